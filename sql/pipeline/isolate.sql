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
-- Errors: 54000
BEGIN
  RAISE EXCEPTION USING ERRCODE = '54000', MESSAGE = 'reading the store took too long',
    DETAIL = format('Stores of untrusted owners share %s ms (setting "untrusted_ms").', ml_rag._get_setting('untrusted_ms'));
END
$$;

CREATE FUNCTION ml_rag._is_small(target text, type regtype, most integer) RETURNS text
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$
-- purpose: the condition that a value (target, a column reference of that type) is null or small, without making it large
-- most: bytes of a text. Others take 20 kB as stored, and as JSON 100 kB when unpacked: of a text the length is known
-- without unpacking it, of JSON it is taken from the value, as its text can be thousands of times longer.
BEGIN
  RETURN format(CASE
    WHEN type IN ('text'::regtype, 'varchar'::regtype, 'bpchar'::regtype)
      THEN '(pg_catalog.octet_length(%1$s) OPERATOR(pg_catalog.>) %2$s) IS NOT TRUE'
    ELSE 'CASE WHEN %1$s IS NULL THEN true '
      'WHEN pg_catalog.pg_column_size(%1$s) OPERATOR(pg_catalog.>) 20000 THEN false '
      'WHEN pg_catalog.pg_column_compression(%1$s) IS NULL THEN true ELSE '
      || CASE type
         WHEN 'json'::regtype THEN 'pg_catalog.octet_length(%1$s::pg_catalog.text) OPERATOR(pg_catalog.<=) 100000'
         WHEN 'jsonb'::regtype THEN 'pg_catalog.pg_column_size(%1$s OPERATOR(pg_catalog.||) ''{}''::pg_catalog.jsonb)'
           ' OPERATOR(pg_catalog.<=) 100000'
         ELSE 'false' END || ' END' END, target, most);
END
$$;

CREATE FUNCTION ml_rag._untrusted_condition(store ml_rag.store, until timestamptz, condition text DEFAULT '') RETURNS text
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: the condition (empty or beginning with AND) on the rows t of a store of an untrusted owner, with its limits
-- The clock stands first, and what is compared
-- behind it, that there is a segment too: the planner would put what looks cheap before it, and rows that fail there would
-- never meet the clock. Left out are rows that would burden all that comes after: segments and metadata of more than 100 kB,
-- names of more than 20 kB, and of all columns that are compared those that take more than 20 kB.
-- Reads: the catalog
-- Errors: 55000 no longer what discovery has found, or of types that are not simple; 54000 too large
DECLARE
  _most numeric := ml_rag._get_setting('untrusted_mb')::numeric;
  _size numeric;
  _column name;
BEGIN
  PERFORM ml_rag._lock_plain(store.relation);
  _column := (
    SELECT a.attname FROM pg_attribute AS a
    WHERE a.attrelid = store.relation AND NOT a.attisdropped
      AND a.attname = ANY (ARRAY[store.segment, store.document_name, store.document_id, store.metadata])
      AND a.atttypid <> ALL ('{text,varchar,bpchar,name,boolean,smallint,integer,bigint,numeric,real,double precision,oid,'
        'uuid,date,time,timetz,timestamp,timestamptz,interval,inet,cidr}'::regtype[])
      AND NOT (a.attname = store.metadata AND a.atttypid IN ('json'::regtype, 'jsonb'::regtype))
    ORDER BY 1 LIMIT 1);
  IF _column IS NOT NULL THEN
    RAISE EXCEPTION USING ERRCODE = '55000', MESSAGE = format('the type of its column %I is not a simple one', _column),
      DETAIL = 'A short value of other types, such as an array of numbers, can be a text of hundreds of megabytes.';
  END IF;
  -- what comes before the first row, such as the bitmap of an index, no clock can end
  _size := (SELECT sum(pg_total_relation_size(p.oid)) FROM unnest(ml_rag._parts(store.relation)) AS p (oid));
  IF _size > _most * 1048576 THEN
    RAISE EXCEPTION USING ERRCODE = '54000', MESSAGE = 'the store is too large',
      DETAIL = format('It has %s MB; stores of untrusted owners are searched up to %s MB (setting "untrusted_mb").',
        round(_size / 1048576), _most);
  END IF;
  -- not as the text of a time: abbreviations of time zones, which some settings of DateStyle write, are read otherwise
  RETURN format(' AND CASE WHEN pg_catalog.clock_timestamp() OPERATOR(pg_catalog.<) pg_catalog.to_timestamp(%s)'
      ' THEN t.%I IS NOT NULL AND ', extract(epoch FROM until), store.segment)
    || (
      SELECT coalesce(string_agg(ml_rag._is_small(format('t.%I', a.attname), a.atttypid,
        CASE a.attname WHEN store.segment THEN 100000 ELSE 20000 END), ' AND '), 'true')
      FROM pg_attribute AS a
      WHERE a.attrelid = store.relation AND a.attnum > 0 AND a.attlen < 0 AND NOT a.attisdropped AND (
        a.attname = ANY (ARRAY[store.segment, store.document_name, store.document_id, store.metadata])
        -- filters can name any column; a name that begins with that of another one brings that in, too
        OR a.attname <> store.segment_embedding AND strpos(condition, format('t.%I', a.attname)) > 0))
    || condition || ' ELSE ml_rag._out_of_time() END';
END
$$;

CREATE FUNCTION ml_rag._has_values(store ml_rag.store, columns name[]) RETURNS text
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$
-- purpose: the condition on the rows t of a store that these columns hold something
-- Of a store of an untrusted owner nothing: the condition of ml_rag._untrusted_condition says so, behind the clock.
BEGIN
  RETURN CASE WHEN store.found = 'untrusted' THEN 'true'
    ELSE format(repeat('t.%I IS NOT NULL AND ', cardinality(columns) - 1) || 't.%I IS NOT NULL', VARIADIC columns) END;
END
$$;

CREATE FUNCTION ml_rag._sorts_ahead(relation oid) RETURNS boolean
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path FROM CURRENT
-- see ml_rag._index_needs
SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off
AS $$
-- purpose: whether an index may sort all rows before it gives the first one, which no clock could end: an IVFFlat index
-- can have a single list
-- Reads: the catalog
DECLARE
  _part oid;
BEGIN
  FOREACH _part IN ARRAY ml_rag._parts(relation) LOOP
    IF EXISTS (
      SELECT FROM pg_index AS x JOIN pg_class AS i ON i.oid = x.indexrelid JOIN pg_am AS a ON a.oid = i.relam
      WHERE x.indrelid = _part AND a.amname = 'ivfflat') THEN
      RETURN true;
    END IF;
  END LOOP;
  RETURN false;
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
-- skipped (the reason), warning_detail, warning_hint. Of many, which anybody can plant, the last ones are named together.
DECLARE
  _most CONSTANT integer := 20;
  _failure jsonb;
BEGIN
  FOREACH _failure IN ARRAY coalesce(failures[1:_most], '{}') LOOP
    RAISE WARNING USING ERRCODE = '01000',
      MESSAGE = coalesce(_failure ->> 'warning', format('"%s" cannot be searched; ignored', _failure ->> 'store')),
      DETAIL = CASE WHEN _failure ? 'warning' THEN coalesce(_failure ->> 'warning_detail', _failure ->> 'skipped')
                    ELSE concat(format('%s: %s.', _failure ->> 'sqlstate', rtrim(_failure ->> 'message', '.')),
                      ' ' || (_failure ->> 'detail')) END,
      HINT = CASE WHEN _failure ? 'warning' THEN _failure ->> 'warning_hint'
                  ELSE 'Leave it out with "exclude_vector_store". To get its error instead, name it with its schema in "vector_store".' END;
  END LOOP;
  IF cardinality(failures) > _most THEN
    RAISE WARNING USING ERRCODE = '01000',
      MESSAGE = format('%s more vector stores cannot be searched; ignored', cardinality(failures) - _most),
      DETAIL = (SELECT string_agg(f ->> 'store', ', ') FROM unnest(failures[_most + 1:2 * _most]) AS f)
        || CASE WHEN cardinality(failures) > 2 * _most THEN ', ….' ELSE '.' END,
      HINT = 'Option "explain" says why of each; setting "searched_owners" leaves out those of some roles.';
  END IF;
  IF cardinality(late) > 0 THEN
    RAISE WARNING USING ERRCODE = '01000',
      MESSAGE = format('time ran out before vector stores of untrusted owners were searched: %s; ignored', cardinality(late)),
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
