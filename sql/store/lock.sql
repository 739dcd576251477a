-- lock: how loads, batch routines and ml_rag.reembed keep out of each other's way, across the transactions of a call.
-- Only an advisory lock outlives a transaction; any role can take any of them, so that docs/reembed.md says what to do then.

CREATE FUNCTION ml_rag._store_key(schema_name name, table_name name) RETURNS bigint
LANGUAGE sql IMMUTABLE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$
-- purpose: what loads into one store lock; by name and not by oid, since two may both be about to create it
SELECT hashtextextended(format('ml_rag load %I.%I', $1, $2), 0)
$$;

CREATE FUNCTION ml_rag._store_key(store oid) RETURNS bigint
LANGUAGE plpgsql VOLATILE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$
-- Calls: ml_rag._store_key
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

CREATE FUNCTION ml_rag._model_key(store oid) RETURNS bigint
LANGUAGE sql IMMUTABLE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$
-- purpose: advisory lock of a store's model: shared by whoever writes vectors of it, exclusive for who changes it
SELECT hashtextextended(concat('ml_rag model ', $1), 0)
$$;

CREATE FUNCTION ml_rag._lock_store(schema_name name, table_name name) RETURNS void
LANGUAGE sql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: one load at a time into a store, until the end of the transaction; the wait can be cancelled
SELECT pg_advisory_xact_lock(ml_rag._store_key($1, $2))
$$;

CREATE FUNCTION ml_rag._lock_store(store oid) RETURNS void
LANGUAGE sql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: the same for a store that exists; complains where it no longer does
SELECT pg_advisory_xact_lock(ml_rag._store_key($1))
$$;

CREATE FUNCTION ml_rag._hold_store(store oid) RETURNS bigint
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: the same across the transactions of one call; returns the key to be unlocked
DECLARE
  _key bigint := ml_rag._store_key(store);
BEGIN
  PERFORM pg_advisory_lock(_key);
  RETURN _key;
END
$$;

CREATE FUNCTION ml_rag._keep_model(store oid) RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: the model of a store stays what it is until the end of the transaction
-- Nobody waits for that who uses the table already: ml_rag.reembed may be waiting for just this table.
-- Calls: ml_rag._model_key
DECLARE
  _key bigint := ml_rag._model_key(store);
BEGIN
  IF NOT pg_try_advisory_xact_lock_shared(_key) THEN
    IF EXISTS (SELECT FROM pg_locks AS l WHERE l.locktype = 'relation' AND l.relation = store AND l.pid = pg_backend_pid()
               AND l.database = (SELECT d.oid FROM pg_database AS d WHERE d.datname = current_database())) THEN
      RAISE EXCEPTION USING ERRCODE = '55006',
        MESSAGE = format('the embedding model of "%s" is just being changed', store::regclass),
        DETAIL = 'This transaction has used the table before, and would keep ml_rag.reembed waiting.',
        HINT = 'Roll back, and do it again.';
    END IF;
    PERFORM pg_advisory_xact_lock_shared(_key);
  END IF;
END
$$;

CREATE FUNCTION ml_rag._share_model(store oid) RETURNS bigint
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: the same across the transactions of one call, after _keep_model; returns the key to be unlocked
-- Calls: ml_rag._model_key
DECLARE
  _key bigint := ml_rag._model_key(store);
BEGIN
  PERFORM pg_advisory_lock_shared(_key);
  RETURN _key;
END
$$;

CREATE FUNCTION ml_rag._reembed_key(store oid) RETURNS bigint
LANGUAGE sql IMMUTABLE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$
-- purpose: advisory lock of whoever re-embeds a store
SELECT hashtextextended(concat('ml_rag reembed ', $1), 0)
$$;

CREATE FUNCTION ml_rag._hold_reembed(store oid) RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: one at a time, until the end of the transaction  Calls: ml_rag._reembed_key, ml_rag._lock_holders
BEGIN
  IF NOT pg_try_advisory_xact_lock(ml_rag._reembed_key(store)) THEN
    RAISE EXCEPTION USING ERRCODE = '55006', MESSAGE = format('"%s" is being re-embedded by another session', store::regclass),
      DETAIL = format('Its lock is held by session %s.',
        coalesce(ml_rag._lock_holders(NULL, ml_rag._reembed_key(store)), 'none any more')),
      HINT = 'SELECT * FROM ml_rag.progress shows how far it is.';
  END IF;
END
$$;

CREATE FUNCTION ml_rag._hold_for_reembed(job jsonb, everything boolean) RETURNS bigint
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: the lock of whoever re-embeds the store, or everything: that of its model, across transactions; returns the
-- key to be unlocked. The first is free: _begin_reembed has it in this transaction.
-- Calls: ml_rag._model_key, ml_rag._reembed_key, ml_rag._lock_too_late
DECLARE
  _store oid := (job ->> 'store')::oid;
  _key bigint := CASE WHEN everything THEN ml_rag._model_key(_store) ELSE ml_rag._reembed_key(_store) END;
BEGIN
  PERFORM pg_advisory_lock(_key);
  RETURN _key;
EXCEPTION WHEN lock_not_available THEN
  PERFORM ml_rag._lock_too_late(job, _key);
END
$$;

CREATE FUNCTION ml_rag._lock_holders(job jsonb, key bigint DEFAULT NULL) RETURNS text
LANGUAGE plpgsql VOLATILE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$
-- purpose: the sessions that hold a lock of the store's table, or the advisory lock of that key; null = none
BEGIN
  RETURN (
    SELECT string_agg(DISTINCT l.pid::text, ', ') FROM pg_locks AS l
    WHERE l.granted AND l.pid <> pg_backend_pid()
      AND l.database = (SELECT d.oid FROM pg_database AS d WHERE d.datname = current_database())
      AND CASE WHEN key IS NULL THEN l.locktype = 'relation' AND l.relation = (job ->> 'store')::oid
          ELSE l.locktype = 'advisory' AND l.objsubid = 1
            AND l.classid::bigint = (key >> 32 & 4294967295) AND l.objid::bigint = (key & 4294967295) END);
END
$$;

CREATE FUNCTION ml_rag._lock_too_late(job jsonb, key bigint DEFAULT NULL) RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$
-- purpose: end a call that has waited for as long as the caller's lock_timeout lets it  Calls: ml_rag._lock_holders
DECLARE
  _holders text := ml_rag._lock_holders(job, key);
BEGIN
  RAISE EXCEPTION USING ERRCODE = '55P03',
    MESSAGE = format(CASE WHEN key IS NULL THEN 'the lock of table "%s" was not to be had in time'
                     ELSE 'what loads into "%s" did not end in time' END, (job ->> 'store')::oid::regclass),
    DETAIL = format('lock_timeout is %s ms; sessions that hold a lock of it: %s.', job ->> 'lock_timeout',
      coalesce(_holders, 'none any more')),
    HINT = 'What was done is kept: CALL it again, at a quieter time or with another lock_timeout, and it goes on.';
END
$$;
