"""Deterministic models whose every answer can be computed by hand. They ship with the package, for tests and trials.

A word is a run of letters, digits and underscores, in lower case.

* embed: component ``crc32(word in UTF-8) % dimensions`` gets 1 for each of the first ``max_tokens`` words; the sum is
  divided by its Euclidean length. A text without words is the first unit vector.
* generate: ``fake answer to: <question> [documents: <n>]``; the question and the number of fenced documents are read
  from the last user message as ``chat/prompt.py`` writes it. A token is a word between blanks; ``max_tokens`` and
  ``stop`` are obeyed. With ``json_schema`` the answer is the smallest instance of it; where that has an empty text
  ``question``, it is what stands behind ``Question:`` in the last user message. The slow model says its text
  again and again until ``max_tokens``.
* rerank: the share of the query's distinct words that occur in the text; 0 for a query without words.

``fake_mode`` of the catalogue entry: ``slow`` waits ``fake_delay_seconds`` a text or a token (and asks ``cancelled``
every 5 ms), ``nan`` and ``short`` return vectors that are not numbers or lack a dimension, ``error`` fails.
"""

from __future__ import annotations

import json
import re
import time
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ml_rag.abc import Cancelled, Delta, Sampling
from ml_rag.errors import EngineFailed

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ml_rag.abc import Engine
    from ml_rag.server.catalogue import ModelEntry

_WORD = re.compile(r"\w+")
_DOCUMENT = re.compile(r"<document number=.*?</document>\s*", re.DOTALL)
_QUESTION = re.compile(
    r"Answer this question[^:]*, from the documents above: (.*?)(?:\nAnswer (?:shortly )?in .*)?$", re.DOTALL
)
_REWRITTEN = re.compile(r"^Question: (.*)$", re.MULTILINE)
_POLL_SECONDS = 0.005


def load(entry: ModelEntry, models_dir: Path) -> Engine:
    """The fake for the entry's task; nothing is read."""
    if entry.task == "embed":
        return FakeEmbed(entry)
    if entry.task == "generate":
        return FakeGenerate(entry)
    return FakeRerank(entry)


def words(text: str) -> list[str]:
    """The words of a text, in lower case."""
    return _WORD.findall(text.lower())


def _sleep(seconds: float, cancelled: Cancelled) -> None:
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0 and not cancelled():
        time.sleep(min(left, _POLL_SECONDS))


class _Fake:
    def __init__(self, entry: ModelEntry) -> None:
        self._mode = entry.fake_mode
        self._delay = entry.fake_delay_seconds if entry.fake_mode == "slow" else 0.0
        self.max_tokens = entry.max_tokens or entry.context_tokens or 256

    def close(self) -> None:
        """Nothing to free."""


class FakeEmbed(_Fake):
    """See the module's docstring."""

    def __init__(self, entry: ModelEntry) -> None:
        super().__init__(entry)
        self.dimensions = entry.dimensions or 16
        self.chunk_texts = 1 if self._delay else None

    def embed(self, texts: Sequence[str], cancelled: Cancelled) -> NDArray[np.float32]:
        if self._mode == "error":
            raise EngineFailed("the fake model failed", detail="its fake_mode is error")
        vectors = np.zeros((len(texts), self.dimensions), np.float32)
        for vector, text in zip(vectors, texts, strict=True):
            _sleep(self._delay, cancelled)
            for word in words(text)[: self.max_tokens]:
                vector[zlib.crc32(word.encode("utf-8", "surrogatepass")) % self.dimensions] += 1
            if not vector.any():
                vector[0] = 1
            vector /= np.linalg.norm(vector)
        if self._mode == "nan":
            vectors[:] = np.nan
        return vectors[:, :-1] if self._mode == "short" else vectors

    def tokenizer(self) -> Any:
        return None


class FakeGenerate(_Fake):
    """See the module's docstring."""

    def __init__(self, entry: ModelEntry) -> None:
        super().__init__(entry)
        self.brief = entry.brief

    def count_tokens(self, messages: Sequence[dict[str, str]], cancelled: Cancelled | None = None) -> int:
        return sum(len(message["content"].split()) for message in messages)

    def generate(self, messages: Sequence[dict[str, str]], sampling: Sampling, cancelled: Cancelled) -> Iterator[Delta]:
        text = self._answer(messages, sampling)
        cuts = [at for stop in sampling.stop if stop and (at := text.find(stop)) >= 0]
        if cuts:
            text = text[: min(cuts)]
        pieces = re.findall(r"\s*\S+", text)
        if self._delay and sampling.json_schema is None and pieces:
            separated = [pieces[0], *(piece if piece[0].isspace() else f" {piece}" for piece in pieces[1:])]
            again = [f" {pieces[0].strip()}", *separated[1:]]
            pieces = [*separated, *(again[i % len(again)] for i in range(max(0, sampling.max_tokens - len(separated))))]
        given = pieces[: sampling.max_tokens]
        for number, piece in enumerate(given, start=1):
            _sleep(self._delay, cancelled)
            if cancelled():
                return
            if self._mode == "error" and number > 1:
                raise EngineFailed("the fake model failed", detail="its fake_mode is error")
            yield Delta(piece)
        yield Delta(
            "",
            finish_reason="length" if len(given) < len(pieces) or self._delay else "stop",
            prompt_tokens=self.count_tokens(messages),
            completion_tokens=len(given),
        )

    def _answer(self, messages: Sequence[dict[str, str]], sampling: Sampling) -> str:
        asked = next((message["content"] for message in reversed(messages) if message["role"] == "user"), "")
        if sampling.json_schema is not None:
            answer = smallest_instance(sampling.json_schema, sampling.json_schema)
            if isinstance(answer, dict) and answer.get("question") == "" and (found := _REWRITTEN.search(asked)):
                answer["question"] = found[1]
            return json.dumps(answer)
        rest, documents = _DOCUMENT.subn("", asked)
        question = _QUESTION.search(rest) if documents else None
        return f"fake answer to: {question[1] if question else rest.strip()} [documents: {documents}]"


def smallest_instance(schema: Any, root: Any, depth: int = 0) -> Any:
    """A minimal value that is valid for a JSON schema (types, const, enum, required, items, bounds, local $ref)."""
    if not isinstance(schema, dict) or depth > 32:
        return None
    if isinstance(reference := schema.get("$ref"), str):
        target = root
        for part in reference.removeprefix("#").split("/")[1:]:
            target = target.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(target, dict) else None
        return smallest_instance(target, root, depth + 1)
    if "const" in schema:
        return schema["const"]
    if schema.get("enum"):
        return schema["enum"][0]
    for key in ("anyOf", "oneOf", "allOf"):
        if schema.get(key):
            return smallest_instance(schema[key][0], root, depth + 1)
    kind = schema.get("type", "object" if "properties" in schema else "null")
    kind = kind[0] if isinstance(kind, list) else kind
    if kind == "object":
        properties = schema.get("properties", {})
        return {key: smallest_instance(properties.get(key), root, depth + 1) for key in schema.get("required", ())}
    if kind == "array":
        return [smallest_instance(schema.get("items"), root, depth + 1)] * int(schema.get("minItems", 0))
    if kind == "string":
        return "x" * int(schema.get("minLength", 0))
    if kind in ("integer", "number"):
        return schema.get("minimum", 0)
    return False if kind == "boolean" else None


class FakeRerank(_Fake):
    """See the module's docstring."""

    def rerank(self, query: str, texts: Sequence[str], cancelled: Cancelled) -> NDArray[np.float32]:
        wanted = set(words(query))
        scores = np.zeros(len(texts), np.float32)
        for index, text in enumerate(texts):
            _sleep(self._delay, cancelled)
            if cancelled():
                break
            if wanted:
                scores[index] = len(wanted.intersection(words(text))) / len(wanted)
        return scores
