-- policy: policies that are evaluated before the reader's conditions.
--
-- PostgreSQL evaluates what a row must meet in the order of costs, and counts leakproof conditions, such as
-- comparisons of texts, among the policies. One that costs less than the policy would come first and be
-- evaluated for hidden rows, and EXPLAIN would tell for how many it was true: by a subplan of the policy that
-- was or was not executed, or by the pages that a second condition reads of a long text. Nothing costs less
-- than a subscript, (jsonb)[text] IS NOT NULL, which compares with a set of texts for nothing. So policies on
-- the tables of ml_rag are such subscripts themselves, of a set that is made once a statement; of conditions
-- that cost the same, the policy comes first, except under UNION ALL. Policies on tables that others own need
-- a function, which costs less than any operator, but more than a subscript: docs/security.md says what
-- remains.

CREATE FUNCTION ml_rag._make_visible(relation regclass, types text[], condition text) RETURNS text
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SET citus.enable_ddl_propagation = off AS $$
-- purpose: the function that the policy of a table asks; returns its name, which has the table's OID so that
-- none is in its way
-- condition: SQL with $1, … of these types; as a parsed body it follows when a table that it reads is renamed
-- Citus does not make it on its workers, which lack the table, nor warns that it cannot.
-- Writes: a new function, of the table's owner
DECLARE
  _owner regrole;
  _function text;
  -- with its types: a function of that name and of others may be there
  _signature text;
BEGIN
  SELECT c.relowner, format('%I.%I', n.nspname,
    ml_rag._derived_name(c.relname, format('_%s_visible', c.oid)))
  INTO _owner, _function
  FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace WHERE c.oid = relation;
  _signature := format('%s(%s)', _function, array_to_string(types, ', '));
  EXECUTE format('CREATE FUNCTION %s RETURNS boolean LANGUAGE sql STABLE COST 0.000001 RETURN %s',
    _signature, condition);
  EXECUTE format('COMMENT ON FUNCTION %s IS %L', _signature,
    format('made by ml_rag: who sees a row of %s', ml_rag._full_name(relation)));
  -- with the rights of the role that reads the table
  EXECUTE format('GRANT EXECUTE ON FUNCTION %s TO PUBLIC', _signature);
  EXECUTE format('ALTER FUNCTION %s OWNER TO %s', _signature, _owner);
  RETURN _function;
END
$$;

CREATE FUNCTION ml_rag._segment_table(relation oid, must_exist boolean DEFAULT false) RETURNS regclass
LANGUAGE plpgsql STABLE PARALLEL SAFE SET search_path FROM CURRENT AS $$
-- purpose: the table of segments of a table; null if it has none. Any role may make a policy that reads
-- another's table, so both must be of one owner  Reads: the catalog
DECLARE
  _segments regclass := (
    SELECT p.polrelid FROM pg_depend AS f
    JOIN pg_depend AS d ON d.refclassid = 'pg_proc'::regclass AND d.refobjid = f.objid
      AND d.classid = 'pg_policy'::regclass
    JOIN pg_policy AS p ON p.oid = d.objid
    JOIN pg_class AS c ON c.oid = p.polrelid JOIN pg_class AS s ON s.oid = relation
      AND s.relowner = c.relowner
    WHERE f.classid = 'pg_proc'::regclass AND f.refclassid = 'pg_class'::regclass AND f.refobjid = relation
      AND p.polname = 'ml_rag_source' AND p.polrelid <> relation LIMIT 1);
BEGIN
  IF _segments IS NULL AND must_exist THEN
    RAISE EXCEPTION USING ERRCODE = '55000',
      MESSAGE = format('the table of segments of "%s" is missing', relation::regclass),
      DETAIL = 'It was dropped, lost its policy "ml_rag_source", or has another owner than the table.',
      HINT = format('First: SELECT ml_rag.drop_vectorizer(%1$L); '
        'then: SELECT ml_rag.create_vectorizer(%1$L, ''{"columns": …}'');', relation::regclass);
  END IF;
  RETURN _segments;
END
$$;

CREATE FUNCTION ml_rag._segments_hint(relation oid) RETURNS text
LANGUAGE plpgsql STABLE PARALLEL SAFE AS $$
-- purpose: which table is meant by one whose vectorizer has made a table of segments; null if none
BEGIN
  RETURN (SELECT format('Its segments are in "%s": name that table.', ml_rag._full_name(s))
    FROM ml_rag._segment_table(relation) AS s WHERE s IS NOT NULL);
END
$$;

CREATE FUNCTION ml_rag._drop_visible() RETURNS event_trigger
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
SET lock_timeout = '100ms'
AS $$
-- purpose: drop a function of ml_rag._make_visible with its table: those that no policy calls any more.
-- Neither its name shows that, as tables have other OIDs in a database that was restored, nor its schema,
-- which the table may have left. It runs as the role that drops the table, with that role's own rights.
-- Any role can make functions that look like these, and hold locks of them or change them meanwhile. So the
-- role's own come first, only some are dropped at once, none is waited for, and none fails the statement:
-- what is left is dropped with the next table.
DECLARE
  _function regprocedure;
BEGIN
  FOR _function IN
    SELECT p.oid FROM pg_proc AS p
    JOIN pg_description AS d ON d.classoid = 'pg_proc'::regclass AND d.objoid = p.oid AND d.objsubid = 0
    WHERE p.proname ~ '_\d+_visible$' AND p.prokind = 'f' AND pg_has_role(p.proowner, 'USAGE')
      -- any role may write a comment of 1 GB, or with bytes that are not characters, at which left fails
      AND CASE WHEN octet_length(d.description) <= 1000
        THEN d.description LIKE 'made by ml!_rag:%' ESCAPE '!' END
      -- looked up once, not for each
      AND p.oid NOT IN (SELECT e.refobjid FROM pg_depend AS e
        WHERE e.refclassid = 'pg_proc'::regclass AND e.classid = 'pg_policy'::regclass)
    ORDER BY p.proowner <> quote_ident(current_user)::regrole, p.oid LIMIT 100
  LOOP
    BEGIN
      EXECUTE format('DROP FUNCTION %s', _function);
    EXCEPTION WHEN dependent_objects_still_exist THEN
      -- the DROP does not fail by what the owner of the function has built upon it
      RAISE NOTICE USING MESSAGE = format('function %s was kept', _function),
        DETAIL = 'Other objects depend on it.';
    WHEN lock_not_available THEN
      EXIT;
    WHEN OTHERS THEN
      -- such as one that another session has dropped or changed meanwhile
      NULL;
    END;
  END LOOP;
END
$$;
CREATE EVENT TRIGGER ml_rag_drop_visible ON sql_drop WHEN TAG IN ('DROP TABLE', 'DROP SCHEMA', 'DROP OWNED')
EXECUTE FUNCTION ml_rag._drop_visible();
