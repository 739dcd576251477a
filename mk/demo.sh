#!/usr/bin/env bash
# From nothing to answers: what retrieval needs is set up, the sample documents are loaded, citations and an answer of their
# sentences are shown; then, if a compiler is there or LLAMA=1 asks for llama.cpp, which is compiled meanwhile, the answer of
# a language model. OLLAMA=llama3.1:8b, or ENDPOINT=http://… MODEL=…: by that model, without llama.cpp.
source "$(dirname "$0")/lib.sh"
here=$(dirname "$0")

started=$(date +%s%N)
samples=$STATE/samples
compile_log=$ROOT/.build/llama.log
compiling=
without_llama=

# Copied, because the database server's user may not be able to read below this checkout.
copy_samples() {
  rm -rf "$samples.new"
  install -d -m 755 "$samples.new"
  install -m 644 -p "$ROOT"/docs/samples/* "$samples.new"
  rm -rf "$samples"
  mv "$samples.new" "$samples"
}

load() {
  copy_samples
  sql -x -c "CALL vector_store_load('file://$samples/', '{\"schema_name\": \"public\", \"table_name\": \"samples\"}')"
  # a table of an earlier demo has none once ml_rag has been created anew
  sql -c "SELECT ml_rag.enable_keyword_search('public.samples')"
}

# Shows a call and what it prints.
show() {
  local title=$1 call=$2 began
  began=$(date +%s%N)
  printf '\n--- %s\n\n%s;\n\n' "$title" "$call"
  sql -At -c "$call" 9>&- ||
    die "this call failed: the error above says why; make psql opens the database to try again"
  printf '\n    answered in %s s\n' "$(seconds_since "$began")"
}

# Makes the wheel of llama-cpp-python in a process group of its own, which stop_compiling can end as a whole.
start_compiling() {
  if bash "$here/llama.sh" fits; then return; fi
  if ! wants_llama; then
    without_llama=1
    return
  fi
  step "Compiler, for llama.cpp" bash "$here/apt.sh" compiler
  note "citations come first, in about two minutes; llama.cpp, for answers by a language model, is compiled meanwhile (log: $compile_log)"
  setsid nice -n 19 bash "$here/llama.sh" wheel >"$compile_log" 2>&1 9>&1 </dev/null &
  compiling=$!
}

stop_compiling() {
  [ -n "$compiling" ] || return 0
  kill -- "-$compiling" "$compiling" 2>/dev/null || true
  wait "$compiling" 2>/dev/null || true
  compiling=
}

# Such as "45/73"; nothing before the compiler runs.
compiled() { sed -n 's|^ *\[\([0-9]*/[0-9]*\)\].*|\1|p' "$compile_log" | tail -1; }

# One line, which changes in place if it is on a terminal.
wait_for_compiler() {
  local began files
  [ -n "$compiling" ] || return 0
  began=$(date +%s%N)
  files=$(compiled)
  printf '==> The rest of the compilation of llama.cpp%s\n' "${files:+: $files files are done}" >&9
  while kill -0 "$compiling" 2>/dev/null; do
    [ ! -t 9 ] || printf '\r    %s files ' "$(compiled)" >&9
    sleep 0.5
  done
  [ ! -t 9 ] || printf '\r' >&9
  if wait "$compiling"; then note "done in $(seconds_since "$began") s"; else note "that failed (details: $compile_log): trying once more"; fi
  compiling=
}

trap stop_compiling EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
trap 'exit 129' HUP

note "PostgreSQL on port 5432 and the package sources of this machine stay as they are; the log is $LOG"
lock
bash "$here/own_model.sh" write
bash "$here/setup.sh" python
has_own_model || start_compiling
bash "$here/setup.sh" retrieval
sql -c "SELECT ml_rag.configure('default_options', '{\"keyword_search\": true}')" >/dev/null
bash "$here/own_model.sh" use
note "all calls of this database search by meaning and by words (default_options: {\"keyword_search\": true})"
step "Sample documents: $(find "$ROOT/docs/samples" -type f | wc -l) files about ml_rag itself into table public.samples" load

show "Retrieval only (skip_generate): the citations without an answer" \
  "SELECT ml_rag_show('What should I do when the model server cannot be reached?',
  '{\"skip_generate\": true, \"n_citations\": 2}')"
show "A question, answered with sentences of the citations, without a language model" \
  "SELECT ml_rag_show('What is ml_rag?', '{\"model_options\": {\"model_id\": \"extractive\"}}')"

if has_own_model; then
  show "The same by your model" "SELECT ml_rag_show('What is ml_rag?')"
else
  printf '\nAnswers after %s s.%s\n\n' "$(seconds_since "$started")" "${compiling:+ What a language model adds follows when llama.cpp is compiled.}"
  if [ "$without_llama" ]; then
    note "answers of a language model need llama.cpp: make demo LLAMA=1 installs a compiler and compiles it, about 5 minutes"
  else
    wait_for_compiler
    bash "$here/setup.sh" generation
    show "The same by smollm2-135m-instruct, a language model of 135 million parameters, there to try things out" \
      "SELECT ml_rag_show('What is ml_rag?', '{\"model_options\": {\"model_id\": \"smollm2-135m-instruct\"}}')"
    printf '\nFor answers of use in its own words, run this one command (1.1 GB); calls that name no model then take that model:\n  %s models pull %s --models-dir %s\n' \
      "$VENV/bin/ml-rag" qwen2.5-1.5b-instruct "$MODELS_DIR"
  fi
  bash "$here/own_model.sh" found
fi
show "Only what is near enough (max_distance), each hit with one neighbour on either side (segment_overlap)" \
  "SELECT ml_rag_show('Which columns does a vector store need?',
  '{\"n_citations\": 2, \"retrieval_options\": {\"max_distance\": 0.6, \"segment_overlap\": 1}}')"

cat <<END

Ready in $(seconds_since "$started") s. Your turn:

  make psql                               SELECT ml_rag_show('How do I load documents?');
  make doctor                             checks the whole chain
  make stop                               stops the model server and the private cluster
  make clean                              removes everything that was made

The command ml-rag is .venv/bin/ml-rag; ML_RAG_CONFIG=$STATE/ml_rag.toml tells it about this model server.
Models of your own go into $OWN_MODELS, then make start. README.md says how to load your own documents.
END
