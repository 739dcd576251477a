-- keyword: the best segments over the stores, by their words.

CREATE FUNCTION ml_rag.keyword(
  stores ml_rag.store[],
  query text,
  n integer DEFAULT 3,
  query_embedding @vector@.vector DEFAULT NULL,
  distance_metric text DEFAULT 'COSINE',
  options jsonb DEFAULT NULL
) RETURNS SETOF ml_rag.hit
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE ROWS 10
SET search_path FROM CURRENT
AS $$
-- purpose: the stage: the n segments of all stores that speak most of the query's words
-- Reads: the stores and their indexes, as the caller
BEGIN
  RETURN QUERY SELECT h.* FROM ml_rag._search_by_one_arm('keyword', stores, n, query, query_embedding, distance_metric, options,
    false, coalesce((options -> 'semantic_search')::boolean, false)) AS f CROSS JOIN LATERAL unnest(f.hits) AS h;
EXCEPTION WHEN query_canceled OR assert_failure OR OTHERS THEN
@RAISE@
END
$$;
COMMENT ON FUNCTION ml_rag.keyword(ml_rag.store[], text, integer, @vector@.vector, text, jsonb) IS
$$the n segments of the stores that match the words of the query best, best first
keyword_score is BM25 (Lucene's variant), from the statistics of the segment's own store; segments without any of the
words are not returned. Equal scores are ordered by store, document and segment. distance is filled if query_embedding is
given and has the right dimensions. options: those of ml_rag that leave rows out, see ml_rag.filter; they apply before the
limit. A store without a usable keyword index is left out with a warning. Errors: 55000 no store has one, the only
store's cannot be used, or numpy is missing; those of ml_rag.filter.$$;
