#!/usr/bin/env bash
# From nothing to three answers: everything set up, the sample documents loaded, and three calls shown with their JSON.
source "$(dirname "$0")/lib.sh"

started=$(date +%s%N)
samples=$STATE/samples

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
}

# Shows a call, then the JSON it returns, indented.
show() {
  local title=$1 call=$2 began
  began=$(date +%s%N)
  printf '\n--- %s\n\n%s;\n\n' "$title" "$call"
  # psql substitutes variables in a script only, not in -c
  printf '%s\n\\gset\nSELECT jsonb_pretty(:%s::jsonb);\n' "$call" "'output'" | sql -At 9>&- ||
    die "this call failed: the error above says why; make psql opens the database to try again"
  printf '\n    answered in %s s\n' "$(seconds_since "$began")"
}

note "PostgreSQL on port 5432 and the package sources of this machine stay as they are; the log is $LOG"
[ -x "$VENV/bin/ml-rag" ] || note "the first run takes some minutes, most of them one compilation; later runs take seconds"
bash "$(dirname "$0")/setup.sh" all
step "Sample documents: $(find "$ROOT/docs/samples" -type f | wc -l) files about ml_rag itself into table public.samples" load

printf '\nThe answers come from a language model of 135 million parameters, which is there to try things out: look at the\ncitations first. README.md says which model to take for real work.\n'

show "A question" \
  "CALL ml_rag('What is ml_rag?')"
show "Only what is near enough (max_distance), each hit with one neighbour on either side (segment_overlap)" \
  "CALL ml_rag('Which columns does a vector store need?',
  '{\"n_citations\": 2, \"retrieval_options\": {\"max_distance\": 0.6, \"segment_overlap\": 1}}')"
show "Retrieval only (skip_generate): the citations without an answer" \
  "CALL ml_rag('What should I do when the model server cannot be reached?',
  '{\"skip_generate\": true, \"n_citations\": 2}')"

cat <<END

Ready in $(seconds_since "$started") s. Your turn:

  make psql                               CALL ml_rag('How do I load documents?');
  make doctor                             checks the whole chain
  make stop                               stops the model server and the private cluster
  make clean                              removes everything that was made

The command ml-rag is .venv/bin/ml-rag; ML_RAG_CONFIG=$STATE/ml_rag.toml tells it about this model server.
README.md says how to load your own documents.
END
