"""The official ``openai`` client against the model server, over TCP and over the unix socket."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import httpx
import openai
import pytest

from support.servers import running_server


@pytest.fixture(scope="module", params=["tcp", "unix"])
def client(request: pytest.FixtureRequest) -> Iterator[openai.OpenAI]:
    with running_server(tcp=True) as server:
        if request.param == "tcp":
            with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
                yield made
        else:
            http = httpx.Client(transport=httpx.HTTPTransport(uds=str(server.socket)))
            with openai.OpenAI(base_url="http://server/v1", api_key="none", max_retries=0, http_client=http) as made:
                yield made


@pytest.mark.parametrize("options", [{}, {"encoding_format": "float"}, {"encoding_format": "base64"}])
def test_embeddings(client: openai.OpenAI, options: dict[str, str]) -> None:
    reply = client.embeddings.create(model="fake-embed", input=["red", "red blue"], **options)
    assert reply.usage.prompt_tokens == 3
    assert [row.index for row in reply.data] == [0, 1]
    if options.get("encoding_format") != "base64":
        assert reply.data[0].embedding.index(1.0) == zlib.crc32(b"red") % 16


def test_models(client: openai.OpenAI) -> None:
    assert "fake-embed" in [model.id for model in client.models.list()]
    assert client.models.retrieve("fake-embed").owned_by == "ml_rag"


def test_errors_are_the_clients_own(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.embeddings.create(model="none", input="a")
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError):
        client.embeddings.create(model="fake-generate", input="a")


def test_chat(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(model="fake-generate", messages=[{"role": "user", "content": "why?"}])
    assert reply.choices[0].message.content.startswith("fake answer to: why?")
    assert reply.choices[0].finish_reason == "stop"


def test_chat_as_a_stream(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="fake-generate", messages=[{"role": "user", "content": "why?"}], stream=True, max_tokens=3
    )
    chunks = [chunk for chunk in stream if chunk.choices]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks).strip() == "fake answer to:"
    assert chunks[-1].choices[0].finish_reason == "length"
