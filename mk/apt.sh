#!/usr/bin/env bash
# apt.sh [compiler|ocr|clients]: installs from the distribution what is missing: PostgreSQL, PL/Python, python3-venv; with compiler
# also what compiles llama.cpp; with ocr what reads text in pictures; with clients what mk/clients.sh needs.
source "$(dirname "$0")/lib.sh"

also=${1:-}
wanted=()
want() { wanted+=("$@"); }
has() { command -v "$1" >/dev/null; }

# The major version that a plain `apt-get install postgresql` would bring.
distribution_version() { apt-cache show postgresql 2>/dev/null | sed -n 's/^Depends:.*postgresql-\([0-9]\+\).*/\1/p' | head -1; }

collect_clients() {
  has javac || want default-jdk-headless
  [ -e /usr/share/java/postgresql.jar ] || want libpostgresql-jdbc-java
  compgen -G '/usr/lib/*/odbc/psqlodbcw.so' >/dev/null || want odbc-postgresql
  { has odbcinst && compgen -G '/usr/lib/*/libodbc.so.2' >/dev/null; } || want unixodbc odbcinst
  has npm || want nodejs npm
  has chromium || want chromium fonts-dejavu-core
}

collect() {
  wanted=()
  has make || want make
  if [ "$also" = compiler ]; then
    { has gcc && has g++; } || want build-essential
    has cmake || want cmake
    has ninja || want ninja-build
  fi
  # keyword search runs in the server's own python3
  /usr/bin/python3 -c 'import numpy' 2>/dev/null || want python3-numpy
  [ "$also" != ocr ] || has tesseract || want tesseract-ocr
  [ "$also" != clients ] || collect_clients
  has curl || want curl
  has openssl || [ -e /etc/ssl/certs/ca-certificates.crt ] || want ca-certificates
  /usr/bin/python3 -c 'import ensurepip, venv' 2>/dev/null || want python3 python3-venv
  [ -z "${PG_CONFIG:-}" ] || return 0
  local pg_config version
  pg_config=$(find_pg_config)
  if [ -n "$pg_config" ]; then
    version=$("$pg_config" --version | sed 's/^[^0-9]*\([0-9]*\).*/\1/')
    [ -e "$("$pg_config" --sharedir)/extension/plpython3u.control" ] || want "postgresql-plpython3-$version"
  else
    version=$(distribution_version)
    want "postgresql-${version:-?}" "postgresql-plpython3-${version:-?}"
  fi
}

# On a machine without PostgreSQL the package would create and start a cluster on port 5432: not ours to do.
without_main_cluster() {
  local folder=/etc/postgresql-common/createcluster.d status=0
  local drop_in=$folder/ml_rag-setup.conf
  if compgen -G '/usr/lib/postgresql/*/bin/postgres' >/dev/null; then
    "$@"
    return
  fi
  as_root mkdir -p "$folder"
  echo 'create_main_cluster = false' | as_root tee "$drop_in" >/dev/null
  "$@" || status=$?
  as_root rm -f "$drop_in"
  as_root rmdir --ignore-fail-on-non-empty "$folder" 2>/dev/null || true
  return "$status"
}

apt_install() {
  as_root env DEBIAN_FRONTEND=noninteractive apt-get -y -q --no-install-recommends -o DPkg::Lock::Timeout=300 install "$@"
}

collect
[ "${#wanted[@]}" -gt 0 ] || exit 0
has apt-get || die "please install ${wanted[*]} by your distribution's means: only Debian and Ubuntu are done automatically"
as_root apt-get -q -o DPkg::Lock::Timeout=300 update || true # a broken foreign source must not stop the rest
collect
case " ${wanted[*]} " in
  *'-? '*) die "no PostgreSQL package is to be found: check the network and the apt sources of this machine, then run this again" ;;
esac
note "installing ${wanted[*]}"
without_main_cluster apt_install "${wanted[@]}" ||
  die "apt-get could not install ${wanted[*]}: check the network and the apt sources of this machine (details: $LOG), then run this again"
