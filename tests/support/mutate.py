"""Small real documents of every format, and what can happen to the bytes of a file."""

from __future__ import annotations

import io
import os
import random
import re
import warnings
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

from support import office

ROOT = Path(__file__).parents[2]
SHARED = Path(os.environ.get("ML_RAG_SHARED") or ROOT.parent / "shared") / "data" / "formats" / "docs"
#: a mutated document is no longer than that, and no larger document of the shared ones is taken
MOST_BYTES = 1 << 20

_RTF = rb"{\rtf1\ansi\ansicpg1252{\fonttbl{\f0 Arial;}}\f0 One {\b two} three\par \u8364? \'e9 four\par}"
_EML = (
    b"From: a@example.org\r\nTo: b@example.org\r\nSubject: =?utf-8?q?caf=C3=A9?=\r\nMIME-Version: 1.0\r\n"
    b'Content-Type: multipart/mixed; boundary="b"\r\n\r\n--b\r\nContent-Type: text/plain; charset=utf-8\r\n'
    b"Content-Transfer-Encoding: base64\r\n\r\nb25lIHR3byB0aHJlZQ==\r\n--b\r\nContent-Type: text/html\r\n\r\n"
    b"<p>four</p>\r\n--b\r\nContent-Disposition: attachment; filename=a.txt\r\n\r\nfive\r\n--b--\r\n"
)
_RSS = (
    '<?xml version="1.0"?><rss version="2.0"><channel><title>News</title><item><title>One</title>'
    "<description><![CDATA[<p>two &amp; three</p>]]></description><link>http://example.org/</link></item></channel></rss>"
)
_PNG = (
    b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR\x00\x00\x00\x01\x00\x00\x00\x01\x08\x00\x00\x00\x00:~\x9bU\x00\x00\x00\n"
    b"IDATx\x9cc\xf8\x0f\x00\x01\x01\x01\x00\x1b\xb6\xeeV\x00\x00\x00\x00IEND\xaeB`\x82"
)
_RST = "Title\n=====\n\nOne\n---\n\ntext ``code``\n\n.. note:: two\n\n   three\n\n+---+---+\n| a | b |\n+---+---+\n"
_TEXTS = {
    "a.txt": "One two three.\n\nFour five, six.\n\n\tSeven\u00a0eight.",
    "a.md": "# One\n\ntext *two*\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n```sh\ncode\n```\n\n- three\n  - four\n",
    "a.adoc": "= Title\nAuthor\n\n== One\n\ntext\n\n|===\n|a |b\n|1 |2\n|===\n\n----\ncode\n----\n* item\n",
    "a.rst": _RST,
    "a.csv": 'name,value,"long, one"\none,1,"a ""quoted"" text\nover lines"\ntwo,2,\n',
    "a.tsv": "name\tvalue\none\t1\ntwo\t2\n",
    "a.json": '{"title": "One", "items": [{"a": 1, "b": "two"}, {"a": 3.5e10, "b": null}], "deep": {"x": ["\\u00e9"]}}',
    "a.jsonl": '{"a": 1, "b": "two"}\n{"a": 2, "b": "three"}\n',
    "a.xml": '<?xml version="1.0"?><book><title lang="en">One</title><p>two <i>three</i></p></book>',
    "a.rss": _RSS,
    "a.vtt": "WEBVTT\n\n00:00:01.000 --> 00:00:02.500\n<v Ann>One two\n\n2\n00:00:03.000 --> 00:00:04.000\nthree\n",
    "a.srt": "1\n00:00:01,000 --> 00:00:02,500\nOne two\n\n2\n00:00:03,000 --> 00:00:04,000\nthree\n",
    "a.py": 'def one(two):\n    """Three."""\n    return two  # four\n',
    "a.html": "<html><head><title>T</title><style>x</style></head><body><h1>One</h1><p>two<br>three</p><table><tr><th>a"
    "<td colspan=2>b</table><ul><li>c<ol><li>d</ol></ul><pre>e\n f</pre><script>g</script></body></html>",
}


def seeds() -> dict[str, bytes]:
    """Name -> content: the shipped samples, what the builders of ``support.office`` make, the shared ones if there."""
    found = {path.name: path.read_bytes() for path in sorted((ROOT / "docs" / "samples").iterdir())}
    found |= {f"built-{name}": text.encode() for name, text in _TEXTS.items()}
    found |= {"built.rtf": _RTF, "built.eml": _EML, "built.png": _PNG, "utf16.txt": "Eins zwei drei".encode("utf-16")}
    found["built.docx"] = office.docx(
        '<w:p><w:pPr><w:pStyle w:val="Heading1"/></w:pPr><w:r><w:t>One</w:t></w:r></w:p><w:tbl><w:tr><w:tc><w:p><w:r>'
        "<w:t>a</w:t></w:r></w:p></w:tc></w:tr></w:tbl>"
    )
    found["built.pptx"] = office.pptx([("One", "two\nthree", "a note"), ("Four", "five", "")])
    found["built.xlsx"] = office.xlsx({"One": [["a", "b"], [1, 2.5], ["x", None]], "Two": [[True, "=A1+1"]]})
    found["built.epub"] = office.epub(["<h1>One</h1><p>two</p>", "<p>three</p>"])
    for kind, ending, body in (
        ("text", "odt", "<text:h text:outline-level='1'>One</text:h><text:p>two</text:p>"),
        ("presentation", "odp", "<draw:page draw:name='One'><text:p>two</text:p></draw:page>"),
        (
            "spreadsheet",
            "ods",
            "<table:table table:name='One'><table:table-row><table:table-cell table:number-columns-repeated='2'>"
            "<text:p>a</text:p></table:table-cell></table:table-row></table:table>",
        ),
    ):
        found[f"built.{ending}"] = office.odt(body, kind)
    found["built.pdf"] = office.text_pdf(["# One\ntwo three", "four"])
    found["image.pdf"] = office.image_pdf("five")
    if SHARED.is_dir():
        shared = [path for path in sorted(SHARED.iterdir()) if path.stat().st_size <= MOST_BYTES // 4]
        found |= {path.name: path.read_bytes() for path in shared}
    return found


Mutation = Callable[[bytes, random.Random, list[bytes]], bytes]
_ODD_BYTES = [
    b"\0",
    b"\xff",
    b"\xff\xfe",
    b"\xef\xbb\xbf",
    b"\xed\xa0\x80",
    b"\x80",
    b"\x1b",
    b"\r",
    b"\n",
    b" ",
    b"\0" * 64,
]
_ODD_TOKENS = [
    b"<", b">", b"</", b"<![CDATA[", b"<!DOCTYPE x [<!ENTITY a 'b'>]>&a;", b"&#0;", b"&#xD800;", b"<table>" * 50,
    b"<div>" * 3000, b"[" * 3000, b"{\"a\":" * 500, b"(" * 1000, b"|" * 1000, b"#" * 50, b"`" * 7, b"- " * 500,
    b"> " * 500, b"\\u0000", b"\\ud800", b"1e99999", b"-1", b"4294967296", b"9" * 400, b"NaN", b"{\\rtf1" * 100,
    b"\\bin99999999 ", b"\\u-1?", b"%PDF-", b"endobj", b"/Count 99999999", b"/Length 99999999",
    b"<< /Kids [2 0 R] >>", b"PK\x03\x04", b"PK\x05\x06", b"WEBVTT\n\n", b"-->", b"=?x?q?=00?=",
    b"Content-Transfer-Encoding: base64\r\n", b"boundary=", b"\t" * 300, b"x" * 20000, b"\n" * 5000, b'"',
]  # fmt: skip


def _flip(data: bytes, chance: random.Random, _: list[bytes]) -> bytes:
    out = bytearray(data)
    for _ in range(chance.choice((1, 2, 8, 64))):
        out[chance.randrange(len(out))] ^= 1 << chance.randrange(8)
    return bytes(out)


def _chunk(data: bytes, chance: random.Random) -> tuple[int, int]:
    start = chance.randrange(len(data))
    return start, min(len(data), start + chance.choice((1, 4, 32, 256, 4096)))


def _truncate(data: bytes, chance: random.Random, _: list[bytes]) -> bytes:
    at = chance.randrange(len(data))
    return data[:at] if chance.random() < 0.8 else data[at:]


def _splice(data: bytes, chance: random.Random, others: list[bytes]) -> bytes:
    other = chance.choice(others)
    start, end = _chunk(data, chance)
    first, last = _chunk(other, chance)
    return data[:start] + other[first:last] + data[end if chance.random() < 0.5 else start :]


def _repeat(data: bytes, chance: random.Random, _: list[bytes]) -> bytes:
    start, end = _chunk(data, chance)
    return data[:end] + data[start:end] * chance.choice((1, 3, 50)) + data[end:]


def _remove(data: bytes, chance: random.Random, _: list[bytes]) -> bytes:
    start, end = _chunk(data, chance)
    return data[:start] + data[end:]


def _insert(data: bytes, chance: random.Random, _: list[bytes]) -> bytes:
    at = chance.randrange(len(data) + 1)
    return data[:at] + chance.choice(_ODD_BYTES + _ODD_TOKENS) + data[at:]


def _number(data: bytes, chance: random.Random, _: list[bytes]) -> bytes:
    """Another number in the place of one that stands there as text."""
    found = list(re.finditer(rb"\d+", data[: 1 << 17]))
    if not found:
        return _flip(data, chance, _)
    match = chance.choice(found)
    number = chance.choice((b"0", b"-1", b"1", b"65536", b"2147483648", b"99999999999999999999", b"1.5", b""))
    return data[: match.start()] + number + data[match.end() :]


def _shuffle(data: bytes, chance: random.Random, _: list[bytes]) -> bytes:
    cuts = sorted(chance.randrange(len(data) + 1) for _ in range(5))
    parts = [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]
    chance.shuffle(parts)
    return b"".join(parts)


_MUTATIONS: list[Mutation] = [_flip, _flip, _truncate, _splice, _repeat, _remove, _insert, _insert, _number, _shuffle]


def _archive(data: bytes, chance: random.Random, others: list[bytes]) -> bytes:
    """Something happens to a member of a zip file, whose checksums are right again afterwards."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = [(info.filename, archive.read(info)) for info in archive.infolist()]
    at = chance.randrange(len(members))
    name, content = members[at]
    order = chance.randrange(8)
    if order == 0:
        del members[at]
    elif order == 1:
        members.insert(chance.randrange(len(members) + 1), (name, content))
    elif order == 2:
        other = chance.randrange(len(members))
        members[at], members[other] = (name, members[other][1]), (members[other][0], content)
    elif order == 3:
        odd = ["../" + name, "/" + name, name.upper(), name + "/", "\\".join(name.split("/")), "é\u202e", "a" * 300]
        members[at] = (chance.choice(odd), content)
    elif order == 4:
        members[at] = (name, chance.choice((b"", b"\0" * 100_000, chance.choice(others)[:100_000])))
    elif content:
        members[at] = (name, chance.choice(_MUTATIONS)(content, chance, others))
    out = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        warnings.simplefilter("ignore")  # two members of a name are meant
        for member, text in members:
            info = zipfile.ZipInfo(member)
            info.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(info, text[: 4 * MOST_BYTES])
    return out.getvalue()


def mutated(data: bytes, chance: random.Random, others: list[bytes]) -> bytes:
    """The content of a file after one to three accidents."""
    for _ in range(chance.choice((1, 1, 2, 3))):
        if not data:
            break
        if data[:4] == b"PK\x03\x04" and chance.random() < 0.7:
            try:
                data = _archive(data, chance, others)
                continue
            except (
                zipfile.BadZipFile,
                OSError,
                EOFError,
                NotImplementedError,
                RuntimeError,
                ValueError,
                IndexError,
                zlib.error,
            ):
                pass  # an earlier accident has made it no archive
        data = chance.choice(_MUTATIONS)(data, chance, others)
    return data[: 2 * MOST_BYTES]
