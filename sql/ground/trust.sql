-- trust: whose code may run with the caller's rights without having been asked for.
--
-- Reading a relation can run its owner's code with the rights of the reader: a view, a policy, a cast of a
-- type of the owner's, an expression of an index. And the owner of a schema decides what a name in it means,
-- since relations are found by OID and read by name. So a relation that the call does not name is touched
-- only if its owner and that of its schema are trusted.

CREATE FUNCTION ml_rag._was_changed(xmax xid) RETURNS boolean
LANGUAGE plpgsql STABLE PARALLEL RESTRICTED AS $$
-- purpose: whether a row of the catalog was changed since the snapshot that shows it; xmax: of the row
-- Where a transaction has one snapshot, the catalog is that of when it began. A row that was changed since
-- tells by which transaction, without its epoch: the one nearest to the snapshot.
DECLARE
  _newest bigint := pg_snapshot_xmax(pg_current_snapshot())::text::bigint;
BEGIN
  RETURN xmax <> '0' AND pg_xact_status((_newest + (xmax::text::bigint - _newest + 2147483648 & 4294967295)
    - 2147483648)::text::xid8) IS NOT DISTINCT FROM 'committed';
END
$$;

CREATE FUNCTION ml_rag._is_former(xmax xid) RETURNS boolean
LANGUAGE plpgsql STABLE PARALLEL RESTRICTED AS $$
-- purpose: whether a row of the catalog that tells who is trusted is none to go by: above READ COMMITTED, one
-- that was changed since the snapshot of the transaction. xmax: of the row
-- At READ COMMITTED each statement has a snapshot of its own, and others may change grants at any time.
BEGIN
  RETURN xmax <> '0' AND ml_rag._was_changed(xmax)
    AND current_setting('transaction_isolation') NOT IN ('read committed', 'read uncommitted');
END
$$;

CREATE FUNCTION ml_rag._is_superuser_now(role oid) RETURNS boolean
LANGUAGE sql STABLE PARALLEL SAFE AS $$
-- purpose: whether a role is a superuser, or may set what else only superusers may, as it is now
-- pg_roles tells it of the snapshot, which can be as old as the transaction.
SELECT has_parameter_privilege(role, 'zero_damaged_pages', 'SET')
$$;

CREATE FUNCTION ml_rag._is_member(role oid, groups oid[], granted_by_superuser boolean) RETURNS boolean
LANGUAGE plpgsql STABLE PARALLEL SAFE AS $$
-- purpose: whether a role is one of the groups or a member of one, if asked for by nothing but grants of
-- superusers
-- Reads: the catalog. Unlike pg_has_role a superuser is a member of what it was made a member of.
BEGIN
  RETURN EXISTS (
    WITH RECURSIVE held AS (
      SELECT role AS oid
      UNION SELECT m.roleid FROM held AS h JOIN pg_auth_members AS m ON m.member = h.oid
      WHERE (NOT granted_by_superuser OR ml_rag._is_superuser_now(m.grantor)
          AND (SELECT r.rolsuper FROM pg_roles AS r WHERE r.oid = m.grantor))
        -- from PostgreSQL 16 on the role that creates another may grant it, without INHERIT and SET
        AND coalesce((to_jsonb(m) ->> 'inherit_option')::boolean OR (to_jsonb(m) ->> 'set_option')::boolean,
          true)
        AND (m.xmax = '0' OR NOT ml_rag._is_former(m.xmax))
    )
    SELECT FROM held AS h WHERE h.oid = ANY (groups));
END
$$;

CREATE FUNCTION ml_rag._trusts(owner oid, role oid DEFAULT NULL) RETURNS boolean
LANGUAGE plpgsql STABLE PARALLEL RESTRICTED AS $$
-- purpose: whether code of the owner may run unasked with the rights of a role, by default the caller's 
-- Reads: the catalog
-- A superuser trusts superusers only. Others trust themselves, superusers, the owner of the database, roles
-- that a superuser made them a member of, and members of ml_rag_publisher. A membership that another role
-- granted does not count: that role need not have asked. Nor does one that only grants privileges, of
-- ml_rag_user, ml_rag_loader or a predefined role: any other member can give such a role what it has made.
DECLARE
  _database_owner oid := (SELECT d.datdba FROM pg_database AS d WHERE d.datname = current_database()
    AND pg_has_role(d.datdba, 'pg_database_owner', 'MEMBER'));  -- it is that now, too
  _is_superuser boolean;
BEGIN
  role := coalesce(role, quote_ident(current_user)::regrole);
  IF owner = to_regrole('pg_database_owner') THEN
    owner := _database_owner;
  END IF;
  IF owner = role THEN
    RETURN true;
  END IF;
  _is_superuser := (SELECT r.rolsuper FROM pg_roles AS r WHERE r.oid = owner);
  IF _is_superuser AND ml_rag._is_superuser_now(owner) THEN
    RETURN true;
  ELSIF _is_superuser IS NULL OR ml_rag._is_superuser_now(role) THEN
    RETURN false;
  END IF;
  -- callers take NOT of it
  RETURN coalesce(owner = _database_owner, false)
    -- below 16384: made by initdb
    OR owner >= 16384 AND pg_get_userbyid(owner) NOT IN ('ml_rag_user', 'ml_rag_loader')
      AND ml_rag._is_member(role, ARRAY[owner], true)
    OR ml_rag._is_member(owner, ARRAY[to_regrole('ml_rag_publisher')::oid], false);
END
$$;

CREATE FUNCTION ml_rag._parts(relation oid) RETURNS oid[]
LANGUAGE plpgsql STABLE PARALLEL SAFE SET search_path FROM CURRENT AS $$
-- purpose: a relation and all that inherits from it, partitions included  Reads: the catalog, without a lock
BEGIN
  -- the planner, too, looks for children only where this is set
  IF NOT EXISTS (SELECT FROM pg_class AS c WHERE c.oid = relation AND c.relhassubclass) THEN
    RETURN ARRAY[relation];
  END IF;
  RETURN ARRAY(
    WITH RECURSIVE part AS (
      SELECT relation AS oid
      UNION SELECT i.inhrelid FROM part AS p JOIN pg_inherits AS i ON i.inhparent = p.oid
    )
    SELECT p.oid FROM part AS p);
END
$$;

CREATE FUNCTION ml_rag._read_with(relation oid) RETURNS oid[]
LANGUAGE plpgsql STABLE PARALLEL SAFE SET search_path FROM CURRENT AS $$
-- purpose: a relation and all whose code can run when it is read: its parts, what a view or a policy reads,
-- and their parts
-- Policies that do not apply to the caller, as they do not to the owner of the table, do not run; those of
-- what a view reads are checked for the owner of the view. The role that wrote a view or a policy answers
-- for the functions in it.  Reads: the catalog
BEGIN
  IF NOT EXISTS (SELECT FROM pg_class AS c WHERE c.oid = relation
    AND (c.relkind = 'v' OR c.relhassubclass OR row_security_active(c.oid))) THEN
    RETURN ARRAY[relation];
  END IF;
  RETURN ARRAY(
    WITH RECURSIVE part AS (
      SELECT relation AS oid, true AS is_own
      UNION SELECT r.oid, r.is_own FROM part AS p CROSS JOIN LATERAL (
        SELECT i.inhrelid, p.is_own FROM pg_inherits AS i WHERE i.inhparent = p.oid
        UNION ALL SELECT d.refobjid, false FROM pg_rewrite AS w
          JOIN pg_depend AS d ON d.classid = 'pg_rewrite'::regclass AND d.objid = w.oid
        WHERE w.ev_class = p.oid AND w.ev_type = '1' AND d.refclassid = 'pg_class'::regclass
        UNION ALL SELECT d.refobjid, false FROM pg_class AS c JOIN pg_policy AS y ON y.polrelid = c.oid
          JOIN pg_depend AS d ON d.classid = 'pg_policy'::regclass AND d.objid = y.oid
        WHERE c.oid = p.oid AND c.relrowsecurity AND (NOT p.is_own OR row_security_active(c.oid))
          AND d.refclassid = 'pg_class'::regclass) AS r (oid, is_own)
    )
    SELECT p.oid FROM part AS p);
END
$$;

CREATE FUNCTION ml_rag._left_behind(relation oid) RETURNS oid[]
LANGUAGE plpgsql STABLE PARALLEL SAFE SET search_path FROM CURRENT AS $$
-- purpose: the former owners of a table who still own the function that ml_rag has made its policy ask
-- (store/policy): ALTER TABLE … OWNER TO leaves it behind, and its owner can put any code there
-- Reads: the catalog
BEGIN
  RETURN ARRAY(
    SELECT f.proowner FROM pg_class AS c JOIN pg_policy AS p ON p.polrelid = c.oid
    JOIN pg_depend AS d ON d.classid = 'pg_policy'::regclass AND d.objid = p.oid
      AND d.refclassid = 'pg_proc'::regclass
    JOIN pg_proc AS f ON f.oid = d.refobjid AND f.proowner <> c.relowner
    WHERE c.oid = relation AND c.relrowsecurity AND p.polname IN ('sees_parent', 'ml_rag_source')
    ORDER BY 1);
END
$$;

CREATE FUNCTION ml_rag._code_owners(relations oid[]) RETURNS oid[]
LANGUAGE plpgsql STABLE PARALLEL SAFE SET search_path FROM CURRENT AS $$
-- purpose: whose code can run when these relations are read: their owners, those of their schemas, and former
-- ones; 0 = not known, since it was changed after the snapshot was taken  Reads: the catalog
BEGIN
  RETURN ARRAY(
    SELECT DISTINCT unnest(ARRAY[c.relowner, n.nspowner] || ml_rag._left_behind(c.oid)
      || CASE WHEN (c.xmax <> '0' OR n.xmax <> '0') AND (ml_rag._is_former(c.xmax)
        OR ml_rag._is_former(n.xmax)) THEN '{0}'::oid[] ELSE '{}' END)
    FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace WHERE c.oid = ANY (relations)
    ORDER BY 1);
END
$$;

CREATE FUNCTION ml_rag._are_trusted(relations oid[], role oid DEFAULT NULL) RETURNS boolean
LANGUAGE plpgsql STABLE PARALLEL RESTRICTED SET search_path FROM CURRENT AS $$
-- purpose: whether relations, such as a table and its partitions, may be touched unasked: a role, by default
-- the caller's, trusts those whose code can run then  Reads: the catalog
BEGIN
  RETURN coalesce((
    SELECT bool_and(ml_rag._trusts(o.owner, role)) FROM unnest(ml_rag._code_owners(relations)) AS o (owner)),
    false);
END
$$;

CREATE FUNCTION ml_rag._why_untrusted(relation oid) RETURNS text
LANGUAGE plpgsql STABLE PARALLEL RESTRICTED AS $$
-- purpose: which owner keeps a relation from being touched unasked, as a sentence; null if none does  Reads:
-- the catalog
DECLARE
  _found record;
  _former oid;
BEGIN
  FOR _found IN
    SELECT CASE c.oid WHEN relation THEN 'It' ELSE 'A relation that is read with it' END AS subject,
      c.relowner AS owner, 0 = ANY (ml_rag._code_owners(ARRAY[c.oid])) AS was_changed,
      n.nspname AS schema, n.nspowner AS schema_owner, ml_rag._left_behind(c.oid) AS former_owners
    FROM unnest(ml_rag._read_with(relation)) WITH ORDINALITY AS r (oid, place)
    JOIN pg_class AS c ON c.oid = r.oid JOIN pg_namespace AS n ON n.oid = c.relnamespace ORDER BY r.place
  LOOP
    IF NOT ml_rag._trusts(_found.owner) THEN
      RETURN format('%s belongs to role %s, which you do not trust.', _found.subject,
        quote_ident(pg_get_userbyid(_found.owner)));
    ELSIF NOT ml_rag._trusts(_found.schema_owner) THEN
      RETURN format('%s is in schema %I, which belongs to role %s, which you do not trust.', _found.subject,
        _found.schema, quote_ident(pg_get_userbyid(_found.schema_owner)));
    ELSIF _found.was_changed THEN
      RETURN format('%s was changed after your transaction began, perhaps given to another role.',
        _found.subject);
    END IF;
    FOREACH _former IN ARRAY _found.former_owners LOOP
      IF NOT ml_rag._trusts(_former) THEN
        RETURN format('%s has a policy whose function still belongs to a former owner, role %s, which you do '
          'not trust.', _found.subject, quote_ident(pg_get_userbyid(_former)));
      END IF;
    END LOOP;
  END LOOP;
  RETURN NULL;
END
$$;

CREATE FUNCTION ml_rag._refuse_foreign_schema(relation regclass) RETURNS void
LANGUAGE plpgsql STABLE PARALLEL RESTRICTED AS $$
-- purpose: refuse a table whose owner does not trust that of its schema  Reads: the catalog  Errors: 42501
DECLARE
  _found record;
BEGIN
  SELECT c.relowner AS owner, n.nspname AS schema, n.nspowner AS schema_owner INTO _found
  FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace WHERE c.oid = relation;
  IF _found.schema_owner <> _found.owner AND NOT ml_rag._trusts(_found.schema_owner, _found.owner) THEN
    RAISE EXCEPTION USING ERRCODE = '42501',
      MESSAGE = format('table "%s" is in a schema of a role that its owner does not trust', relation),
      DETAIL = format('The owner of schema %I, %s, could put another relation in the place of the table and '
        'run code as %s.', _found.schema, quote_ident(pg_get_userbyid(_found.schema_owner)),
          quote_ident(pg_get_userbyid(_found.owner))),
      HINT = 'Move the table: ALTER TABLE … SET SCHEMA …; or have a superuser give the schema to another '
        'role: '
        'ALTER SCHEMA … OWNER TO ….';
  END IF;
END
$$;

CREATE FUNCTION ml_rag._check_name(name text, relation regclass) RETURNS void
LANGUAGE plpgsql STABLE PARALLEL SAFE AS $$
-- purpose: refuse if a statement that named a relation and waited for its lock has another one by that name
BEGIN
  IF to_regclass(name) IS DISTINCT FROM relation THEN
    RAISE EXCEPTION USING ERRCODE = '42P01', MESSAGE = format('table "%s" does not exist any more', name),
      DETAIL = 'It was renamed or dropped during the call; another relation has its name.',
      HINT = 'Try again.';
  END IF;
END
$$;

CREATE FUNCTION ml_rag._schemas_of(relations oid[]) RETURNS SETOF oid
LANGUAGE plpgsql STABLE PARALLEL SAFE AS $$
-- purpose: the schemas that statements on relations name: their own, and those of the types of their columns
-- Not those of the session's temporary tables and of pgvector, which keep their names (ml_rag._keep_schemas)
-- Reads: the catalog
BEGIN
  RETURN QUERY SELECT c.relnamespace FROM pg_class AS c
    WHERE c.oid = ANY (relations) AND c.relnamespace <> pg_my_temp_schema()
    UNION SELECT t.typnamespace FROM pg_attribute AS a JOIN pg_type AS t ON t.oid = a.atttypid
    WHERE a.attrelid = ANY (relations) AND a.atttypid >= 16384 AND t.typnamespace <> pg_my_temp_schema()
      AND a.atttypid NOT IN ('@vector@.vector'::regtype, '@vector@.halfvec'::regtype);
END
$$;

CREATE FUNCTION ml_rag._hold_schemas(relations oid[]) RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE AS $$
-- purpose: the schemas that statements on these relations name keep their names until the end of the
-- transaction: ALTER SCHEMA waits, from the minor releases of PostgreSQL of 2026 on (seen with 15.20)
-- The address of an object is looked up again after the wait for its lock.  Errors: 55P03
DECLARE
  _schema oid;
  _found oid;
BEGIN
  FOR _schema IN SELECT s FROM ml_rag._schemas_of(relations) AS s ORDER BY s LOOP
    FOR _round IN 1..10 LOOP
      BEGIN
        _found := (SELECT h.objid
          FROM pg_identify_object_as_address('pg_namespace'::regclass, _schema, 0) AS n
          CROSS JOIN LATERAL pg_get_object_address(n.type, n.object_names, n.object_args) AS h);
      EXCEPTION WHEN invalid_schema_name THEN
        _found := NULL;  -- renamed or dropped since its name was read
      END;
      EXIT WHEN _found = _schema OR NOT EXISTS (SELECT FROM pg_namespace AS n WHERE n.oid = _schema);
    END LOOP;
    IF _found IS DISTINCT FROM _schema THEN
      RAISE EXCEPTION USING ERRCODE = '55P03', MESSAGE = 'a schema cannot be locked',
        DETAIL = 'It was renamed again and again, or dropped.', HINT = 'Try again.';
    END IF;
  END LOOP;
END
$$;

CREATE FUNCTION ml_rag._hold(relations oid[], from_triggers boolean DEFAULT false) RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SET search_path FROM CURRENT AS $$
-- purpose: these relations and their schemas keep their names, and the relations their owners, until the end
-- of the transaction; a check of owners comes after it
-- A statement looks its names up again once it has the lock that it waited for. A role that may
-- create in a schema can make it wait until the owner of a relation has renamed or dropped that, and put
-- another one there. PREPARE takes the lock, runs nothing and checks no privilege. from_triggers: the tables
-- do not get other triggers, either
-- Errors: 42P01
DECLARE
  _relation regclass;
  _name text;
  _statement text;
BEGIN
  PERFORM ml_rag._hold_schemas(relations);
  FOREACH _relation IN ARRAY relations LOOP
    _name := ml_rag._relation_name(_relation);
    _statement := format('PREPARE ml_rag_held AS %s FROM ONLY %s',
      CASE WHEN from_triggers THEN 'DELETE' ELSE 'SELECT' END, _name);
    BEGIN
      EXECUTE _statement;
    EXCEPTION WHEN duplicate_prepared_statement THEN
      -- left by a call that was cancelled between the two
      EXECUTE concat('DEALLOCATE ml_rag_held; ', _statement);
    END;
    EXECUTE 'DEALLOCATE ml_rag_held';
    PERFORM ml_rag._check_name(_name, _relation);
  END LOOP;
END
$$;

CREATE FUNCTION ml_rag._hold_read(relations oid[]) RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SET search_path FROM CURRENT AS $$
-- purpose: ml_rag._hold for relations that are read, those in schemas that the caller may not use among them
-- These cannot be named. PREPARE locks what a view or a policy reads; LOCK TABLE locks the parts of a table,
-- and of what a view reads, if its owner may SELECT that.
DECLARE
  _named oid[] := ARRAY(
    SELECT r.oid FROM unnest(relations) WITH ORDINALITY AS r (oid, place) JOIN pg_class AS c ON c.oid = r.oid
    WHERE c.relkind IN ('r', 'p', 'v', 'm', 'f') AND has_schema_privilege(c.relnamespace, 'USAGE')
    ORDER BY r.place);
  _name text;
BEGIN
  PERFORM ml_rag._hold(_named);
  FOR _name IN
    SELECT ml_rag._relation_name(c.oid) FROM pg_class AS c
    WHERE NOT relations <@ _named AND c.oid = ANY (_named) AND has_table_privilege(c.oid, 'SELECT')
      AND (c.relkind = 'v' OR c.relkind IN ('r', 'p') AND c.relhassubclass)
  LOOP
    BEGIN
      EXECUTE format('LOCK TABLE %s IN ACCESS SHARE MODE', _name);
    EXCEPTION WHEN insufficient_privilege THEN
      NULL;  -- of a view whose owner may read some columns only
    END;
  END LOOP;
END
$$;

CREATE FUNCTION ml_rag._hold_with(roots oid[], what text DEFAULT 'read') RETURNS oid[]
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SET search_path FROM CURRENT AS $$
-- purpose: hold relations and what is read with them until the end of the transaction; returns what is held
-- what: trusted = null, and those that are not trusted are not waited for; parts = only their parts, which
-- are named in statements; triggers = parts, without new triggers
-- While a lock is waited for, others can come to be read, such as a child: it is looked for after that. What
-- a check of trust goes by is found when all of it is held.  Errors: 42P01, 55P03
DECLARE
  _held oid[] := '{}';
  _found oid[];
BEGIN
  FOR _round IN 1..10 LOOP
    _found := ARRAY(
      SELECT r.oid FROM unnest(roots) WITH ORDINALITY AS t (oid, place)
      CROSS JOIN LATERAL unnest(CASE WHEN what IN ('parts', 'triggers') THEN ml_rag._parts(t.oid)
        ELSE ml_rag._read_with(t.oid) END) WITH ORDINALITY AS r (oid, place)
      GROUP BY r.oid ORDER BY min(t.place), min(r.place));
    IF what = 'trusted' AND NOT ml_rag._are_trusted(_found) THEN
      RETURN NULL;
    ELSIF _found <@ _held THEN
      RETURN _found;
    ELSIF what IN ('parts', 'triggers') THEN
      PERFORM ml_rag._hold(_found, what = 'triggers');
    ELSE
      PERFORM ml_rag._hold_read(_found);
    END IF;
    _held := _found;
  END LOOP;
  RAISE EXCEPTION USING ERRCODE = '55P03',
    MESSAGE = format('what is read with "%s" cannot be locked', roots[1]::regclass),
    DETAIL = 'Each time that it was locked, other parts were there.', HINT = 'Try again.';
END
$$;

CREATE FUNCTION ml_rag._hold_trusted(roots oid[]) RETURNS boolean
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SET search_path FROM CURRENT AS $$
-- purpose: whether relations may be touched unasked, with what is read with them; if so, these stay as they
-- are until the end of the transaction
BEGIN
  RETURN ml_rag._hold_with(roots, 'trusted') IS NOT NULL;
END
$$;

CREATE FUNCTION ml_rag._hold_found(relation oid) RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE AS $$
-- purpose: hold a store that the call has found by itself, and what is read with it  Errors: 42501 it was
-- given away meanwhile
BEGIN
  IF NOT ml_rag._hold_trusted(ARRAY[relation]) THEN
    RAISE EXCEPTION USING ERRCODE = '42501',
      MESSAGE = format('store %s was given to a role that you do not trust', ml_rag._relation_name(relation)),
      DETAIL = ml_rag._why_untrusted(relation), HINT = 'Name it in "vector_store", with its schema.';
  END IF;
END
$$;

CREATE FUNCTION ml_rag._changed_with(relation oid) RETURNS oid[]
LANGUAGE plpgsql STABLE PARALLEL SAFE SET search_path FROM CURRENT AS $$
-- purpose: a table and all that goes or changes with its rows: its parts, and tables whose foreign keys say
-- CASCADE, SET NULL or SET DEFAULT
-- Those are changed as their owners, but their AFTER triggers run as the role that has changed the table.
-- Reads: the catalog, by triggers, as constraints have no index by the table that they refer to
BEGIN
  RETURN ARRAY(
    WITH RECURSIVE part AS (
      SELECT relation AS oid
      UNION SELECT r.oid FROM part AS p CROSS JOIN LATERAL (
        SELECT i.inhrelid FROM pg_inherits AS i WHERE i.inhparent = p.oid
        UNION ALL SELECT t.tgconstrrelid FROM pg_trigger AS t JOIN pg_proc AS f ON f.oid = t.tgfoid
        WHERE t.tgrelid = p.oid AND t.tgisinternal
          AND f.proname ~ '^RI_FKey_(cascade|setnull|setdefault)_') AS r (oid)
    )
    SELECT p.oid FROM part AS p);
END
$$;

CREATE FUNCTION ml_rag._refuse_foreign_trigger(relation regclass, filled regclass) RETURNS void
LANGUAGE plpgsql STABLE PARALLEL RESTRICTED AS $$
-- purpose: refuse that a trigger function, which has the rights of its owner, writes a table of a role that
-- this one does not trust
-- ALTER TABLE … OWNER TO leaves the function behind. A role with TRIGGER on a table can have a function of
-- its own run, by a condition too, or a text as a statement, by an argument of another's function. Only the
-- owner can ENABLE ALWAYS a trigger. A role with REFERENCES on a table of segments can have others change
-- when its rows are deleted; keys of the table itself are not changed.
-- A role that may also execute the function, as it can by default privileges, can have it run by a trigger
-- without transition tables: their names must not lead to a temporary view, whose functions would run then.
-- Reads: the catalog  Errors: 40001; 42501; 55000 isolation level, name of a transition table
DECLARE
  _refers boolean := filled <> relation;
  _tables oid[] := CASE WHEN _refers THEN ml_rag._changed_with(filled) ELSE ml_rag._parts(filled) END;
  _found record;
BEGIN
  IF coalesce(to_regclass('pg_temp.ml_rag_new'), to_regclass('pg_temp.ml_rag_old')) IS NOT NULL THEN
    RAISE EXCEPTION USING ERRCODE = '55000', MESSAGE = format('rows of "%s" cannot be written', relation),
      DETAIL = format('Relation %s has the name of a transition table of its triggers.',
        coalesce(to_regclass('pg_temp.ml_rag_new'), to_regclass('pg_temp.ml_rag_old'))),
      HINT = 'Drop or rename that relation.';
  END IF;
  SELECT c.oid::regclass AS table, g.role INTO _found
  FROM pg_class AS c CROSS JOIN LATERAL (
    SELECT a.grantee FROM aclexplode(c.relacl) AS a
    WHERE a.privilege_type = 'TRIGGER' OR _refers AND a.privilege_type = 'REFERENCES'
    UNION ALL SELECT a.grantee FROM pg_attribute AS n CROSS JOIN LATERAL aclexplode(n.attacl) AS a
    WHERE _refers AND n.attrelid = c.oid AND a.privilege_type = 'REFERENCES'
    -- whatever the snapshot
    UNION ALL SELECT r.oid FROM pg_roles AS r
    WHERE r.rolname IN (session_user, current_setting('role'))
      AND (has_table_privilege(r.oid, c.oid, 'TRIGGER')
        OR _refers AND has_any_column_privilege(r.oid, c.oid, 'REFERENCES'))) AS g (role)
  WHERE c.oid = ANY (_tables) AND NOT ml_rag._trusts(g.role)
    AND current_setting('transaction_isolation') NOT IN ('read committed', 'read uncommitted') LIMIT 1;
  IF FOUND THEN
    -- a trigger runs as soon as it is there, but is in the catalog of later snapshots only
    RAISE EXCEPTION USING ERRCODE = '55000',
      MESSAGE = format('triggers of "%s" cannot be checked at this isolation level', _found.table),
      DETAIL = format('Role %s may create triggers or foreign keys, and isolation level %s hides those that '
        'were just created.',
        CASE _found.role WHEN 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(_found.role)) END,
          current_setting('transaction_isolation')),
      HINT = format('Write at READ COMMITTED, or REVOKE TRIGGER, REFERENCES ON %s FROM the role.',
        _found.table);
  END IF;
  SELECT c.oid::regclass AS table INTO _found
  FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace CROSS JOIN LATERAL (
    SELECT c.xmax UNION ALL SELECT n.xmax
    UNION ALL SELECT a.xmax FROM pg_attribute AS a WHERE a.attrelid = c.oid) AS r (xmax)
  WHERE c.oid = ANY (_tables || ml_rag._parts(relation))
    AND current_setting('transaction_isolation') NOT IN ('read committed', 'read uncommitted')
    AND ml_rag._was_changed(r.xmax) LIMIT 1;
  IF FOUND THEN
    RAISE EXCEPTION USING ERRCODE = '40001',
      MESSAGE = format('table "%s" has been changed since the transaction began', _found.table),
      DETAIL = 'The snapshot of the transaction does not tell who may create triggers on it by now.',
      HINT = 'Try again, in a new transaction.';
  END IF;
  IF NOT ml_rag._are_trusted(ml_rag._parts(relation) || ml_rag._parts(filled)) THEN
    RAISE EXCEPTION USING ERRCODE = '42501',
      MESSAGE = format('the trigger function of "%s" is of role %s, which does not trust the owner of the '
        'table', relation,
        quote_ident(current_user)),
      DETAIL = 'Triggers of a table or a partition that the function writes would run code with the rights '
        'of that role.',
      HINT = 'Give the function to the owner of the table: ALTER FUNCTION … OWNER TO ….';
  END IF;
  SELECT c.oid::regclass AS table, pg_get_userbyid(c.relowner) AS owner INTO _found
  FROM pg_class AS c
  WHERE _refers AND c.oid = ANY (_tables) AND c.oid <> filled AND NOT ml_rag._are_trusted(ARRAY[c.oid])
  ORDER BY c.oid LIMIT 1;
  IF FOUND THEN
    RAISE EXCEPTION USING ERRCODE = '42501',
      MESSAGE = format('rows of "%s" refer to "%s"', _found.table, filled),
      DETAIL = format('Their foreign key changes them together, and triggers of role %s, which you do not '
        'trust, would run with the rights of %s.', quote_ident(_found.owner), quote_ident(current_user)),
      HINT = format('Drop the foreign key, and REVOKE REFERENCES ON %s FROM the role.', filled);
  END IF;
  SELECT t.tgname AS name, t.tgrelid::regclass AS table, r.* INTO _found
  FROM pg_trigger AS t JOIN pg_class AS c ON c.oid = t.tgrelid CROSS JOIN LATERAL (
    SELECT coalesce(p.proowner, o.oprowner, y.typowner), 'owner' FROM pg_depend AS d
    LEFT JOIN pg_proc AS p ON d.refclassid = 'pg_proc'::regclass AND p.oid = d.refobjid
    LEFT JOIN pg_operator AS o ON d.refclassid = 'pg_operator'::regclass AND o.oid = d.refobjid
    LEFT JOIN pg_type AS y ON d.refclassid = 'pg_type'::regclass AND y.oid = d.refobjid
    WHERE d.classid = 'pg_trigger'::regclass AND d.objid = t.oid AND coalesce(p.oid, o.oid, y.oid) IS NOT NULL
      -- keyword/index
      AND (p.pronamespace = 'ml_rag'::regnamespace AND p.proname = '_keep_keywords') IS NOT TRUE
    UNION ALL SELECT a.grantee, 'grant' FROM aclexplode(c.relacl) AS a
    WHERE a.privilege_type = 'TRIGGER' AND t.tgenabled <> 'A' AND (t.tgqual IS NOT NULL OR t.tgnargs > 0)
    -- of a role that may create triggers no more: what can run a statement, check a domain that a text or an
    -- OID names, as input functions of types do, set a path or read a file; of extensions, ml_rag's functions
    -- too, whatever depends on more than its arguments
    UNION ALL SELECT NULL, p.proname FROM regexp_matches(t.tgqual::text, ':funcid ([0-9]+)', 'g') AS f (match)
    JOIN pg_proc AS p ON p.oid = f.match[1]::oid
    WHERE t.tgenabled <> 'A' AND CASE
      WHEN p.pronamespace = 'pg_catalog'::regnamespace
        THEN p.provolatile = 'v' OR p.proname ~ '_to_xml|^pg_input_'
          OR 'cstring'::regtype = ANY (p.proargtypes::oid[])
      ELSE p.provolatile <> 'i' AND EXISTS (SELECT FROM pg_depend AS e
        WHERE e.classid = 'pg_proc'::regclass AND e.objid = p.oid AND e.deptype = 'e') END) AS r (role, why)
  WHERE t.tgrelid = ANY (_tables) AND NOT t.tgisinternal AND t.tgenabled <> 'D'
    AND (r.role IS NULL OR NOT ml_rag._trusts(r.role))
  ORDER BY r.why = 'owner' DESC, r.role NULLS LAST LIMIT 1;
  IF FOUND THEN
    RAISE EXCEPTION USING ERRCODE = '42501',
      MESSAGE = format('trigger "%s" of "%s" can run code of a role that you do not trust', _found.name,
        _found.table),
      DETAIL = format(CASE
        WHEN _found.role IS NULL THEN 'Its condition, which may be of a role that could create triggers, '
          'calls %1$s with the rights of %3$s.'
        WHEN _found.why = 'owner' THEN 'A function, operator or type of it belongs to role %2$s, '
          'whose code would run with the rights of %3$s.'
        ELSE 'Role %2$s may create triggers on the table. Condition and arguments of this one are evaluated '
          'with the rights of %3$s.' END,
        _found.why, CASE _found.role WHEN 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(_found.role)) END,
        quote_ident(current_user)),
      HINT = CASE WHEN _found.why = 'owner'
        THEN 'Drop the trigger, or have a superuser give that to the owner of the table: ALTER FUNCTION … '
          'OWNER TO ….'
        ELSE format('Drop the trigger, or, if you know it: ALTER TABLE %s ENABLE ALWAYS TRIGGER %I;',
          _found.table, _found.name) END;
  END IF;
END
$$;

CREATE FUNCTION ml_rag._keep_schemas() RETURNS event_trigger
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SET search_path FROM CURRENT AS $$
-- purpose: the schemas of ml_rag and pgvector keep their names, by which functions of ml_rag find types,
-- operators and functions. The owner of such a schema, in public the owner of the database, could rename it
-- and put another one in its place. And functions of ml_rag stay as they are: their owner, ml_rag_internal,
-- could have one run with the rights of its caller, and with another search_path
-- Reads: the catalog  Errors: 42501, 55000
DECLARE
  _extension name := (
    SELECT e.name FROM (VALUES ('ml_rag', to_regnamespace('@extschema@')),
      ('vector', to_regnamespace('@vector@'))) AS e (name, schema)
    -- the extensions are not there in a snapshot from before them, the names of schemas are those of now
    WHERE e.schema IS NULL OR EXISTS (
      SELECT FROM pg_extension AS x WHERE x.extname = e.name AND x.extnamespace <> e.schema) LIMIT 1);
BEGIN
  IF EXISTS (
    SELECT FROM pg_event_trigger_ddl_commands() AS c JOIN pg_proc AS p ON p.oid = c.objid
    -- the schema is that of after the command
    WHERE c.classid = 'pg_proc'::regclass AND NOT c.in_extension
      AND (p.pronamespace = 'ml_rag'::regnamespace OR p.proowner = to_regrole('ml_rag_internal')))
    AND NOT coalesce((
      SELECT pg_has_role(e.extowner, 'USAGE') FROM pg_extension AS e WHERE e.extname = 'ml_rag'), false) THEN
    RAISE EXCEPTION USING ERRCODE = '42501', MESSAGE = 'must be owner of extension ml_rag',
      DETAIL = 'Functions of ml_rag run with the rights of others.',
      HINT = 'Leave them as they are.';
  END IF;
  IF _extension IS NOT NULL THEN
    RAISE EXCEPTION USING ERRCODE = '55000',
      MESSAGE = format('extension "%s" cannot be in a schema of another name', _extension),
      DETAIL = 'Functions of ml_rag have the name of its schema in them.',
      HINT = 'DROP EXTENSION ml_rag first, and create it again afterwards.';
  END IF;
END
$$;
CREATE EVENT TRIGGER ml_rag_keep_schemas ON ddl_command_end
  WHEN TAG IN ('ALTER SCHEMA', 'ALTER EXTENSION', 'ALTER FUNCTION', 'ALTER ROUTINE')
EXECUTE FUNCTION ml_rag._keep_schemas();

-- The owner of the schema that they are in could drop them with it, without a right on what a schema has,
-- and put others in their place: a session that is calling ml_rag just then, a superuser's too, waits for a
-- table of that name and finds the new one. An event trigger of sql_drop would come too late: it is dropped,
-- too. But PostgreSQL drops no table that the session itself is reading. So a cursor is opened before a role
-- that may not drop the extension drops what could have it; it ends with the transaction.

CREATE FUNCTION ml_rag._tell_dropper() RETURNS event_trigger
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SET search_path = pg_catalog, pg_temp AS $$
-- purpose: note in a setting whether the role that drops is an owner of the extension, for
-- ml_rag._keep_tables, which runs next and has its owner's rights. A snapshot from before the extension does
-- not tell its owner  Reads: the catalog
BEGIN
  PERFORM set_config('ml_rag.may_drop', coalesce((
    SELECT pg_has_role(e.extowner, 'USAGE') FROM pg_extension AS e WHERE e.extname = 'ml_rag'),
    false)::text, true);
END
$$;

CREATE FUNCTION ml_rag._keep_tables() RETURNS event_trigger
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SECURITY DEFINER SET search_path FROM CURRENT AS $$
-- purpose: a table of ml_rag is in use in this session, unless the owner of the extension drops. The cursor
-- has no rows that could be fetched  Errors: 55006 in DROP, where that would drop the table
DECLARE
  _kept refcursor;
BEGIN
  IF current_setting('ml_rag.may_drop') <> 'true' THEN
    OPEN _kept FOR SELECT FROM ml_rag.setting_value AS v LIMIT 0;
  END IF;
END
$$;

CREATE EVENT TRIGGER ml_rag_keep_1 ON ddl_command_start
  WHEN TAG IN ('DROP EXTENSION', 'DROP SCHEMA', 'DROP OWNED')
EXECUTE FUNCTION ml_rag._tell_dropper();
CREATE EVENT TRIGGER ml_rag_keep_2 ON ddl_command_start
  WHEN TAG IN ('DROP EXTENSION', 'DROP SCHEMA', 'DROP OWNED')
EXECUTE FUNCTION ml_rag._keep_tables();
