"""`ml-rag explore`: who gets in, what the pages say, what they leave alone, and one look by a real browser."""

from __future__ import annotations

import asyncio
import contextlib
import html
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlencode

import httpx
import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from ml_rag.integrations import chart, explore, marked, picture
from ml_rag.integrations.journey import Candidates, Journey, searches
from support.cluster import Database, value_of
from support.processes import free_port, wait_for_port, wait_until
from support.served import explored
from support.stores import create_store, fake_embedding

ML_RAG = [sys.executable, "-c", "import sys; sys.argv[0] = 'ml-rag'; from ml_rag.cli import main; main()"]
TOKEN = "token of the test"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
LIMITED = '{"keyword_search": true, "vector_store": ["public.boats"], "retrieval_options": {"max_distance": 0.45}}'
HYBRID = '{"keyword_search": true, "vector_store": ["public.boats"], "n_citations": 2}'


@pytest.fixture
def boats(db: Database, asker_dsn: str) -> str:
    owner = db.connect()
    texts = ["red boat", "blue boat", "green boat"]
    rows = [("boats.pdf", 1, n, text, fake_embedding(text)) for n, text in enumerate(texts, 1)]
    house = "house <script>alert(1)</script>"
    create_store(owner, "public.boats", [*rows, ("house.pdf", 2, 1, house, fake_embedding("house"))], "vector(16)")
    create_store(owner, "public.other", [("o.pdf", 1, 1, "boat", fake_embedding("boat"))], "vector(16)", "fake-embed-2")
    owner.execute("SELECT ml_rag.enable_keyword_search('public.boats')")
    return asker_dsn


@dataclass
class Page:
    url: str
    port: int

    def client(self, **headers: str) -> httpx.Client:
        """With the token in a header."""
        wanted = {"authorization": f"Bearer {TOKEN}", **headers}
        return httpx.Client(base_url=self.url, headers=wanted, timeout=60)

    def get(self, path: str = "/", **parameters: Any) -> httpx.Response:
        with self.client() as client:
            return client.get(path, params=parameters or None)


@contextlib.contextmanager
def served(dsn: str, marks: str | None = None) -> Iterator[Page]:
    with explored(dsn, TOKEN, marks) as url:
        yield Page(url, int(url.rpartition(":")[2]))


@pytest.fixture
def page(boats: str) -> Iterator[Page]:
    with served(boats) as found:
        yield found


def text_of(response: httpx.Response) -> str:
    """What is to be read, without tags."""
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", response.text)).split())


def test_nobody_comes_in_without_the_token(page: Page) -> None:
    for path in ("/", "/runs", "/why", "/document", "/stores", "/store", "/explore.css", "/none"):
        assert httpx.get(page.url + path).status_code == 401, path
    assert httpx.post(page.url + "/mark").status_code == 401
    assert httpx.get(page.url, params={"token": "another"}).status_code == 401
    assert httpx.get(page.url, params={"token": "täken"}).status_code == 401
    assert httpx.get(page.url, headers={"authorization": "Bearer another"}).status_code == 401
    assert httpx.get(page.url, headers={"cookie": f"ml_rag_explore_{page.port}=another"}).status_code == 401
    assert httpx.get(page.url, headers={"cookie": '="; =;;'}).status_code == 401


def test_the_token_of_the_address_becomes_a_cookie(page: Page) -> None:
    with httpx.Client(base_url=page.url) as client:
        first = client.get("/", params={"token": TOKEN})
        assert (first.status_code, first.headers["location"]) == (303, "/")
        cookie = first.headers["set-cookie"].lower()
        assert "httponly" in cookie
        assert "samesite=strict" in cookie
        assert client.get("/").status_code == 200
        asked = client.get("//evil.example/", params={"token": TOKEN, "q": "a&b"})
        assert asked.headers["location"] == "/?q=a%26b"
        # a page at another port of this machine, and one of elsewhere, have the browser send it
        for site in ("same-site", "cross-site"):
            assert client.get("/", headers={"sec-fetch-site": site}).status_code == 403
        assert client.get("/", headers={"sec-fetch-site": "same-origin"}).status_code == 200
        assert client.post("/mark", headers={"origin": "http://evil.example"}).status_code == 403
        assert client.post("/mark").status_code == 403
        assert client.post("/mark", headers={"origin": page.url}).status_code == 404


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1", "127.0.0.1.evil.example:{port}", "localhost:1", ""])
def test_a_name_of_somebody_else_is_refused(page: Page, host: str) -> None:
    with page.client(host=host.format(port=page.port)) as client:
        assert client.get("/").status_code in (400, 421)
    with page.client(host=f"localhost:{page.port}") as client:
        assert client.get("/").status_code == 200


def test_every_answer_forbids_what_it_does_not_need(page: Page) -> None:
    for path in ("/", "/runs", "/explore.css", "/document", "/?q=boat&a=x"):
        headers = page.get(path).headers
        assert headers["content-security-policy"].startswith("default-src 'none'; style-src 'self';")
        assert headers["cache-control"] == "no-store"
        assert headers["x-content-type-options"] == "nosniff"
    assert "://" not in page.get("/").text
    assert "<script" not in page.get("/").text


def test_a_question_with_its_arms(page: Page) -> None:
    answer = page.get(q="blue boat", a=HYBRID, generate=1)
    assert answer.status_code == 200
    text = text_of(answer)
    assert "semantic : 4 candidates, distance 0.0000 to" in text
    assert "keyword : 3 candidates, BM25" in text
    assert "fused : 4 candidates" in text
    assert "public.boats yes fake-embed" in text
    assert "Tokens: " in text
    # the prompt, as the model got it
    assert re.search(r"system, \d+ characters|user, \d+ characters", text)
    for stage in ("discover", "embed", "search", "keyword", "fuse", "generate", "total"):
        assert re.search(rf'<th scope="row">{stage}</th><td class="n">\d+\.\d</td>', answer.text), stage
    assert re.search(
        r'class="cited"><th scope="row">\s*<a href="/document[^>]+>boats.pdf</a> <span class="about">segment 2<',
        answer.text,
    )
    # what a document says is text
    assert "<script>alert(1)" not in answer.text
    assert "&lt;script&gt;alert(1)" in answer.text


def test_a_threshold_is_drawn_where_it_is(page: Page) -> None:
    options = '{"vector_store": ["public.boats"], "retrieval_options": {"max_distance": 0.1, "segment_overlap": 0}}'
    answer = page.get(q="blue boat", a=options)
    assert "threshold 0.1000, 1 within it" in text_of(answer)
    assert len(re.findall(r'<line class="cited"', answer.text)) == 1
    assert len(re.findall(r'<line class="dropped"', answer.text)) == 3
    assert len(re.findall(r'<line class="threshold"', answer.text)) == 1
    assert "beyond the threshold" in text_of(answer)
    # the axis says its ends, and where the threshold is
    assert re.search(r'<text class="limit" x="[\d.]+%" y="11" text-anchor="\w+">threshold 0\.1000</text>', answer.text)
    assert re.search(r'<text x="0" y="60">0\.0000</text>', answer.text)


def test_what_nothing_is_found_for_is_explained_all_the_same(page: Page) -> None:
    options = '{"vector_store": ["public.boats"], "retrieval_options": {"max_distance": 0}}'
    text = text_of(page.get(q="submarine", a=options))
    assert "no segment within the distance threshold (SQLSTATE P0002)" in text
    assert "semantic : 4 candidates" in text
    assert "No answer was written." in text
    none = page.get(q="boat", a='{"vector_store": ["public.none"]}')
    assert none.status_code == 200
    assert "no vector store found (SQLSTATE P0002)" in text_of(none)


def test_a_model_that_answers_alone_has_no_candidates(page: Page) -> None:
    text = text_of(page.get(q="blue boat", a='{"n_citations": 0}', generate=1))
    assert "fake answer to: blue boat" in text
    assert "Candidates of each stage" not in text


def test_stores_that_were_skipped_have_their_reason(page: Page) -> None:
    text = text_of(page.get(q="boat"))
    assert re.search(r"public\.other no \S", text)


def test_what_each_sentence_stands_on(db: Database, page: Page) -> None:
    text = "Hotels are paid in full."
    create_store(db.connect(), "public.travel", [("t.pdf", 1, 1, text, fake_embedding(text))], "vector(16)")
    options = '{"vector_store": ["public.travel"], "model_options": {"model_id": "extractive"}}'
    content = page.get(q="Are hotels paid?", a=options, generate="1").text
    (answer,) = re.findall(r'<p class="answer">(.*?)</p>', content, re.DOTALL)
    supported = (
        f'<span class="claim">{text}</span> <span class="support"><a href="#citation1-1" aria-label="citation 1">'
    )
    assert f"{supported}1</a> 1.00</span>" in answer
    assert "Support of the whole: 1.00" in content
    assert 'id="citation1-1"' in content
    # the fake model echoes the question beside words of its own
    content = page.get(q="what swims?", a='{"vector_store": ["public.boats"]}', generate="1").text
    assert 'class="claim unsupported">' in content
    assert re.search(r'class="support">no citation 0\.\d\d</span>', content)
    for more in ({}, {"a": '{"n_citations": 0}', "generate": "1"}):
        assert "claim" not in page.get(q="blue boat", **more).text


def test_presets_are_offered(db: Database, page: Page) -> None:
    assert 'id="a.preset"' not in page.get().text
    db.connect().execute("""SELECT ml_rag.create_preset('my <b>', '{"n_citations": 1}', 'the best &')""")
    content = page.get(q="boat").text
    assert ">my &lt;b&gt;: the best &amp;</option>" in content
    value, _ = re.findall(r'<option value="([^"]*)"[^>]*>my', content)
    with page.client() as client:
        sent = {"q": "blue boat", "a.preset": html.unescape(value)}
        shown = client.get("/", params=sent, follow_redirects=True).text
    assert shown.count('<li id="citation') == 1


def test_fields_and_json_make_one_address(page: Page) -> None:
    sent = {"q": "blue boat", "generate": "1", "b": "", "b.citations": "", "a": '{"partial": true}'}
    sent |= {"a.citations": "2", "a.distance": "0.7", "a.document": "boats.pdf", "a.search": '{"keyword_search": true}'}
    with page.client() as client:
        address = client.get("/", params=sent).headers["location"]
        query = parse_qs(address.partition("?")[2])
        assert query.keys() == {"q", "a", "generate"}
        assert json.loads(query["a"][0]) == {
            "partial": True, "n_citations": 2, "retrieval_options": {"max_distance": 0.7},
            "document_name": ["boats.pdf"], "keyword_search": True,
        }  # fmt: skip
        # there the fields have their parts again, and the JSON the rest
        shown = client.get(address).text
    assert '<input id="a.citations" name="a.citations" value="2"' in shown
    assert '<input id="a.distance" name="a.distance" value="0.7"' in shown
    assert re.search(r"<option[^>]* selected>by both", shown)
    assert html.unescape(re.findall(r'<textarea id="a"[^>]*>(.*?)</textarea>', shown)[0]) == '{"partial": true}'


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ({"a": '{"n_citations": '}, "the options are not JSON"),
        ({"a": "[]"}, "the options are not a JSON object"),
        ({"a.citations": "some"}, "Citations is not a number: some"),
        ({"a": '{"n_citations": 3}', "a.citations": "2"}, "in the JSON and in the field"),
        ({"b": "{", "b.document": "<b>"}, "the options are not JSON"),
    ],
)
def test_a_wrong_option_keeps_the_form(page: Page, typed: dict[str, str], said: str) -> None:
    refused = page.get(**{"q": "which boat?", "a.overlap": "4", **typed})
    assert refused.status_code == 400
    assert said in text_of(refused)
    assert ">which boat?</textarea>" in refused.text
    assert refused.text.count('aria-invalid="true"') == 1
    for name, value in {"a.overlap": "4", **typed}.items():
        kept = html.escape(value, quote=True).replace("&quot;", "&#34;")
        wanted = f'name="{name}" value="{kept}"' if "." in name else f">{kept}</textarea>"
        assert wanted in refused.text, name


def test_citations_come_before_the_answer_is_written(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()
    write = explore.write

    async def waits(*arguments: Any) -> None:
        while not go_on.is_set():
            await asyncio.sleep(0.01)
        await write(*arguments)

    monkeypatch.setattr(explore, "write", waits)
    asked = {"q": "blue boat", "a": HYBRID, "generate": "1"}
    with page.client() as client, client.stream("GET", "/", params=asked) as answer:
        shown = ""
        for piece in answer.iter_text():
            shown += piece
            if "What moved where</h2>" in shown and not go_on.is_set():
                assert '<li id="citation1-2">' in shown
                assert "A model writes the answer" in shown
                assert 'class="answer"' not in shown
                go_on.set()
    assert go_on.is_set()
    assert 'slot="answer" class="written">' in shown.split("What moved where</h2>")[1]
    assert '<p class="answer">' in shown


def test_an_answer_that_nobody_waits_for_any_more_is_cancelled(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    began, ended = threading.Event(), threading.Event()

    async def waits(*_: Any) -> None:
        began.set()
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    monkeypatch.setattr(explore, "write", waits)
    with page.client() as client, client.stream("GET", "/", params={"q": "boat", "generate": "1"}) as answer:
        pieces = answer.iter_text()
        assert "Searching" in next(pieces)
        assert began.wait(60)
    assert ended.wait(20)


def test_lists_are_those_of_the_options_in_force(db: Database, page: Page) -> None:
    rerank = {"model_id": "hybrid", "min_score": 0.9}
    settings = {"keyword_search": True, "vector_store": ["public.boats"], "rerank": rerank}
    owner = db.connect()
    owner.execute("SELECT ml_rag.configure('default_options', %s)", (json.dumps(settings),))
    shown = text_of(page.get(q="blue boat"))
    assert "keyword : 3 candidates" in shown
    assert "reranked : 4 candidates" in shown
    # the short options of a setting do not count beside arms
    shown = text_of(page.get(q="blue boat", a='{"arms": [{"search": "keyword"}]}'))
    assert "keyword : 3 candidates" in shown
    assert "semantic : " not in shown
    assert "SQLSTATE" not in shown
    arms = [{"search": "keyword"}, {"search": "semantic"}]
    owner.execute("SELECT ml_rag.configure('default_options', %s)", (json.dumps({"arms": arms}),))
    owner.execute("""SELECT ml_rag.create_preset('near', '{"retrieval_options": {"max_distance": 0.45}}')""")
    shown = text_of(page.get(q="blue boat", a='{"preset": "near", "vector_store": ["public.boats"]}'))
    assert "keyword : 3 candidates" in shown
    assert "semantic : " in shown
    assert "threshold 0.45" in shown
    assert "SQLSTATE" not in shown


def test_reranking_shows_what_moved(page: Page) -> None:
    options = (
        '{"vector_store": ["public.boats"], "rerank": {"model_id": "hybrid", "min_score": 0.01}, "n_citations": 1}'
    )
    answer = page.get(q="green boat", a=options)
    assert "reranked : 4 candidates, relevance" in text_of(answer)
    assert "threshold 0.0100" in text_of(answer)
    moved = answer.text.split("What moved where</h2>")[1].split("</thead>")[0]
    assert re.findall(r'class="n">(\w+)</th>', moved) == ["semantic", "reranked", "cited"]


def test_two_sets_of_options(page: Page) -> None:
    one = '{"vector_store": ["public.boats"], "n_citations": 1}'
    two = '{"vector_store": ["public.boats"], "n_citations": 2}'
    answer = page.get(q="blue boat", a=one, b=two)
    changed = answer.text.split("What changed</h2>")[1].split("</table>")[0]
    cells = [re.sub(r"<[^>]+>", "", row) for row in re.findall(r"<td.*?</td>", changed)]
    assert cells[:6] == ["1", "1", "same", "–", "2", "new"]
    assert "First options" in answer.text
    assert answer.text.count('id="citations"') == 1
    # the candidates of both in one table
    moved = answer.text.split("What moved where</h2>")[1].split("</table>")[0]
    assert re.findall(r'scope="col" class="n">(\w+)</th>', moved) == ["semantic", "cited"] * 2
    rows = [re.findall(r"<td[^>]*>([\d–]*)", row) for row in moved.split("<tbody>")[1].split("</tr>")]
    assert rows[:3] == [["1", "1", "1", "1"], ["2", "–", "2", "2"], ["3", "–", "3", "–"]]


def test_the_first_candidates_are_shown_and_all_can_be(db: Database, page: Page) -> None:
    owner = db.connect()
    rows = [("more.pdf", 9, n, f"boat {n}", fake_embedding(f"boat {n}")) for n in range(1, 14)]
    create_store(owner, "public.more", rows, "vector(16)")
    boats = '{"vector_store": ["public.boats", "public.more"]}'
    for count, options in ((13, '{"vector_store": ["public.more"]}'), (17, boats)):
        content = page.get(q="boat", a=options).text
        moved = content.split("What moved where</h2>")[1].split("</table>")[0]
        assert moved.count("<tr class=") == count
        assert moved.count(' more"') == max(0, count - explore.FEW)
        assert ("Show all 17 candidates" in moved) == (count > explore.FEW)


@pytest.mark.parametrize("wrong", ['{"keyword_serch": 1}', '{"rerank": {"model_id": "none-such"}}'])
def test_a_set_of_options_that_fails_is_told_beside_the_other(page: Page, wrong: str) -> None:
    right = '{"vector_store": ["public.boats"], "n_citations": 1}'
    for options in ({"a": right, "b": wrong}, {"a": wrong, "b": right}, {"a": wrong, "b": wrong}):
        answer = page.get(q="blue boat", **options)
        assert answer.status_code == 200
        failed = [place for place, typed in enumerate(options.values()) if typed == wrong]
        assert answer.text.count('role="alert"') == len(failed)
        assert text_of(answer).count("(SQLSTATE 22023)") == len(failed)
        # nothing has changed where one of the two has not been searched with
        assert "What changed" not in answer.text
        answers, citations = (
            re.split(
                r"<h3>\w+ options</h3>", answer.text.partition(f'<section id="{name}"')[2].partition("</section>")[0]
            )
            for name in ("answer", "citations")
        )
        for place, said in enumerate(answers[1:]):
            assert ('role="alert"' in said) == (place in failed)
        for place, cited in enumerate(citations[1:]):
            assert ("blue boat</p>" in cited) == (place not in failed)


def test_the_options_of_the_placeholders_work_as_they_come(page: Page) -> None:
    one, two = (html.unescape(given) for given in re.findall("placeholder='([^']+)'", page.get().text))
    asked = page.get(q="blue boat", a=one, b=two)
    assert 'role="alert"' not in asked.text
    assert "What changed" in asked.text


def test_why_not_this_one(page: Page) -> None:
    options = '{"vector_store": ["public.boats"], "n_citations": 1}'
    asked = page.get(q="blue boat", a=options)
    link = html.unescape(re.findall(r'href="(/why\?[^"]+segment=3[^"]*)"', asked.text)[0])
    text = text_of(page.get(link))
    assert re.search(r'search \(semantic\) no 3 .*"n_citations" of at least 3 lets it in', text)
    gone = page.get("/why", q="boat", a=options, document="boats.pd")
    assert "Did you mean" in text_of(gone)
    (link,) = re.findall(r'href="(/why\?[^"]+)">boats\.pdf<', gone.text)
    assert "citations" in text_of(page.get(html.unescape(link)))
    for empty in ({}, {"q": "boat"}, {"q": "boat", "document": " "}, {"document": "boats.pdf"}):
        refused = page.get("/why", **empty)
        assert refused.status_code == 400
        assert "give a question, and a document as citations name it" in text_of(refused)
        assert "SELECT" not in refused.text
    assert page.get("/why", q="boat", document="boats.pdf", segment="x").status_code == 400


def test_a_document_with_its_segments(db: Database, page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = db.connect()
    owner.execute("UPDATE boats SET segment = 'a boat. It is' WHERE document_id = 1 AND segment_number = 2")
    owner.execute("UPDATE boats SET segment = 'It is green' WHERE document_id = 1 AND segment_number = 3")
    whole = page.get("/document", store="public.boats", document="boats.pdf")
    assert "Segments 1 to 3 of 3" in text_of(whole)
    assert "<mark>It is</mark> green" in whole.text
    assert "11 characters, 5 of them shared" in text_of(whole)
    raw = page.get("/document", store="public.boats", document="boats.pdf", raw=1).text
    assert '<pre class="stored" tabindex="0">It is green</pre>' in raw
    monkeypatch.setattr(explore, "SEGMENTS", 2)
    part = page.get("/document", store="public.boats", document="boats.pdf")
    assert "Segments 1 to 2 of 3" in text_of(part)
    later = html.unescape(re.findall(r'href="(/document\?[^"]+first=3[^"]*)"', part.text)[0])
    rest = page.get(later)
    assert "Segments 3 to 3 of 3" in text_of(rest)
    assert "<mark>It is</mark> green" in rest.text
    assert page.get("/document", store="public.boats", document="boats.pdf", first=4).status_code == 404
    for store in ("public.none", "pg_catalog.pg_authid", "boats", ""):
        assert page.get("/document", store=store, document="boats.pdf").status_code == 404
    # a name without folders is that of the only document which has it, and the page has its whole name
    owner.execute("UPDATE boats SET document_name = '/srv/boats.pdf' WHERE document_id = 1")
    short = page.get("/document", store="public.boats", document="boats.pdf")
    assert short.text == page.get("/document", store="public.boats", document="/srv/boats.pdf").text


def test_what_a_store_is(db: Database, page: Page) -> None:
    owner = db.connect()
    owner.execute(
        "UPDATE boats SET metadata = jsonb_build_object('page', 1 + segment_number / 2) WHERE document_id = 1"
    )
    owner.execute(
        "UPDATE boats SET segment = 'red boat', segment_embedding = b.segment_embedding FROM boats AS b"
        " WHERE boats.segment_number = 3 AND b.segment_number = 1 AND b.document_id = 1"
    )
    owner.execute("ALTER TABLE boats ALTER segment_embedding DROP NOT NULL")
    owner.execute("UPDATE boats SET segment_embedding = NULL WHERE document_id = 2")
    assert "public.boats" in text_of(page.get("/stores"))
    shown = page.get("/store", store="public.boats")
    totals = re.findall(r"<dt>([^<]+)</dt><dd[^>]*>([^<]+)</dd>", shown.text)
    assert totals == [
        ("documents", "2"), ("segments", "4"), ("pages", "2"), ("without an embedding", "1"), ("repeated texts", "1"),
    ]  # fmt: skip
    bars = [
        re.findall(r'scope="row" class="n">([^<]+)</th><td class="n">(\d+)', part)
        for part in shown.text.split("<figcaption>")[1:]
    ]
    # tokens of the fake model are words
    assert bars == [[("1", "1"), ("2", "0"), ("3", "1")], [("1", "0"), ("2", "4")]]
    assert "Tokens of a segment" in shown.text
    text = text_of(shown)
    assert re.search(r"boats\.pdf 3 2 6 house\.pdf 1", text)
    assert re.search(r"boats\.pdf segment [13] red boat boats\.pdf segment [13] 0\.0000", text)
    # who may not write is told what it takes
    assert 'action="/upload"' not in shown.text
    assert "must be a member of ml_rag_loader" in text
    for name in ("public.none", "pg_catalog.pg_authid", ""):
        assert page.get("/store", store=name).status_code == 404
    owner.execute("DELETE FROM boats")
    assert "Documents" not in page.get("/store", store="public.boats").text


def test_tokens_are_counted_in_a_sample_and_words_without_a_model_server(
    db: Database, page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(picture, "_COUNTED", 3)
    assert "Tokens of a segment, of 3 taken at random" in text_of(page.get("/store", store="public.boats"))
    db.connect().execute("SELECT ml_rag.configure('model_server', 'unix:/nonexistent/s')")
    assert "Words of a segment" in text_of(page.get("/store", store="public.boats"))


def test_a_picture_of_a_store_is_of_what_the_role_may_read(db: Database, boats: str, tenant_dsn: str) -> None:
    owner = db.connect()
    owner.execute("ALTER TABLE boats ENABLE ROW LEVEL SECURITY")
    owner.execute(f"CREATE POLICY seen ON boats TO {db.role('tenant')} USING (document_id = 2)")
    with served(tenant_dsn) as page:
        shown = text_of(page.get("/store", store="public.boats"))
        assert "house.pdf" in shown
        assert "boats.pdf" not in shown


def test_a_document_is_added_once_it_is_confirmed(db: Database, page: Page) -> None:
    owner = db.connect()
    form = {"store": "public.boats", "confirm": "yes"}
    files = {"file": ("C:\\docs\\new.md", b"# New\n\nA <b>yellow</b> boat.", "text/markdown")}

    def sent(form: dict[str, str], **given: Any) -> httpx.Response:
        with page.client() as client:
            return client.post("/upload", data=form, **given)

    refused = sent(form, files=files)
    assert "42501" in refused.text
    owner.execute(f"GRANT INSERT, DELETE ON boats TO {db.role('asker')}")
    assert 'action="/upload"' in page.get("/store", store="public.boats").text
    for wrong, given, status in (
        ({"store": "public.boats"}, {"files": files}, 400),
        ({**form, "confirm": "no"}, {"files": files}, 400),
        (form, {}, 400),
        (form, {"files": {"other": files["file"]}}, 400),
        ({**form, "store": "public.none"}, {"files": files}, 404),
    ):
        assert sent(wrong, **given).status_code == status, wrong
    assert owner.execute("SELECT count(*) FROM boats").fetchone() == (4,)
    assert "Loaded: 1 segments" in text_of(sent(form, files=files))
    assert owner.execute("SELECT document_name FROM boats ORDER BY document_id DESC LIMIT 1").fetchone() == ("new.md",)
    assert "Unchanged" in text_of(sent(form, files=files))
    other = {"file": ("new.md", b"# New\n\nA black boat.", "text/markdown")}
    assert "Replaced" in text_of(sent(form, files=other))
    assert owner.execute("SELECT count(*) FROM boats").fetchone() == (5,)
    broken = sent(form, files={"file": ("x.pdf", b"%PDF-1.4 nothing", "application/pdf")})
    assert 'role="alert"' in broken.text


def test_an_upload_into_a_store_whose_owner_is_not_trusted_any_more(db: Database, asker_dsn: str) -> None:
    """Any role can make it wait."""
    owner, tenant, role = db.connect(), db.connect("tenant"), db.role("tenant")
    owner.execute(f"CREATE SCHEMA kb AUTHORIZATION {role}; GRANT USAGE ON SCHEMA kb TO PUBLIC")
    owner.execute(f"GRANT ml_rag_publisher TO {role}")
    create_store(owner, "kb.docs", [("a.md", 1, 1, "lamp", fake_embedding("lamp"))], "vector(16)")
    owner.execute(f"ALTER TABLE kb.docs OWNER TO {role}; GRANT ALL ON kb.docs TO PUBLIC")
    try:
        with served(asker_dsn) as page, page.client() as client, ThreadPoolExecutor(1) as pool:

            def send(name: str) -> str:
                files = {"file": (name, b"A new lamp.", "text/markdown")}
                return text_of(client.post("/upload", data={"store": "kb.docs", "confirm": "yes"}, files=files))

            assert "Loaded: 1 segments" in send("b.md")
            owner.execute("SELECT pg_advisory_lock(ml_rag._store_key('kb.docs'::regclass::oid))")
            sent = pool.submit(send, "c.md")
            waiting = "SELECT FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
            wait_until(lambda: owner.execute(waiting).fetchone() is not None)
            owner.execute(f"REVOKE ml_rag_publisher FROM {role}")
            tenant.execute(
                "CREATE TABLE kb.ran (who name); GRANT ALL ON kb.ran TO PUBLIC;"
                "CREATE FUNCTION kb.spy() RETURNS trigger LANGUAGE plpgsql AS"
                " $$ BEGIN INSERT INTO kb.ran VALUES (current_user); RETURN NEW; END $$;"
                "CREATE TRIGGER spy BEFORE INSERT ON kb.docs FOR EACH ROW EXECUTE FUNCTION kb.spy()"
            )
            owner.execute("SELECT pg_advisory_unlock_all()")
            assert 'table "kb.docs" is not trusted' in sent.result()
    finally:
        owner.execute(f"REVOKE ml_rag_publisher FROM {role}")
    assert tenant.execute("SELECT * FROM kb.ran").fetchall() == []


def test_an_upload_is_bounded_and_of_this_page_only(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    form = {"store": "public.boats", "confirm": "yes"}
    with httpx.Client(base_url=page.url) as client:
        client.get("/", params={"token": TOKEN})
        for headers in (
            {},
            {"origin": "http://evil.example"},
            {"origin": "null"},
            {"origin": page.url, "sec-fetch-site": "cross-site"},
        ):
            assert client.post("/upload", data=form, headers=headers).status_code == 403, headers
        assert client.post("/upload", data=form, headers={"origin": page.url}).status_code == 400
    assert httpx.post(page.url + "/upload", data=form).status_code == 401
    monkeypatch.setattr(explore, "UPLOAD", 1000)
    with page.client() as client:
        big = {"file": ("x.md", b"x" * 1001, "text/markdown")}
        assert client.post("/upload", data=form, files=big).status_code == 413
        # without a length it could be of any
        assert client.post("/upload", content=iter([b"x"])).status_code == 413


def test_errors_are_said_and_escaped(page: Page) -> None:
    for options, said in (
        ("{", "the options are not JSON"),
        ("[1]", "the options are not a JSON object"),
        ('{"no_such_option": 1}', "SQLSTATE 22023"),
        ('{"arms": 1}', "SQLSTATE 22023"),
        ("[" * 20_000, "the options are not JSON"),
        ("1" * 20_001, "options have at most 20000 characters"),
    ):
        assert said in text_of(page.get(q="boat", a=options)), options[:30]
    assert page.get(q="b" * 10_001).status_code == 400
    assert page.get(q="b" * 10_000, a='{"vector_store": ["public.boats"]}').status_code == 200
    odd = page.get(q='"><img src=x>', a='{"vector_store": ["public.boats"]}')
    assert "<img" not in odd.text
    assert page.get("/runs/x").status_code == 400
    assert page.get("/runs/99").status_code == 404
    assert page.get("/runs/" + "9" * 30).status_code == 400


def test_runs_and_the_result_of_a_question_in_each(page: Page, boats: str) -> None:
    assert "This role has no runs yet" in text_of(page.get("/runs"))
    questions = "SELECT 'blue boat' AS question, 'boats.pdf' AS documents UNION ALL SELECT 'house', 'house.pdf'"
    with psycopg.connect(boats, autocommit=True) as connection:
        for name in ("first", "second"):
            options = f'{{"name": "{name}", "options": {{"vector_store": ["public.boats"]}}}}'
            connection.execute("SELECT ml_rag_evaluate(%s, %s)", (questions, options))
    runs = page.get("/runs")
    # the two runs have the same values: one line for both
    assert (
        re.findall(r"(\d) (second|first) = (\d) (second|first)", text_of(runs)) == [("2", "second", "1", "first")] * 2
    )
    assert 'class="run1"' not in runs.text
    assert "ndcg@10" in text_of(runs)
    number = re.findall(r'href="/runs/(\d+)"', runs.text)[0]
    run = page.get(f"/runs/{number}", measure="mrr")
    assert "blue boat" in text_of(run)
    found = page.get("/question", q="blue boat")
    assert {"first", "second"} <= set(text_of(found).split())
    assert "boats.pdf 2 ✓ right" in text_of(found)
    assert "No run of this role" in text_of(page.get("/question", q="never asked"))


def test_two_runs_compared_with_p_values_and_what_changed_first(page: Page, boats: str) -> None:
    wanted = [
        ("blue boat", "boats.pdf"),
        ("house", "house.pdf"),
        ("house boat", "house.pdf"),
        ("green boat", "boats.pdf"),
    ]
    questions = " UNION ALL ".join(f"SELECT '{q}' AS question, '{d}' AS documents" for q, d in wanted)
    with psycopg.connect(boats, autocommit=True) as connection:
        for name, more in (("all", {}), ("boats", {"document_name": ["boats.pdf"]})):
            options = {"name": name, "options": {"vector_store": ["public.boats"], **more}}
            connection.execute("SELECT ml_rag_evaluate(%s, %s)", (questions, json.dumps(options)))
        measures = connection.execute("SELECT * FROM ml_rag_compare_runs(1, 2) WHERE measure = 'mrr'").fetchone()
    assert measures is not None
    shown = page.get("/runs/compare", a=1, b=2, measure="mrr")
    row = re.search(r'<th scope="row">mrr</th>(.*?)</tr>', shown.text, re.DOTALL)
    assert row is not None
    figures = re.findall(r"<td[^>]*>([^<]*)", row[1])
    told = [*(f"{value:.4f}" for value in measures[1:4]), f"{measures[4]:.3f}" if measures[4] is not None else "–"]
    assert figures == [*told, str(measures[6]), str(measures[7])]
    changed = re.findall(
        r"/question\?q=([^\"]+).*?data-label=\"Change\">(?:<span[^>]*>)?([^<]+)", shown.text, re.DOTALL
    )
    sizes = [0.0 if change == "same" else abs(float(change)) for _, change in changed]
    assert len(changed) == 4
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > 0
    for wrong in ({"a": 1, "b": 99}, {"a": 1}, {"a": "x", "b": 2}):
        refused = page.get("/runs/compare", **wrong)
        assert refused.status_code == 400, wrong
    assert 'action="/runs/compare"' in page.get("/runs").text


def test_curves_begin_below_their_values_and_equal_ones_are_one() -> None:
    runs = [
        {"run_id": n, "measures": {"recall@1": low, "recall@10": 1.0}} for n, low in ((3, 0.75), (2, 0.85), (1, 0.75))
    ]
    drawn = chart.curves(runs, "recall")
    assert [[run["run_id"] for run in line["runs"]] for line in drawn["lines"]] == [[3, 1], [2]]
    assert [label for _, label in drawn["ticks"]] == ["0.7", "0.85", "1"]
    assert drawn["lines"][1]["points"] == [(4.0, 97.0), (96.0, chart.ABOVE)]
    assert drawn["cutoffs"] == [(4.0, 1), (96.0, 10)]
    assert chart.curves([{"measures": {"mrr": 1}}], "recall")["lines"] == []
    assert chart.families(runs) == ["recall@10"]


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("started_at", "infinity"),
        ("started_at", "0001-01-01 BC"),
        ("measures", "[]"),
        ("measures", '{"recall@x": 1}'),
        ("measures", '{"recall@9999": 1}'),
        ("measures", '{"mrr": "x"}'),
        ("measures", f'{{"mrr": 1{"0" * 400}}}'),
        ("options", "[]"),
        ("options", f'{{"n": 1{"0" * 5000}, "deep": {"[" * 3000}{"]" * 3000}}}'),
    ],
)
def test_an_odd_run_breaks_no_page(boats: str, column: str, value: str) -> None:
    values = {
        "name": "odd", "started_at": "2026-01-01", "seconds": "NaN", "source": "s", "questions": "1", "options": "{}",
        "stores": "{}", "models": "{}", "versions": "{}", "measures": '{"mrr": null}', "counted": "{}", "latency": "{}",
        "errors": "{}", column: value,
    }  # fmt: skip
    places = ", ".join(f"%({name})s" for name in values)
    with psycopg.connect(boats, autocommit=True) as connection, contextlib.suppress(psycopg.errors.CheckViolation):
        connection.execute(f"INSERT INTO ml_rag.evaluation_run ({', '.join(values)}) VALUES ({places})", values)
    with served(boats) as page:
        assert page.get("/runs").status_code == 200


def test_large_runs_of_somebody_else_fill_no_memory(db: Database, boats: str) -> None:
    large, columns = "repeat('x', 40000000)", "seconds, questions, stores, models, versions, measures, counted, latency"
    with psycopg.connect(boats, autocommit=True) as connection:
        (number,) = connection.execute(
            f"INSERT INTO ml_rag.evaluation_run (name, started_at, source, options, errors, {columns}) SELECT {large},"
            f" '2026-01-01', {large}, jsonb_build_object('options', jsonb_build_object('x', {large})),"
            " '{}', 1, 1, '{}', '{}', '{}', '{}', '{}', '{}' RETURNING run_id"
        ).fetchone() or (None,)
        for question in ("'boat'", large):
            connection.execute(
                "INSERT INTO ml_rag.evaluation_question"
                " (run_id, question_id, question, citations, measures, latency, sqlstate, message)"
                f" SELECT %s, {question}, {question}, jsonb_build_array("
                f"jsonb_build_object('document_name', '[]'::jsonb, 'segment_number', {large})), '{{}}', '{{}}',"
                f" '22023', {large}",
                (number,),
            )
        with pytest.raises(psycopg.errors.CheckViolation):
            connection.execute(
                f"INSERT INTO ml_rag.evaluation_run (name, started_at, source, options, errors, {columns}) SELECT 'x',"
                " '2026-01-01', 's', '{}', '{}', 1, 1, '{}', '{}', '{}', jsonb_object_agg('m' || i, 1), '{}', '{}'"
                " FROM generate_series(1, 2000) AS i"
            )
    with served(make_conninfo(db.dsn, dbname=db.name)) as page:
        for path, parameters in (("/runs", {}), (f"/runs/{number}", {}), ("/question", {"q": "boat"})):
            tracemalloc.start()
            try:
                assert page.get(path, **parameters).status_code == 200, path
                assert tracemalloc.get_traced_memory()[1] < 20_000_000, path
            finally:
                tracemalloc.stop()


def test_the_page_of_a_superuser_reads_no_runs_of_others(db: Database, boats: str) -> None:
    """They can be of any size, and so many that the page would fill the memory."""
    with psycopg.connect(boats, autocommit=True) as connection:
        connection.execute("SELECT ml_rag_evaluate('SELECT ''red boat'' AS question', '{\"name\": \"of the asker\"}')")
    db.connect().execute("SELECT ml_rag_evaluate('SELECT ''red boat'' AS question', '{\"name\": \"of the owner\"}')")
    for dsn, seen in ((boats, "asker"), (make_conninfo(db.dsn, dbname=db.name), "owner")):
        with served(dsn) as page:
            for shown in (page.get("/runs"), page.get("/question", q="red boat")):
                assert re.findall("of the (asker|owner)", shown.text), shown.text
                assert set(re.findall("of the (asker|owner)", shown.text)) == {seen}


def test_titles_and_addresses_are_shown(db: Database, page: Page) -> None:
    owner = db.connect()
    owner.execute(
        'UPDATE boats SET metadata = \'{"title": "All <boats>", "page": 3}\', document_name = \'/srv/boats.pdf\''
        " WHERE document_id = 1"
    )
    cited = text_of(page.get(q="red boat", a=HYBRID, generate=""))
    assert "All <boats> /srv/boats.pdf page 3" in cited
    read = page.get("/document", store="public.boats", document="/srv/boats.pdf")
    assert "<h1>All &lt;boats&gt;</h1>" in read.text
    listed = text_of(page.get("/store", store="public.boats"))
    assert "boats.pdf All <boats> 3 1" in listed


def test_metadata_of_somebody_else_breaks_no_page(db: Database, page: Page) -> None:
    metadata = f'{{"n": 1{"0" * 5000}}}'
    db.connect().execute("UPDATE boats SET metadata = %s WHERE segment_number = 1", (metadata,))
    assert "1000000" in text_of(page.get("/document", store="public.boats", document="boats.pdf"))
    for levels in (975, 3000):
        deep = "[" * levels + "]" * levels
        metadata = f'{{"n": {deep}, "page": {deep}, "title": {deep}}}'
        db.connect().execute("UPDATE boats SET metadata = %s", (metadata,))
        shown = page.get("/document", store="public.boats", document="boats.pdf")
        assert shown.status_code == 200
        assert "blue boat" in shown.text
        assert "blue boat" in page.get("/", q="blue boat", generate="1").text
        assert page.get("/store", store="public.boats").status_code == 200


def test_marks_become_questions_of_the_evaluation(db: Database, boats: str) -> None:
    owner = db.connect()
    owner.execute(
        "CREATE TABLE public.mark (question text NOT NULL, vector_store text NOT NULL, document text NOT NULL,"
        " segment_number bigint, is_right boolean NOT NULL)"
    )
    owner.execute(f"GRANT SELECT, INSERT, UPDATE, DELETE ON mark TO {db.role('asker')}")
    options = '{"vector_store": ["public.boats"], "n_citations": 2}'
    with served(boats, "public.mark") as page, page.client() as client:

        def mark(kind: str, number: int) -> None:
            form = {
                "question": "blue boat", "vector_store": "public.boats", "document": "boats.pdf",
                "segment_number": str(number), "mark": kind, "here": "q=blue+boat",
            }  # fmt: skip
            done = client.post("/mark", data=form)
            assert (done.status_code, done.headers["location"]) == (303, "/?q=blue+boat#citations")

        mark("wrong", 2)
        mark("right", 2)
        mark("wrong", 1)
        wanted = [
            ("blue boat", "public.boats", "boats.pdf", 1, False),
            ("blue boat", "public.boats", "boats.pdf", 2, True),
        ]
        assert owner.execute("SELECT * FROM mark ORDER BY segment_number").fetchall() == wanted
        shown = client.get("/", params={"q": "blue boat", "a": options}).text
        assert len(re.findall('aria-pressed="true" aria-label="Right: boats.pdf, segment 2"', shown)) == 1
        said = re.search(r"<code>(SELECT ml_rag_evaluate.*?)</code>", client.get("/runs").text)
        assert said is not None
        with psycopg.connect(boats, autocommit=True) as connection:
            assert value_of(connection, html.unescape(said[1]).encode())["measures"]["mrr"] == 1
            # the segment that was marked wrong is of the same document, and no hit
            connection.execute("UPDATE mark SET is_right = NOT is_right")
            assert 0 < value_of(connection, html.unescape(said[1]).encode())["measures"]["mrr"] < 1
        # on the page of the document each segment can be marked, cited or not
        here = {"store": "public.boats", "document": "boats.pdf", "q": "blue boat"}
        shown = client.get("/document", params=here).text
        assert len(re.findall('aria-pressed="true"', shown)) == 2
        assert 'aria-pressed="true" aria-label="Right: boats.pdf, segment 1"' in shown
        assert 'aria-pressed="false" aria-label="Right: boats.pdf, segment 3"' in shown
        assert 'id="segment3"' in shown
        form = {
            "question": "blue boat", "vector_store": "public.boats", "document": "boats.pdf", "segment_number": "3",
            "mark": "right", "from": "/document", "here": "store=public.boats&document=boats.pdf&q=blue+boat",
        }  # fmt: skip
        done = client.post("/mark", data=form)
        assert (done.status_code, done.headers["location"]) == (303, f"/document?{form['here']}#segment3")
        shown = client.get(done.headers["location"]).text
        assert 'aria-pressed="true" aria-label="Right: boats.pdf, segment 3"' in shown
        client.post("/mark", data=form | {"mark": "none"})
        # an address of somebody else is none to go to
        away = client.post("/mark", data=form | {"mark": "none", "from": "//evil.example/"}).headers["location"]
        assert away.startswith("/?store=")
        assert 'action="/mark"' not in client.get("/document", params=here | {"q": ""}).text
        mark("none", 2)
        mark("none", 1)
        assert owner.execute("SELECT count(*) FROM mark").fetchone() == (0,)
        assert client.post("/mark", data={"mark": "right"}).status_code == 400
        assert client.post("/mark", content=b"x" * (explore.FORM + 1)).status_code == 413
        owner.execute(f"REVOKE INSERT ON mark FROM {db.role('asker')}")
        form = {"question": "q", "vector_store": "s", "document": "d", "mark": "right"}
        refused = client.post("/mark", data=form)
        assert refused.status_code == 400
        assert "42501" in refused.text


def test_the_role_sees_what_it_may(db: Database, boats: str, tenant_dsn: str) -> None:
    owner = db.connect()
    owner.execute("ALTER TABLE boats ENABLE ROW LEVEL SECURITY")
    owner.execute(f"CREATE POLICY seen ON boats TO {db.role('tenant')} USING (segment_number <> 2)")
    with served(tenant_dsn) as page:
        asked = page.get(q="blue boat", a='{"vector_store": ["public.boats"]}')
        # the question is all that has the word
        assert "Candidates of each stage" in asked.text
        assert not re.findall(r'class="segment">blue boat|excerpt">blue boat', asked.text)
        assert "of 2." in text_of(page.get("/document", store="public.boats", document="boats.pdf"))
        hidden = text_of(page.get("/why", q="blue boat", document="boats.pdf", segment=2))
        assert "no segment of that number" in hidden


def test_only_marks_are_written(boats: str, trap: psycopg.Connection) -> None:
    with served(boats) as page:
        assert "25006" in text_of(page.get(q="boat", a='{"vector_store": ["public.trap"]}'))
    assert trap.execute("SELECT count(*) FROM written").fetchone() == (0,)


def test_the_searches_of_the_lists() -> None:
    told = {"candidates": {"semantic": 3, "reranked": 3}, "thresholds": {"method": "n_citations", "n_citations": 3}}
    options = {"rerank": {"min_score": 0.5, "candidates": 7}, "prompt": {"system": "x"}, "filters": {"a": 1}}
    (semantic, first), (reranked, last) = searches(options, told)
    assert (semantic.name, semantic.threshold, first["n_citations"]) == ("semantic", None, 100)
    assert first == {"filters": {"a": 1}, "semantic_search": True, "keyword_search": False, "n_citations": 100}
    assert (reranked.name, last["rerank"], last["n_citations"]) == (
        "reranked", {"candidates": 7, "min_score": None}, 7,
    )  # fmt: skip
    arms = {"arms": [{"search": "keyword", "min_score": 2, "weight": 1}, {"search": "keyword", "candidates": 5}]}
    made = searches(arms, {"candidates": {}, "thresholds": {"method": "n_citations", "n_citations": 3}})
    assert [c.name for c, _ in made] == ["keyword", "keyword 2", "fused"]
    assert [c.threshold for c, _ in made] == [2, None, None]
    assert made[0][1] == {"arms": [{"search": "keyword"}], "n_citations": 100}
    # no more than the arm with the fewest brings, which more citations would raise
    assert made[2][1]["n_citations"] == 5


def test_the_places_of_a_drawing() -> None:
    candidates = Candidates("semantic", "distance", [{"distance": d} for d in (0.2, 0.4, None)], threshold=0.3)
    drawn = chart.strip(candidates)
    assert drawn["ticks"] == [
        {"x": 1.0, "is_kept": True, "is_cited": False},
        {"x": 99.0, "is_kept": False, "is_cited": False},
    ]
    assert drawn["line"] == 50.0
    scores = chart.strip(Candidates("fused", "score", [{"score": 1.0}, {"score": 0.0}]))
    assert [tick["x"] for tick in scores["ticks"]] == [1.0, 99.0]
    journey = Journey("q", {}, {"explain": {"milliseconds": {"search": 3, "discover": 1, "odd": 1, "total": 5}}})
    bars = chart.bars(journey.waterfall())
    assert [(bar["stage"], bar["x"], bar["width"]) for bar in bars] == [
        ("discover", 0.0, 20.0),
        ("search", 20.0, 60.0),
        ("odd", 80.0, 20.0),
    ]


def test_names_and_excerpts() -> None:
    assert [explore.short(name) for name in ("/srv/docs/a b.pdf", "a.pdf", "https://x.org/y/", None, "", "/")] == [
        "a b.pdf", "a.pdf", "y", "–", "–", "/"
    ]  # fmt: skip
    assert marked.excerpt("# Head\n\n| a | b |\n| --- | :-: |\n| 1-2 | x |") == "Head a b 1-2 x"
    assert marked.excerpt("one two three", 8) == "one two …"
    assert marked.excerpt("The **first**, of `a_b`") == "The first, of a_b"
    assert marked.excerpt("x" * 200) == "x" * 120 + " …"
    assert marked.excerpt(None) == ""


def test_markdown_is_text_with_tables_and_marked_passages() -> None:
    table = "| plan | copay |\n|---|---|\n| Plus<br>One | $20 |\n| x | y |\n"
    text = f"# Costs & <b>more</b>\n\nIt is *so*. A visit is $20.\n\n{table}"
    passages = [{"start": 0, "end": 10}, {"start": text.index("A visit"), "end": text.index("\n\n| plan")}]
    passages.append({"start": text.index("| Plus"), "end": text.index("| x")})
    made = marked.markdown(text, passages)
    assert '<p class="heading"><mark>Costs &amp;</mark> more</p>' in made
    assert "<p>It is <em>so</em>. <mark>A visit is $20.</mark></p>" in made
    plus = '<td data-label="plan"><mark>Plus</mark><br><mark>One</mark></td>'
    assert f'{plus}\n<td data-label="copay"><mark>$20</mark></td>' in made
    assert '<td data-label="plan">x</td>' in made
    quoted = marked.markdown('| "a" |\n| --- |\n| <b |')
    assert '<td data-label="&#34;a&#34;">&lt;b</td>' in quoted
    for given, shown in (
        ("<script>alert(1)</script>", "&lt;script&gt;alert(1)&lt;/script&gt;"),
        ("[a](https://example.org/x)", "<p>a</p>"),
        ("![a picture](https://example.org/x.png)", "<p>a picture</p>"),
        ("a `<b>` c", "<p>a <code>&lt;b&gt;</code> c</p>"),
        ("<!-- hidden -->", "&lt;!-- hidden --&gt;"),
        ("    code <i", ">code &lt;i"),
    ):
        assert shown in marked.markdown(given), given
    assert "href" not in marked.markdown("[a](javascript:x) <https://example.org>")
    # in the marks' own characters, beyond the end, in the middle of a mark
    assert marked.markdown("a\ufdd0b", [{"start": 0, "end": 99}]) == "<p><mark>a b</mark></p>\n"
    # nor does a reference to a character that is kept for itself
    planted = "".join(f"&#x{place:x}; &#{place};" for place in (0xE000, 0xE001, 0xFDD0, 0xFDD1))
    assert "<mark" not in marked.markdown(f"a {planted} `b {planted}`\n\n    {planted}\n")


def test_a_table_that_would_be_shown_without_end_is_shown_as_text() -> None:
    label = f"| {'x' * 5000} |\n|---|\n" + "|a|\n" * 1200
    assert len(marked.markdown(label)) < 200_000
    cells = f"{'|&' * 600}|\n{'|-' * 600}|\n" + "|\n" * 3700
    assert max(len(marked.markdown(cells)), len(marked.markdown(cells.replace("\n", "\r")))) < 100_000
    assert marked.markdown("|a|b|\n|-|-|\n" + "|c|d|\n" * 1000).count("<td") == 2000


def test_an_answer_in_pieces() -> None:
    claims = [{"start_pos": 2, "end_pos": 4}, {"start_pos": 3, "end_pos": 5}, {"start_pos": 5, "end_pos": 99}]
    assert marked.supported("0123456", claims) == [("01", None), ("23", claims[0]), ("456", None)]
    assert marked.supported("", []) == []
    assert marked.cells("See:  \n| a | b c |\n a | b\n| |") == "See:  \na · b c\n a | b\n"
    row = {"segment": "One. Two three.", "highlights": [{"start": 5, "end": 15}]}
    assert [marked.best(row), marked.best({"segment": "One."})] == ["Two three.", "One."]


def test_where_two_segments_meet() -> None:
    assert explore.overlap("one two", "two three") == 3
    assert explore.overlap("one", "two") == 0
    assert explore.overlap("", "x") == 0
    assert explore.overlap("a" * 3000, "a" * 3000) == explore.OVERLAP


@pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium")
@pytest.mark.parametrize(("width", "scheme"), [(390, "light"), (1280, "dark")])
def test_in_a_real_browser(boats: str, tmp_path: Path, width: int, scheme: str) -> None:
    """The page as Chromium has it: shown, styled, and nothing that its policy refuses."""
    picture = Path(os.environ.get("ML_RAG_PICTURES", str(tmp_path))) / f"explore-{width}-{scheme}.png"
    with started(boats) as url:
        command = [str(CHROMIUM), "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        command += [f"--user-data-dir={tmp_path}", f"--window-size={width},1800", "--enable-logging=stderr"]
        command += ["--hide-scrollbars", *(["--force-dark-mode"] if scheme == "dark" else [])]
        asked = f"{url}&{urlencode({'q': 'blue boat', 'a': LIMITED, 'generate': 1})}"
        for wanted in (["--dump-dom"], [f"--screenshot={picture}"]):
            done = subprocess.run([*command, *wanted, asked], capture_output=True, text=True, timeout=120, check=False)
            assert "Refused to" not in done.stderr
            if wanted == ["--dump-dom"]:
                assert "What moved where" in done.stdout
                assert "token=" not in done.stdout
    # a page without its style is narrow text on one colour, a few kilobytes
    assert picture.stat().st_size > 20_000


@contextlib.contextmanager
def started(dsn: str, *arguments: str) -> Iterator[str]:
    """The command itself, and the address that it prints."""
    port = free_port()
    process = subprocess.Popen(
        [*ML_RAG, "explore", "--port", str(port), *arguments],
        env={**os.environ, "ML_RAG_DSN": dsn}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        wait_for_port(port, process)
        yield url
    finally:
        process.terminate()
        _, logged = process.communicate(timeout=30)
    assert "made for a test" not in logged
    assert "Traceback" not in logged


def test_a_connection_that_sends_no_request_is_closed(boats: str, monkeypatch: pytest.MonkeyPatch) -> None:
    impatient = "from ml_rag.integrations import connections as c; c.PATIENCE = 0.2; "
    monkeypatch.setattr(sys.modules[__name__], "ML_RAG", [*ML_RAG[:2], impatient + ML_RAG[2]])
    with started(boats) as url:
        port = int(url.split(":")[2].split("/")[0])
        for sent in (b"", b"GET / HTTP/1.1\r\nHost: x\r\n"):
            with socket.create_connection(("127.0.0.1", port), 10) as connection, contextlib.suppress(ConnectionError):
                connection.sendall(sent)
                assert connection.recv(1) == b""


def test_each_start_has_a_token_of_its_own(boats: str) -> None:
    with started(boats) as first, started(boats) as second:
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/\?token=[\w-]{43}", first)
        assert first.partition("token=")[2] != second.partition("token=")[2]
        assert httpx.get(first).status_code == 303


def test_a_wrong_dsn_ends_the_command_without_its_password() -> None:
    command = [*ML_RAG, "explore", "--dsn", "host=/nowhere password=secret-of-mine"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "secret-of-mine" not in done.stderr + done.stdout
