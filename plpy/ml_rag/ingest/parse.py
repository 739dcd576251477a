"""From the bytes of a file to a document in Markdown.

Calls: one module of ``ml_rag.ingest.formats``, imported when its format is met.
No parser opens another file, reaches the network, or expands XML entities. Time and memory are bounded by the child
process this runs in (``ml_rag.ingest.sandbox``).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence

from ml_rag import abc, zstd
from ml_rag.archives import compression, plain_name, unpacked
from ml_rag.errors import DocumentError, EngineFailed, InvalidRequest
from ml_rag.ingest.formats import FORMATS
from ml_rag.ingest.formats.archive import MAX_UNPACKED
from ml_rag.ingest.formats.common import Request
from ml_rag.ingest.formats.detect import detect
from ml_rag.ingest.formats.pictures import Pictures

zstd.install()

#: other names people use for them
_ALIASES = {alias: f.name for f in FORMATS.values() for alias in f.aliases}


def parse(
    name: str,
    content: bytes,
    *,
    formats: Sequence[str] | None = None,
    language: str | None = None,
    ocr: bool = False,
    pictures: Pictures | None = None,
) -> abc.Document:
    """The document in the bytes: at least one block, Markdown, NFC, ``\\n`` line ends, no NUL.

    Compressed bytes (gzip, bzip2, xz, Zstandard) are read as what they hold. ``name`` decides between text formats
    only; everything else is found in the content. ``formats`` limits which
    formats are accepted (None or empty: all; ``FORMATS`` and usual endings such as ``md``). ``language`` (ISO 639-1)
    helps with old encodings and OCR. ``ocr`` reads images, also those of pages that have no text. ``pictures`` collects
    them for a model, or has what it said of them.

    Raises DocumentError if the content gives no document, InvalidRequest for an unknown name in ``formats``,
    EngineFailed if the library of a format is missing.
    """
    accepted = accepted_formats(formats)
    try:
        if compression(content):
            name, content = plain_name(name), unpacked(content, MAX_UNPACKED)
        found = detect(name, content, language)
        if accepted and found not in accepted and not (found == "xml" and "rss" in accepted):
            raise _not_accepted(found, accepted)
        module, _, function = FORMATS[found].parser.partition(".")
        parser: Callable[[str, bytes, Request], abc.Document]
        parser = getattr(importlib.import_module(f"ml_rag.ingest.formats.{module}"), function)
        document = parser(name, content, Request(language, ocr, pictures))
    except DocumentError:
        raise
    except ImportError as error:
        raise EngineFailed(
            "a parser is not installed", detail=str(error), hint="Install the ml-rag package with its dependencies."
        ) from error
    except RecursionError as error:
        raise DocumentError("document is nested too deeply", detail=str(error), hint="Convert it to text.") from error
    except Exception as error:  # whatever a library raises over a broken file is about the file
        raise DocumentError(
            "document cannot be read",
            detail=f"{type(error).__name__}: {error}"[:500].replace("\0", ""),
            hint="It may be damaged or cut off: open it in the program it comes from and save it again.",
        ) from error
    if accepted and document.format not in accepted:
        raise _not_accepted(document.format, accepted)
    if not document.blocks:
        raise DocumentError(
            "document has no text", detail=f"its format is {document.format}", hint="Leave it out, or give its text."
        )
    return document


def accepted_formats(formats: Sequence[str] | None) -> frozenset[str]:
    """The option ``formats`` as names of ``FORMATS``; empty = all. Raises InvalidRequest for an unknown name."""
    names = {name: name.lower().lstrip(".") for name in formats or ()}
    accepted = {name: _ALIASES.get(plain, plain) for name, plain in names.items()}
    unknown = [name for name, plain in accepted.items() if plain not in FORMATS]
    if unknown:
        raise InvalidRequest(
            "unknown document format",
            detail=f"{', '.join(map(repr, unknown))} in formats",
            hint=f"Formats are {', '.join(FORMATS)}.",
        )
    return frozenset(accepted.values())


def _not_accepted(found: str, accepted: frozenset[str]) -> DocumentError:
    return DocumentError(
        "document format is not accepted",
        detail=f"the format is {found}; accepted are {', '.join(sorted(accepted))}",
        hint=f"Add {found} to formats, or leave the option out.",
    )
