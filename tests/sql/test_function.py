"""pipeline/function: arms and rerankers that are functions of the caller's, against Python."""

from __future__ import annotations

import json
import random
import re
import threading
import time
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.types.json import Jsonb

from ml_rag.backend.load import own_segments
from support.cluster import Connection, Database, noticed, value_of
from support.loading import connect_as_loader
from support.stores import Row, answer, as_text, create_store, error, fake_embedding, grant, mark, search

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "functions.md").read_text(encoding="utf-8")
WORDS = ["heron", "grebe", "loon", "tern", "gull", "swan", "duck", "coot", "rail", "snipe"]
SEMANTIC, KEYWORD = {"search": "semantic"}, {"search": "keyword"}
ALL = {"n_citations": 100}

#: one number in each language and form: how often the first word of the query is in the segment, over its length
SIGNATURES = {
    "text": "query text, segment text",
    "texts": "query text, segments text[]",
}
FUNCTIONS = """
CREATE SCHEMA own;
CREATE FUNCTION own.sql_text(query text, segment text) RETURNS float8 LANGUAGE sql IMMUTABLE AS $f$
  SELECT count(*) FILTER (WHERE w = split_part(query, ' ', 1))::float8 / count(*)
  FROM regexp_split_to_table(segment, ' ') AS w
$f$;
CREATE FUNCTION own.sql_texts(query text, segments text[]) RETURNS float8[] LANGUAGE sql IMMUTABLE AS $f$
  SELECT array_agg(own.sql_text(query, s) ORDER BY place) FROM unnest(segments) WITH ORDINALITY AS u (s, place)
$f$;
CREATE FUNCTION own.plpgsql_text(query text, segment text) RETURNS float8 LANGUAGE plpgsql AS $f$
DECLARE
  _words text[] := string_to_array(segment, ' ');
BEGIN
  RETURN cardinality(array_positions(_words, split_part(query, ' ', 1)))::float8 / cardinality(_words);
END
$f$;
CREATE FUNCTION own.plpgsql_texts(query text, segments text[]) RETURNS float8[] LANGUAGE plpgsql VOLATILE AS $f$
DECLARE
  _scores float8[] := '{}';
  _segment text;
BEGIN
  FOREACH _segment IN ARRAY segments LOOP
    _scores := _scores || own.plpgsql_text(query, _segment);
  END LOOP;
  RETURN _scores;
END
$f$;
CREATE FUNCTION own.python_text(query text, segment text) RETURNS float8 LANGUAGE plpython3u AS $f$
words = segment.split(" ")
return words.count(query.split(" ")[0]) / len(words)
$f$;
CREATE FUNCTION own.python_texts(query text, segments text[]) RETURNS float8[] LANGUAGE plpython3u AS $f$
first = query.split(" ")[0]
return [s.split(" ").count(first) / len(s.split(" ")) for s in segments]
$f$;
CREATE FUNCTION own.sql_vector(query vector, embedding vector) RETURNS float8 LANGUAGE sql IMMUTABLE AS $f$
  SELECT query <-> embedding
$f$;
CREATE FUNCTION own.plpgsql_vectors(query vector, embeddings vector[]) RETURNS float8[] LANGUAGE plpgsql AS $f$
BEGIN
  RETURN ARRAY(SELECT query <-> e FROM unnest(embeddings) AS e);
END
$f$;
CREATE FUNCTION own.python_vectors(query vector, embeddings vector[]) RETURNS float8[] LANGUAGE plpython3u AS $f$
import json
import math
q = json.loads(query)
return [math.dist(q, json.loads(e)) for e in embeddings]
$f$;
"""


def texts_of(n: int) -> list[str]:
    rng = random.Random(9)
    return [" ".join(rng.choices(WORDS, k=rng.randint(3, 12))) for _ in range(n)]


def document(i: int, text: str) -> Row:
    return f"d{i:04}", i, 1, text, fake_embedding(text)


#: more than two batches
TEXTS = texts_of(2100)


@pytest.fixture(scope="module")
def birds(module_db: Database) -> Connection:
    owner = module_db.connect()
    owner.execute(FUNCTIONS + "GRANT USAGE ON SCHEMA own TO PUBLIC")
    create_store(owner, "docs", [document(i, text) for i, text in enumerate(TEXTS)], type="vector(16)")
    create_store(owner, "halves", [document(i, text) for i, text in enumerate(TEXTS[:50])], type="halfvec(16)")
    owner.execute("SELECT ml_rag.enable_keyword_search('docs')")
    return module_db.connect("asker")


def arm(function: str, **keys: Any) -> dict[str, Any]:
    return {"search": "function", "function": function, **keys}


def found(connection: Connection, query: str, *arms: dict[str, Any], **options: Any) -> list[tuple[str, float | None]]:
    """document_name, score"""
    given = {"vector_store": ["public.docs"], "n_citations": 100, "arms": list(arms), **options}
    return [(row[2], row[9]) for row in search(connection, query, given)]


def share(query: str, text: str) -> float:
    words = text.split(" ")
    return words.count(query.split(" ")[0]) / len(words)


def define(owner: Connection, signature: str, body: str, language: str = "sql", name: str = "f") -> str:
    """A function of schema public that everybody may execute."""
    returns = "float8[]" if "[]" in signature else "float8"
    owner.execute(
        f"CREATE OR REPLACE FUNCTION public.{name}({signature}) RETURNS {returns} LANGUAGE {language} AS $f$ {body} $f$"
    )
    return f"public.{name}"


# -- the four forms, in three languages --------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["text", "texts"])
@pytest.mark.parametrize("language", ["sql", "plpgsql", "python"])
def test_functions_of_texts(birds: Connection, language: str, form: str) -> None:
    want = sorted(((f"d{i:04}", share("heron loon", t)) for i, t in enumerate(TEXTS)), key=lambda h: (-h[1], h[0]))
    assert found(birds, "heron loon", arm(f"own.{language}_{form}")) == want[:100]


@pytest.mark.parametrize("function", ["sql_vector", "plpgsql_vectors", "python_vectors"])
@pytest.mark.parametrize("store", ["docs", "halves"])
def test_functions_of_vectors(birds: Connection, function: str, store: str) -> None:
    got = found(
        birds, "heron loon", arm(f"own.{function}", descending=False), n_citations=20, vector_store=[f"public.{store}"]
    )
    want = search(
        birds, "heron loon", {"vector_store": [f"public.{store}"], "n_citations": 20, "distance_metric": "EUCLIDEAN"}
    )
    assert [score for _, score in got] == pytest.approx([float(row[6]) for row in want], abs=1e-3)
    assert got == sorted(got, key=lambda hit: (hit[1], hit[0]))


def test_a_vector_of_the_arm_is_searched_with(birds: Connection) -> None:
    near = fake_embedding("gull gull swan")
    got = found(birds, "heron", arm("own.sql_vector", descending=False, query_embedding=near), n_citations=5)
    assert got == found(birds, "gull gull swan", arm("own.sql_vector", descending=False), n_citations=5)
    text = arm("own.sql_vector", descending=False, query={"text": "gull gull swan"})
    assert found(birds, "heron", text, n_citations=5) == got


def test_least_first_where_it_is_not_descending(birds: Connection) -> None:
    want = sorted(((f"d{i:04}", share("heron", t)) for i, t in enumerate(TEXTS)), key=lambda h: (h[1], h[0]))
    assert found(birds, "heron", arm("own.sql_text", descending=False)) == want[:100]


def test_text_of_the_arm_is_what_the_function_gets(birds: Connection) -> None:
    got = found(birds, "heron", arm("own.sql_text", query={"text": "tern"}))
    assert got == found(birds, "tern", arm("own.sql_text"))


@pytest.mark.parametrize(("limit", "descending"), [("min_score", True), ("max_distance", False)])
def test_cut_off_of_the_arm(birds: Connection, limit: str, descending: bool) -> None:
    got = found(birds, "heron", arm("own.sql_text", descending=descending, **{limit: 0.5}))
    assert got
    assert all(score >= 0.5 if descending else score <= 0.5 for _, score in got if score is not None)
    with error("22023", "max_distance" if descending else "min_score"):
        wrong = {"max_distance" if descending else "min_score": 0.5}
        found(birds, "heron", arm("own.sql_text", descending=descending, **wrong))


def test_candidates_bound_what_an_arm_brings(birds: Connection) -> None:
    assert len(found(birds, "heron", arm("own.sql_text", candidates=7), n_citations=3)) == 3
    got = search(
        birds,
        "heron",
        {
            "vector_store": ["public.docs"],
            "n_citations": 100,
            "arms": [arm("own.sql_text"), {**KEYWORD, "candidates": 1}],
        },
    )
    assert len(got) == 100


def test_filters_come_before_the_function(birds: Connection) -> None:
    names = [f"d{i:04}" for i in (3, 5, 1999)]
    got = found(birds, "heron", arm("own.plpgsql_texts"), document_name=names)
    assert sorted(name for name, _ in got) == names
    got = found(birds, "heron", arm("own.plpgsql_texts"), required_keywords=["heron"], excluded_keywords=["loon"])
    want = [f"d{i:04}" for i, t in enumerate(TEXTS) if "heron" in t and "loon" not in t]
    assert len(got) == 100
    assert {name for name, _ in got} <= set(want)


# -- fused with others -------------------------------------------------------------------------------------------------


def test_fused_by_its_share_of_the_range(birds: Connection) -> None:
    query = "heron loon"
    words = {
        r[2]: r[8]
        for r in search(birds, query, {"n_citations": 40, "arms": [KEYWORD], "vector_store": ["public.docs"]})
    }
    scores = dict(found(birds, query, arm("own.sql_text"), n_citations=30))
    least, best = min(scores.values()), max(scores.values())  # type: ignore[type-var]
    got = found(
        birds,
        query,
        {**KEYWORD, "candidates": 40, "weight": 0.3},
        arm("own.sql_text", candidates=30, weight=0.6),
        n_citations=30,
    )
    for name, score in got:
        by_words = words.get(name, 0) / max(words.values())
        by_function = (scores[name] - least) / (best - least) if name in scores else 0  # type: ignore[operator]
        assert score == pytest.approx((0.3 * by_words + 0.6 * by_function) / 0.9)


@pytest.mark.parametrize("weight", ["auto", None])
def test_one_that_gives_all_the_same(birds: Connection, module_owner: Connection, weight: str | None) -> None:
    same = define(module_owner, "query text, segment text", "SELECT 7::float8", name="same")
    got = search(
        birds,
        "heron",
        {"arms": [{**SEMANTIC, "weight": weight}, arm(same, weight=weight)], "vector_store": ["public.docs"]},
    )
    assert len(got) == 3
    assert all(0 <= row[9] <= 1 for row in got)


def test_reciprocal_rank_fusion_of_two_functions(birds: Connection) -> None:
    options = {
        "vector_store": ["public.docs"],
        "n_citations": 1,
        "arms": [arm("own.sql_text"), arm("own.python_texts")],
    }
    assert search(birds, "heron", options)[0][9] == pytest.approx(1)


def test_retrieval_info_says_so(birds: Connection) -> None:
    options: dict[str, Any] = {"skip_generate": True, "vector_store": ["public.docs"], "explain": True}
    one = answer(birds, "heron", {**options, "arms": [arm("own.sql_text")]})
    assert one["retrieval_info"]["search"] == "function"
    (store,) = one["explain"]["stores"]
    assert store["function"] == {"function": "own.sql_text", "rows": 2100, "limit": 100, "candidates": 100}
    assert one["explain"]["candidates"]["function"] == 100
    assert one["explain"]["milliseconds"]["function"] > 0
    two = answer(birds, "heron", {**options, "arms": [arm("own.sql_text"), SEMANTIC]})
    assert two["retrieval_info"]["search"] == "hybrid"


def test_thresholds_look_at_the_distance(birds: Connection) -> None:
    nothing = answer(
        birds, "heron", {"skip_generate": True, "vector_store": ["public.docs"], "arms": [arm("own.sql_text")]}
    )
    assert {c["distance"] for c in nothing["citations"]} == {None}
    near = {"retrieval_options": {"max_distance": 0.4, "segment_overlap": 0}}
    rows = search(birds, "heron heron heron", {"vector_store": ["public.docs"], "arms": [arm("own.sql_text")], **near})
    assert rows
    assert all(float(row[6]) <= 0.4 for row in rows)


def test_several_stores_of_other_shapes(db: Database, owner: Connection, asker: Connection) -> None:
    define(owner, "query text, segment text", "SELECT length(segment)::float8")
    create_store(owner, "one", [document(1, "tern"), document(2, "tern tern tern")], type="vector(16)")
    create_store(owner, "other", [("x", 1, 1, "tern tern", [1, 0, 0]), ("y", 2, 1, None, [0, 1, 0])], model="another")
    owner.execute("CREATE TABLE parts (LIKE one INCLUDING ALL) PARTITION BY RANGE (document_id)")
    owner.execute("CREATE TABLE part PARTITION OF parts FOR VALUES FROM (0) TO (10)")
    owner.execute(
        "INSERT INTO parts SELECT 'p', metadata, document_id, 1, segment || ' loon', segment_embedding FROM one"
    )
    owner.execute(
        "CREATE VIEW seen AS"
        " SELECT 'v'::text AS document_name, segment || ' rail rail' AS segment, segment_embedding FROM one"
    )
    for relation in ("parts", "seen"):
        mark(owner, relation)
        grant(owner, relation)
    rows = search(
        asker,
        "q",
        {
            "arms": [arm("public.f")],
            "n_citations": 10,
            "vector_store": ["public.one", "public.other", "public.parts", "public.seen"],
        },
    )
    assert [(row[1].split(".")[1], row[2], row[5], row[9]) for row in rows] == [
        ("seen", "v", "tern tern tern rail rail", 24),
        ("parts", "p", "tern tern tern loon", 19),
        ("one", "d0002", "tern tern tern", 14),
        ("seen", "v", "tern rail rail", 14),
        ("other", "x", "tern tern", 9),
        ("parts", "p", "tern loon", 9),
        ("one", "d0001", "tern", 4),
    ]


def test_vectors_of_other_dimensions_are_left_out(db: Database, owner: Connection, asker: Connection) -> None:
    define(owner, "query vector, embedding vector", "SELECT query <=> embedding")
    create_store(owner, "one", [document(1, "tern")], type="vector(16)")
    create_store(owner, "other", [("x", 1, 1, "tern tern", [1, 0, 0])])
    notices = noticed(asker)
    rows = search(asker, "tern", {"arms": [arm("public.f", descending=False)]})
    assert [row[2] for row in rows] == ["d0001"]
    assert notices == ['"public.other" has other dimensions than the query embedding; ignored']
    with error("22000", "16 dimensions"):
        search(asker, "tern", {"arms": [arm("public.f", descending=False)], "vector_store": ["public.other"]})


# -- what a function may not do, and what it gives ---------------------------------------------------------------------


@pytest.mark.parametrize("value", ["NULL::float8", "'NaN'::float8", "'Infinity'::float8", "'-Infinity'::float8"])
@pytest.mark.parametrize("form", ["text", "texts"])
def test_what_is_no_candidate(birds: Connection, module_owner: Connection, value: str, form: str) -> None:
    case = f"CASE WHEN segment LIKE 'heron%' THEN 1 ELSE {value} END"
    body = f"SELECT {case}" if form == "text" else f"SELECT array_agg({case}) FROM unnest(segments) AS segment"
    name = define(module_owner, SIGNATURES[form], body, name=f"some_{form}")
    want = [f"d{i:04}" for i, t in enumerate(TEXTS) if t.startswith("heron")][:100]
    assert found(birds, "q", arm(name)) == [(n, 1) for n in want]


def test_no_candidate_at_all(birds: Connection, module_owner: Connection) -> None:
    name = define(module_owner, SIGNATURES["text"], "SELECT NULL::float8", name="none")
    with error("P0002", "no segment found", "No row is a candidate of the function"):
        found(birds, "q", arm(name))
    assert (
        answer(birds, "q", {"arms": [arm(name)], "abstain": True, "vector_store": ["public.docs"]})["citations"] == []
    )


@pytest.mark.parametrize(
    ("body", "detail"),
    [
        ("SELECT NULL::float8[]", "null for an array of 1000"),
        ("SELECT '{}'::float8[]", "an array of 0 for an array of 1000"),
        ("SELECT array_agg(1::float8) || 1::float8 FROM unnest(segments)", "an array of 1001 for an array of 1000"),
        ("SELECT array_agg(1::float8) FROM unnest(segments[2:])", "an array of 999 for an array of 1000"),
        ("SELECT array_agg(ARRAY[1::float8]) FROM unnest(segments)", "an array of 2 dimensions"),
    ],
)
def test_arrays_of_another_shape(birds: Connection, module_owner: Connection, body: str, detail: str) -> None:
    name = define(module_owner, SIGNATURES["texts"], body, name="shape")
    with error("22023", "function public.shape returned an array that does not fit", detail):
        found(birds, "q", arm(name))


def test_an_array_from_another_index_on_will_do(birds: Connection, module_owner: Connection) -> None:
    numbers = "array_to_string(array_agg(length(s)), ',')"
    literal = f"'[5:' || 4 + cardinality(segments) || ']={{' || {numbers} || '}}'"
    body = f"SELECT ({literal})::float8[] FROM unnest(segments) AS s"
    name = define(module_owner, SIGNATURES["texts"], body, name="from_five")
    assert found(birds, "q", arm(name))[0][1] == max(len(t) for t in TEXTS)


@pytest.mark.parametrize(
    ("language", "body", "state", "message"),
    [
        ("plpgsql", "BEGIN RAISE EXCEPTION 'no such bird' USING ERRCODE = 'BIRD1'; END", "BIRD1", "no such bird"),
        ("sql", "SELECT 1::float8 / (length(segment) - length(segment))", "22012", "division by zero"),
        ("plpgsql", "BEGIN RETURN (SELECT count(*) FROM nowhere); END", "42P01", "nowhere"),
        ("plpython3u", "return plpy.error('a bird', sqlstate='BIRD2')", "BIRD2", "a bird"),
    ],
)
def test_an_error_is_that_error(
    birds: Connection, module_owner: Connection, language: str, body: str, state: str, message: str
) -> None:
    """Also where the call names no store: it is not one of the store, which would be left out."""
    create = "CREATE TABLE IF NOT EXISTS public.spare (LIKE public.docs INCLUDING ALL)"
    module_owner.execute(create)
    name = define(module_owner, SIGNATURES["text"], body, language, "failing")
    for options in ({}, {"vector_store": ["public.docs"]}):
        with pytest.raises(psycopg.Error, match=message) as raised:
            search(birds, "q", {"arms": [arm(name)], **options})
        assert raised.value.sqlstate == state
        assert "failing" in (raised.value.diag.message_detail or "")


def test_a_volatile_one_may_write(db: Database, owner: Connection, asker: Connection) -> None:
    create_store(owner, "docs", [document(i, t) for i, t in enumerate(TEXTS[:5])], type="vector(16)")
    owner.execute("CREATE TABLE seen (text text); GRANT ALL ON seen TO PUBLIC")
    body = "INSERT INTO public.seen VALUES (segment); SELECT random()"
    define(owner, SIGNATURES["text"], body)
    assert len(search(asker, "q", {"arms": [arm("public.f")]})) == 3
    assert sorted(r[0] for r in asker.execute("SELECT text FROM seen")) == sorted(TEXTS[:5])
    with error("25006"), asker.transaction():
        asker.execute("SET TRANSACTION READ ONLY")
        search(asker, "q", {"arms": [arm("public.f")]})


def test_one_that_sleeps_can_be_cancelled(db: Database, owner: Connection, asker: Connection) -> None:
    create_store(owner, "docs", [document(i, t) for i, t in enumerate(TEXTS[:50])], type="vector(16)")
    define(owner, SIGNATURES["text"], "SELECT 1::float8 FROM pg_sleep(10)")
    began = time.monotonic()
    with error("57014"), asker.transaction():
        asker.execute("SET LOCAL statement_timeout = 300")
        search(asker, "q", {"arms": [arm("public.f")]})
    timer = threading.Timer(0.3, asker.cancel)
    timer.start()
    with error("57014"):
        search(asker, "q", {"arms": [arm("public.f")]})
    timer.join()
    assert time.monotonic() - began < 5
    assert asker.execute("SELECT count(*) FROM pg_cursors").fetchone() == (0,)


def test_memory_is_bounded(db: Database, owner: Connection, asker: Connection) -> None:
    """Of 60 segments of 1 MB a function gets four at once."""
    create_store(owner, "docs", type="vector(16)")
    owner.execute("ALTER TABLE docs ALTER segment SET STORAGE EXTERNAL")
    owner.execute(
        "INSERT INTO docs SELECT 'd' || i, '{}', i, 1, repeat('x', 1048576), %s FROM generate_series(1, 60) AS i",
        (as_text(fake_embedding("x")),),
    )
    owner.execute("CREATE TABLE batches (n integer, anonymous_kb integer); GRANT ALL ON batches TO PUBLIC")
    body = """
import re
with open("/proc/self/status") as status:
    anonymous = int(re.search("RssAnon:[ \\t]+([0-9]+) kB", status.read())[1])
plpy.execute(f"INSERT INTO public.batches VALUES ({len(segments)}, {anonymous})")
return [1.0] * len(segments)
"""
    define(owner, SIGNATURES["texts"], body, "plpython3u")
    assert len(search(asker, "q", {"arms": [arm("public.f")], "n_citations": 1})) == 1
    batches = asker.execute("SELECT n, anonymous_kb FROM batches").fetchall()
    assert [n for n, _ in batches] == [4] * 15
    # shared buffers, which count for the resident size once they are touched, are not among it
    assert max(kb for _, kb in batches) - min(kb for _, kb in batches) < 20_000


# -- rights ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["arm", "rerank"])
def test_who_may_call_it(db: Database, owner: Connection, asker: Connection, where: str) -> None:
    create_store(owner, "docs", [document(1, "tern")], type="vector(16)")
    owner.execute("CREATE SCHEMA own")
    owner.execute(
        "CREATE FUNCTION own.f(query text, segments text[]) RETURNS float8[] LANGUAGE sql AS 'SELECT ARRAY[1::float8]'"
    )

    def call(function: Any) -> int:
        options = {"arms": [arm(function)]} if where == "arm" else {"rerank": {"function": function}}
        return len(search(asker, "tern", options))

    with error("42501", "permission denied for schema own"):
        call("own.f")
    owner.execute("GRANT USAGE ON SCHEMA own TO PUBLIC; REVOKE EXECUTE ON FUNCTION own.f FROM PUBLIC")
    with error("42501", "permission denied for function own.f"):
        call("own.f")
    owner.execute("GRANT EXECUTE ON FUNCTION own.f TO PUBLIC")
    assert call("own.f") == call('OWN."f"') == 1
    for name in ("f", "own.f.f", "own.", 'own."f', "own.f(text)", ""):
        with error("22023", "function"):
            call(name)
    for name in ("own.g", "nowhere.f", 'own."F"'):
        with error("42883", "does not exist"):
            call(name)
    with error("22023", "function"):
        call(7)


def test_it_runs_as_the_caller(db: Database, owner: Connection, asker: Connection) -> None:
    create_store(owner, "docs", [document(1, "tern")], type="vector(16)")
    owner.execute("CREATE TABLE secret (n integer)")
    define(owner, SIGNATURES["text"], "SELECT count(*)::float8 FROM public.secret")
    with error("42501", "secret"):
        search(asker, "q", {"arms": [arm("public.f")]})
    define(owner, SIGNATURES["text"], f"SELECT CASE WHEN current_user = '{db.role('asker')}' THEN 1 END::float8")
    assert len(search(asker, "q", {"arms": [arm("public.f")]})) == 1


@pytest.mark.parametrize(
    ("signature", "returns"),
    [
        ("text, text", "real"),
        ("text, text", "setof float8"),
        ("text, varchar", "float8"),
        ("text, text, text", "float8"),
        ("text, text[]", "float8"),
        ("vector, vector", "float8[]"),
        ("vector, text", "float8"),
    ],
)
def test_signatures_are_exact(db: Database, owner: Connection, asker: Connection, signature: str, returns: str) -> None:
    create_store(owner, "docs", [document(1, "tern")], type="vector(16)")
    owner.execute(
        f"CREATE FUNCTION public.f({signature}) RETURNS {returns} LANGUAGE sql"
        f" AS 'SELECT NULL::{returns.removeprefix('setof ')}'"
    )
    with error("42883", "function public.f has no signature that can be used here", "embeddings vector[]") as caught:
        search(asker, "q", {"arms": [arm("public.f")]})
    its = f"({signature}) returns {returns}".replace("varchar", "character varying")
    its = its.replace("float8", "double precision").replace("vector", "public.vector")
    assert caught.detail.endswith(f" It has: {its}.")


def test_one_name_and_two_signatures(db: Database, owner: Connection, asker: Connection) -> None:
    create_store(owner, "docs", [document(1, "tern")], type="vector(16)")
    define(owner, SIGNATURES["text"], "SELECT 1::float8")
    define(owner, "query text, segment text, more integer", "SELECT 1::float8")
    assert len(search(asker, "q", {"arms": [arm("public.f")]})) == 1
    define(owner, SIGNATURES["texts"], "SELECT ARRAY[1::float8]")
    with error("42725", "public.f"):
        search(asker, "q", {"arms": [arm("public.f")]})


WITH_ARGUMENTS = {
    "text": (
        "query text, segment text, arguments jsonb",
        "SELECT length(segment) * coalesce((arguments ->> 'by')::float8, 1)",
    ),
    "texts": (
        "query text, segments text[], arguments jsonb",
        "SELECT ARRAY(SELECT length(s) * coalesce((arguments ->> 'by')::float8, 1) FROM unnest(segments) AS s)",
    ),
    "vector": (
        "query vector, embedding vector, arguments jsonb",
        "SELECT -(query <=> embedding) * coalesce((arguments ->> 'by')::float8, 1)",
    ),
    "vectors": (
        "query vector, embeddings vector[], arguments jsonb",
        "SELECT ARRAY(SELECT -(query <=> e) * coalesce((arguments ->> 'by')::float8, 1) FROM unnest(embeddings) AS e)",
    ),
}


@pytest.mark.parametrize("form", WITH_ARGUMENTS)
def test_arguments_go_to_the_last_parameter(db: Database, owner: Connection, asker: Connection, form: str) -> None:
    create_store(owner, "docs", [document(i, text) for i, text in enumerate(TEXTS[:30])], type="vector(16)")
    plain = found(asker, "heron", arm(define(owner, *WITH_ARGUMENTS[form])))
    assert len(plain) == 30
    twice = found(asker, "heron", arm("public.f", arguments={"by": 2}))
    assert [(name, score and 2 * score) for name, score in plain] == [(n, pytest.approx(s)) for n, s in twice]
    turned = found(asker, "heron", arm("public.f", arguments={"by": -1}))
    assert {name: -(score or 0) for name, score in plain} == {name: pytest.approx(s) for name, s in turned}
    assert turned[0][0] in {name for name, score in plain if score == plain[-1][1]}


def test_of_two_signatures_that_with_arguments_is_for_calls_that_give_some(
    db: Database, owner: Connection, asker: Connection
) -> None:
    create_store(owner, "docs", [document(1, "tern")], type="vector(16)")
    define(owner, SIGNATURES["text"], "SELECT 1::float8")
    with error("42883", "no signature that can be used here", "arguments jsonb"):
        search(asker, "q", {"arms": [arm("public.f", arguments={})]})
    define(owner, WITH_ARGUMENTS["text"][0], "SELECT 2::float8")
    assert found(asker, "q", arm("public.f")) == [("d0001", 1)]
    assert found(asker, "q", arm("public.f", arguments={})) == [("d0001", 2)]
    with error("22023", "arguments", "an object"):
        found(asker, "q", arm("public.f", arguments=[1]))


@pytest.mark.parametrize("form", ["text", "texts", "vector", "vectors"])
def test_a_function_in_a_node_group(db: Database, owner: Connection, asker: Connection, form: str) -> None:
    rows = [document(1, "Tern. Long heron."), document(2, "Coot. Gull. Loon.")]
    create_store(owner, "docs", rows, type="vector(16)")
    nodes = {"transform": "sentence", "keyword_search": False}
    owner.execute("CALL ml_rag.create_node_group('docs', 'sentences', %s)", (json.dumps(nodes),))
    define(owner, *WITH_ARGUMENTS[form])
    searched = {**arm("public.f", arguments={"by": 3}), "in": "sentences"}
    options = {"skip_generate": True, "n_citations": 10, "citation_fields": ["node", "score"]}
    for query, node in (("long heron", "Long heron."), ("coot", "Coot.")):
        citations = answer(asker, query, {**options, "arms": [searched]})["citations"]
        assert len(citations) == 2
        if form.startswith("vector"):
            assert (citations[0]["node"], citations[0]["score"]) == (node, pytest.approx(0, abs=1e-6))
        else:
            assert [(c["node"], c["score"]) for c in citations] == [("Long heron.", 33), ("Coot.", 15)]
        filtered = answer(asker, query, {**options, "arms": [searched], "filters": {"document_id": 2}})["citations"]
        assert [c["document_name"] for c in filtered] == ["d0002"]
    each = answer(asker, "coot", {**options, "arms": [searched], "return": "node"})["citations"]
    assert sorted(c["segment"] for c in each) == ["Coot.", "Gull.", "Long heron.", "Loon.", "Tern."]
    beside = [searched, {"search": "semantic"}]
    assert len(answer(asker, "coot", {**options, "arms": beside})["citations"]) == 2
    with error("55000", 'no vector store has a node group "words" to search'):
        search(asker, "a", {"arms": [{**searched, "in": "words"}]})


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"search": "function"}, "function"),
        ({**SEMANTIC, "function": "own.sql_text"}, "function"),
        ({**KEYWORD, "descending": True}, "descending"),
        ({"search": "function", "function": "own.sql_text", "query_embedding": [1, 2]}, "query_embedding"),
    ],
)
def test_keys_that_do_not_go_together(birds: Connection, keys: dict[str, Any], named: str) -> None:
    with error("22023", named):
        found(birds, "q", keys)


def test_a_function_sees_no_row_that_its_caller_may_not(db: Database, owner: Connection, asker: Connection) -> None:
    """It is as cheap and as leaky as a function can be, and still called after the policy and the filters."""
    texts = [f"{t} {'hidden' if i % 3 else 'seen'}" for i, t in enumerate(TEXTS[:200])]
    create_store(owner, "docs", [document(i, t) for i, t in enumerate(texts)], type="vector(16)")
    owner.execute("ALTER TABLE docs ENABLE ROW LEVEL SECURITY")
    owner.execute("CREATE POLICY p ON docs USING (segment NOT LIKE '%hidden')")
    owner.execute("CREATE TABLE told (text text); GRANT ALL ON told TO PUBLIC")
    leaky = "BEGIN INSERT INTO public.told VALUES (segment); RETURN 1; END"
    define(owner, SIGNATURES["text"], leaky, "plpgsql")
    owner.execute("ALTER FUNCTION f COST 0.0001")
    owner.execute(
        "CREATE FUNCTION v(query vector, embedding vector) RETURNS float8 COST 0.0001 LANGUAGE plpgsql AS "
        "'BEGIN INSERT INTO public.told VALUES (embedding::text); RETURN 1; END'"
    )
    for function in ("public.f", "public.v"):
        for filters in ({}, {"document_name": [f"d{i:04}" for i in range(100)]}):
            owner.execute("DELETE FROM told")
            options = {"arms": [arm(function)], "n_citations": 100, **filters}
            rows = search(asker, "q", options)
            want = [t for i, t in enumerate(texts[: 100 if filters else 200]) if i % 3 == 0]
            told = sorted(r[0] for r in asker.execute("SELECT text FROM told"))
            if function == "public.f":
                assert told == sorted(want)
            assert len(told) == len(want) == len(rows)
    owner.execute("DELETE FROM told")
    notices = noticed(asker, lambda notice: notice.message_detail)
    search(asker, "q", {"arms": [arm("public.f")], "explain": True})
    assert '"rows": 67' in notices[0]
    assert "hidden" not in notices[0]


def test_a_store_that_fails_is_left_out_and_a_lock_is_not_waited_for(
    db: Database, owner: Connection, asker: Connection
) -> None:
    define(owner, SIGNATURES["text"], "SELECT length(segment)::float8")
    for name in ("one", "other"):
        create_store(owner, name, [document(1, name)], type="vector(16)")
    owner.execute(
        "CREATE FUNCTION fails() RETURNS boolean LANGUAGE plpgsql"
        " AS 'BEGIN RAISE ''no'' USING ERRCODE = ''XX111''; END'"
    )
    owner.execute("ALTER TABLE other ENABLE ROW LEVEL SECURITY; CREATE POLICY p ON other USING (fails())")
    notices = noticed(asker, lambda notice: f"{notice.message_primary} {notice.message_detail}")
    assert [row[2] for row in search(asker, "q", {"arms": [arm("public.f")]})] == ["d0001"]
    assert len(notices) == 1
    assert '"public.other" cannot be searched' in notices[0]
    assert "XX111" in notices[0]
    owner.execute("DROP POLICY p ON other; ALTER TABLE other DISABLE ROW LEVEL SECURITY")
    with owner.transaction():
        owner.execute("LOCK TABLE other IN ACCESS EXCLUSIVE MODE")
        assert [row[2] for row in search(asker, "q", {"arms": [arm("public.f")]})] == ["d0001"]
    assert "55P03" in notices[1]


# -- rerankers ---------------------------------------------------------------------------------------------------------


def reranked(connection: Connection, query: str, function: str, **options: Any) -> list[tuple[str, float]]:
    given = {"vector_store": ["public.docs"], "n_citations": 20, "rerank": {"function": function, "candidates": 40}}
    return [(row[2], row[10]) for row in search(connection, query, {**given, **options})]


@pytest.mark.parametrize("language", ["sql", "plpgsql", "python"])
def test_reranker_of_all_texts(birds: Connection, language: str) -> None:
    rows = search(birds, "heron loon", {"vector_store": ["public.docs"], "n_citations": 40})
    scored = [(row[2], share("heron loon", row[5])) for row in rows]
    want = sorted(scored, key=lambda hit: -hit[1])[:20]
    assert reranked(birds, "heron loon", f"own.{language}_texts") == want


def test_reranker_of_text_and_metadata(birds: Connection, module_owner: Connection) -> None:
    module_owner.execute(
        "CREATE FUNCTION public.by_metadata(query text, segment text, metadata jsonb) RETURNS float8 LANGUAGE sql AS"
        " $$ SELECT CASE WHEN segment NOT LIKE '%loon%' THEN -length(segment) + (metadata ->> 'n')::float8 END $$"
    )
    rows = search(birds, "heron", {"vector_store": ["public.docs"], "n_citations": 40})
    scored = [(row[2], 1.0 - len(row[5])) for row in rows if "loon" not in row[5]]
    assert reranked(birds, "heron", "public.by_metadata") == sorted(scored, key=lambda hit: -hit[1])[:20]


def test_reranker_and_a_store_without_metadata(db: Database, owner: Connection, asker: Connection) -> None:
    owner.execute("CREATE TABLE plain (segment text, segment_embedding vector(16))")
    owner.execute("INSERT INTO plain VALUES ('tern', %s)", (as_text(fake_embedding("tern")),))
    mark(owner, "plain")
    grant(owner, "plain")
    owner.execute(
        "CREATE FUNCTION f(query text, segment text, metadata jsonb) RETURNS float8 STRICT LANGUAGE sql AS"
        " $$ SELECT CASE WHEN metadata = '{}' THEN 3.5 END $$"
    )
    assert [row[10] for row in search(asker, "tern", {"rerank": {"function": "public.f"}})] == [3.5]


def test_reranker_that_leaves_all_out(birds: Connection, module_owner: Connection) -> None:
    body = "SELECT array_agg('NaN'::float8) FROM unnest(segments)"
    name = define(module_owner, SIGNATURES["texts"], body, name="none_left")
    with error("P0002", "no segment left by the reranker", "40 segments"):
        reranked(birds, "heron", name)
    assert answer(birds, "heron", {"rerank": {"function": name}, "abstain": True})["citations"] == []


def test_reranker_and_min_score(birds: Connection) -> None:
    got = reranked(birds, "heron", "own.sql_texts", rerank={"function": "own.sql_texts", "min_score": 0.5})
    assert got
    assert all(score >= 0.5 for _, score in got)
    with error("P0002", "score threshold"):
        reranked(birds, "q", "own.sql_texts", rerank={"function": "own.sql_texts", "min_score": 1})


def test_reranker_of_another_shape_or_with_a_model(birds: Connection, module_owner: Connection) -> None:
    name = define(module_owner, SIGNATURES["texts"], "SELECT ARRAY[1::float8]", name="one_number")
    with error("22023", "an array of 1 for an array of 40"):
        reranked(birds, "heron", name)
    with error("22023", "model_id"):
        reranked(birds, "heron", name, rerank={"function": name, "model_id": "fake-rerank"})
    with error("42883", "own.sql_text"):
        reranked(birds, "heron", "own.sql_text")
    failing = define(
        module_owner, SIGNATURES["texts"], "BEGIN RAISE 'x' USING ERRCODE = 'BIRD3'; END", "plpgsql", "fails"
    )
    with error("BIRD3"):
        reranked(birds, "heron", failing)


def test_the_stage_rerank_by_itself(birds: Connection) -> None:
    hits = "ARRAY(SELECT jsonb_populate_record(NULL::ml_rag.hit, to_jsonb(r)) FROM ml_rag_search('heron', %s) AS r)"
    options = {"vector_store": ["docs"], "query_embedding": fake_embedding("heron"), "n_citations": 9}
    got = birds.execute(
        f"SELECT rerank_score FROM ml_rag.rerank('heron', {hits}, '{{\"function\": \"own.python_texts\"}}')",
        (Jsonb(options),),
    ).fetchall()
    assert len(got) == 9
    assert [row[0] for row in got] == sorted((row[0] for row in got), reverse=True)


# -- splitters ---------------------------------------------------------------------------------------------------------

CLAUSES = """
CREATE FUNCTION public.clauses(text) RETURNS SETOF text LANGUAGE {language} AS $f$ {body} $f$
"""
SPLITTERS = {
    "sql": "SELECT btrim(c) FROM regexp_split_to_table($1, ';') AS c",
    "plpgsql": "BEGIN RETURN QUERY SELECT btrim(c) FROM regexp_split_to_table($1, ';') AS c; END",
    "plpython3u": "for clause in args[0].split(';'):\n    yield clause.strip()",
}
BY_CLAUSE = {"chunking": {"split_by": "public.clauses"}}


@pytest.fixture
def librarian(loader: Connection) -> Connection:
    """A connection as a role that may load, and owns the store ``notes``."""
    loader.execute("SELECT ml_rag.create_store('public.notes')")
    return loader


def load(librarian: Connection, content: str, options: Any = BY_CLAUSE, name: str = "a.txt") -> dict[str, Any]:
    """The result of a load of one document."""
    return value_of(
        librarian, "SELECT ml_rag.load_document('notes', %s, %s, %s)", (name, content.encode(), Jsonb(options))
    )  # type: ignore[no-any-return]


def notes(librarian: Connection) -> list[tuple[int, str]]:
    return librarian.execute("SELECT segment_number, segment FROM notes ORDER BY document_name, 1").fetchall()


@pytest.mark.parametrize("language", SPLITTERS)
def test_a_function_splits(owner: Connection, librarian: Connection, language: str) -> None:
    owner.execute(CLAUSES.format(language=language, body=SPLITTERS[language]))
    result = load(librarian, "heron and loon; ;tern\n\ngull;swan")
    assert (result["segments"], result["failed"]) == (3, [])
    assert notes(librarian) == [(1, "heron and loon"), (2, "tern\n\ngull"), (3, "swan")]
    rows = librarian.execute("SELECT segment, segment_embedding::real[] FROM notes").fetchall()
    for segment, embedding in rows:
        assert embedding == pytest.approx(fake_embedding(segment), abs=1e-6)
    assert [row[5] for row in search(librarian, "swan", {"n_citations": 1})] == ["swan"]


def test_the_first_call_of_a_session_may_wait_for_the_model(
    db: Database, owner: Connection, loader: Connection
) -> None:
    """While the reply to the load is still being read; over another connection, which looks at interrupts, too."""
    owner.execute(CLAUSES.format(language="sql", body=SPLITTERS["sql"]))
    loader.execute("SELECT ml_rag.create_store('public.notes', '{\"embed_model_id\": \"fake-embed-slow\"}')")
    assert load(connect_as_loader(db), "heron")["segments"] == 1


def test_a_splitter_may_ask_a_model(owner: Connection, librarian: Connection) -> None:
    """While the reply to the load, of several documents, is still being read."""
    body = "SELECT $1 FROM public.ml_embed_row($1, NULL) AS v WHERE v IS NOT NULL"
    owner.execute(CLAUSES.format(language="sql", body=body))
    names = [f"{i}.txt" for i in range(5)]
    result = value_of(
        librarian,
        "SELECT ml_rag.load_documents('notes', %s, %s, %s)",
        (names, [name.encode() for name in names], Jsonb(BY_CLAUSE)),
    )
    assert result["documents"]["loaded"] == 5


def test_segments_know_their_page(owner: Connection, librarian: Connection) -> None:
    """What a function made up is of none."""
    pages = [{"text": "one; two", "metadata": {"page": 1}}, {"text": "two; three", "metadata": {"page": 2}}]

    def made_up(text: str) -> list[str]:
        return ["made up", *re.split("; |\n\n", text), "three"]

    assert [(s["text"], s["metadata"]) for s in own_segments(pages, made_up)] == [
        ("made up", None),
        ("one", {"page": 1}),
        ("two", {"page": 1}),
        ("two", {"page": 1}),
        ("three", {"page": 2}),
        ("three", {"page": 2}),
    ]
    (one,) = own_segments(pages[:1], lambda text: [text.upper()])
    assert one == {"text": "ONE; TWO", "metadata": {"page": 1}}


def test_split_again_where_the_function_was_replaced(owner: Connection, librarian: Connection) -> None:
    owner.execute(CLAUSES.format(language="sql", body=SPLITTERS["sql"]))
    assert load(librarian, "a;b c")["documents"]["loaded"] == 1
    assert load(librarian, "a;b c")["documents"]["unchanged"] == 1
    owner.execute(
        CLAUSES.replace("CREATE", "CREATE OR REPLACE").format(language="sql", body=SPLITTERS["sql"].replace(";", " "))
    )
    assert load(librarian, "a;b c")["documents"]["changed"] == 1
    assert notes(librarian) == [(1, "a;b"), (2, "c")]
    assert load(librarian, "a;b c", {})["documents"]["changed"] == 1
    assert notes(librarian) == [(1, "a;b c")]


def test_what_a_splitter_may_give(owner: Connection, librarian: Connection) -> None:
    body = "SELECT * FROM unnest(ARRAY[NULL, '', '  ', 'x'])"
    owner.execute(CLAUSES.format(language="sql", body=body))
    load(librarian, "anything")
    assert notes(librarian) == [(1, "x")]
    replace = CLAUSES.replace("CREATE", "CREATE OR REPLACE")
    owner.execute(replace.format(language="sql", body="SELECT NULL::text"))
    (failed,) = load(librarian, "other")["failed"]
    assert failed["error"] == "the document has no text"
    # more than one INSERT, in order
    owner.execute(replace.format(language="sql", body="SELECT 'n' || i FROM generate_series(1, 1234) AS i"))
    assert load(librarian, "many")["segments"] == 1234
    assert notes(librarian) == [(i, f"n{i}") for i in range(1, 1235)]
    huge = "SELECT repeat('x', 1048576) FROM generate_series(1, 300)"
    owner.execute(replace.format(language="sql", body=huge))
    (failed,) = load(librarian, "much")["failed"]
    assert failed["error"] == "function public.clauses makes too much of the document"
    assert len(notes(librarian)) == 1234


ENDLESS = {
    "sql": "SELECT generate_series(1, 2000000000)::text",
    "plpython3u": "return map(str, iter(int, 1))",
}


@pytest.mark.parametrize("language", ENDLESS)
def test_a_splitter_without_end_is_stopped(owner: Connection, librarian: Connection, language: str) -> None:
    owner.execute(CLAUSES.format(language=language, body=ENDLESS[language]))
    librarian.execute("SET statement_timeout = '30s'")
    (failed,) = load(librarian, "many")["failed"]
    assert failed["error"] == "function public.clauses makes too much of the document"
    assert "100000 segments" in failed["detail"]


def test_a_document_with_a_segment_that_is_too_long_to_embed_fails_alone(
    owner: Connection, librarian: Connection
) -> None:
    owner.execute(CLAUSES.format(language="sql", body="SELECT p FROM string_to_table($1, E'\\n\\n') AS p"))
    # in the request each of these has four bytes
    contents = [b"heron\n\nloon", b"tern\n\n" + "🦆".encode() * 17_000_000, b"gull"]
    found = value_of(
        librarian,
        "SELECT ml_rag.load_documents('notes', %s, %b, %s)",
        (["a.txt", "b.txt", "c.txt"], contents, Jsonb(BY_CLAUSE)),
    )
    (failed,) = found["failed"]
    assert (failed["document_name"], failed["error"]) == ("b.txt", "the document's segments cannot be embedded")
    assert "The request is too long" in failed["detail"]
    assert notes(librarian) == [(1, "heron"), (2, "loon"), (1, "gull")]


@pytest.mark.parametrize(
    ("body", "state"),
    [
        ("BEGIN RAISE 'no' USING ERRCODE = 'BIRD4'; END", "BIRD4"),
        ("BEGIN RETURN NEXT 1 / length(''); END", "22012"),
        ("BEGIN PERFORM pg_sleep(10); END", "57014"),
    ],
)
def test_an_error_of_a_splitter_is_that_error(owner: Connection, librarian: Connection, body: str, state: str) -> None:
    """Not a document that failed: the next one would, too. The store stays as it was, and the session goes on."""
    owner.execute(CLAUSES.format(language="plpgsql", body=SPLITTERS["plpgsql"]))
    load(librarian, "a;b")
    owner.execute(CLAUSES.replace("CREATE", "CREATE OR REPLACE").format(language="plpgsql", body=body))
    with error(state), librarian.transaction():
        librarian.execute("SET LOCAL statement_timeout = 1000")
        load(librarian, "c;d")
    assert notes(librarian) == [(1, "a"), (2, "b")]
    assert load(librarian, "e", {})["documents"]["changed"] == 1


def test_options_of_a_splitter(db: Database, owner: Connection, librarian: Connection) -> None:
    owner.execute(CLAUSES.format(language="sql", body=SPLITTERS["sql"]))
    for name, state in (("word", "22023"), ("public.none", "42883"), ("public.", "22023"), ("none", "22023")):
        with error(state):
            load(librarian, "a", {"chunking": {"split_by": name}})
    for more in ({"segment_tokens": 64}, {"overlap_tokens": 3}, {"context": "headings"}):
        with error("22023", "where a function splits"):
            load(librarian, "a", {"chunking": {**BY_CLAUSE["chunking"], **more}})
    owner.execute("REVOKE EXECUTE ON FUNCTION clauses FROM PUBLIC")
    with error("42501", "clauses"):
        load(librarian, "a")
    assert load(librarian, "One is here. Two is there.", {"chunking": {"split_by": "SENTENCE"}})["segments"] == 2


def test_every_example_of_the_page_runs(owner: Connection) -> None:
    """docs/functions.md"""
    results: list[Any] = []
    for example in re.findall(r"```sql\n(.*?)```", PAGE, re.DOTALL):
        for statement in re.split(r";\n(?=SELECT|CREATE|ALTER|\Z)", example):
            if statement.strip():
                cursor = owner.execute(statement.encode())
                results.append(cursor.fetchall() if cursor.description else None)
    assert [row[0]["documents"]["loaded"] for row in results[1]] == [1, 1, 1]
    found = [sorted(row[0] for row in rows) for rows in results if rows and isinstance(rows[0][0], str)]
    assert found[1] == ["badge.txt", "parking.txt", "visitors.txt"]
    assert found[3] == ["badge.txt"]
    assert len(found[4]) == 2
    assert results[-1] == [
        (1, "Doors close at eight"),
        (2, "alarms ring at nine"),
        (3, "cameras run all night"),
    ]
