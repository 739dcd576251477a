"""pipeline/nodes, nodes/transform, nodes/group, nodes/fill, nodes/create, nodes/status: texts made of a store's."""

from __future__ import annotations

import json
import random
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import sql

from support.cluster import Connection, Database, noticed, value_of
from support.documents_server import DocumentsServer
from support.loading import counts, load, write
from support.models_server import ModelsServer, embedding
from support.nodes import create, nodes, refresh
from support.processes import Background, wait_until
from support.stores import Row, answer, create_store, error, fake_embedding, insert, mark, search
from support.vectorizers import run

TEXTS = {
    (1, 1): "Herons wait for fish. Grebes dive.",
    (1, 2): "Loons call at night. Terns hover. Gulls steal.",
    (2, 1): "Swans are heavy. Ducks swim.",
}
SENTENCES = {
    (1, 1): ["Herons wait for fish.", "Grebes dive."],
    (1, 2): ["Loons call at night.", "Terns hover.", "Gulls steal."],
    (2, 1): ["Swans are heavy.", "Ducks swim."],
}
ARM = {"search": "semantic", "in": "sentences"}
WORDS = {"search": "keyword", "in": "sentences"}
LENGTHS = """CREATE FUNCTION public.lengths(query text, segments text[]) RETURNS float8[] LANGUAGE sql
    AS 'SELECT array_agg(length(s)::float8 ORDER BY o) FROM unnest(segments) WITH ORDINALITY AS u (s, o)'"""


def rows(texts: dict[tuple[int, int], str] = TEXTS) -> list[Row]:
    return [(f"d{d}", d, n, text, fake_embedding(text)) for (d, n), text in texts.items()]


@pytest.fixture
def store(owner: Connection, models: ModelsServer) -> Connection:
    """The owner's connection, and the store docs; the embeddings that nodes cost are counted."""
    create_store(owner, "docs", rows(), type="vector(16)")
    owner.execute("SELECT ml_rag.enable_keyword_search('docs')")
    return owner


def found(connection: Connection, query: str, *arms: Any, **options: Any) -> list[tuple[int, int]]:
    try:
        return [(row[3], row[4]) for row in search(connection, query, {"n_citations": 10, "arms": arms, **options})]
    except psycopg.errors.NoDataFound:
        return []


def distance(a: str, b: str) -> float:
    return 1 - sum(x * y for x, y in zip(fake_embedding(a), fake_embedding(b), strict=True))


def status(connection: Connection, name: str = "sentences") -> tuple[Any, ...]:
    row = connection.execute(
        "SELECT rows, pending, failed FROM ml_rag.node_group WHERE store = 'docs'::regclass AND name = %s", (name,)
    ).fetchone()
    assert row is not None
    return row


# -- made and filled ---------------------------------------------------------------------------------------------------


def test_each_segment_becomes_its_sentences_with_their_embeddings(store: Connection, models: ModelsServer) -> None:
    result = create(store, "sentences", transform="sentence")
    assert result.pop("seconds") >= 0
    assert result == {"vector_store": "public.docs", "parents": 3, "nodes": 7, "failed": 0}
    assert nodes(store, "sentences") == SENTENCES
    for text, vector in store.execute("SELECT node, node_embedding::real[] FROM docs_sentences WHERE node_number > 0"):
        assert vector == pytest.approx(embedding(text, "fake-embed"), abs=1e-6)
    indexes = store.execute("SELECT indexdef FROM pg_indexes WHERE tablename = 'docs_sentences'").fetchall()
    assert sum("hnsw (node_embedding vector_cosine_ops)" in row[0] for row in indexes) == 1
    assert status(store) == (7, 0, 0)


def test_names_may_have_hyphens(store: Connection) -> None:
    create(store, "the-sentences", transform="sentence")
    create(store, "the-words", transform="sentence", parent="the-sentences", merge=True)
    for arm in ({**ARM, "in": "the-sentences"}, {**WORDS, "in": "the-words"}):
        hits = answer(store, "Terns", {"arms": [arm], "return": "node", "skip_generate": True})["citations"]
        assert hits[0]["segment"] == "Terns hover."
    store.execute("DELETE FROM docs WHERE document_id = 2")
    assert refresh(store, name="the-words")["failed"] == 0
    assert status(store, "the-sentences") == (5, 0, 0)
    store.execute("SELECT ml_rag.drop_node_group('docs', 'the-words')")


def test_nodes_of_a_table_with_a_percent_sign_under_a_filter(store: Connection) -> None:
    create(store, "sentences", transform="sentence")
    store.execute('ALTER TABLE docs RENAME TO "50%d"; ALTER TABLE docs_sentences RENAME TO "50%s"')
    assert set(found(store, "Swans", ARM, WORDS, filters={"document_id": 1})) == {(1, 1), (1, 2)}


def test_paragraphs_and_nodes_of_nodes(store: Connection) -> None:
    text = "One. Two.\n\nThree. Four."
    insert(store, "docs", [("d3", 3, 1, text, fake_embedding(text))])
    create(store, "paragraphs", transform="paragraph")
    assert nodes(store, "paragraphs")[3, 1] == ["One. Two.", "Three. Four."]
    create(store, "sentences", transform="sentence", parent="paragraphs")
    assert nodes(store, "sentences")[3, 1] == ["One.", "Two.", "Three.", "Four."]
    parents = "SELECT node_number, parent_number FROM docs_sentences WHERE document_id = 3 AND node_number > 0"
    assert store.execute(parents + " ORDER BY 1").fetchall() == [(1, 1), (2, 1), (3, 2), (4, 2)]
    with error("2BP01", "parent"):
        store.execute("SELECT ml_rag.drop_node_group('docs', 'paragraphs')")
    assert found(store, "four", {"search": "keyword", "in": "sentences"}) == [(3, 1)]


def test_without_embeddings_and_index_there_is_nothing_to_search_in(store: Connection, models: ModelsServer) -> None:
    models.requests.clear()
    create(store, "sentences", transform="sentence", embed=False, keyword_search=False)
    assert nodes(store, "sentences") == SENTENCES
    assert models.requests == []
    for arm in (ARM, WORDS):
        with error("55000", 'no vector store has a node group "sentences" to search') as caught:
            found(store, "terns", arm)
        assert "create_node_group" in caught.hint


@pytest.mark.parametrize("name", ["document", "two words", "x" * 41])
def test_a_hint_proposes_a_name_that_is_taken(store: Connection, models: ModelsServer, name: str) -> None:
    for kind in ("semantic", "keyword"):
        with error("55000", f'no vector store has a node group "{name}" to search') as caught:
            found(store, "terns", {"search": kind, "in": name})
        assert caught.hint.startswith("A node group cannot have that name. CALL ml_rag.create_node_group(")
    proposed = re.search("CALL.*?\\)", caught.hint)
    assert proposed is not None
    store.execute(proposed[0].replace("…", '"sentence"'))  # type: ignore[arg-type]
    assert nodes(store, "sentences")


def test_dry_run_makes_nothing(store: Connection) -> None:
    store.execute("SET array_nulls = off")
    assert create(store, "sentences", transform="sentence", dry_run=True) == {"parents": 3, "model_calls": 0}
    assert create(store, "questions", transform="questions", dry_run=True) == {"parents": 3, "model_calls": 3}
    options = {"transform": "summary", "parent": "document", "dry_run": True}
    assert create(store, "summaries", **options) == {"parents": 2, "model_calls": 2}
    assert store.execute("SELECT * FROM ml_rag.node_group").fetchall() == []
    long = " ".join(["word"] * 5000)  # of 24 999 characters: three parts, and a summary of their summaries
    insert(store, "docs", [("d2", 2, 2, long, fake_embedding("word"))])
    assert create(store, "summaries", **options) == {"parents": 2, "model_calls": 5}
    assert create(store, "phrases", transform="keyphrases", parent="document", dry_run=True)["model_calls"] == 4


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("segment", {"transform": "sentence"}, "invalid name of a node group"),
        ("", {"transform": "sentence"}, "invalid name of a node group"),
        ("a b", {"transform": "sentence"}, "invalid name of a node group"),
        ("-a", {"transform": "sentence"}, "invalid name of a node group"),
        ("x" * 41, {"transform": "sentence"}, "invalid name of a node group"),
        ("n", {}, 'option "transform"'),
        ("n", {"transform": "word"}, 'option "transform"'),
        ("n", {"transform": "pg_catalog.upper"}, 'option "transform"'),
        ("n", {"transform": "a.b.c"}, 'option "transform"'),
        ("n", {"transform": "sentence'; DROP TABLE docs"}, 'option "transform"'),
        ("n", {"transform": "sentence", "model_id": "m"}, 'option "model_id"'),
        ("n", {"transform": "sentence", "prompt": "p"}, 'option "prompt"'),
        ("n", {"transform": "context", "parent": "document"}, 'option "parent"'),
        ("n", {"transform": "sentence", "batch_size": 0}, 'option "batch_size"'),
    ],
)
def test_what_cannot_be_made_is_refused_before_anything_is(
    store: Connection, name: str, options: Any, message: str
) -> None:
    with error("22023", message):
        create(store, name, **options)
    assert store.execute("SELECT * FROM ml_rag.node_group").fetchall() == []


@pytest.mark.parametrize("name", ["hash", "node"])
def test_a_key_has_no_name_of_a_column_of_nodes(owner: Connection, models: ModelsServer, name: str) -> None:
    owner.execute(f"CREATE TABLE notes ({name} text PRIMARY KEY, document_name text, segment text)")
    with error("42701", "cannot have node groups", f"Column {name} of its primary key"):
        create(owner, "parts", transform="sentence", store="notes", embed=False)


@pytest.mark.parametrize(
    ("kind", "name"),
    [("timestamptz(3)", "timestamp(3) with time zone"), ("date", "date"), ("float8", "double precision")],
)
def test_nodes_of_documents_have_keys_that_are_the_same_to_all(
    owner: Connection, models: ModelsServer, kind: str, name: str
) -> None:
    """The text of a time depends on the TimeZone and DateStyle of the session."""
    owner.execute(
        f"CREATE TABLE notes (sent {kind}, chat integer, document_name text, segment text, PRIMARY KEY (chat, sent))"
    )
    with error("55000", "cannot have such a node group", name):
        create(owner, "parts", transform="sentence", parent="document", store="notes", embed=False)
    create(owner, "parts", transform="sentence", store="notes", embed=False, keyword_search=False)


def test_names_parents_and_tables_that_are_not_there_or_there_already(store: Connection) -> None:
    with error("42704", 'no node group "paragraphs"'):
        create(store, "sentences", transform="sentence", parent="paragraphs")
    create(store, "x" * 40, transform="sentence")
    with error("42710", "already"):
        create(store, "x" * 40, transform="sentence")
    store.execute("CREATE TABLE docs_taken ()")
    with error("42P07", "docs_taken"):
        create(store, "taken", transform="sentence")
    with error("42704", "no node group"):
        store.execute("SELECT ml_rag.drop_node_group('docs', 'sentences')")
    with error("42704", "no node group"):
        refresh(store, name="sentences")
    store.execute("CREATE TABLE keyless (segment text)")
    with error("55000", "primary key"):
        create(store, "n", "keyless", transform="sentence", embed=False)
    with error("22023", "not a vector store"):
        create(store, "n", "docs_taken", transform="sentence")
    with store.transaction(), error("25001", "transaction block"):
        create(store, "n", transform="sentence")


def test_no_node_group_loses_its_parent_while_it_is_waited_for(db: Database, store: Connection) -> None:
    """Else each refresh of the store would fail, until the orphan is dropped."""
    watcher, other = db.connect(), db.connect(autocommit=False)
    waiting = "SELECT FROM pg_locks WHERE relation = 'docs'::regclass AND NOT granted"
    create(store, "a", transform="paragraph")
    other.execute("LOCK TABLE docs IN SHARE MODE")
    making = Background(lambda: create(store, "b", transform="sentence", parent="a"))
    wait_until(lambda: watcher.execute(waiting).fetchall())
    other.execute("SELECT ml_rag.drop_node_group('docs', 'a')")
    other.commit()
    with error("42704", 'no node group "a"'):
        making.result()
    assert store.execute("SELECT name FROM ml_rag.node_group").fetchall() == []
    create(store, "a", transform="paragraph")
    other.execute("SELECT FROM docs")
    dropping = Background(lambda: store.execute("SELECT ml_rag.drop_node_group('docs', 'a')"))
    wait_until(lambda: watcher.execute(waiting).fetchall())
    create(watcher, "b", transform="sentence", parent="a")
    other.commit()
    with error("2BP01", "is the parent of another one"):
        dropping.result()
    refresh(store)


def test_a_store_that_is_dropped_before_its_node_groups_are_filled(owner: Connection) -> None:
    with error("42P01", "vector store does not exist", ours=False):
        owner.execute("SELECT ml_rag._work(NULL, 'fill_node_groups', '[1]', NULL, false, NULL)")


# -- searched ----------------------------------------------------------------------------------------------------------


def test_hits_count_for_their_segments_by_the_best_node(store: Connection) -> None:
    create(store, "sentences", transform="sentence")
    hits = search(store, "terns hover", {"arms": [ARM], "n_citations": 10})
    distances = {key: min(distance("terns hover", node) for node in of_key) for key, of_key in SENTENCES.items()}
    assert [(row[3], row[4]) for row in hits] == sorted(distances, key=lambda key: (round(distances[key], 4), key))
    for row in hits:
        key = (row[3], row[4])
        assert (row[2], row[5]) == (f"d{key[0]}", TEXTS[key])
        assert row[9] == pytest.approx(distances[key], abs=1e-4)
        assert float(row[6]) == pytest.approx(min(distances[key], distance("terns hover", TEXTS[key])), abs=1e-4)
    assert found(store, "ducks", WORDS) == [(2, 1)]
    assert found(store, "ducks terns", WORDS, n_citations=1) in ([(2, 1)], [(1, 2)])


def test_many_nodes_of_one_segment_leave_room_for_others(store: Connection) -> None:
    text = " ".join(f"Terns hover {i}." for i in range(300))
    insert(store, "docs", [("d3", 3, 1, text, fake_embedding(text))])
    create(store, "sentences", transform="sentence")
    for arm in (ARM, WORDS):
        hits = found(store, "terns hover", {**arm, "candidates": 2}, n_citations=2)
        assert set(hits) == {(3, 1), (1, 2)}


def test_arms_over_segments_and_nodes_are_fused(store: Connection) -> None:
    create(store, "sentences", transform="sentence")
    hits = search(
        store, "gulls", {"n_citations": 10, "arms": [{"search": "semantic", "weight": 0.5}, {**WORDS, "weight": 0.5}]}
    )
    assert (hits[0][3], hits[0][4]) == (1, 2)
    assert hits[0][8] is not None  # the node's BM25
    assert [row[8] for row in hits[1:]] == [None, None]
    explained = answer(
        store, "gulls", {"explain": True, "skip_generate": True, "arms": [{"search": "semantic"}, ARM, WORDS]}
    )
    assert set(explained["explain"]["candidates"]) >= {"semantic", "semantic 2", "keyword"}
    assert explained["explain"]["candidates"]["keyword"] == 1


def test_filters_are_those_of_the_segments(store: Connection) -> None:
    create(store, "sentences", transform="sentence")
    create(store, "parts", transform="sentence", parent="document")
    assert found(store, "terns", ARM, document_name=["d2"]) == [(2, 1)]
    assert found(store, "swim dive", WORDS, filters={"segment_number": 1}) == [(1, 1), (2, 1)]
    assert found(store, "swim dive", WORDS, filters={"n": {"gt": 1}, "segment_number": {"gt": 0}}) == []
    assert found(store, "terns", ARM, required_keywords=["ducks"]) == [(2, 1)]
    parts = {"search": "keyword", "in": "parts"}
    assert found(store, "terns", parts) == [(1, 1), (1, 2)]
    assert found(store, "terns", parts, filters={"segment_number": 1}) == [(1, 1)]


def test_return_says_what_is_cited(store: Connection) -> None:
    create(store, "sentences", transform="sentence")

    def cited(what: str, *arms: Any) -> Any:
        return answer(
            store,
            "terns hover",
            {"return": what, "arms": arms, "n_citations": 1, "skip_generate": True, "citation_fields": ["metadata"]},
        )["citations"][0]

    hybrid = ({"search": "semantic"}, ARM, WORDS)
    for arms in ((ARM,), (WORDS,), hybrid):
        assert cited("segment", *arms)["segment"] == TEXTS[1, 2]
        assert cited("node", *arms)["segment"] == "Terns hover."
        assert cited("node", *arms)["metadata"] == {"n": 2}
        assert cited("document", *arms)["segment"] == TEXTS[1, 1] + "\n" + TEXTS[1, 2]
    assert cited("node", {"search": "keyword"})["segment"] == TEXTS[1, 2]
    with error("22023", "return"):
        cited("page", ARM)


def test_a_segment_is_as_near_as_the_nearest_text_that_it_was_found_by(store: Connection) -> None:
    create(store, "sentences", transform="sentence")
    create(store, "words", transform="sentence", embed=False)
    near, own = distance("gulls steal", "Gulls steal."), distance("gulls steal", TEXTS[1, 2])
    assert near < 0.1 < own
    limit = {"retrieval_options": {"max_distance": 0.1, "segment_overlap": 0}, "skip_generate": True, "n_citations": 1}
    fields = {"citation_fields": ["node", "node_distance"]}
    with error("P0002", "no segment within the distance threshold"):
        answer(store, "gulls steal", {**limit, "arms": [{"search": "semantic"}]})
    for arms in ([ARM], [WORDS], [{"search": "semantic"}, ARM], [{"search": "keyword"}, WORDS]):
        for also in ({}, {"hybrid_options": {"fusion": "rrf"}}, {"explain": True}):
            (citation,) = answer(store, "gulls steal", {**limit, **fields, **also, "arms": arms})["citations"]
            assert (citation["segment"], citation["node"]) == (TEXTS[1, 2], "Gulls steal.")
            assert citation["distance"] == citation["node_distance"] == pytest.approx(near, abs=1e-4)
    by_words = {"search": "keyword", "in": "words"}
    (citation,) = answer(store, "gulls steal", {**fields, "skip_generate": True, "arms": [by_words]})["citations"]
    assert (citation["node"], citation["node_distance"], citation["distance"]) == ("Gulls steal.", None, None)
    with error("P0002", "no segment within the distance threshold"):
        answer(store, "gulls steal", {**limit, "arms": [by_words]})
    (citation,) = answer(store, "gulls steal", {**fields, "skip_generate": True, "n_citations": 1})["citations"]
    assert (citation["node"], citation["node_distance"]) == (None, None)


def test_a_call_that_may_abstain_answers_by_what_its_nodes_say(store: Connection) -> None:
    create(store, "sentences", transform="sentence")
    options = {"abstain": True, "skip_generate": True, "arms": [ARM], "retrieval_options": {"max_distance": "auto"}}
    far = "Herons and " + " and ".join(f"word{i}" for i in range(40))
    insert(store, "docs", [("d3", 3, 1, f"{far}. Owls hoot.", fake_embedding(far))])
    refresh(store)
    assert distance("owls hoot", far) > 0.6 > distance("owls hoot", "Owls hoot.")
    assert "Owls hoot" in answer(store, "owls hoot", options)["citations"][0]["segment"]
    store.execute("DELETE FROM docs_sentences WHERE node = 'Owls hoot.'")
    with error("P0002", "threshold"):
        answer(store, "owls hoot", {**options, "document_name": ["d3"]})


def test_with_return_node_each_node_is_a_hit(store: Connection) -> None:
    create(store, "sentences", transform="sentence")
    every = [node for of_key in SENTENCES.values() for node in of_key]
    nearest = sorted(every, key=lambda node: distance("terns hover gulls steal", node))

    def cited(n: int, *arms: Any, **options: Any) -> list[tuple[str, float]]:
        asked = {"return": "node", "arms": arms, "n_citations": n, "skip_generate": True, **options}
        return [(c["segment"], c["distance"]) for c in answer(store, "terns hover gulls steal", asked)["citations"]]

    for n in (1, 2, 5, 7, 10):
        hits = cited(n, ARM)
        assert len(hits) == min(n, 7)
        assert {node for node, _ in hits[:2]} <= {"Terns hover.", "Gulls steal."}
        assert [far for _, far in hits] == pytest.approx(
            [distance("terns hover gulls steal", node) for node in nearest[:n]], abs=1e-4
        )
    # two of one segment, by words and by both
    assert {node for node, _ in cited(5, WORDS)} == {"Terns hover.", "Gulls steal."}
    for options in ({}, {"hybrid_options": {"fusion": "rrf"}}, {"retrieval_options": {"max_distance": 2}}):
        assert {node for node, _ in cited(2, ARM, WORDS, **options)} == {"Terns hover.", "Gulls steal."}
    store.execute(LENGTHS)
    reranked = cited(2, ARM, rerank={"function": "public.lengths"})
    assert [node for node, _ in reranked] == ["Herons wait for fish.", "Loons call at night."]
    # an arm over segments speaks for all of their nodes, and where none was found for the segment
    hits = cited(10, {"search": "semantic"}, {**WORDS, "query": {"text": "terns gulls"}})
    assert {node for node, _ in hits} == {"Terns hover.", "Gulls steal.", TEXTS[1, 1], TEXTS[2, 1]}


def test_nodes_of_documents_are_hits_once(store: Connection) -> None:
    create(store, "sentences", transform="sentence")
    create(store, "parts", transform="sentence", parent="document")
    asked = {"return": "node", "n_citations": 20, "skip_generate": True}
    part, whole = {"search": "semantic", "in": "parts"}, {"search": "semantic"}
    texts = sorted(node for of_key in SENTENCES.values() for node in of_key)

    def cited(*arms: Any, **options: Any) -> list[str]:
        return sorted(c["segment"] for c in answer(store, "terns", {**asked, "arms": arms, **options})["citations"])

    assert cited(part) == texts
    assert cited(part, whole) == sorted([*texts, *TEXTS.values()])
    assert cited(part, whole, ARM) == sorted([*texts, *texts])
    assert cited(part, filters={"document_id": 2}) == sorted(SENTENCES[2, 1])


def test_of_several_nodes_of_a_segment_that_of_the_heaviest_arm_is_cited(store: Connection) -> None:
    zebras = "Zebras may be ridden only on Sundays in the northern courtyard."
    bicycles = "All bicycles are kept in the cellar of the house."
    insert(store, "docs", [("d3", 3, 1, f"{zebras} {bicycles}", fake_embedding(f"{zebras} {bicycles}"))])
    create(store, "sentences", transform="sentence")
    questions = {zebras: "zebras ridden on Sundays", bicycles: "bicycles in the cellar"}

    def cited(*arms: Any) -> str:
        asked = {"return": "node", "arms": arms, "n_citations": 1, "skip_generate": True, "document_name": ["d3"]}
        text: str = answer(store, "q", asked)["citations"][0]["segment"]
        return text

    for first, second in ((zebras, bicycles), (bicycles, zebras)):
        heavy, light = ({"query": {"text": questions[node]}, "in": "sentences"} for node in (first, second))
        for a, b in (("semantic", "keyword"), ("keyword", "semantic")):
            arms = [{**heavy, "search": a, "weight": 0.99}, {**light, "search": b, "weight": 0.01}]
            assert cited(*arms) == first
            assert cited(*reversed(arms)) == first


def test_a_store_without_the_group_is_left_out_with_a_warning(store: Connection) -> None:
    create_store(store, "more", rows(), type="vector(16)")
    create(store, "sentences", transform="sentence")
    told = noticed(store, lambda d: str(d.message_primary))
    hits = search(store, "terns", {"arms": [ARM], "n_citations": 10})
    assert {row[1] for row in hits} == {"public.docs"}
    assert told == ['1 vector stores have no node group "sentences" to search; left out']
    with error("55000", "no vector store has a node group"):
        search(store, "terns", {"arms": [{"search": "semantic", "in": "nothing"}]})


def test_a_group_with_children_is_not_searched(store: Connection) -> None:
    """Their rows are no nodes, and have the places of others."""
    create(store, "sentences", transform="sentence")
    store.execute("CREATE TABLE child () INHERITS (docs_sentences)")
    for arm in (ARM, WORDS):
        with error("55000", 'no vector store has a node group "sentences"'):
            found(store, "terns", arm)
    store.execute("DROP TABLE child")
    store.execute("ANALYZE docs_sentences")
    assert found(store, "terns", WORDS) == [(1, 2)]


def test_node_groups_are_no_stores(store: Connection) -> None:
    create(store, "sentences", transform="sentence")
    assert store.execute("SELECT vector_store FROM ml_rag.discover()").fetchall() == [("public.docs",)]
    assert store.execute("SELECT vector_store FROM ml_rag.discover(ARRAY['docs_sentences'])").fetchall() == []


# -- kept current ------------------------------------------------------------------------------------------------------


def test_only_what_changed_is_made_again(store: Connection, models: ModelsServer) -> None:
    create(store, "sentences", transform="sentence")
    models.requests.clear()
    assert refresh(store)["parents"] == 0
    assert models.requests == []
    store.execute("UPDATE docs SET segment = 'Swans fly. Ducks swim.' WHERE document_id = 2")
    store.execute("DELETE FROM docs WHERE segment_number = 2")
    insert(store, "docs", [("d3", 3, 1, "Rails hide.", fake_embedding("rails hide")), ("d4", 4, 1, " ", None)])
    assert status(store) == (4, 2, 0)  # a deleted segment's nodes are gone
    assert refresh(store, dry_run=True) == {"parents": 2, "model_calls": 0}
    result = refresh(store)
    assert (result["parents"], result["nodes"]) == (2, 3)
    assert models.embedded("fake-embed") == ["Swans fly.", "Ducks swim.", "Rails hide."]
    assert nodes(store, "sentences") == {
        (1, 1): SENTENCES[1, 1],
        (2, 1): ["Swans fly.", "Ducks swim."],
        (3, 1): ["Rails hide."],
    }
    assert status(store) == (5, 0, 0)


def test_nodes_of_a_former_text_are_not_found(store: Connection) -> None:
    create(store, "sentences", transform="sentence")
    store.execute("UPDATE docs SET segment = 'Nothing of the kind.' WHERE document_id = 2")
    assert found(store, "ducks swim", WORDS) == []
    assert (2, 1) not in found(store, "ducks swim", ARM)
    refresh(store)
    assert found(store, "kind", WORDS) == [(2, 1)]


def test_nodes_of_what_has_no_text_any_more_are_taken_away(store: Connection) -> None:
    """A blank text has none; a document has them at its first segment, which is another one after a change."""
    store.execute(SYNONYMS)
    create(store, "sentences", transform="sentence")
    create(store, "synonyms", transform="public.synonyms", merge=True)
    create(store, "documents", transform="paragraph", parent="document")
    create(store, "parts", transform="sentence", parent="documents")
    store.execute("UPDATE docs SET segment_number = 3 WHERE (document_id, segment_number) = (1, 1)")
    store.execute("UPDATE docs SET segment = ' ' WHERE segment_number = 3")
    assert refresh(store)["parents"] == 2
    left = {(1, 2): SENTENCES[1, 2], (2, 1): SENTENCES[2, 1]}
    assert nodes(store, "sentences") == nodes(store, "parts") == left
    assert nodes(store, "documents") == {key: [TEXTS[key]] for key in left}
    for arm in (WORDS, {"search": "keyword"}, {**WORDS, "in": "parts"}):
        assert found(store, "herons ardea", arm) == []
    assert refresh(store)["parents"] == 0


def test_batches_commit_and_a_cancelled_call_goes_on(db: Database, store: Connection, models: ModelsServer) -> None:
    texts = {(d, 1): f"One {d} heron. Two {d} grebes." for d in range(10, 20)}
    insert(store, "docs", rows(texts))
    other = db.connect()

    def cancel() -> None:
        other.execute(
            "SELECT pg_cancel_backend(pid) FROM pg_stat_activity WHERE query LIKE 'CALL ml_rag.create_node_group%'"
        )

    models.before[len(models.requests) + 3] = cancel  # the probe, two batches, and then
    with pytest.raises(psycopg.errors.QueryCanceled):
        create(store, "sentences", transform="sentence", batch_size=4)
    rows_then = status(store)[0]
    assert 0 < rows_then < 27
    models.requests.clear()
    done = store.execute("SELECT count(*) FROM docs_sentences WHERE node_number = 0").fetchone()
    assert done in ((4,), (8,))
    assert refresh(store)["parents"] == 13 - done[0]  # type: ignore[index]
    assert len(models.embedded("fake-embed")) == 27 - rows_then
    assert status(store) == (27, 0, 0)


@pytest.mark.parametrize("parent", ["segment", "document"])
def test_each_text_is_read_a_few_times_in_however_many_batches(db: Database, owner: Connection, parent: str) -> None:
    owner.execute(
        "CREATE TABLE docs (document_id integer, segment_number integer, segment text,"
        " PRIMARY KEY (document_id, segment_number));"
        "INSERT INTO docs SELECT 1 + i / 2, i, repeat('heron ', 200) FROM generate_series(0, 3999) AS i; ANALYZE docs"
    )
    with db.connect(autocommit=True) as session:
        session.execute("SET random_page_cost = 1")
        given = {"transform": "sentence", "parent": parent, "embed": False, "keyword_search": False, "batch_size": 50}
        create(session, "parts", **given)
        pid = session.info.backend_pid
    # what a session has read is in the statistics once it has ended
    wait_until(lambda: not owner.execute("SELECT FROM pg_stat_activity WHERE pid = %s", (pid,)).rowcount)
    read = value_of(
        owner, "SELECT seq_tup_read + idx_tup_fetch FROM pg_stat_user_tables WHERE relid = 'docs'::regclass"
    )
    assert 4000 <= read < 8 * 4000


@pytest.mark.parametrize("parent", ["segment", "document"])
def test_long_texts_of_others_stop_nobody(owner: Connection, models: ModelsServer, parent: str) -> None:
    """As JSON one is more than PostgreSQL can hold, and so are the others together."""
    create_store(owner, "docs", rows(), type="vector(16)")
    owner.execute(
        "INSERT INTO docs (document_name, document_id, segment_number, segment, metadata, segment_embedding)"
        " SELECT 'long', 9, i, CASE i WHEN 1 THEN repeat(chr(1), 180000000) ELSE 'x' || repeat(' ', 3000000) END,"
        " '{}', array_fill(1, '{16}')::real[]::vector FROM generate_series(1, 4) AS i"
    )
    result = create(owner, "lines", transform="paragraph", parent=parent, embed=False, keyword_search=False)
    assert (result["parents"], result["failed"]) == {"segment": (7, 1), "document": (3, 1)}[parent]
    query = "SELECT key, sqlstate, message FROM ml_rag.node_group_error"
    assert owner.execute(query).fetchall() == [("{9,1}", "54000", "the text is too long")]


def test_texts_of_many_nodes_are_of_several_batches(owner: Connection, models: ModelsServer) -> None:
    """100 short texts can have a million nodes, which were all held in memory, each with its vector."""
    text = "\n\n".join(map(str, range(1000)))
    create_store(owner, "docs", [("d", 1, i, text, fake_embedding("x")) for i in range(30)], type="vector(16)")
    assert create(owner, "lines", transform="paragraph", embed=False)["nodes"] == 30_000
    numbers = "SELECT count(DISTINCT xmin::text), count(DISTINCT (segment_number, node_number)) FROM docs_lines"
    assert owner.execute(numbers).fetchone() == (3, 30_030)


def many_segments(owner: Connection, n: int) -> None:
    create_store(owner, "docs", rows(), type="vector(16)")
    owner.execute(
        "INSERT INTO docs (document_name, document_id, segment_number, segment, metadata, segment_embedding)"
        " SELECT 'many', 9, i, 'heron', '{}', array_fill(1, '{16}')::real[]::vector FROM generate_series(1, %s) AS i",
        (n,),
    )


def test_a_document_of_many_segments_has_no_more_nodes_than_can_be_kept(
    owner: Connection, models: ModelsServer
) -> None:
    """Each has the keys of all segments: these of 9000 are 70 kB, and took gigabytes of whoever filled the group."""
    many_segments(owner, 9000)
    result = create(owner, "lines", transform="paragraph", parent="document", embed=False)
    assert (result["parents"], result["failed"], result["nodes"]) == (3, 1, 3)
    query = "SELECT key, sqlstate, message FROM ml_rag.node_group_error"
    message = "too many nodes and segments of one document"
    assert owner.execute(query).fetchall() == [("{9,1}", "54000", message)]


def test_who_sees_all_segments_is_told_in_time_that_grows_with_their_number(
    owner: Connection, asker: Connection, models: ModelsServer
) -> None:
    """They were compared with each other, 200 million times here, and no cancel was looked at meanwhile."""
    many_segments(owner, 20_000)
    owner.execute("CREATE FUNCTION public.once(text) RETURNS SETOF text LANGUAGE sql AS $$SELECT 'one heron'$$")
    create(owner, "once", transform="public.once", parent="document", embed=False)
    asker.execute("SET statement_timeout = '60s'")  # all of them with one another: hours
    assert found(asker, "heron", {"search": "keyword", "in": "once"}, vector_store=["docs"])
    assert asker.execute("SELECT count(*) FROM docs_once WHERE document_id = 9 AND node_number = 1").fetchone() == (1,)
    owner.execute("DELETE FROM docs WHERE document_id = 9 AND segment_number = 20000")
    assert asker.execute("SELECT count(*) FROM docs_once WHERE document_id = 9").fetchone() == (0,)


def test_a_key_that_the_index_of_nodes_has_no_room_for_stops_nobody(owner: Connection, models: ModelsServer) -> None:
    key = "".join(map(chr, random.Random(1).choices(range(48, 91), k=2688)))
    owner.execute("CREATE TABLE notes (key text PRIMARY KEY, name text)")
    owner.execute("INSERT INTO notes VALUES (%s, 'A lamp.'), ('z', 'A tent.')", (key,))
    owner.execute('SELECT ml_rag.create_vectorizer(\'notes\', \'{"columns": "name", "keyword_search": false}\')')
    run(owner, "notes")
    assert create(owner, "sentences", store="notes", transform="sentence")["parents"] == 1
    assert owner.execute("SELECT node FROM notes_sentences WHERE node_number > 0").fetchall() == [("A tent.",)]


@pytest.mark.parametrize("parent", ["segment", "document"])
def test_columns_of_a_key_may_have_different_collations(owner: Connection, asker: Connection, parent: str) -> None:
    owner.execute(
        'CREATE TABLE docs (a text COLLATE "C", b text COLLATE "POSIX", document_name text, segment_number integer,'
        " segment text, segment_embedding vector(16), PRIMARY KEY (a, b)); GRANT SELECT ON docs TO PUBLIC;"
        "INSERT INTO docs VALUES ('x', 'y', 'd', 1, 'Geese fly.'), ('x', 'z', 'd', 2, 'Ducks swim.')"
    )
    mark(owner, "docs")
    made = create(owner, "sentences", transform="sentence", parent=parent, embed=False)["nodes"]
    assert asker.execute("SELECT count(*) FROM docs_sentences WHERE node_number > 0").fetchone() == (made,) == (2,)


def test_a_node_that_fails_is_reported_and_does_not_stop_the_rest(store: Connection, models: ModelsServer) -> None:
    insert(store, "docs", [("d3", 3, 1, "Fine. Has !nan within.", fake_embedding("fine"))])
    result = create(store, "sentences", transform="sentence")
    assert (result["parents"], result["nodes"], result["failed"]) == (4, 7, 1)
    errors = "SELECT store::text, name, key, attempts, sqlstate, message FROM ml_rag.node_group_error"
    assert store.execute(errors).fetchall() == [
        ("docs", "sentences", "{3,1}", 1, "38000", "unexpected reply from the model server")
    ]
    assert status(store) == (7, 0, 1)
    assert refresh(store)["failed"] == 1  # by hand it is tried again
    assert store.execute(errors).fetchall()[0][3] == 2
    store.execute("UPDATE docs SET segment = 'Fine.' WHERE document_id = 3")
    assert refresh(store)["failed"] == 0
    assert store.execute(errors).fetchall() == []
    assert nodes(store, "sentences")[3, 1] == ["Fine."]


# -- functions ---------------------------------------------------------------------------------------------------------


def test_a_function_makes_the_nodes(store: Connection) -> None:
    store.execute(
        "CREATE SCHEMA own; CREATE FUNCTION own.lengths(t text) RETURNS SETOF text LANGUAGE sql AS"
        " 'SELECT length(w)::text FROM unnest(string_to_array(t, '' '')) AS w'"
    )
    create(store, "lengths", transform="own.lengths")
    assert nodes(store, "lengths")[2, 1] == ["5", "3", "6", "5", "5"]
    store.execute(
        "CREATE OR REPLACE FUNCTION own.lengths(t text) RETURNS SETOF text LANGUAGE plpgsql AS $$"
        " BEGIN IF t LIKE 'Swans%' THEN RAISE EXCEPTION 'no swans' USING ERRCODE = 'AB123', DETAIL = 'none'; END IF;"
        " RETURN NEXT NULL; RETURN NEXT ' '; RETURN NEXT t; END $$"
    )
    store.execute("SELECT ml_rag.drop_node_group('docs', 'lengths')")
    assert create(store, "lengths", transform="own.lengths")["failed"] == 1
    assert nodes(store, "lengths") == {key: [text] for key, text in TEXTS.items() if key != (2, 1)}
    errors = store.execute("SELECT sqlstate, message, detail FROM ml_rag.node_group_error").fetchall()
    assert errors == [("AB123", "no swans", "none")]


def test_a_failed_assert_is_an_error_of_its_text_or_table_only(db: Database, store: Connection) -> None:
    role = db.role("asker")
    store.execute(f"CREATE SCHEMA theirs AUTHORIZATION {role}")
    asker = db.connect("asker")
    asker.execute(
        "CREATE FUNCTION theirs.fail(t text) RETURNS SETOF text LANGUAGE plpgsql AS"
        " $$ BEGIN ASSERT t <> 'Two.', 'not two'; RETURN NEXT t; END $$"
    )
    for name in ("mine", "others"):
        asker.execute(f"CREATE TABLE theirs.{name} (id int PRIMARY KEY, segment text)".encode())
        asker.execute(f"INSERT INTO theirs.{name} VALUES (1, 'One.'), (2, 'Two.'), (3, 'Three.')".encode())
        made = create(asker, "n", f"theirs.{name}", transform="theirs.fail", embed=False)
        assert (made["nodes"], made["failed"]) == (2, 1)
    errors = asker.execute("SELECT sqlstate, message FROM ml_rag.node_group_error").fetchall()
    assert errors == [("P0004", "not two")] * 2
    asker.execute(
        "CREATE FUNCTION theirs.hide() RETURNS boolean LANGUAGE plpgsql AS 'BEGIN ASSERT false; END';"
        "CREATE POLICY p ON theirs.mine USING (theirs.hide());"
        "ALTER TABLE theirs.mine ENABLE ROW LEVEL SECURITY; ALTER TABLE theirs.mine FORCE ROW LEVEL SECURITY"
    )
    found = asker.execute("SELECT store::text, pending FROM ml_rag.node_group ORDER BY 1").fetchall()
    assert found == [("theirs.mine", None), ("theirs.others", 0)]


def test_a_function_needs_execute_and_an_owner_who_is_trusted(db: Database, store: Connection) -> None:
    store.execute(
        "CREATE SCHEMA own; CREATE FUNCTION own.f(t text) RETURNS SETOF text LANGUAGE sql AS 'SELECT t';"
        "REVOKE EXECUTE ON FUNCTION own.f FROM PUBLIC; CREATE TABLE mine (id int PRIMARY KEY, segment text)"
    )
    asker = db.connect("asker")
    role = asker.execute("SELECT current_user").fetchone()[0]  # type: ignore[index]
    store.execute(
        f"ALTER TABLE mine OWNER TO {role}; GRANT CREATE ON SCHEMA public TO {role};GRANT USAGE ON SCHEMA own TO {role}"
    )
    with error("42501", "permission denied for function", ours=False):
        create(asker, "n", "mine", transform="own.f", embed=False)
    store.execute(f"GRANT EXECUTE ON FUNCTION own.f TO {role}")
    asker.execute("INSERT INTO mine VALUES (1, 'a text')")
    assert create(asker, "n", "mine", transform="own.f", embed=False)["nodes"] == 1
    # a superuser who fills the table of another role does not run that one's functions
    store.execute(f"ALTER FUNCTION own.f OWNER TO {role}; UPDATE mine SET segment = 'another'")
    with error("42501", "not trusted"):
        refresh(store, "mine")
    # nor any that the other role may not execute itself
    (comment,) = asker.execute("SELECT obj_description('mine_n'::regclass)").fetchone() or ("",)
    asker.execute(
        sql.SQL("COMMENT ON TABLE mine_n IS {}").format(sql.Literal(comment.replace("own.f", "pg_catalog.pg_ls_dir")))
    )
    with error("42501", 'the owner of "public.mine" may not execute function pg_ls_dir(text)'):
        refresh(store, "mine")
    with error("42501", "may not execute function pg_ls_dir(text)"):
        create(store, "files", "mine", transform="pg_catalog.pg_ls_dir", embed=False)


# -- rights ------------------------------------------------------------------------------------------------------------


def test_who_holds_a_lock_of_ours_is_named(db: Database, store: Connection) -> None:
    """Any role can take an advisory lock, so that the administrator must be able to see which session it is."""
    create(store, "sentences", transform="sentence")
    stranger = db.connect("stranger")
    (oid,) = store.execute("SELECT 'docs'::regclass::oid").fetchone() or (None,)
    stranger.execute("SELECT pg_advisory_lock(hashtextextended(%s, 0))", (f"ml_rag node group {oid} sentences",))
    with error("55006", "is being filled by another session", f"session {stranger.info.backend_pid}"):
        refresh(store)
    stranger.execute("SELECT pg_advisory_unlock_all()")
    assert refresh(store)["failed"] == 0


@pytest.fixture
def secured(db: Database, store: Connection) -> Connection:
    """A connection as a role that sees document 1 but for segment 2; groups of sentences, of segments and documents."""
    create(store, "sentences", transform="sentence")
    create(store, "parts", transform="sentence", parent="document")
    store.execute("ALTER TABLE docs ENABLE ROW LEVEL SECURITY")
    store.execute("CREATE POLICY p ON docs USING (segment_number = 1)")
    return db.connect("asker")


def test_who_sees_a_segment_sees_its_nodes_and_nobody_else(secured: Connection) -> None:
    assert {(d, n) for d, n in secured.execute("SELECT document_id, segment_number FROM docs_sentences")} == {
        (1, 1),
        (2, 1),
    }
    assert found(secured, "terns hover", WORDS) == []
    assert found(secured, "terns hover", ARM) in ([(1, 1), (2, 1)], [(2, 1), (1, 1)])
    # of document 1 a segment is hidden: its nodes are, too
    assert secured.execute("SELECT DISTINCT document_id FROM docs_parts").fetchall() == [(2,)]
    assert found(secured, "terns dive ducks", {"search": "keyword", "in": "parts"}) == [(2, 1)]


def test_hidden_nodes_change_neither_errors_nor_plans(db: Database, secured: Connection) -> None:
    owner = db.connect()
    questions = [
        ("terns hover", ARM),
        ("terns hover", WORDS),
        ("ducks", WORDS),
        ("terns", {"search": "keyword", "in": "parts"}),
    ]

    def told() -> list[Any]:
        results = []
        for query, arm in questions:
            options = {"arms": [arm], "n_citations": 10, "abstain": True, "skip_generate": True, "explain": True}
            options["retrieval_options"] = {"max_distance": 0.2}
            try:
                document = answer(secured, query, options)
                document["explain"].pop("milliseconds")
                results.append(json.dumps(document, sort_keys=True))
            except psycopg.Error as e:
                results.append((e.sqlstate, re.sub(r'"milliseconds": {.*?}', "", str(e))))
        plan = "EXPLAIN (COSTS OFF) SELECT node FROM docs_sentences WHERE node LIKE 'T%'"
        return [*results, secured.execute(plan).fetchall()]

    before = told()
    owner.execute("UPDATE docs SET segment = 'Nightjars churr at dusk.' WHERE (document_id, segment_number) = (1, 2)")
    refresh(owner)
    assert told() == before


def test_only_the_owner_makes_and_drops_groups(db: Database, secured: Connection) -> None:
    for call in (
        "CALL ml_rag.create_node_group('docs', 'n', '{\"transform\": \"sentence\"}')",
        "CALL ml_rag.refresh_node_groups('docs')",
        "SELECT ml_rag.drop_node_group('docs', 'sentences')",
    ):
        with error("42501", "must be owner"):
            secured.execute(call)
    for statement in ("DELETE FROM docs_sentences", "UPDATE docs_sentences SET node = 'x'"):
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            secured.execute(statement)
    assert secured.execute("SELECT * FROM ml_rag.node_group").fetchall() == []


def test_readers_of_the_store_are_those_of_its_groups(db: Database, store: Connection) -> None:
    create(store, "sentences", transform="sentence")
    asker = db.connect("asker")
    assert found(asker, "terns", WORDS) == [(1, 2)]
    store.execute("REVOKE SELECT ON docs FROM ml_rag_user")
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        asker.execute("SELECT * FROM docs_sentences")
    refresh(store)
    store.execute("GRANT SELECT ON docs TO ml_rag_user")
    with error("55000", "no vector store has a node group"):
        found(asker, "terns", WORDS)
    refresh(store)
    assert found(asker, "terns", WORDS) == [(1, 2)]


def test_nodes_need_the_privilege_to_read_the_texts(db: Database, store: Connection) -> None:
    """Not only the key: a table's readers can be left some of its columns."""
    create(store, "sentences", transform="sentence")
    create(store, "parts", transform="sentence", parent="document")
    asker = db.connect("asker")
    assert len(asker.execute("SELECT s.node FROM docs_sentences AS s, docs_parts").fetchall()) > 0
    store.execute("REVOKE SELECT ON docs FROM ml_rag_user")
    store.execute("GRANT SELECT (document_id, segment_number) ON docs TO ml_rag_user")
    for group in ("sentences", "parts"):
        with error("42501", ours=False):
            asker.execute(f"SELECT node FROM docs_{group}")


# -- with loads and vectorizers ----------------------------------------------------------------------------------------


def test_a_load_makes_the_nodes_of_what_has_changed(loader: Connection, server: DocumentsServer, folder: Path) -> None:
    write(folder, a="Alpha one. Alpha two.", b="Beta one. Beta two.")
    load(loader, f"{folder}/")
    create(loader, "sentences", transform="sentence")
    assert nodes(loader, "sentences") == {(1, 1): ["Alpha one.", "Alpha two."], (2, 1): ["Beta one.", "Beta two."]}
    before = loader.execute("SELECT ctid, node FROM docs_sentences WHERE document_id = 1").fetchall()
    write(folder, b="Beta three.", c="Gamma one.")
    load(loader, f"{folder}/")
    assert nodes(loader, "sentences") == {
        (1, 1): ["Alpha one.", "Alpha two."],
        (2, 1): ["Beta three."],
        (3, 1): ["Gamma one."],
    }
    assert loader.execute("SELECT ctid, node FROM docs_sentences WHERE document_id = 1").fetchall() == before
    (folder / "a.txt").unlink()
    load(loader, f"{folder}/")
    assert set(nodes(loader, "sentences")) == {(2, 1), (3, 1)}
    loader.execute("SELECT ml_rag.load_document('docs', 'd', 'Delta one.')")
    assert loader.execute("SELECT pending FROM ml_rag.node_group").fetchall() == [(1,)]
    with loader.transaction():
        load(loader, f"{folder}/")  # without commits
    assert loader.execute("SELECT pending FROM ml_rag.node_group").fetchall() == [(0,)]


def test_documents_are_loaded_whatever_becomes_of_their_nodes(
    loader: Connection, server: DocumentsServer, folder: Path
) -> None:
    loader.execute("CREATE FUNCTION public.own(t text) RETURNS SETOF text LANGUAGE sql AS 'SELECT t'")
    write(folder, a="Alpha one.")
    load(loader, f"{folder}/")
    create(loader, "own", transform="public.own")
    loader.execute("DROP FUNCTION public.own")
    write(folder, b="Beta one.")
    told = noticed(loader, lambda d: str(d.message_primary))
    assert counts(load(loader, f"{folder}/"))["loaded"] == 1
    assert any('node groups of "public.docs" are not filled' in line for line in told)
    assert nodes(loader, "own") == {(1, 1): ["Alpha one."]}


def test_a_load_tells_that_another_session_fills_the_group(
    db: Database, loader: Connection, server: DocumentsServer, folder: Path
) -> None:
    """That one can be past what the load has changed."""
    write(folder, a="Alpha one.")
    load(loader, f"{folder}/")
    create(loader, "sentences", transform="sentence")
    write(folder, a="Alpha two.")
    told = noticed(loader, lambda d: (d.message_primary, d.message_hint))
    other = db.connect()
    with other.transaction():
        other.execute("SELECT ml_rag._lock_nodes('docs'::regclass, 'sentences')")
        assert counts(load(loader, f"{folder}/"))["changed"] == 1
    ((message, hint),) = [(m, h) for m, h in told if "another session" in str(m)]
    assert message == 'node group "sentences" of "public.docs" is being filled by another session'
    assert hint == "Once it is done: CALL ml_rag.refresh_node_groups('public.docs');"
    assert refresh(loader)["parents"] == 1


def test_a_vectorizer_makes_the_nodes_of_rows(items: Connection) -> None:
    create(items, "sentences", "items", transform="sentence")
    query = "SELECT id, node FROM items_sentences WHERE node_number > 0 ORDER BY 1, node_number"
    assert items.execute(query).fetchall() == [(1, "lamp: of red glass"), (2, "tent: for two"), (3, "rope:")]
    items.execute("UPDATE items SET notes = 'of blue glass. And wood.' WHERE id = 1")
    items.execute("DELETE FROM items WHERE id = 3")
    run(items)
    assert items.execute(query).fetchall() == [(1, "lamp: of blue glass."), (1, "And wood."), (2, "tent: for two")]
    hits = search(items, "wood", {"arms": [WORDS]})
    assert [row[2] for row in hits] == ["public.items/1"]


# -- the store goes, is renamed, is dumped -----------------------------------------------------------------------------


def test_groups_go_with_their_store(store: Connection) -> None:
    create(store, "sentences", transform="sentence")
    create(store, "more", transform="paragraph")
    with pytest.raises(psycopg.errors.DependentObjectsStillExist):
        store.execute("DROP TABLE docs")
    store.execute("SELECT ml_rag.drop_node_group('docs', 'more')")
    assert store.execute("SELECT to_regclass('docs_more')").fetchone() == (None,)
    store.execute("DROP TABLE docs CASCADE")
    assert store.execute("SELECT to_regclass('docs_sentences')").fetchone() == (None,)
    assert store.execute("SELECT count(*) FROM ml_rag_internal.keyword_row").fetchone() == (0,)


def test_what_stands_on_a_group_does_not_keep_its_store(store: Connection) -> None:
    """Nobody else's DROP SCHEMA … CASCADE fails by a view of the owner's."""
    create(store, "sentences", transform="sentence")
    store.execute("CREATE VIEW seen AS SELECT node FROM docs_sentences")
    store.execute("DROP TABLE docs CASCADE")
    left = "SELECT to_regclass('docs'), to_regclass('docs_sentences')::text"
    assert store.execute(left).fetchone() == (None, "docs_sentences")


def test_a_store_and_its_group_can_be_renamed(store: Connection) -> None:
    create(store, "sentences", transform="sentence")
    store.execute("CREATE SCHEMA s; ALTER TABLE docs SET SCHEMA s; ALTER TABLE s.docs RENAME TO texts")
    store.execute("ALTER TABLE docs_sentences RENAME TO other")
    assert found(store, "ducks", WORDS, vector_store=["s.texts"]) == [(2, 1)]
    store.execute("UPDATE s.texts SET segment = 'Coots run.' WHERE document_id = 2")
    assert refresh(store, "s.texts")["parents"] == 1
    assert found(store, "coots", ARM, WORDS)[0] == (2, 1)


# -- merged into the words of their segments ---------------------------------------------------------------------------


SYNONYMS = (
    "CREATE FUNCTION public.synonyms(t text) RETURNS SETOF text LANGUAGE sql AS"
    " $$SELECT 'ardea fisher' WHERE t LIKE 'Herons%' UNION ALL SELECT 'larus' WHERE t LIKE '%Gulls%'$$"
)


def test_merged_nodes_are_found_by_the_words_of_their_segments(store: Connection) -> None:
    store.execute(SYNONYMS)
    words = {"search": "keyword"}
    assert found(store, "ardea", words) == []
    create(store, "synonyms", transform="public.synonyms", embed=False, keyword_search=False, merge=True)
    assert found(store, "ardea", words) == [(1, 1)]
    assert found(store, "larus terns", words) == [(1, 2)]
    merged = "SELECT segment_nodes FROM docs ORDER BY document_id, segment_number"
    assert store.execute(merged).fetchall() == [("ardea fisher",), ("larus",), (None,)]
    # one text: its length and its words are those of both
    indexed = store.execute(
        "SELECT key, length FROM ml_rag_internal.keyword_row WHERE store = 'docs'::regclass ORDER BY key"
    )
    counted = "SELECT sum(n)::int FROM ml_rag.keyword_tokens('english', %s)"
    for (_, length), ((key), text) in zip(indexed.fetchall(), TEXTS.items(), strict=True):
        extra = {(1, 1): " ardea fisher", (1, 2): " larus"}.get(key, "")
        assert store.execute(counted, (text + extra,)).fetchone() == (length,)
    store.execute("UPDATE docs SET segment = 'Coots run.' WHERE (document_id, segment_number) = (1, 1)")
    refresh(store)
    assert found(store, "ardea", words) == []
    assert search(store, "coots", {"arms": [words]})[0][5] == "Coots run."


def test_several_groups_are_merged_and_taken_out_again(store: Connection) -> None:
    store.execute(SYNONYMS)
    create(store, "synonyms", transform="public.synonyms", merge=True)
    create(store, "sentences", transform="sentence", merge=True)
    merged = "SELECT segment_nodes FROM docs WHERE (document_id, segment_number) = (1, 1)"
    assert store.execute(merged).fetchone() == ("ardea fisher\nHerons wait for fish.\nGrebes dive.",)
    store.execute("SELECT ml_rag.drop_node_group('docs', 'synonyms')")
    assert store.execute(merged).fetchone() == ("Herons wait for fish.\nGrebes dive.",)
    assert found(store, "ardea", {"search": "keyword"}) == []
    store.execute("SELECT ml_rag.enable_keyword_search('docs')")  # made anew by hand, with what is merged
    store.execute("SELECT ml_rag.drop_node_group('docs', 'sentences')")
    with pytest.raises(psycopg.errors.UndefinedColumn):
        store.execute(merged)
    assert found(store, "herons", {"search": "keyword"}) == [(1, 1)]


def test_what_cannot_be_merged_is_refused(store: Connection) -> None:
    with error("22023", 'option "merge"'):
        create(store, "n", transform="context", merge=True)
    with error("22023", 'option "merge"'):
        create(store, "n", transform="sentence", parent="document", merge=True)
    store.execute("ALTER TABLE docs ADD segment_nodes text")
    with error("42701", "segment_nodes"):
        create(store, "n", transform="sentence", merge=True)
    store.execute("ALTER TABLE docs DROP segment_nodes; SELECT ml_rag.disable_keyword_search('docs')")
    with error("55000", "no keyword index"):
        create(store, "n", transform="sentence", merge=True)


def test_who_may_not_read_merged_nodes_does_not_search_them(db: Database, store: Connection) -> None:
    store.execute(SYNONYMS)
    create(store, "synonyms", transform="public.synonyms", merge=True)
    store.execute("REVOKE SELECT ON docs FROM ml_rag_user")
    columns = "document_name, metadata, document_id, segment_number, segment, segment_embedding"
    store.execute(f"GRANT SELECT ({columns}) ON docs TO ml_rag_user")
    asker = db.connect("asker")
    with error("55000", "no vector store has a keyword index"):
        found(asker, "ardea", {"search": "keyword"})
    store.execute("GRANT SELECT (segment_nodes) ON docs TO ml_rag_user")
    assert found(asker, "ardea", {"search": "keyword"}) == [(1, 1)]


def test_a_partitioned_store_has_node_groups_of_all_its_partitions(store: Connection) -> None:
    store.execute(
        "CREATE TABLE parts (LIKE docs INCLUDING DEFAULTS, PRIMARY KEY (document_id, segment_number))"
        " PARTITION BY RANGE (document_id);"
        "CREATE TABLE parts_1 PARTITION OF parts FOR VALUES FROM (1) TO (2);"
        "CREATE TABLE parts_2 PARTITION OF parts FOR VALUES FROM (2) TO (9);"
        "INSERT INTO parts SELECT * FROM docs;"
        "COMMENT ON COLUMN parts.segment_embedding IS 'GENAI_OPTIONS=EMBED_MODEL_ID=fake-embed'"
    )
    assert create(store, "sentences", "parts", transform="sentence")["nodes"] == 7
    assert nodes(store, "sentences", "parts") == SENTENCES
    parts = {"vector_store": ["public.parts"]}
    assert found(store, "ducks swim", WORDS, **parts) == [(2, 1)]
    assert found(store, "ducks swim", ARM, **parts)[0] == (2, 1)
    # a changed row, in its partition by name too, and one that moves to another partition
    store.execute("UPDATE parts_1 SET segment = 'Coots nod.' WHERE segment_number = 2")
    store.execute("UPDATE parts SET document_id = 1, segment_number = 3 WHERE document_id = 2")
    assert refresh(store, "parts")["parents"] == 1  # the moved row keeps its nodes
    expected = {(1, 1): SENTENCES[1, 1], (1, 2): ["Coots nod."], (1, 3): SENTENCES[2, 1]}
    assert nodes(store, "sentences", "parts") == expected
    assert refresh(store, "parts")["parents"] == 0
    store.execute("DELETE FROM parts_1 WHERE segment_number = 3")
    assert set(nodes(store, "sentences", "parts")) == {(1, 1), (1, 2)}
    # a partitioned table has no keyword index to merge nodes into
    with error("55000", "has no keyword index"):
        create(store, "words", "parts", transform="sentence", merge=True)
    # PostgreSQL's own error: nodes refer to rows of the partition
    with error("23503", ours=False):
        store.execute("ALTER TABLE parts DETACH PARTITION parts_1")
    store.execute("DELETE FROM parts_1; ALTER TABLE parts DETACH PARTITION parts_1")
    assert nodes(store, "sentences", "parts") == {}
    store.execute("CREATE TABLE parts_3 PARTITION OF parts FOR VALUES FROM (9) TO (99)")
    store.execute("DROP TABLE parts CASCADE")  # with a foreign key for each partition
    assert store.execute("SELECT to_regclass('parts_sentences')").fetchone() == (None,)


# -- long texts --------------------------------------------------------------------------------------------------------

SPLIT = "SELECT (t.o).nodes, (t.o).error ->> 'sqlstate' FROM (SELECT ml_rag._transform(%s, {}, '{{}}') AS o) AS t"


@pytest.mark.parametrize("transform", ["sentence", "summary"])
def test_a_text_has_ten_million_bytes_at_most(asker: Connection, transform: str) -> None:
    asked = SPLIT.format("repeat('x', 10000001)")
    assert asker.execute(asked, (json.dumps({"transform": transform}),)).fetchall() == [([], "54000")]
    asked = SPLIT.format("repeat(repeat('x', 99) || ' ', 100000)")
    found = asker.execute(asked, ('{"transform": "sentence"}',)).fetchone()
    assert found is not None
    # a line of no end is split at a blank before each 100 000 characters
    assert (len(found[0]), max(map(len, found[0])), found[1]) == (101, 99_999, None)
    assert " ".join(found[0]) == " ".join(["x" * 99] * 100_000)


@pytest.mark.parametrize("text", ["repeat(E'a\\n', 4500000)", "repeat('.', 9000000)", "repeat('a. ', 3300000)"])
def test_splitting_a_long_text_can_be_cancelled(asker: Connection, text: str) -> None:
    """Regular expressions and copying all that there is with each line took minutes, and heard nothing."""
    asker.execute(SPLIT.format("'a'"), ('{"transform": "sentence"}',))
    asker.execute("SET statement_timeout = '100ms'")
    began = time.monotonic()
    with error("57014", ours=False):
        asker.execute(SPLIT.format(text), ('{"transform": "sentence"}',))
    assert time.monotonic() - began < 10  # of seconds of other tests' work


@pytest.mark.parametrize(
    ("language", "body"),
    [
        ("sql", "SELECT generate_series(1, 2000000000)::text"),
        ("plpython3u", "return map(str, iter(int, 1))"),
    ],
)
def test_a_function_without_end_is_stopped(owner: Connection, asker: Connection, language: str, body: str) -> None:
    owner.execute(f"CREATE FUNCTION public.endless(text) RETURNS SETOF text LANGUAGE {language} AS $f$ {body} $f$")
    asker.execute("SET statement_timeout = '30s'")
    asked = SPLIT.format("'a'").replace("NULL", "'public.endless(text)'")
    assert asker.execute(asked, ('{"transform": "public.endless"}',)).fetchall() == [([], "54000")]


def test_no_more_nodes_are_made_than_are_kept(asker: Connection) -> None:
    for n, expected in ((10_000, (10_000, None)), (10_001, (0, "54000"))):
        found = asker.execute(SPLIT.format("repeat(E'One.\\n\\n', %s)"), ('{"transform": "paragraph"}', n)).fetchone()
        assert found is not None
        assert (len(found[0]), found[1]) == expected


def test_what_waits_is_counted_and_nodes_are_found_where_plans_are_parallel(owner: Connection) -> None:
    """In a parallel plan a function can neither catch errors nor change settings."""
    create_store(owner, "docs", [("d", 1, 1, "a heron", fake_embedding("a heron"))], "vector(16)")
    owner.execute("CALL ml_rag.create_node_group('docs', 'sentences', '{\"transform\": \"sentence\"}')")
    owner.execute("CREATE TABLE items (id integer PRIMARY KEY, name text)")
    owner.execute("SELECT ml_rag.create_vectorizer('items', '{\"columns\": \"name\"}')")
    owner.execute(
        "SELECT set_config(s.name, 'on', false) FROM pg_settings AS s"
        " WHERE s.name IN ('force_parallel_mode', 'debug_parallel_query')"
    )
    arms = '{"vector_store": ["public.docs"], "arms": [{"search": "semantic", "in": "sentences"}]}'
    assert owner.execute("SELECT segment FROM ml_rag_search('heron', %s)", [arms]).fetchall() == [("a heron",)]
    assert owner.execute("SELECT pending FROM ml_rag.vectorizer").fetchall() == [(0,)]
    assert owner.execute("SELECT rows FROM ml_rag.node_group").fetchall() == [(1,)]
    owner.execute("CALL ml_rag.create_node_group('docs', 'others', '{\"transform\": \"sentence\"}')")
    owner.execute("CALL ml_rag.refresh_node_groups('docs')")
    assert owner.execute("SELECT rows FROM ml_rag.node_group").fetchall() == [(1,), (1,)]


@pytest.mark.parametrize("merge", [False, True])
def test_no_row_that_another_transaction_changes_is_waited_for(db: Database, store: Connection, merge: bool) -> None:
    """Two that wait for each other's rows are a deadlock, and PostgreSQL ends one of them."""
    create(store, "sentences", transform="sentence", embed=False, merge=merge)
    store.execute("UPDATE docs SET segment = segment || ' Coots dive.'")
    other = db.connect(autocommit=False)
    other.execute("DELETE FROM docs WHERE document_id = 2; UPDATE docs SET document_id = 3 WHERE segment_number = 2")
    assert refresh(store)["parents"] == 1
    other.execute("DELETE FROM docs WHERE document_id = 1")
    other.rollback()
    assert refresh(store)["parents"] == 2
    assert nodes(store, "sentences")[2, 1] == ["Swans are heavy.", "Ducks swim.", "Coots dive."]


def test_a_group_that_is_made_anew_meanwhile_gets_no_nodes_of_the_former_one(
    db: Database, store: Connection, models: ModelsServer
) -> None:
    create(store, "parts", transform="sentence")
    insert(store, "docs", rows({(3, 1): "Coots are black. Rails hide."}))
    other = db.connect()

    def make_anew() -> None:
        other.execute("SELECT ml_rag.drop_node_group('docs', 'parts')")
        with error("55006", "is being filled by another session"):
            create(other, "parts", transform="paragraph", embed=False)

    models.before[len(models.requests)] = make_anew
    with error("55000", 'node group "parts"', "was dropped and created again"):
        refresh(store)
    assert nodes(store, "parts") == {}
    assert refresh(store)["parents"] == 4
    assert nodes(store, "parts")[3, 1] == ["Coots are black. Rails hide."]


@pytest.mark.parametrize("parent", ["segment", "document"])
def test_a_row_that_takes_the_key_of_another_meanwhile_has_none_of_its_nodes(
    db: Database, store: Connection, tenant: Connection, parent: str
) -> None:
    store.execute(
        "ALTER TABLE docs ADD tenant text DEFAULT current_user, ENABLE ROW LEVEL SECURITY;"
        "CREATE POLICY own ON docs USING (tenant = current_user);"
        f"GRANT SELECT, INSERT ON docs TO {db.role('tenant')};"
        "CREATE FUNCTION public.slow(text) RETURNS SETOF text LANGUAGE sql AS"
        " 'SELECT $1 FROM (SELECT pg_advisory_xact_lock(77)) AS waited'"
    )
    other = db.connect()
    other.execute("SELECT pg_advisory_lock(77)")
    with ThreadPoolExecutor() as pool:
        filled = pool.submit(create, store, "slow", transform="public.slow", parent=parent)
        wait_until(lambda: other.execute("SELECT FROM pg_locks WHERE objid = 77 AND NOT granted").rowcount)
        other.execute("DELETE FROM docs WHERE document_id = 2")
        insert = "INSERT INTO docs (document_name, metadata, document_id, segment_number, segment) VALUES"
        tenant.execute(f"{insert} ('mine', '{{}}', 2, 1, 'Mine.')")
        other.execute("SELECT pg_advisory_unlock(77)")
        filled.result()
    assert tenant.execute("SELECT node FROM docs_slow WHERE node_number > 0").fetchall() == []
    assert refresh(store)["failed"] == 0
    assert tenant.execute("SELECT node FROM docs_slow WHERE node_number > 0").fetchall() == [("Mine.",)]
    assert TEXTS[1, 1] in nodes(store, "slow")[1, 1][0]


def test_an_index_of_nodes_is_built_without_holding_others_up_before(db: Database, store: Connection) -> None:
    create(store, "sentences", transform="sentence")
    (index,) = store.execute(
        "SELECT indexrelid::regclass::text FROM pg_index WHERE indrelid = 'docs_sentences'::regclass"
        " AND pg_get_indexdef(indexrelid) ~ 'hnsw'"
    ).fetchone() or ("",)
    store.execute(f"DROP INDEX {index}; UPDATE docs SET segment = 'Coots dive.' WHERE segment_number = 2")
    one, other = db.connect(autocommit=False), db.connect()
    one.execute("DELETE FROM docs WHERE document_id = 2")
    other.execute("SET lock_timeout = '5s'")
    with ThreadPoolExecutor() as pool:
        refreshed = pool.submit(refresh, store)
        wait_until(lambda: other.execute("SELECT FROM pg_locks WHERE NOT granted").fetchall())
        try:
            other.execute("DELETE FROM docs WHERE (document_id, segment_number) = (1, 1)")
        finally:
            one.rollback()
        assert refreshed.result()["parents"] == 1
    assert store.execute("SELECT FROM pg_class WHERE relname = %s", (index,)).fetchall() == [()]
