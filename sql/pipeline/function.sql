-- function: functions of the caller's, found by name and signature, and called with the caller's rights.
--
-- They are called by what runs with the caller's rights itself, and get what was read before, in a statement
-- of its own: rows that a policy or a filter leaves out have not been read by then, so no function sees them,
-- whatever it costs and tells.

CREATE FUNCTION ml_rag._find_function(option text, value jsonb, has_arguments boolean DEFAULT false,
  OUT name text, OUT form text)
LANGUAGE plpgsql STABLE PARALLEL UNSAFE SET search_path FROM CURRENT AS $$
-- purpose: a function of the caller's by its name, "schema.function", and the signatures that an option takes
-- (arm, rerank, split_by, metrics)
-- name: as it is written into a statement. form: which signature it has: text or vector, texts or vectors
-- (all of them at once), of an arm also with " arguments" where a last parameter jsonb takes these; metadata,
-- split, metric
-- Reads: the catalog  Errors: 22023, 42501, 42725, 42883
DECLARE
  _parts text[];
  _found record;
  _others text;
  _signatures text;
  _suffix text;
BEGIN
  BEGIN
    _parts := parse_ident(CASE jsonb_typeof(value) WHEN 'string' THEN value #>> '{}' END);
  EXCEPTION WHEN invalid_parameter_value THEN
    NULL;
  END;
  IF cardinality(_parts) IS DISTINCT FROM 2 THEN
    PERFORM ml_rag._bad_option(CASE WHEN option IN ('split_by', 'metrics') THEN option ELSE 'function' END,
      value,
      'the name of a function with its schema, "schema.function"');
  END IF;
  name := format('%I.%I', _parts[1], _parts[2]);
  IF NOT has_schema_privilege(n.oid, 'USAGE') FROM pg_namespace AS n WHERE n.nspname = _parts[1] THEN
    RAISE EXCEPTION USING ERRCODE = '42501', MESSAGE = format('permission denied for schema %I', _parts[1]);
  END IF;
  -- one without the parameter is preferred where no arguments are given
  FOREACH _suffix IN ARRAY CASE WHEN option <> 'arm' THEN '{""}' WHEN has_arguments THEN '{" arguments"}'
                                ELSE '{"", " arguments"}' END::text[] LOOP
    SELECT string_agg(format('(%s) returns %s', s.arguments || replace(_suffix, ' a', ', a')
      || CASE WHEN _suffix <> ''
        THEN ' jsonb' ELSE '' END, s.result), '; ' ORDER BY s.form) AS signatures,
      count(p.oid) AS functions, min(s.form) FILTER (WHERE p.oid IS NOT NULL) || _suffix AS form,
      bool_and(has_function_privilege(p.oid, 'EXECUTE')) AS may_execute
    INTO _found
    FROM (VALUES
      ('arm', 'text', '{text,text}'::regtype[], 'double precision', 'query text, segment text'),
      ('arm', 'texts', '{text,text[]}', 'double precision[]', 'query text, segments text[]'),
      ('arm', 'vector', ARRAY['@vector@.vector'::regtype, '@vector@.vector'::regtype], 'double precision',
        'query vector, embedding vector'),
      ('arm', 'vectors', ARRAY['@vector@.vector'::regtype, '@vector@.vector[]'], 'double precision[]',
        'query vector, embeddings vector[]'),
      ('rerank', 'texts', '{text,text[]}', 'double precision[]', 'query text, segments text[]'),
      ('rerank', 'metadata', '{text,text,jsonb}', 'double precision',
        'query text, segment text, metadata jsonb'),
      ('split_by', 'split', '{text}', 'setof text', 'text'),
      ('metrics', 'metric', '{text,jsonb,text}', 'double precision',
        'question text, answer jsonb, reference text')
    ) AS s (option, form, types, result, arguments)
    LEFT JOIN pg_namespace AS n ON n.nspname = _parts[1]
    LEFT JOIN pg_proc AS p ON p.pronamespace = n.oid AND p.proname = _parts[2] AND p.prokind = 'f'
      AND p.proargtypes = array_to_string(
        s.types::oid[] || CASE WHEN _suffix = '' THEN '{}' ELSE ARRAY['jsonb'::regtype::oid] END,
          ' ')::oidvector
      AND concat(CASE WHEN p.proretset THEN 'setof ' END,
        replace(format_type(p.prorettype, NULL), '"', '')) = s.result
    WHERE s.option = _find_function.option;
    _signatures := concat_ws('; ', _signatures, _found.signatures);
    EXIT WHEN _found.functions > 0;
  END LOOP;
  IF _found.functions = 0 THEN
    SELECT string_agg(o.signature, '; ' ORDER BY o.signature) INTO _others FROM (
      SELECT concat(CASE p.prokind WHEN 'p' THEN 'procedure ' WHEN 'a' THEN 'aggregate '
        WHEN 'w' THEN 'window function ' END,
        '(', oidvectortypes(p.proargtypes), ')',
          ' returns ' || replace(pg_get_function_result(p.oid), 'SETOF ', 'setof ')) AS signature
      FROM pg_proc AS p JOIN pg_namespace AS n ON n.oid = p.pronamespace
      WHERE n.nspname = _parts[1] AND p.proname = _parts[2] ORDER BY 1 LIMIT 10) AS o;
    RAISE EXCEPTION USING ERRCODE = '42883',
      MESSAGE = CASE WHEN _others IS NULL THEN format('function %s does not exist', name)
        ELSE format('function %s has no signature that can be used here', name) END,
      DETAIL = concat(format('Signatures that can be used: %s.', _signatures), ' It has: ' || _others || '.'),
      HINT = 'Argument and result types must be exactly these.';
  ELSIF _found.functions > 1 THEN
    RAISE EXCEPTION USING ERRCODE = '42725', MESSAGE = format('function %s is not unique', name),
      DETAIL = format('More than one function of that name has one of the signatures: %s.', _signatures),
      HINT = 'Give them different names.';
  ELSIF NOT _found.may_execute THEN
    RAISE EXCEPTION USING ERRCODE = '42501', MESSAGE = format('permission denied for function %s', name),
      HINT = 'Ask its owner for GRANT EXECUTE.';
  END IF;
  form := _found.form;
END
$$;

CREATE FUNCTION ml_rag._run_function(
  statement text, query text, query_embedding @vector@.vector, texts text[], embeddings @vector@.vector[],
  metadata jsonb[], arguments jsonb
) RETURNS double precision[]
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
-- a function without a path of its own finds pgvector's operators, as it does where it is called by itself;
-- every name here is qualified
SET search_path = pg_catalog, @vector@, pg_temp
AS $$
-- purpose: run a statement that calls a function of the caller's
DECLARE
  _scores pg_catalog.float8[];
BEGIN
  EXECUTE statement INTO _scores USING query, query_embedding, texts, embeddings, metadata, arguments;
  RETURN _scores;
END
$$;

CREATE FUNCTION ml_rag._call_function(
  name text, form text, query text, query_embedding @vector@.vector, texts text[],
  embeddings @vector@.vector[] DEFAULT NULL, metadata jsonb[] DEFAULT NULL, arguments jsonb DEFAULT NULL
) RETURNS double precision[]
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE AS $$
-- purpose: what a function of the caller's says of each text or embedding, in their order; null, NaN and
-- infinity as null name, form: of ml_rag._find_function  Errors: those of the function; 22023 an array of
-- another shape or length
DECLARE
  _n integer := coalesce(cardinality(texts), cardinality(embeddings));
  _statement text := format(CASE split_part(form, ' ', 1)
    WHEN 'text' THEN 'SELECT ARRAY(SELECT %s($1, t%s) FROM pg_catalog.unnest($3) AS t)'
    WHEN 'texts' THEN 'SELECT %s($1, $3%s)'
    WHEN 'vector' THEN 'SELECT ARRAY(SELECT %s($2, e%s) FROM pg_catalog.unnest($4) AS e)'
    WHEN 'vectors' THEN 'SELECT %s($2, $4%s)'
    WHEN 'metadata' THEN 'SELECT ARRAY(SELECT %s($1, u.t, coalesce(($5)[u.i], ''{}'')%s) '
      'FROM pg_catalog.unnest($3) WITH ORDINALITY AS u (t, i))' END, name,
        CASE WHEN form LIKE '% arguments' THEN ', $6' ELSE '' END);
  _scores double precision[] := ml_rag._run_function(_statement, query, query_embedding, texts,
    embeddings, metadata, coalesce(arguments, '{}'));
BEGIN
  IF _scores IS NULL OR cardinality(_scores) <> _n OR array_ndims(_scores) > 1 THEN
    RAISE EXCEPTION USING ERRCODE = '22023',
      MESSAGE = format('function %s returned an array that does not fit', name),
      DETAIL = format('It returned %s for an array of %s; expected: one number for each element, in their '
        'order.', CASE
        WHEN _scores IS NULL THEN 'null'
        WHEN array_ndims(_scores) > 1 THEN format('an array of %s dimensions', array_ndims(_scores))
        ELSE format('an array of %s', cardinality(_scores)) END, _n);
  END IF;
  RETURN ARRAY(SELECT CASE WHEN s > '-Infinity' AND s < 'Infinity' THEN s END FROM unnest(_scores) AS s);
END
$$;

CREATE FUNCTION ml_rag._try_function(
  name text, form text, query text, query_embedding @vector@.vector, texts text[],
  embeddings @vector@.vector[], arguments jsonb, OUT scores double precision[], OUT error jsonb
)
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE AS $$
-- purpose: ml_rag._call_function, and its error with the lines of the caller's functions that it came through
-- as the detail
DECLARE
  _detail text;
  _hint text;
  _context text;
BEGIN
  scores := ml_rag._call_function(name, form, query, query_embedding, texts, embeddings,
    arguments => arguments);
EXCEPTION WHEN assert_failure OR OTHERS THEN
  GET STACKED DIAGNOSTICS _detail = PG_EXCEPTION_DETAIL, _hint = PG_EXCEPTION_HINT,
    _context = PG_EXCEPTION_CONTEXT;
  error := ml_rag._failure(name, SQLSTATE, SQLERRM,
    concat_ws(E'\n', nullif(_detail, ''), coalesce(nullif(substring(_context
    FROM '^(.*?)(?:\n?SQL statement "[^\n]*"|\n?PL/pgSQL function _run_function\M.*)'), ''),
      format('Function %s.', name))), _hint);
END
$$;
