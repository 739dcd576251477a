#!/usr/bin/env bash
# How cost grows with segments, stores, sessions and tenants, beside bare pgvector: bench/scale says how each is taken.
# SCALE="all --quick" (the default) is what is run and how; it writes the figures of docs/scale.md.
source "$(dirname "$0")/lib.sh"
bash "$(dirname "$0")/setup.sh" all

cd "$ROOT"
export ML_RAG_BENCH_DSN=${ML_RAG_BENCH_DSN:-$(bash mk/cluster.sh dsn)}
read -ra how <<<"${SCALE:-all --quick}"
exec "$VENV/bin/python" -m bench.scale "${how[@]}" 9>&-
