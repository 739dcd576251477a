"""The protocols the rooms of this package meet at: engines of the model server, parsed documents, segments.

Everything here is typing only; no engine imports another. Arrays are numpy, texts are ``str`` without NUL.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Task = Literal["embed", "generate", "rerank"]

#: of a text to embed or to rank, for each token that the model takes in: more is not read, as a text of 1 MB would cost
#: more than one of some pages
CHARACTERS_PER_TOKEN = 64

#: True once the caller has gone away; engines ask at least once a batch or a token.
Cancelled = Callable[[], bool]


class Engine(Protocol):
    """A loaded model. Methods are called from one worker thread at a time."""

    #: longest input in tokens (embed, rerank) or context size in tokens (generate)
    max_tokens: int

    def close(self) -> None:
        """Free the memory. The object is not used afterwards."""


class EmbedEngine(Engine, Protocol):
    """``bulk``, where there is one: an ``EmbedEngine`` that another thread may call beside it, for bulk requests."""

    dimensions: int

    def embed(self, texts: Sequence[str], cancelled: Cancelled) -> NDArray[np.float32]:
        """Embeddings, shape (len(texts), dimensions), finite, float32, as the model normalises them.

        Texts longer than ``max_tokens`` are cut. Batches by length inside; asks ``cancelled`` between batches.
        """

    def tokenizer(self) -> Any:
        """The ``tokenizers.Tokenizer`` of the model (no truncation, no padding), or None for one token a word."""


class RerankEngine(Engine, Protocol):
    def rerank(self, query: str, texts: Sequence[str], cancelled: Cancelled) -> NDArray[np.float32]:
        """Relevance 0–1 of each text to the query, shape (len(texts),)."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to sample. Ranges are those of ``ml_generate`` in docs/reference.md; None = the model's own default."""

    max_tokens: int = 256
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    repeat_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None
    json_schema: dict[str, Any] | None = None
    speculative_decoding: bool | None = None


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of generated text. The last one carries ``finish_reason`` and the token counts."""

    text: str
    finish_reason: Literal["stop", "length"] | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class GenerateEngine(Engine, Protocol):
    #: whether answers from documents are asked for in one short sentence, which is what the smallest models can do
    brief: bool

    def count_tokens(self, messages: Sequence[dict[str, str]], cancelled: Cancelled | None = None) -> int:
        """Tokens of the messages in the model's chat template, generation prompt included.

        An engine that can stop counting once ``cancelled()`` is true raises ``ClientGone``.
        """

    def generate(self, messages: Sequence[dict[str, Any]], sampling: Sampling, cancelled: Cancelled) -> Iterator[Delta]:
        """Text, piece by piece; stops within one token once ``cancelled()`` is true. Of a model that takes images a
        message's content may be OpenAI's list of parts."""


@dataclass(frozen=True, slots=True)
class Block:
    """A piece of a parsed document, in Markdown: text between two page or slide borders."""

    text: str
    #: keys of ``metadata`` every segment cut from it gets, e.g. {"page": 3} (1-based)
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Document:
    """A parsed document. ``format`` is the format found in the content, not the one its name claims."""

    format: str
    blocks: list[Block]
    #: keys of ``metadata`` every segment gets, e.g. {"title": …, "author": …}
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Segment:
    """A row of a vector store to be. ``tokens``: of ``embedded_text``, the model's special tokens among them."""

    text: str
    tokens: int
    metadata: dict[str, Any] = field(default_factory=dict)
    #: title and headings, which stand before the text where it is embedded
    context: str = ""

    def embedded_text(self) -> str:
        """What the embedding model reads."""
        return f"{self.context}\n\n{self.text}" if self.context else self.text
