#!/usr/bin/env bash
# install.sh install|uninstall|refresh|released: the extension into (out of) the PostgreSQL that PG_CONFIG names, below
# DESTDIR. What was installed of older versions stays: databases that are not updated yet run it.
# `refresh` installs only where something differs, and asks for root where the folder needs it. `released` does so for
# the scripts and the Python of the releases, so that tests can upgrade from them.
source "$(dirname "$0")/lib.sh"

pg_config=$(need_pg_config)
extension_dir=${DESTDIR:-}$("$pg_config" --sharedir)/extension
python_dir=$extension_dir/ml_rag-$VERSION
stage=$ROOT/build/extension
releases=$ROOT/migrations/released

# What is to be installed, laid out as it will lie in extension_dir.
make_stage() {
  rm -rf "$stage"
  install -d "$stage/ml_rag-$VERSION/ml_rag/backend"
  install -m 644 "$ROOT/ml_rag.control" "$ROOT/build/ml_rag--$VERSION.sql" "$ROOT"/build/ml_rag--*--"$VERSION.sql" "$stage"
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

python_files() { (cd "$1" 2>/dev/null && find . -name '*.py' | sort); }

# is_current FOLDER: whether all of it is installed, as it is there.
is_current() {
  local file
  while read -r file; do
    cmp -s "$1/$file" "$extension_dir/$file" || return
  done < <(cd "$1" && find . -type f)
}

case ${1:-} in
  install)
    make_stage
    install_stage
    echo "installed ml_rag $VERSION into $extension_dir"
    ;;
  refresh)
    make_stage
    { is_current "$stage" && [ "$(python_files "$stage/ml_rag-$VERSION")" = "$(python_files "$python_dir")" ]; } ||
      as_root env PG_CONFIG="$pg_config" DESTDIR="${DESTDIR:-}" bash "$0" install
    ;;
  released)
    is_current "$releases" || as_root cp -R "$releases/." "$extension_dir"
    ;;
  uninstall)
    rm -rf "$extension_dir/ml_rag.control" "$extension_dir"/ml_rag--*.sql "$extension_dir"/ml_rag-[0-9]*
    echo "removed ml_rag from $extension_dir"
    ;;
  *) die "usage: install.sh install|uninstall|refresh|released" ;;
esac
