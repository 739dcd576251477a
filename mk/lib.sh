# shellcheck shell=bash
# shellcheck disable=SC2034
# Shared by the scripts beside it: where things are, who runs what, how a step speaks. Sourced, never run.
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
VERSION=$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' "$ROOT/plpy/ml_rag/__init__.py")
VENV=$ROOT/.venv
LOG=$ROOT/.build/setup.log
# Private to this checkout, and outside of it: the user `postgres` cannot read below a private home.
STATE=${ML_RAG_STATE:-/var/tmp/ml_rag-$(printf %s "$ROOT" | sha256sum | cut -c1-8)}
PGDATA=$STATE/data
PGHOST=$STATE/pg
PGPORT=54329 # names the socket file only: the private cluster listens on no address
SERVER_SOCKET=$STATE/server/ml_rag.sock
MODELS_DIR=$STATE/models
OWN_MODELS=$STATE/models.toml # the user's entries beside the configuration that mk/server.sh writes
DATABASE=ml_rag
DSN="host=$PGHOST port=$PGPORT dbname=$DATABASE user=postgres"
mkdir -p "$ROOT/.build"
# PL/Python takes its packages from the python3 that it finds there first; it is not to be that of an active environment.
if [ -n "${VIRTUAL_ENV:-}" ]; then PATH=${PATH//"$VIRTUAL_ENV/bin:"/}; fi

# What the person at the terminal reads goes to descriptor 9; the noise of a step goes to the log.
{ true >&9; } 2>/dev/null || exec 9>&2

note() { printf '    %s\n' "$*" >&9; }

# Ends with one sentence that says what to do. Status 3 = the reason has been said.
die() {
  printf 'ml_rag: %s\n' "$*" >&9
  exit 3
}

# step "What is being done" command… : runs it with its output in the log, says how long it took.
step() {
  local what=$1 started status=0
  shift
  started=$(date +%s%N)
  printf '==> %s\n' "$what" >&9
  printf '\n==> %s (%s)\n' "$what" "$(date -Is)" >>"$LOG"
  "$@" >>"$LOG" 2>&1 </dev/null || status=$?
  if [ "$status" -ne 0 ]; then
    [ "$status" -eq 3 ] || printf 'ml_rag: this step failed; the reason is at the end of %s\n' "$LOG" >&9
    exit 3
  fi
  printf '    done in %s s\n' "$(seconds_since "$started")" >&9
}

seconds_since() { awk -v t="$1" -v n="$(date +%s%N)" 'BEGIN { printf "%.1f", (n - t) / 1e9 }'; }

am_root() { [ "$(id -u)" -eq 0 ]; }

as_root() {
  if am_root; then
    "$@"
  elif command -v sudo >/dev/null; then
    sudo -- "$@" || return
  else
    die "this step needs root: install sudo, or run make as root"
  fi
}

# PostgreSQL refuses to run as root; other users run the private cluster under their own name.
if am_root && id postgres >/dev/null 2>&1; then CLUSTER_USER=postgres; else CLUSTER_USER=$(id -un); fi

as_cluster_user() { as_user "$CLUSTER_USER" "$@"; }

as_user() {
  local user=$1
  shift
  if [ "$user" = "$(id -un)" ]; then
    "$@"
  else # from / because that user may not enter the folder we are in
    (cd / && exec setpriv --reuid="$user" --regid="$(id -gn "$user")" --init-groups -- "$@")
  fi
}

# /var/tmp is everybody's: take no folder that somebody else prepared.
make_state() {
  if [ -e "$STATE" ] || [ -L "$STATE" ]; then
    [ -d "$STATE" ] && [ ! -L "$STATE" ] && [ -O "$STATE" ] ||
      die "$STATE belongs to somebody else: set ML_RAG_STATE to a folder of your own, then run this again"
  fi
  install -d -m 750 -g "$(id -gn "$CLUSTER_USER")" "$STATE"
}

# Daemons must not hold our descriptors: a pipe behind `make` would never see its end.
detached() { "$@" </dev/null 9>&- 8>&-; }

has_own_model() { grep -q '^\[models\.house-llm\]' "$OWN_MODELS" 2>/dev/null; }

# The pg_config of the PostgreSQL in use: PG_CONFIG, else the newest one installed that has PL/Python, else the newest.
find_pg_config() {
  local dir best="" best_plpython=""
  if [ -n "${PG_CONFIG:-}" ]; then
    command -v "$PG_CONFIG" || die "PG_CONFIG is $PG_CONFIG, which cannot be run: set it to the pg_config of your server"
    return
  fi
  for dir in $(printf '%s\n' /usr/lib/postgresql/*/bin | sort -V); do
    [ -x "$dir/postgres" ] && [ -x "$dir/pg_config" ] && [ "$(basename "$(dirname "$dir")")" -ge 15 ] || continue
    best=$dir/pg_config
    if [ -e "$("$best" --sharedir)/extension/plpython3u.control" ]; then best_plpython=$best; fi
  done
  printf '%s' "${best_plpython:-$best}"
}

need_pg_config() {
  local found
  found=$(find_pg_config)
  [ -n "$found" ] || die "no PostgreSQL 15 or newer is installed: run make demo, or set PG_CONFIG"
  printf '%s' "$found"
}

pg_bin() { printf '%s/%s' "$("$(need_pg_config)" --bindir)" "$1"; }

# Whether llama.cpp is wanted, which is compiled: where it is asked for, or a compiler is there already.
wants_llama() { [ "${LLAMA:-}" = 1 ] || { command -v g++ && command -v cmake; } >/dev/null; }

sql() { "$(pg_bin psql)" -X -q -v ON_ERROR_STOP=1 -d "$DSN" "$@"; }

# apart NAME PACKAGE…: .venv/NAME, for programs that need other versions of what they share with ml_rag. What is there costs nothing.
apart() {
  local folder=$VENV/$1
  shift
  [ "$(cat "$folder/wanted" 2>/dev/null)" != "$*" ] || return 0
  [ -x "$folder/bin/pip" ] || "$VENV/bin/python" -m venv "$folder"
  "$folder/bin/pip" install --disable-pip-version-check --no-input "$@"
  echo "$*" >"$folder/wanted"
}

# One set-up of a checkout at a time. The process that holds the lock passes it on to those that it starts, by descriptor 8.
lock() {
  local file=$ROOT/.build/lock
  if [ "/proc/$$/fd/8" -ef "$file" ]; then return; fi
  exec 8>>"$file"
  flock -n 8 && return
  note "another make is setting up this checkout: waiting for it"
  flock -w 1800 8 || die "another make has been setting up this checkout for half an hour: end it, then run this again"
}
