-- parse: options as callers give them, checked against those there are; errors about them have one form.

CREATE FUNCTION ml_rag._bad_option(name text, value jsonb, allowed text, hint text DEFAULT NULL) RETURNS void
LANGUAGE plpgsql STABLE PARALLEL SAFE AS $$
-- purpose: the one form of every complaint about an option; the value is cut so that a log line stays a line
-- Of private options only the length is reported: PostgreSQL writes details into its log.
-- Reads: ml_rag.option
DECLARE
  _got text := coalesce($2::text, 'null');
BEGIN
  IF EXISTS (SELECT FROM ml_rag.option AS o WHERE o.name = $1 AND o.is_private) THEN
    _got := CASE jsonb_typeof($2) WHEN 'string' THEN format('a text of %s characters', length($2 #>> '{}'))
      WHEN 'array' THEN format('an array of %s', jsonb_array_length($2)) WHEN 'object' THEN 'an object'
      ELSE _got END;
  ELSIF length(_got) > 200 THEN
    _got := left(_got, 200) || '…';
  END IF;
  RAISE EXCEPTION USING ERRCODE = '22023',
    MESSAGE = format('invalid value for option "%s"', $1),
    DETAIL = format('Got %s; allowed: %s.', _got, $3),
    HINT = coalesce(left($4, 500),
      CASE $1 WHEN 'filters' THEN 'docs/search.md#filters-and-keywords has operators and examples.'
      ELSE 'SELECT * FROM ml_rag.option lists the options with their ranges and defaults.' END);
END
$$;

CREATE FUNCTION ml_rag._distance_of_words(a text, b text) RETURNS integer
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE AS $$
-- purpose: Levenshtein distance, for hints; two letters that changed places are one change. The words are cut
-- at 40 characters
-- Source: Wagner and Fischer 1974, one row at a time; Damerau 1964.
DECLARE
  _a text[] := string_to_array(left($1, 40), NULL);
  _b text[] := string_to_array(left($2, 40), NULL);
  _previous integer[] := ARRAY(SELECT generate_series(0, cardinality(_b)));
  _before integer[];
  _row integer[];
BEGIN
  FOR i IN 1..cardinality(_a) LOOP
    _row := ARRAY[i];
    FOR j IN 1..cardinality(_b) LOOP
      _row := _row || least(_previous[j + 1] + 1, _row[j] + 1, _previous[j] + (_a[i] <> _b[j])::integer,
        CASE WHEN _a[i] = _b[j - 1] AND _a[i - 1] = _b[j] THEN _before[j - 1] + 1 END);
    END LOOP;
    _before := _previous;
    _previous := _row;
  END LOOP;
  RETURN _previous[cardinality(_b) + 1];
END
$$;

CREATE FUNCTION ml_rag._unknown_option(routine text, name text) RETURNS void
LANGUAGE plpgsql STABLE PARALLEL SAFE AS $$
-- purpose: complain about a key that does not exist, with the nearest one that does
-- Reads: ml_rag.option
DECLARE
  _names text[] := ARRAY(SELECT o.name FROM ml_rag.option AS o WHERE o.routine = $1 ORDER BY 1);
  _nearest text;
BEGIN
  SELECT n INTO _nearest FROM unnest(_names) AS n
  WHERE ml_rag._distance_of_words(lower($2), n) <= greatest(2, length(n) / 3)
  ORDER BY ml_rag._distance_of_words(lower($2), n), n LIMIT 1;
  IF _nearest IS NULL AND length($2) > 3 THEN  -- a part of one, or more than one
    SELECT n INTO _nearest FROM unnest(_names) AS n
    WHERE strpos(n, lower($2)) > 0 OR length(n) > 3 AND strpos(lower($2), n) > 0
    ORDER BY abs(length(n) - length($2)), n LIMIT 1;
  END IF;
  RAISE EXCEPTION USING ERRCODE = '22023',
    MESSAGE = format('unknown option "%s"', left($2, 100)),
    DETAIL = format('Options of %s: %s.', $1, array_to_string(_names, ', ')),
    HINT = coalesce(
      -- it belongs to the store, though "grounding" and "rerank" have one, too
      CASE WHEN $1 = 'ml_rag' AND lower($2) = 'language' THEN 'The language of a store is an option of '
        'ml_rag.enable_keyword_search, and of the routine that makes the store.' END,
      -- what other systems call it
      (SELECT format('That is %s here.', s.option) FROM (VALUES
         ('ml_rag', 'limit', '"n_citations"'), ('ml_rag', 'top_k', '"n_citations"'),
         ('ml_rag', 'k', '"n_citations"'),
         ('ml_rag', 'retrieve_top_k', '"n_citations"'), ('ml_rag', 'table', '"vector_store"'),
         ('ml_rag', 'tables', '"vector_store"'),
         ('ml_rag', 'where', '"filters"'), ('ml_rag', 'filter', '"filters"'),
         ('ml_rag', 'threshold', '"max_distance" of "retrieval_options"'), ('arm', 'limit', '"candidates"'),
         ('arm', 'top_k', '"candidates"'), ('arm', 'node_group', '"in"'),
         ('ml_rank', 'limit', '"top_n"'), ('ml_rank', 'top_k', '"top_n"'),
         ('ml_nl_sql', 'limit', '"max_rows"'),
         ('vector_store_load', 'segment_overlap', '"overlap_tokens" of "chunking"'),
         ('vector_store_load', 'chunk_size', '"segment_tokens" of "chunking"'),
         ('vector_store_load', 'chunk_overlap', '"overlap_tokens" of "chunking"'),
         ('chunking', 'chunk_size', '"segment_tokens"'), ('chunking', 'tokens', '"segment_tokens"'),
         ('chunking', 'chunk_overlap', '"overlap_tokens"'), ('vector_store_columns', 'text', '"segment"'),
         ('vector_store_columns', 'content', '"segment"')
       ) AS s (routine, name, option)
       WHERE s.routine = $1 AND s.name = lower($2)),
      -- an option of one of the objects among the options
      (SELECT format('It belongs in "%s".', o.name) FROM ml_rag.option AS o
        JOIN ml_rag.option AS i ON i.routine = o.keys_of
       WHERE o.routine = $1 AND i.name = $2 ORDER BY o.type = 'array', o.name LIMIT 1),
      CASE WHEN _nearest IS NULL THEN 'Leave it out.' ELSE format('Did you mean "%s"?', _nearest) END);
END
$$;

CREATE FUNCTION ml_rag.parse_options(routine text, options jsonb) RETURNS jsonb
LANGUAGE plpgsql STABLE PARALLEL SAFE SET search_path FROM CURRENT AS $$
-- purpose: check the options of a routine, or of one object among them, and fill in the defaults, also
-- for null. The keys of objects among them are checked too
-- Reads: ml_rag.option
DECLARE
  _parsed jsonb;
  _key text;
  _value jsonb;
  _kind text;
  _allowed text;
  _option record;
BEGIN
  SELECT coalesce(jsonb_object_agg(o.name, o.default_value), '{}') INTO _parsed
  FROM ml_rag.option AS o WHERE o.routine = $1 AND o.default_value IS NOT NULL;
  IF $2 IS NULL OR $2 = 'null' THEN
    RETURN _parsed;
  END IF;
  IF jsonb_typeof($2) <> 'object' THEN
    IF EXISTS (SELECT FROM ml_rag.option AS o WHERE o.name = $1) THEN
      PERFORM ml_rag._bad_option($1, $2, 'a JSON object',
        format('Options are one JSON object, such as %s.',
          CASE $1 WHEN 'index' THEN '{"type": "hnsw"}' ELSE '{"n_citations": 5}' END));
    END IF;
    RAISE EXCEPTION USING ERRCODE = '22023',
      MESSAGE = format('the options of %s are not a JSON object', $1),
      DETAIL = format('Got %s.', jsonb_typeof($2)),
      HINT = 'Options are one JSON object: {"option": value, …}.';
  END IF;

  FOR _option IN
    SELECT e.key, e.value, o.* FROM jsonb_each($2) AS e
    LEFT JOIN LATERAL (SELECT * FROM ml_rag.option AS o
      WHERE o.routine = $1 AND o.name = e.key OFFSET 0) AS o ON true
  LOOP
    _key := _option.key;
    _value := _option.value;
    IF _option.name IS NULL THEN
      PERFORM ml_rag._unknown_option($1, _key);
    END IF;
    _kind := jsonb_typeof(_value);
    IF _option.auto_value IS NOT NULL AND _kind = 'string' AND lower(_value #>> '{}') = 'auto' THEN
      _value := _option.auto_value;
      _kind := jsonb_typeof(_value);
    END IF;
    CONTINUE WHEN _kind = 'null';

    -- _allowed is set where the value does not fit
    _allowed := NULL;
    CASE _option.type
    WHEN 'boolean' THEN
      IF _kind <> 'boolean' THEN _allowed := 'true or false'; END IF;
    WHEN 'text' THEN
      IF _kind <> 'string' OR _value = '""' THEN _allowed := 'a text'; END IF;
    WHEN 'text[]' THEN
      IF _kind <> 'array' OR jsonb_path_exists(_value, 'strict $[*] ? (@.type() != "string")') THEN
        _allowed := 'an array of texts';
      END IF;
    WHEN 'object' THEN
      IF _kind <> 'object' THEN
        _allowed := 'an object';
      ELSIF _key = 'json_schema' AND octet_length(_value::text) > 65536 THEN
        -- as in the model server, but before anything is made of it here: 12 MB of empty arrays took 1.3 GB
        RAISE EXCEPTION USING ERRCODE = '22023', MESSAGE = 'json_schema is too complex',
          DETAIL = format('It has %s bytes; at most 65536 are allowed.', octet_length(_value::text)),
          HINT = 'Shorten its descriptions, or leave properties out.';
      ELSIF _option.keys_of IS NOT NULL THEN
        -- only checked: the function that reads the object fills in its defaults, which may depend on more
        PERFORM ml_rag.parse_options(_option.keys_of, _value);
      END IF;
    WHEN 'any' THEN
      NULL; -- checked by the function that reads it
    WHEN 'array' THEN
      IF _kind <> 'array' THEN _allowed := 'an array'; END IF;
    WHEN 'vector' THEN
      IF _kind NOT IN ('array', 'string') THEN
        _allowed := 'an array of numbers, or the text form of a vector'; END IF;
    WHEN 'choice' THEN
      IF _kind = 'string' THEN
        SELECT to_jsonb(c) INTO _value FROM unnest(_option.choices) AS c
        WHERE lower(c) = lower(_value #>> '{}');
      END IF;
      IF _kind <> 'string' OR _value IS NULL THEN
        _value := $2 -> _key;
        _allowed := array_to_string(_option.choices, ', ');
      END IF;
    ELSE  -- integer, number
      IF _kind <> 'number'
        OR _option.type = 'integer' AND _value::numeric <> trunc(_value::numeric)
        OR _value::numeric < _option.minimum OR _value::numeric > coalesce(_option.maximum, 1e300) THEN
        _allowed := concat(CASE _option.type WHEN 'integer' THEN 'an integer' ELSE 'a number' END,
          CASE WHEN _option.maximum IS NULL THEN ' from ' || _option.minimum
               ELSE format(' from %s to %s', _option.minimum, _option.maximum) END,
          CASE WHEN _option.auto_value IS NOT NULL THEN ', or "auto"' END);
      ELSIF _option.type = 'integer' THEN
        _value := to_jsonb(trunc(_value::numeric)::bigint);
      ELSIF scale(_value::numeric) > 300 THEN
        -- it is read as double precision, which has nothing as small
        _value := to_jsonb(trim_scale(round(_value::numeric, 300)));
      END IF;
    END CASE;
    IF _allowed IS NOT NULL THEN
      -- the value itself may be private
      PERFORM ml_rag._bad_option(_key, _value, _allowed, CASE
        WHEN _option.type = 'text[]' AND _kind = 'string' THEN
          format('Put it in brackets: {"%s": ["…"]}.', _key)
        WHEN _option.type = 'array' AND _kind = 'object' THEN
          format('Put it in brackets: {"%s": [{…}]}.', _key)
        WHEN _option.type = 'array' THEN format('Put it in brackets: {"%s": […]}.', _key)
        -- a word that is the value of one of its keys
        WHEN _option.type = 'object' AND _kind = 'string' THEN (
          SELECT format('Write {"%s": {"%s": %s}}.', _key, i.name, _value) FROM ml_rag.option AS i
          WHERE i.routine = _option.keys_of AND (i.name = 'model_id'
            OR lower(_value #>> '{}') = ANY (i.choices))
          ORDER BY i.name = 'model_id' LIMIT 1)
        WHEN _option.type = 'object' AND _value = 'true' THEN
          format('{"%s": {}} takes its defaults.', _key) END);
    END IF;
    _parsed := jsonb_set(_parsed, ARRAY[_key], _value);
  END LOOP;
  RETURN _parsed;
END
$$;
COMMENT ON FUNCTION ml_rag.parse_options(text, jsonb) IS
$$checks the options of a routine and fills in the defaults
routine: ml_rag, retrieval_options, ml_generate, … as in ml_rag.option. A JSON null stands for the default.
The keys of an object among them (keys_of) are checked, but not filled in.
Errors: 22023, whose detail names the option, the value and what is allowed.$$;

CREATE FUNCTION ml_rag._with_dimensions(options jsonb) RETURNS jsonb
LANGUAGE plpgsql STABLE PARALLEL SAFE AS $$
-- purpose: option "dimensions" becomes a part of the model's id, model@256, for which the model server cuts
-- the vectors: whatever keeps the model's id, such as a marker, keeps that with it
-- Reads: ml_rag.setting
DECLARE
  _model text := coalesce(options ->> 'embed_model_id', ml_rag._get_setting('embed_model_id'));
  _dimensions text := '@' || (options ->> 'dimensions');
BEGIN
  IF _dimensions IS NULL THEN
    RETURN options;
  END IF;
  RETURN options - 'dimensions'
    || jsonb_build_object('embed_model_id', regexp_replace(_model, _dimensions || '$', '') || _dimensions);
END
$$;

CREATE FUNCTION ml_rag._texts(value jsonb) RETURNS text[]
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE AS $$
-- purpose: a JSON array of texts as an array; null for null. PL/pgSQL keeps the plan for the session.
BEGIN
  IF $1 IS NULL THEN
    RETURN NULL;
  END IF;
  RETURN ARRAY(SELECT jsonb_array_elements_text($1));
END
$$;
