#!/usr/bin/env bash
# open_webui.sh: Open WebUI, in .venv/open-webui: apart, since it needs other versions. 3 GB; what is there costs nothing.
source "$(dirname "$0")/lib.sh"

wanted=open-webui==0.12.4
open_webui=$VENV/open-webui
[ "$(cat "$open_webui/wanted" 2>/dev/null)" != "$wanted" ] || exit 0
[ -x "$open_webui/bin/pip" ] || "$VENV/bin/python" -m venv "$open_webui"
# the CPU build that .venv has: the plain one drags in gigabytes of CUDA
torch=$("$VENV/bin/python" -c 'import torch; print(torch.__version__)')
"$open_webui/bin/pip" install --disable-pip-version-check --no-input "$wanted" "torch==$torch"
echo "$wanted" >"$open_webui/wanted"
