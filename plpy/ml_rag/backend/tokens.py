"""The words of many texts at once: PostgreSQL finds them in parallel workers (sql/keyword/tokens.sql), here they become
arrays. A tsvector's text, as in ``'cat':3 'fat':2,4``, is taken apart by its quotes and commas; JSON where that is not
enough."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ml_rag.backend.statements import Statements

if TYPE_CHECKING:  # numpy.typing takes as long to import as all that is used here
    from numpy.typing import NDArray

    Ints = NDArray[np.int64]

#: a tsvector keeps that many positions of a word, and no position beyond the last one
_POSITIONS, _LAST_POSITION = 255, "16383"
#: bytes of a word that a tsvector can have
_LONGEST = 2046
#: that many words are looked for one by one
_FEW = 32
#: by the number of bytes of a word: what keeps them alone of the eight that begin with it
_MASKS = np.array([256**size - 1 for size in range(9)], np.uint64)
#: size of the table of a vocabulary, as a power of two, and a factor that spreads words over it
_BITS, _SPREAD = 18, np.uint64(0x9E3779B97F4A7C15)

_STATEMENTS: dict[str, tuple[str, ...]] = {
    "tokens": (
        "SELECT t.tokens FROM ml_rag._tokens_of($1::regconfig, $2, $3) AS t",
        *("text", "text[]", "bool"),
    ),
}
_run = Statements(_STATEMENTS)


@dataclass(frozen=True, slots=True)
class Tokens:
    """Of each token of each text: the number of the text, how often the token stands there, and the token itself."""

    rows: Ints
    counts: Ints
    #: a token of up to eight bytes as a number, its first byte the lowest; 0 = it is the next of ``terms``
    keys: NDArray[np.uint64]
    terms: list[str]

    def __add__(self, other: Tokens) -> Tokens:
        rows, counts = np.concatenate([self.rows, other.rows]), np.concatenate([self.counts, other.counts])
        return Tokens(rows, counts, np.concatenate([self.keys, other.keys]), self.terms + other.terms)

    def lengths(self, n: int) -> Ints:
        """Tokens of each of the ``n`` texts."""
        return np.bincount(self.rows, self.counts, n).astype(np.int64)


class Vocabulary:
    """Numbers terms in the order in which they come.

    The dictionary has all of them. The table has most of the short ones, at a place that their bytes give, and numpy
    looks up those of a whole portion in it: that takes a tenth of the time.
    """

    def __init__(self) -> None:
        self.numbers: defaultdict[str, int] = defaultdict(itertools.count().__next__)
        self._keys, self._numbers = np.zeros(1 << _BITS, np.uint64), np.zeros(1 << _BITS, np.int64)

    def numbers_of(self, found: Tokens) -> Ints:
        """The number of each token."""
        numbers = np.empty(len(found.keys), np.int64)
        is_short = found.keys != 0
        numbers[~is_short] = self._of_terms(found.terms)
        keys = found.keys[is_short]
        at = keys * _SPREAD >> np.uint64(64 - _BITS)
        own = self._numbers[at]
        other = np.flatnonzero(self._keys[at] != keys)
        own[other] = self._of_terms([term.decode() for term in keys[other].astype("<u8").view("S8").tolist()])
        # what is there stays: common words come first
        free = other[self._keys[at[other]] == 0]
        self._keys[at[free]], self._numbers[at[free]] = keys[free], own[free]
        numbers[is_short] = own
        return numbers

    def _of_terms(self, terms: Sequence[str]) -> Ints:
        return np.fromiter(map(self.numbers.__getitem__, terms), np.int64, len(terms))


def find(plpy: Any, configuration: str, segments: Sequence[str], *, as_json: bool) -> list[str]:
    """Of each text a tsvector as text, or JSON: {token: how often}; the latter of all if ``as_json``."""
    found = _run(plpy, "tokens", configuration, segments, as_json)
    return [tokens for part in found for tokens in part["tokens"]]


def read(plpy: Any, configuration: str, segments: Sequence[str]) -> Tokens:
    """The tokens of texts."""
    tokens, unclear = of_vectors(find(plpy, configuration, segments, as_json=False))
    if unclear:
        found = find(plpy, configuration, [segments[row] for row in unclear], as_json=True)
        tokens += of_json(found, unclear)
    return tokens


def of_json(texts: Sequence[str], rows: Sequence[int] | None = None) -> Tokens:
    """The tokens of texts, given as JSON: {token: how often}; ``rows``: their numbers if not 0, 1, 2 …"""
    found: list[dict[str, int]] = list(map(json.loads, texts))
    terms = list(itertools.chain.from_iterable(found))
    return Tokens(
        np.repeat(np.arange(len(texts)) if rows is None else np.array(rows), list(map(len, found))).astype(np.int64),
        np.array(list(itertools.chain.from_iterable(tokens.values() for tokens in found)), np.int64),
        np.zeros(len(terms), np.uint64),
        terms,
    )


def counts_of(text: str, terms: Collection[str]) -> dict[str, int]:
    """How often each of the terms that a text has stands in it; of a text that waits (``ml_rag._words``): JSON, or the
    text of a tsvector, where no word has a quote."""
    found: dict[str, int] = {}
    if text.startswith("{"):
        found = json.loads(text)
    elif len(terms) > _FEW or any("'" in term or term.startswith(":") for term in terms):
        parts = text.split("'")
        found = {token: 1 + places.count(",") for token, places in zip(parts[1::2], parts[2::2], strict=True)}
    else:
        # to look for five takes a quarter of the time that taking 70 words apart does
        for term in terms:
            if (at := text.find(mark := f"'{term}':")) >= 0:
                places = text[at + len(mark) :].partition(" ")[0]
                found[term] = 1 + places.count(",")
    return {term: found[term] for term in terms if term in found}


def any_of(terms: Sequence[str]) -> str | None:
    """The tsquery of tsvectors that have one of the terms; None = they cannot have any."""
    kept = [term for term in terms if 0 < len(term.encode()) <= _LONGEST]
    return " | ".join("'" + term.replace("\\", "\\\\").replace("'", "''") + "'" for term in kept) or None


def of_vectors(vectors: Sequence[str]) -> tuple[Tokens, list[int]]:
    """The tokens of texts, each given as the text of a tsvector, or as JSON; and which of the tsvectors cannot be read
    so, because they were cut or have quotes or backslashes in a word."""
    text = "".join(vectors)
    others = [i for i in _rows_with(text, "{", vectors) if vectors[i].startswith("{")]
    unclear = {i for sign in ("''", "\\", _LAST_POSITION) for i in _rows_with(text, sign, vectors)}.difference(others)
    plain = list(vectors)
    for i in (*others, *unclear):
        plain[i] = ""
    if others or unclear:
        text = "".join(plain)
    data = text.encode()
    letters = np.frombuffer(data, np.uint8)
    quotes, commas = np.flatnonzero(letters == ord("'")), np.flatnonzero(letters == ord(","))
    ends = np.cumsum([len(vector if vector.isascii() else vector.encode()) for vector in plain], dtype=np.int64)
    rows = np.repeat(np.arange(len(plain)), np.diff(np.searchsorted(quotes, ends) // 2, prepend=0))
    # a comma after a closing quote parts two positions, one after an opening quote is part of a word
    before = np.searchsorted(quotes, commas)
    counts = 1 + np.bincount(before[before % 2 == 0] // 2 - 1, minlength=len(rows)).astype(np.int64)
    first, last = quotes[::2] + 1, quotes[1::2]
    cut = set(rows[counts >= _POSITIONS].tolist())
    if cut:
        kept = ~np.isin(rows, list(cut))
        rows, counts, first, last = rows[kept], counts[kept], first[kept], last[kept]
    # the eight bytes that begin at each
    eights = np.ndarray(len(data), "<u8", data + bytes(8), strides=1)
    sizes = last - first
    long = np.flatnonzero(sizes > 8)
    keys = eights[first] & _MASKS[np.minimum(sizes, 8)]
    keys[long] = 0
    terms = [data[start:end].decode() for start, end in zip(first[long].tolist(), last[long].tolist(), strict=True)]
    tokens = Tokens(rows, counts, keys, terms)
    if others:
        tokens += of_json([vectors[i] for i in others], others)
    return tokens, sorted(unclear | cut)


def _rows_with(text: str, sign: str, rows: Sequence[str]) -> list[int]:
    """Which rows have a sign, which few do; ``text``: the rows one after another."""
    return [i for i, row in enumerate(rows) if sign in row] if sign in text else []
