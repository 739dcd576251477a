-- condition: option filters as SQL.
--
-- ml_rag._filter_tree checks it and brings it into one form, whatever the store; ml_rag._filter_node makes
-- SQL of that for one store. No value and no key of the caller ever becomes SQL text: values and JSON paths
-- stand in a parameter (a text[], $3 unless another one is named), and the columns named are those the
-- catalog has.

CREATE FUNCTION ml_rag._filter_terms(key text, value jsonb) RETURNS jsonb
LANGUAGE plpgsql STABLE PARALLEL SAFE AS $$
-- purpose: one key of filters, with its value or operators, as an array of conditions {key, operator, values}
-- that all must hold. Few operators are left: eq, ne, nin and exists become in, those that deny inside
-- {"not": …}; null among the values of in stands for a row without a value.
DECLARE
  _known text[] := '{eq,ne,in,nin,lt,lte,gt,gte,between,like,ilike,exists}';
  -- what others write
  _signs CONSTANT jsonb := '{"=": "eq", "==": "eq", "!=": "ne", "<>": "ne", "<": "lt", "<=": "lte",
    "le": "lte", ">": "gt", ">=": "gte", "ge": "gte"}';
  _operators jsonb := CASE jsonb_typeof(value) WHEN 'object' THEN value
                      WHEN 'array' THEN jsonb_build_object('in', value)
                      ELSE jsonb_build_object('eq', value) END;
  _terms jsonb := '[]';
  _term jsonb;
  _operator text;
  _value jsonb;
  _kind text;
  _allowed text;
  _nearest text;
BEGIN
  IF _operators = '{}' THEN
    PERFORM ml_rag._bad_option('filters', jsonb_build_object(key, value),
      'a value, a list or an object of operators');
  ELSIF key LIKE '/%' AND key ~ '~(?![01])' THEN
    PERFORM ml_rag._bad_option('filters', to_jsonb(key), 'a path, in which ~1 stands for a slash and ~0 for '
      'a tilde');
  END IF;
  FOR _operator, _value IN SELECT o.key, o.value FROM jsonb_each(_operators) AS o LOOP
    _kind := jsonb_typeof(_value);
    _allowed := CASE
      WHEN _operator IN ('eq', 'ne') THEN
        CASE WHEN _kind IN ('object', 'array') THEN 'a text, a number, true, false or null' END
      WHEN _operator IN ('in', 'nin') THEN
        CASE WHEN _kind <> 'array'
               OR jsonb_path_exists(_value, 'strict $[*] ? (@.type() == "object" || @.type() == "array")')
             THEN 'a list of texts, numbers, true, false or null' END
      WHEN _operator IN ('lt', 'lte', 'gt', 'gte') THEN
        CASE WHEN _kind NOT IN ('number', 'string') THEN 'a number or a text' END
      WHEN _operator = 'between' THEN
        CASE WHEN _kind <> 'array' OR jsonb_array_length(_value) <> 2
               OR jsonb_typeof(_value -> 0) <> jsonb_typeof(_value -> 1)
               OR jsonb_typeof(_value -> 0) NOT IN ('number', 'string')
             THEN 'the lowest and the highest value, two numbers or two texts' END
      WHEN _operator IN ('like', 'ilike') THEN
        CASE WHEN _kind <> 'string' THEN 'a pattern with % and _'
             -- compared with each place of a text, and not cancelled within one
             WHEN length(_value #>> '{}') > 400 THEN 'a pattern of at most 400 characters'
             -- an odd run of them at the end: the last one has nothing to escape
             WHEN length(substring(_value #>> '{}' FROM '\\*$')) % 2 = 1
             THEN 'a pattern that does not end within an escape' END
      WHEN _operator = 'exists' THEN CASE WHEN _kind <> 'boolean' THEN 'true or false' END
      ELSE 'unknown' END;
    IF _allowed = 'unknown' THEN
      SELECT o INTO _nearest FROM unnest(_known) AS o, ml_rag._distance_of_words(lower(_operator), o) AS d
      WHERE d <= greatest(1, length(o) / 3) ORDER BY d, o LIMIT 1;
      RAISE EXCEPTION USING ERRCODE = '22023',
        MESSAGE = format('unknown operator "%s" in option "filters"', left(_operator, 100)),
        DETAIL = format('Under the key "%s"; operators: %s.', left(key, 100), array_to_string(_known, ', ')),
        HINT = CASE WHEN _signs ? lower(_operator) THEN
            format('That is "%s" here.', _signs ->> lower(_operator))
          WHEN _nearest IS NOT NULL THEN format('Did you mean "%s"?', _nearest)
          WHEN lower(key) = 'metadata' THEN
            format('A key of the metadata stands by itself: {%s: …}.', to_json(left(_operator, 100)))
          ELSE 'A key inside an object is written as a path: {"/address/city": "Rome"}.' END;
    ELSIF _allowed IS NOT NULL THEN
      PERFORM ml_rag._bad_option('filters', jsonb_build_object(key, jsonb_build_object(_operator, _value)),
        format('%s for "%s"', _allowed, _operator));
    END IF;
    _term := jsonb_build_object('key', key) || CASE
      WHEN _operator IN ('eq', 'ne') THEN jsonb_build_object('operator', 'in',
        'values', jsonb_build_array(_value))
      WHEN _operator IN ('in', 'nin') THEN jsonb_build_object('operator', 'in', 'values', _value)
      WHEN _operator = 'exists' THEN '{"operator": "in", "values": [null]}'
      WHEN _operator = 'between' THEN jsonb_build_object('operator', _operator, 'values', _value)
      ELSE jsonb_build_object('operator', _operator, 'values', jsonb_build_array(_value)) END;
    IF _operator IN ('ne', 'nin') OR _operator = 'exists' AND _value = 'true' THEN
      _term := jsonb_build_object('not', _term);
    END IF;
    _terms := _terms || jsonb_build_array(_term);
  END LOOP;
  RETURN _terms;
END
$$;

CREATE FUNCTION ml_rag._filter_tree(filters jsonb, level integer DEFAULT 1) RETURNS jsonb
LANGUAGE plpgsql STABLE PARALLEL SAFE AS $$
-- purpose: check option filters, whatever the stores, and bring it into one form: {"and": […]}, {"or": […]},
-- {"not": …} and the conditions of ml_rag._filter_terms
DECLARE
  -- an array, not jsonb, which is copied with each part that is added
  _parts jsonb[] := '{}';
  _tree jsonb;
  _term jsonb;
  _key text;
  _value jsonb;
BEGIN
  IF level > 8 THEN
    PERFORM ml_rag._bad_option('filters', filters, 'at most 8 levels of "and", "or" and "not"');
  ELSIF jsonb_typeof(filters) <> 'object' THEN
    PERFORM ml_rag._bad_option('filters', filters, 'an object of conditions');
  ELSIF level = 1 AND (
    -- all there is, then the values alone; nothing that is allowed lies deeper
    (SELECT count(*) > 20000 FROM jsonb_path_query(filters, 'strict $.**{0 to 20}'))
    OR (SELECT count(*) > 10000
        FROM jsonb_path_query(filters,
          'strict $.**{0 to 20} ? (@.type() != "object" && @.type() != "array")'))) THEN
    PERFORM ml_rag._bad_option('filters', filters, 'at most 10000 values');
  END IF;
  FOR _key, _value IN SELECT e.key, e.value FROM jsonb_each(filters) AS e LOOP
    IF _key IN ('and', 'or') THEN
      IF jsonb_typeof(_value) <> 'array' THEN
        PERFORM ml_rag._bad_option('filters', jsonb_build_object(_key, _value), 'an array of objects',
          format('The key of that name is written "/%s".', _key));
      END IF;
      _parts := array_append(_parts, jsonb_build_object(_key, (
        SELECT coalesce(json_agg(ml_rag._filter_tree(m, level + 1))::jsonb, '[]')
        FROM jsonb_array_elements(_value) AS m)));
    ELSIF _key = 'not' THEN
      _parts := array_append(_parts, jsonb_build_object('not', ml_rag._filter_tree(_value, level + 1)));
    ELSE
      FOR _term IN SELECT t FROM jsonb_array_elements(ml_rag._filter_terms(_key, _value)) AS t LOOP
        _parts := array_append(_parts, _term);
      END LOOP;
    END IF;
  END LOOP;
  _tree := jsonb_build_object('and', to_jsonb(_parts));
  IF level = 1 AND (
    SELECT count(*) > 1000
    FROM jsonb_path_query(_tree, 'strict $.** ? (@.type() == "object" && exists (@.operator))')) THEN
    PERFORM ml_rag._bad_option('filters', filters, 'at most 1000 conditions');
  END IF;
  RETURN _tree;
END
$$;

CREATE FUNCTION ml_rag._filter_json(
  target text, path text, operator text, given jsonb, parameter text, INOUT arguments text[],
    OUT condition text
)
LANGUAGE plpgsql STABLE PARALLEL SAFE AS $$
-- purpose: a condition of filters on a JSON value: target is SQL of type jsonb, path the JSON path of the
-- value in it
-- JSON paths compare numbers with numbers and texts with texts (by code point), look into arrays, and never
-- fail: a value of another type does not match. Values stand in the path, the path in the parameter, and a
-- GIN index on the target serves `@?`. The type is asked for because arrays would be opened twice, once for
-- the filter and once for the comparison.
DECLARE
  _comparison text := CASE operator WHEN 'lt' THEN '<' WHEN 'lte' THEN '<=' WHEN 'gt' THEN '>'
    WHEN 'gte' THEN '>=' END;
  _present jsonb := jsonb_path_query_array(given, 'strict $[*] ? (@ != null)');
  _first integer := cardinality(arguments) + 1;
  _test text;
BEGIN
  IF operator IN ('like', 'ilike') THEN
    arguments := arguments || ARRAY[path || ' ? (@.type() == "string")', given ->> 0];
    condition := format('EXISTS (SELECT FROM pg_catalog.jsonb_path_query(%1$s, '
      '%2$s[%3$s]::pg_catalog.jsonpath) AS e (v) '
      'WHERE (e.v OPERATOR(pg_catalog.#>>) ''{}'') OPERATOR(pg_catalog.%4$s) %2$s[%5$s])',
      target, parameter, _first, CASE operator WHEN 'like' THEN '~~' ELSE '~~*' END, _first + 1);
    RETURN;
  END IF;
  IF jsonb_array_length(_present) > 16 THEN
    -- a hashed search instead of as many comparisons
    arguments := arguments || (path || ' ? (@.type() != "array")')
      || ARRAY(SELECT v::text FROM jsonb_array_elements(_present) AS v);
    condition := format('EXISTS (SELECT FROM pg_catalog.jsonb_path_query(%1$s, '
      '%2$s[%3$s]::pg_catalog.jsonpath) AS e (v) '
      'WHERE e.v OPERATOR(pg_catalog.=) ANY (%2$s[%4$s:%5$s]::pg_catalog.jsonb[]))',
      target, parameter, _first, _first + 1, cardinality(arguments));
  ELSIF jsonb_array_length(_present) > 0 THEN
    _test := CASE operator
      WHEN 'in' THEN (SELECT string_agg(concat('@ == ', v), ' || ') FROM jsonb_array_elements(_present) AS v)
      WHEN 'between' THEN format('@ >= %s && @ <= %s', _present -> 0, _present -> 1)
      ELSE format('@ %s %s', _comparison, _present -> 0) END;
    arguments := arguments || format('%s ? (@.type() != "array" && (%s))', path, _test);
    condition := format('%s OPERATOR(pg_catalog.@?) %s[%s]::pg_catalog.jsonpath', target, parameter, _first);
  ELSE
    condition := 'false';
  END IF;
  IF given @> '[null]' THEN
    arguments := arguments || (path || '.type() ? (@ != "null")');
    condition := format('%s OR (%s OPERATOR(pg_catalog.@?) %s[%s]::pg_catalog.jsonpath) IS NOT TRUE',
      condition, target, parameter, cardinality(arguments));
  END IF;
END
$$;

CREATE FUNCTION ml_rag._filter_column(
  key text, target text, type regtype, operator text, given jsonb, parameter text, INOUT arguments text[],
    OUT condition text
)
LANGUAGE plpgsql STABLE PARALLEL UNSAFE AS $$
-- purpose: a condition of filters on a column (target, a column reference) of a type of pg_catalog, or an
-- enum
-- Null condition: columns of that type cannot be filtered. Operators and casts are those of pg_catalog, by
-- name: a cast or an operator of a user-defined type never runs.
-- Errors: 22023 a value that the type does not take
DECLARE
  _values text[] := ARRAY(SELECT v #>> '{}' FROM jsonb_array_elements(given) AS v WHERE v <> 'null');
  _first integer := cardinality(arguments) + 1;
  _last integer := cardinality(arguments) + cardinality(_values);
  _type name;
  _is_array boolean;
  _element text := target;
  _cast text;
  _comparison text := CASE operator WHEN 'lt' THEN '<' WHEN 'lte' THEN '<=' WHEN 'gt' THEN '>'
    WHEN 'gte' THEN '>='
                                    WHEN 'like' THEN '~~' WHEN 'ilike' THEN '~~*' END;
BEGIN
  IF operator = 'in' AND cardinality(_values) = 0 THEN
    condition := CASE WHEN given @> '[null]' THEN format('%s IS NULL', target) ELSE 'false' END;
    RETURN;
  END IF;
  SELECT coalesce(e.typname, t.typname), e.oid IS NOT NULL INTO _type, _is_array
  FROM pg_type AS t LEFT JOIN pg_type AS e ON e.oid = t.typelem AND e.typarray = t.oid
  WHERE t.oid = type AND (t.typnamespace = 'pg_catalog'::regnamespace OR t.typtype = 'e');
  IF (SELECT t.typtype = 'e' FROM pg_type AS t WHERE t.oid = type) THEN
    -- by label, which concat writes without any cast: casts of the type could be any role's functions
    target := format('CASE WHEN %s IS NOT NULL THEN pg_catalog.concat(%1$s) END', target);
    _element := target;
    IF operator IN ('lt', 'lte', 'gt', 'gte', 'between') THEN
      RETURN;
    END IF;
    _type := 'text';
  ELSIF _type IS NULL OR _type NOT IN ('bool', 'int2', 'int4', 'int8', 'numeric', 'float4', 'float8',
    'text', 'varchar',
    'bpchar', 'name', 'date', 'time', 'timetz', 'timestamp', 'timestamptz', 'interval', 'uuid', 'inet',
      'cidr') THEN
    RETURN;
  END IF;
  IF operator IN ('like', 'ilike') AND _type NOT IN ('text', 'varchar', 'bpchar', 'name') THEN
    RETURN;
  END IF;
  IF _is_array THEN
    _element := 'e.v';
    _cast := format('pg_catalog.%I', _type);
  ELSIF _type IN ('int2', 'int4', 'int8') THEN
    -- whole numbers as bigint, which the indexes of all three serve; 2002.5 and 1e30 can be compared as well
    _cast := 'pg_catalog.int8';
    IF EXISTS (SELECT FROM unnest(_values) AS v WHERE v !~ '^-?[0-9]{1,18}$') THEN
      _cast := 'pg_catalog.numeric';
      target := target || '::pg_catalog.numeric';
      _element := target;
    END IF;
  ELSE
    _cast := CASE WHEN _type IN ('varchar', 'name') THEN 'pg_catalog.text'
      WHEN _type = 'cidr' THEN 'pg_catalog.inet'
                  ELSE format('pg_catalog.%I', _type) END;
  END IF;
  IF operator IN ('like', 'ilike') THEN
    _cast := 'pg_catalog.text';
    _element := _element || '::pg_catalog.text COLLATE pg_catalog."default"';
  END IF;
  BEGIN
    EXECUTE format('SELECT $1::%s[]', _cast) USING _values;
  EXCEPTION WHEN data_exception THEN
    PERFORM ml_rag._bad_option('filters', jsonb_build_object(key, given),
      -- PostgreSQL's words hold the whole value
      format('values of the column''s type, %s (%s)', type, left(SQLERRM, 200)));
  END;

  arguments := arguments || _values;
  IF operator = 'in' THEN
    condition := CASE
      WHEN _is_array THEN format('%s OPERATOR(pg_catalog.&&) %s[%s:%s]::%s[]', target, parameter, _first,
        _last, _cast)
      WHEN _first = _last THEN format('%s OPERATOR(pg_catalog.=) %s[%s]::%s', target, parameter,
        _first, _cast)
      ELSE format('%s OPERATOR(pg_catalog.=) ANY (%s[%s:%s]::%s[])', target, parameter, _first,
        _last, _cast) END
      || CASE WHEN given @> '[null]' THEN format(' OR %s IS NULL', target) ELSE '' END;
    RETURN;
  END IF;
  condition := CASE operator
    WHEN 'between' THEN format('%1$s OPERATOR(pg_catalog.>=) %5$s[%2$s]::%4$s '
      'AND %1$s OPERATOR(pg_catalog.<=) %5$s[%3$s]::%4$s', _element, _first, _last, _cast, parameter)
    ELSE format('%s OPERATOR(pg_catalog.%s) %s[%s]::%s', _element, _comparison, parameter, _first, _cast) END;
  IF _is_array THEN
    condition := format('EXISTS (SELECT FROM pg_catalog.unnest(%s) AS e (v) WHERE %s)', target, condition);
  END IF;
END
$$;

CREATE FUNCTION ml_rag._filter_target(store ml_rag.store, key text, OUT column_name name, OUT type regtype,
  OUT in_metadata boolean)
LANGUAGE plpgsql STABLE PARALLEL SAFE AS $$
-- purpose: what a key of filters names in a store: a column that the caller may select, else a key of the
-- metadata; null column = neither  Reads: the catalog
BEGIN
  in_metadata := false;
  IF key NOT LIKE '/%' THEN
    SELECT a.attname, ml_rag._base_type(a.atttypid) INTO column_name, type FROM pg_attribute AS a
    WHERE a.attrelid = store.relation AND a.attnum > 0 AND NOT a.attisdropped
      AND a.attname = coalesce(CASE key
        WHEN 'document_name' THEN store.document_name WHEN 'document_id' THEN store.document_id
        WHEN 'segment_number' THEN store.segment_number WHEN 'segment' THEN store.segment
        WHEN 'segment_embedding' THEN store.segment_embedding WHEN 'metadata' THEN
          store.metadata END::text, key)
      AND has_column_privilege(store.relation, a.attnum, 'SELECT');
  END IF;
  IF column_name IS NULL THEN
    in_metadata := true;
    SELECT a.attname, ml_rag._base_type(a.atttypid) INTO column_name, type FROM pg_attribute AS a
    WHERE a.attrelid = store.relation AND a.attname = store.metadata AND NOT a.attisdropped
      AND ml_rag._base_type(a.atttypid) IN ('json'::regtype, 'jsonb'::regtype);
  END IF;
END
$$;

CREATE FUNCTION ml_rag._filter_node(store ml_rag.store, node jsonb, parameter text, INOUT arguments text[],
  OUT condition text)
LANGUAGE plpgsql STABLE PARALLEL UNSAFE AS $$
-- purpose: a node of ml_rag._filter_tree as a condition on the rows t of a store
-- A condition on a missing value is null or false, which is all the same below "and" and "or"; "not" turns
-- what is not true into true, and so is exactly the opposite.
DECLARE
  _key text := node ->> 'key';
  _member jsonb;
  _part text;
  _parts text[] := '{}';
  _column name;
  _type regtype;
  _in_metadata boolean;
  _path text;
BEGIN
  IF node ? 'not' THEN
    SELECT n.arguments, n.condition INTO arguments, _part
    FROM ml_rag._filter_node(store, node -> 'not', parameter, arguments) AS n;
    condition := format('(%s) IS NOT TRUE', _part);
    RETURN;
  ELSIF _key IS NULL THEN
    FOR _member IN SELECT m FROM jsonb_array_elements(coalesce(node -> 'and', node -> 'or')) AS m LOOP
      SELECT n.arguments, n.condition INTO arguments, _part
      FROM ml_rag._filter_node(store, _member, parameter, arguments) AS n;
      _parts := _parts || format('(%s)', _part);
    END LOOP;
    condition := coalesce(nullif(array_to_string(_parts,
      CASE WHEN node ? 'and' THEN ' AND ' ELSE ' OR ' END), ''),
      (node ? 'and')::text);
    RETURN;
  END IF;

  SELECT f.column_name, f.type, f.in_metadata INTO _column, _type, _in_metadata
  FROM ml_rag._filter_target(store, _key) AS f;
  IF _column IS NOT NULL AND _type NOT IN ('json'::regtype, 'jsonb'::regtype) THEN
    SELECT c.arguments, c.condition INTO arguments, condition
    FROM ml_rag._filter_column(_key, format('t.%I', _column),
      _type, node ->> 'operator', node -> 'values', parameter, arguments) AS c;
    IF condition IS NULL THEN
      RAISE EXCEPTION USING ERRCODE = '22023',
        MESSAGE = format('operator is not supported for column "%s"', left(_key, 100)),
        DETAIL = format('Column %I of %s is of type %s; the operator is "%s".', _column,
          store.vector_store, _type, node ->> 'operator'),
        HINT = CASE WHEN (SELECT t.typtype FROM pg_type AS t WHERE t.oid = _type) = 'e' THEN
          'Enums do not support ranges.'
          WHEN node ->> 'operator' IN ('like', 'ilike') THEN
            format('"%s" requires a column of text.', node ->> 'operator')
          ELSE 'A column of this type supports only "exists".' END;
    END IF;
    RETURN;
  END IF;

  IF _column IS NULL THEN
    -- it has no values; ml_rag._warn_of_unknown_columns says so, which is asked where a condition has this:
    -- retrieval/filters.py
    condition := (node ->> 'operator' = 'in' AND node -> 'values' @> '[null]')::text;
    RETURN;
  END IF;
  -- a value in JSON: of a column of such a type, or of the metadata
  _path := CASE WHEN NOT _in_metadata THEN '$'
    WHEN _key LIKE '/%' THEN (
      SELECT '$' || string_agg('.' || to_jsonb(replace(replace(k, '~1', '/'), '~0', '~'))::text,
        '' ORDER BY i)
      FROM regexp_split_to_table(substr(_key, 2), '/') WITH ORDINALITY AS s (k, i))
    ELSE '$.' || to_jsonb(_key)::text END;
  SELECT j.arguments, j.condition INTO arguments, condition FROM ml_rag._filter_json(
    format(CASE _type WHEN 'jsonb'::regtype THEN 't.%I' ELSE 'ml_rag._as_jsonb(t.%I)' END, _column), _path,
    node ->> 'operator', node -> 'values', parameter, arguments) AS j;
END
$$;

CREATE FUNCTION ml_rag.condition(store ml_rag.store, filters jsonb, INOUT arguments text[],
  parameter text DEFAULT '$3', OUT condition text)
LANGUAGE plpgsql STABLE PARALLEL UNSAFE SET search_path FROM CURRENT AS $$
-- purpose: the stage: option filters as SQL
BEGIN
  SELECT n.arguments, n.condition INTO arguments, condition
  FROM ml_rag._filter_node(store, ml_rag._filter_tree(filters), parameter, coalesce(arguments, '{}')) AS n;
@CATCH@
END
$$;
COMMENT ON FUNCTION ml_rag.condition(ml_rag.store, jsonb, text[], text) IS
$$option filters as a condition on the rows of a store
condition: SQL on the alias t; arguments: what to bind as the parameter, beginning with those that were given.
filters: {"key": value}, or a list of values (any of them), or {"operator": value}; all conditions of an
object must hold; "and" and "or" take arrays of objects, "not" an object. Operators: eq, ne, in, nin, lt, lte,
gt, gte, between [low, high] (both included), like, ilike, exists (true or false).
A key names the column of that name (document_name, …: the mapped one) if the caller may select it, else a key
of the metadata. One that begins with / is a path into the metadata in the form of a JSON Pointer
("/address/city", ~1 for /, ~0 for ~), which also looks into each element of arrays.
JSON values: numbers compare with numbers, texts with texts by code point; a value of another type does not
match; an array matches if one of its elements does. Columns: the value is read as the column's type and
compared as that type; an array matches if one element does; enums compare by label and have no ranges. Null
matches a missing key, a JSON null or an SQL NULL; exists is the opposite. ne, nin and not are true for every
row for which eq, in and the condition are not, also for those without a value. A store with neither the
column nor metadata has no values; a call warns of such stores.
Errors: 22023 unknown operator, wrong value, a value that the column's type does not take, a column of a type
that has no such operator, a pattern of more than 400 characters, more than 8 levels, 1000 conditions or 10000
values.$$;

CREATE FUNCTION ml_rag._nearest_column(stores ml_rag.store[], key text) RETURNS text
LANGUAGE plpgsql STABLE PARALLEL SAFE AS $$
-- purpose: the column of the stores that a key of filters may have been meant for, in another case or spelt
-- almost so
-- Only those that the caller may select.  Reads: the catalog
BEGIN
  RETURN (
    SELECT n.name FROM (
      SELECT DISTINCT a.attname::text AS name FROM unnest(stores) AS s
      JOIN pg_attribute AS a ON a.attrelid = s.relation
      WHERE a.attnum > 0 AND NOT a.attisdropped AND abs(length(a.attname::text) - length(key)) <= 2
        AND has_column_privilege(s.relation, a.attnum, 'SELECT')) AS n
    CROSS JOIN LATERAL ml_rag._distance_of_words(lower(key), lower(n.name)) AS d
    WHERE n.name <> key AND d <= least(2, (length(n.name) - 1) / 2) ORDER BY d, n.name COLLATE "C" LIMIT 1);
END
$$;

CREATE FUNCTION ml_rag._warn_of_unknown_columns(stores ml_rag.store[], filters jsonb) RETURNS void
LANGUAGE plpgsql STABLE PARALLEL SAFE AS $$
-- purpose: say once which stores have nothing that a key of filters could name, with the column that it may
-- have been meant for
DECLARE
  _key text;
  _lacking text[];
BEGIN
  FOR _key IN SELECT DISTINCT n.term ->> 'key'
              FROM jsonb_path_query(ml_rag._filter_tree(filters),
                'strict $.** ? (exists (@.operator))') AS n (term) ORDER BY 1 LOOP
    _lacking := ARRAY(SELECT s.vector_store FROM unnest(stores) AS s
                      WHERE (ml_rag._filter_target(s, _key)).column_name IS NULL ORDER BY 1);
    CONTINUE WHEN cardinality(_lacking) = 0;
    RAISE WARNING USING ERRCODE = '01000',
      MESSAGE = CASE cardinality(_lacking) WHEN 1
        THEN format('"%s" has neither a column "%s" nor metadata; none of its rows has a value', _lacking[1],
          left(_key, 100))
        ELSE format('%s of %s vector stores have neither a column "%s" nor metadata; none of their rows has '
          'a value', cardinality(_lacking), cardinality(stores), left(_key, 100)) END,
      DETAIL = CASE WHEN cardinality(_lacking) > 1 THEN
        format('They are %s%s.', array_to_string(_lacking[:20], ', '),
        CASE WHEN cardinality(_lacking) > 20 THEN ', …' ELSE '' END)
        ELSE 'Of its rows only those pass whose condition holds without a value, such as "ne" and "nin".' END,
      HINT = coalesce('Did you mean "' || ml_rag._nearest_column(stores, _key) || '"?',
        'Leave it out with "exclude_vector_store", or filter by a column it has.');
  END LOOP;
END
$$;
