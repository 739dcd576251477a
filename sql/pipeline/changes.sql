-- changes: what the owner of a table can change in it while others, who did not name it, read it.

CREATE FUNCTION ml_rag._is_member(role oid, groups oid[], granted_by_superuser boolean) RETURNS boolean
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$
-- purpose: whether a role is one of the groups or a member of one, if asked for by nothing but grants of superusers
-- Reads: the catalog. Unlike pg_has_role a superuser is a member of what it was made a member of.
BEGIN
  RETURN EXISTS (
    WITH RECURSIVE held AS (
      SELECT role AS oid
      UNION SELECT m.roleid FROM held AS h JOIN pg_auth_members AS m ON m.member = h.oid
      WHERE NOT granted_by_superuser OR (SELECT r.rolsuper FROM pg_roles AS r WHERE r.oid = m.grantor)
    )
    SELECT FROM held AS h WHERE h.oid = ANY (groups));
END
$$;

CREATE FUNCTION ml_rag._are_known(operator_classes oidvector) RETURNS boolean
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$
-- purpose: whether operator classes are all built in or pgvector's  Reads: the catalog
BEGIN
  RETURN 16384 > ALL (operator_classes::oid[]) OR NOT EXISTS (
    SELECT FROM unnest(operator_classes::oid[]) AS o (oid)
    WHERE o.oid >= 16384 AND NOT EXISTS (
      SELECT FROM pg_depend AS d JOIN pg_extension AS e ON e.oid = d.refobjid AND e.extname = 'vector'
      WHERE d.classid = 'pg_opclass'::regclass AND d.objid = o.oid AND d.refclassid = 'pg_extension'::regclass
        AND d.deptype = 'e' OFFSET 0));
END
$$;

CREATE FUNCTION ml_rag._has_vectors(relation oid) RETURNS boolean
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$
-- purpose: whether a relation has a column of one of pgvector's types, wherever that extension is  Reads: the catalog
BEGIN
  RETURN EXISTS (
    SELECT FROM pg_attribute AS a
    JOIN pg_depend AS d ON d.classid = 'pg_type'::regclass AND d.objid = a.atttypid
      AND d.refclassid = 'pg_extension'::regclass AND d.deptype = 'e'
    JOIN pg_extension AS e ON e.oid = d.refobjid AND e.extname = 'vector'
    WHERE a.attrelid = relation AND NOT a.attisdropped);
END
$$;

CREATE FUNCTION ml_rag._is_trusted(owner oid) RETURNS boolean
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$
-- purpose: whether everybody, but for superusers, trusts that role, see ml_rag._trusts
-- Reads: the catalog
BEGIN
  RETURN (SELECT r.rolsuper FROM pg_roles AS r WHERE r.oid = owner)
    OR owner = (SELECT d.datdba FROM pg_database AS d WHERE d.datname = current_database())
    OR ml_rag._is_member(owner, ARRAY[to_regrole('ml_rag_publisher')::oid], false);
END
$$;

CREATE FUNCTION ml_rag._lock_readers_out() RETURNS event_trigger
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SECURITY DEFINER
SET search_path FROM CURRENT
AS $$
-- purpose: what puts code into a table with vectors, or another table in its place, waits for those who read it
-- PostgreSQL has it so for policies, rules, constraints and columns: they take ACCESS EXCLUSIVE. An index, statistics and
-- a child table do not, and renaming a schema locks nothing; these take it here, as they end. Thus who holds the lock of a
-- reader, and then looks at the catalog, sees what will be read (ml_rag._lock_plain). Owners whom every caller trusts, but
-- for superusers, who search no table of theirs, are left alone, and so is whatever holds no code.
-- Indexes that are built concurrently become valid when no transaction is left that was there before.
-- Writes: the locks of the transaction
DECLARE
  _command record;
  _changed oid[];
  _table record;
BEGIN
  -- by numbers: what a name looks like depends on settings of whoever issues the command
  FOR _command IN SELECT d.classid::regclass AS catalog, d.objid, d.command_tag FROM pg_event_trigger_ddl_commands() AS d
  LOOP
    _changed := CASE _command.catalog
      WHEN 'pg_class'::regclass THEN ARRAY(
        SELECT x.indrelid FROM pg_index AS x
        WHERE x.indexrelid = _command.objid
          AND (x.indexprs IS NOT NULL OR x.indpred IS NOT NULL OR NOT ml_rag._are_known(x.indclass))
        -- age: of children that it has got in this transaction
        UNION ALL SELECT i.inhparent FROM pg_inherits AS i WHERE i.inhrelid = _command.objid AND age(i.xmin) <= 0
        UNION ALL SELECT i.inhparent FROM pg_inherits AS i WHERE i.inhparent = _command.objid AND age(i.xmin) <= 0)
      WHEN 'pg_statistic_ext'::regclass THEN ARRAY(
        SELECT s.stxrelid FROM pg_statistic_ext AS s WHERE s.oid = _command.objid AND s.stxexprs IS NOT NULL)
      WHEN 'pg_namespace'::regclass THEN ARRAY(
        SELECT c.oid FROM pg_class AS c WHERE c.relnamespace = _command.objid AND _command.command_tag = 'ALTER SCHEMA')
      END;
    CONTINUE WHEN coalesce(cardinality(_changed), 0) = 0;
    FOR _table IN
      SELECT c.oid, format('%I.%I', n.nspname, c.relname) AS name
      FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
      WHERE c.oid = ANY (_changed) AND c.relkind IN ('r', 'p') AND ml_rag._has_vectors(c.oid)
        -- a schema with tables of trusted owners can be another one's
        AND (_command.catalog = 'pg_namespace'::regclass OR NOT ml_rag._is_trusted(c.relowner))
    LOOP
      EXECUTE format('LOCK TABLE ONLY %s IN ACCESS EXCLUSIVE MODE', _table.name);
      IF NOT EXISTS (SELECT FROM pg_locks AS l WHERE l.pid = pg_backend_pid() AND l.locktype = 'relation' AND l.granted
                     AND l.relation = _table.oid AND l.mode = 'AccessExclusiveLock') THEN
        RAISE EXCEPTION USING ERRCODE = '55006', MESSAGE = format('table "%s" was renamed meanwhile', _table.name),
          HINT = 'Try again.';
      END IF;
    END LOOP;
  END LOOP;
END
$$;
CREATE EVENT TRIGGER ml_rag_lock_readers_out ON ddl_command_end EXECUTE FUNCTION ml_rag._lock_readers_out();
ALTER EVENT TRIGGER ml_rag_lock_readers_out ENABLE ALWAYS;
