#!/usr/bin/env bash
# install.sh install|uninstall|refresh|released: what mk/build.sh made into (out of) the PostgreSQL that PG_CONFIG names,
# below DESTDIR. What was installed of older versions stays: databases that are not updated yet run it.
# `refresh` installs only where something differs, and asks for root where the folder needs it. `released [FOLDER]` adds
# what the archives of migrations/ (or FOLDER) hold, and the upgrade scripts there.
source "$(dirname "$0")/lib.sh"

pg_config=$(need_pg_config)
extension_dir=${DESTDIR:-}$("$pg_config" --sharedir)/extension
python_dir=$extension_dir/ml_rag-$VERSION
stage=$ROOT/build/extension

install_stage() {
  install -d "$extension_dir"
  rm -rf "$python_dir"
  cp -R "$stage/." "$extension_dir"
  # Compiled ahead: the backend's user may not write here, and would compile anew on each connection.
  if [ -x /usr/bin/python3 ]; then
    /usr/bin/python3 -m compileall -q --invalidation-mode checked-hash "$python_dir"
  fi
}

# released FOLDER
released() {
  local archive released=$ROOT/build/released
  [ -e "$1/SHA256SUMS" ] || return 0
  (cd "$1" && sha256sum --check --strict --quiet SHA256SUMS) || die "a file in $1 is not the one that was sealed: take the released one from git"
  rm -rf "$released"
  install -d "$released"
  for archive in "$1"/ml_rag--*.tar.gz; do
    [ "$archive" = "$1/ml_rag--$VERSION.tar.gz" ] || tar -C "$released" --no-same-owner -xzf "$archive"
  done
  find "$1" -maxdepth 1 -name 'ml_rag--*--*.sql' -exec install -m 644 -t "$released" {} +
  is_current "$released" || as_root cp -R "$released/." "$extension_dir"
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
    install_stage
    echo "installed ml_rag $VERSION into $extension_dir"
    ;;
  refresh)
    { is_current "$stage" && [ "$(python_files "$stage/ml_rag-$VERSION")" = "$(python_files "$python_dir")" ]; } ||
      as_root env PG_CONFIG="$pg_config" DESTDIR="${DESTDIR:-}" bash "$0" install
    ;;
  released) released "${2:-$ROOT/migrations}" ;;
  uninstall)
    rm -rf "$extension_dir/ml_rag.control" "$extension_dir"/ml_rag--*.sql "$extension_dir"/ml_rag-[0-9]*
    echo "removed ml_rag from $extension_dir"
    ;;
  *) die "usage: install.sh install|uninstall|refresh|released [FOLDER]" ;;
esac
