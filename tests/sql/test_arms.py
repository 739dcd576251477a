"""pipeline/isolate, pipeline/quantization: each arm, against an implementation in Python."""

from __future__ import annotations

import itertools
import random
from typing import Any

import psycopg
import pytest

from support.cluster import Connection, Database, noticed
from support.processes import over_and_over
from support.searching import hits
from support.stores import Row, answer, as_text, create_store, error, fake_embedding, grant, mark, search

WORDS = ["heron", "grebe", "loon", "tern", "gull", "swan", "duck", "coot", "rail", "snipe"]
SEMANTIC, KEYWORD = {"search": "semantic"}, {"search": "keyword"}


def document(i: int, text: str) -> Row:
    return f"d{i:03}", i, 1, text, fake_embedding(text)


def make(owner: Connection, texts: list[str], name: str = "docs", suffix: str = "") -> None:
    create_store(owner, name, [document(i, text) for i, text in enumerate(texts)], type="vector(16)", suffix=suffix)


def bird_texts(n: int = 200) -> list[str]:
    rng = random.Random(5)
    return [" ".join(rng.choices(WORDS, k=rng.randint(3, 12))) for _ in range(n)]


@pytest.fixture(scope="module")
def birds(module_db: Database) -> Connection:
    """A connection as a user to random segments of 3 to 12 words."""
    owner = module_db.connect()
    make(owner, bird_texts())
    owner.execute("SELECT ml_rag.enable_keyword_search('docs')")
    return module_db.connect("asker")


def decisiveness(values: list[float], nothing: float) -> float:
    if not values or max(values) <= nothing:
        return 0.0
    return 1 - sum(sorted(((v - nothing) / (max(values) - nothing) for v in values), reverse=True)[:30]) / 30


def by_hand(arms: list[tuple[str, float | None, list[tuple[str, float]]]], known: dict[str, float]) -> dict[str, float]:
    """Scores of documents: of arms (kind, weight, [(document, distance or keyword score)]).

    ``known``: distances from the question, which count for arms of kind "semantic" whether they found a document or
    not; those of kind "own" searched with another vector, and count only for what they found.
    """
    values = [[v if kind == "keyword" else 1 - v for _, v in found] for kind, _, found in arms]
    weights = [weight for _, weight, _ in arms]
    if None in weights:
        kinds = [kind == "keyword" for kind, _, _ in arms]
        prior = [0.5 / kinds.count(keyword) for keyword in kinds]
        decided = [
            p * decisiveness(v, 0 if keyword else min(v, default=0))
            for p, v, keyword in zip(prior, values, kinds, strict=True)
        ]
        weights = [d / sum(decided) for d in decided] if sum(decided) else [p / sum(prior) for p in prior]
    scores = dict.fromkeys({name for _, _, found in arms for name, _ in found}, 0.0)
    for (kind, _, found), weight, of_arm in zip(arms, weights, values, strict=True):
        best = max(of_arm, default=0)
        given = dict(zip([name for name, _ in found], of_arm, strict=True))
        for name in scores:
            value = 1 - known[name] if kind == "semantic" else given.get(name, 0.0)
            scores[name] += (weight or 0) * min(1.0, max(0.0, value) / best) if best > 0 else 0.0
    return scores


# -- the short way and the long way of saying it -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("short", "arms"),
    [
        ({}, [SEMANTIC]),
        ({"semantic_search": False, "keyword_search": True}, [KEYWORD]),
        ({"semantic_search": False, "keyword_search": True, "hybrid_options": {"semantic_weight": 1}}, [KEYWORD]),
        ({"keyword_search": True}, [{**SEMANTIC, "weight": "auto"}, {**KEYWORD, "weight": "auto"}]),
        (
            {"keyword_search": True, "hybrid_options": {"semantic_weight": 0.25}},
            [{**SEMANTIC, "weight": 0.25}, {**KEYWORD, "weight": 0.75}],
        ),
        (
            {"keyword_search": True, "hybrid_options": {"semantic_weight": 0.5, "candidates": 7}},
            [{**SEMANTIC, "candidates": 7}, {**KEYWORD, "candidates": 7}],
        ),
    ],
    ids=["semantic", "keyword", "keyword without a weight", "both", "weighted", "candidates"],
)
@pytest.mark.parametrize("query", ["heron loon", "tern", "snipe rail coot heron swan"])
def test_arms_say_what_the_short_options_say(
    birds: Connection, short: dict[str, Any], arms: list[dict[str, Any]], query: str
) -> None:
    for more in ({}, {"n_citations": 9}, {"retrieval_options": {"percentage_distance": 300, "segment_overlap": 0}}):
        want = answer(birds, query, {"skip_generate": True, **more, **short})
        assert answer(birds, query, {"skip_generate": True, **more, "arms": arms}) == want


@pytest.mark.parametrize("name", ["semantic_search", "keyword_search"])
def test_not_both_ways_at_once(birds: Connection, name: str) -> None:
    with error("22023", name, 'together with "arms"'):
        answer(birds, "heron", {"arms": [SEMANTIC], name: True})


@pytest.mark.parametrize("hybrid", [{"fusion": "rrf"}, {"fusion": "rrf", "rrf_k": 5}, {"fusion": "weighted"}, {}])
def test_how_arms_are_fused_may_stand_beside_them(birds: Connection, hybrid: dict[str, Any]) -> None:
    short = {"keyword_search": True, "hybrid_options": {**hybrid, "semantic_weight": 0.5}, "skip_generate": True}
    arms = {"arms": [SEMANTIC, KEYWORD], "hybrid_options": hybrid, "skip_generate": True}
    assert answer(birds, "heron loon", arms) == answer(birds, "heron loon", short)


@pytest.mark.parametrize("key", ["semantic_weight", "candidates"])
def test_arms_have_weights_and_candidates_of_their_own(birds: Connection, key: str) -> None:
    with error("22023", "hybrid_options", '"fusion" and "rrf_k" beside "arms"', '"weight"'):
        answer(birds, "heron", {"arms": [SEMANTIC], "hybrid_options": {key: 1, "fusion": "rrf"}})


def test_ranks_count_by_the_weights_of_arms(birds: Connection) -> None:
    semantic = [name for name, *_ in hits(birds, "heron loon", n_citations=100, arms=[SEMANTIC])]
    words = [h[0] for h in hits(birds, "heron loon", n_citations=100, arms=[KEYWORD])]
    arms = [{**SEMANTIC, "weight": 0.9}, {**KEYWORD, "weight": 0.1}]
    got = hits(birds, "heron loon", n_citations=20, arms=arms, hybrid_options={"fusion": "rrf", "rrf_k": 7})
    for name, _, _, score in got:
        ranks = [(0.9, semantic), (0.1, words)]
        want = sum(8 * weight / (8 + found.index(name)) for weight, found in ranks if name in found)
        assert score == pytest.approx(want, abs=1e-9)


# -- several arms ------------------------------------------------------------------------------------------------------


def test_several_arms_are_fused_as_by_hand(birds: Connection) -> None:
    names = {f"d{i:03}": text for i, text in enumerate(bird_texts())}
    other = "gull gull swan"
    for query in ("heron loon", "duck", "snipe rail coot heron swan"):
        known = {h[0]: h[1] for h in hits(birds, query, n_citations=100, arms=[{**SEMANTIC, "candidates": 1000}])}
        known |= {name: known.get(name, 1.0) for name in names}
        semantic = [(h[0], h[1]) for h in hits(birds, query, n_citations=40)]
        keyword = [(h[0], h[2]) for h in hits(birds, query, n_citations=40, arms=[KEYWORD]) if h[2] is not None]
        own = [(h[0], h[1]) for h in hits(birds, other, n_citations=30)]
        words = [(h[0], h[2]) for h in hits(birds, other, n_citations=20, arms=[KEYWORD]) if h[2] is not None]
        full = {h[0]: h[1] for h in hits(birds, query, n_citations=100, arms=[SEMANTIC], distance_metric="COSINE")}
        known |= full
        for weights in ([0.1, 0.4, 0.3, 0.2], [None] * 4):
            arms = [
                {**SEMANTIC, "candidates": 40},
                {**KEYWORD, "candidates": 40},
                {**SEMANTIC, "candidates": 30, "query": {"text": other}},
                {**KEYWORD, "candidates": 20, "query": {"text": other}},
            ]
            for arm, weight in zip(arms, weights, strict=True):
                arm["weight"] = "auto" if weight is None else weight
            got = hits(birds, query, n_citations=10, arms=arms)
            # the true distances of all that came, also of those that the first arm did not bring
            known |= {h[0]: h[1] for h in got}
            kinds = ["semantic", "keyword", "own", "keyword"]
            found = [semantic, keyword, own, words]
            want = by_hand(list(zip(kinds, weights, found, strict=True)), known)  # type: ignore[arg-type]
            for name, _, _, score in got:
                assert score == pytest.approx(want[name], abs=2e-4), (query, weights, name)
            assert [h[3] for h in got] == sorted((h[3] for h in got), reverse=True)  # type: ignore[type-var]


def test_weights_are_divided_by_their_sum(birds: Connection) -> None:
    arms = [{**SEMANTIC, "weight": 0.1}, {**KEYWORD, "weight": 0.3}]
    same = [{**SEMANTIC, "weight": 0.25}, {**KEYWORD, "weight": 0.75}]
    got, want = (hits(birds, "heron loon", n_citations=8, arms=a) for a in (arms, same))
    assert [h[0] for h in got] == [h[0] for h in want]
    assert [h[3] for h in got] == pytest.approx([h[3] for h in want])


def test_an_arm_of_no_weight_adds_candidates_and_no_score(birds: Connection) -> None:
    only = hits(birds, "heron", n_citations=5, arms=[{**SEMANTIC, "candidates": 5}])
    got = hits(birds, "heron", n_citations=5, arms=[{**SEMANTIC, "candidates": 5}, {**KEYWORD, "weight": 0}])
    assert [h[1] for h in got] == [h[1] for h in only]


def test_sixteen_arms_and_no_more(birds: Connection) -> None:
    assert len(hits(birds, "heron", arms=[SEMANTIC, KEYWORD] * 8)) == 3
    with error("22023", "arms", "1 to 16"):
        answer(birds, "heron", {"arms": [SEMANTIC] * 17})


def test_an_arm_with_a_vector_of_its_own(birds: Connection) -> None:
    vector = fake_embedding("gull gull swan")
    by_text = hits(birds, "gull gull swan", n_citations=4)
    got = answer(
        birds, "heron", {"skip_generate": True, "n_citations": 4, "arms": [{**SEMANTIC, "query_embedding": vector}]}
    )
    # nothing embeds the question, so its distance is that of the arm's vector
    assert [c["document_name"] for c in got["citations"]] == [h[0] for h in by_text]
    assert [c["distance"] for c in got["citations"]] == [h[1] for h in by_text]


def test_thresholds_look_at_the_distance_to_the_question(birds: Connection) -> None:
    arms = [SEMANTIC, {**SEMANTIC, "query": {"text": "gull gull swan"}}]
    near = hits(birds, "heron", n_citations=100, arms=[{**SEMANTIC, "candidates": 300}])
    limit = near[5][1]
    options = {"n_citations": 100, "arms": arms, "retrieval_options": {"max_distance": limit, "segment_overlap": 0}}
    got = hits(birds, "heron", **options)
    assert {h[0] for h in got} == {h[0] for h in near if h[1] <= limit}


def test_cut_offs_of_one_arm(birds: Connection) -> None:
    semantic = hits(birds, "heron loon", n_citations=20)
    limit = semantic[4][1]
    got = hits(birds, "heron loon", n_citations=20, arms=[{**SEMANTIC, "max_distance": limit}])
    assert got == [h for h in semantic if h[1] <= limit]
    keyword = hits(birds, "heron loon", n_citations=20, arms=[KEYWORD])
    least = keyword[4][2]
    assert least is not None
    got = hits(birds, "heron loon", n_citations=20, arms=[{**KEYWORD, "min_score": least}])
    assert [h[0] for h in got] == [h[0] for h in keyword if h[2] >= least]  # type: ignore[operator]


@pytest.mark.parametrize(
    ("arms", "option", "allowed"),
    [
        ([], "arms", "1 to 16"),
        (["semantic"], "arms", '"search"'),
        ([{"weight": 1}], "arms", '"search"'),
        ([{"search": None}], "arms", '"search"'),
        ([{"search": "both"}], "search", "semantic, keyword"),
        ([{**SEMANTIC, "weight": 1.1}], "weight", "0 to 1"),
        ([{**SEMANTIC, "weight": 0}], "weight", "more than 0"),
        ([{**SEMANTIC, "weight": "auto"}, {**KEYWORD, "weight": 1}], "weight", "for all arms"),
        ([{**SEMANTIC, "min_score": 1}], "min_score", "semantic arm"),
        ([{**KEYWORD, "max_distance": 1}], "max_distance", "keyword arm"),
        ([{**KEYWORD, "query_embedding": [1]}], "query_embedding", "keyword arm"),
        ([{**SEMANTIC, "query_embedding": "x"}], "query_embedding", "numbers"),
        ([{**SEMANTIC, "embedding": "e", "in": "sentences"}], "embedding", "over a node group"),
        ([{**KEYWORD, "embedding": "e"}], "embedding", "keyword arm"),
        ([{**SEMANTIC, "arguments": {}}], "arguments", "semantic arm"),
        ([{**SEMANTIC, "alone": True}], "alone", "hypothetical_document"),
        ([{**SEMANTIC, "query": "answer"}], "query", '"question"'),
        ([{**SEMANTIC, "query": {"text": " "}}], "query", "not blank"),
        ([{**SEMANTIC, "query": {"text": "a", "b": 1}}], "query", '"question"'),
        ([{**SEMANTIC, "query": {"text": 1}}], "query", '"question"'),
    ],
    ids=str,
)
def test_bad_arms_are_refused(birds: Connection, arms: Any, option: str, allowed: str) -> None:
    with error("22023", option, allowed):
        answer(birds, "heron", {"arms": arms, "skip_generate": True})


def test_an_unknown_key_of_an_arm_is_refused(birds: Connection) -> None:
    with pytest.raises(psycopg.Error, match="weigth") as caught:
        answer(birds, "heron", {"arms": [{**SEMANTIC, "weigth": 1}]})
    assert caught.value.sqlstate == "22023"
    assert "weight" in (caught.value.diag.message_hint or "")


def test_explain_has_an_entry_an_arm(birds: Connection) -> None:
    arms = [SEMANTIC, KEYWORD, {**KEYWORD, "query": {"text": "swan"}, "candidates": 5}]
    explained = answer(birds, "heron", {"arms": arms, "explain": True, "skip_generate": True})["explain"]
    (store,) = explained["stores"]
    assert set(store) == {"vector_store", "searched", "embed_model_id", "semantic", "keyword", "keyword 2"}
    assert store["keyword 2"]["words"] == ["swan"]
    candidates = explained["candidates"]
    assert (candidates["semantic"], candidates["keyword"], candidates["keyword 2"]) == (100, 100, 5)
    assert {"search", "keyword", "fuse"} <= set(explained["milliseconds"])
    assert explained["milliseconds"]["keyword"] > 0


# -- stores that lack what an arm needs --------------------------------------------------------------------------------


def test_a_store_without_keyword_index_is_left_out_of_that_arm(owner: Connection, asker: Connection) -> None:
    make(owner, ["heron one", "loon two"])
    make(owner, ["heron three"], "more")
    owner.execute("SELECT ml_rag.enable_keyword_search('docs')")
    told = noticed(asker)
    got = hits(asker, "heron", n_citations=5, arms=[SEMANTIC, KEYWORD])
    assert {h[0] for h in got} == {"d000", "d001"}
    assert len(got) == 3
    assert told == ['"public.more" has no keyword index; keyword search ignores it']


def test_many_stores_without_keyword_index_are_one_warning(owner: Connection, asker: Connection) -> None:
    make(owner, ["heron one"])
    owner.execute("SELECT ml_rag.enable_keyword_search('docs')")
    for i in range(25):
        make(owner, ["loon"], f"more{i:02}")
    told = noticed(asker, lambda notice: (notice.message_primary, notice.message_detail))
    hits(asker, "heron", keyword_search=True)
    ((message, detail),) = told
    assert message == "25 vector stores have no keyword index; keyword search ignores them"
    assert detail is not None
    assert detail.count("public.more") == 20


def test_what_two_arms_lack_is_one_warning(owner: Connection, asker: Connection) -> None:
    make(owner, ["heron one"])
    make(owner, ["loon two"], "more")
    owner.execute("SELECT ml_rag.enable_keyword_search('docs')")
    told = noticed(asker)
    history = [{"role": "user", "content": "Which birds dive?"}]
    answer(asker, "heron", {"keyword_search": True, "query_options": {"history": history}, "skip_generate": True})
    assert told == ['"public.more" has no keyword index; keyword search ignores it']


def test_a_hint_names_a_table_and_no_view(owner: Connection, asker: Connection) -> None:
    make(owner, ["heron one"], "Birds")
    owner.execute('CREATE VIEW "A" AS SELECT * FROM "Birds"; GRANT SELECT ON "A" TO ml_rag_user')
    marker = "GENAI_OPTIONS=EMBED_MODEL_ID=fake-embed"
    owner.execute(f"""COMMENT ON COLUMN "A".segment_embedding IS '{marker}'""")
    for arms, statement in (
        ([KEYWORD], """ml_rag.enable_keyword_search('public."Birds"')"""),
        ([{**SEMANTIC, "in": "sentences"}], """ml_rag.create_node_group('public."Birds"', 'sentences'"""),
        ([{**SEMANTIC, "embedding": "small"}], """ml_rag.add_embedding('public."Birds"', 'small'"""),
    ):
        with error("55000", "no vector store has a") as caught:
            hits(asker, "heron", arms=arms)
        assert statement in caught.hint
        with error("55000", "no vector store has a", "public.A") as caught:
            hits(asker, "heron", arms=arms, vector_store=["A"])
        assert "search the table behind it" in caught.hint


def test_an_arm_that_finds_no_store_is_55000(owner: Connection, asker: Connection) -> None:
    make(owner, ["heron one"])
    with error("55000", "no vector store has a keyword index", "public.docs"):
        answer(asker, "heron", {"arms": [SEMANTIC, KEYWORD], "skip_generate": True})


# -- candidates are keys until their text is wanted --------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["table", "partitioned", "parent", "view", "materialized view"])
def test_every_kind_of_relation_gives_its_texts(owner: Connection, asker: Connection, kind: str) -> None:
    texts = bird_texts(60)
    if kind == "partitioned":
        create_store(owner, "docs", type="vector(16)", suffix=" PARTITION BY LIST (document_id)")
        owner.execute("CREATE TABLE docs_a PARTITION OF docs DEFAULT")
        for name, id_, number, text, embedding in (document(i, t) for i, t in enumerate(texts)):
            row = (name, id_, number, text, as_text(embedding))
            owner.execute("INSERT INTO docs VALUES (%s, '{}', %s, %s, %s, %s)", row)
    else:
        make(owner, texts)
    if kind == "parent":
        owner.execute("CREATE TABLE child () INHERITS (docs); INSERT INTO child SELECT * FROM docs; TRUNCATE ONLY docs")
    if kind in ("view", "materialized view"):
        owner.execute(f"CREATE {kind} seen AS SELECT * FROM docs")
        mark(owner, "seen")
        grant(owner, "seen")
    options = {"vector_store": ["public.seen" if kind.endswith("view") else "public.docs"], "n_citations": 6}
    arms = [SEMANTIC, {**SEMANTIC, "query": {"text": "swan"}}]
    for name, _, _, _ in hits(asker, "heron loon", **options, arms=arms):
        assert name.startswith("d")
    rows = search(asker, "heron loon", {**options, "arms": arms})
    assert [row[5] for row in rows] == [texts[int(row[2][1:])] for row in rows]
    assert len({row[2] for row in rows}) == 6


def test_rows_that_are_the_same_in_everything_stay_as_many_as_they_are(owner: Connection, asker: Connection) -> None:
    make(owner, ["heron", "heron", "heron", "loon"])
    owner.execute("ALTER TABLE docs DROP CONSTRAINT docs_pkey; UPDATE docs SET document_name = 'd', document_id = 1")
    owner.execute("CREATE VIEW seen AS SELECT * FROM docs")
    mark(owner, "seen")
    grant(owner, "seen")
    for store in ("docs", "seen"):
        options = {"vector_store": [f"public.{store}"], "n_citations": 9, "arms": [SEMANTIC, SEMANTIC]}
        assert [row[5] for row in search(asker, "heron", options)] == ["heron"] * 3 + ["loon"]


def test_a_row_level_policy_holds_where_texts_are_read(db: Database, owner: Connection, asker: Connection) -> None:
    make(owner, bird_texts(40))
    owner.execute("SELECT ml_rag.enable_keyword_search('docs')")
    owner.execute("ALTER TABLE docs ENABLE ROW LEVEL SECURITY; CREATE POLICY p ON docs USING (document_id % 3 = 0)")
    rows = search(asker, "heron loon", {"n_citations": 20, "arms": [SEMANTIC, KEYWORD]})
    assert rows
    assert all(row[3] % 3 == 0 and row[5] == bird_texts(40)[row[3]] for row in rows)


def test_texts_are_read_by_the_address_of_their_rows(db: Database, owner: Connection, asker: Connection) -> None:
    """Also under row-level security, whose conditions come first unless what is asked for is leakproof."""
    make(owner, bird_texts(40))
    owner.execute("ALTER TABLE docs ENABLE ROW LEVEL SECURITY; CREATE POLICY p ON docs USING (document_id % 3 = 0)")
    plan = asker.execute('EXPLAIN SELECT segment FROM docs AS t WHERE t.ctid = ANY (\'{"(0,1)","(0,2)"}\'::tid[])')
    assert "Tid Scan" in str(plan.fetchall())


def test_rows_that_change_while_a_call_runs(db: Database, owner: Connection, asker: Connection) -> None:
    """What is searched and what is cited are of one moment: every text is the one that was found."""
    make(owner, bird_texts(30))
    owner.execute("SELECT ml_rag.enable_keyword_search('docs')")
    # a policy is a place where others can write in the middle of a search
    owner.execute(
        "CREATE TABLE hurry (n integer); INSERT INTO hurry VALUES (0); GRANT ALL ON hurry TO PUBLIC;"
        "CREATE FUNCTION slow() RETURNS boolean LANGUAGE sql VOLATILE AS 'SELECT pg_sleep(0.01) IS NOT NULL';"
        "ALTER TABLE docs ENABLE ROW LEVEL SECURITY; CREATE POLICY p ON docs USING (slow())"
    )
    other, numbers = db.connect(), itertools.count(1)

    def write() -> None:
        i = next(numbers)
        other.execute("UPDATE docs SET document_name = document_name WHERE document_id = %s", (i % 30,))
        if i % 20 == 0:
            other.execute("VACUUM docs")

    with over_and_over(write):
        for _ in range(3):
            arms = [SEMANTIC, {**SEMANTIC, "query": {"text": "swan"}}]
            rows = search(asker, "heron loon", {"n_citations": 10, "arms": arms})
            assert len(rows) == 10
            assert [row[5] for row in rows] == [bird_texts(30)[row[3]] for row in rows]


# -- citation_fields ---------------------------------------------------------------------------------------------------


def test_citation_fields(owner: Connection, asker: Connection) -> None:
    rows = [("a", 1, i, f"copper {i}", (1, i, 0)) for i in range(6)]
    create_store(owner, rows=rows)
    fields = ["document_id", "segment_number", "segment_range", "vector_store", "metadata", "score", "keyword_score",
              "rerank_score", "rank"]  # fmt: skip
    options = {"skip_generate": True, "query_embedding": [1, 2, 0], "n_citations": 2, "citation_fields": fields}
    first, second = answer(asker, "copper", {**options, "retrieval_options": {"segment_overlap": 0}})["citations"]
    assert first == {
        "segment": "copper 2", "distance": 0, "document_name": "a", "document_id": 1, "segment_number": 2,
        "segment_range": [2, 2], "vector_store": "public.docs", "metadata": {"n": 2}, "score": None,
        "keyword_score": None, "rerank_score": None, "rank": 1,
    }  # fmt: skip
    assert (second["segment_number"], second["rank"]) == (3, 2)
    plain = answer(asker, "copper", {**options, "citation_fields": []})["citations"]
    assert set(plain[0]) == {"segment", "distance", "document_name"}
    with error("22023", "citation_fields", "document_id"):
        answer(asker, "copper", {**options, "citation_fields": ["documentid"]})


def test_a_citation_of_merged_neighbours_has_number_and_scores_of_its_best_segment(
    owner: Connection, asker: Connection
) -> None:
    create_store(owner, rows=[("a", 1, i, text, (1, i, 0)) for i, text in enumerate(["x", "copper", "y", "z", "w"])])
    owner.execute("SELECT ml_rag.enable_keyword_search('docs')")
    options = {
        "skip_generate": True, "query_embedding": [1, 2, 0], "n_citations": 2, "keyword_search": True,
        "hybrid_options": {"semantic_weight": 0.1}, "retrieval_options": {"segment_overlap": 1},
        "citation_fields": ["segment_number", "segment_range", "keyword_score", "rank"],
    }  # fmt: skip
    (citation,) = answer(asker, "copper", options)["citations"]
    apart = answer(asker, "copper", {**options, "retrieval_options": {"segment_overlap": 0}})["citations"]
    assert [c["segment_number"] for c in apart] == [1, 2]
    assert apart[1]["distance"] == 0
    assert citation["segment"] == "x\ncopper\ny\nz"
    assert citation["segment_range"] == [0, 3]
    assert {k: citation[k] for k in ("segment_number", "distance", "keyword_score", "rank")} == {
        k: apart[0][k] for k in ("segment_number", "distance", "keyword_score", "rank")
    }


def test_a_table_without_metadata_is_searched_by_several_arms(owner: Connection, asker: Connection) -> None:
    owner.execute("CREATE TABLE plain (id integer PRIMARY KEY, segment text, segment_embedding vector(16))")
    owner.execute("COMMENT ON COLUMN plain.segment_embedding IS 'GENAI_OPTIONS=EMBED_MODEL_ID=fake-embed'")
    vector = as_text(fake_embedding("a heron"))
    owner.execute("INSERT INTO plain SELECT n, 'a heron', %s FROM generate_series(1, 5) AS n", (vector,))
    owner.execute("SELECT ml_rag.enable_keyword_search('plain')")
    grant(owner, "plain")
    assert len(hits(asker, "heron", arms=[SEMANTIC, KEYWORD])) == 3
