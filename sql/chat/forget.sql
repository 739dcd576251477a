-- forget: conversations are kept until they are deleted.

CREATE FUNCTION ml_rag.forget_conversation(conversation_id uuid) RETURNS boolean
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SET search_path FROM CURRENT AS $$
-- purpose: delete one conversation; the role is looked at beside the policy, which does not bind the
-- superuser
-- Writes: ml_rag.conversation
BEGIN
  UPDATE ml_rag.conversation AS c SET changed_at = '-infinity'
  WHERE c.role = current_user AND c.conversation_id = forget_conversation.conversation_id;
  RETURN FOUND;
@CATCH@
END
$$;
COMMENT ON FUNCTION ml_rag.forget_conversation(uuid) IS
$$deletes a conversation of the caller's, with all its turns
Returns whether there was one. Several: SELECT ml_rag.forget_conversation(conversation_id) FROM
ml_rag.conversation WHERE …
Errors: 25006 read-only transaction.$$;

CREATE FUNCTION ml_rag.forget(before timestamptz) RETURNS bigint
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SET search_path FROM CURRENT AS $$
-- purpose: the retention of conversations; the role is looked at beside the policy, which does not bind the
-- superuser
-- Writes: ml_rag.conversation
DECLARE
  _n bigint;
BEGIN
  IF before IS NULL THEN
    RAISE EXCEPTION USING ERRCODE = '22023', MESSAGE = 'the time before which to forget is null',
      HINT = 'Such as SELECT ml_rag.forget(now() - interval ''90 days'').';
  END IF;
  UPDATE ml_rag.conversation AS c SET changed_at = '-infinity'
  WHERE c.role = current_user AND c.changed_at < before;
  GET DIAGNOSTICS _n = ROW_COUNT;
  RETURN _n;
@CATCH@
END
$$;
COMMENT ON FUNCTION ml_rag.forget(timestamptz) IS
$$deletes the caller's conversations whose last turn is older: SELECT ml_rag.forget(now() - interval '90 days')
Returns how many conversations it deleted, with all their turns. Errors: 22023 before is null; 25006 read-only
transaction.$$;
