-- question: a question becomes a statement over the caller's tables, written by a model, and its rows.

CREATE FUNCTION @extschema@.ml_nl_sql(query text, options jsonb DEFAULT NULL) RETURNS jsonb
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SET search_path FROM CURRENT AS $$
-- purpose: question to statement and rows
DECLARE
  _call integer := ml_rag._begin('ml_nl_sql');
  _options jsonb;
  _shown record;
  _model text;
  _answer jsonb;
  _error jsonb;
BEGIN
  _options := ml_rag.parse_options('ml_nl_sql', $2);
  IF jsonb_array_length(_options -> 'examples') > 20 OR length((_options -> 'examples')::text) > 20000 THEN
    PERFORM ml_rag._bad_option('examples', to_jsonb(jsonb_array_length(_options -> 'examples')),
      'at most 20, of 20000 characters together');
  END IF;
  PERFORM ml_rag._bad_option('examples', to_jsonb(jsonb_array_length(_options -> 'examples')),
    'objects with the keys "question" and "sql"')
  FROM jsonb_array_elements(_options -> 'examples') AS e
  WHERE NOT ml_rag.parse_options('nl_sql_example', e.value) ?& '{question,sql}'::text[];
  -- the statement itself is read-only; that it is harmless is seen from a temporary view of it
  PERFORM ml_rag._check_writable('cannot execute ml_nl_sql');
  IF NOT has_database_privilege(current_database(), 'TEMP') THEN
    RAISE EXCEPTION USING ERRCODE = '42501', MESSAGE = 'permission denied to create temporary tables',
      DETAIL = 'A statement is checked by making a temporary view of it, which is rolled back.',
      HINT = format('GRANT TEMP ON DATABASE %I TO %I;', current_database(), current_user);
  END IF;
  _shown := ml_rag._schema_metadata($1, _options);
  _model := coalesce(_options ->> 'model_id', ml_rag._default_model());
  -- measured, the statements of such a model are hardly ever right, and some run all the same and return
  -- other rows
  _error := ml_rag._cannot_write(_model, 'write SQL');
  IF _error IS NOT NULL THEN
    PERFORM ml_rag._end(_call);
    RETURN jsonb_build_object('tables', _shown.tables, 'schemas', _shown.schemas, 'model_id', _model,
      'sql_query', NULL,
      'is_sql_valid', false, 'reason', format('%s. %s', _error ->> 'message', _error ->> 'hint'));
  END IF;
  PERFORM ml_rag._stage(_call, 'generate', _model);
  _answer := ml_rag._python('nl_sql',
    jsonb_build_array(jsonb_build_object('question', $1, 'metadata', _shown.metadata,
    'tables', _shown.tables, 'schemas', _shown.schemas, 'model_id', _model, 'options', _options,
    'named', _shown.named, 'relations', _shown.relations::bigint[],
    -- where operators of types of extensions are; in another role's schema every name could be taken
    'extension_schemas', ARRAY(SELECT DISTINCT n.nspname::text
                               FROM pg_extension AS e JOIN pg_namespace AS n ON n.oid = e.extnamespace
                               WHERE e.extname <> 'ml_rag' AND n.nspname <> 'pg_catalog'
                                 AND has_schema_privilege(n.oid, 'USAGE') AND ml_rag._trusts(n.nspowner)
                               ORDER BY 1))));
  IF (_answer -> 'has_more')::boolean THEN
    RAISE WARNING USING ERRCODE = '01000',
      MESSAGE = format('only the first %s rows are returned', jsonb_array_length(_answer -> 'rows')),
      DETAIL = 'The statement has more rows, or they have more than 16 MB, a million values, or an array of '
        '100 000.',
      HINT = 'Raise "max_rows", or run "sql_query" yourself.';
  END IF;
  PERFORM ml_rag._end(_call);
  RETURN _answer - 'has_more';
@CATCH_AND_END@
END
$$;
COMMENT ON FUNCTION @extschema@.ml_nl_sql(text, jsonb) IS
$$answers a question about tables by a statement that a model writes: ml_nl_sql('How many orders came in May?')
Returns {"tables", "schemas": those the model was shown, "model_id", "sql_query", "is_sql_valid"}; where it is
not valid, also "reason"; with "execute" also "columns" (names) and "rows" (arrays of values). sql_query is
null where the model says that the tables cannot answer the question, and where the model is one of the
smallest. Only a SELECT over tables that the caller may read, with harmless functions, is run: docs/nl_sql.md.
It runs as the caller, read-only, for at most 30 s where statement_timeout is 0, and with at most 128 MB.
Not in a read-only transaction: statements are checked by way of a temporary view, which needs TEMP on the
database. Options: SELECT * FROM ml_rag.option WHERE routine = 'ml_nl_sql'.
Errors: 22023 empty question, bad option, prompt longer than the model's context; 25006 read-only transaction;
42501 no TEMP; 42P01 no table to query; 55000 model not available; 08006 model server; 53300 its queue is
full; 57014 cancelled; 38000 the model failed.$$;

CREATE PROCEDURE @extschema@.nl_sql(query text, INOUT output jsonb DEFAULT NULL, options jsonb DEFAULT NULL)
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
-- purpose: HeatWave's NL_SQL
BEGIN
  -- options in the place of the output would be ignored, and the statement run
  IF output IS NOT NULL AND NOT output ? 'is_sql_valid' THEN
    RAISE EXCEPTION USING ERRCODE = '22023', MESSAGE = 'the second argument of nl_sql is its output',
      HINT = 'CALL nl_sql(question, NULL, options), or options => ….';
  END IF;
  output := @extschema@.ml_nl_sql($1, $3);
@CATCH@
END
$$;
COMMENT ON PROCEDURE @extschema@.nl_sql(text, jsonb, jsonb) IS
$$answers a question about tables by a statement that a model writes: CALL nl_sql('How many orders came in May?')
output: what ml_nl_sql returns. options: {"schemas": ["shop"]}, …; those of ml_nl_sql. Errors: see
ml_nl_sql.$$;
