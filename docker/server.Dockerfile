# The model server. The build context is the root of the checkout: see compose.yaml.
#   server  what runs: no compiler, no pip cache, a user without privileges
#   tests   the same with the test suite, for make docker-test
ARG BASE=debian:bookworm-slim

FROM ${BASE} AS environment
RUN apt-get update \
 && apt-get install -y --no-install-recommends build-essential ca-certificates cmake ninja-build python3 python3-venv
ENV PIP_NO_INPUT=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PATH=/opt/ml_rag/bin:$PATH
WORKDIR /source
# Changes of the code leave this and the layers up to the package alone.
COPY mk/constraints.txt mk/llama.cmake ./
RUN --mount=type=cache,target=/root/.cache/pip \
    python3 -m venv /opt/ml_rag \
 && pip install --upgrade pip

# Compiled for any processor of the last ten years, not for the one that builds; the library alone, as mk/llama.sh does it.
# AMX is left out, whose code dies of an illegal instruction where gcc 12 compiled it. pip would give again what it compiled
# with other arguments: each has a cache of its own. LLAMA="": without it.
ARG LLAMA=1
ARG LLAMA_CMAKE_ARGS="-DGGML_NATIVE=OFF"
RUN --mount=type=cache,target=/root/.cache/pip \
    if [ -z "$LLAMA" ]; then exit; fi \
 && args="-DLLAVA_BUILD=OFF -DCMAKE_PROJECT_llama.cpp_INCLUDE=/source/llama.cmake -DLLAMA_BUILD_TOOLS=OFF -DLLAMA_BUILD_SERVER=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_TESTS=OFF" \
 && if [ "$(uname -m)" = x86_64 ]; then for language in C CXX; do \
      args="$args -DCMAKE_${language}_FLAGS='-mno-amx-tile -mno-amx-int8 -mno-amx-bf16'"; done; fi \
 && export CMAKE_ARGS="$args $LLAMA_CMAKE_ARGS" \
 && PIP_CACHE_DIR=/root/.cache/pip/llama-$(printf %s "$CMAKE_ARGS" | sha256sum | cut -c1-12) \
    pip install -c constraints.txt llama-cpp-python

COPY pyproject.toml ./
RUN --mount=type=cache,target=/root/.cache/pip \
    python -c 'import tomllib; project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
      print(*project["dependencies"], *project["optional-dependencies"]["server"], sep="\n")' >requirements.txt \
 && pip install -c constraints.txt -r requirements.txt
# What only compiling and testing need is left behind.
RUN cd /opt/ml_rag/lib/python3*/site-packages \
 && rm -rf include lib/libggml* lib/libllama* \
 && find . -type d -name tests -prune -exec rm -r {} + \
 && python -c 'import onnxruntime' && if [ -n "$LLAMA" ]; then python -c 'import llama_cpp'; fi

FROM environment AS package
COPY README.md LICENSE ./
COPY plpy plpy
RUN --mount=type=cache,target=/root/.cache/pip pip install --no-deps --prefix /package .

FROM ${BASE} AS server
RUN apt-get update \
 && apt-get install -y --no-install-recommends ca-certificates libgomp1 python3 tesseract-ocr \
 && apt-get clean \
 && rm -rf /var/lib/apt/lists/*
# The numbers are those of database.Dockerfile: the model server knows its peer by uid, the folder of the socket by gid.
RUN groupadd --system --gid 999 postgres \
 && useradd --system --no-log-init --uid 999 --gid postgres --home-dir /nonexistent --shell /usr/sbin/nologin postgres \
 && groupadd --system --gid 998 ml_rag \
 && useradd --system --no-log-init --uid 998 --gid ml_rag --groups postgres --home-dir /var/lib/ml_rag --shell /usr/sbin/nologin ml_rag \
 && install -d -o ml_rag -g ml_rag -m 750 /var/lib/ml_rag \
 && install -d -o ml_rag -g postgres -m 2750 /run/ml_rag
COPY --from=environment /opt/ml_rag /opt/ml_rag
COPY --from=package /package /opt/ml_rag
COPY --chmod=644 docker/ml_rag.toml /etc/ml_rag/ml_rag.toml
COPY --chmod=755 docker/server-healthcheck.py /usr/local/bin/healthcheck
ENV PATH=/opt/ml_rag/bin:$PATH HOME=/var/lib/ml_rag PYTHONUNBUFFERED=1
USER ml_rag
WORKDIR /var/lib/ml_rag
VOLUME ["/var/lib/ml_rag", "/run/ml_rag"]
HEALTHCHECK --interval=5s --timeout=5s --start-period=60s --retries=6 CMD ["healthcheck"]
ENTRYPOINT ["ml-rag"]
CMD ["serve"]

FROM server AS tests
USER root
WORKDIR /ml_rag
COPY mk/constraints.txt pyproject.toml ./
# The CPU build of torch is 200 MB; the plain one, TORCH_BUILD="" with TORCH_INDEX="", brings gigabytes of CUDA.
# The index is asked first, because pip waits long for one that it cannot reach and another may have that build.
ARG TORCH_BUILD=+cpu
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN --mount=type=cache,target=/root/.cache/pip \
    version=$(sed -n 's/^torch==//p' constraints.txt) index= \
 && if [ -n "$TORCH_INDEX" ] \
      && python -c 'import sys, urllib.request as r; r.urlopen(sys.argv[1], timeout=5)' "$TORCH_INDEX/torch/" 2>/dev/null; \
    then index="--extra-index-url $TORCH_INDEX"; fi \
 && pip install --disable-pip-version-check --no-input -c constraints.txt $index "torch==$version$TORCH_BUILD" sentence-transformers
RUN --mount=type=cache,target=/root/.cache/pip \
    pip install --disable-pip-version-check --no-input -c constraints.txt --group test
COPY . .
COPY --chmod=755 docker/database-client.sh /usr/local/bin/pg_dump
RUN for program in pg_restore psql; do ln -s pg_dump /usr/local/bin/$program; done
HEALTHCHECK NONE
ENTRYPOINT ["python", "-m", "pytest"]
CMD []
