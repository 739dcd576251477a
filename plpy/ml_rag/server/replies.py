"""The replies of the model server: what its handlers make, which mypy checks, and what ``/openapi.json`` describes.

Typed dictionaries, since they cost a reply nothing. The fuzz tests hold the running server to them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NotRequired

from typing_extensions import TypedDict

from ml_rag.abc import Task
from ml_rag.errors import BY_CODE


class ErrorObject(TypedDict):
    message: str
    type: Literal["invalid_request_error", "server_error"]
    code: Literal[tuple(sorted(BY_CODE))]  # type: ignore[valid-type]
    detail: str | None
    hint: str | None


class Error(TypedDict):
    error: ErrorObject


class Parsers(TypedDict):
    confined: bool | None
    missing: dict[str, str]


State = Literal["loaded", "idle", "unavailable"]


class Health(TypedDict):
    status: Literal["ok"]
    version: str
    uptime_seconds: float
    models: dict[str, State]
    parsers: Parsers


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model of the catalogue. ``reason`` and ``pull`` are set when it is not ``available``."""

    id: str
    object: Literal["model"] = "model"
    created: int = 0
    owned_by: str = "ml_rag"
    task: Task
    engine: str
    dimensions: int | None
    max_tokens: int | None
    available: bool
    reason: str | None
    pull: str | None
    brief: bool


class Models(TypedDict):
    object: Literal["list"]
    data: list[Model]


class Embedding(TypedDict):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingUsage(TypedDict):
    prompt_tokens: int
    total_tokens: int
    #: where it was asked for; null: the tokenizer is not here
    truncated_texts: NotRequired[int | None]
    #: with ``encoding_format`` text: how many tokens of a text the model takes in; null: that is not known here
    max_tokens: NotRequired[int | None]


class Embeddings(TypedDict):
    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


class Tokens(TypedDict):
    model: str
    #: null: the tokenizer is not here; of a text that is far too long
    tokens: list[int | None] | None


class RankedText(TypedDict):
    text: str


class Ranked(TypedDict):
    index: int
    relevance_score: float
    document: NotRequired[RankedText]


class Ranking(TypedDict):
    model: str
    results: list[Ranked]


class Message(TypedDict):
    role: Literal["assistant"]
    content: str
    refusal: None


class Choice(TypedDict):
    index: Literal[0]
    message: Message
    finish_reason: Literal["stop", "length"]
    logprobs: None


class Usage(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Used(TypedDict):
    documents_given: NotRequired[int]
    documents_used: NotRequired[int]
    turns_given: NotRequired[int]
    turns_used: NotRequired[int]
    prompt: NotRequired[list[dict[str, str]]]
    support: NotRequired[float]
    min_support: NotRequired[float]


class Completion(TypedDict):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[Choice]
    usage: Usage
    ml_rag: NotRequired[Used]


class CallInFlight(TypedDict):
    pid: int
    #: when the process began, ns since 1970
    session: int
    database: int
    role: int
    routine: str
    #: this and the other moments: seconds since 1970
    started: float
    stage: str
    stage_started: float
    model: str
    statement: float
    command: NotRequired[str]
    relation: NotRequired[str]
    phase: NotRequired[str]
    done: NotRequired[int]
    total: NotRequired[int]
    failed: NotRequired[int]
    progress_started: NotRequired[float]


class CallStatistics(TypedDict):
    role: int
    routine: str
    stage: str
    calls: int
    errors: int
    errors_by_sqlstate: dict[str, int] | None
    total_ms: float
    mean_ms: float | None
    max_ms: float | None
    p50_ms: float | None
    p95_ms: float | None
    p99_ms: float | None
    prompt_tokens: int | None
    generated_tokens: int | None


class Calls(TypedDict):
    since: float
    activity: list[CallInFlight]
    stats: list[CallStatistics]
