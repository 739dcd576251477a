-- 50_expand: add the neighbouring segments.

CREATE FUNCTION ml_rag._join_segments(a text, b text) RETURNS text
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$
-- purpose: two consecutive segments as one text, what the end of a and the start of b share written once
-- The shared run must consist of whole words: "… cat" and "table" share a letter and no text. Candidates are the
-- places in a where the first word of b (at most 32 characters of it) stands, longest run first. Scripts that are
-- written without blanks (beyond U+2E7F) have no words to keep whole, so there the first character will do.
DECLARE
  _a text := rtrim(a, E' \t\r\n');
  _b text := ltrim(b, E' \t\r\n');
  _start text := CASE WHEN _b ~ '^[^\x01-\u2e7f]' THEN left(_b, 1)
                      ELSE left(substring(_b FROM '^[[:alnum:]]+|^.'), 32) END;
  _place integer;   -- in _a, 1-based
  _offset integer := greatest(0, length(_a) - length(_b));
  _shared text;
BEGIN
  LOOP
    _place := strpos(substr(_a, _offset + 1), _start);
    EXIT WHEN _place = 0 OR _start IS NULL;
    _offset := _offset + _place;
    _shared := substr(_a, _offset);
    IF starts_with(_b, _shared)
      AND (_offset = 1 OR substr(_a, _offset - 1, 2) !~ '^[[:alnum:]]{2}$' OR _shared ~ '^[^\x01-\u2e7f]{2}')
      AND (length(_b) = length(_shared) OR substr(_b, length(_shared), 2) !~ '^[[:alnum:]]{2}$'
           OR _shared ~ '[^\x01-\u2e7f]{2}$')
    THEN
      RETURN _a || substr(_b, length(_shared) + 1);
    END IF;
  END LOOP;
  RETURN _a || E'\n' || _b;
END
$$;

CREATE FUNCTION ml_rag._neighbours(store ml_rag.store, documents text[], first bigint[], last bigint[])
RETURNS TABLE (range integer, segment_number bigint, segment text)
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: the segments first[i] … last[i] of document i of one store, in order
-- Calls: ml_rag._relation_name  Reads: the store, as the caller
BEGIN
  RETURN QUERY EXECUTE format(
    'SELECT r.i::integer, t.%1$I::bigint, t.%2$I::text '
    'FROM unnest($1, $2, $3) WITH ORDINALITY AS r (document, first, last, i) '
    'JOIN %3$s AS t ON t.%4$I = r.document::%5$s AND t.%1$I BETWEEN r.first AND r.last '
    'WHERE t.%2$I IS NOT NULL ORDER BY 1, 2',
    store.segment_number, store.segment, ml_rag._relation_name(store.relation),
    coalesce(store.document_id, store.document_name),
    CASE WHEN store.document_id IS NULL THEN 'text' ELSE store.document_id_type END)
  USING documents, first, last;
END
$$;

CREATE FUNCTION ml_rag.expand(stores ml_rag.store[], hits ml_rag.hit[], segment_overlap integer DEFAULT 1)
RETURNS SETOF ml_rag.hit
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE ROWS 10
SET search_path FROM CURRENT
AS $$
-- purpose: the stage: each hit with its neighbours; ranges of one document that touch become one hit
-- Calls: ml_rag._neighbours, ml_rag._join_segments  Reads: the stores, as the caller
DECLARE
  _store ml_rag.store;
  _ranges record;
  _row record;
  _texts text[];
  -- by the place of a hit: what it becomes
  _segment text[];
  _distance numeric[];
  _merged boolean[];
BEGIN
  IF coalesce(segment_overlap, 0) = 0 THEN
    RETURN QUERY SELECT h.* FROM unnest(hits) AS h;
    RETURN;
  END IF;
  FOREACH _store IN ARRAY coalesce(stores, '{}') LOOP
    CONTINUE WHEN _store.segment_number IS NULL OR coalesce(_store.document_id, _store.document_name) IS NULL;
    -- gaps and islands: a range that starts beyond the end of all before it, and does not touch, opens a new one
    SELECT array_agg(i.document_key) AS documents, array_agg(i.first) AS first, array_agg(i.last) AS last,
           array_agg(i.best) AS best, array_agg(i.distance) AS distance INTO _ranges
    FROM (
      SELECT r.document_key, min(r.first) AS first, max(r.last) AS last, min(r.place) AS best,
        min(r.distance) AS distance
      FROM (
        SELECT o.*, count(*) FILTER (WHERE o.opens) OVER (
          PARTITION BY o.document_key ORDER BY o.first, o.last) AS island
        FROM (
          SELECT h.place, h.distance, h.document_key, h.segment_number - segment_overlap AS first,
            h.segment_number + segment_overlap AS last,
            coalesce(h.segment_number - segment_overlap > 1 + max(h.segment_number + segment_overlap) OVER (
              PARTITION BY h.document_key ORDER BY h.segment_number
              ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING), true) AS opens
          FROM (
            SELECT p.place, (hits[p.place]).* FROM generate_subscripts(hits, 1) AS p (place)
          ) AS h
          WHERE h.vector_store = _store.vector_store AND h.segment_number IS NOT NULL AND h.document_key IS NOT NULL
        ) AS o
      ) AS r GROUP BY r.document_key, r.island
    ) AS i;
    CONTINUE WHEN _ranges.documents IS NULL;
    _texts := NULL;
    FOR _row IN
      SELECT n.range, n.segment FROM ml_rag._neighbours(_store, _ranges.documents, _ranges.first, _ranges.last) AS n
    LOOP
      _texts[_row.range] := CASE WHEN _texts[_row.range] IS NULL THEN _row.segment
        ELSE ml_rag._join_segments(_texts[_row.range], _row.segment) END;
    END LOOP;
    -- one hit a range, at the place of its best one; the others of the range go
    FOR i IN 1..cardinality(hits) LOOP
      IF hits[i].vector_store = _store.vector_store AND hits[i].segment_number IS NOT NULL
        AND hits[i].document_key IS NOT NULL THEN
        _merged[i] := i <> ALL (_ranges.best);
      END IF;
    END LOOP;
    FOR i IN 1..cardinality(_ranges.documents) LOOP
      _segment[_ranges.best[i]] := _texts[i];
      _distance[_ranges.best[i]] := _ranges.distance[i];
    END LOOP;
  END LOOP;
  RETURN QUERY
    SELECT h.vector_store, h.document_name, h.document_id, h.document_key, h.segment_number,
      coalesce(_segment[h.place], h.segment), coalesce(_distance[h.place], h.distance), h.metadata, h.keyword_score,
      h.score, h.rerank_score
    FROM (SELECT p.place, (hits[p.place]).* FROM generate_subscripts(hits, 1) AS p (place)) AS h
    WHERE _merged[h.place] IS NOT TRUE ORDER BY h.place;
END
$$;
COMMENT ON FUNCTION ml_rag.expand(ml_rag.store[], ml_rag.hit[], integer) IS
$$widens each hit by segment_overlap (0-5) segments of its document on either side
Ranges of one document that touch become one hit: text in document order, text that neighbours share written once,
distance of its nearest segment, place, metadata and
segment_number of its best one. Stores without segment numbers are left as they are.$$;
