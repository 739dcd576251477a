#!/usr/bin/env bash
# setup.sh installed|database|unchanged|all|test|models|fuzz|integrations|programs|check: what must stand before a command can run; what is
# done already costs nothing. installed: the extension in PostgreSQL, no cluster. models: the default ones, and no model server.
# setup.sh python, retrieval, generation: the same as all, in three parts. After the first, mk/llama.sh can compile; the
# second needs nothing that must be compiled for long, and the third llama.cpp.
source "$(dirname "$0")/lib.sh"
lock
here=$(dirname "$0")

packages() { step "Distribution packages: PostgreSQL, PL/Python, python3-venv" bash "$here/apt.sh"; }

extension() {
  step "pgvector for PostgreSQL" bash "$here/pgvector.sh"
  step "Extension: build and install" bash -c "bash '$here/build.sh' && bash '$here/install.sh' refresh"
}

cluster() {
  extension
  step "Private cluster in $STATE" bash -c "bash '$here/cluster.sh' start && bash '$here/cluster.sh' extension"
}

database() {
  packages
  cluster
  touch "$ROOT/.build/database"
}

# Whether the private cluster runs with what the sources say. Nothing is built to find that out.
unchanged() {
  local stamp=$ROOT/.build/database script=ml_rag--$VERSION.sql
  [ -e "$stamp" ] && bash "$here/cluster.sh" dsn >/dev/null 2>&1 || return
  [ -z "$(find "$ROOT"/{sql,plpy,mk,migrations,ml_rag.control} -newer "$stamp" -not -name '*.pyc' -not -name __pycache__ -print -quit)" ] || return
  cmp -s "$ROOT/build/$script" "$("$(need_pg_config)" --sharedir)/extension/$script"
}

retrieval() { step "Virtual environment: the model server" bash "$here/venv.sh" retrieval; }

environment() { step "Virtual environment: llama-cpp-python and the model server" bash "$here/venv.sh" "$@"; }

program() {
  case $1 in
    clients) step "Drivers of other languages, and a browser" bash "$here/clients.sh" ;;
    chat) step "Programs that speak OpenAI's protocol: LiteLLM, langchain-openai, AI SDK" bash "$here/chat_programs.sh" ;;
    adopted) step "Programs whose tables are adopted: LangChain, LlamaIndex, Haystack, pgai" bash "$here/programs.sh" ;;
    large) step "Open WebUI, Superset and dbt: 4 GB" bash "$here/large_programs.sh" ;;
  esac
}

server() { step "Default models and model server" bash "$here/server.sh" start; }

case ${1:-} in
  installed)
    packages
    extension
    ;;
  database) database ;;
  unchanged) unchanged ;;
  all)
    database
    if wants_llama; then environment; else retrieval; fi
    server
    bash "$here/own_model.sh" use
    ;;
  python)
    packages
    step "Python" bash "$here/venv.sh" pip
    ;;
  retrieval)
    cluster
    retrieval
    server
    ;;
  generation)
    environment
    server
    ;;
  test) environment torch test ;;
  models)
    environment
    step "Default models" bash "$here/server.sh" pull
    ;;
  fuzz) environment fuzz ;;
  integrations)
    environment integrations
    # without them their tests are skipped
    for program in clients chat adopted; do (program $program) || true; done
    ;;
  programs)
    environment torch integrations
    for program in clients chat adopted large; do program $program; done
    ;;
  check)
    packages
    environment torch check
    ;;
  *) die "usage: setup.sh installed|database|all|test|models|fuzz|integrations|programs|check|python|retrieval|generation" ;;
esac
