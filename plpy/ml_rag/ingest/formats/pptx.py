"""PowerPoint presentations (OOXML): a block a slide, with its tables, charts and notes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from io import BytesIO
from typing import Any

from ml_rag import abc
from ml_rag.ingest.formats.archive import check_entities, core_properties, open_zip
from ml_rag.ingest.formats.common import Request, document, one_line, pipe_table, power
from ml_rag.ingest.formats.ooxml import chart, diagram, formula, run_of, transitional
from ml_rag.ingest.formats.running import may_be_text, running

_MAX_GROUP_DEPTH = 100
#: of the height of a slide, above and below: where running lines stand
_EDGE = 0.12
_DRAWING = "{http://schemas.openxmlformats.org/drawingml/2006/main}"


def parse_pptx(_name: str, content: bytes, request: Request) -> abc.Document:
    """Metadata of a block: ``{"slide": n}``, 1-based. Shapes are read from the top, notes follow the slide, then
    descriptions of its pictures."""
    from pptx import Presentation

    with open_zip(content) as archive:
        check_entities(archive)
        meta = core_properties(archive)
        content = transitional(archive, content)
    deck = Presentation(BytesIO(content))
    slides: dict[int, Any] = {}
    seen = set()
    for number, slide in enumerate(deck.slides, 1):
        if slide.part not in seen:  # a list of slides can name one as often as it likes
            seen.add(slide.part)
            slides[number] = slide
            _choose(slide._element)
            with contextlib.suppress(KeyError):  # without a layout it has no places either
                layout = slide.slide_layout
                _look_up(layout.placeholders, lambda one: one.element.ph_idx)
                _look_up(layout.slide_master.placeholders, lambda one: one.ph_type)
    edges = {number: _edges(slide, number, deck.slide_height or 0) for number, slide in slides.items()}
    found, shown = running({number: list(texts.values()) for number, texts in edges.items()})
    blocks: list[tuple[str, dict[str, Any]]] = []
    for number, slide in slides.items():
        repeated = {element for element, text in edges[number].items() if text in found[number]}
        blocks.append(("\n\n".join(_slide(slide, repeated)), {"slide": number}))
        if request.pictures is not None:
            for draw in _pictures(slide.shapes, 0):
                blocks += request.pictures.block(draw, {"slide": number})
    return document("pptx", blocks, {**meta, "running_lines": shown} if shown else meta)


def _look_up(places: Any, key: Callable[[Any], Any]) -> None:
    """Have the place that a shape takes over from a layout found at once: python-pptx goes through all for each."""
    if "get" not in vars(places):
        known = {key(one): one for one in reversed(list(places))}
        places.get = lambda idx, default=None: known.get(idx, default)


def _choose(root: Any) -> None:
    """Shapes with a formula stand in a choice, which python-pptx does not look into: what PowerPoint takes put in its
    place, formulas as text."""
    for choice in list(root.iter("{http://schemas.openxmlformats.org/markup-compatibility/2006}AlternateContent")):
        taken = choice.find("{*}Choice")
        for one in taken if taken is not None else ():
            choice.addprevious(one)
        choice.getparent().remove(choice)
    for ink in list(root.iter("{http://schemas.openxmlformats.org/presentationml/2006/main}contentPart")):
        ink.getparent().remove(ink)  # python-pptx takes it for a shape, and fails
    for one in list(root.iter("{http://schemas.microsoft.com/office/drawing/2010/main}m")):
        one.getparent().replace(one, run_of([formula(one)], _DRAWING, one))
    for raised in root.iterfind(f".//{_DRAWING}rPr[@baseline]"):
        run, before = raised.getparent(), raised.getparent().getprevious()
        text = run.find(f"{_DRAWING}t")
        if raised.get("baseline")[:1] in {*"123456789"} and before is not None and text is not None:
            text.text = power(before.findtext(f"{_DRAWING}t") or "", text.text or "")


def _edges(slide: Any, number: int, height: int) -> dict[Any, str]:
    """The texts of boxes at the top and the bottom, but for the title, by their elements."""
    title = getattr(slide.shapes.title, "_element", None)
    texts = {
        shape._element: one_line(shape.text_frame.text)
        for shape in slide.shapes
        if shape.has_text_frame and shape._element is not title and shape.top is not None and shape.height is not None
        if shape.top + shape.height <= _EDGE * height or shape.top >= (1 - _EDGE) * height
    }
    return {element: text for element, text in texts.items() if not may_be_text(text, number)}


def _is_running(shape: Any) -> bool:
    """Whether it is the place of a footer, a date or the number of the slide."""
    from pptx.enum.shapes import PP_PLACEHOLDER

    places = (PP_PLACEHOLDER.FOOTER, PP_PLACEHOLDER.DATE, PP_PLACEHOLDER.SLIDE_NUMBER)
    return shape.is_placeholder and shape.placeholder_format.type in places


def _slide(slide: Any, repeated: set[Any]) -> Iterator[str]:
    title = slide.shapes.title
    if title is not None and title.has_text_frame and title.text_frame.text.strip():
        yield f"# {one_line(title.text_frame.text)}"
    left_out = repeated if title is None else {*repeated, title._element}
    shapes = (shape for shape in slide.shapes if shape._element not in left_out and not _is_running(shape))
    yield from _shapes(shapes, 0)
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
            # its rows and cells by number, as python-pptx has them, would each be looked for from the first one
            yield pipe_table([cell.text for cell in row.tc_lst] for row in shape.table._tbl.tr_lst)
        elif getattr(shape, "has_chart", False):
            yield from chart(shape.chart._chartSpace)
        elif shape.has_text_frame:
            yield _text(shape)
        else:
            for one in shape._element.iter("{*}relIds"):
                key = next((value for key, value in one.items() if key.endswith("}dm")), "")
                if key in shape.part.rels and not shape.part.rels[key].is_external:
                    yield "\n".join(diagram(shape.part.related_part(key).blob))


def _pictures(shapes: Iterable[Any], depth: int) -> Iterator[Callable[[], bytes]]:
    """What reads each picture; one that is elsewhere cannot be read."""
    from pptx.shapes.group import GroupShape

    for shape in sorted(shapes, key=_place):
        if isinstance(shape, GroupShape):
            if depth > _MAX_GROUP_DEPTH:
                raise RecursionError("groups of shapes")
            yield from _pictures(shape.shapes, depth + 1)
        elif shape._element.tag.endswith("}pic"):

            def read(shape: Any = shape) -> bytes:
                content: bytes = shape.image.blob
                return content

            yield read


def _text(shape: Any) -> str:
    paragraphs = [paragraph for paragraph in shape.text_frame.paragraphs if paragraph.text.strip()]
    # A placeholder with several paragraphs is what PowerPoint shows as a bulleted list.
    bullets = shape.is_placeholder and len(paragraphs) > 1
    lines = (f"{'  ' * p.level}- {one_line(p.text)}" if bullets else one_line(p.text) for p in paragraphs)
    return "\n".join(lines)
