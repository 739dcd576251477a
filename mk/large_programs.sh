#!/usr/bin/env bash
# large_programs.sh: Open WebUI (3 GB), Superset (1 GB) and dbt, each in an environment of its own below .venv. What is there costs nothing.
source "$(dirname "$0")/lib.sh"

# the CPU build of torch that .venv has: the plain one drags in gigabytes of CUDA
torch=$("$VENV/bin/python" -c 'import torch; print(torch.__version__)')
apart open-webui open-webui==0.12.4 "torch==$torch"
# Superset does not start with flask-caching 2.5.1, nor without rich and cachetools, and names none of that
apart superset apache-superset==6.1.0 cachelib==0.13.0 cachetools==6.2.1 flask-caching==2.3.1 psycopg2-binary==2.9.13 rich==13.9.4
# later ones fetch a part of themselves from elsewhere while pip builds them
apart dbt dbt-core==1.10.23 dbt-postgres==1.11.0
