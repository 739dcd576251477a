"""The pages of `ml-rag explore` in Chromium: for everybody (WCAG 2.2 AA by axe-core), by keyboard, on a phone.

`mk/setup.sh integrations` installs Chromium and axe-core; without them the tests are skipped.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import psycopg
import pytest

from support.cluster import Database
from support.served import explored
from support.stores import create_store, fake_embedding

playwright = pytest.importorskip("playwright.sync_api")

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
AXE = Path(__file__).resolve().parents[2] / ".build" / "node" / "node_modules" / "axe-core" / "axe.min.js"
TOKEN = "token-of-the-test"
LIMITED = '{"keyword_search": true, "vector_store": ["public.boats"], "rerank": {"model_id": "hybrid"}}'
OTHER = '{"vector_store": ["public.boats"], "n_citations": 5, "retrieval_options": {"max_distance": 0.45}}'
NOTHING = '{"retrieval_options": {"max_distance": 0}}'
LONG = "https://example.org/" + "a-very-long-name-without-any-blank-" * 6
RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium: mk/setup.sh integrations")


@dataclass
class Site:
    url: str
    browser: Any

    def paths(self) -> list[str]:
        """Each page once, with all that can be on it."""
        asked = {"q": "blue boat", "a": LIMITED, "generate": "1"}
        document = {"store": "public.boats", "document": "boats.pdf", "q": "blue boat", "a": LIMITED}
        return [
            "/",
            f"/?{urlencode(asked)}",
            f"/?{urlencode({**asked, 'b': OTHER})}",
            f"/?{urlencode({'q': 'submarine', 'a': NOTHING})}",
            f"/?{urlencode({'q': 'x', 'a': '{'})}",
            f"/document?{urlencode(document)}",
            f"/document?{urlencode({**document, 'document': LONG})}",
            f"/why?{urlencode({**asked, 'document': 'boats.pdf', 'segment': 3})}",
            f"/document?{urlencode({**document, 'raw': 1})}",
            "/stores",
            f"/store?{urlencode({'store': 'public.boats'})}",
            "/runs",
            "/runs/compare?a=1&b=2",
            "/runs/1?measure=recall%403",
            f"/question?{urlencode({'q': 'blue boat'})}",
        ]

    def page(self, scheme: str = "light", width: int = 1280) -> Any:
        context = self.browser.new_context(
            color_scheme=scheme,
            viewport={"width": width, "height": 900},
            extra_http_headers={"authorization": f"Bearer {TOKEN}"},
        )
        page = context.new_page()
        page.set_default_timeout(120_000)
        return page


@pytest.fixture(scope="module")
def site(module_db: Database) -> Iterator[Site]:
    from psycopg import sql
    from psycopg.conninfo import make_conninfo

    owner, name = module_db.connect(), sql.Identifier(module_db.role("asker"))
    texts = ["red boat", "a blue boat. It is fast", "It is fast and green " + "green boat " * 60]
    rows = [("boats.pdf", 1, n, text, fake_embedding(text)) for n, text in enumerate(texts, 1)]
    rows.append((LONG, 2, 1, "x" * 500 + " boat", fake_embedding("boat")))
    create_store(owner, "public.boats", rows, "vector(16)")
    create_store(owner, "public.other", [("o.pdf", 1, 1, "boat", fake_embedding("boat"))], "vector(16)", "fake-embed-2")
    owner.execute("SELECT ml_rag.enable_keyword_search('public.boats')")
    owner.execute(
        "CREATE TABLE public.mark (question text NOT NULL, vector_store text NOT NULL, document text NOT NULL,"
        " segment_number bigint, is_right boolean NOT NULL)"
    )
    owner.execute("""SELECT ml_rag.create_preset('short', '{"n_citations": 1}', 'one citation')""")
    owner.execute(sql.SQL("GRANT SELECT, INSERT, DELETE ON mark, boats TO {}").format(name))
    owner.execute(sql.SQL("GRANT ml_rag_loader TO {}").format(name))
    owner.execute(sql.SQL("ALTER ROLE {} LOGIN PASSWORD 'made for a test'").format(name))
    dsn = make_conninfo(module_db.dsn, dbname=module_db.name, user=module_db.role("asker"), password="made for a test")
    questions = "SELECT 'blue boat' AS question, 'boats.pdf' AS documents UNION ALL SELECT 'house', 'house.pdf'"
    with psycopg.connect(dsn, autocommit=True) as connection:
        for run, count in (("first", 3), ("second", 1)):
            options = {"name": run, "options": {"vector_store": ["public.boats"], "n_citations": count}}
            connection.execute("SELECT ml_rag_evaluate(%s, %s)", (questions, json.dumps(options)))
    try:
        with explored(dsn, TOKEN, "public.mark") as url, playwright.sync_playwright() as started:
            browser = started.chromium.launch(
                executable_path=CHROMIUM, args=["--no-sandbox", "--disable-dev-shm-usage"]
            )
            yield Site(url, browser)
            browser.close()
    finally:
        owner.execute(sql.SQL("REVOKE ml_rag_loader FROM {}").format(name))
        owner.execute(sql.SQL("ALTER ROLE {} NOLOGIN").format(name))


@pytest.mark.skipif(not AXE.exists(), reason="there is no axe-core: mk/setup.sh integrations")
@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 390)])
def test_axe_finds_nothing(site: Site, scheme: str, width: int) -> None:
    page = site.page(scheme, width)
    found: list[str] = []
    for path in site.paths():
        page.goto(site.url + path)
        for details in page.locator("details").all():
            details.evaluate("element => { element.open = true }")
        page.evaluate(AXE.read_text())
        result = page.evaluate("rules => axe.run(document, {runOnly: rules})", RULES)
        assert result["passes"], path
        found += [
            f"{one['id']} {path[:30]} {node['html'][:200]}: {node['failureSummary'][:200]}"
            for one in result["violations"]
            for node in one["nodes"]
        ]
    page.context.close()
    assert not found, "\n".join(found)


@pytest.mark.parametrize("width", [320, 390, 768, 1280])
def test_no_page_scrolls_sideways(site: Site, width: int) -> None:
    page = site.page(width=width)
    for path in site.paths():
        page.goto(site.url + path)
        for details in page.locator("details").all():
            details.evaluate("element => { element.open = true }")
        assert page.evaluate("document.documentElement.scrollWidth") <= width, path
        # on a phone rows are cards, and compared runs have room on a screen: no part of a page scrolls, either
        if width in (390, 1280):
            cut = "[...document.querySelectorAll('.scroll, .stack')].filter(e => e.scrollWidth > e.clientWidth + 1)"
            assert page.evaluate(f"{cut}.length") == 0, path
    page.context.close()


def test_the_contents_stay_in_view_and_all_candidates_are_a_key_away(site: Site) -> None:
    page = site.page()
    page.goto(site.url + site.paths()[1])
    assert page.evaluate("document.documentElement.scrollHeight") < 5000
    page.evaluate("document.querySelector('#details').scrollIntoView()")
    contents = page.locator("nav.contents").bounding_box()
    assert 0 <= contents["y"] < 10
    page.locator("nav.contents a[href='#answer']").click()
    assert page.url.endswith("#answer")
    page.context.close()


#: what can be used: all of it must come by the Tab key, once
USABLE = "a[href], button, summary, input:not([type=hidden]), textarea, select, [tabindex='0']"


def test_all_comes_by_the_keyboard(site: Site) -> None:
    page = site.page()
    for path in site.paths():
        page.goto(site.url + path)
        usable = page.evaluate(
            f"""() => [...document.querySelectorAll("{USABLE}")].filter(e => e.checkVisibility()).length"""
        )
        seen = []
        for _ in range(usable):
            page.keyboard.press("Tab")
            seen.append(
                page.evaluate(
                    """() => {
                      const e = document.activeElement, style = getComputedStyle(e);
                      window.numbers ??= new Map();
                      if (!window.numbers.has(e)) window.numbers.set(e, window.numbers.size);
                      return [window.numbers.get(e), e.tagName, style.outlineStyle, parseFloat(style.outlineWidth)];
                    }"""
                )
            )
        assert [number for number, *_ in seen] == list(range(usable)), path
        assert all(style == "solid" and width >= 2 for _, tag, style, width in seen), path
    page.context.close()


def test_a_question_by_the_keyboard_alone(site: Site) -> None:
    page = site.page()
    page.goto(site.url)
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to content"
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    page.keyboard.type("blue boat")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    while page.evaluate("document.activeElement.id") != "a":
        page.keyboard.press("Tab")
    page.keyboard.type(LIMITED)
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    page.wait_for_url("**/?q=blue+boat*")
    assert page.locator(".citations li").count() == 3
    # a citation is marked, and shows it
    right = page.locator("button[aria-label^='Right']").first
    right.focus()
    page.keyboard.press("Enter")
    page.wait_for_url("**#citations")
    assert page.locator("button[aria-label^='Right'][aria-pressed=true]").count() == 1
    page.locator("button[aria-label^='Right']").first.focus()
    page.keyboard.press("Enter")
    page.wait_for_function("document.querySelectorAll('button[aria-pressed=true]').length == 0")
    page.context.close()


def test_a_document_is_added_by_the_cookie_of_the_address(site: Site) -> None:
    page = site.browser.new_context().new_page()
    page.goto(f"{site.url}/?token={TOKEN}")
    page.goto(f"{site.url}/store?{urlencode({'store': 'public.boats'})}")
    page.set_input_files("#file", {"name": "new.md", "mimeType": "text/markdown", "buffer": b"A new boat."})
    page.locator("#confirm").focus()
    page.keyboard.press("Space")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    page.wait_for_url("**/upload")
    said = page.get_by_role("status").last
    assert "Loaded: 1 segments" in said.inner_text(timeout=120_000)
    page.context.close()


def test_an_answer_stands_before_the_citations_that_came_first(site: Site) -> None:
    page = site.page()
    page.goto(site.url + site.paths()[1])
    places = [page.locator(f"#{name}").bounding_box()["y"] for name in ("answer", "citations", "details")]
    assert places == sorted(places)
    assert not page.get_by_text("A model writes the answer").is_visible()
    assert not page.get_by_text("Searching").is_visible()
    page.context.close()


def test_a_segment_of_a_document_is_marked_by_the_keyboard(site: Site) -> None:
    page = site.page()
    document = {"store": "public.boats", "document": "boats.pdf", "q": "blue boat"}
    page.goto(f"{site.url}/document?{urlencode(document)}")
    wrong = page.get_by_role("button", name="Wrong: boats.pdf, segment 3")
    wrong.focus()
    page.keyboard.press("Enter")
    page.wait_for_url("**/document?*#segment3")
    assert wrong.get_attribute("aria-pressed") == "true"
    assert page.locator("button[aria-pressed=true]").count() == 1
    wrong.focus()
    page.keyboard.press("Enter")
    page.wait_for_function("document.querySelectorAll('button[aria-pressed=true]').length == 0")
    page.context.close()
