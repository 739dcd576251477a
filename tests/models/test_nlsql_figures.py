"""Questions about tables: the rows of recorded statements, and the choice of tables by the real embedding model.

The real small model is not asked: it would be wrong.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from bench import nlsql

from support.cluster import Cluster, Connection
from support.real_model import need_models, need_own_machine
from support.shared_data import SHARED

FOLDER = SHARED / "nlsql"

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
    need_own_machine()
    need_models("all_minilm_l6_v2", nlsql.SMALL)
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
