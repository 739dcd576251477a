#!/usr/bin/env bash
# test.sh [pytest arguments]: the test suite. Without ML_RAG_TEST_DSN the tests make clusters of their own from the
# PostgreSQL that PG_CONFIG names; with it they run against that server. Without ML_RAG_MODELS the default models are
# fetched for them; with it they are in that folder.
source "$(dirname "$0")/lib.sh"
here=$(dirname "$0")

if [ -z "${ML_RAG_TEST_DSN:-}" ]; then
  bash "$here/setup.sh" installed
  bash "$here/install.sh" released
  bash "$here/made_up_release.sh" install
  ML_RAG_TEST_PG_CONFIG=$(need_pg_config)
  export ML_RAG_TEST_PG_CONFIG
fi
bash "$here/setup.sh" test
if [ -z "${ML_RAG_MODELS:-}" ]; then
  bash "$here/setup.sh" models
  export ML_RAG_MODELS=$MODELS_DIR
fi
# Hundreds of Pythons are started; where none may keep what it has compiled, each compiles all of it anew.
unset PYTHONDONTWRITEBYTECODE

cd "$ROOT"
exec "$VENV/bin/python" -m pytest "$@" 9>&-
