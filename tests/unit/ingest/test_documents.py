"""``POST /v1/documents`` with the fake models: the protocol and its errors."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from ml_rag.ingest import sandbox
from ml_rag.ingest.sandbox import Limits
from ml_rag.protocol import MAX_REPLY_VALUES, has_more_values
from ml_rag.server.app import create_app
from ml_rag.server.catalogue import load_catalogue
from ml_rag.server.engines.fake import FakeEmbed
from ml_rag.server.registry import Registry
from support.documents_app import (
    Server,
    assert_error,
    by_index,
    expected,
    lines,
    request,
    server,
    vectors,
)
from support.processes import wait_until
from support.servers import running_server

__all__ = ["server"]


def test_a_line_a_document_with_all_its_keys(server: Server) -> None:
    texts = [b"red blue", "grün und gelb".encode(), b"one two three"]
    files = [(f"{number}.txt", text) for number, text in enumerate(texts)]
    found = by_index(server.post(files))
    assert len(found) == 3
    for line, (name, text) in zip(found, files, strict=True):
        assert set(line) == {
            "index",
            "name",
            "format",
            "error",
            "metadata",
            "segments",
            "dimensions",
            "embeddings",
        }
        assert (line["name"], line["format"], line["error"], line["dimensions"]) == (name, "orders", None, 16)
        assert line["metadata"]["name"] == name
        assert line["segments"] == [{"text": text.decode(), "tokens": len(text.split()), "metadata": {}}]
        assert np.allclose(vectors(line), expected(server, "fake-embed", [text.decode()]))


def test_every_segment_has_its_own_vector_in_documents_larger_than_a_batch(server: Server) -> None:
    files = [
        (f"{number}", " ".join(f"w{number}x{word}" for word in range(words)).encode())
        for number, words in enumerate([3, 9000, 1, 40, 32_016, 7])
    ]
    longest = [line for line in lines(server.post(files, chunking={"segment_tokens": 16})) if line["index"] == 4]
    assert [(len(line["segments"]), line["more"]) for line in longest] == [(1000, True), (1000, True), (1, False)]
    for line, (_, text) in zip(by_index(server.post(files, chunking={"segment_tokens": 16})), files, strict=True):
        texts = [segment["text"] for segment in line["segments"]]
        assert " ".join(texts).split() == text.decode().split()
        assert np.allclose(vectors(line), expected(server, "fake-embed", texts))


def test_options_reach_parser_and_splitter(server: Server) -> None:
    chunking = {"split_by": "tokens", "segment_tokens": 20, "overlap_tokens": 5}
    text = " ".join(f"w{number}" for number in range(50))
    reply = server.post([("a", text.encode())], chunking=chunking, formats=["md", "text"], language="de", ocr=True)
    (line,) = lines(reply)
    assert {key: line["metadata"][key] for key in ("formats", "language", "ocr")} == {
        "formats": ["md", "text"],
        "language": "de",
        "ocr": True,
    }
    assert [segment["tokens"] for segment in line["segments"]] == [20, 20, 20]
    assert line["segments"][1]["text"].split()[0] == "w15"


def test_the_models_prefix_counts_and_is_embedded_but_not_stored(server: Server) -> None:
    text = " ".join(f"w{number}" for number in range(100))
    (line,) = lines(server.post([("a", text.encode())], embed_model_id="prefixed"))
    texts = [segment["text"] for segment in line["segments"]]
    assert " ".join(texts) == text
    assert [segment["tokens"] for segment in line["segments"]] == [32, 32, 32, 8]
    assert np.allclose(vectors(line), expected(server, "prefixed", texts))


def test_a_line_has_no_more_values_than_a_backend_takes(server: Server) -> None:
    most = Limits().values // 500
    # each [] has a comma, too
    for values, is_read in (most // 2 - 20, True), (most // 2 + 1, False):
        reply = server.post([("a", b"!values %d" % values)], chunking={"segment_tokens": 16})
        (line,) = reply.text.splitlines()
        assert not has_more_values(line.encode(), MAX_REPLY_VALUES)
        assert (json.loads(line)["error"] is None) == is_read


@pytest.mark.parametrize("size", [10, 300_000])
def test_an_upload_that_a_parser_keeps_open_is_empty_afterwards(
    server: Server, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    kept: list[int] = []
    descriptor = sandbox._descriptor

    def keep(*arguments: Any) -> int:
        found = descriptor(*arguments)
        kept.append(os.dup(found))
        return found

    monkeypatch.setattr(sandbox, "_descriptor", keep)
    assert lines(server.post([("a", b"word " * size)]))[0]["error"] is None
    wait_until(lambda: [os.fstat(one).st_size for one in kept] == [0])
    os.close(kept[0])


def test_no_documents_no_lines(server: Server) -> None:
    with server.client() as client:
        # a field without a file name, so that the body is multipart all the same
        reply = client.post("/v1/documents", files={"options": (None, '{"embed_model_id": "fake-embed"}')})
    assert reply.status_code == 200
    assert reply.text == ""


def test_a_document_that_fails_leaves_the_others_alone(server: Server) -> None:
    files = [
        ("a", b"red"),
        ("b", b"!refuse it says no"),
        ("c", b"!exit 3"),
        ("d", b""),
        ("e", b"!raise odd"),
        ("f", b"blue"),
    ]
    found = by_index(server.post(files))
    assert [line["error"] and line["error"]["message"] for line in found] == [
        None,
        "the document is no good",
        "the document crashed its parser",
        "the document has no text",
        "the document cannot be read",
        None,
    ]
    for line in found:
        if line["error"] is not None:
            assert line["error"]["code"] == "document_failed"
            assert (line["segments"], line["embeddings"]) == ([], "")
    assert found[1]["error"]["detail"] == "it says no"
    assert found[1]["error"]["hint"] == "Write another."


@pytest.mark.parametrize("model", ["nan", "broken"])
def test_a_model_that_fails_is_an_error_in_each_line(server: Server, model: str) -> None:
    for line in by_index(server.post([("a", b"red"), ("b", b"blue"), ("c", b"green")], embed_model_id=model)):
        assert line["error"]["code"] == "engine_failed"
        assert (line["segments"], line["embeddings"]) == ([], "")


def test_only_the_document_fails_whose_text_the_model_cannot_embed(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    embed = FakeEmbed.embed

    def unlucky(self: FakeEmbed, texts: Sequence[str], cancelled: Callable[[], bool]) -> Any:
        time.sleep(0.2)  # so that the others come together meanwhile
        if any("unlucky" in text for text in texts):
            raise RuntimeError("bad luck")
        return embed(self, texts, cancelled)

    monkeypatch.setattr(FakeEmbed, "embed", unlucky)
    files = [(str(number), b"unlucky" if number == 5 else b"red") for number in range(8)]
    found = by_index(server.post(files))
    assert [line["index"] for line in found if line["error"]] == [5]
    assert "RuntimeError" in found[5]["error"]["detail"]


@pytest.mark.parametrize(
    ("options", "status", "code", "says"),
    [
        ({"embed_model_id": "fake-embde"}, 404, "model_not_found", "fake-embde"),
        ({"embed_model_id": "fake-generate"}, 400, "wrong_task", "fake-generate"),
        ({"embed_model_id": "all_minilm_l6_v2"}, 503, "model_unavailable", "all_minilm_l6_v2"),
        ({"embed_model_id": 3}, 400, "invalid_request", "embed_model_id"),
        ({"chunking": {"split_by": "chapter"}}, 400, "invalid_request", "split_by"),
        ({"chunking": {"segment_tokens": 100000}}, 400, "invalid_request", "segment_tokens"),
        ({"chunking": {"overlap_tokens": 1000}}, 400, "invalid_request", "overlap_tokens"),
        ({"chunking": {"context": "title"}}, 400, "invalid_request", "context"),
        ({"chunking": {"context": True}}, 400, "invalid_request", "context"),
        ({"chunking": "small"}, 400, "invalid_request", "chunking"),
        ({"formats": ["word perfect"]}, 400, "invalid_request", "format"),
        ({"formats": "pdf"}, 400, "invalid_request", "formats"),
        ({"language": 3}, 400, "invalid_request", "language"),
        ({"ocr": "yes"}, 400, "invalid_request", "ocr"),
        ({"speed": 3}, 400, "invalid_request", "speed"),
    ],
)
def test_what_concerns_all_documents_is_an_error_reply(
    server: Server, options: dict[str, Any], status: int, code: str, says: str
) -> None:
    assert says in assert_error(server.post([("a", b"red")], **options), status, code)["message"]


def test_bodies_that_are_not_what_they_should_be(server: Server) -> None:
    head = {"content-type": "multipart/form-data; boundary=x"}
    fine = b'--x\r\nContent-Disposition: form-data; name="options"\r\n\r\n{"embed_model_id": "fake-embed"}\r\n--x--\r\n'
    with server.client() as client:

        def post(content: bytes, headers: dict[str, str] = head) -> httpx.Response:
            return client.post("/v1/documents", content=content, headers=headers)

        assert post(fine).status_code == 200
        for content in (
            b"",
            b"nonsense",
            fine.replace(b'name="options"', b""),
            fine.replace(b"options", b"opt"),
            fine.replace(b'"embed_model_id"', b"{{{"),
            fine.replace(b"--x--", b"--y--")[:40],
        ):
            assert_error(post(content), 400, "invalid_request")
        assert_error(post(fine, {"content-type": "multipart/form-data"}), 400, "invalid_request")
        assert_error(post(b"{}", {"content-type": "application/json"}), 400, "invalid_request")
        assert_error(post(fine, {}), 400, "invalid_request")
        stray = fine.replace(b"--x--", b'--x\r\nContent-Disposition: form-data; name="fiel"\r\n\r\nx\r\n--x--')
        assert "'fiel'" in assert_error(post(stray), 400, "invalid_request")["detail"]


def test_a_body_over_the_bound_is_refused(server: Server) -> None:
    error = assert_error(server.post([("a", b"x" * 2_000_001)]), 400, "invalid_request")
    assert "2000000 bytes" in error["detail"]


def test_the_shipped_parsers_in_a_server_of_its_own(tmp_path: Path) -> None:
    page = "<html><head><title>T</title></head><body><h1>Colours</h1><p>Red and blue.</p></body></html>"
    files = [
        ("a.md", b"# Title\n\nSome text.\n\n## Part\n\nMore of it."),
        ("b.html", page.encode()),
        ("c.csv", b"name,amount\napple,3\npear,4\n"),
        ("d.bin", bytes(range(256)) * 4),
    ]
    with running_server() as server:
        transport = httpx.HTTPTransport(uds=str(server.socket))
        with httpx.Client(transport=transport, base_url="http://server", timeout=60) as client:
            found = by_index(client.post("/v1/documents", **request(files)))
            chunking = {"context": "headings"}
            (headed,) = by_index(client.post("/v1/documents", **request(files[:1], chunking=chunking)))
            text = f"Title\n\n{found[0]['segments'][0]['text']}"
            body = {"model": "fake-embed", "input": text, "input_type": "document"}
            (embedded,) = client.post("/v1/embeddings", json=body).json()["data"]
        assert [line["error"] and line["error"]["code"] for line in found] == [None, None, None, "document_failed"]
        assert found[0]["segments"][0]["metadata"] == {"headings": ["Title"]}
        assert [segment["text"] for segment in headed["segments"]] == [found[0]["segments"][0]["text"]]
        assert headed["segments"][0]["metadata"] == {"headings": ["Title"]}
        assert np.allclose(vectors(headed)[0], embedded["embedding"])
        assert not np.allclose(vectors(headed), vectors(found[0]))
        assert "Red and blue." in found[1]["segments"][0]["text"]
        assert "| apple | 3 |" in found[2]["segments"][0]["text"]
        assert server.stop() == 0


def test_without_a_server_by_asgi(tmp_path: Path) -> None:
    registry = Registry(load_catalogue(fake_models=True), tmp_path)
    app = create_app(registry)

    async def main() -> httpx.Response:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            return await client.post("/v1/documents", **request([("a.txt", b"red blue")]))

    try:
        (line,) = lines(asyncio.run(main()))
    finally:
        app.state.sandbox.close()
        registry.close()
    assert (line["format"], line["segments"][0]["text"], line["error"]) == ("text", "red blue", None)


@pytest.mark.parametrize("charset", ["punycode", "idna", "latin-1", "no-such-codec"])
def test_a_body_in_another_character_set_is_refused(server: Server, charset: str) -> None:
    """To decode 1 MB as punycode takes minutes, for which all requests wait."""
    body = b'--x\r\nContent-Disposition: form-data; name="options"\r\n\r\n{}\r\n--x--\r\n'
    kind = f'multipart/form-data; boundary=x; charset="{charset}"'
    with server.client() as client:
        reply = client.post("/v1/documents", content=body, headers={"Content-Type": kind})
        assert "not in UTF-8" in assert_error(reply, 400, "invalid_request")["message"]
        reply = client.post("/v1/documents", content=body, headers={"Content-Type": kind.replace(charset, "UTF-8")})
        assert "embed_model_id" in assert_error(reply, 400, "invalid_request")["message"]


def test_a_picture_that_ends_its_parser_is_left_out_of_its_document(server: Server) -> None:
    (line,) = by_index(
        server.post(
            [
                ("a", b"!draw text"),
            ],
            describe_images="vision",
        )
    )
    assert line["error"] is None
    assert [segment["text"] for segment in line["segments"]] == ["!draw text"]
    assert line["metadata"]["left_out"] == "pictures (the document crashed its parser)"


def test_a_document_that_ends_its_parser_fails_with_and_without_pictures(server: Server) -> None:
    (line,) = by_index(server.post([("a", b"!abort")], describe_images="vision"))
    assert line["error"]["message"] == "the document crashed its parser"


def test_a_parser_reads_documents_of_one_role(server: Server) -> None:
    def parser(role: int) -> str:
        call = [f"6f-{role}", 5, 100, 1, [], [role, "vector_store_load", 1.0, "parse", 1.0, "", "", 1.0, None]]
        with server.client() as client:
            headers = {"X-ML-RAG-Call": json.dumps(call)}
            (line,) = by_index(client.post("/v1/documents", headers=headers, **request([("a", b"!facts")])))
        return str(line["segments"][0]["text"].split()[0])

    assert len({parser(10), parser(11), parser(10), parser(11)}) == 2
