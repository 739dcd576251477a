-- create: node groups made, and kept current: the procedures that fill them, and what loads and vectorizers call.

CREATE FUNCTION ml_rag._count_calls(store regclass, options jsonb, names text[]) RETURNS jsonb
LANGUAGE plpgsql STABLE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: how many texts wait, and how often a model will be asked: of a group that is not made yet (names null), or of those
-- Reads: the store, as the caller
DECLARE
  _run ml_rag._node_run := ml_rag._begin_nodes(store, names, NULL, true, NULL);
  _key record;
  _from text;
  _parents bigint;
  _calls bigint;
  _all bigint := 0;
  _all_calls bigint := 0;
BEGIN
  FOR _i IN 1..coalesce(cardinality(names), 1) LOOP
    IF names IS NULL THEN
      _key := ml_rag._primary_key(store);
      SELECT (jsonb_populate_record(_run, jsonb_build_object('options', _count_calls.options, 'store_key', to_jsonb(_key.key),
        'key_types', to_jsonb(_key.types),
        'document', (SELECT min(a.attname::text) FROM pg_attribute AS a
                     WHERE a.attrelid = _count_calls.store AND a.attname IN ('document_id', 'document_name') AND NOT a.attisdropped),
        'number', (SELECT a.attname FROM pg_attribute AS a
                   WHERE a.attrelid = _count_calls.store AND a.attname = 'segment_number' AND NOT a.attisdropped)))).* INTO _run;
      _from := format('FROM (%s) AS s', ml_rag._node_sources(_run));
    ELSE
      _run := ml_rag._look_up(_run);
      _from := ml_rag._pending_nodes(_run);
    END IF;
    EXECUTE format('SELECT count(*), coalesce(sum((SELECT sum(ml_rag._node_calls($1, t)) FROM unnest(s.texts) AS t)), 0) %s', _from)
      INTO _parents, _calls USING _run.options ->> 'transform';
    _all := _all + _parents;
    _all_calls := _all_calls + _calls;
    SELECT (jsonb_populate_record(_run, jsonb_build_object('names', to_jsonb(names[_i + 1:])))).* INTO _run;
  END LOOP;
  RETURN jsonb_build_object('parents', _all, 'model_calls', _all_calls);
END
$$;

CREATE FUNCTION ml_rag._begin_node_group(store regclass, name text, options jsonb, call integer, OUT run ml_rag._node_run,
  OUT counted jsonb)
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: a node group, checked and made; with dry_run only counted
DECLARE
  _options jsonb;
  _error jsonb;
BEGIN
  PERFORM ml_rag._check_embedding_table(store);
  PERFORM ml_rag._check_segments(store);
  _options := ml_rag._node_options(store, name, options);
  IF (options -> 'dry_run')::boolean THEN
    counted := ml_rag._count_calls(store, _options, NULL);
    RETURN;
  ELSIF _options ? 'model_id' THEN
    _error := ml_rag._too_small(_options ->> 'model_id', 'make nodes');
    PERFORM ml_rag._raise(_error) WHERE _error IS NOT NULL;
  END IF;
  PERFORM ml_rag._make_node_group(store, _options);
  run := ml_rag._begin_nodes(store, ARRAY[name], (options ->> 'batch_size')::integer, true, call);
END
$$;

CREATE FUNCTION ml_rag._check_segments(store regclass) RETURNS void
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$
-- purpose: that a table has texts to make nodes of  Reads: the catalog
BEGIN
  IF NOT EXISTS (SELECT FROM pg_attribute AS a WHERE a.attrelid = store AND a.attname = 'segment' AND NOT a.attisdropped
                 AND a.atttypid IN ('text'::regtype, 'character varying'::regtype)) THEN
    RAISE EXCEPTION USING ERRCODE = '22023', MESSAGE = format('table "%s" is not a vector store', store),
      DETAIL = 'It has no text column segment.', HINT = 'ml_rag.create_vectorizer adds one to an ordinary table.';
  END IF;
END
$$;

CREATE PROCEDURE ml_rag.create_node_group(store regclass, name text, options jsonb, INOUT result jsonb DEFAULT NULL)
LANGUAGE plpgsql
AS $$
-- purpose: a node group, made and filled, a commit after each step
-- A procedure that commits can have no SET clause, so every name here is qualified and no operator is used. Nor can it
-- commit within a block that has an EXCEPTION clause.
DECLARE
  _call pg_catalog.int4;
  _begun record;
  _run ml_rag._node_run;
  _committed pg_catalog.bool;
  _error pg_catalog.jsonb;
BEGIN
  CALL ml_rag._commit(_committed, _error);
  IF NOT _committed THEN
    RAISE EXCEPTION USING ERRCODE = '25001', MESSAGE = 'ml_rag.create_node_group cannot run inside a transaction block',
      DETAIL = 'It commits after each batch.', HINT = 'CALL it by itself, with autocommit on.';
  END IF;
  _call := ml_rag._begin('ml_rag.create_node_group');
  BEGIN
    _begun := ml_rag._begin_node_group(store, name, options, _call);
    _run := _begun.run;
    result := _begun.counted;
  EXCEPTION WHEN query_canceled OR assert_failure OR OTHERS THEN
    PERFORM ml_rag._end(_call, SQLSTATE);
@RAISE@
  END;
  LOOP
    CALL ml_rag._commit(_committed, _error);
    BEGIN
      PERFORM ml_rag._raise(_error);
      EXIT WHEN result IS NOT NULL;
      IF _run.step IS NULL THEN
        result := ml_rag._end_nodes(_run);
      ELSE
        _run := ml_rag._node_step(_run);
      END IF;
    EXCEPTION WHEN query_canceled OR assert_failure OR OTHERS THEN
      PERFORM ml_rag._end(_call, SQLSTATE);
@RAISE@
    END;
  END LOOP;
  PERFORM ml_rag._end(_call);
END
$$;
COMMENT ON PROCEDURE ml_rag.create_node_group(regclass, text, jsonb, jsonb) IS
$$makes a node group of a vector store, texts made of its own, which arms search: CALL ml_rag.create_node_group(…)
CALL ml_rag.create_node_group('handbook', 'sentences', '{"transform": "sentence"}')
transform: sentence, paragraph; summary, keyphrases, questions, entities, context by a model; or "schema.function" (text → setof
text) of the owner's. An arm with "in": "sentences" searches them; what is found counts for the segments they came from. The
nodes are rows of a table beside the store, named after both, with a foreign key: deleting a segment deletes its nodes. Who may
read a segment may read its nodes; of a document's nodes, who may read all of its segments. Filled in batches with a commit
after each, and from then on by loads, vectorizers and ml_rag.refresh_node_groups, only where a text has changed. A text that
fails is in ml_rag.node_group_error and does not stop the rest. With "dry_run": true nothing is made: the result is {"parents",
"model_calls"}. For the owner of a table with a primary key; not inside a transaction block.
options: SELECT * FROM ml_rag.option WHERE routine = 'create_node_group'.
result: {"vector_store", "parents", "nodes", "failed", "seconds"}.
Errors: 22023 bad option, name, function, or table that is not a vector store; 25001; 25006 read-only; 42704 no such parent; 42710
it exists; 42P01; 42P07; 42501; 55000 no primary key, a table or isolation level that it cannot do, or a model that is too small;
55006 another session is at it; 55P03 lock_timeout; 08006; 53300; 57014; 38000.$$;

CREATE FUNCTION ml_rag._begin_refresh(store regclass, options jsonb, call integer, OUT run ml_rag._node_run, OUT counted jsonb)
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: a run over all node groups of a store, parents first; with dry_run only counted
DECLARE
  _options jsonb := ml_rag.parse_options('refresh_node_groups', options);
  _names text[] := ARRAY(SELECT g.name FROM ml_rag._node_groups(store) AS g);
BEGIN
  PERFORM ml_rag._check_embedding_table(store);
  IF _options ? 'name' THEN
    PERFORM ml_rag._node_group(store, _options ->> 'name');
    _names := ARRAY[_options ->> 'name'];
  END IF;
  IF (_options -> 'dry_run')::boolean THEN
    counted := ml_rag._count_calls(store, NULL, _names);
    RETURN;
  END IF;
  run := ml_rag._begin_nodes(store, _names, (_options ->> 'batch_size')::integer, true, call);
END
$$;

CREATE PROCEDURE ml_rag.refresh_node_groups(store regclass, options jsonb DEFAULT NULL, INOUT result jsonb DEFAULT NULL)
LANGUAGE plpgsql
AS $$
-- purpose: fill what is missing in the node groups of a store, a commit after each step
-- As ml_rag.create_node_group.
DECLARE
  _call pg_catalog.int4;
  _begun record;
  _run ml_rag._node_run;
  _committed pg_catalog.bool;
  _error pg_catalog.jsonb;
BEGIN
  CALL ml_rag._commit(_committed, _error);
  IF NOT _committed THEN
    RAISE EXCEPTION USING ERRCODE = '25001', MESSAGE = 'ml_rag.refresh_node_groups cannot run inside a transaction block',
      DETAIL = 'It commits after each batch.', HINT = 'CALL it by itself, with autocommit on.';
  END IF;
  _call := ml_rag._begin('ml_rag.refresh_node_groups');
  BEGIN
    _begun := ml_rag._begin_refresh(store, options, _call);
    _run := _begun.run;
    result := _begun.counted;
  EXCEPTION WHEN query_canceled OR assert_failure OR OTHERS THEN
    PERFORM ml_rag._end(_call, SQLSTATE);
@RAISE@
  END;
  LOOP
    CALL ml_rag._commit(_committed, _error);
    BEGIN
      PERFORM ml_rag._raise(_error);
      EXIT WHEN result IS NOT NULL;
      IF _run.step IS NULL THEN
        result := ml_rag._end_nodes(_run);
      ELSE
        _run := ml_rag._node_step(_run);
      END IF;
    EXCEPTION WHEN query_canceled OR assert_failure OR OTHERS THEN
      PERFORM ml_rag._end(_call, SQLSTATE);
@RAISE@
    END;
  END LOOP;
  PERFORM ml_rag._end(_call);
END
$$;
COMMENT ON PROCEDURE ml_rag.refresh_node_groups(regclass, jsonb, jsonb) IS
$$makes the nodes that are missing in the node groups of a vector store, as each load and vectorizer run does
Texts that are new or have changed, and those that failed: CALL ml_rag.refresh_node_groups('handbook'). Also who may read the
nodes is made what it is for the store. With "dry_run": true the result is {"parents", "model_calls"} of what waits. For the
owner of the table; not inside a transaction block. options: SELECT * FROM ml_rag.option WHERE routine = 'refresh_node_groups'.
result and errors: as ml_rag.create_node_group.$$;

CREATE FUNCTION ml_rag._next_nodes(store regclass, run ml_rag._node_run, call integer) RETURNS ml_rag._node_run
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: the next step of filling the node groups of a store, at the end of a load or of a vectorizer's run; its documents are
-- loaded, whatever becomes of their nodes
DECLARE
  _names text[];
  _detail text;
  _hint text;
BEGIN
  IF run IS NULL THEN
    _names := ARRAY(SELECT g.name FROM ml_rag._node_groups(store) AS g);
    IF cardinality(_names) = 0 THEN
      RETURN NULL;
    ELSIF NOT pg_has_role((SELECT c.relowner FROM pg_class AS c WHERE c.oid = store), 'USAGE') THEN
      RAISE NOTICE USING MESSAGE = format('node groups of "%s" are not filled', store),
        HINT = format('Its owner should CALL ml_rag.refresh_node_groups(%L);', store);
      RETURN NULL;
    END IF;
    RETURN ml_rag._begin_nodes(store, _names, NULL, false, call);
  END IF;
  run := ml_rag._node_step(run);
  IF run.step IS NULL THEN
    PERFORM ml_rag._end_nodes(run);
    RETURN NULL;
  END IF;
  RETURN run;
EXCEPTION WHEN object_in_use THEN
  RETURN NULL;
WHEN OTHERS THEN
  GET STACKED DIAGNOSTICS _detail = PG_EXCEPTION_DETAIL, _hint = PG_EXCEPTION_HINT;
  RAISE WARNING USING ERRCODE = '01000', MESSAGE = format('node groups of "%s" are not filled: %s', store, SQLERRM),
    DETAIL = concat_ws(' ', SQLSTATE, _detail),
    HINT = concat_ws(' ', nullif(_hint, ''), format('Then CALL ml_rag.refresh_node_groups(%L);', store));
  RETURN NULL;
END
$$;

