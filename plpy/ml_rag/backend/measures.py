"""How an answer agrees with those that are expected, as SQuAD's evaluation has it (Rajpurkar et al. 2016)."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Iterable

_MARKER = re.compile(r"\[[0-9]+\]")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
#: ideographs and kana stand alone, as in CMRC's evaluation, and their punctuation goes too
_WIDE_PUNCTUATION = re.compile(
    "[\u3001-\u3003\u3008-\u3011\u3014-\u301f\uff01-\uff0f\uff1a-\uff20\uff3b-\uff40\uff5b-\uff65]"
)
_IDEOGRAPH = re.compile("([\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff])")
_ARTICLE = re.compile(r"\b(a|an|the)\b")


def _words(answer: str) -> list[str]:
    """In lower case, without punctuation, articles and the markers of citations."""
    text = _MARKER.sub("", answer).lower().translate(_NO_PUNCTUATION)
    text = _ARTICLE.sub(" ", _WIDE_PUNCTUATION.sub(" ", text))
    return _IDEOGRAPH.sub(r" \1 ", text).split()


def of_answer(answer: str | None, expected: Iterable[str | None]) -> dict[str, float]:
    """The best of equal, F1 of the words, and contained, each 0 to 1."""
    words = _words(answer or "")
    exact = contains = 0
    f1: float = 0
    for wanted in (_words(text) for text in expected if text is not None):
        if wanted == words:
            exact = f1 = contains = 1
        elif wanted and words:
            shared = sum((Counter(words) & Counter(wanted)).values())
            f1 = max(f1, 2 * shared / (len(words) + len(wanted)))
            if f" {' '.join(wanted)} " in f" {' '.join(words)} ":
                contains = 1
    return {"answer_exact": exact, "answer_f1": f1, "answer_contains": contains}
