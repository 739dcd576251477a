"""Mail (MIME, mailboxes, Outlook's MSG): headers that people read, then the text, then the attachments' names, and
the text of those that are texts or mails."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from email import message_from_bytes
from email.policy import EmailPolicy
from functools import lru_cache, partial
from itertools import chain, pairwise
from typing import Any

from ml_rag import abc
from ml_rag.ingest.formats.common import Request, clean, document, metadata, numbers, one_line
from ml_rag.ingest.formats.detect import is_text
from ml_rag.ingest.formats.encoding import decode
from ml_rag.ingest.formats.html import html_to_markdown, mail_to_markdown

_HEADERS = ("From", "To", "Cc", "Date")
#: characters of a plain text that may only say that the mail is in HTML, which then has more than three times as many;
#: a legal notice can make it long, but addresses, which HTML does not show, do not count
_STUB = 3000
_ADDRESS = re.compile(r"https?://\S+")
#: that are read, also if they are attached
_TEXTS = frozenset({"text/plain", "text/html", "text/markdown", "text/csv"})
#: of names, in mails of Outlook, whose attachments often have no type
_ENDINGS = {"txt": "text/plain", "html": "text/html", "htm": "text/html", "md": "text/markdown", "csv": "text/csv"}
_PICTURES = (".png", ".jpg", ".jpeg", ".tif", ".tiff", ".gif", ".bmp", ".webp")
#: properties of Outlook that have the name of an attachment: in full, short, and as it is shown
_NAMES = ("3707", "3704", "3001")
#: the character set of a parameter, as RFC 2231 has it
_CHARSET = re.compile(r"(\*\d*\*?=)[^'\s;]*'")


_FROM_LINE = re.compile(rb"^From \S(?=.*\d{4}).*\n(?=[\w-]+:)", re.MULTILINE)
_QUOTED_FROM = re.compile(rb"^>(>*From )", re.MULTILINE)

#: characters of a header that are parsed: Python's parser takes minutes for some of 600 kB
_LONGEST_HEADER = 10_000
#: of a part that is encrypted, or in Exchange's own form, whatever its name
_CLOSED = ("pkcs7-mime", "ms-tnef", "smime.p7m", "winmail.dat")
#: of one that each part has: more than a name of 255 characters takes
_LONGEST_OF_PART = 2500


class _Policy(EmailPolicy):
    """Parameters in a character set that is none are read as UTF-8."""

    def header_fetch_parse(self, name: str, value: str) -> Any:
        is_of_part = name.lower().startswith("content-")
        return _parsed(self, name, value[: _LONGEST_OF_PART if is_of_part else _LONGEST_HEADER])

    def _parse(self, name: str, value: str) -> Any:
        try:
            return super().header_fetch_parse(name, value)
        except (ValueError, LookupError):
            return super().header_fetch_parse(name, _CHARSET.sub(r"\1utf-8'", value))


@lru_cache(16)  # each part is asked for its type ten times
def _parsed(policy: _Policy, name: str, value: str) -> Any:
    return policy._parse(name, value)


def parse_eml(_name: str, content: bytes, request: Request) -> abc.Document:
    """One block, and the descriptions of its pictures. A plain part is preferred to the HTML one of the same text, if
    it is not a stub; of attachments those that are text, or mails, are read."""
    message: Any = message_from_bytes(content.lstrip(b"\r\n"), policy=_Policy())
    for part in message.walk():
        _decode_mail(part)
    headers = _headers(message)
    texts, attached = _texts(message, request.language)
    described: list[tuple[str, dict[str, Any]]] = []
    for part in message.walk():
        if request.pictures is not None and _is_picture(part.get_content_type(), part.get_filename()):
            described += request.pictures.block(partial(part.get_payload, decode=True), {})
    names = map(_attached, message.walk())
    text = "\n\n".join(filter(None, texts))
    left_out = None if text.strip() or attached else _unread(message)
    return _mail("eml", headers, text, names, described, left_out, attached)


def parse_mbox(_name: str, content: bytes, request: Request) -> abc.Document:
    """A block a message, with ``{"message": n}``, 1-based. One that cannot be read does not take the others away."""
    blocks = []
    broken = []
    for number, message in enumerate(_messages(content), 1):
        try:
            found = parse_eml("", message, request)
            blocks += [(block.text, {"message": number, **block.metadata}) for block in found.blocks]
            broken += [number] if "left_out" in found.metadata else []
        except Exception:  # noqa: BLE001 - whatever the library raises over a broken message
            broken.append(number)
    return document("mbox", blocks, None, numbers("message", broken))


def _messages(content: bytes) -> Iterator[bytes]:
    """Each message without the line that begins it, and without the mark before ``From`` in its text."""
    starts = [match.start() for match in _FROM_LINE.finditer(content)]
    for start, end in pairwise([*starts, len(content)]):
        yield _QUOTED_FROM.sub(rb"\1", content[content.index(b"\n", start) + 1 : end])


def _decode_mail(part: Any) -> None:
    """In base64, which MIME does not allow for an attached mail, Python takes all of it for a text without headers."""
    if part.get_content_type() == "message/rfc822" and part.is_multipart():
        (inner,) = part.get_payload()
        if not inner.keys() and str(part.get("Content-Transfer-Encoding", "")).strip().lower() == "base64":
            inner["Content-Transfer-Encoding"] = "base64"
            part.set_payload([message_from_bytes(inner.get_payload(decode=True), policy=_Policy())])


def _headers(message: Any) -> dict[str, str]:
    return {key: _header(message, key) for key in ("Subject", *_HEADERS)}


def _texts(message: Any, language: str | None) -> tuple[list[str], list[str]]:
    """What a reader shows: the body, with texts beside it such as a mailing list's footer; and what is attached, each
    with its name as its heading."""
    texts: list[str] = []
    attached: list[str] = []
    body = message.get_body(preferencelist=("plain", "html"))
    for part in _leaves(message, body, language):
        if part.get_content_type() == "message/rfc822":
            inner = part.get_payload()[0]
            headers = _headers(inner)
            found = chain(*_texts(inner, language))
            attached.append(_attachment(headers["Subject"], "\n\n".join(filter(None, (_shown(headers), *found)))))
        elif not _is_attached(part, body):
            texts.append(_text(part, language))
        elif (text := _text(part, language)).strip():
            attached.append(_attachment(_attached(part), text))
    return texts, attached


def _unread(message: Any) -> str | None:
    """What a mail without text has in place of it: an invitation, what is encrypted, parts without their limits."""
    kinds = {
        kind
        for part in message.walk()
        if not part.is_multipart() and (kind := part.get_content_type()) not in _TEXTS
        if part.get_content_maintype() != "image" and _is_unnamed(part, kind)
        if (part.get_payload(decode=True) or b"").strip()
    }
    return f"its text, which is in {', '.join(sorted(kinds))} alone" if kinds else None


def _is_unnamed(part: Any, kind: str) -> bool:
    name = part.get_filename()
    return not name or kind.endswith(_CLOSED) or name.lower() in _CLOSED


def _leaves(part: Any, body: Any, language: str | None) -> Iterator[Any]:
    """The parts of a mail that are text, and the mails in it; of alternatives plain text, unless another has much more,
    or the first that has any, and what is attached to the others."""
    kind = part.get_content_type()
    if kind == "multipart/alternative":
        found = [list(_leaves(one, body, language)) for one in part.iter_parts()]
        shown = [[leaf for leaf in leaves if not _is_attached(leaf, body)] for leaves in found]
        order = sorted(filter(None, shown), key=lambda leaves: leaves[0].get_content_type() != "text/plain")
        chosen = next((leaves for leaves in order if any(_has_text(leaf, language) for leaf in leaves)), None)
        if chosen and chosen[0].get_content_type() == "text/plain" and (least := _length(chosen, language)) <= _STUB:
            chosen = next((leaves for leaves in order if _length(leaves, language) > 3 * least), chosen)
        for leaves, texts in zip(found, shown, strict=True):
            yield from (leaf for leaf in leaves if texts is chosen or _is_attached(leaf, body))
    elif part.get_content_maintype() == "multipart":
        inner = list(part.iter_parts())
        start = part.get_param("start")
        root = next((one for one in inner if start and one.get("Content-ID") == start), inner[0] if inner else None)
        for one in inner:
            # what a page refers to is a frame of it, or a style sheet
            is_shown = kind != "multipart/related" or one is root or _is_attached(one, body)
            if is_shown or not ("Content-ID" in one or "Content-Location" in one):
                yield from _leaves(one, body, language)
    elif (kind == "message/rfc822" and part.is_multipart()) or (
        kind in _TEXTS and (not _is_attached(part, body) or is_text(part.get_payload(decode=True) or b""))
    ):
        yield part


def _has_text(part: Any, language: str | None) -> bool:
    return part.get_content_type() != "text/plain" or bool(_text(part, language).strip())


def _length(parts: list[Any], language: str | None) -> int:
    return sum(_characters(_text(part, language)) for part in parts)


def _characters(text: str) -> int:
    """How many it has, without addresses."""
    return len(_ADDRESS.sub("", text).strip())


def _is_attached(part: Any, body: Any) -> bool:
    is_mail = part.get_content_type() == "message/rfc822"
    return is_mail or part.is_attachment() or (part is not body and part.get_filename() is not None)


def _attachment(name: str, text: str) -> str:
    return f"## {one_line(name)}\n\n{text}" if name else text


def _attached(part: Any) -> str:
    """What an attachment is called; another mail often has its subject only."""
    inner = part.get_payload() if part.get_content_type() == "message/rfc822" else None
    subject = _header(inner[0], "Subject") if isinstance(inner, list) and inner else ""
    return part.get_filename() or subject


def _is_picture(media_type: str, name: str | None) -> bool:
    return media_type.startswith("image/") or (name or "").lower().endswith(_PICTURES)


def _text(part: Any, language: str | None) -> str:
    payload = part.get_payload(decode=True)
    data = payload if isinstance(payload, bytes) else b""
    text = decode(data, language, part.get_content_charset())
    if part.get_content_type() != "text/html":
        return text
    # attached, or saved by a browser as a mail, it is not the text of a mail
    is_page = part.is_attachment() or "Content-Location" in part
    return html_to_markdown(text) if is_page else mail_to_markdown(text)


def _header(message: Any, key: str) -> str:
    raw = one_line(next((value for name, value in message.raw_items() if name.lower() == key.lower()), ""))
    if len(raw) > _LONGEST_HEADER:
        return raw
    try:
        return one_line(message.get(key, ""))
    except (ValueError, IndexError, AttributeError, TypeError, RecursionError):  # the parser of odd headers has gaps
        return raw


def parse_msg(_name: str, content: bytes, request: Request) -> abc.Document:
    """As ``parse_eml``, from the properties of the OLE2 container (MS-OXMSG)."""
    from ml_rag.ingest.formats.ole import open_ole

    with open_ole(content) as ole:
        entries = ole.listdir()
        # olefile goes through all of them for each
        there = {"/".join(entry).lower() for entry in entries}

        def exists(path: str) -> bool:
            return path.lower() in there

        def text(tag: str, prefix: str = "") -> str:
            for kind, encoding in (("001F", "utf-16-le"), ("001E", None), ("0102", None)):
                path = f"{prefix}__substg1.0_{tag}{kind}"
                if exists(path):
                    data: bytes = ole.openstream(path).read()
                    return data.decode(encoding, "replace") if encoding else decode(data, request.language)
            return ""

        def headers(prefix: str) -> dict[str, str]:
            address = text("0C1F", prefix)
            sent = re.search(r"^Date:\s*(.+)$", text("007D", prefix), re.MULTILINE | re.I)
            return {
                "Subject": one_line(text("0037", prefix)),
                "From": " ".join(filter(None, (text("0C1A", prefix), f"<{address}>" if address else ""))),
                "To": text("0E04", prefix),
                "Cc": text("0E03", prefix),
                "Date": sent[1] if sent else "",
            }

        #: by the place of a mail, those of its attachments
        places: defaultdict[str, set[str]] = defaultdict(set)
        for entry in entries:
            for i, part in enumerate(entry):
                if part.startswith("__attach_version1.0"):
                    places["".join(f"{folder}/" for folder in entry[:i])].add("/".join(entry[: i + 1]))
        names: list[str] = []
        unread: list[str] = []
        described: list[tuple[str, dict[str, Any]]] = []

        def texts(prefix: str, whose: str) -> Iterator[str]:
            """The text of a mail, and those that are attached to it."""
            body = text("1000", prefix)
            html = mail_to_markdown(text("1013", prefix)) if (least := _characters(body)) <= _STUB else ""
            body = html if _characters(html) > 3 * least else body
            yield body
            if not body.strip() and exists(f"{prefix}__substg1.0_10090102"):
                unread.append(f"{whose} text, which is in RTF alone")
            for place in sorted(places[prefix]):
                mail, path = f"{place}/__substg1.0_3701000D/", f"{place}/__substg1.0_37010102"
                inner = headers(mail)
                name = next(filter(None, (text(tag, f"{place}/") for tag in _NAMES)), "") or inner["Subject"]
                kind = text("370E", f"{place}/").strip() or _ENDINGS.get(name.lower().rpartition(".")[2], "")
                names.append(name)
                parts = [part for part in (_shown(inner), *texts(mail, "an attached mail's")) if part.strip()]
                if parts:
                    yield _attachment(inner["Subject"] or name, "\n\n".join(parts))
                elif kind in _TEXTS and exists(path) and is_text(data := _stream(ole, path)):
                    found = decode(data, request.language)
                    yield _attachment(name, html_to_markdown(found) if kind == "text/html" else found)
                if request.pictures is not None and _is_picture(kind, name) and exists(path):
                    described.extend(request.pictures.block(partial(_stream, ole, path), {}))

        body, *attached = texts("", "its")
        return _mail("msg", headers(""), body, names, described, "; ".join(dict.fromkeys(unread)), attached)


def _stream(ole: Any, path: str) -> bytes:
    found: bytes = ole.openstream(path).read()
    return found


def _mail(
    format_name: str,
    headers: dict[str, Any],
    text: str,
    names: Iterable[str],
    described: list[tuple[str, dict[str, Any]]],
    left_out: str | None = None,
    attached: Sequence[str] = (),
) -> abc.Document:
    subject = one_line(headers.get("Subject", ""))
    attachments = ", ".join(one_line(name) for name in names if name)
    body = clean(text)
    named = f"Attachments: {attachments}" if attachments else ""
    parts = [f"# {subject}" if subject else "", _shown(headers), body, named, *attached]
    is_empty = not (subject or body.strip() or attached)
    blocks = [] if is_empty else ["\n\n".join(part for part in parts if part)]
    meta = metadata(title=subject, author=headers.get("From"))
    return document(format_name, [*((block, {}) for block in blocks), *described], meta, left_out)


def _shown(headers: dict[str, Any]) -> str:
    return "\n".join(f"{key}: {one_line(headers[key])}" for key in _HEADERS if headers.get(key))
