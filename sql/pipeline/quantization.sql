-- quantization: indexes of smaller vectors than the column holds, halves or one bit a number, and what a
-- search asks of an index.

CREATE FUNCTION ml_rag._quantized(embedding text, dimensions integer, quantization text) RETURNS text
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE AS $$
-- purpose: the smaller vector of an embedding, an SQL expression; quantization: halfvec or binary
BEGIN
  RETURN format(CASE quantization WHEN 'halfvec' THEN '%1$s::@vector@.halfvec(%2$s)'
    ELSE '@vector@.binary_quantize(%1$s)::bit(%2$s)' END,
    embedding, dimensions);
END
$$;

CREATE FUNCTION ml_rag._quantization(store ml_rag.store, distance_metric text) RETURNS text
LANGUAGE plpgsql STABLE PARALLEL SAFE AS $$
-- purpose: halfvec or binary where only an index of such vectors serves that metric; else null, and with
-- shards, which have indexes of their own
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
  JOIN pg_index AS x ON x.indrelid = store.relation AND x.indkey[0] = 0 AND x.indnatts = 1 AND x.indisvalid
    AND x.indpred IS NULL
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
    JOIN pg_attribute AS a ON a.attrelid = x.indrelid AND a.attnum = x.indkey[0]
      AND a.attname = store.segment_embedding
    JOIN pg_opclass AS o ON o.oid = x.indclass[0]
    WHERE x.indrelid = store.relation AND x.indisvalid AND x.indpred IS NULL AND o.opcname = _class) THEN
      _quantization END;
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
