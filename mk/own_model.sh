#!/usr/bin/env bash
# own_model.sh write|use|found: a language model of the user's for the demo: OLLAMA=llama3.1:8b, or ENDPOINT=http://… MODEL=….
# write: its entry [models.house-llm] in models.toml, which mk/server.sh adds to what it writes; other entries there stay.
# use: the database takes it. found: which models an Ollama of this machine has, and the line that takes one.
source "$(dirname "$0")/lib.sh"

ollama=${OLLAMA_HOST:-127.0.0.1:11434}
case $ollama in http://* | https://*) ;; *) ollama=http://$ollama ;; esac

quoted() { case $1 in *[\"\\]* | *$'\n'*) die "$2 is $1: it has a quotation mark, a backslash or a line break" ;; esac; }

write() {
  local url=${ENDPOINT:-} model=${MODEL:-} kept
  if [ -n "${OLLAMA:-}" ]; then
    url=$ollama/v1 model=$OLLAMA
    curl -fsS -m 5 -o /dev/null "$ollama/api/tags" 2>/dev/null || die "no Ollama answers at $ollama: start it (ollama serve), or set OLLAMA_HOST"
  fi
  [ -n "$url" ] || return 0
  [ -n "$model" ] || die "ENDPOINT needs MODEL, the name of the model there: make demo ENDPOINT=$url MODEL=…"
  case $url in http://* | https://*) ;; *) die "ENDPOINT is $url: it begins with http:// or https://, such as http://10.0.0.20:8000/v1" ;; esac
  quoted "$url" ENDPOINT
  quoted "$model" MODEL
  make_state
  touch "$OWN_MODELS"
  # all but the entry of that name
  kept=$(awk '/^[[:space:]]*\[/ { mine = /^[[:space:]]*\[models\.("?)house-llm("?)\]/ } !mine' "$OWN_MODELS")
  cat >"$OWN_MODELS.new" <<TOML
${kept:+$kept
}
[models.house-llm]
task = "generate"
engine = "openai"
base_url = "$url"
remote_model = "$model"
TOML
  mv "$OWN_MODELS.new" "$OWN_MODELS"
  note "model house-llm is $model at $url; its entry is in $OWN_MODELS"
}

case ${1:-} in
  write) write ;;
  use) ! has_own_model || sql -c "SELECT ml_rag.configure('generate_model_id', 'house-llm')" >/dev/null ;;
  found)
    curl -fsS -m 2 "$ollama/api/tags" 2>/dev/null | python3 -c '
import json, sys
names = [str(model["name"]) for model in json.load(sys.stdin)["models"]]
if names:
    print("Ollama answers on this machine with " + ", ".join(names[:10]) + ". To answer with one of them:")
    print("  make demo OLLAMA=" + names[0])' 2>/dev/null || true
    ;;
  *) die "usage: own_model.sh write|use|found" ;;
esac
