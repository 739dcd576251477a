"""ground/parse, pipeline/embed: option dimensions, by which the vectors of a model are cut, wherever it is taken."""

from __future__ import annotations

import json
import math

import pytest

from support.cluster import Connection, Database
from support.embedding import embed
from support.stores import error, fake_embedding
from support.tables import call, make_texts

MODEL = "fake-embed-matryoshka"


def cut(text: str, dimensions: int) -> list[float]:
    kept = fake_embedding(text)[:dimensions]
    length = math.hypot(*kept) or 1
    return [x / length for x in kept]


def marked(connection: Connection, relation: str, column: str) -> tuple[str, str]:
    """Type and comment of a column."""
    row = connection.execute(
        "SELECT format_type(a.atttypid, a.atttypmod), col_description(a.attrelid, a.attnum) FROM pg_attribute AS a"
        " WHERE a.attrelid = %s::regclass AND a.attname = %s",
        (relation, column),
    ).fetchone()
    assert row is not None
    return row


def given(**options: object) -> str:
    return json.dumps(options)


TEXT = " ".join(f"word{i}" for i in range(30))


def test_a_row(module_asker: Connection) -> None:
    for n in (4, 9, 16):
        assert embed(module_asker, TEXT, embed_model_id=MODEL, dimensions=n) == pytest.approx(cut(TEXT, n), abs=1e-6)
        assert embed(module_asker, TEXT, embed_model_id=f"{MODEL}@{n}") == pytest.approx(cut(TEXT, n), abs=1e-6)
    # said twice
    assert len(embed(module_asker, TEXT, embed_model_id=f"{MODEL}@4", dimensions=4)) == 4
    # the default model, which is not for it
    assert len(embed(module_asker, TEXT, dimensions=16)) == 16


@pytest.mark.parametrize("n", [3, 17])
def test_outside_of_the_range(module_asker: Connection, n: int) -> None:
    with error("22023", f"cannot be cut to {n} dimensions") as caught:
        embed(module_asker, TEXT, embed_model_id=MODEL, dimensions=n)
    assert caught.detail == "They can have 4 to 16."


@pytest.mark.parametrize("options", [{"dimensions": 8}, {"embed_model_id": "all_minilm_l6_v2", "dimensions": 256}])
def test_a_model_that_was_not_trained_for_it(module_asker: Connection, options: dict[str, object]) -> None:
    with error("22023", "cannot be cut") as caught:
        embed(module_asker, TEXT, **options)
    assert "the model was not trained for fewer (Matryoshka)" in caught.detail
    assert "ml-rag models list" in caught.hint


def test_a_store_and_its_questions(owner: Connection, db: Database) -> None:
    owner.execute("SELECT ml_rag.create_store('public.small', %s::jsonb)", (given(embed_model_id=MODEL, dimensions=5),))
    assert marked(owner, "public.small", "segment_embedding") == (
        "vector(5)",
        f"GENAI_OPTIONS=EMBED_MODEL_ID={MODEL}@5",
    )
    owner.execute(
        "INSERT INTO public.small SELECT 'd', '{}', n, 1, t, ml_rag.embed(t, %s, 'document')"
        " FROM unnest(%s::text[]) WITH ORDINALITY AS u (t, n)",
        (f"{MODEL}@5", [TEXT]),
    )
    owner.execute("GRANT SELECT ON public.small TO PUBLIC")
    with db.connect("asker") as asker:
        for question in (TEXT, " ".join(TEXT.split()[:15])):
            expected = 1 - sum(a * b for a, b in zip(cut(TEXT, 5), cut(question, 5), strict=True))
            found = asker.execute(
                "SELECT segment, distance::float8 FROM ml_rag_search(%s, %s)",
                (question, given(vector_store=["public.small"], retrieval_options={"max_distance": 2})),
            ).fetchall()
            assert found == [(TEXT, pytest.approx(expected, abs=1e-4))]
    with error("22023", "another model"):
        owner.execute("SELECT ml_rag.create_store('public.small', %s::jsonb)", (given(embed_model_id=MODEL),))


def test_a_store_of_a_model_that_is_not_for_it(owner: Connection) -> None:
    with error("22023", "cannot be cut to 256"):
        owner.execute(
            'SELECT ml_rag.create_store(\'public.none\', \'{"embed_model_id": "all_minilm_l6_v2", "dimensions": 256}\')'
        )
    assert owner.execute("SELECT to_regclass('public.none')").fetchone() == (None,)


def test_a_table_another_embedding_and_a_vectorizer(owner: Connection) -> None:
    make_texts(owner)
    options = {"embed_model_id": MODEL, "dimensions": 6}
    call(owner, "ml_embed_table", "public.texts.q", "public.texts.e", options)
    assert marked(owner, "public.texts", "e") == ("vector(6)", f"GENAI_OPTIONS=EMBED_MODEL_ID={MODEL}@6")
    owner.execute("SELECT ml_rag.create_store('public.more')")
    owner.execute("INSERT INTO public.more SELECT 'd', '{}', 1, 1, 'a b', ml_rag.embed('a b')")
    owner.execute(
        "CALL ml_rag.add_embedding('public.more', 'small', %s::jsonb)",
        (given(embed_model_id=MODEL, dimensions=7),),
    )
    type_, comment = marked(owner, "public.more", "segment_embedding_small")
    assert type_ == "vector(7)"
    assert f"EMBED_MODEL_ID={MODEL}@7" in comment
    owner.execute("CREATE TABLE public.goods (id int PRIMARY KEY, name text)")
    owner.execute(
        "SELECT ml_rag.create_vectorizer('public.goods', %s::jsonb)",
        (given(columns="name", embed_model_id=MODEL, dimensions=8),),
    )
    assert owner.execute("SELECT dimensions, embed_model_id FROM ml_rag.embeddings('public.goods')").fetchone() == (
        8,
        f"{MODEL}@8",
    )


def test_the_default_model_of_a_database(owner: Connection) -> None:
    owner.execute("SELECT ml_rag.configure('embed_model_id', %s)", (f"{MODEL}@4",))
    assert embed(owner, TEXT) == pytest.approx(cut(TEXT, 4), abs=1e-6)
    assert owner.execute(
        "SELECT model_id FROM ml_supported_models() WHERE task = 'embed' AND is_default"
    ).fetchall() == [(MODEL,)]
