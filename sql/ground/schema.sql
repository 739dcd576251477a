-- schema: the schema of everything private, and what all files use of the catalog.

CREATE SCHEMA ml_rag;
COMMENT ON SCHEMA ml_rag IS 'retrieval-augmented generation: stages, settings and helpers behind the public '
  'routines';
CREATE SCHEMA ml_rag_internal;
COMMENT ON SCHEMA ml_rag_internal IS 'tables that only functions of ml_rag read and write';

-- Nothing that this script runs or makes looks a name up anywhere but in pg_catalog and ml_rag: others may be
-- allowed to create objects in pgvector's schema, and an operator for just the types of an expression is
-- taken before one of pg_catalog for any. Before the names of pgvector's stands a placeholder for its schema,
-- see mk/build.sh. Functions with SET search_path FROM
-- CURRENT get this path, too.
SET LOCAL search_path = pg_catalog, ml_rag, pg_temp;

DO $$
DECLARE
  _schema name := (SELECT n.nspname FROM pg_extension AS e JOIN pg_namespace AS n ON n.oid = e.extnamespace
    WHERE e.extname = 'vector');
BEGIN
  IF _schema !~ '^[[:alnum:]_ -]+$' THEN
    RAISE EXCEPTION USING ERRCODE = '0A000', MESSAGE = format('pgvector is in schema %I', _schema),
      DETAIL = 'The name of its schema may have letters, digits, underscores, hyphens and blanks.',
      HINT = 'ALTER EXTENSION vector SET SCHEMA …;';
  ELSIF getdatabaseencoding() = 'SQL_ASCII' THEN
    RAISE EXCEPTION USING ERRCODE = '0A000',
      MESSAGE = 'ml_rag does not work in a database of encoding SQL_ASCII',
      DETAIL = 'PL/Python reads texts as UTF8: one name or row of any role that is not makes calls fail.',
      HINT = 'CREATE DATABASE … ENCODING ''UTF8'' TEMPLATE template0;';
  END IF;
END
$$;

CREATE FUNCTION ml_rag.version() RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE
AS $$ SELECT '@ML_RAG_VERSION@'::pg_catalog.text $$;
COMMENT ON FUNCTION ml_rag.version() IS 'version of the SQL side of the extension';

CREATE FUNCTION ml_rag._full_names(schema_name name, name name) RETURNS text[]
LANGUAGE sql IMMUTABLE PARALLEL SAFE
AS $$
-- purpose: those names of a relation that can be of no other one, whatever schemas and tables somebody makes.
-- The schema "a" could have its quotes in its name, too
SELECT CASE WHEN schema_name ~ '^"|\.' OR name ~ '^"|\.' THEN ARRAY[format('%I.%I', schema_name, name)]
  ELSE ARRAY[format('%I.%I', schema_name, name), concat(schema_name, '.', name)] END
$$;

CREATE FUNCTION ml_rag._names(schema_name name, name name) RETURNS text[]
LANGUAGE sql IMMUTABLE PARALLEL SAFE
AS $$
-- purpose: all names by which a call finds a relation
SELECT ARRAY[concat(schema_name, '.', name), name, format('%I.%I', schema_name, name), quote_ident(name)]
$$;

CREATE FUNCTION ml_rag._relation_name(relation regclass) RETURNS text
LANGUAGE plpgsql STABLE PARALLEL SAFE SET search_path FROM CURRENT AS $$
-- purpose: a relation as it is written into a statement; 42P01 where it was dropped meanwhile
-- A regclass of nothing prints as a bare number, which as SQL is a syntax error, and a name of digits quoted.
DECLARE
  _name text := relation::text;
BEGIN
  IF _name IS NULL THEN
    RAISE EXCEPTION USING ERRCODE = '42P01', MESSAGE = 'table does not exist', DETAIL = 'The table is NULL.',
      HINT = 'Name a table.';
  ELSIF _name ~ '^([0-9]+|-)$' THEN
    RAISE EXCEPTION USING ERRCODE = '42P01', MESSAGE = 'table does not exist',
      DETAIL = format('A table with OID %s does not exist; it may have been dropped during the call.',
        relation::oid),
      HINT = 'Try again.';
  END IF;
  RETURN _name;
END
$$;

CREATE FUNCTION ml_rag._base_type(type oid) RETURNS regtype
LANGUAGE plpgsql STABLE PARALLEL SAFE AS $$
-- purpose: what a type is below its domains  Reads: the catalog
DECLARE
  _type oid := type;
  _base oid;
BEGIN
  LOOP
    SELECT t.typbasetype INTO _base FROM pg_type AS t WHERE t.oid = _type AND t.typtype = 'd';
    IF NOT FOUND THEN
      RETURN _type;
    END IF;
    _type := _base;
  END LOOP;
END
$$;

CREATE FUNCTION ml_rag._type_name(type oid, modifier integer DEFAULT -1) RETURNS text
LANGUAGE plpgsql STABLE PARALLEL SAFE AS $$
-- purpose: a type as it is written into a statement that compares with stored values: never a domain, which
-- its owner can rename at any time, so that another role's, with a CHECK of that role's, has the name
DECLARE
  _base oid := ml_rag._base_type(type);
BEGIN
  RETURN format_type(_base, CASE WHEN _base = type THEN modifier ELSE -1 END);
END
$$;

CREATE FUNCTION ml_rag._check_writable(what text, relation regclass DEFAULT NULL) RETURNS void
LANGUAGE plpgsql STABLE PARALLEL SAFE AS $$
-- purpose: stop what writes before it asks a model, where only temporary tables can be written
BEGIN
  IF current_setting('transaction_read_only')::boolean
    AND NOT EXISTS (SELECT FROM pg_class AS c WHERE c.oid = relation AND c.relpersistence = 't') THEN
    RAISE EXCEPTION USING ERRCODE = '25006', MESSAGE = format('%s in a read-only transaction', what),
      DETAIL = CASE WHEN pg_is_in_recovery() THEN 'This server is a standby.'
        ELSE 'transaction_read_only is on, perhaps by default_transaction_read_only.' END,
      HINT = CASE WHEN pg_is_in_recovery() THEN 'Connect to the primary server.'
        ELSE 'Use BEGIN READ WRITE, or SET default_transaction_read_only = off.' END;
  END IF;
END
$$;

CREATE FUNCTION ml_rag._check_transaction(what text, relation regclass DEFAULT NULL) RETURNS void
LANGUAGE plpgsql STABLE PARALLEL SAFE AS $$
-- purpose: stop what changes definitions in a transaction that cannot write, or whose snapshot is older than
-- what others have committed
DECLARE
  _level text := current_setting('transaction_isolation');
BEGIN
  PERFORM ml_rag._check_writable(what, relation);
  IF _level NOT IN ('read committed', 'read uncommitted') THEN
    RAISE EXCEPTION USING ERRCODE = '55000', MESSAGE = format('%s at this isolation level', what),
      DETAIL = format('The level is %s: what others have committed since it began would be missed.', _level),
      HINT = 'Call it in another transaction, at READ COMMITTED: '
        'SET default_transaction_isolation = ''read committed'';';
  END IF;
END
$$;

CREATE FUNCTION ml_rag._raise(error jsonb) RETURNS void
LANGUAGE plpgsql STABLE PARALLEL SAFE STRICT SET search_path FROM CURRENT AS $$
-- purpose: raise what a PL/Python function returned as its error: {sqlstate, message, detail, hint}, or of a
-- constraint {sqlstate, message, detail, schema, table, constraint}
-- RAISE takes no null for an option, hence a branch for each set of those there are
DECLARE
  _state text := error ->> 'sqlstate';
  _message text := error ->> 'message';
  _detail text := error ->> 'detail';
  _hint text := error ->> 'hint';
BEGIN
  IF _detail IS NOT NULL AND error ? 'constraint' THEN
    RAISE EXCEPTION USING ERRCODE = _state, MESSAGE = _message, DETAIL = _detail, SCHEMA = error ->> 'schema',
      TABLE = error ->> 'table', CONSTRAINT = error ->> 'constraint';
  ELSIF _detail IS NOT NULL AND _hint IS NOT NULL THEN
    RAISE EXCEPTION USING ERRCODE = _state, MESSAGE = _message, DETAIL = _detail, HINT = _hint;
  ELSIF _detail IS NOT NULL THEN
    RAISE EXCEPTION USING ERRCODE = _state, MESSAGE = _message, DETAIL = _detail;
  ELSIF _hint IS NOT NULL THEN
    RAISE EXCEPTION USING ERRCODE = _state, MESSAGE = _message, HINT = _hint;
  ELSIF _message IS NOT NULL THEN
    RAISE EXCEPTION USING ERRCODE = _state, MESSAGE = _message;
  END IF;
END
$$;

CREATE FUNCTION ml_rag._fields_of_error(
  context text, detail text, hint text, schema_name text, table_name text, column_name text,
  constraint_name text, datatype_name text,
  OUT only_message boolean, OUT only_detail boolean, OUT only_hint boolean, OUT detail_and_hint boolean,
  OUT detail_and_constraint boolean, OUT detail_and_column boolean
)
LANGUAGE plpgsql STABLE PARALLEL SAFE SET search_path FROM CURRENT AS $$
-- purpose: what an error has ('' where nothing) that a public routine caught, for it to raise the same again
-- (sql/raise.sql.in): a line of context for each of the functions inside is of no use to who called it.
-- DEBUG1 has them. Nothing is true of an error that stays as it is: one raised in a function that is not
-- ml_rag's, whose owner looks for it, or one with other fields.
DECLARE
  _function text[] := regexp_match(context,
    '(?n)^(?:compilation of )?(\S+) (?:function|procedure) "?([^("\n]*)');
  _object text := concat(schema_name, table_name, column_name, constraint_name, datatype_name);
BEGIN
  IF NOT EXISTS (
    SELECT FROM pg_depend AS d JOIN pg_extension AS e ON e.oid = d.refobjid AND e.extname = 'ml_rag'
    JOIN pg_proc AS p ON p.oid = d.objid JOIN pg_namespace AS n ON n.oid = p.pronamespace
    JOIN pg_language AS l ON l.oid = p.prolang
    WHERE d.refclassid = 'pg_extension'::regclass AND d.classid = 'pg_proc'::regclass AND d.deptype = 'e'
      AND _function[2] IN (p.proname, concat(n.nspname, '.', p.proname))
      -- this runs functions of callers, and an inlined one has no line in the context
      AND p.proname <> '_run_function'
      -- a function of SQL or Python stands there without its schema
      AND CASE l.lanname WHEN 'plpgsql' THEN 'PL/pgSQL' WHEN 'sql' THEN 'SQL'
        ELSE 'PL/Python' END = _function[1]
  ) THEN
    RETURN;
  END IF;
  only_message := _object = '' AND detail = '' AND hint = '';
  only_detail := _object = '' AND detail <> '' AND hint = '';
  only_hint := _object = '' AND detail = '' AND hint <> '';
  detail_and_hint := _object = '' AND detail <> '' AND hint <> '';
  detail_and_constraint := schema_name <> '' AND table_name <> '' AND constraint_name <> ''
    AND concat(column_name, datatype_name, hint) = '' AND detail <> '';
  detail_and_column := schema_name <> '' AND table_name <> '' AND column_name <> ''
    AND concat(constraint_name, datatype_name, hint) = '' AND detail <> '';
  IF only_message OR only_detail OR only_hint OR detail_and_hint OR detail_and_constraint
      OR detail_and_column THEN
    RAISE DEBUG USING MESSAGE = 'the context of an error in ml_rag', DETAIL = context;
  END IF;
END
$$;

CREATE FUNCTION ml_rag._derived_name(name text, suffix text) RETURNS name
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE AS $$
-- purpose: a name and a suffix, with as much of the name as the 63 bytes of a name have room for
BEGIN
  RETURN substr((suffix || name)::name, length(suffix) + 1) || suffix;
END
$$;

CREATE FUNCTION ml_rag._full_name(relation regclass) RETURNS text
LANGUAGE plpgsql STABLE PARALLEL SAFE SET search_path FROM CURRENT AS $$
-- purpose: a relation's name with its schema, quoted where need be: the one that it has now, whatever older
-- one the snapshot of the transaction shows, which another relation may have by now
BEGIN
  RETURN (SELECT concat(o.schema, '.', o.name)
          FROM pg_identify_object('pg_class'::regclass, relation, 0) AS o WHERE o.name IS NOT NULL);
END
$$;

CREATE FUNCTION ml_rag._is_distributed(relation oid) RETURNS boolean
LANGUAGE plpgsql STABLE PARALLEL SAFE AS $$
-- purpose: whether Citus has distributed a table: rows of two of its shards can have the same ctid
-- PL/pgSQL, which is parsed when it runs: without Citus that table does not exist.
-- Reads: the catalog
BEGIN
  IF to_regclass('pg_catalog.pg_dist_partition') IS NULL THEN
    RETURN false;
  END IF;
  RETURN EXISTS (SELECT FROM pg_catalog.pg_dist_partition AS d WHERE d.logicalrelid = relation);
END
$$;

CREATE FUNCTION ml_rag._distribution_column(store regclass) RETURNS name
LANGUAGE plpgsql STABLE PARALLEL SAFE AS $$
-- purpose: the column by whose hash Citus distributes a table; null if it has none
BEGIN
  RETURN (SELECT column_to_column_name(d.logicalrelid, d.partkey) FROM pg_catalog.pg_dist_partition AS d
          WHERE d.logicalrelid = store AND d.partmethod = 'h');
END
$$;

CREATE FUNCTION ml_rag._may_have_shards(relation oid) RETURNS boolean
LANGUAGE plpgsql VOLATILE PARALLEL SAFE AS $$
-- purpose: whether to look for shards: in a partitioned table, if the database has a foreign partition
-- Each partition takes 6 µs. A shard may have come after the snapshot of the caller's statement; this
-- function is volatile to see it. Where a transaction has one snapshot the partitions decide.
-- Reads: the catalog
BEGIN
  RETURN (SELECT c.relkind FROM pg_class AS c WHERE c.oid = relation) = 'p' AND (
    current_setting('transaction_isolation') <> 'read committed'
    OR EXISTS (SELECT FROM pg_foreign_table AS f JOIN pg_class AS c ON c.oid = f.ftrelid
               WHERE c.relispartition));
END
$$;

CREATE FUNCTION ml_rag._has_shards(relation oid) RETURNS boolean
LANGUAGE plpgsql STABLE PARALLEL SAFE AS $$
-- purpose: whether some partition of a relation is a foreign table
-- Reads: the catalog
BEGIN
  RETURN ml_rag._may_have_shards(relation) AND EXISTS (
    SELECT FROM pg_partition_tree(relation) AS p WHERE p.isleaf AND pg_relation_filenode(p.relid) IS NULL);
END
$$;

CREATE FUNCTION ml_rag._can_be_restored(texts text[], documents jsonb[]) RETURNS boolean
LANGUAGE sql IMMUTABLE PARALLEL SAFE
-- as above; of a constraint, which pg_restore checks
SET search_path = pg_catalog, pg_temp
AS $$
-- purpose: whether a row of these can be dumped and restored, for tables that a dump has with the rows of all
-- roles: one that COPY cannot write or read would be the end of all others, too. JSON can come in that is
-- nested some levels deeper than COPY reads it, and texts that are not valid in the encoding of the database.
-- Errors: 22021 such a text
SELECT (SELECT coalesce(sum(octet_length(convert_to(t.value, getdatabaseencoding()))), 0)
    FROM (SELECT unnest(texts) UNION ALL SELECT d.value::text FROM unnest(documents) AS d (value))
      AS t (value)) <= 250000000
  AND NOT EXISTS (SELECT FROM unnest(documents) AS d (value) WHERE d.value @? 'strict $.**{2000}')
$$;

CREATE FUNCTION ml_rag._valid_text(value text) RETURNS text
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE AS $$
-- purpose: a name or comment of any role as a text that can be worked with
-- Of bytes that are not characters, at which length, left, lower and others fail, it has other characters, or
-- none: a regular expression reads them, and needs no subtransaction.
BEGIN
  RETURN (regexp_match(value, '^.*$'))[1];
END
$$;

CREATE FUNCTION ml_rag._is_node_group(comment text) RETURNS boolean
LANGUAGE sql IMMUTABLE PARALLEL SAFE
AS $$
-- purpose: whether a table with this comment, which any role may have written, has nodes
SELECT CASE WHEN octet_length(comment) <= 500000 THEN comment LIKE 'ML!_RAG!_NODE!_GROUP=%' ESCAPE '!' END
$$;

CREATE FUNCTION ml_rag._is_text(value text) RETURNS boolean
LANGUAGE plpgsql STABLE PARALLEL UNSAFE COST 1000 SET search_path FROM CURRENT AS $$
-- purpose: whether PL/Python can read a text. One that is not valid in the encoding of the database comes
-- back from it as another, so that a row is not found by it as a key; in other encodings than UTF8 that fails
BEGIN
  PERFORM convert_to(value, 'UTF8');
  RETURN true;
EXCEPTION WHEN character_not_in_repertoire OR untranslatable_character THEN
  RETURN false;
END
$$;
