#!/usr/bin/env bash
# ml-rag doctor on the private cluster and its model server.
source "$(dirname "$0")/lib.sh"
exec env ML_RAG_START_SERVER="make start" "$VENV/bin/ml-rag" doctor --dsn "$(bash "$(dirname "$0")/cluster.sh" dsn)"
