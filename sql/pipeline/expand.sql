-- expand: each hit with its neighbours.

CREATE FUNCTION ml_rag._expand(stores ml_rag.store[], segment_overlap integer, INOUT hits ml_rag.hit[],
  OUT request ml_rag.request, OUT retrieval ml_rag.retrieval)
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: the stage where it is called by itself  Reads: the stores, as the caller
BEGIN
  request.segment_overlap := segment_overlap;
  retrieval.stores := stores;
  retrieval.hits := hits;
  hits := ml_rag._read_hits('expand', request, retrieval);
END
$$;

CREATE FUNCTION ml_rag.expand(stores ml_rag.store[], hits ml_rag.hit[], segment_overlap integer DEFAULT 1)
RETURNS SETOF ml_rag.hit
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE ROWS 10
SET search_path FROM CURRENT
AS $$
-- purpose: the stage: each hit with its neighbours; ranges of one document that touch become one hit
-- A store that nobody named and whose neighbours cannot be read keeps its hits as they are.
-- Reads: the stores, as the caller
BEGIN
  IF segment_overlap > 0 THEN
    hits := (SELECT e.hits FROM ml_rag._expand(stores, segment_overlap, hits) AS e);
  END IF;
  RETURN QUERY SELECT h.* FROM unnest(hits) AS h;
EXCEPTION WHEN query_canceled OR assert_failure OR OTHERS THEN
@RAISE@
END
$$;
COMMENT ON FUNCTION ml_rag.expand(ml_rag.store[], ml_rag.hit[], integer) IS
$$widens each hit by segment_overlap (0-5) segments of its document on either side
Ranges of one document that touch become one hit: text in document order, text that neighbours share written once, and
metadata, segment_number, distance, scores and rank of its best segment; first_segment and last_segment are the numbers at
its ends. Hits of stores without segment numbers are returned as they are.$$;
