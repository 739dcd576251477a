-- statement: is a statement harmless, and what does it return? Decided by what PostgreSQL itself has parsed.
--
-- A statement becomes a temporary view, which PostgreSQL keeps as the tree that it parsed; the tree says by
-- their OIDs which relations, functions and operators are meant, whatever names the text has. Is the tree
-- harmless, that very view is read, in a read-only transaction; then all of it is rolled back.
-- backend/statement.py does this, with the limits of time and memory. A view can only be a single SELECT,
-- without INTO and without a WITH that writes.
--
-- Only what is listed here and in nlsql/functions is harmless: what a later PostgreSQL adds is refused.

CREATE FUNCTION ml_rag._signatures(functions oid[]) RETURNS text[]
LANGUAGE plpgsql STABLE PARALLEL SAFE SET search_path FROM CURRENT AS $$
-- purpose: of each function that a statement may call name(types of its arguments), else null, in their order
-- Those of extensions are in C and belong to a superuser: the owner of an extension can put other functions
-- into it, and aggregates of functions in C that run a query given as text.
-- Reads: ml_rag.callable_function, the catalog
BEGIN
  RETURN ARRAY(
    SELECT (
      SELECT format('%s(%s)', c.name, c.arguments)
      FROM pg_proc AS p JOIN ml_rag.callable_function AS c ON c.name = p.proname
        AND c.arguments = regexp_replace(oidvectortypes(p.proargtypes),
          '("([^"]|"")*"|[[:alnum:]_]+)[.]', '', 'g')
      WHERE p.oid = f.oid AND CASE c.extension
        -- below 16384: made by initdb
        WHEN '' THEN p.oid < 16384 AND p.pronamespace = 'pg_catalog'::regnamespace
        ELSE p.oid >= 16384 AND (SELECT r.rolsuper FROM pg_roles AS r WHERE r.oid = p.proowner)
          AND NOT EXISTS (
            SELECT FROM pg_proc AS f JOIN pg_language AS l ON l.oid = f.prolang
            WHERE l.lanname <> 'c' AND l.lanname <> 'internal' AND f.oid IN (
              SELECT p.oid UNION ALL
              SELECT unnest(ARRAY[g.aggtransfn, g.aggfinalfn, g.aggcombinefn, g.aggserialfn, g.aggdeserialfn,
                g.aggmtransfn, g.aggminvtransfn, g.aggmfinalfn]::oid[])
              FROM pg_aggregate AS g WHERE g.aggfnoid = p.oid))
          AND EXISTS (SELECT FROM pg_depend AS d JOIN pg_extension AS e ON e.oid = d.refobjid
                      WHERE d.classid = 'pg_proc'::regclass AND d.objid = p.oid AND d.deptype = 'e'
                        AND d.refclassid = 'pg_extension'::regclass AND e.extname = c.extension)
        END
      LIMIT 1)
    FROM unnest(functions) WITH ORDINALITY AS f (oid, place) ORDER BY f.place);
END
$$;

CREATE FUNCTION ml_rag._refusal(tree text, relations oid[]) RETURNS text
LANGUAGE plpgsql STABLE PARALLEL RESTRICTED SET search_path FROM CURRENT AS $$
-- purpose: why a parsed statement is refused; null if it is harmless
-- tree: its pg_node_tree as text. A name in it cannot pass for anything else: blanks and braces of names are
-- escaped.
-- relations: the ones that it may read, the view itself among them
DECLARE
  _kind text;
  _functions oid[];
  _function regprocedure;
  _operator regoperator;
  _relation regclass;
  _type regtype;
BEGIN
  IF tree IS NULL THEN
    RETURN 'it has not been parsed';
  END IF;
  -- nodes that stand for something that is computed from values alone, or for a part of a SELECT
  SELECT m[1] INTO _kind FROM regexp_matches(tree, E'(?:^|[^\\\\])\\{([^ }]*)', 'g') AS m
  WHERE m[1] NOT IN ('QUERY', 'RANGETBLENTRY', 'RTEPERMISSIONINFO', 'ALIAS', 'RANGETBLREF',
    'RANGETBLFUNCTION', 'FROMEXPR', 'JOINEXPR',
    'TARGETENTRY', 'COMMONTABLEEXPR', 'CTESEARCHCLAUSE', 'CTECYCLECLAUSE', 'SETOPERATIONSTMT',
    'SORTGROUPCLAUSE', 'GROUPINGSET',
    'WINDOWCLAUSE', 'VAR', 'CONST', 'FUNCEXPR', 'NAMEDARGEXPR', 'OPEXPR', 'DISTINCTEXPR', 'NULLIFEXPR',
    'SCALARARRAYOPEXPR',
    'BOOLEXPR', 'SUBLINK', 'PARAM', 'AGGREF', 'GROUPINGFUNC', 'WINDOWFUNC', 'SUBSCRIPTINGREF', 'FIELDSELECT',
    'RELABELTYPE',
    'COERCEVIAIO', 'ARRAYCOERCEEXPR', 'COLLATE', 'COLLATEEXPR', 'CASE', 'CASEEXPR', 'WHEN', 'CASEWHEN',
    'CASETESTEXPR', 'ARRAY',
    'ARRAYEXPR', 'ROW', 'ROWEXPR', 'ROWCOMPARE', 'ROWCOMPAREEXPR', 'COALESCE', 'COALESCEEXPR', 'MINMAX',
    'MINMAXEXPR',
    'SQLVALUEFUNCTION', 'NULLTEST', 'BOOLEANTEST') LIMIT 1;
  IF _kind IS NOT NULL THEN
    RETURN format('it is not a plain query: it has %s',
      CASE _kind WHEN 'ROWMARKCLAUSE' THEN 'FOR UPDATE or FOR SHARE'
      WHEN 'COERCETODOMAIN' THEN 'a cast to a domain' WHEN 'XMLEXPR' THEN 'an XML function'
      WHEN 'TABLESAMPLECLAUSE' THEN 'TABLESAMPLE'
      ELSE format('%L of the parse tree', _kind) END);
  END IF;
  SELECT m[1]::oid INTO _relation FROM regexp_matches(tree, ':relid ([0-9]+)', 'g') AS m
  WHERE m[1] <> '0' AND m[1]::oid <> ALL (relations) LIMIT 1;
  IF _relation IS NOT NULL THEN
    RETURN format('it reads %s, which is none of the tables that may be queried', _relation);
  END IF;
  _functions := ARRAY(
    SELECT DISTINCT m[1]::oid
    FROM regexp_matches(tree, ':(?:funcid|opfuncid|aggfnoid|winfnoid) ([0-9]+)', 'g') AS m);
  SELECT f.oid INTO _function FROM unnest(_functions, ml_rag._signatures(_functions)) AS f (oid, signature)
  WHERE f.signature IS NULL ORDER BY f.oid LIMIT 1;
  IF _function IS NOT NULL THEN
    RETURN format('it calls %s, which is none of the functions that may be called', _function);
  END IF;
  -- its function is one of those, but for NOT and for estimates the planner asks its negator's
  SELECT o.oid INTO _operator FROM regexp_matches(tree, ':opno ([0-9]+)', 'g') AS m
  JOIN pg_operator AS o ON o.oid = m[1]::oid
  WHERE o.oid >= 16384 AND NOT ml_rag._trusts(o.oprowner) LIMIT 1;
  IF _operator IS NOT NULL THEN
    RETURN format('it uses operator %s of an untrusted owner', _operator);
  END IF;
  -- to read a value as one of a domain or composite type runs the checks of domains
  SELECT t.oid INTO _type FROM regexp_matches(tree, ':resulttype ([0-9]+)', 'g') AS m
  JOIN pg_type AS t ON t.oid = m[1]::oid
  JOIN pg_type AS e ON e.oid = CASE WHEN t.typcategory = 'A' AND t.typelem <> 0 THEN t.typelem ELSE t.oid END
  WHERE e.oid >= 16384 AND e.typtype NOT IN ('b', 'e') LIMIT 1;
  IF _type IS NOT NULL THEN
    RETURN format('it casts to %s, which is not a type that may be cast to', _type);
  END IF;
  RETURN NULL;
END
$$;

CREATE FUNCTION ml_rag._type_that_runs_code(statement text, schemas text[]) RETURNS text
LANGUAGE plpgsql STABLE PARALLEL UNSAFE
SET search_path FROM CURRENT
-- a plan for one table looks cheaper than the generic one, which takes less time than planning; of a few
-- hundred indexes the planner would read all
SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off
SET jit = off
AS $$
-- purpose: what a statement may name, and so have PostgreSQL read a constant by running code of a role that
-- the caller does not trust
-- PostgreSQL reads constants while it parses: '{1}'::planted.number[] runs the CHECK of that domain, and so
-- does planted.total('{1}') whose argument is of that type. So this goes before, and by the letters. It
-- starts from the names in the text: those of schemas, and in these and in schemas, where a name needs none,
-- those of types, functions and operators. Of what the catalog has beside them nothing is read, however much
-- others put there. A domain that has no CHECK can have got one by the time the constant is read.
-- Reads: the catalog, by its indexes
DECLARE
  _most constant integer := 1000;
  _found jsonb;
  _names name[];
  _namespaces oid[];
  _types oid[];
BEGIN
  IF strpos(lower(statement), 'u&"') > 0 THEN
    RETURN 'a name written with Unicode escapes';
  END IF;
  _found := ml_rag._python('names_in', jsonb_build_array(statement));
  _names := ml_rag._texts(_found -> 'names')::name[];
  _namespaces := ARRAY(
    SELECT n.oid FROM pg_namespace AS n WHERE n.nspname = ANY (_names || schemas::name[])
      AND has_schema_privilege(n.oid, 'USAGE')
    UNION SELECT pg_my_temp_schema());
  -- all that these consist of; below 16384: built in. OFFSET 0: looked up, not joined with whole catalogs
  _types := ARRAY(
    WITH RECURSIVE part (oid) AS (
      SELECT n.oid FROM (
        SELECT t.oid FROM pg_type AS t WHERE t.typname = ANY (_names) AND t.typnamespace = ANY (_namespaces)
        UNION ALL
        SELECT unnest(p.prorettype || p.proargtypes::oid[] || coalesce(p.proallargtypes, '{}'))
        FROM pg_proc AS p WHERE p.proname = ANY (_names) AND p.pronamespace = ANY (_namespaces)
        UNION ALL
        SELECT unnest(ARRAY[o.oprleft, o.oprright, o.oprresult])
        FROM pg_operator AS o
        WHERE o.oprname = ANY (ml_rag._texts(_found -> 'operators')::name[])
          AND o.oprnamespace = ANY (_namespaces)
        OFFSET 0
      ) AS n WHERE n.oid >= 16384
      UNION
      SELECT n.oid FROM part AS p CROSS JOIN LATERAL (
        SELECT unnest(ARRAY[t.typelem, t.typbasetype]) AS oid
        FROM (SELECT t.typelem, t.typbasetype FROM pg_type AS t WHERE t.oid = p.oid OFFSET 0) AS t
        UNION ALL
        SELECT a.atttypid FROM (SELECT t.typrelid FROM pg_type AS t
          WHERE t.oid = p.oid AND t.typrelid <> 0 OFFSET 0) AS t
        CROSS JOIN LATERAL (SELECT a.atttypid FROM pg_attribute AS a
                            WHERE a.attrelid = t.typrelid AND a.attnum > 0
                              AND NOT a.attisdropped OFFSET 0) AS a
        UNION ALL (SELECT r.rngsubtype FROM pg_range AS r WHERE r.rngtypid = p.oid OFFSET 0)
        UNION ALL (SELECT r.rngtypid FROM pg_range AS r WHERE r.rngmultitypid = p.oid OFFSET 0)
      ) AS n WHERE n.oid >= 16384
    )
    SELECT p.oid FROM part AS p LIMIT _most + 1);
  IF cardinality(_types) > _most THEN
    RETURN format('more than %s types', _most);
  END IF;
  RETURN (
    SELECT format('type %s', t.oid::regtype) FROM pg_type AS t
    WHERE t.oid = ANY (_types) AND t.typtype = 'd' AND NOT ml_rag._trusts(t.typowner) LIMIT 1);
END
$$;

CREATE FUNCTION ml_rag._parsed(view text) RETURNS text
LANGUAGE plpgsql STABLE PARALLEL RESTRICTED SET search_path FROM CURRENT AS $$
-- purpose: the parsed query of a temporary view  Reads: the catalog
BEGIN
  RETURN (SELECT r.ev_action::text FROM pg_rewrite AS r JOIN pg_class AS c ON c.oid = r.ev_class
          WHERE c.relname = view AND c.relnamespace = pg_my_temp_schema());
END
$$;

-- What the Python side asks of the view, without operators that the search_path of the statement could give
-- another meaning.

CREATE FUNCTION ml_rag._statement_row() RETURNS text
LANGUAGE plpgsql STABLE PARALLEL RESTRICTED SET search_path FROM CURRENT AS $$
-- purpose: an expression for a row of view ml_rag_statement as a JSON array: numbers, booleans, arrays and
-- JSON as they are, all else as text, and JSON that jsonb cannot hold; null if one of its arrays has more
-- than 100 000 elements
-- By output functions: casts to JSON or text can be the code of the owner of a type.
-- Reads: the catalog
DECLARE
  _numbers constant oid[] := '{bool,int2,int4,int8,float4,float8,numeric}'::regtype[];
  _values text;
  _cardinalities text;
BEGIN
  WITH RECURSIVE base AS (
    SELECT a.attnum, quote_ident(a.attname) AS name, a.atttypid AS type
    FROM pg_attribute AS a JOIN pg_class AS c ON c.oid = a.attrelid
    WHERE c.relname = 'ml_rag_statement' AND c.relnamespace = pg_my_temp_schema() AND a.attnum > 0
    UNION ALL
    SELECT b.attnum, b.name, t.typbasetype FROM base AS b JOIN pg_type AS t ON t.oid = b.type
    WHERE t.typtype = 'd'
  )
  SELECT string_agg(format('CASE WHEN %1$s IS NOT DISTINCT FROM NULL THEN ''null'' ELSE %2$s END',
    b.name, CASE
      WHEN b.type = ANY (_numbers) THEN format('pg_catalog.to_json(%s)::pg_catalog.text', b.name)
      WHEN b.type = 'jsonb'::regtype THEN format('%s::pg_catalog.text', b.name)
      WHEN b.type = 'json'::regtype THEN format('COALESCE(ml_rag._as_jsonb(%1$s)::pg_catalog.text, '
        'pg_catalog.to_json(%1$s::pg_catalog.text)::pg_catalog.text)', b.name)
      WHEN NOT is_array THEN format('pg_catalog.to_json(pg_catalog.concat(%s))::pg_catalog.text', b.name)
      WHEN t.typelem = 'json'::regtype THEN format('COALESCE(ml_rag._as_jsonb(pg_catalog.array_to_json(%1$s))'
        '::pg_catalog.text, pg_catalog.array_to_json(%1$s::pg_catalog.text[])::pg_catalog.text)', b.name)
      WHEN t.typelem = ANY (_numbers || 'jsonb'::regtype) THEN
        format('pg_catalog.array_to_json(%s)::pg_catalog.text', b.name)
      ELSE format('pg_catalog.array_to_json(pg_catalog.concat(%s)::pg_catalog.text[])::pg_catalog.text',
        b.name) END), ', '
      ORDER BY b.attnum),
    string_agg(format('pg_catalog.cardinality(%s)', b.name), ', ' ORDER BY b.attnum) FILTER (WHERE is_array)
  INTO _values, _cardinalities
  FROM base AS b JOIN pg_type AS t ON t.oid = b.type
  CROSS JOIN LATERAL (SELECT t.typsubscript = 'array_subscript_handler'::regproc
    AND t.typdelim = ',' AS is_array) AS a
  WHERE t.typtype <> 'd';
  RETURN format('CASE WHEN pg_catalog.int4le(GREATEST(%s), 100000) THEN pg_catalog.concat(''['', '
    'pg_catalog.array_to_string(ARRAY[%s]::pg_catalog.text[], '', ''), '']'') END',
      concat_ws(', ', '0', _cardinalities), _values);
END
$$;

CREATE FUNCTION ml_rag._limit_temporary_files() RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SECURITY DEFINER
SET search_path = pg_catalog, ml_rag, pg_temp
AS $$
-- purpose: at most 2 GB of temporary files of this session, until the end of the (sub)transaction
-- Only superusers change this setting, so it runs as the owner. Who calls it takes only from their own.
BEGIN
  IF (SELECT s.setting::bigint NOT BETWEEN 0 AND 2097152 FROM pg_settings AS s
    WHERE s.name = 'temp_file_limit') THEN
    PERFORM set_config('temp_file_limit', '2GB', true);
  END IF;
EXCEPTION WHEN insufficient_privilege THEN
  NULL;
END
$$;

CREATE FUNCTION ml_rag._fits(size integer) RETURNS boolean
LANGUAGE plpython3u VOLATILE PARALLEL UNSAFE SET search_path FROM CURRENT AS $$
# purpose: whether a row of so many bytes as JSON is handed to Python, which has no limit of memory then: see
# fits in backend/statement.py
return "ml_rag" in GD and GD["ml_rag"].fits(size)
$$;

CREATE FUNCTION ml_rag._next_row(INOUT portal refcursor, statement text, n bigint, OUT is_there boolean,
  OUT value text)
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE AS $$
-- purpose: the next row of a portal; if portal is null, of one opened for the statement, with n as $1. It
-- runs under the search_path of the statement, hence names with their schema
-- Its errors become short ones: PL/Python copies an error and makes one of Python's of it, and if a long one
-- leaves too little memory for that, PostgreSQL jumps over Python's frames, and the process crashes.
DECLARE
  _portal refcursor := portal;
BEGIN
  IF portal IS NULL THEN
    OPEN _portal FOR EXECUTE (SELECT statement) USING (SELECT n);
  END IF;
  FETCH _portal INTO value;
  is_there := FOUND;
  portal := _portal;
EXCEPTION WHEN query_canceled OR OTHERS THEN
  RAISE EXCEPTION USING ERRCODE = SQLSTATE, MESSAGE = pg_catalog.left(SQLERRM, 1000);
END
$$;
