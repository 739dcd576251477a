# PostgreSQL 15 of Debian 12 beside PostgreSQL 17 of Debian 13, each with pgvector, PL/Python and ml_rag: what the test
# of pg_upgrade needs, and what a server looks like in the middle of an upgrade of Debian. make upgrade-test
ARG OLD_BASE=debian:bookworm-slim
ARG BASE=debian:trixie-slim

FROM ${OLD_BASE} AS old
RUN install -d /etc/postgresql-common/createcluster.d \
 && echo 'create_main_cluster = false' >/etc/postgresql-common/createcluster.d/image.conf \
 && apt-get update \
 && apt-get install -y --no-install-recommends build-essential postgresql-15 postgresql-plpython3-15 python3-numpy \
 # its package would bring a whole clang, for the sake of JIT
 && cd /tmp && apt-get download postgresql-server-dev-15 && dpkg-deb -x postgresql-server-dev-15_*.deb /
WORKDIR /source
COPY mk mk
COPY plpy/ml_rag/__init__.py plpy/ml_rag/__init__.py
RUN PG_CONFIG=/usr/lib/postgresql/15/bin/pg_config bash mk/pgvector.sh

FROM ${BASE}
RUN install -d /etc/postgresql-common/createcluster.d \
 && echo 'create_main_cluster = false' >/etc/postgresql-common/createcluster.d/image.conf \
 && for file in /etc/apt/sources.list /etc/apt/sources.list.d/debian.sources; do \
      if [ -s "$file" ]; then sed 's/trixie/bookworm/g' "$file" >"/etc/apt/sources.list.d/bookworm.${file##*.}"; fi; done \
 && printf 'Package: *\nPin: release n=bookworm*\nPin-Priority: 100\n' >/etc/apt/preferences.d/bookworm \
 && apt-get update \
 && apt-get install -y --no-install-recommends make postgresql-15 postgresql-plpython3-15 \
      postgresql-17 postgresql-17-pgvector postgresql-plpython3-17 python3-numpy python3-psycopg \
      python3-pytest python3-pytest-timeout \
 && apt-get clean \
 && rm -rf /var/lib/apt/lists/*
COPY --from=old /usr/lib/postgresql/15/lib/vector.so /usr/lib/postgresql/15/lib/
COPY --from=old /usr/share/postgresql/15/extension/vector* /usr/share/postgresql/15/extension/
# numpy for Python 3.11, which Debian 13 no longer has: keyword search of the old server needs it
COPY --from=old /usr/lib/python3/dist-packages/numpy /opt/old/numpy
ENV ML_RAG_OLD_PYTHONPATH=/opt/old LANG=C.UTF-8
WORKDIR /ml_rag
COPY . .
RUN for version in 15 17; do \
      export PG_CONFIG=/usr/lib/postgresql/$version/bin/pg_config \
        && make -s install && bash mk/install.sh released && bash mk/made_up_release.sh install || exit; \
    done
ENTRYPOINT ["python3", "-m", "pytest", "tests/migration/test_pg_upgrade.py"]
