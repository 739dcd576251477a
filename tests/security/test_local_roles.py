"""batch/work, store/load: a call that commits goes on as no other role than the one that it began with."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.cluster import Connection, Database
from support.documents_server import DocumentsServer
from support.loading import loader_role, write
from support.stores import error

CALLS = {
    "a run": "ml_rag.run_vectorizer('items', NULL, result)",
    "a node group": "ml_rag.create_node_group('docs', 's', '{\"transform\": \"sentence\"}', result)",
    "another embedding": "ml_rag.add_embedding('docs', 'other', NULL, result)",
    "a batch routine": "ml_embed_table('public.texts.q', 'public.texts.v', '{\"batch_size\": 1}', result)",
    "a load": "vector_store_load('file://FOLDER/', '{\"table_name\": \"docs\"}', result)",
}


@pytest.mark.parametrize("name", CALLS)
def test_a_role_that_ends_at_a_commit_makes_nobody_else_of_the_caller(
    db: Database, owner: Connection, loader: Connection, server: DocumentsServer, folder: Path, name: str
) -> None:
    """As in a job of a superuser's that takes the role of each owner in turn."""
    role = loader_role(db)
    write(folder, a="a lamp. a tent.")
    loader.execute(f"CALL vector_store_load('file://{folder}/', '{{\"table_name\": \"docs\"}}')".encode())
    write(folder, a="a lamp.", b="a tent.", c="a rope.")
    loader.execute(
        "CREATE TABLE items (id integer PRIMARY KEY, q text); INSERT INTO items VALUES (1, 'lamp'), (2, 'tent');"
        "CREATE TABLE texts AS TABLE items; ALTER TABLE texts ADD PRIMARY KEY (id)"
    )
    loader.execute("SELECT ml_rag.create_vectorizer('items', '{\"columns\": \"q\"}')")
    loader.execute(
        "CREATE TABLE ran (who name); GRANT INSERT ON ran TO PUBLIC; CREATE FUNCTION spy() RETURNS trigger"
        " LANGUAGE plpgsql AS $$ BEGIN INSERT INTO public.ran VALUES (current_user); RETURN NEW; END $$"
    )
    for table in ("items", "texts", "docs"):
        spy = f"CREATE TRIGGER spy BEFORE INSERT OR UPDATE ON {table} FOR EACH ROW EXECUTE FUNCTION spy()"
        loader.execute(spy.encode())
    call = CALLS[name].replace("FOLDER", str(folder))
    take = f"DECLARE result jsonb; BEGIN PERFORM set_config('role', '{role}', true); CALL {call}; END"
    with error("42501", "the role of the call has ended with its transaction"):
        owner.execute(f"DO $$ {take} $$".encode())
    assert loader.execute("SELECT DISTINCT who FROM ran WHERE who <> %s", (role,)).fetchall() == []
    # one of the session stays
    owner.execute(f"SET ROLE {role}".encode())
    owner.execute(f"DO $$ DECLARE result jsonb; BEGIN CALL {call}; END $$".encode())
    owner.execute("RESET ROLE")
