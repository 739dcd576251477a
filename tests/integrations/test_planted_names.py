"""What others create on the search_path of a role runs in no statement of the integrations."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from urllib.parse import urlencode

import httpx
import psycopg
import pytest
from langchain_core.messages import AIMessage, HumanMessage
from llama_index.core.schema import TextNode
from llama_index.core.vector_stores.types import MetadataFilters, VectorStoreQuery
from mcp.client import Client
from openai import OpenAI
from psycopg.conninfo import make_conninfo

from ml_rag.errors import MlRagError
from ml_rag.integrations import explore, gateway, langchain, llama_index, mcp
from support.cluster import Cluster, Connection, Database
from support.planted_names import configure, planted, ran
from support.served import explored, gateway_of
from support.stores import create_store, fake_embedding

TOKEN = "token of the test"


@pytest.fixture(scope="module")
def owned(cluster: Cluster, model_server: str) -> Iterator[Database]:
    with planted(cluster) as database:
        admin = database.connect()
        configure(admin, model_server)
        planter = database.connect("stranger")
        for operator, type_ in itertools.product(("=", "<>", "<", ">"), ("integer", "bigint", "oid", "name", "text")):
            planter.execute(
                f"CREATE OPERATOR public.{operator} (LEFTARG = {type_}, RIGHTARG = {type_}, FUNCTION = public.planted)"
            )
        admin.execute("CREATE SCHEMA own")
        create_store(admin, "own.notes", [("a/d", 1, 1, "the plan", fake_embedding("the plan"))], "public.vector(16)")
        admin.execute("ALTER TABLE own.notes ALTER document_name TYPE varchar")
        admin.execute("SELECT ml_rag.enable_keyword_search('own.notes')")
        admin.execute(
            "CREATE TABLE own.mark (question varchar, vector_store varchar, document varchar, segment_number bigint,"
            " is_right boolean)"
        )
        admin.execute(f"GRANT ml_rag_user TO {database.role('asker')}")
        yield database


@pytest.fixture
def admin(owned: Database) -> Iterator[Connection]:
    connection = owned.connect()
    assert not ran(connection)
    yield connection
    assert not ran(connection)


@pytest.fixture
def dsn(owned: Database) -> str:
    """A superuser's, whose search_path has pg_catalog last, so that objects of the same types come before its own."""
    return make_conninfo(owned.dsn, dbname=owned.name, options="-csearch_path=own,public,pg_catalog")


async def test_mcp(admin: Connection, dsn: str) -> None:
    async with Client(mcp.server(dsn)) as client:
        for name, arguments in (
            ("list_stores", {}),
            ("search", {"query": "the plan", "options": {"keyword_search": True}}),
            ("answer", {"query": "the plan"}),
            ("read_document", {"store": "own.notes", "document_name": "a/d"}),
            ("read_document", {"store": "own.notes", "document_name": "d"}),
        ):
            result = await client.call_tool(name, arguments)
            assert not result.is_error, (name, result.content)
            assert "the plan" in str(result.content) or name == "list_stores"


def test_the_page_and_its_marks(admin: Connection, dsn: str) -> None:
    # the table is named without its schema
    headers = {"authorization": f"Bearer {TOKEN}"}
    with explored(dsn, TOKEN, "mark") as url, httpx.Client(base_url=url, headers=headers, timeout=60) as client:
        form = {"question": "the plan", "vector_store": "own.notes", "document": "a/d", "segment_number": "1"}
        for kind in ("right", "wrong", "none", "right"):
            assert client.post("/mark", data={**form, "mark": kind}).status_code == 303
        assert admin.execute("SELECT document FROM own.mark").fetchall() == [("a/d",)]
        for path, query in (
            ("/", {"q": "the plan", "a": '{"keyword_search": true}'}),
            ("/why", {"q": "the plan", "document": "a/d"}),
            ("/document", {"store": "own.notes", "document": "a/d", "q": "the plan"}),
            ("/stores", {}),
            ("/store", {"store": "own.notes"}),
            ("/runs", {}),
            ("/question", {"q": "the plan"}),
        ):
            assert client.get(f"{path}?{urlencode(query)}").status_code == 200, path


def test_a_table_of_marks_that_is_not_there_is_said(dsn: str) -> None:
    with pytest.raises(MlRagError, match="the table of the marks does not exist"):
        explore.app(dsn, TOKEN, 1, "nothing")


def test_a_table_of_marks_of_an_untrusted_role_must_be_named(owned: Database, admin: Connection, dsn: str) -> None:
    """The owner of a schema on the path could run code when marks are read and written."""
    admin.execute(f"CREATE SCHEMA theirs AUTHORIZATION {owned.role('tenant')}")
    owned.connect("tenant").execute("CREATE TABLE theirs.note AS SELECT 1 AS question")
    theirs = make_conninfo(dsn, options="-csearch_path=theirs,own,public")
    with pytest.raises(MlRagError, match="the table of the marks is not trusted"):
        explore.app(theirs, TOKEN, 1, "note")
    explore.app(theirs, TOKEN, 1, "theirs.note")
    explore.app(theirs, TOKEN, 1, "mark")


def test_what_takes_the_name_of_the_table_of_marks_runs_no_code(owned: Database, admin: Connection, dsn: str) -> None:
    """Its owner drops it while the page is open, and somebody else may create in its schema."""
    columns = "question text, vector_store text, document text, segment_number bigint, is_right boolean"
    admin.execute(f"CREATE SCHEMA shared; CREATE TABLE shared.liked ({columns})")
    admin.execute(f"GRANT CREATE, USAGE ON SCHEMA shared TO {owned.role('stranger')}")
    path = make_conninfo(dsn, options="-csearch_path=shared,own,public")
    headers = {"authorization": f"Bearer {TOKEN}"}
    form = {"question": "the plan", "vector_store": "own.notes", "document": "a/d", "mark": "right"}
    with explored(path, TOKEN, "liked") as url, httpx.Client(base_url=url, headers=headers, timeout=60) as client:
        assert client.post("/mark", data=form).status_code == 303
        admin.execute("DROP TABLE shared.liked")
        planter = owned.connect("stranger")
        planter.execute(f"CREATE TABLE shared.liked ({columns}); CREATE TABLE shared.ran (role text)")
        planter.execute(
            "CREATE FUNCTION shared.note() RETURNS trigger LANGUAGE plpgsql AS"
            " $$ BEGIN INSERT INTO shared.ran VALUES (current_user); RETURN NEW; END $$;"
            " CREATE TRIGGER note BEFORE INSERT ON shared.liked FOR EACH ROW EXECUTE FUNCTION shared.note()"
        )
        for answer in (client.post("/mark", data=form), client.get("/?q=the+plan")):
            assert (answer.status_code, "was replaced" in answer.text) == (400, True)
        assert planter.execute("SELECT role FROM shared.ran").fetchall() == []
        admin.execute(f"DROP TABLE shared.liked; CREATE TABLE shared.liked ({columns})")
        assert client.post("/mark", data=form).status_code == 303


def test_the_gateway(owned: Database, admin: Connection, dsn: str) -> None:
    admin.execute(f"GRANT USAGE ON SCHEMA own TO {owned.role('asker')}")
    admin.execute(f"GRANT SELECT ON own.notes TO {owned.role('asker')}")
    config = gateway.Config(tokens={gateway.digest(TOKEN): owned.role("asker")})
    with gateway_of(dsn, config) as url, OpenAI(base_url=url, api_key=TOKEN, max_retries=0) as client:
        message = {"role": "user", "content": "the plan"}
        assert client.chat.completions.create(model="ml_rag", messages=[message]).choices[0].message.content
        assert client.embeddings.create(model="fake-embed", input="the plan").data


@pytest.mark.fresh
async def test_what_takes_the_names_of_the_extension_runs_no_code(db: Database) -> None:
    """It is dropped while programs have connections, and somebody else may create in its schema."""
    owner, planter = db.connect(), db.connect("tenant")
    create_store(owner, "public.notes", [("a/d", 1, 1, "the plan", fake_embedding("the plan"))], "vector(16)")
    owner.execute(f"GRANT CREATE ON SCHEMA public TO {db.role('tenant')}")
    dsn = make_conninfo(db.dsn, dbname=db.name)
    retriever, store = langchain.MlRagRetriever(dsn=dsn), langchain.MlRagVectorStore(dsn, "public.chain")
    nodes = llama_index.MlRagRetriever(dsn)
    assert [found.page_content for found in retriever.invoke("the plan")] == ["the plan"]
    assert [found.text for found in nodes.retrieve("the plan")] == ["the plan"]
    config = gateway.Config(tokens={gateway.digest(TOKEN): db.role("asker")})
    headers = {"authorization": f"Bearer {TOKEN}"}
    asked = {"model": "ml_rag", "messages": [{"role": "user", "content": "the plan"}]}
    async with Client(mcp.server(dsn)) as client:
        assert not (await client.call_tool("search", {"query": "the plan"})).is_error
        with (
            gateway_of(dsn, config) as chat,
            explored(dsn, TOKEN) as page,
            httpx.Client(headers=headers, timeout=60) as http,
        ):
            assert http.post(f"{chat}/chat/completions", json=asked).status_code == 200
            assert http.get(f"{page}/?q=the+plan").status_code == 200
            owner.execute("DROP EXTENSION ml_rag CASCADE")
            planter.execute(
                "CREATE SEQUENCE public.calls; GRANT ALL ON SEQUENCE public.calls TO PUBLIC;"
                "CREATE FUNCTION public.ml_rag_search(query text, options jsonb) RETURNS TABLE (rank bigint)"
                " LANGUAGE sql AS $$ SELECT nextval('public.calls') $$;"
                "CREATE FUNCTION public.ml_supported_models() RETURNS TABLE (model_id text, task text, available bool)"
                " LANGUAGE sql AS $$ SELECT nextval('public.calls')::text, '', true $$"
            )
            for ask in (lambda: retriever.invoke("the plan"), lambda: nodes.retrieve("the plan"), store.delete):
                with pytest.raises(psycopg.ProgrammingError, match="was dropped"):
                    ask()
            for tool in ("search", "answer"):
                assert "was dropped" in str((await client.call_tool(tool, {"query": "the plan"})).content)
            assert http.post(f"{chat}/chat/completions", json=asked).status_code == 503
            assert http.get(f"{page}/?q=the+plan").status_code == 400
    assert owner.execute("SELECT is_called FROM public.calls").fetchone() == (False,)
    for one in (retriever, store, nodes):
        one.close()


def test_langchain(admin: Connection, dsn: str) -> None:
    store = langchain.MlRagVectorStore(dsn, "own.chain")
    store.add_texts(["red boat", "blue boat"], ids=["r", "b"])
    store.create_index()
    assert [found.id for found in store.similarity_search("blue boat", k=1)] == ["b"]
    assert len(store.max_marginal_relevance_search("blue boat", k=2)) == 2
    assert [found.id for found in store.get_by_ids(["r"])] == ["r"]
    store.delete(["r"])
    store.close()
    retriever = langchain.MlRagRetriever(dsn=dsn, k=1, options={"vector_store": ["own.chain"]})
    assert [found.page_content for found in retriever.invoke("boat")] == ["blue boat"]
    retriever.close()
    history = langchain.MlRagChatMessageHistory(dsn)
    history.add_messages([HumanMessage("red?"), AIMessage("blue")])
    assert [message.text for message in history.messages] == ["red?", "blue"]
    history.clear()
    history.close()


def test_llama_index(admin: Connection, dsn: str) -> None:
    store = llama_index.MlRagVectorStore(dsn, "own.llama", 16)
    store.add([TextNode(id_=name, text=name, embedding=fake_embedding(name)) for name in ("red", "blue")])
    store.create_index()
    query = VectorStoreQuery(query_embedding=fake_embedding("blue"), query_str="blue", similarity_top_k=1)
    assert store.query(query).ids == ["blue"]
    assert len(store.get_nodes(filters=MetadataFilters(filters=[]))) == 2
    store.delete_nodes(["blue"])
    assert [node.node_id for node in store.get_nodes()] == ["red"]
    store.close()


def test_the_path_of_a_session_stays(dsn: str) -> None:
    """Statements run under a path of their own by transaction, since a pooler gives the session to others."""
    store = langchain.MlRagVectorStore(dsn, "own.chain")
    with store._database._pool.connection() as connection:
        connection.execute("SELECT 1")
        row = connection.execute("SHOW search_path").fetchone()
        assert row == {"search_path": "own,public,pg_catalog"}
    store.close()
    with pytest.raises(psycopg.OperationalError):
        langchain.MlRagVectorStore(make_conninfo(dsn, dbname="nothing"), "own.chain")
