-- What the made-up release 0.0.0 has otherwise than this version. upgrade.sql is its way here.

-- no longer there
CREATE FUNCTION ml_rag._former() RETURNS integer LANGUAGE sql SET search_path FROM CURRENT AS 'SELECT 1';
CREATE VIEW ml_rag.former AS SELECT name FROM ml_rag.setting_value;
ALTER TABLE ml_rag.evaluation_question ADD FOREIGN KEY (run_id) REFERENCES ml_rag.evaluation_run ON DELETE CASCADE;
CREATE INDEX former_length ON ml_rag_internal.keyword_row (length);

-- changed since
DROP FUNCTION ml_rag.model_server();
CREATE FUNCTION ml_rag.model_server() RETURNS text LANGUAGE sql SET search_path FROM CURRENT
AS $$ SELECT ml_rag._python('get', '["/healthz"]') ->> 'status' $$;
GRANT EXECUTE ON FUNCTION ml_rag.model_server() TO PUBLIC;
COMMENT ON VIEW ml_rag.setting IS 'settings';
ALTER TABLE ml_rag_internal.keyword_run ALTER lengths SET STORAGE EXTENDED;
UPDATE ml_rag.option SET maximum = 50 WHERE routine = 'ml_rank' AND name = 'top_n';
SELECT ml_rag._add_options('ml_rank', 'former | boolean | - | no longer there');

-- not there yet
DELETE FROM ml_rag.option WHERE routine = 'ml_rank' AND name = 'language';
DROP TRIGGER forget_questions ON ml_rag.evaluation_run;
DROP EVENT TRIGGER ml_rag_forget_dropped;
DROP FUNCTION ml_rag._forget_dropped();
