#!/usr/bin/env bash
# How often the default model obeys injected instructions: bench/injection.py says how it is measured.
source "$(dirname "$0")/lib.sh"
bash "$(dirname "$0")/setup.sh" all

cd "$ROOT"
export ML_RAG_BENCH_DSN=${ML_RAG_BENCH_DSN:-$(bash mk/cluster.sh dsn)}
exec "$VENV/bin/python" -m bench.injection "$@" 9>&-
