"""PowerPoint presentations (OOXML): a block a slide, with its tables, charts and notes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from io import BytesIO
from typing import Any

from ml_rag import abc
from ml_rag.ingest.formats.archive import check_entities, core_properties, open_zip
from ml_rag.ingest.formats.common import Request, document, metadata, one_line, pipe_table

_MAX_GROUP_DEPTH = 100


def parse_pptx(_name: str, content: bytes, _request: Request) -> abc.Document:
    """Metadata of a block: ``{"slide": n}``, 1-based. Shapes are read from the top, notes follow the slide."""
    from pptx import Presentation

    with open_zip(content) as archive:
        check_entities(archive)
        meta = metadata(**core_properties(archive))
    slides = Presentation(BytesIO(content)).slides
    blocks = [("\n\n".join(_slide(slide)), {"slide": number}) for number, slide in enumerate(slides, 1)]
    return document("pptx", blocks, meta)


def _slide(slide: Any) -> Iterator[str]:
    title = slide.shapes.title
    if title is not None and title.has_text_frame and title.text_frame.text.strip():
        yield f"# {one_line(title.text_frame.text)}"
    title_id = None if title is None else title.shape_id
    yield from _shapes((shape for shape in slide.shapes if shape.shape_id != title_id), 0)
    if slide.has_notes_slide:
        frame = slide.notes_slide.notes_text_frame
        if frame is not None and frame.text.strip():
            yield f"Notes: {frame.text.strip()}"


def _place(shape: Any) -> tuple[int, int]:
    return (shape.top or 0, shape.left or 0)


def _shapes(shapes: Iterable[Any], depth: int) -> Iterator[str]:
    from pptx.shapes.group import GroupShape

    for shape in sorted(shapes, key=_place):
        if isinstance(shape, GroupShape):
            if depth > _MAX_GROUP_DEPTH:
                raise RecursionError("groups of shapes")
            yield from _shapes(shape.shapes, depth + 1)
        elif getattr(shape, "has_table", False):
            yield pipe_table([cell.text for cell in row.cells] for row in shape.table.rows)
        elif getattr(shape, "has_chart", False):
            yield from _chart(shape.chart)
        elif shape.has_text_frame:
            yield _text(shape)


def _text(shape: Any) -> str:
    paragraphs = [paragraph for paragraph in shape.text_frame.paragraphs if paragraph.text.strip()]
    # A placeholder with several paragraphs is what PowerPoint shows as a bulleted list.
    bullets = shape.is_placeholder and len(paragraphs) > 1
    lines = (f"{'  ' * p.level}- {one_line(p.text)}" if bullets else one_line(p.text) for p in paragraphs)
    return "\n".join(lines)


def _chart(chart: Any) -> Iterator[str]:
    if chart.has_title and chart.chart_title.has_text_frame:
        yield chart.chart_title.text_frame.text
    plots = list(chart.plots)
    categories = [str(category) for category in plots[0].categories] if plots else []
    series = [(str(one.name), list(one.values)) for plot in plots for one in plot.series]
    if categories and series:
        header = ["", *(name for name, _ in series)]
        yield pipe_table(
            [header, *([label, *(_value(values, i) for _, values in series)] for i, label in enumerate(categories))]
        )


def _value(values: list[Any], i: int) -> str:
    return format(values[i], ".15g") if i < len(values) and values[i] is not None else ""
