"""Properties of splitting that hold for any text and any bounds."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ml_rag.abc import Block, Document
from ml_rag.ingest.split import SPLIT_BY, chunking, split
from ml_rag.ingest.units import Counter

WORD = st.text(st.characters(codec="ascii", categories=("L", "N")), min_size=1, max_size=12)
LINE = st.lists(WORD, min_size=1, max_size=30).map(" ".join)
MARKDOWN = st.lists(
    st.one_of(LINE, LINE.map("# {}".format), LINE.map("- {}".format), LINE.map("{}. More.".format)),
    min_size=1,
    max_size=12,
).map("\n\n".join)


@pytest.mark.fuzz
@settings(deadline=None, max_examples=200)
@given(pages=st.lists(MARKDOWN, min_size=1, max_size=4), split_by=st.sampled_from(SPLIT_BY), limit=st.integers(16, 64))
def test_bounds_order_and_whole_words(pages: list[str], split_by: str, limit: int) -> None:
    document = Document("text", [Block(text, {"page": n}) for n, text in enumerate(pages, start=1)])
    segments = split(document, chunking({"split_by": split_by, "segment_tokens": limit}, 256), Counter())
    assert all(segment.tokens <= limit for segment in segments)
    # each word whole, once, in order
    assert [word for s in segments for word in s.text.split()] == [word for text in pages for word in text.split()]
    for number, text in enumerate(pages, start=1):
        # on its own page, unless that has only a few words
        if split_by == "page" or len(text.split()) > 6 or len(text) > 60:
            found = [word for s in segments if s.metadata["page"] == number for word in s.text.split()]
            assert text.split() == found or " ".join(text.split()) in " ".join(found)
