"""vectorizer/immediate: rows that are embedded in the statement which writes them."""

from __future__ import annotations

import pytest

from support.cluster import Connection, Database, value_of
from support.models_server import ModelsServer
from support.stores import error, search
from support.vectorizers import ITEMS, assert_in_step, assert_segments_in_step, create, failures, pending, run

COLUMNS = {"column": "{name}: {notes}", "table": "{name}\n\n{notes}"}


@pytest.fixture(params=["column", "table"])
def destination(request: pytest.FixtureRequest) -> str:
    where: str = request.param
    return where


@pytest.fixture
def items(owner: Connection, models: ModelsServer, destination: str) -> Connection:
    owner.execute(ITEMS)
    owner.execute("INSERT INTO items VALUES (1, 'lamp', 'of red glass', 5), (2, 'tent', 'for two', 50)")
    create(owner, columns=COLUMNS[destination], mode="immediate", destination=destination)
    assert pending(owner) == 2
    assert run(owner)["embedded"] == 2
    models.requests.clear()
    return owner


def in_step(connection: Connection, destination: str) -> None:
    (assert_in_step if destination == "column" else assert_segments_in_step)(connection, "items")


def test_what_is_written_is_found_at_once(items: Connection, models: ModelsServer, destination: str) -> None:
    with items.transaction():
        items.execute("INSERT INTO items VALUES (3, 'hat', 'of straw'), (4, 'cap', 'blue'); UPDATE items SET price = 1")
        found = search(items, "hat: of straw" if destination == "column" else "of straw", {"n_citations": 1})
        assert float(found[0][6]) == 0
    items.execute(
        "UPDATE items SET name = 'lantern' WHERE id = 1; UPDATE items SET id = id + 10; DELETE FROM items WHERE id = 12"
    )
    items.execute("INSERT INTO items VALUES (11, 'x', 'y') ON CONFLICT (id) DO UPDATE SET notes = 'new'")
    asked = [len(texts) for _, texts in models.requests]
    # the question, one request a statement (the double counts one for each text that it splits), none for a price
    assert (sum(asked), len(asked)) == ((5, 4) if destination == "column" else (9, 5))
    in_step(items, destination)
    items.execute("BEGIN; UPDATE items SET name = 'no'; ROLLBACK")
    in_step(items, destination)


def test_a_large_statement_is_embedded_in_portions(items: Connection, models: ModelsServer, destination: str) -> None:
    items.execute("INSERT INTO items SELECT i, 'name ' || i, 'n' FROM generate_series(10, 609) AS i")
    assert max(len(texts) for _, texts in models.requests) <= 256
    in_step(items, destination)


def test_a_row_that_cannot_be_embedded_waits_and_is_told(items: Connection, destination: str) -> None:
    items.execute("INSERT INTO items VALUES (3, '!nan', 'x'), (4, 'hat', ''), (5, '', NULL)")
    assert [failure[:3] for failure in failures(items)] == [("{3}", 1, "38000"), ("{5}", 1, "22023")]
    in_step(items, destination)
    items.execute("UPDATE items SET name = 'fine' WHERE id = 3")
    run(items)
    assert [failure[0] for failure in failures(items)] == ["{5}"]


def test_without_a_model_server_the_statement_fails(items: Connection, destination: str) -> None:
    items.execute("SELECT ml_rag.configure('model_server', 'unix:/nowhere.sock')")
    with error("08006"):
        items.execute("INSERT INTO items VALUES (3, 'hat', 'x')")
    # what changes no text is written all the same
    items.execute("UPDATE items SET price = 3; DELETE FROM items WHERE id = 2")
    in_step(items, destination)


def test_who_writes_needs_no_privilege_of_ml_rag(db: Database, items: Connection, destination: str) -> None:
    items.execute("GRANT SELECT, INSERT, UPDATE ON items TO PUBLIC")
    writer = db.connect("stranger")
    writer.execute("SET search_path = pg_catalog")
    writer.execute("INSERT INTO public.items VALUES (3, 'hat', 'x'); UPDATE public.items SET name = 'cap' WHERE id = 1")
    in_step(items, destination)


def test_nobody_else_can_use_its_function(db: Database, items: Connection) -> None:
    items.execute("GRANT CREATE ON SCHEMA public TO PUBLIC")
    asker = db.connect("asker")
    asker.execute("CREATE TABLE mine (id integer PRIMARY KEY)")
    with error("42501", ours=False):
        asker.execute("CREATE TRIGGER t AFTER INSERT ON mine FOR EACH STATEMENT EXECUTE FUNCTION items_embed()")


def test_it_is_dropped_with_its_triggers(items: Connection) -> None:
    items.execute("SELECT ml_rag.drop_vectorizer('items')")
    left = "SELECT tgname FROM pg_trigger WHERE tgrelid = 'items'::regclass UNION ALL SELECT proname FROM pg_proc"
    assert items.execute(left + " WHERE proname ~ '^items_'").fetchall() == []


def test_a_function_of_the_owner_s_stays(db: Database, items: Connection) -> None:
    """Whoever may make triggers can make one that is called like those of the vectorizer."""
    items.execute(
        "CREATE FUNCTION own() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NEW; END';"
        "GRANT TRIGGER ON items TO PUBLIC"
    )
    tenant = db.connect("tenant")
    for name in ("~ml_rag_immediate_more", "ml_rag_segments_more"):
        tenant.execute(f'CREATE TRIGGER "{name}" BEFORE INSERT ON items FOR EACH ROW EXECUTE FUNCTION own()'.encode())
    items.execute("SELECT ml_rag.drop_vectorizer('items')")
    assert items.execute("SELECT to_regprocedure('own()') IS NOT NULL").fetchone() == (True,)


@pytest.mark.parametrize(
    "former",
    [
        "DROP TABLE items CASCADE; DROP TABLE IF EXISTS items_segments CASCADE",
        "ALTER TABLE items RENAME TO former; ALTER TABLE IF EXISTS items_segments RENAME TO former_segments",
    ],
)
def test_what_a_former_table_has_left_is_not_in_the_way(items: Connection, destination: str, former: str) -> None:
    for _ in range(2):
        items.execute(former.encode())
        items.execute(ITEMS)
        create(items, columns=COLUMNS[destination], mode="immediate", destination=destination)
        items.execute("INSERT INTO items VALUES (1, 'lamp', 'of red glass', 5)")
        in_step(items, destination)
        if "RENAME" in former:
            items.execute("INSERT INTO former VALUES (3, 'hat', 'of straw')")
            (assert_in_step if destination == "column" else assert_segments_in_step)(items, "former")
            items.execute("SELECT ml_rag.drop_vectorizer('former'); DROP TABLE former")


def test_a_new_owner_makes_the_vectorizer_anew(db: Database, owner: Connection, models: ModelsServer) -> None:
    owner.execute("GRANT CREATE ON SCHEMA public TO PUBLIC")
    owner.execute(ITEMS)
    create(owner, mode="immediate")
    asker = db.connect("asker")
    owner.execute(f'ALTER TABLE items OWNER TO "{db.role("asker")}"'.encode())
    asker.execute("SELECT ml_rag.drop_vectorizer('items')")
    create(asker, mode="immediate")
    asker.execute("INSERT INTO items VALUES (3, 'hat', 'of straw')")
    assert owner.execute("SELECT segment_embedding IS NULL FROM items").fetchall() == [(False,)]


def test_a_partitioned_table(owner: Connection, models: ModelsServer) -> None:
    owner.execute("CREATE TABLE p (id integer PRIMARY KEY, t text) PARTITION BY RANGE (id)")
    owner.execute("CREATE TABLE p1 PARTITION OF p FOR VALUES FROM (0) TO (10); CREATE TABLE p2 PARTITION OF p DEFAULT")
    create(owner, "p", "t", keyword_search=False, mode="immediate")
    owner.execute(
        "INSERT INTO p SELECT i, 'text ' || i FROM generate_series(5, 15) AS i; UPDATE p SET t = 'x' WHERE id = 7"
    )
    assert_in_step(owner, "p")
    # a statement that names a partition does not run the triggers of the table: its rows wait
    owner.execute("INSERT INTO p1 VALUES (1, 'apart')")
    assert pending(owner, "p") == 1
    assert run(owner, "p")["embedded"] == 1


def test_a_statement_that_writes_many_partitions(owner: Connection, models: ModelsServer) -> None:
    owner.execute("CREATE TABLE p (id integer PRIMARY KEY, t text) PARTITION BY HASH (id)")
    for i in range(4):
        owner.execute(f"CREATE TABLE p{i} PARTITION OF p FOR VALUES WITH (MODULUS 4, REMAINDER {i})")
    create(owner, "p", "t", keyword_search=False, mode="immediate")
    models.requests.clear()
    with owner.transaction():
        owner.execute("SET LOCAL track_functions = 'all'")
        owner.execute("INSERT INTO p SELECT i, 'text ' || i FROM generate_series(1, 1200) AS i")
        calls = "SELECT calls FROM pg_stat_xact_user_functions WHERE funcname = '_are_trusted'"
        # before the statement and for each portion, and no relation that has nothing to do with the table
        assert value_of(owner, calls) <= 1 + 8
    assert sorted(len(texts) for _, texts in models.requests)[-4:] == [256] * 4
    assert len(models.requests) == 8
    assert_in_step(owner, "p")


@pytest.mark.fresh
@pytest.mark.parametrize(
    ("extension", "key", "values"),
    [
        ("ltree", "id ltree PRIMARY KEY", "text2ltree('a.' || i)"),
        ("ltree", "tenant integer, id ltree, PRIMARY KEY (id, tenant)", "1, text2ltree('a.' || i)"),
        ("citext", "id citext PRIMARY KEY", "'A' || i"),
        ("citext", 'id citext COLLATE "C" PRIMARY KEY', "'A' || i"),
        ("citext", 'id citext, code text COLLATE "C", PRIMARY KEY (code, id)', "'A' || i, 'c'"),
        ("citext", "id email PRIMARY KEY", "'A' || i"),
        ("citext", "id email, tenant whole, PRIMARY KEY (tenant, id)", "'A' || i, 1"),
    ],
)
def test_a_key_of_a_type_of_an_extension(
    owner: Connection, models: ModelsServer, extension: str, key: str, values: str
) -> None:
    owner.execute(f"CREATE SCHEMA apart; CREATE EXTENSION {extension} SCHEMA apart; SET search_path = public, apart")
    domains = "CREATE DOMAIN whole AS integer"
    owner.execute(f"{domains}; CREATE DOMAIN email AS citext" if extension == "citext" else domains)
    for name, options in {"queued": {}, "at_once": {"mode": "immediate"}}.items():
        owner.execute(f"CREATE TABLE {name} ({key}, name text)")
        create(owner, name, "name", document_name="{name}", keyword_search=False, **options)
        owner.execute(f"INSERT INTO {name} SELECT {values}, 'text ' || i FROM generate_series(1, 5) AS i")
        if not options:
            assert run(owner, name, batch_size=1)["embedded"] == 5
        assert_in_step(owner, name)
    if extension == "citext":  # the order is not that of the text
        owner.execute("UPDATE queued SET id = CASE WHEN name ~ '[135]' THEN upper(id::text) ELSE lower(id::text) END")
        parts = '{"transform": "sentence", "batch_size": 1, "keyword_search": false}'
        owner.execute("CALL ml_rag.create_node_group('queued', 'parts', %s)", (parts,))
        assert owner.execute("SELECT count(*) FROM queued_parts WHERE node_number > 0").fetchone() == (5,)


@pytest.mark.parametrize("change", ["UPDATE items SET price = 7 WHERE id = 2", "INSERT INTO items VALUES (4, ' ')"])
def test_no_run_waits_for_who_writes_a_row_that_fails(
    db: Database, items: Connection, destination: str, change: str
) -> None:
    items.execute("UPDATE items SET name = '!nan' WHERE id = 2; INSERT INTO items VALUES (4, ' ')")
    items.execute("SELECT ml_rag.retry_vectorizer('items'); DELETE FROM items WHERE id = 4")
    items.execute("ALTER TABLE items DISABLE TRIGGER \"~ml_rag_immediate_insert\"; INSERT INTO items VALUES (3, 'hat')")
    items.execute('ALTER TABLE items ENABLE TRIGGER "~ml_rag_immediate_insert"')
    writer = db.connect(autocommit=False)
    writer.execute(change)
    items.execute("SET statement_timeout = '10s'")
    assert run(items)["embedded"] == 1
    writer.commit()
    run(items)
    in_step(items, destination)
