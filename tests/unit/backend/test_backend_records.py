"""backend/records.py: what is counted, and its pages."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ml_rag.backend import records, watch
from ml_rag.backend.records import ERRORS, PAGE, ROUTINES, SHORTEST, STAGES, Activity, Record

MICROSECONDS = st.integers(0, 10**11)


def test_the_lists_are_what_files_hold_so_nothing_is_ever_moved_in_them() -> None:
    assert ROUTINES[:4] == ("ml_rag", "ml_rag_search", "ml_rag_table", "ml_generate")
    assert ROUTINES.index("ml_rag.generate") == 16
    assert STAGES[:5] == ("total", "discover", "embed", "search", "keyword")
    assert ERRORS[:3] == ("22000", "22023", "42501")
    assert len(STAGES) <= 16
    assert len(ERRORS) <= 24
    assert len(ROUTINES) < 255
    for names in (ROUTINES, STAGES, ERRORS):
        assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("sqlstate", "name"),
    [
        ("22023", "22023"),
        ("22P02", "22xxx"),
        ("57014", "57014"),
        ("57P01", "57xxx"),
        ("42P01", "42P01"),
        ("42883", "42xxx"),
        ("P0002", "P0002"),
        ("P0001", "P0xxx"),
        ("XX000", "XXxxx"),
        ("99999", "other"),
        ("", "other"),
        ("other", "other"),
        ("terminated", "terminated"),
    ],
)
def test_what_an_sqlstate_counts_as(sqlstate: str, name: str) -> None:
    assert ERRORS[records.error_number(sqlstate)] == name


@given(st.lists(st.tuples(st.integers(0, len(STAGES) - 1), MICROSECONDS), max_size=50))
def test_a_record_adds_up_and_comes_back_from_its_page(durations: list[tuple[int, int]]) -> None:
    record = Record(10, 3)
    for stage, microseconds in durations:
        record.add(stage, microseconds)
    back = Record.of_page(bytes(record.page(7)), 7)
    assert back is not None
    assert (back.role, back.routine) == (10, 3)
    for stage in range(len(STAGES)):
        own = [d for s, d in durations if s == stage]
        total, longest, failed, buckets = back.stage(stage)
        assert (total, longest, failed, sum(buckets)) == (sum(own), max(own, default=0), 0, len(own))


@given(st.lists(MICROSECONDS), st.lists(MICROSECONDS))
def test_the_sum_of_two_records_is_a_record_of_both(one: list[int], other: list[int]) -> None:
    a, b, both = Record(1, 1), Record(2, 1), Record(1, 1)
    for durations, into in ((one, (a, both)), (other, (b, both))):
        for i, microseconds in enumerate(durations):
            for record in into:
                record.add(i % 3, microseconds)
                record.fail(i % 4, i % len(ERRORS))
                record.add_tokens(i, 2 * i)
    a.merge(b)
    assert a.page(1) == both.page(1)


def test_a_full_class_of_durations_stays_full() -> None:
    record = Record(1, 1)
    record.add(0, 5)
    record._i[records._I_BUCKETS] = 0xFFFFFFFF
    record.add(0, 5)
    other = Record(1, 1)
    other.add(0, 5)
    record.merge(other)
    assert record.stage(0)[3][0] == 0xFFFFFFFF


@given(st.data())
def test_a_damaged_page_is_no_record(data: st.DataObject) -> None:
    record = Record(1, 1)
    record.add(0, 123)
    page = bytes(record.page(7))
    at = data.draw(st.integers(0, len(page) - 1))
    damaged = bytearray(page)
    damaged[at] ^= data.draw(st.integers(1, 255))
    assert Record.of_page(bytes(damaged), 7) is None
    assert Record.of_page(page[:at], 7) is None
    assert Record.of_page(page, 8) is None
    # what follows was another record's
    assert Record.of_page(page.ljust(PAGE, b"\xff"), 7) is not None


def test_a_record_of_a_routine_that_is_not_known_is_none() -> None:
    assert Record.of_page(bytes(Record(1, len(ROUTINES)).page(7)), 7) is None


@given(MICROSECONDS, MICROSECONDS)
def test_the_classes_of_durations_are_in_order(a: int, b: int) -> None:
    a, b = sorted((a, b))
    assert 0 <= records.bucket(a) <= records.bucket(b) < records.BUCKETS
    if SHORTEST < a < SHORTEST * 2**23:
        assert 2 ** (records.bucket(a) / 2) * SHORTEST <= a * (1 + 1e-9)
        assert a <= 2 ** ((records.bucket(a) + 1) / 2) * SHORTEST * (1 + 1e-9)


@given(st.lists(st.integers(1, 10**8), min_size=1, max_size=200), st.sampled_from([0.5, 0.95, 0.99]))
def test_a_percentile_is_right_to_a_factor_of_the_square_root_of_two(durations: list[int], share: float) -> None:
    record = Record(1, 1)
    for microseconds in durations:
        record.add(0, microseconds)
    _, longest, _, buckets = record.stage(0)
    found = watch.percentile(buckets, share, longest)
    exact = float(np.percentile(durations, 100 * share, method="inverted_cdf"))
    assert 0 < found <= longest
    if exact > SHORTEST * math.sqrt(2):
        assert exact / math.sqrt(2) * 0.999 <= found <= exact * math.sqrt(2) * 1.001
    else:
        assert found <= SHORTEST * math.sqrt(2)


# a NUL cannot be in a text of PostgreSQL's
TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=()))
TEXTS = st.tuples(TEXT, TEXT, TEXT)


@given(TEXTS, st.integers(-1, 2**62), st.integers(0, 2**31))
def test_activity_comes_back_from_its_page(texts: tuple[str, str, str], total: int, done: int) -> None:
    activity = Activity(4711)
    activity.in_flight, activity.role, activity.routine, activity.stage, activity.command = True, 10, 2, 3, 1
    activity.started, activity.stage_started, activity.statement, activity.progress_started = 1, 2, 3, 4
    activity.done, activity.total, activity.failed = done, total, 5
    activity.texts = texts
    back = Activity.of_page(bytes(activity.page()))
    assert back is not None
    for name in ("pid", "in_flight", "role", "routine", "stage", "command", "started", "statement", "done", "total"):
        assert getattr(back, name) == getattr(activity, name)
    for text, kept, size in zip(texts, back.texts, (64, 128, 48), strict=True):
        known = text.encode(errors="replace").decode()
        assert known.startswith(kept)
        # all of it, or what fits without half a character
        assert kept == known or size - 4 < len(kept.encode()) <= size


def test_what_is_no_page_is_no_activity() -> None:
    activity = Activity(1)
    activity.in_flight = True
    page = bytearray(activity.page())
    assert Activity.of_page(bytes(page)) is not None
    assert Activity.of_page(bytes(page[:-1])) is None
    for at in range(4, len(page)):
        damaged = bytearray(page)
        damaged[at] ^= 1
        assert Activity.of_page(bytes(damaged)) is None
    for name, value in (("routine", len(ROUTINES)), ("stage", len(STAGES)), ("command", len(ROUTINES) + 1)):
        other = Activity(1)
        setattr(other, name, value)
        assert Activity.of_page(bytes(other.page())) is None
