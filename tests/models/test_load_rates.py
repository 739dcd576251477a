"""bench/load/rates: searches at a fixed rate beside other work, in small."""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from pathlib import Path
from typing import Any

import pytest
from bench.load import rates
from bench.load.sessions import Call
from psycopg.conninfo import make_conninfo
from rich.console import Console

from support.cluster import Cluster
from support.real_model import need_models, need_own_machine
from support.servers import running_server

MACHINE = {"cores": "2", "cpu": "a processor"}


def row(rate: float, p50: float = 0.05, p99: float = 0.2, **other: Any) -> dict[str, Any]:
    lost = {"answers": 6.0, "answers lost": 0.0, "loads": 3.0, "loads lost": 0.0}
    return {"rate": rate, "searches": 10, "p50": p50, "p99": p99, "max": p99, "errors": 0, **lost, **other}


def test_a_search_counts_from_the_moment_when_it_was_due() -> None:
    """One session, which takes longer than there is between two searches: they wait for each other more and more."""

    class Slow:
        async def _semantic_search(self) -> None:
            await asyncio.sleep(0.1)

        _hybrid_search = _semantic_search

    calls = asyncio.run(rates.at_rate([Slow()], 20, 0.5))
    assert len(calls) == 10
    began = [call.began for call in calls]
    assert [later - earlier for earlier, later in itertools.pairwise(began)] == pytest.approx([0.05] * 9)
    seconds = [call.seconds for call in calls]
    assert seconds == sorted(seconds)
    assert 0.5 <= seconds[-1] < 1.5
    # with as many sessions as are needed none waits
    calls = asyncio.run(rates.at_rate([Slow() for _ in range(10)], 20, 0.5))
    assert max(call.seconds for call in calls) < seconds[-1] / 2


def test_work_that_reaches_beyond_a_span_counts_by_its_part() -> None:
    calls = [Call("answer", 0, 10), Call("answer", 8, 4), Call("load documents", 0, 1), Call("answer", 0, 1, "failed")]
    assert rates.overlap(calls, "answer", 5, 10) == pytest.approx(0.5 + 0.5)
    assert rates.overlap(calls, "answer", 20, 30) == 0


def test_what_is_lost_is_by_what_was_done_without_searches() -> None:
    begin = time.monotonic()
    beside = [Call("answer", begin + n, 1) for n in range(10)] + [
        Call("answer", begin + 10 + 2 * n, 2) for n in range(5)
    ]
    found = [
        {"rate": 0, "begin": begin, "end": begin + 10, "calls": []},
        {
            "rate": 5,
            "begin": begin + 10,
            "end": begin + 20,
            "calls": [Call("search", 0, 0.1), Call("search", 0, 9, "no")],
        },
    ]
    first, second = rates.figures(found, beside)
    assert (first["answers"], first["answers lost"], second["answers"]) == (pytest.approx(60), 0, pytest.approx(30))
    assert second["answers lost"] == pytest.approx(0.5)
    assert (second["searches"], second["errors"], second["max"]) == (1, 1, 0.1)
    assert math.isnan(first["p50"])


def test_the_verdict_names_the_rate_at_which_it_breaks() -> None:
    assert "up to 5 a second; it breaks at 10. At 5" in rates.verdict([row(0), row(2), row(5), row(10, p99=0.31)])
    assert "at none of these rates; it breaks at 2" in rates.verdict([row(2, p50=0.061)])
    assert rates.is_met(row(5, 0.06, 0.3))
    assert not rates.is_met(row(5, errors=1))
    assert "answers lose 12% and loads 3%." in rates.verdict([row(5, **{"answers lost": 0.12, "loads lost": 0.03})])


def test_a_page_keeps_what_was_written_into_it() -> None:
    document = {"at": "2026-11-25", "machine": MACHINE, "rows": 1000, "seconds": 60, "load": 0.0, "figures": [row(5)]}
    shown = rates.page(document)
    assert rates.kept(f"before\n{shown}\nafter") == shown
    assert "| 5 | 10 | 50 | 200 | 200 | 0 | 6.0 | 0% | 3.0 | 0% |" in shown


@pytest.mark.models
def test_rates_are_measured(cluster: Cluster, reachable_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need_own_machine()
    folder = need_models("all_minilm_l6_v2", "smollm2-135m-instruct")
    socket = reachable_dir / "rates.sock"
    monkeypatch.setattr(rates, "SESSIONS", 4)
    with (
        running_server(fake_models=False, models_dir=folder, socket=socket, config='[server]\nsocket_mode = "0666"\n'),
        cluster.database() as db,
    ):
        db.connect().execute("SELECT ml_rag.configure('model_server', %s)", (f"unix:{socket}",))
        own = make_conninfo(db.dsn, dbname=db.name)
        document = rates.run(own, [0, 2], 6.0, 1000, Console(quiet=True))
    none, two = document["figures"]
    assert document["errors"] == []
    assert (none["searches"], two["searches"]) == (0, 12)
    assert 0 < two["p50"] <= two["p99"] <= two["max"]
    assert none["answers"] > 0
    assert "| 2 | 12 |" in rates.page(document)
