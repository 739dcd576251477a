"""Documents that name addresses and files: nothing is fetched, read, written or unpacked, in any format.

Each is parsed twice: by itself, where nothing but the parsers' own manners holds them back, and through a model server
as PostgreSQL sends it, in a child process that could not if it would. The canaries of tests/support/canary.py tell.
"""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

import httpx
import pytest

from support.canary import WORD, Canaries
from support.office import docx, epub, odt, pptx, text_pdf, xlsx, zipped
from support.servers import running_server

PLPY = str(Path(__file__).parents[2] / "plpy")


def remade(content: bytes, members: dict[str, str]) -> bytes:
    """An archive with more members, or others in place of its own."""
    with zipfile.ZipFile(BytesIO(content)) as archive:
        old = {name: archive.read(name) for name in archive.namelist()}
    return zipped({**old, **members})


def relations(url: str, kind: str) -> str:
    return (
        '<Relationships xmlns="http://schemas.openxmlformats.org/package/2006/relationships">'
        f'<Relationship Id="x1" Type="http://schemas.openxmlformats.org/officeDocument/2006/relationships/{kind}"'
        f' Target="{url}" TargetMode="External"/></Relationships>'
    )


PLAIN = "<w:p><w:r><w:t>plain</w:t></w:r></w:p>"
FIELD = '<w:p><w:fldSimple w:instr="INCLUDETEXT &quot;{}&quot;"><w:r><w:t>shown</w:t></w:r></w:fldSimple></w:p>'
PICTURE = (
    '<w:p xmlns:r="http://schemas.openxmlformats.org/officeDocument/2006/relationships"><w:r><w:pict><v:shape'
    ' xmlns:v="urn:schemas-microsoft-com:vml"><v:imagedata r:id="x1" src="{}"/></v:shape></w:pict></w:r>'
    '<w:altChunk r:id="x1"/></w:p>'
)
BLIP = (
    '<w:p><w:r><w:drawing><wp:inline xmlns:wp="http://schemas.openxmlformats.org/drawingml/2006/wordprocessingDrawing">'
    '<a:graphic xmlns:a="http://schemas.openxmlformats.org/drawingml/2006/main"><a:graphicData><pic:pic'
    ' xmlns:pic="http://schemas.openxmlformats.org/drawingml/2006/picture"><pic:blipFill><a:blip r:link="x1"'
    ' xmlns:r="http://schemas.openxmlformats.org/officeDocument/2006/relationships"/></pic:blipFill></pic:pic>'
    "</a:graphicData></a:graphic></wp:inline></w:drawing></w:r></w:p>"
)
UP = "../" * 12


def documents(c: Canaries) -> dict[str, bytes]:
    """By file name. ``plain`` stands in each that can be read at all."""
    url, path = c.url, str(c.secret)
    file = f"file://{path}"
    relations_of = "word/_rels/document.xml.rels"
    xml = '<!DOCTYPE x [<!ENTITY e SYSTEM "{}">]><x>plain &e;</x>'
    dtd = '<!DOCTYPE x SYSTEM "{}"><x>plain</x>'
    parameter = '<!DOCTYPE x [<!ENTITY % p SYSTEM "{}"> %p;]><x>plain</x>'
    include = '<x xmlns:i="http://www.w3.org/2001/XInclude">plain<i:include href="{}" parse="text"/></x>'
    found: dict[str, bytes] = {
        "links.html": (
            f'<html><head><meta http-equiv="refresh" content="0;url={url}"><base href="{url}"><link rel="stylesheet"'
            f' href="{url}"><link rel="prefetch" href="{file}"><script src="{url}"></script><style>@import "{url}";'
            f'p {{ background: url({url}) }}</style></head><body onload="fetch(\'{url}\')"><p>plain</p><img src="{url}"'
            f' srcset="{url} 2x"><iframe src="{file}"></iframe><object data="{url}"></object><embed src="{file}">'
            f'<video poster="{url}" src="{file}"></video><a href="{url}" ping="{url}">link</a><form action="{url}">'
            f'</form><svg><image href="{url}"/><use xlink:href="{file}#a"/></svg><frameset><frame src="{url}">'
            f"</frameset></body></html>"
        ).encode(),
        "a.md": f"plain ![a]({url}) ![b]({file}) [c]({url})\n\n<img src='{url}'>\n\n{{% include {path} %}}\n".encode(),
        "a.rst": f"plain\n\n.. include:: {path}\n\n.. image:: {url}\n\n.. csv-table::\n   :url: {url}\n".encode(),
        "a.adoc": f"plain\n\ninclude::{path}[]\n\ninclude::{url}[]\n\nimage::{url}[]\n".encode(),
        "a.rtf": (
            rf"{{\rtf1 plain {{\field{{\*\fldinst INCLUDEPICTURE {url}}}{{\fldrslt x}}}}"
            rf'{{\field{{\*\fldinst INCLUDETEXT "{path}"}}{{\fldrslt x}}}}{{\object\objlink {file}}}'
            rf"{{\*\template {url}}}}}"
        ).encode(),
        "a.csv": (
            f'name,value\nplain,"=WEBSERVICE(""{url}"")"\nb,=IMPORTDATA("{url}")\nc,@SUM(1)|cmd\'{path}\'!A1\n'
        ).encode(),
        "a.json": json.dumps({"a": "plain", "$ref": file, "$schema": url, "include": path}).encode(),
        "a.jsonl": f'{{"a": "plain", "$ref": "{url}"}}\n{{"a": "b", "$ref": "{file}"}}\n'.encode(),
        "a.vtt": f"WEBVTT\n\nSTYLE\n::cue {{ background: url({url}) }}\n\n00:00.000 --> 00:01.000\nplain\n".encode(),
        "a.eml": (
            f'From: a@b\nSubject: plain\nMIME-Version: 1.0\nContent-Type: multipart/mixed; boundary="b"\n\n--b\n'
            f'Content-Type: message/external-body; access-type=URL; URL="{url}"\n\nContent-Type: text/plain\n\n\n--b\n'
            f'Content-Type: message/external-body; access-type=local-file; name="{path}"\n\n'
            f'Content-Type: text/plain\n\n\n--b\nContent-Type: text/html\n\n<p>plain<img src="{url}"></p>\n--b--\n'
        ).encode(),
        "style.xml": f'<?xml version="1.0"?><?xml-stylesheet href="{url}" type="text/xsl"?><x>plain</x>'.encode(),
        "location.xml": (
            f'<x xmlns:s="http://www.w3.org/2001/XMLSchema-instance" s:schemaLocation="{url} {url}">plain</x>'
        ).encode(),
        "a.rss": (
            f"<rss><channel><title>plain</title><image><url>{url}</url></image><item><title>b</title><enclosure"
            f' url="{url}"/><description>&lt;img src="{file}"&gt;</description></item></channel></rss>'
        ).encode(),
        "field.docx": docx(PLAIN + FIELD.format(path) + FIELD.format(url)),
        "image.docx": docx(PLAIN + PICTURE.format(file), **{"word/_rels/document.xml.rels": relations(url, "image")}),
        "image-file.docx": docx(
            PLAIN + PICTURE.format(url), **{"word/_rels/document.xml.rels": relations(file, "image")}
        ),
        "blip.docx": docx(PLAIN + BLIP, **{"word/_rels/document.xml.rels": relations(file, "image")}),
        "template.docx": docx(
            PLAIN,
            **{
                "word/settings.xml": "<w:settings xmlns:w='a'><w:attachedTemplate/></w:settings>",
                "word/_rels/settings.xml.rels": relations(url, "attachedTemplate"),
                relations_of: relations(file, "aFChunk"),
            },
        ),
        "part.docx": remade(
            docx(PLAIN),
            {
                # the real part lies elsewhere, under a name that is no XML's, and declares entities
                "_rels/.rels": relations("word/other.bin", "officeDocument").replace(' TargetMode="External"', ""),
                "word/other.bin": f'<!DOCTYPE x [<!ENTITY e SYSTEM "{file}">]><w:document xmlns:w="http://schemas.openxml'
                'formats.org/wordprocessingml/2006/main"><w:body><w:p><w:r><w:t>plain &e;</w:t></w:r></w:p></w:body>'
                "</w:document>",
            },
        ),
        "links.xlsx": remade(
            xlsx({"a": [["plain", f'=WEBSERVICE("{url}")', f"='file://{path}'#$a.A1"]]}),
            {
                "xl/externalLinks/externalLink1.xml": "<externalLink/>",
                "xl/externalLinks/_rels/externalLink1.xml.rels": relations(file, "externalLinkPath"),
                "xl/connections.xml": f'<connections><connection><webPr url="{url}"/></connection></connections>',
                "xl/worksheets/_rels/sheet1.xml.rels": relations(url, "hyperlink"),
            },
        ),
        "links.pptx": remade(pptx([("plain", "b", "c")]), {"ppt/slides/_rels/x.xml.rels": relations(url, "oleObject")}),
        "links.odt": odt(
            f'<text:p>plain<draw:frame><draw:image xmlns:x="http://www.w3.org/1999/xlink" x:href="{url}"/></draw:frame>'
            f'</text:p><text:section><text:section-source xmlns:x="http://www.w3.org/1999/xlink" x:href="{file}"/>'
            "</text:section>"
        ),
        "links.ods": odt(
            '<table:table table:name="a"><table:table-source xmlns:x="http://www.w3.org/1999/xlink"'
            f' x:href="{file}"/><table:table-row><table:table-cell table:formula="of:=WEBSERVICE(&quot;{url}&quot;)">'
            "<text:p>plain</text:p></table:table-cell></table:table-row></table:table>",
            "spreadsheet",
        ),
        "links.epub": epub([f'<p>plain</p><img src="{url}"/><object data="{file}"/><link href="{url}"/>']),
        "outside.epub": remade(
            epub(["plain"]),
            {
                "o/p.opf": f'<package><manifest><item id="a" href="{UP}{path[1:]}"/><item id="b" href="{url}"/>'
                f'<item id="c" href="{file}"/><item id="d" href="c0.xhtml"/></manifest><spine><itemref idref="a"/>'
                '<itemref idref="b"/><itemref idref="c"/><itemref idref="d"/></spine></package>'
            },
        ),
        "actions.pdf": text_pdf(["plain"]).replace(
            b"/Type /Catalog",
            f"/Type /Catalog /OpenAction << /S /URI /URI ({url}) >> /AA << /WC << /S /Launch /F ({path}) >> >>"
            f" /AcroForm << /XFA ({url}) >> /Names << /JavaScript << /Names [(a) << /S /JavaScript /JS"
            f' (app.launchURL\\("{url}"\\)) >>] >> >>'.encode(),
            1,
        ),
        # a content stream whose bytes are in another file
        "stream.pdf": text_pdf(["plain", "b"]).replace(
            b"<< /Length", f"<< /F << /FS /URL /F ({url}) >> /FFilter /FlateDecode /Length".encode(), 1
        ),
        "file.pdf": text_pdf(["b", "plain"]).replace(b"<< /Length", f"<< /F ({path}) /Length".encode(), 1),
    }
    for name, target in (("url", url), ("file", file), ("up", UP + path[1:])):
        for kind, form in (("entity", xml), ("dtd", dtd), ("parameter", parameter), ("include", include)):
            found[f"{kind}-{name}.xml"] = b"<?xml version='1.0'?>" + form.format(target).encode()
    # names of members that lead out, where somebody would unpack them
    slip = {f"{UP}{c.folder}/slip.txt".replace("//", "/"): "slipped", f"{c.folder}/slip.txt": "slipped"}
    makers = {"docx": docx(PLAIN), "odt": odt("<text:p>plain</text:p>"), "epub": epub(["plain"])}
    makers |= {"xlsx": xlsx({"a": [["plain", 1]]}), "pptx": pptx([("plain", "b", "")])}
    for ending, content in makers.items():
        found[f"slip.{ending}"] = remade(content, slip)
    return found


#: parse each document of a folder where the parsers are free to do what they like; a line of JSON a document
ALONE = """
import json, sys
from pathlib import Path
from ml_rag.ingest.parse import parse
for path in sorted(Path(sys.argv[1]).iterdir()):
    try:
        text = "".join(block.text for block in parse(path.name, path.read_bytes()).blocks)
    except Exception as error:
        text = f"{type(error).__name__} {error} {getattr(error, 'detail', '')}"
    print(json.dumps([path.name, text]))
"""


def check(told: dict[str, str], canaries: Canaries) -> None:
    assert canaries.touched() == []
    for name, text in told.items():
        assert WORD not in text, name
        if name not in ("part.docx", "stream.pdf", "file.pdf"):
            assert "plain" in text, (name, text)


def test_parsers_by_themselves_follow_nothing(canaries: Canaries, tmp_path: Path) -> None:
    given = documents(canaries)
    for name, content in given.items():
        (tmp_path / name).write_bytes(content)
    done = subprocess.run(
        [sys.executable, "-c", ALONE, str(tmp_path)],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": PLPY, "PATH": "/usr/bin:/bin"},
        check=True,
        timeout=300,
    )
    told = dict(json.loads(line) for line in done.stdout.splitlines())
    assert told.keys() == given.keys()
    check(told, canaries)
    assert not list(tmp_path.glob("**/slip.txt"))


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with running_server() as server:
        transport = httpx.HTTPTransport(uds=str(server.socket))
        with httpx.Client(transport=transport, base_url="http://server", timeout=300) as client:
            yield client


def load(client: httpx.Client, given: dict[str, bytes]) -> dict[str, str]:
    """By name, all that the model server tells of a document."""
    options = json.dumps({"embed_model_id": "fake-embed"})
    files = [("file", (name, content)) for name, content in given.items()]
    reply = client.post("/v1/documents", data={"options": options}, files=files)
    assert reply.status_code == 200, reply.text
    return {(line := json.loads(row))["name"]: json.dumps(line) for row in reply.text.splitlines()}


def test_the_model_server_follows_nothing(client: httpx.Client, canaries: Canaries) -> None:
    given = documents(canaries)
    told = load(client, given)
    assert told.keys() == given.keys()
    check(told, canaries)


@pytest.mark.parametrize("ending", ["docx", "xlsx", "pptx", "odt", "epub"])
def test_bombs_are_refused_in_every_archive(client: httpx.Client, ending: str) -> None:
    """64 MB of nothing, 64 MB of text in a part that is read, an archive inside an archive inside an archive."""
    part = {"docx": "word/document.xml", "xlsx": "xl/worksheets/sheet1.xml", "pptx": "ppt/slides/slide1.xml"}
    part |= {"odt": "content.xml", "epub": "o/c0.xhtml"}
    plain = {"docx": docx(PLAIN), "xlsx": xlsx({"a": [["plain", 1]]}), "pptx": pptx([("plain", "b", "")])}
    plain |= {"odt": odt("<text:p>plain</text:p>"), "epub": epub(["plain"])}
    content = plain[ending]
    nested = zipped({"a": b"\0" * 50_000_000})
    for _ in range(3):
        nested = zipped({f"{i}.zip": nested for i in range(10)})
    text = "<a>" + "a " * 32_000_000 + "</a>"
    told = load(
        client,
        {
            f"zeros.{ending}": remade(content, {"media/a.png": "\0" * 64_000_000}),
            f"text.{ending}": remade(content, {part[ending]: text}),
            f"nested.{ending}": remade(content, {"inner.zip": nested.decode("latin-1")}),
        },
    )
    for name in (f"zeros.{ending}", f"text.{ending}"):
        assert "unpacks to too much data" in told[name], told[name][:300]
    # what lies inside of it is never unpacked
    assert "plain" in told[f"nested.{ending}"] or "too much data" in told[f"nested.{ending}"]
    assert client.get("/healthz").status_code == 200


LAUGHS = "".join(f'<!ENTITY {new} "{("&" + old + ";") * 10}">' for old, new in zip("abcdefgh", "bcdefghi", strict=True))


def test_laughs_are_refused_in_a_part_under_another_name(client: httpx.Client) -> None:
    """mammoth follows the relations to a part, whatever its name; expat bounds what entities become."""
    other = (
        f'<!DOCTYPE x [<!ENTITY a "ha ha ha ha">{LAUGHS}]><w:document xmlns:w="http://schemas.openxmlformats.org/'
        'wordprocessingml/2006/main"><w:body><w:p><w:r><w:t>plain &i;</w:t></w:r></w:p></w:body></w:document>'
    )
    moved = relations("word/other.bin", "officeDocument").replace(' TargetMode="External"', "")
    told = load(client, {"a.docx": remade(docx(PLAIN), {"_rels/.rels": moved, "word/other.bin": other})})
    assert len(told["a.docx"]) < 100_000
    assert "ha ha ha ha ha ha" not in told["a.docx"]
