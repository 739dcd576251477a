"""pipeline/rerank: the order and the scores of the stage, and option "rerank" of ml_rag.

fake-rerank scores the share of the query's distinct words that occur in the text (see engines/fake.py).
"""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from psycopg.types.json import Jsonb

from support.cluster import Connection, Database
from support.hostile_server import hostile, reply
from support.stores import answer, create_store, error, fake_embedding, insert, search

#: text, distance
HITS = (
    "ARRAY(SELECT ROW('s', 'd', 1, '1', i, t, i * 0.1, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL)"
    "::ml_rag.hit FROM unnest(%s::text[]) WITH ORDINALITY AS u (t, i) ORDER BY i)"
)


def rerank(connection: Connection, query: str | None, texts: list[str] | None, options: Any = None) -> list[Any]:
    """segment number, segment, rerank_score, distance of each hit the stage returns"""
    return connection.execute(
        f"SELECT segment_number, segment, rerank_score, distance::float FROM ml_rag.rerank(%s, {HITS}, %s)",
        (query, texts, None if options is None else Jsonb(options)),
    ).fetchall()


def test_best_first_and_equals_in_the_order_they_came_in(module_asker: Connection) -> None:
    texts = ["green", "red", "blue and red", "blue", "grey", "red, red"]
    assert rerank(module_asker, "red blue", texts) == [
        (3, "blue and red", 1.0, 0.3),
        (2, "red", 0.5, 0.2),
        (4, "blue", 0.5, 0.4),
        (6, "red, red", 0.5, 0.6),
        (1, "green", 0.0, 0.1),
        (5, "grey", 0.0, 0.5),
    ]


@pytest.mark.parametrize(
    ("least", "kept"), [(None, [3, 2, 4, 1]), (0, [3, 2, 4, 1]), (0.5, [3, 2, 4]), (0.51, [3]), (1, [3])]
)
def test_min_score_keeps_what_reaches_it(module_asker: Connection, least: float | None, kept: list[int]) -> None:
    found = rerank(module_asker, "red blue", ["green", "red", "blue red", "blue"], {"min_score": least})
    assert [row[0] for row in found] == kept
    assert (rerank(module_asker, "red", ["green"], {"min_score": least}) == []) == bool(least)


@pytest.mark.parametrize("texts", [None, []])
def test_no_hits_need_no_model(owner: Connection, texts: list[str] | None) -> None:
    owner.execute("SELECT ml_rag.configure('model_server', 'unix:/no/such.sock')")
    assert rerank(owner, "red", texts) == []


def test_every_field_of_a_hit_is_kept(module_asker: Connection) -> None:
    row = module_asker.execute(
        "SELECT h.* FROM ml_rag.rerank('red', ARRAY[ROW('s.t', 'd', 7, 'k', 3, 'red', 0.25, '{\"a\": 1}', 2.5, 0.75,"
        " NULL, '(0,1)', 2, 4, NULL, NULL)::ml_rag.hit]) AS h"
    ).fetchone()
    assert row is not None
    assert [*row[:6], float(row[6]), *row[7:11]] == ["s.t", "d", 7, "k", 3, "red", 0.25, {"a": 1}, 2.5, 0.75, 1.0]


def test_more_texts_than_one_request_or_batch_holds(module_asker: Connection) -> None:
    texts = [f"word{n} red" if n % 100 == 7 else f"word{n}" for n in range(2500)]
    found = rerank(module_asker, "red", texts)
    assert len(found) == 2500
    assert [row[0] for row in found[:25]] == [n + 1 for n in range(2500) if n % 100 == 7]
    assert [row[0] for row in found[25:]] == [n + 1 for n in range(2500) if n % 100 != 7]


@pytest.mark.parametrize("query", [None, "", " \n\t"])
def test_empty_query(module_asker: Connection, query: str | None) -> None:
    with error("22023", "the query is empty"):
        rerank(module_asker, query, ["red"])


@pytest.mark.parametrize("query", ["'; DROP TABLE x; --", "& | ! : * ( )", "🙂", "x " * 10_000, '"', "\\"])
def test_odd_queries_and_texts(module_asker: Connection, query: str) -> None:
    found = rerank(module_asker, query, [query, "", "🙂" * 1000, "y" * 1_000_000])
    assert sorted(row[0] for row in found) == [1, 2, 3, 4]
    assert all(0 <= row[2] <= 1 for row in found)


def test_models_that_cannot(module_asker: Connection) -> None:
    with error("22023", "no-such-model"):
        rerank(module_asker, "q", ["t"], {"model_id": "no-such-model"})
    for model in ("fake-embed", "fake-generate"):
        with error("22023", model, "fake-rerank"):
            rerank(module_asker, "q", ["t"], {"model_id": model})


def test_without_its_files_the_model_is_named_and_how_to_get_it(owner: Connection, asker: Connection) -> None:
    owner.execute("SELECT ml_rag.configure('rerank_model_id', NULL)")
    create_texts(owner)
    for call in (lambda: rerank(asker, "q", ["t"]), lambda: search(asker, "red", {"rerank": {}})):
        with error("55000", "ms-marco-minilm-l6-v2") as caught:
            call()
        assert "ml-rag models pull ms-marco-minilm-l6-v2" in caught.hint
        assert caught.hint.endswith('\nOr rerank without a model of its own: "model_id": "hybrid".')


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"<html>",
        b"[]",
        b"null",
        b'{"results": 7}',
        b'{"results": []}',
        b'{"results": [7, 8]}',
        b'{"results": [{"index": 0}, {"index": 1}]}',
        b'{"results": [{"index": 0, "relevance_score": 0.5}]}',
        b'{"results": [{"index": 0, "relevance_score": 0.5}, {"index": 0, "relevance_score": 0.5}]}',
        b'{"results": [{"index": 0, "relevance_score": 0.5}, {"index": 2, "relevance_score": 0.5}]}',
        b'{"results": [{"index": 0, "relevance_score": 0.5}, {"index": [1], "relevance_score": 0.5}]}',
        b'{"results": [{"index": 0, "relevance_score": 0.5}, {"index": 1, "relevance_score": "0.5"}]}',
        b'{"results": [{"index": 0, "relevance_score": 0.5}, {"index": 1, "relevance_score": null}]}',
        b'{"results": [{"index": 0, "relevance_score": 0.5}, {"index": 1, "relevance_score": true}]}',
        b'{"results": [{"index": 0, "relevance_score": 0.5}, {"index": 1, "relevance_score": NaN}]}',
        b'{"results": [{"index": 0, "relevance_score": 0.5}, {"index": 1, "relevance_score": 1.5}]}',
        b'{"results": [{"index": 0, "relevance_score": 0.5}, {"index": 1, "relevance_score": -0.1}]}',
    ],
    ids=str,
)
def test_a_server_that_answers_nonsense(owner: Connection, asker: Connection, local_sockets: Any, body: bytes) -> None:
    with hostile(local_sockets, reply(body), owner=owner) as server:
        with error("38000") as caught:
            rerank(asker, "q", ["a", "b"])
        assert "internal error" not in caught.message, caught.detail
        right = {"results": [{"index": 1, "relevance_score": 1}, {"index": 0, "relevance_score": 0.25}]}
        server.handler = reply(right)
        assert [row[:3] for row in rerank(asker, "q", ["a", "b"])] == [(2, "b", 1.0), (1, "a", 0.25)]


def test_no_more_of_a_text_is_sent_than_a_model_reads(owner: Connection, asker: Connection, local_sockets: Any) -> None:
    texts = ["x" * 600_000, "\N{GRINNING FACE}" * 600_000, "y" * 9]
    scored = {"results": [{"index": n, "relevance_score": 0.5} for n in range(3)]}
    with hostile(local_sockets, reply(scored), owner=owner) as server:
        assert [row[1] for row in rerank(asker, "q", texts)] == texts
        body = server.requests[-1].partition(b"\r\n\r\n")[2]
    assert json.loads(body)["documents"] == [text[:524_288] for text in texts]
    assert len(body) < 5 * 524_288 + 1000


def test_server_down(owner: Connection, asker: Connection) -> None:
    owner.execute("SELECT ml_rag.configure('model_server', 'unix:/no/such.sock')")
    with error("08006", "unix:/no/such.sock"):
        rerank(asker, "q", ["t"])


@pytest.mark.parametrize("how", ["timeout", "cancel"])
def test_a_call_under_way_ends_within_a_second(module_db: Database, how: str) -> None:
    import threading

    session = module_db.connect("asker")
    assert rerank(session, "red", ["red"])[0][2] == 1.0
    if how == "timeout":
        session.execute("SET statement_timeout = '300ms'")
    else:
        threading.Timer(0.3, session.cancel).start()
    began = time.monotonic()
    # forty texts of two seconds each
    with error("57014", ours=False):
        rerank(session, "red", ["red"] * 40, {"model_id": "fake-rerank-slow"})
    assert time.monotonic() - began < 1.3
    session.execute("RESET statement_timeout")
    # the model is free again: the server stopped too
    began = time.monotonic()
    assert rerank(session, "red", ["red"], {"model_id": "fake-rerank-slow"})[0][2] == 1.0
    assert time.monotonic() - began < 4


# -- option "rerank" of ml_rag ---------------------------------------------------------------------------------------

TEXTS = ["red", "red green", "green green green red blue", "green", "red red red", "blue", "yellow", "green blue"]


def create_texts(owner: Connection, texts: list[str] | None = None) -> None:
    rows = [("d.txt", 1, 10 * i, t, fake_embedding(t)) for i, t in enumerate(texts or TEXTS)]
    create_store(owner, "public.texts", rows, type="vector(16)")


def numbers(connection: Connection, query: str, options: Any) -> list[int]:
    return [row[4] // 10 for row in search(connection, query, options)]


def test_the_citations_are_in_the_rerankers_order(owner: Connection, asker: Connection) -> None:
    create_texts(owner)
    # by distance: the texts that are nothing but red first
    assert numbers(asker, "red blue", {"n_citations": 8})[:3] != [2, 0, 1]
    rows = search(asker, "red blue", {"n_citations": 4, "rerank": {}})
    assert [row[0] for row in rows] == [1, 2, 3, 4]
    assert rows[0][5] == TEXTS[2]
    assert [row[10] for row in rows] == [1.0, 0.5, 0.5, 0.5]
    # equal ones by their distance
    assert [row[6] for row in rows[1:]] == sorted(row[6] for row in rows[1:])
    assert [row[8:10] for row in rows] == [(None, None)] * 4


def test_answer_and_search_agree(owner: Connection, asker: Connection) -> None:
    create_texts(owner)
    options = {"n_citations": 3, "rerank": {"min_score": 0.5}}
    rows = search(asker, "red blue", options)
    document = answer(asker, "red blue", options)
    assert [c["segment"] for c in document["citations"]] == [row[5] for row in rows]
    assert [c["distance"] for c in document["citations"]] == [float(row[6]) for row in rows]
    assert document["retrieval_info"] == {"method": "n_citations", "threshold": max(float(row[6]) for row in rows)}


def test_candidates_bound_what_the_reranker_sees(owner: Connection, asker: Connection) -> None:
    create_texts(owner)
    near = numbers(asker, "red blue", {"n_citations": 3})
    assert 2 not in near
    # only the nearest three are scored, so that the best of all is not among them
    assert sorted(numbers(asker, "red blue", {"n_citations": 3, "rerank": {"candidates": 3}})) == sorted(near)
    assert numbers(asker, "red blue", {"n_citations": 1, "rerank": {"candidates": 8}}) == [2]
    # never fewer than are wanted
    assert len(numbers(asker, "red blue", {"n_citations": 5, "rerank": {"candidates": 1}})) == 5
    assert len(numbers(asker, "red blue", {"n_citations": 100, "rerank": {"candidates": 1000}})) == len(TEXTS)


def test_default_is_fifty_candidates(owner: Connection, asker: Connection) -> None:
    # 60 texts, the farther the more words they have besides; the last ones hold both words that are asked for
    texts = ["red" + " filler" * n for n in range(59)] + ["red blue" + " filler" * 200]
    create_texts(owner, texts)
    assert numbers(asker, "red blue", {"n_citations": 1, "rerank": {}}) != [59]
    assert numbers(asker, "red blue", {"n_citations": 1, "rerank": {"candidates": 60}}) == [59]
    (default,) = asker.execute("SELECT ml_rag.parse_options('rerank', NULL)").fetchone() or (None,)
    assert default == {"candidates": 50}


def test_thresholds_apply_before(owner: Connection, asker: Connection) -> None:
    create_texts(owner)
    rows = search(asker, "red blue", {"rerank": {}, "retrieval_options": {"max_distance": 0.3, "segment_overlap": 0}})
    assert rows
    assert all(row[6] <= 0.3 for row in rows)
    document = answer(asker, "red blue", {"rerank": {}, "retrieval_options": {"max_distance": 0.3}})
    assert document["retrieval_info"] == {"method": "max_distance", "threshold": 0.3}


def test_neighbours_come_after_and_take_no_part(owner: Connection, asker: Connection) -> None:
    create_store(owner, "public.texts", type="vector(16)")
    texts = ["yellow", "red", "grey", "white", "black", "brown", "green blue red", "pink"]
    insert(owner, "public.texts", [("d.txt", 1, i, t, fake_embedding(t)) for i, t in enumerate(texts)])
    rows = search(asker, "red blue", {"n_citations": 2, "rerank": {}, "retrieval_options": {"segment_overlap": 1}})
    assert [row[5] for row in rows] == ["brown\ngreen blue red\npink", "yellow\nred\ngrey"]
    assert [row[10] for row in rows] == [1.0, 0.5]


def test_neighbours_are_those_of_the_hit_if_its_document_is_another_by_then(owner: Connection) -> None:
    """As when a document is removed while a reranker works, and the next one that is loaded gets its id."""
    create_store(owner, "public.texts", type="vector(16)")
    insert(
        owner, "public.texts", [("d.txt", 1, i, t, fake_embedding(t)) for i, t in enumerate(["red", "grey", "white"])]
    )
    owner.execute(
        "CREATE FUNCTION public.change(q text, texts text[]) RETURNS float8[] LANGUAGE plpgsql AS $$ BEGIN"
        " UPDATE texts SET document_name = 'other.txt', segment = 'secret ' || segment_number;"
        " RETURN array_fill(1.0::float8, ARRAY[cardinality(texts)]); END $$"
    )
    options = {"n_citations": 1, "rerank": {"function": "public.change"}, "retrieval_options": {"segment_overlap": 1}}
    ((_, _, name, _, _, text, *_),) = search(owner, "red", options)
    assert (name, text) == ("d.txt", "red")


def test_nothing_scores_high_enough(owner: Connection, asker: Connection) -> None:
    create_texts(owner)
    assert len(search(asker, "red violet", {"rerank": {"min_score": 0.5}})) == 3
    with error("P0002", "score", "0.5", "0.6") as caught:
        search(asker, "red violet", {"rerank": {"min_score": 0.6}})
    assert "min_score" in caught.hint


def test_options_at_their_limits(owner: Connection, asker: Connection) -> None:
    """In a read-only transaction too."""
    create_texts(owner)
    asker.execute("SET default_transaction_read_only = on")
    for options in (
        {}, *({"candidates": n} for n in (1, 1000)), *({"min_score": score} for score in (0, 1)),
        {"model_id": "fake-rerank"}, {"candidates": None, "min_score": None, "model_id": None},
    ):  # fmt: skip
        assert len(search(asker, "red", {"rerank": options})) == 3, options
    # null is no reranking
    rows = search(asker, "red blue", {"rerank": None})
    assert rows == search(asker, "red blue")
    assert [row[10] for row in rows] == [None] * 3


def test_the_table_routine_takes_it_too(owner: Connection) -> None:
    create_texts(owner)
    owner.execute(
        "CREATE TABLE questions (id int PRIMARY KEY, q text, a jsonb); INSERT INTO questions VALUES (1, 'red blue')"
    )
    options = {"n_citations": 1, "skip_generate": True, "rerank": {}}
    owner.execute("CALL ml_rag_table('public.questions.q', 'public.questions.a', %s)", (Jsonb(options),))
    (document,) = owner.execute("SELECT a FROM questions").fetchone() or (None,)
    assert [c["segment"] for c in document["citations"]] == [TEXTS[2]]
