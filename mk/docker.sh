#!/usr/bin/env bash
# docker.sh test [pytest arguments]: builds the images, brings them up, asks, breaks and restarts them, runs the test
# suite against the database in its container, takes everything down. Its containers and volumes have a name of their
# own: those of a `docker compose up` in docker/ are left alone.
# docker.sh short: the same without the conventions of the official image and the start without models, and with those tests
# only that concern the containers and the version of PostgreSQL.
# docker.sh upgrade [pytest arguments]: pg_upgrade from PostgreSQL 15 to 17, in an image that has both; `short`, and `test`
# without arguments, end with it.
# docker.sh versions: the tests of SQL with each version of PostgreSQL from 15 to 18: the one of this machine, and those that
# a release of Debian has whose base image is here or can be pulled. docker.sh sql: one of them, as ML_RAG_TEST_POSTGRES and
# ML_RAG_TEST_BASE say.
# docker.sh short-if-possible: `short` where there is an engine and the base images; else says what is missing.
source "$(dirname "$0")/lib.sh"

project=ml_rag_test
export ML_RAG_TAG=test ML_RAG_TEST_PASSWORD=${ML_RAG_TEST_PASSWORD:-$(head -c 18 /dev/urandom | base64 | tr '+/' 'xy')}
# the sample documents, whatever the caller has for containers of their own
unset ML_RAG_DOCUMENTS ML_RAG_LOAD ML_RAG_PORT ML_RAG_REGISTRY POSTGRES_{DB,USER,PASSWORD,PASSWORD_FILE}
engine_pid='' left_before=''
# of PostgreSQL: catalogs, plans, dumps, the order of rows; of containers: files, sockets, other users
concerned=(tests/docker tests/migration tests/sql/test_api.py tests/sql/test_privileges.py tests/sql/test_schema.py
  tests/sql/test_store.py tests/sql/test_load.py tests/sql/test_load_formats.py tests/sql/test_doctor.py tests/sql/test_rag.py
  tests/sql/test_nlsql_question.py tests/security/test_names.py)
sql=(tests/sql tests/migration tests/security)
# the release of Debian that has a version of PostgreSQL and a pgvector that is new enough
declare -A suites=([17]=trixie [18]=forky)

compose() {
  docker compose -p "$project" -f "$ROOT/docker/compose.yaml" -f "$ROOT/docker/compose.test.yaml" "$@" </dev/null
}

base_images() { sed -n 's/^ARG [A-Z_]*BASE=//p' "$ROOT"/docker/*.Dockerfile | sort -u; }

# An engine that answers: the one there is, else one of our own until the end of this script.
engine() {
  docker info >/dev/null 2>&1 && return
  { am_root && command -v dockerd >/dev/null; } || return
  setsid dockerd </dev/null >"$ROOT/.build/dockerd.log" 2>&1 9>&- 8>&- &
  engine_pid=$!
  for _ in $(seq 60); do
    docker info >/dev/null 2>&1 && return
    kill -0 "$engine_pid" 2>/dev/null || break
    sleep 0.5
  done
  return 1
}

has_image() { docker image inspect "$1" >/dev/null 2>&1 || timeout 120 docker pull -q "$1" >/dev/null 2>&1; }

# Sets `reason`: why the containers cannot be tested here; empty when they can.
find_reason() {
  local image
  reason="the command docker is missing"
  command -v docker >/dev/null || return 0
  reason="docker has no plugin compose"
  docker compose version >/dev/null 2>&1 || return 0
  reason="docker has no plugin buildx"
  docker buildx version >/dev/null 2>&1 || return 0
  reason="no Docker engine answers, and none can be started"
  engine || return 0
  for image in $(base_images); do
    reason="the image $image is not here and cannot be pulled"
    has_image "$image" || return 0
  done
  reason=
}

stop_engine() {
  if [ -n "$engine_pid" ]; then kill "$engine_pid" 2>/dev/null || true; fi
}

# Also after a failure; ML_RAG_DOCKER_KEEP=1 keeps the containers, to look around in them.
take_down() {
  local status=$?
  if [ "$status" -ne 0 ] && [ "${started:-}" ]; then
    compose ps --all || true
    compose logs --tail 60 || true
  fi
  if [ -n "${ML_RAG_DOCKER_KEEP:-}" ]; then
    note "left as they are: docker compose -p $project ps"
  else
    remove_official
    compose --profile tests down --volumes --remove-orphans --timeout 20 || true
  fi
  stop_engine
  exit "$status"
}

ask() { compose exec -T db psql -X -q -At -v ON_ERROR_STOP=1 "$@"; }

# expect "what must be so" command…
expect() {
  local what=$1
  shift
  "$@" || die "docker-test: this is not so: $what"
  note "$what"
}

answers() {
  ask -c "SELECT jsonb_array_length(a -> 'citations') > 0 AND length(a ->> 'text') > 0
          FROM ml_rag_answer('What is ml_rag?', '{\"n_citations\": 1, \"model_options\": {\"max_tokens\": 8}}') AS a" |
    grep -qx t
}

healthy() { compose up --wait --wait-timeout 300 --no-build --detach db server; }

# A unix socket can be reached, the caller is not one of those who may.
peer_is_refused() {
  local reply
  reply=$(compose run --rm --no-deps -T --user 12345:999 --entrypoint python server -c "
import socket
s = socket.socket(socket.AF_UNIX)
s.connect('/run/ml_rag/ml_rag.sock')
s.sendall(b'GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n')
print(s.recv(100).decode())")
  [[ $reply == *'403 Forbidden'* ]]
}

# The interfaces of a container, but for the loopback's.
without_network() { [ "$(compose exec -T "$1" ls /sys/class/net)" = lo ]; }

runs_as() { [ "$(compose exec -T "$1" id -u)" = "$2" ]; }

crash_server() {
  # everything but PID 1, which no process of its own container can kill
  compose exec -T server python -c 'import os; os.kill(-1, 9)' || true
}

segments() { ask -c 'SELECT count(*) FROM documents'; }

# What mk/made_up_release.sh makes, for the container of the database: the image has no more than the releases. Into a
# volume of the tests, as the container is read-only.
add_made_up_release() {
  local folder
  bash "$ROOT/mk/made_up_release.sh"
  rm -rf "$ROOT/build/made_up/files"
  mkdir -p "$ROOT/build/made_up/files"
  tar -C "$ROOT/build/made_up/files" -xzf "$ROOT"/build/made_up/ml_rag--*.tar.gz
  cp "$ROOT"/build/made_up/ml_rag--*--*.sql "$ROOT/build/made_up/files"
  folder=$(compose exec -T db pg_config --sharedir)/extension
  compose cp "$ROOT/build/made_up/files/." "db:$folder"
}

# A database as the image of an older release made it, in a volume that this image finds.
of_an_older_image() {
  ask -c "CREATE DATABASE older"
  ask -d older -c "CREATE EXTENSION vector; CREATE EXTENSION plpython3u; CREATE EXTENSION ml_rag VERSION '0.0.0'" \
    -c "SELECT ml_rag.configure('model_server', 'unix:/run/ml_rag/ml_rag.sock')" \
    -c "CALL vector_store_load('file:///srv/documents/', '{\"table_name\": \"documents\"}')"
}

older_answers() {
  ask -d older -c "SELECT ml_rag_answer('What is ml_rag?', '{\"keyword_search\": true, \"skip_generate\": true}')"
}

same_answer() { [ "$(older_answers)" = "$1" ]; }

# Volumes without a name and images without a tag: what `up` and `down` must not leave.
leftovers() {
  docker volume ls -q | grep -xE '[0-9a-f]{64}' || true
  docker images -q --filter dangling=true
}

nothing_new_is_left() { [ "$(leftovers | sort | comm -13 <(sort <<<"$left_before") -)" = "" ]; }

same_segments() { [ "$(segments)" = "$1" ]; }

first_call() {
  local reply
  reply=$(ask -c "CALL ml_rag('What is ml_rag?')")
  [[ $reply == *'"citations"'*'what-is-ml-rag.md'* ]]
}

# What README.md has the reader ask.
readme_line() {
  local line reply
  line=$(sed -n 's/^docker compose exec db \(psql .*\)/\1/p' "$ROOT/README.md")
  reply=$(eval "compose exec -T db $line")
  [[ $reply == *'[1] '*'what-is-ml-rag.md'* ]]
}

checks() {
  local count answer
  expect "docker compose exec db psql answers CALL ml_rag(…)" first_call
  expect "… and the line of README.md" readme_line
  expect "the database runs without privileges" runs_as db 999
  expect "the model server runs without privileges" runs_as server 998
  expect "the model server has no network" without_network server
  expect "the model server refuses another uid" peer_is_refused
  count=$(segments)
  add_made_up_release
  of_an_older_image >/dev/null
  answer=$(older_answers)
  compose restart db
  healthy
  expect "a database of an older release answers before it is updated" same_answer "$answer"
  ask -d older -c "ALTER EXTENSION ml_rag UPDATE"
  expect "… and the same afterwards" same_answer "$answer"
  ask -c "DROP DATABASE older"
  compose restart server
  expect "after a restart of the model server the next calls are answered" healthy
  expect "… by CALL ml_rag(…) too" answers
  crash_server
  expect "after a crash of the model server it comes back by itself" comes_back
  compose restart db
  expect "after a restart of the database it is healthy" healthy
  expect "… and answers" answers
  compose kill db
  compose start db
  expect "after a crash of the database it is healthy" healthy
  expect "… and answers" answers
  compose --profile worker up --wait --wait-timeout 120 --no-build --detach worker
  expect "the worker is healthy" worker_is_healthy
  COMPOSE_PROFILES=worker compose down --timeout 20
  expect "down takes the worker with it" no_container_is_left
  expect "no volume without a name and no image without a tag is left" nothing_new_is_left
  expect "containers made anew are healthy" healthy
  expect "… with the documents that were loaded" same_segments "$count"
  expect "… and answer" answers
}

database=ml_rag-database:$ML_RAG_TAG

# is_refused "what it is refused for" [options of docker run]: ends with that sentence instead of a start.
is_refused() {
  local reply why=$1
  shift
  ! reply=$(docker run --rm "$@" "$database" 2>&1) && [[ $reply == *"$why"* ]]
}

by_password() { # by TCP, as another machine would
  docker exec -e PGPASSWORD="$1" "$project-official" psql -X -At -h 127.0.0.1 -U app -d shop \
    -c "SELECT string_agg(name, ' ' ORDER BY name) FROM made" </dev/null
}

ran_all_files() { [ "$(by_password "$1")" = "executable gz sourced sql" ]; }

says() { docker logs "$project-official" 2>&1 | grep -F "$1" >/dev/null; }

official() {
  docker run -d --name "$project-official" -v "$project-official:/var/lib/postgresql" \
    -e POSTGRES_USER=app -e POSTGRES_DB=shop -e ML_RAG_LOAD= "$@" "$database" >/dev/null
  for _ in $(seq 120); do
    [ "$(docker inspect -f '{{.State.Health.Status}}' "$project-official")" != healthy ] || return 0
    sleep 0.5
  done
  docker logs --tail 20 "$project-official" >&2
  return 1
}

remove_official() {
  docker rm -f -v "$project-official" >/dev/null 2>&1 || true
  docker volume rm "$project-official" >/dev/null 2>&1 || true
}

# What people know of the official image.
conventions() {
  local folder
  folder=$(mktemp -d)
  chmod 755 "$folder"
  mkdir "$folder/init"
  echo "CREATE TABLE made (name text); INSERT INTO made VALUES ('sql');" >"$folder/init/1.sql"
  echo "INSERT INTO made VALUES ('gz');" | gzip >"$folder/init/2.sql.gz"
  # shellcheck disable=SC2016 # for the scripts
  echo 'psql -v ON_ERROR_STOP=1 -U "$POSTGRES_USER" -d "$POSTGRES_DB" -c "INSERT INTO made VALUES (\$\$sourced\$\$)"' >"$folder/init/3.sh"
  { echo '#!/bin/sh' && sed 's/sourced/executable/' "$folder/init/3.sh"; } >"$folder/init/4.sh"
  chmod 755 "$folder/init/4.sh"
  echo secret >"$folder/secret"
  chmod 600 "$folder/secret"
  expect "a secret that the container cannot read is refused" is_refused "chown 999 the file" \
    -e POSTGRES_PASSWORD_FILE=/secret -v "$folder/secret:/secret:ro"
  chown 999 "$folder/secret"
  expect "a folder of another owner is refused" is_refused "chown -R 999:999" -v "$folder/init:/var/lib/postgresql"
  expect "a volume where it would stay empty is refused" is_refused "mount it at /var/lib/postgresql" \
    -v "$folder/init:/var/lib/postgresql/data"
  expect "a variable that is not supported is refused" is_refused "is not supported" -e POSTGRES_INITDB_ARGS=-k
  remove_official
  expect "POSTGRES_USER, POSTGRES_DB and a secret of mode 0600" official -e POSTGRES_PASSWORD_FILE=/secret \
    -v "$folder/secret:/secret:ro" -v "$folder/init:/docker-entrypoint-initdb.d:ro"
  expect "… and every file of docker-entrypoint-initdb.d" ran_all_files secret
  docker rm -f -v "$project-official" >/dev/null
  expect "a password set later" official -e POSTGRES_PASSWORD=later
  expect "… is said to be ignored" says 'ALTER ROLE "app" PASSWORD'
  docker exec "$project-official" psql -X -q -U app -d shop -c "ALTER ROLE app PASSWORD 'later'" </dev/null
  expect "… and set by that statement" ran_all_files later
  remove_official
  rm -rf "$folder"
}

# A pull that fails, and a server that has no room for its own code: Compose fails, and names the service.
names_what_is_not_well() {
  local log=$ROOT/.build/hopeless.log
  cat >"$ROOT/.build/hopeless.yaml" <<'YAML'
services:
  models: { command: [models, pull, no-such-model] }
  server: { command: [serve, --no-such-option] }
YAML
  ! compose -f "$ROOT/.build/hopeless.yaml" up --wait --wait-timeout 240 --no-build --detach db server >"$log" 2>&1 &&
    grep -qE 'server.*(unhealthy|exited)' "$log" && grep -q 'models.*exit 1' "$log"
}

searches_without_models() {
  local table="'vector_store', '[\"public.animals\"]'::jsonb, 'n_citations', 1"
  [ "$(ask -c "CREATE TABLE animals (id int PRIMARY KEY, segment text, segment_embedding vector(384))" \
    -c "COMMENT ON COLUMN animals.segment_embedding IS 'GENAI_OPTIONS=EMBED_MODEL_ID=all_minilm_l6_v2'" \
    -c "INSERT INTO animals SELECT n, t, ('[' || n || repeat(',0.1', 383) || ']')::vector
        FROM (VALUES (1, 'the cat purrs'), (-1, 'the dog barks')) AS v (n, t)" \
    -c "SELECT FROM ml_rag.enable_keyword_search('animals')" \
    -c "SELECT s.segment FROM ml_rag_search('barks', jsonb_build_object($table, 'semantic_search', false, 'keyword_search', true)) AS s" \
    -c "SELECT s.segment FROM ml_rag_search('x', jsonb_build_object($table, 'query_embedding',
          (SELECT segment_embedding::text::jsonb FROM animals WHERE id = 1))) AS s" | xargs)" = "the dog barks the cat purrs" ]
}

without_models() {
  expect "docker compose up --wait names the services that are not well" names_what_is_not_well
  expect "… and the database searches by words and given vectors" searches_without_models
  compose down --volumes --timeout 20
}

worker_is_healthy() { [ "$(docker inspect -f '{{.State.Health.Status}}' "$project-worker-1")" = healthy ]; }

no_container_is_left() { [ -z "$(docker ps -aq --filter "label=com.docker.compose.project=$project")" ]; }

# Not by our starting it: by the restart policy.
comes_back() {
  for _ in $(seq 60); do
    answers 2>/dev/null && return
    sleep 1
  done
  return 1
}

run_tests() {
  local shared=()
  if [ -d "$ROOT/../shared/data" ]; then
    shared=(--volume "$(cd "$ROOT/../shared" && pwd -P):/shared:ro" --env ML_RAG_SHARED=/shared)
  fi
  compose --profile tests run --rm --no-deps -T "${shared[@]}" tests "$@"
}

upgrade() {
  step "Image: PostgreSQL 15 and 17 side by side" docker build --tag ml_rag-upgrade:test \
    --file "$ROOT/docker/upgrade.Dockerfile" "$ROOT"
  docker run --rm --network none --init --shm-size 1g ml_rag-upgrade:test "$@"
}

# start [command]: which is run when the images are there
start() {
  trap take_down EXIT
  trap 'exit 130' INT TERM
  compose --profile tests down --volumes --remove-orphans --timeout 1 2>/dev/null || true
  step "Images: database, model server, tests" compose --profile tests build
  left_before=$(leftovers) # a build leaves the images of the one before without a tag
  started=1
  "$@"
  step "Containers, models, sample documents" healthy
}

# run BEFORE [pytest arguments]: BEFORE is run when the images are there
run() {
  local before=$1
  start "$before"
  shift
  printf '==> Asking, breaking, restarting\n' >&9
  checks
  [ "$before" = true ] || conventions
  docker images --format '{{.Repository}} {{.Size}}' | grep '^ml_rag-' | while read -r name size; do note "image $name: $size"; done
  add_made_up_release
  run_tests "$@"
}

versions() {
  local major here failed=()
  here=$("$(need_pg_config)" --version | sed 's/^[^0-9]*\([0-9]*\).*/\1/')
  for major in 15 16 17 18; do
    if [ "$major" = "$here" ]; then
      printf '==> PostgreSQL %s: of this machine\n' "$major" >&9
      env -u ML_RAG_TEST_DSN bash "$ROOT/mk/test.sh" "${sql[@]}" || failed+=("$major")
    elif [ -z "${suites[$major]:-}" ]; then
      note "PostgreSQL $major: not tried, as no release of Debian has it with pgvector 0.8"
    elif ! has_image "debian:${suites[$major]}-slim"; then
      note "PostgreSQL $major: not tried, as the image debian:${suites[$major]}-slim is not here and cannot be pulled"
    else
      printf '==> PostgreSQL %s: of Debian %s\n' "$major" "${suites[$major]}" >&9
      ML_RAG_TEST_POSTGRES=$major ML_RAG_TEST_BASE=debian:${suites[$major]}-slim bash "$ROOT/mk/docker.sh" sql ||
        failed+=("$major")
    fi
  done
  [ "${#failed[@]}" -eq 0 ] || die "versions-test: tests failed with PostgreSQL ${failed[*]}"
}

find_reason
if [ -n "$reason" ]; then stop_engine; fi
case ${1:-} in
  test | short | upgrade | versions | sql)
    [ -z "$reason" ] || die "docker-test: $reason"
    ;;
  short-if-possible)
    if [ -n "$reason" ]; then
      note "the containers are not tested here: $reason"
      exit 0
    fi
    ;;
  *) die "usage: docker.sh test|short|upgrade|versions|sql|short-if-possible [pytest arguments]" ;;
esac
case $1 in
  test)
    run without_models "${@:2}"
    [ "$#" -gt 1 ] || upgrade
    ;;
  short*)
    run true "${concerned[@]}"
    upgrade
    ;;
  upgrade)
    trap stop_engine EXIT
    upgrade "${@:2}"
    ;;
  versions)
    trap stop_engine EXIT
    versions
    ;;
  sql)
    start true
    add_made_up_release
    run_tests "${sql[@]}"
    ;;
esac
