"""Word documents (OOXML) through mammoth and the HTML converter: headings, lists, tables, footnotes, text boxes."""

from __future__ import annotations

from io import BytesIO
from typing import Any

from ml_rag import abc
from ml_rag.ingest.formats.archive import check_entities, core_properties, open_zip
from ml_rag.ingest.formats.common import Request, document, metadata
from ml_rag.ingest.formats.html import html_to_markdown

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


def parse_docx(_name: str, content: bytes, _request: Request) -> abc.Document:
    """One block: the format has no page borders. Images are left out, links keep their text."""
    import mammoth  # type: ignore[import-untyped]

    with open_zip(content) as archive:
        check_entities(archive)
        meta = metadata(**core_properties(archive))

    def no_image(_image: Any) -> list[Any]:
        return []

    html = mammoth.convert_to_html(BytesIO(content), convert_image=no_image, style_map=_STYLES).value
    return document("docx", [(html_to_markdown(html), {})], meta)
