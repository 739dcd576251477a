"""Hybrid and keyword search through the public routines: what the arms bring, fuse orders and the thresholds leave."""

from __future__ import annotations

import random
from typing import Any

import psycopg
import pytest

from support.cluster import Connection, Database, noticed
from support.fusing import expected
from support.metrics import METRICS
from support.searching import hits
from support.stores import Row, answer, create_store, error, fake_embedding, grant, search

WORDS = ["heron", "grebe", "loon", "tern", "gull", "swan", "duck", "coot", "rail", "snipe"]


def document(i: int, text: str) -> Row:
    return f"d{i:03}", i, 1, text, fake_embedding(text)


def make(owner: Connection, texts: list[str], name: str = "docs") -> None:
    create_store(owner, name, [document(i, text) for i, text in enumerate(texts)], type="vector(16)")
    owner.execute("SELECT ml_rag.enable_keyword_search(%s)", (name,))


@pytest.fixture(scope="module")
def birds(module_db: Database) -> Connection:
    """A connection as a user to 300 random segments of 3 to 12 words."""
    rng = random.Random(5)
    owner = module_db.connect()
    make(owner, [" ".join(rng.choices(WORDS, k=rng.randint(3, 12))) for _ in range(300)])
    return module_db.connect("asker")


def keyword_hits(connection: Connection, query: str, **options: Any) -> list[Any]:
    """The keyword arm alone, with distances; none where no segment has a word of the query."""
    alone = {"semantic_search": False, "keyword_search": True, "query_embedding": fake_embedding(query)}
    try:
        return hits(connection, query, **alone, **options)
    except psycopg.errors.NoDataFound:
        return []


@pytest.mark.parametrize(("size", "read"), [(1152, 1), (1153, 1152 / 1153), (2304, 0.5)])
def test_texts_that_the_model_has_cut_count_less_by_meaning(db: Database, size: int, read: float) -> None:
    """fake-embed takes in 256 tokens, which are taken for 1152 bytes; what follows the words changes no distance."""
    rng = random.Random(5)
    owner, asker = db.connect(), db.connect("asker")
    make(owner, [" ".join(rng.choices(WORDS, k=9)).ljust(size, ".") for _ in range(60)])
    for query in ("heron loon", "snipe rail coot heron swan"):
        semantic = hits(asker, query, n_citations=60)
        keyword = keyword_hits(asker, query, n_citations=60)
        lists: list[Any] = [[h[:3] for h in semantic], [h[:3] for h in keyword]]
        got = hits(asker, query, n_citations=60, keyword_search=True)
        want = expected(*lists, {}, "COSINE", read)
        assert {h[0]: h[3] for h in got} == pytest.approx({h[0]: h[3] for h in want}, abs=1e-9)
        # who has embedded a vector that is given is not known, and the call may say the weights
        for options in ({"query_embedding": fake_embedding(query)}, {"hybrid_options": {"semantic_weight": 0.7}}):
            got = hits(asker, query, n_citations=60, keyword_search=True, **options)
            want = expected(*lists, options.get("hybrid_options", {}), "COSINE")
            assert {h[0]: h[3] for h in got} == pytest.approx({h[0]: h[3] for h in want}, abs=1e-9)


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("hybrid", [{}, {"candidates": 10}, {"semantic_weight": 0.2}, {"fusion": "rrf"}], ids=str)
def test_hybrid_is_both_arms_fused(birds: Connection, metric: str, hybrid: dict[str, Any]) -> None:
    n = hybrid.get("candidates", 100)
    for query in ("heron loon", "tern", "snipe rail coot heron swan", "no bird at all"):
        semantic = hits(birds, query, n_citations=n, distance_metric=metric)
        keyword = keyword_hits(birds, query, n_citations=n, distance_metric=metric)
        want = expected([h[:3] for h in semantic], [h[:3] for h in keyword], hybrid, metric)  # type: ignore[misc]
        got = hits(birds, query, n_citations=7, distance_metric=metric, keyword_search=True, hybrid_options=hybrid)
        assert [h[0] for h in got] == [h[0] for h in want[:7]]
        assert [h[1] for h in got] == [h[1] for h in want[:7]]
        assert [h[3] for h in got] == pytest.approx([h[3] for h in want[:7]], abs=1e-9)


def test_a_segment_found_by_its_words_alone_has_its_true_distance(birds: Connection) -> None:
    query = "heron heron grebe tern loon coot"
    options = {"keyword_search": True, "hybrid_options": {"candidates": 3, "semantic_weight": 0}, "n_citations": 3}
    found = hits(birds, query, **options)
    everything = {h[0]: h[1] for h in hits(birds, query, n_citations=100)}
    nearest = set(list(everything)[:3])
    assert {h[0] for h in found} - nearest
    assert all(everything[h[0]] == h[1] for h in found)


def test_thresholds_apply_to_the_distance(birds: Connection) -> None:
    both = {"keyword_search": True, "n_citations": 100}
    loose = answer(birds, "heron loon", {**both, "skip_generate": True})
    assert loose["retrieval_info"]["method"] == "n_citations"
    assert loose["retrieval_info"]["threshold"] == max(c["distance"] for c in loose["citations"])
    limit = sorted(c["distance"] for c in loose["citations"])[20]
    retrieval = {"max_distance": limit, "segment_overlap": 0}
    tight = answer(birds, "heron loon", {**both, "skip_generate": True, "retrieval_options": retrieval})
    assert tight["citations"] == [c for c in loose["citations"] if c["distance"] <= limit]
    assert tight["retrieval_info"] == {"method": "max_distance", "threshold": limit, "search": "hybrid"}
    with error("P0002", "distance threshold"):
        search(birds, "heron loon", {**both, "retrieval_options": {"max_distance": 0}})


def test_percentage_counts_from_the_nearest_candidate(birds: Connection) -> None:
    options = {"keyword_search": True, "n_citations": 100, "retrieval_options": {"percentage_distance": 50}}
    found = hits(birds, "heron loon tern", **options)
    nearest = hits(birds, "heron loon tern", n_citations=1)[0][1]
    assert nearest is not None
    assert found
    assert all(h[1] is not None and h[1] <= nearest * 1.5 + 1e-9 for h in found)


def test_retrieval_info_says_which_search(birds: Connection) -> None:
    def info(**options: Any) -> Any:
        return answer(birds, "heron", {"skip_generate": True, "n_citations": 2, **options})["retrieval_info"]

    assert set(info()) == {"method", "threshold"}
    assert info(keyword_search=True)["search"] == "hybrid"
    assert info(keyword_search=True, semantic_search=False)["search"] == "keyword"


def test_keyword_search_alone_needs_neither_model_server_nor_one_model(owner: Connection, asker: Connection) -> None:
    make(owner, ["heron one", "grebe two"], "a")
    make(owner, ["heron three", "loon four"], "b")
    owner.execute("COMMENT ON COLUMN b.segment_embedding IS 'GENAI_OPTIONS=EMBED_MODEL_ID=another'")
    owner.execute("SELECT ml_rag.configure('model_server', 'unix:/no/such.sock')")
    options = {"keyword_search": True, "semantic_search": False, "skip_generate": True}
    got = answer(asker, "heron", options)
    assert got["vector_store"] == ["public.a", "public.b"]
    assert [c["segment"] for c in got["citations"]] == ["heron one", "heron three"]
    assert [c["distance"] for c in got["citations"]] == [None, None]
    assert got["retrieval_info"] == {"method": "n_citations", "threshold": None, "search": "keyword"}
    with error("08006"):
        answer(asker, "heron", {**options, "retrieval_options": {"max_distance": 1}})
    with error("P0002", "word of the question"):
        answer(asker, "ostrich", options)


SEMANTIC, BY_WORDS = {"search": "semantic"}, {"search": "keyword"}


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        (
            {"keyword_search": True},
            'with {"semantic_search": false, "keyword_search": true}, with "skip_generate": true',
        ),
        ({"keyword_search": True, "abstain": True}, 'true}, without "abstain" and limits on distances, with "skip'),
        ({"arms": [SEMANTIC, BY_WORDS]}, "with arms that search by words only, with"),
        ({}, None),
        ({"arms": [SEMANTIC]}, None),
    ],
)
def test_a_hybrid_call_without_a_model_server_says_what_needs_none(
    owner: Connection, asker: Connection, options: dict[str, Any], hint: str | None
) -> None:
    make(owner, ["heron one", "grebe two"])
    owner.execute("SELECT ml_rag.configure('model_server', 'unix:/no/such.sock')")
    for call in (answer, search):
        with error("08006", "cannot be reached", "ml-rag serve") as caught:
            call(asker, "heron", options)
        assert ("Words are searched without a model" in str(caught.hint)) == (hint is not None)
        assert (hint or "") in str(caught.hint)
    # what it says does
    words = {"arms": [BY_WORDS]} if "arms" in options else {"semantic_search": False, "keyword_search": True}
    assert [row[5] for row in search(asker, "heron", words)] == ["heron one"]
    assert answer(asker, "heron", {**words, "skip_generate": True})["citations"]


def test_the_command_of_a_hint_can_be_copied(owner: Connection, asker: Connection) -> None:
    make(owner, ["heron one"])
    owner.execute("COMMENT ON COLUMN docs.segment_embedding IS 'GENAI_OPTIONS=EMBED_MODEL_ID=all_minilm_l6_v2'")
    with error("55000", "all_minilm_l6_v2") as caught:
        answer(asker, "heron", {"keyword_search": True, "embed_model_id": "all_minilm_l6_v2"})
    command, _, rest = str(caught.hint).partition("\n")
    assert command.startswith("Get it with: ml-rag models pull all_minilm_l6_v2")
    assert rest.startswith("Words are searched without a model")


def test_filters_hold_in_both_arms(birds: Connection) -> None:
    chosen = [f"d{i:03}" for i in range(0, 300, 50)]
    found = hits(birds, "heron grebe", keyword_search=True, document_name=chosen, n_citations=100)
    assert sorted(h[0] for h in found) == chosen


@pytest.mark.parametrize("semantic", [True, False])
def test_conditions_and_keywords_hold_in_both_arms(birds: Connection, semantic: bool) -> None:
    options = {
        "keyword_search": True,
        "semantic_search": semantic,
        "filters": {"document_id": {"between": [100, 160]}, "not": {"document_id": [120, 121, 122]}},
        "required_keywords": ["grebe"],
        "excluded_keywords": ["swan"],
        "n_citations": 100,
    }
    rows = search(birds, "heron grebe", options)
    want = birds.execute(
        "SELECT array_agg(document_id ORDER BY 1) FROM docs WHERE document_id BETWEEN 100 AND 160"
        " AND document_id NOT IN (120, 121, 122) AND segment ~ 'grebe' AND segment !~ 'swan'"
    ).fetchone()
    assert (sorted(row[3] for row in rows),) == want
    assert len(rows) > 5


def test_one_arm_at_least(birds: Connection) -> None:
    for options in ({"semantic_search": False}, {"semantic_search": False, "keyword_search": False}):
        with error("22023", "semantic_search"):
            search(birds, "heron", options)
        with error("22023", "semantic_search"):
            search(birds, "heron", {**options, "n_citations": 0})


def test_a_store_without_keyword_index_is_searched_by_meaning_only(owner: Connection, asker: Connection) -> None:
    make(owner, ["heron one", "grebe two"], "a")
    create_store(owner, "b", [document(1, "heron three")], type="vector(16)")
    warnings = noticed(asker, lambda diag: f"{diag.message_primary} {diag.message_hint}")
    found = hits(asker, "heron three", keyword_search=True)
    assert {h[0] for h in found} == {"d000", "d001"}
    assert len(found) == 3
    assert any("public.b" in w and "enable_keyword_search" in w for w in warnings)
    with error("55000", "enable_keyword_search"):
        search(asker, "heron", {"keyword_search": True, "vector_store": ["b"]})


def test_neighbours_are_added_in_the_order_of_the_score(owner: Connection, asker: Connection) -> None:
    rows: list[Row] = [
        ("d", 1, i, text, fake_embedding(text))
        for i, text in enumerate(["alpha", "heron", "omega", "filler words", "more of them", "heron heron", "the end"])
    ]
    create_store(owner, "docs", rows, type="vector(16)")
    owner.execute("SELECT ml_rag.enable_keyword_search('docs')")
    options = {"keyword_search": True, "n_citations": 2, "retrieval_options": {"segment_overlap": 1}}
    got = answer(asker, "heron", {**options, "skip_generate": True})
    assert [c["segment"] for c in got["citations"]] == ["more of them\nheron heron\nthe end", "alpha\nheron\nomega"]


def test_the_reranker_sees_what_both_arms_found(birds: Connection) -> None:
    rows = search(birds, "heron loon", {"keyword_search": True, "rerank": {"candidates": 20}, "n_citations": 5})
    scores = [row[10] for row in rows]
    assert scores == sorted(scores, reverse=True)
    assert all(row[9] is not None for row in rows)


def test_row_level_security_holds_in_both_arms(
    db: Database, owner: Connection, asker: Connection, tenant: Connection
) -> None:
    texts = [f"heron {'mine' if i % 2 else 'theirs'} {WORDS[i % 10]}" for i in range(40)]
    make(owner, texts)
    owner.execute("ALTER TABLE docs ENABLE ROW LEVEL SECURITY")
    for role, word in (("asker", "mine"), ("tenant", "theirs")):
        owner.execute(f"CREATE POLICY {role} ON docs TO {db.role(role)} USING (segment LIKE '%{word}%')")
    grant(owner, "docs")
    for connection, own in ((asker, "mine"), (tenant, "theirs")):
        rows = search(connection, "heron mine theirs", {"keyword_search": True, "n_citations": 100})
        assert len(rows) == 20
        assert all(own in row[5] for row in rows)
        only = {"keyword_search": True, "semantic_search": False, "n_citations": 100}
        assert all(own in row[5] for row in search(connection, "heron mine theirs", only))


def test_it_works_in_a_read_only_transaction_and_from_one_candidate_up(birds: Connection) -> None:
    with birds.transaction():
        birds.execute("SET TRANSACTION READ ONLY")
        one = {"keyword_search": True, "hybrid_options": {"candidates": 1}, "n_citations": 100}
        assert 1 <= len(hits(birds, "heron loon", **one)) <= 200
        assert (
            len(hits(birds, "heron", keyword_search=True, hybrid_options={"candidates": 10000}, n_citations=100)) == 100
        )


def test_arms_reranker_and_neighbours_together(birds: Connection) -> None:
    options = {
        "keyword_search": True,
        "rerank": {"candidates": 30, "min_score": 0.5},
        "n_citations": 4,
        "retrieval_options": {"segment_overlap": 2, "percentage_distance": 80},
    }
    found = search(birds, "heron loon", options)
    assert 1 <= len(found) <= 4
    assert all(row[10] >= 0.5 for row in found)
    assert [row[0] for row in found] == list(range(1, len(found) + 1))


@pytest.mark.parametrize(
    "query", ["heron " * 10_000, "x" * 1_000_000, "' OR 1=1 --", "& | ! : * ( ) <->", "🦆", "the of"]
)
def test_any_query_is_safe(birds: Connection, query: str) -> None:
    assert len(hits(birds, query, keyword_search=True, query_embedding=fake_embedding("heron"))) == 3
    try:
        assert len(hits(birds, query, keyword_search=True, semantic_search=False)) == 3
    except psycopg.errors.NoDataFound:
        assert "heron" not in query


def test_a_store_without_metadata(db: Database, owner: Connection) -> None:
    make(owner, ["heron and loon", "tern"])
    owner.execute("ALTER TABLE docs DROP metadata")
    (found, *_) = search(owner, "heron", {"keyword_search": True})
    assert (found[2], found[5], found[7]) == ("d000", "heron and loon", None)
