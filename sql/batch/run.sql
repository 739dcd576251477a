-- run: the batch routines: ml_rag, ml_generate and ml_embed for every row of a table.

CREATE FUNCTION ml_rag._write_row(job jsonb, statements text[], key text[], value text, input text)
RETURNS bigint
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE AS $$
-- purpose: the first of some statements of the job that writes a row; how many it has written  Writes: the
-- output table, as the caller
DECLARE
  _statement text;
  _n bigint := 0;
BEGIN
  FOREACH _statement IN ARRAY statements LOOP
    CONTINUE WHEN job ->> _statement IS NULL;
    EXECUTE job ->> _statement USING key, value, input;
    GET DIAGNOSTICS _n = ROW_COUNT;
    EXIT WHEN _n > 0;
  END LOOP;
  RETURN _n;
END
$$;

CREATE FUNCTION ml_rag._run_row(job jsonb, given jsonb, vector @vector@.vector, OUT error text)
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SET search_path FROM CURRENT AS $$
-- purpose: one row: compute, write; what fails becomes the row's error and does not stop the batch
-- extra: of embed_column, the embedding of the question; of context_column, the context. Without input the
-- row is too long, and was not read (batch/job)
-- A cancelled statement, a lost model server and a full disk do end the call: the rows left over would all
-- fail the same way, each at the price of a model's answer. A row that takes no error, as one that was
-- deleted meanwhile, is in the counts all the same; one that has another call's result by now has no error.
DECLARE
  _routine text := job ->> 'routine';
  _key text[] := given ->> 'key';
  _input text := given ->> 'input';
  _extra text := given ->> 'extra';
  _n bigint;
  _state text;
  _message text;
  _detail text;
  _options jsonb := CASE WHEN _extra IS NULL THEN job -> 'options'
    ELSE coalesce(nullif(job -> 'options', 'null'), '{}')
    || jsonb_build_object(CASE _routine WHEN 'ml_rag_table' THEN 'query_embedding' ELSE 'context' END,
      _extra) END;
BEGIN
  IF job ->> 'must_embed' IS NOT NULL AND _extra IS NULL AND _input IS NOT NULL THEN
    PERFORM ml_rag.embed(_input, job ->> 'must_embed');
  END IF;
  BEGIN
    IF _input IS NULL THEN
      RAISE EXCEPTION USING ERRCODE = '54000', MESSAGE = 'the text is too long',
        DETAIL = format('It has %s bytes, and may have 10000000.', given ->> 'bytes');
    END IF;
    _n := ml_rag._write_row(job, '{update,insert,update}', _key, CASE _routine
      WHEN 'ml_rag_table' THEN @extschema@.ml_rag_answer(_input, _options)::text
      WHEN 'ml_generate_table' THEN @extschema@.ml_generate(_input, _options)::text
      ELSE coalesce(vector, ml_rag.embed(_input, job ->> 'model',
        'document', (_options -> 'truncate')::boolean))::text END, _input);
    IF _n = 0 AND job ->> 'insert' IS NOT NULL THEN
      RAISE EXCEPTION USING ERRCODE = '23505', MESSAGE = 'the result was not written to the output table',
        DETAIL = 'A trigger skipped the row, or it violates a unique constraint other than the key.';
    END IF;
    RETURN;
  EXCEPTION
    WHEN connection_failure OR disk_full OR read_only_sql_transaction THEN
      RAISE;
    WHEN OTHERS THEN
      GET STACKED DIAGNOSTICS _state = RETURNED_SQLSTATE, _message = MESSAGE_TEXT,
        _detail = PG_EXCEPTION_DETAIL;
      error := concat(_message, ' (', _state, ')', ': ' || nullif(_detail, ''));
  END;
  _n := ml_rag._write_row(job, '{note,note_insert,note}', _key, CASE _routine
      WHEN 'ml_generate_table' THEN jsonb_build_object('text', NULL, 'error', error)::text
      WHEN 'ml_rag_table' THEN jsonb_build_object('error', error)::text ELSE error END, NULL);
  IF _n = 0 THEN
    error := CASE ml_rag._write_row(job, '{result}', _key, NULL, NULL) WHEN 0 THEN error END;
  END IF;
END
$$;

CREATE PROCEDURE @extschema@.ml_rag_table(
  input_table_column text, output_table_column text, options jsonb DEFAULT NULL,
    INOUT result jsonb DEFAULT NULL)
LANGUAGE plpgsql
AS $$
DECLARE
  _routine CONSTANT pg_catalog.text := 'ml_rag_table';
  _given CONSTANT pg_catalog.jsonb := pg_catalog.jsonb_build_array(_routine, input_table_column,
    output_table_column, options);
@WORK@
$$;
COMMENT ON PROCEDURE @extschema@.ml_rag_table(text, text, jsonb, jsonb) IS
$$ml_rag for every row: CALL ml_rag_table('public.questions.question', 'public.questions.answer')
The input table needs a primary key. The output column (jsonb) is created where it does not exist, the output
table too, with the same key. Rows that have a result, and null inputs, are skipped; rows without a result or
with an error are computed, so that each call tries failed rows again. Commits after each batch ("batch_size"
rows, default 100) outside a transaction block. options: those of ml_rag, embed_column (column of the input
table that has the embeddings of the questions), fail_on_embedding_error (default false).
result: {"rows", "succeeded", "failed", "first_error"}; a row that failed holds {"error": …}.
Errors: 22023, 42P01, 3F000 no such schema, 42703, 42501; 25006 read-only; 08006 model server lost, 53100 disk
full: results are kept, and the next call continues.$$;

CREATE PROCEDURE @extschema@.ml_generate_table(
  input_table_column text, output_table_column text, options jsonb DEFAULT NULL,
    INOUT result jsonb DEFAULT NULL)
LANGUAGE plpgsql
AS $$
DECLARE
  _routine CONSTANT pg_catalog.text := 'ml_generate_table';
  _given CONSTANT pg_catalog.jsonb := pg_catalog.jsonb_build_array(_routine, input_table_column,
    output_table_column, options);
@WORK@
$$;
COMMENT ON PROCEDURE @extschema@.ml_generate_table(text, text, jsonb, jsonb) IS
$$ml_generate for every row: CALL ml_generate_table('public.texts.prompt', 'public.texts.answer')
Tables, batches, result and errors: as ml_rag_table. options: those of ml_generate, and
context_column: column of the input table that has the context of each row.$$;

CREATE PROCEDURE @extschema@.ml_embed_table(
  input_table_column text, output_table_column text, options jsonb DEFAULT NULL,
    INOUT result jsonb DEFAULT NULL)
LANGUAGE plpgsql
AS $$
DECLARE
  _routine CONSTANT pg_catalog.text := 'ml_embed_table';
  _given CONSTANT pg_catalog.jsonb := pg_catalog.jsonb_build_array(_routine, input_table_column,
    output_table_column, options);
@WORK@
$$;
COMMENT ON PROCEDURE @extschema@.ml_embed_table(text, text, jsonb, jsonb) IS
$$embeds a column: CALL ml_embed_table('public.texts.segment', 'public.texts.segment_embedding')
The output column is created as vector(n) of the model's dimensions, and its comment makes the table a vector
store. Tables, result and errors: as ml_rag_table; a row that failed stays null. options: embed_model_id,
batch_size (rows of one call to the model and between two commits, default 1000), truncate (true: texts beyond
the model's limit are cut), details_column (text column for the error of each row that failed, null for the
others).

Where both columns are of one table of the caller's, it gets a trigger that empties the embedding of a row
whose text changes, so that it is not found by its former text, and the next call embeds it again.$$;
