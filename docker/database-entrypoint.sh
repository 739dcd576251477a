#!/usr/bin/env bash
# Makes the cluster at the first start, then becomes PostgreSQL. Arguments that begin with `-` are PostgreSQL's; any
# other command is run instead of it. Environment variables as those of the official image: docs/containers.md.
set -euo pipefail

new=$PGDATA.new
home=/var/lib/postgresql
export POSTGRES_USER=${POSTGRES_USER:-postgres} POSTGRES_DB=${POSTGRES_DB:-${PGDATABASE:-ml_rag}}

say() { printf 'ml_rag: %s\n' "$*" >&2; }

die() {
  say "$@"
  exit 1
}

# The server that only this script talks to, while the cluster is being made.
temporary() { pg_ctl -D "$new" -w -s -o "-c listen_addresses='' -c unix_socket_directories='$new'" "$@" >&2; }

query() { psql -X -q -v ON_ERROR_STOP=1 -v SHOW_CONTEXT=never "$@"; }

# Sets `secret`, the password of the first role. It is on no command line and in no log.
read_password() {
  secret=${POSTGRES_PASSWORD:-}
  [ -n "${POSTGRES_PASSWORD_FILE:-}" ] || return 0
  [ -z "$secret" ] || die "POSTGRES_PASSWORD and POSTGRES_PASSWORD_FILE are both set: leave one out"
  [ -r "$POSTGRES_PASSWORD_FILE" ] ||
    die "uid $(id -u) cannot read POSTGRES_PASSWORD_FILE, $POSTGRES_PASSWORD_FILE: chown $(id -u) the file on the host; mode 0600 will do"
  secret=$(cat "$POSTGRES_PASSWORD_FILE")
}

refuse_what_is_not_supported() {
  local name
  for name in POSTGRES_DB_FILE POSTGRES_USER_FILE POSTGRES_INITDB_ARGS POSTGRES_INITDB_WALDIR POSTGRES_HOST_AUTH_METHOD; do
    [ -z "${!name:-}" ] || die "$name is not supported: see docs/containers.md, \"Settings\""
  done
  [ ! -e "$home/data" ] || [ "$PGDATA" = "$home/data" ] || die "a volume at $home/data would stay empty: mount it at $home"
}

check_owner() { # of the data folder, or of the folder that it is made in
  local folder=$PGDATA
  while [ ! -e "$folder" ]; do folder=$(dirname "$folder"); done
  if [ -O "$folder" ] || { [ "$folder" != "$PGDATA" ] && [ -w "$folder" ]; }; then return 0; fi
  die "$folder belongs to uid $(stat -c %u "$folder"), and this container runs as $(id -u): chown -R $(id -u):$(id -g) the folder on the host that is mounted there"
}

# What is in /srv/documents becomes a vector store, so that the first question finds something.
load_documents() {
  [ -n "${ML_RAG_LOAD:-}" ] || return 0
  [ -n "$(find /srv/documents -type f -print -quit 2>/dev/null)" ] || return 0
  say "loading /srv/documents into public.$ML_RAG_LOAD"
  query -v table="$ML_RAG_LOAD" >&2 <<'SQL' ||
SELECT jsonb_build_object('schema_name', 'public', 'table_name', :'table')::text AS options \gset
CALL vector_store_load('file:///srv/documents/', :'options'::jsonb);
SQL
    say "that failed, for the reason above; once it is gone: CALL vector_store_load('file:///srv/documents/'," \
      "'{\"schema_name\": \"public\", \"table_name\": \"$ML_RAG_LOAD\"}')"
}

# As the official image runs them: in the order of their names, scripts that are not executable in this shell.
run_files() {
  local file
  for file in /docker-entrypoint-initdb.d/*; do
    [ -e "$file" ] || continue
    say "running $file"
    case $file in
      *.sh)
        if [ -x "$file" ]; then
          "$file" >&2
        else
          # shellcheck source=/dev/null
          . "$file" >&2
        fi
        ;;
      *.sql) query -f "$file" >&2 ;;
      *.sql.gz) gunzip -c "$file" | query >&2 ;;
      *) die "$file is not a .sh, .sql or .sql.gz file" ;;
    esac
  done
}

# In a folder beside its place, renamed at the end: a first start that breaks off is begun anew by the next one.
initialise() {
  local options=(-U "$POSTGRES_USER" -E UTF8 --locale=C.UTF-8 --data-checksums)
  options+=(--auth-local=peer --auth-host=scram-sha-256)
  options+=(--set listen_addresses='*' --set unix_socket_directories=/run/postgresql)
  rm -rf "$new"
  if [ -n "$secret" ]; then
    initdb -D "$new" "${options[@]}" --pwfile=<(printf '%s\n' "$secret") >&2
  else
    say "no POSTGRES_PASSWORD: no role can log in over TCP until it has a password"
    initdb -D "$new" "${options[@]}" >&2
  fi
  if [ "$POSTGRES_USER" != postgres ]; then # who is in the container is the system user postgres
    sed -i -E '/^local/s/peer$/peer map=container/' "$new/pg_hba.conf"
    printf 'container postgres "%s"\n' "$POSTGRES_USER" >>"$new/pg_ident.conf"
  fi
  echo 'host all all all scram-sha-256' >>"$new/pg_hba.conf"
  trap 'temporary -m immediate stop || true' EXIT
  temporary start
  (
    export PGHOST=$new PGUSER=$POSTGRES_USER PGDATABASE=$POSTGRES_DB
    if [ "$POSTGRES_DB" != postgres ]; then createdb --maintenance-db=postgres "$POSTGRES_DB"; fi
    query -f /usr/share/ml_rag/initdb.sql >/dev/null
    run_files
    load_documents
  )
  temporary -m fast stop
  trap - EXIT
  mv "$new" "$PGDATA"
}

case ${1:-} in
  '' | -*) ;;
  *) exec "$@" ;;
esac
[ "$(id -u)" -ne 0 ] || die "PostgreSQL does not run as root: leave out --user, or use that of a user who owns $PGDATA"
refuse_what_is_not_supported
check_owner
read_password
if [ -s "$PGDATA/PG_VERSION" ]; then
  [ -z "$secret" ] || say "the password in the environment counts at the first start only; to change it:" \
    "ALTER ROLE \"$POSTGRES_USER\" PASSWORD '…', or \\password in psql"
else
  initialise
fi
unset POSTGRES_PASSWORD secret
exec postgres "$@"
