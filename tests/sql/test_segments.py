"""vectorizer/segments: a vectorizer whose destination is a table of segments."""

from __future__ import annotations

import contextlib
import functools
import random
import string
from typing import Any

import pytest

from support.cluster import Connection, Database, noticed
from support.models_server import ModelsServer
from support.processes import Background, wait_until
from support.stores import error, fake_embedding, search
from support.vectorizers import assert_segments_in_step, create, failures, pending, run

NOTES = "CREATE TABLE notes (id integer PRIMARY KEY, title text, body text, price numeric)"
LONG = "first paragraph\n\nsecond of glass\n\nthird one"


@pytest.fixture
def notes(owner: Connection, models: ModelsServer) -> Connection:
    """The table notes with three rows, one of them of three segments; paragraphs are segments here."""
    owner.execute(NOTES)
    owner.execute(
        "INSERT INTO notes VALUES (1, 'one', %s, 5), (2, 'two', 'a tent', 50), (3, 'three', NULL, 7)", (LONG,)
    )
    create(owner, "notes", "{body}", document_name="{title}", destination="table")
    assert run(owner, "notes")["embedded"] == 2
    models.requests.clear()
    return owner


def segments(connection: Connection, relation: str = "notes_segments") -> list[Any]:
    return connection.execute(
        f"SELECT document_name, segment_number, segment FROM {relation} ORDER BY document_id, segment_number"
    ).fetchall()


def test_a_long_text_is_found_by_each_of_its_segments(notes: Connection) -> None:
    assert_segments_in_step(notes, "notes")
    assert segments(notes)[:4] == [
        ("one", 1, "first paragraph"), ("one", 2, "second of glass"), ("one", 3, "third one"), ("two", 1, "a tent"),
    ]  # fmt: skip
    found = search(notes, "third one", {"n_citations": 1})
    assert (found[0][0:1], found[0][2], found[0][3], found[0][4], found[0][5], float(found[0][6])) == (
        (1,), "one", 1, 3, "third one", 0,
    )  # fmt: skip
    assert found[0][1] == "public.notes_segments"
    found = search(notes, "tent", {"semantic_search": False, "keyword_search": True})
    assert [row[2] for row in found] == ["two"]
    wide = search(notes, "third one", {"n_citations": 1, "retrieval_options": {"segment_overlap": 1}})
    assert wide[0][5] == "second of glass\nthird one"


@pytest.mark.parametrize(
    ("keyword_search", "length", "key"),
    [(False, 2692, 'notes" is too long for an index\nKey (name)'), (True, 2680, 'notes_segments" is too long for an')],
)
def test_a_key_that_is_too_long_is_named(
    owner: Connection, models: ModelsServer, keyword_search: bool, length: int, key: str
) -> None:
    """The key of the segments has a number, too."""
    owner.execute("CREATE TABLE notes (name text PRIMARY KEY, body text)")
    long = "".join(random.Random(1).choices(string.ascii_letters + string.digits, k=length))
    owner.execute("INSERT INTO notes VALUES ('short', 'glass'), (%s, 'a tent')", (long,))
    with error("54000", key, f"and begins with {long[:40]}"):
        create(owner, "notes", "{body}", destination="table", keyword_search=keyword_search)


@pytest.mark.parametrize(
    ("change", "embedded"),
    [
        ("INSERT INTO notes VALUES (4, 'four', E'hat\n\nof straw')", ["hat", "of straw"]),
        ("UPDATE notes SET body = 'changed' WHERE id = 1", ["changed"]),
        ("UPDATE notes SET price = price + 1", []),
        ("UPDATE notes SET body = body, title = title", []),
        ("UPDATE notes SET id = id + 10", []),
        ("UPDATE notes SET id = 10, body = 'other' WHERE id = 1", ["other"]),
        ("UPDATE notes SET title = upper(title)", []),
        ("DELETE FROM notes WHERE id = 1", []),
        ("TRUNCATE notes", []),
        ("BEGIN; UPDATE notes SET body = 'no'; DELETE FROM notes; ROLLBACK", []),
        ("BEGIN; SAVEPOINT s; UPDATE notes SET body = 'no'; ROLLBACK TO s; DELETE FROM notes WHERE id = 2; COMMIT", []),
        ("INSERT INTO notes VALUES (1, 'x', 'y') ON CONFLICT (id) DO UPDATE SET body = excluded.body", ["y"]),
        ("INSERT INTO notes VALUES (1, 'x', 'y') ON CONFLICT DO NOTHING", []),
        ("DELETE FROM notes WHERE id = 1; INSERT INTO notes VALUES (1, 'again', 'new')", ["new"]),
    ],
)
def test_a_change_is_followed_and_nothing_else_is_embedded(
    notes: Connection, models: ModelsServer, change: str, embedded: list[str]
) -> None:
    notes.execute(change)
    run(notes, "notes")
    assert models.embedded("fake-embed") == embedded
    assert_segments_in_step(notes, "notes")
    titles = notes.execute("SELECT title FROM notes ORDER BY 1").fetchall()
    names = notes.execute("SELECT DISTINCT document_name FROM notes_segments ORDER BY 1").fetchall()
    assert names == titles


def test_a_row_that_waits_is_found_by_its_words_and_never_by_its_former_text(notes: Connection) -> None:
    notes.execute("UPDATE notes SET body = E'kettle\n\nof copper' WHERE id = 1")
    assert pending(notes, "notes") == 1
    assert {row[2] for row in search(notes, "second of glass", {"n_citations": 10})} == {"two"}
    by_words = search(notes, "copper", {"semantic_search": False, "keyword_search": True})
    assert [row[5] for row in by_words] == ["kettle\n\nof copper"]
    run(notes, "notes")
    by_words = search(notes, "copper", {"semantic_search": False, "keyword_search": True})
    assert [row[5] for row in by_words] == ["of copper"]


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("bigint", ["10000000000", "7"]),
        ("text", ["'a, \"b\"'", "'{x}'"]),
        ("varchar(5)", ["'a'", "'b'"]),
        ("uuid", ["'00000000-0000-0000-0000-000000000001'", "'00000000-0000-0000-0000-000000000002'"]),
        ("numeric(10,2)", ["1.50", "2.25"]),
    ],
)
def test_any_primary_key(owner: Connection, models: ModelsServer, key: str, values: list[str]) -> None:
    owner.execute(f"CREATE TABLE k (id {key} PRIMARY KEY, t text)")
    owner.execute(f"INSERT INTO k VALUES ({values[0]}, E'lamp\n\nred')")
    create(owner, "k", "t", destination="table")
    assert run(owner, "k")["embedded"] == 1
    owner.execute(f"UPDATE k SET id = {values[1]}")
    models.requests.clear()
    run(owner, "k")
    assert models.requests == []
    assert owner.execute("SELECT count(*) FROM k JOIN k_segments ON source_id = id").fetchone() == (2,)
    assert (
        search(owner, "red", {"n_citations": 1})[0][2]
        == owner.execute("SELECT 'public.k/' || id FROM k").fetchall()[0][0]
    )


def test_a_key_of_several_columns_and_awkward_names(owner: Connection, models: ModelsServer) -> None:
    owner.execute(
        'CREATE SCHEMA "My s."; CREATE TABLE "My s."."T.""x"'
        ' ("a.s" text, "B" integer, "t t" text, PRIMARY KEY ("B", "a.s"))'
    )
    name = '"My s."."T.""x"'
    owner.execute(f"INSERT INTO {name} SELECT 'a' || i / 4, i, 'text ' || i FROM generate_series(1, 20) AS i")
    create(owner, name, "t t", destination="table", document_name="{a.s}-{B}")
    assert run(owner, name, batch_size=6)["embedded"] == 20
    owner.execute(f"""UPDATE {name} SET "t t" = 'other' WHERE "B" = 5; UPDATE {name} SET "a.s" = 'z' WHERE "B" = 6""")
    owner.execute(f'DELETE FROM {name} WHERE "B" > 10')
    models.requests.clear()
    assert run(owner, name)["embedded"] == 1
    assert models.embedded("fake-embed") == ["other"]
    found = search(owner, "text 6", {"n_citations": 1})[0]
    assert (found[2], found[5]) == ("z-6", "text 6")
    assert owner.execute('SELECT count(*) FROM "My s."."T.""x_segments"').fetchone() == (10,)
    owner.execute("SELECT ml_rag.drop_vectorizer(%s)", (name,))


# -- failures ----------------------------------------------------------------------------------------------------------


def test_poison_rows_hold_nobody_up(notes: Connection, models: ModelsServer) -> None:
    notes.execute(
        "INSERT INTO notes SELECT i, 't', CASE i WHEN 10 THEN ' ' WHEN 11 THEN repeat('x', 1000001) WHEN 12 THEN"
        " E'!nan\n\nx' WHEN 13 THEN '!fail' ELSE 'text ' || i END FROM generate_series(10, 40) AS i"
    )
    result = run(notes, "notes")
    assert (result["embedded"], result["failed"], result["pending"]) == (27, 4, 0)
    assert failures(notes) == [
        ("{10}", 1, "22023", "the text is empty", True),
        ("{11}", 1, "54000", "the text is too long", True),
        ("{12}", 1, "38000", "the embedding model failed", False),
        ("{13}", 1, "38000", "no good", False),
        ("{3}", 1, "22023", "the text is empty", True),
    ]
    assert_segments_in_step(notes, "notes")
    notes.execute("UPDATE notes SET body = 'fine' WHERE id IN (10, 12, 3); DELETE FROM notes WHERE id = 11")
    run(notes, "notes")
    assert [failure[0] for failure in failures(notes)] == ["{13}"]
    assert_segments_in_step(notes, "notes")


@pytest.mark.parametrize("mode", ["deferred", "immediate"])
def test_texts_of_very_many_segments_are_written_one_after_the_other(
    owner: Connection, models: ModelsServer, mode: str
) -> None:
    """So that neither the vectors of a batch are held at once nor one value has them all."""
    owner.execute(NOTES)
    create(owner, "notes", "{body}", destination="table", mode=mode)
    owner.execute(
        "INSERT INTO notes SELECT i, 't', repeat(E'a\n\n', CASE WHEN i < 3 THEN 34000 ELSE 2 END)"
        " FROM generate_series(1, 4) AS i"
    )
    if mode == "deferred":
        assert run(owner, "notes")["embedded"] == 4
    assert pending(owner, "notes") == 0
    assert owner.execute(
        "SELECT document_id, count(*), count(segment_embedding), max(segment_number) FROM notes_segments"
        " GROUP BY 1 ORDER BY 1"
    ).fetchall() == [*((i, 34000, 34000, 34000) for i in (1, 2)), *((i, 2, 2, 2) for i in (3, 4))]


def test_a_trigger_may_write_a_row_whose_other_segments_come(notes: Connection) -> None:
    notes.execute(
        "CREATE FUNCTION counted() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN UPDATE public.notes_segments SET"
        " metadata = metadata || '{\"n\": 1}' WHERE document_id = NEW.document_id AND segment_number = 1; RETURN NULL;"
        " END $$; CREATE TRIGGER counted AFTER INSERT ON notes_segments FOR EACH ROW WHEN (NEW.segment_number > 1)"
        " EXECUTE FUNCTION counted()"
    )
    notes.execute("UPDATE notes SET body = E'kettle\n\nof copper\n\nthird' WHERE id = 1")
    result = run(notes, "notes")
    assert (result["embedded"], result["pending"]) == (1, 0)
    assert [row[2] for row in segments(notes)[:3]] == ["kettle", "of copper", "third"]


@pytest.mark.parametrize("order", ["!die", "!queue"])
def test_what_every_text_would_get_ends_the_run_and_blames_no_row(notes: Connection, order: str) -> None:
    notes.execute("INSERT INTO notes VALUES (4, 'x', %s)", (order,))
    with error({"!die": "08006", "!queue": "53300"}[order]):
        run(notes, "notes")
    assert [failure[0] for failure in failures(notes)] == ["{3}"]
    assert pending(notes, "notes") == 1
    assert notes.execute("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'").fetchone() == (0,)


def test_whatever_a_text_begins_with_is_text(notes: Connection, models: ModelsServer) -> None:
    notes.execute("UPDATE notes SET body = '%PDF-1.4 is a format' WHERE id = 2")
    run(notes, "notes")
    assert models.embedded("fake-embed") == ["%PDF-1.4 is a format"]
    assert models.options[-1] == {
        "embed_model_id": "fake-embed", "chunking": {"split_by": "auto", "overlap_tokens": 0},
    }  # fmt: skip


@pytest.mark.parametrize("before", ["", "\n ", "\ufeff", "\x01\xad"], ids=["first", "blank", "mark", "control"])
def test_front_matter_of_a_text_is_text(owner: Connection, before: str) -> None:
    owner.execute(NOTES)
    texts = [f"{before}---\ntags: zebra\n---\n# Head\nhorse", f"{before}---\ntags: zebra\n---", "---\n\nhorse"]
    for i, text in enumerate(texts):
        owner.execute("INSERT INTO notes VALUES (%s, %s, %s)", (i, str(i), text))
    create(owner, "notes", "{body}", document_name="{title}", destination="table")
    result = run(owner, "notes")
    assert (result["embedded"], result["failed"]) == (3, 0)
    found = search(owner, "zebra", {"semantic_search": False, "keyword_search": True})
    assert {row[2] for row in found} == {"0", "1"}
    assert [text.split() for _, _, text in segments(owner) if "Head" not in text][-1] == ["---", "horse"]


# -- several at once ---------------------------------------------------------------------------------------------------


def test_two_runs_share_the_rows(db: Database, notes: Connection, models: ModelsServer) -> None:
    notes.execute("INSERT INTO notes SELECT i, 't', 'name ' || i FROM generate_series(10, 200) AS i")
    running = [Background(functools.partial(run, db.connect(), "notes", batch_size=5)) for _ in range(3)]
    assert sum(one.result()["embedded"] for one in running) == 191
    assert sorted(models.embedded("fake-embed")) == sorted(f"name {i}" for i in range(10, 201))
    assert_segments_in_step(notes, "notes")


def test_nobody_waits_for_the_model_and_a_text_that_changes_meanwhile_comes_up_again(
    db: Database, notes: Connection, models: ModelsServer
) -> None:
    writer = db.connect()
    writer.execute("SET lock_timeout = '2s'")
    notes.execute("UPDATE notes SET body = E'a\n\nb' WHERE id IN (1, 2); INSERT INTO notes VALUES (4, 'd', 'd')")

    def change() -> None:
        writer.execute("UPDATE notes SET body = 'c' WHERE id = 1")
        writer.execute("DELETE FROM notes WHERE id = 2")
        writer.execute("UPDATE notes SET id = 5 WHERE id = 4")

    models.before[0] = change
    run(notes, "notes")
    assert_segments_in_step(notes, "notes")


# -- who may what ------------------------------------------------------------------------------------------------------


def test_row_level_security_of_the_source_holds(db: Database, notes: Connection) -> None:
    notes.execute("SELECT ml_rag.drop_vectorizer('notes')")
    notes.execute("GRANT SELECT ON notes TO PUBLIC; ALTER TABLE notes ENABLE ROW LEVEL SECURITY")
    notes.execute("CREATE POLICY cheap ON notes USING (price < 10)")
    create(notes, "notes", "{body}", document_name="{title}", destination="table")
    run(notes, "notes")
    asker = db.connect("asker")
    store = {"vector_store": ["public.notes_segments"], "n_citations": 9}
    for options in ({}, {"keyword_search": True}, {"semantic_search": False, "keyword_search": True}):
        found = search(asker, "a tent first paragraph", store | options)
        assert {row[2] for row in found} == {"one"}
    with error("P0002"):
        search(asker, "tent", store | {"semantic_search": False, "keyword_search": True})
    assert asker.execute("SELECT DISTINCT source_id FROM notes_segments ORDER BY 1").fetchall() == [(1,), (3,)]
    plan = asker.execute("EXPLAIN (ANALYZE, COSTS off, TIMING off, SUMMARY off) SELECT FROM notes_segments").fetchall()
    assert "tent" not in str(plan)
    # the policy is the source's at any time
    notes.execute("DROP POLICY cheap ON notes")
    assert asker.execute("SELECT count(*) FROM notes_segments").fetchone() == (0,)
    notes.execute("ALTER TABLE notes DISABLE ROW LEVEL SECURITY")
    assert asker.execute("SELECT count(DISTINCT source_id) FROM notes_segments").fetchone() == (3,)


def test_privileges_of_the_source_hold(db: Database, notes: Connection) -> None:
    asker = db.connect("asker")
    with error("42501", ours=False):
        asker.execute("SELECT FROM notes_segments")
    # who may read another column only does not read the text here
    notes.execute("GRANT SELECT (id) ON notes TO PUBLIC; GRANT SELECT ON notes_segments TO PUBLIC")
    with error("42501", ours=False):
        asker.execute("SELECT FROM notes_segments")
    notes.execute("GRANT SELECT ON notes TO PUBLIC")
    assert asker.execute("SELECT count(*) FROM notes_segments").fetchone() == (5,)


def test_who_writes_the_source_needs_no_other_privilege(db: Database, notes: Connection) -> None:
    notes.execute("GRANT SELECT, INSERT, UPDATE, DELETE, TRUNCATE ON notes TO PUBLIC")
    writer = db.connect("stranger")
    writer.execute("SET search_path = pg_catalog")
    writer.execute("UPDATE public.notes SET body = 'hat' WHERE id = 1; INSERT INTO public.notes VALUES (7, 'x', 'y')")
    writer.execute("DELETE FROM public.notes WHERE id = 2; UPDATE public.notes SET id = 9 WHERE id = 1")
    for statement in ("SELECT FROM public.notes_segments", "DELETE FROM public.notes_segments"):
        with error("42501", ours=False):
            writer.execute(statement)
    run(notes, "notes")
    assert_segments_in_step(notes, "notes")
    writer.execute("TRUNCATE public.notes")
    assert segments(notes) == []


def test_nobody_else_can_use_the_function_of_the_triggers(db: Database, notes: Connection) -> None:
    notes.execute("GRANT CREATE ON SCHEMA public TO PUBLIC")
    asker = db.connect("asker")
    asker.execute("CREATE TABLE mine (id integer PRIMARY KEY, segment text, document_name text)")
    with error("42501", ours=False):
        asker.execute(
            "CREATE TRIGGER ml_rag_segments_insert AFTER INSERT ON mine FOR EACH STATEMENT"
            " EXECUTE FUNCTION notes_segments()"
        )


def test_what_a_dropped_table_left_is_not_in_the_way(notes: Connection) -> None:
    notes.execute("DROP TABLE notes, notes_segments CASCADE")
    notes.execute(NOTES)
    create(notes, "notes", "{body}", document_name="{title}", destination="table")
    notes.execute("INSERT INTO notes VALUES (1, 'one', 'a tent')")
    assert segments(notes) == [("one", 1, "a tent")]


def test_a_function_of_one_s_own_stays(notes: Connection) -> None:
    notes.execute("DROP TABLE notes, notes_segments CASCADE; DROP FUNCTION notes_segments")
    own = "CREATE FUNCTION notes_segments() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NEW; END'"
    notes.execute(own)
    notes.execute(NOTES)
    create(notes, "notes", "{body}", document_name="{title}", destination="table")
    found = notes.execute("SELECT proname, prosrc FROM pg_proc WHERE proname ~ '^notes_segments' ORDER BY 1").fetchall()
    assert (found[0], found[1][0]) == (("notes_segments", "BEGIN RETURN NEW; END"), "notes_segments1")
    notes.execute("INSERT INTO notes VALUES (1, 'one', 'a tent')")
    assert segments(notes) == [("one", 1, "a tent")]


def test_a_policy_of_another_role_does_not_redirect_the_segments(db: Database, notes: Connection) -> None:
    notes.execute("GRANT CREATE ON SCHEMA public TO PUBLIC; GRANT SELECT ON notes, notes_segments TO PUBLIC")
    asker = db.connect("asker")
    asker.execute(
        "CREATE TABLE a_trap (LIKE notes_segments INCLUDING ALL); ALTER TABLE a_trap ENABLE ROW LEVEL SECURITY"
    )
    asker.execute(
        "CREATE POLICY ml_rag_source ON a_trap USING (EXISTS (SELECT FROM notes AS n WHERE n.id = source_id))"
    )
    notes.execute("DROP TABLE notes_segments")
    with error("55000", "segments of", "drop_vectorizer"):
        notes.execute("INSERT INTO notes VALUES (9, 'x', 'secret')")
    assert asker.execute("SELECT FROM a_trap").fetchall() == []


def test_a_role_that_makes_it_for_the_owner_owns_nothing(db: Database, owner: Connection, models: ModelsServer) -> None:
    owner.execute("GRANT CREATE ON SCHEMA public TO PUBLIC")
    asker = db.connect("asker")
    asker.execute(NOTES)
    create(owner, "notes", "body", destination="table")
    owners = owner.execute(
        "SELECT DISTINCT pg_get_userbyid(relowner) FROM pg_class WHERE relname LIKE 'notes%' UNION"
        " SELECT pg_get_userbyid(proowner) FROM pg_proc WHERE proname = 'notes_segments'"
    ).fetchall()
    assert owners == asker.execute("SELECT current_user::text").fetchall()
    asker.execute("INSERT INTO notes VALUES (1, 'x', 'y')")
    assert run(asker, "notes")["embedded"] == 1


# -- made, altered, dropped --------------------------------------------------------------------------------------------


def test_tables_and_columns_that_are_renamed(notes: Connection) -> None:
    notes.execute(
        "ALTER TABLE notes RENAME body TO content; ALTER TABLE notes RENAME id TO number;"
        "ALTER TABLE notes RENAME TO n;"
        "ALTER TABLE notes_segments RENAME TO n_segments;"
        "CREATE SCHEMA other; ALTER TABLE n SET SCHEMA other"
    )
    notes.execute("ALTER TABLE n_segments SET SCHEMA other; SET search_path = other, public")
    notes.execute("UPDATE n SET content = 'lantern' WHERE number = 1; UPDATE n SET number = 8 WHERE number = 2")
    notes.execute("DELETE FROM n WHERE number = 3")
    assert run(notes, "n")["embedded"] == 1
    assert_segments_in_step(notes, "n", "number")
    with error("2BP01", ours=False):
        notes.execute("ALTER TABLE n DROP content")
    with error("0A000", ours=False):
        notes.execute("ALTER TABLE n ALTER content TYPE varchar(20)")
    with error("2BP01", ours=False):
        notes.execute("DROP TABLE n")
    notes.execute("SELECT ml_rag.drop_vectorizer('n')")
    notes.execute("DROP TABLE n")


def test_a_dropped_vectorizer_leaves_the_table_as_it_was(notes: Connection) -> None:
    notes.execute("SELECT ml_rag.drop_vectorizer('notes')")
    columns = notes.execute(
        "SELECT attname FROM pg_attribute WHERE attrelid = 'notes'::regclass AND attnum > 0 AND NOT attisdropped"
    ).fetchall()
    assert [name for (name,) in columns] == ["id", "title", "body", "price"]
    left = notes.execute(
        "SELECT tgname::text FROM pg_trigger WHERE tgrelid = 'notes'::regclass UNION ALL"
        " SELECT proname FROM pg_proc WHERE proname ~ 'segments$' AND pronamespace = 'public'::regnamespace UNION ALL"
        " SELECT relname FROM pg_class WHERE relname ~ 'notes_segments' UNION ALL"
        " SELECT store::text FROM ml_rag_internal.keyword_store UNION ALL SELECT key FROM ml_rag.vectorizer_error"
    ).fetchall()
    assert left == []


@pytest.mark.parametrize(
    ("call", "sqlstate"),
    [
        ("SELECT ml_rag_search('x', '{\"vector_store\": [\"notes\"]}')", "P0002"),
        ("SELECT ml_rag.tune_index('notes')", "P0002"),
        ("SELECT ml_rag.index_store('notes')", "22023"),
        ("CALL ml_rag.add_embedding('notes', 'other', '{\"embed_model_id\": \"fake-embed\"}')", "22023"),
        ("CALL ml_rag.create_node_group('notes', 'parts', '{\"transform\": \"sentence\"}')", "22023"),
        ("SELECT ml_rag.load_document('notes', 'a.txt', 'text')", "22023"),
    ],
)
def test_whoever_names_the_table_learns_which_one_its_segments_are_in(
    notes: Connection, call: str, sqlstate: str
) -> None:
    with error(sqlstate, 'Its segments are in "public.notes_segments": name that table.'):
        notes.execute(call.encode())


def test_a_node_group_of_the_segments_is_kept_current(notes: Connection) -> None:
    notes.execute("CALL ml_rag.create_node_group('notes_segments', 'parts', '{\"transform\": \"sentence\"}')")
    counts = "SELECT rows, pending FROM ml_rag.node_group"
    notes.execute("UPDATE notes SET body = 'Red boat. Blue boat.' WHERE id = 1")
    run(notes, "notes")
    assert notes.execute(counts).fetchall() == [(3, 0)]
    notes.execute("TRUNCATE notes")
    assert notes.execute(counts).fetchall() == [(0, 0)]
    assert segments(notes) == []


def test_a_node_group_is_dropped_before_the_vectorizer(notes: Connection) -> None:
    told = noticed(notes)
    notes.execute("CALL ml_rag.create_node_group('notes_segments', 'parts', '{\"transform\": \"sentence\"}')")
    drop = "SELECT ml_rag.drop_vectorizer('notes')"
    with error("2BP01", 'node group "parts"', "drop_node_group('public.notes_segments', 'parts')"):
        notes.execute(drop)
    notes.execute("SELECT ml_rag.drop_node_group('notes_segments', 'parts')")
    notes.execute(drop)
    assert told == []
    assert notes.execute("SELECT to_regclass('notes_segments')").fetchone() == (None,)


def test_a_node_group_is_dropped_while_a_writer_waits(db: Database, notes: Connection) -> None:
    """Who drops it keeps writers of the segments out, then readers: a writer that had begun as one was in the way."""
    notes.execute("CALL ml_rag.create_node_group('notes_segments', 'parts', '{\"transform\": \"sentence\"}')")
    with db.connect().transaction() as transaction:
        transaction.connection.execute("LOCK TABLE notes_segments IN SHARE ROW EXCLUSIVE MODE")
        writer = Background(lambda: notes.execute("UPDATE notes SET body = 'hat' WHERE id = 1"))
        with db.connect() as watcher:
            wait_until(lambda: watcher.execute("SELECT FROM pg_locks WHERE NOT granted").fetchone() is not None)
        transaction.connection.execute("SELECT ml_rag.drop_node_group('notes_segments', 'parts')")
    writer.result()
    assert ("one", 1, "hat") in segments(notes)


def test_a_node_group_is_dropped_while_a_reader_becomes_a_writer(db: Database, notes: Connection) -> None:
    notes.execute("CALL ml_rag.create_node_group('notes_segments', 'parts', '{\"transform\": \"sentence\"}')")
    with db.connect().transaction() as transaction:
        transaction.connection.execute("SELECT count(*) FROM notes_segments")
        dropped = Background(lambda: notes.execute("SELECT ml_rag.drop_node_group('notes_segments', 'parts')"))
        with db.connect() as watcher:
            wait_until(lambda: watcher.execute("SELECT FROM pg_locks WHERE NOT granted").fetchone() is not None)
        transaction.connection.execute("UPDATE notes SET body = 'hat' WHERE id = 1")
    dropped.result()
    assert notes.execute("SELECT count(*) FROM ml_rag.node_group").fetchone() == (0,)


@pytest.mark.parametrize("then", ["SELECT body FROM notes", "UPDATE notes SET body = 'hat' WHERE id = 1"])
def test_a_vectorizer_is_dropped_while_readers_of_its_segments_go_on(
    db: Database, notes: Connection, then: str
) -> None:
    """These read the table itself after its segments, by the policy that says who sees them."""
    with db.connect().transaction() as transaction:
        transaction.connection.execute("SELECT count(*) FROM notes_segments")
        dropped = Background(lambda: notes.execute("SELECT ml_rag.drop_vectorizer('notes')"))
        with db.connect() as watcher:
            wait_until(lambda: watcher.execute("SELECT FROM pg_locks WHERE NOT granted").fetchone() is not None)
        transaction.connection.execute(then.encode())
    dropped.result()
    assert notes.execute("SELECT to_regclass('notes_segments')").fetchone() == (None,)


def test_a_dropped_vectorizer_that_leaves_its_segments(notes: Connection) -> None:
    notes.execute("""SELECT ml_rag.drop_vectorizer('notes', '{"keep_columns": true}')""")
    notes.execute("UPDATE notes SET body = 'hat' WHERE id = 1")
    assert [row[5] for row in search(notes, "first paragraph", {"n_citations": 9})] == ["a tent"]


@pytest.mark.parametrize(
    ("setup", "options", "state", "words"),
    [
        ("", {"destination": "column", "chunking": {}}, "22023", ["chunking", "destination"]),
        ("", {"chunking": {"segment_tokens": 20, "overlap_tokens": 11}}, "22023", ["at most half"]),
        ("CREATE TABLE notes_segments ()", {}, "42P07", ["notes_segments", "exists already"]),
        (
            "ALTER TABLE notes ADD d date DEFAULT now(), DROP CONSTRAINT notes_pkey, ADD PRIMARY KEY (d)",
            {"document_name": "body"}, "55000", ["of type date"],
        ),
        (
            "DROP TABLE notes; CREATE TABLE notes (id integer PRIMARY KEY, body text) PARTITION BY RANGE (id)",
            {}, "55000", ["partitioned", "column"],
        ),
    ],
)  # fmt: skip
def test_what_it_cannot_do_it_says_and_changes_nothing(
    owner: Connection, models: ModelsServer, setup: str, options: dict[str, Any], state: str, words: list[str]
) -> None:
    owner.execute(NOTES)
    if setup:
        owner.execute(setup)
    before = owner.execute("SELECT attname FROM pg_attribute WHERE attrelid = 'notes'::regclass").fetchall()
    with error(state, *words):
        create(owner, "notes", "body", **{"destination": "table", **options})
    assert owner.execute("SELECT attname FROM pg_attribute WHERE attrelid = 'notes'::regclass").fetchall() == before


def test_rows_that_their_owner_does_not_see_are_followed(owner: Connection, tenant: Connection) -> None:
    ((role,),) = tenant.execute("SELECT quote_ident(current_user)").fetchall()
    owner.execute(f"CREATE SCHEMA own AUTHORIZATION {role}")
    tenant.execute(NOTES.replace("notes", "own.notes"))
    create(tenant, "own.notes", "body", destination="table")
    tenant.execute("ALTER TABLE own.notes ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY")
    tenant.execute("CREATE POLICY p ON own.notes USING (id > 1) WITH CHECK (true)")
    tenant.execute("INSERT INTO own.notes VALUES (1, 'one', 'lamp', 5), (2, 'two', 'tent', 50), (3, 'three', 'hat', 7)")
    tenant.execute("UPDATE own.notes SET body = 'rope' WHERE id = 2; DELETE FROM own.notes WHERE id = 3")
    found = tenant.execute("SELECT source_id, segment FROM own.notes_segments ORDER BY 1").fetchall()
    assert found == [(1, "lamp"), (2, "rope")]


def test_a_disabled_trigger_is_reported(notes: Connection) -> None:
    told = noticed(notes)
    notes.execute("ALTER TABLE notes DISABLE TRIGGER ml_rag_segments_update")
    run(notes, "notes")
    assert told == ['a trigger of "public.notes" was dropped or disabled']


AGAIN = (
    "CREATE FUNCTION again() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN {}; RETURN NULL; END$$;"
    "CREATE TRIGGER again AFTER {} ON notes FOR EACH {} WHEN (pg_trigger_depth() = 0) EXECUTE FUNCTION again()"
)
REDACT = "UPDATE public.notes SET body = replace(body, 'secret', 'x') WHERE body ~ 'secret'"


@pytest.mark.parametrize("level", ["ROW", "STATEMENT"])
@pytest.mark.parametrize(
    ("event", "then", "change"),
    [
        ("INSERT", REDACT, "INSERT INTO notes VALUES (4, 'four', 'a secret'), (5, 'five', 'hat')"),
        ("UPDATE", REDACT, "UPDATE notes SET body = 'a secret' WHERE id = 1"),
        ("UPDATE", f"{REDACT}; UPDATE public.notes SET id = id + 10", "UPDATE notes SET body = 'secret' WHERE id = 1"),
        ("UPDATE", "DELETE FROM public.notes WHERE id = 1", "UPDATE notes SET body = 'secret' WHERE id < 3"),
        ("UPDATE", REDACT, "UPDATE notes SET id = id + 10, body = 'a secret' WHERE id < 3"),
        ("UPDATE", "UPDATE public.notes SET title = 'x', body = 'y'", "UPDATE notes SET id = id + 10"),
        (
            "DELETE", "INSERT INTO public.notes VALUES (1, 'again', 'hat') ON CONFLICT DO NOTHING",
            "DELETE FROM notes WHERE id < 3",
        ),
    ],
)  # fmt: skip
def test_what_a_trigger_of_the_table_does_to_a_row_again_is_followed(
    notes: Connection, level: str, event: str, then: str, change: str
) -> None:
    """The triggers of its statement have run before those of the first one."""
    notes.execute(AGAIN.format(then, event, level))
    notes.execute(change)
    waiting = "SELECT source_id, segment FROM notes_segments WHERE segment ~ 'secret'"
    assert (
        notes.execute(waiting).fetchall()
        == notes.execute("SELECT id, body FROM notes WHERE body ~ 'secret'").fetchall()
    )
    run(notes, "notes")
    assert_segments_in_step(notes, "notes")
    names = "SELECT DISTINCT {}, document_name FROM {} ORDER BY 1"
    assert (
        notes.execute(names.format("source_id", "notes_segments")).fetchall()
        == notes.execute(names.format("id", "notes")).fetchall()
    )


def test_segments_of_a_row_that_went_with_triggers_off_go_when_another_takes_its_key(notes: Connection) -> None:
    notes.execute(
        "SET session_replication_role = replica; DELETE FROM notes WHERE id = 1; RESET session_replication_role"
    )
    notes.execute("INSERT INTO notes VALUES (1, 'one', 'a hat')")
    run(notes, "notes")
    assert_segments_in_step(notes, "notes")


@pytest.mark.parametrize(
    "change",
    [
        "WITH gone AS (DELETE FROM notes RETURNING *) INSERT INTO notes SELECT id, 'new', 'hat' FROM gone LIMIT 1",
        "WITH gone AS (DELETE FROM notes RETURNING *) INSERT INTO notes SELECT id, 'new', body FROM gone LIMIT 1",
        "WITH gone AS (DELETE FROM notes RETURNING *) INSERT INTO notes SELECT id, 'new', 'hat' FROM gone",
    ],
)
def test_a_statement_may_put_a_row_in_the_place_of_one_that_it_deletes(notes: Connection, change: str) -> None:
    """Triggers of the first INSERT run before those of its DELETE, which ends later."""
    notes.execute(change)
    run(notes, "notes")
    assert_segments_in_step(notes, "notes")
    assert {name for name, _, _ in segments(notes)} == {"new"}


@pytest.mark.parametrize("level", ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"])
@pytest.mark.parametrize("taken", ["DELETE FROM notes WHERE id = 2", "UPDATE notes SET id = 12 WHERE id = 2"])
@pytest.mark.parametrize(
    "change",
    [
        "INSERT INTO notes VALUES (2, 'two', 'a tent', 50)",
        "UPDATE notes SET id = 2, title = 'two', body = 'a tent' WHERE id = 1",
    ],
)
def test_a_row_that_takes_the_key_of_one_that_goes_meanwhile_has_segments(
    db: Database, notes: Connection, level: str, taken: str, change: str
) -> None:
    """Above READ COMMITTED its transaction sees the segments of the other one, which has the same text."""
    other = db.connect()
    may_fail = contextlib.nullcontext() if level == "READ COMMITTED" else error("40001", ours=False)
    with may_fail, other.transaction():
        other.execute(f"SET TRANSACTION ISOLATION LEVEL {level}")
        other.execute("SELECT FROM notes")
        notes.execute(taken)
        other.execute(change)
    run(notes, "notes")
    assert_segments_in_step(notes, "notes")


@pytest.mark.parametrize("context", ["none", "headings"])
def test_headings_are_embedded_before_the_text_where_it_is_asked_for(owner: Connection, context: str) -> None:
    """The text that is stored and found by words stays without them."""
    owner.execute(NOTES)
    body = "# Camp\n\n## Tents\n\nPitch it on even ground.\n\n## Stoves\n\nUse it outdoors only."
    owner.execute("INSERT INTO notes VALUES (1, 'one', %s, 5)", (body,))
    chunking = {"split_by": "paragraph", "segment_tokens": 64, "context": context}
    create(owner, "notes", "{body}", destination="table", chunking=chunking)
    assert run(owner, "notes")["embedded"] == 1
    query = (
        "SELECT segment, metadata -> 'headings', segment_embedding::real[] FROM notes_segments ORDER BY segment_number"
    )
    found = owner.execute(query).fetchall()
    assert [headings for _, headings, _ in found][-1] == ["Camp", "Stoves"]
    for segment, headings, vector in found:
        path = " > ".join(headings) + "\n\n" if context == "headings" and headings else ""
        assert vector == pytest.approx(fake_embedding(path + segment), abs=1e-6)
    assert "Use it outdoors only." in found[-1][0]
    assert (found[-1][2] == pytest.approx(fake_embedding(found[-1][0]), abs=1e-6)) == (context == "none")


def test_segments_of_two_rows_are_no_document_together(owner: Connection, models: ModelsServer) -> None:
    """A key can be made that has the same hash as another one by hashtextextended."""
    hashes = "SELECT count(*), count(DISTINCT hashtextextended(ARRAY[id]::text, 0)) FROM notes"
    owner.execute("CREATE TABLE notes (id text PRIMARY KEY, body text)")
    for key in ("employee-handbook-2026", "984jjdb9qr8v#K+Uvg@J@U2ndbook-2026"):
        owner.execute("INSERT INTO notes VALUES (%s, %s)", (key, LONG))
    assert owner.execute(hashes).fetchone() == (2, 1)
    create(owner, "notes", "{body}", destination="table")
    assert owner.execute("SELECT count(DISTINCT document_id) FROM notes_segments").fetchone() == (2,)


def test_segments_of_a_table_that_a_crash_empties_are_gone_with_its_rows(
    owner: Connection, models: ModelsServer
) -> None:
    owner.execute(f"{NOTES.replace('TABLE', 'UNLOGGED TABLE')}; INSERT INTO notes VALUES (1, 'one', 'glass', 5)")
    create(owner, "notes", "{body}", destination="table")
    assert owner.execute("SELECT relpersistence FROM pg_class WHERE relname = 'notes_segments'").fetchone() == ("u",)
