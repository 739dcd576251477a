#!/usr/bin/env bash
# ml-rag doctor on the private cluster and its model server.
source "$(dirname "$0")/lib.sh"
exec "$VENV/bin/ml-rag" doctor --dsn "$(bash "$(dirname "$0")/cluster.sh" dsn)"
