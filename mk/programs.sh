#!/usr/bin/env bash
# programs.sh: the programs whose tables ml_rag.adopt knows, in .venv/programs: apart, since they need other versions of what
# they share with ml_rag. What is there costs nothing.
source "$(dirname "$0")/lib.sh"

list=$ROOT/mk/programs.txt
programs=$VENV/programs
current=$(sha256sum <"$list")
[ "$(cat "$programs/stamp.sha256" 2>/dev/null)" != "$current" ] || exit 0
[ -x "$programs/bin/pip" ] || "$VENV/bin/python" -m venv "$programs"
"$programs/bin/pip" install --disable-pip-version-check --no-input --no-deps -r "$list"
echo "$current" >"$programs/stamp.sha256"
