#!/usr/bin/env bash
# Joins the files that sql/install.sql names into the script CREATE EXTENSION runs: build/ml_rag--VERSION.sql
source "$(dirname "$0")/lib.sh"

target=$ROOT/build/ml_rag--$VERSION.sql
mkdir -p "$ROOT/build"

grep -qx "default_version = '$VERSION'" "$ROOT/ml_rag.control" ||
  die "ml_rag.control and plpy/ml_rag/__init__.py name different versions: make them the same"

{
  printf '\\echo Use "CREATE EXTENSION ml_rag" to load this file. \\quit\n'
  while read -r command file; do
    [ "$command" = '\i' ] || continue
    [ -f "$ROOT/sql/$file" ] || die "sql/install.sql names $file, which does not exist: add it or take out its line"
    printf '\n-- %s\n\n' "$file"
    cat "$ROOT/sql/$file"
  done <"$ROOT/sql/install.sql"
} | sed "s/@ML_RAG_VERSION@/$VERSION/g" >"$target.new"
mv "$target.new" "$target"
