"""Mail: MIME messages and Outlook's MSG, headers that people read, then the text, then the attachments' names."""

from __future__ import annotations

import re
from collections.abc import Iterable
from email import message_from_bytes, policy
from email.message import EmailMessage
from typing import Any

from ml_rag import abc
from ml_rag.ingest.formats.common import Request, clean, document, metadata, one_line
from ml_rag.ingest.formats.encoding import decode
from ml_rag.ingest.formats.html import html_to_markdown

_HEADERS = ("From", "To", "Cc", "Date")


def parse_eml(_name: str, content: bytes, request: Request) -> abc.Document:
    """One block. The plain part is preferred to the HTML one; attachments are named, not read."""
    message = message_from_bytes(content.lstrip(b"\r\n"), policy=policy.default)
    headers = {key: _header(message, key) for key in ("Subject", *_HEADERS)}
    body = message.get_body(preferencelist=("plain", "html"))
    text = ""
    if isinstance(body, EmailMessage):
        payload = body.get_payload(decode=True)
        data = payload if isinstance(payload, bytes) else b""
        text = _decode(data, body.get_content_charset(), request.language)
        if body.get_content_type() == "text/html":
            text = html_to_markdown(text)
    names = [part.get_filename() or "" for part in message.walk() if part.get_filename()]
    return _mail("eml", headers, text, names)


def _header(message: EmailMessage, key: str) -> str:
    try:
        return one_line(message.get(key, ""))
    except (ValueError, IndexError, AttributeError, TypeError):  # the parser of odd headers has gaps
        return ""


def _decode(data: bytes, charset: str | None, language: str | None) -> str:
    try:
        return data.decode(charset or "utf-8")
    except (UnicodeDecodeError, LookupError):
        return decode(data, language)


def parse_msg(_name: str, content: bytes, request: Request) -> abc.Document:
    """One block, from the properties of the OLE2 container (MS-OXMSG)."""
    from ml_rag.ingest.formats.ole import open_ole

    with open_ole(content) as ole:

        def text(tag: str, prefix: str = "") -> str:
            for kind, encoding in (("001F", "utf-16-le"), ("001E", None), ("0102", None)):
                path = f"{prefix}__substg1.0_{tag}{kind}"
                if ole.exists(path):
                    data: bytes = ole.openstream(path).read()
                    return data.decode(encoding, "replace") if encoding else decode(data, request.language)
            return ""

        sender = " ".join(part for part in (text("0C1A"), f"<{text('0C1F')}>" if text("0C1F") else "") if part)
        sent = re.search(r"^Date:\s*(.+)$", text("007D"), re.MULTILINE | re.I)
        headers = {
            "Subject": text("0037"),
            "From": sender,
            "To": text("0E04"),
            "Cc": text("0E03"),
            "Date": sent[1] if sent else "",
        }
        body = text("1000") or html_to_markdown(text("1013"))
        attached = sorted({entry[0] for entry in ole.listdir() if entry[0].startswith("__attach_version1.0")})
        names = [text("3707", f"{one}/") or text("3704", f"{one}/") for one in attached]
    return _mail("msg", headers, body, names)


def _mail(format_name: str, headers: dict[str, Any], text: str, names: Iterable[str]) -> abc.Document:
    subject = one_line(headers.get("Subject", ""))
    shown = "\n".join(f"{key}: {one_line(headers[key])}" for key in _HEADERS if headers.get(key))
    attached = ", ".join(one_line(name) for name in names if name)
    body = clean(text)
    parts = [f"# {subject}" if subject else "", shown, body, f"Attachments: {attached}" if attached else ""]
    blocks = ["\n\n".join(part for part in parts if part)] if subject or body.strip() else []
    return document(format_name, [(block, {}) for block in blocks], metadata(title=subject, author=headers.get("From")))
