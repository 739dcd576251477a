#!/usr/bin/env bash
# The figures of docs/performance.md, on the private cluster and model server: bench/ says how each is taken.
source "$(dirname "$0")/lib.sh"
bash "$(dirname "$0")/setup.sh" all
bash "$(dirname "$0")/setup.sh" test # sentence-transformers and bm25s, which it is held against

cd "$ROOT"
export ML_RAG_BENCH_DSN=${ML_RAG_BENCH_DSN:-$(bash mk/cluster.sh dsn)} ML_RAG_MODELS=${ML_RAG_MODELS:-$MODELS_DIR}
exec "$VENV/bin/python" -m bench "$@" 9>&-
