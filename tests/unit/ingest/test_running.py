"""ingest/formats/running: headers and footers that repeat; ingest/split: pages of a few words."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import Any

import pytest

from ml_rag.abc import Block, Document
from ml_rag.ingest.formats.running import running
from ml_rag.ingest.parse import parse
from ml_rag.ingest.split import chunking, split
from ml_rag.ingest.units import Counter
from support.office import docx, placed_pdf

SAMPLES = Path(__file__).resolve().parents[3] / "docs" / "samples"


PAGES = (
    "Page {} of 12", "{}/12", "{} of 12", "Seite {}", "Seite {} von 12", "- {} -", "Annual report 2023 | {}",
    "Annual report 2023 {}", "p. {}", "Page no. {}", "Page: {}", "{} CHAPTER 1. BIRDS", "CHAPTER 1. BIRDS {}",
    "Página {}", "стр. {}", "Str. {}", "blz. {}", "Σελ. {}", "صفحه {}", "पृष्ठ {}", "หน้า {}",
    "第 {} 頁", "Acme | {} | internal", "Acme Ltd {} internal",
)  # fmt: skip
VALUES = (
    "Week {}", "Week {} of 12", "Payslip {}/2024", "Fee for this year: {} EUR", "Section {}: Boats", "Invoice no. {}",
    "第{}课",
)  # fmt: skip


@pytest.mark.parametrize(
    ("pages", "runs"),
    [
        ([["Guide · page 1"], ["Guide · page 2"]], ["Guide · page 1"]),
        ([["Page 3 of 9", "x"], ["Page 4 of 9", "y"], ["Page 5 of 9", "z"]], ["Page 3 of 9"]),
        ([["7"], ["8"], ["9"], ["10"], ["11"]], ["7"]),
        ([["Acme"], ["Acme"], ["Acme"], ["other"]], ["Acme"]),
        ([["Acme", "1"], ["2"], ["Acme", "3"], ["4"], ["Acme", "5"]], ["Acme", "1"]),
        # what repeats too seldom, or counts something else
        ([["Acme"], ["Acme"]], []),
        ([["Total 10"], ["Total 25"], ["Total 31"]], []),
        ([["Acme"], ["Acme"], ["Acme"], *[["x"]] * 2, *[[str(n * n + 50)] for n in range(20)]], []),
        ([["x" * 121], ["x" * 121], ["x" * 121]], []),
        # numbers that are text
        ([[f"Invoice {1000 + n}"] for n in range(5)], []),
        ([[f"{1000000 + n}"] for n in range(5)], []),
        ([[f"INV-{n}"] for n in range(1, 6)], []),
        ([[f"Order 00{n}"] for n in range(1, 6)], []),
        ([["Total 10"], ["Total 11"], ["x"]], []),
        ([["Total 1"], ["Total 2"], ["x"], ["x y"]], []),
        ([[f"Step {n}"] if n < 4 else [f"{n * n}"] for n in range(1, 20)], []),
        ([[f"-{n}-"] for n in range(100, 105)], ["-100-"]),
        ([[f"第{n}页"] for n in range(1, 5)], ["第1页"]),
        *(([[line.format(n), "Acme 7"] for n in range(1, 6)], [line.format(1), "Acme 7"]) for line in PAGES),
        *(([[line.format(n), f"Page {n}"] for n in range(1, 6)], ["Page 1"]) for line in VALUES),
        ([["only"]], []),
        ([list("ABCDEFG"), list("ABCDEFG"), list("ABCDEFG")], list("ABCDEFG")),
    ],
)
def test_lines_that_run_over_pages(pages: list[list[str]], runs: list[str]) -> None:
    found, shown = running(dict(enumerate(pages, 1)))
    assert shown == runs
    assert [line for line in pages[0] if line in found[1]] == runs


@pytest.mark.parametrize("name", ["thresholds-and-overlap", "models-and-sizing"])
def test_the_footer_of_a_pdf_is_metadata_only(name: str) -> None:
    made = parse(f"{name}.pdf", (SAMPLES / f"{name}.pdf").read_bytes())
    title = made.metadata["title"]
    assert made.metadata["running_lines"] == [f"{title} · page 1"]
    assert made.blocks[0].text.startswith(f"# {title}\n")
    assert not any("· page" in block.text for block in made.blocks)
    assert all(len(s.text) > 100 for s in split(made, chunking(None, 256), Counter()))


def test_the_numbers_of_chapters_count_alike() -> None:
    pages = {n: [f"{'ABCDEFG'[n // 3]} - {n + 1}", f"Step {n}" if n < 4 else f"{n * n}"] for n in range(21)}
    found, shown = running(pages)
    assert shown == ["A - 1", "B - 4", "C - 7", "D - 10", "E - 13"]
    assert all(lines == {pages[n][0]} for n, lines in found.items())
    _, shown = running({n: [f"{'Birds' if n < 4 else 'Boats'} {n}"] for n in range(1, 8)})
    assert shown == ["Birds 1", "Boats 4"]


def test_consecutive_numbers_are_text_unless_they_stand_in_the_margin() -> None:
    lines = [[(72, 600 - 15 * i, f"{word} {'x' * n}") for i, word in enumerate("abcd")] for n in range(4)]
    for y, is_text in ((720, True), (755, False), (60, True), (40, False)):
        made = parse("a.pdf", placed_pdf(*([(300, y, str(1001 + n)), *lines[n]] for n in range(4))))
        assert [str(1001 + n) in block.text for n, block in enumerate(made.blocks)] == [is_text] * 4, y


def test_a_line_that_reads_like_the_number_of_the_page_is_text() -> None:
    lines = [
        [(72, 600 - 15 * i, f"{word}{' a' * n}") for i, word in enumerate(("in", "and", "", "sites", "say"))]
        for n in range(5)
    ]
    made = parse("a.pdf", placed_pdf(*([*one, (72, 570, str(n)), (72, 50, str(n))] for n, one in enumerate(lines, 1))))
    assert made.metadata["running_lines"] == ["1"]
    assert [block.text.split().count(str(n)) for n, block in enumerate(made.blocks, 1)] == [1] * 5


def test_lines_that_repeat_are_text_but_at_the_edges_of_a_page() -> None:
    alike = ["your account was closed.", "The balance was paid out.", "Act within 30 days."]
    letters = [[(72, 400, f"Dear {'A' * n},"), *((72, 385 - 15 * i, x) for i, x in enumerate(alike))] for n in range(9)]
    made = parse("a.pdf", placed_pdf(*letters))
    assert all(line in block.text for block in made.blocks for line in alike)
    assert "running_lines" not in made.metadata
    for y, is_text in ((661, False), (659, True), (133, True), (131, False)):
        made = parse("a.pdf", placed_pdf(*([(72, 400, f"Dear {'A' * n},"), (72, y, "Acme")] for n in range(9))))
        assert ["Acme" in block.text for block in made.blocks] == [is_text] * 9, y
        assert made.metadata.get("running_lines", []) == ["Acme"] * (not is_text)


def test_footers_of_slides_are_no_text() -> None:
    from pptx import Presentation
    from pptx.util import Emu

    deck = Presentation()
    assert deck.slide_height is not None
    for number in range(1, 4):
        slide = deck.slides.add_slide(deck.slide_layouts[1])
        slide.shapes.title.text = f"Topic {number}"
        slide.placeholders[1].text = f"Acme Inc. {number}"
        box = slide.shapes.add_textbox(0, Emu(int(0.95 * deck.slide_height)), 99, 99)
        box.text_frame.text = f"Acme Inc. {number}"
        for place in slide.slide_layout.placeholders:
            if place.placeholder_format.idx in (11, 12):  # footer, number
                slide.shapes.clone_placeholder(place)
                slide.placeholders[place.placeholder_format.idx].text = "Confidential"
    out = BytesIO()
    deck.save(out)
    made = parse("a.pptx", out.getvalue())
    assert [block.text for block in made.blocks] == [f"# Topic {number}\n\nAcme Inc. {number}" for number in (1, 2, 3)]
    assert made.metadata["running_lines"] == ["Acme Inc. 1", "Confidential"]


def test_headers_and_footers_of_word_are_metadata_unless_they_are_long() -> None:
    paragraph = "<w:p><w:r><w:t>{}</w:t></w:r></w:p>"
    main = 'xmlns:w="http://schemas.openxmlformats.org/wordprocessingml/2006/main"'
    box = paragraph.format("Acme &lt;Inc.&gt;</w:t><w:pict><w:txbxContent>{}</w:txbxContent></w:pict><w:t>")
    header = f"<w:hdr {main}>{box.format(paragraph.format('Since 1900'))}{paragraph.format(7)}</w:hdr>"
    footer = f"<w:ftr {main}>{paragraph.format('Acme &lt;Inc.&gt;')}{paragraph.format('so &lt; ' * 30)}</w:ftr>"
    parts = {"word/header1.xml": header, "word/footer1.xml": footer}
    made = parse("a.docx", docx(paragraph.format("text"), **parts))
    assert [block.text for block in made.blocks] == [f"text\n\n{'so < ' * 30}".strip()]
    assert made.metadata["running_lines"] == ["Acme <Inc.>", "Since 1900"]
    many = "".join(paragraph.format(f"line {n}") for n in range(7))
    made = parse("a.docx", docx(paragraph.format("text"), **{"word/header1.xml": f"<w:hdr {main}>{many}</w:hdr>"}))
    assert [block.text for block in made.blocks] == ["text\n\nline 5\n\nline 6"]
    assert made.metadata["running_lines"] == [f"line {n}" for n in range(5)]


def segments(pages: list[str], key: str = "page", **options: Any) -> list[tuple[Any, str]]:
    blocks = [Block(text, {key: number}) for number, text in enumerate(pages, 1)]
    found = split(Document("pdf", blocks), chunking(options or None, 256), Counter())
    return [(segment.metadata[key], segment.text) for segment in found]


LONG = "There is so much to say here that it fills a segment of its own."


@pytest.mark.parametrize(
    ("pages", "expected"),
    [
        (["Part one", LONG], [(2, f"Part one\n\n{LONG}")]),
        ([LONG, "The end"], [(1, f"{LONG}\n\nThe end")]),
        ([LONG, "Part two", LONG, "The end"], [(1, LONG), (3, f"Part two\n\n{LONG}\n\nThe end")]),
        (["A title", "by somebody", LONG], [(3, f"A title\n\nby somebody\n\n{LONG}")]),
        (["one", "two"], [(1, "one"), (2, "two")]),
        ([LONG, LONG], [(1, LONG), (2, LONG)]),
    ],
)
@pytest.mark.parametrize("key", ["page", "slide"])
def test_a_page_of_a_few_words_joins_its_neighbour(pages: list[str], expected: list[Any], key: str) -> None:
    assert segments(pages, key) == expected
    assert len(segments(pages, key, split_by="page")) == len(pages)
    assert len(segments(pages, "sheet")) == len(pages)


def test_a_title_page_gives_its_heading_to_what_follows() -> None:
    blocks = [Block("# Handbook", {"page": 1}), Block(LONG, {"page": 2})]
    (segment,) = split(Document("pdf", blocks), chunking(None, 256), Counter())
    assert segment.metadata == {"page": 2, "headings": ["Handbook"]}
