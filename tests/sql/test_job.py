"""batch/job: what a batch routine reads and writes, checked before the first row."""

from __future__ import annotations

from typing import Any

import pytest

from support.cluster import Connection, Database
from support.stores import error
from support.tables import ROUTINES, call, column, make_texts


@pytest.fixture
def texts(owner: Connection) -> Connection:
    return make_texts(owner)


def test_a_model_that_fails_is_said_before_anything_is_made(texts: Connection) -> None:
    with error("38000"):
        call(texts, "ml_embed_table", "public.texts.q", "public.texts.e", {"embed_model_id": "fake-embed-nan"})
    assert column(texts, "SELECT count(*) FROM pg_attribute WHERE attrelid = 'texts'::regclass AND attname = 'e'") == [
        0
    ]


@pytest.mark.parametrize("routine", ROUTINES)
@pytest.mark.parametrize(
    ("source", "target", "options", "sqlstate"),
    [
        ("texts.q", "public.texts.o", None, "22023"),
        ("public.texts.q", "o", None, "22023"),
        (None, "public.texts.o", None, "22023"),
        ("a.b.c.d", "public.texts.o", None, "22023"),
        ("public.nothing.q", "public.texts.o", None, "42P01"),
        ("public.texts.nothing", "public.texts.o", None, "42703"),
        ("public.texts.q", "nowhere.texts.o", None, "3F000"),
        ("public.keyless.q", "public.keyless.o", None, "22023"),
        ("public.texts.q", "public.texts.q", None, "22023"),
        ("public.texts.q", "public.other.o", None, "22023"),
        ("public.texts.q", "public.texts.o", {"batch_size": 0}, "22023"),
        ("public.texts.q", "public.texts.o", [], "22023"),
    ],
)
def test_bad_arguments_are_said_before_anything_is_made(
    texts: Connection, routine: str, source: str, target: str, options: Any, sqlstate: str
) -> None:
    texts.execute("CREATE TABLE keyless (q text); CREATE TABLE other (x integer)")
    with error(sqlstate, ours=sqlstate == "22023"):
        call(texts, routine, source, target, options)
    assert column(texts, "SELECT count(*) FROM pg_attribute WHERE attname = 'o'") == [0]


def test_a_caller_needs_the_rights_on_the_tables_only(texts: Connection, db: Database) -> None:
    asker = db.connect("asker")
    with error("42501", ours=False):
        call(asker, "ml_generate_table", "public.texts.q", "public.texts.g")
    texts.execute("GRANT SELECT ON texts TO ml_rag_user; CREATE SCHEMA own; GRANT ALL ON SCHEMA own TO ml_rag_user")
    result = call(asker, "ml_generate_table", "public.texts.q", "own.out.g")
    assert result["succeeded"] == 3


def test_embed_table_keeps_the_comment_that_was_there(texts: Connection) -> None:
    texts.execute("ALTER TABLE texts ADD e vector(16)")
    texts.execute("COMMENT ON COLUMN texts.e IS 'an old remark'")
    call(texts, "ml_embed_table", "public.texts.q", "public.texts.e")
    comment = "SELECT col_description('texts'::regclass, 3)"
    assert column(texts, comment) == ["an old remark GENAI_OPTIONS=EMBED_MODEL_ID=fake-embed"]
    with error("22023", "another model"):
        call(texts, "ml_embed_table", "public.texts.q", "public.texts.e", {"embed_model_id": "fake-embed-slow"})


def test_generate_table_makes_an_output_table_with_the_same_key(owner: Connection) -> None:
    owner.execute('CREATE TABLE "odd Table" (a text, "B b" numeric(6,2), "the.Prompt" text, PRIMARY KEY ("B b", a))')
    owner.execute("""INSERT INTO "odd Table" VALUES ('x''y', 1.5, 'hello'), ('{,"}', 1.5, 'bye')""")
    result = call(
        owner, "ml_generate_table", 'public."odd Table"."the.Prompt"', 'public."out Put".text', {"max_tokens": 4}
    )
    assert (result["rows"], result["failed"]) == (2, 0)
    rows = owner.execute('SELECT a, "B b"::text, text FROM "out Put" ORDER BY text').fetchall()
    assert [(a, b) for a, b, _ in rows] == [('{,"}', "1.50"), ("x'y", "1.50")]
    assert [row[2] for row in rows] == [
        {"text": "fake answer to: bye", "error": None},
        {"text": "fake answer to: hello", "error": None},
    ]
    key = (
        "SELECT pg_get_constraintdef(oid) FROM pg_constraint WHERE conrelid = '\"out Put\"'::regclass AND contype = 'p'"
    )
    assert column(owner, key) == ['PRIMARY KEY ("B b", a)']


def test_a_column_that_does_not_exist_is_named_with_those_that_do(owner: Connection) -> None:
    owner.execute("CREATE TABLE texts (id integer PRIMARY KEY, body text)")
    for routine in ("ml_embed_table", "ml_generate_table", "ml_rag_table"):
        with error("42703", 'column "bodi" of relation "public.texts"', "id, body", 'Did you mean "body"?'):
            owner.execute(f"CALL {routine}('public.texts.bodi', 'public.texts.result')")
    with error("42703", 'column "wholly_other"', "'schema.table.column'"):
        owner.execute("CALL ml_embed_table('public.texts.wholly_other', 'public.texts.result')")
    assert (
        column(owner, "SELECT attname FROM pg_attribute WHERE attrelid = 'texts'::regclass AND attname = 'result'")
        == []
    )
