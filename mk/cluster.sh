#!/usr/bin/env bash
# cluster.sh start|extension|stop|dsn|psql|drop: the private cluster of this checkout. Nothing but a unix socket in a
# folder that only its owner (and root) can enter leads to it, hence `trust`.
source "$(dirname "$0")/lib.sh"

is_running() { [ -S "$PGHOST/.s.PGSQL.$PGPORT" ] && "$(pg_bin pg_isready)" -q -h "$PGHOST" -p "$PGPORT"; }

initialise() {
  if am_root; then install -d -m 700 -o "$CLUSTER_USER" "$PGDATA"; fi
  as_cluster_user "$(pg_bin initdb)" --no-sync -D "$PGDATA" -U postgres -A trust -E UTF8 --locale=C.UTF-8
  as_cluster_user tee -a "$PGDATA/postgresql.conf" <<CONF
# the private cluster of an ml_rag checkout
listen_addresses = ''
port = $PGPORT
unix_socket_directories = '$PGHOST'
unix_socket_permissions = 0700
log_min_messages = warning
# it can be made anew: only a crash of the whole machine would lose anything
fsync = off
full_page_writes = off
CONF
}

start() {
  is_running && return
  make_state
  [ "$(id -u "$CLUSTER_USER")" -ne 0 ] || die "PostgreSQL does not run as root and the user postgres does not exist: create it (useradd --system postgres), then run this again"
  install -d -m 700 -o "$CLUSTER_USER" -g "$(id -gn "$CLUSTER_USER")" "$PGHOST"
  local major have
  major=$("$(need_pg_config)" --version | sed 's/^[^0-9]*\([0-9]*\).*/\1/')
  have=$(as_cluster_user cat "$PGDATA/PG_VERSION" 2>/dev/null || echo none)
  if [ "$have" = none ]; then
    initialise
  elif [ "$have" != "$major" ]; then
    die "the private cluster was made by PostgreSQL $have and this is $major: run make clean, then this again"
  fi
  # the command that hints name
  detached as_cluster_user env ML_RAG_START_SERVER="make start" "$(pg_bin pg_ctl)" -w -s -D "$PGDATA" -l "$PGHOST/postgresql.log" start ||
    die "the private cluster does not start: read $PGHOST/postgresql.log"
}

# The extension as the installed script has it: another script under the same version means creating it anew.
extension() {
  local script checksum
  script=$("$(need_pg_config)" --sharedir)/extension/ml_rag--$VERSION.sql
  checksum=$(sha256sum <"$script")
  "$(pg_bin psql)" -X -q -d "${DSN/dbname=$DATABASE/dbname=postgres}" -Atc \
    "SELECT 1 FROM pg_database WHERE datname = '$DATABASE'" | grep -q 1 ||
    "$(pg_bin createdb)" -h "$PGHOST" -p "$PGPORT" -U postgres "$DATABASE"
  if [ "$(cat "$STATE/extension.sha256" 2>/dev/null)" = "$checksum" ] &&
    [ "$(sql -Atc "SELECT 1 FROM pg_extension WHERE extname = 'ml_rag'")" = 1 ]; then
    return
  fi
  [ ! -e "$STATE/extension.sha256" ] ||
    note "another ml_rag than before is installed: keyword indexes, vectorizers and settings of the database go, tables stay"
  sql --single-transaction <<SQL
SET client_min_messages = warning;
DROP EXTENSION IF EXISTS ml_rag CASCADE;
CREATE EXTENSION ml_rag CASCADE;
SET client_min_messages = error; -- its model server is started after it
SELECT ml_rag.configure('model_server', 'unix:$SERVER_SOCKET');
SQL
  echo "$checksum" >"$STATE/extension.sha256"
}

stop() {
  [ -n "$(find_pg_config)" ] || return 0
  is_running || return 0
  as_cluster_user "$(pg_bin pg_ctl)" -w -s -m fast -D "$PGDATA" stop
}

need_running() { is_running || die "the private cluster is not running: start it with make start"; }

case ${1:-} in
  start) start ;;
  extension) extension ;;
  stop) stop ;;
  dsn) need_running && echo "$DSN" ;;
  # a message, its detail and its hint say it all; the call stack below them is for developers
  psql) exec "$(pg_bin psql)" -v SHOW_CONTEXT=never -d "$DSN" ;;
  drop)
    stop
    [ ! -O "$STATE" ] || rm -rf "$STATE"
    ;;
  *) die "usage: cluster.sh start|extension|stop|dsn|psql|drop" ;;
esac
