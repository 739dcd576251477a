"""A generation model in a process of its own, so that whatever ends its native code ends no more than that process.

The next call starts another. What the process has allocated is given back when the model is unloaded.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Generator, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ml_rag.abc import Cancelled, Delta, Sampling
from ml_rag.errors import EngineFailed, InvalidRequest, MlRagError, ModelUnavailable, from_json
from ml_rag.ingest.sandbox_worker import receive, send
from ml_rag.server.cancellation import ClientGone
from ml_rag.server.engines.time_limit import GRAMMAR_SECONDS

if TYPE_CHECKING:
    from ml_rag.catalogue import ModelEntry

log = logging.getLogger("ml_rag.server")

#: milliseconds between two looks at ``cancelled`` while nothing comes
CANCEL_POLL_MS = 20
#: how long a cancelled call may take to end before its process is ended
CANCEL_SECONDS = 2.0
#: how long a process may take to end once its socket is closed
CLOSE_SECONDS = 1.0
#: most bytes of one message
_MESSAGE_BYTES = 64 * 1024 * 1024
# What of the server's environment the process sees: no keys of remote models.
_ENVIRONMENT = ("PATH", "HOME", "LANG", "TMPDIR", "LD_LIBRARY_PATH", "PYTHONDONTWRITEBYTECODE")
_ENVIRONMENT_PREFIXES = ("LC_", "OMP_", "GOMP_", "KMP_", "GGML_", "LLAMA_", "CUDA_", "NVIDIA_", "HIP_", "ROCR_", "VK_")


class _Lost(Exception):
    """The process is gone."""


class _Process:
    """One process and the socket to it."""

    def __init__(self) -> None:
        self.connection, theirs = socket.socketpair()
        try:
            with theirs:
                self.process = subprocess.Popen(  # noqa: S603 - our own module
                    [sys.executable, "-P", "-m", "ml_rag.server.engines.worker", str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    # llama.cpp prints a grammar that it cannot read: a caller's words, of any length
                    stderr=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    env=_environment(),
                    start_new_session=True,
                )
        except BaseException:
            self.connection.close()
            raise
        self._poll = select.poll()
        self._poll.register(self.connection, select.POLLIN)
        self.ends_with_owner: Any = None

    def tell(self, message: dict[str, Any]) -> None:
        """Send a message. Raises ``_Lost``."""
        try:
            send(self.connection, json.dumps(message).encode())
        except OSError as error:
            raise _Lost from error

    def has_message(self, milliseconds: int) -> bool:
        """Whether a message, or the end, has come within that time."""
        return bool(self._poll.poll(milliseconds))

    def message(self) -> dict[str, Any]:
        """The next message, waited for. Raises ``_Lost``."""
        try:
            head = receive(self.connection, 8)
            length = -1 if head is None else int.from_bytes(head, "big")
            body = receive(self.connection, length) if 0 <= length <= _MESSAGE_BYTES else None
        except OSError as error:
            raise _Lost from error
        if body is None:
            raise _Lost
        message: dict[str, Any] = json.loads(body)
        return message

    def end(self, seconds: float = 0.0) -> int:
        """End it, by force after so many seconds. Its exit status, minus the signal that ended it."""
        self.connection.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.process.wait(seconds)
        self.process.kill()
        return self.process.wait()


class EngineProcess:
    """Protocol ``GenerateEngine``. Its methods are called from one thread at a time.

    Args:
        module: where ``load(entry, models_dir)`` is.

    Raises:
        ModelUnavailable: the model cannot be loaded, or ends its process.
        QueueFull: not enough memory.
    """

    max_tokens: int
    brief: bool

    def __init__(self, entry: ModelEntry, models_dir: Path, module: str) -> None:
        self._start_message = {
            "entry": entry.model_dump(mode="json"),
            "models_dir": str(models_dir),
            "module": module,
        }
        self._model_id = entry.id
        self._number = 0
        self._process: _Process | None = None
        self._started()

    @property
    def pid(self) -> int | None:
        """None while there is no process: it has ended and was not needed since."""
        process = self._process
        return None if process is None or process.process.poll() is not None else process.process.pid

    def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None:
            process.ends_with_owner.detach()
            process.end(CLOSE_SECONDS)

    def count_tokens(self, messages: Sequence[dict[str, str]], cancelled: Cancelled | None = None) -> int:
        """Tokens of the messages in the model's chat template, generation prompt included.

        Raises:
            ClientGone: ``cancelled()`` became true.
            EngineFailed: the process ended.
        """
        request = self._request("count_tokens", messages)
        answers = list(self._ask(request, cancelled or _never))
        if not answers:
            raise ClientGone
        return int(answers[0]["tokens"])

    def generate(self, messages: Sequence[dict[str, str]], sampling: Sampling, cancelled: Cancelled) -> Iterator[Delta]:
        """The answer, piece by piece; it ends within a token once ``cancelled()`` is true, or the process is ended.

        Raises:
            EngineFailed: the process ended.
            MlRagError: what the engine raised.
        """
        request = {**self._request("generate", messages), "sampling": asdict(sampling)}
        with contextlib.closing(self._ask(request, cancelled)) as answers:
            for answer in answers:
                yield Delta(*answer["delta"])

    def _ask(self, request: dict[str, Any], cancelled: Cancelled) -> Generator[dict[str, Any]]:
        """The answers to a request up to their end; fewer once ``cancelled()`` is true."""
        process = self._started()
        at_work = True
        try:
            process.tell(request)
            while True:
                while not process.has_message(CANCEL_POLL_MS):
                    if cancelled():
                        return
                answer = process.message()
                if "error" in answer or "end" in answer:
                    at_work = False
                    if "error" in answer:
                        raise from_json(answer, EngineFailed.status)
                    return
                if cancelled():
                    return
                yield answer
        except _Lost:
            at_work = False
            raise self._lost() from None
        finally:
            if at_work:
                self._cancel(process)

    def _request(self, what: str, messages: Sequence[dict[str, str]]) -> dict[str, Any]:
        self._number += 1
        return {"do": what, "number": self._number, "messages": list(messages)}

    def _started(self) -> _Process:
        """The process; a new one where there is none, or it has ended meanwhile."""
        if self._process is not None and self._process.process.poll() is None:
            return self._process
        if self._process is not None:
            log.warning("%s", self._lost().message)
        process = self._process = _Process()
        process.ends_with_owner = weakref.finalize(self, process.end)
        try:
            process.tell(self._start_message)
            ready = process.message()
            if "unforeseen" in ready:
                log.error("loading model %s failed: %s", self._model_id, ready["unforeseen"])
                raise ModelUnavailable(f"model {self._model_id} cannot be loaded", detail=ready["unforeseen"])
            if "error" in ready:
                raise from_json(ready, EngineFailed.status)
        except _Lost:
            raise self._lost(loading=True) from None
        except BaseException:
            self.close()
            raise
        self.max_tokens, self.brief = ready["max_tokens"], ready["brief"]
        return process

    def _cancel(self, process: _Process) -> None:
        """Have the process end what it does, or end the process."""
        deadline = time.monotonic() + CANCEL_SECONDS
        try:
            process.tell({"cancel": self._number})
            while (left := deadline - time.monotonic()) > 0 and process.has_message(int(1000 * left) + 1):
                answer = process.message()
                if "end" in answer or "error" in answer:
                    return
        except _Lost:
            pass
        else:
            log.warning("model %s did not stop when its call was cancelled: its process is ended", self._model_id)
        self._process = None
        process.ends_with_owner.detach()
        process.end()

    def _lost(self, *, loading: bool = False) -> MlRagError:
        """The error of the call that the process did not survive."""
        process, self._process = self._process, None
        assert process is not None
        process.ends_with_owner.detach()
        # its end of the socket is closed a little before it can be waited for
        status = process.end(CLOSE_SECONDS)
        cause = f"signal {-status} ({signal.Signals(-status).name})" if status < 0 else f"exit status {status}"
        log.warning("the process of model %s ended: %s", self._model_id, cause)
        if status == -signal.SIGPROF:
            return InvalidRequest(
                "json_schema takes too long",
                detail="making its grammar, or choosing a token by it, took more than "
                f"{GRAMMAR_SECONDS:g} s of processor time",
                hint="Use a simpler schema.",
            )
        if status == -signal.SIGKILL:
            return EngineFailed(
                f"the process of model {self._model_id} was killed",
                detail="somebody sent it signal 9 (SIGKILL), as the kernel does where memory runs out",
                hint="Call again; give the model server's machine or container more memory.",
            )
        if loading:
            return ModelUnavailable(
                f"model {self._model_id} cannot be loaded", detail=f"its process ended with {cause}"
            )
        return EngineFailed(
            f"the process of model {self._model_id} ended in mid-call",
            detail=f"it ended with {cause}",
            hint="The next call starts another. Where it happens again, leave out options until it does not.",
        )


def _never() -> bool:
    return False


def _environment() -> dict[str, str]:
    found = {
        name: value
        for name, value in os.environ.items()
        if name in _ENVIRONMENT or name.startswith(_ENVIRONMENT_PREFIXES)
    }
    root = str(Path(__file__).resolve().parents[3])
    found["PYTHONPATH"] = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    return found
