#!/usr/bin/env bash
# clients.sh: what the tests try ml_rag with beside Python: JDBC, ODBC, node-postgres, Chromium and axe-core, which finds what
# keeps people from using a page. The packages of npm go to .build/node.
source "$(dirname "$0")/lib.sh"
here=$(dirname "$0")

wanted=(pg@8.23.1 axe-core@4.14.1)
bash "$here/apt.sh" clients
[ "$(cat "$ROOT/.build/node/wanted" 2>/dev/null)" != "${wanted[*]}" ] || exit 0
npm install --prefix "$ROOT/.build/node" --no-audit --no-fund --ignore-scripts "${wanted[@]}"
echo "${wanted[*]}" >"$ROOT/.build/node/wanted"
