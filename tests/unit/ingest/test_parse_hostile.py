"""Hostile documents: bombs, entities, references to other files, bottomless nesting."""

from __future__ import annotations

import builtins
import io
import os
import re
import socket
import struct
import time
import zipfile
from typing import Any

import pytest

from ml_rag.errors import DocumentError
from ml_rag.ingest.formats import archive, sheets
from ml_rag.ingest.formats.common import Request
from ml_rag.ingest.formats.pictures import Pictures
from ml_rag.ingest.parse import parse
from support.office import deck_with, docx, epub, odt, pptx, xlsx, zipped

LAUGHS = (
    '<!DOCTYPE x [<!ENTITY a "ha ha ha ha">'
    + "".join(f'<!ENTITY {new} "{("&" + old + ";") * 10}">' for old, new in zip("abcdefgh", "bcdefghi", strict=True))
    + "]>"
)
OUTSIDE = '<!DOCTYPE x [<!ENTITY i SYSTEM "file:///etc/hostname">]>'


@pytest.mark.parametrize("prolog", [LAUGHS, OUTSIDE], ids=["billion-laughs", "external"])
@pytest.mark.parametrize("kind", ["docx", "odt", "epub", "utf-16"])
def test_entities_are_refused(prolog: str, kind: str) -> None:
    contents = {
        "docx": docx("<w:p><w:r><w:t>&i;</w:t></w:r></w:p>", prolog=prolog),
        "odt": zipped(
            {"mimetype": "application/vnd.oasis.opendocument.text", "content.xml": f"{prolog}<document>&i;</document>"}
        ),
        "epub": zipped({"META-INF/container.xml": f"{prolog}<container>&i;</container>"}),
        "utf-16": docx("<w:p/>", **{"word/styles.xml": f"{prolog}<x>&i;</x>".encode("utf-16")}),
    }  # fmt: skip
    started = time.monotonic()
    with pytest.raises(DocumentError, match="entities"):
        parse("a", contents[kind])
    assert time.monotonic() - started < 2


@pytest.mark.parametrize("prolog", [LAUGHS, OUTSIDE], ids=["billion-laughs", "external"])
@pytest.mark.parametrize(
    "page", ["<x a='&i;'>The &i; end</x>", "<rss><channel><title>The &i; end</title></channel></rss>"]
)
def test_entities_in_xml_keep_their_names(prolog: str, page: str) -> None:
    (block,) = parse("a.xml", f"<?xml version='1.0'?>{prolog}{page}".encode()).blocks
    assert block.text.removeprefix("# ") == "The &i; end"


@pytest.mark.parametrize(
    "text",
    [
        "<!ENTITY ",
        '<!ENTITY "',
        "<!ENTITY a '\"'",
        '<!ENTITY x "\'" \'"',
        "<!ENTITY x''\"\"",
        "<!ENTITY x" + "''" * 3999,
    ],
)
def test_entities_that_do_not_end_take_no_time(text: str) -> None:
    content = f"<?xml version='1.0'?><!DOCTYPE x [{text * (5_000_000 // len(text))}]><x>a</x>".encode()
    started = time.process_time()
    with pytest.raises(DocumentError, match="entities"):
        parse("a.xml", content)
    assert time.process_time() - started < 5


def test_boxes_to_tick_around_each_other_take_no_time() -> None:
    """All that follows was written for each: half a minute of 0.4 MB."""
    page = "<input type=checkbox><div>" * 200 + "<p>some words here</p>" * 20_000
    started = time.process_time()
    assert parse("a.html", page.encode()).blocks[0].text.startswith("☐")
    assert time.process_time() - started < 8


#: name, content, what is in its text; each took a minute and more of processor time
_SLOW = {
    "marks out of their order": ("a.txt", f"end a{chr(0x301) * 100_000}{chr(0x316) * 100_000}", "end"),
    "blanks in front matter": ("a.md", f"---\ntitle: a{' ' * 200_000}x\n---\nend", "end"),
    "blanks in the name of a voice": ("a.vtt", f"WEBVTT\n\n00:00.000 --> 00:01.000\n<v{' ' * 200_000}end", "end"),
    "entries in entries": (
        "a.xml",
        f"<rss><channel>{'<item><description>' * 900}{'word ' * 80_000}</description>end{'</item></description>' * 899}"
        "</item></channel></rss>",
        "end",
    ),
    "quotes in quotes": ("a.html", f"{'<blockquote>' * 290}{'a<br>' * 50_000}end", "end"),
    "lists in lists": ("a.html", f"{'<ul><li>' * 145}{'a<br>' * 50_000}end", "end"),
    "items of a list": ("a.html", f"<p>a</p><ol start=3>{'<li>a' * 50_000}<li>x</ol>", "50003. x"),
    "parameters of parts": (
        "a.eml",
        "Subject: a\nMIME-Version: 1.0\nContent-Type: multipart/mixed; boundary=a\n\n--a\n\nend\n"
        + "".join(f"--a\nContent-Type: text/plain; {'(a)' * 3000}; q={n}\n\nbody\n" for n in range(95)),
        "end",
    ),
}


@pytest.mark.parametrize("case", _SLOW)
def test_what_is_within_itself_takes_no_time(case: str) -> None:
    name, content, end = _SLOW[case]
    started = time.process_time()
    text = parse(name, content.encode()).blocks[0].text
    assert time.process_time() - started < 12
    assert end in text


def test_a_workbook_with_few_cells_far_apart_takes_no_time() -> None:
    """4 kB took a minute: openpyxl makes all rows and cells between two."""
    book = zipfile.ZipFile(io.BytesIO(xlsx({"S": [["a"]]})))
    parts = {name: book.read(name) for name in book.namelist()}
    cells = "".join(f'<row r="{n}"><c r="XFD{n}"><v>1</v></c><c r="B{n}"><v>2</v></c></row>' for n in range(1, 500))
    parts["xl/worksheets/sheet1.xml"] = (
        '<worksheet xmlns="http://schemas.openxmlformats.org/spreadsheetml/2006/main"><sheetData>'
        f'{cells}<row r="1000000000000"><c r="B7"><v>77</v></c></row></sheetData></worksheet>'
    ).encode()
    started = time.process_time()
    text = parse("a.xlsx", zipped(parts)).blocks[0].text
    assert time.process_time() - started < 5
    assert text.startswith("| 2 | 1 |")
    assert text.endswith("77")


def test_places_of_a_slide_are_looked_up_in_its_layout_once() -> None:
    """6,000 in 140 kB took more than a minute."""
    place = (
        '<p:sp><p:nvSpPr><p:cNvPr id="{0}" name="a"/><p:cNvSpPr/><p:nvPr><p:ph type="body" idx="{0}"/></p:nvPr>'
        "</p:nvSpPr><p:spPr/><p:txBody><a:bodyPr/><a:p><a:r><a:t>x{0}</a:t></a:r></a:p></p:txBody></p:sp>"
    )
    places = "".join(place.format(n) for n in range(100, 3100)).encode() + b"</p:spTree>"
    deck = zipfile.ZipFile(io.BytesIO(pptx([("title", "text", "")])))
    parts = {name: deck.read(name) for name in deck.namelist()}
    for name in parts:
        if re.fullmatch(r"ppt/(slides/slide|slideLayouts/slideLayout)\d+\.xml", name):
            parts[name] = parts[name].replace(b"</p:spTree>", places)
    started = time.process_time()
    assert "x3099" in parse("a.pptx", zipped(parts)).blocks[0].text
    assert time.process_time() - started < 12


def test_an_attribute_of_html_may_be_long() -> None:
    found = Pictures("vision")
    content = b"<p>before</p><img src='data:image/png;base64," + b"A" * 11_000_000 + b"' alt='alt'><p>after</p>"
    assert [block.text for block in parse("a.html", content, pictures=found).blocks] == ["before\n\nalt\n\nafter"]
    assert found.left_out == {"cannot be read": 1}


def test_entities_in_html_stay_unexpanded() -> None:
    page = f"<!DOCTYPE html [{LAUGHS[12:-2]}]><html><body><p>&i; end</p></body></html>"
    text = parse("a.html", page.encode()).blocks[0].text
    assert "end" in text
    assert len(text) < 2 * len(page)


def test_entities_in_an_epub_chapter_stay_unexpanded() -> None:
    chapter = epub([f"<p>{'x' * 10}</p>"])
    assert len(parse("a", chapter).blocks[0].text) == 10
    book = {
        name: zipfile.ZipFile(io.BytesIO(chapter)).read(name)
        for name in zipfile.ZipFile(io.BytesIO(chapter)).namelist()
    } | {"o/c0.xhtml": f"{LAUGHS}<html><body><p>&i; end</p></body></html>".encode()}
    assert len(parse("a", zipped(book)).blocks[0].text) < 2000


def test_a_chapter_that_the_spine_repeats_is_read_once() -> None:
    """20,000 references in 2 kB took a minute of processor time."""
    archive_ = zipfile.ZipFile(io.BytesIO(epub(["<p>first</p>", "<p>second</p>"])))
    book = {name: archive_.read(name) for name in archive_.namelist()}
    (package,) = (name for name in book if name.endswith(".opf"))
    (spine,) = re.findall(rb"<spine[^>]*>(.*)</spine>", book[package], re.DOTALL)
    book[package] = book[package].replace(spine, spine * 20_000)
    assert [block.text for block in parse("a", zipped(book)).blocks] == ["first", "second"]


def test_a_slide_or_a_sheet_that_is_named_again_is_read_once() -> None:
    """20,000 references in 80 kB took a minute of processor time."""
    began = time.process_time()
    for content, member, pattern, text in (
        (
            pptx([("Title", "text", "")]),
            "ppt/presentation.xml",
            rb'(<p:sldId [^>]*id=")\d+("[^>]*/>)',
            "# Title\n\ntext",
        ),
        (xlsx({"S": [["a", "b"], [1, 2]]}), "xl/workbook.xml", rb'(<sheet [^>]*sheetId=")\d+("[^>]*/>)', "| a | b |"),
    ):
        with zipfile.ZipFile(io.BytesIO(content)) as source:
            members: dict[str, Any] = {name: source.read(name) for name in source.namelist()}
        sheet = "xl/worksheets/sheet1.xml"
        if sheet in members:  # without a range it is read as a whole to find one
            row = re.findall(rb"<row .*?</row>", members[sheet])[-1]
            members[sheet] = re.sub(rb"<dimension [^>]*/>", b"", members[sheet]).replace(row, row * 100)
        (one,) = re.finditer(pattern, members[member])
        copies = (one[1] + b"%d" % (1000 + i) + one[2].replace(b'name="S"', b'name="S%d"' % i) for i in range(20_000))
        members[member] = members[member].replace(one[0], one[0] + b"".join(copies))
        (block,) = parse("a", zipped(members)).blocks
        assert block.text.startswith(text)
    assert time.process_time() - began < 12


@pytest.mark.parametrize("key", ["<<", "? <<\n ", "!!merge x", '!!merge "<<"', "!!mer%67e x"])
def test_merged_keys_of_merged_keys_are_not_merged(key: str) -> None:
    """700 bytes took a minute of processor time."""
    keys = "".join(f"a{i}: &a{i} {{{key}: [{', '.join([f'*a{i - 1}'] * 10)}]}}\n" for i in range(1, 12))
    found = parse("a.md", f"---\na0: &a0 {{x: 1}}\nyear: 2024\n{keys}---\ntext".encode())
    assert found.metadata["year"] == "2024"
    assert [block.text for block in found.blocks] == ["text"]


def test_two_angle_brackets_that_merge_nothing_are_read() -> None:
    front = "title: A << B\nyear: 2024\nshift: {'<<': 1}\nlist: [a << b]\n"
    assert parse("a.md", f"---\n{front}---\ntext".encode()).metadata == {
        "title": "A << B", "year": 2024, "shift": {"<<": 1}, "list": ["a << b"],
    }  # fmt: skip


def test_what_repeated_cells_and_rows_add_is_bounded() -> None:
    """500 bytes took a minute of processor time."""
    table = (
        '<table:table><table:table-row table:number-rows-repeated="{}"><table:table-cell '
        f'table:number-columns-repeated="{{}}"><text:p>{"x" * 797}</text:p></table:table-cell>'
        "</table:table-row></table:table>"
    )  # each cell counts 800, but for the one that is there
    for kind in ("spreadsheet", "text"):
        most = odt(table.format(1000, 10) + table.format(1, 2), kind)
        assert sum(block.text.count("x") for block in parse("a", most).blocks) == 10_002 * 797
        with pytest.raises(DocumentError, match="unpacks to too much") as caught:
            parse("a", odt(table.format(1000, 10) + table.format(3, 1), kind))
        assert caught.value.detail == "its repeated cells and rows add more than 8000000 characters"
    row = (
        '<table:table-row><table:table-cell table:number-columns-repeated="500"/>'
        "<table:table-cell><text:p>1</text:p></table:table-cell></table:table-row>"
    )
    with pytest.raises(DocumentError, match="unpacks to too much"):
        parse("a", odt(f"<table:table>{row * 6000}</table:table>", "spreadsheet"))
    for cell, rows in (('<td rowspan="9999">a few words</td>', 5000), ('<td rowspan="99" colspan="999">c</td>', 99)):
        page = f"<!DOCTYPE html><table><tr>{cell * 500}</tr>{'<tr><td>x</td></tr>' * rows}</table>"
        with pytest.raises(DocumentError, match="unpacks to too much"):
            parse("a.html", page.encode())


def test_an_entry_within_another_one_is_read_once() -> None:
    """The text of the innermost one was that of each around it: 30 kB became 10 MB."""
    feed = f"<rss><channel>{'<item><x>' * 900}<description>deep</description>{'</x></item>' * 900}</channel></rss>"
    assert parse("a.xml", feed.encode()).blocks[0].text.count("deep") == 1


def test_zip_bomb_is_refused_before_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    bomb = docx("<w:p/>", **{"word/media/image1.png": b"\0" * (64 * 1024 * 1024)})
    assert len(bomb) < 200_000

    def never(*_: Any, **__: Any) -> bytes:
        raise AssertionError("a member was read")

    monkeypatch.setattr(zipfile.ZipFile, "read", never)
    monkeypatch.setattr(zipfile.ZipFile, "open", never)
    with pytest.raises(DocumentError, match="unpacks to too much"):
        parse("a.docx", bomb)


def test_many_members_are_refused() -> None:
    with pytest.raises(DocumentError, match="unpacks to too much") as caught:
        parse("a", zipped({f"m{i}": b"" for i in range(archive.MAX_MEMBERS + 1)}))
    assert str(archive.MAX_MEMBERS + 1) in (caught.value.detail or "")


def test_a_member_that_lies_about_its_size_is_not_read_on() -> None:
    content = bytearray(docx("<w:p/>", **{"docProps/core.xml": "<x>" + " " * 1_000_000 + "</x>"}))
    size = (1_000_007).to_bytes(4, "little")
    assert content.count(size) == 2  # in the member's own header and in the directory
    with pytest.raises(DocumentError):
        parse("a", bytes(content.replace(size, (100).to_bytes(4, "little"))))


def test_plain_archives_are_not_unpacked() -> None:
    with pytest.raises(DocumentError, match="unknown document format") as caught:
        parse("a.docx", zipped({"inner.docx": docx("<w:p><w:r><w:t>x</w:t></w:r></w:p>")}))
    assert "Unpack" in (caught.value.hint or "")


OUTSIDE_REFERENCES = {
    "html": b'<html><head><link href="http://198.51.100.1/x.css"><base href="file:///etc/"></head><body>'
    b'<img src="file:///etc/hostname" alt="pic"><iframe src="http://198.51.100.1/"></iframe>'
    b'<object data="file:///etc/hostname"></object><p>plain</p></body></html>',
    "xml": b'<?xml version="1.0"?><?xml-stylesheet href="http://198.51.100.1/x.xsl"?>'
    b'<!DOCTYPE x SYSTEM "http://198.51.100.1/x.dtd"><x xmlns:xi="http://www.w3.org/2001/XInclude">'
    b'plain<xi:include href="file:///etc/hostname" parse="text"/></x>',
    "md": b"plain ![pic](file:///etc/hostname)\n\ninclude::/etc/hostname[]\n",
    "rst": b"plain\n\n.. include:: /etc/hostname\n",
    "rtf": rb'{\rtf1 plain {\field{\*\fldinst INCLUDETEXT "/etc/hostname"}{\fldrslt shown}}}',
    "odt": odt('<text:p>plain</text:p><text:section><text:section-source href="file:///etc/hostname"/></text:section>'),
    "docx": docx(
        "<w:p><w:r><w:t>plain</w:t></w:r></w:p>",
        **{
            "word/_rels/document.xml.rels": '<Relationships xmlns="http://schemas.openxmlformats.org/package/2006/'
            'relationships"><Relationship Id="rId1" Type="http://schemas.openxmlformats.org/officeDocument/2006/'
            'relationships/image" Target="file:///etc/hostname" TargetMode="External"/></Relationships>'
        },
    ),
}


@pytest.mark.parametrize("kind", OUTSIDE_REFERENCES)
def test_nothing_outside_the_document_is_opened(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parse(f"a.{kind}", OUTSIDE_REFERENCES[kind])  # imports open files of their own
    opened: list[object] = []
    real = builtins.open

    def watched(file: Any, *args: Any, **kwargs: Any) -> Any:
        opened.append(file)
        return real(file, *args, **kwargs)

    def no_network(*_: Any, **__: Any) -> None:
        raise AssertionError("a connection was tried")

    monkeypatch.setattr(builtins, "open", watched)
    monkeypatch.setattr(socket.socket, "connect", no_network)
    monkeypatch.setattr(socket, "getaddrinfo", no_network)
    monkeypatch.setattr(os, "open", lambda path, *_, **__: opened.append(path))
    document = parse(f"a.{kind}", OUTSIDE_REFERENCES[kind])
    assert "plain" in document.blocks[0].text
    assert socket.gethostname() not in document.blocks[0].text.split()
    assert opened == []


_LIST, _LIST_END = "<text:list><text:list-item>", "</text:list-item></text:list>"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.html", b"<html><body>" + b"<div>" * 20_000 + b"deep" + b"</div>" * 20_000),
        ("a.html", b"<html><body>" + b"<table><tr><td>" * 500 + b"deep"),
        ("a.html", b"<html><body><ul>" + b"<li><ul>" * 2_000 + b"<li>deep"),
        ("a.json", b"[" * 100_000 + b"]" * 100_000),
        ("a.json", b'{"a":' * 500 + b'"deep"' + b"}" * 500),
        ("a.xml", b"<?xml version='1.0'?>" + b"<a>" * 200 + b"deep" + b"</a>" * 200),
        ("a.odt", odt(f"{_LIST * 150}<text:p>deep</text:p>{_LIST_END * 150}")),
        ("a.rtf", rb"{\rtf1 " + b"{" * 50_000 + b"deep" + b"}" * 50_000 + b"}"),
        ("a.rtf", rb"{\rtf1 deep\par " + rb'{\field{\*\fldinst{HYPERLINK "' * 20_000 + b"}"),
        ("a.rtf", rb"{\rtf1 deep\par " + rb"\deleted x" * 100_000 + b"}"),
        ("a.eml", b"Subject: deep\nContent-Type: text/html\n\ndeep" + b"<i style=display:none>" * 20_000),
        ("a.rtf", rb"{\rtf1 deep\par " + rb'{\field{\*\fldinst{HYPERLINK "a"}}{\x ' * 20_000 + b"}"),
        ("a.rtf", rb"{\rtf1 deep\par " + rb'{\field{\*\fldinst{HYPERLINK "a"}}{\x' + b" " * 200_000 + b"}"),
        ("a.rtf", rb"{\rtf1{\fonttbl" + rb"{\f0 A}" * 60_000 + rb"}deep\par}"),
        ("a.rtf", rb"{\rtf1 deep\par \u-" + b"9" * 50_000 + b"?}"),
        ("a.pptx", deck_with("table", rb"<a:tr .*?</a:tr>", 8_000)),
        ("a.pptx", deck_with("table", rb"<a:tc>.*?</a:tc>", 8_000)),
        ("a.pptx", deck_with("chart", rb"<c:ser>.*?</c:ser>", 2_000)),
        ("a.pptx", deck_with("chart", rb"<c:pt .*?</c:pt>", 20_000)),
        ("a.pptx", deck_with("chart", rb'(?<=<c:ptCount val=")2', 9)),
        ("a.md", b">" * 100_000 + b"deep"),
        ("a.md", b"# " + b"#" * 500_000 + b" deep"),
        ("a.md", b"<!-- a comment -->\n" * 1_000 + b"deep"),
        ("a.txt", b"From x" + b"1" * 60_000 + b"\ndeep"),
        ("a.mbox", b"From x 2026\nSubject: deep\n\nFrom x" + b"1" * 500_000 + b"\n"),
        ("a.vtt", b"WEBVTT\n\n00:01.000 --> 00:02.000\n" + b"<v." * 300_000 + b" deep"),
        ("a.vtt", b"WEBVTT\n\n00:01.000 --> 00:02.000\n" + b"<v a" * 300_000 + b" deep"),
        ("a.csv", b'"' + b"deep\n" * 50_000),
        ("a.csv", b"," * 200_000 + b"deep"),
        ("a.html", b"<html><table><tr><td colspan=99999999 rowspan=99999999>deep</td><td>b</td></tr></table>"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_nesting_and_width_end_in_text_or_a_document_error(name: str, content: bytes) -> None:
    started = time.monotonic()
    try:
        text = "".join(block.text for block in parse(name, content).blocks)
    except DocumentError:
        text = "deep"
    assert "deep" in text or name == "a.json"
    assert time.monotonic() - started < 10


def test_a_cell_far_from_all_others_takes_no_time() -> None:
    def record(kind: int, data: bytes) -> bytes:
        return struct.pack("<HH", kind, len(data)) + data

    def beginning(kind: int) -> bytes:
        return record(0x809, struct.pack("<HHHHII", 0x600, kind, 0x0DBB, 0x07CC, 0, 6))

    n, end = 4, record(0x0A, b"")
    sheet = beginning(0x10) + record(0x203, struct.pack("<HHHd", 65_535, 255, 0, 1.5)) + end
    head = beginning(5)
    first = len(head) + n * len(record(0x85, bytes(10))) + len(end)
    names = [struct.pack("<IHBB2s", first + i * len(sheet), 0, 2, 0, b"s%d" % i) for i in range(n)]
    began = time.process_time()
    made = sheets.parse_xls("a.xls", head + b"".join(record(0x85, name) for name in names) + end + sheet * n, Request())
    assert [block.text for block in made.blocks] == [f"# s{i}\n\n1.5" for i in range(n)]
    assert time.process_time() - began < 5
