"""docs/stack.md and the table in README.md: SQL of BI tools as a role that may only SELECT, the line of each stack."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import asyncpg
import openai
import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from ml_rag.integrations.gateway import Config, digest
from support.cluster import Database
from support.processes import free_port, wait_for_port
from support.served import gateway_of
from support.stores import create_store, fake_embedding

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "stack.md").read_text()
README = (ROOT / "README.md").read_text()
ML_RAG = [sys.executable, "-c", "import sys; sys.argv[0] = 'ml-rag'; from ml_rag.cli import main; main()"]
QUESTION = "how do O'Hara's \"boats\" swim? 100% :x $1 \\"

#: tool -> the form of its variable, and what it sends in its place
VARIABLES = {
    "metabase": ("{{question}}", None),
    "superset": ("app.questions", "app.questions"),
    "grafana": ("${question:sqlstring}", "literal"),
    "dbt": ("{{ source('app', 'questions') }}", "app.questions"),
}


def statements(tool: str) -> list[str]:
    """The SQL below the mark of a tool, until the next paragraph of another."""
    part = PAGE.split(f"<!-- {tool} -->")[1]
    part = re.split(r"\n\*\*|\n## ", part)[0]
    found = re.findall(r"```sql\n(.*?)```", part, re.DOTALL)
    assert found
    return [statement.strip().rstrip(";") for statement in found]


RECIPES = [(tool, statement) for tool in VARIABLES for statement in statements(tool)]


@pytest.fixture
def reader(db: Database) -> Iterator[str]:
    """A DSN as a role that may only SELECT."""
    owner, name = db.connect(), sql.Identifier(db.role("asker"))
    row = ("handbook.pdf", 1, 1, "boats swim", fake_embedding("boats swim"))
    create_store(owner, "public.handbook", [row], "vector(16)")
    owner.execute("CREATE SCHEMA app")
    owner.execute("CREATE TABLE app.questions (id integer, question text)")
    owner.execute("INSERT INTO app.questions VALUES (1, 'do boats swim?'), (2, 'what swims?')")
    owner.execute(sql.SQL("GRANT USAGE ON SCHEMA app TO {}").format(name))
    owner.execute(sql.SQL("GRANT SELECT ON app.questions TO {}").format(name))
    owner.execute(sql.SQL("ALTER ROLE {} LOGIN PASSWORD 'made for a test'").format(name))
    try:
        yield make_conninfo(db.dsn, dbname=db.name, user=db.role("asker"), password="made for a test")
    finally:
        owner.execute(sql.SQL("ALTER ROLE {} NOLOGIN").format(name))


def sent(tool: str, statement: str, placeholder: str, connection: psycopg.Connection[Any]) -> tuple[str, list[str]]:
    """The statement as the tool sends it, and the values that it binds."""
    variable, replaced = VARIABLES[tool]
    assert variable in statement
    if replaced is None:
        return statement.replace(variable, placeholder), [QUESTION]
    value = sql.Literal(QUESTION).as_string(connection) if replaced == "literal" else replaced
    return statement.replace(variable, value), []


def check(tool: str, rows: list[Any]) -> None:
    assert len(rows) == (2 if tool in ("dbt", "superset") else 1)
    if len(rows[0]) > 1:
        assert "handbook.pdf" in rows[0]
    else:
        assert rows[0][0]


@pytest.mark.parametrize(("tool", "statement"), RECIPES)
def test_a_recipe_by_psycopg(reader: str, tool: str, statement: str) -> None:
    with psycopg.connect(reader) as connection:
        connection.read_only = True
        text, values = sent(tool, statement, "%s", connection)
        check(tool, connection.execute(text, values or None).fetchall())
        # as Superset and others send it
        wrapped = f"SELECT * FROM ({text}) AS virtual_table LIMIT 1000"
        check(tool, connection.execute(wrapped, values or None).fetchall())


@pytest.mark.parametrize(("tool", "statement"), RECIPES)
async def test_a_recipe_by_asyncpg(reader: str, tool: str, statement: str) -> None:
    with psycopg.connect(reader) as quoting:
        text, values = sent(tool, statement, "$1", quoting)
    connection = await asyncpg.connect(uri(reader))
    try:
        async with connection.transaction(readonly=True):
            check(tool, [tuple(row) for row in await connection.fetch(text, *values)])
    finally:
        await connection.close()


def test_the_role_of_the_recipes_may_not_write(reader: str) -> None:
    with psycopg.connect(reader, autocommit=True) as connection:
        for statement in ("DELETE FROM handbook", "CREATE SCHEMA mine", "INSERT INTO app.questions VALUES (3, 'x')"):
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                connection.execute(statement)


def uri(dsn: str) -> str:
    """A DSN as asyncpg reads it."""
    parts = conninfo_to_dict(dsn)
    query = "&".join(f"{name}={str(parts[name]).replace(' ', '%20')}" for name in ("host", "port", "user", "password"))
    return f"postgresql:///{parts['dbname']}?{query}"


def line(stack: str) -> str:
    """What a row of the table in the README says."""
    (cell,) = re.findall(rf"^\| {re.escape(stack)} \| `(.*)` \|$", README, re.MULTILINE)
    return str(cell)


#: what stands before the line in a program
BEFORE = {
    "psycopg": 'import psycopg\n    connection = psycopg.connect("dbname=app")',
    "asyncpg": 'import asyncpg\n    connection = await asyncpg.connect("postgresql:///app")',
    "LangChain": "from ml_rag.integrations.langchain import MlRagRetriever\n    connection = None",
    "LlamaIndex": "from ml_rag.integrations.llama_index import MlRagRetriever\n    connection = None",
}


@pytest.mark.parametrize("stack", BEFORE)
async def test_a_line_of_python(reader: str, stack: str) -> None:
    code = f"async def run():\n    {BEFORE[stack]}\n    return ({line(stack)}), connection"
    code = code.replace('"dbname=app"', repr(reader)).replace('"postgresql:///app"', repr(uri(reader)))
    names: dict[str, Any] = {}
    exec(compile(code, stack, "exec"), names)

    found, connection = await names["run"]()
    if connection is not None and (closing := connection.close()) is not None:
        await closing
    if stack == "psycopg":  # an answer, which the model has written
        (answer,) = found
        found = answer["citations"]
    assert "boats swim" in str(found)


@pytest.mark.parametrize("stack", ["JDBC", "node-postgres", "ODBC, by pyodbc", "Metabase, Superset, Grafana, dbt"])
def test_a_line_of_sql(reader: str, stack: str) -> None:
    """Whole programs of these drivers are in the page, and run by test_drivers.py."""
    statement = re.search(r"SELECT [^\"]*", line(stack))
    assert statement is not None
    text = re.sub(r"\((\$1|\?)\)", "('How do I claim for perks?')", statement[0])
    with psycopg.connect(reader) as connection:
        connection.read_only = True
        assert len(connection.execute(text).fetchall()) == 1


def test_the_extras_that_the_readme_names_are_there() -> None:
    (named,) = re.findall(r"Each is an extra of the Python package \((.*?)\)", README)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(re.findall(r"`(.*?)`", named)) <= set(extras)


def command(line: str, dsn: str) -> list[str]:
    words = shlex.split(line)
    assert words[0] == "ml-rag"
    return [*ML_RAG, *(dsn if word.startswith("dbname=app") else word for word in words[1:])]


async def test_the_line_of_an_agent(reader: str) -> None:
    from mcp.client import Client
    from mcp.client.stdio import StdioServerParameters

    program, *arguments = command(line("an agent, by MCP"), reader)
    async with Client(StdioServerParameters(command=program, args=arguments, env=dict(os.environ))) as client:
        found = (await client.call_tool("search", {"query": "boats"})).structured_content
    assert [row["segment"] for row in found["results"]] == ["boats swim"]


def test_the_line_of_a_chat_client(db: Database, reader: str, tmp_path: Path) -> None:
    entry = f"ml-rag gateway --new-token {db.role('asker')}"
    made = subprocess.run(command(entry, reader), capture_output=True, text=True, check=True, timeout=60)
    (tmp_path / "gateway.toml").write_text(made.stdout)
    port = free_port()
    process = subprocess.Popen(
        [*command(line("a chat client, by OpenAI's protocol"), reader), "--port", str(port)], cwd=tmp_path
    )
    try:
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=made.stderr.splitlines()[0], timeout=60)
        wait_for_port(port, process)
        (model,) = client.models.list()
        answer = client.chat.completions.create(model=model.id, messages=[{"role": "user", "content": "boats"}])
        assert answer.choices[0].message.content
    finally:
        process.terminate()
        process.wait(30)


def test_the_presets_of_the_page(db: Database, reader: str) -> None:
    block = re.search(r"<!-- presets -->\s+```toml\n(.*?)```", PAGE, re.DOTALL)
    assert block is not None
    models = tomllib.loads(block[1])["models"]
    owner = db.connect()
    for options in models.values():
        owner.execute("SELECT ml_rag.parse_options('ml_rag', %s)", (json.dumps(options),))
    config = Config({digest("token"): db.role("asker")}, models)
    with gateway_of(reader, config) as url:
        client = openai.OpenAI(base_url=url, api_key="token", max_retries=0)

        def said(content: str) -> str:
            asked: Any = [{"role": "user", "content": content}]
            return client.chat.completions.create(model="handbook", messages=asked).choices[0].message.content or ""

        assert said("boats swim").startswith("fake answer to: boats swim")
        assert said("who wins?") == "The handbook does not say."


def test_the_versions_of_the_page_are_those_that_are_tried() -> None:
    pinned = {
        (name.split("[")[0].strip("'"), version)
        for file in ("clients.sh", "chat_programs.sh", "large_programs.sh", "programs.txt")
        for name, version in re.findall(r"([\w@/'\[\]-]+?)(?:==|@)(\d[\w.]*)", (ROOT / "mk" / file).read_text())
    }
    table = PAGE.split("## Tried with")[1]
    told = re.findall(r"(\S+) (\d[\w.]*\d)(?=,| for | \|)", table)
    assert len(told) > 15
    for name, version in told:
        assert (name, version) in pinned or metadata.version(name) == version, name
    (recipe,) = re.findall(r"`pip install (apache-superset.*?)`", PAGE)
    for package in recipe.split():
        assert package in (ROOT / "mk" / "large_programs.sh").read_text()
