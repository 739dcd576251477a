-- The manifest of the extension: the files of this folder in the order of the pipeline.
-- `make` joins them into build/ml_rag--VERSION.sql, and CREATE EXTENSION ml_rag runs that.

-- ground: schema, settings, options, models
\i 00_schema.sql
\i 01_options.sql
\i 01_parse.sql
\i 02_models.sql
\i 03_postings.sql

-- watching it: what calls tell of themselves, and the views that show it
\i 04_track.sql
\i 05_watch.sql

-- what makes a column of vectors one of a vector store
\i 08_marker.sql

-- the pipeline of ml_rag: question in, answer with citations out
\i 10_discover.sql
\i 14_condition.sql
\i 15_filter.sql
\i 20_embed.sql
\i 25_isolate.sql
\i 30_search.sql
\i 32_keyword.sql
\i 35_fuse.sql
\i 40_threshold.sql
\i 45_rerank.sql
\i 50_expand.sql
\i 70_generate.sql

-- the public routines: one question, many rows, many documents
\i 80_explain.sql
\i 80_rag.sql
\i 81_job.sql
\i 81_tables.sql
\i 82_lock.sql
\i 82_store.sql
\i 83_load.sql
\i 84_column.sql
\i 84_index.sql
\i 84_reembed.sql
\i 84_switch.sql
\i 85_rank.sql

-- the ruler: many questions, measured and compared
\i 86_questions.sql
\i 87_measure.sql
\i 88_evaluate.sql
\i 89_compare.sql

-- who may call what, in one place
\i 90_privileges.sql
