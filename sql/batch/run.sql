-- run: the batch routines: ml_rag, ml_generate and ml_embed for every row of a table.

CREATE PROCEDURE ml_rag._commit(INOUT committed boolean DEFAULT NULL, INOUT error jsonb DEFAULT NULL)
LANGUAGE plpython3u
AS $$
# purpose: commit where the caller's transaction allows it; false inside a transaction block or a function
# PL/pgSQL cannot try: a COMMIT inside a block with EXCEPTION is an error of its own. error: what a deferred constraint says
@BACKEND@
return backend.commit(plpy)
$$;

CREATE FUNCTION ml_rag._write_result(job jsonb, key text[], value text, input text) RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: one row's result into the output table  Writes: the output table, as the caller
-- Another call may insert the row at the same time; then both have an answer, and the later one stays.
DECLARE
  _statement text;
  _n bigint;
BEGIN
  FOREACH _statement IN ARRAY ARRAY['update', 'insert', 'update'] LOOP
    CONTINUE WHEN job ->> _statement IS NULL;
    EXECUTE job ->> _statement USING key, value, input;
    GET DIAGNOSTICS _n = ROW_COUNT;
    EXIT WHEN _n > 0;
  END LOOP;
  IF _n = 0 AND job ->> 'insert' IS NOT NULL THEN
    RAISE EXCEPTION USING ERRCODE = '23505', MESSAGE = 'the result was not written to the output table',
      DETAIL = 'A trigger skipped the row, or it violates a unique constraint other than the key.';
  END IF;
END
$$;

CREATE FUNCTION ml_rag._write_error(job jsonb, key text[], value text) RETURNS boolean
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: one row's error into the output table, where it has a place; false where the row has a result of another call
-- A row that takes no error, as one that was deleted meanwhile, is in the counts all the same.
-- Writes: the output table, as the caller
DECLARE
  _statement text;
  _n bigint := 0;
BEGIN
  IF job ->> 'note' IS NOT NULL THEN
    FOREACH _statement IN ARRAY ARRAY[job ->> 'note', job ->> 'note_insert', job ->> 'note'] LOOP
      CONTINUE WHEN _statement IS NULL;
      EXECUTE _statement USING key, value;
      GET DIAGNOSTICS _n = ROW_COUNT;
      IF _n > 0 THEN
        RETURN true;
      END IF;
    END LOOP;
  END IF;
  EXECUTE job ->> 'result' USING key;
  GET DIAGNOSTICS _n = ROW_COUNT;
  RETURN _n = 0;
END
$$;

CREATE FUNCTION ml_rag._run_row(job jsonb, key text[], input text, extra text, vector @vector@.vector, OUT error text)
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: one row: compute, write; what fails becomes the row's error and does not stop the batch
-- extra: of embed_column, the embedding of the question; of context_column, the context
-- A cancelled statement, a lost model server and a full disk do end the call: the rows left over would all fail the same
-- way, each at the price of a model's answer.
DECLARE
  _routine text := job ->> 'routine';
  _state text;
  _message text;
  _detail text;
  _options jsonb := CASE WHEN extra IS NULL THEN job -> 'options' ELSE coalesce(nullif(job -> 'options', 'null'), '{}')
    || jsonb_build_object(CASE _routine WHEN 'ml_rag_table' THEN 'query_embedding' ELSE 'context' END, extra) END;
BEGIN
  IF job ->> 'must_embed' IS NOT NULL AND extra IS NULL THEN
    PERFORM ml_rag.embed(input, job ->> 'must_embed');
  END IF;
  BEGIN
    PERFORM ml_rag._write_result(job, key, CASE _routine
      WHEN 'ml_rag_table' THEN @extschema@.ml_rag_answer(input, _options)::text
      WHEN 'ml_generate_table' THEN @extschema@.ml_generate(input, _options)::text
      ELSE coalesce(vector, ml_rag.embed(input, job ->> 'model', 'document', (_options -> 'truncate')::boolean))::text END, input);
  EXCEPTION
    WHEN connection_failure OR disk_full OR read_only_sql_transaction THEN
      RAISE;
    WHEN OTHERS THEN
      GET STACKED DIAGNOSTICS _state = RETURNED_SQLSTATE, _message = MESSAGE_TEXT, _detail = PG_EXCEPTION_DETAIL;
      error := concat(_message, ' (', _state, ')', ': ' || nullif(_detail, ''));
  END;
  IF error IS NOT NULL AND NOT ml_rag._write_error(job, key, (CASE _routine
      WHEN 'ml_generate_table' THEN jsonb_build_object('text', NULL, 'error', error)::text
      WHEN 'ml_rag_table' THEN jsonb_build_object('error', error)::text ELSE error END)) THEN
    error := NULL;
  END IF;
END
$$;

CREATE FUNCTION ml_rag._run_batch(job jsonb) RETURNS jsonb
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: the next rows of a job; returns the job with its counts and its place moved on
-- Reads: the input table, as the caller
DECLARE
  _is_watched boolean := job ? 'call';
  -- a row that is only written costs little more than to tell of it
  _every integer := CASE job ->> 'routine' WHEN 'ml_embed_table' THEN 100 ELSE 1 END;
  _size integer := (job ->> 'batch_size')::integer;
  _row record;
  _keys text[] := '{}';   -- of each row, as one element: its key in array text form
  _inputs text[] := '{}';
  _extras text[] := '{}';
  _texts text[];
  _vectors @vector@.vector[];
  _truncated integer;
  _failure jsonb;
  _failed integer := 0;
  _error text;
  _first_error text := job ->> 'first_error';
  -- without key and detail, which can hold a row's text: for the warning, which PostgreSQL writes into its log
  _first_told text := job ->> 'first_told';
BEGIN
  FOR _row IN EXECUTE job ->> 'read' USING (job ->> 'last')::text[], _size LOOP
    _keys := _keys || _row.key::text;
    _inputs := _inputs || _row.input;
    _extras := array_append(_extras, _row.extra);
  END LOOP;
  IF _is_watched THEN
    PERFORM ml_rag._tell_table(job, 0, 0);
  END IF;
  IF job ->> 'routine' = 'ml_embed_table' AND cardinality(_inputs) > 0 THEN
    -- all at once; where that fails the rows are tried one by one, to find the one at fault
    -- (a blank text is an error of its row, not of the batch, so it travels as something else)
    _texts := ARRAY(SELECT CASE WHEN i ~ '\S' THEN i ELSE 'blank' END FROM unnest(_inputs) WITH ORDINALITY AS u (i, place)
                    ORDER BY place);
    IF (job #> '{options,truncate}')::boolean THEN
      SELECT o.vectors, o.truncated, o.error INTO _vectors, _truncated, _failure
      FROM ml_rag._embed_counted(_texts, job ->> 'model') AS o;
    ELSE
      SELECT o.vectors, o.error INTO _vectors, _failure FROM ml_rag._embed(_texts, job ->> 'model', 'document', false) AS o;
    END IF;
    IF _failure ->> 'sqlstate' IN ('57014', '08006') THEN
      -- a statement is cancelled once: tried row by row it would go on, and wait for ever where the server hangs
      PERFORM ml_rag._raise(_failure);
    END IF;
  END IF;
  FOR i IN 1..cardinality(_inputs) LOOP
    _error := ml_rag._run_row(job, _keys[i]::text[], _inputs[i], _extras[i],
      CASE WHEN _inputs[i] ~ '\S' THEN _vectors[i] END);
    IF _error IS NOT NULL THEN
      _failed := _failed + 1;
      _first_error := coalesce(_first_error, format('row %s: %s', _keys[i], _error));
      _first_told := coalesce(_first_told, substring(_error FROM '^.*? \([0-9A-Z]{5}\)'));
    END IF;
    IF _is_watched AND (i % _every = 0 OR i = cardinality(_inputs)) THEN
      PERFORM ml_rag._tell_table(job, i, _failed);
    END IF;
  END LOOP;
  RETURN job || jsonb_build_object(
    'last', _keys[cardinality(_keys)],
    'done', cardinality(_inputs) < _size,
    'rows', (job ->> 'rows')::bigint + cardinality(_inputs),
    'succeeded', (job ->> 'succeeded')::bigint + cardinality(_inputs) - _failed,
    'failed', (job ->> 'failed')::bigint + _failed,
    'truncated', coalesce((job ->> 'truncated')::bigint, 0) + coalesce(_truncated, 0),
    'first_error', _first_error, 'first_told', _first_told);
END
$$;

CREATE FUNCTION ml_rag._end_table(job jsonb) RETURNS jsonb
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: what the batch routines answer, and warnings of rows that failed and of texts that were cut
BEGIN
  IF (job ->> 'failed')::bigint > 0 THEN
    RAISE WARNING USING ERRCODE = '01000',
      MESSAGE = format('%s of %s rows failed', job ->> 'failed', job ->> 'rows'),
      DETAIL = format('First error: %s.', job ->> 'first_told'),
      HINT = 'The result names its row, under "first_error". The next call tries failed rows again.';
  END IF;
  IF (job ->> 'truncated')::bigint > 0 THEN
    RAISE WARNING USING ERRCODE = '01000', MESSAGE = format('the model cut the texts of %s rows', job ->> 'truncated'),
      DETAIL = format('They are longer than model %s takes in; searches by meaning do not see the rest, and hybrid searches give '
        'them less weight.', job ->> 'model'),
      HINT = 'ml_rag.create_vectorizer with "destination": "table" splits texts into segments.';
  END IF;
  RETURN jsonb_build_object('rows', job -> 'rows', 'succeeded', job -> 'succeeded', 'failed', job -> 'failed',
    'first_error', job -> 'first_error');
END
$$;

CREATE FUNCTION ml_rag._table_step(job jsonb, routine text, input text, output text, options jsonb, call integer) RETURNS jsonb
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
AS $$
-- purpose: the next step of a batch routine: what there is to do, then a batch of rows. Between two of them the routine commits
-- No SET clause: the names of the table are those of the caller. So every name here is qualified and no operator is used.
BEGIN
  IF job IS NULL THEN
    RETURN ml_rag._watch_table(ml_rag._begin_table(routine, input, output, options), call);
  END IF;
  RETURN ml_rag._run_batch(job);
END
$$;

CREATE PROCEDURE @extschema@.ml_rag_table(
  input_table_column text, output_table_column text, options jsonb DEFAULT NULL, INOUT result jsonb DEFAULT NULL)
LANGUAGE plpgsql
AS $$
-- A procedure that commits can have no SET clause, so every name here is qualified and no operator is used. Nor can it
-- commit within a block that has an EXCEPTION clause.
DECLARE
  _call pg_catalog.int4 := ml_rag._begin('ml_rag_table');
  _job pg_catalog.jsonb;
  _committed pg_catalog.bool;
  _error pg_catalog.jsonb;
BEGIN
  LOOP
    BEGIN
      PERFORM ml_rag._raise(_error);
      EXIT WHEN pg_catalog.jsonb_extract_path_text(_job, 'done')::pg_catalog.bool;
      _job := ml_rag._table_step(_job, 'ml_rag_table', input_table_column, output_table_column, options, _call);
    EXCEPTION WHEN query_canceled OR assert_failure OR OTHERS THEN
      PERFORM ml_rag._end(_call, SQLSTATE);
@RAISE@
    END;
    CALL ml_rag._commit(_committed, _error);
  END LOOP;
  PERFORM ml_rag._end(_call);
  result := ml_rag._end_table(_job);
END
$$;
COMMENT ON PROCEDURE @extschema@.ml_rag_table(text, text, jsonb, jsonb) IS
$$ml_rag for every row: CALL ml_rag_table('public.questions.question', 'public.questions.answer')
The input table needs a primary key. The output column (jsonb) is created where it does not exist, the output table too,
with the same key. Rows that have a result, and null inputs, are skipped; rows without a result or with an error are
computed, so that each call tries failed rows again. Commits after each batch ("batch_size" rows, default 100) outside a
transaction block. options: those of ml_rag, embed_column (column of the input table that has the embeddings of the questions),
fail_on_embedding_error (default false).
result: {"rows", "succeeded", "failed", "first_error"}; a row that failed holds {"error": …}.
Errors: 22023, 42P01, 3F000 no such schema, 42703, 42501; 25006 read-only; 08006 model server lost, 53100 disk full: results are kept,
and the next call continues.$$;

CREATE PROCEDURE @extschema@.ml_generate_table(
  input_table_column text, output_table_column text, options jsonb DEFAULT NULL, INOUT result jsonb DEFAULT NULL)
LANGUAGE plpgsql
AS $$
-- A procedure that commits can have no SET clause, so every name here is qualified and no operator is used. Nor can it
-- commit within a block that has an EXCEPTION clause.
DECLARE
  _call pg_catalog.int4 := ml_rag._begin('ml_generate_table');
  _job pg_catalog.jsonb;
  _committed pg_catalog.bool;
  _error pg_catalog.jsonb;
BEGIN
  LOOP
    BEGIN
      PERFORM ml_rag._raise(_error);
      EXIT WHEN pg_catalog.jsonb_extract_path_text(_job, 'done')::pg_catalog.bool;
      _job := ml_rag._table_step(_job, 'ml_generate_table', input_table_column, output_table_column, options, _call);
    EXCEPTION WHEN query_canceled OR assert_failure OR OTHERS THEN
      PERFORM ml_rag._end(_call, SQLSTATE);
@RAISE@
    END;
    CALL ml_rag._commit(_committed, _error);
  END LOOP;
  PERFORM ml_rag._end(_call);
  result := ml_rag._end_table(_job);
END
$$;
COMMENT ON PROCEDURE @extschema@.ml_generate_table(text, text, jsonb, jsonb) IS
$$ml_generate for every row: CALL ml_generate_table('public.texts.prompt', 'public.texts.answer')
Tables, batches, result and errors: as ml_rag_table. options: those of ml_generate, and
context_column: column of the input table that has the context of each row.$$;

CREATE PROCEDURE @extschema@.ml_embed_table(
  input_table_column text, output_table_column text, options jsonb DEFAULT NULL, INOUT result jsonb DEFAULT NULL)
LANGUAGE plpgsql
AS $$
-- A procedure that commits can have no SET clause, so every name here is qualified and no operator is used. Nor can it
-- commit within a block that has an EXCEPTION clause.
DECLARE
  _call pg_catalog.int4 := ml_rag._begin('ml_embed_table');
  _job pg_catalog.jsonb;
  _committed pg_catalog.bool;
  _error pg_catalog.jsonb;
BEGIN
  LOOP
    BEGIN
      PERFORM ml_rag._raise(_error);
      EXIT WHEN pg_catalog.jsonb_extract_path_text(_job, 'done')::pg_catalog.bool;
      _job := ml_rag._table_step(_job, 'ml_embed_table', input_table_column, output_table_column, options, _call);
    EXCEPTION WHEN query_canceled OR assert_failure OR OTHERS THEN
      PERFORM ml_rag._end(_call, SQLSTATE);
@RAISE@
    END;
    CALL ml_rag._commit(_committed, _error);
  END LOOP;
  PERFORM ml_rag._end(_call);
  result := ml_rag._end_table(_job);
END
$$;
COMMENT ON PROCEDURE @extschema@.ml_embed_table(text, text, jsonb, jsonb) IS
$$embeds a column: CALL ml_embed_table('public.texts.segment', 'public.texts.segment_embedding')
The output column is created as vector(n) of the model's dimensions, and its comment makes the table a vector store. Tables, result
and errors: as ml_rag_table; a row that failed stays null. options: embed_model_id, batch_size (rows of one call to the model and
between two commits, default 1000), truncate (true: texts beyond the model's limit are cut), details_column (text column for the
error of each row that failed, null for the others).

Where both columns are of one table of the caller's, it gets a trigger that empties the embedding of a row whose text changes,
so that it is not found by its former text, and the next call embeds it again.$$;
