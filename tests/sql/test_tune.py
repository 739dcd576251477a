"""evaluate/tune: settings of an index that find what an exact search finds, kept for the searches of a store."""

from __future__ import annotations

import json
import time
from typing import Any

import numpy as np
import pytest

from support.cluster import Connection, noticed, value_of
from support.stores import answer, create_store, error

DIMENSIONS = 16
#: enough for an index of few links to miss some with few candidates
ROWS = 3000


def vectors(n: int, seed: int) -> np.ndarray:
    found = np.random.default_rng(seed).normal(size=(n, DIMENSIONS))
    return found / np.linalg.norm(found, axis=1, keepdims=True)  # type: ignore[no-any-return]


@pytest.fixture
def store(owner: Connection) -> str:
    rows = [(f"{i // 5}.txt", i // 5, i % 5, f"text {i}", v.tolist()) for i, v in enumerate(vectors(ROWS, 1))]
    create_store(owner, "docs", rows, type=f"vector({DIMENSIONS})")
    owner.execute("CREATE TABLE asked (query_embedding vector)")
    owner.cursor().executemany("INSERT INTO asked VALUES (%s)", [(str(v.tolist()),) for v in vectors(30, 2)])
    return "docs"


def index(
    owner: Connection, method: str = "hnsw", options: str = "m = 4, ef_construction = 10", what: str = ""
) -> None:
    what = what or "segment_embedding vector_cosine_ops"
    owner.execute(f"CREATE INDEX ON docs USING {method} ({what}) WITH ({options})")
    owner.execute("ANALYZE docs")


def tune(connection: Connection, **options: Any) -> list[dict[str, Any]]:
    found = connection.execute("SELECT to_jsonb(t) FROM ml_rag.tune_index('docs', %s) AS t", (json.dumps(options),))
    return [row[0] for row in found]


def marker(owner: Connection) -> dict[str, str]:
    found = value_of(
        owner,
        "SELECT col_description('docs'::regclass, attnum) FROM pg_attribute"
        " WHERE attrelid = 'docs'::regclass AND attname = 'segment_embedding'",
    )
    return dict(entry.split("=") for entry in found.removeprefix("GENAI_OPTIONS=").split(","))


def explained(connection: Connection, **options: Any) -> dict[str, Any]:
    given = {"explain": True, "skip_generate": True, "query_embedding": vectors(1, 3)[0].tolist(), **options}
    facts: dict[str, Any] = answer(connection, "?", given)["explain"]["stores"][0]["semantic"]
    return facts


def test_the_cheapest_setting_that_reaches_the_recall_is_kept(owner: Connection, asker: Connection, store: str) -> None:
    index(owner)
    _, *curve = tune(owner, questions="asked", keep=False)
    goal = curve[3]["recall"]
    assert curve[0]["recall"] < goal
    exact, *again = tune(owner, questions="asked", recall=goal)
    assert [row["recall"] for row in again] == [row["recall"] for row in curve]
    curve = again
    assert (exact["recall"], exact["ef_search"], exact["is_kept"]) == (1, None, False)
    assert [row["ef_search"] for row in curve] == [40, 60, 80, 100, 150, 200, 300, 400, 600, 800, 1000]
    assert all(row["milliseconds"] > 0 and row["probes"] is None and row["rescore"] is None for row in curve)
    (kept,) = [row for row in curve if row["is_kept"]]
    assert kept == next(row for row in curve if row["recall"] >= goal)
    found = marker(owner)
    assert found["EMBED_MODEL_ID"] == "fake-embed"
    assert (int(found["EF_SEARCH"]), int(found["TUNED_ROWS"])) == (kept["ef_search"], ROWS)
    assert float(found["RECALL"]) == kept["recall"]
    assert "PROBES" not in found
    # searches take it, unless they say otherwise
    facts = explained(asker)
    assert facts["ef_search"] == kept["ef_search"]
    assert facts["tuned"] == {"recall": kept["recall"], "rows": ROWS, "is_outgrown": False}
    assert explained(asker, index_options={"ef_search": 77})["ef_search"] == 77
    with asker.transaction():
        asker.execute("SET LOCAL hnsw.ef_search = 55")
        assert explained(asker)["ef_search"] == 55


def test_recall_is_the_share_of_the_nearest_rows_that_the_index_finds(owner: Connection, store: str) -> None:
    index(owner)
    _, *curve = tune(owner, questions="asked", keep=False, n_citations=5)
    stored = vectors(ROWS, 1)
    for row in (curve[0], curve[4]):
        owner.execute(f"SET hnsw.ef_search = {row['ef_search']}; SET enable_seqscan = off")
        found = 0
        for question in vectors(30, 2):
            nearest = {f"text {i}" for i in np.argsort(-(stored @ question))[:5]}
            bare = "SELECT segment FROM docs ORDER BY segment_embedding <=> %s::vector LIMIT 5"
            found += len(nearest & {text for (text,) in owner.execute(bare, [str(question.tolist())])})
        assert row["recall"] == round(found / 150, 4)


def test_without_questions_segments_are_asked_with(owner: Connection, store: str) -> None:
    index(owner)
    _, *curve = tune(owner, sample=20)
    assert curve[-1]["recall"] > 0.9
    # each asks for its neighbours; alone it would always be found
    assert curve[0]["recall"] < 1
    assert round(curve[0]["recall"] * 100) == pytest.approx(curve[0]["recall"] * 100)


def test_questions_are_embedded(owner: Connection, store: str) -> None:
    index(owner)
    _, *curve = tune(owner, questions="SELECT 'text ' || i AS question FROM generate_series(1, 10) AS i", keep=False)
    assert len(curve) == 11
    with error("42703", "lack a column", "question"):
        tune(owner, questions="SELECT 1 AS id")


def test_lists_of_ivfflat_are_tuned(owner: Connection, asker: Connection, store: str) -> None:
    index(owner, "ivfflat", "lists = 40")
    _, *curve = tune(owner, questions="asked", recall=1)
    assert [row["probes"] for row in curve] == [1, 2, 3, 5, 10, 20, 30, 40]
    recalls = [row["recall"] for row in curve]
    assert recalls == sorted(recalls)
    assert recalls[0] < recalls[-1] == 1
    kept = next(row for row in curve if row["is_kept"])
    assert int(marker(owner)["PROBES"]) == kept["probes"]
    assert explained(asker)["probes"] == kept["probes"]


def test_rescoring_of_a_binary_index_is_tuned(owner: Connection, asker: Connection, store: str) -> None:
    index(owner, what=f"(binary_quantize(segment_embedding)::bit({DIMENSIONS})) bit_hamming_ops")
    _, *curve = tune(owner, questions="asked", recall=0.9)
    assert [(row["ef_search"], row["rescore"]) for row in curve[-4:]] == [(1000, n) for n in (1000, 2000, 4000, 8000)]
    kept = next(row for row in curve if row["is_kept"])
    assert kept["recall"] >= 0.9 > curve[0]["recall"]
    assert int(marker(owner)["RESCORE"]) == kept["rescore"]
    facts = explained(asker)
    assert (facts["rescored"], facts["ef_search"]) == (kept["rescore"], kept["ef_search"])
    # an index of another kind does not take it over
    owner.execute("DROP INDEX docs_binary_quantize_idx")
    index(owner, what=f"(segment_embedding::halfvec({DIMENSIONS})) halfvec_cosine_ops")
    assert explained(asker)["rescored"] < kept["rescore"]
    _, *curve = tune(owner, questions="asked")
    assert all(row["rescore"] is None for row in curve)
    assert "RESCORE" not in marker(owner)


def test_a_recall_that_no_setting_reaches_is_a_warning(owner: Connection, store: str) -> None:
    index(owner, options="m = 2, ef_construction = 4")
    notices = noticed(owner, lambda d: (d.message_primary, d.message_detail))
    _, *curve = tune(owner, questions="asked", recall=1)
    best = max(row["recall"] for row in curve)
    assert best < 1
    (kept,) = [row for row in curve if row["is_kept"]]
    assert kept == next(row for row in curve if row["recall"] == best)
    assert [message for message, _ in notices] == ["no setting of the index of public.docs reaches a recall of 1"]
    assert str(best) in (notices[0][1] or "")


def test_explain_warns_once_the_table_has_doubled(owner: Connection, asker: Connection, store: str) -> None:
    index(owner)
    tune(owner, questions="asked")
    owner.execute(
        "INSERT INTO docs SELECT document_name, '{}', 1000 + document_id, segment_number, segment, NULL"
        f" FROM docs LIMIT {ROWS - 1}"
    )
    owner.execute("ANALYZE docs")
    notices = noticed(asker, lambda d: (d.message_primary, d.message_detail))
    assert explained(asker)["tuned"]["is_outgrown"] is False
    assert notices == []
    owner.execute("INSERT INTO docs SELECT 'x', '{}', 5000, 1, 'x', NULL")
    owner.execute("ANALYZE docs")
    assert explained(asker)["tuned"]["is_outgrown"] is True
    assert [message for message, _ in notices] == [
        "public.docs has doubled since the settings of its index were measured"
    ]
    assert f"It had {ROWS} rows, and has {2 * ROWS}." in (notices[0][1] or "")


def test_only_the_owner_keeps_settings(owner: Connection, asker: Connection, store: str) -> None:
    index(owner)
    with error("42501", "must be owner of public.docs to keep settings of its index"):
        tune(asker)
    before = marker(owner)
    assert not any(row["is_kept"] for row in tune(asker, keep=False, sample=3))
    assert marker(owner) == before


def test_what_is_measured_is_what_the_caller_may_see(owner: Connection, asker: Connection, store: str) -> None:
    index(owner)
    owner.execute("GRANT SELECT ON asked TO ml_rag_user; ALTER TABLE docs ENABLE ROW LEVEL SECURITY")
    with error("P0002", "has no segments"):
        tune(asker, keep=False)
    owner.execute("CREATE POLICY few ON docs USING (document_id = 1)")
    _, *curve = tune(asker, keep=False, sample=10000, n_citations=4)
    assert [row["recall"] for row in curve] == [1] * 11
    owner.execute("REVOKE SELECT ON asked FROM ml_rag_user")
    with error("42501", "asked"):
        tune(asker, keep=False, questions="asked")


def test_a_call_can_be_cancelled(owner: Connection, store: str) -> None:
    index(owner)
    owner.execute("SET statement_timeout = 500")
    began = time.monotonic()
    with error("57014"):
        tune(owner, sample=3000)
    assert time.monotonic() - began < 5
    owner.execute("RESET statement_timeout")
    assert "EF_SEARCH" not in marker(owner)


def test_what_cannot_be_tuned_is_refused(owner: Connection, store: str) -> None:
    with error("55000", "no approximate index", "COSINE"):
        tune(owner)
    index(owner)
    with error("55000", "no approximate index", "EUCLIDEAN"):
        tune(owner, distance_metric="EUCLIDEAN")
    for name, value in (("recall", 1.01), ("sample", 0), ("n_citations", 100), ("questions", 1), ("keep", "yes")):
        with error("22023", name):
            tune(owner, **{name: value})
    owner.execute("DELETE FROM docs")
    with error("P0002", "has no segments"):
        tune(owner)
    owner.execute("COMMENT ON COLUMN docs.segment_embedding IS NULL")
    with error("P0002", "no vector store"):
        tune(owner)


@pytest.mark.parametrize("value", ["0", "1001", "-5", "x", "1e2", "99999999999999"])
def test_a_setting_in_a_marker_that_is_out_of_range_is_left_out(
    owner: Connection, asker: Connection, store: str, value: str
) -> None:
    index(owner)
    text = f"GENAI_OPTIONS=EMBED_MODEL_ID=fake-embed,EF_SEARCH={value},TUNED_ROWS={ROWS}"
    owner.execute(f"COMMENT ON COLUMN docs.segment_embedding IS '{text}'")
    assert explained(asker)["ef_search"] == 40


def test_the_partitions_of_a_table_are_tuned_together(owner: Connection, asker: Connection, store: str) -> None:
    owner.execute(
        "ALTER TABLE docs RENAME TO rows; CREATE TABLE docs (LIKE rows) PARTITION BY HASH (document_id);"
        "CREATE TABLE docs_0 PARTITION OF docs FOR VALUES WITH (MODULUS 2, REMAINDER 0);"
        "CREATE TABLE docs_1 PARTITION OF docs FOR VALUES WITH (MODULUS 2, REMAINDER 1);"
        "INSERT INTO docs SELECT * FROM rows; DROP TABLE rows; GRANT SELECT ON docs TO ml_rag_user;"
        "COMMENT ON COLUMN docs.segment_embedding IS 'GENAI_OPTIONS=EMBED_MODEL_ID=fake-embed'"
    )
    index(owner)
    _, *curve = tune(owner, questions="asked", recall=0.9)
    (kept,) = [row for row in curve if row["is_kept"]]
    assert curve[-1]["recall"] >= 0.9
    assert explained(asker)["ef_search"] == kept["ef_search"]
