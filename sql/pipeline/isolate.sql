-- isolate: what keeps a store that a call does not name from failing the call or holding it up.
--
-- Such a store is read in a block of its own and without a long wait for a lock. What goes wrong there leaves it out, with a
-- warning. A store of an untrusted owner is also read against the clock, row by row, since PL/pgSQL has no timeout for a
-- statement.

CREATE FUNCTION ml_rag._untrusted_last(stores ml_rag.store[], OUT ordered ml_rag.store[], OUT untrusted integer)
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$
-- purpose: the stores in the order in which they are read, and how many of them are of untrusted owners
DECLARE
  _store ml_rag.store;
  _last ml_rag.store[] := '{}';
BEGIN
  IF cardinality(stores) = 1 THEN
    ordered := stores;
    untrusted := coalesce(stores[1].found = 'untrusted', false)::integer;
    RETURN;
  END IF;
  ordered := '{}';
  FOREACH _store IN ARRAY coalesce(stores, '{}') LOOP
    IF _store.found = 'untrusted' THEN
      _last := _last || _store;
    ELSE
      ordered := ordered || _store;
    END IF;
  END LOOP;
  ordered := ordered || _last;
  untrusted := cardinality(_last);
END
$$;

CREATE FUNCTION ml_rag._share(INOUT ends timestamptz, INOUT untrusted integer, OUT until timestamptz)
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: until when the next store of an untrusted owner may be read; null where no time is left
-- ends: when the time of all of them ends; null before the first. untrusted: how many are still to be read. Each has an
-- equal share, but not less than the 100 ms that any small one takes; what one does not use is for those after it.
-- Calls: ml_rag._get_setting
DECLARE
  _now timestamptz := clock_timestamp();
BEGIN
  ends := coalesce(ends, _now + make_interval(secs => ml_rag._get_setting('untrusted_ms')::numeric / 1000));
  IF ends > _now THEN
    until := least(ends, _now + greatest('100 ms', (ends - _now) / greatest(1, untrusted)));
  END IF;
  untrusted := untrusted - 1;
END
$$;

CREATE FUNCTION ml_rag._out_of_time() RETURNS boolean
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$
BEGIN
  RAISE EXCEPTION USING ERRCODE = '54000', MESSAGE = 'reading the store took too long',
    DETAIL = format('Stores of untrusted owners share %s ms (setting "untrusted_ms").', ml_rag._get_setting('untrusted_ms'));
END
$$;

CREATE FUNCTION ml_rag._is_text(store ml_rag.store, "column" name) RETURNS boolean
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$
-- purpose: whether a column is of a type whose length is known without reading the value  Reads: the catalog
BEGIN
  RETURN EXISTS (SELECT FROM pg_attribute AS a WHERE a.attrelid = store.relation AND a.attname = "column"
                 AND NOT a.attisdropped AND a.atttypid IN ('text'::regtype, 'varchar'::regtype));
END
$$;

CREATE FUNCTION ml_rag._untrusted_condition(store ml_rag.store, until timestamptz, condition text DEFAULT '') RETURNS text
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: the condition (empty or beginning with AND) on the rows t of a store of an untrusted owner, with its limits
-- The clock stands first, and what is compared behind it: the planner would put what looks cheap before it. Left out are
-- rows that would burden all that comes after: segments and metadata of more than 100 kB, names of more than 20 kB.
-- Calls: ml_rag._is_plain, ml_rag._parts, ml_rag._get_setting, ml_rag._is_text  Reads: the catalog
-- Errors: 55000 no longer what discovery has found, 54000 too large
DECLARE
  _most numeric := ml_rag._get_setting('untrusted_mb')::numeric;
  _size numeric;
BEGIN
  -- once more, as near to the reading as can be
  IF NOT ml_rag._is_plain(store.relation) THEN
    RAISE EXCEPTION USING ERRCODE = '55000', MESSAGE = 'the table was changed during the call';
  END IF;
  -- what comes before the first row, such as the bitmap of an index, no clock can end
  _size := (SELECT sum(pg_total_relation_size(p.oid)) FROM unnest(ml_rag._parts(store.relation)) AS p (oid));
  IF _size > _most * 1048576 THEN
    RAISE EXCEPTION USING ERRCODE = '54000', MESSAGE = 'the store is too large',
      DETAIL = format('It has %s MB; stores of untrusted owners are searched up to %s MB (setting "untrusted_mb").',
        round(_size / 1048576), _most);
  END IF;
  RETURN format(' AND CASE WHEN pg_catalog.clock_timestamp() OPERATOR(pg_catalog.<) %L::pg_catalog.timestamptz THEN ', until)
    || (
      -- a value of 20 kB may be megabytes before it was compressed; of a text the length is known without unpacking it
      SELECT string_agg(format(CASE WHEN ml_rag._is_text(store, c.name)
          THEN '(pg_catalog.octet_length(t.%1$I) OPERATOR(pg_catalog.>) %2$s) IS NOT TRUE'
          ELSE 'CASE WHEN t.%1$I IS NULL THEN true '
            'WHEN pg_catalog.pg_column_size(t.%1$I) OPERATOR(pg_catalog.>) 20000 THEN false '
            'WHEN pg_catalog.pg_column_compression(t.%1$I) IS NULL THEN true '
            'ELSE pg_catalog.octet_length(t.%1$I::pg_catalog.text) OPERATOR(pg_catalog.<=) 100000 END' END,
          c.name, CASE c.name WHEN store.segment THEN 100000 ELSE 20000 END), ' AND ')
      FROM unnest(ARRAY[store.segment, store.document_name, store.document_id, store.metadata]) AS c (name)
      WHERE c.name IS NOT NULL)
    || condition || ' ELSE ml_rag._out_of_time() END';
END
$$;

CREATE FUNCTION ml_rag._sorts_ahead(relation oid) RETURNS boolean
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$
-- purpose: whether an index may sort all rows before it gives the first one, which no clock could end: an IVFFlat index
-- can have a single list  Calls: ml_rag._parts
BEGIN
  RETURN EXISTS (
    SELECT FROM pg_index AS x JOIN pg_class AS i ON i.oid = x.indexrelid JOIN pg_am AS a ON a.oid = i.relam
    WHERE x.indrelid = ANY (ml_rag._parts(relation)) AND a.amname = 'ivfflat');
END
$$;

CREATE FUNCTION ml_rag._failure(store text, sqlstate text, message text, detail text, hint text) RETURNS jsonb
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$
-- purpose: the error of a store as ml_rag._raise and ml_rag._warn_of_failures take it
BEGIN
  RETURN jsonb_strip_nulls(jsonb_build_object('store', store, 'sqlstate', sqlstate, 'message', left(message, 500),
    'detail', left(nullif(detail, ''), 500), 'hint', left(nullif(hint, ''), 500)));
END
$$;

CREATE FUNCTION ml_rag._warn_of_failures(failures jsonb[], late text[]) RETURNS void
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$
-- purpose: say which stores were left out, and why; late: for lack of time. A failure may bring its own words: warning,
-- skipped (the reason), warning_detail, warning_hint
DECLARE
  _failure jsonb;
BEGIN
  FOREACH _failure IN ARRAY coalesce(failures, '{}') LOOP
    RAISE WARNING USING ERRCODE = '01000',
      MESSAGE = coalesce(_failure ->> 'warning', format('"%s" cannot be searched; ignored', _failure ->> 'store')),
      DETAIL = CASE WHEN _failure ? 'warning' THEN coalesce(_failure ->> 'warning_detail', _failure ->> 'skipped')
                    ELSE concat(format('%s: %s.', _failure ->> 'sqlstate', rtrim(_failure ->> 'message', '.')),
                      ' ' || (_failure ->> 'detail')) END,
      HINT = CASE WHEN _failure ? 'warning' THEN _failure ->> 'warning_hint'
                  ELSE 'Name it with its schema in "vector_store", or leave it out with "exclude_vector_store".' END;
  END LOOP;
  IF cardinality(late) > 0 THEN
    RAISE WARNING USING ERRCODE = '01000',
      MESSAGE = format('no time was left for %s vector stores of untrusted owners; ignored', cardinality(late)),
      DETAIL = format('Left out: %s%s. All of them share %s ms (setting "untrusted_ms").',
        array_to_string(late[1:20], ', '), CASE WHEN cardinality(late) > 20 THEN ', …' END,
        ml_rag._get_setting('untrusted_ms')),
      HINT = 'Name those you want with their schemas in "vector_store".';
  END IF;
END
$$;

CREATE FUNCTION ml_rag._explain_failures(failures jsonb[], late text[]) RETURNS jsonb
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$
-- purpose: stores that were left out, as option explain tells of them: {vector_store: {"skipped": why}}
BEGIN
  RETURN coalesce((
    SELECT jsonb_object_agg(s.store, jsonb_build_object('skipped', s.why))
    FROM (
      SELECT f ->> 'store', coalesce(f ->> 'skipped',
        format('%s: %s.', f ->> 'sqlstate', rtrim(f ->> 'message', '.')))
      FROM unnest(failures) AS f
      UNION ALL SELECT l, 'No time was left for it.' FROM unnest(late) AS l) AS s (store, why)), '{}');
END
$$;
