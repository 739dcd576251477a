-- tables: conversations and their turns, each role's own.

CREATE TABLE ml_rag.conversation (
  conversation_id uuid NOT NULL DEFAULT gen_random_uuid(),
  role            text COLLATE "C" NOT NULL DEFAULT current_user,
  created_at      timestamptz NOT NULL DEFAULT clock_timestamp(),
  changed_at      timestamptz NOT NULL DEFAULT clock_timestamp(),
  -- Conditions on indexed columns come before policies, and EXPLAIN shows how many rows they leave. So the
  -- role comes first.
  PRIMARY KEY (role, conversation_id)
);
COMMENT ON TABLE ml_rag.conversation IS
$$conversations of ml_rag_chat; each role sees its own
changed_at: when its last turn was written. ml_rag.forget_conversation deletes one with its turns,
ml_rag.forget old ones.$$;

CREATE TABLE ml_rag.message (
  message_id      uuid NOT NULL,
  -- no foreign key: a parallel pg_restore would load this table before the other one
  conversation_id uuid NOT NULL,
  role            text COLLATE "C" NOT NULL DEFAULT current_user,
  turn            integer NOT NULL,
  created_at      timestamptz NOT NULL DEFAULT clock_timestamp(),
  query           text NOT NULL,
  question        text NOT NULL,
  text            text,
  citations       jsonb NOT NULL,
  options         jsonb NOT NULL,
  filters         jsonb,
  PRIMARY KEY (role, conversation_id, turn),
  CONSTRAINT can_be_restored CHECK (
    ml_rag._can_be_restored(ARRAY[query, question, text], ARRAY[citations, options, filters]))
);
COMMENT ON TABLE ml_rag.message IS
$$the turns of conversations: what was asked and what was answered; each role sees its own
turn: its place in the conversation, from 1. query: as asked. question: as searched with. text: the answer;
null with skip_generate. citations: of the answer. options: as given. filters: the conditions that the model
has chosen.$$;

-- nor may estimates, which EXPLAIN shows too, tell what others ask
ALTER TABLE ml_rag.conversation ALTER conversation_id SET STATISTICS 0, ALTER role SET STATISTICS 0,
  ALTER created_at SET STATISTICS 0, ALTER changed_at SET STATISTICS 0;
ALTER TABLE ml_rag.message ALTER message_id SET STATISTICS 0, ALTER conversation_id SET STATISTICS 0,
  ALTER role SET STATISTICS 0, ALTER turn SET STATISTICS 0, ALTER created_at SET STATISTICS 0,
  ALTER query SET STATISTICS 0,
  ALTER question SET STATISTICS 0, ALTER text SET STATISTICS 0, ALTER citations SET STATISTICS 0,
  ALTER options SET STATISTICS 0, ALTER filters SET STATISTICS 0;

SELECT pg_catalog.pg_extension_config_dump('ml_rag.conversation', '');
SELECT pg_catalog.pg_extension_config_dump('ml_rag.message', '');

ALTER TABLE ml_rag.conversation ENABLE ROW LEVEL SECURITY;
ALTER TABLE ml_rag.message ENABLE ROW LEVEL SECURITY;
CREATE POLICY own ON ml_rag.conversation
  USING ((SELECT jsonb_build_object(current_user, true))[role] IS NOT NULL AND role = current_user)
WITH CHECK (role = current_user);
CREATE POLICY own ON ml_rag.message
  USING ((SELECT jsonb_build_object(current_user, true))[role] IS NOT NULL AND role = current_user)
WITH CHECK (role = current_user AND EXISTS (
  SELECT FROM ml_rag.conversation AS c WHERE c.conversation_id = message.conversation_id
    AND c.role = current_user));

-- A conversation is forgotten by an UPDATE of its changed_at to -infinity: evaluate/forget.
