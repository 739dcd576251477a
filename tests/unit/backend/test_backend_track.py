"""backend/track.py and session.py: calls, resets, progress, and the files of databases that are gone."""

from __future__ import annotations

import importlib
import os
from pathlib import Path

import pytest

from ml_rag.backend import records, session, slots, track, watch
from ml_rag.backend.slots import FOLDER
from support.backend_track import DATABASE, Plpy, begin, count, data_directory, in_process, totals

__all__ = ["data_directory"]

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")


def test_a_statement_that_is_to_end_does_end() -> None:
    plpy = Plpy()
    plpy.error = "57014"
    assert begin(plpy) == -1
    assert track.ending() == ("57014", "canceling statement")
    plpy.error = "53200"
    assert begin(plpy) is None
    plpy.error = None
    session.state.check_at = session.state.retry_at = 0.0
    assert begin(plpy) is not None


def test_files_of_databases_that_are_gone_are_removed(data_directory: Path) -> None:
    folder = data_directory / FOLDER
    gone, known, own = ("ml_rag.77.1", "ml_rag.77.9"), ("ml_rag.79.1", "ml_rag.79.9"), ("ml_rag.5.9",)
    others = ("pgss.77.1", "ml_rag.77", "ml_rag.77.1.old", "ml_rag.x.1", f"ml_rag.{2**32}.1")
    for name in (*gone, *known, *own, *others):
        (folder / name).write_bytes(b"")
    plpy = Plpy()
    plpy.databases += [79]
    count(plpy)
    assert {path.name for path in folder.iterdir()} == {*known, *own, *others, "ml_rag.5.1"}
    # not the first session of this database alone: any that is new
    (folder / gone[0]).write_bytes(b"")
    count(plpy)
    in_process(lambda: count(plpy))
    assert not (folder / gone[0]).exists()
    assert totals() == {"ml_rag": (3, 0)}


def test_the_file_is_nobody_elses_to_read(data_directory: Path) -> None:
    before = os.umask(0)
    try:
        count(Plpy())
    finally:
        os.umask(before)
    assert (data_directory / slots.path_of(DATABASE)).stat().st_mode & 0o777 == 0o600


def test_a_reset_reaches_the_processes_that_count() -> None:
    count(Plpy(), 3)
    since = watch.reset(Plpy())
    assert totals() == {}
    count(Plpy(), 2)
    assert totals() == {"ml_rag": (2, 0)}

    in_process(lambda: watch.reset(Plpy()))
    assert totals() == {}
    count(Plpy(), 4)
    assert totals() == {"ml_rag": (4, 0)}
    (row, *_) = watch.stats(Plpy())
    assert row[-1] > since


def test_calls_inside_calls_have_a_bound() -> None:
    plpy = Plpy()
    calls = [begin(plpy) for _ in range(track.MAX_DEPTH + 10)]
    assert calls[-1] is None
    assert calls[0] is not None
    track.end(calls[0], track.SUCCESS)
    assert totals() == {"ml_rag": (track.MAX_DEPTH, 0)}


def test_a_session_of_more_calls_than_an_integer_counts_goes_on() -> None:
    plpy = Plpy()
    count(plpy)
    session.state.last_call = track.MAX_CALL - 1
    assert begin(plpy) == track.MAX_CALL
    assert begin(plpy) == 1


def test_progress_of_a_call_inside_one_that_tells_of_its_own_is_not_shown() -> None:
    plpy = Plpy()
    outer, inner = begin(plpy, "vector_store_load"), begin(plpy, "ml_rag.enable_keyword_search")
    assert outer is not None
    assert inner is not None
    track.progress(outer, "public.docs", "loading documents", 3, 10, 1)
    track.progress(inner, "public.docs", "folding", 0, -1, 0)
    (call,) = watch._in_flight(slots.path_of(DATABASE))
    assert records.ROUTINES[call.command - 1] == "vector_store_load"
    assert call.texts[1:] == ("public.docs", "loading documents")
    assert (call.done, call.total, call.failed) == (3, 10, 1)
    track.end(inner, track.SUCCESS)
    track.advance(outer)
    track.progress(outer, "public.docs", "indexing", 10, 10, 1)
    (call,) = watch._in_flight(slots.path_of(DATABASE))
    assert call.texts[2] == "indexing"
    track.end(outer, track.SUCCESS)
    assert list(watch._in_flight(slots.path_of(DATABASE))) == []


def test_what_is_loaded_ahead_of_a_call_is_little() -> None:
    """A call that needs no model must not wait for what talks to models."""
    names = {f"ml_rag.backend.{name}" for name in ("track", "session", "slots", "locks", "records")}
    source = "".join(Path(importlib.import_module(name).__file__ or "").read_text() for name in names)
    for module in ("http", "socket", "json", "ssl", "bridge", "client"):
        assert f"import {module}" not in source
