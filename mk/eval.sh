#!/usr/bin/env bash
# How well the search finds, on every data set of EVAL_DATA: bench/evaluate.py says what is measured. Status 1 where a
# figure that has to be reached is not. The first time most of it is the embedding of the documents.
source "$(dirname "$0")/lib.sh"
bash "$(dirname "$0")/setup.sh" all
bash "$(dirname "$0")/setup.sh" test # bm25s, which the keyword search is held against
step "Text in pictures: tesseract" bash "$(dirname "$0")/apt.sh" ocr

cd "$ROOT"
export ML_RAG_BENCH_DSN=${ML_RAG_BENCH_DSN:-$(bash mk/cluster.sh dsn)} EVAL_DATA=${EVAL_DATA:-$ROOT/../shared/data} ML_RAG_MODELS=${ML_RAG_MODELS:-$MODELS_DIR}
exec "$VENV/bin/python" -m bench.evaluate "$@" 9>&-
