-- status: which node groups there are, how far each is, and what failed.

CREATE FUNCTION ml_rag._node_status()
RETURNS TABLE (store regclass, name text, relation regclass, transform text, parent text, model_id text,
  rows bigint, pending bigint, failed bigint, options jsonb)
LANGUAGE plpgsql STABLE PARALLEL UNSAFE ROWS 10 SET search_path FROM CURRENT
-- as those that fill have written keys of members
SET "DateStyle" = 'ISO' SET extra_float_digits = 1
AS $$
-- purpose: the node groups of tables that the caller owns; null if the table is not trusted, or cannot be
-- read
-- Reads: the stores and node groups, as the caller
DECLARE
  _one record;
  -- as in ml_rag._vectorizers
  _former_wait text := ml_rag._limit_wait();
BEGIN
  FOR _one IN
    SELECT s.oid AS store, s.relowner, g.name, g.relation, g.options
    FROM (SELECT DISTINCT f.confrelid FROM pg_constraint AS f
          WHERE f.contype = 'f' AND ml_rag._is_node_group(obj_description(f.conrelid, 'pg_class'))) AS f
    JOIN pg_class AS s ON s.oid = f.confrelid AND pg_has_role(s.relowner, 'USAGE')
    CROSS JOIN LATERAL ml_rag._node_groups(s.oid) AS g
  LOOP
    store := _one.store;
    name := _one.name;
    relation := _one.relation;
    options := _one.options - 'name';
    transform := options ->> 'transform';
    parent := options ->> 'parent';
    model_id := options ->> 'model_id';
    rows := NULL;
    pending := NULL;
    failed := NULL;
    BEGIN
      IF ml_rag._hold_trusted(ml_rag._node_tables(store)) THEN
        EXECUTE
          format('SELECT count(*) FILTER (WHERE n.node_number > 0), count(*) FILTER (WHERE n.error IS NOT '
            'NULL) FROM %s AS n', ml_rag._relation_name(relation)) INTO rows, failed;
        EXECUTE concat('SELECT count(*) ', ml_rag._pending_nodes(ml_rag._look_up(store, name, false)))
          INTO pending;
      END IF;
    EXCEPTION WHEN assert_failure OR OTHERS THEN
      pending := NULL;
    END;
    RETURN NEXT;
  END LOOP;
  PERFORM set_config('lock_timeout', _former_wait, true);
END
$$;

CREATE VIEW ml_rag.node_group AS
SELECT s.store, s.name, s.relation, s.transform, s.parent, s.model_id, s.rows, s.pending, s.failed, s.options
  FROM ml_rag._node_status() AS s;
COMMENT ON VIEW ml_rag.node_group IS
$$the node groups of the caller's tables, and how far each is
relation: the table of its nodes. rows: nodes. pending: texts whose nodes are not there, or of a former text;
those that failed not counted before their next attempt. failed: texts that failed: ml_rag.node_group_error.
Null where the table's owner is not trusted (ml_rag.discover).$$;

CREATE FUNCTION ml_rag._node_errors()
RETURNS TABLE (store regclass, name text, key text, attempts integer, sqlstate text, message text,
  detail text, next_attempt timestamptz)
LANGUAGE plpgsql STABLE PARALLEL UNSAFE ROWS 10 SET search_path FROM CURRENT AS $$
-- purpose: the texts that have no nodes since something failed
-- Reads: the node groups, as the caller
DECLARE
  _one record;
BEGIN
  FOR _one IN SELECT s.store, s.name, g.relation, g.key FROM ml_rag._node_status() AS s
    JOIN LATERAL ml_rag._node_groups(s.store) AS g ON g.name = s.name
              WHERE s.failed > 0 LOOP
    -- an error since it was counted has given its lock back
    CONTINUE WHEN NOT ml_rag._hold_trusted(ml_rag._node_tables(_one.store));
    RETURN QUERY EXECUTE format('SELECT $1, $2, %s, n.attempts, n.error ->> ''sqlstate'','
      ' n.error ->> ''message'', n.error ->> ''detail'', n.next_attempt'
      ' FROM %s AS n WHERE n.error IS NOT NULL ORDER BY 3', ml_rag._key_text('n', _one.key),
        ml_rag._relation_name(_one.relation))
        USING _one.store, _one.name;
  END LOOP;
END
$$;

CREATE VIEW ml_rag.node_group_error AS
SELECT e.store, e.name, e.key, e.attempts, e.sqlstate, e.message, e.detail, e.next_attempt
FROM ml_rag._node_errors() AS e;
COMMENT ON VIEW ml_rag.node_group_error IS
$$texts of the caller's tables that have no nodes, with the reason
key: of the segment, as the text of an array; of a document its first one's. attempts: with the text that it
has. next_attempt: loads do not try before, ml_rag.refresh_node_groups does.$$;
