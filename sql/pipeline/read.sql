-- read: whole documents, from end to end

CREATE FUNCTION ml_rag._segments_of(store ml_rag.store, filter ml_rag.row_filter, most integer, longest bigint)
RETURNS ml_rag.hit[]
LANGUAGE plpgsql STABLE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: the segments of one store that a filter leaves, by document and number, until there are more than most, or they have
-- more than longest bytes together
-- Reads: the store, as the caller
DECLARE
  _name text := ml_rag._document_name(store);
  _id text := CASE WHEN store.document_id IS NULL THEN 'NULL' ELSE format('t.%I', store.document_id) END;
  _has_integer_id boolean := coalesce(store.document_id_type IN ('smallint', 'integer', 'bigint'), false);
  _hit ml_rag.hit;
  _hits ml_rag.hit[] := '{}';
  _n integer := 0;
  _bytes bigint := 0;
BEGIN
  -- row by row, so that no more than that is in memory
  FOR _hit IN EXECUTE format(
    'SELECT %L::text, s.name, %s, %s, s.number, s.segment, NULL::numeric, s.metadata, NULL::float8, NULL::float8, NULL::float8, '
    'NULL::text, NULL::bigint, NULL::bigint FROM (SELECT %s AS name, %s AS id, %s::bigint AS number, t.%I::text AS segment, '
    '%s AS metadata FROM %s AS t WHERE t.%I IS NOT NULL%s ORDER BY (%s) COLLATE "C", %s, %s LIMIT $2) AS s',
    store.vector_store, CASE WHEN _has_integer_id THEN 's.id::bigint' ELSE 'NULL::bigint' END,
    CASE WHEN store.document_id IS NULL THEN 's.name' ELSE 's.id::text' END, _name, _id,
    CASE WHEN store.segment_number IS NULL THEN 'NULL' ELSE format('t.%I', store.segment_number) END, store.segment,
    CASE WHEN store.metadata IS NULL THEN 'NULL::jsonb' ELSE format('to_jsonb(t.%I)', store.metadata) END, ml_rag._rows_of(store), store.segment, filter.condition, _name,
    CASE WHEN _has_integer_id THEN _id ELSE format('(%s)::text COLLATE "C"', _id) END,
    CASE WHEN store.segment_number IS NULL THEN 'NULL::bigint' ELSE format('(t.%I)::bigint', store.segment_number) END)
    USING NULL::text, most + 1, filter.arguments
  LOOP
    _n := _n + 1;
    _hits[_n] := _hit;
    _bytes := _bytes + octet_length(_hit.segment);
    EXIT WHEN _bytes > longest;
  END LOOP;
  RETURN _hits;
END
$$;
