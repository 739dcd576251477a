"""store/adopt: tables of vectors that other programs made, and markers that name columns.

The tables are those that langchain-postgres 0.0.x, LlamaIndex 0.10 and later, pgai 0.10 and Haystack 2 create, in our
words.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from support import vectorizers
from support.cluster import Connection, Database, noticed, value_of
from support.embeddings import comment_on
from support.stores import answer, as_text, create_store, error, fake_embedding, grant, mark, names, search

TEXTS = ["heron by the river", "otter in the stone", "moss on the pine"]
SHAPES = {
    "langchain-postgres PGVector": (
        "langchain_pg_embedding",
        "CREATE TABLE langchain_pg_collection (uuid uuid PRIMARY KEY, name varchar NOT NULL UNIQUE, cmetadata json);"
        "CREATE TABLE langchain_pg_embedding (id varchar PRIMARY KEY, collection_id uuid REFERENCES"
        " langchain_pg_collection (uuid) ON DELETE CASCADE, embedding vector, document varchar, cmetadata jsonb);"
        "INSERT INTO langchain_pg_collection VALUES ('00000000-0000-0000-0000-000000000001', 'birds'),"
        " ('00000000-0000-0000-0000-000000000002', 'other beasts')",
        "INSERT INTO langchain_pg_embedding VALUES"
        " (%(id)s, '00000000-0000-0000-0000-000000000001', %(vector)s, %(text)s, %(metadata)s)",
        {"segment": "document", "metadata": "cmetadata", "document_id": "id"},
    ),
    "langchain-postgres PGVectorStore": (
        "texts",
        "CREATE TABLE texts (langchain_id uuid PRIMARY KEY DEFAULT gen_random_uuid(), content text NOT NULL,"
        " embedding vector(16) NOT NULL, source varchar, langchain_metadata json)",
        "INSERT INTO texts (content, embedding, source, langchain_metadata)"
        " VALUES (%(text)s, %(vector)s, %(id)s, %(metadata)s)",
        {
            "segment": "content",
            "metadata": "langchain_metadata",
            "document_id": "langchain_id",
            "document_name": "source",
        },
    ),
    "LlamaIndex": (
        "data_texts",
        "CREATE TABLE data_texts (id bigserial PRIMARY KEY, text varchar NOT NULL, metadata_ json, node_id varchar,"
        " embedding vector(16), text_search_tsv tsvector GENERATED ALWAYS AS (to_tsvector('english', text)) STORED)",
        "INSERT INTO data_texts (text, metadata_, node_id, embedding)"
        " VALUES (%(text)s, %(metadata)s, %(id)s, %(vector)s)",
        {"segment": "text", "metadata": "metadata_", "document_id": "node_id"},
    ),
    "pgai": (
        "blog_embedding_store",
        "CREATE TABLE blog_embedding_store (embedding_uuid uuid PRIMARY KEY DEFAULT gen_random_uuid(),"
        " id text NOT NULL,"
        " chunk_seq integer NOT NULL, chunk text NOT NULL, embedding vector(16) NOT NULL, UNIQUE (id, chunk_seq))",
        "INSERT INTO blog_embedding_store (id, chunk_seq, chunk, embedding) VALUES (%(id)s, 0, %(text)s, %(vector)s)",
        {"segment": "chunk", "segment_number": "chunk_seq", "document_id": "id"},
    ),
    "Haystack": (
        "haystack_documents",
        "CREATE TABLE haystack_documents (id varchar(128) PRIMARY KEY, embedding vector(16), content text,"
        " blob_data bytea, blob_meta jsonb, blob_mime_type varchar(255), meta jsonb)",
        "INSERT INTO haystack_documents (id, content, embedding, meta)"
        " VALUES (%(id)s, %(text)s, %(vector)s, %(metadata)s)",
        {"segment": "content", "metadata": "meta", "document_id": "id"},
    ),
    "columns by their names": (
        "documents",
        "CREATE TABLE documents (id bigserial PRIMARY KEY, content text, metadata jsonb, embedding halfvec(16))",
        "INSERT INTO documents (content, metadata, embedding) VALUES (%(text)s, %(metadata)s, %(vector)s)",
        {"segment": "content", "metadata": "metadata", "document_id": "id"},
    ),
}


def make(owner: Connection, kind: str) -> str:
    """A table of that kind with three rows; its name."""
    name, create, insert, _ = SHAPES[kind]
    owner.execute(create)
    for i, text in enumerate(TEXTS):
        metadata = json.dumps({"n": i, "kind": kind})
        owner.execute(
            insert, {"id": f"x{i}", "text": text, "vector": as_text(fake_embedding(text)), "metadata": metadata}
        )
    grant(owner, name)
    return name


def adopt(connection: Connection, name: str, **options: Any) -> Any:
    return value_of(connection, "SELECT ml_rag.adopt(%s::regclass, %s)", (name, json.dumps(options)))


@pytest.mark.parametrize("kind", SHAPES)
def test_what_other_programs_leave_behind(db: Database, owner: Connection, asker: Connection, kind: str) -> None:
    """Adopted with one call, found without options, searched, filtered, cited by its own keys."""
    name = make(owner, kind)
    with error("22023", "model", "not known"):
        adopt(owner, name)
    assert names(asker) == []
    result = adopt(owner, name, embed_model_id="fake-embed")
    assert result == {
        "vector_store": f"public.{name}",
        "made_by": kind,
        "embed_model_id": "fake-embed",
        "columns": {"segment_embedding": "embedding", **SHAPES[kind][3]},
        "checked": 3,
        "least_similarity": 1,
    }
    assert names(asker) == [f"public.{name}"]
    found = answer(asker, "otter in the stone", {"skip_generate": True, "citation_fields": ["metadata", "document_id"]})
    assert found["citations"][0]["segment"] == TEXTS[1]
    assert found["citations"][0]["distance"] == 0
    if "metadata" in SHAPES[kind][3]:
        assert found["citations"][0]["metadata"] == {"n": 1, "kind": kind}
        rows = search(asker, "otter in the stone", {"filters": {"n": 2}})
        assert [row[5] for row in rows] == [TEXTS[2]]
    if kind not in ("langchain-postgres PGVectorStore", "columns by their names"):
        assert found["citations"][0]["document_id"] == "x1"
    # again, with what is known by now
    assert adopt(owner, name) == result


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({"source": "/docs/birds.pdf", "title": "Birds"}, "/docs/birds.pdf"),
        ({"source": "", "file_path": "/a/b.txt", "file_name": "b.txt"}, "/a/b.txt"),
        ({"file_name": "b.txt"}, "b.txt"),
        ({"url": "https://example.org/b", "title": "Birds"}, "https://example.org/b"),
        ({"title": "Birds", "source": None}, "Birds"),
        ({"page": 3}, "public.langchain_pg_embedding"),
        ([], "public.langchain_pg_embedding"),
        (None, "public.langchain_pg_embedding"),
    ],
)
def test_a_document_is_called_what_its_metadata_say(
    db: Database, owner: Connection, asker: Connection, metadata: Any, expected: str
) -> None:
    name = make(owner, "langchain-postgres PGVector")
    owner.execute(f"UPDATE {name} SET cmetadata = %s WHERE id = 'x1'", (metadata and json.dumps(metadata),))
    adopt(owner, name, embed_model_id="fake-embed")
    owner.execute(f"SELECT ml_rag.enable_keyword_search('{name}', '{{\"segment\": \"document\"}}')")
    for options in ({}, {"keyword_search": True}, {"semantic_search": False, "keyword_search": True}):
        found = search(asker, TEXTS[1], options)
        assert (found[0][2], found[0][5]) == (expected, TEXTS[1])
    others = ["public.langchain_pg_embedding"] * 2
    assert sorted(row[2] for row in search(asker, "q")) == sorted([expected, *others])
    is_alone = expected not in others
    assert len(search(asker, "q", {"document_name": [expected]})) == (1 if is_alone else 3)
    if is_alone:
        rest = search(asker, "q", {"exclude_document_name": [expected]})
        assert sorted(row[5] for row in rest) == sorted([TEXTS[0], TEXTS[2]])


def test_tables_of_all_shapes_are_searched_together(db: Database, owner: Connection, asker: Connection) -> None:
    stores = [make(owner, kind) for kind in SHAPES]
    for name in stores:
        adopt(owner, name, embed_model_id="fake-embed")
    create_store(owner, "usual", [("d", 1, 1, TEXTS[0], fake_embedding(TEXTS[0]))], type="vector(16)")
    rows = search(asker, TEXTS[0], {"n_citations": 7})
    assert sorted(row[1] for row in rows) == sorted(f"public.{name}" for name in [*stores, "usual"])
    assert {row[5] for row in rows} == {TEXTS[0]}


def test_a_table_without_a_keyword_index_is_told_how_to_get_one(owner: Connection) -> None:
    hints = noticed(owner, lambda notice: notice.message_hint or "")
    owner.execute(
        "CREATE TABLE notes (id integer PRIMARY KEY, content text, embedding vector(16));"
        "INSERT INTO notes VALUES (1, 'heron', ml_rag.embed('heron', 'fake-embed'))"
    )
    adopt(owner, "notes", embed_model_id="fake-embed")
    (hint,) = hints
    owner.execute(hint.removeprefix("To search it by words, too: ").encode())
    found = search(owner, "heron", {"vector_store": ["notes"], "keyword_search": True, "semantic_search": False})
    assert len(found) == 1
    adopt(owner, "notes", embed_model_id="fake-embed")
    assert hints == [hint]


def test_where_a_program_goes_on_writing(db: Database, owner: Connection, asker: Connection) -> None:
    name = make(owner, "LlamaIndex")
    adopt(owner, name, embed_model_id="fake-embed")
    insert = SHAPES["LlamaIndex"][2]
    new = {"id": "y", "text": "a snipe", "vector": as_text(fake_embedding("a snipe")), "metadata": None}
    owner.execute(insert, new)
    assert search(asker, "a snipe")[0][5] == "a snipe"
    owner.execute(
        "UPDATE data_texts SET text = 'a rail', embedding = %s WHERE node_id = 'y'",
        (as_text(fake_embedding("a rail")),),
    )
    assert search(asker, "a rail")[0][5] == "a rail"
    owner.execute("DELETE FROM data_texts WHERE node_id = 'y'")
    assert len(search(asker, "a rail", {"n_citations": 9})) == 3


def test_one_collection(db: Database, owner: Connection, asker: Connection) -> None:
    name = make(owner, "langchain-postgres PGVector")
    other = as_text(fake_embedding("a badger"))
    owner.execute(
        "INSERT INTO langchain_pg_embedding VALUES ('b', '00000000-0000-0000-0000-000000000002', %s, 'a badger', '{}')",
        (other,),
    )
    for _ in range(2):
        result = adopt(owner, name, embed_model_id="fake-embed", collection="other beasts")
        assert (result["vector_store"], result["checked"]) == ('public."other beasts"', 1)
    grant(owner, "other beasts")
    assert comment_on(owner, name, "embedding") is None
    assert [row[5] for row in search(asker, "a badger", {"n_citations": 9})] == ["a badger"]
    owner.execute("CREATE TABLE birds ()")
    with error("42P07", "birds", "not a view", '"view"'):
        adopt(owner, name, embed_model_id="fake-embed", collection="birds")
    adopt(owner, name, embed_model_id="fake-embed", collection="birds", view="avian")
    grant(owner, "avian")
    assert {row[5] for row in search(asker, "q", {"n_citations": 9, "vector_store": ["public.avian"]})} == set(TEXTS)
    # rights and policies are those of the table
    owner.execute("ALTER TABLE langchain_pg_embedding ENABLE ROW LEVEL SECURITY")
    version = owner.info.server_version
    if version >= 150000:
        with error("P0002"):
            search(asker, "q", {"vector_store": ["public.avian"]})
    with error("22023", "collection", "langchain_pg_collection") as caught:
        adopt(owner, name, embed_model_id="fake-embed", collection="fish")
    assert caught.hint == 'It has: "birds", "other beasts".'
    with error("22023", "view"):
        adopt(owner, name, embed_model_id="fake-embed", view="x")
    # cut off, both would have one view, and those who may read it the one as the other
    for collection in ("é" * 32, "x" * 63 + "a"):
        owner.execute("INSERT INTO langchain_pg_collection VALUES (gen_random_uuid(), %s)", (collection,))
        with error("22023", '"view"', "at most 63 bytes", 'name the view in "view"'):
            adopt(owner, name, embed_model_id="fake-embed", collection=collection)
        with error("22023", '"view"', "at most 63 bytes"):
            adopt(owner, name, embed_model_id="fake-embed", collection="birds", view=collection)
        adopt(owner, name, embed_model_id="fake-embed", collection=collection, view="short")
    # the call names the table of embeddings only: another owner's table of collections may be a view with code in it
    owner.execute(f"ALTER TABLE langchain_pg_collection OWNER TO {db.role('tenant')}")
    with error("22023", "same owner"):
        adopt(owner, name, embed_model_id="fake-embed", collection="birds")
    make(owner, "Haystack")
    with error("22023", "collection"):
        adopt(owner, "haystack_documents", embed_model_id="fake-embed", collection="birds")


# -- what is checked ---------------------------------------------------------------------------------------------------


def test_vectors_of_another_model(db: Database, owner: Connection) -> None:
    name = make(owner, "Haystack")
    owner.execute("UPDATE haystack_documents SET embedding = %s WHERE id = 'x1'", (as_text(fake_embedding("heron")),))
    with error("22023", "does not make the vectors", "Of 3 rows"):
        adopt(owner, name, embed_model_id="fake-embed")
    assert comment_on(owner, name, "embedding") is None
    result = adopt(owner, name, embed_model_id="fake-embed", sample=0)
    assert (result["checked"], result["least_similarity"]) == (0, None)
    owner.execute("DELETE FROM haystack_documents WHERE id = 'x1'")
    assert adopt(owner, name, embed_model_id="fake-embed", sample=1)["checked"] == 1
    with error("22023", "sample"):
        adopt(owner, name, embed_model_id="fake-embed", sample=1001)
    for sample in (-1, 1.5, "all"):
        with error("22023", "sample"):
            adopt(owner, name, embed_model_id="fake-embed", sample=sample)


def test_rows_are_taken_from_the_whole_table(owner: Connection) -> None:
    owner.execute("CREATE TABLE documents (content text, embedding vector(16))")
    with owner.cursor() as cursor:
        rows = [(f"text {n}", as_text(fake_embedding(f"text {n}" if n < 20 else "alien"))) for n in range(40)]
        cursor.executemany("INSERT INTO documents VALUES (%s, %s)", rows)
    for _ in range(6):
        with error("22023", "does not make the vectors", "Of 16 rows embedded again"):
            adopt(owner, "documents", embed_model_id="fake-embed")
    owner.execute("DELETE FROM documents WHERE split_part(content, ' ', 2)::integer >= 20")
    assert adopt(owner, "documents", embed_model_id="fake-embed")["checked"] == 16


def test_each_collection_is_checked_by_itself(owner: Connection) -> None:
    name = make(owner, "langchain-postgres PGVector")
    birds, others = (f"00000000-0000-0000-0000-00000000000{n}" for n in (1, 2))
    insert = "INSERT INTO langchain_pg_embedding VALUES (%s, %s, %s, %s, '{}')"
    for n in range(100):
        owner.execute(insert, (f"b{n}", birds, as_text(fake_embedding(f"bird {n}")), f"bird {n}"))
    owner.execute(insert, ("o1", others, as_text(fake_embedding("alien")), "a badger"))
    for _ in range(3):
        with error("22023", f"Of 1 rows where collection_id is '{others}'"):
            adopt(owner, name, embed_model_id="fake-embed")
    assert adopt(owner, name, embed_model_id="fake-embed", collection="birds")["checked"] == 16
    owner.execute(
        "UPDATE langchain_pg_embedding SET embedding = %s WHERE id = 'o1'", (as_text(fake_embedding("a badger")),)
    )
    owner.execute(insert, ("n1", None, as_text(fake_embedding("none")), "none"))
    assert adopt(owner, name, embed_model_id="fake-embed", sample=2)["checked"] == 2 + 1 + 1
    owner.execute("DELETE FROM langchain_pg_embedding WHERE collection_id IS NOT NULL")
    owner.execute("UPDATE langchain_pg_embedding SET embedding = %s", (as_text(fake_embedding("alien")),))
    with error("22023", "Of 1 rows where collection_id is NULL"):
        adopt(owner, name, embed_model_id="fake-embed")


def test_a_vector_among_others_that_is_of_zeros_or_other_dimensions(owner: Connection) -> None:
    owner.execute("CREATE TABLE documents (content text, embedding vector)")
    for text, vector in (("heron", fake_embedding("heron")), ("otter", [0.0] * 16)):
        owner.execute("INSERT INTO documents VALUES (%s, %s)", (text, as_text(vector)))
    with error("22023", "a similarity of 0.0000"):
        adopt(owner, "documents", embed_model_id="fake-embed")
    owner.execute("UPDATE documents SET embedding = '[1,2,3]' WHERE content = 'otter'")
    with error("22023", "They have 3 dimensions"):
        adopt(owner, "documents", embed_model_id="fake-embed")


@pytest.mark.parametrize(("angle", "fits"), [(0.139, True), (0.145, False)])
def test_just_past_the_least_similarity(db: Database, owner: Connection, angle: float, fits: bool) -> None:
    """cos 0.139 is 0.9904, cos 0.145 is 0.9895."""
    vector = np.array(fake_embedding("heron"))
    other = np.zeros(16)
    other[int(np.argmin(vector))] = 1
    owner.execute("CREATE TABLE documents (content text, embedding vector(16))")
    turned = as_text(list(np.cos(angle) * vector + np.sin(angle) * other))
    owner.execute("INSERT INTO documents VALUES ('heron', %s)", (turned,))
    if fits:
        assert adopt(owner, "documents", embed_model_id="fake-embed")["least_similarity"] == 0.9904
    else:
        with error("22023", "0.9895"):
            adopt(owner, "documents", embed_model_id="fake-embed")


def test_dimensions_of_another_model_and_models_that_are_none(db: Database, owner: Connection) -> None:
    owner.execute("CREATE TABLE documents (content text, embedding vector(3))")
    owner.execute("INSERT INTO documents VALUES ('x', '[1,2,3]')")
    with error("22023", "They have 3 dimensions, those of the model have 16"):
        adopt(owner, "documents", embed_model_id="fake-embed")
    with error("22023", "nonsense"):
        adopt(owner, "documents", embed_model_id="nonsense")
    with error("22023", "embed_model_id"):
        adopt(owner, "documents", embed_model_id="a b")
    # nothing to compare
    owner.execute(
        "DELETE FROM documents; INSERT INTO documents VALUES (NULL, '[1,2,3]'), (' ', '[1,2,3]'), ('x', NULL)"
    )
    assert adopt(owner, "documents", embed_model_id="fake-embed")["checked"] == 0


@pytest.mark.parametrize(
    ("columns", "given", "message"),
    [
        ("content text", {}, "which column holds the embeddings"),
        ("content text, a vector(16), b vector(16)", {}, "which column holds the embeddings"),
        ("words text, embedding vector(16)", {}, "which column holds the texts"),
        ("content text, embedding vector(16)", {"segment": "words"}, "vector_store_columns"),
        ("content text, embedding vector(16)", {"segment_embedding": "content"}, "vector_store_columns"),
        ("id integer, embedding vector(16)", {"segment": "id"}, "a column of type text"),
        ("content text, embedding vector(16)", {"segments": "content"}, "segments"),
        ('"my, text" text, embedding vector(16)', {"segment": "my, text"}, "cannot stand in a marker"),
    ],
)
def test_columns_that_are_not_known(
    db: Database, owner: Connection, columns: str, given: dict[str, str], message: str
) -> None:
    owner.execute(f"CREATE TABLE t ({columns})")
    with error("22023", message):
        adopt(owner, "t", embed_model_id="fake-embed", vector_store_columns=given)


def test_columns_that_are_named(db: Database, owner: Connection, asker: Connection) -> None:
    owner.execute('CREATE TABLE t (words text, "Title" text, a vector(16), "b c" vector(16), content text)')
    near = as_text(fake_embedding("heron"))
    owner.execute(
        "INSERT INTO t VALUES ('heron', 'Birds', NULL, %s, 'no'), ('tern', 'Birds', NULL, NULL, 'no')", (near,)
    )
    owner.execute("COMMENT ON COLUMN t.\"b c\" IS 'made by hand'")
    given = {"segment": "words", "segment_embedding": "b c"}
    adopt(owner, "t", embed_model_id="fake-embed", vector_store_columns=given)
    assert comment_on(owner, "t", "b c") == (
        "made by hand GENAI_OPTIONS=EMBED_MODEL_ID=fake-embed,DOCUMENT_NAME=Title,SEGMENT=words"
    )
    grant(owner, "t")
    assert [(row[2], row[5]) for row in search(asker, "heron")] == [("Birds", "heron")]
    # the call's columns go before those of the marker
    rows = search(
        asker,
        "heron",
        {"vector_store_columns": {"segment_embedding": "b c", "segment": "content"}, "vector_store": ["t"]},
    )
    assert [(row[2], row[5]) for row in rows] == [("Birds", "no")]


def test_who_may_adopt_what(db: Database, owner: Connection, asker: Connection) -> None:
    name = make(owner, "Haystack")
    with error("42501"):
        adopt(asker, name, embed_model_id="fake-embed")
    owner.execute("REVOKE SELECT ON haystack_documents FROM ml_rag_user")
    with error("42501"):
        adopt(asker, name, embed_model_id="fake-embed")
    with error("42809", "not a table"):
        adopt(owner, "haystack_documents_pkey", embed_model_id="fake-embed")
    with error("42P01"):
        owner.execute("SELECT ml_rag.adopt(1::regclass)")
    with error("42P01"):
        owner.execute("SELECT ml_rag.adopt(NULL)")
    with error("25006"), owner.transaction():
        owner.execute("SET TRANSACTION READ ONLY")
        adopt(owner, name, embed_model_id="fake-embed")


def test_views_and_partitions(db: Database, owner: Connection, asker: Connection) -> None:
    owner.execute("CREATE TABLE parts (id integer, content text, embedding vector(16)) PARTITION BY RANGE (id)")
    owner.execute("CREATE TABLE part PARTITION OF parts FOR VALUES FROM (0) TO (9)")
    owner.execute("INSERT INTO parts VALUES (1, 'heron', %s)", (as_text(fake_embedding("heron")),))
    owner.execute("CREATE VIEW seen AS SELECT content || '' AS text, embedding FROM parts")
    for name in ("parts", "seen"):
        assert adopt(owner, name, embed_model_id="fake-embed")["checked"] == 1
        grant(owner, name)
    assert [row[1] for row in search(asker, "heron")] == ["public.parts", "public.seen"]


# -- markers that name columns -----------------------------------------------------------------------------------------


def test_a_marker_written_by_hand(db: Database, owner: Connection, asker: Connection) -> None:
    owner.execute("CREATE TABLE t (key text, title text, content text, meta jsonb, place integer, v vector(16))")
    for i, text in enumerate(TEXTS):
        owner.execute(
            "INSERT INTO t VALUES ('k', 'Title', %s, '{\"a\": 1}', %s, %s)", (text, i, as_text(fake_embedding(text)))
        )
    marker = (
        "GENAI_OPTIONS=EMBED_MODEL_ID=fake-embed,SEGMENT=content,DOCUMENT_NAME=title,METADATA=meta,SEGMENT_NUMBER=place"
    )
    mark(owner, "t", marker + ",DOCUMENT_ID=key", "v")
    grant(owner, "t")
    overlap = {"retrieval_options": {"segment_overlap": 1}, "n_citations": 1}
    (row,) = search(asker, TEXTS[1], overlap)
    assert (row[2], row[5].split("\n"), row[7]) == ("Title", TEXTS, {"a": 1})
    # a column that it names and that is not there
    mark(owner, "t", marker.replace("content", "nowhere"), "v")
    assert names(asker) == []
    notices = noticed(asker, lambda notice: notice.message_detail or "")
    with error("P0002"):
        search(asker, "q", {"vector_store": ["public.t"]})
    assert notices == ["It has no column nowhere."]


def test_names_that_begin_alike(db: Database, owner: Connection, asker: Connection) -> None:
    """SEGMENT_NUMBER alone does not make a column the embedding, nor does a model whose name has SEGMENT= in it."""
    owner.execute("CREATE TABLE t (segment text, n integer, v vector(16))")
    mark(owner, "t", "GENAI_OPTIONS=EMBED_MODEL_ID=fake-embed,SEGMENT_NUMBER=n", "v")
    grant(owner, "t")
    assert names(asker) == []
    mark(owner, "t", "SEGMENT=segment GENAI_OPTIONS=EMBED_MODEL_ID=fake-embed", "v")
    assert names(asker) == []
    mark(owner, "t", "GENAI_OPTIONS=SEGMENT=segment,EMBED_MODEL_ID=fake-embed", "v")
    assert names(asker) == ["public.t"]


def test_a_further_embedding_of_an_adopted_table(db: Database, owner: Connection, asker: Connection) -> None:
    name = make(owner, "columns by their names")
    adopt(owner, name, embed_model_id="fake-embed")
    owner.execute("CALL ml_rag.add_embedding('documents', 'second')")
    owner.execute("SELECT ml_rag.use_embedding('documents', 'second')")
    (store,) = asker.execute("SELECT segment_embedding::text, segment::text FROM ml_rag.discover()").fetchall()
    assert store == ("segment_embedding_second", "content")
    assert search(asker, TEXTS[2])[0][5] == TEXTS[2]
    owner.execute("SELECT ml_rag.use_embedding('documents', 'fake-embed')")
    (store,) = asker.execute("SELECT segment_embedding::text, segment::text FROM ml_rag.discover()").fetchall()
    assert store == ("embedding", "content")


def test_a_vectorizer_of_an_adopted_table(db: Database, owner: Connection, asker: Connection) -> None:
    """Searches would read the adopted column still."""
    name = make(owner, "columns by their names")
    adopt(owner, name, embed_model_id="fake-embed")
    create = "SELECT ml_rag.create_vectorizer('documents', %s)"
    with error("55000", "has vectors already", "column embedding") as caught:
        owner.execute(create, ('{"columns": ["content"]}',))
    assert "COMMENT ON COLUMN public.documents.embedding IS NULL" in caught.hint
    owner.execute("COMMENT ON COLUMN documents.embedding IS NULL")
    owner.execute(create, ('{"columns": ["content"]}',))
    owner.execute("CALL ml_rag.run_vectorizer('documents')")
    assert search(asker, TEXTS[2])[0][5] == TEXTS[2]


def test_words_of_an_adopted_table(db: Database, owner: Connection, asker: Connection) -> None:
    name = make(owner, "columns by their names")
    adopt(owner, name, embed_model_id="fake-embed")
    owner.execute("SELECT ml_rag.enable_keyword_search('documents', '{\"segment\": \"content\"}')")
    rows = search(asker, "moss", {"semantic_search": False, "keyword_search": True})
    assert [row[5] for row in rows] == [TEXTS[2]]


@pytest.mark.parametrize("kind", ["TABLE", "VIEW"])
def test_the_hint_says_where_embeddings_come_from_where_there_are_none(owner: Connection, kind: str) -> None:
    owner.execute(f"CREATE {kind} t AS SELECT 'a'::text AS content")
    with error("22023", "which column holds the embeddings", "none") as caught:
        adopt(owner, "t", embed_model_id="fake-embed")
    assert caught.hint.startswith("ml_rag.create_vectorizer makes embeddings in a table")


def test_the_hint_for_an_index_of_words_names_a_column_that_is_there(owner: Connection) -> None:
    name = make(owner, "Haystack")
    with error("22023", "segment") as caught:
        owner.execute("SELECT ml_rag.enable_keyword_search(%s)", (name,))
    assert caught.hint == 'Name the column that holds the text: {"segment": "content"}.'
    owner.execute('SELECT ml_rag.enable_keyword_search(%s, \'{"segment": "content"}\')', (name,))


def test_a_table_with_a_vectorizer_is_a_store_already(owner: Connection) -> None:
    owner.execute("CREATE TABLE public.notes (id integer PRIMARY KEY, body text)")
    vectorizers.create(owner, "notes", "body")
    marker = "SELECT col_description('notes'::regclass, attnum) FROM pg_attribute WHERE attname = 'segment_embedding'"
    before = value_of(owner, f"{marker} AND attrelid = 'notes'::regclass")
    with error("55000", "is a vector store already", "vectorizer"):
        owner.execute("SELECT ml_rag.adopt('notes')")
    assert value_of(owner, f"{marker} AND attrelid = 'notes'::regclass") == before
