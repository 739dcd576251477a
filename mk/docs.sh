#!/usr/bin/env bash
# docs.sh: docs/reference.md, docs/options.md and lists in docs/, from the extension in the private cluster.
source "$(dirname "$0")/lib.sh"
bash "$(dirname "$0")/setup.sh" database
bash "$(dirname "$0")/setup.sh" test
PYTHONPATH=$ROOT/plpy "$VENV/bin/python" "$(dirname "$0")/docs.py" "$DSN"
