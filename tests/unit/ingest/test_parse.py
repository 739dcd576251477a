"""Formats are found by content, names decide between texts, whatever cannot be read fails with a DocumentError."""

from __future__ import annotations

import os
import subprocess
import sys
import unicodedata
from io import BytesIO
from typing import Any

import pytest

from ml_rag.errors import DocumentError, InvalidRequest
from ml_rag.ingest.formats import FORMATS
from ml_rag.ingest.parse import parse
from support.office import docx, epub, image_pdf, odt, picture_pdf, pptx, text_pdf, xlsx, zipped


def text_of(name: str, content: bytes, **options: object) -> str:
    return "\n\n".join(block.text for block in parse(name, content, **options).blocks)  # type: ignore[arg-type]


BY_CONTENT = [
    ("mbox", b"From ann@a.example Mon Nov  2 10:00:00 2026\nSubject: One\n\nGrebes dive\n"),
    ("pdf", text_pdf(["Grebes dive"])),
    ("docx", docx("<w:p><w:r><w:t>Grebes dive</w:t></w:r></w:p>")),
    ("pptx", pptx([("Birds", "Grebes dive", "")])),
    ("xlsx", xlsx({"Birds": [["name", "habit"], ["Grebes dive", "often"]]})),
    ("epub", epub(["<p>Grebes dive</p>"])),
    ("odt", odt("<text:p>Grebes dive</text:p>")),
    ("rtf", rb"{\rtf1\ansi Grebes dive\par}"),
    ("html", b"<!DOCTYPE html><html><body><p>Grebes dive</p></body></html>"),
    ("xml", b"<?xml version='1.0'?><birds><bird>Grebes dive</bird></birds>"),
    (
        "rss",
        b"<?xml version='1.0'?><rss><channel><title>B</title><item><title>Grebes dive</title></item></channel></rss>",
    ),
    ("vtt", b"WEBVTT\n\n00:01.000 --> 00:02.000\nGrebes dive\n"),
    ("srt", b"1\n00:00:01,000 --> 00:00:02,000\nGrebes dive\n"),
    (
        "eml",
        b"From: a@b.example\nTo: c@d.example\nSubject: Birds\nDate: Mon, 1 Jan 2024 10:00:00 +0000\n\nGrebes dive\n",
    ),
    ("json", b'{"fact": "Grebes dive"}'),
]


@pytest.mark.parametrize(("expected", "content"), BY_CONTENT, ids=[name for name, _ in BY_CONTENT])
@pytest.mark.parametrize("name", ["unnamed", "wrong.pdf", "wrong.docx"])
def test_the_content_decides_the_format(expected: str, content: bytes, name: str) -> None:
    document = parse(name, content)
    assert document.format == expected
    assert "Grebes dive" in "\n".join(block.text for block in document.blocks)


def test_only_plain_text_and_source_code_have_the_media_type_of_plain_text() -> None:
    plain = {name for name, of in FORMATS.items() if of.media_type == "text/plain"}
    assert plain == {"source", "text"}


@pytest.mark.parametrize("expected", ["pdf", "docx", "pptx", "xlsx", "epub", "odt", "rtf", "html", "vtt"])
def test_a_plain_name_does_not_hide_the_format(expected: str) -> None:
    assert parse("notes.txt", dict(BY_CONTENT)[expected]).format == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a.md", "markdown"), ("a.MARKDOWN", "markdown"), ("a.txt", "text"), ("a", "text"), ("a.rst", "rst"),
        ("a.adoc", "asciidoc"), ("a.csv", "csv"), ("a.tsv", "tsv"), ("a.py", "source"), ("dir.md/a", "text"),
        ("a.pdf", "text"), ("a.zip", "text"), ("a.json", "text"), ("a.html", "text"),
    ],
)  # fmt: skip
def test_the_name_decides_between_texts(name: str, expected: str) -> None:
    assert parse(name, b"one, two\nthree, four\n").format == expected


@pytest.mark.parametrize(
    "minutes",
    [
        "Date: 12 May 2026\nFrom: 10:00\nTo: 12:00\nSubject: Budget\nRoom: 5\n\n1. Costs",
        "From: Ann\nTo: All staff\nSubject: Minutes\n\ntext",
        "From: ann@a.example\nTo: All\nSubject: Minutes\nTo: Bob\n\ntext",
        "From: ann@a.example\nTo: All\nSubject: Minutes\nPlace: Berlin\n\ntext",
        "Subject: x\nDate: y\nX-Ray: z\n10:30 lunch",
        "From Monday 4 May 2026 on\nRoom: 5\n\ntext",
    ],
)
def test_minutes_are_no_mail(minutes: str) -> None:
    for name in ("a.txt", "a"):
        (block,) = parse(name, minutes.encode()).blocks
        assert block.text == minutes


def test_a_text_with_a_header_that_only_programs_write_is_a_mail() -> None:
    mail = "Date: x\nFrom: Ann\nList-Id: y\nMessage-ID: <1@x>\n\ntext"
    assert parse("a.txt", mail.encode()).format == "eml"


def test_formats_limits_what_is_accepted() -> None:
    page = b"<html><body>Grebes dive</body></html>"
    assert parse("a.html", page, formats=["html"]).format == "html"
    assert parse("a.md", b"x", formats=[".MD"]).format == "markdown"
    assert parse("a.html", page, formats=[]).format == "html"
    with pytest.raises(DocumentError) as caught:
        parse("a.txt", page, formats=["text", "pdf"])
    assert caught.value.message == "document format is not accepted"
    assert "html" in (caught.value.detail or "")


def test_a_feed_is_not_accepted_as_xml_nor_xml_as_a_feed() -> None:
    feed, plain = dict(BY_CONTENT)["rss"], dict(BY_CONTENT)["xml"]
    assert parse("a.xml", feed, formats=["atom"]).format == "rss"
    for content, accepted in ((feed, "xml"), (plain, "rss")):
        with pytest.raises(DocumentError, match="not accepted"):
            parse("a.xml", content, formats=[accepted])


def test_an_unknown_name_in_formats_is_a_bad_request() -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse("a.txt", b"x", formats=["pdf", "docz"])
    assert "docz" in (caught.value.detail or "")
    assert all(name in (caught.value.hint or "") for name in FORMATS)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "document is empty"),
        (b" \r\n\t\0 ", "document is empty"),
        (b"\xef\xbb\xbf\n", "document is empty"),
        (b"\x89PNG\r\n\x1a\n" + bytes(range(256)), "document has no text"),
        (b"GIF89a" + bytes(range(256)), "unknown document format"),
        (b"%!PS-Adobe-3.0\n%%Title: a page\n72 720 moveto (Grebes dive) show\n", "unknown document format"),
        (bytes(range(256)) * 4, "unknown document format"),
        (b"PK\x03\x04" + b"\0" * 50, "document is truncated or damaged"),
        (b"%PDF-1.7\nnothing else", "document is truncated or damaged"),
        (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + b"\0" * 600, "document is truncated or damaged"),
        (b"<html><body><script>alert(1)</script></body></html>", "document has no text"),
        (image_pdf("Grebes dive"), "document has no text"),
        (xlsx({"Empty": []}), "document has no text"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_read_says_so(content: bytes, message: str) -> None:
    with pytest.raises(DocumentError) as caught:
        parse("a.pdf", content)
    assert caught.value.message == message
    assert caught.value.detail
    assert caught.value.hint


def test_an_image_only_pdf_hints_at_ocr_and_at_a_model() -> None:
    with pytest.raises(DocumentError) as caught:
        parse("scan.pdf", image_pdf("Grebes dive"))
    assert "ocr" in (caught.value.hint or "")
    assert "describe_images" in (caught.value.hint or "")


def test_an_archive_hints_at_what_is_loaded_as_a_folder() -> None:
    with pytest.raises(DocumentError) as caught:
        parse("inner.zip", zipped({"a.txt": "text"}))
    assert caught.value.hint == (
        "Unpack it. A file that ends in .zip or .tar is loaded as a folder, unless it lies in an archive itself."
    )


def test_ocr_without_tesseract_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda _name: None)
    with pytest.raises(DocumentError, match="OCR is not available") as caught:
        parse("scan.pdf", image_pdf("Grebes dive"), ocr=True)
    assert "tesseract" in (caught.value.hint or "")
    assert text_of("a.pdf", text_pdf(["Grebes dive"]), ocr=True) == "Grebes dive"  # needed for pictures only


def test_ocr_reads_an_image() -> None:
    import shutil

    if shutil.which("tesseract") is None:
        pytest.skip("tesseract is not installed")
    document = parse("scan.pdf", image_pdf("Grebes dive"), ocr=True)
    assert [(block.text, block.metadata) for block in document.blocks] == [("Grebes dive", {"page": 1})]


def picture(text: str, kind: str, pages: int = 1, **options: Any) -> bytes:
    from PIL import Image, ImageDraw

    images = []
    for _ in range(pages):
        images.append(Image.new("L", (1200, 300), 255))
        ImageDraw.Draw(images[-1]).text((60, 60), text, fill=0, font_size=96)
    out = BytesIO()
    if pages > 1:
        options |= {"save_all": True, "append_images": images[1:]}
    images[0].save(out, kind, **options)
    return out.getvalue()


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "TIFF"])
def test_ocr_reads_a_plain_image(kind: str) -> None:
    import shutil

    content = picture("Grebes dive", kind)
    with pytest.raises(DocumentError, match="has no text") as caught:
        parse("scan", content)
    assert "ocr" in (caught.value.hint or "")
    if shutil.which("tesseract") is None:
        pytest.skip("tesseract is not installed")
    document = parse("a.txt", content, ocr=True, formats=[kind.lower()])
    assert document.format == "image"
    assert [(block.text, block.metadata) for block in document.blocks] == [("Grebes dive", {})]


@pytest.mark.parametrize("mode", ["1", "P", "RGBA", "LA", "CMYK", "I", "I;16", "I;16B", "F"])
def test_ocr_reads_pictures_of_all_modes(mode: str) -> None:
    import shutil

    from PIL import Image, ImageOps

    if shutil.which("tesseract") is None:
        pytest.skip("tesseract is not installed")
    grey = Image.open(BytesIO(picture("Grebes dive", "PNG")))
    if mode in ("RGBA", "LA"):  # black all over, and what is not text is transparent
        image = Image.merge("LA", (Image.new("L", grey.size), ImageOps.invert(grey))).convert(mode)
    elif mode == "I;16B":
        image = Image.frombytes(mode, grey.size, bytes(byte for value in grey.tobytes() for byte in (value, value)))
    elif mode in ("I", "F"):
        image = grey.convert(mode).point(lambda value: value * 700000 - 9)
    elif mode == "I;16":
        image = grey.convert("I").point(lambda value: value * 257).convert(mode)
    else:
        image = grey.convert("RGB").convert(mode)
    out = BytesIO()
    image.save(out, "TIFF")
    assert text_of("a.tif", out.getvalue(), ocr=True) == "Grebes dive"


def test_ocr_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    import shutil

    from PIL import Image

    from ml_rag.ingest.formats import ocr

    if shutil.which("tesseract") is None:
        pytest.skip("tesseract is not installed")
    monkeypatch.setattr(ocr, "_as_png", lambda _: b"no picture")
    with pytest.raises(DocumentError, match="OCR has failed") as caught:
        ocr.read_image(Image.new("L", (9, 9)), "en")
    assert caught.value.detail
    monkeypatch.undo()
    monkeypatch.setattr(ocr, "_TIMEOUT", 0.001)
    with pytest.raises(DocumentError, match="OCR has failed") as caught:
        ocr.read_image(Image.new("L", (9, 9)), "en")
    assert "took longer" in (caught.value.detail or "")


def test_ocr_reads_each_page_of_a_tiff_and_finds_blank_images_blank() -> None:
    import shutil

    if shutil.which("tesseract") is None:
        pytest.skip("tesseract is not installed")
    document = parse("fax.tif", picture("Grebes dive", "TIFF", pages=2), ocr=True)
    assert [(block.text, block.metadata) for block in document.blocks] == [
        ("Grebes dive", {"page": 1}),
        ("Grebes dive", {"page": 2}),
    ]
    with pytest.raises(DocumentError, match="has no text"):
        parse("a.png", picture("", "PNG"), ocr=True)


@pytest.mark.parametrize("cut", [8, 40, 400])
def test_a_damaged_image_says_so(cut: int) -> None:
    with pytest.raises(DocumentError) as caught:
        parse("a.png", picture("Grebes dive", "PNG")[:cut], ocr=True)
    assert caught.value.hint


def test_ocr_reads_the_pictures_of_a_page_at_their_place() -> None:
    import shutil

    if shutil.which("tesseract") is None:
        pytest.skip("tesseract is not installed")
    rows = ["Employee only $45.00", "Employee and one $65.00"]
    content = picture_pdf("What the plans cost", rows, "Ask your manager")
    text = "What the plans cost\n\nEmployee only $45.00\nEmployee and one $65.00\n\nAsk your manager"
    assert [block.text for block in parse("a.pdf", content, ocr=True).blocks] == [text]
    assert "45" not in text_of("a.pdf", content)


def test_ocr_leaves_a_picture_alone_that_text_lies_on() -> None:
    content = picture_pdf("\n" * 20 + "A caption on the picture", ["Words"] * 8, "below")
    assert text_of("a.pdf", content, ocr=True) == text_of("a.pdf", content)


def test_text_is_clean() -> None:
    text = text_of("a.txt", b"one\0 two\r\nthree\rcafe\xcc\x81   \n\n\n\n\nend\x08\n")
    assert text == "one two\nthree\ncaf\u00e9\n\nend"
    assert unicodedata.is_normalized("NFC", text)


ENCODED = [
    ("utf-8-sig", "Grüße aus Köln", None),
    ("utf-16", "Grüße aus Köln", None),
    ("utf-16-le", "Grüße aus Köln", None),
    ("utf-16-be", "Grüße aus Köln", None),
    ("utf-32", "Grüße aus Köln", None),
    ("latin-1", "Grüße aus Köln, schöne Tage im Süden", None),
    ("cp1252", "“Schöne Grüße” – aus Köln für 5 €, sagt’s der Bär", None),
    ("cp932", "名前,年齢,住所\n佐藤太郎,30,東京\n髙橋さんは、とても元気です\n", None),
    ("cp932", "東京都", "ja"),
    ("gb18030", "检索增强生成", "zh"),
    ("cp1251", "Поиск по документам", "ru"),
    ("cp949", "문서 검색", "ko"),
    ("latin-1", "A informação não está disponível: açúcar, coração, pão, órgãos.", None),
    ("cp1252", "L’été dernier, à l’école, où l’on étudie « le français » ; ça coûte 5 € – déjà.", None),
    ("cp1252", "2º piso, 1ª puerta. Año", None),
    ("cp1252", "Temperature 25 °C ± 2 °C, 5 µm, §3, © 2024", "en"),
    ("cp1252", "ação", "pt"),
    ("cp874", "เป็นมนุษย์สุดประเสริฐเลิศคุณค่า", "th"),
    ("cp1250", "Bună ziua, vă mulţumim pentru scrisoare.", "ro"),
    ("cp1257", "Išklausius auditoriaus pranešimą, nuspręsta siūlyti mokėti dividendus.", "lt"),
    ("cp1257", "Paldies par jūsu vēstuli, drīz atbildēšu.", "lv"),
    # of the encodings of a language, the likeliest
    ("cp852", "Az őszi erdőben tűz füstje szállt.", "hu"),
    ("koi8_r", "Поиск по документам", "ru"),
    ("koi8_r", "УКАЗ ПРЕЗИДЕНТА РОССИЙСКОЙ ФЕДЕРАЦИИ", "ru"),
    ("cp866", "Поиск по документам", "ru"),
    ("big5", "他們賦有理性和良心", "zh"),
    ("euc_jp", "文書の検索はこちら", "ja"),
    ("euc_jp", "東京都千代田区", "ja"),
    # the first one stays where there are capitals or signs alone
    ("cp1251", "УКАЗ ПРЕЗИДЕНТА РОССИЙСКОЙ ФЕДЕРАЦИИ о мерах", "ru"),
    ("cp1251", "ДОГОВІР КУПІВЛІ-ПРОДАЖУ НЕРУХОМОГО МАЙНА", "uk"),
    ("cp1250", "SĄD NAJWYŻSZY", "pl"),
    ("cp1250", "PŘÍLIŠ ŽLUŤOUČKÝ KŮŇ", "cs"),
    ("cp1250", "ŘEDITEL", "cs"),
    ("cp1250", "Podle § 12 odst. 3 a §\xa015; 1\xa0234\xa0567 Kč", "cs"),
    ("cp1250", "1\xa0234\xa0567 Ft, 12\xa0000 Ft, összesen", "hu"),
    ("cp1250", "ČLANAK 5. § 2 ŽUPANIJA", "hr"),
    ("cp1250", "ŞTIINŢĂ ÎNVĂŢĂMÂNT", "ro"),
    ("gb18030", "中华人民共和国", "zh"),
    # cp1250 stays, also beside the option of another language
    ("cp1250", "Święta są już za pasem, więc życzę Państwu dużo zdrowia i szczęścia.", None),
    ("cp1250", "przedstawili również", None),
    ("cp1250", "podróż,", "en"),
    ("cp1250", "Příliš žluťoučký kůň úpěl ďábelské ódy.", None),
    ("cp1250", "Účet č. 5 je splatný v říjnu.", "pt"),
    ("cp1250", "„Őszi idő”", None),
    ("cp1250", "„pri riečke,“", None),
    ("cp1250", "Čestitamo vam Božić i Novu godinu.", "it"),
    ("cp1250", "Ţara noastră şi oraşul Iaşi", None),
    ("cp1250", "la Bucureşti", None),
]


@pytest.mark.parametrize(("encoding", "text", "language"), ENCODED, ids=[f"{e[0]}-{e[2]}-{e[1][:9]}" for e in ENCODED])
def test_encodings(encoding: str, text: str, language: str | None) -> None:
    assert text_of("a.txt", text.encode(encoding), language=language) == text.strip()


def test_a_declared_encoding_is_believed() -> None:
    page = '<html><head><meta charset="windows-1251"></head><body><p>Поиск</p></body></html>'
    assert text_of("a.html", page.encode("cp1251")) == "Поиск"


DECLARING = {
    "a.html": '<html><head><meta charset="{}"></head><body><p>{}</p></body></html>',
    "a.xml": "<?xml version='1.0' encoding='{}'?><a><b>{}</b></a>",
    "a.eml": "MIME-Version: 1.0\nContent-Type: text/plain; charset={}\nSubject: s\n\n{}",
}


def declared(name: str, encoding: str, text: bytes) -> str:
    return text_of(name, DECLARING[name].format(encoding, "@").encode().replace(b"@", text)).removeprefix("# s\n\n")


@pytest.mark.parametrize("name", DECLARING)
def test_a_declared_encoding_is_read_as_browsers_read_it(name: str) -> None:
    quoted = "“Preis” – 5 € für’s Café"
    for encoding in ("iso-8859-1", "ISO8859-1", "iso_8859-1:1987", "l1", "us-ascii"):
        assert declared(name, encoding, quoted.encode("cp1252")) == quoted
    for encoding, larger, text in (("iso-8859-9", "cp1254", "“Şişli” €"), ("gb2312", "gb18030", "检索增强生成镕")):
        assert declared(name, encoding, text.encode(larger)) == text
    assert declared(name, "iso-2022-jp", "検索拡張生成".encode("iso-2022-jp")) == "検索拡張生成"
    # which it is not
    assert declared(name, "iso-8859-1", quoted.encode()) == quoted
    japanese = "髙橋さんは、とても元気です。住所は東京です"
    assert declared(name, "iso-8859-1", japanese.encode("cp932")) == japanese
    assert declared(name, "utf-8", "Größe und Höhe".encode("latin-1")) == "Größe und Höhe"


@pytest.mark.parametrize("name", DECLARING)
@pytest.mark.parametrize(
    ("encoding", "text", "bad"),
    [
        ("utf-8", "Größe", b"\xfc"),
        ("windows-1251", "Поиск по документам", b"\x98"),
        ("euc-jp", "検索拡張生成の文書", b"\xff"),
        ("gb2312", "检索增强生成", b"\xff"),
        ("iso-8859-1", "Größe, Höhe", b"\x81"),
    ],
)
def test_one_bad_byte_leaves_a_declared_encoding_as_it_is(name: str, encoding: str, text: str, bad: bytes) -> None:
    assert declared(name, encoding, text.encode(encoding) + bad) == f"{text}\ufffd"


def test_one_bad_byte_does_not_make_another_encoding() -> None:
    text = "Größe und Höhe der Bäume. " * 20
    broken = text.encode() + b"\xff" + text.encode()
    assert "Größe und Höhe der Bäume. " * 20 in text_of("a.txt", broken)
    assert text_of("a.txt", text.encode() + "ö".encode()[:1]) == text.rstrip()


def test_a_missing_library_is_not_the_documents_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    from ml_rag.errors import EngineFailed

    monkeypatch.setitem(sys.modules, "striprtf.striprtf", None)
    with pytest.raises(EngineFailed):
        parse("a.rtf", rb"{\rtf1 hello}")


def test_text_waits_for_no_library() -> None:
    heavy = (
        "{'lxml', 'bs4', 'pypdfium2', 'mammoth', 'pptx', 'openpyxl', 'xlrd', 'PIL', 'markdownify', 'olefile', 'numpy'}"
    )
    script = (
        "import sys; from ml_rag.ingest.parse import parse; parse('a.md', b'# hello'); parse('a.csv', b'a,b\\n1,2');"
        f"print(sorted({heavy} & set(sys.modules)))"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=environment)
    assert ran.stdout.strip() == "[]"
