"""README.md: its statements, in order, in a new database, by psql; what each prints is what the page shows.

Where that is meant to change, ML_RAG_UPDATE_GOLDEN=1 makes this test write it into the page.
"""

from __future__ import annotations

import os
import re
import subprocess
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from psycopg.conninfo import make_conninfo

from support.cluster import Cluster
from support.programs import client
from support.real_model import need_models, need_own_machine
from support.servers import running_server

pytestmark = pytest.mark.models

README = Path(__file__).resolve().parents[2] / "README.md"
#: fences of code, with what comes after the first one
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
#: what the page makes its documents with: printf 'text' > path
WRITTEN = re.compile(r"^printf '(.*)' > (\S+)$", re.MULTILINE)
#: the call that the page begins with
LEAD = re.compile(r"(```console\n=> (.*?;)\n)(.*?)```", re.DOTALL)
FOLDER = "/srv/perks"
#: distances and scores differ in their last digits between processors
NUMBER = re.compile(r"\d+\.\d+")
TOLERANCE = 0.02
#: of the page
WIDTH = 110
#: of the server beside the real models: the model that the page describes, and a stand-in for it
CONFIG = """[server]
socket_mode = "0666"
[models.house-llm]
task = "generate"
engine = "fake"
"""


@dataclass(frozen=True)
class Example:
    """Statements, and what the page says they print; None where it says nothing."""

    statements: str
    shown: str | None
    #: where the shown text is in the page
    at: tuple[int, int] = (0, 0)


def examples(page: str) -> list[Example]:
    """The blocks of SQL; a block without a language that follows one at once is what that prints."""
    blocks = list(FENCE.finditer(page))
    found = []
    for block, following in zip(blocks, [*blocks[1:], None], strict=True):
        if block[1] != "sql":
            continue
        is_output = following and not following[1] and not page[block.end() : following.start()].strip()
        at = following.span(2) if following and is_output else (0, 0)
        found.append(Example(block[2], page[slice(*at)] if is_output else None, at))
    return found


@dataclass(frozen=True)
class Reader:
    """Somebody who types the page into psql; its folder is another one here."""

    psql: str
    dsn: str
    folder: str
    #: the address of the model server
    server: str

    def types(self, statements: list[str]) -> list[str]:
        """What each prints, in one session."""
        mark = "-- next --"
        script = f"\\echo {mark}\n".join(statement.replace(FOLDER, self.folder) for statement in statements)
        command = [self.psql, "-X", "-q", "-v", "SHOW_CONTEXT=never", self.dsn]
        done = subprocess.run(
            command, input=script, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=True, timeout=300
        )
        return [text.replace(self.folder, FOLDER) for text in done.stdout.split(f"{mark}\n")]


@pytest.fixture(scope="module")
def reader(cluster: Cluster, reachable_dir: Path) -> Iterator[Reader]:
    need_own_machine()
    models = need_models("all_minilm_l6_v2")
    folder, socket = reachable_dir / "perks", reachable_dir / "readme.sock"
    folder.mkdir(mode=0o755)
    for text, path in WRITTEN.findall(README.read_text()):
        (folder / Path(path).name).write_text(text.replace("\\n", "\n"))
    with (
        running_server(fake_models=False, models_dir=models, socket=socket, config=CONFIG),
        cluster.database("template0") as db,
    ):
        connection = db.connect()
        program = client("psql", connection.info.server_version)
        yield Reader(program, make_conninfo(db.dsn, dbname=db.name), str(folder), f"unix:{socket}")
        for role in ("alice", "bob"):  # which the page makes
            if connection.execute("SELECT FROM pg_roles WHERE rolname = %s", (role,)).rowcount:
                connection.execute(f"DROP OWNED BY {role}; DROP ROLE {role}")


def plain(printed: str) -> str:
    """Without what depends on the machine: widths of columns, line breaks, seconds, the last digits of numbers."""
    printed = re.sub(r'("seconds": )[0-9.]+', r"\g<1>0.1", printed)
    return NUMBER.sub("#", " ".join(re.sub(r"-{2,}", "--", printed).split()))


def numbers(printed: str) -> list[float]:
    return list(map(float, NUMBER.findall(re.sub(r'"seconds": [0-9.]+', "", printed))))


def test_each_statement_prints_what_the_page_shows(reader: Reader) -> None:
    page = README.read_text()
    all_examples = examples(page)
    assert len(all_examples) > 15
    # a reader's model server is where a new database looks for it, this one is not
    enabled = "CREATE EXTENSION IF NOT EXISTS ml_rag CASCADE;\n"
    located = f"{enabled}SELECT ml_rag.configure('model_server', '{reader.server}');\n"
    printed = reader.types([example.statements.replace(enabled, located) for example in all_examples])
    if os.environ.get("ML_RAG_UPDATE_GOLDEN"):
        for example, text in reversed(list(zip(all_examples, printed, strict=True))):
            if example.shown is not None:
                page = page[: example.at[0]] + shortened(text) + page[example.at[1] :]
        README.write_text(LEAD.sub(lambda lead: f"{lead[1]}{shown_by(page, lead[2])}```", page))
        pytest.fail("README.md was written anew: look at the difference")
    for example, text in zip(all_examples, printed, strict=True):
        if example.shown is None:
            assert "ERROR" not in text, example.statements
        else:
            assert plain(shortened(text)) == plain(example.shown), example.statements
            assert numbers(text) == pytest.approx(numbers(example.shown), abs=TOLERANCE), example.statements


def shortened(printed: str) -> str:
    """Without the results of functions that return nothing and the numbers of rows, and with long lines broken."""
    printed = re.sub(r"^ *\w+ *\n-+\n *\n\(1 row\)\n\n", "", printed, flags=re.MULTILINE)
    printed = re.sub(r"^\(\d+ rows?\)\n", "", printed, flags=re.MULTILINE)
    lines = []
    for line in printed.strip("\n").splitlines():
        if len(line) <= WIDTH:
            lines.append(line.rstrip())
        elif " " not in line.strip():
            lines.append(line.strip() if line.strip(" -") else line[:WIDTH])
        else:
            lines += textwrap.wrap(line, WIDTH, subsequent_indent="   ", break_on_hyphens=False, break_long_words=False)
    return "\n".join(lines) + "\n"


def shown_by(page: str, statement: str) -> str:
    (shown,) = [e.shown or "" for e in examples(page) if e.statements == f"{statement}\n"]
    return shown


def test_the_page_begins_with_an_answer_that_it_arrives_at() -> None:
    page = README.read_text()
    lead = LEAD.search(page)
    assert lead is not None
    assert lead[3] == shown_by(page, lead[2])
