-- fill: a column of an embedding, batch by batch: read, embed, write, each in a transaction of its own.

-- What ml_rag.add_embedding works on, from one transaction to the next.
CREATE TYPE ml_rag._embedding_job AS (
  step           text,       -- what comes next: prepare, count, read, embed, write, index; null = it is done
  store          regclass,
  vector_store   text,       -- schema.table, as shown
  call           integer,    -- what ml_rag._begin has returned
  embedding      text,
  column_name    name,
  default_column name,
  segment        name,       -- the column of the texts
  model_id       text,
  type           text,       -- with its dimensions
  starts_anew    boolean,    -- the column is there, and its vectors cannot be relied upon
  index_method   text,       -- the index that is wanted; null = none
  index_class    text,
  index_options  text,
  any_index      boolean,    -- the caller left it open: any index of the column will do
  batch_size     integer,
  lock_seconds   numeric,
  began          timestamptz,
  part           oid,        -- the table that is being read: the store, or a partition of it
  after          tid,        -- the last row that was read
  extent         bigint,     -- blocks of that table
  blocks         bigint,     -- how many of them are read at once
  is_last        boolean,    -- it is read for the last time
  found          bigint,     -- rows that were embedded since it was begun to be read
  places         tid[],      -- a batch
  texts          text[],
  vectors        @vector@.vector[],
  total          bigint,     -- rows to embed, as they were counted
  segments       bigint,     -- rows that were embedded
  failed         bigint,     -- rows that could not be
  first_error    text
);

CREATE FUNCTION ml_rag._tell_embedding(job ml_rag._embedding_job, phase text, stage text, model text DEFAULT '') RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: what a job is at, and how far
DECLARE
  _done bigint := job.segments + job.failed;
BEGIN
  PERFORM ml_rag._stage(job.call, stage, model);
  -- rows that came since they were counted
  PERFORM ml_rag._progress(job.call, job.vector_store, phase, _done,
    CASE WHEN job.total IS NULL THEN -1 ELSE greatest(_done, job.total) END, job.failed);
END
$$;

CREATE FUNCTION ml_rag._read_batch(job ml_rag._embedding_job) RETURNS ml_rag._embedding_job
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
-- some blocks at a time
SET enable_seqscan = off
AS $$
-- purpose: the next rows without an embedding, in the order in which they lie in the table
-- Rows that come, change or are moved meanwhile can lie in blocks that were read before: so a store is read again until
-- little is found, and then once more.  Reads: the store, as the caller
DECLARE
  _job record := job;
  _first bigint;
  _end bigint;
  _n integer;
BEGIN
  IF _job.extent IS NULL THEN
    SELECT min(c.oid) INTO _job.part FROM pg_class AS c
    WHERE c.oid = ANY (ml_rag._parts(_job.store)) AND c.relkind = 'r' AND c.oid > coalesce(_job.part, 0);
    IF _job.part IS NULL AND (_job.is_last OR _job.found = 0) THEN
      _job.step := 'index';
      RETURN _job;
    ELSIF _job.part IS NULL THEN
      _job.is_last := _job.found <= _job.batch_size;
      _job.found := 0;
      _job.failed := 0;
      _job.first_error := NULL;
      RETURN _job;
    END IF;
    _job.extent := pg_relation_size(_job.part) / current_setting('block_size')::bigint;
    _job.after := '(0,0)';
  END IF;
  _first := split_part(substr(_job.after::text, 2), ',', 1)::bigint;
  _end := least(_first + _job.blocks, _job.extent);
  EXECUTE format('SELECT array_agg(r.place), array_agg(r.text) FROM (SELECT t.ctid AS place, t.%2$I::text AS text '
      'FROM %1$s AS t WHERE t.ctid > $1 AND t.ctid < $2 AND t.%3$I IS NULL AND t.%2$I ~ ''\S'' '
      'ORDER BY t.ctid LIMIT $3) AS r', ml_rag._relation_name(_job.part), _job.segment, _job.column_name)
    INTO _job.places, _job.texts USING _job.after, format('(%s,0)', _end)::tid, _job.batch_size;
  _n := coalesce(cardinality(_job.places), 0);
  IF _n = _job.batch_size THEN
    _job.after := _job.places[_n];
    _job.blocks := greatest(1, _job.blocks / 2);
  ELSIF _end = _job.extent THEN
    _job.extent := NULL;
  ELSE
    _job.after := format('(%s,0)', _end);
    _job.blocks := CASE WHEN 2 * _n < _job.batch_size THEN least(8192, _job.blocks * 2) ELSE _job.blocks END;
  END IF;
  IF _n > 0 THEN
    _job.step := 'embed';
  END IF;
  RETURN _job;
END
$$;

CREATE FUNCTION ml_rag._embed_documents(texts text[], model_id text, OUT vectors @vector@.vector[], OUT truncated integer, OUT error jsonb)
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: texts to vectors, or the error where it can lie in a text; raised is what every text would get: no model, no
-- server, no memory. truncated: how many of the texts the model has cut
BEGIN
  BEGIN
    SELECT o.vectors, o.truncated, o.error INTO vectors, truncated, error FROM ml_rag._embed_counted(texts, model_id) AS o;
  EXCEPTION WHEN data_exception THEN
    -- numbers that are none: pgvector is the first to read them
    error := jsonb_build_object('sqlstate', '38000', 'message', 'unexpected reply from the model server',
      'detail', left(SQLERRM, 200));
  END;
  IF error ->> 'sqlstate' NOT IN ('38000', '22000', '22023') THEN
    PERFORM ml_rag._raise(error);
  END IF;
END
$$;

CREATE FUNCTION ml_rag._embed_apart(texts text[], model_id text, OUT vectors @vector@.vector[], OUT truncated integer, OUT errors jsonb[])
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: texts to vectors; where that fails each half by itself, down to those at fault, which get their error
DECLARE
  _n integer := cardinality(texts);
  _embedded record;
  _half record;
BEGIN
  truncated := 0;
  IF _n = 0 THEN
    vectors := '{}';
    errors := '{}';
    RETURN;
  END IF;
  _embedded := ml_rag._embed_documents(texts, model_id);
  IF _embedded.error IS NULL THEN
    vectors := _embedded.vectors;
    truncated := _embedded.truncated;
    errors := array_fill(NULL::jsonb, ARRAY[_n]);
  ELSIF _n = 1 THEN
    vectors := ARRAY[NULL::@vector@.vector];
    errors := ARRAY[_embedded.error];
  ELSE
    _embedded := ml_rag._embed_apart(texts[:_n / 2], model_id);
    _half := ml_rag._embed_apart(texts[_n / 2 + 1:], model_id);
    vectors := _embedded.vectors || _half.vectors;
    truncated := _embedded.truncated + _half.truncated;
    errors := _embedded.errors || _half.errors;
  END IF;
END
$$;

CREATE FUNCTION ml_rag._embed_batch(job ml_rag._embedding_job) RETURNS ml_rag._embedding_job
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: a batch's vectors; texts at fault get none. Where that are the first eleven of more, the error is raised
-- No table is touched while the model is asked.
DECLARE
  _most CONSTANT integer := 11;
  _job record := job;
  _texts text[] := job.texts;
  _embedded record := ml_rag._embed_documents(job.texts, job.model_id);
  _rest record;
  _errors jsonb[];
  _wrong integer[];
BEGIN
  _job.step := 'write';
  _job.vectors := _embedded.vectors;
  IF _embedded.error IS NULL THEN
    RETURN _job;
  END IF;
  _embedded := ml_rag._embed_apart(_texts[:_most], _job.model_id);
  IF cardinality(_texts) > _most AND array_position(_embedded.errors, NULL) IS NULL THEN
    PERFORM ml_rag._raise(_embedded.errors[1]);
  END IF;
  _rest := ml_rag._embed_apart(_texts[_most + 1:], _job.model_id);
  _errors := _embedded.errors || _rest.errors;
  _wrong := ARRAY(SELECT i FROM generate_subscripts(_errors, 1) AS i WHERE _errors[i] IS NOT NULL ORDER BY i);
  _job.vectors := _embedded.vectors || _rest.vectors;
  _job.failed := _job.failed + cardinality(_wrong);
  _job.first_error := coalesce(_job.first_error, format('%s (%s): %s', _errors[_wrong[1]] ->> 'message',
    _errors[_wrong[1]] ->> 'sqlstate', left(_texts[_wrong[1]], 60)));
  RETURN _job;
END
$$;

CREATE FUNCTION ml_rag._write_batch(job ml_rag._embedding_job) RETURNS ml_rag._embedding_job
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: the embeddings of rows that still have that text and that nobody else is changing; others come up again
-- Not waiting for a row is what keeps this out of deadlocks with whoever changes many.
-- Writes: the store, as the caller
DECLARE
  _job record := job;
  _relation text := ml_rag._relation_name(_job.part);
  _free bigint;
  _written bigint;
  _changed tid[];
BEGIN
  EXECUTE format($sql$
    WITH free AS MATERIALIZED (
      SELECT t.ctid AS place, u.text, u.vector FROM unnest($1, $2, $3) AS u (place, text, vector)
      JOIN %1$s AS t ON t.ctid = u.place
      WHERE u.vector IS NOT NULL AND t.%2$I IS NULL AND t.%3$I::text COLLATE "C" = u.text
      FOR NO KEY UPDATE OF t SKIP LOCKED
    ), written AS (
      UPDATE %1$s AS t SET %2$I = f.vector::%4$s FROM free AS f WHERE t.ctid = f.place
      RETURNING t.ctid AS place, t.%3$I::text COLLATE "C" = f.text AS is_same, t.%2$I IS NOT NULL AS is_written
    )
    SELECT (SELECT count(*) FROM free), count(*) FILTER (WHERE w.is_written AND w.is_same),
      array_agg(w.place) FILTER (WHERE w.is_written AND w.is_same IS NOT TRUE)
    FROM written AS w$sql$, _relation, _job.column_name, _job.segment, _job.type)
  INTO _free, _written, _changed USING _job.places, _job.texts, _job.vectors;
  IF _changed IS NOT NULL THEN
    -- a trigger of the table has taken the chance to change the text
    EXECUTE format('UPDATE %s AS t SET %I = NULL WHERE t.ctid = ANY ($1)', _relation, _job.column_name) USING _changed;
  END IF;
  _job.found := _job.found + _written;
  _job.segments := _job.segments + _written;
  _free := _free - _written - coalesce(cardinality(_changed), 0);
  IF _free > 0 THEN
    _job.failed := _job.failed + _free;
    _job.first_error := coalesce(_job.first_error, 'a trigger of the table keeps rows as they are');
  END IF;
  _job.places := NULL;
  _job.texts := NULL;
  _job.vectors := NULL;
  _job.step := 'read';
  RETURN _job;
END
$$;
