"""What callers write and read: signatures, columns, settings. None of it changes by accident.

tests/sql/golden_api.txt has it; options are in docs/reference.md (test_documents.py), who may call what is in
golden_catalog.txt. After a change that is meant: ML_RAG_UPDATE_GOLDEN=1 pytest FILE, and a line in CHANGELOG.md.
"""

from __future__ import annotations

import os
from pathlib import Path

from support.cluster import Connection

GOLDEN = Path(__file__).with_name("golden_api.txt")

# names that begin with _ are inner ones; arguments have names, as callers may write them
API = r"""
WITH member AS (
  SELECT d.classid, d.objid FROM pg_depend AS d
  WHERE d.refclassid = 'pg_extension'::regclass AND d.deptype = 'e'
    AND d.refobjid = (SELECT oid FROM pg_extension WHERE extname = 'ml_rag')
)
SELECT concat_ws(' ', CASE p.prokind WHEN 'p' THEN 'procedure' ELSE 'function' END,
  format('%s.%s(%s)', p.pronamespace::regnamespace, p.proname, pg_get_function_arguments(p.oid)),
  'returns ' || pg_get_function_result(p.oid), CASE WHEN p.proisstrict THEN 'strict' END)
FROM pg_proc AS p JOIN member ON classid = 'pg_proc'::regclass AND objid = p.oid
WHERE p.proname !~ '^_' AND p.prorettype NOT IN ('trigger'::regtype, 'event_trigger'::regtype)
UNION ALL
SELECT format('%s %s (%s)', CASE c.relkind WHEN 'c' THEN 'type' WHEN 'r' THEN 'table' ELSE 'view' END, c.oid::regclass,
  (SELECT string_agg(format('%s %s', a.attname, format_type(a.atttypid, a.atttypmod)), ', ' ORDER BY a.attnum)
   FROM pg_attribute AS a WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped))
FROM pg_class AS c JOIN member ON classid = 'pg_class'::regclass AND objid = c.oid
WHERE c.relkind = 'c' OR c.relkind <> 'S' AND has_any_column_privilege('ml_rag_user', c.oid, 'SELECT')
UNION ALL
SELECT format('setting %s = %s', s.name, s.default_value) FROM ml_rag.setting AS s
"""


def test_the_api_is_the_golden_one(module_owner: Connection) -> None:
    module_owner.execute("SET search_path = ''")
    found = sorted(line for (line,) in module_owner.execute(API))
    module_owner.execute("RESET search_path")
    if os.environ.get("ML_RAG_UPDATE_GOLDEN"):
        GOLDEN.write_text("\n".join(found) + "\n")
    assert found == GOLDEN.read_text().splitlines()


def test_every_public_argument_has_a_name(module_owner: Connection) -> None:
    rows = module_owner.execute(
        "SELECT p.oid::regprocedure::text FROM pg_proc AS p JOIN pg_depend AS d ON d.objid = p.oid AND d.deptype = 'e'"
        " WHERE d.refobjid = (SELECT oid FROM pg_extension WHERE extname = 'ml_rag') AND p.proname !~ '^_'"
        " AND p.pronargs > 0 AND (p.proargnames IS NULL OR '' = ANY (p.proargnames[1:p.pronargs]))"
    ).fetchall()
    assert rows == []


def test_everything_public_says_what_it_is_for(module_owner: Connection) -> None:
    rows = module_owner.execute(
        "SELECT o.identity FROM pg_depend AS d, pg_identify_object(d.classid, d.objid, 0) AS o"
        " WHERE d.deptype = 'e' AND d.refobjid = (SELECT oid FROM pg_extension WHERE extname = 'ml_rag')"
        " AND o.type IN ('function', 'procedure', 'view', 'table', 'sequence', 'materialized view', 'schema', 'type')"
        # PostgreSQL 17 counts the types of arrays and of tables' rows among the members
        " AND NOT EXISTS (SELECT FROM pg_class AS c WHERE c.reltype = d.objid AND c.relkind <> 'c' AND o.type = 'type')"
        " AND o.identity !~ '\\._|\\[\\]' AND obj_description(d.objid, d.classid::regclass::name) IS NULL ORDER BY 1"
    ).fetchall()
    assert rows == []
