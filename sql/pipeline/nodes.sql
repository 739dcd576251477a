-- nodes: the node groups of a store, search in one of them, and the similarity of sentences that one keeps;
-- nodes/ makes and fills them.
--
-- A node group is a table of texts that were made of a store's: each row has the key of the segment that it
-- came from, as a foreign key. Its comment says what it is, so that it is dumped, renamed and dropped with
-- it; that column node_embedding has no marker keeps it from being a store. Row 0 of a key says what its
-- nodes were made of, and what went wrong.

CREATE TYPE ml_rag._node_group AS (
  relation  regclass,
  name      text,
  -- of ml_rag.create_node_group, with "document": the column that tells documents apart, where nodes are of
  -- those
  options   jsonb,
  key       name[],  -- the columns of the store's key: here, and in the store
  store_key name[]
);

CREATE FUNCTION ml_rag._node_groups(store oid) RETURNS SETOF ml_rag._node_group
LANGUAGE plpgsql STABLE PARALLEL UNSAFE ROWS 2 AS $$
-- purpose: the node groups of a store, in the order in which they were made
-- A table of another owner than the store's is not a node group: readers of the store trust only its owner.
-- Nor is one whose comment is not an object, or is longer than ml_rag writes them: any role may write a
-- comment of 1 GB.  Reads: the catalog
DECLARE
  _one record;
  _options jsonb;
BEGIN
  FOR _one IN
    SELECT c.conrelid, c.conkey, c.confkey,
      obj_description(c.conrelid, 'pg_class') AS comment
    FROM pg_depend AS d
    JOIN pg_constraint AS c ON c.oid = d.objid AND c.contype = 'f' AND c.confrelid = _node_groups.store
      AND c.conparentid = 0
    JOIN pg_class AS t ON t.oid = c.conrelid AND t.relkind = 'r'
    WHERE d.classid = 'pg_constraint'::regclass AND d.refclassid = 'pg_class'::regclass
      AND d.refobjid = _node_groups.store
      AND t.relowner = (SELECT s.relowner FROM pg_class AS s WHERE s.oid = _node_groups.store)
      AND ml_rag._is_node_group(obj_description(c.conrelid, 'pg_class'))
    GROUP BY c.oid, c.conrelid, c.conkey, c.confkey ORDER BY c.conrelid
  LOOP
    BEGIN
      _options := substr(_one.comment, 1 + length('ML_RAG_NODE_GROUP='))::jsonb;
    EXCEPTION WHEN data_exception OR statement_too_complex THEN
      CONTINUE;
    END;
    CONTINUE WHEN jsonb_typeof(_options) <> 'object' OR jsonb_typeof(_options -> 'merge') <> 'boolean'
      OR jsonb_typeof(_options -> 'document') <> 'string';
    RETURN QUERY SELECT _one.conrelid::regclass, _options ->> 'name', _options,
      ARRAY(SELECT a.attname FROM unnest(_one.conkey) WITH ORDINALITY AS k (attnum, place)
            JOIN pg_attribute AS a ON a.attrelid = _one.conrelid AND a.attnum = k.attnum ORDER BY k.place),
      ARRAY(SELECT a.attname FROM unnest(_one.confkey) WITH ORDINALITY AS k (attnum, place)
            JOIN pg_attribute AS a ON a.attrelid = _node_groups.store AND a.attnum = k.attnum
            ORDER BY k.place);
  END LOOP;
END
$$;

CREATE FUNCTION ml_rag._node_tables(store oid) RETURNS oid[]
LANGUAGE plpgsql STABLE PARALLEL UNSAFE SET search_path FROM CURRENT AS $$
-- purpose: a store and its node groups, each with its parts: what is read where one of these is searched or
-- filled
-- Reads: the catalog
BEGIN
  RETURN ml_rag._parts(store) || ARRAY(SELECT unnest(ml_rag._parts(g.relation))
    FROM ml_rag._node_groups(store) AS g);
END
$$;

CREATE FUNCTION ml_rag._key_text(alias text, key name[]) RETURNS text
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE SET search_path FROM CURRENT AS $$
-- purpose: SQL of a row's key as one text, that of an array
BEGIN
  RETURN (SELECT format('ARRAY[%s]::text COLLATE "C"',
    string_agg(format('%s.%I::text', alias, k), ', ' ORDER BY place))
          FROM unnest(key) WITH ORDINALITY AS u (k, place));
END
$$;

CREATE FUNCTION ml_rag._same_key(a text, key name[], b text, other_key name[]) RETURNS text
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE AS $$
-- purpose: SQL of: the key of alias a is that of alias b
BEGIN
  RETURN (SELECT string_agg(format('%s.%I = %s.%I', a, k, b, o), ' AND ' ORDER BY place)
          FROM unnest(key, other_key) WITH ORDINALITY AS u (k, o, place));
END
$$;

CREATE FUNCTION ml_rag._known_cosines(request ml_rag.request, stores ml_rag.store[],
  hits ml_rag.hit[]) RETURNS jsonb
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE AS $$
-- purpose: {"vector": of the question, "cosines": {sentence: its cosine}} of the sentences of the hits that
-- node groups keep with vectors of the first store's model; null if there are none, or if the search has no
-- vector of the question itself. A group that is locked or cannot be read does not fail the call, which has
-- not asked for it: its sentences are embedded again
-- Reads: the stores and node groups, as the caller
DECLARE
  _question @vector@.vector := request.query_embedding;
  _one record;
  _former_wait text;
  _is_held boolean;
  _found jsonb;
  _cosines jsonb := '{}';
BEGIN
  -- without such an arm the vector may be that of another text
  IF _question IS NULL OR (request.rewritten).asked IS NOT NULL OR NOT EXISTS (
    SELECT FROM unnest(request.arms) AS a WHERE a.search = 'semantic' AND a.query IS NULL
      AND a.query_embedding IS NULL) THEN
    RETURN NULL;
  END IF;
  FOR _one IN
    SELECT s.*, g.relation AS nodes, g.key, g.store_key, h.documents, h.first, h.last
    FROM (SELECT h.vector_store, array_agg(h.document_key ORDER BY h.place) AS documents,
            array_agg(coalesce(h.first_segment, h.segment_number) ORDER BY h.place) AS first,
            array_agg(coalesce(h.last_segment, h.segment_number) ORDER BY h.place) AS last
          FROM (SELECT h.*, row_number() OVER () AS place FROM unnest(hits) AS h) AS h
          GROUP BY h.vector_store) AS h
    JOIN unnest(stores) AS s ON s.vector_store = h.vector_store
      AND s.embed_model_id = stores[1].embed_model_id
      AND s.segment_number IS NOT NULL AND coalesce(s.document_id, s.document_name) IS NOT NULL
    CROSS JOIN LATERAL (
      SELECT g.* FROM ml_rag._node_groups(s.relation) AS g
      JOIN pg_attribute AS a ON a.attrelid = g.relation AND a.attname = 'node_embedding'
        AND a.atttypmod = @vector@.vector_dims(_question)
      WHERE g.options @> '{"transform": "sentence", "parent": "segment"}'
        AND g.options ->> 'embed_model_id' = s.embed_model_id
        AND has_table_privilege(g.relation, 'SELECT')
      LIMIT 1) AS g
  LOOP
    BEGIN
      _former_wait := ml_rag._limit_wait();
      IF _one.found IS DISTINCT FROM 'trusted' THEN
        PERFORM ml_rag._hold(ml_rag._node_tables(_one.relation));
        _is_held := true;
      ELSE
        _is_held := ml_rag._hold_trusted(ARRAY[_one.relation, _one.nodes]);
      END IF;
      PERFORM set_config('lock_timeout', _former_wait, true);
      CONTINUE WHEN NOT _is_held;
      EXECUTE format($sql$
        SELECT jsonb_object_agg(n.node, n.cosine) FILTER (WHERE n.cosine BETWEEN -1.01 AND 1.01) FROM (
          SELECT n.node, 1 - (n.node_embedding OPERATOR(@vector@.<=>) $1) AS cosine
          FROM unnest($2, $3, $4) AS h (document, first, last)
          JOIN %s AS t ON t.%I = h.document::%s AND t.%I BETWEEN h.first AND h.last
          JOIN %s AS n ON %s
          WHERE n.node_number > 0 AND n.node_embedding IS NOT NULL) AS n
        $sql$, ml_rag._relation_name(_one.relation), coalesce(_one.document_id, _one.document_name),
        CASE WHEN _one.document_id IS NULL THEN 'text' ELSE _one.document_id_type END, _one.segment_number,
        ml_rag._relation_name(_one.nodes), ml_rag._same_key('n', _one.key, 't', _one.store_key))
      INTO _found USING _question, _one.documents, _one.first, _one.last;
      _cosines := _cosines || coalesce(_found, '{}');
    EXCEPTION WHEN assert_failure OR OTHERS THEN
      IF SQLSTATE = '40001' THEN
        RAISE;
      END IF;
    END;
  END LOOP;
  RETURN CASE WHEN _cosines <> '{}' THEN
    jsonb_build_object('vector', _question::text::jsonb, 'cosines', _cosines) END;
END
$$;
