"""Which models a machine can run: the largest of each task that fits its memory, cores and GPU, and the languages."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass

from ml_rag.abc import Task
from ml_rag.server.catalogue import ModelEntry
from ml_rag.server.memory import default_limit

#: megabytes of a model for each core, so that a question takes no more than a fraction of a second to embed or a few
#: to rerank, and an answer less than a minute; without a GPU
CORE_MEGABYTES: dict[Task, int] = {"embed": 60, "rerank": 60, "generate": 600}
#: share of the memory that the model of one task may take, its context and its buffers beside it
MEMORY_SHARE = 1 / 3
GPU_SHARE = 0.7
TASKS: tuple[Task, ...] = ("embed", "rerank", "generate")


@dataclass(frozen=True, slots=True)
class Machine:
    """What a machine has; memory in megabytes."""

    memory: int
    cores: int
    gpu: int = 0


def this_machine() -> Machine:
    """What the model server may use of this machine."""
    return Machine(default_limit() // 10**6, len(os.sched_getaffinity(0)), _gpu_megabytes())


def _gpu_megabytes() -> int:
    """Memory of the largest NVIDIA GPU; 0 where there is none."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return 0
    asked = [command, "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(asked, capture_output=True, text=True, timeout=10, check=True)  # noqa: S603
        return max((int(line) for line in done.stdout.split()), default=0)
    except (OSError, ValueError, subprocess.SubprocessError):
        return 0


def speaks(entry: ModelEntry, languages: Iterable[str]) -> bool:
    """Whether the model is for texts in those languages; codes such as ``de`` or ``zh-TW``."""
    return entry.languages == "many" or all(code.lower().split("-")[0] in ("en", "") for code in languages)


def _fitting(entries: Iterable[ModelEntry], languages: Iterable[str]) -> list[ModelEntry]:
    spoken = list(languages)
    return [
        entry
        for entry in entries
        if entry.megabytes is not None and speaks(entry, spoken) and not entry.is_noncommercial and not entry.thinks
    ]


def _most_megabytes(entry: ModelEntry, machine: Machine) -> float:
    """How large a model of this task and engine may be."""
    most = min(machine.memory * MEMORY_SHARE, CORE_MEGABYTES[entry.task] * machine.cores)
    # torch is installed for CPUs; llama.cpp may be built for a GPU
    return max(most, machine.gpu * GPU_SHARE if entry.engine == "llama-cpp" else 0)


def why_none(entries: Iterable[ModelEntry], machine: Machine, languages: Iterable[str], task: Task) -> str:
    """Why no model of a task fits."""
    known = sorted((e for e in _fitting(entries, languages) if e.task == task), key=lambda e: e.megabytes or 0)
    if not known:
        return "none of the catalogue is for these languages"
    smallest = known[0]
    most = int(_most_megabytes(smallest, machine))
    return f"none fits: the smallest for these languages, {smallest.id}, has {smallest.megabytes} MB, and {most} MB fit"


def recommend(entries: Iterable[ModelEntry], machine: Machine, languages: Iterable[str]) -> list[ModelEntry]:
    """For each task the largest model of known size that fits; a task that none fits is left out.

    Not one that may not be used commercially, nor one that thinks, for which ``max_tokens`` must be raised.
    """
    fitting = _fitting(entries, languages)
    found = []
    for task in TASKS:
        chosen = [
            entry
            for entry in fitting
            if entry.task == task and (entry.megabytes or 0) <= _most_megabytes(entry, machine)
        ]
        found += sorted(chosen, key=lambda entry: entry.megabytes or 0)[-1:]
    return found
