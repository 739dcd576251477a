"""bench/scale: every curve of docs/scale.md can be taken, in small, and drawn."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from bench.scale import page, rows, sessions, stores, tenants, tuning
from bench.scale.setting import Setting, own_cluster
from psycopg.conninfo import make_conninfo

from support.cluster import Cluster
from support.real_model import need_models, need_own_machine
from support.servers import running_server

pytestmark = pytest.mark.models

FEW = {
    rows: {"SIZES": (300, 600), "LARGEST": (900,), "BARE_BUILD": 300},
    stores: {"COUNTS": (1, 3), "QUICK_ROWS": 300},
    sessions: {"COUNTS": (1, 2), "ROWS": 300, "QUICK_SECONDS": 0.3},
    tenants: {"COUNTS": (2,), "QUICK_ROWS": 300},
    tuning: {"SIZES": (600,), "TEXTS": 50, "QUESTIONS": 5},
}


@pytest.fixture(scope="module")
def setting(cluster: Cluster, reachable_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setting]:
    need_own_machine()
    folder = need_models("all_minilm_l6_v2")
    socket = reachable_dir / "scale.sock"
    config = '[server]\nsocket_mode = "0666"\n'
    with running_server(fake_models=False, models_dir=folder, socket=socket, config=config), cluster.database() as db:
        db.connect().execute("SELECT ml_rag.configure('model_server', %s)", (f"unix:{socket}",))
        with own_cluster(make_conninfo(db.dsn, dbname=db.name), reachable_dir, quick=True, most=False) as setting:
            yield setting


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Setting, "rounds", 6)
    for module, few in FEW.items():
        for name, value in few.items():
            monkeypatch.setattr(module, name, value)


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the document, without figures, that ``page.write`` fills in."""
    document = tmp_path / "scale.md"
    document.write_text("\n".join(f"<!-- written by bench/scale: {name} -->\n<!-- end -->" for name in page.SECTIONS))
    for name, path in {"DOCUMENT": document, "PICTURES": tmp_path, "OUT": tmp_path}.items():
        monkeypatch.setattr(page, name, path)
    return document


@pytest.mark.parametrize(
    "part", [rows, stores, sessions, tenants, tuning], ids=lambda module: module.__name__.split(".")[-1]
)
def test_a_curve(part: Any, setting: Setting, small: None, written: Path) -> None:
    name = part.__name__.split(".")[-1]
    figures = part.measure(setting)
    took = {key: value for row in figures for key, value in row.items() if key.endswith((" ms", " s"))}
    assert took
    assert all(value > 0 for value in took.values()), took
    if part is tuning:
        assert [len([point for point in row["curve"] if point[-1]]) for row in figures] == [1] * 4
    if part is rows:
        # of a few hundred segments an index finds nearly all
        assert all(row["recall"] > 0.9 and row["bare recall"] > 0.9 for row in figures if row["kind"] != "binary")
    machine = {"cores": 2, "cpu": "a processor"}
    document = {"at": "2026-11-23", "machine": machine, "quick": True, "load": 0.0, "figures": figures}
    (written.parent / f"scale_{name}.json").write_text(json.dumps(document, default=float))
    pictures = set() if part is tuning else {written.parent / f"scale-{name}.svg"}
    assert set(page.write()) == {written, *pictures}
    lines = [line for line in written.read_text().splitlines() if line.startswith("| ")]
    # a line for each figure, two where it was taken with and without embedding, below a head of two
    assert len(lines) == 2 + len(figures) * (2 if part is sessions else 1)
    assert all(picture.read_text().startswith("<svg") for picture in pictures)
