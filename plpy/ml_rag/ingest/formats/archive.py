"""ZIP containers (OOXML, ODF, EPUB): bounded before a member is read, told apart, their XML without entities."""

from __future__ import annotations

import re
import zipfile
from io import BytesIO
from typing import Any

from ml_rag.archives import MAX_RATIO, SMALL, ZIP_METHODS
from ml_rag.errors import DocumentError
from ml_rag.ingest.formats.common import damaged, dublin_core, encrypted, unknown

MAX_MEMBERS = 20_000
MAX_UNPACKED = 512 * 1024 * 1024
#: what is said of an archive that is not
FOLDERS = "A file that ends in .zip or .tar is loaded as a folder, unless it lies in an archive itself."

_ODF = {
    "application/vnd.oasis.opendocument.text": "odt",
    "application/vnd.oasis.opendocument.text-template": "odt",
    "application/vnd.oasis.opendocument.text-web": "odt",
    "application/vnd.oasis.opendocument.text-master": "odt",
    "application/vnd.oasis.opendocument.presentation": "odp",
    "application/vnd.oasis.opendocument.presentation-template": "odp",
    "application/vnd.oasis.opendocument.spreadsheet": "ods",
    "application/vnd.oasis.opendocument.spreadsheet-template": "ods",
}
_OOXML = (("word/document", "docx"), ("ppt/presentation", "pptx"), ("xl/workbook", "xlsx"))
#: errors of libxml2 after which it continues with all the text that follows
_HARMLESS = frozenset(
    f"ERR_{name}"
    for name in (
        "INVALID_CHAR", "INVALID_ENCODING", "UNDECLARED_ENTITY", "ENTITYREF_SEMICOL_MISSING", "NAME_REQUIRED",
        "ATTRIBUTE_REDEFINED", "RESERVED_XML_NAME", "HYPHEN_IN_COMMENT", "MISPLACED_CDATA_END", "TAG_NOT_FINISHED",
    )
)  # fmt: skip
_ENTITY = re.compile(
    b"|".join(re.escape("<!ENTITY".encode(encoding)) for encoding in ("ascii", "utf-16-le", "utf-16-be"))
)


def open_zip(content: bytes) -> zipfile.ZipFile:
    """The archive, known to be of bearable size. Raises DocumentError for a broken, encrypted or oversized one.

    ``zipfile`` gives no more of a member than its declared size; what it unpacks at once, the process bounds.
    """
    try:
        archive = zipfile.ZipFile(BytesIO(content))
    except (zipfile.BadZipFile, NotImplementedError, ValueError, EOFError, OSError) as error:
        raise damaged(f"ZIP container: {error}") from error
    members = archive.infolist()
    unpacked = sum(member.file_size for member in members)
    if len(members) > MAX_MEMBERS or unpacked > MAX_UNPACKED or unpacked > max(SMALL, MAX_RATIO * len(content)):
        raise DocumentError(
            "document unpacks to too much data",
            detail=f"{len(content)} bytes hold {len(members)} members of {unpacked} bytes in sum",
            hint="Split the document.",
        )
    if any(member.compress_type not in ZIP_METHODS for member in members):
        raise damaged("ZIP container: it is packed in a way that documents are not")
    if any(member.flag_bits & 1 for member in members):
        raise encrypted("ZIP members are encrypted")
    return archive


def detect_zip(content: bytes) -> str:
    """The document format in a ZIP container. Raises DocumentError where it is none of ours."""
    archive = open_zip(content)
    names = set(archive.namelist())
    if "mimetype" in names:
        kind = archive.read("mimetype")[:200].decode("ascii", "replace").strip()
        if kind == "application/epub+zip":
            return "epub"
        if kind in _ODF:
            return _ODF[kind]
    if "META-INF/container.xml" in names:
        return "epub"
    if "[Content_Types].xml" in names:
        for prefix, format_name in _OOXML:
            if any(name.startswith(prefix) and name.endswith(".xml") for name in names):
                return format_name
        if any(name.endswith("workbook.bin") for name in names):
            raise unknown("the content is an XLSB workbook", "Save it as XLSX.")
    raise unknown("the content is a ZIP archive", f"Unpack it. {FOLDERS}")


def check_entities(archive: zipfile.ZipFile) -> None:
    """Raise DocumentError where an XML member declares entities: no office program writes them, attackers do."""
    for member in archive.infolist():
        if member.filename.lower().endswith((".xml", ".rels", ".opf", ".ncx", ".vml")):
            refuse_entities(archive.read(member))


def refuse_entities(content: bytes) -> None:
    if _ENTITY.search(content):
        raise DocumentError(
            "document declares XML entities", detail="<!ENTITY in its XML", hint="Save it again without a DTD."
        )


def parse_xml(content: bytes) -> Any:
    """The root element (lxml). No DTD is loaded, no entity expanded, no network used.

    Raises DocumentError where text could be lost by what is wrong with it.
    """
    from lxml import etree  # type: ignore[import-untyped]

    refuse_entities(content)
    # the process bounds its size; a tree can be 2048 elements deep
    parser = etree.XMLParser(resolve_entities=False, no_network=True, load_dtd=False, huge_tree=True, recover=True)
    try:
        root = etree.fromstring(content, parser)
    except etree.XMLSyntaxError as empty:
        raise damaged(f"XML: {empty}") from empty
    for error in parser.error_log:
        if error.level == etree.ErrorLevels.FATAL and error.type_name not in _HARMLESS:
            raise damaged(f"XML: {error.message.strip()}, line {error.line}")
    if root is None:
        raise damaged("XML: no root")
    return root


def core_properties(archive: zipfile.ZipFile) -> dict[str, Any]:
    """Title and author of an OOXML document."""
    if "docProps/core.xml" not in archive.namelist():
        return {}
    content = archive.read("docProps/core.xml")
    try:
        return dublin_core(parse_xml(content))
    except DocumentError:
        return {}
