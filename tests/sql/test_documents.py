"""What is made in docs/ is what the installed extension says; links lead somewhere; the map has all pages.

Where one of these fails after a change that is meant: make docs.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

import ml_rag
from support.cluster import Cluster, Connection
from support.extension import install

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


def test_the_documents_are_as_the_extension_has_them(docs: ModuleType, cluster: Cluster) -> None:
    # a new one: who locks a record of an option takes its place in their order
    with cluster.database("template0") as database:
        owner = database.connect()
        install(owner, ml_rag.__version__)
        made = docs.documents(owner)
    assert {Path("docs/reference.md"), Path("docs/options.md"), Path("docs/loading.md"), Path("docs/models.md")} <= set(
        made
    )
    stale = [str(path) for path, text in made.items() if (ROOT / path).read_text() != text]
    assert stale == [], "run make docs"


def test_a_stale_table_is_noticed(docs: ModuleType, module_owner: Connection) -> None:
    page = (ROOT / "docs/options.md").read_text()
    with module_owner.transaction(force_rollback=True):
        module_owner.execute("UPDATE ml_rag.option SET maximum = 7 WHERE name = 'segment_overlap'")
        changed = docs.documents(module_owner)[docs.OPTIONS_PAGE]
    assert changed != page
    assert "integer 0–7" in changed


def test_the_options_of_the_readme_are_there_with_that_default(docs: ModuleType, module_owner: Connection) -> None:
    """Its table is written by hand: twelve options, in fewer words."""
    page = (ROOT / "README.md").read_text()
    table = page[page.index("## Options") : page.index("## Answers")]
    shown = dict(re.findall(r"^\| `(\w+)` \| (.*?) \|", table, re.MULTILINE))
    options = {o.name: o for o in docs.read_options(module_owner)["ml_rag"]}
    assert len(shown) == 12
    for name, default in shown.items():
        if default in ("true", "false") or default.isdigit():
            assert default in re.split(r"[ ;,]+", options[name].default_shown), name
        else:
            assert options[name].default is None, name


def links(path: Path) -> list[tuple[str, str]]:
    """The relative links of a page: path, and heading or ''."""
    text = re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    found = re.findall(r"\]\((?!https?:|mailto:)([^)#\s]*)(?:#([^)\s]*))?\)", text)
    return [(target or path.name, heading) for target, heading in found]


def headings(docs: ModuleType, path: Path) -> set[str]:
    anchor = docs.Anchors()
    text = re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    return {anchor(re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", h)) for h in re.findall(r"^#+ (.*)$", text, re.MULTILINE)}


def test_every_link_leads_somewhere(docs: ModuleType) -> None:
    broken = []
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
    for page in pages:
        for target, heading in links(page):
            path = (page.parent / target).resolve()
            if not path.exists() or (heading and heading not in headings(docs, path)):
                broken.append(f"{page.name}: {target}#{heading}")
    assert broken == []


def test_the_map_has_every_page() -> None:
    page = (ROOT / "docs/README.md").read_text()
    assert [
        p.name for p in sorted((ROOT / "docs").glob("*.md")) if p.name != "README.md" and f"]({p.name}" not in page
    ] == []


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
