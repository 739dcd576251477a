#!/usr/bin/env bash
# venv.sh [pip|retrieval] [group…]: the model server's virtual environment, .venv, in the versions mk/constraints.txt was
# tested with. `pip`: only made, with a current pip. `retrieval`: all but llama.cpp, which takes minutes to compile.
# Each group of pyproject.toml's dependency-groups (test, check), and the extra `torch`, is added where it is named.
source "$(dirname "$0")/lib.sh"
here=$(dirname "$0")

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
  "$VENV/bin/python" -c "import torch, sys; sys.exit(torch.__version__.split('+')[0] != '$torch')" 2>/dev/null && return
  local index=https://download.pytorch.org/whl/cpu extra=()
  if curl -fsS -m 3 -o /dev/null "$index/torch/" 2>/dev/null; then extra=(--extra-index-url "$index"); fi
  pip_install "${extra[@]}" "torch==$torch+cpu" && return
  note "no CPU build of torch $torch is offered here: taking the plain one, which is large"
  pip_install "torch==$torch" || or_explain torch
}

# What the package requires with an extra, a line each.
requirements() {
  "$VENV/bin/python" - "$1" "$ROOT/pyproject.toml" <<'PYTHON'
import sys, tomllib
project = tomllib.load(open(sys.argv[2], "rb"))["project"]
print(*project["dependencies"], *project["optional-dependencies"][sys.argv[1]], sep="\n")
PYTHON
}

make_environment() {
  [ -x "$VENV/bin/pip" ] || "$python" -m venv "$VENV" || die "python3 -m venv failed: install python3-venv, then run this again"
  pip_install --upgrade pip 'setuptools>=77' || or_explain pip
}

# install_packages [options of pip install]
install_packages() {
  requirements server >"$ROOT/.build/requirements.txt"
  pip_install "$@" -r "$ROOT/.build/requirements.txt" || or_explain "the packages of pyproject.toml"
  # its code is linked to this checkout
  pip_install --no-deps --no-build-isolation -e "$ROOT" || or_explain "ml_rag itself"
}

# What pip does at each installation; it takes longer than the installation itself, so `retrieval` leaves it for later.
compile_packages() { nice -n 19 "$VENV/bin/python" -m compileall -q -j "$(nproc)" "$VENV"/lib/python3*/site-packages || true; }

# Stamps hold what they were made from; the package itself is linked to this checkout, so its code is always current.
# A change of LLAMA_AMX is one of the environment; which of its values was named last is kept.
amx=${LLAMA_AMX:-$(cat "$VENV/llama_amx" 2>/dev/null || echo 0)}
fingerprint() {
  cat "$ROOT/pyproject.toml" "$constraints" "$0" "$here"/llama.{sh,cmake} <("$1" --version) <(echo "$VERSION $1 $amx") | sha256sum
}

python=$(find_python)
current=$(fingerprint "$python")
stamp=$(cat "$VENV/base.sha256" 2>/dev/null || true)
case ${1:-} in
  pip)
    [ -n "$stamp" ] || make_environment
    exit
    ;;
  retrieval)
    shift
    case $stamp in "$current" | "retrieval $current") ;; *)
      make_environment
      install_packages --no-compile
      stamp="retrieval $current"
      echo "$stamp" >"$VENV/base.sha256"
      ;;
    esac
    ;;
  *)
    if [ "$stamp" != "$current" ]; then
      if [ "$stamp" = "retrieval $current" ]; then
        compile_packages
      else
        make_environment
        install_packages
      fi
      bash "$here/apt.sh" compiler
      bash "$here/llama.sh" install
      echo "$amx" >"$VENV/llama_amx"
      echo "$current" >"$VENV/base.sha256"
    fi
    ;;
esac

for group in "$@"; do
  [ "$(cat "$VENV/$group.sha256" 2>/dev/null)" != "$current" ] || continue
  if [ "$group" = torch ]; then
    install_torch
    requirements torch >"$ROOT/.build/torch.txt"
    pip_install -r "$ROOT/.build/torch.txt" || or_explain "sentence-transformers"
  else
    (cd "$ROOT" && pip_install --group "$group") || or_explain "the group $group of pyproject.toml"
  fi
  echo "$current" >"$VENV/$group.sha256"
done
