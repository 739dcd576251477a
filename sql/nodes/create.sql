-- create: node groups made, and kept current: the procedures that fill them, and what loads and vectorizers
-- call.

CREATE FUNCTION ml_rag._count_calls(store regclass, options jsonb, names text[]) RETURNS jsonb
LANGUAGE plpgsql STABLE PARALLEL UNSAFE AS $$
-- purpose: how many texts wait, and how often a model will be asked: of a group that is not made yet (names
-- null), or of those
-- Reads: the store, as the caller
DECLARE
  _run record;
  _name text;
  _from text;
  _parents bigint;
  _calls bigint;
  _all bigint := 0;
  _all_calls bigint := 0;
BEGIN
  PERFORM ml_rag._hold(ml_rag._node_tables(store));
  FOREACH _name IN ARRAY coalesce(names, ARRAY[NULL::text]) LOOP
    _run := ml_rag._look_up(store, _name, true);
    IF _name IS NULL THEN
      _run.options := options;
      _from := format('FROM (%s) AS s', ml_rag._node_sources(_run));
    ELSE
      _from := ml_rag._pending_nodes(_run);
    END IF;
    EXECUTE format('SELECT count(*), '
      'coalesce(sum(ml_rag._python(''node_calls'', jsonb_build_array($1, s.texts))::bigint), 0) %s', _from)
      INTO _parents, _calls USING _run.options ->> 'transform';
    _all := _all + _parents;
    _all_calls := _all_calls + _calls;
  END LOOP;
  RETURN jsonb_build_object('parents', _all, 'model_calls', _all_calls);
END
$$;

CREATE FUNCTION ml_rag._begin_node_group(store regclass, name text, options jsonb) RETURNS jsonb
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE AS $$
-- purpose: a node group, checked and made; with dry_run only counted
-- Writes: a new table, as the caller
DECLARE
  _options jsonb;
  _store record;
  _key record;
  _taken name;
  _columns text;
  _same text;
  _document text;
  _type text;
  _name text;
  _nodes text;
  _condition text;
  _language jsonb;
BEGIN
  PERFORM ml_rag._check_embedding_table(store, 'Citus cannot lock the segments of nodes across shards.');
  IF NOT EXISTS (SELECT FROM pg_attribute AS a
    WHERE a.attrelid = store AND a.attname = 'segment' AND NOT a.attisdropped
                 AND a.atttypid IN ('text'::regtype, 'character varying'::regtype)) THEN
    RAISE EXCEPTION USING ERRCODE = '22023', MESSAGE = format('table "%s" is not a vector store', store),
      DETAIL = 'It has no text column segment.',
      HINT = 'ml_rag.create_vectorizer adds one to an ordinary table.';
  END IF;
  _options := ml_rag._node_options(store, name, options);
  IF (options -> 'dry_run')::boolean THEN
    RETURN jsonb_build_object('counted', ml_rag._count_calls(store, _options, NULL));
  ELSIF _options ? 'model_id' THEN
    PERFORM ml_rag._raise(ml_rag._cannot_write(_options ->> 'model_id', 'make nodes'));
  END IF;
  -- the table, empty, for the owner of the store
  _key := ml_rag._primary_key(store);
  _taken := (SELECT k FROM unnest(_key.key) AS k WHERE k IN ('node_number', 'parent_number', 'node',
    'text_hash', 'members', 'error', 'attempts', 'next_attempt', 'node_embedding', 'hash', 'texts', 'around',
    'document') LIMIT 1);
  IF _taken IS NOT NULL THEN
    RAISE EXCEPTION USING ERRCODE = '42701', MESSAGE = format('"%s" cannot have node groups', store),
      DETAIL = format('Column %I of its primary key has the name of a column that nodes have.', _taken),
      HINT = format('Rename it: ALTER TABLE %s RENAME %I TO …;', store, _taken);
  ELSIF (_options ->> 'parent' = 'document' OR _options ->> 'transform' = 'context') AND EXISTS (
    SELECT FROM unnest(_key.types) AS t
    WHERE t ~ '^(date|time|timestamp|interval|real|double precision|money|bytea)\M') THEN
    RAISE EXCEPTION USING ERRCODE = '55000', MESSAGE = format('"%s" cannot have such a node group', store),
      DETAIL = format('Its primary key is of type %s. The nodes of a document have the keys of its segments '
        'as text, which depends on settings of the session.', array_to_string(_key.types, ', ')),
      HINT = 'Take "segment" for "parent", or a key of another type.';
  END IF;
  SELECT string_agg(quote_ident(k), ', ' ORDER BY place),
    string_agg(format('s.%I = $%s', k, place), ' AND ' ORDER BY place)
  INTO _columns, _same FROM unnest(_key.key) WITH ORDINALITY AS u (k, place);
  _document := (SELECT min(a.attname::text) FROM pg_attribute AS a
    WHERE a.attrelid = store AND a.attname IN ('document_id', 'document_name') AND NOT a.attisdropped);
  IF _options ? 'embed_model_id' THEN
    -- a first vector tells the dimensions, and whether the model works, before anything is made
    _type := format('@vector@.vector(%s)',
      @vector@.vector_dims(ml_rag.embed('dimensions', _options ->> 'embed_model_id')));
  END IF;
  PERFORM ml_rag._lock_table(store, 'SHARE ROW EXCLUSIVE');
  -- another session may have dropped it meanwhile
  PERFORM ml_rag._node_group(store, _options ->> 'parent')
  WHERE _options ->> 'parent' NOT IN ('segment', 'document');
  SELECT n.nspname, c.relname, c.relowner, c.relpersistence INTO _store
  FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace WHERE c.oid = store;
  _name := ml_rag._derived_name(_store.relname, concat('_', _options ->> 'name'));
  _nodes := format('%I.%I', _store.nspname, _name);
  IF EXISTS (SELECT FROM ml_rag._node_groups(store) AS g WHERE g.name = _options ->> 'name') THEN
    RAISE EXCEPTION USING ERRCODE = '42710',
      MESSAGE = format('"%s" has a node group "%s" already', store, _options ->> 'name'),
      HINT = format('First: SELECT ml_rag.drop_node_group(%L, %L); then create the new one.', store,
        _options ->> 'name');
  ELSIF to_regclass(_nodes) IS NOT NULL THEN
    RAISE EXCEPTION USING ERRCODE = '42P07', MESSAGE = format('relation %s exists already', _nodes),
      DETAIL = 'The nodes of the group are kept in a table of that name.',
        HINT = 'Give the node group another name, or rename that relation.';
  END IF;
  EXECUTE format($sql$
    CREATE %s TABLE %s (
      %s, node_number integer NOT NULL, parent_number integer, node text, %s text_hash bigint NOT NULL,
      members text[],
      error jsonb, attempts integer, next_attempt timestamptz,
      PRIMARY KEY (%s, node_number), FOREIGN KEY (%5$s) REFERENCES %s (%5$s) ON UPDATE CASCADE
        ON DELETE CASCADE
    )$sql$, CASE _store.relpersistence WHEN 'u' THEN 'UNLOGGED' ELSE '' END, _nodes,
    (SELECT string_agg(format('%I %s NOT NULL', k, t), ', ' ORDER BY place) FROM unnest(_key.key, _key.types)
      WITH ORDINALITY AS u (k, t, place)),
    'node_embedding ' || _type || ',', _columns, ml_rag._relation_name(store));
  EXECUTE format('COMMENT ON TABLE %s IS %L', _nodes, concat('ML_RAG_NODE_GROUP=', _options));
  EXECUTE format('ALTER TABLE %s OWNER TO %s', _nodes, _store.relowner::regrole);
  -- nodes are not looked up by their text, and estimates, which EXPLAIN shows to every role, would reveal
  -- hidden nodes
  EXECUTE
    format('ALTER TABLE %s ALTER node SET STATISTICS 0, ALTER text_hash SET STATISTICS 0, ALTER members SET '
      'STATISTICS 0,'
    ' ALTER error SET STATISTICS 0', _nodes);
  -- A role sees a node if it sees its segment, and all that the node was made of: the segments of a document,
  -- or those that a model has read for a context. The policy reads the text, so that it takes the privilege
  -- to read that in the store.
  _condition := format('EXISTS (SELECT s.segment FROM %s AS s WHERE %s) AND ($%s IS NULL',
    ml_rag._relation_name(store), _same, cardinality(_key.key) + 1);
  -- with a column of documents that the table gets later, a model reads several segments
  IF _document IS NOT NULL THEN
    -- EXCEPT takes time in proportion to the segments; <@ takes the square of it, and is not cancelled
    _condition := format('%s OR NOT EXISTS (SELECT unnest($%s) EXCEPT '
      'SELECT %s FROM %s AS a WHERE a.%I = (SELECT s.%5$I FROM %4$s AS s WHERE %6$s))', _condition,
      cardinality(_key.key) + 1, ml_rag._key_text('a', _key.key), ml_rag._relation_name(store), _document,
      _same);
  END IF;
  EXECUTE format('ALTER TABLE %s ENABLE ROW LEVEL SECURITY', _nodes);
  EXECUTE format('CREATE POLICY sees_parent ON %s USING (%s(%s, members))', _nodes,
    ml_rag._make_visible(_nodes::regclass, _key.types || 'text[]'::text, _condition || ')'), _columns);
  EXECUTE format('REVOKE ALL ON %s FROM PUBLIC', _nodes);
  PERFORM ml_rag._grant_readers(store, _nodes::regclass);
  IF (_options -> 'keyword_search')::boolean THEN
    SELECT jsonb_build_object('text_search_configuration', i.configuration, 'statistics', i.statistics)
    INTO _language
    FROM ml_rag._keyword_index(store) AS i;
    PERFORM ml_rag._index_keywords(_nodes::regclass,
      coalesce(_language, '{}') || '{"segment": "node"}', true);
  END IF;
  IF (_options -> 'merge')::boolean AND NOT EXISTS (
    SELECT FROM pg_attribute AS a WHERE a.attrelid = store AND a.attname = 'segment_nodes'
      AND NOT a.attisdropped) THEN
    PERFORM ml_rag._warn_of_subscribers(store, 'segment_nodes', 'text');
    PERFORM ml_rag._change_merged(store, 'ADD COLUMN segment_nodes text');
  END IF;
  RETURN jsonb_build_object('names', ARRAY[name], 'batch_size', options -> 'batch_size');
END
$$;

CREATE PROCEDURE ml_rag.create_node_group(store regclass, name text, options jsonb,
  INOUT result jsonb DEFAULT NULL)
LANGUAGE plpgsql
AS $$
-- purpose: a node group, made and filled, a commit after each step
DECLARE
  _routine CONSTANT pg_catalog.text := 'ml_rag.create_node_group';
  _given CONSTANT pg_catalog.jsonb := pg_catalog.jsonb_build_array(store::pg_catalog.oid, name, options);
@WORK@
$$;
COMMENT ON PROCEDURE ml_rag.create_node_group(regclass, text, jsonb, jsonb) IS
$$makes a node group of a vector store, texts made of its own, which arms search: CALL ml_rag.create_node_group(…)
CALL ml_rag.create_node_group('handbook', 'sentences', '{"transform": "sentence"}')
transform: sentence, paragraph; summary, keyphrases, questions, entities, context by a model; or
"schema.function" (text → setof text) of the owner's. An arm with "in": "sentences" searches them; what is
found counts for the segments they came from. The nodes are rows of a table beside the store, named after
both, with a foreign key: deleting a segment deletes its nodes. Who may read a segment may read its nodes; of
a document's nodes, who may read all of its segments. Filled in batches with a commit after each, and from
then on by loads, vectorizers and ml_rag.refresh_node_groups, only where a text has changed. A text that fails
is in ml_rag.node_group_error and does not stop the rest. With "dry_run": true nothing is made: the result is
{"parents", "model_calls"}. For the owner of a table with a primary key; not inside a transaction block.
options: SELECT * FROM ml_rag.option WHERE routine = 'create_node_group'.
result: {"vector_store", "parents", "nodes", "failed", "seconds"}.
Errors: 22023 bad option, name, function, or table that is not a vector store; 25001; 25006 read-only; 42704
no such parent; 42710 it exists; 42P01; 42P07; 42501; 55000 no primary key, a table or isolation level that it
cannot do, or a model that is too small; 55006 another session is at it; 55P03 lock_timeout; 08006; 53300;
57014; 38000.$$;

CREATE FUNCTION ml_rag._begin_refresh(store regclass, options jsonb) RETURNS jsonb
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE AS $$
-- purpose: a run over all node groups of a store, parents first; with dry_run only counted
DECLARE
  _options jsonb := ml_rag.parse_options('refresh_node_groups', options);
  _names text[] := ARRAY(SELECT g.name FROM ml_rag._node_groups(store) AS g);
BEGIN
  PERFORM ml_rag._check_embedding_table(store, 'Citus cannot lock the segments of nodes across shards.');
  IF _options ? 'name' THEN
    PERFORM ml_rag._node_group(store, _options ->> 'name');
    _names := ARRAY[_options ->> 'name'];
  END IF;
  IF (_options -> 'dry_run')::boolean THEN
    RETURN jsonb_build_object('counted', ml_rag._count_calls(store, NULL, _names));
  END IF;
  RETURN jsonb_build_object('names', _names, 'batch_size', _options -> 'batch_size');
END
$$;

CREATE PROCEDURE ml_rag.refresh_node_groups(store regclass, options jsonb DEFAULT NULL,
  INOUT result jsonb DEFAULT NULL)
LANGUAGE plpgsql
AS $$
-- purpose: fill what is missing in the node groups of a store, a commit after each step
DECLARE
  _routine CONSTANT pg_catalog.text := 'ml_rag.refresh_node_groups';
  _given CONSTANT pg_catalog.jsonb := pg_catalog.jsonb_build_array(store::pg_catalog.oid, options);
@WORK@
$$;
COMMENT ON PROCEDURE ml_rag.refresh_node_groups(regclass, jsonb, jsonb) IS
$$makes the nodes that are missing in the node groups of a vector store, as each load and vectorizer run does
Texts that are new or have changed, and those that failed: CALL ml_rag.refresh_node_groups('handbook'). Also
who may read the nodes is made what it is for the store. With "dry_run": true the result is {"parents",
"model_calls"} of what waits. For the owner of the table; not inside a transaction block. options: SELECT *
FROM ml_rag.option WHERE routine = 'refresh_node_groups'. result and errors: as ml_rag.create_node_group.$$;
