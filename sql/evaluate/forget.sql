-- forget: all that ml_rag keeps for a role, deleted by an administrator; also for one that was dropped.
--
-- Conversations and runs belong to a role by its name, which DROP ROLE leaves as it is: who gets the name gets them.

CREATE FUNCTION ml_rag.forget_role(role name) RETURNS bigint
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: delete the conversations and evaluation runs of a role, with the privileges of the caller
-- Writes: ml_rag.conversation, ml_rag.evaluation_run
DECLARE
  _conversations bigint;
  _runs bigint;
BEGIN
  DELETE FROM ml_rag.conversation AS c WHERE c.role = forget_role.role::text;
  GET DIAGNOSTICS _conversations = ROW_COUNT;
  DELETE FROM ml_rag.evaluation_run AS r WHERE r.role = forget_role.role::text;
  GET DIAGNOSTICS _runs = ROW_COUNT;
  RETURN _conversations + _runs;
EXCEPTION WHEN query_canceled OR assert_failure OR OTHERS THEN
@RAISE@
END
$$;
COMMENT ON FUNCTION ml_rag.forget_role(name) IS
$$deletes all conversations and evaluation runs of a role: SELECT ml_rag.forget_role('alice'), by a superuser
They belong to a role by its name: call it before DROP ROLE and ALTER ROLE … RENAME, or a role that gets the name later sees them.
The role need not exist any more. Returns how many conversations and runs it deleted. Errors: 25006 read-only transaction; 42501.$$;
