\echo Use "ALTER EXTENSION ml_rag UPDATE" to load this file. \quit

-- calls under way end first, and new ones wait: each of them reads a setting
LOCK TABLE ml_rag.setting IN ACCESS EXCLUSIVE MODE;

-- as in ground/schema.sql: SET search_path FROM CURRENT takes it from here
SET LOCAL search_path = pg_catalog, ml_rag, pg_temp;

-- the version that bodies of functions name
DO $$
DECLARE
  _definition text;
BEGIN
  FOR _definition IN
    SELECT regexp_replace(pg_get_functiondef(p.oid), '(["''])0\.0\.0\1', '\1@ML_RAG_VERSION@\1', 'g')
    FROM pg_proc AS p JOIN pg_depend AS d ON d.classid = 'pg_proc'::regclass AND d.objid = p.oid AND d.deptype = 'e'
    JOIN pg_extension AS e ON e.oid = d.refobjid AND e.extname = 'ml_rag'
    WHERE p.prosrc ~ '(["''])0\.0\.0\1'
  LOOP
    EXECUTE _definition;
  END LOOP;
END
$$;

DROP FUNCTION ml_rag._former();
DROP VIEW ml_rag.former;
ALTER TABLE ml_rag.evaluation_question DROP CONSTRAINT evaluation_question_run_id_fkey;
DROP INDEX ml_rag_internal.former_length;

-- its type is another one
DROP FUNCTION ml_rag.model_server();
CREATE FUNCTION ml_rag.model_server() RETURNS jsonb
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SET search_path FROM CURRENT
SET debug_print_parse = off SET debug_print_rewritten = off SET debug_print_plan = off AS $$
BEGIN
  RETURN ml_rag._python('get', '["/healthz"]');
EXCEPTION WHEN query_canceled OR assert_failure OR OTHERS THEN
@RAISE@
END
$$;
COMMENT ON FUNCTION ml_rag.model_server() IS
$$the model server's health: status, version, uptime, state of each model, confinement of document parsers
Errors: 08006 where it cannot be reached.$$;
REVOKE ALL ON FUNCTION ml_rag.model_server() FROM PUBLIC;
GRANT EXECUTE ON FUNCTION ml_rag.model_server() TO ml_rag_user;

COMMENT ON VIEW ml_rag.setting IS 'settings of this database: name, value in force, default, description';
ALTER TABLE ml_rag_internal.keyword_run ALTER lengths SET STORAGE EXTERNAL;

DELETE FROM ml_rag.option WHERE routine = 'ml_rank' AND name IN ('top_n', 'former');
SELECT ml_rag._add_options('ml_rank', $$
top_n | integer 1..2147483647 | all | return only the best n; in ml_rag the option is n_citations
language | text | default_text_search_config | a code such as en or pt-BR, or a name: what the model "hybrid"
  takes for a word
$$);

CREATE FUNCTION ml_rag._forget_dropped() RETURNS event_trigger
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SECURITY DEFINER SET debug_print_parse = off SET debug_print_rewritten = off SET debug_print_plan = off
SET search_path FROM CURRENT AS $$
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
REVOKE ALL ON FUNCTION ml_rag._forget_dropped() FROM PUBLIC;
CREATE EVENT TRIGGER ml_rag_forget_dropped ON sql_drop WHEN TAG IN ('DROP TABLE', 'DROP SCHEMA', 'DROP OWNED', 'DROP EXTENSION',
  'DROP TYPE', 'DROP SERVER', 'DROP TRIGGER') EXECUTE FUNCTION ml_rag._forget_dropped();
CREATE TRIGGER forget_questions AFTER DELETE ON ml_rag.evaluation_run FOR EACH ROW EXECUTE FUNCTION ml_rag._forget();
