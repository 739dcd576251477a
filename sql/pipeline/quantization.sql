-- quantization: indexes of smaller vectors than the column holds, halves or one bit a number, and what a search asks of an index.

CREATE FUNCTION ml_rag._quantized(embedding text, dimensions integer, quantization text) RETURNS text
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$
-- purpose: the smaller vector of an embedding, an SQL expression; quantization: halfvec or binary
BEGIN
  RETURN format(CASE quantization WHEN 'halfvec' THEN '%1$s::@vector@.halfvec(%2$s)' ELSE '@vector@.binary_quantize(%1$s)::bit(%2$s)' END,
    embedding, dimensions);
END
$$;

CREATE FUNCTION ml_rag._quantization(store ml_rag.store, distance_metric text) RETURNS text
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$
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

CREATE FUNCTION ml_rag._index_needs(relation oid, OUT has_expressions boolean, OUT probes text)
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path FROM CURRENT
-- a plan for one table looks cheaper than the generic one, which takes less time than planning; of a few hundred indexes the
-- planner would read all
SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off
AS $$
-- purpose: what the indexes of a table ask of a search. has_expressions: whether one may be of smaller vectors. probes: how many
-- lists of an IVFFlat index are searched: what the caller has set; where that is pgvector's default of 1, a tenth of them, and
-- not less than 10, as also of indexes that lie below a view: measured in docs/embeddings.md  Reads: the catalog
BEGIN
  SELECT coalesce(bool_or(x.indkey[0] = 0), false), greatest(10, max((
    SELECT coalesce(substring(array_to_string(i.reloptions, ',') FROM 'lists=([0-9]+)')::integer, 100)
    FROM pg_class AS i
    WHERE i.oid = x.indexrelid AND i.relam = (SELECT a.oid FROM pg_am AS a WHERE a.amname = 'ivfflat'))) / 10)::text
  INTO has_expressions, probes
  FROM pg_index AS x WHERE x.indrelid = relation;
  probes := coalesce(nullif(current_setting('ivfflat.probes', true), '1'), probes);
END
$$;
