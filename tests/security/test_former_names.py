"""Nothing takes the name of a table that its owner renames while a call waits for it: what runs unasked finds a table
by its OID, and reads it by its name."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

import psycopg
import pytest

from support.cluster import Connection, Database, noticed, waits_for_a_lock
from support.exchange import exchange
from support.processes import Background, wait_until
from support.stores import as_text, create_store, fake_embedding
from support.vectorizers import create

NEAR = as_text(fake_embedding("text"))
STORE = (
    "SELECT '(0,1)'::tid AS ctid, 'd' AS document_name, '{}'::jsonb AS metadata, 1::bigint AS document_id,"
    f" 1 AS segment_number, 'planted' AS segment, '{NEAR}'::vector(16) AS segment_embedding"
    " FROM generate_series(1, 3) WHERE public.evil()"
)
NODES = (
    "SELECT '(0,1)'::tid AS ctid, 1::bigint AS document_id, 1 AS segment_number, 1 AS node_number, 1 AS parent_number,"
    f" 'x' AS node, '{NEAR}'::vector(16) AS node_embedding, 1::bigint AS text_hash, NULL::text[] AS members,"
    " NULL::jsonb AS error, NULL::timestamptz AS next_attempt FROM generate_series(1, 3) WHERE public.evil()"
)
ITEMS = (
    "SELECT '(0,1)'::tid AS ctid, 1 AS id, 'x'::text AS segment, NULL::vector(16) AS segment_embedding"
    " FROM generate_series(1, 3) WHERE public.evil()"
)
SEGMENTS = (
    "SELECT 1 AS source_id, 1::bigint AS document_id, 'd' AS document_name, '{}'::jsonb AS metadata,"
    " 1 AS segment_number, 'x' AS segment, 1::bigint AS text_hash, NULL::vector(16) AS segment_embedding"
    " FROM generate_series(1, 3) WHERE public.evil()"
)
SOURCE = ITEMS.replace(" FROM", ", 'x'::text AS name, 'd'::text AS document_name FROM", 1)


def make_items(owner: Connection) -> None:
    owner.execute("CREATE TABLE items (id integer PRIMARY KEY, name text); INSERT INTO items VALUES (1, 'lamp')")
    create(owner, columns="name")


def make_parts(owner: Connection) -> None:
    owner.execute(
        "CREATE TABLE items (id integer PRIMARY KEY, name text) PARTITION BY RANGE (id);"
        "CREATE TABLE first PARTITION OF items FOR VALUES FROM (0) TO (10);"
        "CREATE TABLE part PARTITION OF items DEFAULT"
    )
    create(owner, columns="name", mode="immediate")
    owner.execute("GRANT INSERT ON items TO PUBLIC")


def make_former(owner: Connection) -> None:
    make_segments(owner)
    owner.execute("SELECT ml_rag.drop_vectorizer('items', '{\"keep_columns\": true}')")


def make_segments(owner: Connection) -> None:
    owner.execute("CREATE TABLE items (id integer PRIMARY KEY, name text)")
    create(owner, columns="name", destination="table")
    owner.execute("GRANT INSERT ON items TO PUBLIC")


def make_at_once(owner: Connection) -> None:
    owner.execute("CREATE TABLE items (id integer PRIMARY KEY, name text)")
    create(owner, columns="name", destination="table", mode="immediate")
    owner.execute("GRANT INSERT ON items TO PUBLIC")


def make_docs(owner: Connection) -> None:
    create_store(owner, "docs", [("d", 1, 1, "text", fake_embedding("text"))], "vector(16)")


def make_nodes(owner: Connection) -> None:
    make_docs(owner)
    owner.execute("CALL ml_rag.create_node_group('docs', 'sentences', '{\"transform\": \"sentence\"}')")
    owner.execute(
        'CALL ml_rag.create_node_group(\'docs\', \'more\', \'{"transform": "paragraph", "parent": "sentences"}\')'
    )


def make_merged(owner: Connection) -> None:
    make_docs(owner)
    owner.execute("SELECT ml_rag.enable_keyword_search('docs')")
    for name in ("sentences", "more"):
        options = '{"transform": "sentence", "merge": true}'
        owner.execute(f"CALL ml_rag.create_node_group('docs', '{name}', '{options}')".encode())


def make_other(owner: Connection) -> None:
    make_docs(owner)
    owner.execute("CALL ml_rag.add_embedding('docs', 'other', '{\"embed_model_id\": \"fake-embed\"}')")


def make_indexed(owner: Connection) -> None:
    make_docs(owner)
    owner.execute("SELECT ml_rag.index_store('docs', 'COSINE', '{\"type\": \"hnsw\"}'::jsonb)")


def make_results(owner: Connection) -> None:
    owner.execute(
        "CREATE TABLE items (id integer PRIMARY KEY, name text); INSERT INTO items VALUES (1, 'lamp');"
        "CREATE TABLE results (id integer PRIMARY KEY)"
    )


def make_collections(owner: Connection) -> None:
    owner.execute(
        "CREATE TABLE langchain_pg_collection (uuid uuid PRIMARY KEY, name varchar NOT NULL UNIQUE, cmetadata json);"
        "CREATE TABLE langchain_pg_embedding (id varchar PRIMARY KEY, collection_id uuid, embedding vector(16),"
        " document varchar, cmetadata jsonb)"
    )


@dataclass
class Case:
    make: Callable[[Connection], None]
    #: what is renamed, and what is put in its place
    table: str
    plant: str
    #: who calls, and what
    caller: str | None
    call: str


SEARCH = "CALL ml_rag('text', '{{\"skip_generate\": true{}}}', NULL)"
VECTOR = f', "query_embedding": {NEAR}'
MODEL = '{"embed_model_id": "fake-embed"}'
#: a table in place of the view
PLANTED = (
    "SELECT; DROP VIEW docs; CREATE TABLE docs (document_name text, metadata jsonb); GRANT ALL ON docs TO PUBLIC;"
    "CREATE TRIGGER t BEFORE DELETE ON docs FOR EACH STATEMENT EXECUTE FUNCTION evil_trigger()"
)
PLANTED_SEGMENTS = (
    "SELECT; DROP VIEW items_segments; CREATE TABLE items_segments (source_id integer, text_hash bigint);"
    "GRANT ALL ON items_segments TO PUBLIC; CREATE TRIGGER t BEFORE DELETE ON items_segments FOR EACH STATEMENT"
    " EXECUTE FUNCTION evil_trigger()"
)
CASES = {
    "the view of vectorizers": Case(make_items, "items", ITEMS, None, "SELECT count(*) FROM ml_rag.vectorizer"),
    "a run": Case(make_items, "items", ITEMS, None, "CALL ml_rag.run_vectorizer('items')"),
    "a run of one of many": Case(make_parts, "part", ITEMS, None, "CALL ml_rag.run_vectorizer('items')"),
    "the view of node groups": Case(make_nodes, "docs", STORE, None, "SELECT count(*) FROM ml_rag.node_group"),
    "the view of node groups, of a parent": Case(
        make_nodes, "docs_sentences", NODES, None, "SELECT count(*) FROM ml_rag.node_group",
    ),
    "a refresh": Case(make_nodes, "docs", STORE, None, "CALL ml_rag.refresh_node_groups('docs')"),
    "the trigger of an immediate vectorizer": Case(
        make_parts, "part", ITEMS, "tenant", "INSERT INTO items VALUES (1, 'x')"
    ),
    "the trigger of a table of segments": Case(
        make_segments, "items_segments",
        "SELECT 1 AS source_id, 1::bigint AS document_id, 'd' AS document_name, 1 AS segment_number, 'x' AS segment,"
        " 1::bigint AS text_hash; CREATE TRIGGER t INSTEAD OF INSERT ON items_segments FOR EACH ROW"
        " EXECUTE FUNCTION evil_trigger()",
        "tenant", "INSERT INTO items VALUES (1, 'x')",
    ),
    "the segments of a former vectorizer": Case(
        make_former, "items_segments", PLANTED_SEGMENTS, None,
        'SELECT ml_rag.create_vectorizer(\'items\', \'{"columns": "name", "destination": "table"}\')',
    ),
    "what a model may filter by": Case(
        make_docs, "docs", STORE, None, "SELECT ml_rag.rewrite('text', '{\"filters\": true}')"
    ),
    "the collections of a table that is adopted": Case(
        make_collections, "langchain_pg_collection",
        "SELECT '00000000-0000-0000-0000-000000000001'::uuid AS uuid, 'birds'::varchar AS name"
        " FROM generate_series(1, 3) WHERE public.evil()",
        None,
        "SELECT ml_rag.adopt('langchain_pg_embedding',"
        ' \'{"embed_model_id": "fake-embed", "collection": "birds", "sample": 0}\')',
    ),
    "a table that is adopted": Case(make_docs, "docs", STORE, None, f"SELECT ml_rag.adopt('docs', '{MODEL}')"),
    "what is loaded into": Case(
        make_docs, "docs", STORE, None, "SELECT ml_rag.load_document('docs', 'a.txt', 'a lamp'::bytea)"
    ),
    "the names of documents": Case(make_docs, "docs", STORE, None, "SELECT ml_rag.documents_below('docs', 'd')"),
    "what loses documents": Case(make_docs, "docs", PLANTED, None, "SELECT ml_rag.remove_documents('docs', '{d}')"),
    "the states of documents": Case(
        make_docs, "docs", STORE, None, "SELECT ml_rag.unchanged_documents('docs', '{d}', '{00}')"
    ),
    "the embeddings of a store": Case(make_other, "docs", STORE, None, "SELECT * FROM ml_rag.embeddings('docs')"),
    "what a node group would be made of": Case(
        make_docs, "docs", STORE, None,
        'CALL ml_rag.create_node_group(\'docs\', \'new\', \'{"transform": "sentence", "dry_run": true}\')',
    ),
    "what waits for its nodes": Case(
        make_nodes, "docs", STORE, None, "CALL ml_rag.refresh_node_groups('docs', '{\"dry_run\": true}')"
    ),
    "a node group beside one that is dropped": Case(
        make_merged, "docs_more", NODES, None, "SELECT ml_rag.drop_node_group('docs', 'sentences')"
    ),
    "the names of documents that are expected": Case(
        make_docs, "docs", STORE, None,
        "SELECT ml_rag_evaluate('SELECT ''text'' AS question, ''x'' AS documents')",
    ),
    "another default embedding": Case(
        make_other, "docs", STORE.replace("segment_embedding", "segment_embedding_other"), None,
        "SELECT ml_rag.use_embedding('docs', 'other')",
    ),
    "the sample of an index": Case(make_indexed, "docs", STORE, None, "SELECT ml_rag.tune_index('docs')"),
    "what questions are made of": Case(make_docs, "docs", STORE, None, "SELECT * FROM ml_rag.make_questions('docs')"),
    "a table of questions": Case(make_items, "items", ITEMS, None, "SELECT ml_rag_evaluate('items'::regclass)"),
    "a column that is embedded": Case(
        make_results, "items", ITEMS, None, "CALL ml_embed_table('public.items.name', 'public.results.v')"
    ),
    "a table of results": Case(
        make_results, "results", ITEMS, None, "CALL ml_embed_table('public.items.name', 'public.results.v')"
    ),
    "a search": Case(make_docs, "docs", STORE, None, SEARCH.format("")),
    "a search by a vector": Case(make_docs, "docs", STORE, None, SEARCH.format(VECTOR)),
    "a search in stages": Case(make_docs, "docs", STORE, None, SEARCH.format(', "explain": true')),
    "a search in stages, by a vector": Case(
        make_docs, "docs", STORE, None, SEARCH.format(VECTOR + ', "explain": true')
    ),
    "the keys that a model may filter by": Case(
        make_docs, "docs", STORE, None, SEARCH.format(', "query_options": {"filters": true}')
    ),
    "a search in nodes": Case(
        make_nodes, "docs_sentences", NODES, None,
        SEARCH.format(', "arms": [{"search": "semantic", "in": "sentences"}]'),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_takes_the_name_of_a_table_that_is_waited_for_runs_no_code(
    db: Database, owner: Connection, name: str
) -> None:
    """Any role that may create in the schema can have others wait for a table, until it has planted what it wants."""
    case = CASES[name]
    owner.execute("GRANT CREATE ON SCHEMA public TO PUBLIC")
    case.make(owner)
    caller, holder, queue, attacker = db.connect(case.caller), *(db.connect("tenant") for _ in range(3))
    for connection in (caller, holder, queue, attacker):
        connection.execute("SET statement_timeout = '10s'")
    said = noticed(caller)
    exchange(owner, case.table, case.plant, holder, queue, attacker, lambda: caller.execute(case.call.encode()))
    assert not any("ran as" in message for message in said), said


@pytest.mark.parametrize(
    ("make", "table", "plant", "caller", "call"),
    [
        (make_segments, "items_segments", SEGMENTS, "tenant", "INSERT INTO items VALUES (1, 'x')"),
        (make_segments, "items", SOURCE, "tenant", "INSERT INTO former VALUES (1, 'x')"),
        (make_at_once, "items_segments", SEGMENTS, "tenant", "INSERT INTO items VALUES (1, 'x')"),
        (make_items, "items", ITEMS, None, "SELECT ml_rag_evaluate('former')"),
        (make_items, "items", ITEMS, None, "SELECT ml_rag_evaluate('former'::regclass)"),
    ],
    ids=["segments", "their source", "segments of an immediate vectorizer", "questions", "questions by their OID"],
)
def test_what_has_the_name_that_a_snapshot_shows_runs_no_code(
    db: Database,
    owner: Connection,
    make: Callable[[Connection], None],
    table: str,
    plant: str,
    caller: str | None,
    call: str,
) -> None:
    """At REPEATABLE READ the catalog shows a table by the name that it had, which is another relation's by now."""
    owner.execute("GRANT CREATE ON SCHEMA public TO PUBLIC")
    make(owner)
    session, attacker = db.connect(caller), db.connect("tenant")
    said = noticed(session)
    attacker.execute(
        "CREATE FUNCTION evil() RETURNS boolean LANGUAGE plpgsql AS"
        " $$ BEGIN RAISE WARNING 'ran as %', current_user; RETURN true; END $$"
    )
    session.execute("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT count(*) FROM pg_class")
    owner.execute(f"ALTER TABLE {table} RENAME TO former".encode())
    attacker.execute(f"CREATE VIEW {table} AS {plant}; GRANT ALL ON {table} TO PUBLIC".encode())
    with contextlib.suppress(psycopg.Error):
        session.execute(call.encode())
    assert not any("ran as" in message for message in said), said


def test_questions_are_those_of_the_table_though_the_store_of_a_preset_is_waited_for(
    db: Database, owner: Connection
) -> None:
    """Any role can have a superuser wait for the one, until it has put something in the place of the other."""
    owner.execute(
        "GRANT CREATE ON SCHEMA public TO PUBLIC;"
        "CREATE TABLE items (id integer, question text); INSERT INTO items VALUES (1, 'text')"
    )
    make_docs(owner)
    owner.execute("SELECT ml_rag.create_preset('docs', '{\"vector_store\": [\"public.docs\"]}')")
    caller, holder, attacker = db.connect(), db.connect(), db.connect("tenant")
    said = noticed(caller)
    attacker.execute(
        "CREATE FUNCTION evil() RETURNS boolean LANGUAGE plpgsql AS"
        " $$ BEGIN RAISE WARNING 'ran as %', current_user; RETURN true; END $$"
    )
    options = '{"options": {"preset": "docs"}, "keep": false}'
    call = f"SELECT ml_rag_evaluate('items'::regclass, '{options}') ->> 'questions'"
    with holder.transaction():
        holder.execute("LOCK TABLE docs")
        running = Background(lambda: caller.execute(call.encode()).fetchone())
        wait_until(lambda: waits_for_a_lock(owner, caller))
        owner.execute("ALTER TABLE items RENAME TO former")
        attacker.execute("CREATE VIEW items AS SELECT 1 AS id, 'x' AS question WHERE public.evil()")
    assert running.result() == ("1",)
    assert not any("ran as" in message for message in said), said


def test_no_view_of_somebody_else_is_replaced_that_took_the_name_of_one_that_is_waited_for(
    db: Database, owner: Connection
) -> None:
    """It would stay that role's, which could change what it shows, and to whom."""
    owner.execute("GRANT CREATE ON SCHEMA public TO PUBLIC")
    make_collections(owner)
    owner.execute("INSERT INTO langchain_pg_collection VALUES ('00000000-0000-0000-0000-000000000001', 'birds')")
    options = '{"embed_model_id": "fake-embed", "collection": "birds", "sample": 0}'
    adopt = f"SELECT ml_rag.adopt('langchain_pg_embedding', '{options}')".encode()
    owner.execute(adopt)
    view = (
        "SELECT NULL::varchar AS id, NULL::varchar AS document, NULL::jsonb AS cmetadata, NULL::vector(16) AS embedding"
    )
    caller, holder, queue, attacker = db.connect(), *(db.connect("tenant") for _ in range(3))
    exchange(owner, "birds", view, holder, queue, attacker, lambda: caller.execute(adopt))
    (found,) = owner.execute("SELECT pg_get_viewdef('birds'::regclass)").fetchone() or ("",)
    assert "langchain" not in found


def test_what_takes_the_name_of_a_table_between_two_batches_runs_no_code(db: Database, owner: Connection) -> None:
    """The owner renames the table of a call that runs; the statements of its next batches have the name only."""
    owner.execute(
        "GRANT CREATE ON SCHEMA public TO PUBLIC;"
        "CREATE TABLE items (id integer PRIMARY KEY, name text);"
        "INSERT INTO items SELECT i, 'x' FROM generate_series(1, 3) AS i;"
        "CREATE TABLE results (id integer PRIMARY KEY);"
        "CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS"
        " $$ BEGIN PERFORM pg_advisory_xact_lock_shared(42); RETURN NEW; END $$;"
        "CREATE TRIGGER slow BEFORE INSERT ON results FOR EACH ROW EXECUTE FUNCTION slow()"
    )
    caller, gate, attacker = db.connect(), db.connect(), db.connect("tenant")
    attacker.execute(
        "CREATE FUNCTION evil() RETURNS boolean LANGUAGE plpgsql AS"
        " $$ BEGIN RAISE WARNING 'ran as %', current_user; RETURN true; END $$"
    )
    said = noticed(caller)

    def waiting(of: str) -> bool:
        (n,) = gate.execute("SELECT count(*) FROM pg_locks WHERE NOT granted AND locktype = %s", (of,)).fetchone() or ()
        return bool(n)

    gate.execute("SELECT pg_advisory_lock(42)")
    call = Background(
        lambda: caller.execute("CALL ml_embed_table('public.items.name', 'public.results.v', '{\"batch_size\": 1}')")
    )
    wait_until(lambda: waiting("advisory") or call.ended)
    renaming = Background(lambda: owner.execute("ALTER TABLE items RENAME TO former"))
    wait_until(lambda: waiting("relation") or renaming.ended)

    def plant() -> None:
        renaming.result()
        attacker.execute(
            "CREATE VIEW items AS SELECT i AS id, 'planted'::text AS name FROM generate_series(1, 9) AS i WHERE evil();"
            "GRANT SELECT ON items TO PUBLIC"
        )

    planting = Background(plant)
    if renaming.ended:
        planting.result()
    gate.execute("SELECT pg_advisory_unlock(42)")
    planting.result()
    with pytest.raises(psycopg.errors.UndefinedTable):
        call.result()
    assert not any("ran as" in message for message in said), said
    assert owner.execute("SELECT count(*) FROM results WHERE v IS NOT NULL").fetchone() == (1,)


@pytest.mark.parametrize("name", ["docs", "docs_slow"])
def test_what_takes_the_name_of_a_table_while_nodes_are_made_runs_no_code(
    db: Database, owner: Connection, name: str
) -> None:
    """A run over node groups commits before each batch; the statements of the next ones have their names of then."""
    make_docs(owner)
    owner.execute(
        "GRANT CREATE ON SCHEMA public TO PUBLIC;"
        "CREATE FUNCTION slow(text) RETURNS SETOF text LANGUAGE plpgsql AS"
        " $$ BEGIN PERFORM pg_advisory_xact_lock_shared(42); RETURN NEXT $1; END $$"
    )
    caller, gate, attacker = db.connect(), db.connect(), db.connect("tenant")
    attacker.execute(
        "CREATE FUNCTION evil() RETURNS boolean LANGUAGE plpgsql AS"
        " $$ BEGIN RAISE WARNING 'ran as %', current_user; RETURN true; END $$;"
        "CREATE FUNCTION evil_trigger() RETURNS trigger LANGUAGE plpgsql AS"
        " $$ BEGIN RAISE WARNING 'ran as %', current_user; RETURN NULL; END $$"
    )
    said = noticed(caller)
    gate.execute("SELECT pg_advisory_lock(42)")
    call = Background(
        lambda: caller.execute("CALL ml_rag.create_node_group('docs', 'slow', '{\"transform\": \"public.slow\"}')")
    )
    waiting = "SELECT FROM pg_locks WHERE NOT granted AND locktype = 'advisory' AND objid = 42"
    wait_until(lambda: gate.execute(waiting).fetchone() is not None or call.ended)
    owner.execute(f"ALTER TABLE {name} RENAME TO former".encode())
    attacker.execute(
        f"CREATE VIEW {name} AS {NODES if name == 'docs_slow' else STORE}; GRANT ALL ON {name} TO PUBLIC;"
        f"CREATE TRIGGER t INSTEAD OF INSERT OR UPDATE OR DELETE ON {name} FOR EACH ROW"
        " EXECUTE FUNCTION evil_trigger()".encode()
    )
    gate.execute("SELECT pg_advisory_unlock(42)")
    call.result()
    assert not any("ran as" in message for message in said), said
    nodes = "former" if name == "docs_slow" else "docs_slow"
    assert owner.execute(f"SELECT count(*) FROM {nodes} WHERE node = 'text'".encode()).fetchone() == (1,)


def test_the_tables_of_texts_without_nodes_are_held_though_counting_them_failed(owner: Connection) -> None:
    """An error gives back the locks that were taken since: here the group has lost the one that it is made of."""
    make_nodes(owner)
    owner.execute("DROP TABLE docs_sentences; UPDATE docs_more SET error = '{}' WHERE node_number = 0")
    with owner.transaction():
        assert owner.execute("SELECT name FROM ml_rag.node_group_error").fetchall() == [("more",)]
        assert owner.execute(
            "SELECT count(*) FROM pg_locks WHERE pid = pg_backend_pid() AND relation = 'docs'::regclass"
        ).fetchone() == (1,)
