"""What each format becomes: headings, tables, borders of pages, slides and sheets, titles."""

from __future__ import annotations

import contextlib
import datetime
import json
import re
import struct
import time
import zipfile
from base64 import b64encode
from io import BytesIO
from types import SimpleNamespace
from typing import Any

import openpyxl
import pytest
import xlsxwriter
from PIL import Image
from pypdfium2 import PdfBitmap, PdfDocument, PdfImage, PdfMatrix  # type: ignore[import-untyped]

from ml_rag.errors import DocumentError
from ml_rag.ingest.formats import pdf
from ml_rag.ingest.formats.common import MAX_VALUE, Request, clean, document
from ml_rag.ingest.formats.mail import parse_msg
from ml_rag.ingest.formats.pictures import Pictures
from ml_rag.ingest.formats.sheets import parse_xls
from ml_rag.ingest.parse import parse
from ml_rag.ingest.split import Chunking, split
from ml_rag.ingest.units import Counter
from support.office import (
    deck_with,
    docx,
    epub,
    image_pdf,
    odt,
    picture_pdf,
    placed_pdf,
    pptx,
    sized_pdf,
    text_pdf,
    written_pdf,
    xlsx,
    zipped,
)


def blocks(name: str, content: bytes | str) -> list[tuple[str, dict[str, Any]]]:
    document = parse(name, content.encode() if isinstance(content, str) else content)
    return [(block.text, block.metadata) for block in document.blocks]


def only(name: str, content: bytes | str) -> str:
    ((text, metadata),) = blocks(name, content)
    assert metadata == {}
    return text


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.csv", "name,age\nAda,36\nBob,41\n", "| name | age |\n| --- | --- |\n| Ada | 36 |\n| Bob | 41 |"),
        ("a.csv", "name;age\nAda;1,5\n", "| name | age |\n| --- | --- |\n| Ada | 1,5 |"),
        # decimal commas, of which each line may have as many as semicolons; without a header, below comments
        ("a.csv", "x;11,5;-3,1\ny;2,5;-3,2", "| x | 11,5 | -3,1 |\n| --- | --- | --- |\n| y | 2,5 | -3,2 |"),
        ("a.csv", "# x, y\nid;v\n1;2,5\n2;3,5", "| # x, y |  |\n| --- | --- |\n| id | v |\n| 1 | 2,5 |\n| 2 | 3,5 |"),
        ("a.csv", "id,tags\n1,2;3\n2,4;5\n", "| id | tags |\n| --- | --- |\n| 1 | 2;3 |\n| 2 | 4;5 |"),
        ("a.csv", "1,2,3;4\n1,2,3;4\n", "| 1 | 2 | 3;4 |\n| --- | --- | --- |\n| 1 | 2 | 3;4 |"),
        ("a.csv", "\ufeffsep=;\nname;age\nA, B;1,5\n", "| name | age |\n| --- | --- |\n| A, B | 1,5 |"),
        ("a.csv", '"sep=|"\r\nname|age\r\nAda|36\r\n', "| name | age |\n| --- | --- |\n| Ada | 36 |"),
        ("a.tsv", "name\tage\nAda\t36\n", "| name | age |\n| --- | --- |\n| Ada | 36 |"),
        ("a.tsv", 'a\tb\n"x\t1\ny\t2\n"z\t3\n', '| a | b |\n| --- | --- |\n| "x | 1 |\n| y | 2 |\n| "z | 3 |'),
        ("a.tsv", 'a\tb\n"x\t1\ny\t2\n', '| a | b |\n| --- | --- |\n| "x | 1 |\n| y | 2 |'),
        ("a.tsv", 'a\tb\n"x\ty"\t"2""\n3"\n', '| a | b |\n| --- | --- |\n| x y | 2" 3 |'),
        ("a.csv", 'a,b\n"one\ntwo",x|y\n', "| a | b |\n| --- | --- |\n| one two | x\\|y |"),
        ("a.csv", "a,,b\n1,,2\n,,\n3\n", "| a | b |\n| --- | --- |\n| 1 | 2 |\n| 3 |  |"),
        ("a.json", '[{"a": 1, "b": null}, {"a": 2, "b": true}]', "| a | b |\n| --- | --- |\n| 1 |  |\n| 2 | true |"),
        ("a.jsonl", '{"a": "x"}\n{"a": "y", "c": 1.5}\n', "| a | c |\n| --- | --- |\n| x |  |\n| y | 1.5 |"),
        ("a.json", '{"a": {"b": [1, {"c": 2}]}, "d": "e"}', "- a:\n  - b:\n    - 1\n    - 2:\n      - c: 2\n- d: e"),
        ("a.json", '{"a": 0.123456789012345678, "b": [1.10]}', "- a: 0.123456789012345678\n- b:\n  - 1.10"),
        ("a.json", '{"a": "x", "b": 1, "a": "y"}', "- a:\n  - x\n  - y\n- b: 1"),
        ("a.html", "<h2>T</h2><p>one<br>two <a href='x'>three</a></p>", "## T\n\none\ntwo three"),
        ("a.html", "<p>x<table><tr><th>a<th>b<tr><td>1<td>2|3</table>", "x\n\n| a | b |\n| --- | --- |\n| 1 | 2\\|3 |"),
        (
            "a.html",
            "<table><tr><td>a<td>b<tr><td rowspan=2>1<td>2<tr><td>3</table>",
            "| a | b |\n| --- | --- |\n| 1 | 2 |\n| 1 | 3 |",
        ),
        (
            "a.html",
            "<table><tr><td><h1>T</h1><td><table><tr><td>a<td>b<tr><td>1<td>2</table></table>",
            "# T\n\n| a | b |\n| --- | --- |\n| 1 | 2 |",
        ),
        ("a.html", "<p>a<header>b</header>c<details><summary>d</summary>e</details>f", "a\n\nb\n\nc\n\nd\n\ne\n\nf"),
        ("a.html", "<ul><li>x<li>y</ul><ol><li>z</ol><pre>a  b</pre>", "- x\n- y\n\n1. z\n\n```\na  b\n```"),
        ("a.html", "<p>10<sup>6</sup> to 10<sup>-6</sup> m<sup>2</sup> 2<sup>nd</sup>", "10^6 to 10^-6 m2 2nd"),
        ("a.html", "<p><ruby>漢字<rp>(</rp><rt>かんじ</rt><rp>)</rp></ruby>です", "漢字です"),
        (
            "a.html",
            "<p>a <math><semantics><mrow><mi>y</mi><mo>=</mo><mfrac><mrow><mi>x</mi><mo>+</mo><mn>1</mn></mrow>"
            "<mn>2</mn></mfrac><msup><mi>z</mi><mn>2</mn></msup></mrow><annotation>tex</annotation></semantics></math>",
            "a y=(x+1)/2z^2",
        ),
        ("a.html", "<p>a<nav>menu</nav><style>s</style><p><img alt='pic'>", "a\n\npic"),
        # what a click shows
        ("a.html", "<h3>Why?</h3><div style='display: none'><p>Therefore.</div>", "### Why?\n\nTherefore."),
        ("a.rst", "Title\n=====\n\ntext\n\nPart\n----\n\nmore", "# Title\n\ntext\n\n## Part\n\nmore"),
        ("a.rst", "=====\nTitle\n=====\n\n===  ===\na    b\n===  ===", "# Title\n\n===  ===\na    b\n===  ==="),
        ("a.adoc", "= Title\n\n== Part\ntext", "# Title\n\n## Part\ntext"),
        ("a.py", "# not a heading\nx = '```'", "````py\n# not a heading\nx = '```'\n````"),
        ("a.vtt", "WEBVTT\n\nNOTE x\n\n1\n00:01.000 --> 00:02.000\n<v Ann>Hi &amp; <b>bye</b></v>", "Ann: Hi & bye"),
        ("a.srt", "1\n00:00:01,000 --> 00:00:02,000\none\ntwo\n\n2\n00:03,000 --> 00:04,000\nthree", "one two\nthree"),
        ("a.md", "---\ntitle: T\n---\n# H\n\n\n\n\ntext  \n", "# H\n\ntext"),
        ("a.xml", "<?xml version='1.0'?><a><b>one <i>two</i> three</b><c/><d>four</d></a>", "one two three\n\nfour"),
        (
            "a.xml",
            "<?xml version='1.0'?><a><b n='one two' x:n='no' xmlns:x='x'/><b n='3' m=' '>x<i n='no'/></b></a>",
            "n: one two\n\nn: 3\n\nx",
        ),
        ("a.xml", "<?xml version='1.0'?><a><b n='one two'>one two</b><b n='M 10 10 L 20 20 Z'/></a>", "one two"),
        ("a.xml", "<?xml version='1.0'?><a><b><i>one</i> two</b><p>x <i><b>y</b></i></p></a>", "one two\n\nx y"),
        ("a.xml", "<?xml version='1.0'?><a>a<b>b</b><b>c</b> H<s>2</s>O<lb/>d<i>e</i><j>f</j></a>", "ab c H2O def"),
        ("a.xml", f"<?xml version='1.0'?><a>{'<b>' * 300}x{'</b>' * 300}<c>end</c></a>", "x\n\nend"),
        ("a.xml", "<?xml version='1.0'?><a>AT&T <b>cut", "AT cut"),
        # records, but neither drawings nor what is marked up
        (
            "a.xml",
            "<?xml version='1.0'?><a><b id='1' sum='9.50'><c>x y</c></b><b id='2' sum='2'/></a>",
            "id: 1, sum: 9.50\n\nx y\n\nid: 2, sum: 2",
        ),
        ("a.xml", "<?xml version='1.0'?><a><b x='1' y='2'>t</b><b x='3' z='4'/></a>", "t"),
        ("a.xml", "<?xml version='1.0'?><a><b x='1' y='2'>t</b><b x='3' y='4'/><p>u <i>v</i></p></a>", "t\n\nu v"),
        (
            "a.xml",
            "<?xml version='1.0'?><svg xmlns='http://www.w3.org/2000/svg'><b x='1' y='2'>t</b><b x='3' y='4'/></svg>",
            "t",
        ),
        ("a.xml", "<?xml version='1.0'?><a>b <c>3</c><d>12.50</d><e>f</e></a>", "b 3 12.50f"),
        # what is not well-formed is read as it stands
        ("a.xml", "<?xml version='1.0'?><a>one</a><a>two</a>", "<a>one</a><a>two</a>"),
        ("a.xml", f"<?xml version='1.0'?>{'<b>' * 3000}x", "<b>" * 3000 + "x"),
        ("a.md", "---\n\nbetween rules\n\n---\nafter", "---\n\nbetween rules\n\n---\nafter"),
        ("a.md", "---\nNote: go on.\n\nThen stop.\n---\nafter", "---\nNote: go on.\n\nThen stop.\n---\nafter"),
        ("a.md", "---\nAnn: hello: you\n  there\nand all\n---", "---\nAnn: hello: you\n  there\nand all\n---"),
        ("a.srt", "1\n00:00:01,000 --> 00:00:02,000\n<i>a</i> <b and c> d <e@f.g>", "a <b and c> d <e@f.g>"),
        ("a.srt", "1\n00:00:01,000 --> 00:00:02,000\none\n\ntwo\n\n2\n00:03,000 --> 00:04,000\nx", "one\ntwo\nx"),
        ("a.vtt", "WEBVTT\n\nSTYLE\n::cue{}\n\n00:01.000 --> 00:02.000\n<c.x>a <00:01.500>b", "a b"),
        (
            "a.rtf",
            r'{\rtf1 {\field{\*\fldinst{HYPERLINK "h:a"}}{\fldrslt{\ul\cf2 x y}}}, '
            r'{\field{\*\fldinst{HYPERLINK "h:b"}}{\fldrslt{\ul z}}}}',
            'x y("h:a"), z("h:b")',
        ),
        ("a.srt", "1\n00:00:01,000 --> 00:00:02,000\none\n\na title\n00:03,000 --> 00:04,000\ntwo", "one\na title two"),
        (
            "a.rtf",
            r"{\rtf1 one{\footnote two} {\shp{\*\shpinst{\sp{\sn x}{\sv y}}{\shptxt three}}} four{\*\footnote five}}",
            "one two three four five",
        ),
        (
            "a.xml",
            "<feed xmlns='http://www.w3.org/2005/Atom' xmlns:m='m'><title>f</title><entry><title>e</title>"
            "<content type='xhtml'><div xmlns='http://www.w3.org/1999/xhtml'><p>one</p><p>two</p></div></content>"
            "<m:group><m:description>three</m:description></m:group><summary type='text'>a &lt;b and c&gt; d</summary>"
            "</entry></feed>",
            "# f\n\n## e\n\nthree\n\na <b and c> d\n\none\n\ntwo",
        ),
        (
            "a.xml",
            "<rss><channel><item><title>e</title><description>one</description><body>&lt;b&gt;three&lt;/b&gt;</body>"
            "<description>two</description></item></channel></rss>",
            "## e\n\none\n\ntwo\n\n**three**",
        ),
        ("a.rtf", r"{\rtf1 {\upr{\b one?}{\*\ud{\b one\u8364?}}} {\object{\*\objdata 01}{\result two}}}", "one€ two"),
        ("a.rtf", r"{\rtf1 a \u-10179?\u-8704? b \u99999999? c}", "a \U0001f600 b \ue0ff c"),
        ("a.rtf", r"{\rtf1\ansi caf\'e9\par \u8364? two\par}", "café\n\n€ two"),
    ],
    ids=lambda value: value if len(value) < 8 else "",
)  # fmt: skip
def test_becomes(name: str, content: str, expected: str) -> None:
    assert only(name, content) == expected


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.html", "<title> A\n page </title><meta name=author content=Ann><p>x", {"title": "A page", "author": "Ann"}),
        ("a.html", "<h1>Top</h1><p>x", {"title": "Top"}),
        ("a.md", "---\ntitle: 'T'\nauthor: Ann\n---\n# H", {"title": "T", "author": "Ann"}),
        ("a.md", "```\n# no\n```\n\n# Yes\n", {"title": "Yes"}),
        ("a.json", '{"title": "T", "x": 1}', {"title": "T"}),
        ("a.rtf", r"{\rtf1{\info{\title T}{\author Ann}} text}", {"title": "T", "author": "Ann"}),
        ("a.txt", "plain", {}),
    ],
)
def test_title_and_author(name: str, content: str, expected: dict[str, str]) -> None:
    assert parse(name, content.encode()).metadata == expected


def test_every_key_of_the_front_matter_is_metadata() -> None:
    front = (
        "title: Travel\nauthor: [Ann, Bob]\nyear: 2024\nfinal: true\ndate: 2024-05-01\ntags: [hr, travel]\n"
        "owner: {team: HR, floor: 3}\nsource: https://intranet/travel\nnothing:\nsum: 1.5\n7: seven\n"
        "huge: 123456789012345678901\nwide: .inf\nnote: >\n  two\n  lines\n"
    )
    assert parse("a.md", f"---\n{front}---\n# H\n\ntext".encode()).metadata == {
        "title": "Travel",
        "author": "Ann, Bob",
        "year": 2024,
        "final": True,
        "date": "2024-05-01",
        "tags": ["hr", "travel"],
        "owner": {"team": "HR", "floor": 3},
        "nothing": None,
        "sum": 1.5,
        "7": "seven",
        "huge": "123456789012345678901",
        "wide": "inf",
        "note": "two lines",
        "front_matter": {"source": "https://intranet/travel"},
    }


@pytest.mark.parametrize(
    ("front", "expected"),
    [
        ("title: Guide: how to\nyear: '2024'", {"title": "Guide: how to", "year": "2024"}),
        (
            "title: T\nplz: 01067\ntime: 12:30\nphone: 030_123\nland: NO\nminus: -007\nsum: 0.5\nn: 0\nis: [yes, true]",
            {
                "title": "T",
                "plz": "01067",
                "time": "12:30",
                "phone": "030_123",
                "land": "NO",
                "minus": "-007",
                "sum": 0.5,
                "n": 0,
                "is": ["yes", True],
            },
        ),
        ("date: 2024-13-45\ntitle: T", {"date": "2024-13-45", "title": "T"}),
        ("title: Untitled\n'e-mail': a@b", {"e-mail": "a@b"}),
        # each names the one before it ten times
        (
            "title: T\na: &a [x, x, x, x, x, x, x, x, x, x]\n"
            + "".join(f"{n}: &{n} [{', '.join(['*' + o] * 10)}]\n" for o, n in ("ab", "bc", "cd", "de", "ef", "fg")),
            {"title": "T", "a": ["x"] * 10, "b": [["x"] * 10] * 10, "left_out": "front matter: c, d, e, f, g"},
        ),
        ("title: Guide: how to\ntags:\n  - a\n- b\n# c", {"title": "Guide: how to", "tags": "- a - b"}),
        ("title: T\na: &a [*a]", {"title": "T", "left_out": "front matter: a"}),
        ("title: T\nx: " + "[" * 5000, {"title": "T", "left_out": "front matter: x"}),
        ("title: T\nx: " + "word " * 700, {"title": "T", "x": ("word " * 700).strip()}),
        ("title: T\n" + "".join(f"k{i}: {'v' * 600}\n" for i in range(9)), None),
    ],
    ids=["no YAML", "YAML 1.2", "no date", "nobody", "bomb", "list", "circle", "deep", "long", "much"],
)
def test_front_matter_is_bounded_and_need_not_be_yaml(front: str, expected: dict[str, Any] | None) -> None:
    found = parse("a.md", f"---\n{front}\n---\ntext".encode()).metadata
    if expected is None:
        expected = {"title": "T", **{f"k{i}": "v" * 600 for i in range(6)}, "left_out": "front matter: k6, k7, k8"}
    assert found == expected


def test_a_notebook_has_its_code_as_it_is_indented_and_what_it_printed() -> None:
    cells: list[Any] = [
        {"cell_type": "markdown", "source": ["# T\n", "a"]},
        {
            "cell_type": "code",
            "source": ["# no title\n", "for i in x:\n", "    print(i)"],
            "outputs": [
                {"output_type": "stream", "text": ["1\n", "2"]},
                {"data": {"image/png": "iVBOR", "text/plain": ["7"]}},
                {"data": {"image/png": "iVBOR"}},
                {"output_type": "error", "traceback": ["\x1b[0;31mNo", ": x"]},
            ],
        },
        {
            "cell_type": "code",
            "source": "show()",
            "outputs": [
                {
                    "data": {
                        "text/markdown": ["## Found\n", "all"],
                        "text/plain": "<IPython.core.display.Markdown object>",
                    }
                },
                {"data": {"text/html": "<table><tr><td>a</td><td>b</td></tr></table>"}},
                {"data": {"text/html": "<b>x</b>", "text/plain": "<pandas.io.formats.style.Styler at 0x7f2a>"}},
                {"data": {"application/json": {"é": 1}, "text/plain": ["<IPython.core.display.JSON object>"]}},
                {"data": {"text/html": "<b>7</b>", "text/plain": "7"}},
            ],
        },
        {"cell_type": "code", "source": [], "outputs": []},
        {"cell_type": "raw", "source": "end"},
    ]
    found = {"nbformat": 4, "metadata": {"kernelspec": {"language": "python"}}, "cells": cells}
    made = parse("a.ipynb", json.dumps(found).encode())
    (block,) = made.blocks
    assert (made.format, made.metadata) == ("json", {"title": "T"})
    code = "```python\n# no title\nfor i in x:\n    print(i)\n```"
    shown = "```python\nshow()\n```\n\n## Found\nall\n\n| a | b |\n| --- | --- |\n\n**x**"
    shown += '\n\n```\n{"é": 1}\n```\n\n```\n7\n```'
    assert block.text == f"# T\na\n\n{code}\n\n```\n1\n2\n```\n\n```\n7\n```\n\n```\nNo: x\n```\n\n{shown}\n\nend"
    assert only("a.ipynb", '{"nbformat": 4, "cells": [1]}') == "- nbformat: 4\n- cells:\n  - 1"


def test_rtf_in_another_code_page() -> None:
    for text in (r"{\rtf1\ansi\ansicpg1251 Поиск}", r"{\rtf1\ansi\ansicpg1251 \'cf\'ee\'e8\'f1\'ea}"):
        assert only("a.rtf", text.encode("cp1251")) == "Поиск"
    assert parse("a.rtf", r"{\rtf1{\info{\title Café}} café}".encode("cp1252")).metadata == {"title": "Café"}


@pytest.mark.parametrize(
    ("formula", "expected"),
    [
        ("<msubsup><mi>x</mi><mn>1</mn><mn>2</mn></msubsup>", "x_1^2"),
        ("<mroot><mrow><mn>8</mn><mo>+</mo><mi>a</mi></mrow><mn>3</mn></mroot>", "3√(8+a)"),
        (
            "<munderover><mo>∑</mo><mrow><mi>i</mi><mo>=</mo><mn>1</mn></mrow><mi>n</mi></munderover><mi>i</mi>",
            "∑_(i=1)^ni",
        ),
        ("<munder><mi>lim</mi><mi>n</mi></munder>", "lim_n"),
        (
            "<mo>(</mo><mtable><mtr><mtd><mn>1</mn></mtd><mtd><mn>2</mn></mtd></mtr>"
            "<mtr><mtd><mn>3</mn></mtd><mtd><mn>4</mn></mtd></mtr></mtable><mo>)</mo>",
            "(1, 2; 3, 4)",
        ),
    ],
)
def test_formulas_of_pages_keep_their_signs(formula: str, expected: str) -> None:
    assert only("a.html", f"<p>a <math>{formula}</math>") == f"a {expected}"


def test_pictures_in_markdown_are_no_text() -> None:
    data = "Data:image/png;name=a.png;base64," + "iVBORw0KGgo" * 1000
    text = f"![a boat]({data})\n\n![][image1]\n\n[image1]: <{data}>\n\nnot data:image/png;base64,abc"
    assert only("a.md", text) == "![a boat]()\n\n![][image1]\n\n[image1]: <>\n\nnot data:image/png;base64,abc"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (r"{\rtf1 a {\deleted gone}b {\f1 \deleted0 c \deleted x\deleted0 d} e}", "a b c d e"),
        # where it is not plain to where it goes, all is kept
        (r"{\rtf1 a \deleted b {\b c} d\deleted0  e}", "a b c d e"),
        (r"{\rtf1 a \deleted b\plain  c\par d}", "a b c\n\nd"),
        (r"{\rtf1 see \\deleted x \\deleted0 y}", r"see \deleted x \deleted0 y"),
        (r"{\rtf1\mac\ansicpg10000 caf\'8e}", "café"),
        (r"{\rtf1 word{\footnote note}. More}", "word note. More"),
        (r"{\rtf1\mac caf\'8e}", "café"),
        (r"{\rtf1\pc caf\'82}", "café"),
        (r"{\rtf1\pca na\'8bve}", "naïve"),
    ],
)
def test_rtf_deleted_text_notes_and_old_code_pages(source: str, expected: str) -> None:
    assert only("a.rtf", source.encode()) == expected


def test_docx_has_headings_lists_and_tables() -> None:
    def paragraph(text: str, style: str = "") -> str:
        properties = f'<w:pPr><w:pStyle w:val="{style}"/></w:pPr>' if style else ""
        return f"<w:p>{properties}<w:r><w:t>{text}</w:t></w:r></w:p>"

    def row(*cells: str) -> str:
        return "<w:tr>" + "".join(f"<w:tc>{paragraph(cell)}</w:tc>" for cell in cells) + "</w:tr>"

    body = paragraph("Top", "Heading1") + paragraph("some text") + f"<w:tbl>{row('a', 'b')}{row('1', '2')}</w:tbl>"
    styles = (
        '<w:styles xmlns:w="http://schemas.openxmlformats.org/wordprocessingml/2006/main">'
        '<w:style w:type="paragraph" w:styleId="Heading1"><w:name w:val="heading 1"/></w:style></w:styles>'
    )
    core = (
        '<cp:coreProperties xmlns:cp="http://schemas.openxmlformats.org/package/2006/metadata/core-properties" '
        'xmlns:dc="http://purl.org/dc/elements/1.1/"><dc:title>T</dc:title><dc:creator>Ann</dc:creator>'
        "</cp:coreProperties>"
    )
    content = docx(body, **{"word/styles.xml": styles, "docProps/core.xml": core})
    assert only("a.docx", content) == "# Top\n\nsome text\n\n| a | b |\n| --- | --- |\n| 1 | 2 |"
    assert parse("a.docx", content).metadata == {"title": "T", "author": "Ann"}


def _numbered(paragraphs: str, levels: str, more: str = "", styles: str = "") -> bytes:
    """A Word document whose first list has these levels; of a paragraph: its list, its level, its style or text."""
    space = 'xmlns:w="http://schemas.openxmlformats.org/wordprocessingml/2006/main"'
    body = ""
    for line in paragraphs.split("\n"):
        place, _, text = line.strip().partition(" ")
        num, _, level = place.partition(".")
        style = f'<w:pStyle w:val="{place}"/>' if place.isalpha() else ""
        number = f'<w:numPr><w:ilvl w:val="{level}"/><w:numId w:val="{num}"/></w:numPr>' if level else ""
        run = f"<w:r><w:t>{text}</w:t></w:r>" if text else ""
        body += f"<w:p><w:pPr>{style}{number}</w:pPr>{run}</w:p>"
    found = "".join(
        f'<w:lvl w:ilvl="{number}"><w:start w:val="{start}"/><w:numFmt w:val="{kind}"/><w:lvlText w:val="{text}"/>'
        f"{''.join(rest)}</w:lvl>"
        for number, level in enumerate(levels.split("; "))
        for start, kind, text, *rest in [level.split(" ", 3)]
    )
    numbering = (
        f'<w:numbering {space}><w:abstractNum w:abstractNumId="0">{found}</w:abstractNum>'
        f'<w:num w:numId="1"><w:abstractNumId w:val="0"/></w:num>{more}</w:numbering>'
    )
    office = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"
    relations = "".join(
        f'<Relationship Id="{key}" Type="{office}/{key}" Target="{key}.xml"/>' for key in ("numbering", "styles")
    )
    return docx(
        body,
        **{
            "word/numbering.xml": numbering,
            "word/styles.xml": f"<w:styles {space}>{styles}</w:styles>",
            "word/_rels/document.xml.rels": "<Relationships "
            f'xmlns="http://schemas.openxmlformats.org/package/2006/relationships">{relations}</Relationships>',
        },
    )


@pytest.mark.parametrize(
    ("paragraphs", "levels", "expected"),
    [
        # what stands between its items does not begin a list anew; an empty item counts
        ("1.0 Open\nNormal Hot\n1.0\n1.0 Close", "1 decimal %1.", "1. Open\n\nHot\n\n3. Close"),
        ("1.0 a\n1.0 b", "5 decimalZero %1)", "05) a\n06) b"),
        ("1.0 a\n1.0 b", "27 lowerLetter (%1)", "(aa) a\n(bb) b"),
        ("1.0 of the law", "4 upperRoman Article_%1", "Article_IV of the law"),
        ("1.0 a\n1.0 b\n1.0 c", "2 ordinal %1", "2nd a\n3rd b\n4th c"),
        ("1.0 a\n1.0 b", "1 bullet ·", "- a\n- b"),
        ("1.0 a\n1.0 b", "1 none ", "a\n\nb"),
        # a level begins anew below the next of one above, unless it says otherwise; a level that is skipped counts
        (
            "1.0 a\n1.1 b\n1.1 c\n1.0 d\n1.1 e\n1.2 f\n1.0 g\n1.2 h\n1.1 i",
            "1 decimal %1; 1 decimal %1.%2; 1 lowerRoman %1.%2.%3",
            "1 a\n  1.1 b\n  1.2 c\n2 d\n  2.1 e\n      2.1.i f\n3 g\n  3.1.i h\n  3.2 i",
        ),
        (
            "1.0 a\n1.1 b\n1.0 c\n1.1 d",
            '1 upperLetter %1; 1 decimal §%2 <w:lvlRestart w:val="0"/>',
            "A a\n  §1 b\nB c\n  §2 d",
        ),
        ("1.1 a", "3 upperRoman %1; 2 decimal %1.%2 <w:isLgl/>", "3.2 a"),
        # headings, and lists that styles begin, by a style on which theirs is based, too
        (
            "Head Scope\nStep a\nStep b",
            '1 decimal %1; 1 decimal %1.%2 <w:pStyle w:val="Base"/>',
            "# 1 Scope\n\n1.1 a\n\n1.2 b",
        ),
        # another use of the list goes on with its numbers, unless it says where it begins
        ("1.0 a\n2.0 b\n3.0 c\n3.0 d\n1.0 e", "1 decimal %1.", "1. a\n2. b\n7. c\n8. d\n9. e"),
        ("4.0 a", "1 decimal %1.", "i) a"),
        ("5.0 a\n1.0 b", "1 decimal %1.", "1. a\n2. b"),
    ],
)
def test_docx_has_the_numbers_of_lists_and_headings(paragraphs: str, levels: str, expected: str) -> None:
    begins = '<w:lvlOverride w:ilvl="0"><w:startOverride w:val="7"/></w:lvlOverride>'
    level = '<w:lvl w:ilvl="0"><w:start w:val="1"/><w:numFmt w:val="lowerRoman"/><w:lvlText w:val="%1)"/></w:lvl>'
    more = (
        '<w:num w:numId="2"><w:abstractNumId w:val="0"/></w:num>'
        f'<w:num w:numId="3"><w:abstractNumId w:val="0"/>{begins}</w:num>'
        f'<w:num w:numId="4"><w:abstractNumId w:val="0"/><w:lvlOverride w:ilvl="0">{level}</w:lvlOverride></w:num>'
        '<w:abstractNum w:abstractNumId="9"><w:numStyleLink w:val="Lists"/></w:abstractNum>'
        '<w:num w:numId="5"><w:abstractNumId w:val="9"/></w:num>'
    )
    styles = "".join(
        f'<w:style w:type="{kind}" w:styleId="{key}"><w:name w:val="{name}"/>{rest}</w:style>'
        for kind, key, name, rest in (
            ("paragraph", "Head", "heading 1", '<w:pPr><w:numPr><w:numId w:val="1"/></w:numPr></w:pPr>'),
            ("paragraph", "Base", "base", '<w:pPr><w:numPr><w:numId w:val="1"/></w:numPr></w:pPr>'),
            ("paragraph", "Step", "step", '<w:basedOn w:val="Base"/>'),
            ("paragraph", "Normal", "normal", ""),
            ("numbering", "Lists", "lists", '<w:pPr><w:numPr><w:numId w:val="1"/></w:numPr></w:pPr>'),
        )
    )
    assert only("a.docx", _numbered(paragraphs, levels, more, styles)) == expected


def test_docx_does_not_count_paragraphs_that_are_deleted() -> None:
    content = _numbered("1.0 a\n1.0 gone\n1.0 b", "1 decimal %1.")
    with zipfile.ZipFile(BytesIO(content)) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    document = parts["word/document.xml"].decode()
    run = "<w:r><w:t>gone</w:t></w:r>"
    start, end = document.split(f"</w:pPr>{run}")
    parts["word/document.xml"] = (
        f"{start}<w:rPr><w:del/></w:rPr></w:pPr><w:del>{run.replace('w:t>', 'w:delText>')}</w:del>{end}".encode()
    )
    assert only("a.docx", zipped(parts)) == "1. a\n2. b"


def test_html_has_the_numbers_of_lists() -> None:
    page = (
        "<ol start=3><li>a<li value=9>b<li>c</ol><p>-<ol type=a><li>d<li>e<ol type=I><li>f</ol></ol>"
        "<p>-<ol reversed><li>g<li>h</ol><p>-<ol start=-1 type=A><li>i<li><li>j</ol>"
    )
    assert only("a.html", page.encode()) == (
        "3. a\n9. b\n10. c\n\n-\n\na. d\nb. e\n   I. f\n\n-\n\n2. g\n1. h\n\n-\n\n-1. i\nA. j"
    )


def test_docx_has_cells_of_rows_that_begin_later_under_their_columns() -> None:
    def row(before: str, *cells: str) -> str:
        found = "".join(f"<w:tc><w:p><w:r><w:t>{cell}</w:t></w:r></w:p></w:tc>" for cell in cells)
        return f'<w:tr><w:trPr><w:gridBefore w:val="{before}"/></w:trPr>{found}</w:tr>'

    rows = row("0", "a", "b", "c") + row("1", "d") + row("2", "e") + row("x", "f")
    assert only("a.docx", docx(f"<w:tbl>{rows}</w:tbl>")) == (
        "| a | b | c |\n| --- | --- | --- |\n|  | d |  |\n|  |  | e |\n| f |  |  |"
    )


def test_docx_keeps_tables_in_which_a_cell_holds_another() -> None:
    def table(*rows: tuple[str, ...]) -> str:
        cells = ("".join(f"<w:tc>{cell}</w:tc>" for cell in row) for row in rows)
        return f"<w:tbl>{''.join(f'<w:tr>{row}</w:tr>' for row in cells)}</w:tbl>"

    def p(text: str) -> str:
        return f"<w:p><w:r><w:t>{text}</w:t></w:r></w:p>"

    inner = table((p("x"), p("y")), (p("1"), p("2")))
    other = table((p("z"), p("w")))
    data = table((p("a"), p("b")), (p("c"), p("d")), (p("e"), p("f")), (p("g") + inner, other), ("<w:p/>", p("h")))
    shown = "| x | y |\n| --- | --- |\n| 1 | 2 |"
    assert only("a.docx", docx(data + p("end"))) == (
        "| a | b |\n| --- | --- |\n| c | d |\n| e | f |\n| g |  |\n|  | h |\n\n"
        f"{shown}\n\n| z | w |\n| --- | --- |\n\nend"
    )
    layout = table((p("a"), p("b")), (p("c"), inner), (p("d"), "<w:p/>"))
    assert only("a.docx", docx(layout)) == f"a\n\nb\n\nc\n\n{shown}\n\nd"


def test_docx_has_the_text_of_fields_directions_and_characters_with_readings() -> None:
    def run(text: str) -> str:
        return f"<w:r><w:t>{text}</w:t></w:r>"

    ruby = f"<w:ruby><w:rubyPr/><w:rt>{run('reading')}</w:rt><w:rubyBase>{run('base')}</w:rubyBase></w:ruby>"
    parts = [
        run("Table "), f'<w:fldSimple w:instr=" SEQ Table ">{run("4")}</w:fldSimple>', run(": "),
        f"<w:dir>{run('one ')}</w:dir><w:bdo>{run('two ')}</w:bdo><w:r>{ruby}</w:r>",
        f"<w:del>{run('gone')}</w:del>",
    ]  # fmt: skip
    content = docx(f"<w:p>{''.join(parts)}</w:p>", **{"word/media/a.png": bytes(range(256)) * 9})
    assert only("a", content) == "Table 4: one two base"
    # a picture that is damaged takes no text away
    with zipfile.ZipFile(BytesIO(content)) as archive:
        start = archive.getinfo("word/media/a.png").header_offset + 60
    assert only("a", content[:start] + b"damaged" + content[start + 7 :]) == "Table 4: one two base"


_MATH = "http://schemas.openxmlformats.org/officeDocument/2006/math"
_DIAGRAM = "http://schemas.openxmlformats.org/drawingml/2006/diagram"
_DRAWING = "http://schemas.openxmlformats.org/drawingml/2006/main"
_OFFICE = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"
_DATA = f"""<dgm:dataModel xmlns:dgm="{_DIAGRAM}" xmlns:a="{_DRAWING}"><dgm:ptLst><dgm:pt type="doc"/>
    <dgm:pt><dgm:t><a:bodyPr/><a:p><a:r><a:t>Pl</a:t></a:r><a:r><a:t>an</a:t></a:r></a:p></dgm:t></dgm:pt>
    <dgm:pt><dgm:t><a:p><a:r><a:t>Do</a:t></a:r><a:br/><a:r><a:t>it</a:t></a:r></a:p></dgm:t></dgm:pt>
    </dgm:ptLst></dgm:dataModel>"""
_SHOWS_DIAGRAM = f"""<a:graphic xmlns:a="{_DRAWING}"><a:graphicData uri="{_DIAGRAM}"><dgm:relIds
    xmlns:dgm="{_DIAGRAM}" xmlns:r="{_OFFICE}" r:dm="d1" r:lo="d2"/></a:graphicData></a:graphic>"""


def _formula(*parts: str) -> str:
    """Words are texts, ``f`` and ``/f`` the beginning and end of an element."""
    names = {name for name in parts if f"/{name}" in parts}
    begin = {**{name: f"<m:{name}>" for name in names}, **{f"/{name}": f"</m:{name}>" for name in names}}
    tags = (begin.get(part, f"<m:r><m:t>{part}</m:t></m:r>") for part in parts)
    return f'<m:oMath xmlns:m="{_MATH}">{"".join(tags)}</m:oMath>'


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        (("x", "=", "f num a+b /num den 2 /den /f"), "x=(a+b)/2"),
        (("sSup e x /e sup 2 /sup /sSup", "sSub e y /e sub ij /sub /sSub"), "x^2y_(ij)"),
        (("rad deg /deg e x /e /rad", "rad deg 3 /deg e x+1 /e /rad"), "√x3√(x+1)"),
        (("nary sub i=1 /sub sup n /sup e x /e /nary", "d e a /e e b /e /d"), "∫_(i=1)^nx(a|b)"),
        (("m mr e 1 /e e 2 /e /mr mr e 3 /e e 4 /e /mr /m", "del z /del"), "1 2; 3 4"),
    ],
)
def test_docx_has_formulas_in_their_place(parts: tuple[str, ...], expected: str) -> None:
    one = _formula(*" ".join(parts).split(" "))
    body = f"<w:p><w:r><w:t>before</w:t></w:r>{one}</w:p><w:p><m:oMathPara xmlns:m='{_MATH}'>{one}</m:oMathPara></w:p>"
    assert only("a.docx", docx(body)) == f"before{expected}\n\n{expected}"


def test_docx_and_pptx_have_the_text_of_diagrams() -> None:
    drawn = (
        '<w:p><w:r><w:t>above</w:t></w:r></w:p><w:p><w:r><w:drawing><wp:inline xmlns:wp="http://schemas.openxmlformats'
        f'.org/drawingml/2006/wordprocessingDrawing">{_SHOWS_DIAGRAM}</wp:inline></w:drawing></w:r></w:p>'
    )
    relations = (
        '<Relationships xmlns="http://schemas.openxmlformats.org/package/2006/relationships">'
        f'<Relationship Id="d1" Type="{_OFFICE}/diagramData" Target="diagrams/data1.xml"/></Relationships>'
    )
    files = {"word/_rels/document.xml.rels": relations, "word/diagrams/data1.xml": _DATA}
    assert only("a.docx", docx(drawn, **files)) == "above\n\nPlan\nDo it"
    assert only("a.docx", docx(drawn)) == "above"
    with zipfile.ZipFile(BytesIO(pptx([("Title", "", "")]))) as deck:
        members = {name: deck.read(name) for name in deck.namelist()}
    slide, its = "ppt/slides/slide1.xml", "ppt/slides/_rels/slide1.xml.rels"
    head = '<p:nvGraphicFramePr><p:cNvPr id="9" name="d"/><p:cNvGraphicFramePr/><p:nvPr/></p:nvGraphicFramePr>'
    place = '<p:xfrm><a:off x="0" y="9"/><a:ext cx="9" cy="9"/></p:xfrm>'
    frame = f"<p:graphicFrame>{head}{place}{_SHOWS_DIAGRAM}</p:graphicFrame></p:spTree>"
    members[slide] = members[slide].replace(b"</p:spTree>", frame.encode())
    target = relations.partition("<Rel")[2].partition(">")[2].replace("diagrams/", "../diagrams/")
    members[its] = members[its].replace(b"</Relationships>", target.encode())
    members["ppt/diagrams/data1.xml"] = _DATA.encode()
    assert only_slide(members) == "# Title\n\nPlan\nDo it"


def only_slide(members: dict[str, bytes]) -> str:
    ((text, _),) = blocks("a.pptx", zipped(dict(members)))
    return text


def test_pptx_has_shapes_with_formulas() -> None:
    """PowerPoint writes such a shape twice: for itself, and as a picture for older versions."""
    with zipfile.ZipFile(BytesIO(pptx([("Title", "body", "")]))) as deck:
        members = {name: deck.read(name) for name in deck.namelist()}
    slide = "ppt/slides/slide1.xml"
    run = f"<a14:m>{_formula('x=1')}</a14:m><a:r><a:t> is it</a:t></a:r>"
    start, _, end = members[slide].decode().rpartition("<p:sp>")
    shape, closing = (f"<p:sp>{end}").split("</p:spTree>")
    assert "<a:r><a:t>body</a:t></a:r>" in shape
    mc = "http://schemas.openxmlformats.org/markup-compatibility/2006"
    members[slide] = (
        f'{start}<mc:AlternateContent xmlns:mc="{mc}"><mc:Choice xmlns:a14="http://schemas.microsoft.com/office/drawing/'
        f'2010/main" Requires="a14">{shape.replace("<a:r><a:t>body</a:t></a:r>", run)}</mc:Choice><mc:Fallback>{shape}'
        f"</mc:Fallback></mc:AlternateContent></p:spTree>{closing}"
    ).encode()
    assert only_slide(members) == "# Title\n\nx=1 is it"


def test_pptx_has_slides_that_someone_has_drawn_on() -> None:
    """PowerPoint keeps ink as a part of its own, and as a picture for older versions."""
    with zipfile.ZipFile(BytesIO(pptx([("Title", "body", "")]))) as deck:
        members = {name: deck.read(name) for name in deck.namelist()}
    slide = "ppt/slides/slide1.xml"
    mc = "http://schemas.openxmlformats.org/markup-compatibility/2006"
    ink = (
        f'<mc:AlternateContent xmlns:mc="{mc}"><mc:Choice xmlns:p14="http://schemas.microsoft.com/office/powerpoint/'
        '2010/main" Requires="p14"><p:contentPart p14:bwMode="auto"><p14:nvContentPartPr/></p:contentPart></mc:Choice>'
        "<mc:Fallback/></mc:AlternateContent></p:spTree>"
    )
    members[slide] = members[slide].replace(b"</p:spTree>", ink.encode())
    assert only_slide(members) == "# Title\n\nbody"


@pytest.mark.parametrize(
    "around",
    [
        "{}",
        "<mc:AlternateContent><mc:Choice>{}</mc:Choice></mc:AlternateContent>",
        # as Google Docs has it, and as Word has it
        "<mc:AlternateContent><mc:Choice>{}</mc:Choice><mc:Fallback><w:pict/></mc:Fallback></mc:AlternateContent>",
        (
            "<mc:AlternateContent><mc:Choice>{}</mc:Choice><mc:Fallback><w:pict><v:textbox xmlns:v='urn:schemas-"
            "microsoft-com:vml'><w:txbxContent><w:p><w:r><w:t>boxed</w:t></w:r></w:p></w:txbxContent></v:textbox></w:pict>"
            "</mc:Fallback></mc:AlternateContent>"
        ),
    ],
)
def test_docx_has_the_text_of_its_boxes_once(around: str) -> None:
    drawn = (
        '<w:drawing><wp:inline xmlns:wp="http://schemas.openxmlformats.org/drawingml/2006/wordprocessingDrawing">'
        f'<a:graphic xmlns:a="{_DRAWING}"><a:graphicData uri="x"><wps:txbx xmlns:wps="http://schemas.microsoft.com/office/'
        'word/2010/wordprocessingShape"><w:txbxContent><w:p><w:r><w:t>boxed</w:t></w:r></w:p></w:txbxContent></wps:txbx>'
        "</a:graphicData></a:graphic></wp:inline></w:drawing>"
    )
    mc = 'xmlns:mc="http://schemas.openxmlformats.org/markup-compatibility/2006"'
    run = "<w:r><w:t>{}</w:t></w:r>"
    body = f"<w:p {mc}>{run.format('text')}<w:r>{around.format(drawn)}</w:r></w:p><w:p>{run.format('end')}</w:p>"
    assert only("a.docx", docx(body)) == "text\n\nboxed\n\nend"


@pytest.mark.parametrize("shape", ["shape", "oval", "polyline", "arc", "line", "curve", "image"])
def test_docx_has_the_text_of_shapes_of_older_versions(shape: str) -> None:
    box = "<v:textbox><w:txbxContent><w:p><w:r><w:t>boxed</w:t></w:r></w:p></w:txbxContent></v:textbox>"
    drawn = f"<v:group xmlns:v='urn:schemas-microsoft-com:vml'><v:{shape}>{box}</v:{shape}></v:group>"
    assert only("a.docx", docx(f"<w:p><w:r><w:pict>{drawn}</w:pict></w:r></w:p>")) == "boxed"


def test_docx_has_the_text_that_newer_versions_show() -> None:
    def run(text: str) -> str:
        return f"<w:r><w:t>{text}</w:t></w:r>"

    def box(text: str) -> str:
        return f"<w:txbxContent><w:p>{run(text)}</w:p></w:txbxContent>"

    def choice(newer: str, older: str) -> str:
        return (
            '<mc:AlternateContent xmlns:mc="http://schemas.openxmlformats.org/markup-compatibility/2006"><mc:Choice '
            f'Requires="wps">{newer}</mc:Choice><mc:Fallback>{older}</mc:Fallback></mc:AlternateContent>'
        )

    drawing = (
        '<w:drawing><wps:txbx xmlns:wps="http://schemas.microsoft.com/office/word/2010/wordprocessingShape">'
        "{}</wps:txbx></w:drawing>"
    )
    older = f"<w:pict><v:textbox xmlns:v='urn:schemas-microsoft-com:vml'>{box('one')}</v:textbox></w:pict>"
    boxes = f"<w:r>{choice(drawing.format(box('one')) + drawing.format(box('two')), older)}</w:r>"
    texts, block = choice(run("new"), run("old")), choice(f"<w:p>{run('in')}</w:p>", "")
    body = f"<w:p>{boxes}</w:p><w:p>{texts}</w:p>{block}<w:p>{run('end')}</w:p>"
    assert only("a.docx", docx(body)) == "one\n\ntwo\n\nnew\n\nin\n\nend"


def test_docx_has_the_text_of_documents_that_are_inserted() -> None:
    def inserting(name: str, content: bytes) -> bytes:
        relations = (
            '<Relationships xmlns="http://schemas.openxmlformats.org/package/2006/relationships">'
            f'<Relationship Id="i1" Type="{_OFFICE}/aFChunk" Target="/word/{name}"/></Relationships>'
        )
        paragraph = "<w:p><w:r><w:t>{}</w:t></w:r></w:p>"
        body = f'{paragraph.format("start")}<w:altChunk xmlns:r="{_OFFICE}" r:id="i1"/>{paragraph.format("end")}'
        return docx(body, **{"word/_rels/document.xml.rels": relations, f"word/{name}": content})

    page = b"<html><body><h2>T</h2><p>a<table><tr><th>b<th>c<tr><td>1<td>2</table></body></html>"
    table = "| b | c |\n| --- | --- |\n| 1 | 2 |"
    assert only("a.docx", inserting("i.html", page)) == f"start\n\n## T\n\na\n\n{table}\n\nend"
    assert only("a.docx", inserting("i.dat", docx("<w:p><w:r><w:t>in</w:t></w:r></w:p>"))) == "start\n\nin\n\nend"
    mail = "MIME-Version: 1.0\n" + parts("related", "Content-Type: text/html\n\n<p>in")
    assert only("a.docx", inserting("i.mht", mail.encode())) == "start\n\nin\n\nend"
    for content, text in ((inserting("j.html", page), "start\n\nend\n\n"), (bytes(range(256)), "")):
        made = parse("a.docx", inserting("i.dat", content))
        assert [block.text for block in made.blocks] == [f"start\n\n{text}end"]
        assert made.metadata["left_out"] == "inserted documents: word/i.dat"


@pytest.mark.parametrize(
    "dangling",
    [
        f'<w:hyperlink xmlns:r="{_OFFICE}" r:id="no"><w:r><w:t>text</w:t></w:r></w:hyperlink>',
        '<w:r><w:t>text</w:t><w:footnoteReference w:id="9"/></w:r>',
        (
            '<w:r><w:t>text</w:t><w:drawing><wp:inline xmlns:wp="http://schemas.openxmlformats.org/drawingml/2006/'
            f'wordprocessingDrawing"><a:graphic xmlns:a="{_DRAWING}"><a:graphicData><pic:pic xmlns:pic="http://schemas.'
            f'openxmlformats.org/drawingml/2006/picture"><pic:blipFill><a:blip xmlns:r="{_OFFICE}" r:embed="no"/>'
            "</pic:blipFill></pic:pic></a:graphicData></a:graphic></wp:inline></w:drawing></w:r>"
        ),
    ],
    ids=["link", "note", "picture"],
)
def test_docx_that_refers_to_what_it_lacks_has_its_text(dangling: str) -> None:
    link = f'<w:hyperlink xmlns:r="{_OFFICE}" r:id="r1"><w:r><w:t> and more</w:t></w:r></w:hyperlink>'
    relations = (
        '<Relationships xmlns="http://schemas.openxmlformats.org/package/2006/relationships">'
        f'<Relationship Id="r1" Type="{_OFFICE}/hyperlink" Target="https://a" TargetMode="External"/></Relationships>'
    )
    content = docx(f"<w:p>{dangling}{link}</w:p>", **{"word/_rels/document.xml.rels": relations})
    assert only("a.docx", content) == "text and more"


def test_docx_has_its_charts_as_tables() -> None:
    with zipfile.ZipFile(BytesIO(deck_with("chart", b"-", 1))) as deck:
        chart = next(deck.read(name) for name in deck.namelist() if name.startswith("ppt/charts/chart"))
    relations = (
        '<Relationships xmlns="http://schemas.openxmlformats.org/package/2006/relationships">'
        f'<Relationship Id="c1" Type="{_OFFICE}/chart" Target="charts/chart1.xml"/></Relationships>'
    )
    drawing = (
        f'<w:drawing><a:graphic xmlns:a="{_DRAWING}"><c:chart xmlns:c="http://schemas.openxmlformats.org/drawingml/2006/'
        f'chart" xmlns:r="{_OFFICE}" r:id="c1"/></a:graphic></w:drawing>'
    )
    body = f"<w:p><w:r>{drawing}</w:r></w:p><w:p><w:r><w:t>end</w:t></w:r></w:p>"
    files = {"word/_rels/document.xml.rels": relations, "word/charts/chart1.xml": chart}
    assert only("a.docx", docx(body, **files)) == "| | s |\n| --- | --- |\n| deep | 1 |\n| two | 2.5 |\n\nend"
    assert only("a.docx", docx(body)) == "end"
    damaged = {name: content[:900] if "chart1" in name else content for name, content in files.items()}
    assert only("a.docx", docx(body, **damaged)) == "end"


def test_docx_and_html_say_which_boxes_are_ticked_and_which_entry_is_chosen() -> None:
    def field(data: str, name: str) -> str:
        return (
            f'<w:r><w:fldChar w:fldCharType="begin"><w:ffData>{data}</w:ffData></w:fldChar></w:r>'
            f'<w:r><w:instrText>{name}</w:instrText></w:r><w:r><w:fldChar w:fldCharType="end"/></w:r>'
        )

    run = '<w:r><w:t xml:space="preserve">{}</w:t></w:r>'
    word = 'xmlns:w14="http://schemas.microsoft.com/office/word/2010/wordml"'
    box = (
        f'<w:sdt><w:sdtPr><w14:checkbox {word}><w14:checked w14:val="{{}}"/></w14:checkbox></w:sdtPr><w:sdtContent>'
        f"{run.format('☒')}</w:sdtContent></w:sdt>"
    )
    content_controls = f"<w:p>{box.format(1)}{run.format(' Yes ')}{box.format(0)}{run.format(' No')}</w:p>"
    older = field('<w:checkBox><w:default w:val="0"/><w:checked/></w:checkBox>', "FORMCHECKBOX")
    entries = "".join(f'<w:listEntry w:val="{name}"/>' for name in ("Red", "Blue"))
    lists = [
        field(f"<w:ddList>{chosen}{entries}</w:ddList>", "FORMDROPDOWN")
        for chosen in ("", '<w:result w:val="1"/>', '<w:result w:val="7"/>')
    ]
    fields = f"<w:p>{older}{run.format('Paid, ')}{run.format(', ').join(lists)}</w:p>"
    assert only("a.docx", docx(content_controls + fields)) == "☒ Yes ☐ No\n\n☒ Paid, Red, Blue,"
    page = "<ul><li><input type=checkbox checked> a<li><input type=radio>b<li><input value=c>d</ul>"
    assert only("a.html", page) == "- ☒ a\n- ☐ b\n- d"


@pytest.mark.parametrize("body", ["<main><p>a</main>", "<header>a</header>", "<x-page><article>a</article></x-page>"])
def test_html_without_the_tags_of_its_head_and_body_keeps_its_text(body: str) -> None:
    head = "<meta charset=utf-8><title>t</title><style>s</style><script>u</script>"
    assert only("a.html", f"<!doctype html>{head}{body}<p>b") == "a\n\nb"
    assert only("a.html", f"<!doctype html><html lang=en><head>{head}<section>a</section>b") == "a\n\nb"


def test_xhtml_keeps_the_text_of_cdata_sections() -> None:
    style = "<style><![CDATA[ p > b {} ]]></style>"
    text = '<div xmlns="http://www.w3.org/1999/xhtml"><p>a <![CDATA[<b> & c]]></p><p>d ]]&gt;</p></div>'
    assert only("a.xhtml", f"<html><head>{style}</head><body>{text}</body></html>") == "a <b> & c\n\nd ]]>"
    assert blocks("a", epub([text])) == [("a <b> & c\n\nd ]]>", {"section": 1})]


def test_a_heading_of_html_may_be_a_button() -> None:
    page = (
        "<h2><button>Who pays?</button></h2><div>The employer. <button>Copy</button></div>"
        "<table><tr><th><button>Name</button><th>Age<tr><td>Ada<td>36 <button>Delete</button></table>"
    )
    table = "| Name | Age |\n| --- | --- |\n| Ada | 36 |"
    assert only("a.html", page) == f"## Who pays?\n\nThe employer.\n\n{table}"


@pytest.mark.parametrize(
    ("button", "text"),
    [
        ("<button class='wide accordion'>Refunds</button>", "Refunds"),
        ("<button aria-expanded=false>Who may <b>apply?</b></button>", "Who may **apply?**"),
        ("<button aria-controls=menu>Open menu</button>", ""),
        ("<button>Read this before you apply here</button>", "Read this before you apply here"),
        ("<button>Accept all of these cookies</button>", ""),
        ("<button><h3>Card</h3><p>Says <button>More</button> more.</p></button>", "### Card\n\nSays  more."),
        ("<nav><button class=accordion>Menu</button></nav>", ""),
    ],
)
def test_a_button_of_html_that_opens_a_part_or_has_many_words_is_text(button: str, text: str) -> None:
    assert only("a.html", f"<p>One</p>{button}<div>Two</div>") == "\n\n".join(filter(None, ("One", text, "Two")))


def test_a_cell_over_many_rows_keeps_its_column() -> None:
    rows = "".join(f"<tr><td>c{n}<td>{n}" for n in range(1, 100))
    table = only("a.html", f"<table><tr><th>r<th>c<th>n<tr><td rowspan=100>N<td>c0<td>0{rows}</table>")
    assert table.split("\n")[2:] == [f"| N | c{n} | {n} |" for n in range(100)]
    # a row without cells takes its place
    spans = "<table><tr><td rowspan=2>a<td>b</tr><tr></tr><tr><td>c<td>d</tr></table>"
    assert only("a.html", spans) == "| a | b |\n| --- | --- |\n| c | d |"
    # and one that is shorter than it too
    short = "<table><tr><td>a<td>b<td rowspan=2>c<tr><td>d<tr><td>e<td>f<td>g</table>"
    assert only("a.html", short) == "| a | b | c |\n| --- | --- | --- |\n| d |  |  |\n| e | f | g |"


@pytest.mark.parametrize(
    "rows",
    [
        "<form><tr><td>a<td>b</tr><tr><td>c<td>d</tr></form>",
        "<tr><td>a<td>b</tr><tr><form><center><td>c</td><td>d</td></center></form></tr>",
        "<tbody><form><tr><td>a</td><td>b</td></tr></form><div><tr><td>c</td><td>d</td></tr></div></tbody>",
    ],
)
def test_what_stands_around_rows_and_cells_of_a_table_leaves_them_apart(rows: str) -> None:
    assert only("a.html", f"<html><body><table>{rows}</table>") == "| a | b |\n| --- | --- |\n| c | d |"


def test_pptx_has_a_block_a_slide() -> None:
    deck = pptx([("First", "one\ntwo", "say hello"), ("Second", "three", "")])
    assert blocks("a.pptx", deck) == [
        ("# First\n\n- one\n- two\n\nNotes: say hello", {"slide": 1}),
        ("# Second\n\nthree", {"slide": 2}),
    ]
    assert parse("a.pptx", deck).metadata["title"] == "A deck"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("See you at the Café".encode("latin-1"), "See you at the Café"),
        ("See you at the Café.".encode("latin-1"), "See you at the Café."),
        ("Coffee and cake: 3 €\n".encode("cp1252"), "Coffee and cake: 3 €"),
        # cut off
        ("Grüße from the Café".encode()[:-1], "Grüße from the Caf"),
        ("See you at the 駅".encode()[:-1], "See you at the"),
    ],
)
def test_the_last_character_of_a_text_is_not_lost(content: bytes, expected: str) -> None:
    assert parse("a.txt", content).blocks[0].text == expected


def test_line_ends_within_paragraphs_keep_words_apart() -> None:
    word = "<w:p><w:r><w:t>a</w:t><w:cr/><w:t>b</w:t><w:ptab/><w:t>c</w:t></w:r></w:p>"
    assert only("a.docx", docx(word)) == "a\nb c"
    power = '<w:r><w:rPr><w:vertAlign w:val="superscript"/></w:rPr><w:t>6</w:t></w:r>'
    assert only("a.docx", docx(f"<w:p><w:r><w:t>10</w:t></w:r>{power}</w:p>")) == "10^6"
    deck = pptx([("Annual\vReport", "one\vtwo\nthree", "four\vfive")])
    assert blocks("a", deck) == [("# Annual Report\n\n- one two\n- three\n\nNotes: four\nfive", {"slide": 1})]
    broken = '<w:p><w:r><w:t>a</w:t><w:br w:type="page"/><w:t>b</w:t><w:br w:type="column"/><w:t>c</w:t></w:r></w:p>'
    assert only("a", docx(broken)) == "a\nb\nc"
    book = xlsx({"S": [["a_x000D_\nb", "_x0041_"], ["c", "d"]]})
    assert blocks("a", book) == [("| a b | _x0041_ |\n| --- | --- |\n| c | d |", {"sheet": "S"})]


def test_a_chart_of_a_pptx_is_a_table() -> None:
    chart = deck_with("chart", b"-", 1)
    assert blocks("a.pptx", chart) == [("|  | s |\n| --- | --- |\n| deep | 1 |\n| two | 2.5 |", {"slide": 1})]
    unnamed = deck_with("chart", rb'<c:pt idx="1">\s*<c:v>two</c:v>\s*</c:pt>', 0)
    assert blocks("a.pptx", unnamed) == [("|  | s |\n| --- | --- |\n| deep | 1 |\n|  | 2.5 |", {"slide": 1})]


def test_the_points_of_charts_without_categories_are_tables() -> None:
    from pptx import Presentation
    from pptx.chart.data import BubbleChartData, XyChartData
    from pptx.enum.chart import XL_CHART_TYPE

    deck = Presentation()
    points, bubbles = XyChartData(), BubbleChartData()
    for name, found in {"s": [(1.5, 2.5), (3, 4)], "t": [(5, 6)]}.items():
        series = points.add_series(name)
        for x, y in found:
            series.add_data_point(x, y)
    bubbles.add_series("b").add_data_point(1, 2, 30)
    for kind, data in ((XL_CHART_TYPE.XY_SCATTER, points), (XL_CHART_TYPE.BUBBLE, bubbles)):
        chart = deck.slides.add_slide(deck.slide_layouts[6]).shapes.add_chart(kind, 0, 0, 9, 9, data).chart
        chart.has_title = True
        chart.chart_title.text_frame.text = "Growth"
    out = BytesIO()
    deck.save(out)
    first, second = (text for text, _ in blocks("a.pptx", out.getvalue()))
    assert first == "Growth\n\n|  | x | y |\n| --- | --- | --- |\n| s | 1.5 | 2.5 |\n| s | 3 | 4 |\n| t | 5 | 6 |"
    assert second == "Growth\n\n|  | x | y | size |\n| --- | --- | --- | --- |\n| b | 1 | 2 | 30 |"
    nameless = deck_with("chart", rb"<c:cat>.*?</c:cat>", 0)
    assert blocks("a.pptx", nameless) == [("s\n\n1\n\n2.5", {"slide": 1})]
    wrong = deck_with("chart", rb"<c:v>2.5</c:v>", 0)
    assert blocks("a.pptx", wrong) == [("|  | s |\n| --- | --- |\n| deep | 1 |\n| two |  |", {"slide": 1})]


def test_shapes_of_a_slide_may_have_the_same_number() -> None:
    from pptx import Presentation

    deck = Presentation()
    slide = deck.slides.add_slide(deck.slide_layouts[5])
    slide.shapes.title.text = "Title"
    box = slide.shapes.add_textbox(0, 9, 9, 9)
    box.text_frame.text = "text"
    box._element.nvSpPr.cNvPr.set("id", str(slide.shapes.title.shape_id))
    out = BytesIO()
    deck.save(out)
    assert blocks("a.pptx", out.getvalue()) == [("# Title\n\ntext", {"slide": 1})]


def test_xlsx_has_a_block_a_sheet_and_values_as_people_write_them() -> None:
    rows = [
        ["when", "n", "ok"],
        [datetime.datetime(2024, 2, 3), 3.0, True],
        [datetime.datetime(2024, 2, 3, 4, 5), 0.1 + 0.2, False],
    ]
    book = xlsx({"Data": rows, "Empty": [], "More": [["x"], ["y"]]})
    assert blocks("a.xlsx", book) == [
        (
            "# Data\n\n| when | n | ok |\n| --- | --- | --- |\n| 2024-02-03 | 3 | TRUE |\n"
            "| 2024-02-03 04:05:00 | 0.3 | FALSE |",
            {"sheet": "Data"},
        ),
        ("# More\n\nx\n\ny", {"sheet": "More"}),
    ]


@pytest.mark.parametrize("kind", ["docx", "pptx", "xlsx"])
def test_strict_ooxml_is_read_as_the_other_kind(kind: str) -> None:
    made = {
        "docx": docx("<w:p><w:r><w:t>one</w:t></w:r></w:p>"),
        "pptx": pptx([("T", "one", "two")]),
        "xlsx": xlsx({"S": [["a", "b"], [1, datetime.date(2024, 5, 1)]]}),
    }[kind]
    names = re.compile(rb"http://schemas.openxmlformats.org/(\w+ml|officeDocument)/2006/")
    with zipfile.ZipFile(BytesIO(made)) as archive:
        parts = {name: names.sub(rb"http://purl.oclc.org/ooxml/\1/", archive.read(name)) for name in archive.namelist()}
    assert b"purl.oclc.org" in parts["_rels/.rels"]
    assert blocks(f"a.{kind}", zipped(parts)) == blocks(f"a.{kind}", made)


def test_numbers_in_a_sheet_keep_the_zeros_that_they_are_shown_with() -> None:
    book = openpyxl.Workbook()
    for value, number_format in ((1067, "00000"), (123456, "00000"), (-7, "000"), (7, "0"), (1.5, "00"), (0.25, "0%")):
        book.active.append([value])
        book.active.cell(book.active.max_row, 1).number_format = number_format
    out = BytesIO()
    book.save(out)
    assert blocks("a.xlsx", out.getvalue())[0][0].split("\n\n") == ["01067", "123456", "-007", "7", "1.5", "0.25"]


def test_formulas_in_a_sheet_without_a_value_are_named() -> None:
    rows: list[list[object]] = [["sum", "=1+1"], *([[n, f"=A{n}"] for n in range(2, 8)])]
    made = parse("a.xlsx", xlsx({"S": rows, "T": [["x"]]}))
    assert made.metadata["left_out"] == (
        "values of formulas that no program has computed, 7: S!B1, S!B2, S!B3, S!B4, S!B5, …"
    )
    # an empty text is a value
    with zipfile.ZipFile(BytesIO(xlsx({"S": [["x", '=""']]}))) as book:
        members = {name: book.read(name).replace(b'<c r="B1">', b'<c r="B1" t="str">') for name in book.namelist()}
    made = parse("a.xlsx", zipped(dict(members)))
    assert made.blocks[0].text == "x"
    assert "left_out" not in made.metadata


def test_a_sheet_with_titles_and_two_tables() -> None:
    rows: list[list[object]] = [
        ["Ducks"],
        ["year", "n"],
        [2020, 1],
        [],
        [2021, 2],
        [],
        [None, "kind", "n"],
        [None, "teal", 5],
    ]
    assert blocks("a.xlsx", xlsx({"S": rows})) == [
        (
            "Ducks\n\n| year | n |\n| --- | --- |\n| 2020 | 1 |\n| 2021 | 2 |\n\n"
            "| kind | n |\n| --- | --- |\n| teal | 5 |",
            {"sheet": "S"},
        )
    ]  # fmt: skip


def test_sheets_have_the_texts_of_their_boxes_below_them() -> None:
    out = BytesIO()
    with xlsxwriter.Workbook(out, {"in_memory": True}) as book:
        data = book.add_worksheet("Data")
        data.write_row(0, 0, ["a", "b"])
        data.insert_textbox(3, 0, "All sums\nin euros")
        data.insert_textbox(9, 0, "Ask Ada")
        book.add_worksheet("Help").insert_textbox(0, 0, "Fill in Data")
    assert blocks("a.xlsx", out.getvalue()) == [
        ("# Data\n\n| a | b |\n| --- | --- |\n\nAll sums\n\nin euros\n\nAsk Ada", {"sheet": "Data"}),
        ("# Help\n\nFill in Data", {"sheet": "Help"}),
    ]
    box = "<draw:frame><draw:text-box><text:p>Ask Ada</text:p></draw:text-box></draw:frame>"
    row = "<table:table-row><table:table-cell><text:p>a</text:p></table:table-cell></table:table-row>"
    sheet = f'<table:table table:name="S"><table:shapes>{box}</table:shapes>{row}</table:table>'
    assert blocks("a", odt(sheet, "spreadsheet")) == [("a\n\nAsk Ada", {"sheet": "S"})]


def test_a_sheet_that_is_a_chart_takes_no_others_away() -> None:
    book = openpyxl.Workbook()
    book.active.append(["a", "b"])
    book.create_chartsheet("Chart")
    out = BytesIO()
    book.save(out)
    assert blocks("a.xlsx", out.getvalue()) == [("| a | b |\n| --- | --- |", {"sheet": "Sheet"})]


def test_odf_presentation_and_spreadsheet() -> None:
    page = (
        '<draw:page><draw:frame presentation:class="title"><draw:text-box><text:p>Title</text:p></draw:text-box>'
        "</draw:frame><draw:frame><draw:text-box><text:list><text:list-item><text:p>one</text:p></text:list-item>"
        "</text:list></draw:text-box></draw:frame></draw:page>"
    )
    assert blocks("a", odt(page * 2, "presentation")) == [("# Title\n\n- one", {"slide": n}) for n in (1, 2)]
    cell = "<table:table-cell><text:p>{}</text:p></table:table-cell>"
    blank = '<table:table-cell table:number-columns-repeated="16000"/>'
    nothing = f'<table:table-row table:number-rows-repeated="1000000">{blank}</table:table-row>'
    two = f"<table:table-row>{cell.format('a')}{cell.format('b')}{blank}</table:table-row>"
    sheet = f'<table:table table:name="S">{two}{two.replace("a<", "1<")}{nothing}</table:table>'
    assert blocks("a", odt(sheet, "spreadsheet")) == [("| a | b |\n| --- | --- |\n| 1 | b |", {"sheet": "S"})]


def test_odt_has_headings_lists_and_tables() -> None:
    cell = "<table:table-cell><text:p>x</text:p></table:table-cell>"
    body = (
        '<text:h text:outline-level="2">Part</text:h><text:p>a<text:s text:c="2"/>b<text:line-break/>c</text:p>'
        "<text:list><text:list-item><text:p>one</text:p><text:list><text:list-item><text:p>two"
        "</text:p></text:list-item></text:list></text:list-item></text:list>"
        f"<table:table><table:table-row>{cell * 2}</table:table-row></table:table>"
    )
    assert only("a", odt(body)) == "## Part\n\na  b\nc\n\n- one\n  - two\n\n| x | x |\n| --- | --- |"


def test_rtf_odt_and_pptx_have_powers() -> None:
    from pptx import Presentation

    raised = r"10{\super 6} W, 3\'d710{\rtlch\super\loch -5}, m{\super 2}, \fs24{\super 7}, 10\super 8"
    made = only("a.rtf", rf"{{\rtf1\ansi {raised}}}".encode())
    assert made == r"10^6 W, 3×10^-5, m2, 7, 10^8"
    styles = "".join(
        f'<style:style style:name="{name}"><style:text-properties style:text-position="{place} 58%"/></style:style>'
        for name, place in (("A", "super"), ("B", "33%"), ("C", "sub"), ("D", "-33%"))
    )
    body = "".join(
        f'<text:p>{before}<text:span text:style-name="{name}">{text}</text:span></text:p>'
        for before, name, text in (
            ("1", "A", 2),
            ("1", "B", 3),
            ("1", "C", 4),
            ("1", "D", 5),
            ("m", "A", 6),
            ("", "A", 7),
        )
    )
    assert only("a", odt(body, styles=styles)) == "1^2\n\n1^3\n\n14\n\n15\n\nm6\n\n7"
    deck = Presentation()
    slide = deck.slides.add_slide(deck.slide_layouts[5])
    slide.shapes.title.text = "T"
    box = slide.shapes.add_textbox(9_000_000, 3_000_000, 9, 9)
    for text, baseline in (("10", ""), ("6", "30000"), (" H", ""), ("2", "-25000"), ("7", "30000"), ("8", "0")):
        run = box.text_frame.paragraphs[0].add_run()
        run.text = text
        if baseline:
            run.font._rPr.set("baseline", baseline)
    out = BytesIO()
    deck.save(out)
    assert blocks("a.pptx", out.getvalue())[0][0] == "# T\n\n10^6 H2^78"


def test_odt_does_not_count_what_was_deleted() -> None:
    style = (
        '<style:style style:name="L"/><text:list-style style:name="L"><text:list-level-style-number text:level="1"'
        ' style:num-format="1" style:num-suffix="."/></text:list-style>'
    )
    item = '<text:list text:style-name="L"><text:list-item><text:p>{}</text:p></text:list-item></text:list>'
    deleted = f"<text:deletion>{item.format('gone')}</text:deletion>"
    changes = f"<text:tracked-changes><text:changed-region>{deleted}</text:changed-region></text:tracked-changes>"
    going_on = item.replace("<text:list ", '<text:list text:continue-numbering="true" ')
    assert only("a", odt(f"{changes}{going_on.format('first')}", styles=style)) == "1. first"


def test_odt_has_the_numbers_of_lists_and_headings() -> None:
    def level(number: int, rest: str, tag: str = "list-level-style-number") -> str:
        return f'<text:{tag} text:level="{number}" {rest}/>'

    def items(*texts: str) -> str:
        return "".join(f"<text:list-item><text:p>{text}</text:p></text:list-item>" for text in texts)

    one, letter = 'style:num-format="1"', 'style:num-format="a" style:num-prefix="(" style:num-suffix=")"'
    dotted = f'{one} style:num-suffix="." '
    nested = level(2, f'{one} text:display-levels="2"') + level(3, letter)
    styles = (
        f'<text:list-style style:name="L">{level(1, dotted + """text:start-value="5" """)}{nested}</text:list-style>'
        f'<text:list-style style:name="B">{level(1, "", "list-level-style-bullet")}</text:list-style>'
        f'<text:list-style style:name="R">{level(1, letter)}</text:list-style>'
        f"<text:outline-style>{level(1, one, 'outline-level-style')}"
        f"{level(2, one + ' text:display-levels=' + repr('2'), 'outline-level-style')}</text:outline-style>"
        '<style:style style:name="Base" style:list-style-name=""/>'
        '<style:style style:name="Plain" style:parent-style-name="Base"/>'
    )
    tables = f"<table:table><table:table-row>{'<table:table-cell>{0}</table:table-cell>' * 2}</table:table-row>"
    cell = f'<text:list text:style-name="R">{items("j", "k")}</text:list>'
    body = (
        '<text:h text:outline-level="1">Scope</text:h><text:h text:outline-level="2">General</text:h>'
        '<text:h text:outline-level="1" text:style-name="Plain">Preface</text:h>'
        '<text:h text:outline-level="1" text:is-list-header="true">Notes</text:h>'
        '<text:h text:outline-level="1">Terms</text:h>'
        f'<text:list text:style-name="L" xml:id="x">{items("a", "b")}<text:list-item><text:p>c</text:p>'
        "<text:p>more</text:p>"
        f"<text:list>{items('d')}<text:list-item><text:list>{items('e')}</text:list></text:list-item>{items('f')}"
        f"</text:list></text:list-item></text:list><text:p>-</text:p><text:list text:style-name='B'>{items('dot')}"
        f"</text:list><text:list text:continue-list='x' text:style-name='L'>{items('g')}"
        '<text:list-item text:start-value="2"><text:p>h</text:p></text:list-item>'
        '<text:list-item text:style-override="R"><text:h text:outline-level="3">i</text:h></text:list-item></text:list>'
        f"{tables.format(cell)}</table:table><text:list text:style-name='R' text:continue-numbering='true'>"
        f"{items('l')}</text:list><text:list text:style-name='R'>{items('m')}</text:list>"
    )
    assert only("a", odt(body, styles=styles)) == (
        "# 1 Scope\n\n## 1.1 General\n\n# Preface\n\n# Notes\n\n# 2 Terms\n\n5. a\n6. b\n7. c\n   more\n  7.1 d\n"
        "    (a) e\n  7.2 f\n\n-\n\n- dot\n\n8. g\n2. h\n\n### (c) i\n\n"
        "| (a) j (b) k | (a) j (b) k |\n| --- | --- |\n\n(c) l\n\n(a) m"
    )


@pytest.mark.parametrize("kind", ["text-web", "text-master", "text-template"])
def test_opendocument_for_pages_books_and_templates_is_text(kind: str) -> None:
    with zipfile.ZipFile(BytesIO(odt("<text:p>a</text:p>"))) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    parts["mimetype"] = f"application/vnd.oasis.opendocument.{kind}".encode()
    made = parse("a", zipped(parts))
    assert (made.format, [block.text for block in made.blocks]) == ("odt", ["a"])


def test_odt_has_the_tables_and_boxes_of_lists_and_nested_boxes_once() -> None:
    cell = "<table:table-cell><text:p>x</text:p></table:table-cell>"
    table = f"<table:table><table:table-row>{cell * 2}</table:table-row></table:table>"
    box = "<text:p>{}<draw:frame><draw:text-box>{}</draw:text-box></draw:frame></text:p>"
    nested = "<text:p>end</text:p>"
    for i in range(20):
        nested = box.format(f"b{i}", nested)
    items = f"{box.format('a', '<text:p>c</text:p>')}{table}"
    made = only("a", odt(f"<text:list><text:list-item>{items}</text:list-item></text:list>{nested}"))
    boxes = "\n\n".join(f"b{i}" for i in reversed(range(20)))
    assert made == f"- a\nc\n| x | x |\n| --- | --- |\n\n{boxes}\n\nend"


def test_odt_has_the_texts_of_shapes_apart_and_once() -> None:
    shape = "<draw:custom-shape><text:p>Start</text:p><text:p>here</text:p></draw:custom-shape>"
    group = f"<draw:g>{shape}<draw:rect><text:p>End</text:p></draw:rect></draw:g>"
    assert only("a", odt(f"<text:p>Flow{group} chart</text:p>")) == "Flow chart\n\nStart\n\nhere\n\nEnd"
    assert only("a", odt(f"<text:list><text:list-item><text:p>a{shape}</text:p></text:list-item></text:list>")) == (
        "- a\nStart\nhere"
    )
    cell = "<table:table-cell><text:p>a{}</text:p></table:table-cell>"
    row = f"<table:table-row>{cell.format(shape)}{cell.format('')}</table:table-row>"
    assert only("a", odt(f"<table:table>{row}</table:table>")) == "| a Start here | a |\n| --- | --- |"


def test_opendocument_has_its_formulas_and_what_its_charts_show() -> None:
    frame = '<draw:frame><draw:object xlink:href="{}"/></draw:frame>'
    formula = (
        '<math:math xmlns:math="http://www.w3.org/1998/Math/MathML"><math:semantics><math:mrow><math:mi>x</math:mi>'
        "<math:mo>=</math:mo><math:mfrac><math:mrow><math:mi>a</math:mi><math:mo>+</math:mo><math:mn>1</math:mn>"
        "</math:mrow><math:mn>2</math:mn></math:mfrac></math:mrow><math:annotation>x = {a+1} over 2</math:annotation>"
        "</math:semantics></math:math>"
    )
    cells = "".join(f"<table:table-cell><text:p>{text}</text:p></table:table-cell>" for text in ("2025", "7"))
    chart = (
        '<office:document-content xmlns:office="urn:oasis:names:tc:opendocument:xmlns:office:1.0" '
        'xmlns:text="urn:oasis:names:tc:opendocument:xmlns:text:1.0" '
        'xmlns:table="urn:oasis:names:tc:opendocument:xmlns:table:1.0"><office:body><office:chart><title>'
        f"<text:p>Sales</text:p></title><table:table><table:table-row>{cells}</table:table-row></table:table>"
        "</office:chart></office:body></office:document-content>"
    )
    objects: dict[str, str | bytes] = {
        "Object 1/content.xml": formula,
        "Object 2/content.xml": chart,
        "Object 3/content.xml": "",
    }
    inline = f"<text:p>As {frame.format('./Object 1')} shows{frame.format('Object 3')}.</text:p>"
    others = f"<text:p>{frame.format('./Object 2')}</text:p>{frame.format('./Object 2')}{frame.format('.')}"
    table = "| 2025 | 7 |\n| --- | --- |"
    assert only("a", odt(inline + others, **objects)) == f"As x=(a+1)/2 shows.\n\nSales\n\n{table}"
    page = f"<draw:page>{frame.format('./Object 1')}{frame.format('./Object 2')}</draw:page>"
    assert blocks("a", odt(page, "presentation", **objects)) == [(f"x=(a+1)/2\n\nSales\n\n{table}", {"slide": 1})]


def test_comments_of_opendocument_are_no_text_and_notes_stand_once() -> None:
    comment = "<office:annotation><text:p>should it be 43?</text:p></office:annotation>"
    note = "<text:note><text:note-body><text:p>estimated</text:p></text:note-body></text:note>"
    box = "<draw:frame><draw:text-box><text:p>box</text:p></draw:text-box></draw:frame>"
    cells = "".join(
        f"<table:table-cell>{inside}</table:table-cell>"
        for inside in (f"{comment}<text:p>42</text:p>", f"<text:p>7{note}{comment}{box}</text:p>")
    )
    table = f'<table:table table:name="S"><table:table-row>{cells}</table:table-row></table:table>'
    expected = "| 42 | 7 (estimated) box |\n| --- | --- |"
    assert blocks("a", odt(table, "spreadsheet")) == [(expected, {"sheet": "S"})]
    assert only("a", odt(table)) == expected
    older = comment.replace("<office:annotation", '<o:annotation xmlns:o="http://openoffice.org/2009/office"')
    page = f"<draw:page>{comment}{older.replace('</office', '</o')}{box}</draw:page>"
    assert blocks("a", odt(page, "presentation")) == [("box", {"slide": 1})]


def test_epub_has_a_block_a_document_of_the_spine() -> None:
    assert blocks("a", epub(["<h1>One</h1>", "<p></p>", "<p>three</p>"])) == [
        ("# One", {"section": 1}),
        ("three", {"section": 3}),
    ]
    assert parse("a", epub(["<p>x</p>"])).metadata == {"title": "A book"}


def test_feed_has_its_entries_as_sections() -> None:
    feed = (
        "<feed xmlns='http://www.w3.org/2005/Atom'><title>F</title><entry><title>E</title>"
        "<updated>2024-01-01</updated>"
        "<content type='html'>&lt;p>one &lt;b>two&lt;/b>&lt;/p></content></entry></feed>"
    )
    assert only("a.xml", "<?xml version='1.0'?>" + feed) == "# F\n\n## E\n\n2024-01-01\n\none **two**"


def test_mail_has_its_headers_text_and_names_of_attachments() -> None:
    mail = (
        "From: Ann <a@b.example>\nTo: c@d.example\nSubject: =?utf-8?q?Gr=C3=BC=C3=9Fe?=\nMIME-Version: 1.0\n"
        'Content-Type: multipart/mixed; boundary="x"\n\n--x\nContent-Type: text/html; charset=iso-8859-1\n\n'
        '<p>caf\xe9</p>\n--x\nContent-Disposition: attachment; filename="n.txt"\n\nno\n--x--\n'
    ).encode("latin-1")
    expected = "# Grüße\n\nFrom: Ann <a@b.example>\nTo: c@d.example\n\ncafé\n\nAttachments: n.txt\n\n## n.txt\n\nno"
    assert only("a.eml", mail) == expected
    assert parse("a.eml", mail).metadata == {"title": "Grüße", "author": "Ann <a@b.example>"}


def test_mail_has_the_texts_beside_its_body() -> None:
    mail = (
        'Subject: s\nMIME-Version: 1.0\nContent-Type: multipart/mixed; boundary="x"\n\n'
        "--x\nContent-Type: text/plain\n\nbody\n--x\nContent-Type: text/html\n\n<p>footer</p>\n"
        "--x\nContent-Type: message/rfc822\n\nSubject: another\n\ninner\n--x--\n"
    )
    assert only("a.eml", mail) == "# s\n\nbody\n\nfooter\n\nAttachments: another\n\n## another\n\ninner"


def parts(kind: str, *found: str) -> str:
    """A part of a mail that has others."""
    within = "".join(f"--{kind}\n{one}\n" for one in found)
    return f"Content-Type: multipart/{kind}; boundary={kind}\n\n{within}--{kind}--\n"


def plain(words: str, more: str = "") -> str:
    return f"Content-Type: text/plain{more}\n\n{words}"


def test_mail_has_all_texts_of_what_is_signed_or_mixed_within() -> None:
    html = "Content-Type: text/html\n\n<p>{}</p>"
    both = parts("alternative", plain("body"), html.format("body"))
    signed = parts("mixed", both, "Content-Type: image/png\n\nx", plain("after"), plain("more", "; name=a.txt"))
    mail = parts("signed", signed, "Content-Type: application/pgp-signature\n\nno")
    assert only("a.eml", f"Subject: s\nMIME-Version: 1.0\n{mail}") == (
        "# s\n\nbody\n\nafter\n\nAttachments: a.txt\n\n## a.txt\n\nmore"
    )
    # a body with a name is one all the same
    named = parts("mixed", plain("body", "; name=a"), parts("alternative", plain("one"), html.format("one")))
    assert only("a.eml", f"Subject: s\nMIME-Version: 1.0\n{named}") == "# s\n\nbody\n\none\n\nAttachments: a"


@pytest.mark.parametrize(
    ("mail", "kinds"),
    [
        (parts("alternative", "Content-Type: text/calendar\n\nBEGIN:VCALENDAR"), "text/calendar"),
        ("Content-Type: application/pkcs7-mime; name=smime.p7m\n\nMIIB", "application/pkcs7-mime"),
        ("Content-Type: application/ms-tnef; name=winmail.dat\n\nx", "application/ms-tnef"),
        ("Content-Type: application/octet-stream; name=WINMAIL.DAT\n\nx", "application/octet-stream"),
        (parts("mixed", plain("lost")).replace("--", "=="), "multipart/mixed"),
        (parts("mixed", plain(" "), "Content-Type: a/b; name=a.pdf\n\n%PDF", "Content-Type: a/b\n\n "), None),
        (parts("related", "Content-Type: text/html\n\n<img>", "Content-Type: image/png\n\nPNG"), None),
        (parts("mixed", plain("body"), "Content-Type: text/calendar\n\nBEGIN:VCALENDAR"), None),
    ],
)
def test_mail_whose_text_cannot_be_read_is_named(mail: str, kinds: str | None) -> None:
    told = {} if kinds is None else {"left_out": f"its text, which is in {kinds} alone"}
    made = parse("a.eml", f"Subject: s\nMIME-Version: 1.0\n{mail}".encode())
    assert made.metadata == {"title": "s", **told}
    box = parse("a.mbox", f"From a 2024\nSubject: s\nMIME-Version: 1.0\n{mail}".encode())
    assert (len(box.blocks), box.metadata) == (1, {"left_out": "message 1"} if told else {})


@pytest.mark.parametrize(
    ("shown", "html", "expected"),
    [
        ("See this mail in a browser.", "word " * 17, "word " * 17),
        ("See this mail in a browser.", "word " * 16, "See this mail in a browser."),
        ("x" * 3000, "word " * 1801, "word " * 1801),
        ("x" * 3001, "word " * 2400, "x" * 3001),
        (f"In a browser: https://a.b/{'x' * 500} or http://c.d", "word " * 20, "word " * 20),
    ],
)
def test_mail_whose_plain_text_is_a_stub_has_the_text_of_its_html(shown: str, html: str, expected: str) -> None:
    mail = parts("alternative", plain(shown), f"Content-Type: text/html\n\n<p>{html}</p>", plain("a", ATTACHED))
    assert only("a.eml", f"Subject: s\nMIME-Version: 1.0\n{mail}") == (
        f"# s\n\n{expected.strip()}\n\nAttachments: a.txt\n\n## a.txt\n\na"
    )


ATTACHED = "\nContent-Disposition: attachment; filename=a.txt"
HIDDEN = "<div style='DISPLAY:none'><p style='display: none'>two</div>"
BASE64 = "\nContent-Transfer-Encoding: base64\n\n"
INNER = f"Subject: t\nFrom: Ann\n{parts('mixed', plain('two', ATTACHED))}".encode()


@pytest.mark.parametrize(
    ("mail", "expected"),
    [
        (parts("mixed", plain("one", ATTACHED)), "Attachments: a.txt\n\n## a.txt\n\none"),
        (plain("one", ATTACHED), "Attachments: a.txt\n\n## a.txt\n\none"),
        (plain("AAECAwQFBgcI", f"{ATTACHED}\nContent-Transfer-Encoding: base64"), "Attachments: a.txt"),
        (parts("related", parts("alternative", plain("one")), plain("two")), "one\n\ntwo"),
        (parts("parallel", plain("one"), plain("two")), "one\n\ntwo"),
        (f"Content-Type: text/html\n\n<p>one{HIDDEN}", "one"),
        ("Content-Type: text/html\n\n<div style='display:none'>one<p>two", "one\n\ntwo"),
        ("Content-Type: text/html\n\n<p style='display:none; display: block; x-display:none'>one", "one"),
        ("Content-Type: text/html\n\n<p>one<p style='/* x */display:none'>two", "one"),
        ("Content-Type: text/html\n\n<p>one<p style='DISPLAY:NONE !important; display:block'>two", "one"),
        (f"Content-Type: text/html\nContent-Location: http://a.b\n\n<p>one{HIDDEN}", "one\n\ntwo"),
        (
            parts("mixed", plain("one"), f"Content-Type: text/html{ATTACHED}\n\n{HIDDEN}"),
            "one\n\nAttachments: a.txt\n\n## a.txt\n\ntwo",
        ),
        (parts("related", plain("one"), plain("no", "\nContent-Location: http://frame")), "one"),
        (
            parts("related", plain("no", "\nContent-ID: <a>"), plain("one", "\nContent-ID: <r>")).replace(
                ";", '; start="<r>";', 1
            ),
            "one",
        ),
        (
            parts("mixed", plain("one"), f"Content-Type: message/rfc822{BASE64}{b64encode(INNER).decode()}"),
            "one\n\nAttachments: t, a.txt\n\n## t\n\nFrom: Ann\n\n## a.txt\n\ntwo",
        ),
        (
            parts("alternative", plain("one"), parts("mixed", "Content-Type: text/html\n\n1", plain("two", ATTACHED))),
            "one\n\nAttachments: a.txt\n\n## a.txt\n\ntwo",
        ),
        (parts("alternative", "Content-Type: text/html\n\none", "Content-Type: text/calendar\n\nno"), "one"),
        (
            parts(
                "digest", "\nSubject: t\nFrom: Ann\n\none", f"\nSubject: u\n{parts('mixed', plain('two', ATTACHED))}"
            ),
            "Attachments: t, u, a.txt\n\n## t\n\nFrom: Ann\n\none\n\n## u\n\n## a.txt\n\ntwo",
        ),
    ],
)
def test_mail_has_the_text_of_every_part_that_is_text(mail: str, expected: str) -> None:
    assert only("a.eml", f"Subject: s\nMIME-Version: 1.0\n{mail}") == f"# s\n\n{expected}"


def test_mail_of_outlook_has_the_texts_and_mails_that_are_attached(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, third, fourth, fifth = (f"__attach_version1.0_#0000000{n}/" for n in range(5))
    mail = f"{second}__substg1.0_3701000D/"
    texts = {
        "0037": "s", "1000": "body", "0C1A": "Ann", f"{first}3707": "a.txt", f"{first}370E": "text/plain",
        f"{mail}0037": "t", f"{mail}0C1F": "b@b", f"{mail}1000": "a stub", f"{mail}1013": f"<p>{'inner ' * 5}",
        f"{third}3707": "b.txt", f"{third}370E": "text/plain",
        f"{fourth}3001": "no subject", f"{fourth}__substg1.0_3701000D/1000": "said",
        f"{fifth}__substg1.0_3701000D/0037": "u", f"{mail}{first}3704": "C.CSV",
    }  # fmt: skip
    streams = {f"{key[:-4]}__substg1.0_{key[-4:]}001F": text.encode("utf-16-le") for key, text in texts.items()}
    streams[f"{first}__substg1.0_37010102"] = b"caf\xe9"
    streams[f"{third}__substg1.0_37010102"] = bytes(range(32))
    streams[f"{mail}{first}__substg1.0_37010102"] = b"x,y"
    streams[f"{fifth}__substg1.0_3701000D/__substg1.0_10090102"] = b"RTF"

    class Ole:
        def openstream(self, path: str) -> BytesIO:
            return BytesIO(streams[path])

        def listdir(self) -> list[list[str]]:
            return [path.split("/") for path in streams]

    monkeypatch.setattr("ml_rag.ingest.formats.ole.open_ole", lambda _content: contextlib.nullcontext(Ole()))
    made = parse_msg("a.msg", b"", Request())
    (block,) = made.blocks
    assert block.text == (
        "# s\n\nFrom: Ann\n\nbody\n\nAttachments: a.txt, t, C.CSV, b.txt, no subject, u\n\n## a.txt\n\ncafé\n\n"
        "## t\n\nFrom: <b@b>\n\ninner inner inner inner inner\n\n## C.CSV\n\nx,y\n\n## no subject\n\nsaid"
    )
    assert made.metadata["left_out"] == "an attached mail's text, which is in RTF alone"


def test_xls_has_times_without_a_day(monkeypatch: pytest.MonkeyPatch) -> None:
    import xlrd

    cells = [xlrd.sheet.Cell(xlrd.XL_CELL_DATE, value) for value in (0.5, 0.0, 45351.0, 45351.25)]
    sheet = SimpleNamespace(name="S", nrows=1, row=lambda _i: cells)
    book = SimpleNamespace(
        datemode=0, nsheets=1, user_name="", sheet_by_index=lambda _n: sheet, unload_sheet=lambda _n: None, xf_list=()
    )
    monkeypatch.setattr(xlrd, "open_workbook", lambda **_: book)
    (block,) = parse_xls("a.xls", b"", Request()).blocks
    assert block.text.startswith("| 12:00:00 | 00:00:00 | 2024-02-29 | 2024-02-29 06:00:00 |")


def test_xls_has_durations_leading_zeros_and_large_numbers() -> None:
    """Those of XLSX are in test_xlsx_has_durations_and_large_numbers."""

    def record(kind: int, data: bytes) -> bytes:
        return struct.pack("<HH", kind, len(data)) + data

    def beginning(kind: int) -> bytes:
        return record(0x809, struct.pack("<HHHHII", 0x600, kind, 0x0DBB, 0x07CC, 0, 6))

    formats = ["[h]:mm", "00000", "General", "hh:mm"]
    cells = [(0, 1.5), (0, -0.5), (0, 0.0625), (1, 1067.0), (1, 1.5), (2, 1234567890123450.0), (2, 1e16), (3, 0.5)]
    head = b"".join(
        record(0x41E, struct.pack("<HHB", 200 + i, len(text), 0) + text.encode()) for i, text in enumerate(formats)
    ) + b"".join(record(0xE0, struct.pack("<HH", 0, 200 + i) + bytes(16)) for i in range(len(formats)))
    rows = b"".join(record(0x203, struct.pack("<HHHd", 0, i, *cell)) for i, cell in enumerate(cells))
    start = len(beginning(5) + head) + 14 + 4
    names = record(0x85, struct.pack("<IHBB2s", start, 0, 2, 0, b"s0"))
    book = beginning(5) + head + names + record(0x0A, b"") + beginning(0x10) + rows + record(0x0A, b"")
    (block,) = parse_xls("a.xls", book, Request()).blocks
    assert block.text.split("\n")[0] == (
        "| 36:00:00 | -12:00:00 | 1:30:00 | 01067 | 1.5 | 1234567890123450 | 1e+16 | 12:00:00 |"
    )


def test_xlsx_has_durations_and_large_numbers() -> None:
    book = openpyxl.Workbook()
    values = [(1.5, "[h]:mm"), (-0.5, "[h]:mm"), (0.0625, "[h]:mm:ss"), (45 / 86_400_000, "[s].00"), (2.0**53, "0")]
    book.active.append([value for value, _ in values])
    for cell, (_, shown) in zip(book.active[1], values, strict=True):
        cell.number_format = shown
    out = BytesIO()
    book.save(out)
    first = "| 36:00:00 | -12:00:00 | 1:30:00 | 0:00:00.045000 | 9007199254740992 |"
    assert blocks("a.xlsx", out.getvalue())[0][0].split("\n")[0] == first


@pytest.mark.parametrize("plain", ["", "\n\n", "=C2=A0\n"])
def test_a_mail_whose_plain_part_is_blank_has_the_text_of_the_other(plain: str) -> None:
    mail = (
        'Subject: s\nMIME-Version: 1.0\nContent-Type: multipart/alternative; boundary="x"\n\n'
        "--x\nContent-Type: text/plain; charset=utf-8\nContent-Transfer-Encoding: quoted-printable\n\n"
        f"{plain}\n--x\nContent-Type: text/html\n\n<p>the text</p>\n--x--\n"
    )
    assert only("a.eml", mail) == "# s\n\nthe text"


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "header",
    [
        f"From: =?punycode?q?{'a' * 300_000}-{'b' * 300_000}?=",
        f"To: {'a@b, ' * 50_000}",
        f"To: {'(' * 20_000}",
        f"To: {'a:' * 20_000}",
        f"Cc: {'=?utf-8?q?' * 50_000}",
    ],
)
def test_a_long_header_of_a_mail_is_shown_as_it_is_written(header: str) -> None:
    """Python's parser of headers takes minutes for some of them."""
    shown = header.strip()
    assert only("a.eml", f"Subject: s\n{header}\n\nbody") == f"# s\n\n{shown}\n\nbody"


@pytest.mark.parametrize("charset", ["punycode", "idna", "undefined", "hex", "no-such", "x" * 300, "unicode_escape"])
def test_mail_in_a_character_set_that_is_none(charset: str) -> None:
    head = "Subject: s\nMIME-Version: 1.0\nContent-Type: "
    assert only("a.eml", f"{head}text/plain; charset={charset}\n\ncaf\xe9 \\u0041") == "# s\n\ncaf\xe9 \\u0041"
    assert only("a.eml", f"{head}text/plain; charset*={charset}''%ff\n\ncaf\xe9") == "# s\n\ncaf\xe9"
    attached = (
        f"--x\nContent-Type: image/png\nContent-Disposition: attachment; filename*={charset}''a%2eb\n\nno\n--x--\n"
    )
    mail = f"{head}multipart/mixed; boundary=x\n\n--x\nContent-Type: text/plain\n\nbody\n{attached}"
    assert only("a.eml", mail) == "# s\n\nbody\n\nAttachments: a.b"


def test_pdf_has_a_block_a_page_with_paragraphs_and_headings() -> None:
    first = (
        "# A heading\nThe first paragraph is long enough to go on for sev-\neral lines, the last of which is\n"
        "short.\nThe second paragraph starts on a line of its own and goes on."
    )
    assert blocks("a.pdf", text_pdf([first, "", "Page three"])) == [
        (
            "# A heading\n\nThe first paragraph is long enough to go on for several lines, the last of which is "
            "short.\n\nThe second paragraph starts on a line of its own and goes on.",
            {"page": 1},
        ),
        ("Page three", {"page": 3}),
    ]


def test_pdf_has_what_was_filled_in_and_written_on_it() -> None:
    def field(y: int, kind: str, rest: str) -> str:
        return f"/Subtype /Widget /Rect [200 {y} 300 {y + 12}] /FT /{kind} {rest}"

    written = [
        field(718, "Tx", "/T (f1[0]) /TU (Name:) /V (Ada Lovelace)"),
        field(703, "Tx", "/Parent 12 0 R"),
        field(703, "Btn", "/T (married) /V /Yes /AS /Yes /AP << /N << /Yes 5 0 R /Off 5 0 R >> >>"),
        field(703, "Btn", "/T (retired) /V /Off /AS /Off /AP << /N << /Yes 5 0 R /Off 5 0 R >> >>"),
        field(703, "Tx", "/T (empty)"),
        field(703, "Tx", "/T (secret) /Ff 8192 /V (secret)"),
        "/T (town) /V <FEFF004B00F6006C006E> /Kids [7 0 R]",
        field(703, "Tx", "/T (hidden) /F 2 /V (hidden)"),
        "/Subtype /FreeText /Rect [72 600 300 680] /Contents (written on it)",
        "/Subtype /Text /Rect [72 600 300 680] /Contents (a comment)",
    ]
    made = written_pdf("Name\nTown\nThe end.", *written, fields="6 0 R 8 0 R 9 0 R 10 0 R 11 0 R 12 0 R 13 0 R")
    text = "Name\n\nName: Ada Lovelace\n\nTown\n\ntown: K\xf6ln\n\nmarried: Yes\n\nThe end.\n\nwritten on it"
    assert blocks("a.pdf", made) == [(text, {"page": 1})]
    # a scan with a stamp has no text
    with pytest.raises(DocumentError, match="document has no text"):
        parse("a.pdf", written_pdf("", written[8]))


def test_a_page_of_many_divided_words_takes_no_time() -> None:
    began = time.monotonic()
    ((text, _),) = blocks("a.pdf", text_pdf(["\n".join(["hyphen-", "ated"] * 4000)]))
    assert text.count("hyphenated") == 4000
    assert pdf._mend_words("w-" * 100_000 + "end a\x02b\x02c", frozenset()) == "w-" * 100_000 + "end ab-c"
    assert time.monotonic() - began < 10


def test_a_page_that_is_broken_is_named() -> None:
    pages = text_pdf(["one", "two", "three"])
    made = parse("a.pdf", pages.replace(b"7 0 obj\n<< /Type /Page", b"7 0 obj\n<< /Type /Nope"))
    assert [(block.text, block.metadata) for block in made.blocks] == [("one", {"page": 1}), ("three", {"page": 3})]
    assert made.metadata == {"left_out": "page 2"}


def test_pages_of_pictures_alone_are_named_unless_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    made = PdfDocument.new()
    for part in (text_pdf(["one", ""]), *[image_pdf("two")] * 3, text_pdf(["three"]), image_pdf("four")):
        made.import_pages(PdfDocument(part))
    out = BytesIO()
    made.save(out)
    told = {"left_out": "4 pages: 3-5, 7 without text (ocr reads pictures)"}
    assert parse("a.pdf", out.getvalue()).metadata == told
    assert parse("a.pdf", out.getvalue(), pictures=Pictures("vision", {"0": "said"})).metadata == {}
    monkeypatch.setattr(pdf, "read_image", lambda *_, **__: "read")
    assert parse("a.pdf", out.getvalue(), ocr=True).metadata == {}


@pytest.mark.parametrize(
    ("height", "texts", "is_scan"),
    [
        (792, {770: "Envelope 3F25", 30: "ACME-00411"}, True),
        (600, {734: "Envelope 3F25", 58: "ACME-00411"}, True),
        # a background, a picture beside text, and text in the middle
        (590, {770: "Envelope 3F25"}, False),
        (792, {731: "Envelope 3F25"}, False),
        (792, {770: "Envelope 3F25", 61: "ACME-00411"}, False),
        (792, {770: "Envelope 3F25", 400: "hidden text of the scan"}, False),
    ],
)
def test_a_picture_with_text_in_the_margins_of_its_page_is_a_scan(
    height: int, texts: dict[int, str], is_scan: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = PdfDocument(placed_pdf([(72, y, text) for y, text in texts.items()]))
    page, picture = made[0], PdfImage.new(made)
    picture.set_bitmap(PdfBitmap.from_pil(Image.new("L", (612, height), 255)))
    picture.set_matrix(PdfMatrix().scale(612, height).translate(0, 792 - height))
    page.insert_obj(picture)
    page.gen_content()
    out = BytesIO()
    made.save(out)
    stamps = " ".join(texts.values())
    found = parse("a.pdf", out.getvalue())
    assert [block.text for block in found.blocks] == [stamps]
    told = {"left_out": "page 1 without text (ocr reads pictures)"}
    assert found.metadata == (told if is_scan else {})
    monkeypatch.setattr(pdf, "read_image", lambda *_, **__: "read")
    found = parse("a.pdf", out.getvalue(), ocr=True)
    assert [block.text for block in found.blocks] == [f"read\n\n{stamps}" if is_scan else stamps]
    assert found.metadata == {}


def test_dynamic_forms_and_attachments_of_a_pdf_are_named() -> None:
    def told(catalog: str) -> Any:
        return parse("a.pdf", text_pdf(["Please wait"]).replace(b"/Catalog", f"/Catalog {catalog}".encode())).metadata

    form = "/AcroForm << /Fields [] /XFA [(template) 4 0 R] >>"
    assert told(f"{form} /NeedsRendering true") == {"left_out": "dynamic form (XFA)"}
    assert told(form) == {}
    files = "".join(f"({name}) << /Type /Filespec /F ({name}) /UF ({name}) >> " for name in ("a.txt", "b.pdf"))
    assert told(f"/Names << /EmbeddedFiles << /Names [{files}] >> >>") == {"left_out": "attachments: a.txt, b.pdf"}
    many = "(a) << /Type /Filespec /UF (a) >> " * 10_000
    assert len(told(f"/Names << /EmbeddedFiles << /Names [{many}] >> >>")["left_out"]) <= MAX_VALUE


def with_font(font: str, text: str) -> bytes:
    made = text_pdf([text, "Read."]).partition(b"xref\n")[0].replace(b"3 0 obj", b"99 0 obj")
    second = made.rindex(b"/F1 3 0 R")
    made = made[:second] + made[second:].replace(b"/F1 3 0 R", b"/F1 99 0 R")
    return made + f"3 0 obj\n<< /Type /Font {font} >>\nendobj\ntrailer\n<< /Root 1 0 R >>\n%%EOF\n".encode()


def test_a_page_in_a_font_without_unicode_is_one_without_text(monkeypatch: pytest.MonkeyPatch) -> None:
    told = {"left_out": "page 1 in fonts without Unicode (ocr reads pages)"}
    text = "Payment is due within thirty days."
    glyphs = "".join(f"\0{chr(ord(character) - 29)}" for character in text)
    within = "<< /Type /Font /Subtype /CIDFontType2 /CIDSystemInfo << /Registry (Adobe) /Ordering (Identity) >> >>"
    composite = f"/Subtype /Type0 /Encoding /Identity-H /DescendantFonts [{within}]"
    names = "/Subtype /Type1 /BaseFont /AAAAAA+Own /Encoding << /Differences [{} {}] >>"
    numbered = names.format(1, " ".join(f"/g{number}" for number in range(1, 30)))
    for content in (with_font(composite, glyphs), with_font(numbered, "\1\2\3\4\5")):
        assert blocks("a.pdf", content) == [("Read.", {"page": 2})]
        assert parse("a.pdf", content).metadata == told
        with monkeypatch.context() as patched:
            patched.setattr(pdf, "read_image", lambda *_, **__: "seen")
            found = parse("a.pdf", content, ocr=True)
        assert ([block.text for block in found.blocks], found.metadata) == (["seen", "Read."], {})
    # the numbers of a simple font are mostly those of ASCII
    lettered = names.format(32, " ".join(f"/g{number}" for number in range(32, 127)))
    found = parse("a.pdf", with_font(lettered, text))
    assert ([block.text for block in found.blocks], found.metadata) == ([text, "Read."], {})


def in_a_form(content: bytes) -> bytes:
    """The first page as a form on another one, at twice its size and moved."""
    made, out = PdfDocument.new(), BytesIO()
    page = made.new_page(1, 1)
    form = PdfDocument(content).page_as_xobject(0, made).as_pageobject()
    form.set_matrix(PdfMatrix().scale(2, 2).translate(40, 60))
    page.insert_obj(form)
    page.gen_content()
    page.set_mediabox(40, 60, 1264, 1644)
    made.save(out)
    return out.getvalue()


@pytest.mark.parametrize(("x", "step", "is_form"), [(0, 20, False), (0, 792, True), (612, 792, False)])
def test_a_scan_may_be_strips_or_a_form_and_its_page_begins_anywhere(
    x: int, step: int, is_form: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, out = PdfDocument(placed_pdf([(x + 72, 20, "ACME-00411")])), BytesIO()
    page = made[0]
    for y in range(0, 792, step):
        picture = PdfImage.new(made)
        picture.set_bitmap(PdfBitmap.from_pil(Image.new("L", (612, step), 200)))
        picture.set_matrix(PdfMatrix().scale(612, step).translate(x, y))
        page.insert_obj(picture)
    page.gen_content()
    page.set_mediabox(x, 0, x + 612, 792)
    made.save(out)
    content = in_a_form(out.getvalue()) if is_form else out.getvalue()
    assert parse("a.pdf", content).metadata == {"left_out": "page 1 without text (ocr reads pictures)"}
    read: list[tuple[Any, ...]] = []
    monkeypatch.setattr(pdf, "read_image", lambda image, *_: read.append(image.convert("L").getextrema()) or "read")
    assert [block.text for block in parse("a.pdf", content, ocr=True).blocks] == ["read\n\nACME-00411"]
    assert read == [(200, 200)]


@pytest.mark.parametrize("kind", ["form", "offset"])
def test_pictures_are_cut_from_forms_and_pages_that_begin_anywhere(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    content = picture_pdf("Above", ["Table"], "Below")
    content = (
        in_a_form(content) if kind == "form" else content.replace(b"/MediaBox", b"/CropBox[30 40 602 782]/MediaBox")
    )
    assert kind == "form" or b"/CropBox" in content
    read: list[Image.Image] = []
    monkeypatch.setattr(pdf, "read_image", lambda image, *_, **__: read.append(image) or "read")
    (block,) = parse("a.pdf", content, ocr=True).blocks
    assert block.text == "Above\n\nread\n\nBelow"
    (image,) = read
    right, bottom = image.width - 4, image.height - 4
    assert {image.getpixel(at) for at in ((3, 3), (right, 3), (3, bottom), (right, bottom))} == {(250, 220, 200)}
    assert image.width > 3 * image.height


@pytest.mark.parametrize("around", ["strong", "em", "code", "del", "h2", "li", "dd", "blockquote", "pre", "q"])
def test_elements_around_cells_and_rows_take_none_away(around: str) -> None:
    cells = "<td>{0}a</td><td>{0}b</td>"
    within = "".join(f"<tr><{around}>{cells.format(i)}</{around}></tr>" for i in range(2))
    whole = f"<{around}><tr>{cells.format(0)}</tr><tr>{cells.format(1)}</tr></{around}>"
    for rows in (within, whole):
        assert only("a.html", f"<p>x<table>{rows}</table>") == "x\n\n| 0a | 0b |\n| --- | --- |\n| 1a | 1b |"


def test_cells_within_a_cell_take_no_text_away() -> None:
    table = "<p>x<table><tr><td>a<div><td>b</td>c</div></td>d<td>e&#x1d;9,9,f&#x1f;g<tr><td>h<td>i<td>j</table>"
    assert only("a.html", table) == "x\n\nc\n\nd\n\n| a | b | e9,9,fg |\n| --- | --- | --- |\n| h | i | j |"


def test_a_chapter_that_is_missing_is_named() -> None:
    with zipfile.ZipFile(BytesIO(epub(["<p>one</p>", "<p>two</p>", "<p>three</p>"]))) as book:
        kept = {name: book.read(name) for name in book.namelist() if "c1" not in name}
    made = parse("a", zipped(dict(kept)))
    assert [(block.text, block.metadata) for block in made.blocks] == [
        ("one", {"section": 1}),
        ("three", {"section": 3}),
    ]
    assert made.metadata["left_out"] == "section 2"


def test_values_stand_anywhere_in_a_sheet() -> None:
    book = openpyxl.Workbook()
    sheet = book.active
    sheet.cell(1, 1, "first")
    sheet.cell(20_000, 600, "lower")
    sheet.cell(1_048_576, 16_384, "last")
    content = BytesIO()
    book.save(content)
    ((text, _),) = blocks("a.xlsx", content.getvalue())
    assert text == "first\n\nlower\n\nlast"


def test_a_table_may_have_any_number_of_columns() -> None:
    names, values = ([f"{kind}{i}" for i in range(2000)] for kind in "nv")
    assert only("a.csv", f"{','.join(names)}\n{','.join(values)}") == f"{' | '.join(names)}\n\n{' | '.join(values)}"
    assert only("a.csv", "," * 200_000 + "deep") == "deep"
    cells = "".join(f'<table:table-cell office:value="{i}"/>' for i in range(600))
    sheet = f'<table:table table:name="S"><table:table-row>{cells}</table:table-row></table:table>'
    ((text, _),) = blocks("a", odt(sheet, "spreadsheet"))
    assert text.split(" | ") == [str(i) for i in range(600)]


def test_many_tables_below_one_another_take_no_time() -> None:
    rows: list[list[object]] = []
    for _ in range(10_000):
        rows += [["a", "b"], []]
    began = time.monotonic()
    ((text, _),) = blocks("a.xlsx", xlsx({"S": rows}))
    assert text.count("| a | b |") == 10_000
    assert time.monotonic() - began < 20


def test_a_hyphen_stays_where_the_document_has_it_elsewhere() -> None:
    page = (
        "We ask about out-of-network care in this sentence, and again out-\nof-network care is what this line is about."
    )
    ((text, _),) = blocks("a.pdf", text_pdf([page]))
    assert text.count("out-of-network") == 2


@pytest.mark.parametrize(
    ("raised", "size", "rise", "after", "read"),
    [
        ("6", 6, 4, " W", "10^6 W"),
        ("-5", 6, 4, " W", "10^-5 W"),
        ("6", 6, -3, " W", "106 W"),
        ("6", 10, 0, " W", "106 W"),
        ("th", 6, 4, " W", "10th W"),
        ("1/2", 6, 4, " W", "101/2 W"),
    ],
)
def test_a_power_is_not_a_figure(raised: str, size: int, rise: int, after: str, read: str) -> None:
    pieces = [
        (72, 700, "Power 10", 10),
        (114.3, 700 + rise, raised, size),
        (114.3 + 0.56 * size * len(raised), 700, after, 10),
    ]
    ((text, _),) = blocks("a.pdf", sized_pdf(pieces))
    assert text == f"Power {read}"


@pytest.mark.parametrize("hyphen", ["-", "\u2010", "\x02"])
def test_a_word_that_is_divided_by_any_hyphen_is_one(hyphen: str) -> None:
    assert pdf._mend_words(pdf._join(f"respon{hyphen}", "sible"), frozenset()) == "responsible"
    assert pdf._mend_words(pdf._join(f"2{hyphen}", "fold"), frozenset()) in ("2-fold", f"2{hyphen}fold")


def test_what_each_segment_repeats_of_a_block_is_short() -> None:
    made = document("xlsx", [("text", {"sheet": "s" * 10_000, "page": 3})])
    assert made.blocks[0].metadata == {"sheet": "s" * MAX_VALUE, "page": 3}


def test_blanks_at_the_ends_of_lines_go_however_many_there_are() -> None:
    assert clean(" a \t \n\t\n b\t ") == " a\n\n b"
    text = "a" + " " * 100_000 + "b"
    began = time.process_time()
    assert clean(text + "\t \n") == text
    assert time.process_time() - began < 3


def test_a_text_of_many_megabytes_in_xml() -> None:
    text = "word " * 2_200_000
    assert only("a.xml", f"<?xml version='1.0'?><a><b>{text}</b><c>end</c></a>") == f"{text.strip()}\n\nend"


def test_a_table_has_its_caption_in_any_format() -> None:
    rows = [["name", "amount"], ["a", "1"], ["b", "2"]]
    cells = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    tags = {"tr": "w:tr", "td": "w:tc"}
    word = cells.replace("<td>", "<w:tc><w:p><w:r><w:t>").replace("</td>", "</w:t></w:r></w:p></w:tc>")
    for plain, tag in tags.items():
        word = word.replace(f"<{plain}>", f"<{tag}>").replace(f"</{plain}>", f"</{tag}>")
    documents = {
        "a.html": f"<body><table><caption>Table 1: Debts</caption>{cells}</table></body>".encode(),
        "a.md": b"Table 1: Debts\n\n| name | amount |\n|---|---|\n| a | 1 |\n| b | 2 |",
        "a.docx": docx(f"<w:p><w:r><w:t>Table 1: Debts</w:t></w:r></w:p><w:tbl>{word}</w:tbl>"),
        "a.xlsx": xlsx({"sheet": [["Table 1: Debts"], *rows]}),
    }
    for name, content in documents.items():
        (segment,) = split(parse(name, content), Chunking("auto", 200, 0), Counter())
        assert segment.metadata["table"] == {"number": 1, "caption": "Table 1: Debts"}, (name, segment.text)


def test_a_mailbox_has_a_block_a_message() -> None:
    first = (
        "From ann@a.example Mon Nov  2 10:00:00 2026\nFrom: Ann\nSubject: One\n\n>From the start.\nFrom here on.\n\n"
    )
    second = "From bob@b.example Tue Nov  3 10:00:00 2026\nFrom: Bob\nSubject: Two\n\nbody\n"
    for name in ("a.mbox", "Inbox"):
        assert blocks(name, first + second) == [
            ("# One\n\nFrom: Ann\n\nFrom the start.\nFrom here on.", {"message": 1}),
            ("# Two\n\nFrom: Bob\n\nbody", {"message": 2}),
        ]
    assert parse("a.mbox", (first + second).encode()).format == "mbox"
