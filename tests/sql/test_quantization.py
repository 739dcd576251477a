"""pipeline/quantization, store/index: options index and index_options: what is built, and what searches find."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pytest

from support.cluster import Connection, Database, noticed
from support.loading import load, write
from support.stores import answer, as_text, create_store, error, fake_embedding, grant, insert, mark, search

ROWS, DIMENSIONS = 3000, 64
KINDS = [
    {"type": "hnsw"},
    {"type": "hnsw", "m": 8, "ef_construction": 40},
    {"type": "hnsw", "quantization": "halfvec"},
    {"type": "hnsw", "quantization": "binary"},
    {"type": "ivfflat", "lists": 30},
    {"type": "ivfflat", "lists": 30, "quantization": "halfvec"},
    {"type": "ivfflat", "lists": 30, "quantization": "binary"},
]


def vectors(n: int, seed: int = 4) -> list[list[float]]:
    """Around 20 centres, so that neighbours exist."""
    source = np.random.default_rng(seed)
    centres = np.random.default_rng(1).normal(size=(20, DIMENSIONS))
    found = [centres[source.integers(20)] + source.normal(size=DIMENSIONS) for _ in range(n)]
    return [list(vector / np.linalg.norm(vector)) for vector in found]


@pytest.fixture(scope="module")
def filled(module_db: Database) -> Connection:
    """The owner's connection to a store without an index."""
    owner = module_db.connect()
    rows = [(f"d{i:04}", i, 1, f"text {i}", v) for i, v in enumerate(vectors(ROWS))]
    create_store(owner, "filled", rows, type=f"vector({DIMENSIONS})")
    owner.execute("ANALYZE filled")
    return owner


@pytest.fixture
def unindexed(filled: Connection) -> Connection:
    drop_indexes(filled, "filled")
    return filled


def indexes(owner: Connection, store: str) -> list[str]:
    """Definitions of the approximate indexes."""
    rows = owner.execute(
        "SELECT pg_get_indexdef(i.oid) FROM pg_index AS x JOIN pg_class AS i ON i.oid = x.indexrelid"
        " JOIN pg_am AS a ON a.oid = i.relam"
        " WHERE x.indrelid = %s::regclass AND a.amname IN ('hnsw', 'ivfflat') ORDER BY 1",
        (store,),
    )
    return [row[0].split(" USING ")[1] for row in rows]


def drop_indexes(owner: Connection, store: str) -> None:
    for (name,) in owner.execute(
        "SELECT i.oid::regclass::text FROM pg_index AS x JOIN pg_class AS i ON i.oid = x.indexrelid"
        " JOIN pg_am AS a ON a.oid = i.relam WHERE x.indrelid = %s::regclass AND a.amname IN ('hnsw', 'ivfflat')",
        (store,),
    ).fetchall():
        owner.execute(f"DROP INDEX {name}")


def nearest(connection: Connection, vector: list[float], n: int = 10, **options: Any) -> list[tuple[str, float]]:
    """document_name and distance"""
    given = {"query_embedding": as_text(vector), "n_citations": n, "vector_store": ["public.filled"], **options}
    return [(row[2], float(row[6])) for row in search(connection, "q", given)]


def explained(connection: Connection, vector: list[float], **options: Any) -> dict[str, Any]:
    given = {
        "query_embedding": as_text(vector),
        "vector_store": ["public.filled"],
        "skip_generate": True,
        "explain": True,
    }
    (store,) = answer(connection, "q", {**given, **options})["explain"]["stores"]
    return store["semantic"]  # type: ignore[no-any-return]


#: what a search without an index finds, by metric
NEAREST: dict[str, list[list[tuple[str, float]]]] = {}


@pytest.mark.parametrize("metric", ["COSINE", "DOT", "EUCLIDEAN", "MANHATTAN"])
@pytest.mark.parametrize("kind", KINDS, ids=json.dumps)
def test_recall_and_true_distances(unindexed: Connection, kind: dict[str, Any], metric: str) -> None:
    """Nearly all of the ten nearest, with the distances of the whole vectors; bench/index.py has more rows."""
    if kind.get("quantization") == "binary" and metric in ("EUCLIDEAN", "MANHATTAN"):
        with error("22023", "quantization", "COSINE and DOT"):
            unindexed.execute("SELECT ml_rag.index_store('filled', %s, %s)", (metric, json.dumps(kind)))
        return
    if kind["type"] == "ivfflat" and metric == "MANHATTAN":
        with error("22023", "distance_metric"):
            unindexed.execute("SELECT ml_rag.index_store('filled', %s, %s)", (metric, json.dumps(kind)))
        return
    questions = vectors(20, seed=8)
    if metric not in NEAREST:
        NEAREST[metric] = [nearest(unindexed, v, distance_metric=metric) for v in questions]
    exact = NEAREST[metric]
    unindexed.execute("SELECT ml_rag.index_store('filled', %s, %s)", (metric, json.dumps(kind)))
    found = [nearest(unindexed, v, distance_metric=metric) for v in questions]
    hits = sum(len(set(f) & set(e)) for f, e in zip(found, exact, strict=True))
    assert hits / 200 >= (0.9 if "m" in kind else 0.95)
    assert [nearest(unindexed, v, distance_metric=metric, index_options={"exact": True}) for v in questions] == exact
    facts = explained(unindexed, questions[0], distance_metric=metric)
    assert facts["plan"] == kind["type"]
    assert ("rescored" in facts) == ("quantization" in kind)
    assert explained(unindexed, questions[0], distance_metric=metric, index_options={"exact": True})["plan"] == "exact"


@pytest.mark.parametrize(
    ("kind", "definition"),
    [
        ({}, "hnsw (segment_embedding vector_cosine_ops)"),
        (
            {"m": 8, "ef_construction": 40},
            "hnsw (segment_embedding vector_cosine_ops) WITH (ef_construction='40', m='8')",
        ),
        ({"quantization": "halfvec"}, "hnsw (((segment_embedding)::halfvec(64)) halfvec_cosine_ops)"),
        ({"quantization": "binary"}, "hnsw (((binary_quantize(segment_embedding))::bit(64)) bit_hamming_ops)"),
        ({"type": "ivfflat", "lists": 7}, "ivfflat (segment_embedding vector_cosine_ops) WITH (lists='7')"),
    ],
)
def test_what_is_built(unindexed: Connection, kind: dict[str, Any], definition: str) -> None:
    for _ in range(2):
        unindexed.execute("SELECT ml_rag.index_store('filled', NULL, %s)", (json.dumps(kind),))
        assert indexes(unindexed, "filled") == [definition]
    # where nothing is asked for, it will do
    unindexed.execute("SELECT ml_rag.index_store('filled')")
    assert indexes(unindexed, "filled") == [definition]


def test_no_index_is_remembered(unindexed: Connection) -> None:
    comment = "SELECT col_description('filled'::regclass, 6)"
    unindexed.execute("SELECT ml_rag.index_store('filled', NULL, '{\"type\": \"none\"}')")
    unindexed.execute("SELECT ml_rag.index_store('filled')")
    assert indexes(unindexed, "filled") == []
    assert unindexed.execute(comment).fetchone() == ("GENAI_OPTIONS=EMBED_MODEL_ID=fake-embed,INDEX=none",)
    assert len(nearest(unindexed, vectors(1)[0])) == 10
    unindexed.execute("SELECT ml_rag.index_store('filled', NULL, '{}')")
    assert len(indexes(unindexed, "filled")) == 1
    assert unindexed.execute(comment).fetchone() == ("GENAI_OPTIONS=EMBED_MODEL_ID=fake-embed",)


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        ({"quantization": "half"}, "quantization"),
        ({"type": "none", "quantization": "halfvec"}, "quantization"),
        ({"type": "diskann"}, "type"),
        ({"m": 8, "lists": 3}, "lists"),
        ({"type": "ivfflat", "m": 8}, '"m"'),
        ({"m": 40, "ef_construction": 79}, "ef_construction"),
    ],
)
def test_what_does_not_go_together(unindexed: Connection, kind: dict[str, Any], named: str) -> None:
    for call in (
        "SELECT ml_rag.index_store('filled', NULL, %s)",
        "SELECT ml_rag.create_store('public.new', jsonb_build_object('index', %s::jsonb))",
        "CALL vector_store_load('file:///none', jsonb_build_object('index', %s::jsonb))",
    ):
        with error("22023", named):
            unindexed.execute(call, (json.dumps(kind),))


def test_half_of_a_half(db: Database, owner: Connection) -> None:
    rows = [(f"d{i}", i, 1, "t", v) for i, v in enumerate(vectors(300))]
    create_store(owner, "halves", rows, type=f"halfvec({DIMENSIONS})")
    with error("22023", "where the column is halfvec"):
        owner.execute("SELECT ml_rag.index_store('halves', NULL, '{\"quantization\": \"halfvec\"}')")
    owner.execute("SELECT ml_rag.index_store('halves', NULL, '{\"quantization\": \"binary\"}')")
    near = nearest(owner, vectors(300)[7], vector_store=["public.halves"])
    assert near[0] == ("d7", pytest.approx(0, abs=1e-4))
    assert near == nearest(owner, vectors(300)[7], vector_store=["public.halves"], index_options={"exact": True})


def test_more_dimensions_than_an_index_of_whole_vectors_has(db: Database, owner: Connection) -> None:
    create_store(owner, "wide", type="vector(2500)")
    source = np.random.default_rng(2)
    for i in range(20):
        insert(owner, "wide", [(f"d{i}", i, 1, "t", list(source.normal(size=2500)))])
    notices = noticed(owner, lambda notice: notice.message_detail or "")
    owner.execute("SELECT ml_rag.index_store('wide')")
    assert indexes(owner, "wide") == []
    assert notices == ["Such an index is limited to 2000 dimensions; the column is vector(2500)."]
    owner.execute("SELECT ml_rag.index_store('wide', NULL, '{\"quantization\": \"halfvec\"}')")
    assert len(indexes(owner, "wide")) == 1


def test_a_column_without_dimensions_gets_no_index_but_a_notice(db: Database, owner: Connection) -> None:
    create_store(owner, "Loose", [("d", 1, 1, "t", [1.0, 0.0, 0.0])], type="vector")
    notices = noticed(owner, lambda notice: notice.message_hint or "")
    owner.execute("""SELECT ml_rag.index_store('"Loose"')""")
    (hint,) = notices
    statement = re.search("ALTER TABLE.*\\)", hint)
    assert statement is not None
    owner.execute(statement[0].replace("…", "3").encode())
    owner.execute("""SELECT ml_rag.index_store('"Loose"')""")
    assert len(indexes(owner, '"Loose"')) == 1
    assert notices == [hint]


# -- at query time -----------------------------------------------------------------------------------------------------


def test_index_options_are_those_of_pgvector(unindexed: Connection) -> None:
    near = vectors(1)[0]
    unindexed.execute("SELECT ml_rag.index_store('filled', NULL, '{}')")
    assert explained(unindexed, near)["ef_search"] == 40
    assert explained(unindexed, near, index_options={"ef_search": 123})["ef_search"] == 123
    drop_indexes(unindexed, "filled")
    unindexed.execute('SELECT ml_rag.index_store(\'filled\', NULL, \'{"type": "ivfflat", "lists": 200}\')')
    assert explained(unindexed, near)["probes"] == 20
    assert explained(unindexed, near, index_options={"probes": 3})["probes"] == 3
    unindexed.execute("SET ivfflat.probes = 5")
    assert explained(unindexed, near)["probes"] == 5
    unindexed.execute("RESET ivfflat.probes")
    assert unindexed.execute("SHOW ivfflat.probes").fetchone() == ("1",)
    drop_indexes(unindexed, "filled")
    unindexed.execute("SELECT ml_rag.index_store('filled', NULL, '{\"quantization\": \"binary\"}')")
    assert explained(unindexed, near)["rescored"] == 400
    assert explained(unindexed, near, index_options={"rescore": 77})["rescored"] == 77
    # never fewer than are wanted
    assert explained(unindexed, near, index_options={"rescore": 1})["rescored"] == explained(unindexed, near)["limit"]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"ef_search": 0}, "ef_search"),
        ({"probe": 1}, "probes"),
    ],
)
def test_bad_index_options(unindexed: Connection, options: dict[str, Any], named: str) -> None:
    with error("22023", named):
        nearest(unindexed, vectors(1)[0], index_options=options)
    # also where nothing is searched by meaning
    with error("22023", named):
        search(unindexed, "q", {"semantic_search": False, "keyword_search": True, "index_options": options})


@pytest.mark.parametrize("quantization", ["halfvec", "binary"])
def test_filters_policies_and_another_vector_with_smaller_vectors(
    db: Database, owner: Connection, asker: Connection, quantization: str
) -> None:
    """Of the rows that pass all come, whatever the index has put before them; hidden rows are not rescored."""
    create_store(owner, "filled", type=f"vector({DIMENSIONS})")
    insert(owner, "filled", [(f"d{i:04}", i, i % 50, f"text {i}", v) for i, v in enumerate(vectors(2000))])
    owner.execute("SELECT ml_rag.index_store('filled', NULL, %s)", (json.dumps({"quantization": quantization}),))
    near = vectors(1, seed=8)[0]
    few = {"filters": {"segment_number": 7}}
    assert nearest(asker, near, 60, **few) == nearest(asker, near, 60, **few, index_options={"exact": True})
    assert len(nearest(asker, near, 60, **few)) == 40
    owner.execute("ALTER TABLE filled ENABLE ROW LEVEL SECURITY; CREATE POLICY p ON filled USING (segment_number = 3)")
    assert nearest(asker, near, 60) == nearest(asker, near, 60, index_options={"exact": True})
    assert len(nearest(asker, near, 60)) == 40
    owner.execute("ALTER TABLE filled DISABLE ROW LEVEL SECURITY")
    arms = [{"search": "semantic", "query_embedding": vectors(1, seed=9)[0]}]
    rows = search(asker, "q", {"arms": arms, "vector_store": ["public.filled"], "n_citations": 10})
    want = nearest(asker, vectors(1, seed=9)[0], index_options={"exact": True})
    assert len({row[2] for row in rows} & {name for name, _ in want}) >= 9


def test_a_view_and_partitions_of_smaller_vectors(db: Database, owner: Connection) -> None:
    create_store(owner, "filled", type=f"vector({DIMENSIONS})", suffix=" PARTITION BY RANGE (document_id)")
    for i in range(2):
        owner.execute(f"CREATE TABLE part{i} PARTITION OF filled FOR VALUES FROM ({i * 500}) TO ({i * 500 + 500})")
    insert(owner, "filled", [(f"d{i:04}", i, 1, f"text {i}", v) for i, v in enumerate(vectors(1000))])
    owner.execute("CREATE INDEX ON filled USING hnsw ((segment_embedding::halfvec(64)) halfvec_cosine_ops)")
    owner.execute("CREATE VIEW seen AS TABLE filled")
    mark(owner, "seen")
    grant(owner, "seen")
    near = vectors(1, seed=8)[0]
    want = nearest(owner, near, index_options={"exact": True})
    assert explained(owner, near)["rescored"] > 3
    assert len(set(nearest(owner, near)) & set(want)) >= 9
    assert nearest(owner, near, vector_store=["public.seen"]) == want


def test_an_index_of_another_expression_is_not_taken_for_one(unindexed: Connection) -> None:
    unindexed.execute(
        "CREATE INDEX ON filled USING hnsw ((subvector(segment_embedding, 1, 8)::halfvec(8)) halfvec_cosine_ops)"
    )
    facts = explained(unindexed, vectors(1)[0])
    assert "rescored" not in facts
    assert facts["plan"] == "exact"


# -- who takes the option ----------------------------------------------------------------------------------------------


def test_a_new_store(db: Database, owner: Connection) -> None:
    owner.execute('SELECT ml_rag.create_store(\'public.hnsw\', \'{"index": {"quantization": "binary"}}\')')
    assert indexes(owner, "hnsw") == ["hnsw (((binary_quantize(segment_embedding))::bit(16)) bit_hamming_ops)"]
    with error("22023", "index", "the store is empty"):
        owner.execute('SELECT ml_rag.create_store(\'public.lists\', \'{"index": {"type": "ivfflat"}}\')')
    options = {"index": {"m": 5}, "distance_metric": "DOT"}
    owner.execute("SELECT ml_rag.create_store('public.dot', %s)", (json.dumps(options),))
    assert indexes(owner, "dot") == ["hnsw (segment_embedding vector_ip_ops) WITH (m='5')"]
    owner.execute('SELECT ml_rag.create_store(\'public.bare\', \'{"index": {"type": "none"}}\')')
    owner.execute("SELECT ml_rag.load_document('bare', 'a', 'alpha'); SELECT ml_rag.index_store('bare')")
    assert indexes(owner, "bare") == []
    assert [row[5] for row in search(owner, "alpha", {"vector_store": ["public.bare"]})] == ["alpha"]


def test_a_load(loader: Connection, server: Any, folder: Any) -> None:
    write(folder, a="alpha one\n\nalpha two")
    load(loader, f"{folder}/", {"index": {"type": "ivfflat", "lists": 1, "quantization": "halfvec"}})
    assert indexes(loader, "docs") == [
        "ivfflat (((segment_embedding)::halfvec(16)) halfvec_cosine_ops) WITH (lists='1')"
    ]
    near = fake_embedding("alpha two")
    assert search(loader, "q", {"query_embedding": as_text(near), "n_citations": 1})[0][5] == "alpha two"


def test_an_embedding_and_a_vectorizer(db: Database, owner: Connection) -> None:
    create_store(owner, "docs", [("d", 1, 1, "alpha", fake_embedding("alpha"))], type="vector(16)")
    owner.execute("CALL ml_rag.add_embedding('docs', 'second', '{\"index\": {\"quantization\": \"binary\"}}')")
    owner.execute("CALL ml_rag.add_embedding('docs', 'second', '{\"index\": {\"quantization\": \"binary\"}}')")
    assert indexes(owner, "docs") == ["hnsw (((binary_quantize(segment_embedding_second))::bit(16)) bit_hamming_ops)"]
    owner.execute("CREATE TABLE items (id integer PRIMARY KEY, name text); INSERT INTO items VALUES (1, 'alpha')")
    vectorizer = {"columns": "name", "index": {"type": "ivfflat", "lists": 1, "quantization": "halfvec"}}
    owner.execute("SELECT ml_rag.create_vectorizer('items', %s)", (json.dumps(vectorizer),))
    owner.execute("CALL ml_rag.run_vectorizer('items')")
    assert indexes(owner, "items") == [
        "ivfflat (((segment_embedding)::halfvec(16)) halfvec_cosine_ops) WITH (lists='1')"
    ]
