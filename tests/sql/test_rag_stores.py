"""pipeline/rag: which stores a call searches, by which embedding, and what it says where there is none."""

from __future__ import annotations

import re
import socket
import time
from contextlib import nullcontext
from pathlib import Path

import psycopg
import pytest

from ml_rag.backend.retrieval import find
from support.cluster import Connection, Database, noticed
from support.hostile_server import embeddings, hostile, reply
from support.stores import (
    ROWS,
    answer,
    create_store,
    create_text_store,
    error,
    fake_embedding,
    insert,
    mark,
    retrieve,
)


def test_several_stores_are_listed_and_merged(owner: Connection, asker: Connection) -> None:
    create_store(owner, "one", [("a", 1, 1, "far", (0, 1, 0))])
    create_store(owner, "two", [("b", 1, 1, "near", (1, 0, 0))])
    owner.execute("CREATE SCHEMA extra; GRANT USAGE ON SCHEMA extra TO ml_rag_user")
    create_store(owner, "extra.three", [("c", 1, 1, "middle", (1, 1, 0))])
    document = retrieve(asker, (1, 0, 0))
    assert document["vector_store"] == ["extra.three", "public.one", "public.two"]
    assert [c["segment"] for c in document["citations"]] == ["near", "middle", "far"]


def test_document_filters(owner: Connection, asker: Connection) -> None:
    create_store(owner, rows=ROWS)
    only_b = retrieve(asker, (1, 0, 0), document_name=["b.txt", "no such"])
    assert {c["document_name"] for c in only_b["citations"]} == {"b.txt"}
    assert len(only_b["citations"]) == 2
    not_a = retrieve(asker, (1, 0, 0), exclude_document_name=["a.txt"])
    assert not_a["citations"] == only_b["citations"]
    with error("P0002"):
        retrieve(asker, (1, 0, 0), document_name=["a.txt"], exclude_document_name=["a.txt"])
    with error("P0002"):
        retrieve(asker, (1, 0, 0), document_name=[])
    assert len(retrieve(asker, (1, 0, 0), exclude_document_name=[])["citations"]) == 3


def test_no_store_and_nothing_near_enough_are_told_apart(owner: Connection, asker: Connection) -> None:
    with error("P0002", "no vector store found") as none:
        retrieve(asker, (1, 0, 0))
    with error("P0002", "no vector store found", 'that fit "schema", "vector_store"'):
        retrieve(asker, (1, 0, 0), schema=["public"], vector_store=["docs"])
    create_store(owner, rows=ROWS)
    with error("P0002", "0.0513", "0.01") as far:
        retrieve(asker, (0, 2, 1), document_name=["b.txt"], retrieval_options={"max_distance": 0.01})
    assert none.message != far.message
    assert far.detail


def test_where_there_is_no_store_those_left_out_are_told(owner: Connection, asker: Connection, db: Database) -> None:
    create_store(owner, "other", ROWS, model="fake-embed-slow")
    create_store(owner, "secret", ROWS)
    owner.execute("REVOKE SELECT ON secret FROM ml_rag_user; CREATE SCHEMA hidden")
    create_store(owner, "hidden.docs", ROWS)
    with error("P0002", "no vector store found") as caught:
        answer(asker, "cats")
    assert "public.other (It holds vectors of model fake-embed-slow, and the call is for fake-embed)" in caught.detail
    assert "public.secret (The caller may not SELECT segment, segment_embedding)" in caught.detail
    assert "hidden" not in caught.detail
    assert caught.hint == 'Name its model in "embed_model_id".'
    owner.execute("DROP TABLE other")
    with error("P0002") as caught:
        answer(asker, "cats")
    assert caught.hint == "Ask its owner for GRANT SELECT ON public.secret."


def test_a_view_of_a_role_that_is_not_trusted_is_told_as_left_out(
    owner: Connection, asker: Connection, db: Database
) -> None:
    tenant = db.connect("tenant")
    owner.execute("GRANT CREATE ON SCHEMA public TO PUBLIC")
    create_store(tenant, "t", ROWS)
    tenant.execute(
        "CREATE VIEW v AS SELECT * FROM t; GRANT SELECT ON v TO ml_rag_user; REVOKE SELECT ON t FROM ml_rag_user"
    )
    mark(tenant, "v")
    with error("P0002", f"public.v (It belongs to role {db.role('tenant')}") as caught:
        answer(asker, "cats")
    assert "public.t (The caller may not SELECT" in caught.detail


def test_store_without_rows_fails_with_its_own_message(owner: Connection, asker: Connection) -> None:
    create_store(owner)
    with error("P0002", "no segment"):
        retrieve(asker, (1, 0, 0))


def test_embed_model_id_selects_the_stores_and_embeds_the_query(owner: Connection, asker: Connection) -> None:
    create_text_store(owner)
    create_store(owner, "other", ROWS, model="all_minilm_l6_v2")
    assert answer(asker, "cats", {"skip_generate": True})["vector_store"] == ["public.texts"]
    document = retrieve(asker, (1, 0, 0), embed_model_id="all_minilm_l6_v2")
    assert document["vector_store"] == ["public.other"]
    with error("22023", "fake-generate"):
        answer(asker, "cats", {"embed_model_id": "fake-generate", "vector_store": ["texts"]})
    with error("P0002", "fake-embed-slow"):
        answer(asker, "cats", {"embed_model_id": "fake-embed-slow", "query_embedding": [1, 0, 0]})
    mark(owner, "texts", "GENAI_OPTIONS=EMBED_MODEL_ID=fake-generate")
    with error("22023", "fake-generate"):
        answer(asker, "cats", {"embed_model_id": "fake-generate"})


def test_the_stores_own_model_embeds_where_none_is_named(owner: Connection, asker: Connection) -> None:
    create_text_store(owner)
    owner.execute("SELECT ml_rag.configure('embed_model_id', NULL)")
    document = answer(asker, "fish swim deep", {"vector_store": ["texts"], "n_citations": 1, "skip_generate": True})
    assert document["citations"][0]["distance"] == 0
    create_store(owner, "other", ROWS, model="another")
    with error("22023", "another", "fake-embed"):
        answer(asker, "fish", {"vector_store": ["texts", "other"]})


def test_dimension_mismatch_names_both(owner: Connection, asker: Connection) -> None:
    create_store(owner, rows=ROWS)
    with error("22000", "4", "3"):
        retrieve(asker, (1, 0, 0, 0))
    create_store(owner, "loose", ROWS, type="vector")
    with error("22000", "4", "3", ours=False):
        retrieve(asker, (1, 0, 0, 0), vector_store=["loose"])


@pytest.mark.parametrize(
    "embedding",
    [
        "[1,2,a]",
        "",
        "[]",
        [],
        [1, "2", 3],
        [True, 1, 1],
        [[1, 2, 3]],
        [1e300, 1, 1],
        "[NaN,1,1]",
        "[1,2",
        "1,2,3",
        [None],
    ],
    ids=str,
)
def test_query_embedding_that_is_none_is_refused(owner: Connection, asker: Connection, embedding: object) -> None:
    create_store(owner, rows=ROWS)
    with error("22023", "query_embedding"):
        answer(asker, "q", {"query_embedding": embedding, "skip_generate": True})


def test_a_refused_query_embedding_is_not_repeated_whole(owner: Connection, asker: Connection) -> None:
    create_store(owner, rows=ROWS)
    with error("22023", "query_embedding", "finite numbers") as refused:
        answer(asker, "q", {"query_embedding": "a secret " * 100})
    assert len(refused.detail) < 400
    assert "secret" not in refused.hint


def test_query_embedding_as_text_and_as_array_are_the_same(owner: Connection, asker: Connection) -> None:
    create_store(owner, rows=ROWS)
    options = {"skip_generate": True}
    as_array = answer(asker, "q", {**options, "query_embedding": [1, 2.5, -3e-2]})
    assert as_array == answer(asker, "q", {**options, "query_embedding": "[1,2.5,-3e-2]"})
    assert as_array == answer(asker, "q", {**options, "query_embedding": " [ 1 , 2.5, -0.03 ] "})
    too_long = [0.5] * 16001
    with error("22023", "query_embedding"):
        answer(asker, "q", {**options, "query_embedding": too_long})


@pytest.mark.parametrize("suffix", ["", " PARTITION BY LIST (document_id)"])
def test_a_store_cannot_be_dropped_while_the_question_is_embedded(
    db: Database, owner: Connection, local_sockets: Path, suffix: str
) -> None:
    create_store(owner, "docs", type="vector(16)", suffix=suffix)
    if suffix:
        owner.execute("CREATE TABLE docs_1 PARTITION OF docs FOR VALUES IN (1)")
    insert(owner, "docs", [("d", 1, 1, "one", fake_embedding("one"))])
    dropper = db.connect()
    dropper.execute("SET lock_timeout = '100ms'")
    refused: list[str | None] = []

    def handler(client: socket.socket, request: bytes) -> None:
        try:
            dropper.execute("DROP TABLE docs")
        except psycopg.Error as e:
            refused.append(e.sqlstate)
        reply(embeddings(fake_embedding("one")))(client, request)

    with hostile(local_sockets, handler, owner=owner):
        found = answer(db.connect("asker"), "one", {"skip_generate": True})
    assert refused == ["55P03"]
    assert [c["segment"] for c in found["citations"]] == ["one"]
    dropper.execute("DROP TABLE docs")


def test_neighbours_are_of_the_document_whatever_the_type_of_its_id(owner: Connection, asker: Connection) -> None:
    create_store(owner, rows=ROWS)
    owner.execute(
        "ALTER TABLE docs ALTER document_id TYPE char(4) USING CASE document_id WHEN 1 THEN 'a' ELSE 'ab' END"
    )
    found = retrieve(asker, (0, 1, 1), n_citations=1, retrieval_options={"segment_overlap": 1})
    assert [c["segment"] for c in found["citations"]] == ["five\nsix"]


def test_a_failed_assert_of_a_store_that_nobody_named_leaves_it_out(owner: Connection, asker: Connection) -> None:
    create_store(owner, "one", [("a", 1, 1, "near", (1, 0, 0))])
    create_store(owner, "two", [("b", 1, 1, "far", (0, 1, 0))])
    owner.execute(
        "CREATE FUNCTION public.asserts() RETURNS boolean LANGUAGE plpgsql AS"
        " $$ BEGIN ASSERT false, 'no such row'; RETURN true; END $$;"
        "ALTER TABLE two ENABLE ROW LEVEL SECURITY; CREATE POLICY p ON two USING (public.asserts())"
    )
    found = retrieve(asker, (1, 0, 0))
    assert (found["vector_store"], [c["segment"] for c in found["citations"]]) == (["public.one"], ["near"])
    with error("P0004", "no such row", ours=False):
        retrieve(asker, (1, 0, 0), vector_store=["public.two"])


def test_stores_without_an_index_are_warned_of_once(owner: Connection, asker: Connection) -> None:
    """The search begins again without the store that fails."""
    for name in ("one", "two", "three"):
        create_store(owner, name, ROWS)
    owner.execute(
        "SELECT ml_rag.enable_keyword_search('one');"
        "CREATE FUNCTION public.fails() RETURNS boolean LANGUAGE plpgsql AS $$ BEGIN RETURN 1 / 0 > 0; END $$;"
        "ALTER TABLE two ENABLE ROW LEVEL SECURITY; CREATE POLICY p ON two USING (public.fails())"
    )
    told = noticed(asker)
    found = retrieve(asker, (1, 0, 0), keyword_search=True)
    assert found["vector_store"] == ["public.one", "public.three"]
    assert sum("keyword index" in message for message in told) == 1, told
    assert sum("cannot be searched" in message for message in told) == 1, told


def test_a_look_up_in_a_known_keyword_index_is_cancelled(owner: Connection, asker: Connection) -> None:
    create_store(owner, rows=ROWS)
    owner.execute(
        "SELECT ml_rag.enable_keyword_search('docs');"
        "CREATE FUNCTION public.waits() RETURNS boolean LANGUAGE plpgsql AS $$ BEGIN"
        " PERFORM pg_sleep(current_setting('test.seconds')::float8); RETURN true; END $$;"
        "ALTER TABLE docs ENABLE ROW LEVEL SECURITY; CREATE POLICY p ON docs USING (public.waits())"
    )
    options = {"semantic_search": False, "keyword_search": True, "skip_generate": True, "vector_store": ["public.docs"]}
    asker.execute("SET test.seconds = '0'")
    assert answer(asker, "two", options)["citations"]
    asker.execute("SET test.seconds = '2'; SET statement_timeout = '300ms'")
    began = time.monotonic()
    with error("57014", ours=False):
        answer(asker, "two", options)
    assert time.monotonic() - began < 1.5


def test_many_stores_take_bounded_memory(owner: Connection, asker: Connection) -> None:
    """As one statement they once took memory by the square of their number: 1,000 of them a gigabyte."""
    create_store(owner, "s_0", [("a", 1, 1, "far", (0, 1, 0))])
    for i in range(1, 200):
        owner.execute(
            f"CREATE TABLE s_{i} (LIKE s_0 INCLUDING ALL); INSERT INTO s_{i} SELECT * FROM s_0;"
            f"GRANT SELECT ON s_{i} TO ml_rag_user"
        )
    owner.execute("UPDATE s_150 SET segment = 'near', segment_embedding = '[1,0,0]'")
    before = own_megabytes(asker)
    document = retrieve(asker, (1, 0, 0))
    assert len(document["vector_store"]) == 200
    assert document["citations"][0]["segment"] == "near"
    assert own_megabytes(asker) - before < 70


def test_searches_that_are_too_large_for_one_statement(owner: Connection, asker: Connection) -> None:
    """They once took 2 GB, and could not be cancelled for half a second."""
    create_store(owner, "s_0", [("a", 1, 1, "far", (0, 1, 0))])
    for i in range(1, 251):
        owner.execute(f"CREATE TABLE s_{i} (LIKE s_0 INCLUDING ALL); GRANT SELECT ON s_{i} TO ml_rag_user")
    arms = [{"search": "semantic", "query_embedding": [1, 0, i]} for i in range(16)]
    with error("54000", "search 4016 tables in all", "takes 4000.", "vector_store"):
        retrieve(asker, (1, 0, 0), arms=arms)
    names = [f"public.s_{i}" for i in range(10)]
    assert len(retrieve(asker, (1, 0, 0), arms=arms, vector_store=names)["citations"]) == 1
    filters = {"or": [{"segment_number": {"gt": i}} for i in range(800)]}
    with error("54000", "longer than 4000000 characters"):
        retrieve(asker, (1, 0, 0), arms=arms, vector_store=names, filters=filters)


def test_a_filter_is_compiled_once_for_stores_with_the_same_columns(owner: Connection, asker: Connection) -> None:
    """A hundred conditions on 250 stores took 20 s."""
    create_store(owner, "s_0", [("a", 1, 1, "far", (0, 1, 0))])
    for i in range(1, 251):
        owner.execute(f"CREATE TABLE s_{i} (LIKE s_0 INCLUDING ALL); GRANT SELECT ON s_{i} TO ml_rag_user")
    began = time.monotonic()
    filters = {"or": [{"segment_number": i} for i in range(100)]}
    assert len(retrieve(asker, (1, 0, 0), filters=filters)["citations"]) == 1
    assert time.monotonic() - began < 5


def test_a_filter_of_stores_with_other_columns(owner: Connection, asker: Connection) -> None:
    """Alike but for a type, a privilege, a column, or the name that stands for that of documents."""
    for name in ("a_number", "b_text", "c_hidden", "d_none", "e_number"):
        year = "" if name == "d_none" else f", ADD year {'text' if name == 'b_text' else 'integer'} DEFAULT 9"
        create_store(owner, name, [(name, 1, 1, name, (1, 0, 0))])
        owner.execute(f"ALTER TABLE {name} DROP document_name{year}")
        owner.execute(f"UPDATE {name} SET metadata = '{{\"year\": 20}}'")
    rest = "(document_id, segment_number, segment, segment_embedding, metadata)"
    owner.execute(f"REVOKE SELECT ON c_hidden FROM ml_rag_user; GRANT SELECT {rest} ON c_hidden TO ml_rag_user")
    for options, expected in (
        ({"filters": {"year": {"gte": 10}}}, ["b_text", "c_hidden", "d_none"]),
        ({"filters": {"year": {"gte": "10"}}}, ["b_text"]),
        ({"document_name": ["public.e_number", "public.d_none"]}, ["d_none", "e_number"]),
    ):
        for _ in range(2):
            found = retrieve(asker, (1, 0, 0), **options)["citations"]
            assert sorted(citation["segment"] for citation in found) == expected


@pytest.mark.parametrize(("reads", "length"), [(4000, 4_000_000), (4001, 0), (1, 4_000_001)])
def test_the_size_of_a_statement(reads: int, length: int) -> None:
    fits = (reads, length) == (4000, 4_000_000)
    with nullcontext() if fits else pytest.raises(find.Failed):
        find._check_size(reads, length)


def own_megabytes(connection: Connection) -> float:
    status = Path(f"/proc/{connection.info.backend_pid}/status").read_text()
    return int(re.search(r"RssAnon:\s+(\d+)", status)[1]) / 1024  # type: ignore[index]
