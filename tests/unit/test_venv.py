"""mk/venv.sh and mk/llama.sh: with which flags llama.cpp is compiled, when again, when a ready wheel is taken.

pip, curl and the environment's Python are doubles; a wheel is a file that says what it was compiled with.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

SCRIPTS = ("mk/venv.sh", "mk/lib.sh", "mk/llama.sh", "mk/llama.cmake")

#: what pip has compiled it gives again from its cache, whatever the flags; `installed` tells what it was compiled with
PIP = """#!/bin/bash
here=$(dirname "$0")
folder() { while [ "$1" != "$option" ]; do shift; done; echo "$2/llama_cpp_python-$version-py3-none-any.whl"; }
version=$(sed -n 's/^llama_cpp_python==//p' "$here/../../mk/constraints.txt")
case "$*" in
  "cache list"*) [ ! -e "$here/cached" ] || echo wheel ;;
  "cache remove"*) rm -f "$here/cached" ;;
  "download "*)
    echo "asked" >>"$here/index.log"
    option=-d
    cp "$here/ready" "$(folder "$@")" ;;
  "wheel "*)
    if [ ! -e "$here/cached" ]; then
      echo "compiled $CMAKE_ARGS $*" >>"$here/log"
      case "$CMAKE_ARGS" in
        *-mamx*) echo "AVX2 = 1 | AMX_INT8 = 1" ;;
        *-mno-amx*) echo "AVX2 = 1" ;;
        *) cat "$here/native" ;;
      esac >"$here/cached"
    fi
    option=-w
    cp "$here/cached" "$(folder "$@")" ;;
  *--force-reinstall*.whl*)
    for word in "$@"; do case $word in *.whl) cp "$word" "$here/installed" ;; esac; done ;;
esac
echo "$*" >>"$here/pip.log"
"""
PYTHON = """#!/bin/bash
case "$*" in
  *"import llama_cpp"*) exec cat "$(dirname "$0")/installed" ;;
  "-m zipfile -e "*) mkdir -p "$5" && exec cp "$4" "$5/info" ;;
  *libllama.so) exec cat "${2%/llama_cpp/lib/libllama.so}/info" ;;
  *pyproject.toml) exec REAL_PYTHON "$@" ;;
esac
"""
CURL = """#!/bin/bash
case "$*" in *llama-cpp-python*) [ -e "$(dirname "$0")/ready" ] ;; *) exit 7 ;; esac
"""


@dataclass
class Checkout:
    root: Path

    def setup(self, *arguments: str, **environment: str) -> tuple[int, str]:
        done = subprocess.run(
            ["bash", str(self.root / "mk" / "venv.sh"), *arguments],
            env={"PATH": f"{self.bin}:{os.environ['PATH']}", "CMAKE_ARGS": "", **environment},
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        return done.returncode, done.stderr

    @property
    def bin(self) -> Path:
        return self.root / ".venv" / "bin"

    @property
    def installed(self) -> str:
        return (self.bin / "installed").read_text().strip()

    @property
    def compilations(self) -> list[str]:
        log = self.bin / "log"
        return log.read_text().splitlines() if log.exists() else []

    @property
    def requirements(self) -> list[str]:
        return (self.root / ".build" / "requirements.txt").read_text().splitlines()

    def pip_calls(self, word: str) -> list[str]:
        return [line for line in (self.bin / "pip.log").read_text().splitlines() if word in line.split()]


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    made = Checkout(tmp_path)
    made.bin.mkdir(parents=True)
    for name in (*SCRIPTS, "mk/constraints.txt", "pyproject.toml", "plpy/ml_rag/__init__.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "mk" / "apt.sh").write_text("exit 0\n")
    # as on a machine that has AMX and python3-venv, whatever this one has
    (tmp_path / "cpuinfo").write_text("flags : avx2 amx_tile amx_int8\n")
    for name, ours, doubles in (
        ("venv.sh", "import sys, ensurepip, venv", "import sys"),
        ("llama.sh", "/proc/cpuinfo", str(tmp_path / "cpuinfo")),
    ):
        script = tmp_path / "mk" / name
        text = script.read_text()
        assert ours in text
        script.write_text(text.replace(ours, doubles))
    (made.bin / "native").write_text("AVX2 = 1 | AMX_INT8 = 1\n")
    doubles = {"pip": PIP, "python": PYTHON.replace("REAL_PYTHON", sys.executable), "curl": CURL}
    for name, text in doubles.items():
        (made.bin / name).write_text(text)
        (made.bin / name).chmod(0o755)
    return made


x86_64 = pytest.mark.skipif(platform.machine() != "x86_64", reason="AMX is of x86-64")


@x86_64
def test_amx_is_left_out_and_a_second_run_compiles_nothing(checkout: Checkout) -> None:
    assert checkout.setup()[0] == 0
    assert checkout.installed == "AVX2 = 1"
    assert checkout.setup()[0] == 0
    assert len(checkout.compilations) == 1


@x86_64
def test_an_installation_with_amx_is_mended_past_pips_cache(checkout: Checkout) -> None:
    (checkout.bin / "cached").write_text("AVX2 = 1 | AMX_INT8 = 1\n")
    (checkout.bin / "installed").write_text("AVX2 = 1 | AMX_INT8 = 1\n")
    assert checkout.setup()[0] == 0
    assert checkout.installed == "AVX2 = 1"


def test_who_wants_amx_gets_and_keeps_it(checkout: Checkout) -> None:
    assert checkout.setup(LLAMA_AMX="0")[0] == 0
    assert checkout.setup(LLAMA_AMX="1")[0] == 0
    assert checkout.installed == "AVX2 = 1 | AMX_INT8 = 1"
    assert "-mno-amx" not in checkout.compilations[-1]
    count = len(checkout.compilations)
    assert checkout.setup()[0] == 0  # nothing has to be said again
    assert (checkout.installed, len(checkout.compilations)) == ("AVX2 = 1 | AMX_INT8 = 1", count)


@x86_64
def test_amx_is_given_up_again(checkout: Checkout) -> None:
    assert checkout.setup(LLAMA_AMX="1")[0] == 0
    assert checkout.setup(LLAMA_AMX="0")[0] == 0
    assert checkout.installed == "AVX2 = 1"
    assert checkout.setup()[0] == 0
    assert checkout.installed == "AVX2 = 1"


def test_one_compiled_by_hand_is_kept_where_amx_is_wanted(checkout: Checkout) -> None:
    (checkout.bin / "installed").write_text("AVX2 = 1 | AMX_INT8 = 1\n")
    assert checkout.setup(LLAMA_AMX="1")[0] == 0
    assert checkout.compilations == []


def test_flags_of_ones_own_that_bring_amx_are_told_what_to_do(checkout: Checkout) -> None:
    status, told = checkout.setup(CMAKE_ARGS="-DCMAKE_C_FLAGS=-mamx-tile")
    assert status == 3
    assert "LLAMA_AMX=1" in told
    assert checkout.setup(CMAKE_ARGS="-DCMAKE_C_FLAGS=-mamx-tile", LLAMA_AMX="1")[0] == 0


def test_a_processor_without_amx_has_nothing_to_compile_again(checkout: Checkout) -> None:
    (checkout.root / "cpuinfo").write_text("flags : avx2\n")
    (checkout.bin / "installed").write_text("AVX2 = 1\n")
    assert checkout.setup(LLAMA_AMX="1")[0] == 0
    assert checkout.compilations == []


def test_a_compiler_without_amx_is_told(checkout: Checkout) -> None:
    (checkout.bin / "native").write_text("AVX2 = 1\n")
    status, told = checkout.setup(LLAMA_AMX="1")
    assert status == 3
    assert "LLAMA_AMX=0" in told


def test_another_value_is_refused(checkout: Checkout) -> None:
    status, told = checkout.setup(LLAMA_AMX="yes")
    assert status == 3
    assert "LLAMA_AMX is yes" in told


def test_the_library_alone_is_compiled(checkout: Checkout) -> None:
    assert checkout.setup()[0] == 0
    assert f"-DCMAKE_PROJECT_llama.cpp_INCLUDE='{checkout.root}/mk/llama.cmake'" in checkout.compilations[0]


def test_one_that_this_processor_lacks_instructions_for_is_compiled_again(checkout: Checkout) -> None:
    (checkout.bin / "cached").write_text("AVX2 = 1 | AVX512 = 1 | OPENMP = 1\n")
    assert checkout.setup()[0] == 0
    assert checkout.installed == "AVX2 = 1"


@x86_64
def test_a_ready_wheel_that_runs_here_is_taken(checkout: Checkout) -> None:
    (checkout.bin / "ready").write_text("AVX2 = 1 | OPENMP = 1\n")
    assert checkout.setup()[0] == 0
    assert checkout.installed == "AVX2 = 1 | OPENMP = 1"
    assert checkout.compilations == []


@pytest.mark.parametrize("made_with", ["AVX2 = 1 | FMA = 1", "AVX2 = 1 | AMX_INT8 = 1"])
def test_a_ready_wheel_that_does_not_fit_is_compiled_here(checkout: Checkout, made_with: str) -> None:
    (checkout.bin / "ready").write_text(made_with)
    assert checkout.setup()[0] == 0
    assert checkout.installed == ("AVX2 = 1" if platform.machine() == "x86_64" else "AVX2 = 1 | AMX_INT8 = 1")
    assert len(checkout.compilations) == 1


@pytest.mark.parametrize("wish", [{"CMAKE_ARGS": "-DGGML_BLAS=ON"}, {"LLAMA_AMX": "1"}])
def test_no_ready_wheel_is_asked_for_by_whoever_wants_their_own_flags(checkout: Checkout, wish: dict[str, str]) -> None:
    (checkout.bin / "ready").write_text("AVX2 = 1\n")
    assert checkout.setup(**wish)[0] == 0
    assert not (checkout.bin / "index.log").exists()
    assert len(checkout.compilations) == 1


def test_retrieval_has_all_but_llama_cpp(checkout: Checkout) -> None:
    assert checkout.setup("retrieval")[0] == 0
    assert not (checkout.bin / "installed").exists()
    names = {line.partition(">")[0] for line in checkout.requirements}
    assert {"psycopg[binary]", "onnxruntime", "safetensors"} <= names
    assert not names & {"llama-cpp-python", "torch", "sentence-transformers"}
    assert checkout.setup()[0] == 0
    assert checkout.installed == "AVX2 = 1"
    assert len(checkout.pip_calls("-r")) == 1  # what retrieval installed is not installed again


def test_the_server_is_started_anew_once_llama_cpp_is_there(checkout: Checkout) -> None:
    stamp = checkout.root / ".venv" / "base.sha256"
    assert checkout.setup("retrieval")[0] == 0
    before = stamp.read_text()
    assert checkout.setup()[0] == 0
    assert stamp.read_text() != before
    whole = stamp.read_text()
    assert checkout.setup("retrieval")[0] == 0
    assert stamp.read_text() == whole


def test_a_wheel_that_was_made_ahead_is_installed(checkout: Checkout) -> None:
    made = subprocess.run(
        ["bash", str(checkout.root / "mk" / "llama.sh"), "wheel"],
        env={"PATH": f"{checkout.bin}:{os.environ['PATH']}"},
        check=False,
        timeout=60,
    )
    assert made.returncode == 0
    assert len(checkout.pip_calls("wheel")) == 1
    assert checkout.setup()[0] == 0
    assert len(checkout.pip_calls("wheel")) == 1
    assert not (checkout.root / ".build" / "llama").exists()
