#!/usr/bin/env bash
# server.sh start|pull|stop: the model server of this checkout, behind a unix socket that only the user of the private
# cluster, its own user and root can reach.
source "$(dirname "$0")/lib.sh"

# Only the socket and the models lie in folders of the server's user; what root writes lies in $STATE, which is root's.
config=$STATE/ml_rag.toml
log=$STATE/ml_rag.log
pid_file=$STATE/ml_rag.pid
started_from=$STATE/ml_rag.sha256
default_models=(all_minilm_l6_v2 smollm2-135m-instruct)

# Not root where it can be helped: the cluster's user, if it may read this checkout.
server_user() {
  if as_cluster_user "$VENV/bin/python" -c 'import ml_rag.cli' 2>/dev/null; then echo "$CLUSTER_USER"; else id -un; fi
}

# Sets `run`, the words before a command of the model server; writes its configuration and fetches the default models.
prepare() {
  local user group
  make_state
  user=$(server_user)
  group=$(id -gn "$CLUSTER_USER")
  install -d -m 750 -o "$user" -g "$group" "$(dirname "$SERVER_SOCKET")"
  install -d -m 755 -o "$user" -g "$group" "$MODELS_DIR"
  cat >"$config" <<TOML
# written by mk/server.sh at each start; entries of yours go into $OWN_MODELS
[server]
socket = "$SERVER_SOCKET"
socket_mode = "0660"
socket_group = "$group"
allowed_users = ["$CLUSTER_USER"]
models_dir = "$MODELS_DIR"
preload = ["${default_models[0]}", "${default_models[1]}"]
TOML
  if [ -e "$OWN_MODELS" ]; then
    { printf '\n# from %s\n' "$OWN_MODELS" && cat "$OWN_MODELS"; } >>"$config"
  fi
  run=(env HOME="$MODELS_DIR" ML_RAG_CONFIG="$config" PYTHONDONTWRITEBYTECODE=1)
  if [ "$user" != "$(id -un)" ]; then
    run=(setpriv --reuid="$user" --regid="$group" --init-groups -- "${run[@]}")
  fi
  cd / # that user may not enter the folder we are in
  "${run[@]}" "$VENV/bin/ml-rag" models pull "${default_models[@]}" ||
    die "the default models could not be fetched: check the network and pip's index, then run this again (details: $LOG)"
}

answers() { curl -fsS -m 5 -o /dev/null --unix-socket "$SERVER_SOCKET" http://localhost/healthz 2>/dev/null; }

# The process of the pid file, if it is (still) the one that keeps our server running.
server_pid() {
  local pid
  pid=$(cat "$pid_file" 2>/dev/null) || return 0
  if { tr '\0' ' ' <"/proc/$pid/cmdline" | grep -q "ml-rag serve"; } 2>/dev/null; then echo "$pid"; fi
}

# What a server is started from: it must be started anew when that changes.
fingerprint() {
  { cat "$VENV/base.sha256" && { cat "$OWN_MODELS" 2>/dev/null || true; } && find "$ROOT/plpy/ml_rag" \( -name '*.py' -o -name '*.toml' \) -print0 | sort -z | xargs -0 cat; } | sha256sum
}

start() {
  local current pid run
  current=$(fingerprint)
  if answers && [ "$(cat "$started_from" 2>/dev/null)" = "$current" ]; then return; fi
  stop
  prepare
  # setsid: the server outlives this shell and its terminal; keep.sh: it comes back until `make stop`
  setsid bash "$ROOT/mk/keep.sh" "${run[@]}" "$VENV/bin/ml-rag" serve </dev/null >>"$log" 2>&1 9>&- 8>&- &
  pid=$!
  echo "$pid" >"$pid_file"
  for _ in $(seq 300); do
    if answers; then
      echo "$current" >"$started_from"
      return
    fi
    kill -0 "$pid" 2>/dev/null || break
    sleep 0.2
  done
  die "the model server does not start: read $log"
}

stop() {
  local pid children=()
  pid=$(server_pid)
  [ -n "$pid" ] || return 0
  kill "$pid"
  for _ in $(seq 100); do
    [ -n "$(server_pid)" ] || return 0
    sleep 0.1
  done
  read -r -a children <"/proc/$pid/task/$pid/children" || true
  kill -KILL "$pid" "${children[@]}"
}

case ${1:-} in
  start) start ;;
  pull) prepare ;;
  stop) stop ;;
  *) die "usage: server.sh start|pull|stop" ;;
esac
