#!/usr/bin/env bash
# Makes the cluster at the first start, then becomes PostgreSQL. Arguments that begin with `-` are PostgreSQL's; any
# other command is run instead of it. compose.yaml and docs/containers.md name the environment variables.
set -euo pipefail

new=$PGDATA.new

say() { printf 'ml_rag: %s\n' "$*" >&2; }

# The server that only this script talks to, while the cluster is being made.
temporary() { pg_ctl -D "$new" -w -s -o "-c listen_addresses='' -c unix_socket_directories='$new'" "$@" >&2; }

query() { psql -X -q -v ON_ERROR_STOP=1 -v SHOW_CONTEXT=never -h "$new" "$@"; }

# The password of the role postgres. It is on no command line and in no log.
password() {
  if [ -n "${POSTGRES_PASSWORD_FILE:-}" ]; then
    cat "$POSTGRES_PASSWORD_FILE"
  else
    printf %s "${POSTGRES_PASSWORD:-}"
  fi
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
    say "that failed, for the reason above; once it is gone: CALL vector_store_load('file:///srv/documents/')"
}

# In a folder beside its place, renamed at the end: a first start that breaks off is begun anew by the next one.
initialise() {
  local file secret options=(-U postgres -E UTF8 --locale=C.UTF-8 --data-checksums)
  options+=(--auth-local=peer --auth-host=scram-sha-256)
  options+=(--set listen_addresses='*' --set unix_socket_directories=/run/postgresql)
  rm -rf "$new"
  secret=$(password)
  if [ -n "$secret" ]; then
    initdb -D "$new" "${options[@]}" --pwfile=<(printf '%s\n' "$secret") >&2
  else
    say "no POSTGRES_PASSWORD: nobody can log in over TCP until a role has a password"
    initdb -D "$new" "${options[@]}" >&2
  fi
  echo 'host all all all scram-sha-256' >>"$new/pg_hba.conf"
  trap 'temporary -m immediate stop || true' EXIT
  temporary start
  if [ "$PGDATABASE" != postgres ]; then createdb -h "$new" --maintenance-db=postgres "$PGDATABASE"; fi
  query -f /usr/share/ml_rag/initdb.sql >/dev/null
  for file in /docker-entrypoint-initdb.d/*.sql; do
    [ -e "$file" ] || continue
    say "running $file"
    query -f "$file" >&2
  done
  load_documents
  temporary -m fast stop
  trap - EXIT
  mv "$new" "$PGDATA"
}

case ${1:-} in
  '' | -*) ;;
  *) exec "$@" ;;
esac
if [ "$(id -u)" -eq 0 ]; then
  say "PostgreSQL does not run as root: leave out --user, or use that of a user who owns $PGDATA"
  exit 1
fi
[ -s "$PGDATA/PG_VERSION" ] || initialise
exec postgres "$@"
