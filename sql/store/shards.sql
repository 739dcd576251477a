-- shards: partitions of a store that move to other servers, and back.

CREATE FUNCTION ml_rag._partition(store regclass, partition integer, OUT relation regclass,
  OUT partitions integer)
LANGUAGE plpgsql STABLE PARALLEL SAFE AS $$
-- purpose: a hash partition of a store, by its remainder, and how many there are; for the owner of the store
DECLARE
  _bounds text;
BEGIN
  PERFORM ml_rag._own_table(store);
  -- they are copied as the transaction sees them, and dropped as they are
  PERFORM ml_rag._check_transaction(format('the partitions of "%s" cannot be moved', store));
  PERFORM ml_rag._check_store(store, NULL);
  SELECT p.oid, pg_get_expr(p.relpartbound, p.oid) INTO relation, _bounds
  FROM pg_inherits AS i JOIN pg_class AS p ON p.oid = i.inhrelid
  WHERE i.inhparent = store AND pg_get_expr(p.relpartbound, p.oid) LIKE format('%%remainder %s)', partition);
  IF NOT FOUND THEN
    RAISE EXCEPTION USING ERRCODE = '42704',
      MESSAGE = format('"%s" has no hash partition %s', store, coalesce(partition::text, 'NULL')),
      DETAIL = format('It has: %s.', coalesce((
        SELECT string_agg(i.inhrelid::regclass::text, ', ' ORDER BY i.inhrelid) FROM pg_inherits AS i
        WHERE i.inhparent = store), 'none')),
      HINT = 'A store that is created with option "partitions" has them; the first is 0.';
  END IF;
  partitions := substring(_bounds FROM 'modulus ([0-9]+)');
END
$$;

CREATE FUNCTION ml_rag._check_unread(store regclass, server name DEFAULT NULL) RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE AS $$
-- purpose: that the transaction has asked nothing of that server, or of those of the store's shards: what
-- postgres_fdw reads in a transaction there is as of its first statement, and what others have written since
-- would not move
-- Foreign tables that were read are locked until the end. To be called first: what looks for shards locks
-- them, too.
-- Reads: the catalog
DECLARE
  _read regclass := (
    SELECT f.ftrelid FROM pg_locks AS l JOIN pg_foreign_table AS f ON f.ftrelid = l.relation
    JOIN pg_foreign_server AS s ON s.oid = f.ftserver
    WHERE l.locktype = 'relation' AND l.pid = pg_backend_pid()
      AND l.database = (SELECT d.oid FROM pg_database AS d WHERE d.datname = current_database())
      AND (s.srvname = _check_unread.server OR s.oid IN (
        SELECT p.ftserver FROM pg_inherits AS i JOIN pg_foreign_table AS p ON p.ftrelid = i.inhrelid
        WHERE i.inhparent = store))
    LIMIT 1);
BEGIN
  IF _read IS NOT NULL THEN
    RAISE EXCEPTION USING ERRCODE = '55000',
      MESSAGE = format('the partitions of "%s" cannot be moved in this transaction', store),
      DETAIL = format('It has used "%s" before: rows that others have written there since would be lost.',
        _read),
      HINT = 'Call it in a transaction of its own, one for each partition.';
  END IF;
END
$$;

CREATE FUNCTION ml_rag._check_server(store regclass, server name, schema_name name,
  table_name name) RETURNS void
LANGUAGE plpgsql STABLE PARALLEL SAFE AS $$
-- purpose: that shards can be on a foreign server, that the caller may use it, and that the table there is
-- not a shard of the store yet: its rows would be found twice. The definitions are compared: a server with
-- two addresses is not recognized.
DECLARE
  _wrapper name := (SELECT w.fdwname FROM pg_foreign_server AS s
    JOIN pg_foreign_data_wrapper AS w ON w.oid = s.srvfdw
                    WHERE s.srvname = server);
  _where CONSTANT text[] := '{host,hostaddr,port,dbname}';
  _shard regclass := (
    SELECT s.shard FROM ml_rag._shards(store) AS s JOIN pg_foreign_table AS f ON f.ftrelid = s.shard
    JOIN pg_foreign_server AS o ON o.oid = f.ftserver
    WHERE f.ftoptions @> ARRAY[concat('schema_name=', schema_name), concat('table_name=', table_name)]
      AND ARRAY(SELECT u FROM unnest(o.srvoptions) AS u WHERE split_part(u, '=', 1) = ANY (_where) ORDER BY u)
        = ARRAY(SELECT u FROM pg_foreign_server AS n CROSS JOIN unnest(n.srvoptions) AS u
                WHERE n.srvname = _check_server.server AND split_part(u, '=', 1) = ANY (_where) ORDER BY u)
    LIMIT 1);
BEGIN
  IF _wrapper IS NULL THEN
    RAISE EXCEPTION USING ERRCODE = '42704',
      MESSAGE = format('server "%s" does not exist', coalesce(server, 'NULL')),
      HINT = 'CREATE SERVER … FOREIGN DATA WRAPPER postgres_fdw OPTIONS (host …, dbname …, extensions '
        '''vector, ml_rag'');';
  ELSIF NOT has_server_privilege(server, 'USAGE') THEN
    RAISE EXCEPTION USING ERRCODE = '42501',
      MESSAGE = format('permission denied for foreign server %s', server),
      HINT = format('GRANT USAGE ON FOREIGN SERVER %I TO %I;', server, current_user);
  ELSIF _wrapper <> 'postgres_fdw' THEN
    RAISE EXCEPTION USING ERRCODE = '22023',
      MESSAGE = format('server "%s" is not one of postgres_fdw', server),
      DETAIL = format('It is of %s.', _wrapper);
  ELSIF NOT (ml_rag._names_extension(server, 'vector') AND ml_rag._names_extension(server, 'ml_rag')) THEN
    RAISE EXCEPTION USING ERRCODE = '22023',
      MESSAGE = format('server "%s" does not name pgvector and ml_rag as extensions', server),
      DETAIL = 'postgres_fdw would read all rows of the shard to compare them here, and could not ask it for '
        'words.',
      HINT = format('ALTER SERVER %I OPTIONS (%s extensions ''vector, ml_rag'');', server, CASE WHEN EXISTS (
        SELECT FROM pg_foreign_server AS s CROSS JOIN LATERAL pg_options_to_table(s.srvoptions) AS o
        WHERE s.srvname = server AND o.option_name = 'extensions') THEN 'SET' ELSE 'ADD' END);
  END IF;
  IF _shard IS NOT NULL THEN
    RAISE EXCEPTION USING ERRCODE = '55000',
      MESSAGE = format('table %I.%I of server "%s" is a shard of "%s" already', schema_name, table_name,
        server, store),
      DETAIL = format('It is partition "%s".', _shard),
      HINT = 'Make another store on that server by ml_rag.create_store with "shard": true, and name it in '
        '"table_name".';
  END IF;
END
$$;

CREATE FUNCTION ml_rag._check_sharding(store regclass) RETURNS void
LANGUAGE plpgsql STABLE PARALLEL SAFE AS $$
-- purpose: that a store has nothing that its shards could not keep up, nor what goes with a partition or runs
-- as the role that moves it: an administrator, say
DECLARE
  _parts oid[] := ml_rag._parts(store);
  _why text := CASE
    -- that of a partition, with FORCE, hides rows from the role that moves it: they would be lost
    WHEN EXISTS (SELECT FROM pg_class AS c WHERE c.oid = ANY (_parts) AND c.relrowsecurity)
      THEN 'It or a partition has row-level security; policies belong on the shards.'
    WHEN EXISTS (SELECT FROM pg_constraint AS k WHERE k.confrelid = ANY (_parts)
      AND k.conrelid <> ALL (_parts))
      THEN 'Another table, such as a node group, refers to its rows.'
    WHEN EXISTS (SELECT FROM pg_rewrite AS r WHERE r.ev_class = ANY (_parts))
      THEN 'It or a partition has a rule.'
    -- a CHECK can call any function, the others only what they depend on
    WHEN NOT ml_rag._are_trusted(_parts) AND EXISTS (
      SELECT FROM pg_constraint AS k WHERE k.conrelid = ANY (_parts) AND k.contype = 'c'
      UNION ALL SELECT FROM pg_depend AS d
      LEFT JOIN pg_proc AS p ON d.refclassid = 'pg_proc'::regclass AND p.oid = d.refobjid
      LEFT JOIN pg_operator AS o ON d.refclassid = 'pg_operator'::regclass AND o.oid = d.refobjid
      LEFT JOIN pg_type AS y ON d.refclassid = 'pg_type'::regclass AND y.oid = d.refobjid
      WHERE d.classid = 'pg_class'::regclass AND d.objid = ANY (_parts || ARRAY(
        SELECT x.indexrelid FROM pg_index AS x WHERE x.indrelid = ANY (_parts)))
        AND coalesce(p.oid, o.oid, y.oid) IS NOT NULL
        AND NOT ml_rag._trusts(coalesce(p.proowner, o.oprowner, y.typowner)))
      THEN 'It is of a role that you do not trust, and its constraints, indexes or types can run code with '
        'your rights.'
    ELSE
      (SELECT format('"%s" has trigger %I; so have tables with a further embedding or a vectorizer.',
        t.tgrelid::regclass, t.tgname)
          FROM pg_trigger AS t WHERE t.tgrelid = ANY (_parts) AND NOT t.tgisinternal
          AND (t.tgfoid <> 'ml_rag._keep_keywords()'::regprocedure OR t.tgqual IS NOT NULL)
          ORDER BY t.tgrelid, t.tgname LIMIT 1)
    END;
BEGIN
  IF _why IS NOT NULL THEN
    RAISE EXCEPTION USING ERRCODE = '55000', MESSAGE = format('"%s" cannot have shards', store),
      DETAIL = _why;
  END IF;
END
$$;

CREATE FUNCTION ml_rag._refuse_policies() RETURNS event_trigger
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SECURITY DEFINER SET search_path FROM CURRENT AS $$
-- purpose: a store with shards gets no row-level security: its readers may SELECT its partitions, where its
-- policies do not apply
-- It runs as its owner, since a role that alters a table may have no privilege on ml_rag.
-- Reads: the catalog  Errors: 55000
DECLARE
  _found record;
BEGIN
  SELECT c.oid::regclass AS store, p.relid AS shard, k.calls INTO _found
  FROM pg_event_trigger_ddl_commands() AS d JOIN pg_class AS c ON c.oid = d.objid
    AND d.classid = 'pg_class'::regclass
  CROSS JOIN LATERAL pg_partition_tree(c.oid) AS p CROSS JOIN LATERAL ml_rag._calls_of(p.relid) AS k (calls)
  WHERE c.relkind = 'p' AND c.relrowsecurity AND k.calls IS NOT NULL LIMIT 1;
  IF FOUND THEN
    RAISE EXCEPTION USING ERRCODE = '55000',
      MESSAGE = format('"%s" has shards, and can have no row-level security', _found.store),
      DETAIL = format('A role that may SELECT it may SELECT its partitions, where its policies do not apply. '
        'Partition %s is a shard; its table of calls is %s.', _found.shard, _found.calls),
      HINT = 'Make the policies on the shards.';
  END IF;
END
$$;
CREATE EVENT TRIGGER ml_rag_refuse_policies ON ddl_command_end WHEN TAG IN ('ALTER TABLE')
EXECUTE FUNCTION ml_rag._refuse_policies();

CREATE FUNCTION ml_rag._follow_partitions(store regclass) RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE AS $$
-- purpose: after partitions have come and gone: triggers, privileges and keys as they must be
-- A partitioned table with foreign partitions can have no unique index; then each partition that is here has
-- the key by itself.
-- Writes: the definitions of the tables, as the caller
DECLARE
  _has_shards boolean := EXISTS (SELECT FROM ml_rag._shards(store));
  _key text := coalesce((SELECT string_agg(quote_ident(k), ', ' ORDER BY place) FROM unnest((
    SELECT i.key FROM ml_rag._keyword_index(store) AS i)) WITH ORDINALITY AS u (k, place)),
    'document_id, segment_number');
  _part regclass;
  _reader text;
BEGIN
  IF EXISTS (SELECT FROM ml_rag._keyword_index(store)) THEN
    PERFORM ml_rag._make_keyword_triggers(store);
  END IF;
  FOR _part IN SELECT p.relid FROM pg_partition_tree(store) AS p WHERE p.isleaf LOOP
    IF _has_shards THEN
      PERFORM ml_rag._grant_readers(store, _part);
    ELSE
      -- the store can have row-level security again, which a partition that is read by its name has not
      FOR _reader IN SELECT DISTINCT CASE a.grantee WHEN 0 THEN 'PUBLIC' ELSE a.grantee::regrole::text END
        FROM pg_class AS c CROSS JOIN LATERAL aclexplode(c.relacl) AS a
        WHERE c.oid = store AND a.privilege_type = 'SELECT' AND a.grantee <> c.relowner LOOP
        EXECUTE format('REVOKE SELECT ON %s FROM %s', ml_rag._relation_name(_part), _reader);
      END LOOP;
    END IF;
    IF EXISTS (SELECT FROM ml_rag._shards(store) AS s WHERE s.shard = _part) THEN
      PERFORM ml_rag._grant_readers(store, k.calls) FROM ml_rag._calls_of(_part) AS k (calls)
      WHERE k.calls IS NOT NULL;
    ELSIF NOT EXISTS (SELECT FROM pg_index AS x WHERE x.indrelid = _part AND x.indisprimary) THEN
      EXECUTE format('ALTER TABLE %s ADD PRIMARY KEY (%s)', ml_rag._relation_name(_part), _key);
    END IF;
  END LOOP;
  IF NOT _has_shards AND NOT EXISTS (SELECT FROM pg_index AS x
    WHERE x.indrelid = store AND x.indisprimary) THEN
    EXECUTE format('ALTER TABLE %s ADD PRIMARY KEY (%s)', ml_rag._relation_name(store), _key);
  END IF;
END
$$;

CREATE FUNCTION ml_rag._leave_shard(shard regclass, calls regclass) RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE AS $$
-- purpose: drops the foreign table of a former shard, and its table of calls. The rows stay on the server,
-- which commits before this one: a crash between both would lose what was deleted there
-- Writes: the definitions of the tables, as the caller
DECLARE
  _there text := (SELECT format('table %s of server %I', (
      SELECT string_agg(quote_ident(o.option_value), '.' ORDER BY o.option_name)
      FROM pg_options_to_table(f.ftoptions) AS o WHERE o.option_name IN ('schema_name', 'table_name')),
      s.srvname)
    FROM pg_foreign_table AS f JOIN pg_foreign_server AS s ON s.oid = f.ftserver WHERE f.ftrelid = shard);
BEGIN
  EXECUTE format('DROP FOREIGN TABLE %s', concat_ws(', ', ml_rag._relation_name(shard), calls));
  RAISE NOTICE USING MESSAGE = format('the rows stay in %s', _there),
    HINT = 'Delete them there once this transaction is committed.';
END
$$;

CREATE FUNCTION ml_rag._free_name(store regclass, suffix text, number integer) RETURNS name
LANGUAGE plpgsql VOLATILE PARALLEL SAFE AS $$
-- purpose: a name for a table beside a store, with another one for its table of calls. Any role that may
-- create there can have taken a name, by a type too.
-- Reads: the catalog
DECLARE
  _names record;
  _name name;
BEGIN
  SELECT n.nspname, (SELECT max(left(c.relname, i)) FROM generate_series(1, 63) AS i
    WHERE octet_length(left(c.relname, i)) <= 50) AS prefix
  INTO _names FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace WHERE c.oid = store;
  LOOP
    _name := concat(_names.prefix, suffix, number);
    EXIT WHEN NOT EXISTS (
      SELECT FROM unnest(ARRAY[_name, ml_rag._calls_name(_name)]) AS u (taken)
      WHERE to_regclass(format('%I.%I', _names.nspname, taken)) IS NOT NULL
        OR to_regtype(format('%I.%I', _names.nspname, taken)) IS NOT NULL);
    number := number + 1;
  END LOOP;
  RETURN _name;
END
$$;

CREATE FUNCTION ml_rag._make_foreign(store regclass, server name, schema_name name,
  table_name name) RETURNS regclass
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE AS $$
-- purpose: the foreign table of a shard, which is not a partition yet, and its table of calls
-- Writes: new tables, as the caller
DECLARE
  _schema name := (SELECT n.nspname FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
                   WHERE c.oid = store);
  _name name := ml_rag._free_name(store, '_s', 0);
BEGIN
  EXECUTE
    format('CREATE FOREIGN TABLE %I.%I (%s) SERVER %I OPTIONS (schema_name %L, table_name %L, async_capable '
      '''true'', batch_size ''100'')', _schema, _name, (
      SELECT string_agg(format('%I %s%s%s', a.attname, format_type(a.atttypid, a.atttypmod),
        CASE WHEN a.attcollation <> t.typcollation THEN ' COLLATE ' || a.attcollation::regcollation END,
        CASE WHEN a.attnotnull THEN ' NOT NULL' END), ', ' ORDER BY a.attnum)
      FROM pg_attribute AS a JOIN pg_type AS t ON t.oid = a.atttypid
      WHERE a.attrelid = store AND a.attnum > 0 AND NOT a.attisdropped), server, schema_name, table_name);
  -- an answer is one row; the second shows that there are more
  EXECUTE format('CREATE FOREIGN TABLE %I.%I (store oid) SERVER %I OPTIONS (schema_name %L, table_name %L, '
    'async_capable ''true'', fetch_size ''1'')', _schema, ml_rag._calls_name(_name), server, schema_name,
      concat(table_name, '_shard'));
  RETURN format('%I.%I', _schema, _name)::regclass;
END
$$;

CREATE FUNCTION ml_rag._check_visible(store regclass, shard regclass) RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE AS $$
-- purpose: that no policy hides rows of a shard from the caller, who would lose them
-- One whose table of calls is gone is asked by tables that are dropped again.
-- Errors: 55000, and those of ml_rag._ask_shards
DECLARE
  _asked regclass := shard;
  _hides boolean;
BEGIN
  IF ml_rag._calls_of(shard) IS NULL THEN
    SELECT ml_rag._make_foreign(store, s.srvname, coalesce(o.schema_name, n.nspname),
      coalesce(o.table_name, c.relname)) INTO _asked
    FROM pg_foreign_table AS f JOIN pg_foreign_server AS s ON s.oid = f.ftserver
    JOIN pg_class AS c ON c.oid = f.ftrelid JOIN pg_namespace AS n ON n.oid = c.relnamespace
    CROSS JOIN LATERAL (
      SELECT max(t.option_value) FILTER (WHERE t.option_name = 'schema_name') AS schema_name,
        max(t.option_value) FILTER (WHERE t.option_name = 'table_name') AS table_name
      FROM pg_options_to_table(f.ftoptions) AS t) AS o
    WHERE f.ftrelid = shard;
  END IF;
  _hides := (SELECT a.answer -> 'hides rows' IS DISTINCT FROM 'false'
             FROM ml_rag._ask_shards(ARRAY[_asked], '{"call": "describe"}') AS a);
  IF _asked <> shard THEN
    EXECUTE format('DROP FOREIGN TABLE %s, %s', ml_rag._relation_name(_asked),
      ml_rag._relation_name(ml_rag._calls_of(_asked)));
  END IF;
  IF _hides THEN
    RAISE EXCEPTION USING ERRCODE = '55000',
      MESSAGE = format('row-level security of shard "%s" applies to you', shard),
      DETAIL = 'Rows that it hides from the role there that your user mapping names would be lost.',
      HINT = 'Map yourself to the owner of the table there, and without FORCE ROW LEVEL SECURITY.';
  END IF;
END
$$;

CREATE FUNCTION ml_rag._copy_rows(store regclass, source regclass, target regclass) RETURNS bigint
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE AS $$
-- purpose: all rows of a partition to another table, or the error; returns how many
-- Writes: the target, as the caller  Errors: 55000
DECLARE
  -- not count(*) of the foreign table, which the server would do in one statement, within a statement_timeout
  _count CONSTANT text := 'SELECT count(*) FROM (SELECT FROM %s OFFSET 0) AS t';
  _rows bigint;
  _before bigint;
  _after bigint;
BEGIN
  EXECUTE format(_count, ml_rag._relation_name(source)) INTO _rows;
  EXECUTE format(_count, ml_rag._relation_name(target)) INTO _before;
  IF _rows > 0 AND _before > 0 THEN
    RAISE EXCEPTION USING ERRCODE = '55000', MESSAGE = 'the shard has rows already',
      DETAIL = format('So has partition "%s".', source),
      HINT = 'Name another table of that server in "table_name", or delete the rows of the shard if they are '
        'not needed.';
  END IF;
  -- it is locked there by now: no policy comes in between
  PERFORM ml_rag._check_visible(store, f.ftrelid) FROM pg_foreign_table AS f
  WHERE f.ftrelid IN (source, target);
  EXECUTE format('INSERT INTO %s (%s) SELECT %2$s FROM %s', ml_rag._relation_name(target), (
    SELECT string_agg(quote_ident(a.attname), ', ' ORDER BY a.attnum) FROM pg_attribute AS a
    WHERE a.attrelid = store AND a.attnum > 0 AND NOT a.attisdropped), ml_rag._relation_name(source));
  EXECUTE format(_count, ml_rag._relation_name(target)) INTO _after;
  IF _after - _before <> _rows THEN
    RAISE EXCEPTION USING ERRCODE = '55000',
      MESSAGE = format('"%s" has got %s of the %s rows of "%s"', target, _after - _before, _rows, source),
      DETAIL = 'A trigger or rule of the table, such as one on the shard, can leave rows out.',
      HINT = 'Drop or disable it, and call again.';
  END IF;
  RETURN _rows;
END
$$;

CREATE FUNCTION ml_rag._move_partition(store regclass, partition integer, target regclass) RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE AS $$
-- purpose: the rows of a partition to another table, which takes its place; the former one is dropped (of a
-- shard, the foreign table).
-- The caller has locked the store: writers wait from the beginning, readers for the last moment.
-- Writes: both tables, and the definition of the store, as the caller
DECLARE
  _old record := ml_rag._partition(store, partition);
  _relation text := ml_rag._relation_name(store);
  _is_shard boolean := EXISTS (SELECT FROM ml_rag._shards(store) AS s WHERE s.shard = _old.relation);
  _key name := (SELECT k.conname FROM pg_constraint AS k WHERE k.conrelid = store AND k.contype = 'p');
  _calls regclass := ml_rag._calls_of(_old.relation);
  _misplaced boolean;
BEGIN
  PERFORM ml_rag._check_sharding(store);
  IF ml_rag._copy_rows(store, _old.relation, target) = 0 THEN
    -- a shard that was filled beforehand; OFFSET 0, as the function would be shipped, with the OID of a table
    -- that is here
    EXECUTE format('SELECT EXISTS (SELECT FROM (SELECT f.document_id FROM %s AS f OFFSET 0) AS t '
      'WHERE NOT satisfies_hash_partition(%s, %s, %s, t.document_id))',
      ml_rag._relation_name(target), store::oid, _old.partitions, partition) INTO _misplaced;
    IF _misplaced THEN
      RAISE EXCEPTION USING ERRCODE = '55000',
        MESSAGE = format('the shard has rows of other partitions than %s', partition),
        HINT = 'Empty it: the rows of the partition are copied.';
    END IF;
  END IF;
  IF NOT _is_shard THEN
    -- its own trigger takes the rows out of the keyword index
    EXECUTE format('DELETE FROM %s', ml_rag._relation_name(_old.relation));
  END IF;
  PERFORM ml_rag._lock_table(store, 'ACCESS EXCLUSIVE');
  IF _key IS NOT NULL THEN
    EXECUTE format('ALTER TABLE %s DROP CONSTRAINT %I', _relation, _key);
  END IF;
  EXECUTE format('ALTER TABLE %s DETACH PARTITION %s', _relation, ml_rag._relation_name(_old.relation));
  IF _is_shard THEN
    PERFORM ml_rag._leave_shard(_old.relation, _calls);
  ELSE
    EXECUTE format('DROP TABLE %s', ml_rag._relation_name(_old.relation));
  END IF;
  -- triggers that PostgreSQL has not for a table with foreign partitions
  PERFORM ml_rag._drop_keyword_triggers(store);
  EXECUTE format('ALTER TABLE %s ATTACH PARTITION %s FOR VALUES WITH (MODULUS %s, REMAINDER %s)', _relation,
    ml_rag._relation_name(target), _old.partitions, partition);
  PERFORM ml_rag._follow_partitions(store);
END
$$;

CREATE FUNCTION ml_rag.attach_shard(store regclass, server name, options jsonb DEFAULT NULL) RETURNS regclass
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SET search_path FROM CURRENT AS $$
-- Writes: the store's definition and the shard, as the caller
DECLARE
  _options jsonb;
  _schema name;
  _table name;
  _shard regclass;
  _own jsonb;
  _other jsonb;
  _key text;
BEGIN
  PERFORM ml_rag._check_unread(store, server);
  _options := ml_rag.parse_options('attach_shard', $3);
  PERFORM ml_rag._partition(store, (_options -> 'partition')::integer);
  -- Before anything is asked of the server: postgres_fdw reads all of a transaction there as of its first
  -- statement, and rows that are written later would not move. And before the shards that there are are
  -- looked at.
  PERFORM ml_rag._lock_table(store, 'SHARE ROW EXCLUSIVE');
  SELECT coalesce(_options ->> 'schema_name', n.nspname), coalesce(_options ->> 'table_name', c.relname)
  INTO _schema, _table
  FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace WHERE c.oid = store;
  PERFORM ml_rag._check_server(store, server, _schema, _table);
  _shard := ml_rag._make_foreign(store, server, _schema, _table);
  _own := ml_rag._describe(store);
  _other := (SELECT a.answer FROM ml_rag._ask_shards(ARRAY[_shard], '{"call": "describe"}') AS a);
  _key := (SELECT k FROM jsonb_object_keys(_own) AS k WHERE _own -> k IS DISTINCT FROM _other -> k
    ORDER BY k LIMIT 1);
  IF _key IS NOT NULL THEN
    RAISE EXCEPTION USING ERRCODE = '55000',
      MESSAGE = format('the shard differs from "%s" in %s', store, _key),
      DETAIL = format('The store has %s, the shard %s.', _own -> _key,
        coalesce(left(_other ->> _key, 1000), 'none')),
      HINT = 'On the shard, ml_rag.create_store with the options of the store and "shard": true makes the '
        'same.';
  END IF;
  PERFORM ml_rag._move_partition(store, (_options -> 'partition')::integer, _shard);
  RETURN _shard;
@CATCH@
END
$$;
COMMENT ON FUNCTION ml_rag.attach_shard(regclass, name, jsonb) IS
$$moves a partition of a vector store to another server: ml_rag.attach_shard('handbook', 'server_a', '{"partition": 0}')
server: a foreign server of postgres_fdw that names the extensions vector and ml_rag and that the caller may
use. There ml_rag.create_store with "shard": true has made a store of the same columns, model and keyword
index, in the same version of ml_rag. The partition's rows are copied, wherever they are by now (on another
server they stay, too); writers wait meanwhile, searches only while the tables are exchanged. Each role
searches the shard with a user mapping of its own. For the owner of the store. options: SELECT * FROM
ml_rag.option WHERE routine = 'attach_shard'. Returns the foreign table. Errors: 22023 bad option or server;
25006; 42704 no such partition or server; 42P01; 42501; 55000 the shard differs from the store, has rows of
its own, or is a shard of the store already, or the store can have none, or at another isolation level than
READ COMMITTED, or in a transaction that has used a shard on one of the servers, or row-level security of a
shard applies to the caller, or a shard does not keep all rows; 55P03 lock_timeout; 40P01 a transaction has
read the store, and waits to write to it; those of postgres_fdw.$$;

CREATE FUNCTION ml_rag.detach_shard(store regclass, partition integer) RETURNS regclass
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SET search_path FROM CURRENT AS $$
-- Writes: the store's definition, and rows, as the caller
DECLARE
  _old record;
  _relation text;
  _calls regclass;
  _shard text;
  _name text;
BEGIN
  PERFORM ml_rag._check_unread(store);
  _old := ml_rag._partition(store, partition);
  _relation := ml_rag._relation_name(store);
  _calls := ml_rag._calls_of(_old.relation);
  _shard := ml_rag._relation_name(_old.relation);
  IF NOT EXISTS (SELECT FROM ml_rag._shards(store) AS s WHERE s.shard = _old.relation) THEN
    RAISE EXCEPTION USING ERRCODE = '55000',
      MESSAGE = format('partition %s of "%s" is not on another server', partition, store),
      DETAIL = format('It is table "%s".', _old.relation);
  END IF;
  PERFORM ml_rag._lock_table(store, 'ACCESS EXCLUSIVE');
  PERFORM ml_rag._check_sharding(store);
  EXECUTE format('ALTER TABLE %s DETACH PARTITION %s', _relation, _shard);
  _name := (SELECT format('%I.%I', n.nspname, ml_rag._free_name(store, '_p', partition))
            FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace WHERE c.oid = store);
  EXECUTE format('CREATE TABLE %s PARTITION OF %s FOR VALUES WITH (MODULUS %s, REMAINDER %s)', _name,
    _relation, _old.partitions, partition);
  PERFORM ml_rag._follow_partitions(store);
  -- by the name of the partition, whose triggers put the rows into the keyword index
  PERFORM ml_rag._copy_rows(store, _old.relation, _name::regclass);
  PERFORM ml_rag._leave_shard(_old.relation, _calls);
  RETURN _name::regclass;
@CATCH@
END
$$;
COMMENT ON FUNCTION ml_rag.detach_shard(regclass, integer) IS
$$brings a partition of a vector store back from another server: ml_rag.detach_shard('handbook', 0)
Its rows are copied here and stay there, too, until they are deleted; other sessions wait meanwhile. For the
owner of the store. Returns the new partition.
Errors: 25006; 42704 no such partition; 42P01; 42501; 55000 it is not on another server, or at another
isolation level than READ COMMITTED, or in a transaction that has used a shard on its server, or row-level
security of the shard applies to the caller, or it has another version of ml_rag; 55P03 lock_timeout; those of
postgres_fdw.$$;
