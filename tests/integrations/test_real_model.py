"""Each client with the real small models behind it: whatever the model writes, it comes through, and nothing breaks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from langchain_core.messages import AIMessage, HumanMessage
from mcp.client import Client
from openai import OpenAI
from psycopg import sql
from psycopg.conninfo import make_conninfo

from ml_rag.integrations import langchain, llama_index, mcp
from ml_rag.integrations.gateway import Config, digest
from support.cluster import Cluster, Database, value_of
from support.real_model import MODEL, need_models, need_own_machine
from support.served import explored, gateway_of
from support.servers import running_server

pytestmark = pytest.mark.models

LEAVE = "Employees at Northwind get 25 vacation days a year."
TEXTS = [LEAVE, "Laptops are replaced every four years.", "PerksPlus pays up to 1000 dollars a year for lessons."]
QUESTION = "How many vacation days do employees get?"
#: what asks a model before the search, and what makes its answer long, short, or of another form
ASKED: list[dict[str, Any]] = [
    {},
    {"query_options": {"rewrite": True, "synonyms": True, "sub_questions": 2, "hypothetical_document": True}},
    {"query_options": {"filters": True, "document_names": True}},
    {"keyword_search": True, "rerank": {"model_id": "hybrid"}, "model_options": {"max_tokens": 3, "temperature": 2}},
]


@pytest.fixture(scope="module")
def database(cluster: Cluster, reachable_dir: Path) -> Iterator[Database]:
    """A database whose model server has the real default models, and a store of the role asker's."""
    need_own_machine()
    folder = need_models("all_minilm_l6_v2", MODEL)
    socket = reachable_dir / "clients.sock"
    config = '[server]\nsocket_mode = "0666"\n'
    with running_server(fake_models=False, models_dir=folder, socket=socket, config=config), cluster.database() as made:
        owner, name = made.connect(), sql.Identifier(made.role("asker"))
        settings = {
            "model_server": f"unix:{socket}",
            "embed_model_id": None,
            "generate_model_id": "smollm2-135m-instruct",
        }
        for setting, value in settings.items():
            owner.execute("SELECT ml_rag.configure(%s, %s)", (setting, value))
        owner.execute(sql.SQL("ALTER ROLE {} LOGIN PASSWORD 'made for a test'").format(name))
        owner.execute(sql.SQL("GRANT CREATE ON SCHEMA public TO {}").format(name))
        owner.execute(sql.SQL("GRANT ml_rag_loader TO {}").format(name))
        try:
            yield made
        finally:
            owner.execute(sql.SQL("REVOKE ml_rag_loader FROM {}").format(name))
            owner.execute(sql.SQL("ALTER ROLE {} NOLOGIN").format(name))


@pytest.fixture(scope="module")
def dsn(database: Database) -> str:
    made = make_conninfo(database.dsn, dbname=database.name, user=database.role("asker"), password="made for a test")
    store = langchain.MlRagVectorStore(made, "public.handbook")
    store.add_texts(TEXTS, [{"source": f"page-{n}.md", "page": n} for n, _ in enumerate(TEXTS, 1)])
    store.close()
    return made


@pytest.mark.parametrize("options", ASKED, ids=json.dumps)
def test_langchain(dsn: str, options: dict[str, Any]) -> None:
    retriever = langchain.MlRagRetriever(dsn=dsn, k=3, options=options)
    found = retriever.invoke(QUESTION)
    retriever.close()
    if "filters" in json.dumps(options):  # the model may have chosen a condition that nothing fulfils
        assert {document.page_content for document in found} <= set(TEXTS)
    else:
        assert len(found) == 3
    if options == {}:
        assert found[0].page_content == LEAVE


def test_a_history_of_langchain_goes_on_with_the_model(database: Database, dsn: str) -> None:
    history = langchain.MlRagChatMessageHistory(dsn)
    history.add_messages([HumanMessage("Who pays for lessons?"), AIMessage("PerksPlus does.")])
    owner = database.connect("asker")
    found = value_of(
        owner, "SELECT ml_rag_chat(%s, %s)", ("And how much?", json.dumps({"conversation_id": history.conversation_id}))
    )
    assert [message.type for message in history.messages] == ["human", "ai", "human", "ai"]
    assert history.messages[-1].content == found["text"]
    history.clear()
    history.close()


@pytest.mark.parametrize("options", ASKED, ids=json.dumps)
def test_llama_index(dsn: str, options: dict[str, Any]) -> None:
    retriever = llama_index.MlRagRetriever(dsn, {"n_citations": 3, **options})
    found = retriever.retrieve(QUESTION)
    retriever.close()
    assert {node.text for node in found} <= set(TEXTS)
    if "filters" not in json.dumps(options):
        assert len(found) == 3


@pytest.mark.parametrize("options", ASKED, ids=json.dumps)
async def test_an_agent(dsn: str, options: dict[str, Any]) -> None:
    async with Client(mcp.server(dsn)) as client:
        arguments = {"query": QUESTION, "limit": 2, "options": options}
        result = await client.call_tool("answer", arguments)
        assert not result.is_error, result.content
        answer = result.structured_content
        assert answer is not None
        assert {citation["segment"] for citation in answer["citations"]} <= set(TEXTS)
        assert (answer["text"] is None) == (answer["citations"] == [])


@pytest.mark.parametrize("options", ASKED, ids=json.dumps)
def test_a_chat_client(database: Database, dsn: str, options: dict[str, Any]) -> None:
    config = Config({digest("token"): database.role("asker")}, {"handbook": {"abstain": True, **options}})
    messages: list[Any] = [
        {"role": "system", "content": "Answer in one sentence."},
        {"role": "user", "content": "Who pays for lessons?"},
        {"role": "assistant", "content": "PerksPlus does."},
        {"role": "user", "content": "And how much?"},
    ]
    with gateway_of(dsn, config) as url:
        client = OpenAI(base_url=url, api_key="token", max_retries=0, timeout=300)
        whole = client.chat.completions.create(model="handbook", messages=messages, temperature=0)
        assert whole.choices[0].message.content is not None
        pieces = list(client.chat.completions.create(model="handbook", messages=messages, temperature=0, stream=True))
    assert pieces[-1].choices[0].finish_reason == "stop"
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces)


def test_a_chat_client_reads_what_the_model_writes(database: Database, dsn: str) -> None:
    asked: Any = {"model": "handbook", "messages": [{"role": "user", "content": QUESTION}], "temperature": 0}
    with gateway_of(dsn, Config({digest("token"): database.role("asker")}, {"handbook": {}})) as url:
        client = OpenAI(base_url=url, api_key="token", max_retries=0, timeout=300)
        whole = client.chat.completions.create(**asked)
        usage = {"include_usage": True}
        *pieces, last = client.chat.completions.create(**asked, stream=True, stream_options=usage)
    texts = [text for piece in pieces if (text := piece.choices[0].delta.content)]
    assert "".join(texts) == whole.choices[0].message.content
    assert "25" in "".join(texts)
    assert len(texts) > 3
    assert last.usage == whole.usage


def test_the_default_model_is_asked_for_no_title(database: Database, dsn: str) -> None:
    task: Any = [
        {"role": "user", "content": '### Task:\nSuggest a title.\nJSON format: { "title": "your title here" }'}
    ]
    for models in ({"handbook": {}}, {"handbook": {"model_options": {"model_id": MODEL}}}):
        with gateway_of(dsn, Config({digest("token"): database.role("asker")}, models)) as url:
            client = OpenAI(base_url=url, api_key="token", max_retries=0, timeout=300)
            answer = client.chat.completions.create(model="handbook", messages=task)
        assert answer.choices[0].message.content == "{}"
        assert answer.usage is not None
        assert answer.usage.total_tokens == 0


@pytest.mark.parametrize("options", ASKED, ids=json.dumps)
def test_the_page(dsn: str, options: dict[str, Any]) -> None:
    with explored(dsn, "token") as url:
        asked = {"q": QUESTION, "a": json.dumps(options), "b": "{}", "generate": "1"}
        page = httpx.get(url, params=asked, headers={"authorization": "Bearer token"}, timeout=300)
    assert page.status_code == 200
    assert "What changed" in page.text
    assert LEAVE in page.text
