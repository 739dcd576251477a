"""Small documents in office formats, made in memory."""

from __future__ import annotations

import re
import zipfile
from email.message import EmailMessage
from io import BytesIO

_W = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"
_RELATIONS = "http://schemas.openxmlformats.org/package/2006/relationships"
_OFFICE = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"


def zipped(members: dict[str, str | bytes]) -> bytes:
    out = BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return out.getvalue()


def docx(body: str, *, prolog: str = "", **extra: str | bytes) -> bytes:
    """A Word document whose body is WordprocessingML; ``prolog`` stands before its root element."""
    types = "http://schemas.openxmlformats.org/package/2006/content-types"
    kind = "application/vnd.openxmlformats-officedocument.wordprocessingml.document.main+xml"
    return zipped(
        {
            "[Content_Types].xml": f'<Types xmlns="{types}"><Default Extension="xml" ContentType="application/xml"/>'
            '<Default Extension="rels" ContentType="application/vnd.openxmlformats-package.relationships+xml"/>'
            f'<Override PartName="/word/document.xml" ContentType="{kind}"/></Types>',
            "_rels/.rels": f'<Relationships xmlns="{_RELATIONS}"><Relationship Id="r1" '
            f'Type="{_OFFICE}/officeDocument" Target="word/document.xml"/></Relationships>',
            "word/document.xml": f'<?xml version="1.0"?>{prolog}<w:document xmlns:w="{_W}"><w:body>{body}</w:body>'
            "</w:document>",
            **extra,
        }
    )


def pptx(slides: list[tuple[str, str, str]]) -> bytes:
    """A presentation of (title, body, notes)."""
    from pptx import Presentation

    deck = Presentation()
    deck.core_properties.title = "A deck"
    for title, body, notes in slides:
        slide = deck.slides.add_slide(deck.slide_layouts[1])
        slide.shapes.title.text = title
        slide.placeholders[1].text = body
        if notes:
            slide.notes_slide.notes_text_frame.text = notes
    out = BytesIO()
    deck.save(out)
    return out.getvalue()


def deck_with(what: str, pattern: bytes, times: int) -> bytes:
    """A presentation with a table or a chart of two categories, in whose XML what fits ``pattern`` first stands so many
    times."""
    from pptx import Presentation
    from pptx.chart.data import CategoryChartData
    from pptx.enum.chart import XL_CHART_TYPE

    deck = Presentation()
    slide = deck.slides.add_slide(deck.slide_layouts[5])
    if what == "table":
        slide.shapes.add_table(2, 2, 0, 0, 9, 9).table.cell(0, 0).text = "deep"
    else:
        data = CategoryChartData()
        data.categories = ["deep", "two"]
        data.add_series("s", (1, 2.5))
        slide.shapes.add_chart(XL_CHART_TYPE.COLUMN_CLUSTERED, 0, 0, 9, 9, data)
    out, made = BytesIO(), BytesIO()
    deck.save(out)
    with zipfile.ZipFile(out) as source, zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as target:
        for name in source.namelist():
            content = source.read(name)
            if name.startswith(("ppt/slides/slide", "ppt/charts/chart")):
                content = re.sub(pattern, lambda found: found[0] * times, content, count=1, flags=re.DOTALL)
            target.writestr(name, content)
    return made.getvalue()


def xlsx(sheets: dict[str, list[list[object]]]) -> bytes:
    from openpyxl import Workbook

    book = Workbook()
    book.remove(book.active)
    for name, rows in sheets.items():
        sheet = book.create_sheet(name)
        for row in rows:
            sheet.append(row)
    out = BytesIO()
    book.save(out)
    return out.getvalue()


def epub(chapters: list[str], **extra: str | bytes) -> bytes:
    items = "".join(f'<item id="c{i}" href="c{i}.xhtml"/>' for i in range(len(chapters)))
    spine = "".join(f'<itemref idref="c{i}"/>' for i in range(len(chapters)))
    container = '<container><rootfiles><rootfile full-path="o/p.opf"/></rootfiles></container>'
    return zipped(
        {
            "mimetype": "application/epub+zip",
            "META-INF/container.xml": container,
            "o/p.opf": '<package xmlns:dc="http://purl.org/dc/elements/1.1/"><metadata><dc:title>A book</dc:title>'
            f"</metadata><manifest>{items}</manifest><spine>{spine}</spine></package>",
            **{f"o/c{i}.xhtml": f"<html><body>{text}</body></html>" for i, text in enumerate(chapters)},
            **extra,
        }
    )


def odt(body: str, kind: str = "text", *, styles: str = "", **extra: str | bytes) -> bytes:
    """OpenDocument: the content of its body, its ``styles``; ``kind`` is text, presentation or spreadsheet."""
    urn = "urn:oasis:names:tc:opendocument:xmlns"
    spaces = 'xmlns:xlink="http://www.w3.org/1999/xlink" ' + " ".join(
        f'xmlns:{short}="{urn}:{name}:1.0"'
        for short, name in (
            ("office", "office"),
            ("text", "text"),
            ("table", "table"),
            ("draw", "drawing"),
            ("presentation", "presentation"),
            ("svg", "svg-compatible"),
            ("style", "style"),
        )
    )
    return zipped(
        {
            "mimetype": f"application/vnd.oasis.opendocument.{kind}",
            "content.xml": f"<office:document-content {spaces}><office:automatic-styles>{styles}"
            f"</office:automatic-styles><office:body><office:{kind}>{body}</office:{kind}>"
            "</office:body></office:document-content>",
            **extra,
        }
    )


def text_pdf(pages: list[str]) -> bytes:
    """A PDF in Helvetica 12, a line of a page's text below the other, ``# `` before one makes it 20 points."""
    drawn = []
    for text in pages:
        page = []
        for i, line in enumerate(text.split("\n")):
            size = 20 if line.startswith("# ") else 12
            page.append(_shown(72, 720 - 15 * i, line.removeprefix("# "), size))
        drawn.append("\n".join(page))
    return _pdf(drawn)


def placed_pdf(*pages: list[tuple[float, float, str]], lines: list[tuple[float, float, float, float]] = ()) -> bytes:  # type: ignore[assignment]
    """A PDF in Helvetica 10: texts at (x, y), in this order, and on each page lines from (x, y) to (x, y)."""
    rules = "\n".join(f"{a} {b} m {c} {d} l S" for a, b, c, d in lines)
    return _pdf([rules + "\n" + "\n".join(_shown(x, y, text, 10) for x, y, text in page) for page in pages])


def sized_pdf(texts: list[tuple[float, float, str, int]]) -> bytes:
    """A page in Helvetica: texts at (x, y) of a size."""
    return _pdf(["\n".join(_shown(*text) for text in texts)])


def turned_pdf(degrees: int, page: list[tuple[float, float, str]], *, is_turned_back: bool = True) -> bytes:
    """The same of a page that is drawn turned, and turned back to be shown, or not."""
    back = {0: "1 0 0 1 0 0", 90: "0 1 -1 0 612 0", 180: "-1 0 0 -1 612 792", 270: "0 -1 1 0 0 792"}[degrees]
    drawn = _pdf([f"{back} cm\n" + "\n".join(_shown(x, y, text, 10) for x, y, text in page)])
    return drawn.replace(b"/MediaBox", b"/Rotate %d /MediaBox" % degrees) if is_turned_back else drawn


def _shown(x: float, y: float, text: str, size: int) -> str:
    escaped = text.replace("\\", "\\\\").replace("(", "\\(").replace(")", "\\)")
    return f"BT /F1 {size} Tf {x} {y} Td ({escaped}) Tj ET"


def written_pdf(text: str, *annotations: str, fields: str = "") -> bytes:
    """As ``text_pdf`` of one page, with annotations, whose numbers begin with 6; ``fields``: those of its form."""
    catalog = f"/Catalog /AcroForm << /Fields [{fields}] >>"
    made = text_pdf([text]).partition(b"xref\n")[0].replace(b"/Catalog", catalog.encode())
    places = " ".join(f"{number} 0 R" for number in range(6, 6 + len(annotations)))
    made = made.replace(b"/Type /Page /Parent", f"/Type /Page /Annots [{places}] /Parent".encode())
    more = "".join(f"{number} 0 obj\n<< {one} >>\nendobj\n" for number, one in enumerate(annotations, 6))
    return made + more.encode() + b"trailer\n<< /Root 1 0 R >>\n%%EOF\n"  # without a table, which pdfium makes again


def right_to_left_pdf(lines: list[list[tuple[float, str]]], *, is_beside: bool = False) -> bytes:
    """Lines of texts in Hebrew or Arabic that begin at x, in Courier 10. Lam and alef are one glyph.

    ``is_beside``: with the letters beside their glyphs, as Chromium writes them."""
    glyphs = sorted({glyph for line in lines for _, text in line for glyph in _glyphs(text)} - {" "})
    codes = {" ": " "} | {glyph: chr(0x41 + place) for place, glyph in enumerate(glyphs)}
    drawn = []
    for i, line in enumerate(lines):
        for x, text in line:
            shown = _glyphs(text)[::-1]
            left, y = x - 6 * len(shown), 700 - 15 * i
            if not is_beside:
                drawn.append(_shown(left, y, "".join(codes[glyph] for glyph in shown), 10))
                continue
            drawn.append(f"BT /F1 10 Tf {left} {y} Td")
            for glyph in shown:
                beside = glyph.encode("utf-16-be").hex()
                drawn.append(f"/Span << /ActualText <FEFF{beside}> >> BDC ({codes[glyph]}) Tj EMC 6 0 Td")
            drawn.append("ET")
    known = "\n".join(f"<{ord(code):02x}> <{glyph.encode('utf-16-be').hex()}>" for glyph, code in codes.items())
    cmap = (
        "/CIDInit /ProcSet findresource begin 12 dict begin begincmap 1 begincodespacerange <00> <ff> "
        f"endcodespacerange {len(codes)} beginbfchar\n{known}\nendbfchar endcmap end end"
    )
    made = _pdf(["\n".join(drawn)]).partition(b"xref\n")[0].replace(b"/Helvetica", b"/Courier /ToUnicode 6 0 R")
    more = f"6 0 obj\n<< /Length {len(cmap)} >>\nstream\n{cmap}\nendstream\nendobj\n"
    return made + more.encode() + b"trailer\n<< /Root 1 0 R >>\n%%EOF\n"  # without a table, which pdfium makes again


def _glyphs(word: str) -> list[str]:
    return re.findall("\u0644[\u0622\u0623\u0625\u0627]|.", word)


def _pdf(streams: list[str]) -> bytes:
    """A PDF of pages with these contents."""
    objects = ["<< /Type /Catalog /Pages 2 0 R >>", "", "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>"]
    kids = []
    for stream in streams:
        objects.append(f"<< /Length {len(stream)} >>\nstream\n{stream}\nendstream")
        objects.append(
            "<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Resources << /Font << /F1 3 0 R >> >> "
            f"/Contents {len(objects)} 0 R >>"
        )
        kids.append(f"{len(objects)} 0 R")
    objects[1] = f"<< /Type /Pages /Kids [{' '.join(kids)}] /Count {len(kids)} >>"
    out = b"%PDF-1.4\n"
    places = []
    for number, content in enumerate(objects, 1):
        places.append(len(out))
        out += f"{number} 0 obj\n{content}\nendobj\n".encode("latin-1")
    table = "".join(f"{place:010} 00000 n \n" for place in places)
    head = f"xref\n0 {len(objects) + 1}\n0000000000 65535 f \n{table}trailer\n"
    return out + f"{head}<< /Size {len(objects) + 1} /Root 1 0 R >>\nstartxref\n{len(out)}\n%%EOF\n".encode()


def image_pdf(text: str) -> bytes:
    """A PDF of one page that is an image of the text."""
    from PIL import Image, ImageDraw

    image = Image.new("L", (1200, 300), 255)
    ImageDraw.Draw(image).text((60, 60), text, fill=0, font_size=96)
    out = BytesIO()
    image.save(out, "PDF", resolution=150)
    return out.getvalue()


def picture_pdf(above: str, rows: list[str], below: str) -> bytes:
    """A PDF of one page: a line of text, a picture of a table with these rows, a line of text."""
    import pypdfium2 as pdfium  # type: ignore[import-untyped]
    from PIL import Image, ImageDraw

    image = Image.new("RGB", (1200, 120 * len(rows) + 60), (250, 220, 200))
    for i, row in enumerate(rows):
        ImageDraw.Draw(image).text((60, 60 + 120 * i), row, fill=0, font_size=60)
    pdf = pdfium.PdfDocument(text_pdf([above + "\n" * 35 + below]))
    page = pdf[0]
    picture = pdfium.PdfImage.new(pdf)
    picture.set_bitmap(pdfium.PdfBitmap.from_pil(image))
    picture.set_matrix(pdfium.PdfMatrix().scale(400, 400 * image.height / image.width).translate(50, 300))
    page.insert_obj(picture)
    page.gen_content()
    out = BytesIO()
    pdf.save(out)
    return out.getvalue()


def drawn(text: str, size: tuple[int, int] = (400, 200), kind: str = "PNG") -> bytes:
    """A picture file with a text in it."""
    from PIL import Image, ImageDraw

    image = Image.new("RGB", size, "white")
    ImageDraw.Draw(image).text((10, 10), text, fill=(0, 0, 0), font_size=40)
    out = BytesIO()
    image.save(out, kind)
    return out.getvalue()


def docx_with_pictures(*parts: str | bytes, alt: str = "", is_one: bool = False) -> bytes:
    """A Word document of paragraphs, or ``is_one``, of texts or the bytes of a PNG; ``alt``: what stands for these."""
    body, relations, files = "", "", {}
    for number, part in enumerate(parts):
        if isinstance(part, str):
            body += f"<w:p><w:r><w:t>{part}</w:t></w:r></w:p>"
            continue
        files[f"word/media/p{number}.png"] = part
        relations += f'<Relationship Id="p{number}" Type="{_OFFICE}/image" Target="media/p{number}.png"/>'
        body += (
            '<w:p><w:r><w:drawing><wp:inline xmlns:wp="http://schemas.openxmlformats.org/drawingml/2006/'
            f'wordprocessingDrawing"><wp:docPr id="1" name="p" descr="{alt}"/><a:graphic xmlns:a="http://schemas.openxmlformats.org/drawingml/2006/main">'
            '<a:graphicData uri="http://schemas.openxmlformats.org/drawingml/2006/picture"><pic:pic '
            'xmlns:pic="http://schemas.openxmlformats.org/drawingml/2006/picture"><pic:blipFill>'
            f'<a:blip xmlns:r="{_OFFICE}" r:embed="p{number}"/></pic:blipFill></pic:pic></a:graphicData></a:graphic>'
            "</wp:inline></w:drawing></w:r></w:p>"
        )
    files["word/_rels/document.xml.rels"] = f'<Relationships xmlns="{_RELATIONS}">{relations}</Relationships>'
    return docx(body.replace("</w:p><w:p>", "") if is_one else body, **files)


def odf_with_pictures(body: str, *pictures: bytes, kind: str = "text") -> bytes:
    """As ``odt``, where ``{0}`` stands for a frame with the first picture, and so on."""
    forms = [(f"Pictures/{i}.svg", f"Pictures/{i}.png") for i in range(len(pictures))]
    image = '<draw:image xlink:href="{}"/><draw:image xlink:href="./{}"/>'
    frames = (f"<draw:frame>{image.format(*names)}</draw:frame>" for names in forms)
    files = {name: picture for names, picture in zip(forms, pictures, strict=True) for name in names}
    return odt(body.format(*frames), kind, **files)


def mail_with_pictures(text: str, *pictures: tuple[str, str, bytes]) -> bytes:
    """A mail with attachments: file name, media type, content."""
    mail = EmailMessage()
    mail["Subject"] = "Hello"
    mail.set_content(text)
    for name, media_type, content in pictures:
        mail.add_attachment(content, *media_type.split("/"), filename=name, disposition="inline")
    return mail.as_bytes()


def pptx_with_picture(title: str, picture: bytes) -> bytes:
    """A presentation of one slide, with a picture in a group of shapes."""
    from pptx import Presentation

    deck = Presentation()
    slide = deck.slides.add_slide(deck.slide_layouts[5])
    slide.shapes.title.text = title
    slide.shapes.add_group_shape().shapes.add_picture(BytesIO(picture), 0, 0)
    out = BytesIO()
    deck.save(out)
    return out.getvalue()
