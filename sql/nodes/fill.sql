-- fill: what waits for its nodes, as SQL; backend/jobs/node_group.py reads it, makes and writes.

CREATE TYPE ml_rag._node_fill AS (
  store     regclass,
  relation  regclass,   -- of the node group
  options   jsonb,
  key       name[],     -- of the node group and of the store, and the types
  store_key name[],
  key_types text[],
  document  name,       -- the column that tells documents apart
  number    name,       -- that which orders their segments
  retries   boolean     -- whether what has failed is tried again before its time
);

CREATE FUNCTION ml_rag._lock_nodes(store regclass, name text) RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE AS $$
-- purpose: one session at a time fills a node group: until the end of the transaction, and then again
DECLARE
  _key bigint := hashtextextended(format('ml_rag node group %s %s', store::oid, name), 0);
BEGIN
  IF NOT pg_try_advisory_xact_lock(_key) THEN
    RAISE EXCEPTION USING ERRCODE = '55006',
      MESSAGE = format('node group "%s" of "%s" is being filled by another session', name, store),
      DETAIL = format('Its lock is held by session %s.', coalesce((
        SELECT string_agg(l.pid::text, ', ' ORDER BY l.pid) FROM pg_locks AS l
        WHERE l.granted AND l.locktype = 'advisory' AND l.objsubid = 1
          AND l.classid::bigint = (_key >> 32 & 4294967295) AND l.objid::bigint = (_key & 4294967295)
          AND l.database = (SELECT d.oid FROM pg_database AS d WHERE d.datname = current_database())),
            'none any more')),
      HINT = 'SELECT * FROM ml_rag.progress shows how far it is.';
  END IF;
END
$$;

CREATE FUNCTION ml_rag._node_sources(run ml_rag._node_fill) RETURNS text
LANGUAGE plpgsql STABLE PARALLEL UNSAFE AS $$
-- purpose: SQL of what a node group is made of: the columns of its key, hash, members, texts, around, and
-- document of whole documents. A text that is too long is null: a role that writes into the store must not
-- fill the memory of the session that makes the nodes
-- Reads: the catalog
DECLARE
  _text CONSTANT text := 'CASE WHEN octet_length(t.segment) <= 10000000 THEN t.segment::text END';
  _has_text CONSTANT text := '(octet_length(t.segment) > 10000000 OR t.segment ~ ''[^[:space:]]'')';
  _store text := ml_rag._indexed_rows(run.store);
  _columns text := (SELECT string_agg(format('t.%I', k), ', ' ORDER BY place)
    FROM unnest(run.store_key) WITH ORDINALITY AS u (k, place));
  _parent ml_rag._node_group;
BEGIN
  CASE run.options ->> 'parent'
  WHEN 'segment' THEN
    IF run.options ->> 'transform' <> 'context' OR run.document IS NULL THEN
      RETURN format('SELECT %s, hashtextextended(concat(t.segment) COLLATE "C", 0) AS hash, NULL::text[] AS '
        'members, ARRAY[%s] AS texts, ''{}''::jsonb AS around FROM %s AS t WHERE %s', _columns, _text, _store,
        _has_text);
    END IF;
    RETURN format('SELECT %s, hashtextextended(concat(t.segment) COLLATE "C", 0) AS hash, m.members,'
      ' ARRAY[' || _text || '] AS texts, jsonb_build_object(''document_name'', %s, ''document'','
      ' (SELECT left(string_agg(left(d.segment, 8000), E''\n'' ORDER BY %s), 8000) FROM ('
      'SELECT * FROM %s AS d WHERE d.%I = t.%5$I ORDER BY %3$s LIMIT 40) AS d)) AS around'
      ' FROM %4$s AS t LEFT JOIN (SELECT d.%5$I AS document, (array_agg(%s ORDER BY %3$s))[:40] AS members '
      'FROM %4$s AS d GROUP BY 1) AS m'
      ' ON m.document = t.%5$I WHERE ' || _has_text, _columns,
      CASE WHEN EXISTS (SELECT FROM pg_attribute AS a
        WHERE a.attrelid = run.store AND a.attname = 'document_name' AND NOT a.attisdropped)
        THEN 't.document_name' ELSE 'NULL' END,
      concat_ws(', ', 'd.' || quote_ident(run.number),
        (SELECT string_agg(format('d.%I', k), ', ') FROM unnest(run.store_key) AS k)),
      _store, run.document, ml_rag._key_text('d', run.store_key));
  WHEN 'document' THEN
    RETURN format('SELECT %s, d.hash, d.members, ARRAY[d.text] AS texts, ''{}''::jsonb AS around, d.document'
      ' FROM (SELECT array_agg(%s ORDER BY %s) AS members, t.%5$I AS document,'
      ' hashtextextended(coalesce(string_agg(t.segment, E''\n\n'' ORDER BY %3$s) FILTER (WHERE t.ml_rag_bytes'
      ' <= 10000000), '''') COLLATE "C", 0) AS hash,'
      ' CASE WHEN max(t.ml_rag_bytes) <= 10000000 THEN string_agg(t.segment, E''\n\n'' ORDER BY %3$s)'
      ' FILTER (WHERE t.ml_rag_bytes <= 10000000) END AS text FROM ('
      'SELECT t.*, sum(octet_length(t.segment)) OVER (PARTITION BY t.%5$I ORDER BY %3$s) AS ml_rag_bytes'
      ' FROM %4$s AS t WHERE ' || _has_text || ') AS t GROUP BY t.%5$I) AS d',
      (SELECT string_agg(format('(d.members[1]::text[])[%s]::%s AS %I', i, y, k), ', ' ORDER BY i)
       FROM unnest(run.store_key, run.key_types) WITH ORDINALITY AS u (k, y, i)),
      ml_rag._key_text('t', run.store_key), concat_ws(', ', 't.' || quote_ident(run.number), _columns),
        _store, run.document);
  ELSE
    _parent := ml_rag._node_group(run.store, run.options ->> 'parent');
    RETURN format('SELECT %s, t.text_hash AS hash, t.members,'
      ' ARRAY(SELECT n.node FROM %s AS n WHERE %s AND n.node_number > 0 ORDER BY n.node_number) AS texts,'
      ' ''{}''::jsonb AS around FROM %2$s AS t WHERE t.node_number = 0 AND t.error IS NULL',
      (SELECT string_agg(format('t.%I AS %I', k, o), ', ' ORDER BY place)
        FROM unnest(_parent.key, run.store_key)
        WITH ORDINALITY AS u (k, o, place)),
      ml_rag._indexed_rows(_parent.relation),
      ml_rag._same_key('n', _parent.key, 't', _parent.key));
  END CASE;
END
$$;

CREATE FUNCTION ml_rag._pending_nodes(run ml_rag._node_fill) RETURNS text
LANGUAGE plpgsql STABLE PARALLEL UNSAFE AS $$
-- purpose: SQL of the parents whose nodes are not there, are of another text, or failed and are to be tried
-- again. Each is looked up: joined as a whole, the nodes that are there would be read again for each batch.
-- Left out are those whose key the indexes of nodes may have no room for, beside a number and a table's name,
-- and those that have a key by which no row is found; that is not looked at for parents that do not wait.
BEGIN
  RETURN format('FROM (%s) AS s LEFT JOIN LATERAL (SELECT * FROM %s AS h WHERE %s AND h.node_number = 0'
    ' OFFSET 0) AS h ON true'
    ' WHERE octet_length(%s) <= 2600 AND CASE'
    ' WHEN h.text_hash IS NULL OR h.text_hash <> s.hash OR h.members IS DISTINCT FROM s.members OR h.error '
    'IS NOT NULL AND %s THEN ml_rag._is_text(concat(%4$s, s.members)) ELSE false END',
    ml_rag._node_sources(run), ml_rag._indexed_rows(run.relation),
    ml_rag._same_key('h', run.key, 's', run.store_key), ml_rag._key_text('s', run.store_key),
    CASE WHEN run.retries THEN 'true' ELSE 'h.next_attempt <= now()' END);
END
$$;

CREATE FUNCTION ml_rag._look_up(store regclass, name text, retries boolean) RETURNS ml_rag._node_fill
LANGUAGE plpgsql STABLE PARALLEL UNSAFE AS $$
-- purpose: what a node group is made of, or, name null, one that is to be made  Reads: the catalog
DECLARE
  _group ml_rag._node_group;
  _key record := ml_rag._primary_key(store);
  _columns name[] := ARRAY(SELECT a.attname FROM pg_attribute AS a
    WHERE a.attrelid = store AND NOT a.attisdropped
    ORDER BY a.attnum);
BEGIN
  IF name IS NOT NULL THEN
    _group := ml_rag._node_group(store, name);
  END IF;
  RETURN ROW(store, _group.relation, _group.options, _group.key, coalesce(_group.store_key, _key.key),
    CASE WHEN name IS NULL THEN _key.types ELSE ARRAY(
      SELECT ml_rag._type_name(a.atttypid, a.atttypmod)
      FROM unnest(_group.key) WITH ORDINALITY AS k (name, place)
      JOIN pg_attribute AS a ON a.attrelid = _group.relation AND a.attname = k.name ORDER BY k.place) END,
    CASE WHEN 'document_id' = ANY (_columns) THEN 'document_id'
      WHEN 'document_name' = ANY (_columns) THEN 'document_name' END,
    CASE WHEN 'segment_number' = ANY (_columns) THEN 'segment_number' END, retries)::ml_rag._node_fill;
END
$$;

CREATE FUNCTION ml_rag._index_group(nodes regclass, options jsonb) RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE AS $$
-- purpose: the index of the embeddings, once they are there for the first time, and fresh statistics
-- Writes: an index, as the caller
DECLARE
  _nodes text := ml_rag._relation_name(nodes);
BEGIN
  IF options ? 'embed_model_id' AND NOT EXISTS (
    SELECT FROM pg_index AS x JOIN pg_attribute AS a ON a.attrelid = x.indrelid AND a.attnum = x.indkey[0]
    WHERE x.indrelid = nodes AND a.attname = 'node_embedding') AND (
    SELECT a.atttypmod <= 2000 FROM pg_attribute AS a
    WHERE a.attrelid = nodes AND a.attname = 'node_embedding') THEN
    -- who deletes from the store writes to it
    PERFORM ml_rag._lock_table(nodes, 'SHARE');
    PERFORM ml_rag._create_index(nodes, 'hnsw', 'node_embedding @vector@.vector_cosine_ops', '');
  END IF;
  IF (options -> 'keyword_search')::boolean THEN
    PERFORM ml_rag.merge_keyword_index(nodes);
  END IF;
  EXECUTE format('ANALYZE %s', _nodes);
END
$$;
