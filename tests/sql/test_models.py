"""ground/models, ground/python: what the model server offers, and its health."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from support.cluster import Connection, Database
from support.hostile_server import hostile, reply
from support.stores import error

# what a session loads, and when


def test_supported_models(module_asker: Connection) -> None:
    cursor = module_asker.execute("SELECT * FROM ml_supported_models()")
    assert cursor.description is not None
    assert [(c.name, c.type_display) for c in cursor.description] == [
        ("model_id", "text"),
        ("task", "text"),
        ("engine", "text"),
        ("dimensions", "int4"),
        ("max_tokens", "int4"),
        ("available", "bool"),
        ("is_default", "bool"),
    ]
    rows = {row[0]: row[1:] for row in cursor.fetchall()}
    assert rows["fake-embed"] == ("embed", "fake", 16, 256, True, True)
    assert rows["fake-generate"][0] == "generate"
    assert rows["fake-generate"][4:] == (True, True)
    assert rows["all_minilm_l6_v2"][:3] == ("embed", "sentence-transformers", 384)
    assert rows["all_minilm_l6_v2"][5] is False
    assert sorted(m for m, row in rows.items() if row[5]) == ["fake-embed", "fake-generate", "fake-rerank"]


def model(id: str, engine: str = "llama-cpp", **keys: Any) -> dict[str, Any]:
    return {"id": id, "task": "generate", "engine": engine, "available": True, "brief": False, **keys}


@pytest.mark.parametrize(
    ("models", "default"),
    [
        ([], "extractive"),
        ([model("extractive", "extractive")], "extractive"),
        (
            [model("tiny", brief=True), model("missing", available=False), model("e", "openai", task="embed")],
            "extractive",
        ),
        ([model("extractive", "extractive"), model("tiny", brief=True), model("far", "openai"), model("b")], "far"),
        ([model("b"), model("far", "openai")], "b"),
    ],
)
def test_the_generation_model_where_none_is_named(
    owner: Connection, asker: Connection, local_sockets: Path, models: list[Any], default: str
) -> None:
    owner.execute("SELECT ml_rag.configure('generate_model_id', NULL)")
    with hostile(local_sockets, reply(json.dumps({"data": models}).encode()), owner=owner):
        assert asker.execute("SELECT ml_rag._default_model()").fetchone() == (default,)
        rows = asker.execute(
            "SELECT model_id FROM ml_supported_models() WHERE is_default AND task = 'generate'"
        ).fetchall()
        assert rows == [(default,)] * (default in [m["id"] for m in models])
        # a setting goes first
        owner.execute("SELECT ml_rag.configure('generate_model_id', 'named')")
        assert asker.execute("SELECT ml_rag._default_model()").fetchone() == ("named",)


def test_calls_take_it(owner: Connection, asker: Connection) -> None:
    owner.execute("SELECT ml_rag.configure('generate_model_id', NULL)")
    named = asker.execute("""SELECT ml_generate('one two', '{"model_id": "fake-generate"}')""").fetchone()
    assert asker.execute("SELECT ml_generate('one two')").fetchone() == named


def test_health(module_asker: Connection) -> None:
    (health,) = module_asker.execute("SELECT ml_rag.model_server()").fetchone() or (None,)
    assert health["status"] == "ok"
    assert health["models"]["fake-embed"] in ("idle", "loaded")
    (version,) = module_asker.execute("SELECT ml_rag.version()").fetchone() or (None,)
    assert re.fullmatch(r"\d+\.\d+\.\d+", version)
    assert health["version"] == version


@pytest.mark.parametrize("call", ["SELECT ml_rag.model_server()", "SELECT * FROM ml_supported_models()"])
def test_server_down(owner: Connection, asker: Connection, call: str) -> None:
    owner.execute("SELECT ml_rag.configure('model_server', 'unix:/no/such.sock')")
    with error("08006", "unix:/no/such.sock") as caught:
        asker.execute(call)
    assert "ml-rag serve" in caught.hint
    assert "configure" in caught.hint


@pytest.mark.parametrize(
    "body",
    [
        b"[]",
        b'"x"',
        b"{",
        b'{"data": 7}',
        b'{"data": [7]}',
        b'{"data": [{"id": "m", "task": "embed", "dimensions": "many"}]}',
        b'{"data": [{"id": "m", "task": "embed", "dimensions": 1e300}]}',
        b'{"data": [{"id": "m", "task": "embed", "available": 7}]}',
        b'{"data": NaN}',
        b'{"data": [{"id": "\\u0000\\ud800", "dimensions": 1e999}]}',
    ],
    ids=str,
)
def test_a_list_of_models_that_is_none(owner: Connection, asker: Connection, local_sockets: Path, body: bytes) -> None:
    with hostile(local_sockets, reply(body), owner=owner):
        with error("38000") as caught:
            asker.execute("SELECT * FROM ml_supported_models()")
        assert "internal error" not in caught.message


def test_odd_health_is_passed_on_or_refused_but_never_an_internal_error(
    owner: Connection, asker: Connection, local_sockets: Path
) -> None:
    with hostile(local_sockets, reply(b'{"status": "a\\u0000b\\ud800"}'), owner=owner) as server:
        assert asker.execute("SELECT ml_rag.model_server()").fetchone() == ({"status": "ab?"},)
        server.handler = reply(b'{"status": Infinity}')
        with error("38000"):
            asker.execute("SELECT ml_rag.model_server()")


def test_the_python_side_is_loaded_once_a_session_and_is_of_this_version(db: Database, owner: Connection) -> None:
    rows = owner.execute(
        "SELECT count(*) FROM pg_proc WHERE prosrc LIKE '%%GD[\"ml_rag\"].VERSION != %%'"
        " AND prosrc NOT LIKE '%%' || ml_rag.version() || '%%'"
    ).fetchone()
    assert rows == (0,)


@pytest.mark.fresh
def test_no_model_library_is_imported_in_the_backend(owner: Connection) -> None:
    owner.execute("SELECT ml_embed_row('x')")
    owner.execute("SELECT ml_generate('x')")
    owner.execute(
        "CREATE FUNCTION modules() RETURNS text[] LANGUAGE plpython3u AS"
        " 'import sys; return sorted({name.partition(\".\")[0] for name in sys.modules})'"
    )
    (modules,) = owner.execute("SELECT modules()").fetchone() or (None,)
    assert "ml_rag" in modules
    assert not {"numpy", "torch", "requests", "psycopg", "pydantic", "fastapi", "httpx"} & set(modules)


def test_settings_of_the_session_cannot_redirect_the_backend(asker: Connection) -> None:
    for name in ("model_server", "ml_rag.model_server", "ml_rag.setting"):
        try:
            asker.execute(f"SET {name} = 'unix:/tmp/evil.sock'")
        except Exception as e:  # noqa: BLE001
            assert "unrecognized" in str(e)  # noqa: PT017
    assert asker.execute("SELECT vector_dims(ml_embed_row('x'))").fetchone() == (16,)
    unchanged: Any = asker.execute("SELECT value FROM ml_rag.setting WHERE name = 'model_server'").fetchone()
    assert "evil" not in unchanged[0]
