"""pipeline/isolate: a store that a call does not name, and what its owner can do to the calls of everybody else."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from psycopg import sql

from support.cluster import Connection, Database
from support.planting import COLUMNS, NEAR, QUESTION, ROW, ask, publish, texts, warnings
from support.stores import as_text, create_store, error, fake_embedding, search

#: made by another role in its own schema, readable by everybody: how, and whether the planted row may be cited
PLANTS: dict[str, tuple[str, bool]] = {
    "a plain table": ("", True),
    "a column without dimensions": (
        "ALTER TABLE evil.kb ALTER segment_embedding TYPE vector; UPDATE evil.kb SET segment_embedding = '[1,2,3]'",
        False,
    ),
    "other dimensions": (
        "ALTER TABLE evil.kb ALTER segment_embedding TYPE vector(3) USING '[1,2,3]'",
        False,
    ),
    "a policy that fails": (
        "ALTER TABLE evil.kb ENABLE ROW LEVEL SECURITY;"
        "CREATE POLICY p ON evil.kb USING (1 / (segment_number - segment_number) = 1)",
        False,
    ),
    "a policy that takes seconds": (
        "ALTER TABLE evil.kb ENABLE ROW LEVEL SECURITY; "
        "CREATE POLICY p ON evil.kb USING (length(repeat('x', 90000000)) > 0"
        " AND length(upper(repeat('y', 90000000))) > segment_number AND length(upper(repeat(segment, 900000))) > 0)",
        False,
    ),
    "a check that fails": ("ALTER TABLE evil.kb ADD CHECK (segment_number <> 0 AND 1 / segment_number >= 0)", False),
    "a view that fails": (
        "ALTER TABLE evil.kb RENAME TO t; CREATE VIEW evil.kb AS SELECT document_name, metadata, document_id,"
        " 1 / (segment_number - 1) AS segment_number, segment, segment_embedding FROM evil.t",
        False,
    ),
    "a domain": (
        "CREATE DOMAIN evil.d AS text CHECK (1 / length(VALUE) >= 0); ALTER TABLE evil.kb ADD x evil.d",
        False,
    ),
    "an enum": ("CREATE TYPE evil.e AS ENUM ('a'); ALTER TABLE evil.kb ADD topic evil.e", False),
    "a composite type": ("CREATE TYPE evil.c AS (a integer); ALTER TABLE evil.kb ADD x evil.c", False),
    "a generated column": (
        "ALTER TABLE evil.kb ADD x integer GENERATED ALWAYS AS (segment_number + 1) STORED",
        False,
    ),
    "an index's expression": ("CREATE INDEX ON evil.kb (lower(segment))", False),
    "an index's predicate": ("CREATE INDEX ON evil.kb (segment) WHERE segment_number > 3", False),
    "statistics": ("CREATE STATISTICS evil.s ON lower(segment), document_name FROM evil.kb", False),
    "a rule": (
        "CREATE RULE r AS ON DELETE TO evil.kb DO ALSO SELECT 1 / 0",
        False,
    ),
    "partitions by an expression": (
        f"DROP TABLE evil.kb; CREATE TABLE evil.kb ({COLUMNS}) PARTITION BY LIST (lower(segment));"
        f"CREATE TABLE evil.part PARTITION OF evil.kb DEFAULT; INSERT INTO evil.kb VALUES {ROW}",
        False,
    ),
    "a partition of such a table": (
        f"DROP TABLE evil.kb; CREATE TABLE evil.t ({COLUMNS}) PARTITION BY LIST (lower(segment));"
        f"CREATE TABLE evil.kb PARTITION OF evil.t DEFAULT; INSERT INTO evil.kb VALUES {ROW}",
        False,
    ),
    "partitions by a column": (
        f"DROP TABLE evil.kb; CREATE TABLE evil.kb ({COLUMNS}) PARTITION BY RANGE (document_id);"
        f"CREATE TABLE evil.part PARTITION OF evil.kb DEFAULT; INSERT INTO evil.kb VALUES {ROW}",
        True,
    ),
    "keys and indexes": (
        "ALTER TABLE evil.kb ADD PRIMARY KEY (document_id, segment_number), ALTER segment SET NOT NULL;"
        "CREATE INDEX ON evil.kb USING hnsw (segment_embedding vector_cosine_ops);"
        "CREATE INDEX ON evil.kb USING gin (metadata); CREATE STATISTICS evil.s ON segment, document_name FROM evil.kb",
        True,
    ),
    "null in every column": (
        "UPDATE evil.kb SET (document_name, metadata, document_id, segment_number, segment, "
        "segment_embedding) = (NULL, NULL, NULL, NULL, NULL, NULL)",
        False,
    ),
    "null beside the segment": (
        "UPDATE evil.kb SET (document_name, metadata, document_id, segment_number) = (NULL, NULL, NULL, NULL)",
        True,
    ),
    "zero vectors": ("UPDATE evil.kb SET segment_embedding = array_fill(0, ARRAY[16])::vector", True),
    "the largest vectors": ("UPDATE evil.kb SET segment_embedding = array_fill(3e38::real, ARRAY[16])::vector", False),
    "a segment of 50 MB": ("UPDATE evil.kb SET segment = repeat('contract notice ', 3200000)", False),
    "a name of 50 MB": ("UPDATE evil.kb SET document_name = repeat('x', 50000000)", False),
    "metadata of 50 MB": (
        "UPDATE evil.kb SET metadata = jsonb_build_object('a', (SELECT string_agg(md5(i::text), '') FROM"
        " generate_series(1, 1600000) AS i))",
        False,
    ),
    "a name of 1 MB that compresses": ("UPDATE evil.kb SET document_name = repeat('x', 1000000)", False),
    "metadata of 1 MB that compress": (
        "UPDATE evil.kb SET metadata = jsonb_build_object('x', repeat('x', 1000000))",
        False,
    ),
    "the last number there is": (
        "ALTER TABLE evil.kb ALTER segment_number TYPE bigint;UPDATE evil.kb SET segment_number = 9223372036854775807",
        True,
    ),
    "many rows of one number": (
        "UPDATE evil.kb SET segment = 'planted',"
        "segment_embedding = array_fill(0, ARRAY[16])::vector - segment_embedding;"
        "INSERT INTO evil.kb SELECT k.* FROM evil.kb AS k, generate_series(1, 3000)",
        True,
    ),
    "very many names": (
        "INSERT INTO evil.kb SELECT substr(md5(i::text), 1, 9), '{}', i, 1, 'planted', array_fill(0, ARRAY[16])::vector"
        " FROM generate_series(2, 20000) AS i",
        True,
    ),
    "a document of another one's name, of very many segments": (
        "UPDATE evil.kb SET document_name = 'g', segment = 'planted',"
        " segment_embedding = array_fill(0, ARRAY[16])::vector - segment_embedding;"
        "INSERT INTO evil.kb SELECT k.document_name, k.metadata, 2, i, k.segment, k.segment_embedding"
        " FROM evil.kb AS k, generate_series(1, 12000) AS i",
        True,
    ),
    "columns of other types": (
        "ALTER TABLE evil.kb ALTER document_id TYPE xml USING '<a/>',"
        ' ALTER metadata TYPE json USING \'{"a": "\\u0000"}\','
        " ALTER document_name TYPE point USING '(1,1)'",
        False,
    ),
    "a filtered column of another type": ("ALTER TABLE evil.kb ADD topic point", True),
    "a keyword index that is nonsense": (
        "ALTER TABLE evil.kb ADD PRIMARY KEY (document_id); SELECT ml_rag.enable_keyword_search('evil.kb');"
        "ALTER TABLE evil.kb ALTER document_id TYPE text",
        True,
    ),
    "a comment of 5 MB": (
        "DO $$BEGIN EXECUTE format('COMMENT ON COLUMN evil.kb.segment_embedding IS %L',"
        " repeat('GENAI_OPTIONS=', 350000)); END$$",
        False,
    ),
    "a comment of 500 MB": (
        "DO $$BEGIN EXECUTE format('COMMENT ON COLUMN evil.kb.segment_embedding IS %L',"
        " 'GENAI_OPTIONS=EMBED_MODEL_ID=fake-embed ' || repeat('x', 500000000)); END$$",
        True,
    ),
    "system columns": (
        "COMMENT ON COLUMN evil.kb.segment_embedding IS 'GENAI_OPTIONS=EMBED_MODEL_ID=fake-embed,"
        "SEGMENT=ctid,DOCUMENT_NAME=xmin,DOCUMENT_ID=tableoid,METADATA=ctid'",
        False,
    ),
    "a column that is everything": (
        "COMMENT ON COLUMN evil.kb.segment_embedding IS 'GENAI_OPTIONS=EMBED_MODEL_ID=fake-embed,"
        "SEGMENT=segment_embedding,DOCUMENT_NAME=segment_embedding,DOCUMENT_ID=segment_embedding,METADATA=segment_embedding'",
        False,
    ),
    "columns that are no names and numbers": (
        "COMMENT ON COLUMN evil.kb.segment_embedding IS 'GENAI_OPTIONS=EMBED_MODEL_ID=fake-embed,"
        "SEGMENT=segment,DOCUMENT_NAME=metadata,DOCUMENT_ID=metadata,SEGMENT_NUMBER=segment'",
        True,
    ),
    "node groups that are none": (
        "ALTER TABLE evil.kb ADD PRIMARY KEY (document_id, segment_number);"
        + "".join(
            f"CREATE TABLE evil.n{n} (document_id bigint, segment_number integer, node_number integer,"
            " FOREIGN KEY (document_id, segment_number) REFERENCES evil.kb);"
            f"COMMENT ON TABLE evil.n{n} IS 'ML_RAG_NODE_GROUP={comment}';"
            for n, comment in enumerate(
                ["7", "[1]", '{"name": "sentences", "merge": 3, "embed_model_id": "fake-embed"}', "{"]
            )
        )
        + "CREATE TABLE evil.deep (document_id bigint, segment_number integer,"
        " FOREIGN KEY (document_id, segment_number) REFERENCES evil.kb);"
        " DO $$BEGIN EXECUTE format('COMMENT ON TABLE evil.deep IS %L',"
        " 'ML_RAG_NODE_GROUP=' || repeat('[', 1000000)); END$$;"
        "COMMENT ON COLUMN evil.kb.segment_embedding IS 'GENAI_OPTIONS=EMBED_MODEL_ID=fake-embed'",
        True,
    ),
}

PATHS: dict[str, dict[str, Any]] = {
    "semantic": {},
    "euclidean": {"distance_metric": "EUCLIDEAN"},
    "keyword": {"semantic_search": False, "keyword_search": True},
    "hybrid": {"keyword_search": True},
    "filters": {"filters": {"topic": "law"}},
    "filters that deny": {"filters": {"topic": {"ne": "sports"}}},
    "keywords": {"required_keywords": ["contract"]},
    "overlap": {"retrieval_options": {"segment_overlap": 1}},
    "reranked": {"rerank": {"model_id": "hybrid"}},
    "documents that the question names": {"query_options": {"document_names": True}},
    "names of no document": {"document_name": ["g", *(f"{i:09d}" for i in range(10))]},
    "nodes": {"arms": [{"search": "semantic"}, {"search": "keyword", "in": "sentences"}]},
    "a whole document": {"document_name": ["g"], "model_options": {"task": "summarization"}},
}


@pytest.fixture(scope="module")
def prepared(module_db: Database) -> Database:
    """A store of a superuser, with a keyword index; the tenant has a schema of its own."""
    owner = module_db.connect()
    create_store(owner, "good", type="vector(16)")
    for i, text in enumerate(("contract notice", "contract period of notice", "period")):
        owner.execute(
            "INSERT INTO good VALUES ('g', '{\"topic\": \"law\"}', 1, %s, %s, %s)",
            (10 * i, text, as_text(fake_embedding(text))),
        )
    owner.execute("ALTER TABLE good ADD topic text NOT NULL DEFAULT 'law'; SELECT ml_rag.enable_keyword_search('good')")
    owner.execute("CALL ml_rag.create_node_group('good', 'sentences', '{\"transform\": \"sentence\"}')")
    owner.execute("CREATE TABLE questions (id integer PRIMARY KEY, question text, documents jsonb, answer jsonb)")
    owner.execute("INSERT INTO questions VALUES (1, %s, '[\"g\"]')", (QUESTION,))
    owner.execute("GRANT SELECT, UPDATE ON questions TO PUBLIC")
    owner.execute(f"GRANT CREATE ON DATABASE {module_db.name} TO {module_db.role('tenant')}")
    module_db.release()
    return module_db


@pytest.fixture
def good(prepared: Database) -> Iterator[Database]:
    yield prepared
    prepared.release()


@pytest.fixture
def attacker(good: Database) -> Iterator[Connection]:
    connection = good.connect("tenant")
    connection.execute("CREATE SCHEMA evil; GRANT USAGE ON SCHEMA evil TO PUBLIC")
    connection.execute(f"CREATE TABLE evil.kb ({COLUMNS}); INSERT INTO evil.kb VALUES {ROW}")
    yield connection
    connection.execute("DROP SCHEMA evil CASCADE")


@pytest.mark.parametrize("plant", PLANTS)
def test_a_planted_store_leaves_the_calls_of_others_as_they_are(
    good: Database, attacker: Connection, plant: str
) -> None:
    statements, may_be_cited = PLANTS[plant]
    asker = good.connect("asker")
    before = {path: ask(asker, **options) for path, options in PATHS.items()}
    assert all(texts(document) for document, _ in before.values())
    publish(attacker, statements)
    for path, options in PATHS.items():
        said = warnings(asker)
        document, seconds = ask(asker, **options)
        assert texts(document) == texts(before[path][0]), (path, said)
        assert "public.good" in document["vector_store"], path
        assert seconds < before[path][1] * 10 + 2, path
        cited = [c for c in document["citations"] if "planted" in c["segment"]]
        assert may_be_cited or not cited, path
        # searched, or left out with a warning where it was a candidate at all
        assert "evil.kb" in document["vector_store"] or not cited, path
        ours = ("no document is named", '1 vector stores have no node group "sentences"')
        assert all('"evil.kb"' in message or message.startswith(ours) for message, _ in said), said


def test_planted_comments_cost_others_little(good: Database, attacker: Connection) -> None:
    asker, superuser = good.connect("asker"), good.connect()

    def discovering(most: float) -> None:
        began = time.monotonic()
        for _ in range(5):
            asker.execute("SELECT * FROM ml_rag.discover()")
            superuser.execute("SELECT * FROM ml_rag.node_group WHERE store = 'good'::regclass")
        assert time.monotonic() - began < most

    publish(attacker, PLANTS["node groups that are none"][0])
    discovering(2)
    publish(attacker, PLANTS["a comment of 500 MB"][0])
    discovering(2)


@pytest.mark.parametrize("plant", ["a plain table", "a column without dimensions", "columns of other types"])
def test_batches_and_evaluations_go_on_too(good: Database, attacker: Connection, plant: str) -> None:
    publish(attacker, PLANTS[plant][0])
    asker = good.connect("asker")
    rows = search(asker, QUESTION, {"n_citations": 5})
    assert "contract notice" in [r[5] for r in rows if r[1] == "public.good"]
    report: Any = asker.execute(
        "CALL ml_rag_table('public.questions.question', 'public.questions.answer', '{\"skip_generate\": true}')"
    ).fetchone()
    assert (report[0]["rows"], report[0]["failed"]) == (1, 0)
    report = asker.execute("SELECT ml_rag_evaluate('public.questions'::regclass, '{\"keep\": false}')").fetchone()
    assert report[0]["errors"] in ({}, None)
    good.connect().execute("UPDATE questions SET answer = NULL")


def test_names_are_read_of_few_documents_of_untrusted_owners(good: Database, attacker: Connection) -> None:
    for i in range(4):
        attacker.execute(f"CREATE TABLE evil.t{i} (LIKE evil.kb); INSERT INTO evil.t{i} (document_name, segment)"
                         f" SELECT n || ' of {i}', 'planted' FROM generate_series(1, 2001) AS n")  # fmt: skip
        publish(attacker, table=f"evil.t{i}")
    attacker.execute(
        "INSERT INTO evil.t0 (document_name, segment) VALUES (repeat('x', 1001), 'x'), (repeat('~', 1000), 'x')"
    )
    asker = good.connect("asker")
    listed = (
        "SELECT d ->> 0 FROM jsonb_array_elements(ml_rag._list_documents(ARRAY(SELECT s FROM ml_rag.discover({}) AS s),"
    )
    listed += " true, '{}')) AS d"
    names = [name for (name,) in asker.execute(listed.format("", "{~," + "~" * 1000 + "}")).fetchall()]
    # those that are looked for come first, and the trusted store before them
    assert names[:2] == ["g", "~" * 1000]
    assert "x" * 1001 not in names
    assert [sum(name.endswith(f" of {i}") for name in names) for i in range(4)] == [1999, 2000, 2000, 0]
    assert len(names) == 6001
    named = "ARRAY[''evil.t0'']".replace("''", "'")
    assert len(asker.execute(listed.format(named, "{}")).fetchall()) == 2003


def test_a_document_is_not_made_longer_by_who_uses_its_name(good: Database, attacker: Connection) -> None:
    """Each further segment is one that a model reads."""
    whole = PATHS["a whole document"]
    asker = good.connect("asker")
    publish(attacker, "UPDATE evil.kb SET document_name = 'g'")
    assert len(ask(asker, **whole)[0]["citations"]) == 3
    # what no other store has is read, and little of it
    whole = {**whole, "document_name": ["mine"]}
    rows = "INSERT INTO evil.kb SELECT 'mine', '{}', 1, i, repeat('x', %s), NULL FROM generate_series(1, %s) AS i"
    for length, most in ((1, 1000), (100_000, 10)):
        attacker.execute("TRUNCATE evil.kb")
        attacker.execute(rows, (length, most))
        assert len(ask(asker, **whole)[0]["citations"]) == most
        attacker.execute("INSERT INTO evil.kb VALUES ('mine', '{}', 1, 0, 'x', NULL)")
        said = warnings(asker)
        with error("P0002"):
            ask(asker, **whole)
        (left_out,) = [detail for message, detail in said if message == '"evil.kb" cannot be searched; ignored']
        assert left_out.startswith("54000: the documents are too long to be read as a whole. ")
        # all of it where that is what is asked for
        assert len(ask(asker, **whole, vector_store=["evil.kb"])[0]["citations"]) == most + 1


def test_what_was_left_out_is_said(good: Database, attacker: Connection) -> None:
    publish(attacker, PLANTS["a column without dimensions"][0])
    asker = good.connect("asker")
    said = warnings(asker)
    document, _ = ask(asker, explain=True)
    assert document["vector_store"] == ["public.good"]
    ((message, detail),) = said
    assert message == '"evil.kb" cannot be searched; ignored'
    assert detail == "22000: different vector dimensions 3 and 16."
    (store,) = [s for s in document["explain"]["stores"] if s["vector_store"] == "evil.kb"]
    assert store["semantic"] == {"skipped": "22000: different vector dimensions 3 and 16."}
    # who names it gets its error
    with error("22000", ours=False):
        ask(asker, vector_store=["evil.kb"])
    with error("22000", ours=False):
        ask(asker, vector_store=["evil.kb", "public.good"])
    # and so does who has no other one
    with error("22000"):
        ask(asker, exclude_vector_store=["good"])


@pytest.mark.parametrize("path", PATHS)
def test_a_table_that_its_owner_has_locked_is_not_waited_for(good: Database, attacker: Connection, path: str) -> None:
    attacker.execute("ALTER TABLE evil.kb ADD PRIMARY KEY (document_id)")
    publish(attacker, "SELECT ml_rag.enable_keyword_search('evil.kb')")
    asker = good.connect("asker")
    before, _ = ask(asker, **PATHS[path])
    asker.execute("SET lock_timeout = '1min'")
    said = warnings(asker)
    with attacker.transaction():
        attacker.execute("LOCK TABLE evil.kb IN ACCESS EXCLUSIVE MODE")
        document, seconds = ask(asker, **PATHS[path])
    assert texts(document) == texts(before)
    assert document["vector_store"] == ["public.good"]
    assert seconds < 1
    assert any("55P03" in detail for _, detail in said)
    assert asker.execute("SHOW lock_timeout").fetchone() == ("1min",)


def test_many_locked_tables_do_not_add_up(good: Database, attacker: Connection) -> None:
    for i in range(30):
        attacker.execute(f"CREATE TABLE evil.t{i} (LIKE evil.kb)")
        publish(attacker, table=f"evil.t{i}")
    asker = good.connect("asker")
    said = warnings(asker)
    with attacker.transaction():
        for i in range(30):
            attacker.execute(f"LOCK TABLE evil.t{i} IN ACCESS EXCLUSIVE MODE")
        document, seconds = ask(asker)
    assert "contract notice" in texts(document)
    assert seconds < 3
    assert len(said) >= 11


def test_what_takes_long_is_cut_off_and_what_is_left_is_named(good: Database, attacker: Connection) -> None:
    for i in range(3):
        attacker.execute(f"CREATE TABLE evil.t{i} (LIKE evil.kb)")
        attacker.execute(
            f"INSERT INTO evil.t{i} SELECT 'x', '{{}}', i, 1, 'planted', '{NEAR}' FROM generate_series(1, 40000) AS i"
        )
        publish(attacker, table=f"evil.t{i}")
    attacker.execute("CREATE INDEX ON evil.t0 USING ivfflat (segment_embedding vector_cosine_ops) WITH (lists = 1)")
    owner, asker = good.connect(), good.connect("asker")
    try:
        for limit in (10, 0):
            owner.execute("SELECT ml_rag.configure('untrusted_ms', %s)", (str(limit),))
            said = warnings(asker)
            document, seconds = ask(asker)
            assert (document["vector_store"], sorted(texts(document))[0]) == (["public.good"], "contract notice")
            assert seconds < 1
            if limit:
                assert any("54000" in detail for _, detail in said), said
            else:
                assert [m for m, _ in said] == [
                    "time ran out before vector stores of untrusted owners were searched: 3; ignored"
                ]
                assert "Left out: evil.t0, evil.t1, evil.t2." in said[0][1]
        owner.execute("SELECT ml_rag.configure('untrusted_ms', NULL), ml_rag.configure('untrusted_mb', '1')")
        said = warnings(asker)
        document, _ = ask(asker)
        assert document["vector_store"] == ["public.good"]
        assert all("54000: the store is too large." in detail for _, detail in said)
        assert len(said) == 3
        # named, it has no limit
        assert ask(asker, vector_store=["evil.t0"])[0]["citations"]
    finally:
        owner.execute("SELECT ml_rag.configure('untrusted_ms', NULL), ml_rag.configure('untrusted_mb', NULL)")


def test_all_arms_share_the_time(good: Database, attacker: Connection) -> None:
    """A question in sub-questions is as many searches."""
    attacker.execute(
        "CREATE TABLE evil.t (LIKE evil.kb);"
        f"INSERT INTO evil.t SELECT 'x', '{{}}', i, 1, 'contract planted', '{NEAR}'"
        " FROM generate_series(1, 200000) AS i"
    )
    publish(attacker, table="evil.t")
    owner, asker = good.connect(), good.connect("asker")
    # no row passes, so that all are looked at
    asked = {"arms": [{"search": "semantic", "weight": 1}] * 16, "required_keywords": ["nobodyhasthis"]}
    try:
        owner.execute("SELECT ml_rag.configure('untrusted_ms', '300')")
        with error("P0002"):
            ask(asker, **asked, schema=["public"])
        began = time.monotonic()
        with error("P0002"):
            ask(asker, **asked)
        assert time.monotonic() - began < 2.5
    finally:
        owner.execute("SELECT ml_rag.configure('untrusted_ms', NULL)")


CHANGES: dict[str, str] = {
    "dropped": "DROP TABLE evil.kb",
    "renamed": "ALTER TABLE evil.kb RENAME TO other",
    "a column less": "ALTER TABLE evil.kb DROP segment",
    "a policy": (
        "ALTER TABLE evil.kb ENABLE ROW LEVEL SECURITY; CREATE POLICY p ON evil.kb USING (1 / (segment_number - 1) = 1)"
    ),
    "an index's expression": "CREATE INDEX ON evil.kb (lower(segment))",
    "a child": "CREATE TABLE evil.child (CHECK (1 / segment_number >= 0)) INHERITS (evil.kb)",
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_store_that_changes_between_discovery_and_search_is_left_out(
    good: Database, attacker: Connection, change: str
) -> None:
    publish(attacker)
    asker = good.connect("asker")
    asker.execute("CREATE TEMPORARY TABLE found AS SELECT array_agg(s) AS stores FROM ml_rag.discover() AS s")
    attacker.execute(CHANGES[change])
    said = warnings(asker)
    found = asker.execute(
        "SELECT h.vector_store FROM ml_rag.search((SELECT stores FROM found), %s::vector, 10) AS h", (NEAR,)
    ).fetchall()
    expected = {"public.good"} | ({"evil.kb"} if change == "renamed" else set())
    assert {row[0] for row in found} == expected
    assert len(said) == (change != "renamed")


def test_neighbours_that_take_long_to_join_are_cut_off(good: Database, attacker: Connection) -> None:
    attacker.execute(
        "INSERT INTO evil.kb SELECT 'planted', '{}', 1, i, 'planted' || repeat('中', 33000) || 'X', %s"
        " FROM generate_series(2, 11) AS i",
        (NEAR,),
    )
    attacker.execute("UPDATE evil.kb SET segment = repeat('中', 33000) || 'planted X'")
    publish(attacker)
    asker = good.connect("asker")
    said = warnings(asker)
    document, seconds = ask(asker, n_citations=20, retrieval_options={"segment_overlap": 5})
    assert texts(document)
    assert seconds < 4
    assert any("54000" in detail for _, detail in said), said


def test_a_table_of_a_name_without_schema_does_not_decide_the_model(good: Database, attacker: Connection) -> None:
    attacker.execute("ALTER TABLE evil.kb RENAME TO good")
    attacker.execute("COMMENT ON COLUMN evil.good.segment_embedding IS 'GENAI_OPTIONS=EMBED_MODEL_ID=other'")
    attacker.execute("GRANT SELECT ON evil.good TO PUBLIC")
    asker = good.connect("asker")
    said = warnings(asker)
    document, _ = ask(asker, vector_store=["good"])
    assert document["vector_store"] == ["public.good"]
    assert [m for m, _ in said] == ['"evil.good" has another embedding model than the stores named; ignored']
    # who names both of them with their schemas is told
    with error("22023", "different embedding models"):
        ask(asker, vector_store=["evil.good", "public.good"])


def test_wide_keys_and_long_rows_of_a_keyword_index_burden_nobody(good: Database, attacker: Connection) -> None:
    """150 kB of one letter are a key of 2 kB; 7 MB of words are one row of tokens."""
    attacker.execute("ALTER TABLE evil.kb ADD PRIMARY KEY (document_name, segment_number)")
    publish(attacker, "SELECT ml_rag.enable_keyword_search('evil.kb')")
    attacker.execute(
        "INSERT INTO evil.kb SELECT repeat('x', 150000) || i, '{}', 1, 1, 'contract planted', %s"
        " FROM generate_series(1, 300) AS i",
        (NEAR,),
    )
    attacker.execute(
        "INSERT INTO evil.kb SELECT 'planted', '{}', 1, i, 'contract planted ' ||"
        " (SELECT string_agg('w' || j, ' ') FROM generate_series(1, 100000) AS j), %s FROM generate_series(2, 4) AS i",
        (NEAR,),
    )
    asker = good.connect("asker")
    ask(asker, exclude_vector_store=["evil.kb"], semantic_search=False, keyword_search=True)
    document, seconds = ask(asker, semantic_search=False, keyword_search=True)
    assert texts(document)
    assert [c["document_name"] for c in document["citations"] if "planted" in c["segment"]] == ["planted"]
    assert seconds < 1


def test_a_cancelled_call_is_cancelled(good: Database, attacker: Connection) -> None:
    """Errors are caught a store; a cancellation is none of them."""
    publish(attacker)
    asker = good.connect("asker")
    asker.execute("SET statement_timeout = '50ms'")
    with attacker.transaction():
        attacker.execute("LOCK TABLE evil.kb IN ACCESS EXCLUSIVE MODE")
        with error("57014", ours=False):
            ask(asker)


def test_a_filter_that_is_wrong_for_every_store_is_an_error(good: Database, attacker: Connection) -> None:
    publish(attacker)
    for options in ({}, {"semantic_search": False, "keyword_search": True}):
        with error("22023", "unknown operator"):
            ask(good.connect("asker"), filters={"topic": {"equals": 1}}, **options)


# -- whose stores ------------------------------------------------------------------------------------------------------


VIEW = "ALTER TABLE evil.kb RENAME TO t; CREATE VIEW evil.kb AS SELECT * FROM evil.t"


def found(connection: Connection) -> dict[str, str]:
    return dict(connection.execute("SELECT vector_store, found FROM ml_rag.discover()").fetchall())


@pytest.fixture
def grants(good: Database) -> Iterator[Callable[[str], None]]:
    owner = good.connect()
    roles = {name: sql.Identifier(good.role(name)) for name in ("asker", "tenant", "stranger")}
    undo: list[sql.Composable] = []

    def run(statement: str) -> None:
        owner.execute(sql.SQL(statement).format(**roles))
        if statement.startswith("GRANT"):
            revoke = statement.replace("GRANT", "REVOKE").replace(" TO ", " FROM ").removesuffix(" WITH ADMIN OPTION")
            undo.append(sql.SQL(revoke + " CASCADE").format(**roles))

    yield run
    for statement in reversed(undo):
        owner.execute(statement)


def test_a_publisher_s_view_is_searched_unasked(
    good: Database, attacker: Connection, grants: Callable[[str], None]
) -> None:
    publish(attacker, VIEW)
    asker = good.connect("asker")
    assert found(asker) == {"public.good": "trusted"}
    grants("GRANT ml_rag_publisher TO {tenant}")
    assert found(asker) == {"evil.kb": "trusted", "public.good": "trusted"}
    # code of one who is no superuser never runs as one
    assert found(good.connect()) == {"public.good": "trusted"}


def test_only_a_superuser_can_make_others_trust_a_role(
    good: Database, attacker: Connection, grants: Callable[[str], None]
) -> None:
    """Whoever has the admin option of a role may make anybody a member of it, who need not know."""
    publish(attacker, VIEW)
    asker = good.connect("asker")
    grants("GRANT {tenant} TO {stranger} WITH ADMIN OPTION")
    me, victim = (sql.Identifier(good.role(r)) for r in ("tenant", "asker"))
    lead = good.connect("stranger")
    lead.execute(sql.SQL("GRANT {} TO {}").format(me, victim))
    assert asker.execute("SELECT pg_has_role(%s, 'MEMBER')", (good.role("tenant"),)).fetchone() == (True,)
    assert found(asker) == {"public.good": "trusted"}
    lead.execute(sql.SQL("REVOKE {} FROM {}").format(me, victim))
    grants("GRANT {tenant} TO {asker}")
    assert found(asker) == {"evil.kb": "trusted", "public.good": "trusted"}


def test_an_administrator_says_whose_stores_are_searched(
    good: Database, attacker: Connection, grants: Callable[[str], None]
) -> None:
    publish(attacker)
    owner, asker = good.connect(), good.connect("asker")
    superuser: Any = owner.execute("SELECT current_user").fetchone()
    both = {"evil.kb": "untrusted", "public.good": "trusted"}
    assert found(asker) == both
    try:
        for value, expected in {
            f'"{superuser[0]}"': {"public.good"},
            good.role("tenant"): {"evil.kb"},
            f'"{superuser[0]}" , {good.role("tenant")}': {"evil.kb", "public.good"},
            good.role("stranger"): set[str](),
            '"$user"': set[str](),
        }.items():
            owner.execute("SELECT ml_rag.configure('searched_owners', %s)", (value,))
            assert set(found(asker)) == expected, value
        assert found(good.connect("tenant")) == {"evil.kb": "trusted"}
        owner.execute("SELECT ml_rag.configure('searched_owners', %s)", (good.role("stranger"),))
        said = warnings(asker)
        with error("P0002"):
            ask(asker, vector_store=["kb"])
        assert "searched_owners" in said[0][1]
        assert ask(asker, vector_store=["evil.kb"])[0]["citations"]
        # members count
        grants("GRANT {stranger} TO {tenant}")
        assert found(asker) == {"evil.kb": "untrusted"}
        for wrong in ("", " ", "no_such_role", f"{superuser[0]},", "a b", f'"{superuser[0]}', "'x'"):
            with error("22023"):
                owner.execute("SELECT ml_rag.configure('searched_owners', %s)", (wrong,))
        with error("42501", ours=False):
            asker.execute("SELECT ml_rag.configure('searched_owners', NULL)")
    finally:
        owner.execute("SELECT ml_rag.configure('searched_owners', NULL)")
    assert found(asker) == both


@pytest.mark.parametrize(
    ("name", "value"), [(n, v) for n in ("untrusted_ms", "untrusted_mb") for v in ("-1", "1.5", "x", "1000000000", "")]
)
def test_limits_are_whole_numbers(good: Database, name: str, value: str) -> None:
    owner = good.connect()
    with error("22023", name):
        owner.execute("SELECT ml_rag.configure(%s, %s)", (name, value))
    for limit in ("0", "999999999", None):
        owner.execute("SELECT ml_rag.configure(%s, %s)", (name, limit))


def test_a_change_while_a_call_runs_fails_nobody(good: Database, attacker: Connection) -> None:
    """Dropped, filled with nonsense and made anew, over and over."""
    publish(attacker)
    stop = threading.Event()

    def change() -> None:
        while not stop.is_set():
            attacker.execute(f"DROP TABLE evil.kb; CREATE TABLE evil.kb ({COLUMNS}); INSERT INTO evil.kb VALUES {ROW}")
            publish(attacker)

    thread = threading.Thread(target=change)
    thread.start()
    try:
        asker = good.connect("asker")
        for _ in range(60):
            assert "contract notice" in texts(ask(asker)[0])
    finally:
        stop.set()
        thread.join()


def test_settings_are_listed(good: Database) -> None:
    rows = dict(good.connect("asker").execute("SELECT name, default_value FROM ml_rag.setting").fetchall())
    assert rows["searched_owners"] is None
    assert json.loads(rows["untrusted_ms"]) == 1000
    assert json.loads(rows["untrusted_mb"]) == 10000
