"""evaluate/evaluate: runs of the ruler: what they measure, what they keep, who sees them."""

from __future__ import annotations

import json
import re
import threading
import time
from typing import Any

import psycopg
import pytest

from support import programs
from support.cluster import Cluster, Connection, Database, noticed, value_of
from support.stores import create_store, error, fake_embedding

#: the words of each document are its own, so that the question with the same words finds it
DOCUMENTS = {
    "a.txt": "apples oranges pears",
    "b.txt": "violin trumpet drum",
    "c.txt": "mountain river valley",
    "d.txt": "copper silver gold",
}
#: a question that finds a.txt first, by hand: the fake embedding of the text itself
QUESTIONS = "SELECT * FROM (VALUES {}) AS v (id, question, documents, answers, answerable)"


def store(owner: Connection, name: str = "docs") -> None:
    rows = [(n, i, 1, text, fake_embedding(text)) for i, (n, text) in enumerate(DOCUMENTS.items(), start=1)]
    create_store(owner, name, rows, type="vector(16)")


@pytest.fixture
def ready(owner: Connection, asker: Connection) -> Connection:
    store(owner)
    return asker


def row(id_: int, question: str, documents: str = "NULL", answers: str = "NULL", answerable: str = "NULL") -> str:
    return f"({id_}, '{question}', {documents}::text[], {answers}::text[], {answerable}::boolean)"


def evaluate(connection: Connection, *rows: str, **options: Any) -> Any:
    return value_of(
        connection, "SELECT ml_rag_evaluate(%s, %s)", (QUESTIONS.format(", ".join(rows)), json.dumps(options))
    )


def questions(connection: Connection, run: Any) -> dict[str, Any]:
    rows = connection.execute(
        "SELECT question_id, answer, citations, measures, latency, sqlstate, message"
        " FROM ml_rag.evaluation_question WHERE run_id = %s",
        (run["run_id"],),
    ).fetchall()
    names = ("answer", "citations", "measures", "latency", "sqlstate", "message")
    return {r[0]: dict(zip(names, r[1:], strict=True)) for r in rows}


def test_retrieval_is_measured(ready: Connection) -> None:
    run = evaluate(
        ready,
        row(1, "apples oranges pears", "'{a.txt}'"),
        row(2, "violin trumpet drum", "'{a.txt,b.txt}'"),
        row(3, "mountain river valley", "'{nowhere.txt}'"),
        row(4, "copper silver gold"),
        k=[1, 2],
    )
    assert run["questions"] == 4
    assert run["counted"] == dict.fromkeys(run["measures"], 3)
    assert run["measures"]["recall@1"] == pytest.approx((1 + 0.5 + 0) / 3, abs=1e-6)
    assert run["measures"]["citation_match"] == pytest.approx(2 / 3, abs=1e-6)
    assert run["measures"]["mrr"] == pytest.approx(2 / 3, abs=1e-6)
    assert run["errors"] == {}
    assert run["vector_store"] == ["public.docs"]
    assert run["models"] == {"embed": ["fake-embed"]}
    assert set(run["versions"]) == {"ml_rag", "postgresql", "pgvector", "model_server"}
    assert set(run["latency"]) == {"retrieval", "discover", "embed", "search"}
    latency = run["latency"]["retrieval"]
    assert 0 < latency["p50"] <= latency["p95"]
    found = questions(ready, run)
    for q in found.values():
        assert 0 < sum(q["latency"].values()) - q["latency"]["retrieval"] <= q["latency"]["retrieval"]
    assert found["1"]["citations"][0]["document_name"] == "a.txt"
    # what ml_rag cites by itself is 3 segments; the fourth was found as well, but is shown only where k asks for it
    assert [c["relevant"] for c in found["1"]["citations"]] == [True, False, False]
    assert found["1"]["measures"]["citation_share"] == pytest.approx(1 / 3)
    assert "relevant" not in found["4"]["citations"][0]
    assert found["4"]["measures"] == {}
    assert all("segment" not in c for q in found.values() for c in q["citations"])


def test_the_measures_of_a_run_are_the_means_of_its_questions(ready: Connection) -> None:
    run = evaluate(ready, *(row(i, text, "'{a.txt,c.txt}'") for i, text in enumerate(DOCUMENTS.values())))
    found = questions(ready, run).values()
    assert "recall@10" in run["measures"]
    for name, mean in run["measures"].items():
        assert mean == pytest.approx(sum(q["measures"][name] for q in found) / len(found), abs=1e-6)


def test_options_of_ml_rag_reach_the_search(ready: Connection) -> None:
    question = row(1, "apples oranges pears", "'{a.txt}'")
    run = evaluate(ready, question, options={"exclude_document_name": ["a.txt"]})
    assert run["measures"]["recall@10"] == 0
    run = evaluate(ready, question, options={"n_citations": 1})
    assert len(questions(ready, run)["1"]["citations"]) == 1
    run = evaluate(ready, question, options={"rerank": {"candidates": 4}})
    assert run["models"] == {"embed": ["fake-embed"], "rerank": "fake-rerank"}
    reranked = questions(ready, run)["1"]
    assert reranked["citations"][0]["rerank_score"] == 1
    assert reranked["latency"]["rerank"] > 0


def test_more_is_looked_at_than_is_cited(owner: Connection, asker: Connection) -> None:
    """Ten documents are found though the nearest has nine segments; what counts as citation stays what ml_rag cites."""
    rows = [("near", 1, i, "apples", fake_embedding("apples")) for i in range(9)]
    rows += [(f"d{i}", i, 1, f"apples word{i}", fake_embedding(f"apples word{i}")) for i in range(2, 11)]
    create_store(owner, "docs", rows, type="vector(16)")
    run = evaluate(asker, row(1, "apples", "'{d10}'"))
    assert run["measures"]["recall@10"] == 1
    assert run["measures"]["citation_match"] == 0
    run = evaluate(asker, row(1, "apples", "'{d10}'"), options={"n_citations": 10})
    assert run["measures"]["recall@10"] in (0, 1)
    assert len(questions(asker, run)["1"]["citations"]) == 10


def test_answers_are_measured(ready: Connection) -> None:
    run = evaluate(
        ready,
        row(1, "apples", "'{a.txt}'", "'{fake answer to apples documents 1, x}'", "true"),
        row(2, "violin", "NULL", "'{violin}'", "true"),
        row(3, "do not know", "NULL", "NULL", "true"),
        row(4, "do not know", "NULL", "NULL", "false"),
        row(5, "copper", "NULL", "NULL", "false"),
        generate=True,
        options={"n_citations": 1},
    )
    found = questions(ready, run)
    assert found["1"]["answer"] == "fake answer to: apples [documents: 1]"
    assert found["1"]["measures"]["answer_exact"] == 1
    assert found["2"]["measures"]["answer_contains"] == 1
    assert 0 < found["2"]["measures"]["answer_f1"] < 1
    assert run["measures"]["refused_wrongly"] == pytest.approx(1 / 3, abs=1e-6)
    assert run["measures"]["refused_rightly"] == pytest.approx(1 / 2)
    assert run["counted"]["refused_rightly"] == 2
    assert run["measures"]["answer_length"] == sum(len(q["answer"]) for q in found.values()) / 5
    assert set(run["latency"]) == {"retrieval", "discover", "embed", "search", "generate"}
    assert run["models"]["generate"] == "fake-generate"


def test_what_counts_as_a_refusal_can_be_set(ready: Connection) -> None:
    rows = [row(1, "apples", answerable="false"), row(2, "violin", answerable="true")]
    assert evaluate(ready, *rows, generate=True)["measures"]["refused_rightly"] == 0
    run = evaluate(ready, *rows, generate=True, refusal_pattern="^FAKE ANSWER to: apples")
    assert (run["measures"]["refused_rightly"], run["measures"]["refused_wrongly"]) == (1, 0)


def test_abstaining_is_refusing(ready: Connection) -> None:
    rows = [row(1, "apples oranges pears", answerable="true"), row(2, "zebra quagga okapi", answerable="false")]
    options = {"retrieval_options": {"max_distance": 0.01}, "abstain_text": "Nothing there."}
    run = evaluate(ready, *rows, generate=True, options=options)
    assert (run["measures"]["refused_rightly"], run["measures"]["refused_wrongly"]) == (1, 0)
    found = questions(ready, run)
    assert found["2"]["answer"] == "Nothing there."
    assert found["2"]["sqlstate"] is None
    assert "generation" not in found["2"]["latency"]
    # without an answer to give, or told not to abstain, ml_rag fails with P0002, which is a refusal too
    for changed in ({"generate": False}, {"options": {**options, "abstain": False}}):
        run = evaluate(ready, *rows, **{"generate": True, "options": options, **changed})
        assert (run["measures"]["refused_rightly"], run["measures"]["refused_wrongly"]) == (1, 0)
        assert run["errors"] == {"P0002": 1}
        assert questions(ready, run)["2"]["message"] == "no segment within the distance threshold"


def test_a_question_that_fails_counts_as_nothing_found(ready: Connection) -> None:
    run = evaluate(
        ready,
        row(1, "apples oranges pears", "'{a.txt}'"),
        row(2, " ", "'{a.txt}'"),
        row(3, "apples oranges pears", "'{a.txt}'"),
    )
    assert run["errors"] == {"22023": 1}
    assert run["measures"]["recall@1"] == pytest.approx(2 / 3, abs=1e-6)
    failed = questions(ready, run)["2"]
    assert (failed["sqlstate"], failed["message"], failed["citations"]) == ("22023", "the question is empty", [])
    assert failed["measures"]["mrr"] == 0


def test_a_failing_model_fails_the_question(ready: Connection) -> None:
    rows = [row(1, "apples", answers="'{x}'"), row(2, "violin", answers="'{x}'")]
    model = {"model_options": {"model_id": "fake-generate-error"}}
    with error("38000", "every question failed"):
        evaluate(ready, *rows, generate=True, options=model)
    assert ready.execute("SELECT count(*) FROM ml_rag.evaluation_run").fetchone() == (0,)


def test_no_store_is_an_error_at_once(asker: Connection) -> None:
    with error("P0002", "no vector store found"):
        evaluate(asker, row(1, "apples"))


def test_the_model_alone_is_measured_with_no_citations(asker: Connection) -> None:
    run = evaluate(asker, row(1, "apples", answers="'{x}'"), generate=True, options={"n_citations": 0})
    assert run["errors"] == {}
    assert run["measures"]["answer_f1"] == 0


def test_a_judge_that_scores(ready: Connection) -> None:
    run = evaluate(ready, row(1, "apples"), row(2, "do not know"), judge_model_id="fake-generate")
    # the fake model answers with the smallest instance of the schema
    assert (run["measures"]["groundedness"], run["measures"]["relevance"]) == (0, 0)
    assert run["counted"]["groundedness"] == 1  # nobody judges a refusal
    assert run["models"]["judge"] == "fake-generate"
    assert set(run["latency"]) == {"retrieval", "discover", "embed", "search", "generate", "judge"}


@pytest.mark.parametrize("model", ["no-such-model", "fake-embed"])
def test_a_judge_that_is_none_ends_the_run_at_once(ready: Connection, model: str) -> None:
    with error("22023", model):
        evaluate(ready, row(1, "apples"), judge_model_id=model)


def test_a_judge_that_fails_judges_nothing(ready: Connection) -> None:
    run = evaluate(ready, row(1, "apples"), judge_model_id="fake-generate-error")
    assert run["errors"] == {}
    assert "groundedness" not in run["measures"]
    assert "relevance" not in run["measures"]


def test_a_lost_model_server_ends_the_run(owner: Connection, ready: Connection) -> None:
    owner.execute("SELECT ml_rag.configure('model_server', 'unix:/nowhere/at/all.sock')")
    with error("08006"):
        evaluate(ready, row(1, "apples"))


def test_a_cancelled_run_ends_and_leaves_nothing(ready: Connection) -> None:
    rows = [row(i, "apples") for i in range(50)]
    threading.Timer(0.7, ready.cancel).start()
    began = time.monotonic()
    with error("57014", ours=False):
        evaluate(ready, *rows, generate=True, options={"model_options": {"model_id": "fake-generate-slow"}})
    assert time.monotonic() - began < 5
    assert ready.execute("SELECT count(*) FROM ml_rag.evaluation_run").fetchone() == (0,)


def test_progress_is_told(ready: Connection) -> None:
    told = noticed(ready)
    ready.execute("SET ml_rag.progress_seconds = 0.000001")
    evaluate(ready, *(row(i, "apples") for i in range(3)))
    counts = [re.findall(r"asking questions: (\d of 3)", line) for line in told]
    assert [count for (count,) in filter(None, counts)] == ["0 of 3", "1 of 3", "2 of 3"]
    assert re.fullmatch(r"summing up: 3 of 3(, .* a second)?", told[-1])


def test_a_warning_is_given_once_for_all_questions(ready: Connection) -> None:
    told = noticed(ready)
    evaluate(ready, *(row(i, "apples") for i in range(3)), options={"vector_store": ["docs", "nowhere"]})
    assert len(told) == 1
    assert "nowhere" in told[0]


# -- what is kept -----------------------------------------------------------------------------------------------------


def test_a_run_is_kept_with_all_it_depends_on(ready: Connection, db: Database) -> None:
    options = {"name": "first", "options": {"n_citations": 2}}
    run = evaluate(ready, row(1, "apples", "'{a.txt}'"), **options)
    kept = ready.execute(
        "SELECT name, role, source, questions, options, stores, models, versions, measures, counted, latency, errors,"
        " seconds > 0, started_at <= clock_timestamp() FROM ml_rag.evaluation_run WHERE run_id = %s",
        (run["run_id"],),
    ).fetchone()
    source = QUESTIONS.format(row(1, "apples", "'{a.txt}'"))
    same = [run[n] for n in ("models", "versions", "measures", "counted", "latency", "errors")]
    assert kept == ("first", db.role("asker"), source, 1, options, ["public.docs"], *same, True, True)


def test_a_run_is_not_kept_where_that_was_said(ready: Connection) -> None:
    ready.execute("SET default_transaction_read_only = on")
    run = evaluate(ready, row(1, "apples", "'{a.txt}'"), keep=False)
    assert run["run_id"] is None
    assert run["measures"]["recall@10"] == 1
    with error("25006", '"keep": false'):
        evaluate(ready, row(1, "apples"))
    assert ready.execute("SELECT count(*) FROM ml_rag.evaluation_run").fetchone() == (0,)


def test_everybody_sees_their_own_runs_only(ready: Connection, tenant: Connection, owner: Connection) -> None:
    run = evaluate(ready, row(1, "apples"))
    count = "SELECT (SELECT count(*) FROM ml_rag.evaluation_run), (SELECT count(*) FROM ml_rag.evaluation_question)"
    assert ready.execute(count).fetchone() == (1, 1)
    assert tenant.execute(count).fetchone() == (0, 0)
    assert owner.execute(count).fetchone() == (1, 1)
    for table in ("evaluation_run", "evaluation_question"):
        for connection in (ready, tenant):
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                connection.execute(f"DELETE FROM ml_rag.{table}".encode())
    forget = f"SELECT ml_rag.forget_evaluation({run['run_id']})".encode()
    # of the superuser, too, its own only
    for connection in (tenant, owner):
        assert connection.execute(forget).fetchone() == (False,)
    assert tenant.execute("UPDATE ml_rag.evaluation_run SET questions = 0").rowcount == 0
    assert owner.execute(count).fetchone() == (1, 1)
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        ready.execute("UPDATE ml_rag.evaluation_run SET measures = '{}'")
    # nobody puts a question into another's run, or a run under another's name or the number of one to come
    with pytest.raises(psycopg.errors.InsufficientPrivilege, match="row-level security"):
        tenant.execute(
            f"INSERT INTO ml_rag.evaluation_question SELECT {run['run_id']}, 'x', 'x', NULL, '[]', '{{}}', '{{}}'"
        )
    for column, value in (("role", "'postgres'"), ("run_id", str(run["run_id"] + 1))):
        with pytest.raises(psycopg.errors.InsufficientPrivilege, match="permission denied"):
            tenant.execute(
                f"INSERT INTO ml_rag.evaluation_run ({column}, started_at, seconds, source, questions, options, stores,"
                " models, versions, measures, counted, latency, errors) OVERRIDING SYSTEM VALUE"
                f" SELECT {value}, now(), 1, '', 1, '{{}}', '{{}}', '{{}}', '{{}}', '{{}}', '{{}}', '{{}}', '{{}}'"
            )
    assert [ready.execute(forget).fetchone() for _ in range(2)] == [(True,), (False,)]
    assert ready.execute("SELECT ml_rag.forget_evaluation(NULL)").fetchone() == (False,)
    assert owner.execute(count).fetchone() == (0, 0)


def test_runs_are_in_a_dump(ready: Connection, owner: Connection, cluster: Cluster, db: Database) -> None:
    run = evaluate(ready, row(1, "apples"), name="dumped")
    dump = programs.run("pg_dump", db, "--no-owner").stdout
    with cluster.database(template="template0") as copy:
        programs.run("psql", copy, "-X", "-q", "-v", "ON_ERROR_STOP=1", input=dump)
        restored = copy.connect("asker")
        assert restored.execute("SELECT run_id, name FROM ml_rag.evaluation_run").fetchall() == [
            (run["run_id"], "dumped")
        ]
        assert restored.execute("SELECT question FROM ml_rag.evaluation_question").fetchall() == [("apples",)]
        again = evaluate(restored, row(1, "apples"))
        assert again["run_id"] > run["run_id"]


# -- conversations -----------------------------------------------------------------------------------------------------

TURNS = [{"role": "user", "content": "violin trumpet"}, {"role": "assistant", "content": "drum"}]


def converse(connection: Connection, *histories: Any, **options: Any) -> Any:
    """A run of a question whose words no document has, with one history each time."""
    rows = ", ".join(["(%s::int, 'how long', '{b.txt}'::text[], %s::jsonb)"] * len(histories))
    values = [value for i, h in enumerate(histories) for value in (i, None if h is None else json.dumps(h))]
    connection.execute("DROP TABLE IF EXISTS conversations")
    connection.execute("CREATE TEMP TABLE conversations (id, question, documents, history) AS VALUES " + rows, values)
    return value_of(connection, "SELECT ml_rag_evaluate('conversations', %s)", (json.dumps(options),))


def test_a_history_is_searched_with(ready: Connection) -> None:
    options = {"options": {"keyword_search": False, "n_citations": 1}}
    found = questions(ready, converse(ready, TURNS, None, [], **options))
    assert found["0"]["citations"][0]["document_name"] == "b.txt"
    assert found["0"]["measures"]["recall@1"] == 1
    assert found["1"]["citations"] == found["2"]["citations"] != found["0"]["citations"]
    run = converse(ready, TURNS, options={"n_citations": 1, "query_options": {"history_tokens": 0}})
    assert questions(ready, run)["0"]["citations"] == found["1"]["citations"]


def test_a_history_is_searched_with_as_the_levels_below_say(ready: Connection, owner: Connection) -> None:
    lower = json.dumps({"query_options": {"history_tokens": 0}, "n_citations": 1})
    owner.execute("SELECT ml_rag.create_preset('short', %s)", (lower,))
    found = questions(ready, converse(ready, TURNS, None, options={"preset": "short"}))
    assert found["0"]["citations"] == found["1"]["citations"]
    owner.execute("SELECT ml_rag.configure('default_options', %s)", (lower,))
    for options in ({}, {"query_options": None}):
        found = questions(ready, converse(ready, TURNS, None, options=options))
        assert (found["0"]["citations"] == found["1"]["citations"]) == (options == {})


def test_a_history_that_is_wrong_fails_its_question(ready: Connection) -> None:
    run = converse(ready, TURNS, {"role": "user"}, [{"role": "robot", "content": "a"}])
    assert run["errors"] == {"22023": 2}
    assert questions(ready, run)["0"]["sqlstate"] is None


def test_the_column_of_the_history_can_have_another_name(ready: Connection) -> None:
    ready.execute("CREATE TEMP TABLE named AS SELECT 'how long' AS question, %s::jsonb AS turns", (json.dumps(TURNS),))
    run = value_of(ready, 'SELECT ml_rag_evaluate(\'named\', \'{"columns": {"history": "turns"}}\')')
    assert questions(ready, run)["1"]["citations"][0]["document_name"] == "b.txt"
    with error("42703", "nowhere"):
        ready.execute('SELECT ml_rag_evaluate(\'named\', \'{"columns": {"history": "nowhere"}}\')')
