"""Everything the catalog says about the objects of the extension, so that two databases can be compared."""

from __future__ import annotations

from typing import Any

from support.cluster import Connection

#: what an object is called -> its facts by name, all as text and without any oid
Objects = dict[str, dict[str, str]]

# privileges without their order; the owner's own are in there too, as it may have been taken some
ACL = """(SELECT string_agg(format('%s=%s%s by %s',
  CASE g.grantee WHEN 0 THEN 'PUBLIC' ELSE g.grantee::regrole::text END,
  lower(g.privilege_type), CASE WHEN g.is_grantable THEN '*' ELSE '' END, g.grantor::regrole), ', '
  ORDER BY g.grantee::regrole::text COLLATE "C", g.privilege_type) FROM aclexplode({acl}) AS g)"""

FUNCTIONS = """
SELECT p.oid, 'pg_proc'::regclass,
  CASE p.prokind WHEN 'p' THEN 'procedure ' WHEN 'a' THEN 'aggregate ' ELSE 'function ' END
    || p.oid::regprocedure::text,
  p.proowner, coalesce(p.proacl, acldefault('f', p.proowner)),
  jsonb_build_object('arguments', pg_get_function_arguments(p.oid), 'result', pg_get_function_result(p.oid),
    'language', (SELECT l.lanname FROM pg_language AS l WHERE l.oid = p.prolang), 'volatility', p.provolatile,
    'parallel', p.proparallel, 'strict', p.proisstrict, 'security definer', p.prosecdef, 'leakproof', p.proleakproof,
    'cost', p.procost, 'rows', p.prorows, 'settings', p.proconfig, 'source', p.prosrc,
    'body', pg_get_function_sqlbody(p.oid))
FROM pg_proc AS p"""

RELATIONS = """
SELECT c.oid, 'pg_class'::regclass,
  CASE c.relkind WHEN 'r' THEN 'table' WHEN 'v' THEN 'view' WHEN 'm' THEN 'materialized view' WHEN 'S' THEN 'sequence'
    WHEN 'c' THEN 'type' ELSE c.relkind::text END || ' ' || c.oid::regclass::text, c.relowner,
  coalesce(c.relacl, acldefault(CASE c.relkind WHEN 'S' THEN 's' ELSE 'r' END::"char", c.relowner)),
  jsonb_build_object('options', c.reloptions, 'persistence', c.relpersistence, 'replica identity', c.relreplident,
    'row-level security', c.relrowsecurity, 'forced', c.relforcerowsecurity, 'populated', c.relispopulated,
    'definition', CASE WHEN c.relkind IN ('v', 'm') THEN pg_get_viewdef(c.oid) END,
    'columns', (SELECT string_agg(concat_ws(' ', a.attname, format_type(a.atttypid, a.atttypmod),
        CASE WHEN a.attnotnull THEN 'not null' END, 'default ' || pg_get_expr(d.adbin, d.adrelid),
        'identity ' || nullif(a.attidentity::text, ''), 'generated ' || nullif(a.attgenerated::text, ''),
        'storage ' || a.attstorage::text, 'compression ' || nullif(a.attcompression::text, ''),
        'collation ' || nullif(a.attcollation, 0)::regcollation::text,
        'options ' || (SELECT string_agg(o, ', ') FROM unnest(a.attoptions) AS o WHERE o LIKE 'n_distinct%'),
        'privileges ' || {column_acl}), E'\\n' ORDER BY a.attnum)
      FROM pg_attribute AS a LEFT JOIN pg_attrdef AS d ON d.adrelid = a.attrelid AND d.adnum = a.attnum
      WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped),
    'column comments', (SELECT jsonb_object_agg(a.attname, col_description(a.attrelid, a.attnum))
      FROM pg_attribute AS a WHERE a.attrelid = c.oid AND col_description(a.attrelid, a.attnum) IS NOT NULL),
    'constraints', (SELECT jsonb_object_agg(t.conname, pg_get_constraintdef(t.oid)) FROM pg_constraint AS t
      WHERE t.conrelid = c.oid AND t.contype <> 't' AND t.contype <> 'n'),
    'indexes', (SELECT jsonb_object_agg(x.indexrelid::regclass,
        format('%s, valid %s', pg_get_indexdef(x.indexrelid), x.indisvalid))
      FROM pg_index AS x WHERE x.indrelid = c.oid),
    'triggers', (SELECT jsonb_object_agg(t.tgname, format('%s, enabled %s', pg_get_triggerdef(t.oid), t.tgenabled))
      FROM pg_trigger AS t WHERE t.tgrelid = c.oid AND NOT t.tgisinternal),
    'policies', (SELECT jsonb_object_agg(p.polname, concat_ws(' ', p.polcmd,
        CASE WHEN p.polpermissive THEN 'permissive' END,
        p.polroles::regrole[]::text, 'using ' || pg_get_expr(p.polqual, p.polrelid),
        'check ' || pg_get_expr(p.polwithcheck, p.polrelid))) FROM pg_policy AS p WHERE p.polrelid = c.oid),
    'sequence', (SELECT to_jsonb(s) - 'seqrelid' FROM pg_sequence AS s WHERE s.seqrelid = c.oid),
    'belongs to', (SELECT d.refobjid::regclass::text FROM pg_depend AS d WHERE d.classid = 'pg_class'::regclass
      AND d.objid = c.oid AND d.refclassid = 'pg_class'::regclass AND d.deptype IN ('i', 'a') AND c.relkind = 'S'),
    'dumped', (SELECT format('yes, where %s', e.extcondition[array_position(e.extconfig, c.oid)]) FROM pg_extension AS e
      WHERE c.oid = ANY (e.extconfig)))
FROM pg_class AS c""".replace("{column_acl}", ACL.format(acl="a.attacl"))

SCHEMAS = """
SELECT n.oid, 'pg_namespace'::regclass, 'schema ' || n.nspname, n.nspowner,
  coalesce(n.nspacl, acldefault('n', n.nspowner)), '{}'::jsonb
FROM pg_namespace AS n"""

# domains and enumerations; a composite type is among the relations, and that of a table comes and goes with it
TYPES = """
SELECT t.oid, 'pg_type'::regclass, 'type ' || t.oid::regtype::text, t.typowner,
  coalesce(t.typacl, acldefault('T', t.typowner)),
  jsonb_build_object('base', nullif(t.typbasetype, 0)::regtype, 'default', t.typdefault, 'not null', t.typnotnull,
    'constraints', (SELECT jsonb_object_agg(k.conname, pg_get_constraintdef(k.oid)) FROM pg_constraint AS k
      WHERE k.contypid = t.oid),
    'labels', (SELECT string_agg(l.enumlabel, ', ' ORDER BY l.enumsortorder) FROM pg_enum AS l
      WHERE l.enumtypid = t.oid))
FROM pg_type AS t WHERE t.typtype IN ('d', 'e')"""

EVENT_TRIGGERS = """
SELECT e.oid, 'pg_event_trigger'::regclass, 'event trigger ' || e.evtname, e.evtowner, NULL,
  jsonb_build_object('event', e.evtevent, 'function', e.evtfoid::regprocedure, 'enabled', e.evtenabled,
    'tags', e.evttags)
FROM pg_event_trigger AS e"""

OPERATORS = """
SELECT o.oid, 'pg_operator'::regclass, 'operator ' || o.oid::regoperator::text, o.oprowner, NULL,
  jsonb_build_object('function', o.oprcode::regprocedure)
FROM pg_operator AS o"""

CATALOG = f"""
WITH extension AS (
  SELECT oid FROM pg_extension WHERE extname = 'ml_rag'
), object (oid, class, name, owner, acl, facts) AS (
  {FUNCTIONS} UNION ALL {RELATIONS} UNION ALL {SCHEMAS} UNION ALL {TYPES}
  UNION ALL {EVENT_TRIGGERS} UNION ALL {OPERATORS}
), member AS (
  SELECT d.classid, d.objid FROM pg_depend AS d, extension
  WHERE d.refclassid = 'pg_extension'::regclass AND d.refobjid = extension.oid AND d.deptype = 'e'
), here AS (
  -- what lies in the extension's schema without belonging to it
  SELECT 'pg_proc'::regclass AS class, p.oid FROM pg_proc AS p WHERE p.pronamespace = to_regnamespace('ml_rag')
  UNION ALL
  SELECT 'pg_class', c.oid FROM pg_class AS c
  WHERE c.relnamespace IN (to_regnamespace('ml_rag'), to_regnamespace('ml_rag_internal'))
    AND c.relkind NOT IN ('i', 'I')
  UNION ALL
  SELECT 'pg_type', t.oid FROM pg_type AS t WHERE t.typnamespace = to_regnamespace('ml_rag') AND t.typtype IN ('d', 'e')
)
SELECT coalesce(o.name, format('%s %s', m.classid::regclass, m.objid)), jsonb_strip_nulls(coalesce(o.facts, '{{}}')
  || jsonb_build_object('owner', o.owner::regrole, 'privileges', {ACL.format(acl="o.acl")},
    'initial privileges', (SELECT string_agg(format('%s: %s', i.objsubid, {ACL.format(acl="i.initprivs")}), '; '
        ORDER BY i.objsubid)
      FROM pg_init_privs AS i WHERE i.classoid = m.classid AND i.objoid = m.objid),
    'comment', obj_description(m.objid, m.classid::regclass::name),
    'member', EXISTS (SELECT FROM member AS e WHERE e.classid = m.classid AND e.objid = m.objid)))
FROM (SELECT classid, objid FROM member UNION SELECT class, oid FROM here) AS m
LEFT JOIN object AS o ON o.class = m.classid AND o.oid = m.objid
WHERE m.classid <> 'pg_type'::regclass OR o.oid IS NOT NULL
ORDER BY 1
"""


# the rows that the extension itself makes
RECORDS = "SELECT format('option %s.%s', o.routine, o.name), jsonb_strip_nulls(to_jsonb(o)) FROM ml_rag.option AS o"


def objects(connection: Connection) -> Objects:
    """The objects that belong to the extension or lie in its schema, and its own rows."""
    # names with their schemas, wherever the session looks
    with connection.transaction():
        connection.execute("SET LOCAL search_path = ''")
        found: dict[str, dict[str, Any]] = dict(connection.execute(CATALOG).fetchall())
        found |= dict(connection.execute(RECORDS).fetchall())
    return {name: {fact: str(value) for fact, value in facts.items()} for name, facts in found.items()}


def differences(fresh: Objects, upgraded: Objects) -> list[str]:
    """What an upgrade leaves different, and what to do about each."""
    problems = []
    for name in sorted(fresh.keys() | upgraded.keys()):
        if name not in upgraded:
            problems.append(f"{name}: the upgrade does not make it. The upgrade script must")
        elif name not in fresh and name.startswith("option "):
            problems.append(f"{name}: sql/ no longer has it. Add to the upgrade script: DELETE FROM ml_rag.option …;")
        elif name not in fresh:
            problems.append(
                f"{name}: sql/ no longer has it. Add to the upgrade script: DROP {name.upper().split()[0]} …;"
            )
        else:
            for fact in sorted(fresh[name].keys() | upgraded[name].keys()):
                old, new = upgraded[name].get(fact), fresh[name].get(fact)
                if old != new:
                    problems.append(
                        f"{name}: {fact} differs.\n  upgraded: {old}\n  fresh:    {new}\n  The upgrade script lacks it."
                    )
    return problems
