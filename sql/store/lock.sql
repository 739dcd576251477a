-- lock: how loads keep out of each other's way, and locks of tables in use.
-- Any role can take any advisory lock, see docs/security.md; no other one outlives a transaction.

CREATE FUNCTION ml_rag._store_key(schema_name name, table_name name) RETURNS bigint
LANGUAGE sql IMMUTABLE PARALLEL SAFE SET search_path FROM CURRENT AS $$
-- purpose: what loads into one store lock; by name and not by oid, since two may both be about to create it
SELECT hashtextextended(format('ml_rag load %I.%I', $1, $2), 0)
$$;

CREATE FUNCTION ml_rag._store_key(store oid) RETURNS bigint
LANGUAGE plpgsql VOLATILE PARALLEL SAFE SET search_path FROM CURRENT AS $$
DECLARE
  _key bigint;
BEGIN
  SELECT ml_rag._store_key(n.nspname, c.relname) INTO _key
  FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace WHERE c.oid = store;
  IF _key IS NULL THEN
    RAISE EXCEPTION USING ERRCODE = '42P01', MESSAGE = 'vector store does not exist',
      DETAIL = 'It was dropped while documents were loaded into it.',
      HINT = 'Call again: vector_store_load creates the store again.';
  END IF;
  RETURN _key;
END
$$;

CREATE FUNCTION ml_rag._lock_table(store regclass, mode text, longest numeric DEFAULT 10,
  call integer DEFAULT NULL, segments regclass DEFAULT NULL)
RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE AS $$
-- purpose: a lock of a table until the end of the transaction, without blocking other sessions while it waits
-- Other sessions queue behind a lock that is waited for: so each wait is short at first, and at most longest
-- seconds, and in between the others proceed. The caller's own lock_timeout ends the wait, and so does a
-- deadlock that lasts. segments: of the store, to be locked too. Readers lock these before the store, writers
-- after it: so writers of the store are waited for first, its readers last
-- Errors: 40P01, 42P01, 55P03
DECLARE
  _lock_timeout text := current_setting('lock_timeout');
  _most numeric := nullif(extract(epoch FROM _lock_timeout::interval), 0);
  _began timestamptz := clock_timestamp();
  _wait numeric;
  _holders text;
  _name text := ml_rag._relation_name(store);
  _segments text := CASE WHEN segments IS NOT NULL THEN ml_rag._relation_name(segments) END;
BEGIN
  PERFORM ml_rag._hold_schemas(array_remove(ARRAY[store::oid, segments::oid], NULL));
  FOR _attempt IN 0..1000000 LOOP
    _wait := least(longest, 0.5 * 2 ^ least(_attempt, 20), _most);
    BEGIN
      PERFORM set_config('lock_timeout', format('%sms', ceil(1000 * _wait)), true);
      IF segments IS NOT NULL THEN
        EXECUTE format('LOCK TABLE %s IN SHARE ROW EXCLUSIVE MODE', _name);
        EXECUTE format('LOCK TABLE %s IN %s MODE', _segments, mode);
        PERFORM ml_rag._check_name(_segments, segments);
      END IF;
      -- COMMENT, which this mode is for, locks no parts either
      EXECUTE format('LOCK TABLE %s%s IN %s MODE', CASE mode WHEN 'SHARE UPDATE EXCLUSIVE' THEN 'ONLY ' END,
        _name, mode);
      PERFORM ml_rag._check_name(_name, store);
      PERFORM set_config('lock_timeout', _lock_timeout, true);
      RETURN;
    EXCEPTION WHEN lock_not_available THEN
      NULL;
    WHEN deadlock_detected THEN
      -- who has read the table and waits to write, for a lock that is held already, waits until this ends
      IF _attempt > 4 AND EXISTS (SELECT FROM pg_locks AS l
        WHERE l.locktype = 'relation' AND l.relation = store AND l.granted AND l.pid = pg_backend_pid()
          AND l.mode <> 'AccessShareLock'
          AND l.database = (SELECT d.oid FROM pg_database AS d WHERE d.datname = current_database())) THEN
        RAISE EXCEPTION USING ERRCODE = '40P01', MESSAGE = format('could not lock table "%s"', store),
          DETAIL = 'A transaction that has read it waits to write to it, which is not possible before this '
            'one ends.',
          HINT = 'Call it again when no session writes to the table.';
      END IF;
    END;
    _wait := least(longest, 0.1 * 2 ^ least(_attempt, 20),
      _most - extract(epoch FROM clock_timestamp() - _began));
    IF _wait <= 0 THEN
      SELECT string_agg(DISTINCT l.pid::text, ', ') INTO _holders FROM pg_locks AS l
      WHERE l.locktype = 'relation' AND l.relation = ANY (ml_rag._parts(store) || segments::oid) AND l.granted
        AND l.pid <> pg_backend_pid()
        AND l.database = (SELECT d.oid FROM pg_database AS d WHERE d.datname = current_database());
      RAISE EXCEPTION USING ERRCODE = '55P03', MESSAGE = format('could not lock table "%s" in time', store),
        DETAIL = format('lock_timeout is %s; sessions that hold a lock of it: %s.', _lock_timeout,
          coalesce(_holders, 'none any more')),
        HINT = 'What was done is kept: call it again, at a quieter time or with another lock_timeout.';
    END IF;
    PERFORM ml_rag._progress(call, ml_rag._full_name(store), 'waiting for a lock');
    PERFORM pg_sleep(_wait);
  END LOOP;
END
$$;

CREATE FUNCTION ml_rag._lock_comments(relation regclass) RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE AS $$
-- purpose: keep others from changing the comments of a table's columns until the end of the transaction; one
-- that is written back with a change is read after it
-- Not those of a view: LOCK TABLE would lock what that reads.  Errors: 42501; those of ml_rag._lock_table
BEGIN
  PERFORM ml_rag._lock_table(c.oid, 'SHARE UPDATE EXCLUSIVE')
  FROM pg_class AS c WHERE c.oid = relation AND c.relkind IN ('r', 'p');
END
$$;
