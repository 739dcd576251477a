-- forget: conversations are kept until somebody deletes them.

CREATE FUNCTION ml_rag.forget(before timestamptz) RETURNS bigint
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: the retention of conversations; the role is looked at beside the policy, which does not bind the superuser
-- Writes: ml_rag.conversation
DECLARE
  _n bigint;
BEGIN
  IF before IS NULL THEN
    RAISE EXCEPTION USING ERRCODE = '22023', MESSAGE = 'there is no time before which to forget',
      HINT = 'Such as SELECT ml_rag.forget(now() - interval ''90 days'').';
  END IF;
  DELETE FROM ml_rag.conversation AS c WHERE c.role = current_user AND c.changed_at < before;
  GET DIAGNOSTICS _n = ROW_COUNT;
  RETURN _n;
END
$$;
COMMENT ON FUNCTION ml_rag.forget(timestamptz) IS
$$deletes the caller's conversations whose last turn is older: SELECT ml_rag.forget(now() - interval '90 days')
Returns how many conversations it deleted, with all their turns. Errors: 22023 before is null.$$;
