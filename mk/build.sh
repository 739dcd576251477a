#!/usr/bin/env bash
# Joins the files that sql/install.sql names into the script CREATE EXTENSION runs, build/ml_rag--VERSION.sql, and makes
# of it, the released scripts and the migrations what ALTER EXTENSION UPDATE runs, build/ml_rag--RELEASED--VERSION.sql.
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

older_or_same() { printf '%s\n%s\n' "$1" "$2" | sort -V -C; }

# migrations_from VERSION: those that a database of that version has not seen, in order.
migrations_from() {
  local file after
  for file in "$ROOT"/migrations/[0-9]*.sql; do
    [ -e "$file" ] || continue
    after=$(sed -n '1s/^-- after \([0-9.]*\)$/\1/p' "$file")
    [ -n "$after" ] || die "the first line of migrations/$(basename "$file") is not \"-- after X.Y.Z\": write there which release came before it"
    if older_or_same "$1" "$after"; then
      printf -- '-- migrations/%s\n\n' "$(basename "$file")"
      cat "$file"
      printf '\n'
    fi
  done
}

rm -f "$ROOT"/build/ml_rag--*--*.sql
for released in "$ROOT"/migrations/released/ml_rag--*.sql; do
  from=$(basename "$released" .sql)
  from=${from#ml_rag--}
  [ "$from" != "$VERSION" ] || continue
  { cat "$ROOT/mk/update_begin.sql" && echo && migrations_from "$from"; } >"$ROOT/build/migrations.sql"
  {
    printf '\\echo Use "ALTER EXTENSION ml_rag UPDATE" to load this file. \\quit\n\n'
    awk -v migrations="$ROOT/build/migrations.sql" -f "$ROOT/mk/update.awk" \
      is=old "$released" "$ROOT/build/migrations.sql" is=new "$target" || die "the script that upgrades $from cannot be made: see above"
    cat "$ROOT/mk/update_end.sql"
  } | sed "s/@ML_RAG_VERSION@/$VERSION/g" >"$target.new"
  mv "$target.new" "$ROOT/build/ml_rag--$from--$VERSION.sql"
done
rm -f "$ROOT/build/migrations.sql"
