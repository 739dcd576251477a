-- expand: add the neighbouring segments.

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

CREATE FUNCTION ml_rag._neighbours(store ml_rag.store, documents text[], first bigint[], last bigint[],
  condition text DEFAULT '', most bigint DEFAULT NULL)
RETURNS TABLE (range integer, segment_number bigint, segment text)
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: the segments first[i] … last[i] of document i of one store, in order; condition: of ml_rag._untrusted_condition;
-- most: how many there are at most, null = any number
-- Calls: ml_rag._relation_name  Reads: the store, as the caller
BEGIN
  RETURN QUERY EXECUTE format(
    'SELECT r.i::integer, t.%1$I::bigint, t.%2$I::text '
    'FROM unnest($1, $2, $3) WITH ORDINALITY AS r (document, first, last, i) '
    'JOIN %3$s AS t ON t.%4$I = r.document::%5$s AND t.%1$I BETWEEN r.first AND r.last '
    'WHERE t.%2$I IS NOT NULL%6$s ORDER BY 1, 2 LIMIT $4',
    store.segment_number, store.segment, ml_rag._relation_name(store.relation),
    coalesce(store.document_id, store.document_name),
    CASE WHEN store.document_id IS NULL THEN 'text' ELSE store.document_id_type END, condition)
  USING documents, first, last, most;
END
$$;

CREATE FUNCTION ml_rag.expand(stores ml_rag.store[], hits ml_rag.hit[], segment_overlap integer DEFAULT 1)
RETURNS SETOF ml_rag.hit
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE ROWS 10
SET search_path FROM CURRENT
AS $$
-- purpose: the stage: each hit with its neighbours; ranges of one document that touch become one hit
-- A store that nobody named and whose neighbours cannot be read keeps its hits as they are.
-- Calls: ml_rag._untrusted_last, ml_rag._share, ml_rag._limit_wait, ml_rag._untrusted_condition, ml_rag._out_of_time,
-- ml_rag._failure, ml_rag._warn_of_failures, ml_rag._neighbours, ml_rag._join_segments  Reads: the stores, as the caller
DECLARE
  _store ml_rag.store;
  _ranges record;
  _row record;
  _texts text[];
  -- by the place of a hit: what it becomes
  _segment text[];
  _distance numeric[];
  _merged boolean[];
  _is_untrusted boolean;
  _ordered ml_rag.store[];
  _untrusted integer;
  _ends timestamptz;
  _until timestamptz;
  _lock_timeout text;
  _failures jsonb[] := '{}';
  _late text[] := '{}';
  _detail text;
  _hint text;
  _names text[];
  _condition text;
  _most bigint;
  _rows bigint;
BEGIN
  IF coalesce(segment_overlap, 0) = 0 THEN
    RETURN QUERY SELECT h.* FROM unnest(hits) AS h;
    RETURN;
  END IF;
  _names := ARRAY(SELECT h.vector_store FROM unnest(hits) AS h
                  WHERE h.segment_number IS NOT NULL AND h.document_key IS NOT NULL);
  SELECT o.ordered, o.untrusted INTO _ordered, _untrusted FROM ml_rag._untrusted_last(stores) AS o;
  IF _untrusted > 0 THEN
    _untrusted := (SELECT count(DISTINCT s.vector_store) FROM unnest(stores) AS s
                   JOIN unnest(hits) AS h ON h.vector_store = s.vector_store WHERE s.found = 'untrusted');
  END IF;
  FOREACH _store IN ARRAY _ordered LOOP
    CONTINUE WHEN _store.segment_number IS NULL OR coalesce(_store.document_id, _store.document_name) IS NULL
      OR _store.vector_store <> ALL (_names);
    _is_untrusted := coalesce(_store.found = 'untrusted', false);
    _until := NULL;
    IF _is_untrusted THEN
      SELECT s.ends, s.untrusted, s.until INTO _ends, _untrusted, _until FROM ml_rag._share(_ends, _untrusted) AS s;
      IF _until IS NULL THEN
        _late := _late || _store.vector_store;
        CONTINUE;
      END IF;
    END IF;
    BEGIN
      _condition := '';
      _most := NULL;
      _lock_timeout := NULL;
      IF _is_untrusted THEN
        _lock_timeout := ml_rag._limit_wait(100);
        _condition := ml_rag._untrusted_condition(_store, _until);
      ELSIF _store.found = 'trusted' AND cardinality(stores) > 1 THEN
        _lock_timeout := ml_rag._limit_wait(1000);
      END IF;
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
      _texts := NULL;
      IF _is_untrusted THEN
        _most := (SELECT sum(r.last - r.first + 1) FROM unnest(_ranges.first, _ranges.last) AS r (first, last));
      END IF;
      _rows := 0;
      FOR _row IN
        SELECT n.range, n.segment FROM ml_rag._neighbours(_store, _ranges.documents, _ranges.first, _ranges.last,
          _condition, _most + 1) AS n
      LOOP
        _rows := _rows + 1;
        IF _rows > _most THEN
          RAISE EXCEPTION USING ERRCODE = '54000', MESSAGE = 'several segments have one number';
        ELSIF clock_timestamp() > _until THEN
          PERFORM ml_rag._out_of_time();
        END IF;
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
        -- else it would be a long text for all that comes after
        _segment[_ranges.best[i]] := CASE WHEN NOT _is_untrusted OR octet_length(_texts[i]) <= 100000 THEN _texts[i] END;
        _distance[_ranges.best[i]] := _ranges.distance[i];
      END LOOP;
      IF _lock_timeout IS NOT NULL THEN
        PERFORM set_config('lock_timeout', _lock_timeout, true);
      END IF;
    EXCEPTION WHEN OTHERS THEN
      IF coalesce(_store.found, 'named') = 'named' OR cardinality(stores) = 1 OR SQLSTATE = '40001' THEN
        RAISE;
      END IF;
      GET STACKED DIAGNOSTICS _detail = PG_EXCEPTION_DETAIL, _hint = PG_EXCEPTION_HINT;
      _failures := _failures || (ml_rag._failure(_store.vector_store, SQLSTATE, SQLERRM, _detail, _hint)
        || jsonb_build_object('warning', format('the neighbours of segments of "%s" cannot be read', _store.vector_store),
          'skipped', format('%s: %s.', SQLSTATE, rtrim(left(SQLERRM, 500), '.')),
          'warning_hint', 'Its segments stand as they were found; "segment_overlap": 0 asks for no neighbours.'));
    END;
  END LOOP;
  IF cardinality(_failures) > 0 OR cardinality(_late) > 0 THEN
    PERFORM ml_rag._warn_of_failures(_failures, _late);
  END IF;
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
