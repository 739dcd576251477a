-- The manifest of the extension. `make` joins the files that it names, in this order, into
-- build/ml_rag--VERSION.sql, and CREATE EXTENSION ml_rag runs that. No file uses a later one.
--
-- The story of a call, CALL ml_rag('What is AutoML?', options), is in ml_rag.backend.retrieval (plpy/):
-- run.py shows from top to bottom what a retrieval is, plan.py writes its statement without a database, and
-- kept.py keeps the plan. Its door is pipeline/compile; what comes out is ml_rag._retrieve in pipeline/rag.
--
--  1  the options are checked, those of each step, too  pipeline/request            request.py
--  2  the stores that the caller may search             pipeline/discover           stores.py
--  3  what is asked becomes what is searched with       pipeline/rewrite, documents, keys
--  4  the question becomes a vector                     pipeline/embed              vectors.py
--  5  filters become conditions on rows of a store      pipeline/filter, condition  filters.py
--  6  arms bring candidates: by meaning (pgvector),     pipeline/function, nodes,   arms.py, search.py,
--     by words (BM25), by a function of the caller's,   shards                      functions.py, shards.py
--     in node groups; shards run an arm by themselves
--  7  one SQL statement: the candidates of the arms as  pipeline/isolate            plan.py, rows.py, fuse.py
--     one list, without what is too far away; texts of
--     what is left, and their neighbours
--  8  a cross-encoder puts what is left in order        pipeline/rerank
--  9  a language model answers from the citations,      pipeline/generate,
--     its sentences are checked by the citations        summarize, grounding
-- 10  the answer document, with how it came about       pipeline/rag, explain       explain.py
--
-- A store that was not named must not fail the call: if the statement of step 7 fails, each store is searched
-- by itself, and the others without the one that fails (pipeline/isolate). If whole documents are wanted,
-- they are read after step 3, and step 9 follows (pipeline/summarize).
--
-- ml_rag_search ends after step 8 and returns rows; ml_rag.why_not (pipeline/why) follows one segment so
-- far. ml_rag_chat (chat/) keeps the turns of a conversation, ml_rag_table (batch/) asks many questions,
-- ml_rag_evaluate (evaluate/) measures the answers. vector_store_load and the like (store/) bring in what is
-- searched, vectorizers (vectorizer/) keep ordinary tables searchable.

-- ground: schema, types, settings, whose code may run unasked, the door to Python, the model server, metrics,
-- options
\i ground/schema.sql
\i ground/types.sql
\i ground/settings.sql
\i ground/trust.sql
\i ground/python.sql
\i ground/models.sql
\i ground/metric.sql
\i ground/options.sql
\i ground/parse.sql

-- watch: what calls report of themselves, and the views that show it
\i watch/track.sql
\i watch/watch.sql

-- keyword: the BM25 index of a table: its tables, what it sees in a text, made and kept current
\i keyword/tables.sql
\i keyword/tokens.sql
\i keyword/index.sql

-- locks of tables; the comment that makes a column of vectors an embedding of a vector store
\i store/lock.sql
\i store/marker.sql

-- row-level security of the tables that ml_rag makes
\i store/policy.sql

-- pipeline: question in, answer with citations out
\i pipeline/discover.sql
\i pipeline/isolate.sql
\i pipeline/condition.sql
\i pipeline/embed.sql
\i pipeline/shards.sql
\i pipeline/filter.sql
\i pipeline/function.sql
\i pipeline/documents.sql
\i pipeline/keys.sql
\i pipeline/rewrite.sql
\i pipeline/levels.sql
\i pipeline/request.sql
\i pipeline/quantization.sql
\i pipeline/neighbours.sql
\i pipeline/nodes.sql
\i pipeline/rerank.sql
\i pipeline/generate.sql
\i pipeline/summarize.sql
\i pipeline/grounding.sql
\i pipeline/compile.sql
\i pipeline/explain.sql
\i pipeline/rag.sql
\i pipeline/why.sql

-- settings and presets, which are checked by what reads them
\i ground/configure.sql
\i preset/preset.sql

-- batch: the loop of all that is derived (backend/jobs), many rows of a table
\i store/follow.sql
\i batch/work.sql
\i batch/job.sql
\i batch/run.sql

-- store: made, loaded, indexed, given further embeddings
\i store/index.sql
\i store/serve.sql
\i store/store.sql
\i store/embeddings.sql
\i store/add.sql
\i store/adopt.sql

-- nodes: texts made of the texts of a store, and kept current; loads and vectorizers fill them
\i vectorizer/text.sql
\i nodes/transform.sql
\i nodes/group.sql
\i nodes/fill.sql
\i nodes/create.sql
\i nodes/status.sql
\i store/load.sql
\i store/shards.sql

-- vectorizer: ordinary tables made searchable and kept so: definition, failures, runs
\i vectorizer/error.sql
\i vectorizer/segments.sql
\i vectorizer/queue.sql
\i store/citus.sql
\i vectorizer/run.sql
\i vectorizer/immediate.sql
\i vectorizer/former.sql
\i vectorizer/vectorizer.sql
\i vectorizer/status.sql

-- rank: pairs and lists of texts by a cross-encoder
\i rank/rank.sql

-- nlsql: a question becomes SQL over the caller's tables
\i nlsql/metadata.sql
\i nlsql/functions.sql
\i nlsql/statement.sql
\i nlsql/question.sql

-- chat: answers in a conversation whose turns are kept
\i chat/tables.sql
\i chat/chat.sql
\i chat/forget.sql
\i chat/heatwave.sql

-- evaluate: many questions, measured and compared; thresholds for one's own documents; settings of
-- an index that find what is there
\i evaluate/measure.sql
\i evaluate/questions.sql
\i evaluate/evaluate.sql
\i evaluate/forget.sql
\i evaluate/compare.sql
\i evaluate/calibrate.sql
\i evaluate/tune.sql
\i evaluate/make.sql

-- what settings of a session do not change
\i strings.sql

-- who may call what, in one place
\i privileges.sql
