"""The sources of the extension: what the manifest, the control file and the package say must agree."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import ml_rag

ROOT = Path(__file__).parents[2]
SQL = ROOT / "sql"


def manifest() -> list[str]:
    return re.findall(r"^\\i (\S+)\.sql$", (SQL / "install.sql").read_text(), re.M)


def source(name: str) -> str:
    return (SQL / f"{name}.sql").read_text()


def test_the_manifest_names_every_file_once() -> None:
    found = [str(path.relative_to(SQL)).removesuffix(".sql") for path in SQL.rglob("*.sql")]
    assert sorted(manifest()) == sorted(name for name in found if name != "install")


def test_a_file_is_named_after_its_subject_which_is_its_first_word() -> None:
    for name in manifest():
        assert re.fullmatch(r"([a-z]+/)?[a-z0-9]+", name)
        assert source(name).startswith(f"-- {name.rpartition('/')[2]}: "), name


def test_lines_of_sql_are_not_too_long() -> None:
    longest = 110
    lines = [
        f"{name}:{i}"
        for name in manifest()
        for i, line in enumerate(source(name).splitlines(), 1)
        # the first line of COMMENT ON is a row of the reference
        if len(line) > longest and not line.startswith("$$")
    ]
    assert lines == []


#: literals, which stay, and what makes no part of a stage: comments, and what COMMENT ON and options say
WORDS = re.compile(
    r"('(?:[^']|'')*')|--[^\n]*|^\s*#[^\n]*$|^COMMENT ON .*?(?:\$\$;|';)$"
    r"|_add_options\('\w+', \$\$.*?^\$\$\)",
    re.M | re.S,
)
DEFINED = re.compile(
    r"^CREATE (?:OR REPLACE )?(?:FUNCTION|PROCEDURE|AGGREGATE|TABLE|(?:MATERIALIZED )?VIEW|TYPE|SEQUENCE)"
    r" (?:ml_rag|ml_rag_internal|@extschema@)\.(\w+)",
    re.M,
)
#: objects that nothing names, or whose names are those of the extension
OTHERS = re.compile(r"^CREATE (?:SCHEMA|(?:UNIQUE )?INDEX|(?:EVENT |CONSTRAINT )?TRIGGER|POLICY|OPERATOR) ", re.M)
USED = re.compile(r"(?:ml_rag|ml_rag_internal|@extschema@)\.(\w+)")
#: a statement made at run time
DYNAMIC = re.compile(r"\bEXECUTE (?!FUNCTION|format\('COMMENT )[^;]*;")
LITERAL = re.compile(r"'(?:[^']|'')*'")
#: sent to another server, whose reads may be sent on
ELSEWHERE = [f"pipeline/shards uses {name} of store/serve" for name in ("_answer_on_worker", "_shard_answer")]


def bodies() -> list[str]:
    """The files without comments."""
    return [WORDS.sub(r"\1", source(name)) for name in manifest()]


def uses(text: str) -> set[str]:
    """The names of ml_rag's that a file uses. In a literal a public one may be that of a message or a hint."""
    assert "'" not in LITERAL.sub("", text), "quotation marks that are none"
    private = {name for literal in LITERAL.findall(text) for name in USED.findall(literal) if name.startswith("_")}
    dynamic = {name for statement in DYNAMIC.findall(text) for name in USED.findall(statement)}
    return {*USED.findall(LITERAL.sub("", text)), *private, *dynamic}


def test_all_that_is_made_is_seen() -> None:
    for name, text in zip(manifest(), bodies(), strict=True):
        made = re.findall(r"^CREATE .*", text, re.M)
        assert [line for line in made if not DEFINED.match(line) and not OTHERS.match(line)] == [], name
        assert set(DEFINED.findall(source(name))) == set(DEFINED.findall(text)), name


#: collected into one value; its parenthesis is the last character
COLLECTED = re.compile(r"\b(?:string_agg|array_agg|jsonb?_agg)\(|\bARRAY\((?=\s*SELECT\b)")
#: what is collected and read by no user: rows and their places, OIDs, numbers, sets of names, texts for a model
NOT_READ = re.compile(
    # the list of functions that statements of models may call
    r"anyarray; anynonarray$|bytea, bytea; text, text$|"
    r"(SELECT )?(DISTINCT )?((\w+\.)?(oid|ctid|\w+relid|relowner|tgfoid|relation(::bigint)?|place|row_key|key|n|value"
    r"|shown|first|last|best|document_key|embedding(::@vector@\.vector)?|text(::text)?|metadata|node)"
    r"|ROW\(h\.\*\)::ml_rag\.hit|%s|n\.name(?=$)|m\[1\]::oid"
    r"|int8send\(\w+\.id\), ''|generate_series\(r\.first, r\.last\)"
    r"|pg_catalog\.to_jsonb\([^)]*\)|coalesce\(p\.oid::regprocedure::text, n\))(?= FROM|$)"
)


def parenthesis(text: str, start: int) -> str:
    """From an opening parenthesis to the one that closes it, without them; to the end where none does."""
    depth = 0
    for i in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[i], 0)
        if depth == 0:
            return text[start + 1 : i]
    return text[start + 1 :]


def has_order(text: str, start: int) -> bool:
    """Whether the rows that are collected, from this parenthesis on, come in an order.

    That of ORDER BY, of DISTINCT within an aggregate, of the one function or of the ordered subquery that they come
    from. A function of the whole query that collects them, such as coalesce, may follow.
    """
    inner = parenthesis(text, start)
    is_query = inner.lstrip().startswith("SELECT")
    if "ORDER BY" in inner or "{order}" in inner or (inner.startswith("DISTINCT ") and not is_query):
        return True
    query = inner if is_query else text[start + len(inner) + 2 :]
    if is_query and "FROM" not in inner:
        return "DISTINCT" not in inner
    source = re.search(r"\bFROM (LATERAL )?(ROWS FROM |[\w.]*)\(", query)
    before = re.search(r"\bFROM\b", query)
    if source is None or before is None or before.start() != source.start():
        return False
    argument = parenthesis(query, source.end() - 1)
    rest = parenthesis("(" + query[source.end() + len(argument) + 1 :], 0)
    if re.match(r"[^;()]*(\([^()]*\))?\s*,", rest) and not source[2]:
        return False
    is_alone = not re.search(r"\b(JOIN|GROUP BY|EXISTS|UNION)\b|(?<!NOT )IN \(SELECT\b", rest.split(";")[0])
    is_distinct = is_query and re.match(r"\s*SELECT DISTINCT\b", inner) is not None
    return is_alone and not is_distinct and (bool(source[2]) or "ORDER BY" in argument)


def test_what_users_read_is_collected_in_an_order() -> None:
    """Without ORDER BY a DETAIL or a list of names is in the order of a plan, which changes with the version."""
    files = [*SQL.rglob("*.sql"), *(ROOT / "plpy").rglob("*.py")]
    found = []
    for path in files:
        text = re.sub(r"\s+", " ", re.sub(r"--.*", "", path.read_text()))
        for match in COLLECTED.finditer(text):
            inner = parenthesis(text, match.end() - 1).strip()
            if not has_order(text, match.end() - 1) and not NOT_READ.match(inner):
                found.append(f"{path.relative_to(ROOT)}: {match[0]}{inner[:80]}")
    assert found == []


@pytest.mark.parametrize(
    ("statement", "ordered"),
    [
        ("string_agg(w.name, ', ') INTO x FROM (VALUES (1)) AS w (name) WHERE NOT EXISTS (SELECT)", False),
        ("string_agg(w.name, ', ' ORDER BY w.name) INTO x FROM (VALUES (1)) AS w (name)", True),
        ("string_agg(s.name, ', ') FROM ml_rag.setting AS s)", False),
        ("string_agg(DISTINCT s.name, ', ') FROM ml_rag.setting AS s)", True),
        ("string_agg(n, ', ') FROM unnest(names) AS n WHERE n <> 'a')", True),
        ("string_agg(n, ', ') FROM unnest(names) AS n WHERE NOT EXISTS (SELECT FROM t WHERE t.n = n))", False),
        ("jsonb_agg(d.name), '[]') FROM (SELECT n.name FROM n ORDER BY n.name) AS d)", True),
        ("jsonb_agg(d.name), '[]') FROM (SELECT n.name FROM n) AS d)", False),
        ("ARRAY(SELECT n FROM unnest(names) AS n)", True),
        ("ARRAY(SELECT a FROM ROWS FROM (unnest(x), unnest(y)) AS u (a, b))", True),
        ("ARRAY(SELECT DISTINCT n FROM unnest(names) AS n)", False),
        ("ARRAY(SELECT DISTINCT n FROM unnest(names) AS n ORDER BY 1)", True),
        ("ARRAY(SELECT n.name FROM unnest(names) AS n (name) JOIN pg_class AS c ON c.relname = n.name)", False),
    ],
)
def test_an_order_is_recognised(statement: str, ordered: bool) -> None:
    match = COLLECTED.search(statement)
    assert match is not None
    assert has_order(statement, match.end() - 1) is ordered


def test_no_file_uses_a_later_one() -> None:
    place: dict[str, int] = {}
    for i, text in enumerate(bodies()):
        for name in DEFINED.findall(text):
            place.setdefault(name, i)
    later = [
        f"{manifest()[i]} uses {name} of {manifest()[place[name]]}"
        for i, text in enumerate(bodies())
        for name in sorted(uses(text))
        if place.get(name, -1) > i
    ]
    assert later == ELSEWHERE


def test_each_stage_is_a_function_of_its_name() -> None:
    story = (SQL / "install.sql").read_text()
    numbers = re.findall(r"^-- +(\d+)  ", story, re.M)
    assert [int(number) for number in numbers] == list(range(1, len(numbers) + 1))
    steps = re.findall(r"^-- +\d+  .*  pipeline/((?:\w+, )*\w+)", story, re.M)
    assert len(steps) == len(numbers)
    assert {name for step in steps for name in step.split(", ")} <= {path.stem for path in (SQL / "pipeline").iterdir()}
    stages = {"discover", "rewrite", "embed", "filter", "rerank", "generate"}
    assert stages <= {step.split(", ")[0] for step in steps}
    for name in stages:
        assert re.search(rf"^CREATE FUNCTION ml_rag\.{name}\(", source(f"pipeline/{name}"), re.M), name
    modules = ROOT / "plpy/ml_rag/backend/retrieval"
    assert all((modules / name).exists() for name in re.findall(r"\w+\.py", story))


def test_what_is_called_is_there() -> None:
    """PL/pgSQL looks a function up when it is called, and a handler of errors may hide that it is not there."""
    files = [*SQL.rglob("*.sql"), *SQL.rglob("*.in"), *(ROOT / "plpy/ml_rag/backend").rglob("*.py")]
    texts = [re.sub(r"--.*", "", path.read_text()) for path in files]
    made = {
        name
        for text in texts
        for name in re.findall(r"^CREATE (?:FUNCTION|PROCEDURE|AGGREGATE|VIEW|TABLE|TYPE) ml_rag\.(\w+)", text, re.M)
    }
    assert {name for text in texts for name in re.findall(r"\bml_rag\.(\w+)\(", text)} - made == set()


def test_each_source_has_its_test() -> None:
    """A test file names the sources it is about first, as in pipeline/fuse: …"""
    named: set[str] = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        if found := re.match(r'"""([a-z0-9_/, ]+):', path.read_text()):
            named |= set(found[1].split(", "))
    assert [name for name in manifest() if name not in named] == []


def test_the_version_is_written_in_one_place() -> None:
    """The others have a mark that it is put in for."""
    for name in ("ml_rag.control", "META.json"):
        text = (ROOT / name).read_text()
        assert "@ML_RAG_VERSION@" in text
        assert ml_rag.__version__ not in text
    for name in ("pyproject.toml", "docker/docker-bake.hcl", ".github/workflows/release.yml"):
        assert ml_rag.__version__ not in (ROOT / name).read_text()


def test_what_runs_in_the_backend_imports_the_standard_library_only() -> None:
    """But for keyword search, which is imported when it is first needed: numpy, a package of the distribution."""
    with_numpy = {"keyword", "runs", "tokens"}
    import ast
    import sys

    shared = ("archives", "errors", "files", "progress", "protocol", "sentences")
    files = [*(ROOT / "plpy/ml_rag/backend").rglob("*.py"), *(ROOT / f"plpy/ml_rag/{name}.py" for name in shared)]
    allowed = sys.stdlib_module_names | {"ml_rag"}
    for path in files:
        more = {"numpy"} if path.stem in with_numpy else set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                modules = [node.module or ""]
            else:
                continue
            for module in modules:
                assert module.split(".")[0] in allowed | more, f"{path.name} imports {module}"
                if module.startswith("ml_rag."):
                    assert module.split(".")[1] in ("backend", *shared), f"{path.name} imports {module}"
                    assert more or module.split(".")[-1] not in with_numpy, f"{path.name} imports numpy with {module}"
            if isinstance(node, ast.ImportFrom) and node.module == "ml_rag.backend":
                assert more or not with_numpy & {alias.name for alias in node.names}, f"{path.name} imports numpy"


def test_what_may_open_a_subtransaction_is_not_parallel_safe() -> None:
    """PostgreSQL refuses to begin one while a parallel plan runs, in its leader too."""
    made = re.compile(r"^CREATE (?:FUNCTION|PROCEDURE) \w+\.(\w+)\((.*?)\$(\w*)\$(.*?)\$\3\$", re.M | re.S)
    opening = re.compile(r"^\s*EXCEPTION WHEN\b|@CATCH", re.M)
    found = [f for name in manifest() for f in made.finditer(source(name)) if opening.search(f[4])]
    assert found
    assert [f[1] for f in found if re.search(r"PARALLEL (?!UNSAFE)", f[2])] == []


#: a body, and in it a statement that reads or writes rows of a relation by its name
BODY = re.compile(r"^CREATE (?:OR REPLACE )?(?:FUNCTION|PROCEDURE) ml_rag\.(\w+)\(.*?\$(\w*)\$(.*?)\$\2\$", re.M | re.S)
BY_NAME = re.compile(r"\b(?:FROM|INTO|UPDATE|ONLY|JOIN) (?:%(?:\d\$)?s|',)")
HOLDS = re.compile(r"ml_rag\._(?:hold|hold_read|hold_trusted|hold_filled|hold_written|lock_table|lock_indexed)\(")
FIND, FILL = "backend/retrieval/find.py", "backend/jobs/column.py"
#: what leaves it to others that the name stays that of its relation, and to whom
HELD_BY = {
    "_check_sample": {"adopt"},
    "_copy_rows": {"_move_partition", "detach_shard"},
    "_estimated_rows": {FIND},
    "_insert_segments": {"_replace_document"},
    "_merged_nodes": {"drop_node_group", "backend/jobs/node_group.py"},
    "_node_sources": {"_count_calls", "_pending_nodes", "backend/jobs/node_group.py"},
    "_passing_rows": {FIND},
    "_pending_nodes": {"_count_calls", "_node_status", "backend/jobs/node_group.py"},
    "_place_calls": {"create_vectorizer", "distribute_store"},
    "_read_waiting": {"_count_waiting", "_vectorizers"},
    "_rows_of": {"_read_apart", "_read_documents", "_tune_index"},
    "_take_back_column": {"create_vectorizer"},
    "_take_back_segments": {"create_vectorizer"},
    "_visible_keys": {FIND},
    "_waiting": {"_read_waiting", FILL},
}
#: that which holds; REVOKE … FROM a role; and in a trigger, names of its rows
NOT_BY_NAME = {"_hold", "_follow_partitions", "_grant_readers", "_keep_keywords"}


def test_what_reads_rows_by_a_name_holds_the_relation() -> None:
    """While a statement waits for a lock, the owner can rename the relation and somebody else can take its name."""
    bodies: dict[str, str] = {}
    for name in manifest():
        for found in BODY.finditer(source(name)):
            body = re.sub(r"--[^\n]*|\bRAISE [A-Z]+ .*?;", "", found[3], flags=re.S)
            bodies[found[1]] = bodies.get(found[1], "") + body
    by_name = {name for name, body in bodies.items() if BY_NAME.search(body)} - NOT_BY_NAME
    callers = {name: {n for n, body in bodies.items() if n != name and f"ml_rag.{name}(" in body} for name in by_name}
    assert {name for name in by_name if not HOLDS.search(bodies[name])} <= set(HELD_BY)
    for name, holders in HELD_BY.items():
        assert callers.get(name, set()) <= holders, name
        for holder in holders:
            text = (ROOT / "plpy/ml_rag" / holder).read_text() if "/" in holder else bodies[holder]
            assert "_hold" in text or HOLDS.search(text) or holder in HELD_BY, (name, holder)
