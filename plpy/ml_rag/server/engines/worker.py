"""The process of one model. Started by ``ml_rag.server.engines.process`` only.

``python -m ml_rag.server.engines.worker SOCKET_FD``. Messages are JSON. The first one names the model, its answer says
that it is loaded. Requests come one at a time, beside ``{"cancel": number}``; once the server closes the socket, as it
does by ending, the process ends, whatever it is doing.
"""

from __future__ import annotations

import base64
import contextlib
import importlib
import json
import os
import queue
import resource
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ml_rag.abc import Delta, Engine, Sampling
from ml_rag.errors import EngineFailed, MlRagError
from ml_rag.ingest.child import receive_message, send_message
from ml_rag.ingest.confine import end_with_parent, hide
from ml_rag.priority import yield_thread
from ml_rag.server.catalogue import ModelEntry
from ml_rag.server.engines import time_limit
from ml_rag.server.memory import default_limit, status_bytes
from ml_rag.shortage import shortage

#: writable memory beyond what the loaded model has: prompts, grammars, and what each of its threads takes
GROWTH_BYTES = 1024**3
THREAD_BYTES = 16 * 1024**2


class _Requests:
    """What comes from the server, read by a thread of its own so that a cancel is seen at once."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._waiting: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._cancelled = -1
        threading.Thread(target=self._read, name="requests", daemon=True).start()

    def _read(self) -> None:
        with contextlib.suppress(OSError, MemoryError):
            while (received := receive_message(self._connection)) is not None:
                message = json.loads(received[0])
                if "cancel" in message:
                    self._cancelled = message["cancel"]
                else:
                    self._waiting.put(message)
        # the server is gone, or this request has no room; the model may be inside of a call that cannot be interrupted
        os._exit(0)

    def next(self) -> dict[str, Any]:
        return self._waiting.get()

    def is_cancelled(self, number: int) -> bool:
        return self._cancelled >= number


def _failure(error: BaseException) -> dict[str, Any]:
    if isinstance(error, MlRagError):
        return error.to_json()
    # the class only: the message of an unforeseen error may hold texts of the request
    return (shortage(error) or EngineFailed("the model failed", detail=type(error).__name__)).to_json()


def _answers(engine: Any, request: dict[str, Any], requests: _Requests) -> Iterator[dict[str, Any]]:
    number: int = request["number"]

    def cancelled() -> bool:
        return requests.is_cancelled(number)

    what = request["do"]
    if what == "count_tokens":
        yield {"tokens": engine.count_tokens(request["messages"])}
        return
    if what == "tokenizer":
        tokenizer = engine.tokenizer()
        yield {"tokenizer": None if tokenizer is None else tokenizer.to_str()}
        return
    if what in ("embed", "rerank"):
        arguments = [request["query"], request["texts"]] if what == "rerank" else [request["texts"]]
        found = getattr(engine, what)(*arguments, cancelled)
        numbers = base64.b64encode(found.astype("<f4").tobytes()).decode("ascii")
        yield {"shape": found.shape, "numbers": numbers, "tokens": getattr(engine, "last_token_counts", None)}
        return
    sampling = Sampling(**{**request["sampling"], "stop": tuple(request["sampling"]["stop"])})
    delta: Delta
    for delta in engine.generate(request["messages"], sampling, cancelled):
        yield {"delta": [delta.text, delta.finish_reason, delta.prompt_tokens, delta.completion_tokens]}


def _bound_memory(entry: ModelEntry, limit: int) -> None:
    # a GPU's driver maps as it likes
    if entry.gpu_layers == 0:
        _, most = resource.getrlimit(resource.RLIMIT_DATA)
        limit = limit if most == resource.RLIM_INFINITY else min(limit, most)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, most))


def _load(start: dict[str, Any]) -> Engine:
    entry = ModelEntry.model_validate(start["entry"])
    if entry.task == "generate":  # somebody waits for an embedding, or for a reranked search
        yield_thread()
    _bound_memory(entry, default_limit())
    engine: Engine = importlib.import_module(start["module"]).load(entry, Path(start["models_dir"]))
    threads = entry.threads or os.cpu_count() or 1
    _bound_memory(entry, status_bytes("VmData") + GROWTH_BYTES + threads * THREAD_BYTES)
    return engine


def main(descriptor: int) -> None:
    """Load the model and answer requests until the server closes the socket."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the server's to handle
    with contextlib.suppress(OSError):  # /proc may be missing
        # if memory runs out: after the documents' parsers, before the server and PostgreSQL
        Path("/proc/self/oom_score_adj").write_text("500")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    end_with_parent()
    hide()
    connection = socket.socket(fileno=descriptor)
    requests = _Requests(connection)
    time_limit.end_long_steps(time_limit.GRAMMAR_SECONDS)

    def tell(message: dict[str, Any]) -> None:
        send_message(connection, json.dumps(message).encode())

    try:
        engine = _load(requests.next())
    except MlRagError as error:
        tell(error.to_json())
        return
    except Exception as error:  # noqa: BLE001 - told to the server
        known = shortage(error)
        tell(known.to_json() if known else {"unforeseen": f"{type(error).__name__}: {error}"[:2000]})
        return
    facts = {name: getattr(engine, name, None) for name in ("max_tokens", "brief", "dimensions")}
    tell({name: value for name, value in facts.items() if value is not None})
    while True:
        request = requests.next()
        try:
            for answer in _answers(engine, request, requests):
                tell(answer)
            tell({"end": request["number"]})
        except BrokenPipeError:
            return
        except Exception as error:  # noqa: BLE001 - told to the server
            tell(_failure(error))


if __name__ == "__main__":
    main(int(sys.argv[1]))
