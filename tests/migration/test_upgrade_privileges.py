"""What an administrator granted or revoked by hand survives an upgrade, and is still told from the extension's own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support import objects
from support.cluster import Cluster, Connection, Database
from support.extension import VERSIONS, install, update

#: by hand; {stranger}, {tenant} are roles without privileges of their own
BY_HAND = """
GRANT EXECUTE ON FUNCTION ml_rag.configure(text, text) TO {stranger};
REVOKE EXECUTE ON FUNCTION ml_generate(text, jsonb) FROM ml_rag_user;
GRANT EXECUTE ON FUNCTION ml_rag_answer(text, jsonb) TO PUBLIC;
GRANT USAGE ON SCHEMA ml_rag TO {stranger};
GRANT SELECT ON ml_rag.setting TO {stranger} WITH GRANT OPTION;
GRANT SELECT ON ml_rag.option TO {stranger};
REVOKE SELECT ON ml_rag.option FROM ml_rag_user;
GRANT SELECT (name) ON ml_rag.setting_value TO {stranger};
REVOKE INSERT (name) ON ml_rag.evaluation_run FROM ml_rag_user;
GRANT SELECT ON SEQUENCE ml_rag_internal.keyword_number TO {stranger};
REVOKE USAGE ON TYPE ml_rag.store FROM PUBLIC;
SET SESSION AUTHORIZATION {stranger};
GRANT SELECT ON ml_rag.setting TO {tenant};
RESET SESSION AUTHORIZATION;
"""

HELD = """
SELECT has_function_privilege('{stranger}', 'ml_rag.configure(text, text)', 'EXECUTE'),
  NOT has_function_privilege('ml_rag_user', 'ml_generate(text, jsonb)', 'EXECUTE'),
  has_function_privilege('{stranger}', 'ml_rag_answer(text, jsonb)', 'EXECUTE'),
  has_schema_privilege('{stranger}', 'ml_rag', 'USAGE'),
  has_table_privilege('{stranger}', 'ml_rag.setting', 'SELECT WITH GRANT OPTION'),
  has_table_privilege('{tenant}', 'ml_rag.setting', 'SELECT'),
  has_table_privilege('{stranger}', 'ml_rag.option', 'SELECT'),
  NOT has_table_privilege('ml_rag_user', 'ml_rag.option', 'SELECT'),
  has_column_privilege('{stranger}', 'ml_rag.setting_value', 'name', 'SELECT'),
  NOT has_column_privilege('{stranger}', 'ml_rag.setting_value', 'value', 'SELECT'),
  NOT has_column_privilege('ml_rag_user', 'ml_rag.evaluation_run', 'name', 'INSERT'),
  has_sequence_privilege('{stranger}', 'ml_rag_internal.keyword_number', 'SELECT'),
  NOT has_type_privilege('{stranger}', 'ml_rag.store', 'USAGE')
"""


def formatted(database: Database, text: str) -> str:
    return text.format(stranger=database.role("stranger"), tenant=database.role("tenant"))


def held(database: Database, owner: Connection) -> list[bool]:
    row = owner.execute(formatted(database, HELD)).fetchone()
    assert row is not None
    return list(row)


@pytest.fixture(params=VERSIONS)
def old(request: pytest.FixtureRequest, cluster: Cluster) -> Iterator[Database]:
    with cluster.database("template0") as database:
        install(database.connect(), request.param)
        yield database


def test_grants_and_revokes_by_hand_stay(old: Database, owner: Connection) -> None:
    upgraded = old.connect()
    upgraded.execute(formatted(old, BY_HAND))
    assert all(held(old, upgraded))
    update(upgraded)
    assert all(held(old, upgraded))
    # and they are the only difference to a new database where the same was done after the installation
    owner.execute(formatted(old, BY_HAND))
    assert objects.differences(objects.objects(owner), objects.objects(upgraded)) == []


def test_a_role_that_was_granted_something_can_be_dropped(old: Database) -> None:
    owner = old.connect()
    role = f'"{old.name} visitor"'
    owner.execute(f"CREATE ROLE {role}; GRANT EXECUTE ON FUNCTION ml_rag.configure(text, text) TO {role}")
    update(owner)
    owner.execute(f"REVOKE EXECUTE ON FUNCTION ml_rag.configure(text, text) FROM {role}; DROP ROLE {role}")
