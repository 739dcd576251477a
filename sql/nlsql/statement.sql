-- statement: is a statement harmless, and what does it return? Decided by what PostgreSQL itself has parsed.
--
-- A statement becomes a temporary view, which PostgreSQL keeps as the tree that it parsed; the tree says by their OIDs which
-- relations, functions and operators are meant, whatever names the text has. Is the tree harmless, that very view is read, in a
-- read-only transaction; then all of it is rolled back. backend/statement.py does this, with the limits of time and memory.
-- A view can only be a single SELECT, without INTO and without a WITH that writes.
--
-- Only what is listed here is harmless. What a later PostgreSQL adds is refused until it is listed.

CREATE FUNCTION ml_rag._is_harmless(function oid) RETURNS boolean
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$
-- purpose: whether a statement may call a function, or use an operator that does
-- Of built-in ones: immutable ones, and of the stable ones those that look at nothing but their arguments, the clock and the
-- settings of dates, locale and text search. Not among them are those that tell of the catalog, sessions, files or settings, that
-- run a query given as text, or that make JSON of any type, since that calls casts that the type's owner defined.
-- Of others: immutable ones in C, which only superusers can make; those of extensions, that is.
BEGIN
  RETURN EXISTS (
    SELECT FROM pg_proc AS p
    WHERE p.oid = function AND CASE
      WHEN p.oid >= 16384 THEN
        p.provolatile = 'i' AND p.prokind = 'f' AND p.prolang IN (SELECT l.oid FROM pg_language AS l WHERE l.lanname IN ('c', 'internal'))
      WHEN p.pronamespace <> 'pg_catalog'::regnamespace THEN false
      WHEN p.provolatile = 'i' THEN
        (p.proname !~ '^(pg|txid|binary|brin|gin|gist|spg|ts)_' OR p.proname IN ('pg_size_pretty', 'pg_size_bytes', 'ts_delete',
          'ts_filter', 'ts_headline', 'ts_match_qv', 'ts_match_vq', 'ts_rank', 'ts_rank_cd'))
        AND p.proname !~ '^(json|jsonb)_(object_)?agg' AND p.proname NOT IN ('satisfies_hash_partition', 'makeaclitem', 'acldefault',
          'xmlvalidate', 'xpath', 'xpath_exists', 'xmlexists', 'xml_is_well_formed_content', 'xml_is_well_formed_document')
      WHEN p.provolatile = 's' THEN p.proname IN (
        -- dates and times
        'age', 'date', 'date_cmp_timestamptz', 'date_eq_timestamptz', 'date_ge_timestamptz', 'date_gt_timestamptz',
        'date_le_timestamptz', 'date_lt_timestamptz', 'date_ne_timestamptz', 'date_part', 'date_trunc', 'date_add', 'date_subtract',
        'extract', 'generate_series', 'in_range', 'interval_pl_timestamptz', 'make_timestamptz', 'now', 'overlaps',
        'statement_timestamp', 'time', 'timestamp', 'timestamp_cmp_timestamptz', 'timestamp_eq_timestamptz',
        'timestamp_ge_timestamptz', 'timestamp_gt_timestamptz', 'timestamp_le_timestamptz', 'timestamp_lt_timestamptz',
        'timestamp_ne_timestamptz', 'timestamptz', 'timestamptz_cmp_date', 'timestamptz_cmp_timestamp', 'timestamptz_eq_date',
        'timestamptz_eq_timestamp', 'timestamptz_ge_date', 'timestamptz_ge_timestamp', 'timestamptz_gt_date',
        'timestamptz_gt_timestamp', 'timestamptz_le_date', 'timestamptz_le_timestamp', 'timestamptz_lt_date',
        'timestamptz_lt_timestamp', 'timestamptz_mi_interval', 'timestamptz_ne_date', 'timestamptz_ne_timestamp',
        'timestamptz_pl_interval', 'timetz', 'timezone', 'to_date', 'to_timestamp', 'transaction_timestamp',
        -- texts and numbers
        'anytextcat', 'array_to_string', 'concat', 'concat_ws', 'format', 'length', 'money', 'numeric', 'quote_literal',
        'quote_nullable', 'textanycat', 'to_char', 'to_number', 'convert_from', 'convert_to', 'enum_first', 'enum_last', 'enum_range',
        -- JSON that is there already
        'jsonb_path_exists_tz', 'jsonb_path_match_tz', 'jsonb_path_query_array_tz', 'jsonb_path_query_first_tz', 'jsonb_path_query_tz',
        -- text search
        'phraseto_tsquery', 'plainto_tsquery', 'to_tsquery', 'to_tsvector', 'ts_headline', 'ts_match_tq', 'ts_match_tt',
        'websearch_to_tsquery')
      ELSE false END);
END
$$;

CREATE FUNCTION ml_rag._refusal(tree text, relations oid[]) RETURNS text
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$
-- purpose: why a parsed statement is refused; null = it is harmless
-- tree: its pg_node_tree as text. A name in it cannot pass for anything else: blanks and braces of names are escaped.
-- relations: the ones that it may read, the view itself among them
DECLARE
  _kind text;
  _function regprocedure;
  _relation regclass;
  _type regtype;
BEGIN
  IF tree IS NULL THEN
    RETURN 'it has not been parsed';
  END IF;
  -- nodes that stand for something that is computed from values alone, or for a part of a SELECT
  SELECT m[1] INTO _kind FROM regexp_matches(tree, '(?:^|[^\\])\{([^ }]*)', 'g') AS m
  WHERE m[1] NOT IN ('QUERY', 'RANGETBLENTRY', 'RTEPERMISSIONINFO', 'ALIAS', 'RANGETBLREF', 'RANGETBLFUNCTION', 'FROMEXPR', 'JOINEXPR',
    'TARGETENTRY', 'COMMONTABLEEXPR', 'CTESEARCHCLAUSE', 'CTECYCLECLAUSE', 'SETOPERATIONSTMT', 'SORTGROUPCLAUSE', 'GROUPINGSET',
    'WINDOWCLAUSE', 'VAR', 'CONST', 'FUNCEXPR', 'NAMEDARGEXPR', 'OPEXPR', 'DISTINCTEXPR', 'NULLIFEXPR', 'SCALARARRAYOPEXPR',
    'BOOLEXPR', 'SUBLINK', 'PARAM', 'AGGREF', 'GROUPINGFUNC', 'WINDOWFUNC', 'SUBSCRIPTINGREF', 'FIELDSELECT', 'RELABELTYPE',
    'COERCEVIAIO', 'ARRAYCOERCEEXPR', 'COLLATE', 'COLLATEEXPR', 'CASE', 'CASEEXPR', 'WHEN', 'CASEWHEN', 'CASETESTEXPR', 'ARRAY',
    'ARRAYEXPR', 'ROW', 'ROWEXPR', 'ROWCOMPARE', 'ROWCOMPAREEXPR', 'COALESCE', 'COALESCEEXPR', 'MINMAX', 'MINMAXEXPR',
    'SQLVALUEFUNCTION', 'NULLTEST', 'BOOLEANTEST') LIMIT 1;
  IF _kind IS NOT NULL THEN
    RETURN format('it is not a plain query: it has %s', CASE _kind WHEN 'ROWMARKCLAUSE' THEN 'FOR UPDATE or FOR SHARE'
      WHEN 'COERCETODOMAIN' THEN 'a cast to a domain' WHEN 'XMLEXPR' THEN 'an XML function' WHEN 'TABLESAMPLECLAUSE' THEN 'TABLESAMPLE'
      ELSE format('%L of the parse tree', _kind) END);
  END IF;
  SELECT m[1]::oid INTO _relation FROM regexp_matches(tree, ':relid (\d+)', 'g') AS m
  WHERE m[1] <> '0' AND m[1]::oid <> ALL (relations) LIMIT 1;
  IF _relation IS NOT NULL THEN
    RETURN format('it reads %s, which is none of the tables that may be queried', _relation);
  END IF;
  SELECT m[1]::oid INTO _function FROM regexp_matches(tree, ':(?:funcid|opfuncid|aggfnoid|winfnoid) (\d+)', 'g') AS m
  WHERE NOT ml_rag._is_harmless(m[1]::oid) LIMIT 1;
  IF _function IS NOT NULL THEN
    RETURN format('it calls %s, which is none of the functions that may be called', _function);
  END IF;
  -- to read a value as one of a domain or composite type runs the checks of domains
  SELECT t.oid INTO _type FROM regexp_matches(tree, ':resulttype (\d+)', 'g') AS m
  JOIN pg_type AS t ON t.oid = m[1]::oid
  JOIN pg_type AS e ON e.oid = CASE WHEN t.typcategory = 'A' AND t.typelem <> 0 THEN t.typelem ELSE t.oid END
  WHERE e.oid >= 16384 AND e.typtype NOT IN ('b', 'e') LIMIT 1;
  IF _type IS NOT NULL THEN
    RETURN format('it casts to %s, which is not a type that may be cast to', _type);
  END IF;
  RETURN NULL;
END
$$;

CREATE FUNCTION ml_rag._may_name(statement text, name name, follows text DEFAULT '') RETURNS boolean
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$
-- purpose: whether a name stands in a statement, as a whole word unless it has to be quoted, or is as long as one that was cut off
-- follows: what a regular expression finds behind it. Statement and name as they are and in lower case, of this locale and of none.
DECLARE
  _name text := replace(lower(name), '"', '""');
BEGIN
  IF strpos(statement, _name) = 0 THEN
    RETURN false;
  END IF;
  RETURN _name !~ '^[a-z_][a-z0-9_]*$' OR octet_length(_name) >= 63
    OR statement ~ concat('(^|[^a-z_$])', _name, '($|[^a-z0-9_$])') AND (follows = '' OR statement ~ concat(_name, follows));
END
$$;

CREATE FUNCTION ml_rag._type_that_runs_code(statement text, schemas text[]) RETURNS text
LANGUAGE plpgsql STABLE PARALLEL RESTRICTED
SET search_path FROM CURRENT
AS $$
-- purpose: what a statement may name, and so have PostgreSQL read a constant by running code of somebody whom the caller does not trust
-- PostgreSQL reads constants while it parses: '{1}'::planted.number[] runs the CHECK of that domain, and so does
-- planted.total('{1}') whose argument is of that type. So this goes before, and by the letters: the name of such a type, or of
-- a function or operator with one, may not stand in the text together with its schema. schemas: those that a name needs not
-- tell. A domain that has no CHECK can have got one by the time the constant is read.
-- Reads: the catalog
DECLARE
  _domains oid[] := ARRAY(
    SELECT t.oid FROM pg_type AS t WHERE t.typtype = 'd' AND t.oid >= 16384 AND NOT ml_rag._trusts(t.typowner));
  _statement text := concat(lower(statement), ' ', lower(statement COLLATE "C"));
  _built oid[];
BEGIN
  IF _domains = '{}' THEN
    RETURN NULL;
  ELSIF strpos(_statement, 'u&"') > 0 THEN
    RETURN 'a name written with Unicode escapes';
  END IF;
  _built := ARRAY(
    WITH RECURSIVE built AS (
      SELECT d.oid FROM unnest(_domains) AS d (oid)
      UNION
      SELECT t.oid FROM built AS b CROSS JOIN LATERAL (
        SELECT t.oid FROM pg_type AS t WHERE t.typelem = b.oid OR t.typbasetype = b.oid
        UNION ALL SELECT c.reltype FROM pg_attribute AS a JOIN pg_class AS c ON c.oid = a.attrelid
        WHERE a.atttypid = b.oid AND NOT a.attisdropped AND c.reltype <> 0
        UNION ALL SELECT r.rngtypid FROM pg_range AS r WHERE r.rngsubtype = b.oid
        UNION ALL SELECT r.rngmultitypid FROM pg_range AS r WHERE r.rngsubtype = b.oid
      ) AS t
    )
    SELECT b.oid FROM built AS b);
  RETURN (
    SELECT o.described
    FROM (
      SELECT format('type %s', t.oid::regtype) AS described, t.typname AS name, t.typnamespace AS namespace
      FROM pg_type AS t WHERE t.oid = ANY (_built)
      -- of an array by its element
      UNION ALL SELECT format('type %s', t.oid::regtype), e.typname, t.typnamespace
      FROM pg_type AS t JOIN pg_type AS e ON e.typarray = t.oid WHERE t.oid = ANY (_built)
      UNION ALL SELECT format('function %s', p.oid::regprocedure), p.proname, p.pronamespace
      FROM pg_proc AS p
      WHERE p.oid >= 16384 AND (p.prorettype = ANY (_built) OR p.proargtypes::oid[] && _built OR p.proallargtypes && _built)
      UNION ALL SELECT format('operator %s', p.oid::regoperator), p.oprname, p.oprnamespace
      FROM pg_operator AS p WHERE p.oid >= 16384 AND (p.oprleft = ANY (_built) OR p.oprright = ANY (_built) OR p.oprresult = ANY (_built))
    ) AS o JOIN pg_namespace AS n ON n.oid = o.namespace
    WHERE has_schema_privilege(n.oid, 'USAGE') AND ml_rag._may_name(_statement, o.name)
      -- behind a schema stands a point, if not at once
      AND (n.nspname = ANY (schemas) OR n.oid = pg_my_temp_schema()
           OR ml_rag._may_name(_statement, n.nspname, '"?\s*([.]|--|/[*])'))
    LIMIT 1);
END
$$;

CREATE FUNCTION ml_rag._parsed(view text) RETURNS text
LANGUAGE plpgsql STABLE PARALLEL RESTRICTED
SET search_path FROM CURRENT
AS $$
-- purpose: the parsed query of a temporary view  Reads: the catalog
BEGIN
  RETURN (SELECT r.ev_action::text FROM pg_rewrite AS r JOIN pg_class AS c ON c.oid = r.ev_class
          WHERE c.relname = view AND c.relnamespace = pg_my_temp_schema());
END
$$;

-- What the Python side asks of the view, without operators that the search_path of the statement could give another meaning.

CREATE FUNCTION ml_rag._statement_columns() RETURNS text[]
LANGUAGE plpgsql STABLE PARALLEL RESTRICTED
SET search_path FROM CURRENT
AS $$
-- purpose: the names of the columns, equal ones too: those of subquery ml_rag_statement in view ml_rag_statement_columns
DECLARE
  _names text := substring(ml_rag._parsed('ml_rag_statement_columns')
    from ':eref \{ALIAS :aliasname ml_rag_statement :colnames \(((?:[^()\\]|\\.)*)\)');
BEGIN
  RETURN ARRAY(
    SELECT regexp_replace(substr(n.name, 2, length(n.name) - 2), '\\(.)', '\1', 'g')
    FROM regexp_split_to_table(_names, '(?<!\\) ') WITH ORDINALITY AS n (name, place) ORDER BY n.place);
END
$$;

CREATE FUNCTION ml_rag._statement_refusal(relations oid[]) RETURNS text
LANGUAGE plpgsql STABLE PARALLEL RESTRICTED
SET search_path FROM CURRENT
AS $$
-- purpose: why view ml_rag_statement is not read; null = it may be. relations: those that it may read
BEGIN
  RETURN ml_rag._refusal(ml_rag._parsed('ml_rag_statement'), relations || (
    SELECT c.oid FROM pg_class AS c WHERE c.relname = 'ml_rag_statement' AND c.relnamespace = pg_my_temp_schema()));
END
$$;

CREATE FUNCTION ml_rag._statement_types() RETURNS bigint[]
LANGUAGE plpgsql STABLE PARALLEL RESTRICTED
SET search_path FROM CURRENT
AS $$
-- purpose: the types of the columns of view ml_rag_statement  Reads: the catalog
BEGIN
  RETURN ARRAY(
    SELECT a.atttypid::bigint FROM pg_attribute AS a JOIN pg_class AS c ON c.oid = a.attrelid
    WHERE c.relname = 'ml_rag_statement' AND c.relnamespace = pg_my_temp_schema() AND a.attnum > 0 ORDER BY a.attnum);
END
$$;

CREATE FUNCTION ml_rag._fits(size integer) RETURNS boolean
LANGUAGE plpython3u VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
# purpose: whether a row of so many bytes as text is handed to Python, which has no limit of memory then: see fits in
# backend/statement.py
return "ml_rag" in GD and GD["ml_rag"].fits(size)
$$;
