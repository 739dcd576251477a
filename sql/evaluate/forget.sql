-- forget: all that ml_rag keeps for a role, deleted by an administrator; also for one that was dropped.
--
-- Conversations and runs belong to a role by its name, which outlives DROP ROLE: a new role of that name gets
-- those of the former one.

-- A role that may DELETE from a table, or UPDATE all of it, may LOCK it too, whatever its policies: then the
-- calls of all others, writes to tables whose rows are embedded at once, and every DROP TABLE would wait. So
-- neither is granted. A row is forgotten by an UPDATE of one column, which policies allow for one's own.
CREATE FUNCTION ml_rag._forget() RETURNS trigger
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SECURITY DEFINER SET search_path FROM CURRENT AS $$
-- purpose: delete a row that was marked as forgotten, and what goes with one that was deleted
-- Writes: ml_rag.conversation, ml_rag.message, ml_rag.evaluation_run, ml_rag.evaluation_question,
-- ml_rag.vectorizer_error, ml_rag.vectorizer_truncated, tables of ml_rag_internal
BEGIN
  -- only the owner may make triggers of it (privileges); on other tables the row could be anything
  CASE TG_RELID
  WHEN 'ml_rag.conversation'::regclass THEN
    IF TG_OP = 'UPDATE' THEN
      DELETE FROM ml_rag.conversation AS c
      WHERE c.role = NEW.role AND c.conversation_id = NEW.conversation_id;
    ELSE
      DELETE FROM ml_rag.message AS m WHERE m.role = OLD.role AND m.conversation_id = OLD.conversation_id;
    END IF;
  WHEN 'ml_rag.evaluation_run'::regclass THEN
    IF TG_OP = 'UPDATE' THEN
      DELETE FROM ml_rag.evaluation_run AS r WHERE r.role = NEW.role AND r.run_id = NEW.run_id;
    ELSE
      DELETE FROM ml_rag.evaluation_question AS q WHERE q.role = OLD.role AND q.run_id = OLD.run_id;
    END IF;
  WHEN 'ml_rag.vectorizer_error'::regclass THEN
    DELETE FROM ml_rag.vectorizer_error AS e WHERE e.relation = NEW.relation AND e.key = NEW.key;
  WHEN 'ml_rag.vectorizer_truncated'::regclass THEN
    DELETE FROM ml_rag.vectorizer_truncated AS t WHERE t.relation = NEW.relation;
  WHEN 'ml_rag_internal.keyword_store'::regclass THEN
    PERFORM ml_rag._empty_keywords(OLD.store);
  ELSE
    NULL;
  END CASE;
  RETURN NULL;
END
$$;
CREATE TRIGGER forget AFTER UPDATE ON ml_rag.conversation
FOR EACH ROW WHEN (NEW.changed_at = '-infinity') EXECUTE FUNCTION ml_rag._forget();
CREATE TRIGGER forget_messages AFTER DELETE ON ml_rag.conversation
  FOR EACH ROW EXECUTE FUNCTION ml_rag._forget();
CREATE TRIGGER forget AFTER UPDATE ON ml_rag.evaluation_run FOR EACH ROW
  WHEN (NEW.questions = 0) EXECUTE FUNCTION ml_rag._forget();
CREATE TRIGGER forget_questions AFTER DELETE ON ml_rag.evaluation_run
  FOR EACH ROW EXECUTE FUNCTION ml_rag._forget();
CREATE TRIGGER forget AFTER UPDATE ON ml_rag.vectorizer_error FOR EACH ROW
  WHEN (NEW.attempts = 0) EXECUTE FUNCTION ml_rag._forget();
CREATE TRIGGER forget AFTER UPDATE ON ml_rag.vectorizer_truncated FOR EACH ROW
  WHEN (NEW.texts = 0) EXECUTE FUNCTION ml_rag._forget();
CREATE TRIGGER forget AFTER DELETE ON ml_rag_internal.keyword_store
  FOR EACH ROW EXECUTE FUNCTION ml_rag._forget();

CREATE FUNCTION ml_rag._forget_dropped() RETURNS event_trigger
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SECURITY DEFINER SET search_path FROM CURRENT AS $$
-- purpose: what is kept for a table goes with it: its keyword index, that of a shard of Citus with its
-- trigger; the failures of its vectorizer  Writes: ml_rag_internal.keyword_store, ml_rag.vectorizer_error,
-- ml_rag.vectorizer_truncated
BEGIN
  DELETE FROM ml_rag_internal.keyword_store AS i USING pg_event_trigger_dropped_objects() AS d
  WHERE d.classid = 'pg_class'::regclass AND d.objsubid = 0 AND i.store = d.objid
    -- by the owner of the table: a trigger that goes with its function may be of a role that may only make
    -- triggers
    OR d.classid = 'pg_trigger'::regclass AND d.original AND d.address_names[3] ~ '^ml_rag_keywords_written'
      AND i.store = to_regclass(format('%I.%I', d.address_names[1], d.address_names[2]));
  DELETE FROM ml_rag.vectorizer_truncated AS t USING pg_event_trigger_dropped_objects() AS d
  WHERE d.classid = 'pg_class'::regclass AND d.objsubid = 0 AND t.relation = d.objid;
  DELETE FROM ml_rag.vectorizer_error AS e USING pg_event_trigger_dropped_objects() AS d
  WHERE d.classid = 'pg_class'::regclass AND d.objsubid = 0 AND e.relation = d.objid;
END
$$;
CREATE EVENT TRIGGER ml_rag_forget_dropped ON sql_drop
  WHEN TAG IN ('DROP TABLE', 'DROP SCHEMA', 'DROP OWNED', 'DROP EXTENSION',
  'DROP TYPE', 'DROP SERVER', 'DROP TRIGGER') EXECUTE FUNCTION ml_rag._forget_dropped();

CREATE FUNCTION ml_rag.forget_role(role name) RETURNS bigint
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SET search_path FROM CURRENT AS $$
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
@CATCH@
END
$$;
COMMENT ON FUNCTION ml_rag.forget_role(name) IS
$$deletes all conversations and evaluation runs of a role: SELECT ml_rag.forget_role('alice'), by a superuser
They belong to a role by its name: call it before DROP ROLE and ALTER ROLE … RENAME, or a role that gets the
name later sees them. The role need not exist any more. Returns how many conversations and runs it deleted.
Errors: 25006 read-only transaction; 42501.$$;
