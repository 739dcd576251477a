-- index: keyword indexes: made by a table's owner, kept current by its triggers, merged.

CREATE FUNCTION ml_rag._key_and_segment(alias text, index ml_rag_internal.keyword_store) RETURNS text
-- not in SQL, which would be parsed anew in each statement that writes a row
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE AS $$
-- purpose: SQL of what an index has of a row: key, text
BEGIN
  RETURN format('%s, CASE WHEN %s.%I IS NOT NULL THEN concat_ws(E''\n'', %2$s.%3$I%4$s) END COLLATE "C"',
    ml_rag._key_values(alias, index.key), alias, index.segment,
    CASE WHEN index.beside IS NOT NULL THEN format(', %s.%I', alias, index.beside) END);
END
$$;

CREATE FUNCTION ml_rag._raise_of_columns(index ml_rag_internal.keyword_store) RETURNS void
LANGUAGE plpgsql STABLE PARALLEL SAFE AS $$
BEGIN
  RAISE EXCEPTION USING ERRCODE = '55000',
    MESSAGE = format('keyword index of "%s" no longer matches its columns', index.store),
    DETAIL = format('It indexes column %s with key (%s).',
      concat_ws(', ', quote_ident(index.segment), quote_ident(index.beside)),
        array_to_string(index.key, ', ')),
    HINT = format('SELECT ml_rag.enable_keyword_search(%L) rebuilds it, ml_rag.disable_keyword_search drops '
      'it.', index.store::text);
END
$$;

CREATE FUNCTION ml_rag._keep_keywords() RETURNS trigger
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SECURITY DEFINER SET search_path FROM CURRENT
SET row_security = on AS $$
-- purpose: what a statement did to a table, done to its index
-- Security definer because a role that writes the table may not write its index otherwise. It reads only the
-- rows of that statement, in columns of built-in types; never the table, whose policies and indexes may run
-- any role's code. A partition's own trigger runs if a statement names the partition, the one of the whole
-- table if it names that. Any owner of a table can make a trigger of this function, one without transition
-- tables too: then their names must not lead to a relation of the caller's, such as a temporary view, whose
-- functions would run with the definer's rights.
-- Statements of a transaction can come here in another order than they were made in: one within another, by a
-- trigger or a function, comes before that, and an INSERT before the DELETE of a WITH clause. So of the rows
-- of a key the one with the text that was deleted goes. If none has it, that is owed: the statement that
-- comes to add it does not.
-- Writes: ml_rag_internal.keyword_row, keyword_new, keyword_gone, keyword_owed
DECLARE
  _portion CONSTANT integer := 1000;
  _long CONSTANT integer := 100000;
  _store oid;
  _index ml_rag_internal.keyword_store;
  _configuration regconfig;
  _columns text;
  _old text;
  _new text;
  _row record;
  _found record;
  _id bigint;
  _n bigint := 0;
  _gone bigint := 0;
  _is_row boolean := false;
  _is_large boolean := false;
  _is_usual boolean;
  _is_changed boolean;
  _has_owed boolean;
  _paid text[];
  _rows refcursor;
BEGIN
  IF TG_LEVEL <> 'STATEMENT' THEN
    -- before it is written a row need not be one of the table
    -- with an argument it is that of a shard, see _index_shards
    _is_row := TG_WHEN = 'AFTER'
      AND (TG_NARGS = 1 OR ml_rag._has_shards(pg_partition_root(TG_RELID)) IS TRUE);
    IF NOT _is_row THEN
      RAISE EXCEPTION USING ERRCODE = '55000',
        MESSAGE = format('keyword index of "%s" cannot be updated', TG_RELID::regclass),
        DETAIL = format('Trigger "%s" is %s … FOR EACH ROW.', TG_NAME, TG_WHEN),
        HINT = 'ml_rag.enable_keyword_search creates the triggers.';
    END IF;
  ELSIF coalesce(to_regclass('ml_rag_new'), to_regclass('ml_rag_old')) IS NOT NULL THEN
    RAISE EXCEPTION USING ERRCODE = '55000',
      MESSAGE = format('keyword index of "%s" cannot be updated', TG_RELID::regclass),
      DETAIL = format('Relation %s has the name of a transition table of its triggers.',
        coalesce(to_regclass('ml_rag_new'), to_regclass('ml_rag_old'))),
      HINT = 'Drop or rename that relation.';
  END IF;
  IF current_setting('transaction_isolation') NOT IN ('read committed', 'read uncommitted') AND NOT EXISTS (
    SELECT FROM pg_trigger AS t
    WHERE t.tgrelid = TG_RELID AND t.tgname = TG_NAME AND NOT ml_rag._was_changed(t.xmax)) THEN
    RAISE EXCEPTION USING ERRCODE = '40001',
      MESSAGE = format('keyword index of "%s" has been made or changed since the transaction began',
        TG_RELID::regclass),
      DETAIL = 'The snapshot of the transaction does not show it.',
      HINT = 'Try again, in a new transaction.';
  END IF;
  -- matches: the columns are there, of types whose conversion to text runs built-in code and never changes
  SELECT i AS index, (
      SELECT count(*) FROM pg_attribute AS a
      WHERE a.attrelid = i.store AND a.attnum > 0 AND NOT a.attisdropped AND (
        a.attname = ANY (i.key)
          AND a.atttypid
            = ANY ('{smallint,integer,bigint,numeric,oid,text,character varying,uuid}'::regtype[])
        OR a.attname IN (i.segment, i.beside) AND a.attname <> ALL (i.key) AND a.attgenerated <> 'v'
          AND a.atttypid = ANY ('{text,character varying}'::regtype[]))
    ) = cardinality(i.key) + 1 + (i.beside IS NOT NULL)::integer AS matches
  INTO _found FROM ml_rag_internal.keyword_store AS i
  WHERE i.store = coalesce((SELECT o.store FROM ml_rag_internal.keyword_store AS o WHERE o.store = TG_RELID),
    pg_partition_root(TG_RELID));
  IF NOT FOUND THEN
    RETURN NULL;
  END IF;
  _index := _found.index;
  _store := _index.store;
  IF current_setting('transaction_isolation') NOT IN ('read committed', 'read uncommitted') AND EXISTS (
    SELECT FROM pg_attribute AS a
    WHERE a.attrelid = _store AND a.xmax <> '0' AND ml_rag._was_changed(a.xmax)) THEN
    -- a column of another type could have a cast, and r.to_jsonb of one that is gone is to_jsonb(r), which
    -- runs casts of the other columns
    RAISE EXCEPTION USING ERRCODE = '40001',
      MESSAGE = format('columns of "%s" have been changed since the transaction began', _store::regclass),
      DETAIL = 'The snapshot of the transaction does not show how.',
      HINT = 'Try again, in a new transaction.';
  END IF;
  IF TG_OP = 'TRUNCATE' THEN
    IF TG_RELID = _store THEN
      PERFORM ml_rag._empty_keywords(_store);
    -- where the whole table is truncated its trigger has run before
    ELSIF EXISTS (SELECT FROM ml_rag_internal.keyword_row AS r WHERE r.store = _store) THEN
      RAISE EXCEPTION USING ERRCODE = '55000',
        MESSAGE = format('partition "%s" cannot be truncated by itself', TG_RELID::regclass),
        DETAIL = format('The keyword index of "%s" does not tell which of its rows are of that partition.',
          _store::regclass),
        HINT = format('Use DELETE FROM %s, or truncate the whole table.', TG_RELID::regclass);
    END IF;
    RETURN NULL;
  ELSIF NOT _found.matches THEN
    PERFORM ml_rag._raise_of_columns(_index);
  END IF;
  -- the columns of a store: to plan a statement of a table's own takes as long as to insert its row
  _is_usual := NOT _is_row AND _index.key = '{document_id,segment_number}' AND _index.segment = 'segment'
    AND _index.beside IS NULL;
  -- an update that changes neither key nor text does not touch the index
  IF TG_OP = 'UPDATE' AND _is_usual THEN
    -- the plan is kept, and is one for few rows
    _is_changed := CASE WHEN NOT EXISTS (SELECT FROM ml_rag_new OFFSET _portion - 1) THEN EXISTS (
      SELECT concat(r.document_id), concat(r.segment_number), concat(r.segment) COLLATE "C",
        r.segment IS NULL FROM ml_rag_old AS r
      EXCEPT ALL
      SELECT concat(r.document_id), concat(r.segment_number), concat(r.segment) COLLATE "C",
        r.segment IS NULL FROM ml_rag_new AS r) END;
    IF NOT _is_changed THEN
      RETURN NULL;
    END IF;
  END IF;
  _has_owed := EXISTS (SELECT FROM ml_rag_internal.keyword_owed AS w WHERE w.store = _store);
  IF TG_OP <> 'INSERT' OR NOT _is_usual OR _has_owed THEN
    _columns := ml_rag._key_and_segment('r', _index);
    _old := format('SELECT %s FROM %s AS r', _columns,
      CASE WHEN _is_row THEN '(SELECT ($2).*)' ELSE 'ml_rag_old' END);
    _new := format('SELECT %s FROM %s AS r', _columns,
      CASE WHEN _is_row THEN '(SELECT ($3).*)' ELSE 'ml_rag_new' END);
  END IF;
  IF TG_OP = 'UPDATE' THEN
    SELECT format('%s EXCEPT ALL %s', _old, _new), format('%s EXCEPT ALL %s', _new, _old) INTO _old, _new;
    IF _is_changed IS NULL THEN
      EXECUTE format('SELECT EXISTS (%s)', _new) INTO _is_changed USING _store, OLD, NEW;
      IF NOT _is_changed THEN
        RETURN NULL;
      END IF;
    END IF;
  END IF;
  IF TG_OP <> 'INSERT' THEN
    EXECUTE format($sql$
      WITH former AS MATERIALIZED (
        -- one by one: before it has statistics of the table, the planner would read all of its rows
        SELECT o.key, o.text_hash, (
          SELECT min(r.ctid) FROM ml_rag_internal.keyword_row AS r
          WHERE r.store = $1 AND r.key = o.key AND r.text_hash = o.text_hash) AS place
        FROM (
          SELECT DISTINCT o.key, hashtextextended(o.segment, 0) AS text_hash FROM (%s) AS o (key, segment)
          WHERE o.segment IS NOT NULL) AS o
      ), gone AS (
        DELETE FROM ml_rag_internal.keyword_row AS r WHERE r.ctid = ANY (ARRAY(
          SELECT f.place FROM former AS f WHERE f.place IS NOT NULL))
        RETURNING r.id, r.length
      ), owed AS (
        INSERT INTO ml_rag_internal.keyword_owed (store, key, text_hash)
        SELECT $1, f.key, f.text_hash FROM former AS f WHERE f.place IS NULL
      )
      INSERT INTO ml_rag_internal.keyword_gone (store, id, length) SELECT $1, g.id, g.length
        FROM gone AS g$sql$, _old)
    USING _store, OLD, NEW;
    GET DIAGNOSTICS _gone = ROW_COUNT;
  END IF;
  IF _has_owed AND TG_OP <> 'DELETE' THEN
    EXECUTE format($sql$
      WITH paid AS (
        DELETE FROM ml_rag_internal.keyword_owed AS w WHERE w.ctid = ANY (ARRAY(
          SELECT min(u.ctid) FROM ml_rag_internal.keyword_owed AS u JOIN (%s) AS n (key, segment)
            ON u.key = n.key AND u.text_hash = hashtextextended(n.segment, 0)
          WHERE u.store = $1 GROUP BY u.key ORDER BY u.key))
        RETURNING w.key
      )
      SELECT array_agg(p.key) FROM paid AS p$sql$, _new) INTO _paid USING _store, OLD, NEW;
    _new := format('SELECT * FROM (%s) AS n (key, segment) WHERE n.key <> ALL (%L::text[])', _new,
      coalesce(_paid, '{}'));
  END IF;
  IF TG_OP <> 'DELETE' THEN
    IF TG_OP = 'INSERT' AND _is_usual AND NOT _has_owed THEN
      OPEN _rows NO SCROLL FOR SELECT ARRAY[concat(n.document_id),
        concat(n.segment_number)]::text COLLATE "C" AS key,
        concat(n.segment) COLLATE "C" AS segment,
        hashtextextended(concat(n.segment) COLLATE "C", 0) AS text_hash
        FROM ml_rag_new AS n WHERE n.segment IS NOT NULL;
    ELSE
      _new := format('SELECT s.key AS key, s.segment AS segment, hashtextextended(s.segment, 0) AS text_hash'
        ' FROM (%s) AS s (key, segment) WHERE s.segment IS NOT NULL', _new);
      OPEN _rows NO SCROLL FOR EXECUTE (SELECT _new) USING (SELECT _store), (SELECT OLD), (SELECT NEW);
    END IF;
    -- a large statement makes runs of its rows itself: they are its own, so that no other session works on
    -- them; so does one of a long text, which each search would read as long as it waits
    IF _is_usual THEN
      _is_large := (SELECT count(*) >= _portion OR coalesce(max(octet_length(n.segment)), 0) > _long
        FROM ml_rag_new AS n);
    ELSE
      EXECUTE format('SELECT count(*) >= %s OR coalesce(max(octet_length(concat(n.%I%s))), 0) > %s'
        ' FROM %s AS n', _portion, _index.segment, ', n.' || quote_ident(_index.beside), _long,
        CASE WHEN _is_row THEN '(SELECT ($1).*)' ELSE 'ml_rag_new' END) INTO _is_large USING NEW;
    END IF;
    IF _is_large THEN
      _n := ml_rag._python('index_cursor', jsonb_build_array(_store::bigint, _rows::text))::bigint;
    ELSE
      -- one by one, by statements that are planned once in a session
      _configuration := ml_rag._configuration(_index.configuration);
      LOOP
        FETCH _rows INTO _row;
        EXIT WHEN NOT FOUND;
        _found := ml_rag._words(_configuration, _row.segment, _index.statistics = 'visible');
        INSERT INTO ml_rag_internal.keyword_row (id, store, length, key, tokens, text_hash)
        VALUES (nextval('ml_rag_internal.keyword_number'), _store, _found.length, _row.key,
          CASE _index.statistics WHEN 'visible' THEN _found.tokens END, _row.text_hash)
        RETURNING id INTO _id;
        INSERT INTO ml_rag_internal.keyword_new (store, id, length, tokens, words)
        VALUES (_store, _id, _found.length, _found.tokens, _found.words);
        _n := _n + 1;
      END LOOP;
    END IF;
    CLOSE _rows;
  END IF;
  -- How much waits is looked at by about every 50th row's statement; random() is the caller's, who may have
  -- seeded it. Under repeatable read nothing is merged: what others have merged since would make
  -- the transaction fail.
  IF extract(microseconds FROM clock_timestamp())::integer % 50 < _n + _gone
    AND current_setting('transaction_isolation') IN ('read committed', 'read uncommitted') THEN
    -- an expression with a statement in it takes as long as one
    IF (_is_large OR EXISTS (SELECT FROM ml_rag_internal.keyword_new AS w
      WHERE w.store = _store OFFSET _portion - 1)
        OR EXISTS (SELECT FROM ml_rag_internal.keyword_gone AS w WHERE w.store = _store OFFSET _portion - 1)
        -- those of long texts, which a role that may not merge has written
        OR EXISTS (SELECT FROM ml_rag_internal.keyword_run AS u
          WHERE u.store = _store AND u.rows < _portion OFFSET 99))
      -- The session's role may know the words of all rows of the table, or at least in how many rows each is:
      -- what a merge writes, as pg_stat_xact_all_tables and EXPLAIN (ANALYZE, WAL) show to the role that
      -- caused it, depends on the words that are pending. current_user would be the owner of the trigger.
      AND (SELECT bool_and(has_column_privilege(r.oid, _store, a.attnum, 'SELECT'))
           AND bool_and(_index.statistics = 'all' OR NOT c.relrowsecurity OR r.rolsuper OR r.rolbypassrls
             OR pg_has_role(r.oid, c.relowner, 'USAGE') AND NOT c.relforcerowsecurity)
           FROM pg_roles AS r, pg_class AS c, pg_attribute AS a
           WHERE r.rolname = coalesce(nullif(current_setting('role'), 'none'), session_user)
             AND c.oid = _store
             AND a.attrelid = _store AND a.attname IN (_index.segment, _index.beside)
             AND NOT a.attisdropped) THEN
      PERFORM ml_rag._python('merge_keywords', jsonb_build_array(_store::bigint, false));
    END IF;
  END IF;
  RETURN NULL;
END
$$;

CREATE FUNCTION ml_rag._settle_keywords() RETURNS trigger
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SECURITY DEFINER
-- each row is looked up by its key: what was deleted is still in the table
SET search_path FROM CURRENT SET row_security = on SET enable_seqscan = off AS $$
-- purpose: what is owed when a transaction ends has changed with triggers off: what the index has of those
-- keys from before goes; of all of them at once
-- Writes: ml_rag_internal.keyword_row, keyword_gone, keyword_owed
BEGIN
  IF NOT EXISTS (
    SELECT FROM ml_rag_internal.keyword_owed AS w WHERE w.store = NEW.store AND w.key = NEW.key) THEN
    RETURN NULL;
  END IF;
  WITH owed AS (
    DELETE FROM ml_rag_internal.keyword_owed AS w RETURNING w.store, w.key
  ), gone AS (
    -- age: not by this transaction
    DELETE FROM ml_rag_internal.keyword_row AS r USING owed AS w
    WHERE r.store = w.store AND r.key = w.key AND age(r.xmin) > 0
    RETURNING r.store, r.id, r.length
  )
  INSERT INTO ml_rag_internal.keyword_gone (store, id, length) SELECT g.store, g.id, g.length FROM gone AS g;
  RETURN NULL;
END
$$;

CREATE CONSTRAINT TRIGGER settle AFTER INSERT ON ml_rag_internal.keyword_owed DEFERRABLE INITIALLY DEFERRED
FOR EACH ROW EXECUTE FUNCTION ml_rag._settle_keywords();
-- also where Citus applies what its workers wrote
ALTER TABLE ml_rag_internal.keyword_owed ENABLE ALWAYS TRIGGER settle;

CREATE FUNCTION ml_rag._own_table(store regclass) RETURNS void
LANGUAGE plpgsql STABLE PARALLEL SAFE AS $$
-- purpose: that the relation is there, the caller owns it, and its owner trusts that of its schema
DECLARE
  _owner oid := (SELECT c.relowner FROM pg_class AS c WHERE c.oid = store);
BEGIN
  IF _owner IS NULL THEN
    RAISE EXCEPTION USING ERRCODE = '42P01', MESSAGE = 'table does not exist';
  ELSIF NOT pg_has_role(_owner, 'USAGE') THEN
    RAISE EXCEPTION USING ERRCODE = '42501', MESSAGE = format('must be owner of table "%s"', store),
      HINT = 'Call it as the owner of the table, or as a member of that role.';
  END IF;
  PERFORM ml_rag._refuse_foreign_schema(store);
END
$$;

CREATE FUNCTION ml_rag._drop_keyword_triggers(store regclass) RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET citus.enable_unsafe_triggers = on
AS $$
-- Writes: triggers, as the caller
DECLARE
  _trigger record;
BEGIN
  FOR _trigger IN
    SELECT t.tgname, t.tgrelid::regclass AS part FROM pg_trigger AS t
    WHERE t.tgfoid = 'ml_rag._keep_keywords()'::regprocedure
      AND t.tgrelid IN (SELECT store::oid UNION SELECT p.relid FROM pg_partition_tree(store) AS p)
  LOOP
    EXECUTE format('DROP TRIGGER %I ON %s', _trigger.tgname, _trigger.part);
  END LOOP;
END
$$;

CREATE FUNCTION ml_rag._make_keyword_triggers(store regclass, options jsonb DEFAULT NULL) RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET citus.enable_unsafe_triggers = on
AS $$
-- purpose: the triggers of a table and of its partitions; options: of the index of a table of Citus, see
-- _index_shards
-- Transition tables of a table with foreign partitions are refused by PostgreSQL; there each row of the
-- partitions that are here has its trigger.
-- Writes: triggers, as the caller
DECLARE
  _has_foreign boolean := ml_rag._has_shards(store);
  _event text;
  _part regclass;
BEGIN
  FOR _event, _part IN
    SELECT e, c.oid FROM unnest('{INSERT,UPDATE,DELETE,TRUNCATE}'::text[]) AS e
    CROSS JOIN (SELECT store AS relid UNION SELECT t.relid FROM pg_partition_tree(store) AS t) AS p
    JOIN pg_class AS c ON c.oid = p.relid
    WHERE c.relkind = 'r' OR c.relkind = 'p' AND (NOT _has_foreign OR e = 'TRUNCATE')
  LOOP
    EXECUTE format('CREATE OR REPLACE TRIGGER %I AFTER %s ON %s %s'
      ' FOR EACH %s EXECUTE FUNCTION ml_rag._keep_keywords()', 'ml_rag_keywords_' || lower(_event),
      _event, _part, CASE WHEN _has_foreign OR _event = 'TRUNCATE' THEN ''
        ELSE concat('REFERENCING', CASE WHEN _event <> 'INSERT' THEN ' OLD TABLE AS ml_rag_old' END,
          CASE WHEN _event <> 'DELETE' THEN ' NEW TABLE AS ml_rag_new' END) END,
      CASE WHEN _has_foreign AND _event <> 'TRUNCATE' THEN 'ROW' ELSE 'STATEMENT' END);
  END LOOP;
  IF options IS NOT NULL THEN
    EXECUTE format('DROP TRIGGER IF EXISTS ml_rag_keywords_written ON %s', store);
    EXECUTE format('CREATE TRIGGER ml_rag_keywords_written AFTER INSERT OR UPDATE OR DELETE ON %s'
      ' FOR EACH ROW EXECUTE FUNCTION ml_rag._keep_keywords(%L)', store, options);
    EXECUTE format('ALTER TABLE %s ENABLE REPLICA TRIGGER ml_rag_keywords_written', store);
  END IF;
END
$$;

CREATE FUNCTION ml_rag.disable_keyword_search(store regclass) RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SET search_path FROM CURRENT AS $$
-- purpose: drop the keyword index of a table
-- Writes: triggers, as the caller
BEGIN
  PERFORM ml_rag._own_table(store);
  PERFORM ml_rag._check_transaction('the keyword index cannot be dropped', store);
  PERFORM ml_rag._lock_indexed(store, 'ACCESS EXCLUSIVE');
  PERFORM ml_rag._drop_keyword_triggers(store);
  PERFORM ml_rag._python('drop_keyword_index', jsonb_build_array(store::oid::bigint));
@CATCH@
END
$$;
COMMENT ON FUNCTION ml_rag.disable_keyword_search(regclass) IS
$$drops the keyword index of a table; for its owner
No error where there is none. Errors: 25006; 42P01; 42501 not the owner; 55000 isolation level.$$;

CREATE FUNCTION ml_rag._keyword_definition(store regclass, options jsonb,
  OUT index ml_rag_internal.keyword_store)
LANGUAGE plpgsql STABLE PARALLEL UNSAFE AS $$
-- purpose: the keyword index that a table of the caller's gets by these options, or why it can have none
DECLARE
  _options jsonb := ml_rag.parse_options('enable_keyword_search', $2);
  _segment text := _options ->> 'segment';
  _configuration text := _options ->> 'text_search_configuration';
  _kind "char" := (SELECT c.relkind FROM pg_class AS c WHERE c.oid = store);
  _key name[];
  _why text;
  _hint text;
BEGIN
  PERFORM ml_rag._own_table(store);
  IF NOT EXISTS (SELECT FROM pg_attribute AS a
                 WHERE a.attrelid = store AND a.attname = _segment AND NOT a.attisdropped
                   AND a.atttypid = ANY ('{text,character varying}'::regtype[])) THEN
    PERFORM ml_rag._bad_option('segment', to_jsonb(_segment), format('a text column of "%s"', store),
      coalesce((
        SELECT format('Name the column that holds the text: {"segment": %s}.', to_jsonb(a.attname))
        FROM pg_attribute AS a
        WHERE a.attrelid = store AND a.attnum > 0 AND NOT a.attisdropped AND a.attgenerated <> 'v'
          AND a.atttypid = ANY ('{text,character varying}'::regtype[])
        ORDER BY array_position('{content,text,chunk,document,body}'::text[], lower(a.attname)),
        a.attnum LIMIT 1),
        'It has no column of type text.'));
  ELSIF EXISTS (SELECT FROM pg_attribute AS a
                WHERE a.attrelid = store AND a.attname = _segment AND a.attgenerated = 'v') THEN
    -- from PostgreSQL 18 on
    RAISE EXCEPTION USING ERRCODE = '55000',
      MESSAGE = format('"%s" cannot have a keyword index of column "%s"', store, _segment),
      DETAIL = 'It is a virtual generated column, whose values triggers do not see.',
      HINT = 'Make it a stored one: GENERATED ALWAYS AS (…) STORED.';
  END IF;
  IF _configuration IS NULL THEN
    _configuration := ml_rag.text_search_configuration(_options ->> 'language');
  ELSE
    BEGIN
      SELECT format('%I.%I', n.nspname, c.cfgname) INTO STRICT _configuration
      FROM pg_ts_config AS c JOIN pg_namespace AS n ON n.oid = c.cfgnamespace
      WHERE c.oid = _configuration::regconfig;
    EXCEPTION WHEN undefined_object OR invalid_name OR invalid_schema_name OR no_data_found OR syntax_error
      OR feature_not_supported OR data_exception THEN
      PERFORM ml_rag._bad_option('text_search_configuration', _options -> 'text_search_configuration',
        'a text search configuration, with its schema where that is not pg_catalog',
          'SELECT * FROM pg_ts_config;');
    END;
  END IF;
  SELECT r.why, r.hint INTO _why, _hint
  FROM (VALUES
    (_kind NOT IN ('r', 'p'), 'It is not an ordinary table: changes in it would be missed.', NULL),
    (EXISTS (SELECT FROM pg_inherits AS i WHERE i.inhrelid = store OR i.inhparent = store AND _kind = 'r'),
      'It is a partition or has inheritance: changes made through another table would be missed.',
      'An index has all partitions: call it for the whole table.'),
    (ml_rag._is_distributed(store) AND ml_rag._distribution_column(store) IS NULL,
      'Citus does not distribute its rows by a column.', NULL),
    (ml_rag._has_shards(store), 'A partition of it is a foreign table: changes in it would be missed.',
      'Each shard has an index of its own: call it there, for the table that the shard has.'),
    ((SELECT c.relpersistence = 't' FROM pg_class AS c WHERE c.oid = store), 'It is a temporary table.', NULL)
  ) AS r (is_so, why, hint)
  WHERE r.is_so LIMIT 1;
  IF _why IS NOT NULL THEN
    RAISE EXCEPTION USING ERRCODE = '55000', MESSAGE = format('"%s" cannot have a keyword index', store),
      DETAIL = _why,
      HINT = coalesce(_hint, 'Keep the text in an ordinary table.');
  END IF;
  -- the columns that tell the rows apart: the primary key, else a unique key without nulls
  SELECT k.key INTO _key
  FROM pg_index AS x
  CROSS JOIN LATERAL (
    SELECT array_agg(a.attname ORDER BY u.place) AS key, bool_and(a.attnotnull) AS is_not_null,
      bool_and(a.atttypid
        = ANY ('{smallint,integer,bigint,numeric,oid,text,character varying,uuid}'::regtype[])) AS is_plain
    FROM unnest(x.indkey::smallint[]) WITH ORDINALITY AS u (attnum, place)
    JOIN pg_attribute AS a ON a.attrelid = x.indrelid AND a.attnum = u.attnum
    WHERE u.place <= x.indnkeyatts
  ) AS k
  WHERE x.indrelid = store AND x.indisunique AND x.indisvalid AND x.indimmediate AND x.indpred IS NULL
    AND x.indexprs IS NULL AND k.is_not_null AND k.is_plain
  ORDER BY x.indisprimary DESC, x.indnkeyatts, x.indexrelid LIMIT 1;
  IF _key IS NULL THEN
    RAISE EXCEPTION USING ERRCODE = '55000',
      MESSAGE = format('"%s" has no key that a keyword index can use', store),
      DETAIL = 'It needs a primary key, or a unique index without nulls, of integer, numeric, text or uuid '
        'columns.',
      HINT = format('ALTER TABLE %s ADD PRIMARY KEY (…);', store);
  END IF;
  SELECT _keyword_definition.store, _segment, _key, _configuration,
    (_options -> 'k1')::double precision, (_options -> 'b')::double precision, _options ->> 'statistics',
    -- node groups are merged into that column
    CASE WHEN _segment = 'segment' THEN (
      SELECT a.attname FROM pg_attribute AS a
      WHERE a.attrelid = store AND a.attname = 'segment_nodes' AND NOT a.attisdropped
        AND a.atttypid = 'text'::regtype) END
  INTO index;
  IF _segment = ANY (index.key) THEN
    PERFORM ml_rag._raise_of_columns(index);
  END IF;
  -- the owner may have taken that from itself
  IF row_security_active(store) THEN
    RAISE EXCEPTION USING ERRCODE = '55000',
      MESSAGE = format('row-level security hides rows of "%s" from its owner', store),
      DETAIL = 'The index must contain all rows; row-level security applies when it is searched.',
      HINT = format('First: ALTER TABLE %1$s NO FORCE ROW LEVEL SECURITY; afterwards: ALTER TABLE %1$s FORCE '
        'ROW LEVEL SECURITY;', store);
  END IF;
END
$$;

CREATE FUNCTION ml_rag._index_keywords(store regclass, options jsonb, is_new boolean,
  call integer DEFAULT NULL)
RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE AS $$
-- purpose: create the keyword index of a table, or rebuild it with other options; is_new: the caller has just
-- made it
-- call: what ml_rag._begin has returned
-- Reads: the table  Writes: triggers, all as the caller
DECLARE
  _index ml_rag_internal.keyword_store := ml_rag._keyword_definition(store, options);
  _relation text := ml_rag._full_name(store);
  _table text;
BEGIN
  PERFORM ml_rag._progress(call, _relation, 'waiting for writers');
  PERFORM ml_rag._check_transaction('the keyword index cannot be created', store) WHERE NOT is_new;
  PERFORM ml_rag._lock_indexed(store, 'SHARE ROW EXCLUSIVE');
  -- again, as columns can have changed while it was waited for: t.to_jsonb of one that is gone is
  -- to_jsonb(t), which runs casts of the other columns
  _index := ml_rag._keyword_definition(store, coalesce(nullif(options, 'null'), '{}') - 'language'
    || jsonb_build_object('text_search_configuration', _index.configuration));
  PERFORM ml_rag._make_keyword_triggers(store, CASE WHEN ml_rag._is_distributed(store) THEN
    jsonb_build_object('segment', _index.segment, 'text_search_configuration', _index.configuration,
      'k1', _index.k1, 'b', _index.b,
      'statistics', _index.statistics) END);
  PERFORM ml_rag._progress(call, _relation, 'indexing segments', 0,
    -- as pg_stat_progress_create_index has it: what the last ANALYZE or VACUUM has seen
    coalesce((SELECT nullif(greatest(c.reltuples, 0), 0)::bigint FROM pg_class AS c
      WHERE c.oid = store), -1));
  PERFORM ml_rag._python('build_keyword_index', jsonb_build_array(
    to_jsonb(_index) || jsonb_build_object('store', store::oid::bigint), call));
EXCEPTION WHEN program_limit_exceeded THEN
  GET STACKED DIAGNOSTICS _table = TABLE_NAME;
  IF _table = 'keyword_row' THEN
    PERFORM ml_rag._raise_of_long_key(store, _index.key);
  END IF;
  RAISE;
END
$$;

CREATE FUNCTION ml_rag._index_shards() RETURNS event_trigger
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SET search_path FROM CURRENT AS $$
-- purpose: the keyword index of a shard of Citus, once it has its triggers
-- Wherever Citus creates a shard or moves it to, it gives it the triggers of its table, and sets their state
-- last. The argument of the trigger that is for replicas says which index. It notes the rows that are written
-- to a shard while that is moved. Runs as the role that alters the table, which may have no privilege on
-- ml_rag: so ml_rag is used only for tables with that trigger. Any role can make such a trigger on a table of
-- its own. A shard is altered by its owner; a superuser, say, must not read what the owner of the schema puts
-- in the place of the table: it is read by its name.
-- Reads: the shard, as the caller
DECLARE
  _shard regclass;
  _options text;
BEGIN
  FOR _shard, _options IN
    SELECT t.tgrelid,
      convert_from(substring(t.tgargs FROM 1 FOR octet_length(t.tgargs) - 1), getdatabaseencoding())
    FROM pg_event_trigger_ddl_commands() AS d JOIN pg_trigger AS t ON t.tgrelid = d.objid
      AND d.classid = 'pg_class'::regclass
    JOIN pg_proc AS p ON p.oid = t.tgfoid AND p.proname = '_keep_keywords'
    JOIN pg_namespace AS n ON n.oid = p.pronamespace AND n.nspname = 'ml_rag'
    WHERE t.tgenabled = 'R' AND t.tgnargs = 1
  LOOP
    IF NOT ml_rag._are_trusted(ARRAY[_shard::oid]) THEN
      RAISE WARNING USING ERRCODE = '01000', MESSAGE = format('shard "%s" gets no keyword index', _shard),
        DETAIL = 'It is altered by a role that does not trust its owner or that of its schema.';
    ELSIF NOT EXISTS (SELECT FROM ml_rag._keyword_index(_shard)) THEN
      PERFORM ml_rag._python('build_keyword_index', jsonb_build_array(
        to_jsonb(ml_rag._keyword_definition(_shard, _options::jsonb))
          || jsonb_build_object('store', _shard::oid::bigint), NULL));
      -- that one Citus keeps to itself
      IF NOT ml_rag._is_distributed(_shard) THEN
        EXECUTE
          format('CREATE OR REPLACE TRIGGER ml_rag_keywords_truncate AFTER TRUNCATE ON %s FOR EACH STATEMENT'
          ' EXECUTE FUNCTION ml_rag._keep_keywords()', _shard);
      END IF;
    END IF;
  END LOOP;
EXCEPTION WHEN assert_failure OR OTHERS THEN
  -- Citus could not move the shard otherwise
  RAISE WARNING USING ERRCODE = '01000',
    MESSAGE = format('shard "%s" gets no keyword index: %s', _shard, SQLERRM);
END
$$;
CREATE EVENT TRIGGER ml_rag_index_shards ON ddl_command_end
  WHEN TAG IN ('ALTER TABLE') EXECUTE FUNCTION ml_rag._index_shards();

CREATE FUNCTION ml_rag.enable_keyword_search(store regclass, options jsonb DEFAULT NULL) RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SET search_path FROM CURRENT AS $$
DECLARE
  _call integer := ml_rag._begin('ml_rag.enable_keyword_search');
BEGIN
  PERFORM ml_rag._index_keywords($1, $2, false, _call);
  PERFORM ml_rag._end(_call);
@CATCH_AND_END@
END
$$;
COMMENT ON FUNCTION ml_rag.enable_keyword_search(regclass, jsonb) IS
$$creates the keyword index of a table, or rebuilds it: ml_rag.enable_keyword_search('handbook', '{"language": "de"}')
The table's owner calls it; from then on the index follows every change of the table. The table needs a
primary key or a unique key without nulls; it can be partitioned, and is named as a whole then: one index has
the rows of all its partitions. It cannot be inherited, foreign or a view. Meanwhile writers wait, readers do
not. After ATTACH or DETACH PARTITION: call it again.
options: SELECT * FROM ml_rag.option WHERE routine = 'enable_keyword_search'. Errors: 22023 bad option; 42P01;
42501 not the owner; 54000 a key that is too long; 55000 no such key, a table that cannot have one, or numpy
is missing.$$;

CREATE FUNCTION ml_rag.merge_keyword_index(store regclass) RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SET search_path FROM CURRENT AS $$
BEGIN
  PERFORM ml_rag._own_table(store);
  PERFORM ml_rag._python('merge_own_keywords', jsonb_build_array(store::oid::bigint));
@CATCH@
END
$$;
COMMENT ON FUNCTION ml_rag.merge_keyword_index(regclass) IS
$$merges pending changes into the keyword index of a table, which makes searches faster; for its owner
Writers merge some of them as they go; this merges all, and blocks only others who do the same. Errors: 42P01;
42501 not the owner; 55000 numpy is missing.$$;

CREATE FUNCTION ml_rag.fold_keyword_index(store regclass) RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SET search_path FROM CURRENT AS $$
BEGIN
  PERFORM ml_rag.merge_keyword_index(store);
@CATCH@
END
$$;
COMMENT ON FUNCTION ml_rag.fold_keyword_index(regclass) IS
$$former name of ml_rag.merge_keyword_index; the next release drops it$$;
