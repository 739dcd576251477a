"""ground/schema, ground/types, ground/settings, ground/configure: settings, comments; CREATE and DROP EXTENSION."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path
from typing import Any

import pytest

from support.cluster import Cluster, Connection, Database, noticed
from support.hostile_server import hostile, reply, silent
from support.schema import LARGE
from support.stores import create_store, error

SETTINGS = {
    "model_server": "unix:/run/ml_rag/ml_rag.sock",
    "embed_model_id": "all_minilm_l6_v2",
    "generate_model_id": None,
    "query_model_id": None,
    "rerank_model_id": "ms-marco-minilm-l6-v2",
    "abstain_text": "I do not know: nothing relevant was found in the documents.",
    "track": "on",
    "searched_owners": None,
    "default_options": None,
}
MEMBERS = """
    SELECT d.classid::regclass::text, pg_describe_object(d.classid, d.objid, 0),
      obj_description(d.objid, d.classid::regclass::name)
    FROM pg_depend AS d
    WHERE d.refclassid = 'pg_extension'::regclass AND d.deptype = 'e'
      AND d.refobjid = (SELECT oid FROM pg_extension WHERE extname = 'ml_rag')
"""


def value(connection: Connection, name: str) -> str | None:
    (found,) = connection.execute("SELECT value FROM ml_rag.setting WHERE name = %s", (name,)).fetchone() or (None,)
    assert found is None or isinstance(found, str)
    return found


def test_callers_can_read_what_tools_list(asker: Connection) -> None:
    listed = asker.execute(
        "SELECT format('ml_rag.%I', c.relname) FROM pg_class AS c"
        " WHERE c.relnamespace = 'ml_rag'::regnamespace AND c.relkind IN ('r', 'v', 'm', 'p', 'f')"
    ).fetchall()
    assert ("ml_rag.preset",) in listed
    for (relation,) in listed:
        asker.execute(f"SELECT * FROM {relation} LIMIT 1")


def test_settings_and_their_defaults(asker: Connection) -> None:
    rows = asker.execute("SELECT name, default_value, description FROM ml_rag.setting").fetchall()
    assert {r[0]: r[1] for r in rows} == SETTINGS
    assert all(r[2] for r in rows)


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_is_changed_and_put_back(owner: Connection, asker: Connection, name: str) -> None:
    pairs = {
        "model_server": ("unix:/elsewhere.sock", "unix:/elsewhere.sock2"),
        "track": ("off", "on"),
        "default_options": ('{"n_citations": 1}', "{}"),
        "searched_owners": ("ml_rag_user", 'ml_rag_user, "$user"'),
    }
    for new in pairs.get(name, ("another-model", "another-model2")):
        owner.execute("SELECT ml_rag.configure(%s, %s)", (name, new))
        assert value(asker, name) == new
    owner.execute("SELECT ml_rag.configure(%s, NULL)", (name,))
    assert value(asker, name) == SETTINGS[name]


@pytest.mark.parametrize("new", ["", "ON", "true", "x" * 1000])
def test_track_is_on_or_off(owner: Connection, asker: Connection, new: str) -> None:
    with error("22023", "on or off"):
        owner.execute("SELECT ml_rag.configure('track', %s)", (new,))
    assert value(asker, "track") == "on"


OF_SETTINGS = "SELECT * FROM ml_rag.setting describes them."


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("nonsense", OF_SETTINGS),
        ("", OF_SETTINGS),
        (None, OF_SETTINGS),
        ("MODEL_SERVER", 'Did you mean "model_server"?'),
        ("ml_rag.model_server", OF_SETTINGS),
        ("embed_model", 'Did you mean "embed_model_id"?'),
        (
            "n_citations",
            "It is an option, for all calls: SELECT ml_rag.configure('default_options', '{\"n_citations\": …}').",
        ),
    ],
)
def test_an_unknown_setting(owner: Connection, name: str | None, hint: str) -> None:
    with error("22023", "model_server, ") as caught:
        owner.execute("SELECT ml_rag.configure(%s, 'x')", (name,))
    assert caught.hint == hint


@pytest.mark.parametrize(
    "address",
    [
        "",
        "unix:",
        "/a/path",
        "https://host:1",
        "http://",
        "http://host",
        "http://host:",
        "http://127.0.0.1:1/path",
        "http://127.0.0.1/8:80",
        "http://[::1/64]:80",
        "unix:rel",
        "file:///x",
        "http://user@host:x",
        "localhost:1234",
    ],
)
def test_an_address_of_another_form(owner: Connection, address: str) -> None:
    before = value(owner, "model_server")
    with error("22023", "unix:/path/of/socket") as caught:
        owner.execute("SELECT ml_rag.configure('model_server', %s)", (address,))
    assert caught.hint == "Examples: unix:/run/ml_rag/ml_rag.sock, http://127.0.0.1:8080."
    assert value(owner, "model_server") == before


@pytest.mark.parametrize(
    "address",
    [
        "http://host.name:1",
        "http://host:1/",
        "http://1.2.3:80",
        "http://::1:80",
        "http://[1.2.3.4]:80",
        "http://[]:80",
        "http://LOCALHOST.:80",
        "http://[localhost]:80",
        "http://127.0.0.1:0",
        "http://127.0.0.1:65536",
        "http://[fe80::1%eth0]:80",
    ],
)
def test_a_host_name_or_a_port_that_is_none(owner: Connection, address: str) -> None:
    before = value(owner, "model_server")
    with error("22023", "IP address or localhost", "cannot be cancelled") as caught:
        owner.execute("SELECT ml_rag.configure('model_server', %s)", (address,))
    assert address in caught.detail
    assert value(owner, "model_server") == before


@pytest.mark.parametrize(
    "address",
    ["unix:/a b/c.sock", "http://127.0.0.1:8080", "http://[::1]:80/", "http://localhost:65535", "http://[fd00::1:2]:1"],
)
def test_an_address_as_it_should_be(owner: Connection, address: str) -> None:
    owner.execute("SELECT ml_rag.configure('model_server', %s)", (address,))
    assert value(owner, "model_server") == address


def test_only_the_owner_changes_settings(asker: Connection) -> None:
    with error("42501", ours=False):
        asker.execute("SELECT ml_rag.configure('model_server', 'unix:/tmp/evil.sock')")
    for statement in (
        "INSERT INTO ml_rag.setting_value VALUES ('embed_model_id', 'x')",
        "UPDATE ml_rag.setting_value SET value = 'x'",
        "DELETE FROM ml_rag.setting_value",
        "INSERT INTO ml_rag.setting VALUES ('model_server', 'x', 'x', 'x')",
    ):
        with error("42501", ours=False) if "ml_rag.setting " not in statement else pytest.raises(Exception):  # noqa: PT011
            asker.execute(statement)


def test_settings_are_part_of_a_dump(owner: Connection) -> None:
    rows = owner.execute(
        "SELECT c.relname FROM pg_extension AS e, unnest(e.extconfig) AS t JOIN pg_class AS c ON c.oid = t"
        " WHERE e.extname = 'ml_rag'"
    ).fetchall()
    assert ("setting_value",) in rows


def test_every_public_routine_and_view_has_a_comment(owner: Connection) -> None:
    missing = []
    for class_, name, comment in owner.execute(MEMBERS):
        private = name.partition("(")[0].rpartition(".")[2].startswith("_")
        if class_ in ("pg_proc", "pg_class") and not private and not comment:
            missing.append(name)
    assert missing == []


def test_a_comments_first_line_is_a_line(owner: Connection) -> None:
    for _, name, comment in owner.execute(MEMBERS):
        if comment is not None and "ml_rag" in name:
            first = comment.splitlines()[0]
            assert 0 < len(first) <= 120, name
            assert not first.endswith("."), name


def test_everything_private_is_in_the_schema_ml_rag(owner: Connection) -> None:
    rows = owner.execute(
        "SELECT p.proname FROM pg_proc AS p JOIN pg_depend AS d ON d.objid = p.oid AND d.deptype = 'e'"
        " WHERE d.refobjid = (SELECT oid FROM pg_extension WHERE extname = 'ml_rag')"
        " AND p.pronamespace <> 'ml_rag'::regnamespace ORDER BY 1"
    ).fetchall()
    public = {
        "ml_rag",
        "ml_rag_answer",
        "ml_rag_search",
        "ml_generate",
        "ml_embed_row",
        "ml_rank",
        "ml_rank_rows",
        "ml_supported_models",
    }
    later = {"ml_rag_table", "ml_generate_table", "ml_embed_table", "vector_store_load"}
    later |= {"ml_rag_evaluate", "ml_rag_compare_runs", "nl_sql", "ml_nl_sql", "ml_retrieve_schema_metadata"}
    later |= {"ml_rag_chat", "heatwave_chat", "ml_check_grounding", "ml_rag_show"}
    assert public <= {name for (name,) in rows} <= public | later


def test_rows_can_be_deleted_where_all_tables_are_published(owner: Connection) -> None:
    assert (
        owner.execute(
            "SELECT c.oid::regclass::text FROM pg_class AS c WHERE c.relkind IN ('r', 'p') AND c.relreplident <> 'f'"
            " AND c.relnamespace IN ('ml_rag'::regnamespace, 'ml_rag_internal'::regnamespace)"
            " AND NOT EXISTS (SELECT FROM pg_index AS x WHERE x.indrelid = c.oid AND x.indisprimary)"
        ).fetchall()
        == []
    )


def test_constraints_read_the_same_after_a_restore(owner: Connection) -> None:
    """pg_upgrade and pg_restore parse them anew, which writes BETWEEN beside AND in another way."""
    found = owner.execute(
        "SELECT conrelid::regclass::text, conname, pg_get_constraintdef(oid) FROM pg_constraint"
        " WHERE contype = 'c' AND connamespace::regnamespace::text IN ('ml_rag', 'ml_rag_internal')"
    ).fetchall()
    assert len(found) > 10
    for relation, name, definition in found:
        owner.execute(f"CREATE TEMP TABLE again (LIKE {relation}, CONSTRAINT {name} {definition})")
        read = owner.execute(
            "SELECT pg_get_constraintdef(oid) FROM pg_constraint WHERE conrelid = 'again'::regclass AND contype = 'c'"
        ).fetchone()
        assert read == (definition,), name
        owner.execute("DROP TABLE again")


def test_drop_extension_leaves_nothing_but_the_callers_own(cluster: Cluster, db: Database) -> None:
    owner = db.connect()
    create_store(owner)
    owner.execute("DROP EXTENSION ml_rag")
    assert owner.execute("SELECT to_regnamespace('ml_rag')").fetchone() == (None,)
    assert owner.execute("SELECT count(*) FROM pg_proc WHERE proname LIKE 'ml\\_%'").fetchone() == (0,)
    assert owner.execute("SELECT count(*) FROM docs").fetchone() == (0,)
    owner.execute("CREATE EXTENSION ml_rag")
    assert owner.execute("SELECT count(*) FROM ml_rag.discover()").fetchone() == (1,)


@pytest.mark.parametrize("schema", ["public", "extensions"])
def test_the_vector_extension_may_be_in_any_schema(cluster: Cluster, schema: str) -> None:
    with cluster.database(template="template0") as database:
        owner = database.connect()
        owner.execute(f"CREATE SCHEMA IF NOT EXISTS {schema}; CREATE EXTENSION vector SCHEMA {schema}")
        owner.execute("CREATE EXTENSION plpython3u; CREATE EXTENSION ml_rag")
        owner.execute(f"GRANT USAGE ON SCHEMA {schema} TO ml_rag_user")
        owner.execute(f"SET search_path = public, {schema}")
        create_store(owner, "public.docs", [("a", 1, 1, "s", (1, 0, 0))], model="all_minilm_l6_v2")
        asker = database.connect("asker")
        row = asker.execute("SELECT segment FROM ml_rag_search('q', '{\"query_embedding\": [1,0,0]}')").fetchone()
        assert row == ("s",)


# -- an address at which nothing answers ------------------------------------------------------------------------------


def configured(owner: Connection, address: str | None) -> list[tuple[str | None, ...]]:
    """Severity, message, detail, hint of what is said where the model server is to be at that address."""
    said: list[tuple[str | None, ...]] = []

    def keep(n: Any) -> None:
        said.append((n.severity_nonlocalized, n.message_primary, n.message_detail, n.message_hint))

    owner.add_notice_handler(keep)
    owner.execute("SELECT ml_rag.configure('model_server', %s)", (address,))
    owner.remove_notice_handler(keep)
    assert value(owner, "model_server") == (address or SETTINGS["model_server"])
    return said


@pytest.mark.parametrize(
    ("address", "why"), [("unix:/no/such.sock", "No such file"), ("http://127.0.0.1:1", "refused")]
)
def test_a_dead_address_is_set_with_a_warning(owner: Connection, address: str, why: str) -> None:
    ((severity, message, detail, hint),) = configured(owner, address)
    assert (severity, message) == ("WARNING", "the address is set, but the model server cannot be reached")
    assert detail is not None
    assert address in detail
    assert why in detail
    assert 'Start it with "ml-rag serve"' in str(hint)


def test_a_live_address_is_set_without_a_word(owner: Connection, local_sockets: Path) -> None:
    before = value(owner, "model_server")
    with hostile(local_sockets, silent) as server:
        assert configured(owner, server.address) == []
        assert server.requests == []
    assert configured(owner, before) == []


@pytest.mark.parametrize(
    ("name", "value", "task"),
    [
        ("generate_model_id", "fake-generate", None),
        ("generate_model_id", "gpt-5", "generate"),
        ("query_model_id", "fake-embed", "generate"),
        ("embed_model_id", "fake-embed", None),
        ("embed_model_id", "fake-embed@4", None),
        ("embed_model_id", "fake-generate", "embed"),
        ("rerank_model_id", "hybrid", None),
        ("rerank_model_id", "extractive", "rerank"),
        ("embed_model_id", None, None),
    ],
)
def test_a_model_that_is_not_there_is_set_with_a_warning(
    owner: Connection, name: str, value: str | None, task: str | None
) -> None:
    told = noticed(owner)
    owner.execute("SELECT ml_rag.configure(%s, %s)", (name, value))
    wanted = f'{name} is set, but the model server has no model "{value}" that can {task}'
    assert told == ([wanted] if task else [])


@pytest.mark.parametrize(
    "call",
    [
        "adopt('docs')",
        "create_vectorizer('items', '{\"columns\": \"name\"}')",
        "disable_keyword_search('docs')",
        "drop_embedding('docs', 'other')",
        "drop_node_group('docs', 'sentences')",
        "drop_vectorizer('items')",
        "enable_keyword_search('docs')",
        "use_embedding('docs', 'other')",
    ],
)
@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
def test_no_definition_is_changed_by_what_an_old_snapshot_shows(owner: Connection, call: str, level: str) -> None:
    """What others have changed since would be lost: another default embedding, a child of the node group."""
    create_store(owner, rows=[])
    owner.execute("CREATE TABLE items (id integer PRIMARY KEY, name text)")
    owner.execute(f"BEGIN ISOLATION LEVEL {level}".encode())
    with error("55000", "at this isolation level", f"The level is {level}", "at READ COMMITTED"):
        owner.execute(f"SELECT ml_rag.{call}".encode())
    owner.execute("ROLLBACK")


@pytest.mark.parametrize(
    ("name", "value", "nearest"),
    [
        ("embed_model_id", "multilingual-e5", "multilingual-e5-base"),
        ("embed_model_id", "fake-emebd@4", "fake-embed"),
        ("rerank_model_id", "hybird", "hybrid"),
        ("generate_model_id", "gpt-5", None),
        ("generate_model_id", "", None),
        ("generate_model_id", "fake-embed", None),
    ],
)
def test_a_model_that_is_spelt_almost_so_is_suggested(
    owner: Connection, name: str, value: str, nearest: str | None
) -> None:
    told = noticed(owner, lambda d: d.message_hint)
    owner.execute("SELECT ml_rag.configure(%s, %s)", (name, value))
    rest = "SELECT * FROM ml_supported_models() lists its models; "
    assert [str(hint).partition(rest)[:2] for hint in told] == [
        (f'Did you mean "{nearest}"? ' if nearest else "", rest)
    ]


def test_a_model_whose_files_are_missing_is_set_with_a_warning(owner: Connection, local_sockets: Path) -> None:
    listed = {"object": "list", "data": [LARGE, {**LARGE, "id": "own", "pull": None}, {**LARGE, "task": "embed"}]}
    with hostile(local_sockets, reply(listed)) as server:
        owner.execute("SELECT ml_rag.configure('model_server', %s)", (server.address,))
        told = noticed(owner, lambda d: (d.message_primary, d.message_hint))
        for name in ("large", "own"):
            owner.execute("SELECT ml_rag.configure('generate_model_id', %s)", (name,))
    assert told == [
        ('generate_model_id is set, but the files of model "large" are missing', "Get them with: get large"),
        (
            'generate_model_id is set, but the files of model "own" are missing',
            "SELECT * FROM ml_supported_models() lists the models that are there.",
        ),
    ]


def test_a_model_is_set_where_no_model_server_answers(owner: Connection) -> None:
    owner.execute("SELECT ml_rag.configure('model_server', 'unix:/no/such.sock')")
    told = noticed(owner)
    owner.execute("SELECT ml_rag.configure('embed_model_id', 'fake-embed')")
    assert told == []


def test_a_socket_that_postgresql_may_not_open_is_told(owner: Connection, local_sockets: Path) -> None:
    with hostile(local_sockets, silent) as server:
        Path(server.address.removeprefix("unix:")).chmod(0)
        ((_, message, _, hint),) = configured(owner, server.address)
    assert message == "the address is set, but the model server may not be reached"
    assert "socket_group" in str(hint)


def test_waiting_for_an_address_can_be_cancelled(owner: Connection, local_sockets: Path) -> None:
    before = value(owner, "model_server")
    path = local_sockets / "full.sock"
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(str(path))
        path.chmod(0o666)
        listener.listen(0)
        for _ in range(3):
            waiting = stack.enter_context(socket.socket(socket.AF_UNIX))
            waiting.setblocking(False)
            waiting.connect_ex(str(path))
        owner.execute("SET statement_timeout = '300ms'")
        with error("57014"):
            owner.execute("SELECT ml_rag.configure('model_server', %s)", (f"unix:{path}",))
    path.unlink()
    assert value(owner, "model_server") == before
