"""What the model server counts, as Prometheus reads it at ``/metrics``."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

if TYPE_CHECKING:
    from ml_rag.server.memory import Usage

#: the model of the request being served: a one-element list that the middleware makes and ``Registry.lease`` fills
current_model: ContextVar[list[str] | None] = ContextVar("current_model", default=None)

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


class Metrics:
    """The counters of one server. Labels are routes of the app and ids of the catalogue, so their number is bounded."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        counter, gauge = partial(Counter, registry=self.registry), partial(Gauge, registry=self.registry)
        histogram = partial(Histogram, registry=self.registry)
        self.requests = counter("ml_rag_requests", "Requests served", ["route", "model", "status"])
        self.seconds = histogram(
            "ml_rag_request_seconds", "Time from a request's head to the end of its reply", ["route", "model"],
            buckets=_SECONDS,
        )  # fmt: skip
        self._tokens = counter("ml_rag_tokens", "Tokens read and written", ["model", "direction"])
        self.batch_texts = histogram(
            "ml_rag_embed_batch_texts", "Texts in one batch given to an embedding model", ["model"],
            buckets=(1, 2, 4, 8, 16, 32, 64, 128),
        )  # fmt: skip
        self.load_seconds = histogram("ml_rag_model_load_seconds", "Time to load a model", ["model"], buckets=_SECONDS)
        self.calls = counter("ml_rag_calls", "Calls of PostgreSQL's sessions that have ended", ["routine", "sqlstate"])
        self.call_seconds = histogram(
            "ml_rag_call_seconds", "Time of calls without an error, whole (stage total) and by stage",
            ["routine", "stage"], buckets=_SECONDS,
        )  # fmt: skip
        self._queue = gauge("ml_rag_queue_depth", "Requests that wait for a model", ["model"])
        self._running = gauge("ml_rag_running", "Requests a model is working on", ["model"])
        self._loaded = gauge("ml_rag_model_loaded", "1 while the model is in memory", ["model"])
        self.refused_peers = counter("ml_rag_refused_peers", "Connections refused because of the peer's uid")

    def watch_model(
        self, model_id: str, depth: Callable[[], float], running: Callable[[], float], loaded: Callable[[], float]
    ) -> None:
        """Read a model's queue depth and state when ``/metrics`` is asked for, not before."""
        self._queue.labels(model_id).set_function(depth)
        self._running.labels(model_id).set_function(running)
        self._loaded.labels(model_id).set_function(loaded)

    def watch_memory(self, tightest: Callable[[], Usage | None]) -> None:
        """Read what is in use of the tightest limit when ``/metrics`` is asked for; 0 where there is none."""
        used = Gauge("ml_rag_memory_used_bytes", "Memory in use of the tightest limit", registry=self.registry)
        limit = Gauge("ml_rag_memory_limit_bytes", "The tightest limit on memory, 0 for none", registry=self.registry)
        used.set_function(lambda: float(usage.used) if (usage := tightest()) else 0.0)
        limit.set_function(lambda: float(usage.limit) if (usage := tightest()) else 0.0)

    def tokens(self, model_id: str, *, tokens_in: int = 0, tokens_out: int = 0) -> None:
        """Count the tokens of a finished request."""
        if tokens_in:
            self._tokens.labels(model_id, "in").inc(tokens_in)
        if tokens_out:
            self._tokens.labels(model_id, "out").inc(tokens_out)

    def render(self) -> bytes:
        """The metrics in Prometheus' text format."""
        return generate_latest(self.registry)
