-- The manifest of the extension. `make` joins the files that it names, in this order, into build/ml_rag--VERSION.sql, and
-- CREATE EXTENSION ml_rag runs that. No file uses a later one.
--
-- The story of a call, CALL ml_rag('What is AutoML?', options), is told by ml_rag._retrieve in pipeline/rag: a request goes in,
-- a retrieval comes out, and each stage adds to it and to its trace:
--
--   1  the options are checked, those of each stage too     ml_rag._parse_rag_options   pipeline/request
--   2  the stores that the caller may search                ml_rag.discover             pipeline/discover
--   3  what is asked becomes what is searched with          ml_rag.rewrite              pipeline/rewrite, documents, keys
--   4  the question becomes a vector                        ml_rag.embed                pipeline/embed
--   5  filters become conditions on the rows of a store     ml_rag.filter               pipeline/filter, condition
--   6  search by meaning (pgvector): candidates             ml_rag.search               pipeline/search, knn, quantization
--   7  search by words (BM25): candidates                   ml_rag.keyword              pipeline/keyword, bm25, keyword/
--      or with a function of the caller's                  ml_rag._call_function       pipeline/function, score
--   8  what the arms have found becomes one list            ml_rag.fuse                 pipeline/fuse
--   9  what is too far away is dropped                      ml_rag.threshold            pipeline/threshold
--  10  a cross-encoder puts what is left in order           ml_rag.rerank               pipeline/rerank
--  11  each hit gets its neighbours                         ml_rag.expand               pipeline/expand, neighbours
--  12  a language model answers from the citations          ml_rag.generate             pipeline/generate, summarize
--  13  the answer document, with how it came about          ml_rag_answer, ml_rag       pipeline/rag, explain
--
-- Most calls do not go through them: pipeline/compile makes steps 1, 2, 4 and 6 to 9 one SQL statement, written by Python without a
-- database (plpy/ml_rag/backend/retrieval: request, stores, plan, run). What one statement cannot do (rewriting, functions, node
-- groups, shards, views, explain, and stores that fail and must not fail the call) goes through the stages, store by store.
--
-- Steps 6 and 7 are arms; pipeline/arms goes through arms and stores. Each store is read in one place, pipeline/read, which
-- keeps what goes wrong in a store that nobody named from the call (pipeline/isolate). Shards of a store on other servers run an
-- arm by themselves (pipeline/sharded). From step 6 on hits are keys and scores; their texts are read after step 9, from the same
-- snapshot. Where whole documents are wanted, they are read after step 3, and step 12 follows (pipeline/summarize).
--
-- The functions named above are the stages as they can be called by themselves. In a call, six of them are run by what lies
-- beneath in the same files: _rewrite, _search_store (knn), _keyword_store (bm25), _fuse, _expand_store (neighbours),
-- _generate_text.
--
-- ml_rag_search ends after step 11 and returns rows; ml_rag.why_not (pipeline/why) follows one segment that far. ml_rag_chat
-- (chat/) keeps the turns of a conversation, ml_rag_table (batch/) asks many questions, ml_rag_evaluate (evaluate/) measures the
-- answers. vector_store_load and the like (store/) bring in what is searched, vectorizers (vectorizer/) keep ordinary tables
-- searchable.

-- ground: schema, types, settings, whose code may run unasked, the door to Python, the model server, metrics, options
\i ground/schema.sql
\i ground/types.sql
\i ground/settings.sql
\i ground/trust.sql
\i ground/python.sql
\i ground/models.sql
\i ground/configure.sql
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

-- the comment that makes a column of vectors an embedding of a vector store
\i store/marker.sql

-- row-level security of the tables that ml_rag makes
\i store/policy.sql

-- pipeline: question in, answer with citations out
\i pipeline/discover.sql
\i pipeline/condition.sql
\i pipeline/filter.sql
\i pipeline/embed.sql
\i pipeline/isolate.sql
\i pipeline/shards.sql
\i pipeline/function.sql
\i pipeline/documents.sql
\i pipeline/keys.sql
\i pipeline/rewrite.sql
\i pipeline/request.sql
\i pipeline/quantization.sql
\i pipeline/knn.sql
\i pipeline/bm25.sql
\i pipeline/sharded.sql
\i pipeline/neighbours.sql
\i pipeline/nodes.sql
\i pipeline/read.sql
\i pipeline/arms.sql
\i pipeline/rerank.sql
\i pipeline/generate.sql
\i pipeline/summarize.sql
\i pipeline/compile.sql
\i pipeline/explain.sql
\i pipeline/rag.sql
\i pipeline/why.sql

-- batch: many rows of a table; the locks that they and loads take
\i store/lock.sql
\i store/follow.sql
\i batch/job.sql
\i batch/run.sql

-- store: made, loaded, indexed, given further embeddings
\i store/index.sql
\i store/serve.sql
\i store/store.sql
\i store/embeddings.sql
\i store/fill.sql
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

-- evaluate: many questions, measured and compared; thresholds for one's own documents
\i evaluate/measure.sql
\i evaluate/questions.sql
\i evaluate/evaluate.sql
\i evaluate/forget.sql
\i evaluate/compare.sql
\i evaluate/calibrate.sql

-- who may call what, in one place
\i privileges.sql
