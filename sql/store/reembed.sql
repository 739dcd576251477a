-- reembed: another embedding model for a vector store that stays in use; docs/reembed.md tells it as a whole.
-- A new column beside the old one is filled batch by batch, follows the table by a trigger, and takes the old one's
-- place in one short transaction. What has been done stands in the table itself: the new column, its comment, its rows.

CREATE FUNCTION ml_rag._later_trigger(store regclass, name text, disabled boolean DEFAULT false) RETURNS name
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$
-- purpose: the last trigger that can change a row after the one of that name has seen it; null = none. disabled: also those
BEGIN
  RETURN (
    SELECT t.tgname FROM pg_trigger AS t
    -- for each row, before, update (the catalog's bits)
    WHERE t.tgrelid = store AND t.tgtype & 19 = 19 AND NOT t.tgisinternal AND (disabled OR t.tgenabled <> 'D')
      AND t.tgname > name::name AND t.tgfoid <> 'ml_rag._outdate_embedding()'::regprocedure
    ORDER BY t.tgname DESC LIMIT 1);
END
$$;

CREATE FUNCTION ml_rag._warn_of_subscribers(store regclass, next name, type text) RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$
-- purpose: a logical replication stops at the first row whose new column the subscriber's table lacks
-- A publication with a list of columns does not send the new one.  Calls: ml_rag._full_name
DECLARE
  _publications text;
BEGIN
  SELECT string_agg(quote_ident(p.pubname), ', ' ORDER BY p.pubname) INTO _publications
  FROM pg_publication AS p
  WHERE EXISTS (SELECT FROM pg_get_publication_tables(p.pubname) AS t WHERE t.relid = store)
    AND NOT EXISTS (SELECT FROM pg_publication_rel AS r
                    WHERE r.prpubid = p.oid AND r.prrelid = store AND r.prattrs IS NOT NULL);
  IF _publications IS NOT NULL THEN
    RAISE WARNING USING ERRCODE = '01000',
      MESSAGE = format('subscribers of "%s" need its new column', store),
      DETAIL = format('It is in publication %s. The subscription of a table without column %I stops, and keeps the '
        'write-ahead log here until it goes on.', _publications, next),
      HINT = format('On each subscriber: ALTER TABLE %s ADD COLUMN %I %s; docs/reembed.md has the rest.',
        ml_rag._full_name(store), next, type);
  END IF;
END
$$;

CREATE FUNCTION ml_rag._outdate_embedding() RETURNS trigger
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: a text that has changed has no new embedding yet
-- It runs as whoever writes the table and touches nothing but the row; any owner may make triggers of it.
BEGIN
  RETURN jsonb_populate_record(NEW, jsonb_build_object(TG_ARGV[0], NULL));
END
$$;

CREATE FUNCTION ml_rag._reembedding(store regclass, OUT next name, OUT model_id text, OUT follows boolean,
  OUT overtaken_by name)
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$
-- purpose: the column that is being filled, of which model, whether its trigger has been there and on, and which other
-- one runs after it; null = none  Calls: ml_rag._later_trigger
DECLARE
  _trigger name;
BEGIN
  SELECT a.attname, substring(col_description(store, a.attnum) FROM '^ml_rag\.reembed MODEL=(\S+)'), (
    SELECT t.tgname FROM pg_trigger AS t
    WHERE t.tgrelid = store AND t.tgname ~ format('_ml_rag_reembed_%s$', a.attnum) AND t.tgenabled = 'A'
      AND t.tgfoid = 'ml_rag._outdate_embedding()'::regprocedure LIMIT 1)
  INTO next, model_id, _trigger
  FROM pg_attribute AS a
  WHERE a.attrelid = store AND a.attnum > 0 AND NOT a.attisdropped
    AND col_description(store, a.attnum) ~ '^ml_rag\.reembed MODEL='
  ORDER BY a.attnum LIMIT 1;
  overtaken_by := ml_rag._later_trigger(store, _trigger);
  follows := _trigger IS NOT NULL AND overtaken_by IS NULL;
END
$$;

CREATE FUNCTION ml_rag._kept_indexes(store regclass, column_name name)
RETURNS TABLE (index regclass, name name, definition text, copy bigint)
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$
-- purpose: the indexes of just that column, and each one's definition for a column to be filled in for %1$I; copy: 1, 2, …
-- where several are the same but for their names
-- Others that use the column are not among them: what they would be for another column cannot be told.
BEGIN
  RETURN QUERY
    SELECT k.*, row_number() OVER (PARTITION BY k.definition ORDER BY k.relname)
    FROM (
      SELECT i.oid::regclass, i.relname,
        format('ON %s USING %I (%%1$I %I.%I)%s%s%s', replace(ml_rag._relation_name(store), '%', '%%'), m.amname,
          n.nspname, o.opcname, ' WITH (' || array_to_string(i.reloptions, ', ') || ')',
          ' TABLESPACE ' || quote_ident(s.spcname),
          ' WHERE ' || replace(pg_get_expr(x.indpred, x.indrelid), '%', '%%')) AS definition
      FROM pg_index AS x
      JOIN pg_class AS i ON i.oid = x.indexrelid
      JOIN pg_am AS m ON m.oid = i.relam
      JOIN pg_opclass AS o ON o.oid = x.indclass[0]
      JOIN pg_namespace AS n ON n.oid = o.opcnamespace
      LEFT JOIN pg_tablespace AS s ON s.oid = i.reltablespace
      WHERE x.indrelid = store AND x.indisvalid AND x.indnatts = 1 AND NOT x.indisunique AND x.indexprs IS NULL
        AND x.indkey[0] = (SELECT a.attnum FROM pg_attribute AS a
                           WHERE a.attrelid = store AND a.attname = column_name AND NOT a.attisdropped)
        AND (x.indpred IS NULL OR x.indpred::text !~ format(':varattno %s\M', x.indkey[0]))
    ) AS k
    ORDER BY k.relname;
END
$$;

CREATE FUNCTION ml_rag._check_embedding_column(store regclass, column_name name) RETURNS void
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$
-- purpose: stop where something builds upon the column and would be lost with it
-- Calls: ml_rag._kept_indexes
DECLARE
  _dependents text;
BEGIN
  SELECT string_agg(DISTINCT pg_describe_object(d.classid, d.objid, d.objsubid), ', ') INTO _dependents
  FROM pg_depend AS d
  JOIN pg_attribute AS a ON a.attrelid = d.refobjid AND a.attnum = d.refobjsubid
  WHERE d.refclassid = 'pg_class'::regclass AND d.refobjid = store AND a.attname = column_name AND NOT a.attisdropped
    AND NOT (d.classid = 'pg_class'::regclass AND d.objid IN (
      SELECT k.index FROM ml_rag._kept_indexes(store, column_name) AS k))
    AND NOT (d.classid = 'pg_constraint'::regclass AND EXISTS (
      SELECT FROM pg_constraint AS k WHERE k.oid = d.objid
        AND (k.contype = 'n' OR k.conrelid = store AND k.conname = 'ml_rag_reembed_not_null')));
  IF _dependents IS NOT NULL THEN
    RAISE EXCEPTION USING ERRCODE = '2BP01',
      MESSAGE = format('the embeddings of "%s" cannot be changed because other objects depend on them', store),
      DETAIL = format('On column %I depend: %s.', column_name, _dependents),
      HINT = 'Drop them, and make them again afterwards.';
  END IF;
END
$$;

CREATE FUNCTION ml_rag._check_reembed(store regclass, segment name, embedding name) RETURNS void
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$
-- purpose: whether the vectors of a relation can be changed, and by this caller  Calls: ml_rag._own_table,
-- ml_rag._check_embedding_column
DECLARE
  _why text;
  _hint text;
BEGIN
  PERFORM ml_rag._own_table(store);
  SELECT CASE
    WHEN c.relkind = 'p' OR c.relispartition THEN 'It is partitioned, or a partition.'
    WHEN c.relkind <> 'r' THEN 'It is no ordinary table.'
    WHEN EXISTS (SELECT FROM pg_inherits AS i WHERE c.oid IN (i.inhrelid, i.inhparent)) THEN 'It is one end of an inheritance.'
    END INTO _why
  FROM pg_class AS c WHERE c.oid = store;
  IF _why IS NOT NULL THEN
    _hint := 'Load the documents into a new table with the new model, and let that take this one''s place.';
  ELSIF row_security_active(store) THEN
    _why := 'Row-level security hides rows of it from its owner.';
    _hint := format('ALTER TABLE %s NO FORCE ROW LEVEL SECURITY; it can be forced again afterwards.', store);
  ELSE
    SELECT format('Column %I is generated.', a.attname) INTO _why FROM pg_attribute AS a
    WHERE a.attrelid = store AND a.attname IN (segment, embedding) AND NOT a.attisdropped AND a.attgenerated <> '';
  END IF;
  IF _why IS NOT NULL THEN
    RAISE EXCEPTION USING ERRCODE = '55000', MESSAGE = format('"%s" cannot be re-embedded', store), DETAIL = _why,
      HINT = coalesce(_hint, '');
  END IF;
  SELECT string_agg(format('%I %s', w.name, w.types[1]), ', ') INTO _why
  FROM (VALUES (segment, '{text,character varying}'::text[]), (embedding, '{vector,halfvec}')) AS w (name, types)
  WHERE NOT EXISTS (
    SELECT FROM pg_attribute AS a JOIN pg_type AS t ON t.oid = a.atttypid
    WHERE a.attrelid = store AND a.attname = w.name AND a.attnum > 0 AND NOT a.attisdropped
      AND (format_type(a.atttypid, NULL) = ANY (w.types)
           OR a.atttypid IN ('vector'::regtype, 'halfvec'::regtype) AND t.typname = ANY (w.types)));
  IF _why IS NOT NULL THEN
    RAISE EXCEPTION USING ERRCODE = '22023', MESSAGE = format('table "%s" is not a vector store', store),
      DETAIL = format('Columns missing or of another type: %s.', _why),
      HINT = 'Name its columns in "vector_store_columns": {"segment": …, "segment_embedding": …}.';
  END IF;
  PERFORM ml_rag._check_embedding_column(store, embedding);
END
$$;

CREATE FUNCTION ml_rag._begin_reembed(store regclass, model_id text, options jsonb, call integer) RETURNS jsonb
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: check everything before anything is made; returns the job
-- Calls: ml_rag.parse_options, ml_rag._check_writable, ml_rag._check_reembed, ml_rag._hold_reembed,
-- ml_rag._marked_model, ml_rag._reembedding, ml_rag.embed, ml_rag._warn_of_subscribers, ml_rag._full_name
DECLARE
  _options jsonb := ml_rag.parse_options('reembed', $3);
  _columns jsonb := ml_rag.parse_options('vector_store_columns', _options -> 'vector_store_columns');
  _segment name := coalesce(_columns ->> 'segment', 'segment');
  _embedding name := coalesce(_columns ->> 'segment_embedding', 'segment_embedding');
  _next name;
  _dimensions integer;
  _old record;
  _begun record;
  _type text;
BEGIN
  PERFORM ml_rag._check_writable('a store cannot be re-embedded');
  IF current_setting('transaction_isolation') NOT IN ('read committed', 'read uncommitted') THEN
    -- the switch would not see the rows that others have committed while it waited for the table's lock
    RAISE EXCEPTION USING ERRCODE = '55000', MESSAGE = 'a store cannot be re-embedded at this isolation level',
      DETAIL = format('default_transaction_isolation is %s.', current_setting('transaction_isolation')),
      HINT = 'SET default_transaction_isolation = ''read committed''; and CALL it again.';
  END IF;
  PERFORM ml_rag._check_reembed(store, _segment, _embedding);
  PERFORM ml_rag._hold_reembed(store);
  IF coalesce(model_id, '') = '' OR model_id ~ '[\s,;]' THEN
    RAISE EXCEPTION USING ERRCODE = '22023', MESSAGE = 'model id cannot be used in the marker of a vector store',
      DETAIL = format('Model id %L; it is not empty and has no blanks, commas and semicolons.', model_id);
  END IF;
  SELECT a.attnum, a.attnotnull, a.atttypid::regtype::text AS type,
    ml_rag._marked_model(col_description(store, a.attnum)) AS model_id
  INTO _old
  FROM pg_attribute AS a WHERE a.attrelid = store AND a.attname = _embedding AND NOT a.attisdropped;
  IF _old.model_id IS NULL THEN
    RAISE EXCEPTION USING ERRCODE = '22023',
      MESSAGE = format('column "%s" of table "%s" has no comment that names its embedding model', _embedding, store),
      HINT = format('COMMENT ON COLUMN %s.%I IS ''GENAI_OPTIONS=EMBED_MODEL_ID=…'';', store, _embedding);
  END IF;
  _begun := ml_rag._reembedding(store);
  IF _begun.next IS NOT NULL AND (_begun.model_id <> $2 OR _old.model_id = $2) THEN
    RAISE EXCEPTION USING ERRCODE = '55000', MESSAGE = format('"%s" is being re-embedded with another model', store),
      DETAIL = format('Column %I is filled with vectors of %s.', _begun.next, _begun.model_id),
      HINT = format('Go on with that model, or SELECT ml_rag.abandon_reembed(%L) first.', store::text);
  ELSIF _old.model_id = $2 THEN
    RAISE NOTICE USING MESSAGE = format('"%s" holds vectors of %s already', store, $2);
  ELSE
    -- a first vector tells the dimensions, and whether the model works, before anything is made
    _dimensions := vector_dims(ml_rag.embed('dimensions', $2));
    _type := format('%s(%s)', _old.type, _dimensions);
  END IF;
  IF octet_length(_embedding) > 58 THEN
    RAISE EXCEPTION USING ERRCODE = '22023', MESSAGE = format('the name of column "%s" is too long', _embedding),
      DETAIL = 'The new column gets the same name with "_next" at its end; a name has 63 bytes.';
  END IF;
  _next := concat(_embedding, '_next');

  IF _begun.next IS NOT NULL AND (_begun.next <> _next OR NOT _begun.follows OR _type <> (
      SELECT format_type(a.atttypid, a.atttypmod) FROM pg_attribute AS a
      WHERE a.attrelid = store AND a.attname = _next AND NOT a.attisdropped)) THEN
    RAISE NOTICE USING MESSAGE = format('"%s" is re-embedded from the beginning', store),
      DETAIL = 'What there was is of other dimensions, or its trigger was gone or switched off.';
    _begun.follows := false;
  ELSIF _type IS NOT NULL AND _begun.next IS NULL AND EXISTS (
      SELECT FROM pg_attribute AS a WHERE a.attrelid = store AND a.attname = _next AND NOT a.attisdropped) THEN
    RAISE EXCEPTION USING ERRCODE = '42701', MESSAGE = format('table "%s" has a column "%s" already', store, _next),
      HINT = format('The new vectors need that name for a while: ALTER TABLE %s RENAME COLUMN …;', store);
  END IF;
  IF _type IS NOT NULL AND NOT coalesce(_begun.follows, false) THEN
    PERFORM ml_rag._warn_of_subscribers(store, _next, _type);
  END IF;
  RETURN jsonb_build_object('store', store::oid::bigint, 'name', ml_rag._full_name(store), 'call', $4, 'model', $2, 'former', _old.model_id,
    'same', _type IS NULL, 'begun', _begun.next IS NOT NULL AND _begun.follows, 'segment', _segment, 'embedding', _embedding, 'next', _next, 'type', _type,
    'pending', concat('ml_rag_reembed_', store::oid), 'dimensions', _dimensions, 'not_null', _old.attnotnull, 'batch_size', _options -> 'batch_size',
    'switch', _options -> 'switch', 'lock_seconds', _options -> 'lock_seconds',
    'lock_timeout', (SELECT s.setting::integer FROM pg_settings AS s WHERE s.name = 'lock_timeout'));
END
$$;

CREATE FUNCTION ml_rag._reembed_extent(job jsonb, OUT blocks bigint, OUT rows bigint)
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: how far to read, and about how many rows that is (-1: not known)
BEGIN
  SELECT pg_relation_size(c.oid) / current_setting('block_size')::bigint, c.reltuples::bigint INTO blocks, rows
  FROM pg_class AS c WHERE c.oid = (job ->> 'store')::oid;
END
$$;

CREATE FUNCTION ml_rag._reembed_progress(job jsonb, phase text, done bigint, total bigint, failed bigint) RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- Calls: ml_rag._stage, ml_rag._progress
BEGIN
  PERFORM ml_rag._stage((job ->> 'call')::integer,
    CASE WHEN phase IN ('embedding', 'catching up') THEN 'embed' WHEN phase = 'building index' THEN 'index' ELSE 'switch' END,
    CASE WHEN phase IN ('embedding', 'catching up') THEN job ->> 'model' ELSE '' END);
  PERFORM ml_rag._progress((job ->> 'call')::integer, job ->> 'name', phase, done,
    CASE WHEN total >= 0 THEN greatest(total, done) ELSE -1 END, failed);
END
$$;

CREATE FUNCTION ml_rag._reembed_read(job jsonb, first bigint, last bigint, OUT places text[], OUT texts text[],
  OUT seen bigint)
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: rows without a new embedding in the blocks from first to before last, where they are and their text; how
-- many rows there are  Reads: the store, as the caller
BEGIN
  EXECUTE format($sql$
    SELECT array_agg(t.ctid::text) FILTER (WHERE t.%2$I IS NULL AND t.%3$I ~ '\S'),
      array_agg(t.%3$I::text) FILTER (WHERE t.%2$I IS NULL AND t.%3$I ~ '\S'), count(*)
    FROM %1$s AS t WHERE t.ctid >= $1 AND t.ctid < $2$sql$,
    ml_rag._relation_name((job ->> 'store')::oid), job ->> 'next', job ->> 'segment')
  INTO places, texts, seen USING format('(%s,0)', first)::tid, format('(%s,0)', last)::tid;
END
$$;

CREATE FUNCTION ml_rag._reembed_pending(job jsonb, most integer, OUT places text[], OUT texts text[])
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
-- ml_rag._index_pending has made an index of just these rows
SET enable_seqscan = off
AS $$
-- purpose: rows that have come in since, and those that failed, at most so many  Reads: the store, as the caller
BEGIN
  EXECUTE format($sql$
    SELECT array_agg(n.ctid::text), array_agg(n.segment)
    FROM (SELECT t.ctid, t.%2$I::text AS segment FROM %1$s AS t WHERE t.%3$I IS NULL AND t.%2$I ~ '\S' LIMIT $1) AS n$sql$,
    ml_rag._relation_name((job ->> 'store')::oid), job ->> 'segment', job ->> 'next')
  INTO places, texts USING most;
END
$$;

CREATE FUNCTION ml_rag._reembed_write(job jsonb, places text[], texts text[], vectors vector[], OUT written bigint,
  OUT refused bigint)
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: the new embeddings of rows that still have that text and that nobody else is changing; others come up again
-- Not waiting for a row is what keeps this out of deadlocks with whoever changes many. refused: rows that a trigger of the
-- table kept as they are (or that were changed in this very moment).  Writes: the store, as the caller
BEGIN
  EXECUTE format($sql$
    WITH free AS MATERIALIZED (
      SELECT t.ctid AS place, u.vector FROM unnest($1::tid[], $2, $3) AS u (place, text, vector)
      JOIN %1$s AS t ON t.ctid = u.place
      WHERE t.%2$I IS NULL AND t.%3$I::text COLLATE "C" = u.text
      FOR NO KEY UPDATE OF t SKIP LOCKED
    ), changed AS (
      UPDATE %1$s AS t SET %2$I = f.vector::%4$s FROM free AS f WHERE t.ctid = f.place RETURNING t.%2$I AS vector
    )
    SELECT count(c.vector), (SELECT count(*) FROM free) - count(c.vector) FROM changed AS c$sql$,
    ml_rag._relation_name((job ->> 'store')::oid), job ->> 'next', job ->> 'segment', job ->> 'type')
  INTO written, refused USING places, texts, vectors;
END
$$;

CREATE FUNCTION ml_rag._embed_documents(texts text[], model_id text, OUT vectors vector[], OUT error jsonb)
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: texts to vectors, or the error  Calls: ml_rag._embed
BEGIN
  SELECT o.vectors, o.error INTO vectors, error FROM ml_rag._embed(texts, model_id, 'document') AS o;
EXCEPTION WHEN data_exception THEN
  -- numbers that are none: pgvector is the first to read them
  error := jsonb_build_object('sqlstate', '38000', 'message', 'unexpected reply from the model server',
    'detail', left(SQLERRM, 200));
END
$$;

CREATE FUNCTION ml_rag._reembed_rows(job jsonb, places text[], texts text[], OUT written bigint, OUT failed bigint,
  OUT first_error text, OUT refused bigint)
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: a batch: all at once; where that fails one by one, to find the rows at fault; refused: see _reembed_write
-- What would fail for every row (no model, no server, no memory) ends the call instead.
-- Calls: ml_rag._embed_documents, ml_rag._reembed_write, ml_rag._raise
DECLARE
  _embedded record;
  _wrote record;
  _one record;
BEGIN
  written := 0;
  failed := 0;
  refused := 0;
  _embedded := ml_rag._embed_documents(texts, job ->> 'model');
  IF _embedded.error IS NULL THEN
    _wrote := ml_rag._reembed_write(job, places, texts, _embedded.vectors);
    written := _wrote.written;
    refused := _wrote.refused;
    RETURN;
  ELSIF _embedded.error ->> 'sqlstate' NOT IN ('38000', '22000', '22023') THEN
    PERFORM ml_rag._raise(_embedded.error);
  END IF;
  FOR _one IN SELECT u.place, u.text FROM unnest(places, texts) AS u (place, text) LOOP
    _embedded := ml_rag._embed_documents(ARRAY[_one.text], job ->> 'model');
    IF _embedded.error IS NULL THEN
      _wrote := ml_rag._reembed_write(job, ARRAY[_one.place], ARRAY[_one.text], _embedded.vectors);
      written := written + _wrote.written;
      refused := refused + _wrote.refused;
      CONTINUE;
    ELSIF _embedded.error ->> 'sqlstate' NOT IN ('38000', '22000', '22023') OR written = 0 AND failed >= 10 THEN
      PERFORM ml_rag._raise(_embedded.error);
    END IF;
    failed := failed + 1;
    first_error := coalesce(first_error, format('%s (%s): %s', _embedded.error ->> 'message',
      _embedded.error ->> 'sqlstate', left(_one.text, 60)));
  END LOOP;
END
$$;

-- of the old one's place. Each step waits for the table's lock a little and then lets the others through.

CREATE FUNCTION ml_rag._limit_lock(job jsonb, attempt integer) RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: how long the calling function, which has a SET lock_timeout of its own, waits for a lock: others wait behind
-- it, so that it is little at first, and never more than the option and the caller's own lock_timeout say
BEGIN
  PERFORM set_config('lock_timeout', format('%sms', least(nullif((job ->> 'lock_timeout')::numeric, 0),
    round(1000 * least((job ->> 'lock_seconds')::numeric, 0.5 * 2 ^ least(attempt, 20))))), true);
END
$$;

CREATE FUNCTION ml_rag.abandon_reembed(store regclass) RETURNS boolean
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- Calls: ml_rag._own_table, ml_rag._hold_reembed, ml_rag._reembedding, ml_rag._drop_reembed_triggers  Writes: the table's definition, as the caller
DECLARE
  _relation text;
  _found boolean := false;
  _next name;
BEGIN
  PERFORM ml_rag._own_table(store);
  PERFORM ml_rag._hold_reembed(store);
  _relation := ml_rag._relation_name(store);
  LOOP
    _next := (ml_rag._reembedding(store)).next;
    EXIT WHEN _next IS NULL;
    PERFORM ml_rag._drop_reembed_triggers(store);
    EXECUTE format('ALTER TABLE %s DROP COLUMN %I', _relation, _next);
    _found := true;
  END LOOP;
  RETURN _found;
END
$$;
COMMENT ON FUNCTION ml_rag.abandon_reembed(regclass) IS
$$gives up a re-embedding that has not switched: drops the new column with its vectors and its trigger; for the owner
Returns false where there was none. The store goes on with its old vectors. Errors: 42P01; 42501; 55006 it is running:
cancel that call first.$$;

CREATE FUNCTION ml_rag._begin_column(job jsonb, attempt integer) RETURNS boolean
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
SET lock_timeout = '1s'
AS $$
-- purpose: make column and trigger, unless a call that was stopped has; false where others use the table: try again
-- Calls: ml_rag._limit_lock, ml_rag.abandon_reembed, ml_rag._later_trigger  Writes: column, comment and trigger of the store, as the caller
DECLARE
  _store regclass := (job ->> 'store')::oid;
  _relation text := ml_rag._relation_name(_store);
  _next name := job ->> 'next';
  _trigger text;
  _last text;
BEGIN
  IF (job -> 'begun')::boolean THEN
    RETURN true;
  END IF;
  PERFORM ml_rag._limit_lock(job, attempt);
  PERFORM ml_rag.abandon_reembed(_store);
  EXECUTE format('ALTER TABLE %s ADD COLUMN %I %s', _relation, _next, job ->> 'type');
  EXECUTE format('ALTER TABLE %s ALTER COLUMN %I SET STORAGE %s', _relation, _next, (
    SELECT CASE a.attstorage WHEN 'p' THEN 'PLAIN' WHEN 'e' THEN 'EXTERNAL' WHEN 'm' THEN 'MAIN' ELSE 'EXTENDED' END
    FROM pg_attribute AS a WHERE a.attrelid = _store AND a.attname = job ->> 'embedding' AND NOT a.attisdropped));
  EXECUTE format('COMMENT ON COLUMN %s.%I IS %L', _relation, _next, concat('ml_rag.reembed MODEL=', job ->> 'model'));
  -- its name is the last one, so that it sees what other triggers have made of the row
  _trigger := concat('zz_ml_rag_reembed_', (
    SELECT a.attnum FROM pg_attribute AS a WHERE a.attrelid = _store AND a.attname = _next AND NOT a.attisdropped));
  _last := ml_rag._later_trigger(_store, _trigger, true);
  IF _last IS NOT NULL THEN
    _trigger := concat(_last, substr(_trigger, 3));
    IF octet_length(_trigger) > 63 THEN
      RAISE EXCEPTION USING ERRCODE = '55000', MESSAGE = format('"%s" cannot be re-embedded', _store),
        DETAIL = format('A trigger of ours has to run after "%s", and there is no such name.', _last),
        HINT = format('ALTER TRIGGER %I ON %s RENAME TO …;', _last, _relation);
    END IF;
  END IF;
  EXECUTE format('CREATE TRIGGER %I BEFORE UPDATE ON %s FOR EACH ROW '
    'WHEN (OLD.%I::text COLLATE "C" IS DISTINCT FROM NEW.%3$I::text COLLATE "C") '
    'EXECUTE FUNCTION ml_rag._outdate_embedding(%4$L)', _trigger, _relation, job ->> 'segment', _next);
  -- also for what a logical replication applies
  EXECUTE format('ALTER TABLE %s ENABLE ALWAYS TRIGGER %I', _relation, _trigger);
  RETURN true;
EXCEPTION WHEN lock_not_available OR deadlock_detected THEN
  RETURN false;
END
$$;

CREATE FUNCTION ml_rag._missing_indexes(job jsonb) RETURNS TABLE (name name, definition text)
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$
-- purpose: indexes of the old column that the new one lacks and can have  Calls: ml_rag._kept_indexes
DECLARE
  _store regclass := (job ->> 'store')::oid;
  -- pgvector's limits of hnsw and ivfflat
  _can_have boolean := (job ->> 'dimensions')::integer <= CASE WHEN job ->> 'type' ~ 'halfvec' THEN 4000 ELSE 2000 END;
BEGIN
  RETURN QUERY
    SELECT k.name, k.definition FROM ml_rag._kept_indexes(_store, job ->> 'embedding') AS k
    WHERE _can_have AND (k.definition, k.copy) NOT IN (
      SELECT n.definition, n.copy FROM ml_rag._kept_indexes(_store, job ->> 'next') AS n);
END
$$;

CREATE FUNCTION ml_rag._reembed_index(job jsonb, attempt integer) RETURNS text
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
SET lock_timeout = '1s'
AS $$
-- purpose: build one index that is missing: first that of the rows to be embedded, then what the old column has; returns
-- built, locked (others write to the table: try again) or null, none is missing
-- Nobody can write to the table meanwhile. An index that was built by hand, concurrently, is not missing.
-- Calls: ml_rag._limit_lock, ml_rag._missing_indexes  Writes: an index, as the caller
DECLARE
  _store regclass := (job ->> 'store')::oid;
  _relation text := ml_rag._relation_name(_store);
  _definition text;
BEGIN
  IF NOT EXISTS (SELECT FROM pg_index AS x JOIN pg_class AS i ON i.oid = x.indexrelid
                 WHERE x.indrelid = _store AND x.indisvalid AND i.relname = job ->> 'pending') THEN
    _definition := format('%I ON %s ((1)) WHERE %%1$I IS NULL', job ->> 'pending', replace(_relation, '%', '%%'));
  ELSE
    _definition := (SELECT m.definition FROM ml_rag._missing_indexes(job) AS m LIMIT 1);
  END IF;
  IF _definition IS NOT NULL THEN
    PERFORM ml_rag._limit_lock(job, attempt);
    EXECUTE format('LOCK TABLE ONLY %s IN SHARE MODE', _relation);
    EXECUTE format('CREATE INDEX ' || _definition, job ->> 'next');
    RETURN 'built';
  END IF;
  RETURN NULL;
EXCEPTION WHEN lock_not_available OR deadlock_detected THEN
  RETURN 'locked';
END
$$;

CREATE FUNCTION ml_rag._drop_reembed_triggers(store regclass) RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- Writes: the table's definition, as the caller
DECLARE
  _trigger name;
BEGIN
  FOR _trigger IN
    SELECT t.tgname FROM pg_trigger AS t
    WHERE t.tgrelid = store AND t.tgfoid = 'ml_rag._outdate_embedding()'::regprocedure AND NOT t.tgisinternal
  LOOP
    EXECUTE format('DROP TRIGGER %I ON %s', _trigger, ml_rag._relation_name(store));
  END LOOP;
END
$$;

CREATE FUNCTION ml_rag._replace_column(job jsonb) RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: the new column becomes the store's: name, marker, indexes' names, privileges; takes no time but the lock's
-- Calls: ml_rag._kept_indexes, ml_rag._remark_model, ml_rag._drop_reembed_triggers
-- Writes: the table's definition, as the caller
DECLARE
  _store regclass := (job ->> 'store')::oid;
  _relation text := ml_rag._relation_name(_store);
  _old name := job ->> 'embedding';
  _next name := job ->> 'next';
  _column record;
  _indexes jsonb;
  _privileges jsonb;
  _comment text;
  _row record;
BEGIN
  SELECT a.attnum, a.attnotnull, nullif(a.attstattarget, -1) AS attstattarget, a.attacl INTO _column
  FROM pg_attribute AS a WHERE a.attrelid = _store AND a.attname = _old AND NOT a.attisdropped;
  SELECT jsonb_agg(jsonb_build_object('new', n.name, 'old', k.name)) INTO _indexes
  FROM ml_rag._kept_indexes(_store, _old) AS k
  JOIN ml_rag._kept_indexes(_store, _next) AS n ON n.definition = k.definition AND n.copy = k.copy;
  SELECT jsonb_agg(jsonb_build_object('privilege', g.privilege_type, 'grantable', g.is_grantable,
    'role', CASE g.grantee WHEN 0 THEN 'PUBLIC' ELSE g.grantee::regrole::text END)) INTO _privileges
  FROM aclexplode(_column.attacl) AS g;
  _comment := ml_rag._remark_model(col_description(_store, _column.attnum), job ->> 'model');

  PERFORM ml_rag._drop_reembed_triggers(_store);
  -- more than one where the table comes out of a dump: there it had another number
  EXECUTE (SELECT format('DROP INDEX %s', string_agg(format('%I.%I', n.nspname, i.relname), ', '))
           FROM pg_index AS x JOIN pg_class AS i ON i.oid = x.indexrelid
           JOIN pg_namespace AS n ON n.oid = i.relnamespace
           WHERE x.indrelid = _store AND i.relname ~ '^ml_rag_reembed_\d+$');
  EXECUTE format('ALTER TABLE %s DROP COLUMN %I', _relation, _old);
  EXECUTE format('ALTER TABLE %s RENAME COLUMN %I TO %I', _relation, _next, _old);
  EXECUTE format('COMMENT ON COLUMN %s.%I IS %L', _relation, _old, _comment);
  IF _column.attnotnull THEN
    -- enforced from now on; what is there is checked afterwards, while the table is in use
    EXECUTE format('ALTER TABLE %s ADD CONSTRAINT ml_rag_reembed_not_null CHECK (%I IS NOT NULL) NOT VALID', _relation,
      _old);
  END IF;
  IF _column.attstattarget IS NOT NULL THEN
    EXECUTE format('ALTER TABLE %s ALTER COLUMN %I SET STATISTICS %s', _relation, _old, _column.attstattarget);
  END IF;
  FOR _row IN SELECT i.new, i.old, n.nspname FROM jsonb_to_recordset(_indexes) AS i (new name, old name)
    CROSS JOIN pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace WHERE c.oid = _store
  LOOP
    EXECUTE format('ALTER INDEX %I.%I RENAME TO %I', _row.nspname, _row.new, _row.old);
  END LOOP;
  FOR _row IN SELECT * FROM jsonb_to_recordset(_privileges) AS p (privilege text, grantable boolean, role text) LOOP
    EXECUTE format('GRANT %s (%I) ON %s TO %s %s', _row.privilege, _old, _relation, _row.role,
      CASE WHEN _row.grantable THEN 'WITH GRANT OPTION' END);
  END LOOP;
END
$$;
