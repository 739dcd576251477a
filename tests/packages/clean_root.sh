#!/usr/bin/env bash
# In a clean Debian, as root: installs what is in /dist as a user does, up to the first citation, says how long each step took,
# removes it again. /source is a checkout, for the sample documents; mk/packages.sh test runs this in containers.
set -euo pipefail
export DEBIAN_FRONTEND=noninteractive PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 PIP_ROOT_USER_ACTION=ignore
# shellcheck source=/dev/null
. /etc/os-release
if [ "$VERSION_CODENAME" = bookworm ]; then major=15; else major=17; fi
package=postgresql-$major-ml-rag
log=/tmp/step.log

step() { # step "what" command…
  local what=$1 began=$SECONDS
  shift
  "$@" </dev/null >"$log" 2>&1 || { tail -30 "$log" && echo "failed: $what" && exit 1; }
  printf '    %s: %s s\n' "$what" "$((SECONDS - began))"
}

holds() { # holds "what" command…
  local what=$1
  shift
  "$@" || { echo "this is not so: $what" && exit 1; }
  printf '    %s\n' "$what"
}

as_postgres() { (cd / && exec runuser -u postgres -- "$@"); }
sql() { as_postgres psql -X -q -At -v ON_ERROR_STOP=1 "$@"; }
install_package() { apt-get -q update && apt-get -q -y --no-install-recommends install /dist/"$package"_*.deb; }
has_no_compiler() { ! command -v gcc >/dev/null && ! command -v cc >/dev/null; }

step "apt install ./$package.deb, PostgreSQL $major with it" install_package
holds "without a compiler" has_no_compiler
if ! compgen -G "/usr/share/postgresql/$major/extension/vector--0.[89]*.sql" >/dev/null; then
  holds "the package says where pgvector is to be had" grep -q "pgvector 0.8 or newer is missing" "$log"
  step "pgvector, which this release does not have" bash /source/mk/pgvector.sh
fi
pg_ctlcluster "$major" main start 2>/dev/null || true
step "CREATE EXTENSION" sql -c "CREATE EXTENSION ml_rag CASCADE"
installed=$(sql -c "SELECT ml_rag.version()")
holds "version $installed, that of the package" grep -qF "ml-rag_$installed-" <(ls /dist/"$package"_*)

step "apt install python3-venv" apt-get -q -y --no-install-recommends install python3-venv ca-certificates
python3 -m venv /opt/ml_rag
wheel=$(ls /dist/ml_rag-*.whl)
torch=$(sed -n 's/^torch==//p' /source/mk/constraints.txt)
step "pip install ml_rag.whl, the client" /opt/ml_rag/bin/pip install -q -c /source/mk/constraints.txt "$wheel"
holds "ml-rag doctor finds the database" grep -q '"ok": true' <(as_postgres /opt/ml_rag/bin/ml-rag doctor --json --dsn dbname=postgres)

# the build of torch that needs no GPU; another brings gigabytes
if ! /opt/ml_rag/bin/pip install -q -c /source/mk/constraints.txt "torch==$torch+cpu" --timeout 10 --retries 0 \
  --extra-index-url https://download.pytorch.org/whl/cpu >"$log" 2>&1 </dev/null; then
  tail -2 "$log"
  echo "    no CPU build of torch for this Python can be reached: the model server is not tried"
else
  step "pip install ml_rag.whl[server]" /opt/ml_rag/bin/pip install -q -c /source/mk/constraints.txt "${wheel}[server]"
  holds "without a compiler and llama.cpp" test ! -e "$(echo /opt/ml_rag/lib/python3*/site-packages/llama_cpp)"
  install -d -o postgres /etc/ml_rag /var/lib/ml_rag /run/ml_rag
  printf '[server]\nsocket = "/run/ml_rag/ml_rag.sock"\nmodels_dir = "/var/lib/ml_rag"\n' >/etc/ml_rag/ml_rag.toml
  step "ml-rag models pull" as_postgres env HOME=/var/lib/ml_rag /opt/ml_rag/bin/ml-rag models pull all_minilm_l6_v2
  as_postgres env HOME=/var/lib/ml_rag /opt/ml_rag/bin/ml-rag serve >/tmp/server.log 2>&1 </dev/null &
  for _ in $(seq 120); do [ ! -S /run/ml_rag/ml_rag.sock ] || break; sleep 0.5; done
  sql -c "SELECT ml_rag.configure('model_server', 'unix:/run/ml_rag/ml_rag.sock')" >/dev/null
  install -d -m 755 /srv/samples
  install -m 644 /source/docs/samples/*.md /source/docs/samples/*.pdf /srv/samples
  step "the first load" sql -c "CALL vector_store_load('file:///srv/samples/', '{\"schema_name\": \"public\", \"table_name\": \"samples\"}')"
  cited=$(sql -c "SELECT document_name FROM ml_rag_search('What is ml_rag?', '{\"n_citations\": 1}')")
  holds "the first citation is of what-is-ml-rag.md" grep -q 'what-is-ml-rag.md' <<<"$cited"
  answer=$(sql -c "SELECT ml_rag_answer('What is ml_rag?') ->> 'text'")
  holds "an answer of the citations' sentences: ${answer:0:60}…" test -n "$answer"
  kill %1
fi
sql -c "DROP EXTENSION ml_rag CASCADE" 2>/dev/null
step "apt purge" apt-get -q -y purge "$package"
holds "nothing of it is left" test -z "$(compgen -G "/usr/share/postgresql/$major/extension/ml_rag*" || true)"
