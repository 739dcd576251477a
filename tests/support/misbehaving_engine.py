"""A generation engine that does what its last message says, for tests of the process that it runs in."""

from __future__ import annotations

import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ml_rag.abc import Cancelled, Delta, Sampling
from ml_rag.errors import InvalidRequest, ModelUnavailable
from ml_rag.server.engines import time_limit

STEP_SECONDS = 0.3


def load(entry: Any, models_dir: Path) -> MisbehavingEngine:
    time_limit.end_long_steps(STEP_SECONDS)
    how = entry.description
    if how.startswith("SIG"):
        os.kill(os.getpid(), signal.Signals[how])
    if how == "unavailable":
        raise ModelUnavailable("the model is not available", detail="because")
    if how == "broken":
        raise ValueError("it is broken")
    if how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    return MisbehavingEngine()


class MisbehavingEngine:
    max_tokens = 65_432
    brief = True

    def close(self) -> None:
        pass

    def count_tokens(self, messages: Sequence[dict[str, str]], cancelled: Cancelled | None = None) -> int:
        if messages[-1]["content"] == "hang":
            time.sleep(60)
        return len(messages[-1]["content"].split())

    def generate(self, messages: Sequence[dict[str, str]], sampling: Sampling, cancelled: Cancelled) -> Iterator[Delta]:
        what = messages[-1]["content"]
        yield Delta("begun")
        if what.startswith("SIG"):
            os.kill(os.getpid(), signal.Signals[what])
        elif what == "exit":
            os._exit(3)
        elif what == "hang":
            time.sleep(60)
        elif what == "wait":
            while not cancelled():
                time.sleep(0.001)
            return
        elif what == "memory":
            bytearray(4 * 1024**3)
        elif what == "long step":
            with time_limit.step():
                while True:
                    pass
        elif what == "many steps":
            for _ in range(6):
                with time_limit.step():
                    _work(STEP_SECONDS / 4)
            _work(STEP_SECONDS * 1.5)  # none of a caller's choosing
        elif what == "refuse":
            raise InvalidRequest("refused", detail="the detail", hint="The hint.")
        elif what.startswith("say "):
            _say(what.removeprefix("say ").encode("latin-1"))
            time.sleep(60)
        elif what == "fail":
            raise RuntimeError("a text of the request")
        elif what == "environment":
            yield Delta(" ".join(os.environ))
        elif what == "limits":
            adjustment = Path("/proc/self/oom_score_adj").read_text().strip()
            yield Delta(f"{resource.getrlimit(resource.RLIMIT_CORE)[0]} {adjustment}")
        elif what == "print":
            os.write(1, b"to stdout\n")
            os.write(2, b"to stderr\n")
        else:
            yield from (Delta(word) for word in what.split())
        yield Delta("\ud800é", "stop", 5, len(what))


def _say(data: bytes) -> None:
    """To the server, in the place of a message."""
    with socket.socket(fileno=os.dup(int(sys.argv[1]))) as connection:
        connection.sendall(data)


def _work(seconds: float) -> None:
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass
