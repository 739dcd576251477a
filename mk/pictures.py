"""pictures.py DSN FOLDER: pictures of ml-rag explore, in light and dark and as a phone shows it, in few colours."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlencode

import psycopg
from PIL import Image
from playwright.sync_api import sync_playwright

PORT = 8639
COLOURS = 64
QUESTION = "What should I do when the model server cannot be reached?"
SEMANTIC = {"n_citations": 3, "retrieval_options": {"max_distance": 0.6}}
HYBRID = {"keyword_search": True, "n_citations": 3}
LIMITED = {"keyword_search": True, "n_citations": 3, "retrieval_options": {"max_distance": 0.75}}
#: what should be found, for the runs of the evaluation
QUESTIONS = {
    QUESTION: "errors.xlsx",
    "Which columns does a vector store need?": "vector-stores.docx",
    "How do I load a folder of documents?": "loading-documents.pptx",
    "How are segments that are too far away dropped?": "thresholds-and-overlap.pdf",
    "How much memory does a model need?": "models-and-sizing.pdf",
    "What does n_citations do?": "options.html",
    "What is ml_rag?": "what-is-ml-rag.md",
    "What does SQLSTATE 55000 mean?": "errors.xlsx",
}


#: run of the evaluation -> its options
RUNS = {
    "by words": {"semantic_search": False, "keyword_search": True},
    "by meaning": {},
    "hybrid": {"keyword_search": True},
}


def evaluate(dsn: str) -> None:
    """The runs, in place of those of an earlier call."""
    rows = [f"SELECT '{question}' AS question, '{document}' AS documents" for question, document in QUESTIONS.items()]
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("DELETE FROM ml_rag.evaluation_run WHERE name = ANY (%s)", (list(RUNS),))
        for name, options in RUNS.items():
            wanted = {"name": name, "options": {**options, "vector_store": ["public.samples"]}}
            connection.execute("SELECT ml_rag_evaluate(%s, %s)", (" UNION ALL ".join(rows), json.dumps(wanted)))


def main(dsn: str, folder: Path) -> None:
    evaluate(dsn)
    with psycopg.connect(dsn) as connection:
        row = connection.execute(
            "SELECT document_name FROM samples WHERE document_name LIKE '%/thresholds-and-overlap.pdf' LIMIT 1"
        ).fetchone()
    assert row is not None
    asked = {"q": QUESTION, "a": json.dumps(HYBRID), "generate": "1"}
    limited = {**asked, "a": json.dumps(LIMITED)}
    document = {"store": "public.samples", "document": row[0], "q": QUESTION, "a": json.dumps(HYBRID)}
    #: name -> path, what the picture begins with, width and height
    pictures = {
        "question": (f"/?{urlencode(asked)}", "h1", 1100, 900),
        "candidates": (f"/?{urlencode(limited)}", "h3:text('Candidates')", 1100, 900),
        "compare": (f"/?{urlencode({**asked, 'b': json.dumps(SEMANTIC), 'generate': ''})}", "h2", 1100, 900),
        "document": (f"/document?{urlencode(document)}", "ol.document", 1100, 700),
        "runs": ("/runs", "h1", 1100, 580),
        "phone": (f"/?{urlencode(limited)}", "h3:text('Candidates')", 390, 844),
    }
    command = [Path(sys.executable).parent / "ml-rag", "explore", "--dsn", dsn, "--port", str(PORT)]
    folder.mkdir(exist_ok=True)
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as explore,  # noqa: S603 - our own program
        sync_playwright() as started,
    ):
        assert explore.stdout is not None
        address = explore.stdout.readline().strip()
        try:
            browser = started.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
            for scheme in ("light", "dark"):
                context = browser.new_context(color_scheme=scheme)
                page = context.new_page()
                page.set_default_timeout(300_000)
                page.goto(address)
                for name, (path, first, width, height) in pictures.items():
                    page.set_viewport_size({"width": width, "height": height})
                    page.goto(f"http://127.0.0.1:{PORT}{path}")
                    page.locator(first).first.evaluate("e => window.scrollTo(0, e.offsetTop - 12)")
                    save(page.screenshot(), folder / f"{name}-{scheme}.png")
            browser.close()
        finally:
            explore.terminate()


def save(content: bytes, path: Path) -> None:
    image = Image.open(io.BytesIO(content)).convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE)
    image.save(path, optimize=True)
    print(path.name, path.stat().st_size)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
