"""Word documents (OOXML) through mammoth and the HTML converter: headings, lists, tables, footnotes, text boxes."""

from __future__ import annotations

from io import BytesIO
from typing import Any

from ml_rag import abc
from ml_rag.ingest.formats.archive import check_entities, core_properties, open_zip
from ml_rag.ingest.formats.common import Request, document
from ml_rag.ingest.formats.html import html_blocks

# mammoth knows headings; the title styles are left to the caller.
_STYLES = """
p[style-name='Title'] => h1:fresh
p[style-name='Subtitle'] => p:fresh
p[style-name='Heading 7'] => h6:fresh
p[style-name='Heading 8'] => h6:fresh
p[style-name='Heading 9'] => h6:fresh
b => span
i => span
"""


def parse_docx(_name: str, content: bytes, request: Request) -> abc.Document:
    """One block, but for pictures that are described: the format has no page borders. Links keep their text."""
    import mammoth  # type: ignore[import-untyped]

    with open_zip(content) as archive:
        check_entities(archive)
        meta = core_properties(archive)

    marks: list[str] = []

    def convert_image(image: Any) -> list[Any]:
        def read() -> bytes:
            with image.open() as file:
                found: bytes = file.read()
                return found

        if request.pictures is None or not (mark := request.pictures.mark(read)):
            return []
        marks.append(mark)
        return [mammoth.html.element("img", {"src": str(len(marks) - 1)})]

    html = mammoth.convert_to_html(BytesIO(content), convert_image=convert_image, style_map=_STYLES).value
    return document("docx", html_blocks(html, request.pictures, lambda source: marks[int(source)], {}), meta)
