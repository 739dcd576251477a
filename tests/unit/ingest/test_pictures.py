"""Pictures of documents: which are collected for a model, and where its descriptions stand."""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Iterable
from io import BytesIO
from typing import Any

import pypdfium2 as pdfium
import pytest
from PIL import Image

from ml_rag.abc import Block, Document
from ml_rag.errors import DocumentError
from ml_rag.ingest.formats import pictures
from ml_rag.ingest.formats.pictures import MAX_SIDE, Pictures
from ml_rag.ingest.parse import parse
from ml_rag.ingest.split import NONE, Chunking, split
from ml_rag.ingest.units import Counter
from support.office import (
    docx_with_pictures,
    drawn,
    epub,
    image_pdf,
    mail_with_pictures,
    odf_with_pictures,
    odt,
    picture_pdf,
    pptx_with_picture,
    text_pdf,
)


def collected(name: str, content: bytes) -> Pictures:
    found = Pictures("vision")
    try:
        parse(name, content, pictures=found)
    except DocumentError:
        assert found.count
    return found


def described(name: str, content: bytes, texts: Iterable[str], **options: Any) -> list[tuple[str, dict[str, Any]]]:
    found = collected(name, content)
    numbers = (str(number) for number, _ in found.wanted)
    document = parse(name, content, pictures=Pictures("vision", dict(zip(numbers, texts, strict=True))), **options)
    return [(block.text, block.metadata) for block in document.blocks]


def html(*sources: bytes, table: bool = False) -> bytes:
    images = (f"<img alt='a' src='data:image/png;base64,{base64.b64encode(source).decode()}'>" for source in sources)
    inner = "".join(f"<p>before {image} after</p>" for image in images)
    return f"<h1>T</h1>{f'<table><tr><td>x<td>{inner}<tr><td>1<td>2</table>' if table else inner}".encode()


MADE = {"described_by": "vision"}
#: parts of an OpenDocument text, with a picture
TABLE = "<table:table>" + "".join(
    f"<table:table-row><table:table-cell><text:p>{one}</text:p></table:table-cell>"
    f"<table:table-cell><text:p>{other}</text:p></table:table-cell></table:table-row>"
    for one, other in (("x{0}", "y"), ("1", "2"))
) + "</table:table>"  # fmt: skip
BOX = "<draw:frame><draw:text-box>{0}<text:p>in the box</text:p></draw:text-box></draw:frame>"


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.png", drawn("one"), [("said", MADE)]),
        ("a.pdf", image_pdf("one"), [("said", {"page": 1, **MADE})]),
        (
            "a.pdf",
            picture_pdf("Above it", ["one"], "Below it"),
            [("Above it Below it", {"page": 1}), ("said", {"page": 1, **MADE})],
        ),
        ("a.docx", docx_with_pictures("Above", drawn("one"), "Below"), [("Above", {}), ("said", MADE), ("Below", {})]),
        (
            "a.pptx", pptx_with_picture("Title", drawn("one")),
            [("# Title", {"slide": 1}), ("said", {"slide": 1, **MADE})],
        ),
        ("a.html", html(drawn("one")), [("# T\n\nbefore a", {}), ("said", MADE), ("after", {})]),
        (
            "a.html", html(drawn("one"), table=True),
            [("# T\n\n| x | before a after |\n| --- | --- |\n| 1 | 2 |", {}), ("said", MADE)],
        ),
        (
            "a.epub",
            epub(["Text", "<p>a</p><svg><image xlink:href='i/p.png'/></svg><p>b"], **{"o/i/p.png": drawn("one")}),
            [("Text", {"section": 1}), ("a", {"section": 2}), ("said", {"section": 2, **MADE}), ("b", {"section": 2})],
        ),
        (
            "a.odt", odf_with_pictures("<text:p>a{0}</text:p><text:p>b</text:p>", drawn("one")),
            [("a", {}), ("said", MADE), ("b", {})],
        ),
        (
            "a.odt", odf_with_pictures(f"<text:p>a</text:p>{TABLE}<text:p>b</text:p>", drawn("one")),
            [("a\n\n| x | y |\n| --- | --- |\n| 1 | 2 |", {}), ("said", MADE), ("b", {})],
        ),
        (
            "a.odt", odf_with_pictures(f"<text:p>a{BOX}</text:p>", drawn("one")),
            [("a", {}), ("said", MADE), ("in the box", {})],
        ),
        (
            "a.odp", odf_with_pictures("<draw:page><text:p/>{0}</draw:page>", drawn("one"), kind="presentation"),
            [("said", {"slide": 1, **MADE})],
        ),
        (
            "a.eml", mail_with_pictures("See", ("a.bin", "image/png", drawn("one"))),
            [("# Hello\n\nSee\n\nAttachments: a.bin", {}), ("said", MADE)],
        ),
        (
            "a.mbox",
            b"From a@example.com Thu Jan  1 00:00:00 2026\n"
            + mail_with_pictures("See", ("a.PNG", "application/octet-stream", drawn("one"))),
            [("# Hello\n\nSee\n\nAttachments: a.PNG", {"message": 1}), ("said", {"message": 1, **MADE})],
        ),
    ],
)  # fmt: skip
def test_a_description_stands_where_its_picture_does(name: str, content: bytes, expected: list[Any]) -> None:
    assert described(name, content, ["said"]) == expected


@pytest.mark.parametrize("name", ["a.png", "a.pdf", "a.docx", "a.pptx", "a.html"])
def test_nothing_is_collected_without_the_option(name: str) -> None:
    contents = {
        "a.docx": docx_with_pictures("Above", drawn("one")),
        "a.pptx": pptx_with_picture("Title", drawn("one")),
        "a.html": html(drawn("one")),
        "a.pdf": picture_pdf("Above it", ["one"], "Below it"),
    }
    if name == "a.png":
        with pytest.raises(DocumentError) as caught:
            parse(name, drawn("one"))
        assert "describe_images" in (caught.value.hint or "")
        return
    assert all("described_by" not in block.metadata for block in parse(name, contents[name]).blocks)


def test_each_page_of_a_tiff_is_described() -> None:
    out = BytesIO()
    frames = [Image.open(BytesIO(drawn(text))) for text in ("one", "two")]
    frames[0].save(out, "TIFF", save_all=True, append_images=frames[1:])
    assert described("a.tiff", out.getvalue(), ["1", "2"]) == [
        ("1", {"page": 1, **MADE}),
        ("2", {"page": 2, **MADE}),
    ]


def test_a_picture_that_comes_again_is_described_once() -> None:
    logo = drawn("logo")
    content = docx_with_pictures("A", logo, "B", drawn("other"), "C", logo)
    assert [text for text, _ in described("a.docx", content, ["a logo", "another"])] == [
        "A", "a logo", "B", "another", "C",
    ]  # fmt: skip


def test_icons_are_left_out_without_a_word() -> None:
    found = collected(
        "a.docx", docx_with_pictures("A", drawn("i", (128, 128)), drawn("i", (900, 31)), drawn("i", (100, 200)))
    )
    assert [number for number, _ in found.wanted] == [2]
    assert found.left_out == {}


def test_a_picture_is_sent_as_a_jpeg_of_bounded_size() -> None:
    ((_, jpeg),) = collected("a.png", drawn("one", (5000, 2500))).wanted
    with Image.open(BytesIO(jpeg)) as image:
        assert (image.format, image.mode, image.size) == ("JPEG", "RGB", (MAX_SIDE, MAX_SIDE // 2))


def test_what_is_transparent_is_white() -> None:
    out = BytesIO()
    half = Image.new("RGBA", (200, 200), (0, 0, 0, 0))
    half.paste((0, 0, 0, 255), (0, 0, 100, 200))
    half.save(out, "PNG")
    ((_, jpeg),) = collected("a.png", out.getvalue()).wanted
    with Image.open(BytesIO(jpeg)) as image:
        assert [image.getpixel((x, 100)) for x in (20, 180)] == [(0, 0, 0), (255, 255, 255)]


def test_a_page_of_a_scan_is_sent_within_the_bound() -> None:
    ((_, jpeg),) = collected("a.pdf", image_pdf("one")).wanted
    with Image.open(BytesIO(jpeg)) as image:
        assert max(image.size) <= MAX_SIDE + 1
        assert image.convert("L").getextrema()[0] < 50


def test_pictures_beyond_the_bounds_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    three = docx_with_pictures(*(drawn(text) for text in "abc"))
    monkeypatch.setattr(pictures, "MAX_PICTURES", 2)
    assert collected("a.docx", three).left_out == {"beyond the 2 of a document": 1}
    monkeypatch.setattr(pictures, "MAX_PICTURES", 3)
    assert collected("a.docx", three).left_out == {}
    monkeypatch.setattr(pictures, "MAX_PIXELS", 400 * 200 - 1)
    assert collected("a.docx", three).left_out == {"too large": 3}
    monkeypatch.setattr(pictures, "MAX_PIXELS", 400 * 200)
    assert collected("a.docx", three).left_out == {}
    monkeypatch.setattr(pictures, "MAX_BYTES", sum(len(jpeg) for _, jpeg in collected("a.docx", three).wanted) - 1)
    assert sum(collected("a.docx", three).left_out.values()) == 1


def test_pictures_of_one_colour_are_left_out_without_a_word() -> None:
    out = BytesIO()
    Image.new("L", (600, 600), 200).save(out, "PNG")
    found = collected("a.docx", docx_with_pictures("A", out.getvalue()))
    assert (found.count, found.wanted, found.left_out) == (1, [], {})


def test_pictures_have_a_time_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures, "MAX_SECONDS", 1e-9)
    found = collected("a.docx", docx_with_pictures(*(drawn(text) for text in "abc")))
    assert [number for number, _ in found.wanted] == [0]
    assert found.left_out == {"beyond 1e-09 s of processor time for a document": 2}


@pytest.mark.parametrize("side", [9000, 50_000, 2**31 - 1])
def test_a_bomb_is_not_decoded(side: int) -> None:
    head = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    bomb = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + head + struct.pack(">I", zlib.crc32(b"IHDR" + head))
    found = collected("a.docx", docx_with_pictures("A", bomb + b"\0\0\0\0IDAT\x35\xaf\x06\x1e", drawn("ok")))
    assert found.left_out == {"too large": 1}
    assert len(found.wanted) == 1


@pytest.mark.parametrize(("width", "height"), [(14_400, 14_400), (1, 14_400), (14_400, 20)])
def test_a_page_of_any_size_is_drawn_within_the_bound(width: int, height: int, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[tuple[int, int]] = []

    def ocr(image: Image.Image, *_: Any, **__: Any) -> str:
        read.append(image.size)
        return "read"

    monkeypatch.setattr("ml_rag.ingest.formats.pdf.read_image", ocr)
    out = BytesIO()
    Image.open(BytesIO(drawn("one"))).resize((100, 100)).save(out, "PDF")
    content = out.getvalue().replace(b"[ 0 0 100.0 100.0 ]", b"[ 0 0 %d %d ]" % (width, height))
    assert content != out.getvalue()
    for _, jpeg in collected("a.pdf", content).wanted:
        with Image.open(BytesIO(jpeg)) as image:
            assert max(image.size) <= MAX_SIDE
    parse("a.pdf", content, ocr=True)
    assert [max(size) <= 7017 for size in read] == [True]


def test_an_empty_page_is_not_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Any] = []
    monkeypatch.setattr("ml_rag.ingest.formats.pdf.read_image", lambda *a, **_: read.append(a) or "read")
    pdf, out = pdfium.PdfDocument(image_pdf("one")), BytesIO()
    pdf.new_page(600, 800)
    pdf.save(out)
    assert [number for number, _ in collected("a.pdf", out.getvalue()).wanted] == [0]
    assert collected("a.pdf", out.getvalue()).count == 1
    assert [block.metadata for block in parse("a.pdf", out.getvalue(), ocr=True).blocks] == [{"page": 1}]
    assert len(read) == 1


def test_pictures_that_are_nowhere_are_not_asked_for() -> None:
    svg = base64.b64encode(b'<!DOCTYPE s [<!ENTITY a "aaaa">]><svg>&a;</svg>').decode()
    sources = (f"data:image/svg+xml;base64,{svg}", "http://127.0.0.1:9/a.png", "file:///etc/passwd", "a.png", "data:,")
    content = "<p>Text</p>" + "".join(f"<img src='{source}'>" for source in sources)
    found = collected("a.html", content.encode())
    assert (found.count, found.left_out) == (1, {"cannot be read": 1})


@pytest.mark.parametrize(
    ("said", "shown"), [("Sales &amp; costs", "Sales & costs"), ("", ""), ("C:\\My files\\Logo.PNG", "")]
)
def test_the_text_that_stands_for_a_picture_is_text_in_docx_as_in_html(said: str, shown: str) -> None:
    made = docx_with_pictures("above", drawn("one"), "below", alt=said)
    texts = [text for text in ("above", shown, "below") if text]
    assert [block.text for block in parse("a.docx", made).blocks] == ["\n\n".join(texts)]
    described = parse("a.docx", made, pictures=Pictures("vision", {"0": "said"}))
    assert [block.text for block in described.blocks] == ["\n\n".join(texts[:-1]), "said", "below"]


@pytest.mark.parametrize(("said", "shown"), [("Logo", "Head Logo line"), ("", "Headline")])
def test_the_text_that_stands_for_a_picture_is_apart_from_the_words_beside_it(said: str, shown: str) -> None:
    made = docx_with_pictures("Head", drawn("one"), "line", alt=said, is_one=True)
    assert [block.text for block in parse("a.docx", made).blocks] == [shown]


def test_the_texts_that_stand_for_a_picture_are_text_in_odt() -> None:
    image = '<draw:image xlink:href="Pictures/0.png"/>'
    said = "<svg:title>Sales</svg:title><svg:desc>by  year</svg:desc>"
    frame = f"<text:p>above <draw:frame>{image}{said}</draw:frame> below</text:p>"
    made = odt(frame, **{"Pictures/0.png": drawn("one")})
    assert [block.text for block in parse("a.odt", made).blocks] == ["above  below\n\nSales by year"]
    described = parse("a.odt", made, pictures=Pictures("vision", {"0": "said"}))
    assert [block.text for block in described.blocks] == ["above  below\n\nSales by year", "said"]


def test_a_broken_picture_costs_itself_only() -> None:
    content = docx_with_pictures("Above", drawn("one")[:200], drawn("two"))
    assert collected("a.docx", content).left_out == {"cannot be read": 1}
    assert [text for text, _ in described("a.docx", content, ["said"])] == ["Above", "said"]


def test_a_document_without_pictures_has_none() -> None:
    assert collected("a.pdf", text_pdf(["one"])).count == 0


def test_ocr_reads_what_has_no_description(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("image", "pdf"):
        monkeypatch.setattr(f"ml_rag.ingest.formats.{module}.read_image", lambda *_, **__: "read")
    undescribed = Pictures("vision", {})
    for name, content in (("a.png", drawn("one")), ("a.pdf", image_pdf("one"))):
        (block,) = parse(name, content, ocr=True, pictures=undescribed).blocks
        assert block.text == "read"
        assert "described_by" not in block.metadata
        assert [text for text, _ in described(name, content, ["said"], ocr=True)] == ["said"]


def test_each_segment_of_a_description_says_who_wrote_it() -> None:
    said = " ".join(f"It shows the thing with number {i}." for i in range(60))
    document = Document(
        "image", [Block("Short title", {"page": 1}), Block(said, {"page": 1, **MADE}), Block("End.", {"page": 1})]
    )
    segments = split(document, Chunking("auto", 64, 16), Counter())
    inner = [segment for segment in segments if segment.metadata.get("described_by") == "vision"]
    assert len(inner) > 3
    assert all(segment.text.startswith("(Picture, described by the model vision)\n\nIt shows") for segment in inner[:1])
    assert all(segment.text.startswith("(Picture, described by the model vision)\n\n") for segment in inner)
    assert all(segment.tokens <= 64 for segment in segments)
    assert [segment.text for segment in segments if segment not in inner] == ["Short title", "End."]


def test_pages_that_a_function_splits_say_it_too() -> None:
    document = Document("image", [Block("said", MADE)])
    (segment,) = split(document, Chunking(NONE, 64, 0), Counter())
    assert segment.text == "(Picture, described by the model vision)\n\nsaid"
