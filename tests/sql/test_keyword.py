"""keyword/tokens: tokens, BM25 scores, order, filters; any text as a query."""

from __future__ import annotations

import itertools
import json
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import bm25s
import numpy as np
import psycopg
import pytest

from support.cluster import Connection, Database, noticed, value_of
from support.keywords import MOST_CITED, add, assert_exact, by_hand, keyword_store, rows, search, tokens
from support.stores import create_store, error, fake_embedding, insert
from support.stores import search as search_rows

DATA = Path(__file__).parents[3] / "shared" / "data"


def shared(folder: str, file: str) -> list[Any]:
    path = DATA / folder / file
    if not path.exists():
        pytest.skip(f"{path} is not there: the public evaluation data lies beside the checkout")
    return [json.loads(line) for line in path.read_text().splitlines()]


def by_words(connection: Connection, query: str, **options: Any) -> list[Any]:
    """The rows of a search by words alone."""
    return search_rows(connection, query, {"semantic_search": False, "keyword_search": True, **options})


# -- tokens -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("configuration", "text", "expected"),
    [
        ("english", "The cats and the cat's hats", {"cat": 2, "hat": 1}),
        ("simple", "The cats", {"the": 1, "cats": 1}),
        ("german", "Die Häuser der Stadt", {"haus": 1, "stadt": 1}),
        ("english", "", {}),
        ("english", "   \n\t", {}),
        ("english", "the of and", {}),
        ("english", "' & | ! : * ( ) <-> \" \\", {}),
        ("english", "👍🏽 🎉", {}),
        ("english", "cat's & dog | !bird:* (fish)", {"cat": 1, "dog": 1, "bird": 1, "fish": 1}),
        ("english", "plan costs $45.00", {"plan": 1, "cost": 1, "45.00": 1}),
        ("simple", "東京都", {"東京": 1, "京都": 1}),
        ("simple", "東", {"東": 1}),
        ("simple", "東 京", {"東": 1, "京": 1}),
        ("english", "The 中文文本 tests 中文", {"中文": 2, "文文": 1, "文本": 1, "test": 1}),
        ("simple", "カタカナ", {"カタ": 1, "タカ": 1, "カナ": 1}),
        ("simple", "ｶﾅ ＡＢＣ", {"カナ": 1, "abc": 1}),
        ("simple", "한국어", {"한국": 1, "국어": 1}),
        ("simple", "𠀀𠀁𠀂", {"𠀀𠀁": 1, "𠀁𠀂": 1}),
        ("simple", "AI模型2024年", {"ai": 1, "模型": 1, "2024": 1, "年": 1}),
    ],
)
def test_tokens(module_owner: Connection, configuration: str, text: str, expected: dict[str, int]) -> None:
    assert tokens(module_owner, text, configuration) == expected


@pytest.mark.parametrize("separator", [" ", ", ", ",", "\n"])
@pytest.mark.parametrize("n", [254, 255, 256, 300, 1000])
def test_a_word_said_often_is_counted_beyond_what_a_tsvector_holds(
    module_owner: Connection, n: int, separator: str
) -> None:
    text = separator.join(["cat"] * n)
    # "a,a" is one token to no parser: the default one sees words there
    assert tokens(module_owner, text, "simple") == {"cat": n}


def test_a_text_of_more_positions_than_a_tsvector_holds_is_counted_whole(module_owner: Connection) -> None:
    words = [f"w{i % 9000}" for i in range(40_000)]
    assert tokens(module_owner, " ".join(words), "simple") == Counter(words)


def test_a_text_larger_than_a_tsvector_is_counted_whole(module_owner: Connection) -> None:
    words = ["".join(chr(97 + int(digit)) for digit in str(i)) * 6 for i in range(60_000)]
    text = " ".join(words)
    assert len(text) > 2**20
    assert tokens(module_owner, text, "simple") == Counter(words)


def test_a_monster_of_a_word_is_no_error_and_no_notice(module_owner: Connection) -> None:
    notices = noticed(module_owner)
    assert tokens(module_owner, "x" * 5000 + " cat") == {"cat": 1}
    assert tokens(module_owner, "x" * 3_000_000 + " cat") == {"cat": 1}
    assert notices == []


def test_many_accents_of_a_letter_can_be_cancelled(module_db: Database) -> None:
    """PostgreSQL sorts them in a time that grows with the square of their number: these would take minutes."""
    asker = module_db.connect("asker")
    asker.execute("SET statement_timeout = '300ms'")
    began = time.monotonic()
    with pytest.raises(psycopg.errors.QueryCanceled):
        tokens(asker, "\uff21" + "\u0301\u0316" * 200_000)
    assert time.monotonic() - began < 5


def test_letters_of_a_long_text_have_their_usual_width(module_owner: Connection) -> None:
    """As in a short one: it is cut at blanks."""
    assert module_owner.execute(
        "SELECT bool_and(ml_rag._usual_width(t.text) = normalize(t.text, NFKC))"
        " FROM generate_series(4000, 20000, 501) AS n, LATERAL (SELECT left(repeat(%s, 5000), n)) AS t (text)",
        ("\uff21\uff22\uff11e\u0301 \uff76\uff9e ",),
    ).fetchone() == (True,)


@pytest.mark.parametrize("word", ["x", "word other "])
def test_a_long_text_takes_time_in_step_with_its_length(module_owner: Connection, word: str) -> None:
    def seconds(length: int) -> float:
        began = time.monotonic()
        module_owner.execute(
            "SELECT (ml_rag._tokens('simple', repeat(%s, %s))).length", (word, length // len(word))
        ).fetchone()
        return time.monotonic() - began

    seconds(300_000)
    # in step with the square it would be sixteen times as long
    assert seconds(2_400_000) < 10 * min(seconds(600_000), seconds(600_000))


def words(connection: Connection, text: str, as_json: bool = False) -> tuple[dict[str, int] | None, Any, int]:
    """ml_rag._words: how often each word stands in the tsvector, the tokens as JSON, and how many words there are."""
    row = connection.execute(
        "SELECT CASE WHEN w.words IS NOT NULL THEN (SELECT"
        " coalesce(jsonb_object_agg(u.lexeme, cardinality(u.positions)), '{}') FROM unnest(w.words) AS u) END,"
        " w.tokens, w.length FROM ml_rag._words('simple', %s, %s) AS w",
        (text, as_json),
    ).fetchone()
    assert row is not None
    return row[0], row[1], row[2]


@pytest.mark.parametrize(
    ("text", "is_exact"),
    [
        ("", True),
        ("one two two", True),
        ("x-1 AX-4411", True),
        ("x " * 254, True),
        ("x " * 255, False),
        ("x " * 256, False),
        ("x " * 254 + "y " * 254, True),
        ("x " * 254 + "y " * 255, False),
        # positions 16382 and 16383
        (" ".join(f"w{i}" for i in range(16382)), True),
        (" ".join(f"w{i}" for i in range(16383)), False),
        (" ".join(f"w{i}" for i in range(20000)), False),
        # a word may look like a position, or like what stands between words
        ("number 16383", False),
        ("it's, 'quoted' a''b \\ c\\d /a/b,c http://example.org/a,b?c='d' /a\\b", False),
        ("http://example.org/a,b", False),
        ("http://example.org/o'brien", False),
        ("it's /a/b\\c", True),
        ("naïve", False),
        ("東京都", False),
    ],
)
def test_words_are_a_tsvector_only_where_that_is_exact(module_asker: Connection, text: str, is_exact: bool) -> None:
    vector, of_json, length = words(module_asker, text)
    assert (vector is not None, of_json is None) == (is_exact, is_exact)
    counted = tokens(module_asker, text, "simple")
    assert (of_json if vector is None else vector) == counted
    assert length == sum(counted.values())
    assert words(module_asker, text, as_json=True) == (None, counted, length)


def test_the_text_column_changes_its_type_between_inserts(owner: Connection) -> None:
    """The trigger's statements were planned in this session for the type before."""
    keyword_store(owner, ["fox one"])
    add(owner, ["fox two"], 2)
    n = 3
    for type_ in ("varchar(100)", 'text COLLATE "C"', "char(40)", "name", "text"):
        owner.execute(f"ALTER TABLE docs ALTER COLUMN segment TYPE {type_}")
        if type_ in ("char(40)", "name"):
            with error("55000", "docs"):
                add(owner, ["fox none"], n)
        else:
            add(owner, [f"fox number {n}"], n)
            n += 1
            assert_exact(owner, "fox")
            assert_exact(owner, "three four")
    assert len(search(owner, "fox")) == n - 1


def test_tokens_of_any_text_add_up(module_owner: Connection) -> None:
    alphabet = "ab c'&|!:*()\"\\<>-_.,;@/中文字\u3000é😀ＡＢ\u0301\u200d"
    generator = random.Random(5)
    for _ in range(200):
        text = "".join(generator.choices(alphabet, k=generator.randrange(80)))
        found = tokens(module_owner, text, "simple")
        assert all(n > 0 for n in found.values())
        # the same text twice, apart, has each token twice
        twice = tokens(module_owner, f"{text} \n {text}", "simple")
        if not set("<>@/:._-'&;") & set(text):  # what may become one token with its neighbour, such as a tag
            assert twice == {token: 2 * n for token, n in found.items()}, text


# -- scores -----------------------------------------------------------------------------------------------------------


def test_scores_are_bm25(owner: Connection) -> None:
    keyword_store(owner, ["the quick brown fox", "lazy dogs sleep", "foxes and dogs and foxes", None, "", "the of"])
    (hit,) = search(owner, "brown")
    # N = 5 (a null is no segment), df = 1, tf = 1, length 3, average 9 / 5
    assert hit == (1, 1, pytest.approx(np.log(1 + 4.5 / 1.5) / (1 + 1.2 * (0.25 + 0.75 * 3 / 1.8))))
    for query in ("fox", "fox dog", "fox fox dog", "quick quick", "sleepy dog of the fox", "nothing"):
        assert_exact(owner, query)


#: which statements of the index a session runs from now on
TELL = """
DO LANGUAGE plpython3u $$
from ml_rag.backend import keyword
class Told:
    own, names = keyword._run, []
    def __call__(self, plpy, name, *arguments):
        self.names.append(name)
        return self.own(plpy, name, *arguments)
    def rows(self, plpy, name, *arguments, **portion):
        self.names.append(name)
        return self.own.rows(plpy, name, *arguments, **portion)
GD["told"] = keyword._run = Told()
$$"""
TOLD = """
DO LANGUAGE plpython3u $$
plpy.execute("SELECT set_config('test.told', '%s', false)" % " ".join(GD["told"].names))
GD["told"].names.clear()
$$"""


@pytest.mark.fresh
def test_a_search_reads_its_index_by_four_statements(owner: Connection, db: Database) -> None:
    """And by one more where rows wait; what never changes of its runs is read once in a session."""
    keyword_store(owner, ["the quick brown fox", "lazy dogs sleep", "foxes and dogs"])
    owner.execute("SELECT ml_rag.merge_keyword_index('docs')")
    connection = db.connect()
    search(connection, "fox")
    connection.execute(TELL)

    def statements() -> list[str]:
        search(connection, "fox dog")
        connection.execute(TOLD)
        return str(value_of(connection, "SELECT current_setting('test.told')")).split()

    assert statements() == ["index", "parts", "postings", "keys"]
    add(owner, ["a fox more"], 4)
    assert statements() == ["index", "parts", "new", "postings", "keys"]


def test_k1_and_b_are_the_stores_own(owner: Connection) -> None:
    texts = ["fox", "fox fox", "fox dog cat bird", "dog dog dog"]
    for i, (k1, b) in enumerate([(0, 0), (2, 0), (0, 1), (100, 1), (1.5, 0.3)]):
        keyword_store(owner, texts, f"docs{i}", json.dumps({"k1": k1, "b": b}))
        assert_exact(owner, "fox dog", f"docs{i}", k1=k1, b=b)


def test_the_language_is_the_stores_own(owner: Connection) -> None:
    keyword_store(owner, ["die Häuser", "das Haus", "houses"], options='{"language": "de"}')
    assert [row[:2] for row in search(owner, "Haus")] == [(1, 1), (2, 1)]
    keyword_store(owner, ["houses", "house"], "english", '{"language": "en-GB"}')
    assert len(search(owner, "housing", name="english")) == 2


def test_chinese_and_mixed_text_is_found(owner: Connection) -> None:
    texts = ["数据库中的向量检索", "The database 检索 engine", "今天天气很好", "database"]
    keyword_store(owner, texts, options='{"language": "zh"}')
    assert [row[0] for row in search(owner, "向量检索")] == [1, 2]
    assert {row[0] for row in search(owner, "database检索")} == {1, 2, 4}
    assert_exact(owner, "database检索天气", configuration="simple")


def test_equal_scores_go_by_store_document_and_segment(owner: Connection) -> None:
    for name in ("b_docs", "a_docs"):
        create_store(owner, name, rows=[
            (d, i, s, "same words here", (1, 0, 0)) for d, i in (("y", 1), ("x", 7), ("x", 5)) for s in (2, 1)
        ])  # fmt: skip
        owner.execute("SELECT ml_rag.enable_keyword_search(%s)", (name,))
    expected = [
        (f"public.{store}", *rest)
        for store in ("a_docs", "b_docs")
        for rest in (("x", 5, 1), ("x", 5, 2), ("x", 7, 1), ("x", 7, 2), ("y", 1, 1), ("y", 1, 2))
    ]
    for n in (1, 2, 5, 6, 7, 12, 100):
        assert [row[1:5] for row in by_words(owner, "words", n_citations=n)] == expected[:n]


def test_stores_have_their_own_statistics_and_are_merged_by_score(owner: Connection) -> None:
    keyword_store(owner, ["fox", "fox", "fox", "dog"], "common")
    keyword_store(owner, ["fox", "dog", "dog", "cat"], "rare")
    found = [(row[1], row[8]) for row in by_words(owner, "fox", n_citations=10)]
    assert [name for name, _ in found] == ["public.rare", "public.common", "public.common", "public.common"]
    assert found[0][1] == pytest.approx(np.log(1 + 3.5 / 1.5) / 2.2)


def test_limits_of_n(owner: Connection) -> None:
    keyword_store(owner, ["fox"] * 30)
    assert [len(search(owner, "fox", n)) for n in (1, 29, 30, 31, MOST_CITED)] == [1, 29, 30, 30, 30]


# -- hits -------------------------------------------------------------------------------------------------------------


def test_a_hit_has_all_of_the_row_and_its_true_distance(owner: Connection, asker: Connection) -> None:
    keyword_store(owner, ["red fox"])
    insert(owner, "docs", [("no vector", 9, 1, "a fox", None), ("nought", 10, 1, "fox", (0, 0, 0))])

    def hits(vector: list[int] | None, metric: str = "COSINE") -> list[Any]:
        given = {} if vector is None else {"query_embedding": vector}
        found = by_words(asker, "fox", vector_store=["docs"], distance_metric=metric, **given)
        return sorted(found, key=lambda row: row[3])

    row = hits([1, 1, 0])[0]
    assert row[1:6] == ("public.docs", "d1", 1, 1, "red fox")
    assert (float(row[6]), row[7], row[9], row[10]) == (0.2929, {"n": 1}, None, None)
    assert [float(hits([3, 1, 0], metric)[0][6]) for metric in ("DOT", "EUCLIDEAN")] == [-2.0, 2.2361]
    # no vector in the row, no vector in the query, no distance between them, other dimensions
    assert hits([1, 1, 0])[1][6] is None
    assert hits([1, 1, 0])[2][6] is None
    assert {row[6] for row in hits(None)} == {None}
    assert {row[6] for row in hits([1, 1])} == {None}


def test_filters_apply_before_the_limit(owner: Connection) -> None:
    texts = ["fox fox fox"] * 3000 + ["fox and many other words that make it a longer text"] * 5
    keyword_store(owner, texts)
    last = [f"d{i}" for i in range(3001, 3006)]
    assert [row[0] for row in search(owner, "fox", 3, document_name=last)] == [3001, 3002, 3003]
    assert [row[0] for row in search(owner, "fox", 10, document_name=last)] == [3001, 3002, 3003, 3004, 3005]
    assert search(owner, "fox", 3, document_name=["none"]) == []
    excluded = [f"d{i}" for i in range(1, 3001)]
    assert [row[0] for row in search(owner, "fox", 2, exclude_document_name=excluded)] == [3001, 3002]
    # the statistics are those of all rows
    whole = dict.fromkeys(search(owner, "fox", 4000))
    assert set(search(owner, "fox", 3, document_name=last)) <= set(whole)


def test_any_text_is_a_safe_query(owner: Connection, asker: Connection) -> None:
    keyword_store(owner, ["a fox's den", "dogs & cats", "中文 text", ""])
    awkward = [
        "'", "''", "it's", "a & b", "a | b", "!a", "a:*", "(a", "a)", "*", ":", "\\", '"', "<->", "a <-> b",
        "the of and", "👍", "fox" * 1000, "\u0301", "\u200b", "%s %(x)s", "$1", "'; DROP TABLE docs; --",
        "<a href='x'>", "中", "🦊fox", "fox\n\tdog", "a\u00a0b", "{}", "[1,2]", "null", "-1", "1e400",
        "http://x.y/z?a=b&c", "@@", "&&",
    ]  # fmt: skip
    for query in awkward:
        for row in search(asker, query):
            assert row[2] > 0
    for query in ("", " "):
        with error("22023", "the question is empty"):
            search(asker, query)
    with error("54000", "the question is too long", "It has 1000001 bytes"):
        search(asker, "x" * 1_000_001)
    with error("22023", 'invalid value for option "query"', "at most 1000000 bytes"):
        search_rows(asker, "fox", {"arms": [{"search": "keyword", "query": {"text": "x" * 1_000_001}}]})
    assert {row[0] for row in search(asker, "!fox:* | (cat & 'dog'")} == {1, 2}
    words = " ".join(f"word{i}" for i in range(9_999)) + " fox"
    assert [row[0] for row in search(asker, words)] == [1]
    assert len(search(asker, "fox " * 10_000)) == 1


def test_a_query_with_no_words_finds_nothing(owner: Connection) -> None:
    keyword_store(owner, ["fox"])
    assert search(owner, "the") == []


# -- stores without an index ------------------------------------------------------------------------------------------


def test_a_store_without_an_index_is_left_out_with_a_warning(owner: Connection) -> None:
    keyword_store(owner, ["fox"])
    create_store(owner, "bare", rows=rows(["fox"]))
    warnings = noticed(owner, lambda d: (d.severity, d.sqlstate, d.message_primary, d.message_hint or ""))
    assert [row[0] for row in search(owner, "fox", name=None)] == [1]
    ((severity, sqlstate, message, hint),) = warnings
    assert (severity, sqlstate) == ("WARNING", "01000")
    assert message == '"public.bare" has no keyword index; keyword search ignores it'
    assert "ml_rag.enable_keyword_search('public.bare')" in hint


def test_no_store_with_an_index_is_55000(owner: Connection) -> None:
    create_store(owner, "bare", rows=rows(["fox"]))
    with error(
        "55000", "no vector store has a keyword index", "public.bare", "ml_rag.enable_keyword_search('public.bare')"
    ) as caught:
        search(owner, "fox", name="bare")
    assert caught.hint.endswith('Or search by meaning alone, as with "keyword_search": false.')


def test_without_select_on_the_key_the_hint_names_it(owner: Connection, asker: Connection) -> None:
    owner.execute("CREATE TABLE docs (id bigint PRIMARY KEY, segment text, segment_embedding vector(3))")
    owner.execute("INSERT INTO docs VALUES (1, 'fox', '[1, 0, 0]')")
    owner.execute("COMMENT ON COLUMN docs.segment_embedding IS 'GENAI_OPTIONS=EMBED_MODEL_ID=fake-embed'")
    owner.execute("SELECT ml_rag.enable_keyword_search('docs')")
    owner.execute("GRANT SELECT (segment, segment_embedding) ON docs TO PUBLIC")
    with error("55000", "no vector store has a keyword index", "SELECT on the columns of its key"):
        search(asker, "fox")
    owner.execute("GRANT SELECT (id) ON docs TO PUBLIC")
    assert len(search(asker, "fox")) == 1


def test_a_view_has_no_index_even_over_a_table_that_has(owner: Connection) -> None:
    keyword_store(owner, ["fox"])
    owner.execute("CREATE VIEW v AS SELECT * FROM docs; COMMENT ON COLUMN v.segment_embedding IS"
                  " 'GENAI_OPTIONS=EMBED_MODEL_ID=fake-embed'")  # fmt: skip
    with error("55000", "Only an ordinary table can have one"):
        search(owner, "fox", name="v")


def test_another_text_column_than_the_indexed_one_has_no_index(owner: Connection) -> None:
    keyword_store(owner, ["fox"])
    owner.execute("ALTER TABLE docs ADD title text; UPDATE docs SET title = 'dog'")
    with error("55000"):
        by_words(owner, "fox", vector_store=["docs"], vector_store_columns={"segment": "title"})


def test_a_store_that_is_loaded_is_searched_by_words_at_once(owner: Connection, db: Database) -> None:
    owner.execute("SELECT ml_rag.create_store('public.made', '{\"language\": \"de\"}')")
    vector = "[" + ",".join(map(str, fake_embedding("x"))) + "]"
    owner.execute("INSERT INTO made VALUES ('a', '{}', 1, 1, 'viele Häuser', %s)", (vector,))
    assert [row[0] for row in search(owner, "Haus", name="made")] == [1]


# -- the same as bm25s ------------------------------------------------------------------------------------------------


@pytest.mark.shared
@pytest.mark.parametrize(("folder", "language", "limit"), [("vaswani_npl", "en", 93), ("squad2", "en", 300)])
def test_the_same_ten_and_scores_as_bm25s(owner: Connection, folder: str, language: str, limit: int) -> None:
    corpus = shared(folder, "corpus.jsonl")
    questions = [row["text"] for row in shared(folder, "questions.jsonl")][:limit]
    texts = [" ".join(filter(None, (row.get("title"), row["text"]))) for row in corpus]
    create_store(owner)
    with owner.cursor().copy(
        "COPY docs (document_name, metadata, document_id, segment_number, segment) FROM STDIN"
    ) as copy:
        for i, text in enumerate(texts):
            copy.write_row((f"{i:06}", "{}", i, 1, text))
    owner.execute("SELECT ml_rag.enable_keyword_search('docs', %s)", (json.dumps({"language": language}),))

    def bags(texts: list[str]) -> list[list[str]]:
        found = owner.execute(
            "SELECT (SELECT json_object_agg(k.token, k.n) FROM ml_rag.keyword_tokens('english', t) AS k)"
            " FROM unnest(%s::text[]) WITH ORDINALITY AS u (t, place) ORDER BY place", (texts,)
        ).fetchall()  # fmt: skip
        return [list(Counter(bag or {}).elements()) for (bag,) in found]

    retriever = bm25s.BM25(method="lucene", k1=1.2, b=0.75)
    retriever.index(bags(texts), show_progress=False)
    for question, bag in zip(questions, bags(questions), strict=True):
        known = [token for token in bag if token in retriever.vocab_dict]
        scores = retriever.get_scores(known) if known else np.zeros(len(texts))
        found = search(owner, question, 10)
        best = sorted((-float(score), i) for i, score in enumerate(scores) if score > 0)[:10]
        assert [score for _, _, score in found] == pytest.approx([-score for score, _ in best], abs=1e-4)
        assert all(score == pytest.approx(float(scores[i]), abs=1e-4) for i, _, score in found)
        # the same ten, up to scores that differ by less than single precision
        edge = found[-1][2] + 1e-4 if len(found) == 10 else 0
        assert {i for i, _, score in found if score > edge} == {i for score, i in best if -score > edge}


@pytest.mark.shared
def test_chinese_is_found_as_well_as_the_issue_asks(owner: Connection) -> None:
    corpus, questions = shared("cmrc2018_trial", "corpus.jsonl"), shared("cmrc2018_trial", "questions.jsonl")
    number = {row["_id"]: i for i, row in enumerate(corpus)}
    keyword_store(owner, [row["text"] for row in corpus], options='{"language": "zh"}')
    gains = []
    for question in questions:
        # one is empty
        ranks = [row[0] - 1 for row in search(owner, question["text"], 10)] if question["text"].strip() else []
        relevant = {number[document] for document in question["docs"]}
        dcg = sum(1 / np.log2(rank + 2) for rank, i in enumerate(ranks) if i in relevant)
        gains.append(dcg / sum(1 / np.log2(rank + 2) for rank in range(min(10, len(relevant)))))
    assert np.mean(gains) >= 0.95


def test_random_texts_and_queries_against_bm25_by_hand(owner: Connection) -> None:
    generator = random.Random(11)
    words = [f"w{i}" for i in range(40)]
    documents = [" ".join(generator.choices(words, weights=range(40, 0, -1), k=generator.randrange(0, 60)))
                 for _ in range(300)]  # fmt: skip
    keyword_store(owner, documents, options='{"language": "simple"}')
    add(owner, documents[:50], 301)
    bags = {(i, 1): Counter(text.split()) for i, text in enumerate(documents + documents[:50], 1)}
    for size in itertools.chain(range(1, 12), [40]):
        query = Counter(generator.choices(words, k=size))
        expected = by_hand(bags, query)
        found = {(d, s): score for d, s, score in search(owner, " ".join(query.elements()), 1000)}
        assert found == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("query", ["AX-4411", "ax 4411", "4411", "part 4411?"])
def test_a_code_is_found_by_its_number(owner: Connection, query: str) -> None:
    keyword_store(owner, ["cordless drill AX-4411", "cordless drill AX-4412", "on 2024-04-11"])
    assert search(owner, query)[0][0] == 1


def test_hyphens_before_digits_are_blanks(module_asker: Connection) -> None:
    found = tokens(module_asker, "AX-4411 -7 well-known 2024-01-31 AX-4411B", "simple")
    words = ["ax", "ax", "4411", "7", "well-known", "well", "known", "2024", "01", "31", "4411b"]
    assert found == Counter(words)
