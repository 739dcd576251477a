-- filter: which rows of a store count at all: documents, conditions, keywords.

CREATE FUNCTION ml_rag._keyword_pattern(keywords text[], "collation" text) RETURNS text
LANGUAGE plpgsql STABLE PARALLEL SAFE AS $$
-- purpose: a regular expression that a text with one of the keywords matches: as whole words, in any case,
-- with any white space where the keyword has some, accents composed or combining. collation: SQL, of
-- ml_rag._keyword_collation. A keyword that begins or ends with a letter, a digit or _ must not have another
-- one beside it; scripts written without blanks (Thai, Lao, Burmese, Khmer, and what lies beyond U+2E7F) have
-- no such ends. Cases are spelled out, [aA], because ~* and lower() cost more than the search itself.
DECLARE
  _unbroken text := '\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u2e80-\U0010ffff';
  _border text := format('[^[:alnum:]_\u0300-\u036f]|[%s]', _unbroken);
  _keyword text;
  _form text;
  _pattern text;
  _patterns text[] := '{}';
BEGIN
  FOREACH _keyword IN ARRAY keywords LOOP
    _keyword := regexp_replace(_keyword, '^[\s\u00a0]+|[\s\u00a0]+$', '', 'g');
    FOR _form IN
      SELECT DISTINCT f FROM unnest(CASE WHEN getdatabaseencoding() = 'UTF8'
        THEN ARRAY[_keyword, normalize(_keyword, NFC), normalize(_keyword, NFD)]
        ELSE ARRAY[_keyword] END) AS f
    LOOP
      EXECUTE format($query$
        SELECT concat(
          CASE WHEN $1 COLLATE %1$s ~ '^[[:alnum:]_\u0300-\u036f]' AND $1 !~ $2 THEN $4 END,
          string_agg(CASE
            WHEN c = ' ' THEN '[\s\u00a0]+'
            WHEN strpos('.^$*+?()[]{}|\', c) > 0 THEN '\' || c
            WHEN c IN ('σ', 'ς', 'Σ') THEN '[σςΣ]'
            WHEN lower(c COLLATE %1$s) <> upper(c COLLATE %1$s) THEN concat('[', c,
              CASE WHEN length(lower(c COLLATE %1$s)) = 1 THEN lower(c COLLATE %1$s) END,
              CASE WHEN length(upper(c COLLATE %1$s)) = 1 THEN upper(c COLLATE %1$s) END, ']')
            ELSE c END, '' ORDER BY i),
          CASE WHEN $1 COLLATE %1$s ~ '[[:alnum:]_\u0300-\u036f]$' AND $1 !~ $3 THEN $5 END)
        FROM string_to_table(regexp_replace($1, '[\s\u00a0]+', ' ', 'g'), NULL) WITH ORDINALITY AS s (c, i)
        $query$, "collation")
      INTO _pattern USING _form, format('^[%s]', _unbroken), format('[%s]$', _unbroken),
        format('(?:^|%s)', _border), format('(?:$|%s)', _border);
      _patterns := _patterns || _pattern;
    END LOOP;
  END LOOP;
  RETURN array_to_string(_patterns, '|');
END
$$;

CREATE FUNCTION ml_rag._check_keywords(name text, keywords jsonb) RETURNS void
LANGUAGE plpgsql STABLE PARALLEL SAFE AS $$
-- purpose: what parse_options does not know about the two options of keywords
-- The limits keep the regular expressions of a call within what a session keeps compiled (32).
BEGIN
  IF jsonb_array_length(keywords) > 20 OR EXISTS (
    SELECT FROM jsonb_array_elements_text(keywords) AS k WHERE k !~ '[^\s\u00a0]' OR length(k) > 200) THEN
    PERFORM ml_rag._bad_option(name, keywords, 'at most 20 words or phrases of 1 to 200 characters');
  END IF;
END
$$;

CREATE FUNCTION ml_rag._metadata_types(store ml_rag.store, n integer) RETURNS TABLE (key text, type text)
LANGUAGE plpgsql STABLE PARALLEL UNSAFE ROWS 20 AS $$
-- purpose: the keys in the metadata of the first n rows, at most 10 000, and the JSON types of their values;
-- of lists those of the elements
-- No row if the metadata is not jsonb of a table, or cannot be read: it is looked at for hints alone.
-- Reads: the store, as the caller
BEGIN
  IF EXISTS (
    SELECT FROM pg_class AS c JOIN pg_attribute AS a ON a.attrelid = c.oid
    WHERE c.oid = store.relation AND c.relkind IN ('r', 'p', 'm') AND a.attname = store.metadata
      AND a.atttypid = 'jsonb'::regtype) THEN
    RETURN QUERY SELECT m.key, m.type FROM json_to_recordset(ml_rag._read_apart(store,
      format('WITH first AS MATERIALIZED (SELECT t.%I AS document', store.metadata), format($query$
        LIMIT %s)
      SELECT json_agg(m ORDER BY m.key, m.type) FROM (
        SELECT DISTINCT k.key,
          jsonb_typeof(CASE jsonb_typeof(k.value) WHEN 'array' THEN k.value -> 0 ELSE k.value END) AS type
        FROM first AS f
        CROSS JOIN jsonb_each(CASE jsonb_typeof(f.document) WHEN 'object' THEN f.document END) AS k
        LIMIT 10000) AS m$query$, n), for_hint => true)::json) AS m (key text, type text);
  END IF;
END
$$;

CREATE FUNCTION ml_rag._nearest_key(keys text[], key text) RETURNS text
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE AS $$
-- purpose: the key that a missing one may have been meant for; null if none is spelt almost so
BEGIN
  RETURN (
    SELECT c.n FROM (
      -- letters that the other one lacks cost a change each; what is left takes a while for each
      SELECT k.n
      FROM (SELECT n, lower(left(n, 40)) AS a, lower(left(key, 40)) AS b FROM unnest(keys) AS n) AS k
      WHERE length(key) > 2 AND starts_with(lower(k.n), lower(key)) OR abs(length(k.a) - length(k.b)) <= 2
        AND length(translate(k.a, k.b, '')) <= 2 AND length(translate(k.b, k.a, '')) <= 2
      LIMIT 500
    ) AS c, ml_rag._distance_of_words(lower(key), lower(c.n)) AS d
    WHERE d <= least(2, (length(c.n) - 1) / 2) OR length(key) > 2 AND starts_with(lower(c.n), lower(key))
    ORDER BY d, c.n LIMIT 1);
END
$$;

CREATE FUNCTION ml_rag._warn_of_unknown_keys(store ml_rag.store, filters jsonb) RETURNS void
LANGUAGE plpgsql STABLE PARALLEL UNSAFE AS $$
-- purpose: a warning about a misspelt key of the metadata that would go unnoticed: a condition that holds for
-- rows without a value then holds for all of them. Other conditions return nothing, which is noticed.
-- Only the rows know which keys exist. A few are looked at, and a key that they lack is reported only if they
-- have one that is spelt almost so: such conditions are meant for keys that hardly any row has.
-- Reads: the store, as the caller
DECLARE
  _rows CONSTANT integer := 100;
  _tree jsonb;
  _key text;
  _keys text[];
  _known text[];
  _nearest text;
BEGIN
  IF store.metadata IS NULL OR filters IS NULL OR filters::text !~ '"(ne|nin|not|exists)"|null' THEN
    RETURN;
  END IF;
  _tree := ml_rag._filter_tree(filters);
  _keys := ARRAY(
    -- the first step of a path; what is a column is none of the metadata
    SELECT DISTINCT CASE WHEN k.key LIKE '/%' THEN
      replace(replace(split_part(k.key, '/', 2), '~1', '/'), '~0', '~')
                         ELSE k.key END
    FROM (
      SELECT n.term ->> 'key' AS key
      FROM jsonb_path_query(_tree,
        'strict $.** ? (exists (@."not"))."not".** ? (exists (@.operator))') AS n (term)
      UNION SELECT n.term ->> 'key'
      FROM jsonb_path_query(_tree,
        'strict $.** ? (exists (@.operator) && exists (@.values[*] ? (@ == null)))') AS n (term)) AS k
    WHERE k.key LIKE '/%' OR NOT EXISTS (
      SELECT FROM pg_attribute AS a WHERE a.attrelid = store.relation AND a.attname = k.key
        AND NOT a.attisdropped)
    ORDER BY 1);
  IF cardinality(_keys) = 0 THEN
    RETURN;
  END IF;
  SELECT array_agg(DISTINCT m.key) INTO _known FROM ml_rag._metadata_types(store, _rows) AS m;
  FOR _key IN SELECT k FROM unnest(_keys) AS k WHERE k <> ALL (_known) LOOP
    _nearest := ml_rag._nearest_key(_known, _key);
    IF _nearest IS NOT NULL THEN
      RAISE WARNING USING ERRCODE = '01000',
        MESSAGE = format('the metadata of "%s" seems to have no key "%s"', store.vector_store,
          left(_key, 100)),
        DETAIL = format('None of the first %s rows has it; "ne", "nin", "not", null and "exists": false hold '
          'for a row '
          'without a value.', _rows),
        HINT = format('Did you mean "%s"?', left(_nearest, 100));
    END IF;
  END LOOP;
END
$$;

CREATE FUNCTION ml_rag._passing_rows(store ml_rag.store, condition text, arguments text[]) RETURNS tid[]
LANGUAGE plpgsql STABLE PARALLEL UNSAFE AS $$
-- purpose: the row keys of the rows of a table that pass a filter; null if they are more than 10 000. Of a
-- partitioned table, where several rows can have the same, only their number is of use
-- So few are best compared one by one: that is exact, and an approximate index has to go through as many
-- times more rows as the filter leaves out.
-- Reads: the store, as the caller
DECLARE
  _most CONSTANT integer := 10000;
  _keys tid[];
BEGIN
  EXECUTE format(
    'SELECT CASE WHEN count(*) <= $2 THEN coalesce(array_agg(r.ctid), ''{}'') END '
    'FROM (SELECT t.ctid FROM %s AS t WHERE t.%I IS NOT NULL%s LIMIT $2 + 1) AS r',
    concat(CASE WHEN store.is_table THEN 'ONLY ' END, ml_rag._relation_name(store.relation)), store.segment,
    condition) INTO _keys USING NULL::text,
      _most, arguments;
  RETURN _keys;
END
$$;

CREATE FUNCTION ml_rag._estimated_rows(
  store ml_rag.store, condition text, arguments text[], OUT n double precision, OUT is_scanned boolean,
  OUT cost double precision
)
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE AS $$
-- purpose: how many rows of a table pass a filter, rather too few than too many, and whether all are read to
-- find them, and the planner's cost of that; null where a table is so small that it takes less to look at all
-- rows, or was never analyzed
-- The planner knows nothing of the keys of a JSON column, and takes one row in 200, or in 3, for conditions
-- on them. So 64 pages are looked at, but not more than 2000 rows. Rows that were written together are often
-- alike: less twice the standard deviation, which is one of pages, of few that pass nothing is concluded.
-- Half of the planner's estimate counts as far as the pages bear it out; of a partitioned table, where a
-- filter may leave out most partitions, no pages are looked at. Its estimate can come of rows that the caller
-- may not see. It decides in which order rows are read, and is not shown to any role.
-- Reads: pg_class; the store, as the caller
DECLARE
  _is_partitioned boolean := (SELECT c.relkind = 'p' FROM pg_class AS c WHERE c.oid = store.relation);
  -- the size that it has by now, not what it had when it was analyzed
  _percent double precision := (
    SELECT least(6400 / greatest(1,
      pg_relation_size(c.oid) / current_setting('block_size')::double precision), 200000 / c.reltuples)
    FROM pg_class AS c JOIN pg_am AS a ON a.oid = c.relam
    WHERE c.oid = store.relation AND c.reltuples > 0 AND a.amname = 'heap');
  _from text := concat(CASE WHEN store.is_table THEN 'ONLY ' END, ml_rag._relation_name(store.relation),
    ' AS t');
  _condition text := concat(format(' WHERE t.%I IS NOT NULL', store.segment), condition);
  _seen double precision;
  _least double precision;
  _plan json;
BEGIN
  IF NOT _is_partitioned THEN
    IF coalesce(_percent, 100) > 25 THEN
      RETURN;
    END IF;
    EXECUTE concat('SELECT sum(p.n), sum(p.n) - 2 * sqrt(sum(p.n * p.n)) FROM (SELECT count(*) AS n FROM ',
      _from, ' TABLESAMPLE SYSTEM (',
        _percent, ') REPEATABLE (0)', _condition, ' GROUP BY (t.ctid::text::point)[0]) AS p')
      INTO _seen, _least USING NULL::text, 0, arguments;
    IF _seen IS NULL THEN
      n := 0;
      RETURN;
    END IF;
  END IF;
  EXECUTE concat('EXPLAIN (FORMAT JSON) SELECT FROM ', _from, _condition) INTO _plan USING NULL::text,
    0, arguments;
  n := greatest(0, _least * 100 / _percent,
    least(_seen * 100 / _percent, (_plan #>> '{0,Plan,Plan Rows}')::double precision / 2));
  -- a scan by parallel workers is below Gather
  cost := _plan #>> '{0,Plan,Total Cost}';
  is_scanned := coalesce('Seq Scan' IN (_plan #>> '{0,Plan,Node Type}',
    _plan #>> '{0,Plan,Plans,0,Node Type}'), false);
END
$$;

CREATE FUNCTION ml_rag.filter(store ml_rag.store, options jsonb,
  parameter text DEFAULT '$3', OUT condition text, OUT arguments text[])
LANGUAGE plpgsql STABLE PARALLEL UNSAFE SET search_path FROM CURRENT AS $$
-- purpose: the stage: the options that leave rows out, as a condition that stands before any limit
-- Lists are slices of the parameter, which the planner folds to constants, so that an index serves them and
-- postgres_fdw ships them.
DECLARE
  _name text;
  _names text[];
  _condition text;
  _collation text;
BEGIN
  _name := ml_rag._document_name(store);
  condition := '';
  arguments := '{}';
  _names := ml_rag._texts(options -> 'document_name');
  IF _names IS NOT NULL THEN
    condition := format(' AND %s = ANY (%s[1:%s])', _name, parameter, cardinality(_names));
    arguments := _names;
  END IF;
  _names := ml_rag._texts(options -> 'exclude_document_name');
  IF _names IS NOT NULL THEN
    condition := condition || format(' AND (%1$s IS NULL OR %1$s <> ALL (%2$s[%3$s:%4$s]))', _name, parameter,
      cardinality(arguments) + 1, cardinality(arguments) + cardinality(_names));
    arguments := arguments || _names;
  END IF;
  IF options ? 'filters' THEN
    SELECT c.arguments, c.condition INTO arguments, _condition
    FROM ml_rag.condition(store, options -> 'filters', arguments, parameter) AS c;
    condition := condition || format(' AND (%s)', _condition);
  END IF;
  IF options ?| '{required_keywords,excluded_keywords}' THEN
    -- the database's where it knows letters beyond ASCII (that of LC_CTYPE C does not), else Unicode's: both
    -- are deterministic, which regular expressions need, and a column's own may not be
    _collation := CASE WHEN 'é' COLLATE pg_catalog."default" ~ '[[:alnum:]]'
      AND lower('É' COLLATE pg_catalog."default") = 'é'
        OR to_regcollation('pg_catalog."und-x-icu"') IS NULL THEN 'pg_catalog."default"'
          ELSE 'pg_catalog."und-x-icu"' END;
    PERFORM ml_rag._check_keywords(o.key, o.value) FROM jsonb_each(options) AS o
    WHERE o.key IN ('required_keywords', 'excluded_keywords');
    FOR _condition IN SELECT k FROM jsonb_array_elements_text(options -> 'required_keywords') AS k LOOP
      arguments := arguments || ml_rag._keyword_pattern(ARRAY[_condition], _collation);
      condition := condition || format(' AND t.%I::text COLLATE %s ~ %s[%s]', store.segment,
        _collation, parameter, cardinality(arguments));
    END LOOP;
    _names := ml_rag._texts(options -> 'excluded_keywords');
    IF cardinality(_names) > 0 THEN
      arguments := arguments || ml_rag._keyword_pattern(_names, _collation);
      condition := condition || format(' AND t.%I::text COLLATE %s !~ %s[%s]', store.segment,
        _collation, parameter, cardinality(arguments));
    END IF;
  END IF;
@CATCH@
END
$$;
COMMENT ON FUNCTION ml_rag.filter(ml_rag.store, jsonb, text) IS
$$the options that leave rows out, as a condition on the rows of a store
condition: SQL on the alias t, empty or beginning with AND; arguments: what to bind as the parameter, a
text[]. Options: document_name, exclude_document_name: names of documents. filters: see ml_rag.condition.
required_keywords: segments that lack one of them are left out; excluded_keywords: those that have one. A
keyword is a word or a phrase; it matches whole words, in any case, with any white space between them, and in
scripts without blanks anywhere.
Errors: 22023, of ml_rag.condition; more than 20 keywords of one option, or one that is blank or has more than
200 characters.$$;
