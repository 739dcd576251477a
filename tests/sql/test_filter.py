"""pipeline/filter: which rows count at all: names of documents, keywords, all of them together."""

from __future__ import annotations

import json
import random
import unicodedata
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support import filtering, reference
from support.cluster import Cluster, Connection, Database, noticed, value_of
from support.keywords import search as by_words
from support.metrics import METRICS
from support.searching import INDEXES, load, random_segments
from support.stores import create_store, error, retrieve, search


@pytest.mark.parametrize("metric", METRICS)
def test_document_filters_against_brute_force(owner: Connection, asker: Connection, metric: str) -> None:
    generator = random.Random(metric)
    segments = random_segments(generator, ["public.a", "public.b"], 80)
    load(owner, segments)
    for _ in range(8):
        query = [generator.randint(-2, 2) or 1 for _ in range(3)]
        listed = [f"doc {i}" for i in generator.sample(range(10), 5)]
        for option in ("document_name", "exclude_document_name"):
            expected = reference.retrieve(segments, query, metric=metric, n=10, **{option: listed})
            got = retrieve(asker, query, distance_metric=metric, n_citations=10, **{option: listed})
            assert got["citations"] == expected["citations"]
        both = {"document_name": listed, "exclude_document_name": listed[:2]}
        expected = reference.retrieve(segments, query, metric=metric, n=10, **both)
        assert (
            retrieve(asker, query, distance_metric=metric, n_citations=10, **both)["citations"] == expected["citations"]
        )


def test_empty_lists_of_documents(owner: Connection, asker: Connection) -> None:
    load(owner, [reference.Segment("public.a", "d", 1, 1, "s", (1, 0, 0))])
    assert len(retrieve(asker, (1, 0, 0), exclude_document_name=[])["citations"]) == 1
    with error("P0002", "No row passed the filters"):
        retrieve(asker, (1, 0, 0), document_name=[])


@pytest.fixture(scope="module")
def many(cluster: Cluster) -> Iterator[Database]:
    """A database with a store that is searched by indexes."""
    with cluster.database(fresh=True) as database:
        owner = database.connect()
        create_store(owner)
        owner.execute(
            "INSERT INTO docs SELECT 'd' || i, '{}', i, 1, 'w' || i % 7 || ' w' || i % 11 || repeat(' filler', i % 5),"
            " ARRAY[sin(i), cos(i * 1.7), sin(i * 0.3)]::vector FROM generate_series(1, 16000) AS i;"
            "SELECT ml_rag.enable_keyword_search('docs', '{\"language\": \"en\"}');"
            "CREATE INDEX ON docs USING hnsw (segment_embedding vector_cosine_ops); ANALYZE docs"
        )
        yield database


@pytest.mark.parametrize("secured", [False, True])
def test_few_and_many_rows_that_pass(many: Database, secured: bool) -> None:
    """Few rows are compared one by one, more are looked for by the indexes: both find the same."""
    owner, asker = many.connect(), many.connect("asker")
    owner.execute("DROP POLICY IF EXISTS p ON docs; ALTER TABLE docs DISABLE ROW LEVEL SECURITY")
    visible = "true"
    if secured:
        visible = "mod(document_id, 3) <> 0"
        owner.execute(f"ALTER TABLE docs ENABLE ROW LEVEL SECURITY; CREATE POLICY p ON docs USING ({visible})")
    words = by_words(asker, "w3 w4", 10_000)
    assert len(words) > 5_000 * (1 - secured / 3)
    for passing in (7, 40, 1_200, 10_000, 10_001):
        (last,) = owner.execute(
            f"SELECT document_id FROM docs WHERE {visible} ORDER BY document_id OFFSET %s LIMIT 1", (passing - 1,)
        ).fetchone() or (None,)
        options = {
            "query_embedding": [1, 0, 0],
            "filters": {"document_id": {"lte": last}},
            "n_citations": 5,
            "retrieval_options": {"segment_overlap": 0},
        }
        exact = owner.execute(
            f"SELECT document_name FROM docs WHERE {visible} AND document_id <= %s"
            " ORDER BY round((segment_embedding <=> '[1,0,0]')::numeric, 4), document_name COLLATE \"C\" LIMIT 5",
            (last,),
        ).fetchall()
        assert [row[2] for row in search(asker, "w3 w4", options)] == [name for (name,) in exact]
        best = search(asker, "w3 w4", {**options, "keyword_search": True, "semantic_search": False})
        assert [row[3] for row in best] == [row[0] for row in words if row[0] <= last][:5]


# -- keys of the metadata that are misspelt ---------------------------------------------------------------------------


def warnings(connection: Connection, filters: Any, **options: Any) -> list[str]:
    """What a search with these filters warns of, each warning with its hint."""
    told = noticed(connection, lambda notice: f"{notice.message_primary} {notice.message_hint}")
    retrieve(connection, (1, 0, 0), filters=filters, **options)
    return told


@pytest.mark.parametrize(
    "filters",
    [
        {"langage": {"ne": "de"}},
        {"langage": {"nin": ["de", "fr"]}},
        {"not": {"langage": "de"}},
        {"or": [{"not": {"and": [{"langage": {"like": "d%"}}]}}]},
        {"langage": {"exists": False}},
        {"langage": None},
        {"langage": ["de", None]},
        {"Language": {"ne": "de"}},
        {"/langage": {"ne": "de"}},
        {"/langage/code": {"ne": "de"}},
        {"langauge": {"ne": "de"}},
        {"lan": {"ne": "de"}},
    ],
)
def test_a_misspelt_key_that_would_match_everything_is_told(owner: Connection, asker: Connection, filters: Any) -> None:
    create_store(owner, rows=[("a", 1, 1, "s", (1, 0, 0))])
    owner.execute("""UPDATE docs SET metadata = '{"language": "de", "page": 1}'""")
    (warning,) = warnings(asker, filters)
    assert 'the metadata of "public.docs" seems to have no key "' in warning
    assert warning.endswith('Did you mean "language"?')


@pytest.mark.parametrize(
    "filters",
    [
        {"language": {"ne": "fr"}},
        {"/language": {"ne": "fr"}},
        {"status": {"ne": "draft"}},  # like nothing there is: a key that rows may lack
        {"document_name": {"ne": "x"}},
        {"document_nam": {"ne": "x"}},  # like a column, and not like a key
        {"language": "de"},
        {"n": {"ne": 1}},
    ],
)
def test_keys_that_are_right_or_like_nothing_are_not_told(owner: Connection, asker: Connection, filters: Any) -> None:
    create_store(owner, rows=[("a", 1, 1, "s", (1, 0, 0))])
    owner.execute("""UPDATE docs SET metadata = '{"language": "de", "page": 1}'""")
    assert warnings(asker, filters) == []


def test_it_is_told_once_by_whatever_way_is_searched(owner: Connection, asker: Connection) -> None:
    create_store(owner, rows=[("a", 1, 1, "q", (1, 0, 0))])
    owner.execute("""UPDATE docs SET metadata = '{"language": "de"}'""")
    owner.execute("SELECT ml_rag.enable_keyword_search('docs')")
    filters = {"langage": {"ne": "de"}}
    assert len(warnings(asker, filters, keyword_search=True)) == 1
    assert len(warnings(asker, filters, keyword_search=True, semantic_search=False)) == 1


def test_metadata_that_is_no_object_is_looked_at_all_the_same(owner: Connection, asker: Connection) -> None:
    create_store(owner, rows=[("a", 1, i, "s", (1, 0, 0)) for i in range(1, 4)])
    owner.execute("UPDATE docs SET metadata = '[1]' WHERE segment_number = 1")
    owner.execute("UPDATE docs SET metadata = '\"n\"' WHERE segment_number = 2")
    assert warnings(asker, {"m": {"ne": 1}}) == []
    owner.execute("""UPDATE docs SET metadata = '{"page": 1}' WHERE segment_number = 3""")
    assert len(warnings(asker, {"pag": {"ne": 1}})) == 1


# -- keywords ---------------------------------------------------------------------------------------------------------

SEGMENTS = [
    "The Plan costs $45.00 a month, tax included.",  # 0
    "Plans cost $45.005; planning is free.",  # 1
    "Über-Café: CRÈME brûlée",  # 2
    unicodedata.normalize("NFD", "Das Café am Übergang"),  # 3
    "C++ and C#, not C; a.b*c [x] (y) {z} ^w$ \\d | ?",  # 4
    "full\n  time work, part-time\u00a0work",  # 5
    "我喜欢机器学习和iPhone手机。",  # 6
    "서울에서 만나요",  # 7
    "snake_case_name and snake case",  # 8
    "ΟΔΟΣ ΕΡΜΟΥ",  # 9
    "İstanbul'da ılık",  # 10
    "ภาษาไทยง่าย",  # 11
    "e-mail me@example.com, C:\\Temp\\a.txt 100% _x_",  # 12
]


def found(connection: Connection, **options: Any) -> list[int]:
    """The numbers of the segments found."""
    options = {"query_embedding": [1, 0, 0], "n_citations": 100, "distance_metric": "EUCLIDEAN", **options}
    try:
        return sorted(row[4] for row in search(connection, "q", options))
    except psycopg.Error as e:
        if e.diag.sqlstate == "P0002":
            return []
        raise


@pytest.fixture(scope="module")
def segments(module_db: Database) -> Connection:
    rows = [("d", 1, i, text, (1.0, i, 0.0)) for i, text in enumerate(SEGMENTS)]
    create_store(module_db.connect(), rows=rows)
    return module_db.connect("asker")


@pytest.mark.parametrize(
    ("keyword", "expected"),
    [
        ("plan", [0]),
        ("PLAN", [0]),
        ("plans", [1]),
        ("lan", []),
        ("$45.00", [0]),
        ("45.00", [0]),
        ("$45x00", []),
        ("café", [2, 3]),
        ("CAFÉ", [2, 3]),
        (unicodedata.normalize("NFD", "café"), [2, 3]),
        ("cafe", []),
        ("caf", []),
        ("über", [2]),
        ("crème  BRÛLÉE", [2]),
        ("c++", [4]),
        ("c", [4, 12]),
        ("c#", [4]),
        ("a.b*c", [4]),
        ("[x]", [4]),
        ("(y) {z} ^w$", [4]),
        ("\\d", [4]),
        ("|", [4]),
        (".*", []),
        ("full time", [5]),
        (" full time\t", [5]),
        ("\u00a0full\u00a0time \u00a0", [5]),
        ("part-time work", [5]),
        ("time", [5]),
        ("full-time", []),
        ("机器", [6]),
        ("器学", [6]),
        ("机 器", []),
        ("iphone", [6]),
        ("iphon", []),
        ("手机。", [6]),
        ("서울", [7]),
        ("case", [8]),
        ("case_name", []),
        ("snake_case_name", [8]),
        ("snake", [8]),
        ("οδος", [9]),
        ("ερμου", [9]),
        ("ไทย", [11]),
        ("100%", [12]),
        ("_x_", [12]),
        ("x", [4]),
        ("C:\\temp\\A.TXT", [12]),
        ("me@example.com", [12]),
        ("ılık", [10]),
    ],
)
def test_keywords(segments: Connection, keyword: str, expected: list[int]) -> None:
    assert found(segments, required_keywords=[keyword]) == expected
    assert found(segments, excluded_keywords=[keyword]) == [i for i in range(len(SEGMENTS)) if i not in expected]
    assert [i for i, text in enumerate(SEGMENTS) if filtering.has_keyword(text, keyword)] == expected


def test_all_required_keywords_must_be_there_and_none_of_the_excluded(segments: Connection) -> None:
    everything = list(range(len(SEGMENTS)))
    assert found(segments, required_keywords=["plan", "month"]) == [0]
    assert found(segments, required_keywords=["plan", "free"]) == []
    assert found(segments, excluded_keywords=["plan", "free"]) == everything[2:]
    assert found(segments, required_keywords=["c"], excluded_keywords=["c#"]) == [12]
    assert found(segments, required_keywords=["c"], excluded_keywords=["c"]) == []
    assert found(segments, required_keywords=[], excluded_keywords=[]) == everything
    assert found(segments, required_keywords=["c"], filters={"n": {"lt": 10}}, document_name=["d"]) == [4]
    assert found(segments, required_keywords=["c"], exclude_document_name=["d"]) == []
    many = [f"word{i}" for i in range(19)]
    assert found(segments, excluded_keywords=[*many, "plan"]) == everything[1:]
    assert found(segments, required_keywords=[*many, "plan"]) == []


@pytest.mark.parametrize("option", ["required_keywords", "excluded_keywords"])
@pytest.mark.parametrize(
    "value",
    [[""], ["plan", " "], ["\u00a0\t"], ["x" * 201], ["x"] * 21, [1]],
    ids=str,
)
def test_keywords_that_are_refused(segments: Connection, option: str, value: Any) -> None:
    for more in ({}, {"n_citations": 0}):
        with error("22023", f'"{option}"'):
            retrieve(segments, (1, 0, 0), **{option: value}, **more)


def test_keywords_of_the_greatest_length_and_number(segments: Connection) -> None:
    longest = ["é" * 200, "(" * 200, "a " * 100, *("机" * n for n in range(184, 201))]
    assert len(longest) == 20
    assert found(segments, required_keywords=longest) == []
    assert found(segments, excluded_keywords=longest) == list(range(len(SEGMENTS)))


@pytest.mark.parametrize("index", INDEXES, ids=["hnsw", "ivfflat"])
def test_k_segments_with_a_keyword_come_back_whatever_the_index(
    owner: Connection, asker: Connection, index: str
) -> None:
    create_store(owner)
    owner.execute(
        "INSERT INTO docs SELECT 'd', '{}', i, i, CASE WHEN i % 500 = 7 THEN 'a rare word' ELSE 'rarely words' END,"
        " ARRAY[sin(i), cos(i * 1.7), sin(i * 0.3)]::vector FROM generate_series(1, 5000) AS i"
    )
    owner.execute(f"CREATE INDEX ON docs USING {index}; ANALYZE docs")
    options = {"distance_metric": "COSINE", "query_embedding": [0.3, -0.2, 0.9]}
    assert found(asker, required_keywords=["RARE"], **options) == list(range(7, 5000, 500))
    assert found(asker, required_keywords=["rare"], n_citations=3, **options) == [
        i
        for (i,) in owner.execute(
            "SELECT i FROM (SELECT document_id AS i FROM docs WHERE document_id % 500 = 7"
            " ORDER BY (segment_embedding <=> '[0.3,-0.2,0.9]') + 0 LIMIT 3) AS s ORDER BY 1"
        )
    ]
    assert len(found(asker, excluded_keywords=["rarely"], n_citations=5, **options)) == 5


def test_keywords_where_the_database_knows_ascii_only(cluster: Cluster) -> None:
    """LC_CTYPE C has neither é nor É; Unicode's collation does."""
    name = f"{cluster.prefix}_ascii"
    cluster.execute("CREATE DATABASE {} TEMPLATE template0 ENCODING 'UTF8' LOCALE 'C'", name)
    database = Database(cluster.dsn, name, cluster.prefix)
    try:
        owner = database.connect()
        owner.execute("CREATE EXTENSION ml_rag CASCADE")
        owner.execute("SELECT ml_rag.configure('embed_model_id', 'fake-embed')")
        create_store(owner, rows=[("d", 1, i, text, (1.0, i, 0.0)) for i, text in enumerate(SEGMENTS)])
        assert owner.execute("SELECT 'é' ~ '[[:alnum:]]'").fetchone() == (False,)
        for keyword, expected in (("CAFÉ", [2, 3]), ("caf", []), ("机器", [6]), ("plan", [0]), ("crème BRÛLÉE", [2])):
            assert found(owner, required_keywords=[keyword]) == expected, keyword
    finally:
        database.close()
        cluster.execute("DROP DATABASE {} WITH (FORCE)", name)


def test_a_segment_column_whose_collation_knows_no_patterns(owner: Connection, asker: Connection) -> None:
    owner.execute("CREATE COLLATION any_case (provider = icu, locale = 'und-u-ks-level2', deterministic = false)")
    create_store(owner, rows=[("d", 1, 1, "one Word", (1, 0, 0)), ("d", 1, 2, "another", (1, 0, 0))])
    owner.execute(
        "ALTER TABLE docs ALTER segment TYPE text COLLATE any_case, ADD author text COLLATE any_case DEFAULT 'Ann'"
    )
    assert found(asker, required_keywords=["word"]) == [1]
    assert found(asker, filters={"author": {"like": "A%"}, "segment": {"ilike": "%WORD"}}) == [1]
    # the column compares as its collation does
    assert found(asker, filters={"author": "ANN"}) == [1, 2]


WORDS = st.text(st.sampled_from([*"abAB1_ éÉ\u0301.+*()[]{}\\|^$?-'\"%#&机手ไ한σΣς\n\t\u00a0"]), min_size=1, max_size=6)


@pytest.mark.fuzz
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(texts=st.lists(st.lists(WORDS, max_size=8).map("".join), min_size=1, max_size=8), data=st.data())
def test_random_keywords_against_an_implementation_in_python(
    module_owner: Connection, texts: list[str], data: st.DataObject
) -> None:
    drawn = st.one_of(WORDS, st.sampled_from(texts).map(lambda t: t[1:5]))
    keyword = data.draw(drawn.filter(lambda w: w.strip(" \n\t\u00a0") != ""))
    (pattern,) = module_owner.execute(
        "SELECT ml_rag._keyword_pattern(ARRAY[%s], CASE lower('É') WHEN 'é' THEN 'pg_catalog.\"default\"'"
        " ELSE 'pg_catalog.\"und-x-icu\"' END)",
        (keyword,),
    ).fetchone() or ("",)
    rows = module_owner.execute(
        "SELECT t ~ %s FROM unnest(%s::text[]) WITH ORDINALITY AS s (t, i) ORDER BY i", (pattern, texts)
    )
    assert [m for (m,) in rows] == [filtering.has_keyword(t, keyword) for t in texts], (keyword, pattern)


@pytest.mark.parametrize("secured", [False, True])
def test_how_many_rows_pass_is_seen_on_some_pages(owner: Connection, asker: Connection, secured: bool) -> None:
    """Of keys of a JSON column the planner knows nothing: it would take one row in 200."""
    create_store(owner)
    owner.execute(
        "INSERT INTO docs SELECT 'd', jsonb_build_object('half', i % 2, 'rare', i % 5000), i, 1, repeat('w ', 100),"
        " '[1,0,0]' FROM generate_series(1, 20000) AS i"
    )
    if secured:
        owner.execute("ALTER TABLE docs ENABLE ROW LEVEL SECURITY; CREATE POLICY p ON docs USING (document_id % 4 = 0)")

    def passing(filters: dict[str, Any]) -> float | None:
        return value_of(
            asker,
            "SELECT e.n FROM ml_rag.discover(ARRAY['docs']) AS s,"
            " ml_rag.filter(s, jsonb_build_object('filters', %s::jsonb)) AS f,"
            " ml_rag._estimated_rows(s, f.condition, f.arguments) AS e",
            (json.dumps(filters),),
        )

    assert passing({"half": 0}) is None, "never analyzed"
    owner.execute("ANALYZE docs")
    half, other_half, rare = (passing(filters) for filters in ({"half": 0}, {"half": 1}, {"rare": 7}))
    assert half is not None
    assert other_half is not None
    assert rare is not None
    seen = 5_000 if secured else 10_000
    assert 0.5 * seen < half < 1.2 * seen
    assert other_half == 0 if secured else other_half > 5_000
    assert rare <= 0
    owner.execute("DELETE FROM docs WHERE document_id > 4900")
    owner.execute("VACUUM ANALYZE docs")
    assert passing({"half": 0}) is None, "few rows"


def test_rows_that_lie_together_are_not_taken_for_many(owner: Connection) -> None:
    create_store(owner)
    owner.execute(
        "INSERT INTO docs SELECT 'd', '{}', i / 1000, i, 's', '[1,0,0]' FROM generate_series(0, 199999) AS i;"
        "ANALYZE docs"
    )

    def passing(condition: str, n: int) -> list[float]:
        rows = owner.execute(
            "SELECT e.n FROM ml_rag.discover() AS s, generate_series(0, %s) AS i,"
            " ml_rag._estimated_rows(s, %s, ARRAY[i::text]) AS e",
            (n - 1, f" AND {condition}"),
        )
        return [row[0] for row in rows]

    # one in 200 passes
    assert max(passing("t.document_id = $3[1]::bigint", 200)) < 2000
    # the planner takes a third for an inequality that it knows nothing of
    assert passing("mod(t.document_id, 200) + 0.5 > $3[1]::numeric + 199", 1)[0] < 2000
    # one in ten, which the planner knows and most pages bear out
    tenths = passing("t.document_id >= $3[1]::bigint * 20 AND t.document_id < $3[1]::bigint * 20 + 20", 10)
    assert sorted(tenths)[3] > 5_000
    # whether an index finds them
    for condition, is_scanned in (("t.document_id < 40", False), ("t.document_id + 0 < 40", True)):
        row = owner.execute(
            "SELECT e.is_scanned FROM ml_rag.discover() AS s, ml_rag._estimated_rows(s, %s, '{}') AS e",
            (f" AND {condition}",),
        ).fetchone()
        assert row == (is_scanned,)


def test_rows_without_a_vector_count_where_words_are_searched(owner: Connection) -> None:
    create_store(owner)
    owner.execute(
        "INSERT INTO docs SELECT 'd', '{}', i, i % 2, 'birch' || i % 50, NULL FROM generate_series(1, 20000) AS i;"
        "SELECT ml_rag.enable_keyword_search('docs'); ANALYZE docs"
    )

    def rows_read() -> int:
        row = owner.execute(
            "SELECT seq_tup_read + idx_tup_fetch FROM pg_stat_xact_user_tables WHERE relname = 'docs'"
        ).fetchone()
        return row[0] if row else 0

    # what transactions of the last second read counts too, until it is reported
    with owner.transaction():
        before = rows_read()
        assert len(by_words(owner, "birch7", 3, filters={"segment_number": 1})) == 3
        # a sample and not all rows that pass
        assert rows_read() - before < 5000


def test_rows_that_pass_are_read_once_for_words(owner: Connection) -> None:
    """Those that pass are not counted before their keys are read."""
    create_store(owner)
    owner.execute(
        "INSERT INTO docs SELECT 'd', '{}', i, i % 100, 'birch', '[1,0,0]' FROM generate_series(1, 3000) AS i;"
        "SELECT ml_rag.enable_keyword_search('docs'); ANALYZE docs"
    )
    count = "SELECT seq_tup_read + idx_tup_fetch FROM pg_stat_xact_user_tables WHERE relname = 'docs'"
    with owner.transaction():
        before = owner.execute(count).fetchone()
        assert len(by_words(owner, "birch", 3, filters={"segment_number": 1})) == 3
        after = owner.execute(count).fetchone()
    assert before is not None
    assert after is not None
    # all are equally good: once for their keys, once as candidates
    assert after[0] - before[0] == 2 * 30


@pytest.mark.parametrize("rows", [3000, 12_000], ids=["counted", "sampled"])
def test_the_best_words_of_many_rows_that_pass(owner: Connection, rows: int) -> None:
    """Where many rows pass, the best of all are read first, and those that pass one by one only where that does not
    suffice, also where the pages that are looked at mislead."""
    rng = random.Random(3)
    # what does not pass has more of "rare": nothing else is among the best hundreds
    rare = [9 if i % 2 else i % 400 == 0 for i in range(rows)]
    texts = [" ".join(rng.choices(["maple", "birch", "oak", "elm"], k=12)) + " rare" * n for n in rare]
    create_store(owner, "docs", [(f"d{i}", i, i % 2, text, (1, 0, 0)) for i, text in enumerate(texts)])
    owner.execute("SELECT ml_rag.enable_keyword_search('docs'); ANALYZE docs")
    filtered = {"filters": {"segment_number": 0}}

    for passing in (2, 300):
        owner.execute("UPDATE docs SET segment_number = 1 WHERE mod(document_id, %s) <> 0", (passing,))
        for query in ("maple", "birch oak", "rare", "rare elm", "nothing"):
            every = [row for row in by_words(owner, query, 10_000) if row[0] % passing == 0]
            for n in (1, 3, 10):
                assert by_words(owner, query, n, **filtered) == every[:n], (passing, query, n)
        assert len(by_words(owner, "rare", 10_000, **filtered)) == len(range(0, rows, 400 if passing == 2 else 1200))


@pytest.mark.parametrize("share", [2, 600])
def test_arms_under_a_filter_in_either_order(owner: Connection, share: int) -> None:
    """The arm by words may go without counting the rows that pass; the one by meaning is exact where they are few."""
    create_store(
        owner, "docs", [(f"d{i}", i, int(i % share > 0), f"maple birch{i % 50}", (1, i / 6000, 0)) for i in range(6000)]
    )
    owner.execute("SELECT ml_rag.enable_keyword_search('docs')")
    owner.execute("CREATE INDEX ON docs USING hnsw (segment_embedding vector_cosine_ops); ANALYZE docs")
    both = [{"search": "keyword", "candidates": 10}, {"search": "semantic", "candidates": 10}]
    found = [
        search(
            owner,
            "maple birch7",
            {"arms": arms, "filters": {"segment_number": 0}, "query_embedding": [1, 0.5, 0], "n_citations": 5},
        )
        for arms in (both, both[::-1])
    ]
    assert found[0] == found[1]
    assert len(found[0]) == 5


@pytest.mark.parametrize(
    ("filters", "hint"),
    [
        ({"languag": "en"}, 'Did you mean "language", a key of the metadata?'),
        ({"and": [{"Langauge": "en"}, {"language": "en"}]}, 'Did you mean "language", a key of the metadata?'),
        ({"metadata.language": "en"}, 'Did you mean "language", a key of the metadata?'),
        ({"/metadata/language": "en"}, 'Did you mean "language", a key of the metadata?'),
        ({"metadata.office.city": "Rome"}, 'Did you mean "/office/city", a key of the metadata?'),
        ({"office.city": "Rome"}, 'Did you mean "/office/city", a key of the metadata?'),
        ({"documentname": "x"}, 'Did you mean column "document_name"?'),
        ({"apge": 3}, 'Did you mean "page", a key of the metadata?'),
        (
            {"page": "3"},
            'The values of "page" in the metadata are of type number, and "filters" compares them with a string.',
        ),
        ({"page": {"gt": "a"}}, 'The values of "page" in the metadata are of type number'),
        ({"language": [1, 2]}, 'The values of "language" in the metadata are of type string'),
        ({"page": {"like": "4%"}}, 'Check the keys and values of "filters"'),
        ({"page": 4}, 'Check the keys and values of "filters"'),
        ({"language": "none"}, 'Check the keys and values of "filters"'),
        ({"nothing like it": "none"}, 'Check the keys and values of "filters"'),
    ],
)
def test_a_misspelt_key_that_leaves_nothing_is_told(
    owner: Connection, asker: Connection, filters: dict[str, Any], hint: str
) -> None:
    create_store(owner, rows=[("a", 1, 1, "text", (1, 0, 0))])
    owner.execute("""UPDATE docs SET metadata = '{"language": "de", "page": 3, "office": {"city": "Bari"}}'""")
    with error("P0002", "No row passed the filters") as caught:
        search(asker, "q", {"query_embedding": [1, 0, 0], "filters": filters})
    assert str(caught.hint).startswith(hint)


def test_very_many_keys_hold_up_no_hint(owner: Connection, asker: Connection) -> None:
    create_store(owner, rows=[("a", 1, 1, "text", (1, 0, 0))])
    owner.execute(
        "INSERT INTO docs SELECT 'a', (SELECT jsonb_object_agg(md5(format('%s %s', n, k)), 1)"
        " FROM generate_series(1, 3000) AS k), 1, n, 'text', '[1, 0, 0]' FROM generate_series(2, 100) AS n"
    )
    asker.execute("SET statement_timeout = '60s'")  # some seconds; minutes where each is compared letter by letter
    filters = {"0123456789abcdef0123456789abcdef": 1}
    with error("P0002", "No row passed the filters"):
        search(asker, "q", {"query_embedding": [1, 0, 0], "filters": filters})


def test_a_key_of_the_metadata_within_it_is_told(owner: Connection, asker: Connection) -> None:
    create_store(owner, rows=[("a", 1, 1, "text", (1, 0, 0))])
    with error("22023", 'unknown operator "kind"') as caught:
        search(asker, "q", {"query_embedding": [1, 0, 0], "filters": {"metadata": {"kind": "note"}}})
    assert caught.hint == 'A key of the metadata stands by itself: {"kind": …}.'
