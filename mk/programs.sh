#!/usr/bin/env bash
# programs.sh: the programs whose tables ml_rag.adopt knows, in .venv/programs: apart, since they need other versions of what
# they share with ml_rag. What is there costs nothing.
source "$(dirname "$0")/lib.sh"

list=$ROOT/mk/programs.txt
programs=$VENV/programs
wanted=$(sha256sum <"$list")
[ "$(cat "$programs/wanted" 2>/dev/null)" != "$wanted" ] || exit 0
[ -x "$programs/bin/pip" ] || "$VENV/bin/python" -m venv "$programs"
"$programs/bin/pip" install --disable-pip-version-check --no-input --no-deps -r "$list"
echo "$wanted" >"$programs/wanted"
