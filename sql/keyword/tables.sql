-- tables: the keyword indexes: their tables, and the only ways to them.
-- keyword/index keeps them, pipeline/keyword asks them; docs/keyword.md says why they are as they are.

-- Rows get a number of their own, which is never used again. A run is a sealed part of an index: up to 65536
-- rows with their postings, which never change; what is deleted from it is noted beside. New rows wait in
-- keyword_new and deleted ones in keyword_gone until they are merged into runs, so that writers only ever
-- append and never wait for each other.

CREATE TABLE ml_rag_internal.keyword_store (
  store         regclass PRIMARY KEY,
  segment       name NOT NULL,              -- column of the text
  -- bounded, as the owners of tables choose them and the searches of all roles read them
  key           name[] NOT NULL CHECK (cardinality(key) BETWEEN 1 AND 32),  -- columns that tell rows apart
  -- text search configuration, with its schema
  configuration text NOT NULL CHECK (octet_length(configuration) <= 300),
  k1            double precision NOT NULL CHECK (k1 BETWEEN 0 AND 100),
  b             double precision NOT NULL CHECK (b BETWEEN 0 AND 1),
  statistics    text NOT NULL CHECK (statistics IN ('all', 'visible')),
  -- column of a text that is indexed together with the first, as one; null if none
  beside        name CHECK (beside = 'segment_nodes')
);
CREATE SEQUENCE ml_rag_internal.keyword_number;
CREATE TABLE ml_rag_internal.keyword_row (
  id     bigint PRIMARY KEY,
  store  regclass NOT NULL,
  length integer NOT NULL,                  -- tokens
  -- of the row of the store: a text[], as text, which compares faster
  key    text COLLATE "C" NOT NULL,
  tokens jsonb,                             -- token: how often; kept where statistics are of the visible rows
  text_hash bigint NOT NULL,                -- of the text, which tells the rows of a key apart
  -- COPY would read no row of the table: a key that is not valid in the encoding of the database is 22021
  CONSTRAINT can_be_restored CHECK (convert_to(key, getdatabaseencoding()) IS NOT NULL)
);
-- the only index that begins with the table, so that no plan looks up its rows by less than the key; with the
-- number, so that they are looked up in it alone
CREATE INDEX ON ml_rag_internal.keyword_row (store, key) INCLUDE (id);
CREATE TABLE ml_rag_internal.keyword_new (
  store  regclass NOT NULL,
  id     bigint NOT NULL,
  length integer NOT NULL,
  tokens jsonb,                             -- token: how often
  words  tsvector,                          -- the same, made faster; one of both is null
  PRIMARY KEY (store, id),
  CONSTRAINT can_be_restored CHECK (convert_to(concat(tokens, words), getdatabaseencoding()) IS NOT NULL)
);
CREATE TABLE ml_rag_internal.keyword_gone (
  store  regclass NOT NULL,
  id     bigint NOT NULL,
  length integer NOT NULL,
  PRIMARY KEY (store, id)
);
-- Texts that a transaction has taken away before it has added them, see ml_rag._keep_keywords.
CREATE TABLE ml_rag_internal.keyword_owed (
  store     regclass NOT NULL,
  key       text COLLATE "C" NOT NULL,
  text_hash bigint NOT NULL
);
CREATE INDEX ON ml_rag_internal.keyword_owed (store, key);
-- it has no key, and PostgreSQL refuses to delete from such a table where all tables are published
ALTER TABLE ml_rag_internal.keyword_owed REPLICA IDENTITY FULL;
CREATE TABLE ml_rag_internal.keyword_run (
  run         bigint PRIMARY KEY,
  store       regclass NOT NULL,
  -- bounded, as searches of all roles take memory by them
  rows        integer NOT NULL CHECK (rows BETWEEN 1 AND 65536),
  total       bigint NOT NULL,              -- of the lengths
  gone_rows   integer NOT NULL DEFAULT 0 CHECK (gone_rows BETWEEN 0 AND rows),
  gone_total  bigint NOT NULL DEFAULT 0,
  first_id    bigint NOT NULL,
  last_id     bigint NOT NULL,
  ids         bytea NOT NULL,               -- by slot (0 …), ascending, less first_id; see backend/keyword.py
  lengths     bytea NOT NULL,               -- by slot
  gone        bytea                         -- a bit for each slot; null if none
);
CREATE INDEX ON ml_rag_internal.keyword_run (store);
CREATE TABLE ml_rag_internal.keyword_posting (
  run      bigint NOT NULL,
  store    regclass NOT NULL,
  term     text COLLATE "C" NOT NULL,
  postings bytea NOT NULL,                  -- slots, and how often the term stands in each
  PRIMARY KEY (store, term, run)
);
CREATE INDEX ON ml_rag_internal.keyword_posting (run);

-- read in pieces, and numbers that differ compress badly
ALTER TABLE ml_rag_internal.keyword_run ALTER ids SET STORAGE EXTERNAL, ALTER lengths SET STORAGE EXTERNAL,
  ALTER gone SET STORAGE EXTERNAL;
ALTER TABLE ml_rag_internal.keyword_posting ALTER postings SET STORAGE EXTERNAL;
-- tokens of a usual segment stay in the row, uncompressed: queries look through them
ALTER TABLE ml_rag_internal.keyword_new ALTER tokens SET STORAGE EXTERNAL, ALTER words SET STORAGE EXTERNAL;
ALTER TABLE ml_rag_internal.keyword_new SET (toast_tuple_target = 8160);
ALTER TABLE ml_rag_internal.keyword_row ALTER tokens SET STORAGE EXTERNAL;
ALTER TABLE ml_rag_internal.keyword_row SET (toast_tuple_target = 8160);
-- no estimate of a plan, which debug_print_plan shows to any role, may depend on words
ALTER TABLE ml_rag_internal.keyword_row ALTER tokens SET STATISTICS 0;
ALTER TABLE ml_rag_internal.keyword_new ALTER tokens SET STATISTICS 0, ALTER words SET STATISTICS 0;
ALTER TABLE ml_rag_internal.keyword_posting ALTER term SET STATISTICS 0;

COMMENT ON TABLE ml_rag_internal.keyword_store IS 'tables with a keyword index, and how each is made and '
  'scored';
COMMENT ON TABLE ml_rag_internal.keyword_row IS 'rows of the keyword indexes: number, key in the store, '
  'length in tokens';
COMMENT ON TABLE ml_rag_internal.keyword_new IS 'rows that wait to be merged into a run';
COMMENT ON TABLE ml_rag_internal.keyword_gone IS 'deleted rows that are still in a run';
COMMENT ON TABLE ml_rag_internal.keyword_owed IS 'texts that a transaction has taken away before it has '
  'added them; empty when it ends';
COMMENT ON TABLE ml_rag_internal.keyword_run IS 'runs, the parts that a keyword index consists of';
COMMENT ON TABLE ml_rag_internal.keyword_posting IS 'which rows of a run hold a term, and how often';
COMMENT ON SEQUENCE ml_rag_internal.keyword_number IS 'numbers of rows and runs; never used twice, as '
  'sessions remember runs';

-- A dump has each table by its name. If a restored database has none of a name, COPY fails, and all rows are
-- missing. So the dump leaves out the rows of tables that were dropped with another object (CASCADE), of
-- tables that belong to an extension, and of temporary tables and indexes, for which every role can have a
-- row made (backend/runs.py).
DO $$
DECLARE
  _table name;
BEGIN
  FOREACH _table IN ARRAY
    '{keyword_store,keyword_row,keyword_new,keyword_gone,keyword_run,keyword_posting}'::name[] LOOP
    PERFORM pg_extension_config_dump(format('ml_rag_internal.%I', _table)::regclass,
      'WHERE store IN (SELECT c.oid FROM pg_catalog.pg_class AS c WHERE c.relkind IN (''r'', ''p'') '
      'AND c.relpersistence <> ''t'' AND NOT EXISTS (SELECT FROM pg_catalog.pg_depend AS d '
      'WHERE d.classid = ''pg_catalog.pg_class''::pg_catalog.regclass AND d.objid = c.oid '
      'AND d.deptype = ''e''))');
  END LOOP;
END
$$;
SELECT pg_catalog.pg_extension_config_dump('ml_rag_internal.keyword_number', '');

-- Only ml_rag_internal reads and writes these tables, so that neither results nor plans of others tell what
-- they hold. backend/rights.py says how a caller's search gets at them all the same.

CREATE FUNCTION ml_rag._read_as_owner() RETURNS void
LANGUAGE plpython3u STABLE PARALLEL UNSAFE SECURITY DEFINER
SET search_path FROM CURRENT
-- off is an error where a policy applies
SET row_security = on
-- planning its statements anew for each query takes longer than all the rest
SET plan_cache_mode = force_generic_plan
-- the cost that the planner sees grows with the index, so it would compile; what is read does not
SET jit = off
AS $$
# purpose: run what backend/rights.py holds ready, at the moment of the caller's statement; by itself it does
# nothing
if "ml_rag" in GD:
    GD["ml_rag"].run_handed()
$$;

CREATE FUNCTION ml_rag._write_as_owner() RETURNS void
LANGUAGE plpython3u VOLATILE PARALLEL UNSAFE SECURITY DEFINER
SET search_path FROM CURRENT
SET row_security = on
SET plan_cache_mode = force_generic_plan
AS $$
# purpose: run what backend/rights.py holds ready; by itself it does nothing
if "ml_rag" in GD:
    GD["ml_rag"].run_handed()
$$;

CREATE FUNCTION ml_rag._keyword_index(relation oid DEFAULT NULL)
RETURNS TABLE (store regclass, segment name, key name[], configuration text, k1 double precision,
  b double precision,
               statistics text, secured boolean)
LANGUAGE plpgsql STABLE PARALLEL UNSAFE ROWS 10
SET search_path FROM CURRENT
-- planning its statements anew for each query takes longer than all the rest
SET plan_cache_mode = force_generic_plan
AS $$
-- purpose: the keyword indexes (of one table) whose text and key the caller may read
#variable_conflict use_column
DECLARE
  _called record := ml_rag._call_python('keyword_indexes', jsonb_build_array($1::bigint));
BEGIN
  PERFORM ml_rag._raise(_called.error);
  RETURN QUERY SELECT i.store::regclass, i.segment, i.key, i.configuration, i.k1, i.b, i.statistics, i.secured
    FROM jsonb_to_recordset(_called.found) AS i (store oid, segment name, key name[], configuration text,
      k1 double precision, b double precision, statistics text, secured boolean);
END
$$;

CREATE VIEW ml_rag.keyword_index WITH (security_barrier) AS SELECT * FROM ml_rag._keyword_index();
COMMENT ON VIEW ml_rag.keyword_index IS
'keyword indexes of the tables whose text and key the caller may read; secured: row-level security applies '
'to the caller';

CREATE FUNCTION ml_rag._indexed_rows(store regclass) RETURNS text
LANGUAGE plpgsql STABLE PARALLEL SAFE AS $$
-- purpose: SQL of the rows of a table that its index has, and its jobs fill: those of its partitions, but not
-- of what else inherits from it
-- Reads: the catalog
BEGIN
  RETURN CASE (SELECT c.relkind FROM pg_class AS c WHERE c.oid = store) WHEN 'p' THEN '' ELSE 'ONLY ' END
    || ml_rag._relation_name(store);
END
$$;

CREATE FUNCTION ml_rag._lock_indexed(store regclass, mode text) RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE AS $$
-- purpose: a lock of the rows that the index of a table has, until the end of the transaction
-- Errors: 42P01
DECLARE
  _name text := ml_rag._relation_name(store);
BEGIN
  EXECUTE format('LOCK TABLE %s IN %s MODE', ml_rag._indexed_rows(store), mode);
  PERFORM ml_rag._check_name(_name, store);
END
$$;

CREATE FUNCTION ml_rag._key_values(alias text, key name[]) RETURNS text
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE AS $$
-- purpose: SQL of a row's key, the text of a text[]; two keys are the same if each letter is, whatever the
-- collation of the column
-- By concat and not by a cast: it writes a value as its type's own output does, and a cast of a user-defined
-- type could be any role's function. The types are checked as well, but under repeatable read the catalog may
-- be of another moment than the table.
BEGIN
  RETURN (SELECT concat('ARRAY[', string_agg(format('concat(%s.%I)', alias, u.k), ', ' ORDER BY u.place),
    ']::text COLLATE "C"')
    FROM unnest(key) WITH ORDINALITY AS u (k, place));
END
$$;

CREATE FUNCTION ml_rag._raise_of_long_key(relation regclass, key name[]) RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE AS $$
-- purpose: the error of an index that takes less of a key than that of the table, as it has more beside it;
-- PostgreSQL's names the index
-- Reads: the table, as the caller
DECLARE
  _bytes integer;
  _begins text;
BEGIN
  PERFORM ml_rag._hold(ARRAY[relation::oid]);  -- what failed has given back its locks
  EXECUTE format('SELECT %s, left(concat_ws('', '', %s), 40) FROM %s AS t ORDER BY 1 DESC LIMIT 1',
    (SELECT string_agg(format('pg_column_size(t.%I)', k), ' + ') FROM unnest(key) AS k),
    (SELECT string_agg(format('t.%I', k), ', ' ORDER BY place)
      FROM unnest(key) WITH ORDINALITY AS u (k, place)),
    ml_rag._indexed_rows(relation)) INTO _bytes, _begins;
  RAISE EXCEPTION USING ERRCODE = '54000',
    MESSAGE = format('a key of "%s" is too long for an index', relation),
    DETAIL = format('Key (%s) of a row has %s bytes and begins with %s.', array_to_string(key, ', '), _bytes,
      _begins),
    HINT = 'There is room for about 2600 bytes. Use a shorter primary key, such as a bigint.';
END
$$;

CREATE FUNCTION ml_rag._has_key(relation oid, key name[]) RETURNS boolean
LANGUAGE plpgsql STABLE PARALLEL SAFE AS $$
-- purpose: whether an index of a relation keeps these columns unique and not null  Reads: the catalog
BEGIN
  RETURN EXISTS (
    SELECT FROM pg_index AS x
    WHERE x.indrelid = relation AND x.indisunique AND x.indisvalid AND x.indimmediate AND x.indpred IS NULL
      AND x.indexprs IS NULL AND x.indnkeyatts = (
        SELECT count(*) FROM pg_attribute AS a
        WHERE a.attrelid = relation AND a.attnum = ANY ((x.indkey::smallint[])[:x.indnkeyatts - 1])
          AND a.attnotnull AND a.attname = ANY (key)));
END
$$;

CREATE FUNCTION ml_rag._is_key(store oid, key name[]) RETURNS boolean
LANGUAGE plpgsql STABLE PARALLEL SAFE SET search_path FROM CURRENT AS $$
-- purpose: whether these columns tell the rows of a table apart
-- A partitioned table with shards has no unique index. Then each partition that is here has one, and rows of
-- one key are in one partition.
-- Reads: the catalog
BEGIN
  RETURN ml_rag._has_key(store, key) OR coalesce((
    SELECT bool_and(CASE c.relkind WHEN 'r' THEN ml_rag._has_key(c.oid, key) WHEN 'p' THEN NOT EXISTS (
      SELECT FROM pg_partitioned_table AS t CROSS JOIN unnest(t.partattrs::smallint[]) AS u (attnum)
      LEFT JOIN pg_attribute AS a ON a.attrelid = c.oid AND a.attnum = u.attnum AND a.attname = ANY (key)
      WHERE t.partrelid = c.oid AND a.attnum IS NULL) ELSE true END)
    FROM pg_partition_tree(store) AS p JOIN pg_class AS c ON c.oid = p.relid), false);
END
$$;

CREATE FUNCTION ml_rag._visible_keys(store regclass, key name[], row_keys text DEFAULT NULL,
  condition text DEFAULT NULL, arguments text[] DEFAULT NULL, most integer DEFAULT NULL)
RETURNS TABLE (keys text, n bigint)
LANGUAGE plpgsql STABLE PARALLEL UNSAFE ROWS 10 COST 100000 SET search_path FROM CURRENT AS $$
-- purpose: keys of the rows that the caller can see, in portions: the text of an array of them, and how many
-- there are in it
-- row_keys: of few rows that pass a filter, the text of a tid[], all if null; condition and its arguments: of
-- those that pass it (ml_rag.filter), most at most. Not SQL, which could give keys of hidden rows
-- A key is the text of a text[]: as one text they pass PL/Python fastest.  Reads: the store, as the caller
BEGIN
  IF to_regclass(store::text) IS NOT NULL AND (
    SELECT bool_and(has_column_privilege(a.attrelid, a.attnum, 'SELECT')) AND count(*) = cardinality(key)
    FROM pg_attribute AS a WHERE a.attrelid = store AND a.attname = ANY (key) AND NOT a.attisdropped
  ) THEN
    RETURN QUERY EXECUTE format('SELECT array_agg(k.key)::text, count(*) FROM (SELECT %s AS key,'
      ' %s AS portion FROM %s AS t WHERE true%s%s LIMIT $4) AS k GROUP BY k.portion',
      ml_rag._key_values('t', key),
      -- to number rows takes a third as long as to read them, and few rows are one portion
      CASE WHEN row_keys IS NULL AND most IS NULL THEN '(row_number() OVER () - 1) / $1' ELSE '0' END,
      ml_rag._indexed_rows(store),
      CASE WHEN row_keys IS NOT NULL THEN ' AND t.ctid = ANY ($2::tid[])' END, condition)
      USING 50000, row_keys, arguments, most;
  END IF;
END
$$;

CREATE FUNCTION ml_rag._analyze_keywords(rows integer, postings integer) RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SECURITY DEFINER
SET search_path FROM CURRENT
-- a table that another session is analyzing is skipped, with a warning
SET client_min_messages = 'error'
AS $$
-- purpose: analyze the tables for which PostgreSQL has a tenth of the rows that were just added, or less
-- When all indexes were dropped and their tables vacuumed, it has none, until autovacuum comes round again; a
-- search would then read all rows of a store for each row that it looks for. Only their owner analyzes them.
BEGIN
  IF (SELECT c.reltuples < rows / 10 FROM pg_class AS c
    WHERE c.oid = 'ml_rag_internal.keyword_row'::regclass) THEN
    ANALYZE (SKIP_LOCKED) ml_rag_internal.keyword_row;
  END IF;
  IF (SELECT c.reltuples < postings / 10 FROM pg_class AS c
    WHERE c.oid = 'ml_rag_internal.keyword_posting'::regclass) THEN
    ANALYZE (SKIP_LOCKED) ml_rag_internal.keyword_posting;
  END IF;
END
$$;

CREATE FUNCTION ml_rag._empty_keywords(store oid) RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE AS $$
-- purpose: forget all rows of an index; waits for a session that merges it
-- Writes: ml_rag_internal.keyword_row, keyword_new, keyword_gone, keyword_owed, keyword_posting, keyword_run
BEGIN
  PERFORM FROM ml_rag_internal.keyword_store AS i WHERE i.store = _empty_keywords.store FOR UPDATE;
  DELETE FROM ml_rag_internal.keyword_row AS r WHERE r.store = _empty_keywords.store;
  DELETE FROM ml_rag_internal.keyword_new AS r WHERE r.store = _empty_keywords.store;
  DELETE FROM ml_rag_internal.keyword_gone AS r WHERE r.store = _empty_keywords.store;
  DELETE FROM ml_rag_internal.keyword_owed AS r WHERE r.store = _empty_keywords.store;
  DELETE FROM ml_rag_internal.keyword_posting AS r WHERE r.store = _empty_keywords.store;
  DELETE FROM ml_rag_internal.keyword_run AS r WHERE r.store = _empty_keywords.store;
END
$$;
