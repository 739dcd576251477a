#!/usr/bin/env bash
# pictures.sh: the pictures of docs/pictures: ml-rag explore over the sample documents of make demo, in Chromium.
source "$(dirname "$0")/lib.sh"
here=$(dirname "$0")

bash "$here/setup.sh" all
bash "$here/setup.sh" integrations
samples=$STATE/samples
[ -d "$samples" ] || install -d -m 755 "$samples"
install -m 644 -p "$ROOT"/docs/samples/* "$samples"
# made anew: a store that is older than the extension has no keyword index
sql -c "DROP TABLE IF EXISTS samples" >/dev/null
sql -c "CALL vector_store_load('file://$samples/', '{\"schema_name\": \"public\", \"table_name\": \"samples\"}')" >/dev/null
# no picture shows a path of this machine
sql -c "UPDATE samples SET document_name = regexp_replace(document_name, '^.*/', '/srv/documents/')" >/dev/null
exec "$VENV/bin/python" "$here/pictures.py" "$DSN" "$ROOT/docs/pictures"
