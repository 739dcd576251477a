-- neighbours: the segments beside those that were found, and their texts as one.

CREATE FUNCTION ml_rag._join_segments(a text, b text) RETURNS text
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE STRICT
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
  -- neighbours share less; in long texts of one word every place would be a candidate
  _most integer := least(length(_b), 4000);
  -- with a character before and behind what may be shared; characters of a long text are found by counting them
  _tail text := right(_a, _most + 1);
  _head text := left(_b, _most + 1);
  _place integer;   -- in _tail, 1-based
  _offset integer := length(_tail) - least(length(_tail), _most);
  _shared text;
BEGIN
  LOOP
    _place := strpos(substr(_tail, _offset + 1), _start);
    EXIT WHEN _place = 0 OR _start IS NULL;
    _offset := _offset + _place;
    _shared := substr(_tail, _offset);
    IF starts_with(_head, _shared)
      AND (_offset = 1 OR substr(_tail, _offset - 1, 2) !~ '^[[:alnum:]]{2}$' OR _shared ~ '^[^\x01-\u2e7f]{2}')
      AND (length(_head) = length(_shared) OR substr(_head, length(_shared), 2) !~ '^[[:alnum:]]{2}$'
           OR _shared ~ '[^\x01-\u2e7f]{2}$')
    THEN
      RETURN _a || substr(_b, length(_shared) + 1);
    END IF;
  END LOOP;
  RETURN _a || E'\n' || _b;
END
$$;

-- segments in their order as one text
CREATE AGGREGATE ml_rag._joined(text) (SFUNC = ml_rag._join_segments, STYPE = text, PARALLEL = SAFE);

CREATE FUNCTION ml_rag._neighbours(store ml_rag.store, documents text[], first bigint[], last bigint[])
RETURNS TABLE (range integer, segment_number bigint, segment text)
LANGUAGE plpgsql STABLE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: the segments first[i] … last[i] of document i of one store, in order
-- Reads: the store, as the caller
DECLARE
  -- what a shard can be asked for, that is not a join with what is here
  _numbers bigint[] := CASE WHEN store.is_table IS NOT TRUE AND ml_rag._has_shards(store.relation) THEN ARRAY(
    SELECT DISTINCT n FROM unnest(first, last) AS r (first, last) CROSS JOIN LATERAL generate_series(r.first, r.last) AS n) END;
BEGIN
  RETURN QUERY EXECUTE format(
    'SELECT r.i::integer, t.%1$I::bigint, t.%2$I::text '
    'FROM unnest($1, $2, $3) WITH ORDINALITY AS r (document, first, last, i) '
    'JOIN %3$s AS t ON t.%4$I = r.document::%5$s AND t.%1$I BETWEEN r.first AND r.last '
    'WHERE %7$s%6$s ORDER BY 1, 2',
    store.segment_number, store.segment, ml_rag._rows_of(store),
    coalesce(store.document_id, store.document_name),
    CASE WHEN store.document_id IS NULL THEN 'text' ELSE store.document_id_type END,
    ml_rag._has_values(ARRAY[store.segment]),
    CASE WHEN _numbers IS NOT NULL THEN format('t.%I = ANY ($1::%s[]) AND t.%I = ANY ($4) AND ',
      coalesce(store.document_id, store.document_name),
      CASE WHEN store.document_id IS NULL THEN 'text' ELSE store.document_id_type END, store.segment_number) END)
  USING documents, first, last, _numbers;
END
$$;

CREATE FUNCTION ml_rag._expand_store(store ml_rag.store, hits ml_rag.hit[], segment_overlap integer)
RETURNS ml_rag.hit[]
LANGUAGE plpgsql STABLE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: all the hits, those of one store with their neighbours: ranges of one document that touch are one hit, the best
-- of them, which keeps its number, distance and scores
-- Reads: the store, as the caller
DECLARE
  _ranges record;
  _row record;
  _texts text[];
  _first bigint[];
  _last bigint[];
BEGIN
  -- gaps and islands: a range that starts beyond the end of all before it, and does not touch, opens a new one
  SELECT array_agg(i.document_key) AS documents, array_agg(i.first) AS first, array_agg(i.last) AS last,
         array_agg(i.best) AS best INTO _ranges
  FROM (
    SELECT r.document_key, min(r.first) AS first, max(r.last) AS last, min(r.place) AS best
    FROM (
      SELECT o.*, count(*) FILTER (WHERE o.opens) OVER (PARTITION BY o.document_key ORDER BY o.first, o.last) AS island
      FROM (
        SELECT h.ordinality AS place, h.document_key, h.segment_number - segment_overlap AS first,
          h.segment_number + segment_overlap AS last,
          coalesce(h.segment_number - segment_overlap > 1 + max(h.segment_number + segment_overlap) OVER (
            PARTITION BY h.document_key ORDER BY h.segment_number
            ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING), true) AS opens
        FROM unnest(hits) WITH ORDINALITY AS h
        WHERE h.vector_store = store.vector_store AND h.segment_number IS NOT NULL AND h.document_key IS NOT NULL
      ) AS o
    ) AS r GROUP BY r.document_key, r.island
  ) AS i;
  IF _ranges.best IS NULL THEN
    RETURN hits;
  END IF;
  FOR _row IN
    SELECT n.range, n.segment_number, n.segment FROM ml_rag._neighbours(store, _ranges.documents, _ranges.first, _ranges.last) AS n
  LOOP
    _texts[_row.range] := CASE WHEN _texts[_row.range] IS NULL THEN _row.segment
      ELSE ml_rag._join_segments(_texts[_row.range], _row.segment) END;
    _first[_row.range] := coalesce(_first[_row.range], _row.segment_number);
    _last[_row.range] := _row.segment_number;
  END LOOP;
  FOR i IN 1..cardinality(_ranges.best) LOOP
    IF _texts[i] IS NOT NULL THEN
      hits[_ranges.best[i]].segment := _texts[i];
      hits[_ranges.best[i]].first_segment := _first[i];
      hits[_ranges.best[i]].last_segment := _last[i];
    END IF;
  END LOOP;
  RETURN ARRAY(
    SELECT hits[i] FROM generate_subscripts(hits, 1) AS i
    WHERE hits[i].vector_store <> store.vector_store OR hits[i].segment_number IS NULL OR hits[i].document_key IS NULL
      OR i = ANY (_ranges.best) ORDER BY i);
END
$$;
