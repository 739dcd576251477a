# PostgreSQL with pgvector, PL/Python and ml_rag. The build context is the root of the checkout: see compose.yaml.
ARG BASE=debian:trixie-slim
ARG POSTGRES=17

FROM ${BASE} AS packages
ARG POSTGRES
# The numbers are those of server.Dockerfile. No cluster is made here; a snake-oil key would be the same for everybody.
RUN groupadd --system --gid 999 postgres \
 && useradd --system --no-log-init --uid 999 --gid postgres --home-dir /var/lib/postgresql --shell /bin/bash postgres \
 && install -d /etc/postgresql-common/createcluster.d \
 && echo 'create_main_cluster = false' >/etc/postgresql-common/createcluster.d/image.conf \
 && apt-get update \
 # a version that the release does not have, with its pgvector, comes from PostgreSQL's own package source
 && if ! apt-cache show "postgresql-$POSTGRES-pgvector" >/dev/null 2>&1; then \
      apt-get install -y --no-install-recommends ca-certificates postgresql-common \
        && /usr/share/postgresql-common/pgdg/apt.postgresql.org.sh -y; \
    fi \
 && apt-get install -y --no-install-recommends \
      "postgresql-$POSTGRES" "postgresql-$POSTGRES-pgvector" "postgresql-plpython3-$POSTGRES" python3-numpy \
 && apt-get clean \
 && rm -rf /var/lib/apt/lists/* /etc/ssl/private/ssl-cert-snakeoil.key /etc/ssl/certs/ssl-cert-snakeoil.pem

FROM packages AS extension
ARG POSTGRES
RUN apt-get update && apt-get install -y --no-install-recommends make
WORKDIR /source
COPY Makefile ml_rag.control ./
COPY mk mk
COPY sql sql
COPY migrations migrations
COPY plpy plpy
# With what the releases had: a volume that an older image made runs its own version until it is updated.
RUN export DESTDIR=/stage PG_CONFIG=/usr/lib/postgresql/$POSTGRES/bin/pg_config && make install && bash mk/install.sh released

FROM packages
ARG POSTGRES
COPY --from=extension /stage /
COPY --chmod=644 docs/samples /srv/documents
COPY --chmod=755 docker/database-entrypoint.sh /usr/local/bin/entrypoint
COPY --chmod=644 docker/initdb.sql /usr/share/ml_rag/initdb.sql
# COPY --chmod changes folders too
RUN chmod 755 /srv/documents /usr/share/ml_rag \
 && install -d -o postgres -g postgres -m 755 /var/lib/postgresql "/var/lib/postgresql/$POSTGRES" \
 && install -d -o postgres -g postgres -m 2775 /run/postgresql \
 && install -d -o 998 -g postgres -m 2750 /run/ml_rag \
 && install -d /docker-entrypoint-initdb.d
ENV PATH=/usr/lib/postgresql/$POSTGRES/bin:$PATH PGDATA=/var/lib/postgresql/$POSTGRES/main LANG=C.UTF-8 \
    PGHOST=/run/postgresql PGDATABASE=ml_rag
USER postgres
WORKDIR /var/lib/postgresql
VOLUME ["/var/lib/postgresql", "/run/ml_rag"]
EXPOSE 5432
# SIGINT: sessions are ended and the cluster is shut down cleanly; SIGTERM would wait for the sessions
STOPSIGNAL SIGINT
HEALTHCHECK --interval=5s --timeout=5s --start-period=10m --retries=6 CMD ["pg_isready", "-q"]
ENTRYPOINT ["entrypoint"]
