"""What format bytes are in: by their content; the name decides between text formats only."""

from __future__ import annotations

import json
import re

from ml_rag.archives import compression
from ml_rag.errors import DocumentError
from ml_rag.ingest.formats import FORMATS, HTML_TAGS
from ml_rag.ingest.formats.common import unknown
from ml_rag.ingest.formats.encoding import decode, utf16_without_mark

_BY_ENDING = {ending: f for f in FORMATS.values() for ending in f.endings}
_OPENINGS = [(opening, f.name) for f in FORMATS.values() for opening in f.openings]
_BEGINS = [(f.begins, f.name) for f in FORMATS.values() if f.begins is not None]

_PACKED = "Unpack it, or pack its files as ZIP or tar: such an archive is loaded as a folder."
_PICTURE = "Save it as PNG and load it with ocr or describe_images, or give its text."
_MEDIA = "Transcribe it, and load the text or its subtitles (VTT, SRT)."
_PROGRAM = "Leave it out: list what you want in formats."
_TABLE = "Export what it holds as CSV or JSON lines."
_CONVERT = "Convert it to PDF, HTML or text first."
#: openings of formats that no parser here reads, with what can be done about each
_UNREADABLE = (
    (b"\x89PNG", "PNG image", _PICTURE), (b"GIF8", "GIF image", _PICTURE), (b"BM", "BMP image", _PICTURE),
    (b"7z\xbc\xaf", "7z archive", _PACKED), (b"Rar!", "RAR archive", _PACKED),
    (b"\x7fELF", "program", _PROGRAM), (b"MZ", "program", _PROGRAM),
    (b"SQLite format 3", "SQLite database", _TABLE), (b"PAR1", "Parquet file", _TABLE),
    (b"%!PS", "PostScript file", _CONVERT),
    (b"OggS", "Ogg media", _MEDIA), (b"ID3", "MP3 audio", _MEDIA), (b"RIFF", "RIFF media", _MEDIA),
)  # fmt: skip

#: a header of a mail, with its continuation lines
_HEADER = re.compile(r"([\x21-\x39\x3b-\x7e]+):(.*\n(?:[ \t]+\S.*\n)*)")
#: headers that a mail shows, and those that people do not write
_SHOWN = frozenset({"from", "to", "cc", "date", "subject"})
_OF_PROGRAMS = frozenset({
    "return-path", "received", "delivered-to", "dkim-signature", "arc-seal", "message-id", "mime-version", "user-agent",
    "content-type", "content-transfer-encoding", "thread-topic",
})  # fmt: skip


def detect(name: str, content: bytes, language: str | None = None) -> str:
    """The format of the bytes, one of ``FORMATS``. Raises DocumentError for what is none."""
    if not content.strip(b" \t\r\n\0\xef\xbb\xbf"):
        raise DocumentError("document is empty", detail=f"{len(content)} bytes", hint="Leave it out.")
    # PDF readers allow up to 1024 bytes of rubbish before the mark.
    if b"%PDF-" in content[:1024] and (content.startswith(b"%PDF-") or not is_text(content)):
        return "pdf"
    for opening, name_of_format in _OPENINGS:
        if content.startswith(opening):
            return name_of_format
    if content.startswith((b"PK\x03\x04", b"PK\x05\x06")):
        from ml_rag.ingest.formats.archive import detect_zip

        return detect_zip(content)
    if content.startswith(b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"):
        from ml_rag.ingest.formats.ole import detect_ole

        return detect_ole(content)
    if packed := compression(content):
        raise unknown(f"the content is a {packed} file in another", _PACKED)
    for opening, kind, hint in _UNREADABLE:
        if content.startswith(opening) and (len(opening) > 2 or not is_text(content)):
            raise unknown(f"the content is a {kind}", hint)
    if content[257:262] == b"ustar":
        raise unknown("the content is a tar archive", "Give it a name that ends in .tar, .tar.gz, .tar.bz2 or .tar.xz.")
    if not is_text(content):
        raise unknown("the content is neither text nor a known document format", _CONVERT)
    return _detect_text(name, content, language)


def is_text(content: bytes) -> bool:
    sample = content[:8192]
    if sample.startswith((b"\xff\xfe", b"\xfe\xff")) or utf16_without_mark(sample):
        return True
    # Some texts carry a stray NUL; binary data carries many control characters.
    controls = sum((byte < 32 and byte not in b"\t\n\r\x0c\x1b") or byte == 127 for byte in sample)
    return controls <= 2 + len(sample) // 100


def _detect_text(name: str, content: bytes, language: str | None) -> str:
    text = decode(content[:65536], language).lstrip("\ufeff").replace("\r\n", "\n").replace("\0", "")
    base = name.replace("\\", "/").rpartition("/")[2].lower()
    ending = base.rpartition(".")[2]
    claimed = _BY_ENDING.get(ending)
    if claimed is not None and claimed.name == "source":
        return "source"
    for begins, name_of_format in _BEGINS:
        if begins.match(text):
            return name_of_format
    if claimed is not None and claimed.name in {"json", "jsonl"}:
        return _json_or_lines(content, claimed.name, language)
    # a mail may be called .txt
    if claimed is not None and claimed.name != "text" and (claimed.holds is None or claimed.holds.search(text)):
        return claimed.name
    if _is_mail(text.lstrip("\n")):
        return "eml"
    if claimed is None:
        if text.lstrip().startswith("{") or text.lstrip().startswith("[{"):
            return _json_or_lines(content, "json", language)
        if len(HTML_TAGS.findall(text[:4096])) >= 4 and text.lstrip().startswith("<"):
            return "html"
    return "text"


def _is_mail(text: str) -> bool:
    """Whether a text begins with headers of a mail, one of which only programs write. Minutes and agendas begin alike:
    without such a header it has those alone that a mail shows, each once, and an address."""
    found = []
    place = text.find("\n") + 1 if text.startswith("From ") else 0
    while header := _HEADER.match(text, place):
        found.append((header[1].lower(), header[2]))
        place = header.end()
    names = {name for name, _ in found}
    if names & _OF_PROGRAMS:
        return "mime-version" in names or len(names & (_OF_PROGRAMS | _SHOWN)) >= 3
    return 3 <= len(names) == len(found) and names <= _SHOWN and "@" in dict(found).get("from", "")


def _json_or_lines(content: bytes, claimed: str, language: str | None) -> str:
    """json, jsonl or, where neither can be read, text."""
    text = decode(content, language)
    for format_name in (claimed, "jsonl" if claimed == "json" else "json"):
        try:
            if format_name == "json":
                json.loads(text)
            else:
                json.loads(next(line for line in text.split("\n") if line.strip()))
        except (ValueError, RecursionError, StopIteration):
            continue
        return format_name
    return "text"
