"""pictures.py DSN FOLDER: the pages of ml-rag explore at three widths, in light and dark, in few colours."""

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
COLOURS = 16
#: pixels of the pages, at most, and between them; then they are made smaller
WIDTHS, HEIGHT, GAP, SCALE = (1440, 768, 390), 1000, 24, 0.5
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
        found = connection.execute("SELECT run_id FROM ml_rag.evaluation_run ORDER BY run_id DESC LIMIT 3")
        runs = sorted(number for (number,) in found)
        row = connection.execute(
            "SELECT document_name FROM samples WHERE document_name LIKE '%/thresholds-and-overlap.pdf' LIMIT 1"
        ).fetchone()
    assert row is not None
    asked = {"q": QUESTION, "a": json.dumps(HYBRID), "generate": "1"}
    document = {"store": "public.samples", "document": row[0], "q": QUESTION, "a": json.dumps(HYBRID)}
    #: name -> path
    pictures = {
        "ask": "/",
        "question": f"/?{urlencode({**asked, 'a': json.dumps(LIMITED)})}",
        "compare": f"/?{urlencode({**asked, 'b': json.dumps(SEMANTIC), 'generate': ''})}",
        "why": f"/why?{urlencode({**document, 'segment': 1})}",
        "document": f"/document?{urlencode(document)}",
        "stores": "/stores",
        "store": "/store?store=public.samples",
        "runs": "/runs",
        "run": f"/runs/{runs[-1]}",
        "runs-compared": f"/runs/compare?a={runs[0]}&b={runs[1]}",
        "runs-question": f"/question?{urlencode({'q': QUESTION})}",
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
                for name, path in pictures.items():
                    page.goto(f"http://127.0.0.1:{PORT}{path}")
                    shown = []
                    for width in WIDTHS:
                        page.set_viewport_size({"width": width, "height": 900})
                        height = min(HEIGHT, page.evaluate("document.querySelector('main').offsetHeight + 60"))
                        page.set_viewport_size({"width": width, "height": height})
                        shown.append(page.screenshot())
                    save(shown, folder / f"{name}-{scheme}.png")
                # that of README.md
                page.set_viewport_size({"width": 1100, "height": 900})
                page.goto(f"http://127.0.0.1:{PORT}{pictures['question']}")
                page.locator("#stages").evaluate("e => window.scrollTo(0, e.offsetTop)")
                save([page.screenshot()], folder / f"candidates-{scheme}.png", scale=1)
            browser.close()
        finally:
            explore.terminate()


def save(contents: list[bytes], path: Path, scale: float = SCALE) -> None:
    """Beside each other, and smaller."""
    images = [Image.open(io.BytesIO(content)).convert("RGB") for content in contents]
    joined = Image.new("RGB", (sum(i.width + GAP for i in images) - GAP, max(i.height for i in images)), "#808080")
    left = 0
    for image in images:
        joined.paste(image, (left, 0))
        left += image.width + GAP
    small = joined.resize((int(joined.width * scale), int(joined.height * scale)), Image.Resampling.LANCZOS)
    few = small.quantize(COLOURS, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    few.save(path, optimize=True)
    print(path.name, path.stat().st_size)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
