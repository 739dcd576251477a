-- search: the nearest segments over the stores, by meaning.

CREATE FUNCTION ml_rag.search(
  stores ml_rag.store[],
  query_embedding @vector@.vector,
  n integer DEFAULT 3,
  distance_metric text DEFAULT 'COSINE',
  options jsonb DEFAULT NULL,
  skip_other_dimensions boolean DEFAULT false
) RETURNS SETOF ml_rag.hit
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE ROWS 10
SET search_path FROM CURRENT
AS $$
-- purpose: the stage: the n nearest segments of all stores, by (distance, store, document, segment)
-- Reads: the stores, as the caller
BEGIN
  RETURN QUERY SELECT h.* FROM ml_rag._search_by_one_arm('semantic', stores, n, NULL, query_embedding, distance_metric, options,
    skip_other_dimensions, false) AS f CROSS JOIN LATERAL unnest(f.hits) AS h;
EXCEPTION WHEN query_canceled OR assert_failure OR OTHERS THEN
@RAISE@
END
$$;
COMMENT ON FUNCTION ml_rag.search(ml_rag.store[], @vector@.vector, integer, text, jsonb, boolean) IS
$$the n nearest segments of the stores, nearest first
distance_metric: a name in ml_rag.metric; distances are rounded to 4 decimals. Equal distances are ordered by store,
document and segment. options: those of ml_rag that leave rows out, see ml_rag.filter; they apply before the limit. Rows
whose segment or embedding is null are skipped. Errors: 22000 different dimensions; with skip_other_dimensions only a
warning if another store has the right ones; those of ml_rag.filter. A store whose "found" is trusted, and that
fails, is left out with a warning if another one can be searched.$$;
