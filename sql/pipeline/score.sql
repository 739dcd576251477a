-- score: the segments of one store by a function of the caller's, batch by batch.
--
-- The rows are read by a cursor, under whatever limits the store has (ml_rag._read_store), and scored outside of it: an error of
-- the function is not one of the store.

CREATE FUNCTION ml_rag._open_rows(
  store ml_rag.store, request ml_rag.request, arm ml_rag.arm, with_text boolean, filter ml_rag.row_filter
) RETURNS refcursor
LANGUAGE plpgsql STABLE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: a cursor over all rows of a store that pass the filter: hit, and text or embedding, what the function of an arm gets of it
-- Reads: the store, as the caller
DECLARE
  _columns record := ml_rag._hit_columns(store, request.distance_metric, with_text);
  _takes_vectors boolean := arm.form IN ('vector', 'vectors');
  _is_narrow boolean := filter.row_keys IS NOT NULL;
  -- what has another number of dimensions is no distance away
  _vector @vector@.vector := CASE WHEN coalesce(store.dimensions = @vector@.vector_dims(request.query_embedding), true)
    THEN request.query_embedding END;
  _statement text := concat(
    'SELECT ROW(', replace(_columns.of_hit, format(_columns.rounded, 's.distance'),
      'CASE WHEN s.distance > ''-Infinity'' AND s.distance < ''Infinity'' THEN '
      || format(_columns.rounded, 's.distance') || ' END'), ')::ml_rag.hit AS hit, s.text, s.embedding FROM (SELECT ', _columns.of_row,
    CASE WHEN _takes_vectors THEN format(', NULL::text AS text, t.%I::@vector@.vector AS embedding', store.segment_embedding)
         ELSE format(', t.%I::text AS text, NULL::@vector@.vector AS embedding', store.segment) END, ' FROM ',
           ml_rag._rows_of(store), ' AS t WHERE ',
    ml_rag._has_values(CASE WHEN _takes_vectors THEN ARRAY[store.segment, store.segment_embedding] ELSE ARRAY[store.segment] END),
    CASE WHEN _is_narrow THEN ' AND t.ctid = ANY ($3::tid[])' ELSE filter.condition END, ') AS s');
  _rows refcursor;
BEGIN
  -- subqueries, because pgspot takes what stands here for statements
  OPEN _rows NO SCROLL FOR EXECUTE (SELECT _statement)
  USING (SELECT _vector), (SELECT NULL::integer), (SELECT coalesce(filter.row_keys::text[], filter.arguments));
  RETURN _rows;
END
$$;

CREATE FUNCTION ml_rag._next_rows(rows refcursor, OUT hits ml_rag.hit[], OUT texts text[], OUT embeddings @vector@.vector[])
LANGUAGE plpgsql STABLE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: the next batch of a cursor of ml_rag._open_rows: 1000 rows, or fewer that have 4 MB together; null after the last
-- Reads: the store, as the caller
DECLARE
  _most CONSTANT integer := 1000;
  _most_bytes CONSTANT bigint := 4194304;
  _bytes bigint := 0;
  _rows refcursor := rows;
  _row record;
BEGIN
  WHILE _bytes < _most_bytes AND coalesce(cardinality(hits), 0) < _most LOOP
    FETCH _rows INTO _row;
    EXIT WHEN NOT FOUND;
    hits := hits || _row.hit;
    IF _row.embedding IS NULL THEN
      texts := texts || _row.text;
      _bytes := _bytes + octet_length(_row.text);
    ELSE
      embeddings := embeddings || _row.embedding;
      _bytes := _bytes + 4 * @vector@.vector_dims(_row.embedding);
    END IF;
  END LOOP;
END
$$;

CREATE FUNCTION ml_rag._best_scored(hits ml_rag.hit[], n integer, is_descending boolean) RETURNS ml_rag.hit[]
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$
-- purpose: the n best of what an arm with a function has found; equals as in ml_rag._best_of
BEGIN
  RETURN ARRAY(
    SELECT h FROM unnest(hits) AS h
    ORDER BY CASE WHEN is_descending THEN -h.score ELSE h.score END, h.vector_store COLLATE "C",
      h.document_name COLLATE "C", h.document_id, h.document_key COLLATE "C", h.segment_number
    LIMIT n);
END
$$;

CREATE FUNCTION ml_rag._add_scored(kept ml_rag.hit[], hits ml_rag.hit[], scores double precision[], arm ml_rag.arm)
RETURNS ml_rag.hit[]
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$
-- purpose: what was found, and those hits of a batch that are candidates, with their scores; only the best are kept
DECLARE
  _all ml_rag.hit[] := kept || ARRAY(
    SELECT ROW(h.vector_store, h.document_name, h.document_id, h.document_key, h.segment_number, h.segment, h.distance,
      h.metadata, h.keyword_score, scores[h.ordinality], h.rerank_score, h.row_key, h.first_segment, h.last_segment)::ml_rag.hit
    FROM unnest(hits) WITH ORDINALITY AS h
    WHERE scores[h.ordinality] IS NOT NULL AND (arm.min_score IS NULL OR scores[h.ordinality] >= arm.min_score)
      AND (arm.max_distance IS NULL OR scores[h.ordinality] <= arm.max_distance)
    ORDER BY h.ordinality);
BEGIN
  RETURN CASE WHEN cardinality(_all) > arm.candidates THEN ml_rag._best_scored(_all, arm.candidates, arm.is_descending)
              ELSE _all END;
END
$$;

CREATE FUNCTION ml_rag._as_shares(hits ml_rag.hit[], is_descending boolean) RETURNS ml_rag.hit[]
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$
-- purpose: the hits of an arm with a function, with scores between 0, the worst, and 1, the best (min-max normalisation):
-- nobody knows on what scale a function scores
DECLARE
  _best double precision;
  _worst double precision;
BEGIN
  SELECT CASE WHEN is_descending THEN max(h.score) ELSE min(h.score) END,
    CASE WHEN is_descending THEN min(h.score) ELSE max(h.score) END
  INTO _best, _worst FROM unnest(hits) AS h;
  FOR i IN 1..cardinality(hits) LOOP
    -- halves, since the difference of two numbers can be more than there are
    hits[i].score := CASE WHEN _best / 2 = _worst / 2 THEN 1 ELSE (hits[i].score / 2 - _worst / 2) / (_best / 2 - _worst / 2) END;
  END LOOP;
  RETURN hits;
END
$$;
