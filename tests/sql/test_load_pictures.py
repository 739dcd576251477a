"""store/load with describe_images: pictures of real files, described by an endpoint that answers as it is told."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from click.testing import CliRunner
from psycopg import sql

from ml_rag.cli import main
from support.cluster import Connection, Database
from support.loading import counts, load, loader_role, rows
from support.office import docx_with_pictures, drawn, epub, image_pdf, mail_with_pictures, odf_with_pictures, text_pdf
from support.processes import wait_until
from support.remote_endpoint import RemoteEndpoint, piece, replies, streams
from support.servers import remote_model, running_server
from support.stores import answer

MARK = "(Picture, described by the model vision)"
SAID = "A bar chart. Sales rose from 3 to 5 million."
CHART = streams(piece("A bar chart. "), piece("Sales rose from 3 to 5 million.", "stop"), "[DONE]")
WITH = {"describe_images": "vision"}


@pytest.fixture(scope="module")
def endpoint(reachable_dir: Path) -> Iterator[tuple[RemoteEndpoint, str]]:
    remote = RemoteEndpoint()
    config = '[server]\nsocket_mode = "0666"\n'
    config += remote_model("vision", remote.url, input=["text", "image"]) + remote_model("blind", remote.url)
    models = reachable_dir / "pictures"
    models.mkdir(exist_ok=True)
    with running_server(config=config, socket=reachable_dir / "pictures.sock", models_dir=models) as server:
        yield remote, f"unix:{server.socket}"
    remote.server.shutdown()
    remote.server.server_close()


@pytest.fixture
def remote(endpoint: tuple[RemoteEndpoint, str], owner: Connection) -> RemoteEndpoint:
    made, address = endpoint
    owner.execute("SELECT ml_rag.configure('model_server', %s)", (address,))
    owner.execute("SELECT ml_rag.configure('embed_model_id', 'fake-embed')")
    made.requests.clear()
    made.replies = [CHART]
    return made


def pictured(folder: Path, **files: bytes) -> str:
    for name, content in files.items():
        (folder / name.replace("_", ".")).write_bytes(content)
    return f"{folder}/"


def table(connection: Connection) -> list[tuple[Any, ...]]:
    columns = "segment, metadata ->> 'described_by', metadata ->> 'page'"
    return rows(connection, f"SELECT {columns} FROM docs ORDER BY document_name, segment_number")


def test_pictures_become_text_that_says_who_wrote_it(loader: Connection, remote: RemoteEndpoint, folder: Path) -> None:
    uri = pictured(folder, a_pdf=image_pdf("one"), b_docx=docx_with_pictures("Above", drawn("two"), "Below"))
    result = load(loader, uri, WITH)
    assert (counts(result), result["incomplete"]) == ({"loaded": 2}, [])
    assert table(loader) == [
        (f"{MARK}\n\n{SAID}", "vision", "1"),
        ("Above", None, None),
        (f"{MARK}\n\n{SAID}", "vision", None),
        ("Below", None, None),
    ]
    assert len(remote.requests) == 2
    asked = {"skip_generate": True, "n_citations": 1, "citation_fields": ["metadata.described_by", "metadata.page"]}
    (citation,) = answer(loader, f"{MARK} {SAID}", {**asked, "document_name": [f"{folder}/a.pdf"]})["citations"]
    assert (citation["described_by"], citation["page"]) == ("vision", 1)


def test_pictures_of_books_presentations_and_mails_too(
    loader: Connection, remote: RemoteEndpoint, folder: Path
) -> None:
    uri = pictured(
        folder,
        a_epub=epub(["<p>a</p><img src='p.png'/>"], **{"o/p.png": drawn("book")}),
        b_odp=odf_with_pictures("<draw:page>{0}</draw:page>", drawn("deck"), kind="presentation"),
        c_eml=mail_with_pictures(
            "See", ("p.png", "image/png", drawn("mail")), ("cut.png", "image/png", drawn("x")[:99])
        ),
    )
    result = load(loader, uri, WITH)
    assert counts(result) == {"loaded": 3}
    assert [one["left_out"] for one in result["incomplete"]] == ["1 picture (cannot be read)"]
    assert [row[:2] for row in table(loader)] == [
        ("a", None),
        (f"{MARK}\n\n{SAID}", "vision"),
        (f"{MARK}\n\n{SAID}", "vision"),
        ("# Hello\n\nSee\n\nAttachments: p.png, cut.png", None),
        (f"{MARK}\n\n{SAID}", "vision"),
    ]
    assert len(remote.requests) == 3


def test_off_by_default(loader: Connection, remote: RemoteEndpoint, folder: Path) -> None:
    uri = pictured(folder, a_pdf=image_pdf("other"), b_docx=docx_with_pictures("Above", drawn("two"), "Below"))
    result = load(loader, uri)
    assert counts(result) == {"loaded": 1, "failed": 1}
    assert "describe_images" in result["failed"][0]["hint"]
    assert [row[1] for row in table(loader)] == [None]
    assert remote.requests == []


def test_a_second_load_asks_nothing(
    loader: Connection, remote: RemoteEndpoint, folder: Path, endpoint: tuple[RemoteEndpoint, str]
) -> None:
    uri = pictured(folder, a_docx=docx_with_pictures("Above", drawn("again"), "Below"))
    load(loader, uri, WITH)
    assert len(remote.requests) == 1
    assert counts(load(loader, uri, WITH)) == {"unchanged": 1}
    pictured(folder, a_docx=docx_with_pictures("Above, changed", drawn("again")))
    assert counts(load(loader, uri, WITH)) == {"changed": 1}
    assert counts(load(loader, uri, {**WITH, "chunking": {"split_by": "sentence"}})) == {"changed": 1}
    assert counts(load(loader, uri, {**WITH, "table_name": "others"})) == {"loaded": 1}
    assert len(remote.requests) == 1
    assert [row[1] for row in table(loader)] == [None, "vision", "vision"]
    assert counts(load(loader, uri)) == {"changed": 1}  # without the option its text goes
    assert [row[1] for row in table(loader)] == [None]


def test_a_description_that_fails_loses_nothing_and_is_tried_again(
    loader: Connection, remote: RemoteEndpoint, folder: Path
) -> None:
    remote.replies = [replies(500, {"error": {"message": "busy"}}), CHART]
    uri = pictured(folder, a_docx=docx_with_pictures("Above", drawn("fails"), "Below", drawn("works")))
    result = load(loader, uri, WITH)
    assert counts(result) == {"loaded": 1}
    ((left_out),) = [one["left_out"] for one in result["incomplete"]]
    assert left_out == "1 picture (the remote model failed: HTTP status 500: busy)"
    assert [row[:2] for row in table(loader)] == [("Above\n\nBelow", None), (f"{MARK}\n\n{SAID}", "vision")]
    result = load(loader, uri, WITH)
    assert (counts(result), result["incomplete"]) == ({"changed": 1}, [])
    assert [row[1] for row in table(loader)] == [None, "vision", None, "vision"]
    assert len(remote.requests) == 3
    assert counts(load(loader, uri, WITH)) == {"unchanged": 1}


def test_many_reasons_are_cut(loader: Connection, remote: RemoteEndpoint, folder: Path) -> None:
    """Each segment of the document repeats them."""
    remote.replies = [replies(400, {"error": {"message": letter * 250}}) for letter in "abc"]
    uri = pictured(folder, a_docx=docx_with_pictures("Above", *(drawn(f"reason {n}") for n in range(3))))
    ((left_out),) = [one["left_out"] for one in load(loader, uri, WITH)["incomplete"]]
    assert (len(left_out), left_out[-2:]) == (500, "b…")


def test_what_the_endpoint_refuses_is_not_tried_again(loader: Connection, remote: RemoteEndpoint, folder: Path) -> None:
    remote.replies = [replies(400, {"error": {"message": "against our policy"}})]
    uri = pictured(folder, a_docx=docx_with_pictures("Above", drawn("refused")), b_png=drawn("refused too"))
    result = load(loader, uri, WITH)
    assert counts(result) == {"loaded": 1, "failed": 1}
    (failed,) = result["failed"]
    assert failed["error"] == "document has no text"
    assert "against our policy" in failed["detail"]
    assert counts(load(loader, uri, WITH)) == {"unchanged": 1, "failed": 1}


@pytest.mark.parametrize(
    ("model", "message", "hint"),
    [
        ("blind", "model blind takes no images", "Models that take images: vision."),
        ("fake-embed", "model fake-embed takes no images", "Models that take images: vision."),
        ("visoin", "model 'visoin' does not exist", "Did you mean 'vision'?"),
    ],
)
def test_a_model_that_takes_no_images_is_refused(
    loader: Connection, remote: RemoteEndpoint, folder: Path, model: str, message: str, hint: str
) -> None:
    uri = pictured(folder, a_pdf=text_pdf(["text"]))
    with pytest.raises(psycopg.errors.InvalidParameterValue) as caught:
        load(loader, uri, {"describe_images": model})
    assert (caught.value.diag.message_primary, caught.value.diag.message_hint) == (message, hint)


def test_who_may_not_generate_may_not_send_pictures(
    loader: Connection, owner: Connection, remote: RemoteEndpoint, folder: Path, db: Database
) -> None:
    uri = pictured(folder, a_pdf=image_pdf("secret"))
    owner.execute("REVOKE EXECUTE ON FUNCTION ml_generate(text, jsonb) FROM ml_rag_user")
    try:
        with pytest.raises(psycopg.errors.InsufficientPrivilege, match="to have pictures described"):
            load(loader, uri, WITH)
        loader.execute("SELECT ml_rag.create_store('public.docs')")
        with pytest.raises(psycopg.errors.InsufficientPrivilege, match="to have pictures described"):
            loader.execute("SELECT ml_rag.load_document('docs', 'a', %s, %s)", (image_pdf("secret"), json.dumps(WITH)))
        owner.execute(
            sql.SQL("GRANT EXECUTE ON FUNCTION ml_generate(text, jsonb) TO {}").format(sql.Identifier(loader_role(db)))
        )
        load(loader, uri, WITH)
        assert len(remote.requests) == 1
    finally:
        owner.execute("GRANT EXECUTE ON FUNCTION ml_generate(text, jsonb) TO ml_rag_user")


def test_cancelling_ends_the_question_at_once(
    loader: Connection, remote: RemoteEndpoint, folder: Path, db: Database
) -> None:
    remote.replies = [streams(*[piece("")] * 200, pause=0.2)]
    uri = pictured(folder, a_pdf=image_pdf("cancelled"))
    took: list[float] = []

    def run() -> None:
        with pytest.raises(psycopg.errors.QueryCanceled):
            load(loader, uri, WITH)
        took.append(time.monotonic())

    before = remote.broken_pipes
    for _ in range(3):  # one of them on a busy machine
        remote.requests.clear()
        thread = threading.Thread(target=run)
        thread.start()
        wait_until(lambda: remote.requests)
        time.sleep(0.3)
        began = time.monotonic()
        loader.cancel_safe()
        thread.join(20)
        took[-1] -= began
    assert min(took) < 0.2
    wait_until(lambda: remote.broken_pipes > before, seconds=10)  # the endpoint is left, too


def test_the_command_loads_them_as_well(
    owner: Connection, remote: RemoteEndpoint, tmp_path: Path, db: Database
) -> None:
    (tmp_path / "a.png").write_bytes(drawn("by the command"))
    arguments = ["load", str(tmp_path), "--store", "public.docs", "--dsn", f"{db.dsn} dbname={db.name}"]
    done = CliRunner().invoke(main, [*arguments, "--describe-images", "vision"])
    assert done.exit_code == 0, done.output
    assert [row[1] for row in table(owner)] == ["vision"]
