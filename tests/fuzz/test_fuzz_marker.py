"""The comment that makes a table a vector store: whatever stands in it, every routine reads the same model from it."""

from __future__ import annotations

import psycopg
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from support import fuzzing
from support.cluster import Connection, value_of
from support.option_cases import PLAIN
from support.stores import create_store, error, fake_embedding, grant, mark, search

FULL, SHORT = 2_000, 120

TOKENS = [
    "GENAI_OPTIONS=", "EMBED_MODEL_ID=", "GENAI_OPTIONS=EMBED_MODEL_ID=fake-embed", "genai_options=embed_model_id=a",
    "fake-embed", "fake-embed-wide", "no_such_model", "OTHER=1", "{", "}", '"', "'", ",", ";", "=", " ", " ", "\t",
    "\u00a0", "\\", "%s", "$1", "(?=", "\x01", "\u202e", "é", "😀", "\n", "x" * 3000,
    "ID=", "GENAI_", "OPTIONS=", ",EMBEDDING=mine", "EMBEDDING=", "DEFAULT=true",
]  # fmt: skip
COMMENTS = st.lists(st.one_of(st.sampled_from(TOKENS), st.sampled_from(TOKENS), PLAIN), max_size=8).map("".join)
BLANKS = " \t\n\r\v\f"


def model_of(comment: str) -> str | None:
    """The marker read by hand: from GENAI_OPTIONS= to the next blank there is EMBED_MODEL_ID= with a model."""
    for word in comment.translate(str.maketrans(dict.fromkeys(BLANKS, " "))).split(" "):
        if (model := read(word)[1]) is not None:
            return model
    return None


def read(word: str) -> tuple[str, str | None]:
    """The part of a word that is a marker, and its model: what stands behind the first GENAI_OPTIONS= that has one."""
    at = -1
    while (at := word.find("GENAI_OPTIONS=", at + 1)) >= 0:
        run = word[at + len("GENAI_OPTIONS=") :]
        for entry in run.replace(";", ",").split(","):
            key, _, model = entry.partition("=")
            if key == "EMBED_MODEL_ID" and model and "=" not in model:
                return run, model
    return "", None


def name_of(comment: str) -> str | None:
    """The value of EMBEDDING= in that run, whatever stands between it and the model."""
    for word in comment.translate(str.maketrans(dict.fromkeys(BLANKS, " "))).split(" "):
        run, model = read(word)
        if model is not None:
            entries = run.replace("GENAI_OPTIONS=", ",").replace(";", ",").split(",")
            return next((e.removeprefix("EMBEDDING=") for e in entries if e.startswith("EMBEDDING=")), "") or None
    return None


@pytest.fixture(scope="module")
def stores(module_owner: Connection) -> Connection:
    """Store ``docs`` as it should be; table ``odd`` to be commented on; table ``bare`` without embeddings."""
    rows = [("a", 1, i, text, fake_embedding(text)) for i, text in enumerate(["one two three", "two", "four"])]
    create_store(module_owner, "docs", rows, type="vector(16)")
    create_store(module_owner, "odd", rows, type="vector(16)", model=None)
    module_owner.execute("CREATE TABLE bare (id integer PRIMARY KEY, segment text, segment_embedding vector(16))")
    module_owner.execute("INSERT INTO bare VALUES (1, 'one two')")
    grant(module_owner, "bare")
    module_owner.execute("SET client_min_messages = error")
    return module_owner


def discovered(connection: Connection) -> dict[str, str]:
    rows = connection.execute("SELECT vector_store, embed_model_id FROM ml_rag.discover()").fetchall()
    return dict(rows)


def test_every_comment_is_read_alike_by_all_routines(stores: Connection) -> None:
    models: set[str | None] = set()
    with fuzzing.target("marker comment", full=FULL, short=SHORT) as account:

        @fuzzing.examples(account.wanted)
        @given(comment=COMMENTS)
        @example(comment="GENAI_OPTIONS=A GENAI_OPTIONS=EMBED_MODEL_ID=fake-embed")
        @example(comment="GENAI_OPTIONS=EMBED_MODEL_ID=fake-embed,EMBED_MODEL_ID=x")
        @example(comment="x" * 12_000)
        @example(comment="made by hand\nGENAI_OPTIONS=EMBED_MODEL_ID=fake-embed\nby me")
        def run(comment: str) -> None:
            if not account.next():
                return
            mark(stores, "odd", comment)
            model = model_of(comment)
            models.add(model)
            found = discovered(stores)
            assert found.pop("public.docs") == "fake-embed"
            assert found == ({} if model is None else {"public.odd": model})
            # what others write into their comments is not felt by those who do not name the store
            assert search(stores, "one two")[0][3:6] == (1, 0, "one two three")
            named = {"vector_store": ["odd"]}
            if model == "fake-embed":
                assert search(stores, "one two", named)[0][5] == "one two three"
            elif model is None:
                with error("P0002", "no vector store found"):
                    search(stores, "one two", named)
            else:
                with pytest.raises(psycopg.Error) as caught:
                    search(stores, "one two", named)
                assert caught.value.diag.sqlstate in ("22023", "22000", "55000"), caught.value
            check_loading(stores, model)
            check_embedding(stores, comment, model)
            check_name(stores, comment, model)

        run()
        account.coverage = f"{len(models)} models read"


def check_name(connection: Connection, comment: str, model: str | None) -> None:
    """The name of an embedding is read from the marker that names its model, and written into that."""
    read = "SELECT ml_rag._marked_key(%s, 'EMBEDDING')"
    assert connection.execute(read, (comment,)).fetchone() == (name_of(comment),)
    for is_default in (False, True):
        write = "SELECT ml_rag._mark_keys(%s, jsonb_build_object('EMBEDDING', 'a.b', 'DEFAULT', nullif(%s, false)))"
        row = connection.execute(write, (comment, is_default)).fetchone()
        assert row is not None
        assert model_of(row[0]) == model
        if model is not None:
            assert connection.execute(read, row).fetchone() == ("a.b",)
            default = connection.execute("SELECT ml_rag._marked_key(%s, 'DEFAULT')", row).fetchone()
            assert default == ("true" if is_default else None,)


def check_loading(connection: Connection, model: str | None) -> None:
    """``load_documents`` takes the store for one of that model."""
    with connection.transaction(force_rollback=True):
        if model is None:
            with error("22023", "names its embedding model"):
                load(connection)
        elif model == "fake-embed":
            load(connection)
        else:
            with error("22023", "holds vectors of another model"):
                load(connection)


def load(connection: Connection) -> None:
    options = '{"embed_model_id": "fake-embed"}'
    with connection.transaction():
        connection.execute("SELECT ml_rag.load_document('odd', 'b', 'five', %s)", (options,))


def check_embedding(connection: Connection, comment: str, model: str | None) -> None:
    """``ml_embed_table`` keeps a marker of the same model, refuses another's, and adds one where there is none."""
    mark(connection, "bare", comment)
    with connection.transaction(force_rollback=True):
        call = "CALL ml_embed_table('public.bare.segment', 'public.bare.segment_embedding')"
        if model in (None, "fake-embed"):
            connection.execute(call)
            found = value_of(connection, "SELECT col_description('bare'::regclass, 3)")
            assert found.startswith(comment) or (len(comment) > 9000 and found.endswith(comment)), found
            assert (found == comment) == (model is not None)
            assert discovered(connection)["public.bare"] == "fake-embed", found
        else:
            with error("22023", "holds vectors of another model"), connection.transaction():
                connection.execute(call)
    mark(connection, "bare", "")
