#!/usr/bin/env bash
# Many sessions at once against the private cluster and its model server, with the real models: bench/load says what they
# do and what has to hold. LOAD_MINUTES (5), LOAD_SESSIONS (64); LOAD_DOCS=1 writes docs/load.md and docs/load.svg.
# load.sh rates: searches at a fixed rate beside other work (bench/load/rates.py); LOAD_SECONDS (120) for each rate.
source "$(dirname "$0")/lib.sh"
bash "$(dirname "$0")/setup.sh" all

cd "$ROOT"
export ML_RAG_BENCH_DSN=${ML_RAG_BENCH_DSN:-$(bash mk/cluster.sh dsn)}
exec "$VENV/bin/python" -m "bench.load${1:+.$1}" "${@:2}" 9>&-
