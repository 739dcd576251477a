-- What an administrator granted or revoked by hand on objects of the extension is noted here and done again at the end:
-- what comes between grants as a new installation does, and would give back what was revoked.
DO $$
DECLARE
  _noted jsonb;
BEGIN
  WITH member AS (
    SELECT d.classid, d.objid FROM pg_depend AS d JOIN pg_extension AS e ON e.oid = d.refobjid
    WHERE d.refclassid = 'pg_extension'::regclass AND d.deptype = 'e' AND e.extname = 'ml_rag'
  ), object (class, oid, sub, kind, part, owner, acl, usual) AS (
    SELECT 'pg_proc'::regclass, p.oid, 0, 'ROUTINE', NULL::name, p.proowner, p.proacl, acldefault('f', p.proowner)
    FROM pg_proc AS p
    UNION ALL
    SELECT 'pg_class', c.oid, 0, CASE c.relkind WHEN 'S' THEN 'SEQUENCE' ELSE 'TABLE' END, NULL, c.relowner, c.relacl,
      acldefault(CASE c.relkind WHEN 'S' THEN 's' ELSE 'r' END::"char", c.relowner)
    FROM pg_class AS c WHERE c.relkind <> 'c'
    UNION ALL
    SELECT 'pg_class', a.attrelid, a.attnum, 'TABLE', a.attname, c.relowner, a.attacl, NULL
    FROM pg_attribute AS a JOIN pg_class AS c ON c.oid = a.attrelid WHERE NOT a.attisdropped
    UNION ALL
    SELECT 'pg_namespace', n.oid, 0, 'SCHEMA', NULL, n.nspowner, n.nspacl, acldefault('n', n.nspowner)
    FROM pg_namespace AS n
    UNION ALL
    SELECT 'pg_type', t.oid, 0, 'TYPE', NULL, t.typowner, t.typacl, acldefault('T', t.typowner) FROM pg_type AS t
  ), state AS (
    SELECT o.class, o.oid, o.kind, o.part, o.owner, coalesce(o.acl, o.usual) AS now,
      coalesce((SELECT i.initprivs FROM pg_init_privs AS i
                WHERE i.classoid = o.class AND i.objoid = o.oid AND i.objsubid = o.sub), o.usual) AS initially
    FROM object AS o JOIN member AS m ON m.classid = o.class AND m.objid = o.oid
  ), deviation AS (
    -- the owner's own privileges stay as they are, and so does what others have passed on
    SELECT s.class, s.oid, s.kind, s.part, true AS granted, g.grantee, g.privilege_type, g.is_grantable
    FROM state AS s CROSS JOIN aclexplode(s.now) AS g
    WHERE g.grantor = s.owner AND g.grantee <> s.owner AND NOT EXISTS (
      SELECT FROM aclexplode(s.initially) AS i
      WHERE i.grantee = g.grantee AND i.privilege_type = g.privilege_type AND i.is_grantable >= g.is_grantable)
    UNION ALL
    SELECT s.class, s.oid, s.kind, s.part, false, i.grantee, i.privilege_type, false
    FROM state AS s CROSS JOIN aclexplode(s.initially) AS i
    WHERE i.grantee <> s.owner AND (i.grantee = 0 OR EXISTS (SELECT FROM pg_roles AS r WHERE r.oid = i.grantee))
      AND NOT EXISTS (SELECT FROM aclexplode(s.now) AS g
                      WHERE g.grantee = i.grantee AND g.privilege_type = i.privilege_type)
  )
  SELECT jsonb_agg(jsonb_build_object('class', d.class, 'object', (pg_identify_object(d.class, d.oid, 0)).identity,
    'part', d.part, 'kind', d.kind, 'granted', d.granted, 'privilege', d.privilege_type, 'grantable', d.is_grantable,
    'role', CASE d.grantee WHEN 0 THEN 'PUBLIC' ELSE d.grantee::regrole::text END)) INTO _noted
  FROM deviation AS d;
  PERFORM set_config('ml_rag.update_noted', coalesce(_noted, '[]')::text, true);
END
$$;
