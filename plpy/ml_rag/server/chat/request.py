"""The body of ``POST /v1/chat/completions``, as OpenAI has it and as docs/protocol.md adds to it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, WithJsonSchema, model_validator

from ml_rag.abc import Sampling
from ml_rag.errors import InvalidRequest
from ml_rag.server.boundary import check_values
from ml_rag.server.calls import Cluster, Name, Oid
from ml_rag.server.chat import prompt


class _Model(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True, protected_namespaces=())


def _plain_text(content: Any) -> Any:
    """OpenAI's content parts as one text; a missing content as an empty one."""
    if content is None:
        return ""
    if isinstance(content, list):
        if not all(isinstance(p, dict) and p.get("type") == "text" and isinstance(p.get("text"), str) for p in content):
            raise ValueError("only parts of the type text are taken")
        return "".join(part["text"] for part in content)
    return content


_PART_SCHEMA = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
_CONTENT_SCHEMA = {"anyOf": [{"type": "string"}, {"type": "null"}, {"type": "array", "items": _PART_SCHEMA}]}


class ChatMessage(_Model):
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, BeforeValidator(_plain_text), WithJsonSchema(_CONTENT_SCHEMA)] = ""

    @property
    def is_system(self) -> bool:
        return self.role in ("system", "developer")


class ChatDocument(_Model):
    document_name: str = ""
    text: str
    #: ours: what stands above the text in the prompt
    metadata: dict[str, str] | None = None


class ChatTurn(_Model):
    role: Literal["user", "assistant"]
    content: str


class KnownCosines(_Model):
    """What is known of an extractive answer: the vector of the question, and its cosine with each sentence."""

    vector: list[Annotated[float, Field(allow_inf_nan=False)]] = Field(min_length=1, max_length=16000, fail_fast=True)
    cosines: dict[str, Annotated[float, Field(ge=-1.01, le=1.01)]]


class _JsonSchema(_Model):
    name: str = "answer"
    schema_: dict[str, Any] = Field(alias="schema")


class ResponseFormat(_Model):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: _JsonSchema | None = None

    @model_validator(mode="after")
    def _schema_is_there(self) -> ResponseFormat:
        if self.type == "json_schema" and self.json_schema is None:
            raise ValueError("json_schema is missing")
        return self

    def schema_of_answer(self) -> dict[str, Any] | None:
        if self.type == "json_object":
            return {"type": "object"}
        return self.json_schema.schema_ if self.json_schema is not None and self.type == "json_schema" else None


class StreamOptions(_Model):
    include_usage: bool = False


def _stop_list(stop: Any) -> Any:
    return [stop] if isinstance(stop, str) else stop


_STOP_SCHEMA = {
    "anyOf": [
        {"type": "string"},
        {"type": "null"},
        {"type": "array", "items": {"type": "string"}, "maxItems": 64},
    ]
}


class ChatRequest(_Model):
    """The body; fields that OpenAI has and this server does not need are ignored, those it cannot honour refused."""

    model: str = Field(min_length=1)
    # lists fail fast: see EmbeddingsBody
    messages: list[ChatMessage] = Field(min_length=1, fail_fast=True)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(default=None, ge=1, le=1_000_000)
    max_completion_tokens: int | None = Field(default=None, ge=1, le=1_000_000)
    temperature: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    top_p: float | None = Field(default=None, ge=0, le=1)
    top_k: int | None = Field(default=None, ge=0, le=32000)
    repeat_penalty: float | None = Field(default=None, ge=0, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    stop: Annotated[list[str] | None, BeforeValidator(_stop_list), WithJsonSchema(_STOP_SCHEMA)] = Field(
        default=None, max_length=64
    )
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    response_format: ResponseFormat | None = None
    speculative_decoding: bool | None = None
    language: str | None = None
    task: prompt.PromptTask | None = None
    documents: list[ChatDocument] | None = Field(default=None, fail_fast=True)
    #: ours: earlier turns, oldest first; as many of the newest as fit history_tokens stand before the question
    history: list[ChatTurn] | None = Field(default=None, fail_fast=True)
    history_tokens: int | None = Field(default=None, ge=0, le=1_000_000)
    #: ours: whether the reply has the messages that the server wrote
    return_prompt: bool = False
    citation_style: prompt.CitationStyle | None = None
    document_order: prompt.DocumentOrder | None = None
    answer_length: prompt.AnswerLength | None = None
    #: how many of the documents, the first ones, the answer may point to: other markers are taken out of it
    citations: int | None = Field(default=None, ge=0)
    #: ours, of extractive answers: how many sentences, the least support, the embedding model of their similarity, and
    #: what is known of that
    max_sentences: int | None = Field(default=None, ge=1, le=10)
    min_support: float | None = Field(default=None, ge=0, le=1)
    embed_model: str | None = None
    known_cosines: KnownCosines | None = None
    #: ours: cluster, database, role and routine of the call of a session that this is the generation of
    counted_as: tuple[Cluster, Oid, Oid, Name] | None = None
    n: Literal[1] | None = None
    logprobs: Literal[False] | None = None
    tools: Annotated[list[Any] | None, Field(max_length=0)] = None

    @model_validator(mode="after")
    def _fits_together(self) -> ChatRequest:
        writes, asks = self.writes_prompt, self.messages[-1].role == "user"
        for is_wrong, why in (
            (writes and not asks, "with documents, task or language the last message must be the user's"),
            (self.citations is not None and self.documents is None, "citations needs documents"),
            (self.history is not None and not asks, "history needs a last message of the user's"),
            (self.return_prompt and not writes, "return_prompt needs documents, task or language"),
        ):
            if is_wrong:
                raise ValueError(why)
        return self

    @property
    def writes_prompt(self) -> bool:
        """Whether the server writes the prompt, rather than taking the messages as they are."""
        return self.documents is not None or self.task is not None or self.language is not None

    def sampling(self) -> Sampling:
        return Sampling(
            max_tokens=self.max_completion_tokens or self.max_tokens or 256,
            temperature=self.temperature or 0.0,
            top_k=self.top_k,
            top_p=self.top_p,
            repeat_penalty=self.repeat_penalty,
            frequency_penalty=self.frequency_penalty,
            presence_penalty=self.presence_penalty,
            stop=tuple(self.stop or ()),
            seed=self.seed,
            json_schema=self.response_format.schema_of_answer() if self.response_format else None,
            speculative_decoding=self.speculative_decoding,
        )

    def plain_messages(self) -> list[prompt.Message]:
        return [{"role": "system" if m.is_system else m.role, "content": m.content} for m in self.messages]


def parse(body: bytes) -> ChatRequest:
    """The request in ``body``.

    Raises ``InvalidRequest``: it is not JSON, has too many values, or a field is missing, of the wrong type or out of
    range; the detail names it.
    """
    check_values(body)
    try:
        return ChatRequest.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(str(part) for part in first["loc"]) or "the body"
        # texts are not repeated: an error's detail ends up in PostgreSQL's log
        given = f", not {first['input']}" if isinstance(first["input"], int | float) else ""
        raise InvalidRequest(
            f"invalid {field}" if first["type"] != "json_invalid" else "the request is not valid JSON",
            detail=f"{field}: {first['msg']}{given}",
        ) from None
