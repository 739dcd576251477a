-- shards: the partitions of a store that are on other servers: what is read there, and what is asked.
--
-- A shard is a partition that is a foreign table of postgres_fdw. Everything goes there with the caller's own
-- user mapping, so that privileges and row-level security of the shard decide. Rows are read as from any
-- foreign table. Words are asked for by an aggregate
-- (ml_rag._shard_answer, store/serve) over a foreign table beside it, its table of calls: postgres_fdw ships
-- the aggregate of an extension as a whole, so that it runs on the shard, and runs those of several servers
-- side by side. A table that Citus distributes has all its shards on workers, under the caller's own role.
-- Its table of calls is distributed with it and has one row in each shard: Citus runs there what is selected
-- from it.

CREATE FUNCTION ml_rag._shards(relation oid) RETURNS TABLE (shard regclass, server name)
LANGUAGE plpgsql STABLE PARALLEL SAFE ROWS 4 AS $$
-- purpose: the partitions of a relation that are foreign tables  Reads: the catalog
-- pg_partition_tree has a shard that has come since the snapshot was taken, too, so that its rows are read.
BEGIN
  IF ml_rag._may_have_shards(relation) THEN
    RETURN QUERY SELECT p.relid, (
        SELECT s.srvname FROM pg_foreign_table AS f JOIN pg_foreign_server AS s ON s.oid = f.ftserver
        WHERE f.ftrelid = p.relid)
      FROM pg_partition_tree(relation) AS p WHERE p.isleaf AND pg_relation_filenode(p.relid) IS NULL
      ORDER BY p.relid::oid;
  END IF;
END
$$;

CREATE FUNCTION ml_rag._leaves(store ml_rag.store) RETURNS regclass[]
LANGUAGE plpgsql STABLE PARALLEL SAFE AS $$
-- purpose: the partitions of a store with shards that are read one by one, but for those that are missing;
-- null if it is read as a whole
-- One by one each gets its own LIMIT. Policies of the whole table would not apply then, nor are privileges on
-- it enough.
-- Reads: the catalog
DECLARE
  _leaves regclass[];
BEGIN
  IF store.is_table IS NOT TRUE AND ml_rag._has_shards(store.relation) THEN
    _leaves := ARRAY(
      SELECT p.relid FROM pg_partition_tree(store.relation) AS p
      WHERE p.isleaf AND p.relid <> ALL (coalesce(store.missing, '{}')) ORDER BY p.relid::oid);
    IF store.missing IS NOT NULL OR NOT row_security_active(store.relation)
      AND (SELECT bool_and(has_table_privilege(l, 'SELECT')) FROM unnest(_leaves) AS l) THEN
      RETURN _leaves;
    END IF;
  END IF;
  RETURN NULL;
END
$$;

CREATE FUNCTION ml_rag._rows_of(store ml_rag.store) RETURNS text
LANGUAGE plpgsql STABLE PARALLEL SAFE AS $$
-- purpose: SQL of the rows of a store: its name, without children that a table has got by now; if shards are
-- missing, what the others have
BEGIN
  IF store.missing IS NULL THEN
    RETURN concat(CASE WHEN store.is_table THEN 'ONLY ' END, ml_rag._relation_name(store.relation));
  END IF;
  RETURN (SELECT format('(%s)', string_agg(format('SELECT %s FROM %s AS t', (
      SELECT string_agg(format('t.%I', a.attname), ', ' ORDER BY a.attnum) FROM pg_attribute AS a
      WHERE a.attrelid = store.relation AND a.attnum > 0 AND NOT a.attisdropped), ml_rag._relation_name(l)),
        ' UNION ALL '))
    FROM unnest(ml_rag._leaves(store)) AS l);
END
$$;

CREATE FUNCTION ml_rag._read_apart(store ml_rag.store, head text, tail text,
  given text[] DEFAULT NULL, for_hint boolean DEFAULT false) RETURNS text
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE AS $$
-- purpose: the value of a statement over the rows t of a store, which stand between head and tail; given: $1
-- Null of a store that the call does not name, and that cannot be read: the search says so. for_hint: of any
-- store; a hint ends no call, whatever the server of a shard says
-- Reads: the store, as the caller
DECLARE
  _is_named boolean := store.found IS DISTINCT FROM 'trusted';
  _former_wait text;
  _statement text;
  _context text;
  _found text;
BEGIN
  IF _is_named THEN
    PERFORM ml_rag._hold_read(ml_rag._parts(store.relation));
  ELSE
    _former_wait := ml_rag._limit_wait();
    PERFORM ml_rag._hold_found(store.relation);
  END IF;
  _statement := concat(head, ' FROM ', ml_rag._rows_of(store), ' AS t ', tail);
  EXECUTE _statement INTO _found USING given;
  PERFORM set_config('lock_timeout', _former_wait, true) WHERE _former_wait IS NOT NULL;
  RETURN _found;
EXCEPTION WHEN query_canceled OR assert_failure OR OTHERS THEN
  GET STACKED DIAGNOSTICS _context = PG_EXCEPTION_CONTEXT;
  IF _is_named AND NOT for_hint
    -- cancelled, or to be tried again, and not by the server of a shard
    OR SQLSTATE IN ('57014', '40001')
      AND NOT ml_rag._is_of_server(_context, coalesce(_statement, '')) THEN
    RAISE;
  END IF;
  RETURN NULL;
END
$$;

CREATE FUNCTION ml_rag._why_silent(sqlstate text, message text, detail text, is_of_server boolean)
RETURNS text
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE AS $$
-- purpose: in one line why a server does not answer, where an error of postgres_fdw, or of Citus, says so: no
-- connection, none left, shut down, or its own statement_timeout or lock_timeout; else null
-- A server that says what would end the call here does not answer either. Where no connection is made, the
-- detail has the reason; that of an error of the server itself could have values of its rows.
DECLARE
  _message text := left(message, 1000);
BEGIN
  RETURN CASE WHEN sqlstate ~ '^08' AND (_message ~ 'server "|remote node ' OR is_of_server)
      OR is_of_server AND sqlstate ~ '^(57|40|53300|55P03)'
      OR sqlstate = '53300' AND _message ~ 'connect to server'
      -- of Citus, where a connection that it had is lost
      OR sqlstate = 'XX000' AND _message ~ '^failure on connection marked as essential'
    THEN left(regexp_replace(concat_ws(': ', rtrim(_message, '.'), CASE WHEN sqlstate = '08001'
      THEN nullif(rtrim(left(detail, 1000), '.'), '') END), '\s+', ' ', 'g'), 500) END;
END
$$;

CREATE FUNCTION ml_rag._silent(shard regclass) RETURNS text
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE AS $$
-- purpose: why a shard does not answer; null if it does  Reads: the shard, as the caller
DECLARE
  _statement text := format('SELECT FROM %s LIMIT 1', ml_rag._relation_name(shard));
  _is_of_server boolean;
  _context text;
  _detail text;
  _why text;
BEGIN
  PERFORM ml_rag._hold(ARRAY[shard::oid]);
  EXECUTE _statement;
  RETURN NULL;
EXCEPTION WHEN query_canceled OR assert_failure OR OTHERS THEN
  GET STACKED DIAGNOSTICS _context = PG_EXCEPTION_CONTEXT, _detail = PG_EXCEPTION_DETAIL;
  _is_of_server := ml_rag._is_of_server(_context, _statement);
  _why := ml_rag._why_silent(SQLSTATE, SQLERRM, _detail, _is_of_server);
  -- with an error it does answer, too
  IF _why IS NULL AND NOT _is_of_server AND SQLSTATE <> '42501' THEN
    RAISE;
  END IF;
  RETURN _why;
END
$$;

CREATE FUNCTION ml_rag._shard_failure(store ml_rag.store, sqlstate text, message text, detail text,
  is_of_server boolean, is_only boolean) RETURNS jsonb
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE AS $$
-- purpose: the error that names the shard that does not answer; null if the error is another one, or if all
-- shards of the store answer and another store was read, too
-- Reads: the shards, as the caller
DECLARE
  _why text := ml_rag._why_silent(sqlstate, message, detail, is_of_server);
  -- of postgres_fdw; a server can say anything
  _server text := CASE WHEN NOT is_of_server THEN substring(left(message, 1000) FROM 'server "([^"]+)"') END;
  _shard record;
  _name text;
BEGIN
  IF _why IS NULL THEN
    RETURN NULL;
  ELSIF ml_rag._is_distributed(store.relation) THEN
    RETURN ml_rag._failure(store.vector_store,
      '08006', format('a worker of "%s" does not answer', store.vector_store),
      concat(_why, '.'), 'Call again when it is back. If it does not know this role, create it there.');
  ELSIF ml_rag._has_shards(store.relation) IS NOT TRUE THEN
    RETURN NULL;
  END IF;
  FOR _shard IN SELECT s.shard, s.server FROM ml_rag._shards(store.relation) AS s
    WHERE s.server = coalesce(_server, s.server) LOOP
    IF _server IS NOT NULL OR ml_rag._silent(_shard.shard) IS NOT NULL THEN
      _name := format('"%s" on server "%s"', _shard.shard, _shard.server);
      EXIT;
    END IF;
  END LOOP;
  IF _name IS NULL AND NOT is_only THEN
    RETURN NULL;
  END IF;
  RETURN ml_rag._failure(store.vector_store, '08006',
    format('shard %s of "%s" does not answer', coalesce(_name, 'unknown'), store.vector_store),
    concat(_why, '.'), 'Search the others with "partial": true, or call again when it is back.');
END
$$;

CREATE FUNCTION ml_rag._leave_out_silent(stores ml_rag.store[], OUT answering ml_rag.store[],
  OUT missing text[])
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE AS $$
-- purpose: option partial: the stores, each with its shards that do not answer as missing, and a warning
-- about these. A store that the call does not name, and that cannot be looked at, is left to the search,
-- which says so
-- Reads: the shards, as the caller
DECLARE
  _store ml_rag.store;
  _shard record;
  _missing regclass[];
  _why text;
  _is_named boolean;
  _former_wait text;
BEGIN
  answering := '{}';
  FOREACH _store IN ARRAY stores LOOP
    _missing := NULL;
    _is_named := coalesce(_store.found, 'named') = 'named' OR cardinality(stores) = 1;
    BEGIN
      IF NOT _is_named THEN
        _former_wait := ml_rag._limit_wait();
      END IF;
      FOR _shard IN SELECT s.shard, s.server FROM ml_rag._shards(_store.relation) AS s LOOP
        _why := ml_rag._silent(_shard.shard);
        CONTINUE WHEN _why IS NULL;
        IF row_security_active(_store.relation) THEN
          RAISE EXCEPTION USING ERRCODE = '55000',
            MESSAGE = format('"%s" cannot be searched in part', _store.vector_store),
            DETAIL = 'It has row-level security of its own, beside that of its shards.';
        END IF;
        _missing := _missing || _shard.shard;
        missing := missing || _shard.shard::text;
        RAISE WARNING USING ERRCODE = '01000',
          MESSAGE = format('shard "%s" of "%s" does not answer; ignored', _shard.shard, _store.vector_store),
          DETAIL = format('Server "%s": %s.', _shard.server, _why);
      END LOOP;
      _store := jsonb_populate_record(_store, jsonb_build_object('missing', _missing));
      IF cardinality(ml_rag._leaves(_store)) = 0 THEN
        RAISE EXCEPTION USING ERRCODE = '08006',
          MESSAGE = format('no shard of "%s" answers', _store.vector_store),
          DETAIL = format('Missing: %s.', array_to_string(_missing, ', ')),
          HINT = 'Call again when they are back.';
      END IF;
      IF NOT _is_named THEN
        PERFORM set_config('lock_timeout', _former_wait, true);
      END IF;
    EXCEPTION WHEN query_canceled OR assert_failure OR OTHERS THEN
      -- those of servers have been told apart
      IF _is_named OR SQLSTATE IN ('57014', '40001') THEN
        RAISE;
      END IF;
      _store := jsonb_populate_record(_store, '{"missing": null}');
    END;
    answering := answering || _store;
  END LOOP;
END
$$;

CREATE FUNCTION ml_rag._calls_name(relation name) RETURNS name
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
-- purpose: the name of the table of calls of that relation
SELECT ml_rag._derived_name(relation, '_calls')
$$;

CREATE FUNCTION ml_rag._calls_of(shard regclass) RETURNS regclass
LANGUAGE plpgsql VOLATILE PARALLEL SAFE AS $$
-- purpose: the table of calls of a shard, or of a store that Citus distributes; null if it has none
-- A role that may create in that schema could give the name to another table. Volatile, to see that of a
-- shard that has just come.
-- Reads: the catalog
DECLARE
  _calls oid;
BEGIN
  SELECT c.oid INTO _calls FROM pg_class AS s
  JOIN pg_class AS c ON c.relnamespace = s.relnamespace AND c.relname = ml_rag._calls_name(s.relname)
    AND c.relowner = s.relowner
  WHERE s.oid = shard;
  IF _calls IS NULL THEN
    RETURN NULL;
  ELSIF ml_rag._is_distributed(shard) THEN
    RETURN (SELECT b.logicalrelid FROM pg_catalog.pg_dist_partition AS a
      JOIN pg_catalog.pg_dist_partition AS b USING (colocationid)
            WHERE a.logicalrelid = shard AND b.logicalrelid = _calls);
  END IF;
  RETURN (SELECT g.ftrelid FROM pg_foreign_table AS f JOIN pg_foreign_table AS g ON g.ftserver = f.ftserver
          WHERE f.ftrelid = shard AND g.ftrelid = _calls);
END
$$;

CREATE FUNCTION ml_rag._shard_table(store oid, shard bigint) RETURNS text
LANGUAGE plpgsql STABLE PARALLEL SAFE AS $$
-- purpose: the name of a shard on its worker; shard_name has it with or without its schema
BEGIN
  RETURN (SELECT format('%I.%I', n.nspname, s.name[cardinality(s.name)])
          FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
          CROSS JOIN LATERAL parse_ident(shard_name(c.oid, shard)) AS s (name) WHERE c.oid = store);
END
$$;

CREATE FUNCTION ml_rag._filled_parts(store oid) RETURNS TABLE (oid bigint, name text, shard json)
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE ROWS 1 AS $$
-- purpose: the tables in which a job reads and writes rows by their places: a table, its partitions, or its
-- shards on workers of Citus
-- shard: for ml_rag._execute
-- Reads: the catalog, the table of calls  Errors: 55000 a shard without a call
DECLARE
  _calls regclass;
  _keys jsonb;
BEGIN
  IF NOT ml_rag._is_distributed(store) THEN
    RETURN QUERY SELECT c.oid::bigint, ml_rag._relation_name(c.oid::regclass), NULL::json FROM pg_class AS c
      WHERE c.oid = ANY (ml_rag._parts(store)) AND c.relkind = 'r';
    RETURN;
  END IF;
  _calls := ml_rag._calls_of(store);
  IF _calls IS NOT NULL THEN
    PERFORM ml_rag._hold(ARRAY[_calls]::oid[]);
    EXECUTE format('SELECT jsonb_object_agg(c.shard, c.key::text) FROM %s AS c', _calls) INTO _keys;
  END IF;
  FOR oid IN SELECT d.shardid FROM pg_catalog.pg_dist_shard AS d WHERE d.logicalrelid = store LOOP
    IF _keys -> oid::text IS NULL THEN
      RAISE EXCEPTION USING ERRCODE = '55000',
        MESSAGE = format('shard %s of "%s" cannot be reached', oid, store::regclass),
        DETAIL = 'It is not in the table of calls.',
        HINT = format('SELECT ml_rag.distribute_store(%L);', store::regclass);
    END IF;
    name := ml_rag._shard_table(store, oid);
    shard := json_build_object('store', store::bigint, 'shard', oid, 'key', _keys ->> oid::text);
    RETURN NEXT;
  END LOOP;
END
$$;

CREATE FUNCTION ml_rag._names_extension(server name, extension name) RETURNS boolean
LANGUAGE plpgsql STABLE PARALLEL SAFE AS $$
-- purpose: whether a server of postgres_fdw names an extension, whose operators and functions it then ships
BEGIN
  RETURN EXISTS (
    SELECT FROM pg_foreign_server AS s CROSS JOIN LATERAL pg_options_to_table(s.srvoptions) AS o
    WHERE s.srvname = server AND o.option_name = 'extensions'
      AND extension = ANY (regexp_split_to_array(trim(o.option_value), '\s*,\s*')));
END
$$;

CREATE FUNCTION ml_rag._ask_shards(shards regclass[], request jsonb) RETURNS TABLE (shard text, answer jsonb)
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE ROWS 4
-- Citus plans no statement whose parameters it does not know
SET plan_cache_mode = auto
AS $$
-- purpose: one answer of each shard to a request (store/serve), in any order; they work side by side
-- Errors: 55000 another version there, no table of calls, a server that does not name ml_rag, or no answer
DECLARE
  _shard regclass;
  _calls regclass;
  _server name;
  _parts text[];
  _asks text;
  _query text;
  _part text;
  _place integer := 0;
  _names text[] := '{}';
  _waiting text[] := '{}';
BEGIN
  FOREACH _shard IN ARRAY shards LOOP
    _place := _place + 1;
    PERFORM ml_rag._hold(ARRAY[c.calls::oid]) FROM ml_rag._calls_of(_shard) AS c (calls)
    WHERE c.calls IS NOT NULL;
    _calls := ml_rag._calls_of(_shard);
    _server := (SELECT r.srvname FROM pg_foreign_table AS f JOIN pg_foreign_server AS r ON r.oid = f.ftserver
                WHERE f.ftrelid = _calls);
    IF ml_rag._is_distributed(_shard) THEN
      -- workers do not know a table yet in the transaction that distributes it
      SELECT array_agg(d.shardid::text ORDER BY d.shardid),
        format('SELECT %s AS place, c.shard::text AS part, ml_rag._answer_on_worker(%L::jsonb ->> '
          'c.shard::text, $1) AS answer'
          ' FROM %s AS c', _place, jsonb_object_agg(d.shardid, ml_rag._shard_table(_shard, d.shardid)),
            ml_rag._relation_name(_calls))
      INTO _parts, _asks FROM pg_catalog.pg_dist_shard AS d WHERE d.logicalrelid = _shard;
    ELSIF _server IS NULL THEN
      RAISE EXCEPTION USING ERRCODE = '55000', MESSAGE = format('shard "%s" has no table of calls', _shard),
        DETAIL = 'It must be a foreign table of the same schema, owner and server, named like the shard with '
          '"_calls" after it.',
        HINT = 'ml_rag.detach_shard and ml_rag.attach_shard make it anew.';
    ELSIF NOT ml_rag._names_extension(_server, 'ml_rag') THEN
      RAISE EXCEPTION USING ERRCODE = '55000', MESSAGE = format('shard "%s" cannot be asked', _shard),
        DETAIL = format('Server "%s" does not name ml_rag as an extension.', _server),
        HINT = format('ALTER SERVER %I OPTIONS (SET extensions ''vector, ml_rag'');', _server);
    ELSE
      _parts := ARRAY[_shard::text];
      _asks := format('SELECT %s AS place, %L AS part, ml_rag._shard_answer(c.store, $1) AS answer FROM %s '
        'AS c', _place, _shard, _calls);
    END IF;
    _query := concat(_query || ' UNION ALL ', _asks);
    _names := _names || _shard::text;
    -- all parts must answer, one row each
    _waiting := _waiting || ARRAY(SELECT concat(_place, ' ', p) FROM unnest(_parts) AS p);
  END LOOP;
  IF _query IS NULL THEN
    RETURN;
  END IF;
  -- no more connections to a worker than Citus keeps: a new one starts Python first; until the end of this
  -- function
  PERFORM set_config('citus.max_adaptive_executor_pool_size',
    greatest(current_setting('citus.max_cached_conns_per_worker')::integer, 1)::text, true)
  WHERE ml_rag._is_distributed(shards[1]);
  -- row by row: a shard, which can be any server, may send any number of them, and gives back the place that
  -- it was sent
  FOR _place, _part, answer IN EXECUTE _query USING request
    || jsonb_build_object('version', ml_rag.version()) LOOP
    shard := CASE WHEN _part = _names[_place] THEN _part ELSE concat(_names[_place], '_', _part) END;
    IF answer IS NULL OR (concat(_place, ' ', _part) = ANY (_waiting)) IS NOT TRUE THEN
      _waiting := ARRAY[concat(coalesce(_place, 1), ' ', _part)];
      EXIT;
    END IF;
    _waiting := array_remove(_waiting, concat(_place, ' ', _part));
    RETURN NEXT;
  END LOOP;
  IF cardinality(_waiting) > 0 THEN
    _shard := coalesce(shards[split_part(_waiting[1], ' ', 1)::integer], shards[1]);
    RAISE EXCEPTION USING ERRCODE = '55000', MESSAGE = format('unexpected answer of shard "%s"', _shard),
      DETAIL = 'It is not one row with an answer.',
      HINT = CASE WHEN ml_rag._is_distributed(_shard) THEN format('After shards were split: SELECT '
        'ml_rag.distribute_store(%L);', _shard)
        ELSE '' END;
  END IF;
END
$$;

CREATE FUNCTION ml_rag._ask_arm(store ml_rag.store, asked regclass[], request jsonb, n integer,
  here jsonb DEFAULT NULL, OUT shards text[], OUT answers jsonb[], OUT failure jsonb)
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE AS $$
-- purpose: what shards answer to a request for an arm: for statistics of n words one answer, what their
-- keyword indexes count together and what is here; for n hits one of each shard; one of another version has
-- no hits. failure: if one does not answer, or has an error. A shard can be any server, so that all that it
-- answers is checked.
-- Reads: the shards, as the caller
DECLARE
  _types CONSTANT jsonb := '{"document_name": "string", "document_id": "number", "document_key": "string",
    "segment_number": "number", "segment": "string", "distance": "number", "keyword_score": "number",
    "score": "number"}';
  _detail text;
  _hint text;
  _context text;
  _is_of_server boolean;
  _one record;
  _counts jsonb;
  _hits jsonb;
  _why text;
BEGIN
  IF here IS NOT NULL THEN
    answers := ARRAY[here];
  END IF;
  FOR _one IN SELECT a.shard, a.answer FROM ml_rag._ask_shards(asked, request) AS a LOOP
    _counts := _one.answer -> 'statistics';
    _hits := _one.answer -> 'hits';
    IF request ->> 'call' = 'statistics' THEN
      _why := CASE WHEN coalesce(jsonb_typeof(_counts) <> 'array' OR jsonb_array_length(_counts) <> 3
          OR jsonb_typeof(_counts -> 2) <> 'array' OR jsonb_array_length(_counts -> 2) <> n
          OR EXISTS (SELECT FROM jsonb_array_elements((_counts - 2) || (_counts -> 2)) AS c
                     WHERE jsonb_typeof(c) <> 'number' OR c::numeric NOT BETWEEN 0 AND 1e15
                       OR scale(c::numeric) > 0)
          -- more rows with a term than rows would turn the order round
          OR EXISTS (SELECT FROM jsonb_array_elements(_counts -> 2) AS c
            WHERE c::numeric > (_counts -> 0)::numeric), true)
        THEN format('It has no counts of rows, tokens and %s words.', n) END;
    ELSIF _one.answer ? 'version' THEN
      _why := NULL;
    ELSIF coalesce(jsonb_typeof(_hits) <> 'array', true) THEN
      _why := 'It has no list of hits.';
    ELSIF jsonb_array_length(_hits) > n THEN
      _why := format('It has %s hits; %s were asked for.', jsonb_array_length(_hits), n);
    ELSE
      _why := (
        SELECT format('The %s of a hit is %s.', t.key, left((h -> t.key)::text, 100))
        FROM jsonb_array_elements(_hits) AS h CROSS JOIN jsonb_each_text(_types) AS t
        WHERE coalesce(jsonb_typeof(h -> t.key), 'none') NOT IN (t.value, 'null')
          OR jsonb_typeof(h -> t.key) = 'null' AND t.key = 'segment'
          OR jsonb_typeof(h -> t.key) = 'number' AND CASE t.key
            WHEN 'document_id' THEN scale((h ->> t.key)::numeric) > 0
              OR (h ->> t.key)::numeric NOT BETWEEN -9223372036854775808 AND 9223372036854775807
            -- as ml_rag_search has it
            WHEN 'segment_number' THEN scale((h ->> t.key)::numeric) > 0
              OR (h ->> t.key)::numeric NOT BETWEEN -2147483648 AND 2147483647
            -- those of double precision; only the distance of an inner product is below 0
            ELSE (h ->> t.key)::numeric <> 0 AND abs((h ->> t.key)::numeric) NOT BETWEEN 1e-300 AND 1e300
              OR t.key = 'distance' AND (h ->> t.key)::numeric < 0
                AND request -> 'request' ->> 'distance_metric' <> 'DOT' END
          -- by which neighbours are read
          OR t.key = 'document_key' AND store.document_id_type = ANY ('{smallint,integer,bigint}')
            AND h ->> t.key IS DISTINCT FROM h ->> 'document_id'
        LIMIT 1);
    END IF;
    IF _why IS NOT NULL THEN
      RAISE EXCEPTION USING ERRCODE = '55000',
        MESSAGE = format('unexpected answer of shard "%s"', _one.shard), DETAIL = _why;
    END IF;
    IF request ->> 'call' <> 'statistics' THEN
      shards := array_append(shards, _one.shard);
      answers := array_append(answers, _one.answer);
    ELSIF answers IS NULL THEN
      answers := ARRAY[_counts];
    ELSE
      answers := ARRAY[jsonb_build_array((answers[1] -> 0)::bigint + (_counts -> 0)::bigint,
        (answers[1] -> 1)::bigint + (_counts -> 1)::bigint, (
        SELECT jsonb_agg(x.n::bigint + (_counts -> 2 -> (x.place - 1)::integer)::bigint ORDER BY x.place)
        FROM jsonb_array_elements(answers[1] -> 2) WITH ORDINALITY AS x (n, place)))];
    END IF;
  END LOOP;
EXCEPTION WHEN query_canceled OR OTHERS THEN
  GET STACKED DIAGNOSTICS _context = PG_EXCEPTION_CONTEXT, _detail = PG_EXCEPTION_DETAIL,
    _hint = PG_EXCEPTION_HINT;
  _is_of_server := ml_rag._is_of_server(_context, VARIADIC ARRAY(
    SELECT w.written FROM unnest(asked) AS s
    CROSS JOIN LATERAL unnest(ARRAY[s, ml_rag._calls_of(s)]) AS r
    CROSS JOIN LATERAL unnest(ARRAY[quote_literal(r), ml_rag._relation_name(r)]) AS w (written)
    WHERE r IS NOT NULL ORDER BY 1));
  failure := ml_rag._shard_failure(store, SQLSTATE, SQLERRM, _detail, _is_of_server, true);
  IF failure IS NULL AND _is_of_server THEN
    failure := ml_rag._failure(store.vector_store, SQLSTATE, SQLERRM, _detail, _hint);
  ELSIF failure IS NULL THEN
    RAISE;
  END IF;
END
$$;

CREATE FUNCTION ml_rag._try_statement(statement text, stores ml_rag.store[], OUT answer jsonb,
  OUT failure jsonb)
LANGUAGE plpgsql STABLE PARALLEL UNSAFE AS $$
-- purpose: the row of a statement that reads these stores; failure: the one with a shard that does not answer
-- Reads: the stores, as the caller
DECLARE
  _context text;
  _detail text;
  _is_of_server boolean;
  _store ml_rag.store;
BEGIN
  EXECUTE format('SELECT to_jsonb(r) FROM (%s) AS r', statement) INTO answer;
EXCEPTION WHEN query_canceled OR OTHERS THEN
  GET STACKED DIAGNOSTICS _context = PG_EXCEPTION_CONTEXT, _detail = PG_EXCEPTION_DETAIL;
  _is_of_server := ml_rag._is_of_server(_context, statement);
  FOREACH _store IN ARRAY stores LOOP
    failure := coalesce(failure, ml_rag._shard_failure(_store, SQLSTATE, SQLERRM, _detail, _is_of_server,
      cardinality(stores) = 1));
  END LOOP;
  IF failure IS NULL AND _is_of_server THEN
    -- none that would end the call here
    RAISE EXCEPTION USING ERRCODE = CASE WHEN SQLSTATE ~ '^(57|40)' THEN '08006' ELSE SQLSTATE END,
      MESSAGE = left(SQLERRM, 500), DETAIL = left(_detail, 500);
  ELSIF failure IS NULL THEN
    RAISE;
  END IF;
END
$$;

CREATE FUNCTION ml_rag._failure_of(store ml_rag.store, statement text) RETURNS jsonb
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE AS $$
-- purpose: why a statement over one store fails; null if it does not. The detail ends in the functions that
-- the error came through: of a policy, a view
-- Reads: the store, as the caller
DECLARE
  _detail text;
  _hint text;
  _context text;
BEGIN
  EXECUTE statement;
  RETURN NULL;
EXCEPTION WHEN query_canceled OR assert_failure OR OTHERS THEN
  GET STACKED DIAGNOSTICS _detail = PG_EXCEPTION_DETAIL, _hint = PG_EXCEPTION_HINT,
    _context = PG_EXCEPTION_CONTEXT;
  IF ml_rag._is_of_server(_context, statement) THEN
    -- as in _try_statement
    RETURN ml_rag._failure(store.vector_store, CASE WHEN SQLSTATE ~ '^(57|40)' THEN '08006'
      ELSE SQLSTATE END, SQLERRM, _detail, _hint);
  ELSIF SQLSTATE = '57014' THEN
    RAISE;
  END IF;
  RETURN ml_rag._failure(store.vector_store, SQLSTATE, SQLERRM,
    concat_ws(E'\n', nullif(_detail, ''),
      nullif(rtrim(split_part(_context, 'SQL statement "', 1), E'\n'), '')), _hint);
END
$$;

CREATE FUNCTION ml_rag._asked_shards(store ml_rag.store, is_keyword boolean) RETURNS regclass[]
LANGUAGE plpgsql STABLE PARALLEL SAFE AS $$
-- purpose: the shards of a store that run its arms, those that answer; null if it has none. By meaning also
-- null if the caller may not ask them all or not read the partitions: a statement can read the whole table.
-- Words are on the shards alone.
-- Reads: the catalog
DECLARE
  _shards regclass[] := ARRAY(SELECT s.shard FROM ml_rag._shards(store.relation) AS s
                              WHERE s.shard <> ALL (coalesce(store.missing, '{}')));
BEGIN
  IF ml_rag._is_distributed(store.relation) THEN
    IF ml_rag._calls_of(store.relation) IS NOT NULL THEN
      RETURN ARRAY[store.relation];
    ELSIF is_keyword THEN
      RAISE EXCEPTION USING ERRCODE = '55000',
        MESSAGE = format('the shards of "%s" cannot be asked for words', store.vector_store),
        DETAIL = 'Citus distributes it, and it has no table of calls of its owner''s.',
        HINT = format('SELECT ml_rag.distribute_store(%L); makes one.', store.vector_store);
    END IF;
  END IF;
  RETURN CASE WHEN cardinality(_shards) > 0 AND (is_keyword OR ml_rag._leaves(store) IS NOT NULL AND (
    SELECT bool_and(has_table_privilege(ml_rag._calls_of(s), 'SELECT') IS NOT FALSE)
    FROM unnest(_shards) AS s))
    THEN _shards END;
END
$$;
