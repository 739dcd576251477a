-- fill: the nodes of what has none, or of another text by now, batch by batch: read, make, write, each in a transaction of its
-- own. Row 0 of a key says what was done, so that a call that ended at any moment is gone on with by the next.

CREATE TYPE ml_rag._node_run AS (
  step         text,       -- what comes next: group, read, make, write, index; null = it is done
  store        regclass,
  owner        oid,        -- of the store
  vector_store text,       -- schema.table, as shown
  call         integer,    -- what ml_rag._begin has returned
  names        text[],     -- node groups that are still to be filled, the first one is
  relation     regclass,   -- of that one
  options      jsonb,
  key          name[],     -- of the node group and of the store, and the types
  store_key    name[],
  key_types    text[],
  document     name,       -- the column that tells documents apart
  number       name,       -- that which orders their segments
  batch_size   integer,
  retries      boolean,    -- whether what has failed is tried again before its time
  after        text,       -- the key of the last parent that was read
  batch        jsonb,      -- [{"key", "hash", "members", "texts", "around"}]
  keys         text[],     -- what was made: a node a place; with number 0 the state of a parent
  hashes       bigint[],
  numbers      integer[],
  parents      integer[],
  texts        text[],
  vectors      @vector@.vector[],
  errors       jsonb[],
  nodes        bigint,     -- so far
  done         bigint,
  failed       bigint,
  total        bigint,
  began        timestamptz
);

CREATE FUNCTION ml_rag._key_text(alias text, key name[]) RETURNS text
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$
-- purpose: SQL of a row's key as one text, that of an array
BEGIN
  RETURN (SELECT format('ARRAY[%s]::text COLLATE "C"', string_agg(format('%s.%I::text', alias, k), ', ' ORDER BY place))
          FROM unnest(key) WITH ORDINALITY AS u (k, place));
END
$$;

CREATE FUNCTION ml_rag._node_sources(run ml_rag._node_run) RETURNS text
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$
-- purpose: SQL of what a node group is made of: the columns of its key, hash, members, texts, around
-- Reads: the catalog
DECLARE
  _store text := ml_rag._relation_name(run.store);
  _columns text := (SELECT string_agg(format('t.%I', k), ', ' ORDER BY place) FROM unnest(run.store_key) WITH ORDINALITY AS u (k, place));
  _parent ml_rag._node_group;
BEGIN
  CASE run.options ->> 'parent'
  WHEN 'segment' THEN
    IF run.options ->> 'transform' <> 'context' OR run.document IS NULL THEN
      RETURN format('SELECT %s, hashtextextended(concat(t.segment) COLLATE "C", 0) AS hash, NULL::text[] AS members,'
        ' ARRAY[t.segment::text] AS texts, ''{}''::jsonb AS around FROM %s AS t WHERE t.segment ~ ''\S''', _columns, _store);
    END IF;
    RETURN format('SELECT %s, hashtextextended(concat(t.segment) COLLATE "C", 0) AS hash, m.members,'
      ' ARRAY[t.segment::text] AS texts, jsonb_build_object(''document_name'', %s, ''document'','
      ' (SELECT left(string_agg(d.segment, E''\n'' ORDER BY %s), 8000) FROM ('
      'SELECT * FROM %s AS d WHERE d.%I = t.%5$I ORDER BY %3$s LIMIT 40) AS d)) AS around'
      ' FROM %4$s AS t LEFT JOIN (SELECT d.%5$I AS document, (array_agg(%s ORDER BY %3$s))[:40] AS members FROM %4$s AS d GROUP BY 1) AS m'
      ' ON m.document = t.%5$I WHERE t.segment ~ ''\S''', _columns,
      CASE WHEN EXISTS (SELECT FROM pg_attribute AS a WHERE a.attrelid = run.store AND a.attname = 'document_name' AND NOT a.attisdropped)
        THEN 't.document_name' ELSE 'NULL' END,
      concat_ws(', ', 'd.' || quote_ident(run.number), (SELECT string_agg(format('d.%I', k), ', ') FROM unnest(run.store_key) AS k)),
      _store, run.document, ml_rag._key_text('d', run.store_key));
  WHEN 'document' THEN
    RETURN format('SELECT %s, d.hash, d.members, ARRAY[d.text] AS texts, ''{}''::jsonb AS around'
      ' FROM (SELECT array_agg(%s ORDER BY %s) AS members,'
      ' hashtextextended(string_agg(t.segment, E''\n\n'' ORDER BY %3$s) COLLATE "C", 0) AS hash,'
      ' string_agg(t.segment, E''\n\n'' ORDER BY %3$s) AS text'
      ' FROM %s AS t WHERE t.segment ~ ''\S'' GROUP BY t.%I) AS d',
      (SELECT string_agg(format('(d.members[1]::text[])[%s]::%s AS %I', i, y, k), ', ' ORDER BY i)
       FROM unnest(run.store_key, run.key_types) WITH ORDINALITY AS u (k, y, i)),
      ml_rag._key_text('t', run.store_key), concat_ws(', ', 't.' || quote_ident(run.number), _columns), _store, run.document);
  ELSE
    _parent := ml_rag._node_group(run.store, run.options ->> 'parent');
    RETURN format('SELECT %s, t.text_hash AS hash, t.members,'
      ' ARRAY(SELECT n.node FROM %s AS n WHERE %s AND n.node_number > 0 ORDER BY n.node_number) AS texts,'
      ' ''{}''::jsonb AS around FROM %2$s AS t WHERE t.node_number = 0 AND t.error IS NULL',
      (SELECT string_agg(format('t.%I AS %I', k, o), ', ' ORDER BY place) FROM unnest(_parent.key, run.store_key)
        WITH ORDINALITY AS u (k, o, place)),
      ml_rag._relation_name(_parent.relation),
      ml_rag._same_key('n', _parent.key, 't', _parent.key));
  END CASE;
END
$$;

CREATE FUNCTION ml_rag._pending_nodes(run ml_rag._node_run) RETURNS text
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$
-- purpose: SQL of the parents whose nodes are not there, are of another text, or failed and are to be tried again
BEGIN
  RETURN format('FROM (%s) AS s LEFT JOIN %s AS h ON %s AND h.node_number = 0'
    ' WHERE (h.text_hash IS NULL OR h.text_hash <> s.hash OR h.members IS DISTINCT FROM s.members OR h.error IS NOT NULL AND %s)',
    ml_rag._node_sources(run), ml_rag._relation_name(run.relation), ml_rag._same_key('h', run.key, 's', run.store_key),
    CASE WHEN run.retries THEN 'true' ELSE 'h.next_attempt <= now()' END);
END
$$;

CREATE FUNCTION ml_rag._begin_nodes(store regclass, names text[], batch_size integer, retries boolean, call integer)
  RETURNS ml_rag._node_run
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: a run over node groups of a store
BEGIN
  RETURN jsonb_populate_record(NULL::ml_rag._node_run, jsonb_build_object('step', 'group', 'store', store::oid::bigint,
    'owner', (SELECT c.relowner::bigint FROM pg_class AS c WHERE c.oid = _begin_nodes.store), 'vector_store', ml_rag._full_name(store),
    'call', call, 'names', to_jsonb(names), 'batch_size', batch_size, 'retries', retries,
    'nodes', 0, 'done', 0, 'failed', 0, 'began', clock_timestamp()));
END
$$;

CREATE FUNCTION ml_rag._look_up(run ml_rag._node_run) RETURNS ml_rag._node_run
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$
-- purpose: what the node group that a run comes to is, and has  Reads: the catalog
DECLARE
  _group ml_rag._node_group := ml_rag._node_group(run.store, run.names[1]);
BEGIN
  run.relation := _group.relation;
  run.options := _group.options;
  run.key := _group.key;
  run.store_key := _group.store_key;
  run.key_types := ARRAY(SELECT format_type(a.atttypid, a.atttypmod) FROM unnest(_group.key) WITH ORDINALITY AS k (name, place)
                         JOIN pg_attribute AS a ON a.attrelid = _group.relation AND a.attname = k.name ORDER BY k.place);
  SELECT max(a.attname::text) FILTER (WHERE a.attname = 'segment_number'),
    min(a.attname::text) FILTER (WHERE a.attname IN ('document_id', 'document_name'))
  INTO run.number, run.document
  FROM pg_attribute AS a WHERE a.attrelid = run.store AND NOT a.attisdropped;
  RETURN run;
END
$$;

CREATE FUNCTION ml_rag._status_run(store regclass, name text) RETURNS ml_rag._node_run
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$
-- purpose: a run that only looks
BEGIN
  RETURN ml_rag._look_up(jsonb_populate_record(NULL::ml_rag._node_run,
    jsonb_build_object('store', store::oid::bigint, 'names', jsonb_build_array(name), 'retries', false)));
END
$$;

CREATE FUNCTION ml_rag._begin_group(run ml_rag._node_run) RETURNS ml_rag._node_run
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: the next node group of a run
DECLARE
  _total bigint;
BEGIN
  IF cardinality(run.names) = 0 THEN
    run.step := NULL;
    RETURN run;
  END IF;
  run := ml_rag._look_up(run);
  run.after := NULL;
  PERFORM ml_rag._grant_readers(run.store, run.relation);
  EXECUTE concat('SELECT count(*) ', ml_rag._pending_nodes(run)) INTO _total;
  run.total := coalesce(run.total, 0) + _total;
  run.step := CASE WHEN _total > 0 THEN 'read' ELSE 'index' END;
  RETURN run;
END
$$;

CREATE FUNCTION ml_rag._read_parents(run ml_rag._node_run) RETURNS ml_rag._node_run
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: the next parents, in the order of their keys; fewer where a model is asked about each
-- Reads: the store and the node group, as the caller
DECLARE
  _columns text := (SELECT string_agg(format('s.%I', k), ', ' ORDER BY place) FROM unnest(run.store_key) WITH ORDINALITY AS u (k, place));
  _types text[] := run.key_types;
BEGIN
  EXECUTE format('SELECT jsonb_agg(to_jsonb(r) ORDER BY r.n), max(r.key) FILTER (WHERE r.n = r.most) FROM ('
    'SELECT p.*, row_number() OVER () AS n, count(*) OVER () AS most FROM ('
    'SELECT %s AS key, s.hash, s.members, s.texts, s.around %s%s ORDER BY %s LIMIT %s) AS p) AS r',
    ml_rag._key_text('s', run.store_key), ml_rag._pending_nodes(run),
    CASE WHEN run.after IS NOT NULL THEN format(' AND (%s) > (%s)', _columns,
      (SELECT string_agg(format('$1[%s]::%s', i, t), ', ' ORDER BY i) FROM unnest(_types) WITH ORDINALITY AS u (t, i))) END,
    _columns, coalesce(run.batch_size, CASE WHEN ml_rag._asks_model(run.options ->> 'transform') THEN 8 ELSE 100 END))
  INTO run.batch, run.after USING run.after::text[];
  run.step := CASE WHEN run.batch IS NULL THEN 'index' ELSE 'make' END;
  RETURN run;
END
$$;

CREATE FUNCTION ml_rag._embed_nodes(texts text[], model_id text, OUT vectors @vector@.vector[], OUT errors jsonb[])
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: texts to vectors; where that fails one by one, to find those at fault, which get their error
DECLARE
  _embedded record;
BEGIN
  vectors := '{}';
  errors := array_fill(NULL::jsonb, ARRAY[cardinality(texts)]);
  IF cardinality(texts) = 0 THEN
    RETURN;
  END IF;
  _embedded := ml_rag._embed_documents(texts, model_id);
  IF _embedded.error IS NULL THEN
    vectors := _embedded.vectors;
    RETURN;
  END IF;
  FOR _i IN 1..cardinality(texts) LOOP
    _embedded := ml_rag._embed_documents(ARRAY[texts[_i]], model_id);
    vectors := array_append(vectors, _embedded.vectors[1]);
    errors[_i] := _embedded.error;
  END LOOP;
END
$$;

CREATE FUNCTION ml_rag._make_nodes(run ml_rag._node_run) RETURNS ml_rag._node_run
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: the nodes of a batch, with their embeddings; no table is touched while a model is asked
-- A parent of which one node fails has none.
DECLARE
  _transform text := run.options ->> 'transform';
  _function regprocedure := CASE WHEN NOT ml_rag._asks_model(_transform) AND _transform <> ALL ('{sentence,paragraph}')
                                 THEN ml_rag._node_function(_transform) END;
  _one jsonb;
  _text text;
  _made record;
  _parent integer;
  _n integer;
  _first integer;
  _embedded record;
BEGIN
  run.keys := '{}'; run.hashes := '{}'; run.numbers := '{}'; run.parents := '{}';
  run.texts := '{}'; run.vectors := '{}'; run.errors := '{}';
  FOR _one IN SELECT b FROM jsonb_array_elements(run.batch) AS b LOOP
    _first := cardinality(run.keys);
    run.keys := array_append(run.keys, _one ->> 'key');
    run.hashes := run.hashes || (_one ->> 'hash')::bigint;
    run.numbers := run.numbers || 0;
    run.parents := array_append(run.parents, NULL);
    run.texts := array_append(run.texts, NULL);
    run.errors := array_append(run.errors, NULL);
    _parent := 0;
    _n := 0;
    FOR _text IN SELECT t FROM jsonb_array_elements_text(_one -> 'texts') AS t LOOP
      _parent := _parent + 1;
      _made := ml_rag._transform(run.options, _function, _text, _one -> 'around');
      IF _made.error IS NOT NULL THEN
        run.errors[_first + 1] := _made.error;
        EXIT;
      END IF;
      FOR _i IN 1..cardinality(_made.nodes) LOOP
        _n := _n + 1;
        run.keys := array_append(run.keys, _one ->> 'key');
        run.hashes := run.hashes || (_one ->> 'hash')::bigint;
        run.numbers := run.numbers || _n;
        run.parents := run.parents || _parent;
        run.texts := array_append(run.texts, _made.nodes[_i]);
        run.errors := array_append(run.errors, NULL);
      END LOOP;
    END LOOP;
  END LOOP;
  IF run.options ? 'embed_model_id' THEN
    _embedded := ml_rag._embed_nodes(ARRAY(SELECT t FROM unnest(run.texts) WITH ORDINALITY AS u (t, i) WHERE t IS NOT NULL ORDER BY i),
      run.options ->> 'embed_model_id');
    _n := 0;
    FOR _i IN 1..cardinality(run.texts) LOOP
      IF run.texts[_i] IS NULL THEN
        _first := _i;
        run.vectors := array_append(run.vectors, NULL);
      ELSE
        _n := _n + 1;
        run.vectors := array_append(run.vectors, _embedded.vectors[_n]);
        run.errors[_first] := coalesce(run.errors[_first], _embedded.errors[_n]);
      END IF;
    END LOOP;
  END IF;
  run.step := 'write';
  RETURN run;
END
$$;

CREATE FUNCTION ml_rag._write_group(run ml_rag._node_run) RETURNS ml_rag._node_run
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: the nodes of a batch in place of what was there; a parent that was deleted meanwhile has none, one whose text was
-- changed comes up again  Writes: the node group, and
-- where it is merged the store, as the caller
DECLARE
  _nodes text := ml_rag._relation_name(run.relation);
  _columns text := (SELECT string_agg(quote_ident(k), ', ' ORDER BY place) FROM unnest(run.key) WITH ORDINALITY AS u (k, place));
  _store_columns text := (SELECT string_agg(format('s.%I', k), ', ' ORDER BY place) FROM unnest(run.store_key)
    WITH ORDINALITY AS u (k, place));
  _values text := (SELECT string_agg(format('(u.key::text[])[%s]::%s', i, t), ', ' ORDER BY i) FROM unnest(run.key_types)
    WITH ORDINALITY AS u (t, i));
  _former jsonb;
  _n bigint;
BEGIN
  EXECUTE format('WITH former AS (DELETE FROM %s AS n USING (SELECT DISTINCT k AS key FROM unnest($1) AS k) AS u WHERE (%s) = (%s)'
    ' RETURNING n.node_number, %s AS key, n.text_hash, n.attempts)'
    ' SELECT coalesce(jsonb_object_agg(f.key, jsonb_build_array(f.text_hash, f.attempts)), ''{}'')'
    ' FROM former AS f WHERE f.node_number = 0',
    _nodes, (SELECT string_agg(format('n.%I', k), ', ' ORDER BY place) FROM unnest(run.key) WITH ORDINALITY AS u (k, place)), _values,
    ml_rag._key_text('n', run.key)) INTO _former USING run.keys;
  EXECUTE format($sql$
    WITH there AS MATERIALIZED (SELECT %1$s FROM %2$s AS s WHERE (%1$s) IN (SELECT %3$s FROM unnest($1) AS u (key)) FOR KEY SHARE)
    INSERT INTO %4$s (%5$s, node_number, parent_number, node, text_hash, members, error, attempts, next_attempt%6$s)
    SELECT %3$s, u.number, u.parent, u.text, u.hash, b.members, u.error,
      CASE WHEN u.error IS NOT NULL THEN a.attempts END,
      CASE WHEN u.error IS NOT NULL THEN now() + least(interval '1 day', interval '1 minute' * 2 ^ least(a.attempts - 1, 20)) END%7$s
    FROM unnest($1, $2, $3, $4, $5, $6, $7) AS u (key, hash, number, parent, text, error, vector)
    JOIN (SELECT e.key, min(e.error::text) AS error FROM unnest($1, $6) AS e (key, error) GROUP BY e.key) AS e ON e.key = u.key
    LEFT JOIN jsonb_to_recordset($8) AS b (key text, members text[]) ON b.key = u.key
    CROSS JOIN LATERAL (SELECT 1 + CASE WHEN ($9 -> u.key ->> 0)::bigint = u.hash THEN coalesce(($9 -> u.key ->> 1)::integer, 0)
      ELSE 0 END AS attempts) AS a
    WHERE (u.number = 0 OR e.error IS NULL) AND (%3$s) IN (SELECT * FROM there)$sql$,
    _store_columns, ml_rag._relation_name(run.store), _values, _nodes, _columns,
    CASE WHEN run.options ? 'embed_model_id' THEN ', node_embedding' END, CASE WHEN run.options ? 'embed_model_id' THEN ', u.vector' END)
  USING run.keys, run.hashes, run.numbers, run.parents, run.texts, run.errors, run.vectors, run.batch, _former;
  GET DIAGNOSTICS _n = ROW_COUNT;
  IF (run.options -> 'merge')::boolean THEN
    EXECUTE format('UPDATE %s AS s SET segment_nodes = %s WHERE (%s) IN (SELECT %s FROM unnest($1) AS u (key))',
      ml_rag._relation_name(run.store), ml_rag._merged_nodes(run.store), _store_columns, _values) USING run.keys;
  END IF;
  run.failed := run.failed + (SELECT count(*) FROM unnest(run.numbers, run.errors) AS u (number, error) WHERE u.number = 0
    AND u.error IS NOT NULL);
  run.done := run.done + jsonb_array_length(run.batch);
  run.nodes := run.nodes + greatest(0, _n - jsonb_array_length(run.batch));
  run.batch := NULL; run.keys := NULL; run.hashes := NULL; run.numbers := NULL;
  run.parents := NULL; run.texts := NULL; run.vectors := NULL; run.errors := NULL;
  run.step := 'read';
  RETURN run;
END
$$;

CREATE FUNCTION ml_rag._index_group(run ml_rag._node_run) RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: the index of the embeddings, once they are there for the first time, and fresh statistics
-- Writes: an index, as the caller
DECLARE
  _nodes text := ml_rag._relation_name(run.relation);
BEGIN
  IF run.options ? 'embed_model_id' AND NOT EXISTS (
    SELECT FROM pg_index AS x JOIN pg_attribute AS a ON a.attrelid = x.indrelid AND a.attnum = x.indkey[0]
    WHERE x.indrelid = run.relation AND a.attname = 'node_embedding') AND (
    SELECT a.atttypmod <= 2000 FROM pg_attribute AS a WHERE a.attrelid = run.relation AND a.attname = 'node_embedding') THEN
    EXECUTE format('CREATE INDEX ON %s USING hnsw (node_embedding @vector@.vector_cosine_ops)', _nodes);
  END IF;
  IF (run.options -> 'keyword_search')::boolean THEN
    PERFORM ml_rag.fold_keyword_index(run.relation);
  END IF;
  EXECUTE format('ANALYZE %s', _nodes);
END
$$;

CREATE FUNCTION ml_rag._node_step(run ml_rag._node_run) RETURNS ml_rag._node_run
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: a run's next step, in a transaction of its own; one session at a time fills a node group
BEGIN
  IF run.step <> 'make' THEN
    PERFORM ml_rag._hold(ml_rag._node_tables(run.store));
    PERFORM ml_rag._refuse_foreign_schema(t) FROM unnest(ml_rag._node_tables(run.store)) AS t;
    PERFORM ml_rag._refuse_other_owner(run.store, run.owner);
  END IF;
  IF run.step <> 'group' AND NOT pg_try_advisory_xact_lock(hashtextextended(format('ml_rag nodes %s', run.relation::oid), 0)) THEN
    RAISE EXCEPTION USING ERRCODE = '55006', MESSAGE = format('node group "%s" of "%s" is being filled by another session',
      run.names[1], run.store),
      HINT = 'SELECT * FROM ml_rag.progress shows how far it is.';
  END IF;
  PERFORM ml_rag._stage(run.call, CASE run.step WHEN 'make' THEN 'generate' WHEN 'index' THEN 'index' ELSE 'read' END,
    coalesce(run.options ->> 'model_id', run.options ->> 'embed_model_id', ''));
  PERFORM ml_rag._progress(run.call, run.vector_store, CASE run.step WHEN 'index' THEN 'building index' ELSE 'making nodes' END,
    run.done, coalesce(greatest(run.total, run.done), -1), run.failed);
  CASE run.step
  WHEN 'group' THEN
    run := ml_rag._begin_group(run);
  WHEN 'read' THEN
    run := ml_rag._read_parents(run);
  WHEN 'make' THEN
    run := ml_rag._make_nodes(run);
  WHEN 'write' THEN
    run := ml_rag._write_group(run);
  WHEN 'index' THEN
    IF run.done > 0 THEN
      PERFORM ml_rag._index_group(run);
    END IF;
    run.names := run.names[2:];
    run.step := 'group';
  END CASE;
  RETURN run;
END
$$;

CREATE FUNCTION ml_rag._end_nodes(run ml_rag._node_run) RETURNS jsonb
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: the result, and a warning where something failed
BEGIN
  IF run.failed > 0 THEN
    RAISE WARNING USING ERRCODE = '01000', MESSAGE = format('%s texts of "%s" have no nodes', run.failed, run.store),
      DETAIL = 'View ml_rag.node_group_error has the reasons.',
      HINT = 'The others are done. What failed is tried again later, or by CALL ml_rag.refresh_node_groups at once.';
  END IF;
  RETURN jsonb_build_object('vector_store', run.vector_store, 'parents', run.done, 'nodes', run.nodes, 'failed', run.failed,
    'seconds', round(extract(epoch FROM clock_timestamp() - run.began), 3));
END
$$;
