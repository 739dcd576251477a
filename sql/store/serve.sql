-- serve: a store as a shard of another server's: the view beside it, and what answers requests.

CREATE FUNCTION ml_rag._describe(store regclass) RETURNS jsonb
LANGUAGE plpgsql STABLE PARALLEL UNSAFE AS $$
-- purpose: what a store and its shards must have in common
BEGIN
  RETURN jsonb_build_object('columns', (
      SELECT jsonb_object_agg(a.attname, format_type(a.atttypid, a.atttypmod)) FROM pg_attribute AS a
      WHERE a.attrelid = store AND a.attnum > 0 AND NOT a.attisdropped),
    'pgvector in schema', (SELECT e.extnamespace::regnamespace::text FROM pg_extension AS e
      WHERE e.extname = 'vector'),
    'embedding model', (SELECT e.model_id FROM ml_rag._embeddings(store) AS e WHERE e.is_default),
    'keyword index', (SELECT to_jsonb(i) - '{store,secured}'::text[] FROM ml_rag._keyword_index(store) AS i));
END
$$;

CREATE FUNCTION ml_rag._open_shard(store regclass) RETURNS oid
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SET search_path FROM CURRENT AS $$
-- purpose: the store of the view beside it, noted for ml_rag._answer_request: roles that may read the view
-- may send it requests
BEGIN
  PERFORM set_config('ml_rag.shard', store::oid::text, true);
  RETURN store;
END
$$;

CREATE FUNCTION ml_rag._answer_request(answer jsonb, store oid, request jsonb) RETURNS jsonb
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
-- until the end of this function: those of the caller's session there, by which dates and times in filters
-- are read; postgres_fdw has its own
SET "TimeZone" = 'GMT'
SET "DateStyle" = 'ISO'
SET "IntervalStyle" = 'postgres'
AS $$
-- purpose: the answer to a request that another server has sent by way of the view beside a store. It runs as
-- the role that reads the view, and shows nothing that this role cannot read.
-- Several roles of the other server can be the same one here: the store must be that of the view, which is
-- open to some of them.
-- Reads: the store and its index, as the caller
-- Errors: 22023 unknown or invalid request, 42501 another store than that of the view, or none that the role
-- may search, 55000 another version, or no such index, 57P03 statement_timeout, lock_timeout or a cancel here
DECLARE
  _name text := (SELECT format('%I.%I', n.nspname, c.relname)
    FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
                 WHERE c.oid = store);
  _store ml_rag.store;
  _index ml_rag.keyword_index;
  _arm ml_rag.arm;
  _described jsonb;
  _found record;
  _detail text;
BEGIN
  IF store::text IS DISTINCT FROM current_setting('ml_rag.shard', true) THEN
    RAISE EXCEPTION USING ERRCODE = '42501', MESSAGE = 'permission denied for this request to a shard',
      DETAIL = 'It did not come by way of the view of its store.';
  END IF;
  -- one request, as others can follow in this transaction
  PERFORM set_config('ml_rag.shard', '', true);
  IF request ->> 'version' IS DISTINCT FROM ml_rag.version() THEN
    IF request ->> 'call' = 'semantic' THEN
      -- can be done without asking
      RETURN jsonb_build_object('version', ml_rag.version());
    END IF;
    RAISE EXCEPTION USING ERRCODE = '55000',
      MESSAGE = format('shard "%s" has another version of ml_rag', _name),
      DETAIL = format('The shard has %s; version %s asks.', ml_rag.version(), request ->> 'version'),
      HINT = 'ALTER EXTENSION ml_rag UPDATE brings the older one up.';
  ELSIF request ->> 'call' = 'describe' THEN
    -- from the role that asks
    RETURN ml_rag._describe(store) || jsonb_build_object('hides rows', row_security_active(store));
  ELSIF request ->> 'call' IS NULL OR request ->> 'call' <> ALL ('{statistics,keyword,semantic}') THEN
    RAISE EXCEPTION USING ERRCODE = '22023', MESSAGE = 'unknown request to a shard',
      DETAIL = format('Got %s.', coalesce(left(request ->> 'call', 100), 'none'));
  ELSIF request ->> 'call' <> 'semantic' THEN
    SELECT i.* INTO _index FROM ml_rag._keyword_index(store) AS i;
    _described := CASE WHEN _index.store IS NOT NULL THEN to_jsonb(_index) - '{store,secured}'::text[] END;
    IF _described IS DISTINCT FROM (SELECT jsonb_object_agg(k, request -> k)
                                    FROM unnest('{segment,key,configuration,k1,b,statistics}'::text[]) AS k)
                                      THEN
      RAISE EXCEPTION USING ERRCODE = '55000',
        MESSAGE = format('shard "%s" lacks the keyword index of its store', _name),
        DETAIL = CASE WHEN _described IS NULL THEN 'It has none that its role may search.'
          ELSE format('It has %s.', _described) END,
        HINT = 'ml_rag.enable_keyword_search creates it on the shard, with the options of the store''s.';
    END IF;
  END IF;
  IF request ->> 'call' = 'statistics' THEN
    RETURN jsonb_build_object('statistics', ml_rag._python('keyword_statistics', jsonb_build_array(
      _index.store::oid::bigint, _index.segment, _index.key, request -> 'terms')));
  END IF;
  SELECT s.* INTO _store FROM ml_rag.discover(ARRAY[_name], NULL, NULL, request -> 'columns', NULL, true) AS s
  WHERE s.relation = store;
  IF _store IS NULL THEN
    RAISE EXCEPTION USING ERRCODE = '42501', MESSAGE = format('permission denied for shard "%s"', _name),
      DETAIL = 'Its role may not read all of the columns that are searched.',
      HINT = format('GRANT SELECT ON %s TO …;', _name);
  END IF;
  _arm := jsonb_populate_record(NULL::ml_rag.arm, request -> 'arm');
  IF request ->> 'call' = 'keyword' THEN
    SELECT array_agg(t.key ORDER BY t.key COLLATE "C") AS terms INTO _found
    FROM jsonb_each_text((ml_rag._tokens(_index.configuration::regconfig,
      coalesce(array_to_string(_arm.query, ' '), request #>> '{request,question}'))).tokens) AS t;
    IF _found.terms IS DISTINCT FROM ml_rag._texts(request -> 'terms') THEN
      RAISE EXCEPTION USING ERRCODE = '55000',
        MESSAGE = format('shard "%s" finds other words in a text than its store', _name),
        DETAIL = format('It finds %s, the store %s.', _found.terms, request -> 'terms'),
        HINT = 'Text search configurations and locales of the servers must be the same.';
    END IF;
  END IF;
  PERFORM set_config(k, request -> 'settings' ->> k, true)
  FROM unnest('{TimeZone,DateStyle,IntervalStyle}'::text[]) AS k;
  _found := ml_rag._compile_question('', jsonb_build_object('request', request, 'store', to_jsonb(_store),
    'relation', store)::text,
    NULL, 'shard', NULL, ml_rag._session_settings());
  PERFORM ml_rag._raise(_found.error);
  RETURN _found.answer;
EXCEPTION WHEN query_canceled OR lock_not_available THEN
  -- 57014 and 55P03 would look like those of the other server
  RAISE EXCEPTION USING ERRCODE = '57P03', MESSAGE = SQLERRM;
WHEN external_routine_exception THEN
  -- no model is asked here: it is the request, which ml_rag does not make like that
  GET STACKED DIAGNOSTICS _detail = PG_EXCEPTION_DETAIL;
  RAISE EXCEPTION USING ERRCODE = '22023', MESSAGE = 'invalid request to a shard', DETAIL = _detail;
END
$$;

-- purpose: the answer of a shard, for ml_rag._ask_shards. An aggregate, because postgres_fdw sends one to the
-- shard as a whole
CREATE AGGREGATE ml_rag._shard_answer(oid, jsonb) (SFUNC = ml_rag._answer_request, STYPE = jsonb,
  PARALLEL = UNSAFE);

CREATE FUNCTION ml_rag._answer_on_worker(shard text, request jsonb) RETURNS jsonb
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SET search_path FROM CURRENT AS $$
-- purpose: the answer of a shard of Citus, which calls it on the worker, as the role that searches; null if
-- the shard is missing
BEGIN
  RETURN CASE WHEN shard IS NOT NULL THEN
    ml_rag._answer_request(NULL, ml_rag._open_shard(shard::regclass), request) END;
END
$$;

CREATE FUNCTION ml_rag._serve(store regclass) RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
-- pg_get_viewdef follows it
SET quote_all_identifiers = off
-- the workers of Citus lack the store
SET citus.enable_ddl_propagation = off
AS $$
-- purpose: the view by way of which requests come, open to whom the store is
-- Writes: a new view, as the caller
DECLARE
  _view text;
  _owner oid;
  _grantee oid;
BEGIN
  SELECT format('%I.%I', n.nspname, concat(c.relname, '_shard')), c.relowner INTO _view, _owner
  FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace WHERE c.oid = store;
  IF to_regclass(_view) = store THEN
    PERFORM ml_rag._bad_option('shard', 'true', 'false if the name of the store has 63 bytes',
      'Give it a shorter name: other servers search it by a view with that name and _shard.');
  ELSIF to_regclass(_view) IS NOT NULL AND NOT EXISTS (
    -- it runs its owner's code as its reader
    SELECT FROM pg_class AS v WHERE v.oid = to_regclass(_view) AND v.relkind = 'v' AND v.relowner = _owner
    AND regexp_replace(pg_get_viewdef(v.oid), '\s+', ' ', 'g')
      = regexp_replace(format(' SELECT %s(%L::regclass) AS store;', 'ml_rag._open_shard'::regproc, store),
        '\s+', ' ', 'g')
    AND 1 = (SELECT count(*) FROM pg_rewrite AS r WHERE r.ev_class = v.oid)
  ) THEN
    RAISE EXCEPTION USING ERRCODE = '42P07',
      MESSAGE = format('relation "%s" already exists', to_regclass(_view)),
      DETAIL = 'It is not the view that ml_rag makes for the store, or of another owner.',
      HINT = 'Drop or rename it, and let no other role create in that schema.';
  END IF;
  IF to_regclass(_view) IS NULL THEN
    EXECUTE format('CREATE VIEW %s AS SELECT ml_rag._open_shard(%L::regclass) AS store', _view,
      ml_rag._relation_name(store));
  END IF;
  FOR _grantee IN SELECT DISTINCT a.grantee FROM pg_class AS c CROSS JOIN LATERAL aclexplode(c.relacl) AS a
                  WHERE c.oid = store AND a.privilege_type = 'SELECT' LOOP
    EXECUTE format('GRANT SELECT ON %s TO %s', _view,
      CASE _grantee WHEN 0 THEN 'PUBLIC' ELSE _grantee::regrole::text END);
  END LOOP;
END
$$;
