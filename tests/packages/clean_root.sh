#!/usr/bin/env bash
# In a clean Debian, as root: types what README.md says about packages and the first questions, with what is in /dist, says how
# long each step took, removes it again. /source is a checkout; mk/packages.sh test runs this in containers.
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
  "$@" || { tail -30 "$log" && echo "this is not so: $what" && exit 1; }
  printf '    %s\n' "$what"
}

# blocks HEADING LANGUAGE: what README.md has in blocks of code of that language below that heading
blocks() {
  awk -v heading="$1" -v fence="\`\`\`$2" '/^#+ / && !code { here = $0 == heading } /^```/ { code = !code; wanted = code && here && $0 == fence; next }
    wanted' /source/README.md
}

as_postgres() { (cd / && exec runuser -u postgres -- "$@"); }
sql() { as_postgres psql -X -q -At -v ON_ERROR_STOP=1 "$@"; }
types() { (cd /dist && bash -c "$1"); }
types_sql() { blocks "$1" sql | as_postgres psql -X -v ON_ERROR_STOP=1; }
has_no_compiler() { ! command -v gcc >/dev/null && ! command -v cc >/dev/null; }

mapfile -t lines < <(blocks '### Packages' '' | sed "s/postgresql-17-/postgresql-$major-/")
[ "${#lines[@]}" -eq 6 ] || { echo "README.md has other lines for packages than this test" && exit 1; }
echo 'APT::Get::Assume-Yes "true";' >/etc/apt/apt.conf.d/90yes
step "apt update, sudo" sh -c "apt-get -q update && apt-get -q install sudo"
echo 'Defaults !env_reset' >/etc/sudoers.d/packages # how this container reaches package sources

step "${lines[0]}" types "${lines[0]}"
holds "without a compiler" has_no_compiler
if ! compgen -G "/usr/share/postgresql/$major/extension/vector--0.[89]*.sql" >/dev/null; then
  holds "the package says where pgvector is to be had" grep -q "pgvector 0.8 or newer is missing" "$log"
  step "pgvector, which this release does not have" bash /source/mk/pgvector.sh
fi
pg_ctlcluster "$major" main start 2>/dev/null || true # a container has no systemd
python3 -m venv /opt/client
wheel=$(ls /dist/ml_rag-*.whl)
step "pip install ml_rag-*.whl, the client" /opt/client/bin/pip install -q "$wheel"

step "${lines[1]}" types "${lines[1]}"
for absent in llama_cpp torch; do
  holds "without $absent" test ! -e "$(echo /opt/ml_rag/lib/python3*/site-packages)/$absent"
done
step "${lines[2]}" types "${lines[2]}"
installed=$(sql -c "SELECT ml_rag.version()")
holds "version $installed, that of the package" grep -qF "ml-rag_$installed-" <(ls /dist/"$package"_*)
holds "ml-rag doctor finds the database" grep -q '"ok": true' <(as_postgres /opt/client/bin/ml-rag doctor --json --dsn dbname=postgres)

step "${lines[3]}" types "${lines[3]}"
step "${lines[4]}" types "${lines[4]}"
types "${lines[5]}" >/tmp/server.log 2>&1 </dev/null &
for _ in $(seq 240); do [ ! -S /run/ml_rag/ml_rag.sock ] || break; sleep 0.5; done
step "Getting started" types_sql "## Getting started"
holds "a citation of its table" grep -qF "[1] Travel, distance 0.3" "$log"
blocks '## Your documents' '' | grep -E '^(mkdir|printf) ' >/tmp/documents.sh
step "the documents of the README" bash /tmp/documents.sh
step "Your documents" types_sql "## Your documents"
holds "a citation of a document" grep -q '^ \[1\] .*/srv/perks/parking.md, distance' "$log"
holds "ml-rag doctor finds nothing wrong" as_postgres /opt/ml_rag/bin/ml-rag doctor --dsn dbname=postgres
sql -c "DROP EXTENSION ml_rag CASCADE" 2>/dev/null
step "apt purge" apt-get -q purge "$package"
holds "nothing of it is left" test -z "$(compgen -G "/usr/share/postgresql/$major/extension/ml_rag*" || true)"
