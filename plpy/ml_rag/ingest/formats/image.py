"""Pictures, read by OCR or described by a model: PNG, JPEG, TIFF with as many pages as it has."""

from __future__ import annotations

from functools import partial
from io import BytesIO
from typing import Any

from ml_rag import abc
from ml_rag.errors import DocumentError
from ml_rag.ingest.formats.common import Request, document
from ml_rag.ingest.formats.ocr import read_image


def parse_image(name: str, content: bytes, request: Request) -> abc.Document:
    """A block a page, with its number where there are several."""
    if not request.ocr and request.pictures is None:
        raise DocumentError(
            "document has no text",
            detail="it is an image",
            hint="Set ocr to true to read the text in it, or have a model describe it with describe_images.",
        )
    from PIL import Image, ImageOps, ImageSequence

    blocks: list[tuple[str, dict[str, Any]]] = []
    # other decoders of the library are never tried, whatever the file claims to be
    with Image.open(BytesIO(content), formats=("PNG", "JPEG", "TIFF")) as image:
        pages = getattr(image, "n_frames", 1)
        media_type = image.get_format_mimetype()
        for number, frame in enumerate(ImageSequence.Iterator(image), start=1):
            page = {"page": number} if pages > 1 else {}
            described = request.pictures.block(partial(_same, frame), page) if request.pictures else ()
            blocks += described
            if request.ocr and not described:
                blocks.append((read_image(ImageOps.exif_transpose(frame), request.language), page))
    if not any(text.strip() for text, _ in blocks):
        detail = "OCR found none in the image" if request.ocr else "the image has no description"
        raise DocumentError("document has no text", detail=detail, hint="Leave it out.")
    return document("image", blocks, {"file_type": media_type} if media_type else None)


def _same(frame: Any) -> Any:
    return frame
