-- status: which vectorizers there are, and how far each is.

CREATE FUNCTION ml_rag._vectorizers(asked oid DEFAULT NULL)
RETURNS TABLE (relation regclass, options jsonb, pending bigint, oldest_pending timestamptz, failed bigint,
  rows bigint, truncated bigint, reason text)
LANGUAGE plpgsql STABLE PARALLEL UNSAFE ROWS 10 SET search_path FROM CURRENT
-- as those that run have written keys of failures
SET "DateStyle" = 'ISO' SET extra_float_digits = 1
AS $$
-- purpose: the vectorizers of tables that the caller owns, or that of one; what is read of the table itself
-- is null if that could run code of a role that is not trusted, or if it fails, and reason says why
-- The owner of a table may make a trigger with anything as its argument.
-- Reads: the tables, as the caller; ml_rag.vectorizer_error, ml_rag.vectorizer_truncated
DECLARE
  _one record;
  -- A lock on one table must not hide the others.
  _former_wait text := ml_rag._limit_wait();
BEGIN
  FOR _one IN
    SELECT c.oid, c.reltuples FROM pg_class AS c
    WHERE c.oid = ANY (CASE WHEN asked IS NULL THEN ml_rag._vectorized() ELSE ARRAY[asked] END)
      AND ml_rag._has_vectorizer(c.oid) AND pg_has_role(c.relowner, 'USAGE')
    ORDER BY c.oid
  LOOP
    relation := _one.oid;
    options := NULL;
    pending := NULL;
    oldest_pending := NULL;
    failed := (SELECT count(*) FROM ml_rag.vectorizer_error AS e WHERE e.relation = _one.oid);
    truncated := coalesce((SELECT t.texts FROM ml_rag.vectorizer_truncated AS t
      WHERE t.relation = _one.oid), 0);
    rows := CASE WHEN NOT ml_rag._is_distributed(_one.oid) THEN nullif(_one.reltuples, -1)::bigint END;
    BEGIN
      reason := CASE WHEN NOT ml_rag._hold_trusted(array_remove(
          ARRAY[_one.oid, ml_rag._segment_table(_one.oid)], NULL))
        THEN coalesce(ml_rag._why_untrusted(_one.oid), 'A part of it, or its schema, belongs to a role that '
          'you do not trust.') END;
      IF reason IS NULL THEN
        options := (ml_rag._find_vectorizer(relation)).options;
        pending := ml_rag._count_waiting(relation);
        -- workers of Citus have transactions of their own
        oldest_pending := CASE WHEN current_setting('track_commit_timestamp')::boolean
          AND NOT ml_rag._is_distributed(relation) THEN (
          SELECT min(w.value::timestamptz)
          FROM ml_rag._read_waiting(relation, 'min(pg_xact_commit_timestamp(t.xmin))') AS w (value)) END;
      END IF;
    EXCEPTION WHEN assert_failure OR OTHERS THEN
      pending := NULL;
      reason := SQLERRM;
    END;
    RETURN NEXT;
  END LOOP;
  PERFORM set_config('lock_timeout', _former_wait, true);
END
$$;

CREATE VIEW ml_rag.vectorizer AS
  SELECT v.relation, v.options, v.pending, v.oldest_pending, v.failed, v.rows, v.truncated, v.reason
  FROM ml_rag._vectorizers() AS v;
COMMENT ON VIEW ml_rag.vectorizer IS
$$the vectorizers of the caller's tables, and how far each is
options: as given to ml_rag.create_vectorizer, with the defaults. pending: rows that wait for a run.
oldest_pending: when the oldest of them was written; null where nothing waits, or where track_commit_timestamp
is off. failed: rows in ml_rag.vectorizer_error. rows: of the table, an estimate: as the last ANALYZE or
VACUUM has it.
truncated: texts that runs have embedded since it was created and that were longer than the model takes in:
"destination": "table" splits them. reason: why options, pending and oldest_pending are null: the owner of the
table or of its schema is not trusted (ml_rag.discover), so that to read the table could run that role's code,
or its columns were dropped.$$;

CREATE FUNCTION ml_rag._waiting_in(stores ml_rag.store[]) RETURNS jsonb
LANGUAGE plpgsql STABLE PARALLEL UNSAFE AS $$
-- purpose: the first of 20 stores that has rows that wait for its vectorizer, and what to do, as {"store",
-- "hint"}; null if none has any. One that cannot be read has none
-- Reads: the stores, as the caller
DECLARE
  _store ml_rag.store := (
    SELECT s FROM unnest(stores[:20]) AS s
    WHERE CASE WHEN ml_rag._has_vectorizer(s.relation) OR EXISTS (
      SELECT FROM pg_policy AS p WHERE p.polrelid = s.relation AND p.polname = 'ml_rag_source')
      THEN ml_rag._read_apart(s, 'SELECT EXISTS (SELECT', format('WHERE t.%I IS NULL AND t.%I IS NOT NULL)',
        s.segment_embedding, s.segment), for_hint => true)::boolean END
    LIMIT 1);
BEGIN
  RETURN CASE WHEN _store.relation IS NOT NULL THEN jsonb_build_object('store', _store.vector_store, 'hint',
    coalesce((
      SELECT format('To embed them: CALL ml_rag.run_vectorizer(%L), or ml-rag worker.', ml_rag._full_name(v))
      FROM unnest(ml_rag._vectorized()) AS v
      WHERE coalesce(ml_rag._segment_table(v), v) = _store.relation AND ml_rag._are_trusted(ARRAY[v])
      LIMIT 1),
      'Ask the owner of the table to call ml_rag.run_vectorizer, or to run ml-rag worker.')) END;
END
$$;
