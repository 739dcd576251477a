"""Questions about tables: the rows of recorded statements, and the choice of tables by the real embedding model.

The real small model is not asked: it would be wrong.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from bench import nlsql

from ml_rag.server.catalogue import load_catalogue, models_dir
from support.cluster import Cluster, Connection

SHARED = Path(os.environ.get("ML_RAG_SHARED") or Path(__file__).resolve().parents[3] / "shared")
FOLDER = SHARED / "data" / "nlsql"

pytestmark = [
    pytest.mark.models,
    pytest.mark.shared,
    pytest.mark.skipif(not FOLDER.is_dir(), reason=f"{FOLDER} does not exist; name its folder by ML_RAG_SHARED"),
]


@pytest.fixture(scope="module")
def questions() -> list[nlsql.Question]:
    return nlsql.read(FOLDER)


@pytest.fixture(scope="module")
def connection(cluster: Cluster, questions: list[nlsql.Question]) -> Iterator[Connection]:
    if os.environ.get("ML_RAG_TEST_MODEL_SERVER"):
        pytest.skip("the database is on another machine, which cannot reach a socket of this one")
    catalogue = load_catalogue()
    for model in ("all_minilm_l6_v2", nlsql.SMALL):
        entry = catalogue.get(model)
        assert entry is not None
        if reason := entry.missing(models_dir(catalogue)):
            pytest.skip(f"{reason}; get it with: {entry.pull_command}")
    with nlsql.recorded_server(questions) as address, cluster.database() as db:
        connection = db.connect()
        for setting, value in {"model_server": address, "embed_model_id": None}.items():
            connection.execute("SELECT ml_rag.configure(%s, %s)", (setting, value))
        nlsql.load(connection, FOLDER)
        yield connection


def test_recorded_statements_give_the_expected_rows(connection: Connection, questions: list[nlsql.Question]) -> None:
    found = nlsql.outcomes(connection, questions, nlsql.RECORDED)
    assert {id_: outcome for id_, outcome in found.items() if outcome != "right"} == {}
    assert len(found) >= 42
    assert nlsql.share(found, questions, {"right"}, answerable=False) == 1


def test_needed_tables_are_among_the_first_eight(connection: Connection, questions: list[nlsql.Question]) -> None:
    assert nlsql.share_of_tables(connection, questions) >= 0.95


def test_the_small_model_refuses(connection: Connection, questions: list[nlsql.Question]) -> None:
    assert set(nlsql.outcomes(connection, questions, nlsql.SMALL).values()) == {"refused"}


def test_other_rows_are_noticed(connection: Connection, questions: list[nlsql.Question]) -> None:
    """So that the others can fail."""
    other = nlsql.Question("x", questions[0].text, "SELECT 7", (), is_ordered=False)
    assert nlsql.outcome(connection, other, nlsql.RECORDED) == "wrong"
    assert nlsql.outcome(connection, other, "no-such-model") == "error 22023"
    unknown = nlsql.Question("x", "What was never recorded?", None, (), is_ordered=False)
    assert nlsql.outcome(connection, unknown, nlsql.RECORDED) == "refused"
