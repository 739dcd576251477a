"""docs.py DSN: the parts of the documentation that the installed extension says itself.

Writes docs/reference.md from COMMENT ON, docs/options.md from ml_rag.option, and the lists of document formats
(``<!-- formats -->``) and of engines (``<!-- engines -->``) in other pages from the Python package.
"""

from __future__ import annotations

import json
import re
import sys
import textwrap
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ml_rag.ingest.formats import FORMATS
from ml_rag.server.kinds import ENGINES

if TYPE_CHECKING:
    from psycopg import Connection

ROOT = Path(__file__).resolve().parents[1]
REFERENCE, OPTIONS_PAGE = Path("docs/reference.md"), Path("docs/options.md")
LISTS = {
    "formats": lambda: ", ".join(code(name) for name in FORMATS),
    "engines": lambda: ", ".join(f"{code(name)} ({kind.runs})" for name, kind in ENGINES.items()),
}
LIST = re.compile(r"<!-- (formats|engines) -->\n.*?<!-- end of \1 -->", re.DOTALL)

OPTIONS = """
SELECT routine, name, type, minimum, maximum, choices, default_value, default_rule, auto_value IS NOT NULL, auto_value,
  keys_of, description
FROM ml_rag.option ORDER BY cmin::text::bigint
"""

# without trigger functions, which users do not call
ROUTINES = """
SELECT CASE n.nspname WHEN 'ml_rag' THEN 'ml_rag.' ELSE '' END, p.proname, pg_get_function_arguments(p.oid),
  CASE WHEN p.prokind = 'p' THEN NULL ELSE pg_get_function_result(p.oid) END,
  (SELECT string_agg(CASE a.grantee WHEN 0 THEN 'everybody' ELSE a.grantee::regrole::text END, ', ' ORDER BY 1)
   FROM aclexplode(p.proacl) AS a WHERE a.grantee <> p.proowner AND a.grantee <> 'pg_read_all_stats'::regrole),
  obj_description(p.oid, 'pg_proc')
FROM pg_proc AS p JOIN pg_namespace AS n ON n.oid = p.pronamespace
JOIN pg_depend AS d ON d.classid = 'pg_proc'::regclass AND d.objid = p.oid AND d.deptype = 'e'
JOIN pg_extension AS e ON d.refclassid = 'pg_extension'::regclass AND d.refobjid = e.oid AND e.extname = 'ml_rag'
WHERE p.proname !~ '^_' AND p.prorettype NOT IN ('trigger'::regtype, 'event_trigger'::regtype)
ORDER BY n.nspname = 'ml_rag', p.proname, p.pronargs, p.oid::regprocedure::text
"""

RELATIONS = """
SELECT CASE c.relkind WHEN 'c' THEN 'type' WHEN 'v' THEN 'view' WHEN 'm' THEN 'materialized view' ELSE 'table' END,
  'ml_rag.' || c.relname, array(SELECT ARRAY[a.attname, format_type(a.atttypid, a.atttypmod)]
    FROM pg_attribute AS a WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped ORDER BY a.attnum),
  CASE c.relkind WHEN 'c' THEN obj_description(c.reltype, 'pg_type') ELSE obj_description(c.oid, 'pg_class') END
FROM pg_class AS c
JOIN pg_depend AS d ON d.deptype = 'e' AND CASE c.relkind
  WHEN 'c' THEN d.classid = 'pg_type'::regclass AND d.objid = c.reltype
  ELSE d.classid = 'pg_class'::regclass AND d.objid = c.oid END
JOIN pg_extension AS e ON d.refclassid = 'pg_extension'::regclass AND d.refobjid = e.oid AND e.extname = 'ml_rag'
WHERE c.relname !~ '^_' AND CASE c.relkind WHEN 'c' THEN true WHEN 'S' THEN false
  ELSE has_any_column_privilege('ml_rag_user', c.oid, 'SELECT') END
ORDER BY c.relkind = 'c', c.relname
"""

SETTINGS = "SELECT name, default_value, description FROM ml_rag.setting"

HEAD = """# Reference

Made by `make docs` from the comments and records of the installed extension; psql shows the same:
`SELECT obj_description('ml_rag.filter'::regproc)`. All run with the caller's rights; names that begin with `_` are
internal. After the routines come [settings](#settings).
[options.md](options.md) has the options."""

OPTIONS_HEAD = """# Options

Made by `make docs` from `ml_rag.option`, which psql shows, too. JSON null means the default. An unknown key, a wrong
type or a value out of range is error 22023, whose detail says what is allowed. `"auto"` stands for the value in its
column. What a call does not say is taken from its preset, the role, and the database:
[answers.md](answers.md#options-by-name-and-for-everybody)."""


@dataclass(frozen=True)
class Option:
    """A record of ml_rag.option."""

    routine: str
    name: str
    type: str
    minimum: Any
    maximum: Any
    choices: list[str] | None
    default: Any
    default_rule: str | None
    has_auto: bool
    auto: Any
    keys_of: str | None
    description: str

    @property
    def allowed(self) -> str:
        """The values it takes."""
        if self.type in ("integer", "number"):
            unbounded = self.maximum is None or self.maximum == 2**31 - 1
            limits = f"≥ {self.minimum}" if unbounded else f"{self.minimum}–{self.maximum}"
            return f"{self.type} {limits}"
        if self.choices:
            return ", ".join(self.choices)
        return {"text[]": "array of texts", "vector": "array of numbers, or a vector as text"}.get(self.type, self.type)

    @property
    def default_shown(self) -> str:
        """What holds where it is left out."""
        if self.default_rule:
            return styled(self.default_rule)
        if self.default is None:
            return ""
        if isinstance(self.default, str):
            return self.default if self.choices else code(self.default)
        return json.dumps(self.default)

    @property
    def auto_shown(self) -> str:
        """What "auto" stands for."""
        if not self.has_auto:
            return ""
        return "decided for each question" if self.auto is None else json.dumps(self.auto)


def code(text: str) -> str:
    return f"`{text}`"


_CODE = re.compile(r'\[\{.*\}\]|\{.*\}|\["[^\]]*\]|"[^"]*"|\bml_rag\.[a-z_]+\b|\b[a-z][a-z0-9]*(?:_[a-z0-9]+)+\b')
_LINK = re.compile(r"\b(docs/[\w/]+\.md)(#[\w-]+)?")


def styled(text: str, folder: str = "") -> str:
    """A plain description in Markdown: names as code, documents as links from a folder."""
    parts, end = [], 0
    for link in _LINK.finditer(text):
        name = link[1].removeprefix(folder)
        parts += [_CODE.sub(lambda found: code(found[0]), text[end : link.start()]), f"[{name}]({name}{link[2] or ''})"]
        end = link.end()
    return "".join([*parts, _CODE.sub(lambda found: code(found[0]), text[end:])])


def row(*cells: str) -> str:
    return "|" + "|".join(f" {cell} ".replace("|", "\\|") if cell else " " for cell in cells) + "|"


def option_table(options: list[Option], folder: str = "") -> str:
    """The options of one routine."""
    with_auto = any(option.has_auto for option in options)
    head = ["option", "type, range", *(['`"auto"`'] if with_auto else []), "default", ""]
    lines = [row(*head), "|" + "---|" * len(head)]
    for o in options:
        auto = [o.auto_shown] if with_auto else []
        lines.append(row(code(o.name), o.allowed, *auto, o.default_shown, styled(o.description, folder)))
    return "\n".join(lines)


def read_options(connection: Connection[Any]) -> dict[str, list[Option]]:
    """Routine, or object among options -> its options."""
    found: dict[str, list[Option]] = {}
    for record in connection.execute(OPTIONS):
        found.setdefault(record[0], []).append(Option(*record))
    return found


def with_lists(text: str) -> str:
    """A document with its lists of what the Python package has."""

    def block(found: re.Match[str]) -> str:
        names = textwrap.fill(LISTS[found[1]](), 120, break_on_hyphens=False)
        return f"<!-- {found[1]} -->\n\n{names}\n\n<!-- end of {found[1]} -->"

    return LIST.sub(block, text)


def prose(text: str) -> str:
    """The lines of a comment as paragraphs; errors are one of their own."""
    text = re.sub(r"([<*])", r"\\\1", " ".join(text.split()))
    parts = re.split(r"\s*\b(?=Errors: )", text)
    return "\n\n".join(textwrap.fill(p, 120, break_long_words=False, break_on_hyphens=False) for p in parts if p)


class Anchors:
    """Where GitHub puts the headings of a page; the second of a name gets a number."""

    def __init__(self) -> None:
        self._seen: Counter[str] = Counter()

    def __call__(self, heading: str) -> str:
        plain = re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")
        self._seen[plain] += 1
        return plain if self._seen[plain] == 1 else f"{plain}-{self._seen[plain] - 1}"


class Page:
    """A page that begins with an index of its headings."""

    def __init__(self, head: str) -> None:
        self._index = [head]
        self._body: list[str] = []
        self._anchor = Anchors()

    def part(self, title: str) -> None:
        """A heading of the first level, in the index too."""
        self._index.append(f"\n{title}:\n")
        self._body.append(f"## {title}")
        self._anchor(title)

    def entry(self, name: str, heading: str, comment: str) -> None:
        """A heading with the first line of its comment, which is in the index too, and the rest of the comment."""
        summary, _, rest = comment.partition("\n")
        line = f"- [`{name}`](#{self._anchor(heading)}): {prose(summary)}"
        self._index.append(line.replace("\n", " "))
        self._body += [f"### {heading.replace(name, code(name))}", prose(summary)]
        self.add(prose(rest))

    def add(self, *parts: str) -> None:
        """Paragraphs and tables."""
        self._body += [part for part in parts if part]

    def __str__(self) -> str:
        return "\n\n".join(["\n".join(self._index), *self._body]) + "\n"


def add_routine(page: Page, record: tuple[Any, ...], options: dict[str, list[Option]]) -> None:
    schema, name, arguments, result, grantees, comment = record
    shown = re.sub(r"\bIN ", "", re.sub(r"(DEFAULT NULL)::[\w.\[\]]+", r"\1", arguments))
    names = [a.removeprefix("INOUT ").split(" ")[0] for a in shown.split(", ") if a[:4] not in ("", "OUT ")]
    page.entry(f"{schema}{name}({', '.join(names)})", f"{schema}{name}({', '.join(names)})", comment)
    call = f"CALL {schema}{name}({shown})" if result is None else f"{schema}{name}({shown}) → {result}"
    page.add("```\n" + "\n".join(textwrap.wrap(call.replace("public.vector", "vector"), 118)) + "\n```")
    facts = f"Granted to: {grantees or 'no role; the owner of the extension calls it'}."
    page.add(facts + (f" Options: [{name}](options.md#{name})." if name in options else ""))


def add_relation(page: Page, record: tuple[Any, ...]) -> None:
    kind, name, columns, comment = record
    page.entry(name, f"{kind} {name}", comment)
    lines = [row("column", "type"), "|---|---|"]
    page.add("\n".join(lines + [row(code(column), type_.replace("public.", "")) for column, type_ in columns]))


def options_page(options: dict[str, list[Option]]) -> str:
    """docs/options.md."""
    index = [f"- [{routine}](#{routine})" for routine in options]
    parts = [OPTIONS_HEAD, "\n".join(index)]
    for routine, records in options.items():
        parts.append(f"## {routine}")
        users = [f"`{o.name}` of {o.routine}" for group in options.values() for o in group if o.keys_of == routine]
        if users:
            parts.append(f"The keys of {', '.join(users)}.")
        parts.append(option_table(records, "docs/"))
    return "\n\n".join(parts) + "\n"


def reference(connection: Connection[Any], options: dict[str, list[Option]]) -> str:
    """docs/reference.md."""
    with connection.transaction(force_rollback=True):
        connection.execute("SET LOCAL search_path = ''")
        routines = connection.execute(ROUTINES).fetchall()
        relations = connection.execute(RELATIONS).fetchall()
        settings = connection.execute(SETTINGS).fetchall()
    page = Page(HEAD)
    for title, schema in (("Routines", ""), ("Stages and helpers", "ml_rag.")):
        page.part(title)
        for record in routines:
            if record[0] == schema:
                add_routine(page, record, options)
    page.part("Tables, views and types")
    for record in relations:
        add_relation(page, record)
    page.add("## Settings", "`SELECT ml_rag.configure(name, value)` changes one, null puts the default back.")
    lines = [row("setting", "default", ""), "|---|---|---|"]
    page.add("\n".join(lines + [row(code(n), code(d) if d else "", styled(text, "docs/")) for n, d, text in settings]))
    return str(page)


def documents(connection: Connection[Any]) -> dict[Path, str]:
    """Each document that has made parts -> what it should hold."""
    options = read_options(connection)
    found = {REFERENCE: reference(connection, options), OPTIONS_PAGE: options_page(options)}
    for path in sorted((ROOT / "docs").glob("*.md")):
        text = path.read_text()
        if LIST.search(text):
            found[path.relative_to(ROOT)] = with_lists(text)
    return found


def main(dsn: str) -> None:
    import psycopg

    with psycopg.connect(dsn, autocommit=True) as connection:
        for path, text in documents(connection).items():
            (ROOT / path).write_text(text)


if __name__ == "__main__":
    main(sys.argv[1])
