"""docs/reference.md and the tables of options in README.md and docs/ say what the installed extension says.

Where one of these fails after a change that is meant: make docs.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from support.cluster import Connection

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def docs() -> ModuleType:
    spec = importlib.util.spec_from_file_location("mk_docs", ROOT / "mk" / "docs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["mk_docs"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_the_documents_are_as_the_extension_has_them(docs: ModuleType, module_owner: Connection) -> None:
    made = docs.documents(module_owner)
    assert {Path("README.md"), Path("docs/reference.md")} <= set(made)
    stale = [str(path) for path, text in made.items() if (ROOT / path).read_text() != text]
    assert stale == [], "run make docs"


def test_every_option_of_ml_rag_is_in_the_readme_or_in_docs(module_owner: Connection) -> None:
    """Its tables need a line with their markers."""
    text = "".join(
        p.read_text() for p in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")] if p.name != "reference.md"
    )
    tables = set(re.findall(r"<!-- options of (\w+) -->", text))
    routines = {
        r
        for (r,) in module_owner.execute(
            "SELECT DISTINCT o.keys_of FROM ml_rag.option AS o WHERE o.routine = 'ml_rag' AND o.keys_of IS NOT NULL"
        )
    }
    # the columns of a store have a table of their own
    assert routines | {"ml_rag", "ml_rank", "vector_store_load"} <= tables | {"vector_store_columns"}


def test_a_stale_table_is_noticed(docs: ModuleType, module_owner: Connection) -> None:
    readme = (ROOT / "README.md").read_text()
    options = docs.read_options(module_owner)
    assert docs.with_tables(readme, options) == readme
    with module_owner.transaction(force_rollback=True):
        module_owner.execute("UPDATE ml_rag.option SET maximum = 7 WHERE name = 'segment_overlap'")
        changed = docs.with_tables(readme, docs.read_options(module_owner))
    assert changed != readme
    assert "integer 0–7" in changed


@pytest.mark.parametrize(
    ("plain", "markdown"),
    [
        ("at least n_citations", "at least `n_citations`"),
        ('"schema.table", or "table"', '`"schema.table"`, or `"table"`'),
        (
            'such as {"a": [1]}: docs/search.md#filters',
            'such as `{"a": [1]}`: [docs/search.md](docs/search.md#filters)',
        ),
        ("kept in ml_rag.evaluation_run", "kept in `ml_rag.evaluation_run`"),
        ("a plain sentence", "a plain sentence"),
    ],
)
def test_a_description_becomes_markdown(docs: ModuleType, plain: str, markdown: str) -> None:
    assert docs.styled(plain) == markdown


def test_every_link_in_the_reference_leads_to_a_heading(docs: ModuleType) -> None:
    text = (ROOT / "docs/reference.md").read_text()
    anchor = docs.Anchors()
    headings = {anchor(h) for h in re.findall(r"^#+ (.*)$", text, re.M)}
    links = re.findall(r"\]\(#([^)]*)\)", text)
    assert len(links) > 50
    assert set(links) - headings == set()
