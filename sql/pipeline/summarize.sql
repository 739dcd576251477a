-- summarize: whole documents: their segments in document order (backend/answer.py writes their summary).

CREATE FUNCTION ml_rag._read_bytes(segment text, names text, metadata jsonb) RETURNS bigint
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE AS $$
-- purpose: what a segment counts of those that are read at once; of what comes with its text a quarter
BEGIN
  RETURN octet_length(segment) + (octet_length(names) + coalesce(octet_length(metadata::text), 0)) / 4;
END
$$;

CREATE FUNCTION ml_rag._read_documents(request ml_rag.request, stores ml_rag.store[], OUT hits ml_rag.hit[],
  OUT skipped text[])
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE AS $$
-- purpose: the segments of all stores that the options leave, in document order; skipped: stores that were
-- left out
-- Reads: the stores, as the caller  Errors: 54000 more than can be summarized
DECLARE
  _most CONSTANT integer := 10000;
  _longest CONSTANT bigint := 16000000;
  _is_only boolean := cardinality(stores) = 1;
  _store ml_rag.store;
  _former_wait text;
  _context text;
  _detail text;
  _hint text;
  _is_of_server boolean;
  _failure jsonb;
  _failures jsonb[] := '{}';
  _filter record;
  _name text;
  _id text;
  _has_integer_id boolean;
  _hit ml_rag.hit;
  _found ml_rag.hit[];
BEGIN
  hits := '{}';
  FOREACH _store IN ARRAY stores LOOP
    BEGIN
      _former_wait := NULL;
      IF _store.found = 'trusted' AND NOT _is_only THEN
        _former_wait := ml_rag._limit_wait();
      END IF;
      PERFORM ml_rag._hold_found(_store.relation) WHERE _store.found = 'trusted';
      -- no shard comes or goes from here on
      PERFORM ml_rag._hold(ARRAY[c.oid]) FROM pg_class AS c
      WHERE c.oid = _store.relation AND c.relkind = 'p' AND _store.found IS DISTINCT FROM 'trusted';
      PERFORM ml_rag._warn_of_unknown_keys(_store, request.options -> 'filters');
      _filter := ml_rag.filter(_store, request.options);
      _name := ml_rag._document_name(_store);
      _id := CASE WHEN _store.document_id IS NULL THEN 'NULL' ELSE format('t.%I', _store.document_id) END;
      _has_integer_id := coalesce(_store.document_id_type IN ('smallint', 'integer', 'bigint'), false);
      _found := '{}';
      -- by document and number, row by row, until they are too many, so that no more than that is in memory;
      -- metadata that was compressed is not unpacked before the sort, and no row after too many
      FOR _hit IN EXECUTE format(
        'SELECT %L::text, s.name, %s, %s, s.number, s.segment, NULL::numeric, s.metadata, NULL::float8, '
        'NULL::float8, NULL::float8, '
        'NULL::text, NULL::bigint, NULL::bigint, NULL::text, NULL::numeric '
        'FROM (SELECT s.*, sum(ml_rag._read_bytes(s.segment, concat(s.name, s.id), s.metadata)) OVER ('
        'ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS before '
        'FROM (SELECT s.name, s.id, s.number, s.segment, ml_rag._as_jsonb(s.metadata) AS metadata '
        'FROM (SELECT %s AS name, %s AS id, %s::bigint AS number, t.%I::text AS segment, %s AS metadata '
        'FROM %s AS t WHERE t.%I IS NOT NULL%s ORDER BY (%s) COLLATE "C", %s, %s LIMIT $2) AS s '
        'OFFSET 0) AS s) AS s '
        'WHERE coalesce(s.before, 0) <= $4',
        _store.vector_store, CASE WHEN _has_integer_id THEN 's.id::bigint' ELSE 'NULL::bigint' END,
        CASE WHEN _store.document_id IS NULL THEN 's.name' ELSE 's.id::text' END, _name, _id,
        CASE WHEN _store.segment_number IS NULL THEN 'NULL' ELSE format('t.%I', _store.segment_number) END,
        _store.segment,
        CASE WHEN _store.metadata IS NULL THEN 'NULL::jsonb' ELSE format('t.%I', _store.metadata) END,
        ml_rag._rows_of(_store), _store.segment, _filter.condition, _name,
        CASE WHEN _has_integer_id THEN _id ELSE format('(%s)::text COLLATE "C"', _id) END,
        CASE WHEN _store.segment_number IS NULL THEN 'NULL::bigint'
          ELSE format('(t.%I)::bigint', _store.segment_number) END)
        USING NULL::text, _most + 1, _filter.arguments, _longest
      LOOP
        _found := array_append(_found, _hit);
      END LOOP;
      hits := hits || _found;
      PERFORM set_config('lock_timeout', _former_wait, true) WHERE _former_wait IS NOT NULL;
    EXCEPTION WHEN query_canceled OR assert_failure OR OTHERS THEN
      GET STACKED DIAGNOSTICS _context = PG_EXCEPTION_CONTEXT, _detail = PG_EXCEPTION_DETAIL,
        _hint = PG_EXCEPTION_HINT;
      _is_of_server := ml_rag._is_of_server(_context, ml_rag._relation_name(_store.relation));
      _failure := ml_rag._shard_failure(_store, SQLSTATE, SQLERRM, _detail, _is_of_server, true);
      IF coalesce(_store.found, 'named') = 'named' OR _is_only THEN
        PERFORM ml_rag._raise(_failure);
        RAISE;
      ELSIF _failure IS NULL AND NOT _is_of_server AND SQLSTATE IN ('57014', '40001') THEN
        RAISE;
      END IF;
      _failures := _failures || coalesce(_failure,
        ml_rag._failure(_store.vector_store, SQLSTATE, SQLERRM, _detail, _hint));
    END;
    IF cardinality(hits) > _most OR (
      SELECT sum(ml_rag._read_bytes(h.segment, concat(h.document_name, h.document_key), h.metadata))
      FROM unnest(hits) AS h) > _longest THEN
      RAISE EXCEPTION USING ERRCODE = '54000', MESSAGE = 'the documents are too long to be read as a whole',
        DETAIL = format('At most %s segments of %s bytes together can be summarized; of metadata and names '
          'a quarter counts.', _most, _longest),
        HINT = 'Name fewer documents in "document_name", or leave segments out with "filters".';
    END IF;
  END LOOP;
  IF cardinality(_failures) > 0 THEN
    PERFORM ml_rag._warn_of_failures(_failures);
  END IF;
  skipped := ARRAY(SELECT f ->> 'store' FROM unnest(_failures) AS f);
END
$$;
