"""The document formats: a row of ``FORMATS`` and a parser each, one module per family; CONTRIBUTING.md has the recipe.

A parser takes ``(name, content, request)`` and gives an ``abc.Document``. Its module is imported when its format is
met, its libraries inside the parser, so that a text file never waits for an office library.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Format:
    """How a format is called, recognised and read."""

    name: str
    #: module of this folder and function in it
    parser: str
    #: what a file of it begins with, whatever its name
    openings: tuple[bytes, ...] = ()
    #: what a text of it begins with, whatever its name
    begins: re.Pattern[str] | None = None
    #: endings of names, which decide between texts only
    endings: tuple[str, ...] = ()
    #: what a text whose name has such an ending must hold; None = anything
    holds: re.Pattern[str] | None = None
    #: other names of it in the option ``formats``
    aliases: tuple[str, ...] = ()
    #: its media type (IANA), for those that are not plain text
    media_type: str = "text/plain"


_NEVER = re.compile(r"(?!)")
HTML_TAGS = re.compile(r"</?(?:p|div|span|table|h[1-6]|ul|body|html)\b[^<>]*>", re.I)

_SOURCE = (
    "bash c cc clj cmake conf cpp cs css cxx dart diff el erl ex exs f90 fs go gradle graphql groovy h hpp hs ini java "  # noqa: SIM905
    "jl js jsx kt kts less lisp lua m makefile mk ml mm nim nix patch php pl pm proto ps1 py pyi r rb rs sass scala "
    "scss sh sol sql svelte swift tcl tf toml ts tsx v vb vhd vim vue yaml yml zig zsh".split()
)

#: every format that can be parsed. Several that begin alike: the first one. ``detect`` knows the containers (zip, OLE),
#: PDF, JSON and mail, which take more than a look at the beginning or the name
_ALL = (
    Format("pdf", "pdf.parse_pdf", media_type="application/pdf"),
    Format(
        "docx", "docx.parse_docx", media_type="application/vnd.openxmlformats-officedocument.wordprocessingml.document"
    ),
    Format(
        "pptx",
        "pptx.parse_pptx",
        media_type="application/vnd.openxmlformats-officedocument.presentationml.presentation",
    ),
    Format("xlsx", "sheets.parse_xlsx", media_type="application/vnd.openxmlformats-officedocument.spreadsheetml.sheet"),
    Format("xls", "sheets.parse_xls", media_type="application/vnd.ms-excel"),
    Format("odt", "odf.parse_odf", media_type="application/vnd.oasis.opendocument.text"),
    Format("odp", "odf.parse_odf", media_type="application/vnd.oasis.opendocument.presentation"),
    Format("ods", "odf.parse_odf", media_type="application/vnd.oasis.opendocument.spreadsheet"),
    Format("epub", "epub.parse_epub", media_type="application/epub+zip"),
    Format("rtf", "rtf.parse_rtf", openings=(b"{\\rtf",), media_type="application/rtf"),
    Format(
        "html",
        "html.parse_html",
        begins=re.compile(
            r"\s*(?:<\?xml[^>]*>\s*)?(?:<!--(?>.*?-->)\s*)*<(?:!doctype\s+html|html|head|body)\b", re.I | re.DOTALL
        ),
        endings=("htm", "html", "xhtml"),
        holds=HTML_TAGS,
        aliases=("htm",),
        media_type="text/html",
    ),
    # feeds often lack the declaration, and come without a name that tells
    Format(
        "xml",
        "xml.parse_xml",
        begins=re.compile(r"\s*<(?:\?xml|rss|feed|rdf:RDF)\b"),
        endings=("xml", "rss", "atom"),
        holds=re.compile(r"\A\s*<"),
        media_type="application/xml",
    ),
    Format("rss", "xml.parse_xml", aliases=("atom",), media_type="application/rss+xml"),
    Format("csv", "tables.parse_csv", endings=("csv",), media_type="text/csv"),
    Format("tsv", "tables.parse_csv", endings=("tsv", "tab"), media_type="text/tab-separated-values"),
    Format("json", "tables.parse_json", endings=("json",), media_type="application/json"),
    Format(
        "jsonl", "tables.parse_json", endings=("jsonl", "ndjson"), aliases=("ndjson",), media_type="application/jsonl"
    ),
    # PNG, JPEG, TIFF in either byte order
    Format(
        "image",
        "image.parse_image",
        openings=(b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"II*\0", b"MM\0*"),
        aliases=("png", "jpg", "jpeg", "tif", "tiff"),
        # the parser says which
        media_type="image/*",
    ),
    Format(
        "eml",
        "mail.parse_eml",
        endings=("eml",),
        holds=re.compile(r"\A[\w-]+:"),
        media_type="message/rfc822",
    ),
    Format(
        "mbox",
        "mail.parse_mbox",
        begins=re.compile(r"From \S.{0,200}? [A-Z][a-z]{2} [A-Z][a-z]{2} [ \d]\d \d\d:\d\d.*\n(?=[\w-]+:)"),
        endings=("mbox", "mbx"),
        holds=re.compile(r"\AFrom \S"),
        media_type="application/mbox",
    ),
    Format("msg", "mail.parse_msg", media_type="application/vnd.ms-outlook"),
    Format(
        "vtt",
        "text.parse_subtitles",
        begins=re.compile("WEBVTT"),
        endings=("vtt",),
        holds=_NEVER,
        media_type="text/vtt",
    ),
    Format(
        "srt",
        "text.parse_subtitles",
        begins=re.compile(r"\s*\d+\s*\n\d{1,2}:\d{2}:\d{2},\d{3}\s+-->\s"),
        endings=("srt",),
        holds=_NEVER,
        media_type="application/x-subrip",
    ),
    Format(
        "markdown",
        "text.parse_markdown",
        endings=("md", "markdown", "mdown", "mkd", "mdx"),
        aliases=("md",),
        media_type="text/markdown",
    ),
    Format(
        "asciidoc",
        "text.parse_asciidoc",
        endings=("adoc", "asciidoc", "asc"),
        aliases=("adoc",),
        media_type="text/asciidoc",
    ),
    Format("rst", "text.parse_rst", endings=("rst",), media_type="text/x-rst"),
    Format("source", "text.parse_source", endings=tuple(_SOURCE)),
    Format("text", "text.parse_text", endings=("txt",), aliases=("txt",)),
)
#: name -> format
FORMATS: dict[str, Format] = {f.name: f for f in _ALL}
