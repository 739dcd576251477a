"""OLE2 containers: which of the old Microsoft formats, or an encrypted new one."""

from __future__ import annotations

from io import BytesIO
from typing import Any

from ml_rag.errors import DocumentError
from ml_rag.ingest.formats.archive import encrypted


def open_ole(content: bytes) -> Any:
    """An ``olefile.OleFileIO``. Raises DocumentError for a broken container."""
    import olefile  # type: ignore[import-untyped]

    try:
        return olefile.OleFileIO(BytesIO(content))
    except Exception as error:
        raise DocumentError(
            "document is truncated or damaged", detail=f"OLE2 container: {error}"[:300], hint="Copy the file again."
        ) from error


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
            raise DocumentError(
                "unknown document format", detail=f"the content is {kind}", hint=f"Save it as {better} or PDF."
            )
    raise DocumentError("unknown document format", detail="an OLE2 container", hint="Convert it to PDF or text first.")
