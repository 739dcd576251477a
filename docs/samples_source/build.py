"""Make the binary sample documents in docs/samples/ from the Markdown beside this file.

    python docs/samples_source/build.py

needs python-docx, python-pptx, openpyxl, reportlab and markdown-it-py, which the product itself does not all need.
The results are committed; run this again after changing a source.
what-is-ml-rag.md and options.html are written by hand.
"""

from __future__ import annotations

import html
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from markdown_it import MarkdownIt

HERE = Path(__file__).parent
SAMPLES = HERE.parent / "samples"
#: column widths of the PDF tables by their number of columns
SHARES = {3: (0.3, 0.2, 0.5), 5: (0.14, 0.14, 0.24, 0.32, 0.16)}


@dataclass
class Piece:
    """A block of a document: ``kind`` is h1, h2, text, list, code or table."""

    kind: str
    #: text of h1, h2, text and code; inline code keeps its backquotes
    text: str = ""
    items: list[str] = field(default_factory=list)
    rows: list[list[str]] = field(default_factory=list)


def read(name: str) -> list[Piece]:
    """The blocks of a Markdown file; every construct that the sources do not use is an error."""
    pieces: list[Piece] = []
    inside = ""
    for token in MarkdownIt("commonmark").enable("table").parse((HERE / name).read_text(encoding="utf-8")):
        match token.type:
            case "heading_open":
                inside = token.tag
            case "bullet_list_open":
                inside = "list"
                pieces.append(Piece("list"))
            case "table_open":
                inside = "table"
                pieces.append(Piece("table"))
            case "tr_open":
                pieces[-1].rows.append([])
            case "heading_close" | "bullet_list_close" | "table_close":
                inside = ""
            case "fence":
                pieces.append(Piece("code", token.content.rstrip("\n")))
            case "inline":
                text = token.content.replace("\n", " ")
                if inside == "list":
                    pieces[-1].items.append(text)
                elif inside == "table":
                    pieces[-1].rows[-1].append(text)
                else:
                    pieces.append(Piece(inside or "text", text))
            case "paragraph_open" | "paragraph_close" | "list_item_open" | "list_item_close" | "tr_close":
                pass
            case other if other.startswith(("thead", "tbody", "th_", "td_")):
                pass
            case other:
                raise ValueError(f"{name}: cannot render {other}")
    return pieces


def runs(text: str) -> list[tuple[str, bool]]:
    """Text split at its backquotes: (piece, is code)."""
    return [(part, index % 2 == 1) for index, part in enumerate(text.split("`")) if part]


def plain(text: str) -> str:
    return text.replace("`", "")


def build_pdf(name: str) -> None:
    from reportlab.lib import colors
    from reportlab.lib.pagesizes import A4
    from reportlab.lib.styles import ParagraphStyle, getSampleStyleSheet
    from reportlab.lib.units import cm
    from reportlab.platypus import Paragraph, Preformatted, SimpleDocTemplate, Spacer, Table, TableStyle

    base = getSampleStyleSheet()
    body = ParagraphStyle("body", parent=base["BodyText"], fontSize=10, leading=14, spaceAfter=6)
    cell = ParagraphStyle("cell", parent=body, fontSize=9, leading=11, spaceAfter=0)
    code = ParagraphStyle("code", parent=base["Code"], fontSize=7.5, leading=10, leftIndent=6, spaceAfter=8)
    styles = {
        "h1": ParagraphStyle("h1", parent=base["Title"], alignment=0, fontSize=20, spaceAfter=12),
        "h2": ParagraphStyle("h2", parent=base["Heading2"], fontSize=13, spaceBefore=10, spaceAfter=4),
    }

    def markup(text: str) -> str:
        return "".join(
            f'<font face="Courier">{html.escape(part)}</font>' if is_code else html.escape(part)
            for part, is_code in runs(text)
        )

    width = A4[0] - 4.4 * cm
    flow: list[Any] = []
    pieces = read(f"{name}.md")
    for piece in pieces:
        if piece.kind == "code":
            flow.append(Preformatted(piece.text, code, maxLineLength=104, splitChars=" ,", newLineChars="  "))
        elif piece.kind == "table":
            table = Table(
                [[Paragraph(markup(value), cell) for value in row] for row in piece.rows],
                colWidths=[width * share for share in SHARES[len(piece.rows[0])]],
                repeatRows=1,
            )
            table.setStyle(
                TableStyle(
                    [
                        ("GRID", (0, 0), (-1, -1), 0.4, colors.lightgrey),
                        ("BACKGROUND", (0, 0), (-1, 0), colors.whitesmoke),
                        ("VALIGN", (0, 0), (-1, -1), "TOP"),
                    ]
                )
            )
            flow += [table, Spacer(1, 8)]
        else:
            flow.append(Paragraph(markup(piece.text), styles.get(piece.kind, body)))

    def footer(canvas: Any, document: Any) -> None:
        canvas.setFont("Helvetica", 8)
        canvas.drawCentredString(A4[0] / 2, 1.2 * cm, f"{plain(pieces[0].text)} · page {document.page}")

    SimpleDocTemplate(
        str(SAMPLES / f"{name}.pdf"),
        pagesize=A4,
        leftMargin=2.2 * cm,
        rightMargin=2.2 * cm,
        topMargin=2 * cm,
        bottomMargin=2 * cm,
        title=plain(pieces[0].text),
        author="ml_rag",
        invariant=True,
    ).build(flow, onFirstPage=footer, onLaterPages=footer)


def build_docx(name: str) -> None:
    from docx import Document
    from docx.shared import Pt

    document = Document()
    document.styles["Normal"].font.size = Pt(11)
    pieces = read(f"{name}.md")
    document.core_properties.title = plain(pieces[0].text)
    document.core_properties.author = "ml_rag"

    def write(paragraph: Any, text: str, size: float | None = None) -> None:
        for part, is_code in runs(text):
            run = paragraph.add_run(part)
            if is_code:
                run.font.name = "Courier New"
            if size:
                run.font.size = Pt(size)

    for piece in pieces:
        if piece.kind in ("h1", "h2"):
            document.add_heading(plain(piece.text), level=int(piece.kind[1]))
        elif piece.kind == "code":
            run = document.add_paragraph().add_run(piece.text)
            run.font.name, run.font.size = "Courier New", Pt(9)
        elif piece.kind == "table":
            table = document.add_table(rows=0, cols=len(piece.rows[0]), style="Light Grid Accent 1")
            for row in piece.rows:
                for target, value in zip(table.add_row().cells, row, strict=True):
                    write(target.paragraphs[0], value, 9.5)
            document.add_paragraph()
        else:
            write(document.add_paragraph(), piece.text)
    document.save(str(SAMPLES / f"{name}.docx"))


def build_pptx(name: str) -> None:
    """h1 and the text below it make the title slide, each h2 the title of another."""
    from pptx import Presentation
    from pptx.enum.text import PP_ALIGN
    from pptx.util import Inches, Pt

    deck = Presentation()
    deck.slide_width, deck.slide_height = Inches(10), Inches(5.625)
    pieces = read(f"{name}.md")
    deck.core_properties.title = plain(pieces[0].text)
    deck.core_properties.author = "ml_rag"

    def place(shape: Any, left: float, top: float, width: float, height: float) -> None:
        shape.left, shape.top, shape.width, shape.height = (Inches(value) for value in (left, top, width, height))

    slide: Any = None
    for piece in pieces:
        if piece.kind == "h1":
            slide = deck.slides.add_slide(deck.slide_layouts[0])
            slide.shapes.title.text = piece.text
            place(slide.shapes.title, 0.7, 1.4, 8.6, 1.2)
            place(slide.placeholders[1], 0.7, 2.7, 8.6, 1)
        elif piece.kind == "text":
            slide.placeholders[1].text = plain(piece.text)
        elif piece.kind == "h2":
            slide = deck.slides.add_slide(deck.slide_layouts[1])
            slide.shapes.title.text = plain(piece.text)
            place(slide.shapes.title, 0.6, 0.3, 8.8, 0.9)
            slide.shapes.title.text_frame.paragraphs[0].alignment = PP_ALIGN.LEFT
            slide.shapes.title.text_frame.paragraphs[0].runs[0].font.size = Pt(30)
        elif piece.kind == "list":
            place(slide.placeholders[1], 0.6, 1.3, 8.8, 3.9)
            frame = slide.placeholders[1].text_frame
            for index, item in enumerate(piece.items):
                paragraph = frame.paragraphs[0] if index == 0 else frame.add_paragraph()
                paragraph.space_after = Pt(8)
                for part, is_code in runs(item):
                    run = paragraph.add_run()
                    run.text, run.font.size = part, Pt(15 if is_code else 18)
                    if is_code:
                        run.font.name = "Courier New"
        elif piece.kind == "table":
            body = slide.placeholders[1].element
            body.getparent().remove(body)
            rows, columns = len(piece.rows), len(piece.rows[0])
            shape = slide.shapes.add_table(rows, columns, Inches(0.6), Inches(1.3), Inches(8.8), Inches(0.4 * rows))
            shape.table.columns[0].width, shape.table.columns[1].width = Inches(3), Inches(5.8)
            for r, row in enumerate(piece.rows):
                for c, value in enumerate(row):
                    target = shape.table.cell(r, c)
                    target.text = plain(value)
                    target.text_frame.paragraphs[0].runs[0].font.size = Pt(13)
        else:
            raise ValueError(f"{name}: a slide cannot hold {piece.kind}")
    deck.save(str(SAMPLES / f"{name}.pptx"))


def build_xlsx(name: str) -> None:
    """Each h1 makes a sheet: the text below it the first row, then the table."""
    from openpyxl import Workbook
    from openpyxl.styles import Alignment, Font

    book = Workbook()
    book.remove(book.worksheets[0])
    sheet: Any = None
    for piece in read(f"{name}.md"):
        if piece.kind == "h1":
            sheet = book.create_sheet(plain(piece.text))
        elif piece.kind == "text":
            sheet.append([plain(piece.text)])
        elif piece.kind == "table":
            for row in piece.rows:
                sheet.append([plain(value) for value in row])
            for target in sheet[2]:
                target.font = Font(bold=True)
            for row in sheet.iter_rows(min_row=3):
                for target in row:
                    target.alignment = Alignment(wrap_text=True, vertical="top")
            widths = [12, 40, 50, 60] if len(piece.rows[0]) == 4 else [45, 100]
            for letter, width in zip("ABCD", widths, strict=False):
                sheet.column_dimensions[letter].width = width
            sheet.freeze_panes = "A3"
        else:
            raise ValueError(f"{name}: a sheet cannot hold {piece.kind}")
    book.properties.title, book.properties.creator = "Errors of ml_rag", "ml_rag"
    book.save(SAMPLES / f"{name}.xlsx")


def main() -> None:
    build_pdf("thresholds-and-overlap")
    build_pdf("models-and-sizing")
    build_docx("vector-stores")
    build_pptx("loading-documents")
    build_xlsx("errors")


if __name__ == "__main__":
    main()
