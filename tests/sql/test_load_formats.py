"""store/load with the model server that ships: real files of several formats, its parsers and its fake models."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from support.cluster import Connection
from support.loading import counts, load, rows, segments, write
from support.processes import Background, wait_until
from support.servers import running_server
from support.stores import error

SLOW = """
[models.slow]
task = "embed"
engine = "fake"
dimensions = 16
fake_mode = "slow"
fake_delay_seconds = 0.01
[server]
socket_mode = "0666"
"""
SAMPLES = Path(__file__).resolve().parents[2] / "docs" / "samples"


@pytest.fixture
def samples(folder: Path) -> Path:
    """The sample documents of the product."""
    for path in SAMPLES.iterdir():
        shutil.copy(path, folder)
    return folder


def test_the_sample_documents_load_with_pages_and_headings(loader: Connection, samples: Path) -> None:
    result = load(loader, f"{samples}/")
    names = sorted(path.name for path in SAMPLES.iterdir())
    assert counts(result) == {"loaded": len(names)}
    assert sorted(segments(loader)) == names
    formats = {row[0] for row in rows(loader, "SELECT DISTINCT metadata ->> 'format' FROM docs")}
    assert {"pdf", "docx", "pptx", "xlsx", "html", "markdown"} <= formats
    pages = rows(loader, "SELECT DISTINCT metadata ->> 'page' FROM docs WHERE document_name LIKE '%.pdf'")
    assert ("1",) in pages
    assert counts(load(loader, f"{samples}/")) == {"unchanged": len(names)}


def test_each_file_has_its_name_type_size_and_dates(loader: Connection, samples: Path) -> None:
    (samples / "errors.xlsx").touch()
    for path in samples.iterdir():
        os.utime(path, (1_700_000_000, 1_600_000_000))
    load(loader, f"{samples}/")
    found = {
        row[0]: row[1:]
        for row in rows(
            loader,
            "SELECT DISTINCT metadata ->> 'file_name', metadata ->> 'file_type', (metadata -> 'file_size')::integer,"
            " metadata ->> 'last_modified_date', metadata ->> 'last_accessed_date',"
            " metadata ->> 'creation_date' <= metadata ->> 'last_modified_date', document_name FROM docs",
        )
    }
    types = {
        "errors.xlsx": "application/vnd.openxmlformats-officedocument.spreadsheetml.sheet",
        "loading-documents.pptx": "application/vnd.openxmlformats-officedocument.presentationml.presentation",
        "models-and-sizing.pdf": "application/pdf",
        "options.html": "text/html",
        "thresholds-and-overlap.pdf": "application/pdf",
        "vector-stores.docx": "application/vnd.openxmlformats-officedocument.wordprocessingml.document",
        "what-is-ml-rag.md": "text/markdown",
    }
    assert found == {
        name: (
            file_type,
            (samples / name).stat().st_size,
            *("2020-09-13T12:26:40Z", "2023-11-14T22:13:20Z", True, str(samples / name)),
        )
        for name, file_type in types.items()
    }


def test_files_are_filtered_by_type_and_date(loader: Connection, samples: Path) -> None:
    for path in samples.iterdir():
        os.utime(path, (0, 1_700_000_000 if path.suffix == ".pdf" else 1_600_000_000))
    load(loader, f"{samples}/")

    def names(**filters: object) -> set[str]:
        options = json.dumps({"filters": filters, "n_citations": 100})
        return {
            row[0] for row in rows(loader, "SELECT metadata ->> 'file_name' FROM ml_rag_search('store', %s)", options)
        }

    pdfs = {"models-and-sizing.pdf", "thresholds-and-overlap.pdf"}
    assert names(file_type="application/pdf") == pdfs
    assert names(last_modified_date={"gte": "2023-11-14T22:13:20Z"}) == pdfs
    assert names(last_modified_date={"gt": "2020-09-14", "lt": "2023-11-15"}) == pdfs
    with error("P0002", "no segment found"):
        names(last_modified_date={"gt": "2023-11-14T22:13:20Z"})
    assert names(file_name={"like": "%.md"}, file_size={"gt": 100}) == {"what-is-ml-rag.md"}


def test_formats_leaves_the_others_out_without_an_error(loader: Connection, samples: Path) -> None:
    result = load(loader, f"{samples}/", {"formats": ["pdf", "docx"]})
    wanted = {path.name for path in SAMPLES.iterdir() if path.suffix in (".pdf", ".docx")}
    assert set(segments(loader)) == wanted
    assert counts(result) == {"loaded": len(wanted), "skipped": len(list(SAMPLES.iterdir())) - len(wanted)}
    # what was left out is loaded by a later call, and what is there is not made anew for another choice of formats
    result = load(loader, f"{samples}/")
    assert counts(result) == {"loaded": len(list(SAMPLES.iterdir())) - len(wanted), "unchanged": len(wanted)}


def test_broken_files_fail_alone(loader: Connection, samples: Path) -> None:
    pdf = next(samples.glob("*.pdf")).read_bytes()
    (samples / "cut.pdf").write_bytes(pdf[: len(pdf) // 3])
    (samples / "empty.txt").write_bytes(b"")
    (samples / "really.docx").write_text("a text that claims to be something else")
    (samples / "noise.bin").write_bytes(bytes(range(256)) * 64)
    result = load(loader, f"{samples}/")
    failed = {Path(failure["document_name"]).name for failure in result["failed"]}
    assert {"empty.txt", "noise.bin"} <= failed
    assert failed.isdisjoint(path.name for path in SAMPLES.iterdir())
    assert counts(result)["failed"] == len(failed)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"formats": ["docs"]}, "unknown document format"),
        ({"embed_model_id": "nothing"}, "model"),
        ({"embed_model_id": "fake-generate"}, "model"),
        ({"chunking": {"segment_tokens": 1048576}}, "segment_tokens"),
    ],
)
def test_options_that_only_the_model_server_can_judge_are_22023(
    loader: Connection, samples: Path, options: dict[str, object], message: str
) -> None:
    with error("22023", message):
        load(loader, f"{samples}/", options)
    assert rows(loader, "SELECT to_regclass('docs')") == [(None,)]


def test_chunking_reaches_the_splitter(loader: Connection, folder: Path) -> None:
    write(folder, a="\n\n".join(f"Paragraph {i} has some words in it." for i in range(20)))
    load(loader, f"{folder}/", {"table_name": "whole"})
    load(loader, f"{folder}/", {"table_name": "parts", "chunking": {"split_by": "paragraph"}})
    assert len(segments(loader, "parts")["a.txt"]) == 20
    assert len(segments(loader, "whole")["a.txt"]) < 20


def test_a_model_server_that_is_killed_in_mid_load_keeps_what_was_committed(
    owner: Connection, loader: Connection, folder: Path, local_sockets: Path
) -> None:
    write(folder, **{f"f{i:03}": f"text number {i}" for i in range(300)})
    socket = local_sockets / "killed.sock"
    with running_server(socket=socket, config=SLOW) as server:
        owner.execute("SELECT ml_rag.configure('model_server', %s)", (f"unix:{socket}",))

        def kill_after_the_first_commit() -> None:
            wait_until(lambda: rows(owner, "SELECT FROM pg_class WHERE relname = 'docs'"), 60)
            server.kill()

        killing = Background(kill_after_the_first_commit)
        with error("08006"):
            load(loader, f"{folder}/", {"embed_model_id": "slow"})
        killing.result()
    kept = segments(owner)
    assert len(kept) in range(16, 300)
    with running_server(socket=socket, config=SLOW):
        assert counts(load(loader, f"{folder}/")) == {"unchanged": len(kept), "loaded": 300 - len(kept)}
