"""Rich Text Format: its text; the format's own tables and styles are not kept."""

from __future__ import annotations

import re
from itertools import pairwise

from ml_rag import abc
from ml_rag.ingest.formats.common import Request, document, metadata, power

#: a link, whose text is written before its address; striprtf's own pattern reads a line as often as it holds links
_LINK = re.compile(
    r"(\{\\field\{\s*\\\*\\fldinst\{[^\"\n]{0,200}?HYPERLINK\s(\"[^\"\n]*\")\}{2}\s*\{[^\s}]{0,200}\s{1,10}([^{}\n]{0,2000})\}{2,3})",
    re.IGNORECASE,
)
#: number, character set and name of a font; striprtf's own pattern runs to the end of the table from each font
_FONT = re.compile(r"\\f(\d{1,6})[^;]{0,300}?\\fcharset(\d{1,6})([^;]{1,300});")
#: a character by its number, a signed one of 16 bits
_CHARACTER = re.compile(r"\\u(-?\d{1,10})\d*")
_NOT_ASCII = re.compile(rb"[\x80-\xff]")
#: groups whose text is read, though striprtf leaves them out: footnotes, boxes of text, what objects show
_READ = {"footnote", "shp", "shpinst", "shptxt", "object", "result", "ud"}
#: the same text twice, of which the second has all characters
_TWICE = re.compile(r"\{\\upr\s*\{")
_OPTIONAL = re.compile(r"\{\\\*\\(shpinst|ud|footnote)\b")
#: striprtf reads on at once, as if the note were the end of the word before it
_NOTE = re.compile(r"\{\\footnote\b ?")
#: what was deleted while changes were tracked: to the end of its group, or until it is switched off
_DELETED = re.compile(r"(?<!\\)\\deleted(?![a-z0-9-])(?:(?!\\deleted|\\plain\b)[^{}])*(\}|\\deleted0(?!\d) ?)")
#: what raises the text behind it, where the mark is put
_RAISED = re.compile(r"(?<!\\)\\super(?![a-z0-9-]) ?")
_MARK = "\x1f"
#: what the letters above ASCII are where no code page is named
_CODE_PAGE = re.compile(rb"\{\\rtf\d*\s*\\(mac|pca|pc)(?![a-z])")
_CODE_PAGES = {b"mac": "mac_roman", b"pca": "cp850", b"pc": "cp437"}
_INFO = re.compile(r"\{\\(title|author)\s+([^{}\\]{1,300})\}")


def parse_rtf(_name: str, content: bytes, _request: Request) -> abc.Document:
    """One block, a paragraph a line apart."""
    import striprtf.striprtf as library

    library.HYPERLINKS, library.FONTTABLE = _LINK, _FONT
    library.destinations = library.destinations - _READ
    info = dict(_INFO.findall(content[:16384].decode("latin-1")))
    # characters of the code page that are not written by their number, as they should be
    content = _NOT_ASCII.sub(lambda found: b"\\'%02x" % found[0][0], content)
    code_page = _CODE_PAGE.match(content)
    encoding = _CODE_PAGES[code_page[1]] if code_page else "cp1252"
    content = content.replace(b"\\ansicpg10000", b"", 1)  # that of \\mac, which Python has under its name alone
    source = _OPTIONAL.sub(r"{\\\1", _TWICE.sub(r"{{\\*", content.decode("ascii")))
    source = _NOTE.sub(r"{\\footnote  ", _DELETED.sub(lambda found: "}" if found[1] == "}" else "", source))
    source = _RAISED.sub(rf"\\super {_MARK}", source)
    source = _CHARACTER.sub(lambda found: f"\\u{int(found[1]) % 0x10000}", source)
    text = re.sub(r"\n+", "\n\n", library.rtf_to_text(source, encoding, "replace"))  # type: ignore[no-untyped-call]
    before, *raised = re.split(f"{_MARK}+", text)
    text = before + "".join(power(one, following) for one, following in pairwise([before, *raised]))
    # those of more bits are two in a row
    text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    # striprtf closes table cells with a bar
    text = re.sub(r"^(.*\|)$", lambda found: found[1].rstrip("|").replace("|", " | "), text, flags=re.MULTILINE)
    return document("rtf", [(text, {})], metadata(**info))
