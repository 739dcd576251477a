#!/usr/bin/env bash
# test.sh [pytest arguments]: the test suite. Without ML_RAG_TEST_DSN against the private cluster, which is set up first;
# with it against that server, and no cluster is started.
source "$(dirname "$0")/lib.sh"
here=$(dirname "$0")

if [ -z "${ML_RAG_TEST_DSN:-}" ]; then
  bash "$here/setup.sh" database
  bash "$here/install.sh" released
  bash "$here/made_up_release.sh" install
  ML_RAG_TEST_DSN=$(bash "$here/cluster.sh" dsn)
  # where the extension is: the fault suite makes clusters of its own, which it may kill
  ML_RAG_TEST_PG_CONFIG=$(need_pg_config)
  export ML_RAG_TEST_PG_CONFIG
fi
bash "$here/setup.sh" test
export ML_RAG_TEST_DSN ML_RAG_MODELS=${ML_RAG_MODELS:-$MODELS_DIR}

cd "$ROOT"
exec "$VENV/bin/python" -m pytest "$@" 9>&-
