"""How many rows that pass a filter are looked up by words, without a database."""

from __future__ import annotations

import pytest

from ml_rag.backend.retrieval import filters


@pytest.mark.parametrize("n", [1, 3, 100])
@pytest.mark.parametrize("rows", [100.0, 20_000.0, 1e6, 1e9])
def test_rows_are_looked_up_until_the_best_of_all_take_less(rows: float, n: int) -> None:
    most = filters._looked_up(rows, n)
    assert filters._likely_rows(rows, n, most, 0) is None
    is_bound = most == filters._MOST
    assert is_bound or filters._likely_rows(rows, n, most + 1, 0) is not None


def test_of_a_table_that_was_never_analyzed_as_many_are_looked_up_as_may_be() -> None:
    assert filters._looked_up(0, 3) == filters._MOST
    found = filters.Filtered(" AND true", [], 0, 0, is_uncounted=True)
    beyond = filters.lookup_beyond(found, filters.Lookup(3, most=filters._MOST), 3)
    assert beyond == filters.Lookup(4 * 3 + 100)


def test_beyond_what_is_looked_up_the_best_rows_are_likely_to_suffice() -> None:
    found = filters.Filtered(" AND true", [], 100_000, 0, is_uncounted=True)
    most = filters._looked_up(found.rows, 3)
    assert filters.lookup_beyond(found, filters.Lookup(3, most=most), 3).is_likely
