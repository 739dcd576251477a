-- 84_column: what a re-embedding changes of the table itself: the new column with its trigger, its indexes, and its taking
-- of the old one's place. Each step waits for the table's lock a little and then lets the others through.

CREATE FUNCTION ml_rag._limit_lock(job jsonb, attempt integer) RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: how long the calling function, which has a SET lock_timeout of its own, waits for a lock: others wait behind
-- it, so that it is little at first, and never more than the option and the caller's own lock_timeout say
BEGIN
  PERFORM set_config('lock_timeout', format('%sms', least(nullif((job ->> 'lock_timeout')::numeric, 0),
    round(1000 * least((job ->> 'lock_seconds')::numeric, 0.5 * 2 ^ least(attempt, 20))))), true);
END
$$;

CREATE FUNCTION ml_rag._later_trigger(store regclass, name text, disabled boolean DEFAULT false) RETURNS name
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$
-- purpose: the last trigger that can change a row after the one of that name has seen it; null = none. disabled: also those
BEGIN
  RETURN (
    SELECT t.tgname FROM pg_trigger AS t
    -- for each row, before, update (the catalog's bits)
    WHERE t.tgrelid = store AND t.tgtype & 19 = 19 AND NOT t.tgisinternal AND (disabled OR t.tgenabled <> 'D')
      AND t.tgname > name::name AND t.tgfoid <> 'ml_rag._outdate_embedding()'::regprocedure
    ORDER BY t.tgname DESC LIMIT 1);
END
$$;

CREATE FUNCTION ml_rag._warn_of_subscribers(store regclass, next name, type text) RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$
-- purpose: a logical replication stops at the first row whose new column the subscriber's table lacks
-- A publication with a list of columns does not send the new one.  Calls: ml_rag._full_name
DECLARE
  _publications text;
BEGIN
  SELECT string_agg(quote_ident(p.pubname), ', ' ORDER BY p.pubname) INTO _publications
  FROM pg_publication AS p
  WHERE EXISTS (SELECT FROM pg_get_publication_tables(p.pubname) AS t WHERE t.relid = store)
    AND NOT EXISTS (SELECT FROM pg_publication_rel AS r
                    WHERE r.prpubid = p.oid AND r.prrelid = store AND r.prattrs IS NOT NULL);
  IF _publications IS NOT NULL THEN
    RAISE WARNING USING ERRCODE = '01000',
      MESSAGE = format('subscribers of "%s" need its new column', store),
      DETAIL = format('It is in publication %s. The subscription of a table without column %I stops, and keeps the '
        'write-ahead log here until it goes on.', _publications, next),
      HINT = format('On each subscriber: ALTER TABLE %s ADD COLUMN %I %s; docs/reembed.md has the rest.',
        ml_rag._full_name(store), next, type);
  END IF;
END
$$;

CREATE FUNCTION ml_rag._begin_column(job jsonb, attempt integer) RETURNS boolean
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
SET lock_timeout = '1s'
AS $$
-- purpose: make column and trigger, unless a call that was stopped has; false where others use the table: try again
-- Calls: ml_rag._limit_lock, ml_rag.abandon_reembed, ml_rag._later_trigger  Writes: column, comment and trigger of the store, as the caller
DECLARE
  _store regclass := (job ->> 'store')::oid;
  _relation text := ml_rag._relation_name(_store);
  _next name := job ->> 'next';
  _trigger text;
  _last text;
BEGIN
  IF (job -> 'begun')::boolean THEN
    RETURN true;
  END IF;
  PERFORM ml_rag._limit_lock(job, attempt);
  PERFORM ml_rag.abandon_reembed(_store);
  EXECUTE format('ALTER TABLE %s ADD COLUMN %I %s', _relation, _next, job ->> 'type');
  EXECUTE format('ALTER TABLE %s ALTER COLUMN %I SET STORAGE %s', _relation, _next, (
    SELECT CASE a.attstorage WHEN 'p' THEN 'PLAIN' WHEN 'e' THEN 'EXTERNAL' WHEN 'm' THEN 'MAIN' ELSE 'EXTENDED' END
    FROM pg_attribute AS a WHERE a.attrelid = _store AND a.attname = job ->> 'embedding' AND NOT a.attisdropped));
  EXECUTE format('COMMENT ON COLUMN %s.%I IS %L', _relation, _next, concat('ml_rag.reembed MODEL=', job ->> 'model'));
  -- its name is the last one, so that it sees what other triggers have made of the row
  _trigger := concat('zz_ml_rag_reembed_', (
    SELECT a.attnum FROM pg_attribute AS a WHERE a.attrelid = _store AND a.attname = _next AND NOT a.attisdropped));
  _last := ml_rag._later_trigger(_store, _trigger, true);
  IF _last IS NOT NULL THEN
    _trigger := concat(_last, substr(_trigger, 3));
    IF octet_length(_trigger) > 63 THEN
      RAISE EXCEPTION USING ERRCODE = '55000', MESSAGE = format('"%s" cannot be re-embedded', _store),
        DETAIL = format('A trigger of ours has to run after "%s", and there is no such name.', _last),
        HINT = format('ALTER TRIGGER %I ON %s RENAME TO …;', _last, _relation);
    END IF;
  END IF;
  EXECUTE format('CREATE TRIGGER %I BEFORE UPDATE ON %s FOR EACH ROW '
    'WHEN (OLD.%I::text COLLATE "C" IS DISTINCT FROM NEW.%3$I::text COLLATE "C") '
    'EXECUTE FUNCTION ml_rag._outdate_embedding(%4$L)', _trigger, _relation, job ->> 'segment', _next);
  -- also for what a logical replication applies
  EXECUTE format('ALTER TABLE %s ENABLE ALWAYS TRIGGER %I', _relation, _trigger);
  RETURN true;
EXCEPTION WHEN lock_not_available OR deadlock_detected THEN
  RETURN false;
END
$$;

CREATE FUNCTION ml_rag._missing_indexes(job jsonb) RETURNS TABLE (name name, definition text)
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$
-- purpose: indexes of the old column that the new one lacks and can have  Calls: ml_rag._kept_indexes
DECLARE
  _store regclass := (job ->> 'store')::oid;
  -- pgvector's limits of hnsw and ivfflat
  _can_have boolean := (job ->> 'dimensions')::integer <= CASE WHEN job ->> 'type' ~ 'halfvec' THEN 4000 ELSE 2000 END;
BEGIN
  RETURN QUERY
    SELECT k.name, k.definition FROM ml_rag._kept_indexes(_store, job ->> 'embedding') AS k
    WHERE _can_have AND (k.definition, k.copy) NOT IN (
      SELECT n.definition, n.copy FROM ml_rag._kept_indexes(_store, job ->> 'next') AS n);
END
$$;

CREATE FUNCTION ml_rag._reembed_index(job jsonb, attempt integer) RETURNS text
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
SET lock_timeout = '1s'
AS $$
-- purpose: build one index that is missing: first that of the rows to be embedded, then what the old column has; returns
-- built, locked (others write to the table: try again) or null, none is missing
-- Nobody can write to the table meanwhile. An index that was built by hand, concurrently, is not missing.
-- Calls: ml_rag._limit_lock, ml_rag._missing_indexes  Writes: an index, as the caller
DECLARE
  _store regclass := (job ->> 'store')::oid;
  _relation text := ml_rag._relation_name(_store);
  _definition text;
BEGIN
  IF NOT EXISTS (SELECT FROM pg_index AS x JOIN pg_class AS i ON i.oid = x.indexrelid
                 WHERE x.indrelid = _store AND x.indisvalid AND i.relname = job ->> 'pending') THEN
    _definition := format('%I ON %s ((1)) WHERE %%1$I IS NULL', job ->> 'pending', replace(_relation, '%', '%%'));
  ELSE
    _definition := (SELECT m.definition FROM ml_rag._missing_indexes(job) AS m LIMIT 1);
  END IF;
  IF _definition IS NOT NULL THEN
    PERFORM ml_rag._limit_lock(job, attempt);
    EXECUTE format('LOCK TABLE ONLY %s IN SHARE MODE', _relation);
    EXECUTE format('CREATE INDEX ' || _definition, job ->> 'next');
    RETURN 'built';
  END IF;
  RETURN NULL;
EXCEPTION WHEN lock_not_available OR deadlock_detected THEN
  RETURN 'locked';
END
$$;

CREATE FUNCTION ml_rag._drop_reembed_triggers(store regclass) RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- Writes: the table's definition, as the caller
DECLARE
  _trigger name;
BEGIN
  FOR _trigger IN
    SELECT t.tgname FROM pg_trigger AS t
    WHERE t.tgrelid = store AND t.tgfoid = 'ml_rag._outdate_embedding()'::regprocedure AND NOT t.tgisinternal
  LOOP
    EXECUTE format('DROP TRIGGER %I ON %s', _trigger, ml_rag._relation_name(store));
  END LOOP;
END
$$;

CREATE FUNCTION ml_rag._replace_column(job jsonb) RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: the new column becomes the store's: name, marker, indexes' names, privileges; takes no time but the lock's
-- Calls: ml_rag._kept_indexes, ml_rag._remark_model, ml_rag._drop_reembed_triggers
-- Writes: the table's definition, as the caller
DECLARE
  _store regclass := (job ->> 'store')::oid;
  _relation text := ml_rag._relation_name(_store);
  _old name := job ->> 'embedding';
  _next name := job ->> 'next';
  _column record;
  _indexes jsonb;
  _privileges jsonb;
  _comment text;
  _row record;
BEGIN
  SELECT a.attnum, a.attnotnull, nullif(a.attstattarget, -1) AS attstattarget, a.attacl INTO _column
  FROM pg_attribute AS a WHERE a.attrelid = _store AND a.attname = _old AND NOT a.attisdropped;
  SELECT jsonb_agg(jsonb_build_object('new', n.name, 'old', k.name)) INTO _indexes
  FROM ml_rag._kept_indexes(_store, _old) AS k
  JOIN ml_rag._kept_indexes(_store, _next) AS n ON n.definition = k.definition AND n.copy = k.copy;
  SELECT jsonb_agg(jsonb_build_object('privilege', g.privilege_type, 'grantable', g.is_grantable,
    'role', CASE g.grantee WHEN 0 THEN 'PUBLIC' ELSE g.grantee::regrole::text END)) INTO _privileges
  FROM aclexplode(_column.attacl) AS g;
  _comment := ml_rag._remark_model(col_description(_store, _column.attnum), job ->> 'model');

  PERFORM ml_rag._drop_reembed_triggers(_store);
  -- more than one where the table comes out of a dump: there it had another number
  EXECUTE (SELECT format('DROP INDEX %s', string_agg(format('%I.%I', n.nspname, i.relname), ', '))
           FROM pg_index AS x JOIN pg_class AS i ON i.oid = x.indexrelid
           JOIN pg_namespace AS n ON n.oid = i.relnamespace
           WHERE x.indrelid = _store AND i.relname ~ '^ml_rag_reembed_\d+$');
  EXECUTE format('ALTER TABLE %s DROP COLUMN %I', _relation, _old);
  EXECUTE format('ALTER TABLE %s RENAME COLUMN %I TO %I', _relation, _next, _old);
  EXECUTE format('COMMENT ON COLUMN %s.%I IS %L', _relation, _old, _comment);
  IF _column.attnotnull THEN
    -- enforced from now on; what is there is checked afterwards, while the table is in use
    EXECUTE format('ALTER TABLE %s ADD CONSTRAINT ml_rag_reembed_not_null CHECK (%I IS NOT NULL) NOT VALID', _relation,
      _old);
  END IF;
  IF _column.attstattarget IS NOT NULL THEN
    EXECUTE format('ALTER TABLE %s ALTER COLUMN %I SET STATISTICS %s', _relation, _old, _column.attstattarget);
  END IF;
  FOR _row IN SELECT i.new, i.old, n.nspname FROM jsonb_to_recordset(_indexes) AS i (new name, old name)
    CROSS JOIN pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace WHERE c.oid = _store
  LOOP
    EXECUTE format('ALTER INDEX %I.%I RENAME TO %I', _row.nspname, _row.new, _row.old);
  END LOOP;
  FOR _row IN SELECT * FROM jsonb_to_recordset(_privileges) AS p (privilege text, grantable boolean, role text) LOOP
    EXECUTE format('GRANT %s (%I) ON %s TO %s %s', _row.privilege, _old, _relation, _row.role,
      CASE WHEN _row.grantable THEN 'WITH GRANT OPTION' END);
  END LOOP;
END
$$;
