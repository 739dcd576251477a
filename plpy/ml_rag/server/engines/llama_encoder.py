"""Embeddings and reranking by GGUF models, through llama.cpp; runs in the model's own process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import llama_cpp
import numpy as np

from ml_rag.abc import CHARACTERS_PER_TOKEN, Cancelled
from ml_rag.errors import ModelUnavailable
from ml_rag.server.engines.llama_native import Aborted, NativeModel, watching
from ml_rag.server.engines.llama_tokenizer import tokenizer_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ml_rag.server.catalogue import ModelEntry

#: longest text in tokens where the catalogue does not say, or what the model was trained for where that is less
DEFAULT_TOKENS = 2048
#: tokens in one batch: of several texts no more, since each token is compared with all others of the batch
BATCH_TOKENS = 256
#: texts in one batch
BATCH_TEXTS = 32
_POOLING = {
    None: llama_cpp.LLAMA_POOLING_TYPE_UNSPECIFIED,
    "mean": llama_cpp.LLAMA_POOLING_TYPE_MEAN,
    "cls": llama_cpp.LLAMA_POOLING_TYPE_CLS,
    "last": llama_cpp.LLAMA_POOLING_TYPE_LAST,
    "rank": llama_cpp.LLAMA_POOLING_TYPE_RANK,
}


class _Encoder:
    """A model that makes one row of numbers of each text."""

    def __init__(self, entry: ModelEntry, path: Path, pooling: str | None) -> None:
        tokens = entry.max_tokens or DEFAULT_TOKENS
        self._native = NativeModel(
            path,
            context_tokens=max(tokens, BATCH_TOKENS),
            default_context_tokens=tokens,
            batch_tokens=max(tokens, BATCH_TOKENS),
            threads=entry.threads,
            gpu_layers=entry.gpu_layers,
            pooling=_POOLING[pooling],
            sequences=BATCH_TEXTS,
        )
        self.max_tokens = min(tokens, self._native.trained_context)

    def close(self) -> None:
        self._native.close()

    def _rows(self, texts: Sequence[Sequence[int]], width: int, cancelled: Cancelled) -> NDArray[np.float32]:
        """Of each text, given as tokens; those that come once ``cancelled()`` is true are zeros."""
        rows = np.zeros((len(texts), width), np.float32)
        with watching(cancelled, self._native):
            for batch in batches([len(text) for text in texts]):
                # the abort callback works on the CPU only; elsewhere a batch is short
                if self._native.abort.value:
                    break
                try:
                    rows[batch] = self._native.pooled([texts[index] for index in batch], width)
                except Aborted:
                    break
        return rows

    def _cut(self, text: str) -> str:
        return text[: self.max_tokens * CHARACTERS_PER_TOKEN]


def batches(counts: Sequence[int]) -> list[list[int]]:
    """Indexes of texts by their length in tokens, longest first, ``BATCH_TOKENS`` together or a single text."""
    made: list[list[int]] = []
    room = 0
    for index in sorted(range(len(counts)), key=lambda index: -counts[index]):
        if not made or counts[index] > room or len(made[-1]) == BATCH_TEXTS:
            made.append([])
            room = BATCH_TOKENS
        made[-1].append(index)
        room -= counts[index]
    return made


class LlamaEmbedder(_Encoder):
    """An ``EmbedEngine``."""

    def __init__(self, entry: ModelEntry, path: Path) -> None:
        super().__init__(entry, path, entry.pooling)
        self.dimensions = self._native.width
        around = self._native.tokenize("", special=False, whole=True)
        # where only a text's beginning is marked, nothing is kept of its end
        self._end = around[-1:] if around and around[-1] != self._native.begin_token else []
        #: tokens of each text of the last ``embed``
        self.last_token_counts: list[int] = []

    def embed(self, texts: Sequence[str], cancelled: Cancelled) -> NDArray[np.float32]:
        tokens = [self._tokens(text) for text in texts if not cancelled()]
        if len(tokens) < len(texts):
            return np.zeros((len(texts), self.dimensions), np.float32)
        self.last_token_counts = [len(text) for text in tokens]
        vectors = self._rows(tokens, self.dimensions, cancelled)
        lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
        lengths[lengths == 0] = 1
        vectors /= lengths
        return vectors

    def _tokens(self, text: str) -> list[int]:
        """With those that begin and end a text; cut before the end where they are too many."""
        found = self._native.tokenize(self._cut(text), special=False, whole=True)
        if len(found) > self.max_tokens:
            found[self.max_tokens - len(self._end) :] = self._end
        return found or [max(self._native.end_token, 0)]

    def tokenizer(self) -> Any:
        return tokenizer_of(self._native)


class LlamaReranker(_Encoder):
    """A ``RerankEngine`` over a cross-encoder with one output, which the sigmoid brings to 0-1.

    Query and text together are cut at ``max_tokens``, the longer of the two first.
    """

    def __init__(self, entry: ModelEntry, path: Path) -> None:
        super().__init__(entry, path, "rank")
        if self._native.outputs != 1:
            outputs = self._native.outputs
            self.close()
            raise ModelUnavailable(f"model {entry.id} cannot rerank", detail=f"it has {outputs} outputs instead of one")
        native = self._native
        end = native.end_token if native.end_token >= 0 else native.separator_token
        self._begin = [native.begin_token] if native.wants_begin_token else []
        self._end = [end] if native.wants_end_token else [native.separator_token]
        # as the tokenizers of these models put two texts together: one mark between them with BERT, two with RoBERTa
        self._between = [*self._end, native.separator_token] if native.wants_end_token else self._end

    def rerank(self, query: str, texts: Sequence[str], cancelled: Cancelled) -> NDArray[np.float32]:
        asked = self._native.tokenize(self._cut(query), special=False)
        cut = [self._native.tokenize(self._cut(text), special=False) for text in texts if not cancelled()]
        if len(cut) < len(texts):
            return np.zeros(len(texts), np.float32)
        pairs = [self._pair(asked, text) for text in cut]
        scores = self._rows(pairs, 1, cancelled)[:, 0]
        return (1 / (1 + np.exp(-scores.astype(np.float64)))).astype(np.float32)

    def _pair(self, query: list[int], text: list[int]) -> list[int]:
        room = self.max_tokens - len(self._begin) - len(self._between) - len(self._end)
        of_query, of_text = len(query), len(text)
        if of_query + of_text > room:
            if of_query > of_text:
                of_query = max(room - of_text, -(-room // 2))
                of_text = room - of_query
            else:
                of_text = max(room - of_query, -(-room // 2))
                of_query = room - of_text
        query, text = query[:of_query], text[:of_text]
        return [*self._begin, *query, *self._between, *text, *self._end]
