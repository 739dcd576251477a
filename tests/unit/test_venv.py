"""mk/venv.sh: with which flags llama.cpp is compiled, and when again. pip and the environment's Python are doubles."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

#: what pip has compiled it gives again from its cache, whatever the flags; `installed` tells what it was compiled with
PIP = """#!/bin/bash
here=$(dirname "$0")
case "$*" in
  "cache list"*) [ ! -e "$here/cached" ] || echo wheel ;;
  "cache remove"*) rm -f "$here/cached" ;;
  *--force-reinstall*)
    if [ ! -e "$here/cached" ]; then
      echo "compiled $CMAKE_ARGS" >>"$here/log"
      case "$CMAKE_ARGS" in
        *-mamx*) echo AMX_INT8 ;;
        *-mno-amx*) echo AVX2 ;;
        *) cat "$here/native" ;;
      esac >"$here/cached"
    fi
    cp "$here/cached" "$here/installed" ;;
esac
"""
PYTHON = """#!/bin/bash
case "$*" in *llama_cpp*) exec cat "$(dirname "$0")/installed" ;; esac
"""


@dataclass
class Checkout:
    root: Path

    def setup(self, **environment: str) -> tuple[int, str]:
        done = subprocess.run(
            ["bash", str(self.root / "mk" / "venv.sh")],
            env={"PATH": os.environ["PATH"], "CMAKE_ARGS": "", **environment},
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


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    made = Checkout(tmp_path)
    made.bin.mkdir(parents=True)
    for name in ("mk/venv.sh", "mk/lib.sh", "mk/constraints.txt", "pyproject.toml", "plpy/ml_rag/__init__.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    # as on a machine that has AMX and python3-venv, whatever this one has
    script = tmp_path / "mk" / "venv.sh"
    (tmp_path / "cpuinfo").write_text("flags : avx2 amx_tile amx_int8\n")
    text = script.read_text()
    for ours, doubles in {
        "/proc/cpuinfo": str(tmp_path / "cpuinfo"),
        "import sys, ensurepip, venv": "import sys",
    }.items():
        assert ours in text
        text = text.replace(ours, doubles)
    script.write_text(text)
    (made.bin / "native").write_text("AMX_INT8\n")
    for name, text in {"pip": PIP, "python": PYTHON}.items():
        (made.bin / name).write_text(text)
        (made.bin / name).chmod(0o755)
    return made


x86_64 = pytest.mark.skipif(platform.machine() != "x86_64", reason="AMX is of x86-64")


@x86_64
def test_amx_is_left_out_and_a_second_run_compiles_nothing(checkout: Checkout) -> None:
    assert checkout.setup()[0] == 0
    assert checkout.installed == "AVX2"
    assert checkout.setup()[0] == 0
    assert len(checkout.compilations) == 1


@x86_64
def test_an_installation_with_amx_is_mended_past_pips_cache(checkout: Checkout) -> None:
    (checkout.bin / "cached").write_text("AMX_INT8\n")
    (checkout.bin / "installed").write_text("AMX_INT8\n")
    assert checkout.setup()[0] == 0
    assert checkout.installed == "AVX2"


def test_who_wants_amx_gets_and_keeps_it(checkout: Checkout) -> None:
    assert checkout.setup(LLAMA_AMX="0")[0] == 0
    assert checkout.setup(LLAMA_AMX="1")[0] == 0
    assert checkout.installed == "AMX_INT8"
    assert "amx" not in checkout.compilations[-1]
    count = len(checkout.compilations)
    assert checkout.setup()[0] == 0  # nothing has to be said again
    assert (checkout.installed, len(checkout.compilations)) == ("AMX_INT8", count)


@x86_64
def test_amx_is_given_up_again(checkout: Checkout) -> None:
    assert checkout.setup(LLAMA_AMX="1")[0] == 0
    assert checkout.setup(LLAMA_AMX="0")[0] == 0
    assert checkout.installed == "AVX2"
    assert checkout.setup()[0] == 0
    assert checkout.installed == "AVX2"


def test_one_compiled_by_hand_is_kept_where_amx_is_wanted(checkout: Checkout) -> None:
    (checkout.bin / "installed").write_text("AMX_INT8\n")
    assert checkout.setup(LLAMA_AMX="1")[0] == 0
    assert checkout.compilations == []


def test_flags_of_ones_own_that_bring_amx_are_told_what_to_do(checkout: Checkout) -> None:
    status, told = checkout.setup(CMAKE_ARGS="-DCMAKE_C_FLAGS=-mamx-tile")
    assert status == 3
    assert "LLAMA_AMX=1" in told
    assert checkout.setup(CMAKE_ARGS="-DCMAKE_C_FLAGS=-mamx-tile", LLAMA_AMX="1")[0] == 0


def test_a_processor_without_amx_has_nothing_to_compile_again(checkout: Checkout) -> None:
    (checkout.root / "cpuinfo").write_text("flags : avx2\n")
    (checkout.bin / "installed").write_text("AVX2\n")
    assert checkout.setup(LLAMA_AMX="1")[0] == 0
    assert checkout.compilations == []


def test_a_compiler_without_amx_is_told(checkout: Checkout) -> None:
    (checkout.bin / "native").write_text("AVX2\n")
    status, told = checkout.setup(LLAMA_AMX="1")
    assert status == 3
    assert "LLAMA_AMX=0" in told


def test_another_value_is_refused(checkout: Checkout) -> None:
    status, told = checkout.setup(LLAMA_AMX="yes")
    assert status == 3
    assert "LLAMA_AMX is yes" in told
