"""rank/rank: the contract of ml_rank and ml_rank_rows, and the ranking model "hybrid" against a reference in Python.

fake-rerank scores the share of the query's distinct words that occur in the text (see engines/fake.py).
"""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from support.cluster import Connection, Database
from support.hostile_server import hostile, reply
from support.ranking import rank, rows
from support.stores import create_store, error, fake_embedding, search

RECORDS = [
    {"id": "g", "title": "Green", "content": "grass"},
    {"id": "r", "content": "red"},
    {"id": "rb", "title": "Red", "content": "and blue"},
    {"id": "b", "title": "blue"},
    {"id": "x", "title": "x", "content": "y"},
]


def ids(answer: Any) -> list[str]:
    return [record["id"] for record in answer["records"]]


# -- the contract ----------------------------------------------------------------------------------------------------


def test_the_answer_has_the_records_with_their_scores_best_first(module_asker: Connection) -> None:
    assert rank(module_asker, "red blue", RECORDS) == {
        "model": "fake-rerank",
        "records": [
            {"id": "rb", "title": "Red", "content": "and blue", "score": 1.0},
            {"id": "r", "content": "red", "score": 0.5},
            {"id": "b", "title": "blue", "score": 0.5},
            {"id": "g", "title": "Green", "content": "grass", "score": 0.0},
            {"id": "x", "title": "x", "content": "y", "score": 0.0},
        ],
    }


@pytest.mark.parametrize(
    ("record", "ranked"),
    [
        ({"title": "a", "content": "b"}, {"title": "a", "content": "b", "score": pytest.approx(2 / 3)}),
        ({"title": None, "content": "c"}, {"content": "c", "score": pytest.approx(1 / 3)}),
    ],
)
def test_title_and_content_are_read_together(module_asker: Connection, record: Any, ranked: Any) -> None:
    """And null is as if left out."""
    assert rank(module_asker, "a b c", [{"id": "1", **record}])["records"] == [{"id": "1", **ranked}]


@pytest.mark.parametrize(("n", "count"), [(1, 1), (2, 2), (5, 5), (6, 5), (200, 5), (2**31 - 1, 5), (None, 5)])
def test_top_n(module_asker: Connection, n: int | None, count: int) -> None:
    assert ids(rank(module_asker, "red blue", RECORDS, {"top_n": n})) == ["rb", "r", "b", "g", "x"][:count]


def test_options_as_googles_ranking_api_spells_them(module_asker: Connection) -> None:
    own = {"top_n": 2, "ignore_record_details_in_response": True}
    for model in ("semantic-ranker-512@latest", "semantic-ranker-default-004", "semantic-ranker-fast-004"):
        google = {"topN": 2, "ignoreRecordDetailsInResponse": True, "model": model}
        assert rank(module_asker, "red blue", RECORDS, google) == rank(module_asker, "red blue", RECORDS, own)
    assert rows(module_asker, "red", "{a,b}", "{x,red}", {"topN": 1}) == [(1, "b", 1.0)]
    for bad in ({"topN": 1, "top_n": 1}, {"topN": 0}, {"topN": "1"}, {"ignoreRecordDetailsInResponse": 1}):
        with error("22023", "invalid value for option"):
            rank(module_asker, "red", RECORDS, bad)


@pytest.mark.parametrize("model", ["fake-rerank", "hybrid"])
def test_ids_and_scores_only(module_asker: Connection, model: str) -> None:
    full = rank(module_asker, "red blue", RECORDS, {"model": model})
    short = rank(module_asker, "red blue", RECORDS, {"ignore_record_details_in_response": True, "model": model})
    assert short["model"] == full["model"] == model
    assert short["records"] == [{"id": r["id"], "score": r["score"]} for r in full["records"]]


def test_an_answer_can_be_ranked_again(module_asker: Connection) -> None:
    again = rank(module_asker, "grass", rank(module_asker, "red blue", RECORDS)["records"])
    assert again["records"][0] == {"id": "g", "title": "Green", "content": "grass", "score": 1.0}


def test_equal_scores_and_equal_ids_keep_their_order(module_asker: Connection) -> None:
    records = [{"id": "same", "content": f"red {n}"} for n in range(50)]
    assert [r["content"] for r in rank(module_asker, "red", records)["records"]] == [r["content"] for r in records]


def test_no_records_are_an_empty_answer(module_asker: Connection) -> None:
    assert rank(module_asker, "red", []) == {"model": "fake-rerank", "records": []}
    assert rank(module_asker, "red", [], {"model": "hybrid"}) == {"model": "hybrid", "records": []}
    assert rows(module_asker, "red", [], []) == []


@pytest.mark.parametrize("model", ["fake-rerank", "hybrid"])
def test_two_hundred_records_and_no_more(module_asker: Connection, model: str) -> None:
    records = [{"id": str(n), "content": f"text {n}" + (" red" if n == 150 else "")} for n in range(201)]
    answer = rank(module_asker, "red", records[:200], {"model": model})
    assert (len(answer["records"]), answer["records"][0]["id"]) == (200, "150")
    with error("22023", "201", "200"):
        rank(module_asker, "red", records, {"model": model})
    texts = [record["content"] for record in records]
    assert len(rows(module_asker, "red", texts[:200], texts[:200], {"model": model})) == 200
    with error("22023", "201", "200"):
        rows(module_asker, "red", texts, texts, {"model": model})


def test_rows(module_asker: Connection) -> None:
    cursor = module_asker.execute(
        "SELECT * FROM ml_rank_rows('red blue', ARRAY['a', 'b', 'c'], ARRAY['green', 'red', 'blue red'])"
    )
    types = [(c.name, c.type_display) for c in cursor.description or []]
    assert types == [("rank", "int4"), ("id", "text"), ("score", "float8")]
    assert cursor.fetchall() == [(1, "c", 1.0), (2, "b", 0.5), (3, "a", 0.0)]
    # the bounds of an array do not matter
    assert rows(module_asker, "red", "[0:1]={a,b}", "[5:6]={x,red}", {"top_n": 1}) == [(1, "b", 1.0)]
    assert rows(module_asker, "red", ["a"], ["red"], {"ignore_record_details_in_response": True}) == [(1, "a", 1.0)]


@pytest.mark.parametrize("model", ["fake-rerank", "hybrid"])
def test_works_in_a_read_only_transaction_without_any_table(asker: Connection, model: str) -> None:
    asker.execute("SET default_transaction_read_only = on")
    assert rank(asker, "red blue", RECORDS, {"model": model})["records"][0]["id"] == "rb"
    assert rows(asker, "red", ["a", "b"], ["blue", "red"], {"model": model})[0][1] == "b"


def test_a_stranger_may_not(stranger: Connection) -> None:
    with error("42501", ours=False):
        rank(stranger, "q", RECORDS)


# -- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("query", [None, "", " \n\t"])
@pytest.mark.parametrize("model", ["fake-rerank", "hybrid"])
def test_empty_query(module_asker: Connection, query: str | None, model: str) -> None:
    for records in (RECORDS, []):
        with error("22023", "the query is empty"):
            rank(module_asker, query, records, {"model": model})
    with error("22023", "the query is empty"):
        rows(module_asker, query, ["1"], ["t"], {"model": model})


@pytest.mark.parametrize("records", [None, "null", "7", '"x"', "{}", '{"records": []}', "true"])
def test_records_that_are_no_array(module_asker: Connection, records: str | None) -> None:
    with error("22023", "array"):
        rank(module_asker, "q", records)


GOOD = {"id": "first", "content": "t"}


@pytest.mark.parametrize(
    ("record", "words"),
    [
        (7, ["number"]),
        ("x", ["string"]),
        (None, ["null"]),
        ([], ["array"]),
        ({}, ['"id"']),
        ({"content": "t"}, ['"id"']),
        ({"id": None, "content": "t"}, ['"id"']),
        ({"id": "", "content": "t"}, ['"id"']),
        ({"id": 7, "content": "t"}, ['"id"', "7"]),
        ({"id": ["a"], "content": "t"}, ['"id"']),
        ({"id": "abc"}, ['"abc"', "title", "content"]),
        ({"id": "abc", "title": ""}, ['"abc"', "title", "content"]),
        ({"id": "abc", "title": " ", "content": "\n"}, ['"abc"', "title", "content"]),
        ({"id": "abc", "title": None, "content": None}, ['"abc"', "title", "content"]),
        ({"id": "abc", "content": 7}, ['"abc"', "content", "text"]),
        ({"id": "abc", "title": {}}, ['"abc"', "title", "text"]),
        ({"id": "abc", "title": "t", "content": False}, ['"abc"', "content", "text"]),
        ({"id": "abc", "content": "t", "contents": "t"}, ['"abc"', '"contents"']),
        ({"id": "i" * 5000, "text": "t"}, ["i" * 100]),
    ],
    ids=str,
)
def test_a_bad_record_is_named(module_asker: Connection, record: Any, words: list[str]) -> None:
    with error("22023", "record 2 ", *words) as caught:
        rank(module_asker, "q", [GOOD, record, GOOD])
    assert len(caught.detail) < 300


def test_numbers_too_large_and_nul_escapes(module_asker: Connection) -> None:
    # a score is not read; jsonb itself takes numbers of any size, and no NUL
    assert ids(rank(module_asker, "t", '[{"id": "1", "content": "t", "score": 1e400}]')) == ["1"]
    with error("22023", '"id"'):
        rank(module_asker, "t", '[{"id": 1e400, "content": "t"}]')
    for n in ("1e400", "-1e400", "2147483648", "0", "-1", "1.5", '"1"', "true", "[]"):
        with error("22023", "top_n"):
            module_asker.execute("SELECT ml_rank('t', '[]', %s)", (f'{{"top_n": {n}}}',))
    with error("22P05", ours=False):
        rank(module_asker, "t", '[{"id": "1", "content": "a\\u0000b"}]')
    # an escaped backslash before u0000 is just text
    assert ids(rank(module_asker, "t", r'[{"id": "\\u0000", "content": "t"}]')) == [r"\u0000"]


@pytest.mark.parametrize(
    "options",
    [
        {"topn": 1}, [],
        *({"model": bad} for bad in ("", "no-such-model", "fake-embed", "fake-generate")),
    ],
    ids=str,
)  # fmt: skip
def test_bad_options(module_asker: Connection, options: Any) -> None:
    with error("22023"):
        rank(module_asker, "q", RECORDS, options)
    with error("22023"):
        rows(module_asker, "q", ["1"], ["t"], options)


@pytest.mark.parametrize(
    ("ids", "texts", "words"),
    [
        (None, None, ["NULL"]),
        (["a"], None, ["1 ids", "NULL"]),
        (None, ["a"], ["NULL ids"]),
        (["a", "b"], ["t"], ["2 ids", "1 texts"]),
        (["a", None], ["t", "t"], ["record 2 ", "id"]),
        (["a", ""], ["t", "t"], ["record 2 ", "id"]),
        (["a", "b"], ["t", None], ["record 2 ", '"b"']),
        (["a", "b"], ["t", " "], ["record 2 ", '"b"']),
    ],
)
def test_bad_rows(module_asker: Connection, ids: Any, texts: Any, words: list[str]) -> None:
    with error("22023", *words):
        rows(module_asker, "q", ids, texts)


@pytest.mark.parametrize("model", ["fake-rerank", "hybrid"])
@pytest.mark.parametrize(
    "text",
    [
        "x" * 1_000_000,
        "word " * 200_000,
        "漢字" * 300_000,
        "🙂" * 250_000,
        "'",
        "& | ! : * ( )",
        '"\\',
        "<b>",
        "\x01\x1f",
    ],
    ids=lambda text: f"{text[:8]!r}*{len(text)}",
)
def test_odd_and_huge_texts(module_asker: Connection, text: str, model: str) -> None:
    records = [{"id": "a", "content": "red"}, {"id": "b", "title": text, "content": text}]
    for query in ("red", text):
        answer = rank(module_asker, query, records, {"model": model, "ignore_record_details_in_response": True})
        assert sorted(ids(answer)) == ["a", "b"]
        assert all(0 <= record["score"] <= 1 for record in answer["records"])


# -- which model ranks ------------------------------------------------------------------------------------------------


def test_hybrid_ranks_where_the_default_models_files_are_missing(owner: Connection, asker: Connection) -> None:
    owner.execute("SELECT ml_rag.configure('rerank_model_id', NULL)")
    assert rank(asker, "red blue", RECORDS) == rank(asker, "red blue", RECORDS, {"model": "hybrid"})
    assert rank(asker, "red blue", RECORDS)["model"] == "hybrid"
    # but not where it is named
    for call in (rank, lambda c, q, r, o: rows(c, q, ["1"], ["t"], o)):
        with error("55000", "ms-marco-minilm-l6-v2") as caught:
            call(asker, "q", RECORDS, {"model": "ms-marco-minilm-l6-v2"})
        assert "ml-rag models pull ms-marco-minilm-l6-v2" in caught.hint


def test_the_default_model_is_a_setting(owner: Connection, asker: Connection) -> None:
    owner.execute("SELECT ml_rag.configure('rerank_model_id', 'hybrid')")
    assert rank(asker, "red blue", RECORDS)["model"] == "hybrid"
    owner.execute("SELECT ml_rag.configure('rerank_model_id', 'no-such-model')")
    with error("22023", "no-such-model"):
        rank(asker, "q", RECORDS)


def test_hybrid_in_option_rerank(owner: Connection, asker: Connection) -> None:
    owner.execute("SELECT ml_rag.configure('rerank_model_id', NULL)")
    texts = ["red", "red green", "blue and red", "green", "yellow"]
    create_store(owner, "t", [("d", 1, 10 * i, t, fake_embedding(t)) for i, t in enumerate(texts)], type="vector(16)")
    found = search(asker, "red blue", {"n_citations": 5, "rerank": {"model_id": "hybrid"}})
    ranked = rank(asker, "red blue", [{"id": row[5], "content": row[5]} for row in found], {"model": "hybrid"})
    want = [(r["id"], pytest.approx(r["score"], abs=1e-4)) for r in ranked["records"]]
    assert [(row[5], row[10]) for row in found] == want
    assert found[0][5] == "blue and red"
    least = found[1][10]
    assert len(search(asker, "red blue", {"rerank": {"model_id": "hybrid", "min_score": least}})) == 2


def test_server_down(owner: Connection, asker: Connection) -> None:
    owner.execute("SELECT ml_rag.configure('model_server', 'unix:/no/such.sock')")
    for options in (None, {"model": "hybrid"}, {"model": "fake-rerank"}):
        with error("08006", "unix:/no/such.sock"):
            rank(asker, "q", RECORDS, options)


@pytest.mark.parametrize("body", [b"[]", b"{}", b'{"data": 7}', b'{"data": [7, {"id": 7}]}', b"<html>"], ids=str)
def test_a_server_that_answers_nonsense(owner: Connection, asker: Connection, local_sockets: Any, body: bytes) -> None:
    with hostile(local_sockets, reply(body), owner=owner):
        for options in (None, {"model": "hybrid"}, {"model": "fake-rerank"}):
            with error("38000") as caught:
                rank(asker, "q", RECORDS, options)
            assert "internal error" not in caught.message, caught.detail


@pytest.mark.parametrize("model", ["fake-rerank-slow", "hybrid"])
@pytest.mark.parametrize("how", ["timeout", "cancel"])
def test_a_call_under_way_ends_within_a_second(db: Database, model: str, how: str) -> None:
    db.connect().execute("SELECT ml_rag.configure('embed_model_id', 'fake-embed-slow')")
    session = db.connect("asker")
    session.execute("SELECT ml_rag.model_server()")
    records = [{"id": str(n), "content": "red"} for n in range(200)]
    if how == "timeout":
        session.execute("SET statement_timeout = '300ms'")
    else:
        threading.Timer(0.3, session.cancel).start()
    began = time.monotonic()
    with error("57014", ours=False):
        rank(session, "red", records, {"model": model})
    assert time.monotonic() - began < 1.3
    session.execute("RESET statement_timeout")
    assert rank(session, "red", records)["model"] == "fake-rerank"
