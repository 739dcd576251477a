-- quantization: indexes of smaller vectors than the column holds, halves or one bit a number, and what a search asks of an index.

CREATE FUNCTION ml_rag._quantized(embedding text, dimensions integer, quantization text) RETURNS text
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE AS $$
-- purpose: the smaller vector of an embedding, an SQL expression; quantization: halfvec or binary
BEGIN
  RETURN format(CASE quantization WHEN 'halfvec' THEN '%1$s::@vector@.halfvec(%2$s)' ELSE '@vector@.binary_quantize(%1$s)::bit(%2$s)' END,
    embedding, dimensions);
END
$$;

CREATE FUNCTION ml_rag._quantization(store ml_rag.store, distance_metric text) RETURNS text
LANGUAGE plpgsql STABLE PARALLEL SAFE AS $$
-- purpose: halfvec or binary where only an index of such vectors serves that metric; else null, and with shards, which have
-- indexes of their own
-- The order by signs is about that by angle: binary serves the metrics of similarity, not those of length.
-- Reads: the catalog, ml_rag.metric
DECLARE
  _quantization text;
  _class text;
BEGIN
  IF store.is_table IS NOT TRUE AND ml_rag._has_shards(store.relation) THEN
    RETURN NULL;
  END IF;
  SELECT q.name, format('%s_%s_ops', store.embedding_type, m.operator_class) INTO _quantization, _class
  FROM ml_rag.metric AS m
  CROSS JOIN unnest(ARRAY['halfvec', 'binary']) AS q (name)
  JOIN pg_index AS x ON x.indrelid = store.relation AND x.indkey[0] = 0 AND x.indnatts = 1 AND x.indisvalid AND x.indpred IS NULL
  JOIN pg_class AS i ON i.oid = x.indexrelid
  JOIN pg_am AS a ON a.oid = i.relam AND a.amname IN ('hnsw', 'ivfflat')
  JOIN pg_opclass AS o ON o.oid = x.indclass[0]
  WHERE m.name = distance_metric
    AND CASE q.name WHEN 'halfvec' THEN o.opcname = format('halfvec_%s_ops', m.operator_class)
                    ELSE o.opcname = 'bit_hamming_ops' AND m.is_complement END
    AND pg_get_indexdef(x.indexrelid, 1, true) IN (
      ml_rag._quantized(quote_ident(store.segment_embedding), store.dimensions, q.name),
      format('(%s)', ml_rag._quantized(quote_ident(store.segment_embedding), store.dimensions, q.name)))
  ORDER BY q.name DESC LIMIT 1;
  RETURN CASE WHEN NOT EXISTS (
    SELECT FROM pg_index AS x
    JOIN pg_attribute AS a ON a.attrelid = x.indrelid AND a.attnum = x.indkey[0] AND a.attname = store.segment_embedding
    JOIN pg_opclass AS o ON o.oid = x.indclass[0]
    WHERE x.indrelid = store.relation AND x.indisvalid AND x.indpred IS NULL AND o.opcname = _class) THEN _quantization END;
END
$$;

CREATE FUNCTION ml_rag._ef_search(relation oid) RETURNS integer
LANGUAGE plpgsql STABLE PARALLEL SAFE SET search_path FROM CURRENT AS $$
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

CREATE FUNCTION ml_rag._analyzed_rows(relation oid) RETURNS bigint
LANGUAGE plpgsql STABLE PARALLEL SAFE SET search_path FROM CURRENT AS $$
-- purpose: how many rows a relation and its partitions had when they were last analyzed  Reads: pg_class
BEGIN
  RETURN (SELECT coalesce(sum(greatest(c.reltuples, 0)), 0) FROM unnest(ml_rag._parts(relation)) AS p (oid)
          JOIN pg_class AS c ON c.oid = p.oid AND c.relkind <> 'p');
END
$$;

CREATE FUNCTION ml_rag._may_fall_short(relation regclass) RETURNS boolean
LANGUAGE plpgsql STABLE PARALLEL SAFE
-- a plan for one table looks cheaper than the generic one, which takes less time than planning; of a few hundred indexes the
-- planner would read all
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
