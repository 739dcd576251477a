-- job: the job of a batch routine: what it reads, computes and writes, checked before the first row.

CREATE FUNCTION ml_rag._column_reference(value text, argument text, OUT relation text, OUT column_name text)
LANGUAGE plpgsql IMMUTABLE PARALLEL UNSAFE AS $$
-- purpose: 'schema.table.column' as a quoted relation name and a bare column name
DECLARE
  _parts text[];
BEGIN
  BEGIN
    _parts := parse_ident(value);
  EXCEPTION WHEN invalid_parameter_value THEN
    _parts := NULL;
  END;
  IF cardinality(_parts) IS DISTINCT FROM 3 THEN
    RAISE EXCEPTION USING ERRCODE = '22023', MESSAGE = format('invalid %s', argument),
      DETAIL = format('Got %s; expected ''schema.table.column''.',
        coalesce(quote_literal(left(value, 200)), 'NULL'));
  END IF;
  relation := format('%I.%I', _parts[1], _parts[2]);
  column_name := _parts[3];
END
$$;

CREATE FUNCTION ml_rag._column_type(relation regclass, name text, told text) RETURNS oid
LANGUAGE plpgsql STABLE PARALLEL SAFE AS $$
-- purpose: the type of a column; told: what the relation is called in the error where there is none
-- Reads: the catalog
DECLARE
  _type oid := (SELECT a.atttypid FROM pg_attribute AS a
                WHERE a.attrelid = relation AND a.attname = name AND a.attnum > 0 AND NOT a.attisdropped);
  _names text[];
BEGIN
  IF _type IS NULL THEN
    SELECT array_agg(a.attname::text ORDER BY a.attnum) INTO _names FROM pg_attribute AS a
    WHERE a.attrelid = relation AND a.attnum > 0 AND NOT a.attisdropped;
    RAISE EXCEPTION USING ERRCODE = '42703',
      MESSAGE = format('column "%s" of relation "%s" does not exist', name, told),
      DETAIL = format('Its columns: %s.', array_to_string(_names, ', ')),
      HINT = coalesce((
        SELECT format('Did you mean "%s"?', n) FROM unnest(_names) AS n,
          ml_rag._distance_of_words(lower(name), lower(n)) AS d
        WHERE d <= greatest(2, length(n) / 3) ORDER BY d, n LIMIT 1),
        'Name the column of the texts: ''schema.table.column''.');
  END IF;
  RETURN _type;
END
$$;

CREATE FUNCTION ml_rag._vectors_of(relation oid, column_name name) RETURNS jsonb
LANGUAGE plpgsql STABLE PARALLEL SAFE AS $$
-- purpose: a column of vectors, such as a job knows again: another one of its name has other vectors
-- Reads: the catalog
BEGIN
  RETURN (
    SELECT jsonb_build_object('relation', a.attrelid::bigint, 'column', a.attname, 'attnum', a.attnum,
      'model_id', ml_rag._marked_model(col_description(a.attrelid, a.attnum)))
    FROM pg_attribute AS a WHERE a.attrelid = relation AND a.attname = column_name);
END
$$;

CREATE FUNCTION ml_rag._begin_table(routine text, input text, output text, options jsonb) RETURNS jsonb
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SET search_path FROM CURRENT AS $$
-- purpose: check everything before the first row, make the output column, and return what the job works on
-- (backend/jobs/table.py)
-- Writes: the output table, as the caller
DECLARE
  _options jsonb;
  -- options of a column, that those of a row do not have
  _own CONSTANT text[] := CASE routine WHEN 'ml_rag_table' THEN
    '{batch_size,embed_column,fail_on_embedding_error}'
    WHEN 'ml_generate_table' THEN '{batch_size,context_column}' ELSE '{batch_size,details_column}' END;
  _batch jsonb := ml_rag.parse_options(routine, CASE WHEN jsonb_typeof(options) = 'object' THEN
    -- as in _lay_over_filters
    (SELECT json_object_agg(o.key, o.value)::jsonb FROM jsonb_each(options) AS o
      WHERE o.key = ANY (_own)) END);
  _extra text;
  _extra_type oid;
  _details text;
  _model text;
  _in record;
  _out record;
  _input regclass;
  _output regclass;
  _parsed jsonb;
  _job jsonb := '{}';
  _vectors jsonb;
  _type text := 'jsonb';
  _existing text;
  _comment text;
  _key name[];
  _key_types text[];
  _columns text;
  _of_row text;
  _values text;
  _is_row text;
  _missing text;
  _error text;
  _insert text;
  -- of a row that has no result
  _without text;
BEGIN
  _options := options;
  IF jsonb_typeof(_options) = 'object' THEN
    _options := _options - _own;
  END IF;
  CASE routine
  WHEN 'ml_rag_table' THEN
    _parsed := ml_rag._parse_rag_options(_options);
    IF _batch ? 'embed_column' AND _parsed ? 'query_embedding' THEN
      PERFORM ml_rag._bad_option('query_embedding', _parsed -> 'query_embedding',
        'nothing together with "embed_column"');
    END IF;
  WHEN 'ml_generate_table' THEN
    _options := ml_rag.parse_options('ml_generate', _options);
    IF _batch ? 'context_column' AND _options ? 'context' THEN
      PERFORM ml_rag._bad_option('context', _options -> 'context', 'nothing together with "context_column"');
    END IF;
  ELSE
    _options := ml_rag._with_dimensions(ml_rag.parse_options('ml_embed_row', _options));
    _model := coalesce(_options ->> 'embed_model_id', ml_rag._get_setting('embed_model_id'));
  END CASE;
  _without := CASE WHEN _model IS NULL THEN '(%1$s%2$I IS NULL OR %1$s%2$I ->> ''error'' IS NOT NULL)'
    ELSE '%1$s%2$I IS NULL' END;
  _in := ml_rag._column_reference(input, 'input_table_column');
  _out := ml_rag._column_reference(output, 'output_table_column');
  PERFORM ml_rag._check_writable('results cannot be written', to_regclass(_out.relation));

  -- Reading it, if only no row, keeps the table from being dropped until the job stands; statements get its
  -- name and not the regclass, which prints as a number once it is dropped.
  _input := to_regclass(_in.relation);
  IF _input IS NOT NULL THEN
    PERFORM ml_rag._hold(ARRAY[_input::oid]);
    PERFORM ml_rag._check_name(_in.relation, _input);
  END IF;
  EXECUTE format('SELECT FROM %s LIMIT 0', _in.relation);
  _input := _in.relation::regclass;
  PERFORM ml_rag._column_type(_input, _in.column_name, _in.relation);
  _extra := coalesce(_batch ->> 'embed_column', _batch ->> 'context_column');
  IF _extra IS NOT NULL THEN
    _extra_type := ml_rag._column_type(_input, _extra, _in.relation);
    IF _batch ? 'embed_column' AND _extra_type NOT IN ('@vector@.vector'::regtype,
      '@vector@.halfvec'::regtype) THEN
      PERFORM ml_rag._bad_option('embed_column', to_jsonb(_extra), 'a column of type vector or halfvec',
        format('It is %s. ml_embed_table makes such a column.', format_type(_extra_type, NULL)));
    END IF;
  END IF;
  SELECT array_agg(a.attname ORDER BY k.place),
    array_agg(ml_rag._type_name(a.atttypid, a.atttypmod) ORDER BY k.place)
  INTO _key, _key_types
  FROM pg_index AS x
  CROSS JOIN LATERAL unnest(x.indkey::smallint[]) WITH ORDINALITY AS k (attnum, place)
  JOIN pg_attribute AS a ON a.attrelid = x.indrelid AND a.attnum = k.attnum
  WHERE x.indrelid = _input AND x.indisprimary;
  IF _key IS NULL THEN
    RAISE EXCEPTION USING ERRCODE = '22023', MESSAGE = format('relation "%s" has no primary key', _input),
      DETAIL = 'The key says which row a result belongs to.',
      HINT = format('ALTER TABLE %s ADD PRIMARY KEY (…);', _input);
  END IF;

  _output := to_regclass(_out.relation);
  IF _output IS NOT NULL THEN
    PERFORM ml_rag._hold(ARRAY[_output::oid]);
    PERFORM ml_rag._check_name(_out.relation, _output);
  END IF;
  IF _model IS NOT NULL THEN
    -- a first vector tells the dimensions, and whether the model works, before anything is made
    _type := format('@vector@.vector(%s)', @vector@.vector_dims(ml_rag.embed('dimensions', _model)));
  END IF;
  IF _output IS NULL THEN
    EXECUTE format('CREATE TABLE %s (%s, %I %s, PRIMARY KEY (%s))', _out.relation,
      (SELECT string_agg(format('%I %s', k, t), ', ') FROM unnest(_key, _key_types) AS u (k, t)),
      _out.column_name, _type, (SELECT string_agg(quote_ident(k), ', ') FROM unnest(_key) AS k));
    _output := _out.relation::regclass;
  ELSE
    EXECUTE format('SELECT FROM %s LIMIT 0', _out.relation);
    SELECT format_type(a.atttypid, a.atttypmod) INTO _existing FROM pg_attribute AS a
    WHERE a.attrelid = _output AND a.attname = _out.column_name AND a.attnum > 0 AND NOT a.attisdropped;
    IF EXISTS (SELECT FROM unnest(_key) AS k WHERE NOT EXISTS (
        SELECT FROM pg_attribute AS a WHERE a.attrelid = _output AND a.attname = k AND NOT a.attisdropped))
          THEN
      RAISE EXCEPTION USING ERRCODE = '22023',
        MESSAGE = format('relation "%s" lacks the key of "%s"', _output, _input),
        DETAIL = format('Key: %s.', array_to_string(_key, ', ')),
        HINT = 'Name a table that does not exist yet; it is created with the right key.';
    ELSIF _existing IS NULL THEN
      EXECUTE format('ALTER TABLE %s ADD COLUMN %I %s', _out.relation, _out.column_name, _type);
    -- quote_all_identifiers may put quotes around names
    ELSIF _model IS NULL AND replace(_existing, '"', '') NOT IN ('json', 'jsonb')
      OR replace(_existing, '"', '') <> replace(_type, '"', '') AND _model IS NOT NULL THEN
      RAISE EXCEPTION USING ERRCODE = '22023',
        MESSAGE = format('column "%s" of relation "%s" has the wrong type', _out.column_name, _output),
        DETAIL = format('It is %s; %s writes %s.', _existing, routine, _type),
        HINT = 'Name a column that does not exist yet: it is added with the right type.';
    END IF;
    _type := coalesce(_existing, _type);
  END IF;
  _details := _batch ->> 'details_column';
  IF _details IS NOT NULL THEN
    IF _details = ANY (_key || _out.column_name::name
      || CASE WHEN _input = _output THEN _in.column_name::name END) THEN
      PERFORM ml_rag._bad_option('details_column', to_jsonb(_details), 'a column of its own');
    END IF;
    SELECT replace(format_type(a.atttypid, NULL), '"', '') INTO _existing FROM pg_attribute AS a
    WHERE a.attrelid = _output AND a.attname = _details AND a.attnum > 0 AND NOT a.attisdropped;
    IF NOT FOUND THEN
      EXECUTE format('ALTER TABLE %s ADD COLUMN %I text', _out.relation, _details);
    ELSIF _existing NOT IN ('text', 'character varying') THEN
      PERFORM ml_rag._bad_option('details_column', to_jsonb(_details),
        format('a column of type text; it is %s', _existing));
    END IF;
  END IF;
  IF routine = 'ml_rag_table' THEN
    -- the model of the questions: that of their embeddings, where their column says so
    _vectors := ml_rag._vectors_of(_input, _extra);
    _existing := _vectors ->> 'model_id';
    IF _existing IS NOT NULL AND NOT _parsed ? 'embed_model_id' THEN
      _options := coalesce(nullif(_options, 'null'), '{}') || jsonb_build_object('embed_model_id', _existing);
      _parsed := _parsed || jsonb_build_object('embed_model_id', _existing);
    END IF;
    IF (_batch -> 'fail_on_embedding_error')::boolean THEN
      _existing := coalesce(_parsed ->> 'embed_model_id', (ml_rag._discover(_parsed))[1].embed_model_id,
        ml_rag._get_setting('embed_model_id'));
    ELSE
      _existing := NULL;
    END IF;
    _job := jsonb_build_object('must_embed', _existing);
  END IF;

  IF _model IS NOT NULL THEN
    IF ml_rag._vectors_of(_output, _out.column_name) ->> 'model_id' IS NULL THEN
      PERFORM ml_rag._lock_comments(_output);
    END IF;
    _vectors := ml_rag._vectors_of(_output, _out.column_name);
    _existing := _vectors ->> 'model_id';
    IF _existing IS NULL THEN
      _comment := col_description(_output, (_vectors ->> 'attnum')::integer);
      _vectors := _vectors || jsonb_build_object('model_id', _model);
      EXECUTE format('COMMENT ON COLUMN %s.%I IS %L', _out.relation, _out.column_name,
        -- where it is read: at the end of a very long comment it would not be
        CASE WHEN length(_comment) > 9000 THEN concat('GENAI_OPTIONS=EMBED_MODEL_ID=', _model, ' ', _comment)
             ELSE concat_ws(' ', _comment, 'GENAI_OPTIONS=EMBED_MODEL_ID=' || _model) END);
    ELSIF _existing <> _model THEN
      RAISE EXCEPTION USING ERRCODE = '22023',
        MESSAGE = format('column "%s" of relation "%s" holds vectors of another model',
          _out.column_name, _output),
        DETAIL = format('It holds vectors of %s; the call is for %s.', _existing, _model),
        HINT = 'Write to another column, or name that model in "embed_model_id".';
    END IF;
    PERFORM ml_rag._notice_changes(_output, _out.column_name, _in.column_name) WHERE _input = _output;
  END IF;

  _columns := (SELECT string_agg(quote_ident(k), ', ' ORDER BY place)
    FROM unnest(_key) WITH ORDINALITY AS u (k, place));
  _of_row := (SELECT string_agg(format('t.%I', k), ', ' ORDER BY place)
    FROM unnest(_key) WITH ORDINALITY AS u (k, place));
  -- the rows that have no result yet, or a failed one
  _missing := format('FROM %s AS t %s WHERE t.%I IS NOT NULL AND %s', _in.relation,
    CASE WHEN _input <> _output THEN
      format('LEFT JOIN %s AS o ON %s', _out.relation, ml_rag._same_key('o', _key, 't', _key)) END,
    _in.column_name, format(_without, CASE WHEN _input <> _output THEN 'o.' ELSE 't.' END, _out.column_name));
  -- of a row whose key is $1
  _values := (SELECT string_agg(format('$1[%s]::%s', i, t), ', ' ORDER BY i)
    FROM unnest(_key_types) WITH ORDINALITY AS u (t, i));
  _is_row := format('(%s) = (%s)', _columns, _values);
  -- an error takes no result's place
  IF _model IS NULL OR _details IS NOT NULL THEN
    _error := format('UPDATE %s SET %I = $2::%s WHERE %s AND %s', _out.relation,
      coalesce(_details, _out.column_name),
      CASE WHEN _details IS NULL THEN _type ELSE 'text' END, format(_without, '', _out.column_name), _is_row);
  END IF;
  -- Another call may insert the row at the same time; then both have an answer, and the later one stays.
  _insert := 'INSERT INTO %s (%s, %I) VALUES (%s, $2::%s) ON CONFLICT DO NOTHING';
  RETURN _job || jsonb_build_object(
    'routine', routine, 'options', _options, 'model', _model, 'batch_size', _batch -> 'batch_size',
    'relation', ml_rag._full_name(_output), 'vectors', _vectors,
    -- also of the stores that each row searches
    'names', coalesce((SELECT jsonb_object_agg(format('%I.%I', n.nspname, c.relname), c.oid::text)
      FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
      WHERE ml_rag._full_names(n.nspname, c.relname)
        && ml_rag._texts(ml_rag._layered(_parsed) -> 'vector_store')
        AND c.relkind IN ('r', 'p', 'f', 'v', 'm')), '{}')
      || jsonb_build_object(_in.relation, _input::oid::text, _out.relation, _output::oid::text),
    'count', concat('SELECT count(*) ', _missing),
    'key', _key, 'key_types', _key_types,
    -- a batch of rows t, of which more conditions stand between the two. A row that is too long comes without
    -- its texts, and the batch ends after "most" bytes: roles that write into the table cannot fill the
    -- memory of the session that calls
    'read', ARRAY[format(
      'SELECT json_agg(json_build_object(''key'', r.key, ''bytes'', r.bytes, ''size'', r.size,'
      ' ''input'', CASE WHEN r.bytes <= 10000000 THEN r.input END,'
      ' ''extra'', CASE WHEN r.bytes <= 10000000 THEN r.extra END) ORDER BY r.place)'
      ' FROM (SELECT r.*, sum(r.size) OVER (ORDER BY r.place) - r.size AS former'
      ' FROM (SELECT r.*, r.bytes + octet_length(r.key::text) AS size FROM ('
      'SELECT r.*, octet_length(r.input) + coalesce(octet_length(r.extra), 0) AS bytes FROM ('
      'SELECT %s AS key, t.%I::text AS input, %s AS extra,'
      ' row_number() OVER (ORDER BY %5$s) AS place %4$s',
      ml_rag._key_text('t', _key), _in.column_name,
      CASE WHEN _extra IS NULL THEN 'NULL::text' ELSE format('t.%I::text', _extra) END, _missing, _of_row),
      ' ORDER BY place LIMIT ($1 ->> ''size'')::integer) AS r) AS r) AS r) AS r'
      ' WHERE r.former <= ($1 ->> ''most'')::bigint'],
    'update', format('UPDATE %s SET %I = $2::%s%s WHERE %s', _out.relation, _out.column_name, _type,
      ', ' || quote_ident(_details) || ' = NULL', _is_row)
      -- a text that was changed meanwhile waits for the next call
      || CASE WHEN _model IS NOT NULL AND _input = _output THEN
        format(' AND %I::text COLLATE "C" = $3', _in.column_name) ELSE '' END,
    'insert', CASE WHEN _input <> _output THEN
      format(_insert, _out.relation, _columns, _out.column_name, _values, _type) END,
    'note', _error,
    'note_insert', CASE WHEN _input <> _output AND _error IS NOT NULL THEN
      format(_insert, _out.relation, _columns, coalesce(_details, _out.column_name), _values,
        CASE WHEN _details IS NULL THEN _type ELSE 'text' END) END,
    -- whether a row has a result
    'result', format('SELECT FROM %s WHERE NOT %s AND %s', _out.relation,
      format(_without, '', _out.column_name), _is_row));
END
$$;
