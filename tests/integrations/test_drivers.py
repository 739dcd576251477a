"""docs/stack.md, Drivers: each program as a role that may only SELECT, in a read-only transaction.

`mk/setup.sh integrations` installs the drivers; without one its tests are skipped."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict

from support.cluster import Database
from support.forward import by_tcp
from support.stores import create_store, fake_embedding

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "stack.md").read_text()
QUESTION = "How do I claim for perks?"
ODD = "how do O'Hara's \"boats\" swim? 100% :x $1 ? {d} ü"
ANSWERED = "fake answer to: "
JAR = Path("/usr/share/java/postgresql.jar")
FRAMEWORKS = Path(sys.prefix) / "frameworks" / "bin" / "python"
MODULES = ROOT / ".build" / "node" / "node_modules"


@dataclass
class Reader:
    """A role that may only SELECT, behind a TCP port."""

    role: str
    database: str
    port: int

    @property
    def uri(self) -> str:
        return f"postgresql://{self.role}:made@127.0.0.1:{self.port}/{self.database}"

    @property
    def settings(self) -> str:
        """Those of a project of Django."""
        database = {
            "ENGINE": "django.db.backends.postgresql", "NAME": self.database, "USER": self.role, "PASSWORD": "made",
            "HOST": "127.0.0.1", "PORT": self.port,
        }  # fmt: skip
        return f"from django.conf import settings\nsettings.configure(DATABASES={{'default': {database}}})\n"

    def placed(self, code: str) -> str:
        """A program whose connection string is this one's."""
        for written, own in {
            '"dbname=app user=bi"': json.dumps(self.uri),
            '"postgresql://bi@localhost/app"': json.dumps(self.uri),
            '"postgresql://localhost/app"': json.dumps(self.uri),
            '"postgresql+psycopg://bi@localhost/app"': json.dumps(self.uri.replace("://", "+psycopg://")),
            "from django.db": f"{self.settings}from django.db",
            "jdbc:postgresql://localhost/app": f"jdbc:postgresql://127.0.0.1:{self.port}/{self.database}",
            "?user=bi": f"?user={self.role}&password=made",
            "Servername=localhost;Database=app": (
                f"Servername=127.0.0.1;Port={self.port};Database={self.database};Pwd=made"
            ),
            ";Uid=bi": f";Uid={self.role}",
        }.items():
            code = code.replace(written, own)
        assert "app" not in re.findall(r"postgresql://[^\"]*|Database=\w+", code)
        return code


@pytest.fixture
def reader(db: Database) -> Iterator[Reader]:
    owner, name = db.connect(), sql.Identifier(db.role("asker"))
    row = ("handbook.pdf", 1, 1, "boats swim", fake_embedding("boats swim"))
    create_store(owner, "public.handbook", [row], "vector(16)")
    owner.execute(sql.SQL("ALTER ROLE {} LOGIN PASSWORD 'made'").format(name))
    try:
        with by_tcp(db.dsn) as dsn:
            yield Reader(db.role("asker"), db.name, int(conninfo_to_dict(dsn)["port"]))
    finally:
        owner.execute(sql.SQL("ALTER ROLE {} NOLOGIN").format(name))


def java(code: str, folder: Path) -> list[str]:
    if shutil.which("javac") is None or not JAR.exists():
        pytest.skip("there is no JDK, or no JDBC driver: mk/setup.sh integrations")
    (folder / "Ask.java").write_text(code)
    return ["java", "-cp", str(JAR), str(folder / "Ask.java")]


def node(code: str, folder: Path) -> list[str]:
    if shutil.which("node") is None or not (MODULES / "pg").is_dir():
        pytest.skip("there is no node, or no node-postgres: mk/setup.sh integrations")
    (folder / "node_modules").symlink_to(MODULES)
    (folder / "ask.js").write_text(code)
    return ["node", str(folder / "ask.js")]


def python(code: str, folder: Path) -> list[str]:
    has_odbc = find_spec("pyodbc") and list(Path("/usr/lib").glob("*/odbc/psqlodbcw.so"))
    if "pyodbc" in code and not has_odbc:
        pytest.skip("there is no pyodbc, or no psqlodbc: mk/setup.sh integrations")
    (folder / "ask.py").write_text(code)
    return [sys.executable, str(folder / "ask.py")]


def framework(code: str, folder: Path) -> list[str]:
    if not FRAMEWORKS.exists():
        pytest.skip("there is no SQLAlchemy and Django: mk/setup.sh integrations")
    return [str(FRAMEWORKS), *python(code, folder)[1:]]


#: mark of the program in the page -> what runs it
DRIVERS = {
    "psycopg": python,
    "asyncpg": python,
    "sqlalchemy": framework,
    "django": framework,
    "jdbc": java,
    "node-postgres": node,
    "odbc": python,
}


def program(driver: str) -> str:
    found = re.search(rf"<!-- {driver} -->\n\n```\w+\n(.*?)```", PAGE, re.DOTALL)
    assert found is not None
    assert QUESTION in found[1]
    return found[1]


def run(driver: str, code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = DRIVERS[driver](code, folder)
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, encoding="utf-8")


@pytest.mark.parametrize("driver", DRIVERS)
def test_a_program_finds(reader: Reader, tmp_path: Path, driver: str) -> None:
    odd = ODD.replace('"', '\\"')
    code = reader.placed(program(driver)).replace(f'"{QUESTION}"', f'"{odd}"')
    assert odd in code
    done = run(driver, code, tmp_path)
    assert (done.returncode, done.stdout) == (0, "handbook.pdf: boats swim\n"), done.stderr


@pytest.mark.parametrize("driver", DRIVERS)
def test_its_transaction_is_read_only_and_its_role_may_only_read(reader: Reader, tmp_path: Path, driver: str) -> None:
    rights = "has_table_privilege('handbook', 'INSERT') OR has_schema_privilege('public', 'CREATE')"
    told = f"current_setting('transaction_read_only') || ' ' || ({rights})"
    code = reader.placed(program(driver)).replace(
        "SELECT document_name, segment", f"SELECT {told} AS document_name, segment"
    )
    assert told in code
    done = run(driver, code, tmp_path)
    assert (done.returncode, done.stdout) == (0, "on false: boats swim\n"), done.stderr


def test_a_bad_option_is_an_error_of_the_driver_with_its_sqlstate(reader: Reader, tmp_path: Path) -> None:
    code = reader.placed(program("node-postgres")).replace("{ n_citations: 5 }", "{ n_citation: 5 }")
    code = code.replace("main();", "main().catch((error) => { console.log(error.code); process.exit(1); });")
    done = run("node-postgres", code, tmp_path)
    assert (done.returncode, done.stdout) == (1, "22023\n"), done.stderr


@pytest.mark.parametrize(
    ("driver", "shown"),
    [("psycopg", "{'a': 1}"), ("asyncpg", '{"a": 1}'), ("sqlalchemy", "{'a': 1}"), ("django", '{"a": 1}')],
)
def test_what_jsonb_and_numbers_are_to_python(reader: Reader, tmp_path: Path, driver: str, shown: str) -> None:
    for number, digits in (("distance", "0.0000"), ("distance::float8", "0.0")):
        columns = f"""SELECT '{{\\"a\\": 1}}'::jsonb AS document_name, {number} AS segment"""
        code = reader.placed(program(driver)).replace("SELECT document_name, segment", columns)
        done = run(driver, code.replace(f'"{QUESTION}"', '"boats swim"'), tmp_path)
        assert (done.returncode, done.stdout) == (0, f"{shown}: {digits}\n"), done.stderr


def test_asyncpg_takes_and_gives_dicts_with_a_codec(reader: Reader, tmp_path: Path) -> None:
    codec = textwrap.indent(program("asyncpg-codec"), "    ")
    code = (
        "import asyncio, json\nimport asyncpg\n\nasync def main():\n"
        f"    connection = await asyncpg.connect({reader.uri!r})\n{codec}"
        "    print(answer['text'])\n\nasyncio.run(main())\n"
    )
    done = run("asyncpg", code, tmp_path)
    assert done.stdout.startswith(ANSWERED), done.stderr


def test_what_is_a_parameter_to_sqlalchemy(reader: Reader, tmp_path: Path) -> None:
    code = reader.placed(program("sqlalchemy"))
    assert "CAST(:options AS jsonb)" in code

    def told(options: str) -> str:
        done = run("sqlalchemy", code.replace("CAST(:options AS jsonb)", options), tmp_path)
        return done.stdout + done.stderr

    assert told("""'{\\"n_citations\\": 2}'""") == "handbook.pdf: boats swim\n"
    assert "A value is required for bind parameter '2'" in told("""'{\\"n_citations\\":2}'""")
    assert "syntax error" in told(":options::jsonb")


def test_what_is_a_parameter_to_django(reader: Reader, tmp_path: Path) -> None:
    for text, shown in (("100%%", "100%: boats swim\n"), ("100%", "")):
        columns = f"SELECT '{text}' AS document_name, segment"
        code = reader.placed(program("django")).replace("SELECT document_name, segment", columns)
        done = run("django", code, tmp_path)
        assert done.stdout == shown, done.stderr
