-- group: node groups: what they are made of, and dropped; docs/nodes.md tells it as a whole,
-- pipeline/nodes what one is.

CREATE FUNCTION ml_rag._node_group(store regclass, name text) RETURNS ml_rag._node_group
LANGUAGE plpgsql STABLE PARALLEL UNSAFE SET search_path FROM CURRENT AS $$
-- purpose: a node group of a store, or the error
DECLARE
  _found ml_rag._node_group;
BEGIN
  SELECT g.* INTO _found FROM ml_rag._node_groups(store) AS g WHERE g.name = _node_group.name;
  IF NOT FOUND THEN
    RAISE EXCEPTION USING ERRCODE = '42704',
      MESSAGE = format('"%s" has no node group "%s"', store, coalesce(left(name, 100), 'NULL')),
      DETAIL = format('It has: %s.',
        coalesce((SELECT string_agg(g.name, ', ') FROM ml_rag._node_groups(store) AS g), 'none')),
      HINT = 'CALL ml_rag.create_node_group makes one.';
  END IF;
  RETURN _found;
END
$$;

CREATE FUNCTION ml_rag._change_merged(store regclass, change text) RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE AS $$
-- purpose: the column of merged nodes comes or goes, and the keyword index is made anew, as it was
-- Writes: the table's definition, as the caller
DECLARE
  _options jsonb := (
    SELECT jsonb_build_object('text_search_configuration', i.configuration, 'k1', i.k1, 'b', i.b,
      'statistics', i.statistics)
    FROM ml_rag._keyword_index(store) AS i);
BEGIN
  PERFORM ml_rag._lock_table(store, 'ACCESS EXCLUSIVE');
  EXECUTE format('ALTER TABLE %s %s', ml_rag._relation_name(store), change);
  PERFORM ml_rag._index_keywords(store, _options, false) WHERE _options IS NOT NULL;
END
$$;

CREATE FUNCTION ml_rag._merged_nodes(store regclass) RETURNS text
LANGUAGE plpgsql STABLE PARALLEL UNSAFE AS $$
-- purpose: SQL of the nodes that are merged into row s of a store, as one text; null if no group is merged
BEGIN
  RETURN (
    SELECT format('nullif(concat_ws(%L, %s), %L)', E'\n', string_agg(format(
      '(SELECT string_agg(n.node, %L ORDER BY n.node_number) FROM %s AS n WHERE %s AND n.node_number > 0)',
      E'\n', ml_rag._indexed_rows(g.relation), ml_rag._same_key('n', g.key, 's', g.store_key)), ', '
        ORDER BY g.relation), '')
    FROM ml_rag._node_groups(store) AS g WHERE (g.options -> 'merge')::boolean HAVING count(*) > 0);
END
$$;

CREATE FUNCTION ml_rag._node_options(store regclass, name text, options jsonb) RETURNS jsonb
LANGUAGE plpgsql STABLE PARALLEL UNSAFE AS $$
-- purpose: the options of a new node group, checked, with what they stand for in this store
DECLARE
  _options jsonb := ml_rag.parse_options('create_node_group', options);
  _transform text := _options ->> 'transform';
  _parent text := _options ->> 'parent';
  _document text;
  _model text;
BEGIN
  IF coalesce(name, '') !~ '^[[:alpha:]_][[:alnum:]_-]*$' OR octet_length(name) > 40
      OR name IN ('segment', 'document') THEN
    RAISE EXCEPTION USING ERRCODE = '22023', MESSAGE = 'invalid name of a node group',
      DETAIL = format('Got %s; a name has 1 to 40 bytes of letters, digits, _ and -, and is neither segment '
        'nor document.', coalesce(quote_literal(left(name, 100)), 'NULL'));
  ELSIF _transform IS NULL THEN
    PERFORM ml_rag._bad_option('transform', 'null', 'what the nodes are made by',
      'Such as {"transform": "sentence"}.');
  ELSIF NOT ml_rag._asks_model(_transform) THEN
    IF _options ?| '{model_id,prompt}' THEN
      PERFORM ml_rag._bad_option(CASE WHEN _options ? 'model_id' THEN 'model_id' ELSE 'prompt' END, '"…"',
        format('nothing, where "transform" is %s', _transform));
    ELSIF _transform <> ALL ('{sentence,paragraph}') THEN
      PERFORM ml_rag._node_function(_transform, store);
    END IF;
  ELSIF octet_length(_options ->> 'prompt') > 65536 THEN
    PERFORM ml_rag._bad_option('prompt', '"…"', 'at most 65536 bytes');
  ELSE
    _options := jsonb_build_object('model_id', ml_rag._default_model()) || _options;
  END IF;
  IF _parent = 'document' THEN
    _document := (SELECT a.attname FROM pg_attribute AS a
                  WHERE a.attrelid = store AND a.attname IN ('document_id', 'document_name')
                    AND NOT a.attisdropped ORDER BY 1 LIMIT 1);
    IF _document IS NULL THEN
      PERFORM ml_rag._bad_option('parent', '"document"', 'segment', format('"%s" has neither document_id nor '
        'document_name.', store));
    END IF;
  ELSIF _parent <> 'segment' THEN
    _document := (ml_rag._node_group(store, _parent)).options ->> 'document';
  END IF;
  IF _transform = 'context' AND _parent <> 'segment' THEN
    PERFORM ml_rag._bad_option('parent', to_jsonb(_parent), 'segment, where "transform" is context');
  END IF;
  IF (_options -> 'merge')::boolean THEN
    IF _transform = 'context' THEN
      PERFORM ml_rag._bad_option('merge', 'true', 'false, where "transform" is context',
        'Its nodes have the text of their segment.');
    ELSIF EXISTS (
      -- a model has read other segments for them, which not all who read the segment may read
      WITH RECURSIVE above AS (
        SELECT _parent AS name
        UNION SELECT g.options ->> 'parent' FROM above AS a
        JOIN ml_rag._node_groups(store) AS g ON g.name = a.name
      )
      SELECT FROM above AS a JOIN ml_rag._node_groups(store) AS g ON g.name = a.name
      WHERE g.options ->> 'transform' = 'context') THEN
      PERFORM ml_rag._bad_option('merge', 'true', 'false for nodes of context');
    ELSIF _document IS NOT NULL THEN
      PERFORM ml_rag._bad_option('merge', 'true', 'false for nodes of documents');
    END IF;
    IF NOT EXISTS (SELECT FROM ml_rag._keyword_index(store) AS i WHERE i.segment = 'segment') THEN
      RAISE EXCEPTION USING ERRCODE = '55000',
        MESSAGE = format('"%s" has no keyword index to merge nodes into', store),
        HINT = format('SELECT ml_rag.enable_keyword_search(%L);', store);
    ELSIF NOT EXISTS (SELECT FROM ml_rag._node_groups(store) AS g WHERE (g.options -> 'merge')::boolean)
      AND EXISTS (SELECT FROM pg_attribute AS a
        WHERE a.attrelid = store AND a.attname = 'segment_nodes' AND NOT a.attisdropped) THEN
      RAISE EXCEPTION USING ERRCODE = '42701',
        MESSAGE = format('table "%s" has a column "segment_nodes" already', store),
        DETAIL = 'The nodes that are merged are kept in a column of that name.',
        HINT = format('ALTER TABLE %s RENAME COLUMN segment_nodes TO …;', store);
    END IF;
  END IF;
  IF (_options -> 'embed')::boolean THEN
    _model := (SELECT e.model_id FROM ml_rag._embeddings(store) AS e WHERE e.is_default);
    IF _model IS NULL THEN
      RAISE EXCEPTION USING ERRCODE = '22023',
        MESSAGE = format('table "%s" has no embedding to take the model of', store),
        HINT = coalesce(ml_rag._segments_hint(store),
          'Create the node group with {"embed": false}, or make the table a vector store.');
    END IF;
  END IF;
  RETURN _options - '{dry_run,batch_size}'::text[]
    || jsonb_strip_nulls(jsonb_build_object('name', name, 'document', _document,
    'embed_model_id', _model));
END
$$;

CREATE FUNCTION ml_rag._grant_readers(store regclass, nodes regclass) RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE AS $$
-- purpose: exactly the roles that may SELECT the store may SELECT its node group
-- Writes: the privileges of the node group, as the caller
DECLARE
  _nodes text := ml_rag._relation_name(nodes);
  _one record;
BEGIN
  FOR _one IN
    WITH readers AS (
      SELECT c.oid, g.grantee FROM pg_class AS c CROSS JOIN LATERAL aclexplode(c.relacl) AS g
      WHERE c.oid IN (store, nodes) AND g.privilege_type = 'SELECT' AND g.grantee <> c.relowner
    )
    SELECT CASE r.grantee WHEN 0 THEN 'PUBLIC' ELSE r.grantee::regrole::text END AS role,
      bool_or(r.oid = store) AS may
    FROM readers AS r GROUP BY r.grantee HAVING count(DISTINCT r.oid) = 1
  LOOP
    EXECUTE format(CASE WHEN _one.may THEN 'GRANT SELECT ON %s TO %s' ELSE 'REVOKE SELECT ON %s FROM %s' END,
      _nodes, _one.role);
  END LOOP;
END
$$;

CREATE FUNCTION ml_rag.drop_node_group(store regclass, name text) RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SET search_path FROM CURRENT AS $$
-- Writes: the table's definition, as the caller
DECLARE
  _group ml_rag._node_group;
  _child text;
BEGIN
  PERFORM ml_rag._own_table(store);
  PERFORM ml_rag._check_transaction('node groups cannot be changed', store);
  PERFORM ml_rag._node_group(store, name);
  -- what DROP TABLE takes in the end: with a weaker lock, a transaction that has read the store and then
  -- writes to it would wait for this one, and this one for it
  PERFORM ml_rag._lock_table(store, 'ACCESS EXCLUSIVE');
  _group := ml_rag._node_group(store, name);
  _child := (SELECT g.name FROM ml_rag._node_groups(store) AS g
    WHERE g.options ->> 'parent' = drop_node_group.name LIMIT 1);
  IF _child IS NOT NULL THEN
    RAISE EXCEPTION USING ERRCODE = '2BP01',
      MESSAGE = format('node group "%s" of "%s" is the parent of another one', name, store),
      DETAIL = format('Node group "%s" is made of its nodes.', _child), HINT = 'Drop that one first.';
  END IF;
  -- the nodes of others are merged again
  PERFORM ml_rag._hold(ml_rag._node_tables(store));
  EXECUTE format('DROP TABLE %s', ml_rag._relation_name(_group.relation));
  IF (_group.options -> 'merge')::boolean AND ml_rag._merged_nodes(store) IS NOT NULL THEN
    EXECUTE
      format('UPDATE %1$s AS t SET segment_nodes = m.merged FROM (SELECT s.ctid AS place, s.tableoid AS '
        'part, %2$s AS merged'
      ' FROM %1$s AS s) AS m WHERE t.ctid = m.place AND t.tableoid = m.part AND t.segment_nodes IS DISTINCT '
      'FROM m.merged', ml_rag._relation_name(store), ml_rag._merged_nodes(store));
  ELSIF (_group.options -> 'merge')::boolean THEN
    PERFORM ml_rag._change_merged(store, 'DROP COLUMN IF EXISTS segment_nodes');
  END IF;
@CATCH@
END
$$;
COMMENT ON FUNCTION ml_rag.drop_node_group(regclass, text) IS
$$drops a node group of a vector store, with its nodes, embeddings and indexes; for the table's owner
Errors: 25006; 2BP01 another node group is made of it; 42704 no such node group; 42P01; 42501; 55000 isolation
level; 55P03 lock_timeout.$$;

CREATE FUNCTION ml_rag._drop_node_tables() RETURNS event_trigger
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $$
-- purpose: node groups go with their store: DROP … CASCADE leaves their tables without the foreign key that
-- makes them nodes
-- It runs as the role that drops the store, with that role's own rights.
-- Writes: the tables' definition, as the caller
DECLARE
  _table text;
BEGIN
  FOR _table IN
    SELECT DISTINCT format('%I.%I', n.nspname, c.relname)
    FROM pg_event_trigger_dropped_objects() AS d
    JOIN pg_namespace AS n ON n.nspname = d.address_names[1]
    JOIN pg_class AS c ON c.relnamespace = n.oid AND c.relname = d.address_names[2] AND c.relkind = 'r'
    WHERE d.classid = 'pg_constraint'::regclass AND d.object_type = 'table constraint' AND NOT d.original
      AND ml_rag._is_node_group(obj_description(c.oid, 'pg_class'))
      AND pg_has_role(c.relowner, 'USAGE')
      AND NOT EXISTS (SELECT FROM pg_constraint AS f WHERE f.conrelid = c.oid AND f.contype = 'f')
  LOOP
    BEGIN
      EXECUTE format('DROP TABLE %s', _table);
    EXCEPTION WHEN dependent_objects_still_exist THEN
      -- another's DROP does not fail by what the owner of the table has built upon it
      RAISE NOTICE USING MESSAGE = format('table %s was kept', _table),
        DETAIL = 'Other objects depend on it.';
    END;
  END LOOP;
END
$$;
CREATE EVENT TRIGGER ml_rag_drop_node_tables ON sql_drop
  WHEN TAG IN ('DROP TABLE', 'DROP SCHEMA', 'DROP OWNED')
EXECUTE FUNCTION ml_rag._drop_node_tables();
