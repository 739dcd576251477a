"""``/v1/documents`` with the real default embedding model, on the Northwind handbook."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest

from support.real_model import need_models
from support.servers import running_server
from support.shared_data import SHARED

MODEL = "all_minilm_l6_v2"
PDF = SHARED / "northwind" / "pdf"

pytestmark = [
    pytest.mark.models,
    pytest.mark.shared,
    pytest.mark.skipif(not PDF.is_dir(), reason=f"{PDF} does not exist; name its folder by ML_RAG_SHARED"),
]


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with running_server(fake_models=False, models_dir=need_models(MODEL)) as server:
        transport = httpx.HTTPTransport(uds=str(server.socket))
        with httpx.Client(transport=transport, base_url="http://server", timeout=600) as client:
            yield client


def load(client: httpx.Client, names: list[str], **chunking: Any) -> dict[str, dict[str, Any]]:
    reply = client.post(
        "/v1/documents",
        data={"options": json.dumps({"embed_model_id": MODEL, "chunking": chunking})},
        files=[("file", (name, (PDF / name).read_bytes())) for name in names],
    )
    assert reply.status_code == 200, reply.text
    return {line["name"]: line for line in map(json.loads, reply.text.splitlines())}


@pytest.mark.parametrize("chunking", [{}, {"segment_tokens": 64, "overlap_tokens": 16}])
def test_segments_fit_the_model_and_have_the_vectors_of_their_texts(
    client: httpx.Client, chunking: dict[str, int]
) -> None:
    names = ["Benefit_Options.pdf", "PerksPlus.pdf", "employee_handbook.pdf"]
    lines = load(client, names, **chunking)
    assert set(lines) == set(names)
    for line in lines.values():
        assert line["error"] is None
        texts = [segment["text"] for segment in line["segments"]]
        vectors = np.frombuffer(base64.b64decode(line["embeddings"]), "<f4").reshape(len(texts), 384)
        reply = client.post("/v1/embeddings", json={"model": MODEL, "input": texts, "encoding_format": "base64"}).json()
        alone = [np.frombuffer(base64.b64decode(row["embedding"]), "<f4") for row in reply["data"]]
        assert np.allclose(vectors, alone, atol=1e-4)
        # what the model has read is what the splitter counted, so nothing was cut off
        assert reply["usage"]["total_tokens"] == sum(segment["tokens"] for segment in line["segments"])
        assert max(segment["tokens"] for segment in line["segments"]) <= chunking.get("segment_tokens", 256)
        assert {"page"} <= set(line["segments"][0]["metadata"])
        pages = [segment["metadata"]["page"] for segment in line["segments"]]
        assert pages == sorted(pages)
