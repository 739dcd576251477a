"""A model in a process of its own, so that whatever ends its native code ends no more than that process.

The next call starts another. What the process has allocated is given back when the model is unloaded.
"""

from __future__ import annotations

import base64
import contextlib
import json
import logging
import math
import os
import signal
import time
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ml_rag import priority
from ml_rag.abc import Cancelled, Delta, Sampling
from ml_rag.errors import EngineFailed, InvalidRequest, MlRagError, ModelUnavailable, from_json
from ml_rag.ingest.child import POLL_MS, Child, Lost, Useless, cause, inherited
from ml_rag.server.cancellation import ClientGone
from ml_rag.server.engines.time_limit import GRAMMAR_SECONDS

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ml_rag.server.catalogue import ModelEntry

log = logging.getLogger("ml_rag.server")

#: how long a cancelled call may take to end before its process is ended
CANCEL_SECONDS = 2.0
#: how long a process may take to end once its socket is closed
CLOSE_SECONDS = 1.0
#: how long a process that is asked something may use no processor time before it is ended
STALL_SECONDS = 30.0
#: bytes of messages for each token of the context; longer ones are not sent: llama.cpp takes about 100 bytes of memory
#: for each byte that it tokenizes, and cannot be stopped
BYTES_PER_TOKEN = 64
#: most bytes of one message
_MESSAGE_BYTES = 64 * 1024 * 1024
# What of the server's environment the process sees: no keys of remote models.
_ENVIRONMENT = ("PATH", "HOME", "LANG", "TMPDIR", "LD_LIBRARY_PATH", "PYTHONDONTWRITEBYTECODE", priority.VARIABLE)
_ENVIRONMENT_PREFIXES = ("LC_", "OMP_", "GOMP_", "KMP_", "GGML_", "LLAMA_", "CUDA_", "NVIDIA_", "HIP_", "ROCR_", "VK_")


#: in place of a tokenizer that the process was not asked for yet
_UNKNOWN = object()


class _GivenUp(Exception):
    """The caller does not wait for the answer any more."""


class _Process(Child):
    """One process, which may not stand still while it is asked something."""

    def __init__(self) -> None:
        environment = inherited(_ENVIRONMENT, _ENVIRONMENT_PREFIXES)
        super().__init__("ml_rag.server.engines.worker", environment=environment, most=_MESSAGE_BYTES)
        self.ends_with_owner: Any = None
        self._used = math.nan

    def ask(self, message: dict[str, Any], go_on: Callable[[], None]) -> None:
        """Send a message. Raises ``Lost``, ``Useless``, what ``go_on`` raises."""
        self.tell(json.dumps(message).encode(), go_on)

    def answer(self, go_on: Callable[[], None]) -> dict[str, Any]:
        """The next message. Raises the same."""
        try:
            message = json.loads(self.message(go_on))
        except (ValueError, RecursionError) as error:
            raise Useless("sent an unexpected reply", type(error).__name__) from error
        if not isinstance(message, dict):
            raise Useless("sent an unexpected reply", "a message that is not a JSON object")
        return message

    def _check_alive(self, waits: int) -> None:
        # by waits, not by the clock, which continues while the whole machine, or container, is made to stand still
        if waits * POLL_MS % (1000 * STALL_SECONDS) == 0:
            before, self._used = self._used if waits else math.nan, processor_seconds(self.process.pid)
            if self._used == before:
                raise Useless("stood still", f"it used no processor time for {STALL_SECONDS:g} s")


def processor_seconds(pid: int) -> float:
    """That a process has used; NaN where that is not known."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return math.nan


class EngineProcess:
    """Protocol ``GenerateEngine``, ``EmbedEngine`` or ``RerankEngine``, as the model's task says.

    Its methods are called from one thread at a time.

    Args:
        module: where ``load(entry, models_dir)`` is.

    Raises ``ModelUnavailable`` (the model cannot be loaded, or ends its process); ``QueueFull`` (not enough memory).
    """

    max_tokens: int
    brief: bool = False
    dimensions: int

    def __init__(self, entry: ModelEntry, models_dir: Path, module: str) -> None:
        self._start_message = {
            "entry": entry.model_dump(mode="json"),
            "models_dir": str(models_dir),
            "module": module,
        }
        self._model_id = entry.id
        self._number = 0
        self._tokenizer: Any = _UNKNOWN
        #: tokens of each text of the last ``embed``
        self.last_token_counts: list[int] = []
        self._process: _Process | None = None
        self._started()

    @property
    def pid(self) -> int | None:
        """None without a process: it has ended and was not needed since."""
        process = self._process
        return None if process is None or process.process.poll() is not None else process.process.pid

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._end(CLOSE_SECONDS)

    def _end(self, seconds: float = 0.0) -> int:
        """End the process, by force after so many seconds. Its exit status."""
        process, self._process = self._process, None
        assert process is not None
        process.ends_with_owner.detach()
        return process.end(seconds)

    def count_tokens(self, messages: Sequence[dict[str, str]], cancelled: Cancelled | None = None) -> int:
        """Tokens of the messages in the model's chat template, generation prompt included.

        Of messages that are far longer than the context a number that is larger than it, too.

        Raises ``ClientGone`` (``cancelled()`` became true); ``EngineFailed`` (the process ended).
        """
        if (size := _size(messages)) > BYTES_PER_TOKEN * self.max_tokens:
            return size // BYTES_PER_TOKEN + 1
        answer = self._one({"do": "count_tokens", "messages": list(messages)}, cancelled or (lambda: False))
        if answer is None:
            raise ClientGone
        return int(answer["tokens"])

    def generate(self, messages: Sequence[dict[str, str]], sampling: Sampling, cancelled: Cancelled) -> Iterator[Delta]:
        """The answer, piece by piece; it ends within a token once ``cancelled()`` is true, or the process is ended.

        Raises ``EngineFailed`` (the process ended); ``InvalidRequest`` (the messages are far longer than the
        context); ``MlRagError`` (what the engine raised).
        """
        if (size := _size(messages)) > (most := BYTES_PER_TOKEN * self.max_tokens):
            raise InvalidRequest(
                "the prompt does not fit the model's context",
                detail=f"The prompt has {size} bytes; the context has {self.max_tokens} tokens: {most} bytes.",
                hint="Ask a shorter question, or take a model with a larger context.",
            )
        request = {"do": "generate", "messages": list(messages), "sampling": asdict(sampling)}
        with contextlib.closing(self._ask(request, cancelled)) as answers:
            for answer in answers:
                yield Delta(*answer["delta"])

    def embed(self, texts: Sequence[str], cancelled: Cancelled) -> NDArray[np.float32]:
        """Embeddings, shape (len(texts), dimensions); zeros once ``cancelled()`` is true.

        Raises ``EngineFailed`` (the process ended); ``MlRagError`` (what the engine raised).
        """
        answer = self._numbers({"do": "embed", "texts": self._cut(texts)}, cancelled)
        if answer is None:
            return np.zeros((len(texts), self.dimensions), np.float32)
        vectors, self.last_token_counts = answer
        return vectors

    def rerank(self, query: str, texts: Sequence[str], cancelled: Cancelled) -> NDArray[np.float32]:
        """Relevance 0-1 of each text to the query; zeros once ``cancelled()`` is true. Raises as ``embed``."""
        request = {"do": "rerank", "query": self._cut([query])[0], "texts": self._cut(texts)}
        answer = self._numbers(request, cancelled)
        return np.zeros(len(texts), np.float32) if answer is None else answer[0]

    def tokenizer(self) -> Any:
        """As ``EmbedEngine`` has it; got from the process once. Raises as ``embed``."""
        if self._tokenizer is _UNKNOWN:
            answer = self._one({"do": "tokenizer"}, lambda: False)
            text: Any = answer["tokenizer"] if answer else None
            if text is not None:
                from tokenizers import Tokenizer

                text = Tokenizer.from_str(text)
            self._tokenizer = text
        return self._tokenizer

    def _cut(self, texts: Sequence[str]) -> list[str]:
        return [text[: BYTES_PER_TOKEN * self.max_tokens] for text in texts]

    def _numbers(self, request: dict[str, Any], cancelled: Cancelled) -> tuple[NDArray[np.float32], list[int]] | None:
        """What the process has computed, and the tokens of each text where it counts them; None: cancelled."""
        if (answer := self._one(request, cancelled)) is None:
            return None
        numbers = np.frombuffer(base64.b64decode(answer["numbers"]), "<f4").astype(np.float32)
        return numbers.reshape(answer["shape"]), answer["tokens"] or []

    def _one(self, request: dict[str, Any], cancelled: Cancelled) -> dict[str, Any] | None:
        """The answer to a request that has one; None: cancelled."""
        return next(iter(list(self._ask(request, cancelled))), None)

    def _ask(self, request: dict[str, Any], cancelled: Cancelled) -> Generator[dict[str, Any]]:
        """The answers to a request up to their end; fewer once ``cancelled()`` is true."""
        process = self._started()
        at_work = True
        self._number += 1

        def go_on() -> None:
            if cancelled():
                raise _GivenUp

        try:
            process.ask({**request, "number": self._number}, go_on)
            while True:
                answer = process.answer(go_on)
                if "error" in answer or "end" in answer:
                    at_work = False
                    if "error" in answer:
                        raise from_json(answer, EngineFailed.status)
                    return
                if cancelled():
                    return
                yield answer
        except _GivenUp:
            return
        except Lost:
            at_work = False
            raise self._lost() from None
        except Useless as useless:
            at_work = False
            raise self._useless(*useless.args) from None
        finally:
            if at_work:
                self._cancel(process)

    def _started(self) -> _Process:
        """The process; a new one where there is none, or it has ended meanwhile."""
        if self._process is not None and self._process.process.poll() is None:
            return self._process
        if self._process is not None:
            log.warning("%s", self._lost().message)
        process = self._process = _Process()
        process.ends_with_owner = weakref.finalize(self, process.end)
        try:
            # the caller that waits for this may go: the next one wants it, too
            process.ask(self._start_message, _nothing)
            ready = process.answer(_nothing)
            if "unforeseen" in ready:
                log.error("loading model %s failed: %s", self._model_id, ready["unforeseen"])
                raise ModelUnavailable(f"model {self._model_id} cannot be loaded", detail=ready["unforeseen"])
            if "error" in ready:
                raise from_json(ready, EngineFailed.status)
        except Lost:
            raise self._lost(loading=True) from None
        except Useless as useless:
            raise self._useless(*useless.args) from None
        except BaseException:
            self.close()
            raise
        for name, value in ready.items():
            setattr(self, name, value)
        return process

    def _cancel(self, process: _Process) -> None:
        """Have the process end what it does, or end the process."""
        deadline = time.monotonic() + CANCEL_SECONDS

        def go_on() -> None:
            if time.monotonic() > deadline:
                raise _GivenUp

        try:
            process.ask({"cancel": self._number}, go_on)
            while True:
                answer = process.answer(go_on)
                if "end" in answer or "error" in answer:
                    return
                go_on()
        except Lost:
            pass
        except (_GivenUp, Useless):
            log.warning("model %s did not stop when its call was cancelled: its process is ended", self._model_id)
        if self._process is not None:
            self._end()

    def _lost(self, *, loading: bool = False) -> MlRagError:
        """The error of the call that the process did not survive."""
        # its end of the socket is closed a little before it can be waited for
        status = self._end(CLOSE_SECONDS)
        log.warning("the process of model %s ended: %s", self._model_id, cause(status))
        if status == -signal.SIGPROF:
            return InvalidRequest(
                "json_schema takes too long",
                detail="making its grammar, or choosing a token by it, took more than "
                f"{GRAMMAR_SECONDS:g} s of processor time",
                hint="Leave parts of it out, or lower its lengths, counts and repetitions.",
            )
        if status == -signal.SIGKILL:
            return EngineFailed(
                f"the process of model {self._model_id} was killed",
                detail="it got signal 9 (SIGKILL), which the kernel sends when memory runs out",
                hint="Call again; give the model server's machine or container more memory.",
            )
        if loading:
            return ModelUnavailable(
                f"model {self._model_id} cannot be loaded", detail=f"its process ended with {cause(status)}"
            )
        return EngineFailed(
            f"the process of model {self._model_id} ended during the call",
            detail=f"it ended with {cause(status)}",
            hint="The next call starts another. If it happens again, try with fewer options.",
        )

    def _useless(self, what: str, how: str) -> MlRagError:
        """The error of the call that the process is of no use to; it is ended."""
        self._end()
        log.warning("the process of model %s %s: it is ended", self._model_id, what)
        return EngineFailed(
            f"the process of model {self._model_id} {what}", detail=how, hint="The next call starts another."
        )


def _size(messages: Sequence[dict[str, str]]) -> int:
    """Bytes of the texts."""
    return sum(len(message["content"].encode("utf-8", "replace")) for message in messages)


def _nothing() -> None:
    pass
