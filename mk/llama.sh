#!/usr/bin/env bash
# llama.sh wheel|install|fits: llama-cpp-python for the virtual environment, of which nothing is needed but pip.
# wheel: leaves one that runs on this machine in .build/llama: its package's own, else compiled here. install: puts it into
# the environment, and makes it first where it is not there. fits: whether one is installed that is as it was asked for.
# LLAMA_AMX=1 wants AMX, LLAMA_AMX=0 does not; which of them was named last is kept. CMAKE_ARGS: flags of your own.
source "$(dirname "$0")/lib.sh"

constraints=$ROOT/mk/constraints.txt
version=$(sed -n 's/^llama_cpp_python==//p' "$constraints")
work=$ROOT/.build/llama
index=https://abetlen.github.io/llama-cpp-python/whl/cpu
cpuinfo=/proc/cpuinfo

# Its AMX code died of an illegal instruction at the first generation here (gcc 12; llama.cpp's pull request 26954), so it
# is left out unless somebody who knows better wants it.
amx=${LLAMA_AMX:-$(cat "$VENV/llama_amx" 2>/dev/null || echo 0)}
case $amx in 0 | 1) ;; *) die "LLAMA_AMX is $amx: set it to 1 for a llama.cpp with AMX, to 0 for one without" ;; esac

pip() { "$VENV/bin/pip" "$@" --disable-pip-version-check --no-input; }

# What a llama.cpp was compiled with, such as "AVX2 = 1"; fails where it cannot be loaded. Of the environment, or of a folder.
installed_info() { "$VENV/bin/python" -c "import llama_cpp; print(llama_cpp.llama_print_system_info().decode())" 2>/dev/null; }
library_info() {
  "$VENV/bin/python" - "$1/llama_cpp/lib/libllama.so" 2>/dev/null <<'PYTHON'
import ctypes, sys
info = ctypes.CDLL(sys.argv[1]).llama_print_system_info
info.restype = ctypes.c_char_p
print(info().decode())
PYTHON
}

# Whether what was compiled so is what was asked for.
is_wanted() {
  case $amx:$1 in
    1:*AMX*) ;;
    1:*) ! grep -qw amx_tile "$cpuinfo" ;;
    *AMX*) return 1 ;;
  esac
}

# Whether this processor has all the instructions of such a llama.cpp: one that lacks some loads and dies when it is used.
runs_here() {
  local name flag
  # shellcheck disable=SC2013 # names of one word each
  for name in $(grep -o '[A-Z0-9_]* = 1' <<<"$1" | cut -d' ' -f1); do
    case $name in
      SSE3) flag=pni ;;
      AVX512) flag=avx512f ;;
      AVX512_VBMI) flag=avx512vbmi ;;
      SSSE3 | AVX* | F16C | FMA | BMI2 | AMX_INT8) flag=${name,,} ;;
      *) continue ;; # not an instruction set
    esac
    grep -m1 '^flags' "$cpuinfo" | grep -qw "$flag" || return
  done
}

fits() {
  local info
  info=$(installed_info) && is_wanted "$info" && runs_here "$info"
}

wheel() { compgen -G "$work/llama_cpp_python-$version-*.whl"; }

wheel_fits() {
  local info
  rm -rf "$work/unpacked"
  "$VENV/bin/python" -m zipfile -e "$(wheel)" "$work/unpacked"
  info=$(library_info "$work/unpacked") && is_wanted "$info" && runs_here "$info"
}

# Only for processors whose instructions can be compared, and without flags of the user's own.
take_ready_wheel() {
  [ "$amx" = 0 ] && [ -z "${CMAKE_ARGS:-}" ] && [ "$(uname -m)" = x86_64 ] || return
  curl -fsS -m 3 -o /dev/null "$index/llama-cpp-python/" 2>/dev/null || return
  pip download -c "$constraints" --no-deps --only-binary :all: --index-url "$index" -d "$work" llama-cpp-python || return
  wheel_fits || { rm -f "$work"/*.whl && return 1; }
}

# Of all that comes with the package, the library itself: mk/llama.cmake leaves out what it would build besides.
compile() {
  local off="-DLLAVA_BUILD=OFF -DCMAKE_PROJECT_llama.cpp_INCLUDE='$ROOT/mk/llama.cmake'" part language
  for part in TOOLS SERVER EXAMPLES TESTS; do off+=" -DLLAMA_BUILD_$part=OFF"; done
  if [ "$amx" = 0 ] && [ "$(uname -m)" = x86_64 ]; then
    for language in C CXX; do off+=" -DCMAKE_${language}_FLAGS='-mno-amx-tile -mno-amx-int8 -mno-amx-bf16'"; done
  fi
  # below $work: whatever ends the compilation, the next one clears away what it has left
  mkdir -p "$work/tmp"
  CMAKE_ARGS="$off ${CMAKE_ARGS:-}" TMPDIR=$work/tmp pip wheel -v -c "$constraints" --no-deps -w "$work" llama-cpp-python
}

make_wheel() {
  wheel >/dev/null && wheel_fits && return
  rm -rf "$work"
  mkdir -p "$work"
  take_ready_wheel && return
  for _ in 1 2; do
    if [ "$(pip cache list --format=abspath llama_cpp_python | wc -l)" -eq 0 ]; then
      note "compiling llama.cpp: about 3 minutes on 2 cores, once; pip keeps the result for the next time"
    fi
    compile || die "llama.cpp could not be compiled: check the network and pip's index, then run this again (details: $LOG)"
    rm -rf "$work/tmp"
    wheel_fits && return
    info=$(library_info "$work/unpacked") || die "llama-cpp-python does not run here: see the end of $LOG"
    # what pip had kept was compiled with other flags than those above, or for another processor
    rm -f "$work"/*.whl
    pip cache remove llama_cpp_python || true
  done
  [ "$amx" = 0 ] || die "llama.cpp was compiled without AMX: take a compiler that has it (gcc 11 or newer), or LLAMA_AMX=0"
  is_wanted "$info" || die "llama.cpp was compiled with AMX all the same: look at CMAKE_ARGS, or keep it by LLAMA_AMX=1 where you know that it works"
  die "llama.cpp was compiled for another processor than this one: look at CMAKE_ARGS ($info)"
}

install() {
  fits && return
  make_wheel
  pip install -c "$constraints" --force-reinstall --no-deps "$(wheel)" &&
    pip install -c "$constraints" llama-cpp-python ||
    die "pip could not install llama-cpp-python: check the network and pip's index, then run this again (details: $LOG)"
  fits || die "llama-cpp-python does not run here: see the end of $LOG"
  rm -rf "$work"
}

case ${1:-} in
  wheel) make_wheel ;;
  install) install ;;
  fits) fits ;;
  *) die "usage: llama.sh wheel|install|fits" ;;
esac
