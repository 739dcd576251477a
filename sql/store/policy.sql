-- policy: policies that are asked before conditions of whoever reads.
--
-- PostgreSQL evaluates what a row must meet in the order of costs, and counts leakproof conditions, such as comparisons of texts,
-- among the policies. One that costs less than the policy would come first and be evaluated for hidden rows, and EXPLAIN would
-- tell for how many it was true: by a subplan of the policy that was or was not executed, or by the pages that a second
-- condition reads of a long text. Nothing costs less than a subscript, (jsonb)[text] IS NOT NULL, which compares with a set of
-- texts for nothing. So policies on the tables of ml_rag are such subscripts themselves, of a set that is made once a statement;
-- of conditions that cost the same, the policy comes first. Policies on tables that others own need a function, which
-- costs less than any operator, but more than a subscript: docs/security.md says what remains.

CREATE FUNCTION ml_rag._make_visible(relation regclass, types text[], condition text) RETURNS text
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: the function that the policy of a table asks; returns its name, which has the table's OID so that none is in its way
-- condition: SQL with $1, … of these types; as a parsed body it follows when a table that it reads is renamed
-- Writes: a new function, of the table's owner
DECLARE
  _owner regrole;
  _function text;
BEGIN
  SELECT c.relowner, format('%I.%I', n.nspname, format('%s_%s_visible', left(c.relname, 40), c.oid)) INTO _owner, _function
  FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace WHERE c.oid = relation;
  EXECUTE format('CREATE FUNCTION %s(%s) RETURNS boolean LANGUAGE sql STABLE COST 0.000001 RETURN %s', _function,
    array_to_string(types, ', '), condition);
  EXECUTE format('COMMENT ON FUNCTION %s IS %L', _function, format('made by ml_rag: who sees a row of %s', ml_rag._full_name(relation)));
  -- with the rights of whoever reads the table
  EXECUTE format('GRANT EXECUTE ON FUNCTION %s TO PUBLIC', _function);
  EXECUTE format('ALTER FUNCTION %s OWNER TO %s', _function, _owner);
  RETURN _function;
END
$$;

CREATE FUNCTION ml_rag._policy_functions(relation oid) RETURNS regprocedure[]
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$
-- purpose: the functions of ml_rag._make_visible that the policies of a table ask  Reads: the catalog
BEGIN
  RETURN ARRAY(
    SELECT DISTINCT p.oid::regprocedure FROM pg_policy AS y
    JOIN pg_depend AS d ON d.classid = 'pg_policy'::regclass AND d.objid = y.oid AND d.refclassid = 'pg_proc'::regclass
    JOIN pg_proc AS p ON p.oid = d.refobjid AND p.proname ~ '_\d+_visible$'
    JOIN pg_class AS c ON c.oid = y.polrelid AND c.relowner = p.proowner
    WHERE y.polrelid = relation);
END
$$;

CREATE FUNCTION ml_rag._drop_visible(relation regclass) RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: drop a table, with the functions that its policies ask  Writes: the table's definition, as the caller
DECLARE
  _functions regprocedure[] := ml_rag._policy_functions(relation);
  _function regprocedure;
BEGIN
  EXECUTE format('DROP TABLE %s', ml_rag._relation_name(relation));
  FOREACH _function IN ARRAY _functions LOOP
    EXECUTE format('DROP FUNCTION %s', _function);
  END LOOP;
END
$$;
