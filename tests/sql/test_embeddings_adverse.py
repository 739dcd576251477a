"""store/add, store/fill: another embedding where the table, the session or a trigger is not as it would like it."""

from __future__ import annotations

import pytest
from psycopg import sql

from support import programs
from support.cluster import Cluster, Connection, Database, noticed, value_of
from support.embeddings import (
    INSERT,
    TEXTS,
    add,
    assert_embedded,
    columns,
    comment_on,
    default,
    definition,
    drop,
    listed,
    rows,
    store,
    triggers,
    use,
    vectors,
)
from support.models_server import ModelsServer
from support.stores import create_store, error, fake_embedding, grant, insert, mark, names, search

__all__ = ["store"]


# -- who may -----------------------------------------------------------------------------------------------------------


def test_the_owner_of_the_table_calls_it(db: Database, store: Connection) -> None:
    asker = db.connect("asker")
    store.execute("GRANT ALL ON docs TO PUBLIC")
    add(store, "two", "other")
    for statement in (
        "CALL ml_rag.add_embedding('docs', 'more')",
        "SELECT ml_rag.use_embedding('docs', 'two')",
        "SELECT ml_rag.drop_embedding('docs', 'two')",
    ):
        with error("42501", "must be owner"):
            asker.execute(statement)
    store.execute(sql.SQL("ALTER TABLE docs OWNER TO {}").format(sql.Identifier(db.role("asker"))))
    with error("42501", ours=False):  # an index needs CREATE in the schema
        add(asker)
    store.execute("GRANT CREATE ON SCHEMA public TO PUBLIC")
    assert add(asker)["segments"] == 0
    assert_embedded(store)
    use(asker, "more")
    drop(asker, "two")
    assert list(listed(asker)) == ["more", "fake-embed"]


def test_who_writes_needs_no_privilege_on_ml_rag(db: Database, store: Connection) -> None:
    add(store)
    store.execute("GRANT SELECT, UPDATE ON docs TO PUBLIC")
    stranger = db.connect("stranger")
    stranger.execute("SET search_path = pg_catalog")
    stranger.execute("UPDATE public.docs SET segment = 'red hut' WHERE document_id = 1")
    assert vectors(store, column="segment_embedding_more")["red hut"] is None


def test_row_level_security_of_others_is_untouched(db: Database, store: Connection) -> None:
    store.execute("ALTER TABLE docs ENABLE ROW LEVEL SECURITY")
    store.execute("CREATE POLICY two ON docs USING (document_id < 3)")
    add(store)
    assert_embedded(store)
    use(store, "more")
    asker = db.connect("asker")
    assert len(search(asker, "q", {"embed_model_id": "narrow", "n_citations": 10})) == 2


def test_rows_that_are_hidden_from_the_owner(db: Database, store: Connection, models: ModelsServer) -> None:
    add(store, "two", "other")
    models.requests.clear()
    store.execute("ALTER TABLE docs ENABLE ROW LEVEL SECURITY; CREATE POLICY two ON docs USING (document_id < 3)")
    store.execute("GRANT CREATE ON SCHEMA public TO PUBLIC; ALTER TABLE docs FORCE ROW LEVEL SECURITY")
    store.execute(sql.SQL("ALTER TABLE docs OWNER TO {}").format(sql.Identifier(db.role("asker"))))
    asker = db.connect("asker")
    with error("55000", "Row-level security hides rows of it from its owner", "NO FORCE"):
        add(asker)
    with error("55000", "Row-level security hides rows of it from its owner"):
        use(asker, "two")
    assert models.requests == []
    drop(asker, "two")


# -- what it cannot do -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setup", "state", "word"),
    [
        ("CREATE TABLE c () INHERITS (docs)", "55000", "inherits"),
        ("COMMENT ON COLUMN docs.segment_embedding IS NULL", "22023", "does not say which model"),
        ("ALTER TABLE docs ADD segment_embedding_more integer", "42701", "has a column"),
        ("ALTER TABLE docs RENAME segment TO body", "22023", "segment text"),
        ("ALTER TABLE docs DROP segment_embedding", "22023", "segment_embedding vector"),
        (
            "ALTER TABLE docs DROP segment, ADD segment text GENERATED ALWAYS AS (document_name) STORED",
            "55000",
            "is generated",
        ),
        ("SET default_transaction_isolation = 'repeatable read'", "55000", "repeatable read"),
        ("SET default_transaction_isolation = 'serializable'", "55000", "read committed"),
        ("SET default_transaction_read_only = on", "25006", "read-only"),
    ],
)
def test_what_it_cannot_do_it_says_before_anything_is_changed(
    store: Connection, models: ModelsServer, setup: str, state: str, word: str
) -> None:
    store.execute(setup)
    before = definition(store)
    with error(state, word):
        add(store)
    assert definition(store) == before
    assert [texts for _, texts in models.requests] in ([], [["dimensions"]])


@pytest.mark.parametrize(
    "make",
    [
        "CREATE VIEW other AS SELECT * FROM docs",
        "CREATE MATERIALIZED VIEW other AS SELECT * FROM docs",
        "CREATE FOREIGN DATA WRAPPER w; CREATE SERVER s FOREIGN DATA WRAPPER w;"
        "CREATE FOREIGN TABLE other (segment text, segment_embedding vector(16)) SERVER s",
        "CREATE FOREIGN DATA WRAPPER w; CREATE SERVER s FOREIGN DATA WRAPPER w;"
        "CREATE TABLE other (segment text, segment_embedding vector(16)) PARTITION BY LIST (segment);"
        "CREATE FOREIGN TABLE far PARTITION OF other DEFAULT SERVER s",
        "CREATE TABLE whole (segment text, segment_embedding vector(16)) PARTITION BY LIST (segment);"
        "CREATE TABLE other PARTITION OF whole DEFAULT",
    ],
)
def test_other_kinds_of_relations(store: Connection, make: str) -> None:
    store.execute(make)
    with error("55000", 'the embeddings of "public.other" cannot be changed'):
        add(store, store="other")


def test_not_inside_a_transaction(store: Connection) -> None:
    with error("25001"), store.transaction():
        add(store)
    assert columns(store)[-1] == "segment_embedding"


@pytest.mark.parametrize("model", ["a b", "a,b", "a;b"])
def test_model_ids_that_cannot_be_in_a_marker(store: Connection, model: str) -> None:
    with error("22023", "model id"):
        add(store, model=model)


def test_no_table(store: Connection) -> None:
    for statement in (
        "CALL ml_rag.add_embedding(NULL, 'more')",
        "CALL ml_rag.add_embedding(0::regclass, 'more')",
        "SELECT ml_rag.use_embedding(NULL, 'more')",
        "SELECT ml_rag.drop_embedding(NULL, 'more')",
        "SELECT * FROM ml_rag.embeddings(NULL)",
    ):
        with error("42P01"):
            store.execute(statement)
    with error("42P01") as caught:
        store.execute("SELECT ml_rag._relation_name(NULL)")
    assert caught.detail == "The table is NULL."


def test_objects_that_depend_on_a_column_keep_it(store: Connection) -> None:
    add(store)
    store.execute("CREATE VIEW v AS SELECT segment_embedding_more FROM docs")
    with error("2BP01", "view public.v", ours=False):
        drop(store, "more")
    assert len(triggers(store)) == 2
    store.execute("DROP VIEW v")
    drop(store, "more")


# -- triggers ----------------------------------------------------------------------------------------------------------


def make_trigger(connection: Connection, name: str) -> None:
    """A trigger that takes the text out of the metadata: also where a statement does not touch the text."""
    connection.execute(
        "CREATE OR REPLACE FUNCTION take_text() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
        " NEW.segment := coalesce(NEW.metadata ->> 'text', NEW.segment); RETURN NEW; END $$"
    )
    connection.execute(
        sql.SQL("CREATE TRIGGER {} BEFORE UPDATE ON docs FOR EACH ROW EXECUTE FUNCTION take_text()").format(
            sql.Identifier(name)
        )
    )


@pytest.mark.parametrize("name", ["a_rule", "zzz_rule"])
def test_whatever_a_trigger_makes_of_the_text_is_embedded(
    db: Database, store: Connection, models: ModelsServer, name: str
) -> None:
    make_trigger(store, name)
    writer = db.connect()

    def change() -> None:
        for document, text in ((1, "red hut"), (3, "blue lake"), (7, "brown bear")):
            writer.execute(f'UPDATE docs SET metadata = \'{{"text": "{text}"}}\' WHERE document_id = {document}')

    # request 0 is the probe of the dimensions; one row to a batch
    models.before = {3: change}
    add(store, batch_size=1)
    assert_embedded(store)
    found = {text for (text,) in store.execute("SELECT segment FROM docs WHERE document_id IN (1, 3, 7)")}
    assert found == {"red hut", "blue lake", "brown bear"}


def test_a_trigger_that_changes_the_text_as_soon_as_it_can(store: Connection) -> None:
    """That is in the statement that writes its embedding."""
    store.execute('UPDATE docs SET metadata = \'{"text": "red hut"}\' WHERE document_id = 1')
    make_trigger(store, "a_rule")
    assert add(store)["segments"] == 7
    assert "red hut" in vectors(store)
    assert_embedded(store)


@pytest.mark.parametrize("name", ["~rule", "étage"])
def test_a_trigger_after_ours_is_refused(store: Connection, name: str) -> None:
    make_trigger(store, name)
    with error("55000", f'trigger "{name}" of "public.docs" runs after that of ml_rag', "RENAME TO"):
        add(store)
    assert columns(store)[-1] == "segment_embedding"
    store.execute(sql.SQL("ALTER TRIGGER {} ON docs RENAME TO a_rule").format(sql.Identifier(name)))
    add(store)
    assert_embedded(store)


def test_a_trigger_after_ours_that_is_made_meanwhile(db: Database, store: Connection, models: ModelsServer) -> None:
    other = db.connect()
    models.before = {4: lambda: make_trigger(other, "~rule")}
    with error("55000", "runs after that of ml_rag", "drop the embedding and add it again"):
        add(store, batch_size=1)
    with error("55000", "runs after that of ml_rag"):
        use(store, "more")
    store.execute('DROP TRIGGER "~rule" ON docs')
    use(store, "more")


def test_triggers_of_other_kinds_may_run_after_ours(store: Connection) -> None:
    add(store)
    store.execute("CREATE FUNCTION nothing() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NULL; END $$")
    store.execute('CREATE TRIGGER "~1" AFTER UPDATE ON docs FOR EACH ROW EXECUTE FUNCTION nothing()')
    store.execute('CREATE TRIGGER "~2" BEFORE UPDATE ON docs FOR EACH STATEMENT EXECUTE FUNCTION nothing()')
    store.execute('CREATE TRIGGER "~3" BEFORE INSERT OR DELETE ON docs FOR EACH ROW EXECUTE FUNCTION nothing()')
    assert add(store)["segments"] == 0
    use(store, "more")


# a trigger that keeps a row as it is, by either way there is
@pytest.mark.parametrize("kept", ["NULL", "OLD"])
@pytest.mark.parametrize("last", [0, 6])
def test_rows_that_a_trigger_keeps_as_they_are(store: Connection, models: ModelsServer, kept: str, last: int) -> None:
    store.execute(
        "CREATE FUNCTION a_rule() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
        f" IF OLD.document_id > {last} THEN RETURN {kept}; END IF; RETURN NEW; END $$;"
        "CREATE TRIGGER a_rule BEFORE UPDATE ON docs FOR EACH ROW EXECUTE FUNCTION a_rule()"
    )
    result = add(store)
    assert (result["segments"], result["failed"], result["pending"]) == (last, 7 - last, 7 - last)
    assert result["first_error"].startswith("a trigger of the table keeps the row as it is (55000): ")
    store.execute("DROP FUNCTION a_rule CASCADE")
    assert add(store)["segments"] == 7 - last
    assert_embedded(store)


@pytest.mark.parametrize("forget", ["DISABLE TRIGGER USER", "ENABLE TRIGGER USER", "drop"])
def test_without_its_trigger_an_embedding_is_made_anew(store: Connection, forget: str) -> None:
    add(store)
    (name,) = [name for name in triggers(store) if name.endswith("_more")]
    store.execute(f'DROP TRIGGER "{name}" ON docs' if forget == "drop" else f"ALTER TABLE docs {forget}")
    store.execute("UPDATE docs SET segment = segment || 's' WHERE document_id = 1")
    with error(
        "55000", 'the trigger of embedding "more" of "public.docs" was dropped or disabled', "CALL ml_rag.add_embedding"
    ):
        use(store, "more")
    notices = noticed(store)
    assert add(store)["segments"] == 7
    assert notices == ['embedding "more" of "public.docs" is made from the beginning']
    assert_embedded(store)
    use(store, "more")


def test_a_trigger_that_is_disabled_while_it_is_filled(db: Database, store: Connection, models: ModelsServer) -> None:
    other = db.connect()
    notices = noticed(store)

    def change() -> None:
        other.execute("ALTER TABLE docs DISABLE TRIGGER USER")
        other.execute("UPDATE docs SET segment = 'red hut' WHERE document_id = 1")
        other.execute("ALTER TABLE docs ENABLE TRIGGER USER")

    models.before = {4: change}
    add(store, batch_size=1)
    assert notices == ['the trigger of embedding "more" of "public.docs" was disabled']
    with error("55000", "dropped or disabled"):
        use(store, "more")
    add(store)
    assert_embedded(store)


def test_the_default_one_is_never_taken_away(store: Connection) -> None:
    add(store)
    use(store, "more")
    notices = noticed(store, lambda notice: f"{notice.message_primary} {notice.message_hint}")
    store.execute("ALTER TABLE docs DISABLE TRIGGER USER")
    store.execute(INSERT, (30, "late frost"))
    assert add(store)["segments"] == 1
    assert len(notices) == 1
    assert "Add another embedding, use that, and drop this one." in str(notices[0])


# -- rows --------------------------------------------------------------------------------------------------------------


def test_rows_that_fail_do_not_stop_the_others(store: Connection, models: ModelsServer) -> None:
    store.execute("UPDATE docs SET segment = 'a !nan b' WHERE document_id = 3")
    warnings = noticed(store, lambda notice: (notice.message_primary, notice.message_detail))
    result = add(store)
    assert (result["segments"], result["failed"], result["pending"]) == (6, 1, 1)
    assert result["first_error"] == "unexpected reply from the model server (38000): a !nan b"
    # a warning is written to PostgreSQL's log, and texts do not belong there
    assert warnings == [('1 rows of "public.docs" have no embedding "more"', "The result has the first error.")]
    with error("55000", '1 rows of "public.docs"'):
        use(store, "more")
    store.execute("UPDATE docs SET segment = 'mended' WHERE document_id = 3")
    result = add(store)
    assert (result["segments"], result["failed"]) == (1, 0)
    assert_embedded(store)


def test_a_text_that_is_far_too_long_does_not_stop_the_others(store: Connection) -> None:
    """A regular expression over it would take more memory than PostgreSQL gives."""
    store.execute("UPDATE docs SET segment = repeat('x', 270000000) WHERE document_id = 3")
    result = add(store)
    assert (result["segments"], result["failed"], result["pending"]) == (6, 1, 1)
    assert result["first_error"] == f"the text is too long (54000): {'x' * 60}"
    query = "SELECT pending FROM ml_rag.embeddings('docs') WHERE name = 'more'"
    assert store.execute(query).fetchall() == [(1,)]


def test_a_model_that_fails_for_all_ends_the_call(owner: Connection, models: ModelsServer) -> None:
    create_store(owner, rows=rows([f"!nan {i}" for i in range(40)]), type="vector(16)")
    with error("38000"):
        add(owner)
    assert len(models.requests) < 25


def test_rows_without_text_have_no_embedding(store: Connection) -> None:
    store.execute(
        INSERT.replace("segment)", "segment, segment_embedding)").replace("%s)", "%s, %s)"), (20, " ", _vector("x"))
    )
    result = add(store)
    assert (result["segments"], result["failed"], result["pending"]) == (7, 0, 0)
    use(store, "more")


def _vector(text: str) -> str:
    return str([float(x) for x in fake_embedding(text)])


def test_a_table_without_rows(owner: Connection, models: ModelsServer) -> None:
    create_store(owner, type="vector(16)")
    assert add(owner)["segments"] == 0
    use(owner, "more")
    assert names(owner, embed_model_id="narrow") == ["public.docs"]


def test_a_model_that_has_other_dimensions_by_now(store: Connection, models: ModelsServer) -> None:
    add(store)
    models.vectors = lambda texts, model: [[1.0] * 9 for _ in texts]  # type: ignore[method-assign]
    with error("22000", "The model answers 9 dimensions, column segment_embedding_more has 8"):
        add(store)


# -- partitions --------------------------------------------------------------------------------------------------------


@pytest.fixture
def parts(owner: Connection, models: ModelsServer) -> Connection:
    """The store docs in three partitions, one of them partitioned itself."""
    create_store(owner, type="vector(16)", suffix=" PARTITION BY RANGE (document_id)")
    owner.execute(
        "CREATE TABLE a PARTITION OF docs FOR VALUES FROM (0) TO (3);"
        "CREATE TABLE b PARTITION OF docs FOR VALUES FROM (3) TO (6) PARTITION BY RANGE (document_id);"
        "CREATE TABLE b1 PARTITION OF b FOR VALUES FROM (3) TO (6);"
        "CREATE TABLE c PARTITION OF docs DEFAULT"
    )
    insert(owner, "docs", rows(TEXTS))
    return owner


def test_a_partitioned_table(db: Database, parts: Connection, models: ModelsServer) -> None:
    result = add(parts, batch_size=2)
    assert (result["segments"], result["pending"]) == (7, 0)
    assert_embedded(parts)
    assert parts.execute("SELECT count(*) FROM pg_indexes WHERE indexdef LIKE '%hnsw%'").fetchone() == (5,)
    parts.execute("UPDATE docs SET segment = 'red hut' WHERE document_id = 1")
    parts.execute("UPDATE b1 SET segment = 'blue lake' WHERE document_id = 3")
    parts.execute("UPDATE docs SET segment = 'brown bear', document_id = 0 WHERE document_id = 7")  # to another one
    parts.execute(
        "CREATE TABLE d (LIKE docs INCLUDING ALL); ALTER TABLE docs ATTACH PARTITION d FOR VALUES FROM (50) TO (60)"
    )
    parts.execute(INSERT, (50, "late frost"))
    parts.execute("UPDATE docs SET segment = 'later frost' WHERE document_id = 50")
    assert listed(parts)["more"]["pending"] == 4
    assert add(parts)["segments"] == 4
    assert_embedded(parts)
    parts.execute("UPDATE docs SET segment = 'latest frost' WHERE document_id = 50")
    assert vectors(parts, column="segment_embedding_more")["latest frost"] is None
    add(parts)
    use(parts, "more")
    asker = db.connect("asker")
    found = search(asker, "latest frost", {"embed_model_id": "narrow", "n_citations": 1})
    assert found[0][5:7] == ("latest frost", 0)
    parts.execute("SELECT ml_rag.load_document('docs', 'fresh', 'fresh fish')")
    assert_embedded(parts)
    add(parts, "fake-embed", None)
    use(parts, "fake-embed")
    drop(parts, "more")
    assert triggers(parts) == []
    assert columns(parts, "b1")[-1] == "segment_embedding"


def test_a_partition_whose_trigger_is_disabled(parts: Connection) -> None:
    add(parts)
    parts.execute("ALTER TABLE b1 DISABLE TRIGGER USER")
    parts.execute("UPDATE docs SET segment = 'blue lake' WHERE document_id = 3")
    with error("55000", "dropped or disabled"):
        use(parts, "more")
    assert add(parts)["segments"] == 7
    assert_embedded(parts)


def test_a_partition_with_row_level_security_that_is_forced(db: Database, parts: Connection) -> None:
    parts.execute("ALTER TABLE b1 ENABLE ROW LEVEL SECURITY; ALTER TABLE b1 FORCE ROW LEVEL SECURITY")
    for table in ("docs", "a", "b", "b1", "c"):
        parts.execute(
            sql.SQL("ALTER TABLE {} OWNER TO {}").format(sql.Identifier(table), sql.Identifier(db.role("asker")))
        )
    with error("55000", "Row-level security hides rows"):
        add(db.connect("asker"))


# -- comments, dumps ---------------------------------------------------------------------------------------------------

COMMENTS = {
    "two markers": "GENAI_OPTIONS=EMBED_MODEL_ID=fake-embed GENAI_OPTIONS=EMBED_MODEL_ID=never",
    "two in one": "GENAI_OPTIONS=EMBED_MODEL_ID=fake-embed,EMBED_MODEL_ID=never",
    "a line break": "of the handbook\nGENAI_OPTIONS=EMBED_MODEL_ID=fake-embed\nkept",
    "a tab": "GENAI_OPTIONS=EMBED_MODEL_ID=fake-embed\tkept",
}


@pytest.mark.parametrize("comment", COMMENTS.values(), ids=list(COMMENTS))
def test_the_marker_is_read_as_everywhere_else(store: Connection, comment: str) -> None:
    mark(store, "docs", comment)
    add(store)
    assert list(listed(store)) == ["fake-embed", "more"]
    use(store, "more")
    use(store, "fake-embed")
    changed = str(comment_on(store)).replace(",EMBEDDING=fake-embed", "", 1)
    assert changed == comment
    found = store.execute("SELECT embed_model_id FROM ml_rag.discover()").fetchall()
    assert found == [("fake-embed",)]


@pytest.mark.parametrize("comment", COMMENTS.values(), ids=list(COMMENTS))
def test_a_batch_routine_reads_the_marker_as_everywhere_else(
    owner: Connection, models: ModelsServer, comment: str
) -> None:
    owner.execute("CREATE TABLE texts (id integer PRIMARY KEY, segment text, segment_embedding vector(16))")
    mark(owner, "texts", comment)
    owner.execute("INSERT INTO texts VALUES (1, 'red house')")
    found = value_of(
        owner,
        "CALL ml_embed_table('public.texts.segment', 'public.texts.segment_embedding',"
        ' \'{"embed_model_id": "fake-embed"}\')',
    )
    assert found["succeeded"] == 1


def test_a_view_has_the_embeddings_that_its_own_comments_say(db: Database, store: Connection) -> None:
    add(store)
    store.execute("CREATE VIEW v AS SELECT * FROM docs")
    grant(store, "v")
    assert listed(store, "v") == {}
    mark(store, "v")
    mark(store, "v", "GENAI_OPTIONS=EMBED_MODEL_ID=narrow,EMBEDDING=mine,DEFAULT=true", "segment_embedding_more")
    assert list(listed(store, "v")) == ["mine", "fake-embed"]
    asker = db.connect("asker")
    assert names(asker, embed_model_id="narrow") == ["public.docs", "public.v"]
    asked = {"embed_model_id": "narrow", "n_citations": 1, "vector_store": ["public.v"]}
    assert search(asker, "blue sea", asked)[0][5:7] == ("blue sea", 0)


def test_a_dump_keeps_them(cluster: Cluster, db: Database, store: Connection, models: ModelsServer) -> None:
    store.execute("ALTER TABLE docs ADD gone integer; ALTER TABLE docs DROP gone")  # other numbers of columns
    add(store)
    add(store, "half", "other", type="halfvec")
    use(store, "more")
    store.execute("UPDATE docs SET segment = 'red hut' WHERE document_id = 1")
    with cluster.database() as copy:
        dumped = programs.run("pg_dump", db, "--no-owner", "-t", "docs").stdout
        programs.run("psql", copy, "-qX", "-v", "ON_ERROR_STOP=1", input=dumped)
        there = copy.connect()
        there.execute(
            "SELECT ml_rag.configure('model_server', %s)",
            store.execute("SELECT value FROM ml_rag.setting WHERE name = 'model_server'").fetchone(),
        )
        assert listed(there) == listed(store)
        assert triggers(there) == triggers(store)
        there.execute("UPDATE docs SET segment = 'green bush' WHERE document_id = 2")
        assert {name: one["pending"] for name, one in listed(there).items()} == {"more": 2, "fake-embed": 2, "half": 2}
        for name in listed(there):
            assert add(there, name, None)["segments"] == 2
        assert_embedded(there)
        assert default(there) == "more"


def test_where_a_subscriber_lacks_the_column_it_warns(store: Connection) -> None:
    hints: list[str] = []
    store.execute("CREATE PUBLICATION p FOR TABLE docs (document_id, segment_number)")
    store.add_notice_handler(lambda notice: hints.append(notice.message_hint or ""))
    add(store, "one", index={"type": "none"})
    assert hints == []
    store.execute("ALTER PUBLICATION p SET TABLE docs")
    add(store, type="halfvec")
    add(store)
    (hint,) = hints
    assert hint.startswith(
        "On each subscriber: ALTER TABLE public.docs ADD COLUMN segment_embedding_more public.halfvec(8);"
    )
