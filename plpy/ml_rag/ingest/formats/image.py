"""Pictures of text, read by OCR: PNG, JPEG, TIFF with as many pages as it has."""

from __future__ import annotations

from io import BytesIO

from ml_rag import abc
from ml_rag.errors import DocumentError
from ml_rag.ingest.formats.common import Request, document
from ml_rag.ingest.formats.ocr import read_image


def parse_image(name: str, content: bytes, request: Request) -> abc.Document:
    """A block a page, with its number where there are several."""
    if not request.ocr:
        raise DocumentError(
            "document has no text", detail="it is an image", hint="Set ocr to true to read the text in it."
        )
    from PIL import Image, ImageOps, ImageSequence

    blocks = []
    # other decoders of the library are never tried, whatever the file claims to be
    with Image.open(BytesIO(content), formats=("PNG", "JPEG", "TIFF")) as image:
        pages = getattr(image, "n_frames", 1)
        media_type = image.get_format_mimetype()
        for number, frame in enumerate(ImageSequence.Iterator(image), start=1):
            upright = ImageOps.exif_transpose(frame).convert("RGB")
            blocks.append((read_image(upright, request.language), {"page": number} if pages > 1 else {}))
    if not any(text.strip() for text, _ in blocks):
        raise DocumentError("document has no text", detail="OCR found none in the image", hint="Leave it out.")
    return document("image", blocks, {"file_type": media_type} if media_type else None)
