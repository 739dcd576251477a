# The commands of this repository; each is a script in mk/. `make help` lists them.
SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help demo test test-all test-rest test-one fault-test psql dsn doctor start stop clean build install uninstall bench injection eval check docs docker-test upgrade-test

help: ## what each command does
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 28

demo: ## from nothing to three answers; OLLAMA=llama3.1:8b, or ENDPOINT=http://… MODEL=…, for answers by a model of yours
	@bash mk/demo.sh

# Several processes of tests, each with a cluster and a model server of its own; one where a server is given. The tests of
# a file share databases and servers, so they stay in one process.
WORKERS = $(if $(ML_RAG_TEST_DSN),,-n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder)

# What a run leaves out, so that it takes no more than ten minutes on two idle cores, and what it has measured of each test (mk/durations.py).
LONG = models or faults or fuzz or integrations
RECORDED = --junitxml=build/$@.xml

test: ## the tests but the long ones, set-up included; ML_RAG_TEST_DSN=... runs them against another server
	@ML_RAG_MODELS=none bash mk/test.sh $(WORKERS) $(RECORDED) -m 'not (slow or $(LONG))'

test-rest: ## what test leaves out: real models, frameworks, faults, fuzzing
	@bash mk/test.sh $(WORKERS) $(RECORDED) -m 'not slow and ($(LONG))'

test-all: ## all tests, also those marked slow, which show at each call what others show at one
	@bash mk/test.sh $(WORKERS) $(RECORDED) -m ''

test-one: ## one test: make test-one T=tests/sql/test_rag.py
	@[ -n "$(T)" ] || { echo "usage: make test-one T=tests/sql/test_rag.py (or FILE::TEST)" >&2; exit 2; }
	@bash mk/test.sh $(T)

fault-test: ## breaks a running system in every way of docs/faults.md and proves that nothing is lost
	@bash mk/test.sh -m faults tests/faults

psql: ## psql in the private cluster, which is started where needed
	@bash mk/setup.sh unchanged || bash mk/setup.sh database
	@bash mk/cluster.sh psql

dsn: ## the libpq DSN of the running private cluster, and nothing else (make -s dsn)
	@bash mk/cluster.sh dsn

doctor: ## checks the private cluster, the model server and everything between them
	@bash mk/setup.sh all
	@bash mk/doctor.sh

start: ## the private cluster and the model server
	@bash mk/setup.sh all

stop: ## stops the model server and the private cluster
	@bash mk/server.sh stop
	@bash mk/cluster.sh stop

clean: ## removes what was built: the private cluster with its data, the virtual environment, build/
	@bash mk/server.sh stop
	@bash mk/cluster.sh drop
	rm -rf build .build .venv

.PHONY: all version packages packages-test images
all: build

version: ## the version, from plpy/ml_rag/__init__.py
	@sed -n 's/^__version__ = "\(.*\)"$$/\1/p' plpy/ml_rag/__init__.py

packages: ## dist/: Debian packages for PostgreSQL 15 to 18, wheel and sdist, PGXN's distribution
	@bash mk/packages.sh build

packages-test: ## tries them in clean containers of Debian 12 and 13, up to the first citation
	@bash mk/packages.sh test

images: ## both images by the bake file; TARGETS="server database-17": those only
	@VERSION=$$($(MAKE) -s version) docker buildx bake -f docker/docker-bake.hcl $(TARGETS)

build: ## joins sql/ into build/ml_rag--VERSION.sql
	@bash mk/build.sh

install: build ## the extension into the PostgreSQL that PG_CONFIG names (honours DESTDIR)
	@bash mk/install.sh install

uninstall: ## removes it there again
	@bash mk/install.sh uninstall

bench: ## measures the figures of docs/performance.md; writes bench/out/
	@bash mk/bench.sh

injection: ## measures how often the default model obeys instructions in documents; writes it into docs/security.md
	@bash mk/injection.sh

eval: ## measures the search on the public data sets (EVAL_DATA=folder: on yours; SETS=squad2,shop: some); writes bench/out/eval.json
	@bash mk/eval.sh $(if $(SETS),--only $(SETS))

docs: ## docs/reference.md, docs/options.md and lists in docs/, from what the installed extension says
	@bash mk/docs.sh

check: build ## lint, types, pgspot on the built script, vulnerabilities and licences of the packages, shellcheck
	@bash mk/check.sh

.PHONY: load-test
load-test: ## 64 sessions for five minutes (LOAD_SESSIONS, LOAD_MINUTES); LOAD_DOCS=1 writes docs/load.md and its picture
	@bash mk/load.sh

.PHONY: load-rates
load-rates: ## searches at 2 to 20 a second beside answers and a load (LOAD_SECONDS each); LOAD_DOCS=1 writes their table in docs/load.md
	@bash mk/load.sh rates

.PHONY: scale
scale: ## cost by segments, stores, sessions and tenants, into docs/scale.md (SCALE="all --quick": what, and how)
	@bash mk/scale.sh

.PHONY: fuzz-test
fuzz-test: ## the fuzz tests with their whole counts; FUZZ_SEED=… for the same cases again, FUZZ_SECONDS=… a target
	@bash mk/fuzz.sh

.PHONY: integrations-test
integrations-test: ## LangChain, LlamaIndex, MCP, the gateway and the page, tried with the packages themselves, which it installs
	@bash mk/setup.sh integrations
	@bash mk/test.sh tests/integrations

.PHONY: programs-test
programs-test: ## the same, and Open WebUI, Superset and dbt, which take 4 GB: all programs of docs/stack.md
	@bash mk/setup.sh programs
	@bash mk/test.sh tests/integrations

.PHONY: citus-test
citus-test: ## the tests of SQL on a coordinator of Citus with two workers; CITUS=… (its sources) installs it into PG_CONFIG before
	@[ -z "$(CITUS)" ] || bash mk/citus.sh "$(CITUS)"
	@ML_RAG_MODELS=none ML_RAG_TEST_CITUS=1 bash mk/test.sh $(WORKERS) $(RECORDED) tests/sql

docker-test: ## builds the images of docker/, brings them up, runs the tests against them (PostgreSQL 17), takes them down
	@bash mk/docker.sh test

.PHONY: docker-check versions-test
docker-check: ## the images built, started, broken and restarted, with the tests that concern them, and upgrade-test: 10 minutes
	@bash mk/docker.sh short

versions-test: ## the tests of SQL on PostgreSQL 15 to 18, as far as a release of Debian has it; before a release
	@bash mk/docker.sh versions

upgrade-test: ## pg_upgrade from PostgreSQL 15 to 17 in an image that has both: docs/upgrading.md
	@bash mk/docker.sh upgrade
