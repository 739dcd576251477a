#!/usr/bin/env bash
# install.sh install|uninstall|refresh: the extension into (out of) the PostgreSQL that PG_CONFIG names, below DESTDIR.
# `refresh` installs only where something differs, and asks for root where the folder needs it.
source "$(dirname "$0")/lib.sh"

pg_config=$(need_pg_config)
extension_dir=${DESTDIR:-}$("$pg_config" --sharedir)/extension
python_dir=$extension_dir/ml_rag-$VERSION
stage=$ROOT/build/extension

# What is to be installed, laid out as it will lie in extension_dir.
make_stage() {
  rm -rf "$stage"
  install -d "$stage/ml_rag-$VERSION/ml_rag/backend"
  install -m 644 "$ROOT/ml_rag.control" "$ROOT/build/ml_rag--$VERSION.sql" "$stage"
  install -m 644 "$ROOT"/plpy/ml_rag/{__init__,errors}.py "$stage/ml_rag-$VERSION/ml_rag"
  install -m 644 "$ROOT"/plpy/ml_rag/backend/*.py "$stage/ml_rag-$VERSION/ml_rag/backend"
}

install_stage() {
  install -d "$extension_dir"
  rm -rf "$python_dir"
  cp -R "$stage/." "$extension_dir"
  # Compiled ahead: the backend's user may not write here, and would compile anew on each connection.
  if [ -x /usr/bin/python3 ]; then
    /usr/bin/python3 -m compileall -q --invalidation-mode checked-hash "$python_dir"
  fi
}

is_current() {
  cmp -s "$stage/ml_rag.control" "$extension_dir/ml_rag.control" &&
    cmp -s "$stage/ml_rag--$VERSION.sql" "$extension_dir/ml_rag--$VERSION.sql" &&
    diff -rq -x __pycache__ "$stage/ml_rag-$VERSION" "$python_dir" >/dev/null 2>&1
}

case ${1:-} in
  install)
    make_stage
    install_stage
    echo "installed ml_rag $VERSION into $extension_dir"
    ;;
  refresh)
    make_stage
    is_current || as_root env PG_CONFIG="$pg_config" DESTDIR="${DESTDIR:-}" bash "$0" install
    ;;
  uninstall)
    rm -rf "$extension_dir/ml_rag.control" "$extension_dir"/ml_rag--*.sql "$extension_dir"/ml_rag-[0-9]*
    echo "removed ml_rag from $extension_dir"
    ;;
  *) die "usage: install.sh install|uninstall|refresh" ;;
esac
