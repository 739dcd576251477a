"""backend/keyword.py and runs.py: packed forms, scores, the best of many; no database."""

from __future__ import annotations

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


@given(st.one_of(st.lists(st.integers(0, 2**bits - 1), max_size=50) for bits in (16, 17, 33, 63)))
def test_integers_survive_packing(values: list[int]) -> None:
    packed = runs.pack(np.array(values, np.int64))
    assert runs.unpack(packed).tolist() == values
    most = max(values, default=0)
    assert len(packed) == 8 + len(values) * (2 if most < 2**16 else 4 if most < 2**32 else 8)


def test_runs_of_before_are_read() -> None:
    """They were packed in four bytes at least."""
    assert runs.unpack(bytes([4, *[0] * 7, 1, 0, 0, 0, 255, 255, 0, 0])).tolist() == [1, 65535]


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
def test_slots_of_the_ids_that_a_run_has(own: list[int], wanted: list[int], first: int) -> None:
    """Ids here are the numbers of ``own``, moved by ``first``."""
    if not own:
        return
    ids = runs.unpack(runs.pack(np.array(own, np.int64)))
    found = runs.slots_of(ids, first, np.array(wanted, np.int64) + first)
    assert [own[slot] for slot in found] == [value for value in wanted if value in set(own)]


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
    (share,) = score.share(np.array([5], np.uint8), np.array([8], np.uint32))
    found = score.factor(3, 2) * share
    idf = np.log(1 + (10 - 3 + 0.5) / (3 + 0.5))
    assert found == pytest.approx(2 * idf * 5 / (5 + k1 * (1 - b + b * 8 / 4)))


def test_a_table_without_any_token_has_no_average_length() -> None:
    score = keyword.Scorer(1.2, 0.75, rows=3, total=0)
    assert score.share(np.array([], np.uint8), np.array([], np.uint32)).size == 0


def test_the_bridge_imports_no_numpy_before_it_is_asked_to(tmp_path: Path) -> None:
    script = "import sys; import ml_rag.backend.bridge as b; assert 'numpy' not in sys.modules; b.keyword()"
    environment = {**os.environ, "PYTHONPATH": str(PLPY)}
    subprocess.run([sys.executable, "-c", script], check=True, env=environment)


def test_without_numpy_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ml_rag.backend.keyword", None)
    with pytest.raises(ModelUnavailable) as caught:
        bridge.keyword()
    assert "python3-numpy" in (caught.value.hint or "")
    with pytest.raises(ModelUnavailable):
        bridge.numpy_version(None)


def test_the_environment_is_left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
    bridge.keyword()
    assert os.environ["OMP_NUM_THREADS"] == "3"
    assert "OPENBLAS_NUM_THREADS" not in os.environ


def test_what_a_session_keeps_of_the_runs_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keyword, "_columns", {})
    monkeypatch.setattr(keyword, "_BYTES_KEPT", 10)

    def keep(name: str, store: int, n: int) -> list[tuple[str, int]]:
        keyword._keep(name, store, (), np.zeros(n, np.uint8))
        return list(keyword._columns)

    assert keep("lengths", 1, 5) == [("lengths", 1)]
    assert keep("ids", 1, 5) == [("lengths", 1), ("ids", 1)]
    # of another store what came before goes; its own lengths never go for the sake of ids
    assert keep("lengths", 2, 6) == [("lengths", 2)]
    assert keep("ids", 2, 6) == [("lengths", 2)]
    assert keep("lengths", 3, 11) == [("lengths", 3)]
    assert keep("ids", 3, 11) == [("lengths", 3)]
    assert keep("lengths", 1, 4) == [("lengths", 1)]
    # it has grown
    assert keep("ids", 1, 4) == [("lengths", 1), ("ids", 1)]
    assert keep("lengths", 1, 8) == [("lengths", 1)]
