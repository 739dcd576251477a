#!/usr/bin/env bash
# venv.sh [group…]: the model server's virtual environment, .venv, in the versions mk/constraints.txt was tested with.
# Each group of pyproject.toml's dependency-groups (test, check) is added where it is named.
# LLAMA_AMX=1 compiles llama.cpp with AMX, LLAMA_AMX=0 without; which of them was named last is kept.
source "$(dirname "$0")/lib.sh"

constraints=$ROOT/mk/constraints.txt
torch=$(sed -n 's/^torch==//p' "$constraints")

find_python() {
  local python
  for python in /usr/bin/python3 python3 python3.13 python3.12 python3.11; do
    "$python" -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || continue
    command -v "$python"
    return
  done
  die "no Python 3.11 or newer with venv is to be found: install python3 and python3-venv"
}

pip_install() { "$VENV/bin/pip" install --disable-pip-version-check --no-input -c "$constraints" "$@"; }

or_explain() { die "pip could not install $1: check the network and pip's index, then run this again (details: $LOG)"; }

# A CPU build of torch is 200 MB, the plain one drags in gigabytes of CUDA.
install_torch() {
  local index=https://download.pytorch.org/whl/cpu extra=()
  if curl -fsS -m 3 -o /dev/null "$index/torch/" 2>/dev/null; then extra=(--extra-index-url "$index"); fi
  pip_install "${extra[@]}" "torch==$torch+cpu" && return
  note "no CPU build of torch $torch is offered here: taking the plain one, which is large"
  pip_install "torch==$torch" || or_explain torch
}

# Its AMX code died of an illegal instruction at the first generation here (gcc 12; llama.cpp's pull request 26954), so it
# is left out unless somebody who knows better wants it.
amx=${LLAMA_AMX:-$(cat "$VENV/llama_amx" 2>/dev/null || echo 0)}
case $amx in 0 | 1) ;; *) die "LLAMA_AMX is $amx: set it to 1 for a llama.cpp with AMX, to 0 for one without" ;; esac

# Fails where it is not there or cannot be loaded.
llama_cpp_info() { "$VENV/bin/python" -c "import llama_cpp; print(llama_cpp.llama_print_system_info().decode())" 2>/dev/null; }

# Whether it can be loaded and is compiled as it was asked for.
llama_cpp_fits() {
  local info
  info=$(llama_cpp_info) || return
  case $amx:$info in
    1:*AMX*) ;;
    1:*) ! grep -qw amx_tile /proc/cpuinfo ;;
    *AMX*) return 1 ;;
  esac
}

# llama-cpp-python comes as source; its server, tools and vision parts are not needed here.
install_llama_cpp() {
  llama_cpp_fits && return
  local off="-DLLAVA_BUILD=OFF"
  for part in TOOLS SERVER EXAMPLES TESTS; do off+=" -DLLAMA_BUILD_$part=OFF"; done
  if [ "$amx" = 0 ] && [ "$(uname -m)" = x86_64 ]; then
    for language in C CXX; do off+=" -DCMAKE_${language}_FLAGS='-mno-amx-tile -mno-amx-int8 -mno-amx-bf16'"; done
  fi
  for _ in 1 2; do
    if [ "$("$VENV/bin/pip" cache list --format=abspath llama_cpp_python | wc -l)" -eq 0 ]; then
      note "compiling llama.cpp: 4 to 9 minutes on 2 cores, once; pip keeps the result for the next time"
    fi
    CMAKE_ARGS="$off ${CMAKE_ARGS:-}" pip_install --force-reinstall --no-deps llama-cpp-python || or_explain llama-cpp-python
    pip_install llama-cpp-python || or_explain llama-cpp-python
    llama_cpp_fits && return
    # what pip had kept was compiled with other flags than those above
    "$VENV/bin/pip" cache remove llama_cpp_python || true
  done
  llama_cpp_info || die "llama-cpp-python does not run here: see the end of $LOG"
  [ "$amx" = 0 ] || die "llama.cpp was compiled without AMX: take a compiler that has it (gcc 11 or newer), or LLAMA_AMX=0"
  die "llama.cpp was compiled with AMX all the same: look at CMAKE_ARGS, or keep it by LLAMA_AMX=1 where you know that it works"
}

# Stamps hold what they were made from; the package itself is linked to this checkout, so its code is always current.
fingerprint() { cat "$ROOT/pyproject.toml" "$constraints" "$0" <("$1" --version) <(echo "$VERSION $1 $amx") | sha256sum; }

python=$(find_python)
current=$(fingerprint "$python")
if [ "$(cat "$VENV/base.sha256" 2>/dev/null)" != "$current" ]; then
  [ -x "$VENV/bin/pip" ] || "$python" -m venv "$VENV" || die "python3 -m venv failed: install python3-venv, then run this again"
  pip_install --upgrade pip || or_explain pip
  "$VENV/bin/python" -c "import torch, sys; sys.exit(torch.__version__.split('+')[0] != '$torch')" 2>/dev/null || install_torch
  install_llama_cpp
  pip_install -e "$ROOT[server]" || or_explain "the packages of pyproject.toml"
  echo "$amx" >"$VENV/llama_amx"
  echo "$current" >"$VENV/base.sha256"
fi

for group in "$@"; do
  [ "$(cat "$VENV/$group.sha256" 2>/dev/null)" != "$current" ] || continue
  (cd "$ROOT" && pip_install --group "$group") || or_explain "the group $group of pyproject.toml"
  echo "$current" >"$VENV/$group.sha256"
done
