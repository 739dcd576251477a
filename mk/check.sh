#!/usr/bin/env bash
# Lint, format, types, the security of the SQL, vulnerabilities and licences of the packages, the shell scripts. Everything is run; one failure fails the whole.
source "$(dirname "$0")/lib.sh"
bash "$(dirname "$0")/setup.sh" check

failed=()
check() {
  printf '==> %s\n' "$*"
  "$@" || failed+=("$1")
}

# pgspot does not read `SET search_path FROM CURRENT`: it gets the path that this means, of schemas that no other role can write
# to, and what mk/build.sh puts into a string for the name of pgvector's schema as it stands there.
# Inner functions run under the path of those that call them, and get it here. A function that pins a path cannot be inlined, and a
# procedure that does cannot commit: those named here do without, or have pgvector's schema in it for functions of the caller's.
# shellcheck disable=SC2016
pgspot() {
  local script=$ROOT/build/pgspot.sql unpinned=()
  sed -e 's/SET search_path FROM CURRENT/SET search_path = pg_catalog, ml_rag, pg_temp/' \
    -e 's/pg_catalog\.\(record\|refcursor\)/\1/' -e 's/OPERATOR(@vector@\.\([^)]*\))/\1/g' -e 's/@vector@\.//g' -e 's/@vector@/vector_schema/g' \
    -e '/^DO \$run\$ BEGIN/d' -e '/^\$file\$, \$vector\$/,/END \$run\$;$/d' "$ROOT/build/ml_rag--$VERSION.sql" |
    awk '/^CREATE / { inner = /FUNCTION ml_rag\._/ && !/\._(begin|stage|end|session_settings)\(/ } /SET search_path/ { inner = 0 }
      inner && / ?AS \$\$$/ { sub(/AS \$\$$/, "SET search_path = pg_catalog, ml_rag, pg_temp AS $$"); inner = 0 } { print }' >"$script"
  while read -r signature; do unpinned+=(--proc-without-search-path "$signature"); done <<'LIST'
ml_rag.version()
ml_rag._begin(routine text,stage text)
ml_rag._stage(call integer,stage text,model text)
ml_rag._end(call integer,sqlstate text,trace ml_rag.step[],began timestamptz)
ml_rag._session_settings()
extschema.ml_rag_evaluate(questions text,options jsonb)
ml_rag.calibrate(questions text,options jsonb,option text,threshold numeric,refused_wrongly float8,answered_wrongly float8,answerable integer,unanswerable integer,is_proposed boolean)
ml_rag.tune_index(store regclass,options jsonb,ef_search integer,probes integer,rescore integer,recall float8,milliseconds float8,is_kept boolean)
extschema.ml_rag_table(input_table_column text,output_table_column text,options jsonb,INOUT result jsonb)
extschema.ml_generate_table(input_table_column text,output_table_column text,options jsonb,INOUT result jsonb)
extschema.ml_embed_table(input_table_column text,output_table_column text,options jsonb,INOUT result jsonb)
extschema.vector_store_load(uri text,options jsonb,INOUT result jsonb)
ml_rag.add_embedding(store regclass,name text,options jsonb,INOUT result jsonb)
ml_rag.create_node_group(store regclass,name text,options jsonb,INOUT result jsonb)
ml_rag.refresh_node_groups(store regclass,options jsonb,INOUT result jsonb)
ml_rag.run_vectorizer(relation regclass,options jsonb,INOUT result jsonb)
ml_rag._run_function(statement text,query text,query_embedding vector,texts text[],embeddings vector[],metadata jsonb[],arguments jsonb)
LIST
  "$bin/pgspot" --ignore-lang plpython3u "${unpinned[@]}" "$script"
}

audit() { "$bin/python" mk/audit.py; }

# Words that PostgreSQL's documentation would not use; those within names do not count.
words() {
  ! git grep -nPi '(?<!\w)((is|are|was|were|be) (no (?!longer)|told\b)|(nobody|anybody|whoever)\b|(goes|go|going|gone|went) on(?= |,|\.|;|:|$)|null = )' \
    -- sql plpy mk bench docker systemd 'docs/*.md' README.md CONTRIBUTING.md ':!docs/samples_source' ':!mk/check.sh'
}

cd "$ROOT"
bin=$VENV/bin
check "$bin/ruff" check .
check "$bin/ruff" format --check .
check "$bin/mypy"
check words
check pgspot
check audit
if command -v shellcheck >/dev/null; then
  check shellcheck mk/*.sh docker/*.sh tests/packages/*.sh .ci/run
else
  note "shellcheck is not installed: the shell scripts are not checked"
fi
[ "${#failed[@]}" -eq 0 ] || die "make check: fix what ${failed[*]##*/} found above"
