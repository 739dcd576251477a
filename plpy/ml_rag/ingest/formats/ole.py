"""OLE2 containers: which of the old Microsoft formats, or an encrypted new one."""

from __future__ import annotations

from io import BytesIO
from typing import Any

from ml_rag.ingest.formats.common import damaged, encrypted, unknown


def open_ole(content: bytes) -> Any:
    """An ``olefile.OleFileIO``. Raises DocumentError for a broken container."""
    import olefile  # type: ignore[import-untyped]

    try:
        return olefile.OleFileIO(BytesIO(content))
    except Exception as error:
        raise damaged(f"OLE2 container: {error}") from error


def detect_ole(content: bytes) -> str:
    """``xls`` or ``msg``. Raises DocumentError for what cannot be read, with what it is."""
    ole = open_ole(content)
    names = {entry[0].lower() for entry in ole.listdir(streams=True, storages=False)}
    if "encryptedpackage" in names or "encryptioninfo" in names:
        raise encrypted("an Office document with a password")
    if "workbook" in names or "book" in names:
        return "xls"
    if "__properties_version1.0" in names:
        return "msg"
    for stream, kind, better in (
        ("worddocument", "a Word 97-2003 document", "DOCX"),
        ("powerpoint document", "a PowerPoint 97-2003 presentation", "PPTX"),
    ):
        if stream in names:
            raise unknown(f"the content is {kind}", f"Save it as {better} or PDF.")
    raise unknown("an OLE2 container", "Convert it to PDF or text first.")
