-- knn: the nearest segments of one store.

CREATE FUNCTION ml_rag._ef_search(relation oid) RETURNS integer
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$
-- purpose: how many candidates an HNSW index keeps while it searches: what the caller has set; where that is pgvector's default
-- of 40, 200 for large tables: with 40, of the ten nearest segments of 100 000 it misses two, and of 5 000 none. Each partition has
-- an index of its own  Reads: pg_class
DECLARE
  _is_small boolean := (SELECT c.reltuples BETWEEN 0 AND 20000 FROM pg_class AS c WHERE c.oid = relation AND c.relkind <> 'p');
  _parts oid[];
BEGIN
  IF _is_small IS NULL THEN
    _parts := ml_rag._parts(relation);
    _is_small := (SELECT bool_and(c.reltuples BETWEEN 0 AND 20000) FROM pg_class AS c WHERE c.oid = ANY (_parts) AND c.relkind <> 'p');
  END IF;
  RETURN coalesce(nullif(current_setting('hnsw.ef_search', true), '40')::integer, CASE WHEN _is_small THEN 40 ELSE 200 END);
END
$$;

CREATE FUNCTION ml_rag._may_fall_short(relation regclass) RETURNS boolean
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path FROM CURRENT
-- see ml_rag._index_needs
SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off
AS $$
-- purpose: whether a scan of the relation can end before it has seen every row: with an approximate index on it or on
-- what lies below it, and who knows what lies below a view or on a shard
-- Reads: the catalog
DECLARE
  _part oid;
BEGIN
  FOREACH _part IN ARRAY ml_rag._parts(relation) LOOP
    IF (SELECT c.relkind IN ('v', 'f') FROM pg_class AS c WHERE c.oid = _part) OR EXISTS (
      SELECT FROM pg_index AS x JOIN pg_class AS i ON i.oid = x.indexrelid JOIN pg_am AS a ON a.oid = i.relam
      WHERE x.indrelid = _part AND a.amname IN ('hnsw', 'ivfflat')) THEN
      RETURN true;
    END IF;
  END LOOP;
  RETURN false;
END
$$;
