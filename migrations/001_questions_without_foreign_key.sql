-- after 0.1.0
-- A parallel pg_restore loaded the questions of evaluation runs before the runs, and lost them.
ALTER TABLE ml_rag.evaluation_question DROP CONSTRAINT evaluation_question_run_id_fkey;
