"""Reranking and ml_rank with cross-encoders: a tiny one made on the spot, and the real one where it is there."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support import cross_encoder
from support.cluster import Cluster, Connection, value_of
from support.real_model import need_models
from support.servers import running_server
from support.shared_data import SHARED, shared
from support.stores import create_store, fake_embedding, search

pytestmark = [
    pytest.mark.models,
    pytest.mark.skipif(
        bool(os.environ.get("ML_RAG_TEST_MODEL_SERVER")),
        reason="the database is on another machine, which cannot reach a socket of this one",
    ),
]

TEXTS = [
    "The sky appears blue because of Rayleigh scattering.",
    "Bananas are yellow.",
    "x " * 500,
    "a",
    *[f"This is text number {n} of many." for n in range(60)],
]
QUERY = "Why is the sky blue?"


def connected(cluster: Cluster, socket: Path) -> Iterator[Connection]:
    with cluster.database() as database:
        connection = database.connect()
        connection.execute("SELECT ml_rag.configure('model_server', %s)", (f"unix:{socket}",))
        yield connection


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("sentence_transformers")
    tiny_model = tmp_path_factory.mktemp("models") / "tiny"
    cross_encoder.make(tiny_model)
    return tiny_model


@pytest.fixture(scope="module")
def tiny(cluster: Cluster, reachable_dir: Path, tiny_model: Path) -> Iterator[Connection]:
    """A database whose default reranker is the tiny cross-encoder."""
    config = '[server]\nsocket_mode = "0666"\n' + cross_encoder.catalogue_entry("tiny", tiny_model)
    with running_server(socket=reachable_dir / "tiny.sock", config=config, models_dir=tiny_model.parent) as server:
        for connection in connected(cluster, server.socket):
            connection.execute("SELECT ml_rag.configure('rerank_model_id', 'tiny')")
            yield connection


@pytest.fixture(scope="module")
def expected(tiny_model: Path) -> list[float]:
    """What the library itself says of TEXTS."""
    import torch
    from sentence_transformers import CrossEncoder

    model = CrossEncoder(str(tiny_model), device="cpu", max_length=cross_encoder.MAX_TOKENS)
    scores = model.predict([(QUERY, text) for text in TEXTS], activation_fn=torch.nn.Sigmoid())
    assert np.unique(np.round(scores, 3)).size > 20
    return [float(score) for score in scores]


def rank(connection: Connection, query: str, texts: list[str], **options: Any) -> Any:
    records = [{"id": str(n), "content": text} for n, text in enumerate(texts)]
    return value_of(connection, "SELECT ml_rank(%s, %s, %s)", (query, json.dumps(records), json.dumps(options)))


def test_scores_and_order_are_the_librarys(tiny: Connection, expected: list[float]) -> None:
    answer = rank(tiny, QUERY, TEXTS)
    assert answer["model"] == "tiny"
    scores = {int(record["id"]): record["score"] for record in answer["records"]}
    assert [scores[n] for n in range(len(TEXTS))] == pytest.approx(expected, abs=1e-4)
    found = [record["score"] for record in answer["records"]]
    assert found == sorted(found, reverse=True)


def test_what_is_beyond_the_models_tokens_does_not_count(tiny: Connection) -> None:
    long = "ab " * 200
    first, second = rank(tiny, QUERY, [long, long + "something else altogether"])["records"]
    assert first["score"] == pytest.approx(second["score"], abs=1e-6)


def test_the_pipeline_follows_the_model(tiny: Connection) -> None:
    texts = TEXTS[:2] + TEXTS[4:40]
    rows = [("d.txt", 1, 10 * n, text, fake_embedding(text)) for n, text in enumerate(texts)]
    create_store(tiny, "public.texts", rows, type="vector(16)")
    best = rank(tiny, QUERY, texts)["records"][:5]
    found = search(tiny, QUERY, {"n_citations": 5, "rerank": {}})
    assert [row[5] for row in found] == [record["content"] for record in best]
    assert [row[10] for row in found] == pytest.approx([record["score"] for record in best], abs=1e-5)


# -- the real one ----------------------------------------------------------------------------------------------------

MODEL = "ms-marco-minilm-l6-v2"


@pytest.fixture(scope="module")
def real(cluster: Cluster, reachable_dir: Path) -> Iterator[Connection]:
    """A database whose model server has the real embedding model and the real cross-encoder."""
    folder = need_models(MODEL, "all_minilm_l6_v2")
    config = '[server]\nsocket_mode = "0666"\n'
    with running_server(socket=reachable_dir / "marco.sock", config=config, models_dir=folder) as server:
        for connection in connected(cluster, server.socket):
            for setting in ("rerank_model_id", "embed_model_id"):
                connection.execute("SELECT ml_rag.configure(%s, NULL)", (setting,))
            yield connection


def test_the_real_cross_encoder_knows_what_answers_a_question(real: Connection) -> None:
    answer = rank(real, QUERY, TEXTS)
    assert answer["model"] == MODEL
    assert answer["records"][0]["content"] == TEXTS[0]
    assert answer["records"][0]["score"] > 0.9
    assert answer["records"][1]["score"] < 0.1


@pytest.mark.shared
@shared
def test_underwater_activities_are_found_in_the_perks(real: Connection, reachable_dir: Path) -> None:
    # copied to where PostgreSQL's user can read
    copy = reachable_dir / "northwind_reranked"
    shutil.copytree(SHARED / "northwind" / "pdf", copy)
    copy.chmod(0o755)
    for path in copy.iterdir():
        path.chmod(0o644)
    options = json.dumps({"schema_name": "public", "table_name": "northwind"})
    real.execute("CALL vector_store_load(%s, %s)", (f"file://{copy}/", options))
    for more in ({}, {"keyword_search": True}):
        found = search(
            real, "learning about underwater activities", {"rerank": {}, "vector_store": ["northwind"], **more}
        )
        assert Path(found[0][2]).name == "PerksPlus.pdf"
