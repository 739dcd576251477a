"""rank/rank by the model hybrid: similarity and words together, computed by hand here."""

from __future__ import annotations

import math
import re
from collections import Counter

import pytest

from support.cluster import Connection, value_of
from support.models_server import ModelsServer
from support.ranking import rank, rows
from support.stores import create_store, fake_embedding, search


def words(text: str) -> list[str]:
    """What configuration ``simple`` makes of a text of plain ASCII words and runs of Chinese."""
    found = re.findall(r"[a-z0-9]+", text.lower())
    for run in re.findall(r"[\u4e00-\u9fff]+", text):
        found += [run[i : i + 2] for i in range(max(1, len(run) - 1))]
    return found


def expected(query: str, texts: list[str]) -> list[float]:
    """The scores of model hybrid over fake-embed, written down once more."""
    asked = Counter(words(query))
    read = [Counter(words(text)) for text in texts]
    mean = sum(sum(r.values()) for r in read) / len(read) or 1
    bm25, attainable = [0.0] * len(texts), 0.0
    for word, times in asked.items():
        holders = sum(word in r for r in read)
        weight = times * math.log(1 + (len(texts) - holders + 0.5) / (holders + 0.5))
        attainable += weight
        for i, r in enumerate(read):
            bm25[i] += weight * r[word] / (r[word] + 1.2 * (0.25 + 0.75 * sum(r.values()) / mean))
    best = max(*bm25, 0.15 * attainable)
    vector = fake_embedding(query)
    cosines = [max(0.0, sum(a * b for a, b in zip(vector, fake_embedding(t), strict=True))) for t in texts]
    if not asked:
        return cosines
    return [0.7 * c + 0.3 * b / best for c, b in zip(cosines, bm25, strict=True)]


def hybrid(connection: Connection, query: str, texts: list[str], language: str = "simple") -> list[float]:
    """In the order of the texts."""
    found = rows(
        connection, query, [str(n) for n in range(len(texts))], texts, {"model": "hybrid", "language": language}
    )
    assert [row[2] for row in found] == sorted((row[2] for row in found), reverse=True)
    by_id = {int(row[1]): row[2] for row in found}
    return [by_id[n] for n in range(len(texts))]


@pytest.mark.parametrize(
    ("query", "texts"),
    [
        ("red blue", ["red", "blue red", "green grass", "red red red and more", "blue " * 30]),
        ("red red blue", ["red", "blue", "green"]),
        ("what is the colour of the sky", ["the sky is blue", "the the the", "of", "clouds"]),
        # one record: shares everything, something, nothing
        ("red blue", ["red blue"]),
        ("what is the colour of the sky", ["the"]),
        ("red blue", ["yellow"]),
        # no record has a word of the query
        ("violet", ["red", "blue"]),
        ("W45 invoice", ["invoice w45", "invoice w46", "letter"]),
    ],
)
def test_hybrid_by_hand(module_asker: Connection, query: str, texts: list[str]) -> None:
    assert hybrid(module_asker, query, texts) == pytest.approx(expected(query, texts), abs=1e-6)


def test_hybrid_compares_chinese_by_pairs_of_characters(module_asker: Connection) -> None:
    texts = ["今天天气很好", "明天下雨", "数据库的索引 index", "天"]
    scores = hybrid(module_asker, "天气", texts)
    assert scores.index(max(scores)) == 0
    # by the words alone: only the first text has the pair
    row = module_asker.execute(
        "SELECT ml_rag._word_scores('天气 index', %s, 'simple'), ml_rag._word_scores('天', %s, 'simple')",
        (texts, texts),
    ).fetchone()
    assert row is not None
    assert [score > 0 for score in row[0]] == [True, False, True, False]
    assert [score > 0 for score in row[1]] == [False, False, False, True]


def test_a_query_without_words_leaves_it_to_the_similarity(module_asker: Connection) -> None:
    texts = ["the who sang", "bananas"]
    similarities = value_of(
        module_asker,
        "SELECT ARRAY(SELECT greatest(0, 1 - (ml_rag.embed(t, m, 'document') <=> ml_rag.embed('the who', m, 'query')))"
        " FROM unnest(%s::text[]) AS t) FROM ml_rag._get_setting('embed_model_id') AS m",
        (texts,),
    )
    assert hybrid(module_asker, "the who", texts, "english") == pytest.approx(similarities, abs=1e-9)
    assert hybrid(module_asker, "the who", texts, "simple") != pytest.approx(similarities, abs=1e-3)
    assert all(0 <= score <= 1 for score in hybrid(module_asker, "🙂 !!", texts))


@pytest.mark.parametrize("language", ["en", "EN", "en-GB", "english", "English"])
def test_the_language_decides_what_a_word_is(module_asker: Connection, language: str) -> None:
    texts = ["a hundred mice", "a hundred men"]
    stemmed = hybrid(module_asker, "hundreds", texts, language)
    plain = hybrid(module_asker, "hundreds", texts, "simple")
    assert all(a > b for a, b in zip(stemmed, plain, strict=True))


def test_without_a_language_the_databases_configuration_counts(module_asker: Connection) -> None:
    records = [{"id": "1", "content": "a hundred mice"}, {"id": "2", "content": "nothing"}]
    scores = {}
    for configuration in ("english", "simple"):
        module_asker.execute(f"SET default_text_search_config = 'pg_catalog.{configuration}'")
        scores[configuration] = rank(module_asker, "hundreds", records, {"model": "hybrid"})["records"][0]["score"]
        named = rank(module_asker, "hundreds", records, {"model": "hybrid", "language": configuration})
        assert named["records"][0]["score"] == scores[configuration]
    module_asker.execute("RESET default_text_search_config")
    assert scores["english"] > scores["simple"]


@pytest.mark.parametrize("language", ["klingon", "zh", "ja", "'; DROP TABLE x; --", "a.b.c", '"', "l" * 100, "🙂", " "])
def test_a_language_without_a_configuration_of_its_own_is_simple(module_asker: Connection, language: str) -> None:
    texts = ["a hundred mice", "a hundred men"]
    assert hybrid(module_asker, "hundreds", texts, language) == hybrid(module_asker, "hundreds", texts, "simple")


# -- hits of a search --------------------------------------------------------------------------------------------------

BIRDS = ["heron and tern", "tern", "gull and heron and coot", "owl", "heron heron", "swan and duck and heron"]


@pytest.fixture
def store(owner: Connection, models: ModelsServer) -> Connection:
    rows = [(f"d{i}", i, 1, text, fake_embedding(text)) for i, text in enumerate(BIRDS)]
    create_store(owner, "birds", rows, type="vector(16)")
    owner.execute("SELECT ml_rag.enable_keyword_search('birds', '{\"text_search_configuration\": \"simple\"}')")
    owner.execute("SET default_text_search_config = 'pg_catalog.simple'")
    return owner


@pytest.mark.parametrize("metric", ["COSINE", "DOT", "EUCLIDEAN"])
@pytest.mark.parametrize("by", ["semantic", "keyword"])
def test_hits_are_ranked_by_the_vectors_that_are_stored(
    store: Connection, models: ModelsServer, by: str, metric: str
) -> None:
    asked = {"arms": [{"search": by}], "n_citations": 10, "distance_metric": metric, "rerank": {"model_id": "hybrid"}}
    models.requests.clear()
    found = search(store, "heron tern", asked)
    assert models.embedded("fake-embed") == ["heron tern"]  # and no segment
    if metric != "EUCLIDEAN":
        texts = [row[5] for row in found]
        assert len(texts) == (6 if by == "semantic" else 5)
        in_order = sorted(texts, key=BIRDS.index)
        want = dict(zip(in_order, expected("heron tern", in_order), strict=True))
        if by == "keyword":  # by what the search knows of their words
            words_of = {row[5]: row[8] / max(row[8] for row in found) for row in found}
            near = {row[5]: 1 - float(row[6]) for row in found}
            want = {text: 0.5 * near[text] / max(near.values()) + 0.5 * words_of[text] for text in texts}
        assert [row[10] for row in found] == pytest.approx([want[text] for text in texts], abs=1e-4)
    assert [row[10] for row in found] == sorted((row[10] for row in found), reverse=True)


def scores_by_words(connection: Connection) -> float:
    """Half of the share that the longer text has of the best score."""
    found = {row[5]: row[8] for row in search(connection, "tern", {"arms": [{"search": "keyword"}]})}
    return found["heron and tern"] / found["tern"] / 2


def test_a_row_without_a_vector_is_ranked_by_its_words(store: Connection) -> None:
    store.execute("UPDATE birds SET segment_embedding = NULL WHERE document_id = 1")
    asked = {"arms": [{"search": "keyword"}], "n_citations": 10, "rerank": {"model_id": "hybrid"}}
    scores = {row[5]: row[10] for row in search(store, "tern", asked)}
    assert scores == {
        "tern": pytest.approx(0.5),
        "heron and tern": pytest.approx(1 / 2 + scores_by_words(store), abs=1e-3),
    }


def test_a_search_by_meaning_and_words_keeps_its_order(store: Connection, models: ModelsServer) -> None:
    hybrid = {"keyword_search": True, "n_citations": 10}
    models.requests.clear()
    found = search(store, "heron tern", hybrid)
    ranked = search(store, "heron tern", {**hybrid, "rerank": {"model_id": "hybrid"}})
    assert [row[5] for row in ranked] == [row[5] for row in found]
    assert [row[10] for row in ranked] == [row[9] for row in found]
    assert models.embedded("fake-embed") == ["heron tern", "heron tern"]
    cut = search(store, "heron tern", {**hybrid, "rerank": {"model_id": "hybrid", "min_score": found[1][9]}})
    assert [row[5] for row in cut] == [row[5] for row in found[:2]]
