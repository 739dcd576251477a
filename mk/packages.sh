#!/usr/bin/env bash
# packages.sh build: dist/ with Debian packages of the extension for PostgreSQL 15 to 18, wheel and sdist of ml-rag, and the
# distribution for PGXN.
# packages.sh test: makes them, and tries them in clean containers of Debian 12 and 13, as a user would:
# tests/packages/clean_root.sh. test-if-possible: where there is an engine and the images; else says what is missing.
source "$(dirname "$0")/lib.sh"

dist=$ROOT/dist
work=$ROOT/build/packages
majors=(15 16 17 18)
revision=1

debian() { # debian MAJOR: the extension is SQL and Python, so no PostgreSQL is needed to make it
  local major=$1 name=postgresql-$1-ml-rag tree=$work/$1 what
  rm -rf "$tree"
  mkdir -p "$tree/DEBIAN" "$tree/usr/share/doc/$name"
  printf '#!/bin/sh\necho /usr/share/postgresql/%s\n' "$major" >"$work/pg_config"
  chmod 755 "$work/pg_config"
  # with what the releases had: a database runs its own version until it is updated
  for what in install released; do PG_CONFIG=$work/pg_config DESTDIR=$tree bash "$ROOT/mk/install.sh" "$what"; done
  find "$tree" -name __pycache__ -prune -exec rm -r {} + # compiled by the python3 of where it is installed
  install -m 644 "$ROOT/LICENSE" "$tree/usr/share/doc/$name/copyright"
  # Debian 12 has PostgreSQL 15 and an older pgvector
  local vector="postgresql-$major-pgvector (>= 0.8.0)" depends='' recommends=''
  if [ "$major" = 15 ]; then recommends="Recommends: $vector"$'\n'; else depends=", $vector"; fi
  cat >"$tree/DEBIAN/control" <<CONTROL
Package: $name
Version: $VERSION-$revision
Architecture: all
Section: database
Priority: optional
Maintainer: the ml_rag authors <ml_rag@localhost>
Depends: postgresql-$major, postgresql-plpython3-$major, python3, python3-numpy$depends
${recommends}Description: retrieval-augmented generation inside PostgreSQL $major
 Search by meaning and by words over documents and tables, with citations and
 answers, from SQL. Models run in a server of its own: the Python package ml-rag.
CONTROL
  cat >"$tree/DEBIAN/postinst" <<POSTINST
#!/bin/sh
set -e
folder=/usr/share/postgresql/$major/extension
if [ "\$1" = configure ]; then
  # sessions may not write there, and would compile anew each
  /usr/bin/python3 -m compileall -q --invalidation-mode checked-hash "\$folder/ml_rag-$VERSION" || true
  if ! grep -qE "^default_version = '(0\.([89]|[1-9][0-9])|[1-9])" "\$folder/vector.control" 2>/dev/null; then
    echo "$name: pgvector 0.8 or newer is missing, without which CREATE EXTENSION ml_rag fails."
    echo "PostgreSQL's own package source has it (apt install postgresql-common, then"
    echo "/usr/share/postgresql-common/pgdg/apt.postgresql.org.sh, then apt install postgresql-$major-pgvector);"
    echo "mk/pgvector.sh of the sources of ml_rag compiles it."
  fi
fi
POSTINST
  cat >"$tree/DEBIAN/prerm" <<PRERM
#!/bin/sh
set -e
find /usr/share/postgresql/$major/extension/ml_rag-* -name __pycache__ -prune -exec rm -r {} + 2>/dev/null || true
PRERM
  chmod 755 "$tree"/DEBIAN/p*
  dpkg-deb --root-owner-group -Zxz --build "$tree" "$dist/${name}_$VERSION-${revision}_all.deb"
}

python() {
  [ -x "$work/venv/bin/pip" ] || python3 -m venv "$work/venv"
  "$work/venv/bin/pip" install -q --disable-pip-version-check --no-input build
  rm -rf "$ROOT"/build/{lib,bdist.*} # what is there would come with it
  "$work/venv/bin/python" -m build --outdir "$dist" "$ROOT"
}

pgxn() {
  local tree=$work/ml_rag-$VERSION
  rm -rf "$tree"
  mkdir -p "$tree"
  cp -R "$ROOT"/{CHANGELOG.md,LICENSE,Makefile,README.md,docs,migrations,mk,ml_rag.control,plpy,sql} "$tree"
  find "$tree" \( -name __pycache__ -o -name '*.egg-info' \) -prune -exec rm -r {} +
  sed "s/@ML_RAG_VERSION@/$VERSION/" "$ROOT/META.json" >"$tree/META.json"
  rm -f "$dist/ml_rag-$VERSION.zip"
  (cd "$work" && python3 -m zipfile -c "$dist/ml_rag-$VERSION.zip" "ml_rag-$VERSION")
}

build() {
  local major
  command -v dpkg-deb >/dev/null || die "the packages are made with dpkg-deb: use a Debian or Ubuntu"
  rm -rf "$dist"
  mkdir -p "$dist" "$work"
  bash "$ROOT/mk/build.sh"
  for major in "${majors[@]}"; do step "Debian package for PostgreSQL $major" debian "$major"; done
  step "Wheel and source distribution of ml-rag" python
  step "Distribution for PGXN" pgxn
  ls -l "$dist"
}

suites=(bookworm trixie)

try() {
  build
  for suite in "${suites[@]}"; do
    printf '==> Packages in Debian %s\n' "$suite" >&9
    docker run --rm --init -e PIP_CONSTRAINT=/source/mk/constraints.txt -v "$dist:/dist:ro" -v "$ROOT:/source:ro" \
      "debian:$suite-slim" bash /source/tests/packages/clean_root.sh
  done
}

case ${1:-} in
  build) build ;;
  test | test-if-possible)
    for suite in "${suites[@]}"; do
      docker image inspect "debian:$suite-slim" >/dev/null 2>&1 || docker pull -q "debian:$suite-slim" >/dev/null 2>&1 || missing=$suite
    done
    if [ -z "${missing:-}" ]; then
      try
    elif [ "$1" = test ]; then
      die "packages-test: no Docker engine answers, or the image debian:$missing-slim is not there"
    else
      note "the packages are not tested here: no Docker engine answers, or the image debian:$missing-slim is not there"
    fi
    ;;
  *) die "usage: packages.sh build|test|test-if-possible" ;;
esac
