"""backend/keyword.py and runs.py: packed forms, scores, the best of many; no database."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ml_rag.backend import bridge, keyword, runs
from ml_rag.errors import ModelUnavailable

PLPY = Path(__file__).parents[3] / "plpy"

counts = st.lists(st.integers(1, 2**32 - 1), max_size=50)
slots = st.sets(st.integers(0, runs.RUN_ROWS - 1), max_size=200).map(sorted)


@given(st.lists(st.integers(0, 2**63 - 1), max_size=50))
def test_integers_survive_packing(values: list[int]) -> None:
    packed = runs.pack(np.array(values, np.int64))
    assert runs.unpack(packed).tolist() == values
    assert len(packed) == 8 + len(values) * (8 if any(value >= 2**32 for value in values) else 4)


@given(st.dictionaries(st.integers(0, runs.RUN_ROWS - 1), st.integers(1, 2**32 - 1), max_size=50))
def test_postings_survive_packing(postings: dict[int, int]) -> None:
    own = sorted(postings)
    packed = runs.as_postings(np.array(own, np.int64), np.array([postings[slot] for slot in own], np.int64))
    found_slots, found_counts = runs.postings_of(packed)
    assert dict(zip(found_slots.tolist(), found_counts.tolist(), strict=True)) == postings


def test_postings_of_usual_counts_take_three_bytes() -> None:
    assert len(runs.as_postings(np.arange(1000), np.full(1000, 255))) == 2 + 3000
    assert len(runs.as_postings(np.arange(1000), np.full(1000, 256))) == 2 + 6000


@given(slots, slots, st.integers(0, 2**40))
def test_what_is_visible_of_a_run(own: list[int], visible: list[int], first: int) -> None:
    """Ids here are the numbers of ``own``, moved by ``first``."""
    if not own:
        return
    ids = runs.pack(np.array(own, np.int64))
    lengths = runs.pack(np.arange(len(own)) + 7)
    packed = b"".join((value + first).to_bytes(8, "big") for value in visible)
    mask = keyword.visible_slots(ids, first, packed)
    expected = [slot for slot, value in enumerate(own) if value in set(visible)]
    assert [slot for slot, bit in enumerate(mask) if bit] == expected
    rows = keyword.visible_rows(mask, ids, first, lengths)
    if not expected:
        assert rows is None
    else:
        assert rows is not None
        found = np.frombuffer(rows, "<i8").reshape(3, -1).tolist()
        assert found == [expected, [own[slot] + first for slot in expected], [slot + 7 for slot in expected]]
    postings = runs.as_postings(np.arange(0, len(own), 2), np.arange(0, len(own), 2) + 1)
    hits = keyword.visible_postings(mask, postings)
    shown = [slot for slot in expected if slot % 2 == 0]
    assert (hits is None) == (not shown)
    if hits is not None:
        assert [part.tolist() for part in runs.postings_of(hits)] == [shown, [slot + 1 for slot in shown]]


@given(slots, slots, slots)
def test_rows_that_are_alive(own: list[int], noted: list[int], waiting: list[int]) -> None:
    postings = runs.as_postings(np.array(own, np.int64), np.ones(len(own), np.int64))
    bits = np.zeros(runs.RUN_ROWS, np.bool_)
    bits[noted] = True
    ids = runs.pack(np.arange(runs.RUN_ROWS) * 2)
    gone = [10 + 2 * slot for slot in waiting] + [11 + 2 * slot for slot in own] + [-5, 10**12]
    found = keyword.live_rows(postings, np.packbits(bits).tobytes(), ids, 10, gone)
    assert found == len(set(own) - set(noted) - set(waiting))
    assert keyword.live_rows(postings, None, None, 10, None) == len(own)


@given(st.lists(st.sampled_from([0.0, 0.5, 1.0, 1.5, 2.0, 7.25]), max_size=300), st.integers(1, 40), st.booleans())
def test_the_best_with_all_that_equal_the_last(scores: list[float], n: int, with_sample: bool) -> None:
    values = np.array(scores)
    sample = np.flatnonzero(values)[::3] if with_sample else None
    found = keyword.best(values, n, sample).tolist()
    ranked = sorted((score for score in scores if score > 0), reverse=True)
    last = ranked[n - 1] if len(ranked) >= n else 0
    assert sorted(found) == [i for i, score in enumerate(scores) if score > 0 and score >= last]
    assert [scores[i] for i in found] == sorted((scores[i] for i in found), reverse=True)


@pytest.mark.parametrize(("k1", "b"), [(1.2, 0.75), (0, 0), (0, 1), (100, 1), (2, 0)])
def test_one_score_by_hand(k1: float, b: float) -> None:
    score = keyword.Scorer(k1, b, rows=10, total=40)
    (found,) = score(3, 2, np.array([5], np.uint8), np.array([8], np.uint32))
    idf = np.log(1 + (10 - 3 + 0.5) / (3 + 0.5))
    assert found == pytest.approx(2 * idf * 5 / (5 + k1 * (1 - b + b * 8 / 4)))


def test_a_table_without_any_token_has_no_average_length() -> None:
    assert keyword.Scorer(1.2, 0.75, rows=3, total=0)(0, 1, np.array([], np.uint8), np.array([], np.uint32)).size == 0


def test_the_bridge_imports_no_numpy_before_it_is_asked_to(tmp_path: Path) -> None:
    script = "import sys; import ml_rag.backend.bridge as b; assert 'numpy' not in sys.modules; b.keyword()"
    environment = {**os.environ, "PYTHONPATH": str(PLPY)}
    subprocess.run([sys.executable, "-c", script], check=True, env=environment)


def test_without_numpy_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ml_rag.backend.keyword", None)
    with pytest.raises(ModelUnavailable) as caught:
        bridge.keyword()
    assert "python3-numpy" in (caught.value.hint or "")
    _, error = bridge.numpy_version(type("Plpy", (), {"SPIError": RuntimeError}))
    assert json.loads(error or "")["sqlstate"] == "55000"


def test_the_environment_is_left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
    bridge.keyword()
    assert os.environ["OMP_NUM_THREADS"] == "3"
    assert "OPENBLAS_NUM_THREADS" not in os.environ
