\echo Use "CREATE EXTENSION ml_rag" to load this file. \quit

-- 00_schema.sql

-- 00_schema: the schema of everything private, its types, the settings.

CREATE SCHEMA ml_rag;
COMMENT ON SCHEMA ml_rag IS 'retrieval-augmented generation: stages, settings and helpers behind the public routines';

-- The script itself looks nowhere else; CREATE EXTENSION puts the session's path back when it ends.
SET LOCAL search_path = pg_catalog, pg_temp;

-- Every function below is created with SET search_path FROM CURRENT, and this is the path they get: nothing a caller
-- can write to, with the types and operators of pgvector wherever that extension was put.
SELECT set_config('search_path', format('pg_catalog, ml_rag, %s, pg_temp', extnamespace::regnamespace), true)
FROM pg_extension WHERE extname = 'vector';

DO $$
DECLARE
  _schema regnamespace := (SELECT extnamespace FROM pg_extension WHERE extname = 'vector');
BEGIN
  IF has_schema_privilege('public', _schema, 'CREATE') THEN
    RAISE WARNING USING MESSAGE = format('everybody may create objects in schema %s, where pgvector is', _schema),
      DETAIL = 'That schema is on the path of every function of ml_rag.',
      HINT = format('REVOKE CREATE ON SCHEMA %s FROM PUBLIC;', _schema);
  END IF;
END
$$;

-- A vector store as discovery found it. A *_column that is null does not exist in the relation.
CREATE TYPE ml_rag.store AS (
  vector_store           text,      -- schema.table, as shown in the output
  relation               regclass,
  embed_model_id         text,      -- from the marker comment; null where an unmarked relation was named
  segment_embedding      name,      -- columns, by their logical names
  segment                name,
  document_name          name,
  document_id            name,
  segment_number         name,
  metadata               name,
  embedding_type         text,      -- vector or halfvec
  dimensions             integer,   -- null where the column declares none
  document_id_type       text,      -- SQL name of its type
  segment_number_type    text
);

-- A segment on its way through the pipeline. An array of hits is in the order of the citations, the best one first.
CREATE TYPE ml_rag.hit AS (
  vector_store   text,
  document_name  text,
  document_id    bigint,            -- null where the column is no integer
  document_key   text,              -- what tells the store's documents apart, as text
  segment_number bigint,
  segment        text,
  distance       numeric,           -- rounded to 4 decimals; null where there is no query embedding to measure from
  metadata       jsonb,
  keyword_score  double precision,  -- BM25; null where the keyword arm did not look or the segment has none of the words
  score          double precision,  -- 0-1, of fuse: what hybrid search orders by; null without it
  rerank_score   double precision   -- 0-1, of the reranker; null without it
);

CREATE TABLE ml_rag.setting_value (
  name  text PRIMARY KEY,
  value text NOT NULL
);
COMMENT ON TABLE ml_rag.setting_value IS 'settings that differ from their default; change them with ml_rag.configure';
-- Only changed settings are rows, so that a restored dump never meets a row that CREATE EXTENSION made.
SELECT pg_catalog.pg_extension_config_dump('ml_rag.setting_value', '');

CREATE VIEW ml_rag.setting AS
SELECT d.name, coalesce(v.value, d.default_value) AS value, d.default_value, d.description
FROM (VALUES
  ('model_server', 'unix:/run/ml_rag/ml_rag.sock',
   'address of the model server: unix:/path/of/socket or http://host:port, host an IP address or localhost'),
  ('embed_model_id', 'all_minilm_l6_v2', 'embedding model used where no option names one'),
  ('generate_model_id', 'smollm2-135m-instruct', 'generation model used where no option names one'),
  ('rerank_model_id', 'ms-marco-minilm-l6-v2', 'cross-encoder used where no option names one'),
  ('abstain_text', 'I do not know: nothing relevant was found in the documents.',
   'what ml_rag answers, without a model, where nothing relevant enough was found and "abstain" holds')
) AS d (name, default_value, description)
LEFT JOIN ml_rag.setting_value AS v ON v.name = d.name;
COMMENT ON VIEW ml_rag.setting IS 'settings of this database: name, value in force, default, description';

CREATE FUNCTION ml_rag._check_address(address text) RETURNS void
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$
-- purpose: stop an address of the model server that cannot be one, or whose look-up could hang
DECLARE
  _parts text[] := regexp_match(address, '^http://([^/@]+):([0-9]{1,5})/?$');
  _host text := _parts[1];
  _is_good boolean;
BEGIN
  IF address IS NULL OR address ~ '^unix:/.+$' THEN
    RETURN;
  ELSIF _parts IS NULL THEN
    RAISE EXCEPTION USING ERRCODE = '22023', MESSAGE = 'invalid address of the model server',
      DETAIL = format('Got %L; an address is unix:/path/of/socket or http://host:port.', address);
  END IF;
  BEGIN
    -- the expression above has let no slash in, so there is no netmask
    _is_good := _host = 'localhost' OR CASE WHEN _host ~ '^\[.*\]$'
      THEN family(btrim(_host, '[]')::inet) = 6 ELSE family(_host::inet) = 4 END;
  EXCEPTION WHEN invalid_text_representation THEN
    _is_good := false;
  END;
  IF NOT _is_good OR _parts[2]::integer NOT BETWEEN 1 AND 65535 THEN
    RAISE EXCEPTION USING ERRCODE = '22023', MESSAGE = 'invalid address of the model server',
      DETAIL = format('Got %L; host is an IP address or localhost (IPv6 in brackets), port 1 to 65535.', address),
      HINT = 'The look-up of a name cannot be cancelled, so give the address it stands for, or a unix socket.';
  END IF;
END
$$;

CREATE FUNCTION ml_rag.configure(name text, value text) RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: change one setting of this database, or put it back to its default (value null)
-- Calls: ml_rag._check_address  Reads: ml_rag.setting  Writes: ml_rag.setting_value
-- The address of the model server is a table row and no custom setting because any session may SET those.
BEGIN
  IF NOT EXISTS (SELECT FROM ml_rag.setting AS s WHERE s.name = configure.name) THEN
    RAISE EXCEPTION USING ERRCODE = '22023',
      MESSAGE = format('unknown setting %s', coalesce(quote_literal(configure.name), 'NULL')),
      DETAIL = format('Settings: %s.', (SELECT string_agg(s.name, ', ') FROM ml_rag.setting AS s));
  END IF;
  IF configure.name = 'model_server' THEN
    PERFORM ml_rag._check_address(configure.value);
  END IF;
  IF configure.name = 'abstain_text' AND configure.value !~ '\S' THEN
    RAISE EXCEPTION USING ERRCODE = '22023', MESSAGE = 'the abstain text is blank',
      DETAIL = 'It is the answer where nothing relevant was found.',
      HINT = 'Set it to NULL to have the default back.';
  END IF;
  DELETE FROM ml_rag.setting_value AS v WHERE v.name = configure.name;
  IF configure.value IS NOT NULL THEN
    INSERT INTO ml_rag.setting_value (name, value) VALUES (configure.name, configure.value);
  END IF;
END
$$;
COMMENT ON FUNCTION ml_rag.configure(text, text) IS
$$changes a setting of this database (null = back to the default); for the owner of the extension
model_server: unix:/path/of/socket or http://host:port, host an IP address (IPv6 in brackets) or localhost, port 1-65535.
Settings are listed by ml_rag.setting. Errors: 22023 unknown setting, malformed address, blank abstain_text; 42501.$$;

CREATE FUNCTION ml_rag._get_setting(name text) RETURNS text
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$
-- purpose: the value in force. PL/pgSQL, because it keeps the plan for the session.  Reads: ml_rag.setting
BEGIN
  RETURN (SELECT s.value FROM ml_rag.setting AS s WHERE s.name = $1);
END
$$;

CREATE FUNCTION ml_rag.version() RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE
AS $$ SELECT '0.1.0'::pg_catalog.text $$;
COMMENT ON FUNCTION ml_rag.version() IS 'version of the SQL side of the extension';

CREATE FUNCTION ml_rag._relation_name(relation regclass) RETURNS text
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$
-- purpose: a relation as it is written into a statement; 42P01 where it was dropped since its oid was looked up
-- A regclass of nothing prints as a bare number, which as SQL is a syntax error. A name made of digits prints quoted.
DECLARE
  _name text := relation::text;
BEGIN
  IF _name IS NULL OR _name ~ '^([0-9]+|-)$' THEN
    RAISE EXCEPTION USING ERRCODE = '42P01', MESSAGE = 'the table does not exist, or no longer',
      DETAIL = format('A table of oid %s is not there; it may have been dropped while the call was running.',
        coalesce(relation::oid::text, 'NULL')),
      HINT = 'Call again: what is there by then is used.';
  END IF;
  RETURN _name;
END
$$;

CREATE FUNCTION ml_rag._raise(error jsonb) RETURNS void
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$
-- purpose: raise what a PL/Python function returned as its error: {sqlstate, message, detail, hint}
-- RAISE takes no null for an option, hence a branch for each set of those there are
DECLARE
  _state text := error ->> 'sqlstate';
  _message text := error ->> 'message';
  _detail text := error ->> 'detail';
  _hint text := error ->> 'hint';
BEGIN
  IF _detail IS NOT NULL AND _hint IS NOT NULL THEN
    RAISE EXCEPTION USING ERRCODE = _state, MESSAGE = _message, DETAIL = _detail, HINT = _hint;
  ELSIF _detail IS NOT NULL THEN
    RAISE EXCEPTION USING ERRCODE = _state, MESSAGE = _message, DETAIL = _detail;
  ELSIF _hint IS NOT NULL THEN
    RAISE EXCEPTION USING ERRCODE = _state, MESSAGE = _message, HINT = _hint;
  ELSIF _message IS NOT NULL THEN
    RAISE EXCEPTION USING ERRCODE = _state, MESSAGE = _message;
  END IF;
END
$$;

-- 01_options.sql

-- 01_options: what callers may say, its ranges and its defaults. The defaults live here and nowhere else.

-- Materialized because every call reads it: expressions of VALUES are set up anew for each row of each scan.
CREATE MATERIALIZED VIEW ml_rag.option AS
SELECT d.routine, d.name, d.type, d.minimum, d.maximum, d.choices, d.default_value, d.auto_value, d.description
FROM (VALUES
  -- routine, name, type, minimum, maximum, choices, default, auto, description
  ('ml_rag', 'vector_store', 'text[]', NULL::numeric, NULL::numeric, NULL::text[], NULL::jsonb, NULL::jsonb,
   'search only these stores: "schema.table" or "table"'),
  ('ml_rag', 'exclude_vector_store', 'text[]', NULL, NULL, NULL, NULL, NULL, 'leave these stores out'),
  ('ml_rag', 'schema', 'text[]', NULL, NULL, NULL, NULL, NULL, 'look for stores in these schemas'),
  ('ml_rag', 'document_name', 'text[]', NULL, NULL, NULL, NULL, NULL, 'search only these documents'),
  ('ml_rag', 'exclude_document_name', 'text[]', NULL, NULL, NULL, NULL, NULL, 'leave these documents out'),
  ('ml_rag', 'filters', 'object', NULL, NULL, NULL, NULL, NULL,
   'search only rows for which this holds: {"author": ["A", "B"], "year": {"gte": 2002}}; see ml_rag.condition'),
  ('ml_rag', 'required_keywords', 'text[]', NULL, NULL, NULL, NULL, NULL,
   'search only segments that have all these words or phrases; at most 20'),
  ('ml_rag', 'excluded_keywords', 'text[]', NULL, NULL, NULL, NULL, NULL,
   'leave out segments that have one of these words or phrases; at most 20'),
  ('ml_rag', 'n_citations', 'integer', 0, 100, NULL, NULL, NULL,
   'how many segments; default 3, and 10 with max_distance or percentage_distance; 0 = no retrieval'),
  ('ml_rag', 'distance_metric', 'choice', NULL, NULL, '{COSINE,DOT,EUCLIDEAN}', '"COSINE"', NULL,
   'distance between the question and a segment'),
  ('ml_rag', 'skip_generate', 'boolean', NULL, NULL, NULL, 'false', NULL, 'retrieval only, no text'),
  ('ml_rag', 'model_options', 'object', NULL, NULL, NULL, NULL, NULL, 'options of ml_generate, without context'),
  ('ml_rag', 'retrieval_options', 'object', NULL, NULL, NULL, NULL, NULL,
   'max_distance, percentage_distance, segment_overlap'),
  ('ml_rag', 'vector_store_columns', 'object', NULL, NULL, NULL, NULL, NULL,
   'logical column name to real column name'),
  ('ml_rag', 'embed_model_id', 'text', NULL, NULL, NULL, NULL, NULL,
   'embedding model of the question and of the stores searched; default: setting embed_model_id'),
  ('ml_rag', 'query_embedding', 'vector', NULL, NULL, NULL, NULL, NULL, 'used instead of embedding the question'),
  ('ml_rag', 'rerank', 'object', NULL, NULL, NULL, NULL, NULL,
   'model_id, candidates, min_score: reorder what was found by a cross-encoder; {} = with the defaults'),
  ('ml_rag', 'abstain', 'boolean', NULL, NULL, NULL, NULL, NULL,
   'say abstain_text instead of failing where nothing relevant enough is found; default: true with max_distance or '
   'min_score, else false'),
  ('ml_rag', 'abstain_text', 'text', NULL, NULL, NULL, NULL, NULL,
   'the answer where nothing relevant enough is found; default: setting abstain_text'),
  ('ml_rag', 'prompt', 'object', NULL, NULL, NULL, NULL, NULL, 'system, citation_style, order'),

  ('ml_rag', 'semantic_search', 'boolean', NULL, NULL, NULL, 'true', NULL, 'search by the meaning: kNN'),
  ('ml_rag', 'keyword_search', 'boolean', NULL, NULL, NULL, 'false', NULL,
   'search by the words: BM25; with semantic_search both, fused (hybrid)'),
  ('ml_rag', 'hybrid_options', 'object', NULL, NULL, NULL, NULL, NULL,
   'fusion, semantic_weight, rrf_k, candidates; where semantic_search and keyword_search are both true'),

  ('hybrid_options', 'fusion', 'choice', NULL, NULL, '{weighted,rrf}', '"weighted"', NULL,
   'weighted sum of the scores, or reciprocal rank fusion'),
  ('hybrid_options', 'semantic_weight', 'number', 0, 1, NULL, NULL, 'null',
   'weight of the semantic arm in a weighted fusion; auto and default: by how clear each arm is about this question'),
  ('hybrid_options', 'rrf_k', 'integer', 1, 1000000, NULL, '60', NULL, 'constant of reciprocal rank fusion'),
  ('hybrid_options', 'candidates', 'integer', 1, 10000, NULL, '100', NULL, 'segments that each arm brings'),

  ('retrieval_options', 'max_distance', 'number', 0, 999999.9999, NULL, NULL, '0.6', 'largest distance kept'),
  ('retrieval_options', 'percentage_distance', 'number', 0, 999999.9999, NULL, NULL, '20',
   'largest distance kept, in per cent above the nearest'),
  ('retrieval_options', 'segment_overlap', 'integer', 0, 5, NULL, '1', '1', 'neighbours added on either side'),

  ('rerank', 'model_id', 'text', NULL, NULL, NULL, NULL, NULL,
   'cross-encoder, or hybrid; default: setting rerank_model_id'),
  ('rerank', 'candidates', 'integer', 1, 1000, NULL, '50', NULL,
   'how many segments of the search are scored; at least n_citations'),
  ('rerank', 'min_score', 'number', 0, 1, NULL, NULL, NULL, 'least score kept; without it, all are'),

  ('prompt', 'system', 'text', NULL, NULL, NULL, NULL, NULL,
   'text that follows the constant system text, which says how documents are to be taken'),
  ('prompt', 'citation_style', 'choice', NULL, NULL, '{none,numbered}', '"none"', NULL,
   'numbered = the model is asked to write [1] after a statement from the first citation'),
  ('prompt', 'order', 'choice', NULL, NULL, '{best_first,best_last}', '"best_last"', NULL,
   'of the segments in the prompt; best_last puts the best one beside the question'),

  ('ml_rank', 'top_n', 'integer', 1, 2147483647, NULL, NULL, NULL, 'return so many, the best; default: all'),
  ('ml_rank', 'ignore_record_details_in_response', 'boolean', NULL, NULL, NULL, 'false', NULL,
   'return ids and scores only'),
  ('ml_rank', 'model', 'text', NULL, NULL, NULL, NULL, NULL,
   'cross-encoder, or hybrid; default: setting rerank_model_id where its files are there, else hybrid'),
  ('ml_rank', 'language', 'text', NULL, NULL, NULL, NULL, NULL,
   'hybrid: language of the records, such as en or pt-BR; default: default_text_search_config'),

  ('vector_store_columns', 'segment', 'text', NULL, NULL, NULL, '"segment"', NULL, 'column of the text'),
  ('vector_store_columns', 'segment_embedding', 'text', NULL, NULL, NULL, '"segment_embedding"', NULL,
   'vector or halfvec column'),
  ('vector_store_columns', 'document_name', 'text', NULL, NULL, NULL, '"document_name"', NULL,
   'column of the name shown in citations'),
  ('vector_store_columns', 'document_id', 'text', NULL, NULL, NULL, '"document_id"', NULL,
   'column that tells documents apart'),
  ('vector_store_columns', 'segment_number', 'text', NULL, NULL, NULL, '"segment_number"', NULL,
   'column of the order within a document'),
  ('vector_store_columns', 'metadata', 'text', NULL, NULL, NULL, '"metadata"', NULL, 'json column'),

  ('ml_generate', 'task', 'choice', NULL, NULL, '{generation,summarization}', '"generation"', NULL, 'what to do'),
  ('ml_generate', 'model_id', 'text', NULL, NULL, NULL, NULL, NULL,
   'generation model; default: setting generate_model_id'),
  ('ml_generate', 'context', 'text', NULL, NULL, NULL, NULL, NULL, 'text the answer is drawn from'),
  ('ml_generate', 'language', 'text', NULL, NULL, NULL, NULL, NULL, 'language of the answer, such as en'),
  ('ml_generate', 'temperature', 'number', 0, NULL, NULL, '0', NULL, '0 = always the likeliest token'),
  ('ml_generate', 'max_tokens', 'integer', 1, 1000000, NULL, '256', NULL, 'longest answer, in tokens'),
  ('ml_generate', 'top_k', 'integer', 0, 32000, NULL, NULL, NULL, 'sample among the k likeliest tokens; 0 = all'),
  ('ml_generate', 'top_p', 'number', 0, 1, NULL, NULL, NULL, 'sample among tokens of this probability together'),
  ('ml_generate', 'repeat_penalty', 'number', 0, 2, NULL, NULL, NULL, 'factor against repeated tokens; 1 = none'),
  ('ml_generate', 'frequency_penalty', 'number', 0, 1, NULL, NULL, NULL, 'penalty that grows with each repetition'),
  ('ml_generate', 'presence_penalty', 'number', 0, 1, NULL, NULL, NULL, 'penalty for any repetition'),
  ('ml_generate', 'stop_sequences', 'text[]', NULL, NULL, NULL, NULL, NULL, 'texts that end the answer'),
  ('ml_generate', 'speculative_decoding', 'boolean', NULL, NULL, NULL, NULL, NULL,
   'look answer tokens up in the prompt: faster, same text'),
  ('ml_generate', 'seed', 'integer', 0, 4294967295, NULL, NULL, NULL, 'makes sampling repeatable'),
  ('ml_generate', 'json_schema', 'object', NULL, NULL, NULL, NULL, NULL, 'the answer is valid JSON of this schema'),

  ('ml_generate_table', 'batch_size', 'integer', 1, 10000, NULL, '100', NULL, 'rows between two commits'),
  ('ml_rag_table', 'batch_size', 'integer', 1, 10000, NULL, '100', NULL, 'rows between two commits'),
  ('ml_embed_table', 'batch_size', 'integer', 1, 10000, NULL, '1000', NULL, 'rows between two commits'),
  ('ml_embed_table', 'embed_model_id', 'text', NULL, NULL, NULL, NULL, NULL,
   'embedding model; default: setting embed_model_id'),
  ('ml_embed_row', 'embed_model_id', 'text', NULL, NULL, NULL, NULL, NULL,
   'embedding model; default: setting embed_model_id'),

  ('ml_rag_evaluate', 'name', 'text', NULL, NULL, NULL, NULL, NULL, 'what to call the run'),
  ('ml_rag_evaluate', 'options', 'object', NULL, NULL, NULL, NULL, NULL,
   'options of ml_rag, all but query_embedding; skip_generate is what generate says'),
  ('ml_rag_evaluate', 'columns', 'object', NULL, NULL, NULL, NULL, NULL,
   'id, question, documents, answers, answerable: the names of the columns'),
  ('ml_rag_evaluate', 'k', 'array', NULL, NULL, NULL, '[1, 3, 5, 10]', NULL,
   'cut-offs of recall@k and ndcg@k: 1 to 20 integers from 1 to 100'),
  ('ml_rag_evaluate', 'match', 'choice', NULL, NULL, '{path_end,document_name,document_id}', '"path_end"', NULL,
   'how documents are expected: by name or by the end of a path after a slash, by the whole name, by id'),
  ('ml_rag_evaluate', 'generate', 'boolean', NULL, NULL, NULL, 'false', NULL,
   'answer the questions too; true where judge_model_id is set'),
  ('ml_rag_evaluate', 'judge_model_id', 'text', NULL, NULL, NULL, NULL, NULL,
   'generation model that scores groundedness and relevance of the answers'),
  ('ml_rag_evaluate', 'refusal_pattern', 'text', NULL, NULL, NULL,
   '"(do not|don''t) know|(cannot|can''t) (answer|be answered)'
     '|(documents?|context|sources?) (do|does) not (say|mention|contain|provide|specify)"',
   NULL, 'regular expression (any case) of an answer that is none; the abstain text is one anyway'),
  ('ml_rag_evaluate', 'limit', 'integer', 1, 1000000, NULL, NULL, NULL, 'measure so many of the questions only'),
  ('ml_rag_evaluate', 'seed', 'integer', 0, 4294967295, NULL, NULL, NULL,
   'the questions of limit are drawn, the same ones for the same seed; without it they are the first'),
  ('ml_rag_evaluate', 'keep', 'boolean', NULL, NULL, NULL, 'true', NULL,
   'keep the run in ml_rag.evaluation_run and ml_rag.evaluation_question'),
  ('ml_rag_evaluate', 'progress_seconds', 'number', 0, 86400, NULL, '10', NULL,
   'time between two notices of how far it is; 0 = none'),

  ('evaluation_columns', 'id', 'text', NULL, NULL, NULL, '"id"', NULL, 'what tells the questions apart; else 1, 2, …'),
  ('evaluation_columns', 'question', 'text', NULL, NULL, NULL, '"question"', NULL, 'the question; must be there'),
  ('evaluation_columns', 'documents', 'text', NULL, NULL, NULL, '"documents"', NULL,
   'expected documents: text, text[], or json'),
  ('evaluation_columns', 'answers', 'text', NULL, NULL, NULL, '"answers"', NULL, 'right answers: text, text[], or json'),
  ('evaluation_columns', 'answerable', 'text', NULL, NULL, NULL, '"answerable"', NULL, 'boolean'),

  ('vector_store_load', 'schema_name', 'text', NULL, NULL, NULL, NULL, NULL,
   'schema of the store; default: the first schema of search_path'),
  ('vector_store_load', 'table_name', 'text', NULL, NULL, NULL, NULL, NULL, 'table of the store; default: from the path'),
  ('vector_store_load', 'formats', 'text[]', NULL, NULL, NULL, NULL, NULL,
   'load only files of these formats; default: all, each by its content'),
  ('vector_store_load', 'language', 'text', NULL, NULL, NULL, NULL, NULL, 'language of the documents, such as en'),
  ('vector_store_load', 'embed_model_id', 'text', NULL, NULL, NULL, NULL, NULL,
   'embedding model; default: that of the store, else setting embed_model_id'),
  ('vector_store_load', 'description', 'text', NULL, NULL, NULL, NULL, NULL, 'comment of the table'),
  ('vector_store_load', 'chunking', 'object', NULL, NULL, NULL, NULL, NULL,
   'split_by, segment_tokens, overlap_tokens'),
  ('vector_store_load', 'distance_metric', 'choice', NULL, NULL, '{COSINE,DOT,EUCLIDEAN}', '"COSINE"', NULL,
   'metric the index is built for'),
  ('vector_store_load', 'ocr', 'boolean', NULL, NULL, NULL, 'false', NULL, 'read the text in scanned pages and pictures of a PDF'),
  ('vector_store_load', 'refresh', 'boolean', NULL, NULL, NULL, 'true', NULL,
   'changed files again, new ones added, those gone removed; false = add new files only'),

  ('load_documents', 'formats', 'text[]', NULL, NULL, NULL, NULL, NULL,
   'load only documents of these formats; default: all, each by its content'),
  ('load_documents', 'language', 'text', NULL, NULL, NULL, NULL, NULL, 'language of the documents, such as en'),
  ('load_documents', 'embed_model_id', 'text', NULL, NULL, NULL, NULL, NULL,
   'embedding model; default: that of the store, and no other will do'),
  ('load_documents', 'chunking', 'object', NULL, NULL, NULL, NULL, NULL, 'split_by, segment_tokens, overlap_tokens'),
  ('load_documents', 'ocr', 'boolean', NULL, NULL, NULL, 'false', NULL, 'read the text in scanned pages and pictures of a PDF'),
  ('load_documents', 'refresh', 'boolean', NULL, NULL, NULL, 'true', NULL,
   'changed documents again; false = add new ones only'),

  ('create_store', 'embed_model_id', 'text', NULL, NULL, NULL, NULL, NULL,
   'embedding model; default: setting embed_model_id'),
  ('create_store', 'description', 'text', NULL, NULL, NULL, NULL, NULL, 'comment of the table'),
  ('create_store', 'language', 'text', NULL, NULL, NULL, NULL, NULL,
   'language of the documents, for keyword search; default: default_text_search_config'),

  ('enable_keyword_search', 'language', 'text', NULL, NULL, NULL, NULL, NULL,
   'language of the texts, such as en or pt-BR; default: default_text_search_config'),
  ('enable_keyword_search', 'text_search_configuration', 'text', NULL, NULL, NULL, NULL, NULL,
   'text search configuration; default: that of the language'),
  ('enable_keyword_search', 'segment', 'text', NULL, NULL, NULL, '"segment"', NULL, 'column of the text'),
  ('enable_keyword_search', 'k1', 'number', 0, 100, NULL, '1.2', NULL,
   'how much the second time a word stands there counts; 0 = nothing'),
  ('enable_keyword_search', 'b', 'number', 0, 1, NULL, '0.75', NULL,
   'how much longer segments count less; 0 = length does not count'),
  ('enable_keyword_search', 'statistics', 'choice', NULL, NULL, '{all,visible}', '"all"', NULL,
   'what the weights of words are counted over: all rows, or those the caller can see under row-level security'),

  ('chunking', 'split_by', 'choice', NULL, NULL, '{auto,paragraph,sentence,page,tokens}', '"auto"', NULL,
   'where segments end; auto = headings, paragraphs, sentences, whichever fills a segment'),
  ('chunking', 'segment_tokens', 'integer', 16, 1048576, NULL, NULL, NULL,
   'longest segment, in tokens of the embedding model; at most what the model takes in, and 256 where left out'),
  ('chunking', 'overlap_tokens', 'integer', 0, 524288, NULL, '0', NULL,
   'tokens that a segment repeats of the one before, at most half of segment_tokens')
) AS d (routine, name, type, minimum, maximum, choices, default_value, auto_value, description);
CREATE UNIQUE INDEX option_key ON ml_rag.option (routine, name);
COMMENT ON MATERIALIZED VIEW ml_rag.option IS 'every option of every routine: type, range, choices, default, what auto means';

CREATE FUNCTION ml_rag._bad_option(name text, value jsonb, allowed text, hint text DEFAULT NULL) RETURNS void
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$
-- purpose: the one form of every complaint about an option; the value is cut so that a log line stays a line
BEGIN
  RAISE EXCEPTION USING ERRCODE = '22023',
    MESSAGE = format('invalid value for option "%s"', $1),
    DETAIL = format('Got %s; allowed: %s.',
      CASE WHEN length($2::text) > 200 THEN left($2::text, 200) || '…' ELSE coalesce($2::text, 'null') END, $3),
    HINT = coalesce($4, 'SELECT * FROM ml_rag.option lists the options with their ranges and defaults.');
END
$$;

CREATE FUNCTION ml_rag._distance_of_words(a text, b text) RETURNS integer
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$
-- purpose: Levenshtein distance, for hints; the words are cut at 40 characters
-- Source: Wagner and Fischer 1974, one row at a time.
DECLARE
  _a text := left($1, 40);
  _b text := left($2, 40);
  _previous integer[] := ARRAY(SELECT generate_series(0, length(_b)));
  _row integer[];
BEGIN
  FOR i IN 1..length(_a) LOOP
    _row := ARRAY[i];
    FOR j IN 1..length(_b) LOOP
      _row := _row || least(_previous[j + 1] + 1, _row[j] + 1,
        _previous[j] + (substr(_a, i, 1) <> substr(_b, j, 1))::integer);
    END LOOP;
    _previous := _row;
  END LOOP;
  RETURN _previous[length(_b) + 1];
END
$$;

CREATE FUNCTION ml_rag._unknown_option(routine text, name text) RETURNS void
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$
-- purpose: complain about a key that does not exist, with the nearest one that does
-- Calls: ml_rag._distance_of_words  Reads: ml_rag.option
DECLARE
  _names text[] := ARRAY(SELECT o.name FROM ml_rag.option AS o WHERE o.routine = $1 ORDER BY 1);
  _nearest text;
BEGIN
  SELECT n INTO _nearest FROM unnest(_names) AS n
  WHERE ml_rag._distance_of_words(lower($2), n) <= greatest(2, length(n) / 3)
  ORDER BY ml_rag._distance_of_words(lower($2), n), n LIMIT 1;
  RAISE EXCEPTION USING ERRCODE = '22023',
    MESSAGE = format('unknown option "%s"', left($2, 100)),
    DETAIL = format('Options of %s: %s.', $1, array_to_string(_names, ', ')),
    HINT = coalesce(
      -- an option of one of the objects among the options
      (SELECT format('It belongs into "%s".', i.object)
       FROM (SELECT CASE o.routine WHEN 'ml_generate' THEN 'model_options' ELSE o.routine END AS object
             FROM ml_rag.option AS o WHERE o.name = $2) AS i
       WHERE i.object = ANY (_names) ORDER BY i.object LIMIT 1),
      CASE WHEN _nearest IS NULL THEN 'Leave it out.' ELSE format('Did you mean "%s"?', _nearest) END);
END
$$;

CREATE FUNCTION ml_rag.parse_options(routine text, options jsonb) RETURNS jsonb
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$
-- purpose: check the options of a routine, or of one object among them, and fill in the defaults; null = default
-- Calls: ml_rag._bad_option, ml_rag._unknown_option  Reads: ml_rag.option
DECLARE
  _parsed jsonb;
  _key text;
  _value jsonb;
  _kind text;
  _allowed text;
  _option record;
BEGIN
  SELECT coalesce(jsonb_object_agg(o.name, o.default_value), '{}') INTO _parsed
  FROM ml_rag.option AS o WHERE o.routine = $1 AND o.default_value IS NOT NULL;
  IF $2 IS NULL OR $2 = 'null' THEN
    RETURN _parsed;
  END IF;
  IF jsonb_typeof($2) <> 'object' THEN
    PERFORM ml_rag._bad_option($1, $2, 'a JSON object',
      'Options are one JSON object, such as {"n_citations": 5}.');
  END IF;

  FOR _key, _value IN SELECT e.key, e.value FROM jsonb_each($2) AS e LOOP
    SELECT o.* INTO _option FROM ml_rag.option AS o WHERE o.routine = $1 AND o.name = _key;
    IF NOT FOUND THEN
      PERFORM ml_rag._unknown_option($1, _key);
    END IF;
    _kind := jsonb_typeof(_value);
    IF _option.auto_value IS NOT NULL AND _kind = 'string' AND lower(_value #>> '{}') = 'auto' THEN
      _value := _option.auto_value;
      _kind := jsonb_typeof(_value);
    END IF;
    CONTINUE WHEN _kind = 'null';

    -- _allowed is set where the value does not fit
    _allowed := NULL;
    CASE _option.type
    WHEN 'boolean' THEN
      IF _kind <> 'boolean' THEN _allowed := 'true or false'; END IF;
    WHEN 'text' THEN
      IF _kind <> 'string' OR _value = '""' THEN _allowed := 'a text'; END IF;
    WHEN 'text[]' THEN
      IF _kind <> 'array' OR jsonb_path_exists(_value, 'strict $[*] ? (@.type() != "string")') THEN
        _allowed := 'an array of texts';
      END IF;
    WHEN 'object' THEN
      IF _kind <> 'object' THEN _allowed := 'an object'; END IF;
    WHEN 'array' THEN
      IF _kind <> 'array' THEN _allowed := 'an array'; END IF;
    WHEN 'vector' THEN
      IF _kind NOT IN ('array', 'string') THEN _allowed := 'an array of numbers, or the text form of a vector'; END IF;
    WHEN 'choice' THEN
      IF _kind = 'string' THEN
        SELECT to_jsonb(c) INTO _value FROM unnest(_option.choices) AS c WHERE lower(c) = lower(_value #>> '{}');
      END IF;
      IF _kind <> 'string' OR _value IS NULL THEN
        _value := $2 -> _key;
        _allowed := array_to_string(_option.choices, ', ');
      END IF;
    ELSE  -- integer, number
      IF _kind <> 'number'
        OR _option.type = 'integer' AND _value::numeric <> trunc(_value::numeric)
        OR _value::numeric < _option.minimum OR _value::numeric > _option.maximum THEN
        _allowed := concat(CASE _option.type WHEN 'integer' THEN 'an integer' ELSE 'a number' END,
          CASE WHEN _option.maximum IS NULL THEN ' from ' || _option.minimum
               ELSE format(' from %s to %s', _option.minimum, _option.maximum) END,
          CASE WHEN _option.auto_value IS NOT NULL THEN ', or "auto"' END);
      ELSIF _option.type = 'integer' THEN
        _value := to_jsonb(trunc(_value::numeric)::bigint);
      END IF;
    END CASE;
    IF _allowed IS NOT NULL THEN
      PERFORM ml_rag._bad_option(_key, _value, _allowed);
    END IF;
    _parsed := jsonb_set(_parsed, ARRAY[_key], _value);
  END LOOP;
  RETURN _parsed;
END
$$;
COMMENT ON FUNCTION ml_rag.parse_options(text, jsonb) IS
$$checks the options of a routine and fills in the defaults
routine: ml_rag, retrieval_options, ml_generate, … as in ml_rag.option. A JSON null stands for the default.
Errors: 22023, whose detail names the option, the value and what is allowed.$$;

CREATE FUNCTION ml_rag._texts(value jsonb) RETURNS text[]
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$
-- purpose: a JSON array of texts as an array; null for null. PL/pgSQL, because it keeps the plan for the session.
BEGIN
  RETURN CASE WHEN $1 IS NOT NULL THEN ARRAY(SELECT jsonb_array_elements_text($1)) END;
END
$$;

CREATE FUNCTION ml_rag._needs_embedding(options jsonb) RETURNS boolean
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$
-- purpose: whether a question has to be embedded; keyword search alone goes without, and so without a model server,
-- unless distances are asked for
BEGIN
  RETURN (options -> 'semantic_search')::boolean
    OR coalesce(options -> 'retrieval_options' ?| '{max_distance,percentage_distance}', false);
END
$$;

CREATE FUNCTION ml_rag._parse_rag_options(options jsonb) RETURNS jsonb
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$
-- purpose: the options of ml_rag with those objects inside that have options of their own
-- Calls: ml_rag.parse_options
DECLARE
  _parsed jsonb := ml_rag.parse_options('ml_rag', $1);
BEGIN
  IF _parsed ? 'retrieval_options' THEN
    _parsed := jsonb_set(_parsed, '{retrieval_options}',
      ml_rag.parse_options('retrieval_options', _parsed -> 'retrieval_options'));
  END IF;
  IF _parsed ? 'rerank' THEN
    _parsed := jsonb_set(_parsed, '{rerank}', ml_rag.parse_options('rerank', _parsed -> 'rerank'));
  END IF;
  IF _parsed ? 'hybrid_options' THEN
    PERFORM ml_rag.parse_options('hybrid_options', _parsed -> 'hybrid_options');
  END IF;
  IF NOT (_parsed -> 'semantic_search')::boolean AND NOT (_parsed -> 'keyword_search')::boolean THEN
    PERFORM ml_rag._bad_option('semantic_search', 'false', 'true where "keyword_search" is false',
      'Set one of them, or "n_citations": 0 to ask the model without any retrieval.');
  END IF;
  IF _parsed -> 'model_options' ? 'context' THEN
    PERFORM ml_rag._bad_option('context', _parsed #> '{model_options,context}', 'nothing: ml_rag fills it in',
      'Leave "context" out of model_options; it is an option of ml_generate.');
  END IF;
  IF _parsed ->> 'abstain_text' !~ '\S' THEN
    PERFORM ml_rag._bad_option('abstain_text', _parsed -> 'abstain_text', 'a text that is not blank');
  END IF;
  IF _parsed ? 'prompt' THEN
    PERFORM ml_rag.parse_options('prompt', _parsed -> 'prompt');
  END IF;
  -- checked even where skip_generate leaves them unused: a mistyped option should not wait for its day
  IF _parsed ? 'model_options' THEN
    PERFORM ml_rag.parse_options('ml_generate', _parsed -> 'model_options');
  END IF;
  IF _parsed ? 'vector_store_columns' THEN
    PERFORM ml_rag.parse_options('vector_store_columns', _parsed -> 'vector_store_columns');
  END IF;
  IF _parsed ?| '{filters,required_keywords,excluded_keywords}' THEN
    PERFORM ml_rag._filter_tree(_parsed -> 'filters') WHERE _parsed ? 'filters';
    PERFORM ml_rag._check_keywords(o.key, o.value) FROM jsonb_each(_parsed) AS o
    WHERE o.key IN ('required_keywords', 'excluded_keywords');
  END IF;
  RETURN jsonb_build_object(
    'n_citations',
    CASE WHEN _parsed -> 'retrieval_options' ?| '{max_distance,percentage_distance}' THEN 10 ELSE 3 END,
    -- percentage_distance says nothing about relevance: the nearest segment always passes it
    'abstain', coalesce(_parsed -> 'retrieval_options' ? 'max_distance', false)
      OR coalesce(_parsed -> 'rerank' ? 'min_score', false)) || _parsed;
END
$$;

-- 02_models.sql

-- 02_models: the door to the model server, and what lies behind it. SQL version == Python version.

CREATE FUNCTION ml_rag._python_path() RETURNS text
LANGUAGE sql STABLE PARALLEL SAFE SECURITY DEFINER
SET search_path FROM CURRENT
AS $$
-- purpose: where the Python that runs in the backend was installed; found anew so that pg_upgrade cannot make it stale
-- Security definer because pg_config shows paths to its owner only. It takes no argument.
SELECT setting || '/extension/ml_rag-' || ml_rag.version() FROM pg_config WHERE name = 'SHAREDIR'
$$;

-- A function that is written in PL/Python returns its error as a value, and the SQL function around it raises that
-- (ml_rag._raise): only so do message, detail and SQLSTATE come out clean.

CREATE FUNCTION ml_rag._load_backend() RETURNS jsonb
LANGUAGE plpython3u VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
# purpose: once a session, import the Python side of this very version and keep it in GD; returns what went wrong
# Calls: ml_rag._python_path
import importlib
import json
import sys

found = plpy.execute("SELECT ml_rag._python_path() AS path, ml_rag.version() AS version")[0]
for name in [n for n in sys.modules if n == "ml_rag" or n.startswith("ml_rag.")]:
    del sys.modules[name]  # what an older version of the extension left in this session
sys.path[:] = [found["path"]] + [p for p in sys.path if "/extension/ml_rag-" not in p]
try:
    bridge = importlib.import_module("ml_rag.backend.bridge")
except Exception as e:  # a Python that is too old shows as a SyntaxError
    return json.dumps({
        "sqlstate": "55000", "message": "the Python side of ml_rag cannot be imported",
        "detail": f"{type(e).__name__}: {e}; looked in {found['path']}.",
        "hint": "Run make install with the PG_CONFIG of this server."})
if bridge.VERSION != found["version"]:
    return json.dumps({
        "sqlstate": "55000", "message": "the SQL and the Python side of ml_rag differ in version",
        "detail": f"SQL {found['version']}, Python {bridge.VERSION}.",
        "hint": "Run make install, then ALTER EXTENSION ml_rag UPDATE, and connect again."})
GD["ml_rag"] = bridge
$$;

CREATE FUNCTION ml_rag._model_server(path text, OUT reply jsonb, OUT error jsonb)
LANGUAGE plpython3u VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
if "ml_rag" not in GD or GD["ml_rag"].VERSION != "0.1.0":
    if error := plpy.execute("SELECT ml_rag._load_backend() AS error")[0]["error"]:
        return None, error
return GD["ml_rag"].get(plpy, path)
$$;

CREATE FUNCTION ml_rag.model_server() RETURNS jsonb
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- Calls: ml_rag._model_server, ml_rag._raise
DECLARE
  _outcome record;
BEGIN
  SELECT o.* INTO _outcome FROM ml_rag._model_server('/healthz') AS o;
  PERFORM ml_rag._raise(_outcome.error) WHERE _outcome.error IS NOT NULL;
  RETURN _outcome.reply;
END
$$;
COMMENT ON FUNCTION ml_rag.model_server() IS
$$the model server's health: status, version, uptime, state of each model
Errors: 08006 where it cannot be reached.$$;

CREATE FUNCTION @extschema@.ml_supported_models()
RETURNS TABLE (model_id text, task text, engine text, dimensions integer, max_tokens integer, available boolean,
               is_default boolean)
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: the catalogue of the model server, and which of its models are this database's defaults
-- Calls: ml_rag._model_server, ml_rag._get_setting, ml_rag._raise
DECLARE
  _outcome record;
BEGIN
  SELECT o.* INTO _outcome FROM ml_rag._model_server('/v1/models') AS o;
  PERFORM ml_rag._raise(_outcome.error) WHERE _outcome.error IS NOT NULL;
  BEGIN
    RETURN QUERY
      SELECT m.id, m.task, m.engine, m.dimensions, m.max_tokens, m.available,
        m.id = ml_rag._get_setting(m.task || '_model_id')
      FROM jsonb_to_recordset(_outcome.reply -> 'data')
        AS m (id text, task text, engine text, dimensions integer, max_tokens integer, available boolean)
      ORDER BY m.task, m.id;
  EXCEPTION WHEN data_exception THEN
    RAISE EXCEPTION USING ERRCODE = '38000', MESSAGE = 'the model server answered nonsense',
      DETAIL = format('No list of models: %s.', left(SQLERRM, 200));
  END;
END
$$;
COMMENT ON FUNCTION @extschema@.ml_supported_models() IS
$$the models of the model server
task: embed, generate or rerank. dimensions: of the embedding. max_tokens: longest input (embed, rerank) or the
context (generate). available: its files are there. is_default: used where no option names one.
Errors: 08006 where the model server cannot be reached.$$;

-- 03_postings.sql

-- 03_postings: the keyword indexes: their tables, and the views through which they are read and made.
-- 84_index keeps them, 32_keyword asks them; docs/keyword.md says why they are as they are.

-- Rows get a number of their own, which is never used again. A run is a sealed part of an index: up to 65536 rows with
-- their postings, which never change; what is deleted from it is noted beside. New rows wait in keyword_new and deleted
-- ones in keyword_gone until they are folded into runs, so that writers only ever append and never wait for each other.

CREATE TYPE ml_rag.keyword_candidate AS (key text[], score double precision);

CREATE TABLE ml_rag.keyword_store (
  store         regclass PRIMARY KEY,
  segment       name NOT NULL,              -- column of the text
  key           name[] NOT NULL,            -- columns that tell rows apart
  configuration text NOT NULL,              -- text search configuration, with its schema
  k1            double precision NOT NULL CHECK (k1 BETWEEN 0 AND 100),
  b             double precision NOT NULL CHECK (b BETWEEN 0 AND 1),
  statistics    text NOT NULL CHECK (statistics IN ('all', 'visible')),
  folding       bigint NOT NULL DEFAULT 0   -- set by the owner to have a batch folded; locked by whoever folds
);
CREATE SEQUENCE ml_rag.keyword_number;
CREATE TABLE ml_rag.keyword_row (
  id     bigint NOT NULL,
  store  regclass NOT NULL,
  length integer NOT NULL,                  -- tokens
  key    text[] COLLATE "C" NOT NULL,
  -- with the store: owners write here, and must not take the numbers of others' rows
  PRIMARY KEY (store, id)
);
CREATE INDEX ON ml_rag.keyword_row (store, key);
CREATE TABLE ml_rag.keyword_new (
  store  regclass NOT NULL,
  batch  bigint NOT NULL,                   -- 0, or the number of the statement that folds its rows itself
  id     bigint NOT NULL,
  length integer NOT NULL,
  tokens jsonb NOT NULL,                    -- token: how often
  PRIMARY KEY (store, batch, id)
);
CREATE TABLE ml_rag.keyword_gone (
  store  regclass NOT NULL,
  id     bigint NOT NULL,
  length integer NOT NULL,
  PRIMARY KEY (store, id)
);
CREATE TABLE ml_rag.keyword_run (
  run         bigint PRIMARY KEY,
  store       regclass NOT NULL,
  rows        integer NOT NULL,
  total       bigint NOT NULL,              -- of the lengths
  gone_rows   integer NOT NULL DEFAULT 0,
  gone_total  bigint NOT NULL DEFAULT 0,
  first_id    bigint NOT NULL,
  last_id     bigint NOT NULL,
  ids         bytea NOT NULL,               -- by slot (0 …), ascending, less first_id; see backend/keyword.py
  lengths     bytea NOT NULL,               -- by slot
  gone        bytea                         -- a bit for each slot; null = none
);
CREATE INDEX ON ml_rag.keyword_run (store);
CREATE TABLE ml_rag.keyword_posting (
  run      bigint NOT NULL,
  store    regclass NOT NULL,
  term     text COLLATE "C" NOT NULL,
  postings bytea NOT NULL,                  -- slots, and how often the term stands in each
  PRIMARY KEY (store, term, run)
);
CREATE INDEX ON ml_rag.keyword_posting (run);

-- read in pieces, and numbers that differ compress badly
ALTER TABLE ml_rag.keyword_run ALTER ids SET STORAGE EXTERNAL, ALTER lengths SET STORAGE EXTERNAL,
  ALTER gone SET STORAGE EXTERNAL;
ALTER TABLE ml_rag.keyword_posting ALTER postings SET STORAGE EXTERNAL;
-- tokens of a usual segment stay in the row, uncompressed: each query looks through them
ALTER TABLE ml_rag.keyword_new ALTER tokens SET STORAGE EXTERNAL;
ALTER TABLE ml_rag.keyword_new SET (toast_tuple_target = 8160);

COMMENT ON TABLE ml_rag.keyword_store IS 'tables with a keyword index, and how each is made and scored';
COMMENT ON TABLE ml_rag.keyword_row IS 'rows of the keyword indexes: number, key in the store, length in tokens';
COMMENT ON TABLE ml_rag.keyword_new IS 'rows that wait to be folded into a run';
COMMENT ON TABLE ml_rag.keyword_gone IS 'deleted rows that wait to be noted in their run';
COMMENT ON TABLE ml_rag.keyword_run IS 'sealed parts of the keyword indexes';
COMMENT ON TABLE ml_rag.keyword_posting IS 'which rows of a run hold a term, and how often';
COMMENT ON SEQUENCE ml_rag.keyword_number IS 'numbers of rows and runs; never used twice, as sessions remember runs';

SELECT pg_catalog.pg_extension_config_dump('ml_rag.keyword_store', '');
SELECT pg_catalog.pg_extension_config_dump('ml_rag.keyword_row', '');
SELECT pg_catalog.pg_extension_config_dump('ml_rag.keyword_new', '');
SELECT pg_catalog.pg_extension_config_dump('ml_rag.keyword_gone', '');
SELECT pg_catalog.pg_extension_config_dump('ml_rag.keyword_run', '');
SELECT pg_catalog.pg_extension_config_dump('ml_rag.keyword_posting', '');
SELECT pg_catalog.pg_extension_config_dump('ml_rag.keyword_number', '');

-- Nobody reads these tables but their owner. Others read the views below: of a view the tables are read with its
-- owner's rights, while the functions in it run as whoever asks, so that the conditions speak of the caller. All of them
-- are barriers: no function of the caller sees a row before the view's own conditions have passed it.

CREATE VIEW ml_rag.keyword_index WITH (security_barrier) AS
SELECT i.store, i.segment, i.key, i.configuration, i.k1, i.b, i.statistics, row_security_active(i.store) AS secured
FROM ml_rag.keyword_store AS i JOIN pg_class AS c ON c.oid = i.store
WHERE c.relkind = 'r' AND has_schema_privilege(c.relnamespace, 'USAGE') AND cardinality(i.key) + 1 = (
  SELECT count(*) FROM pg_attribute AS a
  WHERE a.attrelid = i.store AND a.attname = ANY (i.key || i.segment) AND NOT a.attisdropped
    AND has_column_privilege(a.attrelid, a.attnum, 'SELECT')
    -- what is compared with or made of a value of these is nobody's code
    AND a.atttypid = ANY ('{smallint,integer,bigint,numeric,oid,text,character varying,uuid}'::regtype[]));
COMMENT ON VIEW ml_rag.keyword_index IS
'keyword indexes of the tables whose text and key the caller may read; secured: row-level security applies to the caller';

-- A caller who may read the whole table may read its whole index.
CREATE VIEW ml_rag.keyword_whole_row WITH (security_barrier) AS
SELECT r.store, r.id, r.key
FROM ml_rag.keyword_index AS i JOIN ml_rag.keyword_row AS r ON r.store = i.store WHERE NOT i.secured;
CREATE VIEW ml_rag.keyword_whole_new WITH (security_barrier) AS
SELECT n.store, n.id, n.length, n.tokens
FROM ml_rag.keyword_index AS i JOIN ml_rag.keyword_new AS n ON n.store = i.store WHERE NOT i.secured;
CREATE VIEW ml_rag.keyword_whole_gone WITH (security_barrier) AS
SELECT g.store, g.id, g.length
FROM ml_rag.keyword_index AS i JOIN ml_rag.keyword_gone AS g ON g.store = i.store WHERE NOT i.secured;
CREATE VIEW ml_rag.keyword_whole_run WITH (security_barrier) AS
SELECT r.tableoid AS origin, r.*
FROM ml_rag.keyword_index AS i JOIN ml_rag.keyword_run AS r ON r.store = i.store WHERE NOT i.secured;
CREATE VIEW ml_rag.keyword_whole_posting WITH (security_barrier) AS
SELECT p.store, p.term, p.run, p.postings
FROM ml_rag.keyword_index AS i JOIN ml_rag.keyword_posting AS p ON p.store = i.store WHERE NOT i.secured;

COMMENT ON VIEW ml_rag.keyword_whole_row IS 'rows of the indexes of tables that the caller may read wholly';
COMMENT ON VIEW ml_rag.keyword_whole_new IS 'rows not yet in a run, of tables that the caller may read wholly';
COMMENT ON VIEW ml_rag.keyword_whole_gone IS 'deleted rows not yet noted, of tables that the caller may read wholly';
COMMENT ON VIEW ml_rag.keyword_whole_run IS 'runs of the indexes of tables that the caller may read wholly';
COMMENT ON VIEW ml_rag.keyword_whole_posting IS 'postings of the indexes of tables that the caller may read wholly';

-- A caller to whom row-level security applies gets what the index has of the rows that the caller can see. The caller's
-- own rights decide which these are (_visible_keys reads the table as the caller); the functions that cut
-- the postings down to them are pure: calling them by themselves shows nothing.
CREATE FUNCTION ml_rag._visible_keys(store regclass, key name[]) RETURNS SETOF text[]
LANGUAGE plpgsql STABLE PARALLEL UNSAFE ROWS 10000 COST 100000
SET search_path FROM CURRENT
AS $$
-- purpose: keys of the rows that the caller can see  Reads: the store, as the caller
BEGIN
  IF to_regclass(store::text) IS NOT NULL AND (
    SELECT bool_and(has_column_privilege(a.attrelid, a.attnum, 'SELECT')) AND count(*) = cardinality(key)
    FROM pg_attribute AS a WHERE a.attrelid = store AND a.attname = ANY (key) AND NOT a.attisdropped
  ) THEN
    RETURN QUERY EXECUTE format('SELECT ARRAY[%s] FROM ONLY %s AS t',
      (SELECT string_agg(format('concat(t.%I)', k), ', ' ORDER BY place) FROM unnest(key) WITH ORDINALITY AS u (k, place)),
      store);
  END IF;
END
$$;

CREATE FUNCTION ml_rag._visible_slots(ids bytea, first_id bigint, visible bytea) RETURNS bytea
LANGUAGE plpython3u IMMUTABLE PARALLEL UNSAFE STRICT COST 100000
SET search_path FROM CURRENT
AS $$
# purpose: of the rows of a run, a byte for each slot: 1 where its id is among the visible (8 bytes each, big-endian)
if "ml_rag" not in GD or GD["ml_rag"].VERSION != "0.1.0":
    if plpy.execute("SELECT ml_rag._load_backend() AS error")[0]["error"]:
        return None
return GD["ml_rag"].keyword().visible_slots(ids, first_id, visible)
$$;

CREATE FUNCTION ml_rag._visible_rows(slots bytea, ids bytea, first_id bigint, lengths bytea) RETURNS bytea
LANGUAGE plpython3u IMMUTABLE PARALLEL UNSAFE STRICT COST 10000
SET search_path FROM CURRENT
AS $$
# purpose: slot, id and length of the visible rows of a run; null where there are none
if "ml_rag" not in GD or GD["ml_rag"].VERSION != "0.1.0":
    if plpy.execute("SELECT ml_rag._load_backend() AS error")[0]["error"]:
        return None
return GD["ml_rag"].keyword().visible_rows(slots, ids, first_id, lengths)
$$;

CREATE FUNCTION ml_rag._visible_postings(slots bytea, postings bytea) RETURNS bytea
LANGUAGE plpython3u IMMUTABLE PARALLEL UNSAFE STRICT COST 1000
SET search_path FROM CURRENT
AS $$
# purpose: those postings whose slots are visible; null where there are none
if "ml_rag" not in GD or GD["ml_rag"].VERSION != "0.1.0":
    if plpy.execute("SELECT ml_rag._load_backend() AS error")[0]["error"]:
        return None
return GD["ml_rag"].keyword().visible_postings(slots, postings)
$$;

CREATE FUNCTION ml_rag._live_rows(postings bytea, gone bytea, ids bytea, first_id bigint, gone_ids bigint[])
RETURNS bigint
LANGUAGE plpython3u IMMUTABLE PARALLEL UNSAFE COST 1000
SET search_path FROM CURRENT
AS $$
# purpose: how many of the postings are of rows that are not deleted
if "ml_rag" not in GD or GD["ml_rag"].VERSION != "0.1.0":
    if plpy.execute("SELECT ml_rag._load_backend() AS error")[0]["error"]:
        return None
return GD["ml_rag"].keyword().live_rows(postings, gone, ids, first_id, gone_ids)
$$;

-- Run by run: term '' is the run itself (_visible_rows), all others are postings of it (_visible_postings), of the terms
-- in ml_rag.keyword_terms only: the planner would not look for them by a condition outside. Run 0 is what is in no run
-- yet: a row and its tokens.
CREATE VIEW ml_rag.keyword_visible WITH (security_barrier) AS
SELECT i.store, h.run, h.term, h.hits, h.id, h.length, h.n
FROM ml_rag.keyword_index AS i
CROSS JOIN LATERAL (
  SELECT string_agg(int8send(r.id), ''::bytea) AS packed, array_agg(r.id) AS ids
  FROM ml_rag._visible_keys(i.store, i.key) AS k (key)
  JOIN ml_rag.keyword_row AS r ON r.store = i.store AND r.key = k.key
) AS v
CROSS JOIN LATERAL (
  SELECT r.run, p.term, p.hits, NULL::bigint AS id, NULL::integer AS length, NULL::integer AS n
  FROM ml_rag.keyword_run AS r
  CROSS JOIN LATERAL (SELECT ml_rag._visible_slots(r.ids, r.first_id, v.packed) AS slots OFFSET 0) AS s
  CROSS JOIN LATERAL (
    SELECT '' COLLATE "C" AS term, ml_rag._visible_rows(s.slots, r.ids, r.first_id, r.lengths) AS hits
    UNION ALL
    SELECT q.term, ml_rag._visible_postings(s.slots, q.postings)
    FROM (SELECT DISTINCT unnest(nullif(current_setting('ml_rag.keyword_terms', true), '')::text[]) COLLATE "C") AS a (term)
    JOIN ml_rag.keyword_posting AS q ON q.store = i.store AND q.term = a.term AND q.run = r.run
  ) AS p
  WHERE r.store = i.store
  UNION ALL
  SELECT 0, t.key COLLATE "C", NULL, n.id, n.length, t.value::integer
  FROM ml_rag.keyword_new AS n
  CROSS JOIN LATERAL (SELECT e.key, e.value FROM jsonb_each_text(n.tokens) AS e UNION ALL SELECT '', '0') AS t
  WHERE n.store = i.store AND n.id IN (SELECT unnest(v.ids))
) AS h
-- a term that only hidden rows have must not show as an empty list
WHERE i.secured AND (h.hits IS NOT NULL OR h.run = 0);
COMMENT ON VIEW ml_rag.keyword_visible IS
'what the keyword indexes have of the rows that row-level security lets the caller see';

CREATE FUNCTION ml_rag._is_visible(store regclass, key name[], value text[]) RETURNS boolean
LANGUAGE plpgsql STABLE PARALLEL UNSAFE COST 10000
SET search_path FROM CURRENT
AS $$
-- purpose: whether the caller can see the row of a key  Reads: the store, as the caller
DECLARE
  _visible boolean;
BEGIN
  EXECUTE format('SELECT EXISTS (SELECT FROM ONLY %s AS t WHERE %s)', store, (
    SELECT string_agg(format('t.%I = ($1[%s])::%s', a.attname, u.place, format_type(a.atttypid, NULL)), ' AND ')
    FROM unnest(key) WITH ORDINALITY AS u (k, place)
    JOIN pg_attribute AS a ON a.attrelid = store AND a.attname = u.k AND NOT a.attisdropped))
  INTO _visible USING value;
  RETURN _visible;
END
$$;

CREATE VIEW ml_rag.keyword_visible_row WITH (security_barrier) AS
SELECT r.store, r.id, r.key
FROM ml_rag.keyword_index AS i JOIN ml_rag.keyword_row AS r ON r.store = i.store
WHERE i.secured AND ml_rag._is_visible(i.store, i.key, r.key);
COMMENT ON VIEW ml_rag.keyword_visible_row IS 'rows of the indexes that row-level security lets the caller see';

-- The statistics of a score span the whole table, unless its index says otherwise.
CREATE VIEW ml_rag.keyword_total WITH (security_barrier) AS
SELECT i.store, t.rows, t.total
FROM ml_rag.keyword_index AS i
CROSS JOIN LATERAL (
  SELECT sum(s.rows)::bigint AS rows, sum(s.total)::bigint AS total FROM (
    SELECT r.rows - r.gone_rows, r.total - r.gone_total FROM ml_rag.keyword_run AS r WHERE r.store = i.store
    UNION ALL
    SELECT count(*), sum(n.length) FROM ml_rag.keyword_new AS n WHERE n.store = i.store
    UNION ALL
    SELECT -count(*), -sum(g.length) FROM ml_rag.keyword_gone AS g WHERE g.store = i.store
  ) AS s (rows, total)
) AS t
WHERE i.statistics = 'all' OR NOT i.secured;
COMMENT ON VIEW ml_rag.keyword_total IS 'number of rows and of their tokens, where statistics span the whole table';

-- Only terms that are asked for: a list of all of them would be what hidden rows say, word by word.
CREATE VIEW ml_rag.keyword_term WITH (security_barrier) AS
SELECT i.store, h.term, sum(h.n)::bigint AS rows
FROM ml_rag.keyword_index AS i
CROSS JOIN LATERAL (
  SELECT array_agg(g.id) AS ids, min(g.id) AS first, max(g.id) AS last
  FROM ml_rag.keyword_gone AS g WHERE g.store = i.store
) AS g
CROSS JOIN LATERAL (
  SELECT p.term, ml_rag._live_rows(p.postings, r.gone,
    CASE WHEN g.last >= r.first_id AND g.first <= r.last_id THEN r.ids END, r.first_id, g.ids) AS n
  FROM ml_rag.keyword_posting AS p JOIN ml_rag.keyword_run AS r ON r.run = p.run
  WHERE p.store = i.store
    AND p.term IN (SELECT unnest(nullif(current_setting('ml_rag.keyword_terms', true), '')::text[]) COLLATE "C")
  UNION ALL
  SELECT t.key COLLATE "C", 1
  FROM ml_rag.keyword_new AS n CROSS JOIN LATERAL jsonb_object_keys(n.tokens) AS t (key)
  WHERE n.store = i.store
    AND t.key IN (SELECT unnest(nullif(current_setting('ml_rag.keyword_terms', true), '')::text[]))
    AND NOT EXISTS (SELECT FROM ml_rag.keyword_gone AS x WHERE x.store = i.store AND x.id = n.id)
) AS h
WHERE i.statistics = 'all' OR NOT i.secured
GROUP BY i.store, h.term;
COMMENT ON VIEW ml_rag.keyword_term IS
'how many rows hold each of the terms in ml_rag.keyword_terms (a text[]), where statistics span the whole table';

-- The owner of a table makes its index; the check is on the caller's own rights.
CREATE VIEW ml_rag.keyword_own_store WITH (security_barrier) AS
SELECT i.* FROM ml_rag.keyword_store AS i
WHERE pg_has_role((SELECT c.relowner FROM pg_class AS c WHERE c.oid = i.store), 'USAGE') WITH CASCADED CHECK OPTION;
CREATE VIEW ml_rag.keyword_own_row WITH (security_barrier) AS
SELECT i.* FROM ml_rag.keyword_row AS i
WHERE pg_has_role((SELECT c.relowner FROM pg_class AS c WHERE c.oid = i.store), 'USAGE') WITH CASCADED CHECK OPTION;
CREATE VIEW ml_rag.keyword_own_new WITH (security_barrier) AS
SELECT i.* FROM ml_rag.keyword_new AS i
WHERE pg_has_role((SELECT c.relowner FROM pg_class AS c WHERE c.oid = i.store), 'USAGE') WITH CASCADED CHECK OPTION;
COMMENT ON VIEW ml_rag.keyword_own_store IS 'keyword indexes of the caller''s own tables, to be made, changed, dropped';
COMMENT ON VIEW ml_rag.keyword_own_row IS 'rows of the keyword indexes of the caller''s own tables';
COMMENT ON VIEW ml_rag.keyword_own_new IS 'rows that wait, of the keyword indexes of the caller''s own tables';

CREATE FUNCTION ml_rag._empty_keywords(store oid) RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: forget all rows of an index; waits for whoever folds it
-- Writes: ml_rag.keyword_row, keyword_new, keyword_gone, keyword_posting, keyword_run
BEGIN
  PERFORM FROM ml_rag.keyword_store AS i WHERE i.store = _empty_keywords.store FOR UPDATE;
  DELETE FROM ml_rag.keyword_row AS r WHERE r.store = _empty_keywords.store;
  DELETE FROM ml_rag.keyword_new AS r WHERE r.store = _empty_keywords.store;
  DELETE FROM ml_rag.keyword_gone AS r WHERE r.store = _empty_keywords.store;
  DELETE FROM ml_rag.keyword_posting AS r WHERE r.store = _empty_keywords.store;
  DELETE FROM ml_rag.keyword_run AS r WHERE r.store = _empty_keywords.store;
END
$$;

CREATE FUNCTION ml_rag._forget_keywords() RETURNS trigger
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SECURITY DEFINER
SET search_path FROM CURRENT
AS $$
-- purpose: an index goes with its row in ml_rag.keyword_store  Calls: ml_rag._empty_keywords
BEGIN
  -- nobody but the owner may make triggers of it (90_privileges); on another table OLD.store could be anything
  IF TG_RELID = 'ml_rag.keyword_store'::regclass THEN
    PERFORM ml_rag._empty_keywords(OLD.store);
  END IF;
  RETURN NULL;
END
$$;
CREATE TRIGGER forget AFTER DELETE ON ml_rag.keyword_store
FOR EACH ROW EXECUTE FUNCTION ml_rag._forget_keywords();

CREATE FUNCTION ml_rag._drop_keywords() RETURNS event_trigger
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SECURITY DEFINER
SET search_path FROM CURRENT
AS $$
-- purpose: an index goes with its table  Writes: ml_rag.keyword_store
BEGIN
  DELETE FROM ml_rag.keyword_store AS i USING pg_event_trigger_dropped_objects() AS d
  WHERE d.classid = 'pg_class'::regclass AND d.objsubid = 0 AND i.store = d.objid;
END
$$;
CREATE EVENT TRIGGER ml_rag_drop_keywords ON sql_drop WHEN TAG IN ('DROP TABLE', 'DROP SCHEMA', 'DROP OWNED',
  'DROP EXTENSION', 'DROP TYPE', 'DROP SERVER') EXECUTE FUNCTION ml_rag._drop_keywords();

-- 10_discover.sql

-- 10_discover: which relations are vector stores.

CREATE FUNCTION ml_rag._is_harmless(relation regclass) RETURNS boolean
LANGUAGE plpgsql STABLE PARALLEL RESTRICTED
SET search_path FROM CURRENT
AS $$
-- purpose: whether reading a relation that the caller did not name can run code of somebody the caller need not trust
-- A view, a policy or a cast of a column's type runs its functions with the rights of whoever reads, so a role with a
-- schema of its own could plant a "vector store" that works for it as soon as a superuser asks a question.
-- Reads: the catalog. Policies count as harmless where they use nothing but built-in functions and operators.
BEGIN
  RETURN EXISTS (
    SELECT FROM pg_class AS c JOIN pg_roles AS o ON o.oid = c.relowner
    WHERE c.oid = relation AND (
      o.rolsuper OR o.rolname = current_user
      OR o.oid = (SELECT d.datdba FROM pg_database AS d WHERE d.datname = current_database())
      OR NOT (SELECT r.rolsuper FROM pg_roles AS r WHERE r.rolname = current_user) AND pg_has_role(o.oid, 'MEMBER')
      OR c.relkind IN ('r', 'p', 'm')
        AND NOT EXISTS (
          SELECT FROM pg_policy AS p JOIN pg_depend AS d ON d.classid = 'pg_policy'::regclass AND d.objid = p.oid
          WHERE p.polrelid = c.oid AND (d.refclassid IN ('pg_proc'::regclass, 'pg_operator'::regclass)
            OR d.refclassid = 'pg_class'::regclass AND d.refobjid <> c.oid))
        AND NOT EXISTS (
          SELECT FROM pg_attribute AS a JOIN pg_type AS t ON t.oid = a.atttypid
          WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
            AND t.typnamespace <> 'pg_catalog'::regnamespace
            AND t.oid NOT IN ('vector'::regtype, 'halfvec'::regtype, 'sparsevec'::regtype))));
END
$$;

CREATE FUNCTION ml_rag.discover(
  vector_store text[] DEFAULT NULL,
  exclude_vector_store text[] DEFAULT NULL,
  schema text[] DEFAULT NULL,
  vector_store_columns jsonb DEFAULT NULL,
  embed_model_id text DEFAULT NULL,
  unmarked boolean DEFAULT false
) RETURNS SETOF ml_rag.store
LANGUAGE plpgsql STABLE PARALLEL RESTRICTED ROWS 10
SET search_path FROM CURRENT
AS $$
-- purpose: the stage: the relations the caller may search
-- Calls: ml_rag._is_harmless
-- Reads: the catalog. It starts from pg_depend, where every column of type vector is one index entry away, and goes on
-- by index look-ups (OFFSET 0 keeps the planner from joining whole catalogs instead), so the cost grows with the vector
-- columns of the database and not with its tables. PL/pgSQL, because it keeps the plan for the session.
#variable_conflict use_column
BEGIN
RETURN QUERY
WITH logical AS MATERIALIZED (
  SELECT coalesce($4 ->> 'segment_embedding', 'segment_embedding')::name AS segment_embedding,
         coalesce($4 ->> 'segment', 'segment')::name AS segment,
         coalesce($4 ->> 'document_name', 'document_name')::name AS document_name,
         coalesce($4 ->> 'document_id', 'document_id')::name AS document_id,
         coalesce($4 ->> 'segment_number', 'segment_number')::name AS segment_number,
         coalesce($4 ->> 'metadata', 'metadata')::name AS metadata
), marked AS MATERIALIZED (
  SELECT embedding.*, relation.*,
    (SELECT substring(substring(m.description FROM 'GENAI_OPTIONS=([^ ]*)') FROM 'EMBED_MODEL_ID=([^,;]+)')
     FROM pg_description AS m
     WHERE m.objoid = d.objid AND m.classoid = 'pg_class'::regclass AND m.objsubid = d.objsubid) AS embed_model_id
  FROM pg_depend AS d
  CROSS JOIN logical
  CROSS JOIN LATERAL (
    SELECT a.attname, a.attnum, a.atttypid, a.atttypmod FROM pg_attribute AS a
    WHERE a.attrelid = d.objid AND a.attnum = d.objsubid AND a.atttypid = d.refobjid AND NOT a.attisdropped OFFSET 0
  ) AS embedding
  CROSS JOIN LATERAL (
    SELECT c.oid AS relid, n.nspname,
      ARRAY[concat(n.nspname, '.', c.relname), c.relname, format('%I.%I', n.nspname, c.relname),
            quote_ident(c.relname)] AS names,
      -- quoted where two pairs of schema and table could read the same
      CASE WHEN strpos(n.nspname, '.') = 0 THEN concat(n.nspname, '.', c.relname)
           ELSE format('%I.%I', n.nspname, c.relname) END AS vector_store
    FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
    -- relispopulated: a materialized view without data cannot be read
    WHERE c.oid = d.objid AND c.relkind IN ('r', 'p', 'f', 'v', 'm') AND c.relispopulated
      AND has_schema_privilege(n.oid, 'USAGE')
      AND NOT pg_is_other_temp_schema(n.oid) OFFSET 0
  ) AS relation
  WHERE d.refclassid = 'pg_type'::regclass AND d.refobjid IN ('vector'::regtype, 'halfvec'::regtype)
    AND d.refobjsubid = 0 AND d.classid = 'pg_class'::regclass AND d.objsubid > 0
    AND embedding.attname = logical.segment_embedding
    -- here, as what follows costs more: comments and columns only of those that were asked for
    AND ($1 IS NULL OR $1 && relation.names)
    AND ($2 IS NULL OR NOT $2 && relation.names)
    AND ($3 IS NULL OR relation.nspname = ANY ($3))
)
SELECT m.vector_store, m.relid::regclass, m.embed_model_id,
  m.attname, c.segment::name, c.document_name::name, c.document_id::name, c.segment_number::name, c.metadata::name,
  CASE m.atttypid WHEN 'vector'::regtype THEN 'vector' ELSE 'halfvec' END, nullif(m.atttypmod, -1),
  format_type(c.document_id_type, NULL), format_type(c.segment_number_type, NULL)
FROM marked AS m
CROSS JOIN logical
CROSS JOIN LATERAL (
  SELECT min(a.attname::text) FILTER (WHERE a.attname = logical.segment) AS segment,
         min(a.attname::text) FILTER (WHERE a.attname = logical.document_name) AS document_name,
         min(a.attname::text) FILTER (WHERE a.attname = logical.document_id) AS document_id,
         min(a.atttypid) FILTER (WHERE a.attname = logical.document_id) AS document_id_type,
         min(a.attname::text) FILTER (WHERE a.attname = logical.segment_number
           AND a.atttypid IN ('int2'::regtype, 'int4'::regtype, 'int8'::regtype)) AS segment_number,
         min(a.atttypid) FILTER (WHERE a.attname = logical.segment_number) AS segment_number_type,
         min(a.attname::text) FILTER (WHERE a.attname = logical.metadata) AS metadata,
         coalesce(bool_or(a.attnum = m.attnum), false) AS embedding_selectable
  FROM pg_attribute AS a
  WHERE a.attrelid = m.relid AND NOT a.attisdropped AND has_column_privilege(m.relid, a.attnum, 'SELECT')
    AND a.attname = ANY (ARRAY[logical.segment, logical.document_name, logical.document_id, logical.segment_number,
                               logical.metadata, logical.segment_embedding])
) AS c
WHERE (m.embed_model_id IS NOT NULL OR $6 AND $1 IS NOT NULL)
  AND ($5 IS NULL OR m.embed_model_id = $5 OR m.embed_model_id IS NULL)
  AND ($1 IS NOT NULL OR ml_rag._is_harmless(m.relid))
  AND c.segment IS NOT NULL AND c.embedding_selectable
  -- a column that was named is also a condition
  AND (NOT coalesce($4 ? 'document_name', false) OR c.document_name IS NOT NULL)
  AND (NOT coalesce($4 ? 'document_id', false) OR c.document_id IS NOT NULL)
  AND (NOT coalesce($4 ? 'segment_number', false) OR c.segment_number IS NOT NULL)
  AND (NOT coalesce($4 ? 'metadata', false) OR c.metadata IS NOT NULL)
ORDER BY m.vector_store COLLATE "C";
END
$$;
COMMENT ON FUNCTION ml_rag.discover(text[], text[], text[], jsonb, text, boolean) IS
$$the vector stores the caller may search
vector_store, exclude_vector_store: names, "schema.table" or "table". schema: names of schemas. vector_store_columns:
logical to real column names. embed_model_id: only stores of that model. unmarked: also relations that are named in
vector_store and carry no marker comment.
A vector store is a relation with the mapped columns, a vector or halfvec column whose comment holds
GENAI_OPTIONS=EMBED_MODEL_ID=<model id>, and SELECT granted to the caller. Views and foreign tables, and tables whose
policies or column types can run code, of a role that is neither a superuser nor the owner of the database nor one the
caller is a member of, must be named in vector_store: reading them runs that role's code with the caller's rights.$$;

CREATE FUNCTION ml_rag._why_no_store(name text, options jsonb, OUT reason text, OUT hint text)
LANGUAGE plpgsql STABLE PARALLEL RESTRICTED
SET search_path FROM CURRENT
AS $$
-- purpose: why a relation that a call named is none that it can search; options are parsed ones
-- Reads: the catalog. Of a relation in a schema that the caller may not use nothing is told, not even that it exists.
DECLARE
  _columns jsonb := options -> 'vector_store_columns';
  _embedding text := coalesce(_columns ->> 'segment_embedding', 'segment_embedding');
  _wanted text[] := ARRAY(SELECT v.value FROM jsonb_each_text(_columns) AS v UNION SELECT _embedding
                          UNION SELECT coalesce(_columns ->> 'segment', 'segment'));
  _relation record;
  _column text;
  _type text;
  _comment text;
  _model text;
BEGIN
  SELECT c.oid, c.relkind, c.relispopulated, n.nspname, format('%I.%I', n.nspname, c.relname) AS full_name,
    ARRAY[concat(n.nspname, '.', c.relname), c.relname, format('%I.%I', n.nspname, c.relname),
          quote_ident(c.relname)] AS names
  INTO _relation
  FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
  WHERE c.relkind IN ('r', 'p', 'f', 'v', 'm') AND NOT pg_is_other_temp_schema(n.oid)
    AND has_schema_privilege(n.oid, 'USAGE')
    AND _why_no_store.name IN (concat(n.nspname, '.', c.relname), c.relname, format('%I.%I', n.nspname, c.relname),
                               quote_ident(c.relname))
  ORDER BY options -> 'schema' ? n.nspname DESC NULLS LAST, n.nspname LIMIT 1;
  IF _relation.oid IS NULL THEN
    reason := 'There is no table or view of that name in a schema that the caller may use.';
    hint := 'A name is "schema.table" or "table", as SELECT vector_store FROM ml_rag.discover() lists them.';
    RETURN;
  ELSIF ml_rag._texts(options -> 'exclude_vector_store') && _relation.names THEN
    reason := 'It stands in "exclude_vector_store" too.';
    RETURN;
  ELSIF NOT options -> 'schema' ? _relation.nspname THEN
    reason := format('It is in schema %I, which "schema" does not name.', _relation.nspname);
    RETURN;
  ELSIF NOT _relation.relispopulated THEN
    reason := 'It is a materialized view without data.';
    hint := format('REFRESH MATERIALIZED VIEW %s;', _relation.full_name);
    RETURN;
  END IF;
  SELECT e.column_name INTO _column FROM unnest(_wanted) AS e (column_name)
  WHERE NOT EXISTS (SELECT FROM pg_attribute AS a
                    WHERE a.attrelid = _relation.oid AND a.attname = e.column_name AND NOT a.attisdropped)
  ORDER BY 1 LIMIT 1;
  IF _column IS NOT NULL THEN
    reason := format('It has no column %I.', _column);
    hint := 'Map the columns it has with "vector_store_columns".';
    RETURN;
  END IF;
  SELECT CASE WHEN a.atttypid NOT IN ('vector'::regtype, 'halfvec'::regtype) THEN format_type(a.atttypid, NULL) END,
    col_description(a.attrelid, a.attnum)
  INTO _type, _comment
  FROM pg_attribute AS a WHERE a.attrelid = _relation.oid AND a.attname = _embedding;
  IF _type IS NOT NULL THEN
    reason := format('Column %I is of type %s, not vector or halfvec.', _embedding, _type);
    RETURN;
  END IF;
  SELECT string_agg(quote_ident(e.column_name), ', ' ORDER BY e.column_name) INTO _column
  FROM unnest(_wanted) AS e (column_name)
  WHERE NOT has_column_privilege(_relation.oid, e.column_name, 'SELECT');
  IF _column IS NOT NULL THEN
    reason := format('The caller may not SELECT %s.', _column);
    hint := format('Ask its owner for GRANT SELECT ON %s.', _relation.full_name);
    RETURN;
  END IF;
  _model := substring(substring(_comment FROM 'GENAI_OPTIONS=([^ ]*)') FROM 'EMBED_MODEL_ID=([^,;]+)');
  IF _model IS NULL THEN
    reason := format('The comment of its column %I does not say which model its vectors are of.', _embedding);
    hint := format('COMMENT ON COLUMN %s.%I IS ''GENAI_OPTIONS=EMBED_MODEL_ID=…''; its owner may.',
      _relation.full_name, _embedding);
  ELSIF _model <> options ->> 'embed_model_id' THEN
    reason := format('It holds vectors of model %s, and the call is for %s.', _model, options ->> 'embed_model_id');
    hint := 'Leave "embed_model_id" out, or name stores of one model.';
  ELSE
    -- the checks above are those of ml_rag.discover one by one; where they pass it has an integer-less segment_number
    reason := 'A column that "vector_store_columns" names has the wrong type.';
  END IF;
END
$$;

CREATE FUNCTION ml_rag._discover(options jsonb) RETURNS ml_rag.store[]
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: discovery for ml_rag: which model counts, warnings for names that led nowhere; options are parsed ones
-- Calls: ml_rag.discover, ml_rag._why_no_store, ml_rag._get_setting, ml_rag._needs_embedding
DECLARE
  _names text[] := ml_rag._texts($1 -> 'vector_store');
  _model text := $1 ->> 'embed_model_id';
  _stores ml_rag.store[];
  _models text[];
  _name text;
  _why record;
BEGIN
  _stores := ARRAY(SELECT s FROM ml_rag.discover(
    _names, ml_rag._texts($1 -> 'exclude_vector_store'), ml_rag._texts($1 -> 'schema'), $1 -> 'vector_store_columns',
    CASE WHEN _model IS NULL AND _names IS NULL AND ml_rag._needs_embedding($1)
         THEN ml_rag._get_setting('embed_model_id') ELSE _model END,
    $1 ? 'vector_store_columns' AND $1 ?| '{query_embedding,embed_model_id}') AS s);
  -- one name and one store: nothing to compare
  IF _names IS NOT NULL AND (cardinality(_names) <> 1 OR cardinality(_stores) <> 1) THEN
    FOREACH _name IN ARRAY _names LOOP
      IF NOT EXISTS (
        SELECT FROM unnest(_stores) AS s JOIN pg_class AS c ON c.oid = s.relation
        JOIN pg_namespace AS n ON n.oid = c.relnamespace
        WHERE _name IN (concat(n.nspname, '.', c.relname), c.relname, format('%I.%I', n.nspname, c.relname), quote_ident(c.relname)))
      THEN
        _why := ml_rag._why_no_store(_name, $1);
        RAISE WARNING USING ERRCODE = '01000',
          MESSAGE = format('"%s" is no vector store that this call can search; ignored', left(_name, 200)),
          DETAIL = _why.reason,
          HINT = coalesce(_why.hint, 'SELECT * FROM ml_rag.discover() lists what can be searched.');
      END IF;
    END LOOP;
    _models := ARRAY(SELECT DISTINCT s.embed_model_id FROM unnest(_stores) AS s
                     WHERE s.embed_model_id IS NOT NULL ORDER BY 1);
    IF _model IS NULL AND cardinality(_models) > 1 AND ml_rag._needs_embedding($1) THEN
      RAISE EXCEPTION USING ERRCODE = '22023',
        MESSAGE = 'the vector stores named were made with different embedding models',
        DETAIL = format('Models: %s.', array_to_string(_models, ', ')),
        HINT = 'Name one of the models in "embed_model_id", or stores of one model in "vector_store".';
    END IF;
  END IF;
  RETURN _stores;
END
$$;

-- 14_condition.sql

-- 14_condition: option filters as SQL.
--
-- ml_rag._filter_tree checks it and brings it into one form, whatever the store; ml_rag._filter_node makes SQL of that
-- for one store. No value and no key of the caller ever becomes SQL text: values and JSON paths stand in $3 (a text[]),
-- and the columns named are those the catalog has.

CREATE FUNCTION ml_rag._filter_terms(key text, value jsonb) RETURNS jsonb
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$
-- purpose: one key of filters, with its value or operators, as an array of conditions {key, operator, values} that all
-- must hold. Few operators are left: eq, ne, nin and exists become in, those that deny inside {"not": …}; null among
-- the values of in stands for a row without a value.  Calls: ml_rag._bad_option, ml_rag._distance_of_words
DECLARE
  _known text[] := '{eq,ne,in,nin,lt,lte,gt,gte,between,like,ilike,exists}';
  _operators jsonb := CASE jsonb_typeof(value) WHEN 'object' THEN value
                      WHEN 'array' THEN jsonb_build_object('in', value) ELSE jsonb_build_object('eq', value) END;
  _terms jsonb := '[]';
  _term jsonb;
  _operator text;
  _value jsonb;
  _kind text;
  _allowed text;
  _nearest text;
BEGIN
  IF _operators = '{}' THEN
    PERFORM ml_rag._bad_option('filters', jsonb_build_object(key, value), 'a value, a list or an object of operators');
  ELSIF key LIKE '/%' AND key ~ '~(?![01])' THEN
    PERFORM ml_rag._bad_option('filters', to_jsonb(key), 'a path, in which ~1 stands for a slash and ~0 for a tilde');
  END IF;
  FOR _operator, _value IN SELECT o.key, o.value FROM jsonb_each(_operators) AS o LOOP
    _kind := jsonb_typeof(_value);
    _allowed := CASE
      WHEN _operator IN ('eq', 'ne') THEN
        CASE WHEN _kind IN ('object', 'array') THEN 'a text, a number, true, false or null' END
      WHEN _operator IN ('in', 'nin') THEN
        CASE WHEN _kind <> 'array'
               OR jsonb_path_exists(_value, 'strict $[*] ? (@.type() == "object" || @.type() == "array")')
             THEN 'a list of texts, numbers, true, false or null' END
      WHEN _operator IN ('lt', 'lte', 'gt', 'gte') THEN
        CASE WHEN _kind NOT IN ('number', 'string') THEN 'a number or a text' END
      WHEN _operator = 'between' THEN
        CASE WHEN _kind <> 'array' OR jsonb_array_length(_value) <> 2
               OR jsonb_typeof(_value -> 0) <> jsonb_typeof(_value -> 1)
               OR jsonb_typeof(_value -> 0) NOT IN ('number', 'string')
             THEN 'the lowest and the highest value, two numbers or two texts' END
      WHEN _operator IN ('like', 'ilike') THEN
        CASE WHEN _kind <> 'string' THEN 'a pattern with % and _'
             -- an odd run of them at the end: the last one has nothing to escape
             WHEN length(substring(_value #>> '{}' FROM '\\*$')) % 2 = 1
             THEN 'a pattern that does not end within an escape' END
      WHEN _operator = 'exists' THEN CASE WHEN _kind <> 'boolean' THEN 'true or false' END
      ELSE 'unknown' END;
    IF _allowed = 'unknown' THEN
      SELECT o INTO _nearest FROM unnest(_known) AS o, ml_rag._distance_of_words(lower(_operator), o) AS d
      WHERE d <= greatest(1, length(o) / 3) ORDER BY d, o LIMIT 1;
      RAISE EXCEPTION USING ERRCODE = '22023',
        MESSAGE = format('unknown operator "%s" in option "filters"', left(_operator, 100)),
        DETAIL = format('Under the key "%s"; operators: %s.', left(key, 100), array_to_string(_known, ', ')),
        HINT = CASE WHEN _nearest IS NULL THEN 'A key inside an object is written as a path: {"/address/city": "Rome"}.'
                    ELSE format('Did you mean "%s"?', _nearest) END;
    ELSIF _allowed IS NOT NULL THEN
      PERFORM ml_rag._bad_option('filters', jsonb_build_object(key, jsonb_build_object(_operator, _value)),
        format('%s for "%s"', _allowed, _operator));
    END IF;
    _term := jsonb_build_object('key', key) || CASE
      WHEN _operator IN ('eq', 'ne') THEN jsonb_build_object('operator', 'in', 'values', jsonb_build_array(_value))
      WHEN _operator IN ('in', 'nin') THEN jsonb_build_object('operator', 'in', 'values', _value)
      WHEN _operator = 'exists' THEN '{"operator": "in", "values": [null]}'
      WHEN _operator = 'between' THEN jsonb_build_object('operator', _operator, 'values', _value)
      ELSE jsonb_build_object('operator', _operator, 'values', jsonb_build_array(_value)) END;
    IF _operator IN ('ne', 'nin') OR _operator = 'exists' AND _value = 'true' THEN
      _term := jsonb_build_object('not', _term);
    END IF;
    _terms := _terms || jsonb_build_array(_term);
  END LOOP;
  RETURN _terms;
END
$$;

CREATE FUNCTION ml_rag._filter_tree(filters jsonb, level integer DEFAULT 1) RETURNS jsonb
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$
-- purpose: check option filters, whatever the stores, and bring it into one form: {"and": […]}, {"or": […]},
-- {"not": …} and the conditions of ml_rag._filter_terms  Calls: itself, ml_rag._filter_terms, ml_rag._bad_option
DECLARE
  _parts jsonb := '[]';
  _key text;
  _value jsonb;
BEGIN
  IF level > 8 THEN
    PERFORM ml_rag._bad_option('filters', filters, 'at most 8 levels of "and", "or" and "not"');
  ELSIF jsonb_typeof(filters) <> 'object' THEN
    PERFORM ml_rag._bad_option('filters', filters, 'an object of conditions');
  ELSIF level = 1 AND (
    -- all there is, then the values alone; nothing that is allowed lies deeper
    (SELECT count(*) > 20000 FROM jsonb_path_query(filters, 'strict $.**{0 to 20}'))
    OR (SELECT count(*) > 10000
        FROM jsonb_path_query(filters, 'strict $.**{0 to 20} ? (@.type() != "object" && @.type() != "array")'))) THEN
    PERFORM ml_rag._bad_option('filters', filters, 'at most 10000 values');
  END IF;
  FOR _key, _value IN SELECT e.key, e.value FROM jsonb_each(filters) AS e LOOP
    IF _key IN ('and', 'or') THEN
      IF jsonb_typeof(_value) <> 'array' THEN
        PERFORM ml_rag._bad_option('filters', jsonb_build_object(_key, _value), 'an array of objects',
          format('The key of that name is written "/%s".', _key));
      END IF;
      _parts := _parts || jsonb_build_array(jsonb_build_object(_key, (
        SELECT coalesce(jsonb_agg(ml_rag._filter_tree(m, level + 1)), '[]') FROM jsonb_array_elements(_value) AS m)));
    ELSIF _key = 'not' THEN
      _parts := _parts || jsonb_build_array(jsonb_build_object('not', ml_rag._filter_tree(_value, level + 1)));
    ELSE
      _parts := _parts || ml_rag._filter_terms(_key, _value);
    END IF;
  END LOOP;
  _parts := jsonb_build_object('and', _parts);
  IF level = 1 AND (
    SELECT count(*) > 1000
    FROM jsonb_path_query(_parts, 'strict $.** ? (@.type() == "object" && exists (@.operator))')) THEN
    PERFORM ml_rag._bad_option('filters', filters, 'at most 1000 conditions');
  END IF;
  RETURN _parts;
END
$$;

CREATE FUNCTION ml_rag._as_jsonb(document json) RETURNS jsonb
LANGUAGE plpgsql IMMUTABLE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: the metadata of a row where the column is json: null where jsonb cannot hold it (\u0000, 1e999999), since
-- one such row must not break the search of all the others
BEGIN
  RETURN document::jsonb;
EXCEPTION WHEN data_exception THEN
  RETURN NULL;
END
$$;

CREATE FUNCTION ml_rag._base_type(type oid) RETURNS regtype
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$
-- purpose: what a type is below its domains  Reads: the catalog
DECLARE
  _type oid := type;
  _base oid;
BEGIN
  LOOP
    SELECT t.typbasetype INTO _base FROM pg_type AS t WHERE t.oid = _type AND t.typtype = 'd';
    IF NOT FOUND THEN
      RETURN _type;
    END IF;
    _type := _base;
  END LOOP;
END
$$;

CREATE FUNCTION ml_rag._filter_json(
  target text, path text, operator text, given jsonb, INOUT arguments text[], OUT condition text
)
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$
-- purpose: a condition of filters on a JSON value: target is SQL of type jsonb, path the JSON path of the value in it
-- JSON paths compare numbers with numbers and texts with texts (by code point), look into arrays, and never fail: a
-- value of another type does not match. Values stand in the path, the path in $3, and a GIN index on the target serves
-- `@?`. The type is asked for because arrays would be opened twice, once for the filter and once for the comparison.
DECLARE
  _comparison text := CASE operator WHEN 'lt' THEN '<' WHEN 'lte' THEN '<=' WHEN 'gt' THEN '>' WHEN 'gte' THEN '>=' END;
  _present jsonb := jsonb_path_query_array(given, 'strict $[*] ? (@ != null)');
  _first integer := cardinality(arguments) + 1;
  _test text;
BEGIN
  IF operator IN ('like', 'ilike') THEN
    arguments := arguments || ARRAY[path || ' ? (@.type() == "string")', given ->> 0];
    condition := format('EXISTS (SELECT FROM pg_catalog.jsonb_path_query(%s, $3[%s]::pg_catalog.jsonpath) AS e (v) '
      'WHERE (e.v OPERATOR(pg_catalog.#>>) ''{}'') OPERATOR(pg_catalog.%s) $3[%s])',
      target, _first, CASE operator WHEN 'like' THEN '~~' ELSE '~~*' END, _first + 1);
    RETURN;
  END IF;
  IF jsonb_array_length(_present) > 16 THEN
    -- a hashed search instead of as many comparisons
    arguments := arguments || (path || ' ? (@.type() != "array")')
      || ARRAY(SELECT v::text FROM jsonb_array_elements(_present) AS v);
    condition := format('EXISTS (SELECT FROM pg_catalog.jsonb_path_query(%s, $3[%s]::pg_catalog.jsonpath) AS e (v) '
      'WHERE e.v OPERATOR(pg_catalog.=) ANY ($3[%s:%s]::pg_catalog.jsonb[]))',
      target, _first, _first + 1, cardinality(arguments));
  ELSIF jsonb_array_length(_present) > 0 THEN
    _test := CASE operator
      WHEN 'in' THEN (SELECT string_agg(concat('@ == ', v), ' || ') FROM jsonb_array_elements(_present) AS v)
      WHEN 'between' THEN format('@ >= %s && @ <= %s', _present -> 0, _present -> 1)
      ELSE format('@ %s %s', _comparison, _present -> 0) END;
    arguments := arguments || format('%s ? (@.type() != "array" && (%s))', path, _test);
    condition := format('%s OPERATOR(pg_catalog.@?) $3[%s]::pg_catalog.jsonpath', target, _first);
  ELSE
    condition := 'false';
  END IF;
  IF given @> '[null]' THEN
    arguments := arguments || (path || '.type() ? (@ != "null")');
    condition := format('%s OR (%s OPERATOR(pg_catalog.@?) $3[%s]::pg_catalog.jsonpath) IS NOT TRUE', condition, target,
      cardinality(arguments));
  END IF;
END
$$;

CREATE FUNCTION ml_rag._filter_column(
  key text, target text, type regtype, operator text, given jsonb, INOUT arguments text[], OUT condition text
)
LANGUAGE plpgsql STABLE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: a condition of filters on a column (target, a column reference) of a type of pg_catalog, or an enum
-- Null condition: columns of that type cannot be filtered. Operators and casts are those of pg_catalog, by name: a cast
-- or an operator that somebody made for a type of theirs never runs. Errors: 22023 a value that the type does not take.
DECLARE
  _values text[] := ARRAY(SELECT v #>> '{}' FROM jsonb_array_elements(given) AS v WHERE v <> 'null');
  _first integer := cardinality(arguments) + 1;
  _last integer := cardinality(arguments) + cardinality(_values);
  _type name;
  _is_array boolean;
  _element text := target;
  _cast text;
  _comparison text := CASE operator WHEN 'lt' THEN '<' WHEN 'lte' THEN '<=' WHEN 'gt' THEN '>' WHEN 'gte' THEN '>='
                                    WHEN 'like' THEN '~~' WHEN 'ilike' THEN '~~*' END;
BEGIN
  IF operator = 'in' AND cardinality(_values) = 0 THEN
    condition := CASE WHEN given @> '[null]' THEN format('%s IS NULL', target) ELSE 'false' END;
    RETURN;
  END IF;
  SELECT coalesce(e.typname, t.typname), e.oid IS NOT NULL INTO _type, _is_array
  FROM pg_type AS t LEFT JOIN pg_type AS e ON e.oid = t.typelem AND e.typarray = t.oid
  WHERE t.oid = type AND (t.typnamespace = 'pg_catalog'::regnamespace OR t.typtype = 'e');
  IF (SELECT t.typtype = 'e' FROM pg_type AS t WHERE t.oid = type) THEN
    -- by label, which concat writes without any cast: casts of the type could be anybody's functions
    target := format('CASE WHEN %s IS NOT NULL THEN pg_catalog.concat(%1$s) END', target);
    _element := target;
    IF operator IN ('lt', 'lte', 'gt', 'gte', 'between') THEN
      RETURN;
    END IF;
    _type := 'text';
  ELSIF _type IS NULL OR _type NOT IN ('bool', 'int2', 'int4', 'int8', 'numeric', 'float4', 'float8', 'text', 'varchar',
    'bpchar', 'name', 'date', 'time', 'timetz', 'timestamp', 'timestamptz', 'interval', 'uuid', 'inet', 'cidr') THEN
    RETURN;
  END IF;
  IF operator IN ('like', 'ilike') AND _type NOT IN ('text', 'varchar', 'bpchar', 'name') THEN
    RETURN;
  END IF;
  IF _is_array THEN
    _element := 'e.v';
    _cast := format('pg_catalog.%I', _type);
  ELSIF _type IN ('int2', 'int4', 'int8') THEN
    -- whole numbers as bigint, which the indexes of all three serve; 2002.5 or 1e30 is a number to compare with as well
    _cast := 'pg_catalog.int8';
    IF EXISTS (SELECT FROM unnest(_values) AS v WHERE v !~ '^-?[0-9]{1,18}$') THEN
      _cast := 'pg_catalog.numeric';
      target := target || '::pg_catalog.numeric';
      _element := target;
    END IF;
  ELSE
    _cast := CASE WHEN _type IN ('varchar', 'name') THEN 'pg_catalog.text' WHEN _type = 'cidr' THEN 'pg_catalog.inet'
                  ELSE format('pg_catalog.%I', _type) END;
  END IF;
  IF operator IN ('like', 'ilike') THEN
    _cast := 'pg_catalog.text';
    _element := _element || '::pg_catalog.text COLLATE pg_catalog."default"';
  END IF;
  BEGIN
    EXECUTE format('SELECT $1::%s[]', _cast) USING _values;
  EXCEPTION WHEN data_exception THEN
    PERFORM ml_rag._bad_option('filters', jsonb_build_object(key, given),
      format('values of the column''s type, %s (%s)', type, SQLERRM));
  END;

  arguments := arguments || _values;
  IF operator = 'in' THEN
    condition := CASE
      WHEN _is_array THEN format('%s OPERATOR(pg_catalog.&&) $3[%s:%s]::%s[]', target, _first, _last, _cast)
      WHEN _first = _last THEN format('%s OPERATOR(pg_catalog.=) $3[%s]::%s', target, _first, _cast)
      ELSE format('%s OPERATOR(pg_catalog.=) ANY ($3[%s:%s]::%s[])', target, _first, _last, _cast) END
      || CASE WHEN given @> '[null]' THEN format(' OR %s IS NULL', target) ELSE '' END;
    RETURN;
  END IF;
  condition := CASE operator
    WHEN 'between' THEN format('%1$s OPERATOR(pg_catalog.>=) $3[%2$s]::%4$s '
      'AND %1$s OPERATOR(pg_catalog.<=) $3[%3$s]::%4$s', _element, _first, _last, _cast)
    ELSE format('%s OPERATOR(pg_catalog.%s) $3[%s]::%s', _element, _comparison, _first, _cast) END;
  IF _is_array THEN
    condition := format('EXISTS (SELECT FROM pg_catalog.unnest(%s) AS e (v) WHERE %s)', target, condition);
  END IF;
END
$$;

CREATE FUNCTION ml_rag._filter_node(store ml_rag.store, node jsonb, INOUT arguments text[], OUT condition text)
LANGUAGE plpgsql STABLE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: a node of ml_rag._filter_tree as a condition on the rows t of a store
-- A condition on a missing value is null or false, which is all the same below "and" and "or"; "not" turns what is not
-- true into true, and so is exactly the opposite.
-- Calls: itself, ml_rag._filter_json, ml_rag._filter_column, ml_rag._bad_option  Reads: the catalog
DECLARE
  _key text := node ->> 'key';
  _member jsonb;
  _part text;
  _parts text[] := '{}';
  _column name;
  _type regtype;
  _json regtype;
  _path text;
BEGIN
  IF node ? 'not' THEN
    SELECT n.arguments, n.condition INTO arguments, _part
    FROM ml_rag._filter_node(store, node -> 'not', arguments) AS n;
    condition := format('(%s) IS NOT TRUE', _part);
    RETURN;
  ELSIF _key IS NULL THEN
    FOR _member IN SELECT m FROM jsonb_array_elements(coalesce(node -> 'and', node -> 'or')) AS m LOOP
      SELECT n.arguments, n.condition INTO arguments, _part FROM ml_rag._filter_node(store, _member, arguments) AS n;
      _parts := _parts || format('(%s)', _part);
    END LOOP;
    condition := coalesce(nullif(array_to_string(_parts, CASE WHEN node ? 'and' THEN ' AND ' ELSE ' OR ' END), ''),
      (node ? 'and')::text);
    RETURN;
  END IF;

  IF _key NOT LIKE '/%' THEN
    SELECT a.attname, ml_rag._base_type(a.atttypid) INTO _column, _type FROM pg_attribute AS a
    WHERE a.attrelid = store.relation AND a.attnum > 0 AND NOT a.attisdropped
      AND a.attname = coalesce(CASE _key
        WHEN 'document_name' THEN store.document_name WHEN 'document_id' THEN store.document_id
        WHEN 'segment_number' THEN store.segment_number WHEN 'segment' THEN store.segment
        WHEN 'segment_embedding' THEN store.segment_embedding WHEN 'metadata' THEN store.metadata END::text, _key)
      AND has_column_privilege(store.relation, a.attnum, 'SELECT');
  END IF;
  IF _column IS NOT NULL AND _type NOT IN ('json'::regtype, 'jsonb'::regtype) THEN
    SELECT c.arguments, c.condition INTO arguments, condition FROM ml_rag._filter_column(_key, format('t.%I', _column),
      _type, node ->> 'operator', node -> 'values', arguments) AS c;
    IF condition IS NULL THEN
      RAISE EXCEPTION USING ERRCODE = '22023',
        MESSAGE = format('column "%s" cannot be filtered so', left(_key, 100)),
        DETAIL = format('Column %I of %s is of type %s; the operator is "%s".', _column, store.vector_store, _type,
          node ->> 'operator'),
        HINT = '"like" is for texts, enums have no ranges, and other types of one''s own have nothing but "exists".';
    END IF;
    RETURN;
  END IF;

  -- a value in JSON: of a column of such a type, or of the metadata
  IF _column IS NULL THEN
    SELECT a.attname, ml_rag._base_type(a.atttypid) INTO _column, _type FROM pg_attribute AS a
    WHERE a.attrelid = store.relation AND a.attname = store.metadata AND NOT a.attisdropped;
    _path := CASE WHEN _key LIKE '/%' THEN (
        SELECT '$' || string_agg('.' || to_jsonb(replace(replace(k, '~1', '/'), '~0', '~'))::text, '' ORDER BY i)
        FROM regexp_split_to_table(substr(_key, 2), '/') WITH ORDINALITY AS s (k, i))
      ELSE '$.' || to_jsonb(_key)::text END;
  ELSE
    _path := '$';
  END IF;
  IF _type IS NULL OR _type NOT IN ('json'::regtype, 'jsonb'::regtype) THEN
    RAISE WARNING USING ERRCODE = '01000',
      MESSAGE = format('"%s" has no column "%s" and no metadata; no row of it has a value there', store.vector_store,
        left(_key, 100)),
      HINT = 'Leave the store out with "exclude_vector_store", or filter by something it has.';
    condition := (node ->> 'operator' = 'in' AND node -> 'values' @> '[null]')::text;
    RETURN;
  END IF;
  SELECT j.arguments, j.condition INTO arguments, condition FROM ml_rag._filter_json(
    format(CASE _type WHEN 'jsonb'::regtype THEN 't.%I' ELSE 'ml_rag._as_jsonb(t.%I)' END, _column), _path,
    node ->> 'operator', node -> 'values', arguments) AS j;
END
$$;

CREATE FUNCTION ml_rag.condition(store ml_rag.store, filters jsonb, INOUT arguments text[], OUT condition text)
LANGUAGE plpgsql STABLE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: the stage: option filters as SQL  Calls: ml_rag._filter_tree, ml_rag._filter_node
BEGIN
  SELECT n.arguments, n.condition INTO arguments, condition
  FROM ml_rag._filter_node(store, ml_rag._filter_tree(filters), coalesce(arguments, '{}')) AS n;
END
$$;
COMMENT ON FUNCTION ml_rag.condition(ml_rag.store, jsonb, text[]) IS
$$option filters as a condition on the rows of a store
condition: SQL on the alias t; arguments: what to bind as $3, beginning with those that were given.
filters: {"key": value}, or a list of values (any of them), or {"operator": value}; all conditions of an object must
hold; "and" and "or" take arrays of objects, "not" an object. Operators: eq, ne, in, nin, lt, lte, gt, gte, between
[low, high] (both included), like, ilike, exists (true or false).
A key names the column of that name (document_name, …: the mapped one) where the caller may select it, else a key of
the metadata. One that begins with / is a path into the metadata in the form of a JSON Pointer ("/address/city", ~1 for
/, ~0 for ~), which looks into each element of the arrays on its way.
JSON values: numbers compare with numbers, texts with texts by code point, and a value of another type does not match;
an array matches where one of its elements does. Columns: the value is read as the column's type and compares as that
type does; an array matches where one element does; enums go by label and have no ranges. Null stands for a missing key,
a JSON null or an SQL NULL; exists is its opposite. ne, nin and not hold for every row for which eq, in and the
condition do not, also for those without a value. A store with neither the column nor metadata has none, with a warning.
Errors: 22023 unknown operator, wrong value, a value that the column's type does not take, a column of a type that has
no such operator, more than 8 levels, 1000 conditions or 10000 values.$$;

-- 15_filter.sql

-- 15_filter: which rows of a store count at all: documents, conditions, keywords.

CREATE FUNCTION ml_rag._keyword_collation() RETURNS text
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$
-- purpose: the collation that keywords are looked up by, as SQL: the database's where it knows letters beyond ASCII
-- (that of LC_CTYPE C does not), else Unicode's. Both are deterministic, which regular expressions need, as a column's
-- own may not be.
BEGIN
  RETURN CASE WHEN 'é' COLLATE pg_catalog."default" ~ '[[:alnum:]]' AND lower('É' COLLATE pg_catalog."default") = 'é'
              OR to_regcollation('pg_catalog."und-x-icu"') IS NULL
         THEN 'pg_catalog."default"' ELSE 'pg_catalog."und-x-icu"' END;
END
$$;

CREATE FUNCTION ml_rag._keyword_pattern(keywords text[], "collation" text) RETURNS text
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$
-- purpose: a regular expression that a text with one of the keywords matches: as whole words, in any case, with any
-- white space where the keyword has some, accents composed or combining. collation: SQL, of ml_rag._keyword_collation.
-- A keyword that begins or ends with a letter, a digit or _ must not have another one beside it; scripts written
-- without blanks (Thai, Lao, Burmese, Khmer, and what lies beyond U+2E7F) have no such ends. Cases are spelled out,
-- [aA], because ~* and lower() cost more than the search itself.
DECLARE
  _unbroken text := '\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u2e80-\U0010ffff';
  _border text := format('[^[:alnum:]_\u0300-\u036f]|[%s]', _unbroken);
  _keyword text;
  _form text;
  _pattern text;
  _patterns text[] := '{}';
BEGIN
  FOREACH _keyword IN ARRAY keywords LOOP
    _keyword := regexp_replace(_keyword, '^[\s\u00a0]+|[\s\u00a0]+$', '', 'g');
    FOR _form IN
      SELECT DISTINCT f FROM unnest(CASE WHEN getdatabaseencoding() = 'UTF8'
        THEN ARRAY[_keyword, normalize(_keyword, NFC), normalize(_keyword, NFD)] ELSE ARRAY[_keyword] END) AS f
    LOOP
      EXECUTE format($query$
        SELECT concat(
          CASE WHEN $1 COLLATE %1$s ~ '^[[:alnum:]_\u0300-\u036f]' AND $1 !~ $2 THEN $4 END,
          string_agg(CASE
            WHEN c = ' ' THEN '[\s\u00a0]+'
            WHEN strpos('.^$*+?()[]{}|\', c) > 0 THEN '\' || c
            WHEN c IN ('σ', 'ς', 'Σ') THEN '[σςΣ]'
            WHEN lower(c COLLATE %1$s) <> upper(c COLLATE %1$s) THEN concat('[', c,
              CASE WHEN length(lower(c COLLATE %1$s)) = 1 THEN lower(c COLLATE %1$s) END,
              CASE WHEN length(upper(c COLLATE %1$s)) = 1 THEN upper(c COLLATE %1$s) END, ']')
            ELSE c END, '' ORDER BY i),
          CASE WHEN $1 COLLATE %1$s ~ '[[:alnum:]_\u0300-\u036f]$' AND $1 !~ $3 THEN $5 END)
        FROM string_to_table(regexp_replace($1, '[\s\u00a0]+', ' ', 'g'), NULL) WITH ORDINALITY AS s (c, i)
        $query$, "collation")
      INTO _pattern USING _form, format('^[%s]', _unbroken), format('[%s]$', _unbroken), format('(?:^|%s)', _border),
        format('(?:$|%s)', _border);
      _patterns := _patterns || _pattern;
    END LOOP;
  END LOOP;
  RETURN array_to_string(_patterns, '|');
END
$$;

CREATE FUNCTION ml_rag._check_keywords(name text, keywords jsonb) RETURNS void
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$
-- purpose: what parse_options does not know about the two options of keywords  Calls: ml_rag._bad_option
-- The limits keep the regular expressions of a call within what a session keeps compiled (32).
BEGIN
  IF jsonb_array_length(keywords) > 20 OR EXISTS (
    SELECT FROM jsonb_array_elements_text(keywords) AS k WHERE k !~ '[^\s\u00a0]' OR length(k) > 200) THEN
    PERFORM ml_rag._bad_option(name, keywords, 'at most 20 words or phrases of 1 to 200 characters');
  END IF;
END
$$;

CREATE FUNCTION ml_rag.filter(store ml_rag.store, options jsonb, OUT condition text, OUT arguments text[])
LANGUAGE plpgsql STABLE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: the stage: the options that leave rows out, as a condition that stands before any limit
-- Lists are slices of $3, which the planner folds to constants, so that an index serves them and postgres_fdw ships
-- them.
-- Calls: ml_rag.condition, ml_rag._check_keywords, ml_rag._keyword_collation, ml_rag._keyword_pattern
DECLARE
  _name text := CASE WHEN store.document_name IS NULL THEN quote_literal(store.vector_store)
                     ELSE format('t.%I::text', store.document_name) END;
  _names text[];
  _condition text;
  _collation text;
BEGIN
  condition := '';
  arguments := '{}';
  _names := ml_rag._texts(options -> 'document_name');
  IF _names IS NOT NULL THEN
    condition := format(' AND %s = ANY ($3[1:%s])', _name, cardinality(_names));
    arguments := _names;
  END IF;
  _names := ml_rag._texts(options -> 'exclude_document_name');
  IF _names IS NOT NULL THEN
    condition := condition || format(' AND (%s IS NULL OR %1$s <> ALL ($3[%s:%s]))', _name,
      cardinality(arguments) + 1, cardinality(arguments) + cardinality(_names));
    arguments := arguments || _names;
  END IF;
  IF options ? 'filters' THEN
    SELECT c.arguments, c.condition INTO arguments, _condition
    FROM ml_rag.condition(store, options -> 'filters', arguments) AS c;
    condition := condition || format(' AND (%s)', _condition);
  END IF;
  IF options ?| '{required_keywords,excluded_keywords}' THEN
    _collation := ml_rag._keyword_collation();
    PERFORM ml_rag._check_keywords(o.key, o.value) FROM jsonb_each(options) AS o
    WHERE o.key IN ('required_keywords', 'excluded_keywords');
    FOR _condition IN SELECT k FROM jsonb_array_elements_text(options -> 'required_keywords') AS k LOOP
      arguments := arguments || ml_rag._keyword_pattern(ARRAY[_condition], _collation);
      condition := condition || format(' AND t.%I::text COLLATE %s ~ $3[%s]', store.segment, _collation,
        cardinality(arguments));
    END LOOP;
    _names := ml_rag._texts(options -> 'excluded_keywords');
    IF cardinality(_names) > 0 THEN
      arguments := arguments || ml_rag._keyword_pattern(_names, _collation);
      condition := condition || format(' AND t.%I::text COLLATE %s !~ $3[%s]', store.segment, _collation,
        cardinality(arguments));
    END IF;
  END IF;
END
$$;
COMMENT ON FUNCTION ml_rag.filter(ml_rag.store, jsonb) IS
$$the options that leave rows out, as a condition on the rows of a store
condition: SQL on the alias t, empty or beginning with AND; arguments: what to bind as $3, a text[]. Options:
document_name, exclude_document_name: names of documents. filters: see ml_rag.condition. required_keywords: segments
that lack one of them are left out, excluded_keywords: those that have one. A keyword is a word or a phrase and stands
for whole words, in any case, with any white space between them; in scripts without blanks for itself anywhere.
Errors: 22023, of ml_rag.condition; more than 20 keywords of one option, or one that is blank or has more than 200
characters.$$;

-- 20_embed.sql

-- 20_embed: texts to vectors.

CREATE FUNCTION ml_rag._embed(texts text[], model_id text, input_type text, OUT vectors vector[], OUT error jsonb)
LANGUAGE plpython3u VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
if "ml_rag" not in GD or GD["ml_rag"].VERSION != "0.1.0":
    if error := plpy.execute("SELECT ml_rag._load_backend() AS error")[0]["error"]:
        return None, error
return GD["ml_rag"].embed(plpy, texts, model_id, input_type)
$$;

CREATE FUNCTION ml_rag.embed(query text, model_id text DEFAULT NULL, input_type text DEFAULT 'query') RETURNS vector
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: the stage: one text to its vector
-- Calls: ml_rag._embed, ml_rag._get_setting, ml_rag._raise
DECLARE
  _embedded record;
BEGIN
  IF coalesce(query, '') !~ '\S' THEN
    RAISE EXCEPTION USING ERRCODE = '22023', MESSAGE = 'the text to embed is empty';
  END IF;
  BEGIN
    _embedded := ml_rag._embed(ARRAY[query], coalesce(embed.model_id, ml_rag._get_setting('embed_model_id')),
      embed.input_type);
  EXCEPTION WHEN data_exception THEN
    -- numbers that are none: the backend hands them on as text, and pgvector is the first to read them
    RAISE EXCEPTION USING ERRCODE = '38000', MESSAGE = 'the model server answered nonsense', DETAIL = SQLERRM;
  END;
  IF _embedded.error IS NOT NULL THEN
    PERFORM ml_rag._raise(_embedded.error);
  END IF;
  RETURN _embedded.vectors[1];
END
$$;
COMMENT ON FUNCTION ml_rag.embed(text, text, text) IS
$$embeds one text; the dimensions are those of the model
input_type: query, document or null; some models put a prefix before the one or the other. A text beyond the model's
limit is cut. Errors: 22023 empty text, unknown model or model of another task; 55000;
08006; 53300; 38000.$$;

CREATE FUNCTION ml_rag._vector(value jsonb) RETURNS vector
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$
-- purpose: option query_embedding, an array or the text form of a vector, as a vector
-- Calls: ml_rag._bad_option
BEGIN
  RETURN ($1 #>> '{}')::vector;
EXCEPTION WHEN data_exception OR program_limit_exceeded THEN
  PERFORM ml_rag._bad_option('query_embedding', $1, 'an array of numbers, or the text form of a vector', SQLERRM);
END
$$;

CREATE FUNCTION @extschema@.ml_embed_row(text text, options jsonb DEFAULT NULL) RETURNS vector
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: ml_rag.embed under the name and with the options of the public routines
-- Calls: ml_rag.parse_options, ml_rag.embed
BEGIN
  IF $1 IS NULL THEN
    RETURN NULL;
  END IF;
  RETURN ml_rag.embed($1, ml_rag.parse_options('ml_embed_row', $2) ->> 'embed_model_id', NULL);
END
$$;
COMMENT ON FUNCTION @extschema@.ml_embed_row(text, jsonb) IS
$$embeds one text: ml_embed_row('a text', '{"embed_model_id": "all_minilm_l6_v2"}')
Returns a vector of the model's dimensions, null for null; a text beyond the model's limit is cut. Errors: 22023 empty text, bad
option, unknown model or model of another task; 55000 model not available; 08006 model server; 53300; 38000.$$;

-- 30_search.sql

-- 30_search: the nearest segments over the stores.

CREATE FUNCTION ml_rag._hit_columns(
  store ml_rag.store, distance_metric text, keyword_score text DEFAULT 'NULL::float8',
  OUT distance text, OUT of_row text, OUT of_hit text, OUT place text
)
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$
-- purpose: how a row t of a store becomes an ml_rag.hit, for the statements of both arms: SELECT <of_hit> FROM
-- (SELECT <of_row> FROM store AS t WHERE … ORDER BY … LIMIT $2) AS s, $1 the query vector (its distance is null where
-- that is). distance: from t to $1, what an index can serve: neither rounded nor named. keyword_score: SQL for that
-- column of the hit, over s. place: what settles ties, an ORDER BY list over t (document, then segment).
-- Rounding and naming stand in the outer list, so that the inner query keeps to what postgres_fdw can ship to a shard.
DECLARE
  _name text := CASE WHEN store.document_name IS NULL THEN quote_literal(store.vector_store)
                     ELSE format('t.%I::text', store.document_name) END;
  _id text := CASE WHEN store.document_id IS NULL THEN 'NULL' ELSE format('t.%I', store.document_id) END;
  _has_integer_id boolean := coalesce(store.document_id_type IN ('smallint', 'integer', 'bigint'), false);
  _number text := CASE WHEN store.segment_number IS NULL THEN 'NULL' ELSE format('t.%I', store.segment_number) END;
BEGIN
  distance := format('t.%I %s $1::%s', store.segment_embedding,
    CASE distance_metric WHEN 'COSINE' THEN '<=>' WHEN 'DOT' THEN '<#>' ELSE '<->' END, store.embedding_type);
  of_row := concat(_name, ' AS document_name, ', _id, ' AS document_id, ', _number, '::bigint AS segment_number, ',
    format('t.%I::text', store.segment), ' AS segment, ', distance, ' AS distance, ',
    CASE WHEN store.metadata IS NULL THEN 'NULL::jsonb' ELSE format('to_jsonb(t.%I)', store.metadata) END,
    ' AS metadata');
  of_hit := concat(quote_literal(store.vector_store), '::text, s.document_name, ',
    CASE WHEN _has_integer_id THEN 's.document_id::bigint' ELSE 'NULL::bigint' END, ', ',
    CASE WHEN store.document_id IS NULL THEN 's.document_name' ELSE 's.document_id::text' END,
    ', s.segment_number, s.segment, ',
    -- 1 - inner product: smaller is nearer, and normalised vectors get the cosine distance
    'round((', CASE distance_metric WHEN 'DOT' THEN '1 + ' END, 's.distance)::numeric, 4), s.metadata, ',
    keyword_score, ', NULL::float8, NULL::float8');
  place := concat('(', _name, ') COLLATE "C", ',
    CASE WHEN _has_integer_id THEN _id ELSE format('(%s)::text COLLATE "C"', _id) END, ', (', _number, ')::bigint');
END
$$;

CREATE FUNCTION ml_rag._nearest_statement(
  store ml_rag.store, distance_metric text, condition text DEFAULT '', sort text DEFAULT 'index'
) RETURNS text
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$
-- purpose: the kNN statement of one store: $1 query vector, $2 limit, $3 what the condition of ml_rag.filter refers to
-- Calls: ml_rag._hit_columns, ml_rag._relation_name
-- The ORDER BY … LIMIT stands at one query level with nothing but filters, which is what an index can serve and
-- what postgres_fdw can ship to a shard. sort: index; exact, by an expression that no index has, neither here nor on
-- the shard, whose settings are out of our reach; total, which settles equal distances too, at the cost of rounding
-- each row's.
DECLARE
  _columns record := ml_rag._hit_columns(store, distance_metric);
BEGIN
  RETURN concat(
    'SELECT ', _columns.of_hit, ' FROM (SELECT ', _columns.of_row, ' FROM ', ml_rag._relation_name(store.relation),
    format(' AS t WHERE t.%I IS NOT NULL AND t.%I IS NOT NULL', store.segment_embedding, store.segment), condition,
    ' ORDER BY ', CASE sort
      WHEN 'index' THEN _columns.distance
      WHEN 'exact' THEN format('(%s) + 0', _columns.distance)
      ELSE concat('round((', CASE distance_metric WHEN 'DOT' THEN '1 + ' END, '(', _columns.distance,
        '))::numeric, 4), ', _columns.place)
    END,
    ' LIMIT $2) AS s WHERE s.distance <> ''NaN''');
END
$$;

CREATE FUNCTION ml_rag._run_nearest(statement text, query_embedding vector, n integer, arguments text[])
RETURNS ml_rag.hit[]
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
-- An approximate index goes on until n rows have passed the filters and row-level security.
SET hnsw.iterative_scan = 'relaxed_order'
SET ivfflat.iterative_scan = 'relaxed_order'
AS $$
-- purpose: run a kNN statement  Reads: the store, as the caller
DECLARE
  _hits ml_rag.hit[];
BEGIN
  EXECUTE format('SELECT array_agg(ROW(h.*)::ml_rag.hit) FROM (%s) AS h', statement)
    INTO _hits USING query_embedding, n, arguments;
  RETURN coalesce(_hits, '{}');
END
$$;

CREATE FUNCTION ml_rag._may_fall_short(relation regclass) RETURNS boolean
LANGUAGE sql STABLE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$
-- purpose: whether a scan of the relation can end before it has seen every row: with an approximate index on it or on
-- what lies below it, and who knows what lies below a view or on a shard
SELECT c.relkind = 'v' OR EXISTS (
  SELECT FROM (SELECT c.oid AS relid UNION ALL SELECT p.relid FROM pg_partition_tree(c.oid) AS p WHERE c.relkind = 'p'
               UNION ALL SELECT i.inhrelid FROM pg_inherits AS i WHERE i.inhparent = c.oid) AS part
  JOIN pg_class AS pc ON pc.oid = part.relid
  WHERE pc.relkind = 'f' OR EXISTS (
    SELECT FROM pg_index AS x
    JOIN pg_class AS ic ON ic.oid = x.indexrelid
    JOIN pg_am AS a ON a.oid = ic.relam AND a.amname IN ('hnsw', 'ivfflat')
    WHERE x.indrelid = part.relid))
FROM pg_class AS c WHERE c.oid = relation
$$;

CREATE FUNCTION ml_rag.search(
  stores ml_rag.store[],
  query_embedding vector,
  n integer DEFAULT 3,
  distance_metric text DEFAULT 'COSINE',
  options jsonb DEFAULT NULL,
  skip_other_dimensions boolean DEFAULT false
) RETURNS SETOF ml_rag.hit
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE ROWS 10
SET search_path FROM CURRENT
AS $$
-- purpose: the stage: the n nearest segments of all stores, by (distance, store, document, segment)
-- Calls: ml_rag.filter, ml_rag._nearest_statement, ml_rag._run_nearest, ml_rag._may_fall_short
-- Reads: the stores, as the caller
DECLARE
  -- most calls have no filter: those need not ask store by store
  _filters boolean := coalesce(
    options ?| '{document_name,exclude_document_name,filters,required_keywords,excluded_keywords}', false);
  _condition text := '';
  _arguments text[];
  _store ml_rag.store;
  _hits ml_rag.hit[];
  _all ml_rag.hit[] := '{}';
  _fetch integer;
  _sort text;
BEGIN
  IF n IS NULL OR n < 1 THEN
    RETURN;
  END IF;
  FOREACH _store IN ARRAY coalesce(stores, '{}') LOOP
    IF _store.dimensions <> vector_dims(query_embedding) THEN
      IF skip_other_dimensions AND EXISTS (
        SELECT FROM unnest(stores) AS s WHERE s.dimensions = vector_dims(query_embedding)) THEN
        RAISE WARNING USING ERRCODE = '01000',
          MESSAGE = format('"%s" has other dimensions than the query embedding; ignored', _store.vector_store),
          DETAIL = format('%s against %s.', _store.dimensions, vector_dims(query_embedding)),
          HINT = 'Its marker comment names the wrong model, or leave it out with "exclude_vector_store".';
        CONTINUE;
      END IF;
      RAISE EXCEPTION USING ERRCODE = '22000',
        MESSAGE = 'the query embedding and the vector store differ in dimensions',
        DETAIL = format('The query embedding has %s dimensions, %s.%I has %s.', vector_dims(query_embedding),
          _store.vector_store, _store.segment_embedding, _store.dimensions),
        HINT = 'Name the store''s own model in "embed_model_id", or leave the store out with "exclude_vector_store".';
    END IF;
    IF _filters THEN
      SELECT f.condition, f.arguments INTO _condition, _arguments FROM ml_rag.filter(_store, search.options) AS f;
    END IF;
    -- More than n, to see whether the last place is shared: of equal distances those that come first by name are
    -- wanted, and the index does not know about names. Where very many share it, the rows are sorted by all of it.
    -- Each costs a read of the table, so one is enough, except where the index goes on past what is left out: in a
    -- relaxed order.
    _fetch := n + CASE WHEN _condition = '' THEN 1 ELSE 8 END;
    _sort := 'index';
    LOOP
      _hits := ml_rag._run_nearest(ml_rag._nearest_statement(_store, search.distance_metric, _condition, _sort),
        query_embedding, _fetch, _arguments);
      IF cardinality(_hits) < n AND _sort = 'index' AND ml_rag._may_fall_short(_store.relation) THEN
        _sort := 'exact';
        CONTINUE;
      END IF;
      EXIT WHEN cardinality(_hits) < _fetch OR _sort = 'total'
        OR (SELECT max(h.distance) FROM unnest(_hits) AS h)
           > (SELECT h.distance FROM unnest(_hits) AS h ORDER BY h.distance OFFSET n - 1 LIMIT 1);
      IF _fetch > 700 THEN
        _sort := 'total';
        _fetch := n;
      ELSE
        _fetch := _fetch * 4;
      END IF;
    END LOOP;
    _all := _all || _hits;
  END LOOP;
  RETURN QUERY
    SELECT h.* FROM unnest(_all) AS h
    ORDER BY h.distance, h.vector_store COLLATE "C", h.document_name COLLATE "C", h.document_id,
      h.document_key COLLATE "C", h.segment_number
    LIMIT n;
END
$$;
COMMENT ON FUNCTION ml_rag.search(ml_rag.store[], vector, integer, text, jsonb, boolean) IS
$$the n nearest segments of the stores, nearest first
distance_metric: COSINE, DOT (1 - inner product) or EUCLIDEAN; distances are rounded to 4 decimals. Equal distances go
by store, document and segment. options: those of ml_rag that leave rows out, see ml_rag.filter; they apply before the
limit. Rows whose segment or embedding is null are skipped. Errors: 22000 different dimensions; with
skip_other_dimensions a warning instead, where another store has the right ones; those of ml_rag.filter.$$;

-- 32_keyword.sql

-- 32_keyword: the best segments over the stores by their words (BM25).

CREATE FUNCTION ml_rag.text_search_configuration(language text) RETURNS text
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$
-- purpose: the text search configuration for a language: code (en, de-AT) or name; null = the database's default
BEGIN
  IF language IS NULL THEN
    RETURN (SELECT format('%I.%I', n.nspname, c.cfgname) FROM pg_ts_config AS c
      JOIN pg_namespace AS n ON n.oid = c.cfgnamespace WHERE c.oid = get_current_ts_config());
  END IF;
  RETURN coalesce((
    SELECT format('pg_catalog.%I', c.cfgname)
    FROM (SELECT lower(substring(language FROM '^[A-Za-z]+')) AS code) AS l
    LEFT JOIN (VALUES
      ('ar', 'arabic'), ('ca', 'catalan'), ('da', 'danish'), ('de', 'german'), ('el', 'greek'), ('en', 'english'),
      ('es', 'spanish'), ('et', 'estonian'), ('eu', 'basque'), ('fi', 'finnish'), ('fr', 'french'), ('ga', 'irish'),
      ('hi', 'hindi'), ('hu', 'hungarian'), ('hy', 'armenian'), ('id', 'indonesian'), ('it', 'italian'),
      ('lt', 'lithuanian'), ('nb', 'norwegian'), ('ne', 'nepali'), ('nl', 'dutch'), ('nn', 'norwegian'),
      ('no', 'norwegian'), ('pt', 'portuguese'), ('ro', 'romanian'), ('ru', 'russian'), ('sr', 'serbian'),
      ('sv', 'swedish'), ('ta', 'tamil'), ('tr', 'turkish'), ('yi', 'yiddish')
    ) AS m (code, name) ON m.code = l.code
    JOIN pg_ts_config AS c ON c.cfgnamespace = 'pg_catalog'::regnamespace AND c.cfgname = coalesce(m.name, l.code)
  ), 'pg_catalog.simple');
END
$$;
COMMENT ON FUNCTION ml_rag.text_search_configuration(text) IS
$$the text search configuration that keyword search takes for a language: en = english, de = german, …
language: a code (en, pt-BR) or a name (english); null = default_text_search_config; one that PostgreSQL has no
configuration for, such as zh, ja or ko, = simple. Returns the name with its schema.$$;

CREATE FUNCTION ml_rag._lexemes(configuration regconfig, segment text) RETURNS TABLE (lexeme text, n bigint)
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path FROM CURRENT
-- a word of more than 2 kB is left out, and that is no news to whoever writes a row
SET client_min_messages = 'warning'
AS $$
-- purpose: words of a text by its configuration, each with its number, whatever the length
-- A tsvector keeps 255 positions of a lexeme, up to position 16383, and has at most 1 MB: what does not fit is cut at
-- blanks, and where that does not help (a,a,a,…) after 500 characters, which is less than 255 words.
-- Calls: ml_rag._lexemes
DECLARE
  _vector tsvector;
  _small integer;
BEGIN
  IF octet_length(segment) <= 500000 THEN
    _vector := to_tsvector(configuration, segment);
    IF length(segment) <= 500 OR NOT EXISTS (
      SELECT FROM unnest(_vector) AS u
      WHERE cardinality(u.positions) > 254 OR u.positions[cardinality(u.positions)] > 16382
    ) THEN
      RETURN QUERY SELECT u.lexeme, cardinality(u.positions)::bigint FROM unnest(_vector) AS u;
      RETURN;
    END IF;
  END IF;
  -- once and not for each piece: to count characters takes as long as there are
  _small := least(length(segment), 10000);
  RETURN QUERY
    SELECT l.lexeme, sum(l.n)::bigint
    FROM (
      -- not by a regular expression, which takes 20 µs for each word
      SELECT string_agg(w.word, ' ' ORDER BY w.place) AS piece
      FROM string_to_table(translate(segment, E'\t\n\u000b\f\r', '     '), ' ') WITH ORDINALITY AS w (word, place)
      GROUP BY w.place / 200
    ) AS p
    CROSS JOIN LATERAL (
      SELECT length(p.piece) AS length, length(p.piece) < _small AS is_small,
        -- ten parts, which are cut again, down to 500: a part from far behind is found by counting characters
        500 * ceil(greatest(length(p.piece), 5000) / 5000.0)::integer AS step
    ) AS c
    CROSS JOIN LATERAL (
      SELECT p.piece AS part WHERE c.is_small
      UNION ALL
      SELECT substr(p.piece, s.first, c.step) FROM generate_series(1, c.length, c.step) AS s (first) WHERE NOT c.is_small
    ) AS s
    CROSS JOIN LATERAL ml_rag._lexemes(configuration, s.part) AS l
    GROUP BY l.lexeme;
END
$$;

CREATE FUNCTION ml_rag._tokens(configuration regconfig, segment text, OUT tokens jsonb, OUT length integer)
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path FROM CURRENT
SET client_min_messages = 'warning'
AS $$
-- purpose: {token: number} of a text, and how many there are: what is indexed, and what is asked for
-- Chinese, Japanese and Korean have no blanks between words, and no parser of PostgreSQL knows where they end: runs of
-- their characters become pairs (東京都 = 東京, 京都), a character alone stays itself, in whatever configuration.
-- Calls: ml_rag._lexemes
DECLARE
  _scripts CONSTANT text := '[\u1100-\u11ff\u2e80-\u2fdf\u3005-\u3007\u3040-\u312f\u3130-\u318f\u31a0-\u31ff\u3400-\u4dbf'
    '\u4e00-\u9fff\ua960-\ua97f\uac00-\ud7ff\uf900-\ufaff\U00020000-\U0003ffff]+';
  _text text := segment;
  _words text;
  _is_whole boolean;
BEGIN
  -- PostgreSQL's parser takes the hyphen of AX-4411 and 2024-01-31 for a sign, and 4411 would not find -4411
  IF strpos(_text, '-') > 0 THEN
    FOR digit IN 0..9 LOOP
      _text := replace(_text, '-' || digit, ' ' || digit);
    END LOOP;
  END IF;
  _words := _text;
  IF octet_length(_text) <> length(_text) THEN
    -- letters of full and half width are the same letters
    IF _text ~ '[\uff01-\uffef]' AND getdatabaseencoding() = 'UTF8' THEN
      _text := normalize(_text, NFKC);
    END IF;
    _words := regexp_replace(_text, _scripts, ' ', 'g');
  END IF;
  IF _words = _text AND octet_length(_words) <= 500000 THEN
    SELECT coalesce(jsonb_object_agg(u.lexeme, cardinality(u.positions)), '{}'), coalesce(sum(cardinality(u.positions)), 0),
      coalesce(bool_and(cardinality(u.positions) < 255 AND u.positions[cardinality(u.positions)] < 16383), true)
    INTO tokens, length, _is_whole FROM unnest(to_tsvector(configuration, _words)) AS u;
    IF _is_whole THEN
      RETURN;
    END IF;
  END IF;
  IF _words = _text THEN
    SELECT coalesce(jsonb_object_agg(l.lexeme, l.n), '{}'), coalesce(sum(l.n), 0) INTO tokens, length
    FROM ml_rag._lexemes(configuration, _words) AS l;
  ELSE
    SELECT coalesce(jsonb_object_agg(t.token, t.n), '{}'), coalesce(sum(t.n), 0) INTO tokens, length
    FROM (
      SELECT a.token, sum(a.n) AS n
      FROM (
        SELECT l.lexeme AS token, l.n FROM ml_rag._lexemes(configuration, _words) AS l
        UNION ALL
        SELECT concat(c.one, c.two), 1
        FROM regexp_matches(_text, _scripts, 'g') AS m (run)
        CROSS JOIN LATERAL string_to_array(m.run[1], NULL) AS s (letters)
        CROSS JOIN LATERAL unnest(s.letters, s.letters[2:]) AS c (one, two)
        WHERE c.two IS NOT NULL OR cardinality(s.letters) = 1
      ) AS a
      GROUP BY a.token
    ) AS t;
  END IF;
END
$$;

CREATE FUNCTION ml_rag.keyword_tokens(configuration regconfig, segment text) RETURNS TABLE (token text, n integer)
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$
-- Calls: ml_rag._tokens
BEGIN
  IF NOT EXISTS (SELECT FROM pg_ts_config AS c WHERE c.oid = configuration) THEN
    RAISE EXCEPTION USING ERRCODE = '22023', MESSAGE = 'there is no such text search configuration',
      DETAIL = format('Got %s.', coalesce(configuration::text, 'null')), HINT = 'In psql, \dF lists them.';
  END IF;
  RETURN QUERY SELECT t.key, t.value::integer FROM jsonb_each_text((ml_rag._tokens(configuration, segment)).tokens) AS t
    ORDER BY t.key COLLATE "C";
END
$$;
COMMENT ON FUNCTION ml_rag.keyword_tokens(regconfig, text) IS
$$the tokens that keyword search sees in a text or a query, and how often: keyword_tokens('english', 'Two words')
The words as the text search configuration gives them; Chinese, Japanese and Korean in pairs of characters. Any text is
safe: nothing in it is an operator. Errors: 22023 no such configuration.$$;

CREATE FUNCTION ml_rag._numpy(OUT version text, OUT error jsonb)
LANGUAGE plpython3u VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
# purpose: the version of numpy that keyword search runs with, or why it cannot
if "ml_rag" not in GD or GD["ml_rag"].VERSION != "0.1.0":
    if error := plpy.execute("SELECT ml_rag._load_backend() AS error")[0]["error"]:
        return None, error
return GD["ml_rag"].numpy_version(plpy)
$$;

CREATE FUNCTION ml_rag._keyword_scores(store oid, terms text[], weights integer[], k1 double precision,
  b double precision, n integer, secured boolean, own_statistics boolean,
  OUT candidates ml_rag.keyword_candidate[], OUT error jsonb)
LANGUAGE plpython3u STABLE PARALLEL UNSAFE
SET search_path FROM CURRENT
-- planning its statements anew for each query takes longer than all the rest
SET plan_cache_mode = force_generic_plan
AS $$
# Stable, so that all that is read is of one moment: a run may be replaced by another at any time.
if "ml_rag" not in GD or GD["ml_rag"].VERSION != "0.1.0":
    if error := plpy.execute("SELECT ml_rag._load_backend() AS error")[0]["error"]:
        return None, error
return GD["ml_rag"].keyword_scores(plpy, store, terms, weights, k1, b, n, secured, own_statistics)
$$;

CREATE FUNCTION ml_rag._run_keyword(
  store ml_rag.store, index ml_rag.keyword_index, terms text[], weights integer[], candidates integer,
  query_embedding vector, distance_metric text, n integer, condition text, arguments text[],
  OUT hits ml_rag.hit[], OUT is_all boolean
)
LANGUAGE plpgsql STABLE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: the n best of the candidates that the condition leaves; is_all: whether there are no further candidates
-- Calls: ml_rag._keyword_scores, ml_rag._raise, ml_rag._hit_columns, ml_rag._relation_name  Reads: the store and its index, as the caller
-- Stable for the same reason: candidates and rows are of one moment.
DECLARE
  _found record;
  _columns record := ml_rag._hit_columns(store, distance_metric, 's.score');
BEGIN
  SELECT s.candidates, s.error INTO _found
  FROM ml_rag._keyword_scores(index.store, terms, weights, index.k1, index.b, candidates, index.secured,
    index.statistics = 'visible') AS s;
  PERFORM ml_rag._raise(_found.error) WHERE _found.error IS NOT NULL;
  is_all := cardinality(_found.candidates) < candidates;
  EXECUTE concat(
    'SELECT array_agg(ROW(h.*)::ml_rag.hit) FROM (SELECT ', _columns.of_hit, ' FROM (SELECT ', _columns.of_row,
    ', c.score AS score FROM unnest($4) AS c JOIN ONLY ', ml_rag._relation_name(index.store), ' AS t ON ', (
      SELECT string_agg(format('t.%I = (c.key[%s])::%s', a.attname, k.place, format_type(a.atttypid, NULL)), ' AND ')
      FROM unnest(index.key) WITH ORDINALITY AS k (name, place)
      JOIN pg_attribute AS a ON a.attrelid = index.store AND a.attname = k.name AND NOT a.attisdropped),
    format(' WHERE t.%I IS NOT NULL', store.segment), condition,
    ' ORDER BY c.score DESC, ', _columns.place, ' LIMIT $2) AS s) AS h')
  INTO hits USING query_embedding, n, arguments, _found.candidates;
  hits := coalesce(hits, '{}');
END
$$;

CREATE FUNCTION ml_rag.keyword(
  stores ml_rag.store[],
  query text,
  n integer DEFAULT 3,
  query_embedding vector DEFAULT NULL,
  distance_metric text DEFAULT 'COSINE',
  options jsonb DEFAULT NULL
) RETURNS SETOF ml_rag.hit
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE ROWS 10
SET search_path FROM CURRENT
AS $$
-- purpose: the stage: the n segments of all stores that speak most of the query's words
-- Calls: ml_rag.filter, ml_rag._tokens, ml_rag._run_keyword  Reads: the stores and their indexes, as the caller
DECLARE
  -- most calls have no filter: those need not ask store by store
  _filters boolean := coalesce(
    options ?| '{document_name,exclude_document_name,filters,required_keywords,excluded_keywords}', false);
  _store ml_rag.store;
  _index ml_rag.keyword_index;
  _condition text := '';
  _arguments text[];
  _terms text[];
  _weights integer[];
  _candidates integer;
  _part record;
  _all ml_rag.hit[] := '{}';
  _searched boolean := false;
  _why text;
BEGIN
  IF n IS NULL OR n < 1 OR coalesce(cardinality(stores), 0) = 0 THEN
    RETURN;
  END IF;
  FOREACH _store IN ARRAY stores LOOP
    SELECT i.* INTO _index FROM ml_rag.keyword_index AS i
    WHERE i.store = _store.relation AND i.segment = _store.segment;
    IF NOT FOUND THEN
      IF cardinality(stores) > 1 THEN
        RAISE WARNING USING ERRCODE = '01000',
          MESSAGE = format('"%s" has no keyword index; not searched by words', _store.vector_store),
          HINT = CASE WHEN (SELECT c.relkind FROM pg_class AS c WHERE c.oid = _store.relation) = 'r'
            THEN format('Its owner can make one: SELECT ml_rag.enable_keyword_search(%L);', _store.relation::text)
            ELSE 'Only an ordinary table can have one: search the table behind it.' END;
      END IF;
      CONTINUE;
    END IF;
    _searched := true;
    IF _filters THEN
      SELECT f.condition, f.arguments INTO _condition, _arguments FROM ml_rag.filter(_store, keyword.options) AS f;
    END IF;
    BEGIN
      SELECT coalesce(array_agg(t.key ORDER BY t.key COLLATE "C"), '{}'),
        coalesce(array_agg(t.value::integer ORDER BY t.key COLLATE "C"), '{}')
      INTO _terms, _weights
      FROM jsonb_each_text((ml_rag._tokens(_index.configuration::regconfig, keyword.query)).tokens) AS t;
      CONTINUE WHEN cardinality(_terms) = 0;
      -- the best ones may not pass the filters: then many more are tried, then all
      _candidates := CASE _condition WHEN '' THEN n ELSE 4 * n + 100 END;
      LOOP
        SELECT r.hits, r.is_all INTO _part
        FROM ml_rag._run_keyword(_store, _index, _terms, _weights, _candidates,
          CASE WHEN _store.dimensions IS NULL OR _store.dimensions = vector_dims(keyword.query_embedding)
               THEN keyword.query_embedding END,
          keyword.distance_metric, n, _condition, _arguments) AS r;
        EXIT WHEN cardinality(_part.hits) >= n OR _part.is_all;
        _candidates := CASE WHEN _candidates < 10000 THEN _candidates * 50 ELSE 2147483647 END;
      END LOOP;
    EXCEPTION WHEN data_exception OR undefined_object OR external_routine_exception OR config_file_error THEN
      -- Its configuration was dropped, its key's type changed, or its owner wrote into it. That must not stop those who
      -- never named the store.
      _why := SQLERRM;
      IF cardinality(stores) = 1 THEN
        RAISE EXCEPTION USING ERRCODE = '55000',
          MESSAGE = format('the keyword index of "%s" cannot be used', _store.vector_store), DETAIL = _why,
          HINT = format('Its owner can make it anew: SELECT ml_rag.enable_keyword_search(%L);', _store.relation::text);
      END IF;
      RAISE WARNING USING ERRCODE = '01000',
        MESSAGE = format('the keyword index of "%s" cannot be used; ignored', _store.vector_store), DETAIL = _why,
        HINT = format('Its owner can make it anew: SELECT ml_rag.enable_keyword_search(%L);', _store.relation::text);
      CONTINUE;
    END;
    _all := _all || _part.hits;
  END LOOP;
  IF NOT _searched THEN
    RAISE EXCEPTION USING ERRCODE = '55000', MESSAGE = 'no vector store has a keyword index',
      DETAIL = format('Stores: %s.', (SELECT string_agg(s.vector_store, ', ') FROM unnest(stores) AS s)),
      HINT = format('The owner of a store can make one: SELECT ml_rag.enable_keyword_search(%L);',
        stores[1].relation::text);
  END IF;
  RETURN QUERY
    SELECT h.vector_store, h.document_name, h.document_id, h.document_key, h.segment_number, h.segment,
      nullif(h.distance, 'NaN'), h.metadata, h.keyword_score, h.score, h.rerank_score
    FROM unnest(_all) AS h
    ORDER BY h.keyword_score DESC, h.vector_store COLLATE "C", h.document_name COLLATE "C", h.document_id,
      h.document_key COLLATE "C", h.segment_number
    LIMIT n;
END
$$;
COMMENT ON FUNCTION ml_rag.keyword(ml_rag.store[], text, integer, vector, text, jsonb) IS
$$the n segments of the stores that match the words of the query best, best first
keyword_score is BM25 (Lucene's variant), from the statistics of the segment's own store; segments without any of the
words do not come. Equal scores go by store, document and segment. distance is filled where query_embedding is given and
fits. options: those of ml_rag that leave rows out, see ml_rag.filter; they apply before the limit. A store without a
keyword index, or with one that cannot be used, is left out with a warning. Errors: 55000 no store has one, the only
store's cannot be used, or numpy is missing; those of ml_rag.filter.$$;

-- 35_fuse.sql

-- 35_fuse: the hits of the semantic and the keyword arm as one list.

CREATE FUNCTION ml_rag._decisiveness(scores double precision[], nothing double precision) RETURNS double precision
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$
-- purpose: how clearly an arm tells its best candidates from the others, 0-1; nothing is the score that counts as 0
-- An arm that has something to say gives a few segments much more than the rest; one that has not (a model that does
-- not know the language, words that stand everywhere) gives all of them about the same. One minus the mean of the best
-- thirty, where the first counts 1 and those missing 0.
DECLARE
  _range double precision := (SELECT max(s) FROM unnest(scores) AS s) - nothing;
BEGIN
  IF coalesce(_range <= 0, true) THEN
    RETURN 0;
  END IF;
  RETURN (SELECT 1 - sum(greatest(b.s - nothing, 0) / _range) / 30
          FROM (SELECT s FROM unnest(scores) AS s ORDER BY s DESC LIMIT 30) AS b);
END
$$;

CREATE FUNCTION ml_rag.fuse(
  semantic ml_rag.hit[], keyword ml_rag.hit[], options jsonb DEFAULT NULL, distance_metric text DEFAULT 'COSINE'
) RETURNS SETOF ml_rag.hit
LANGUAGE plpgsql STABLE PARALLEL SAFE ROWS 100
SET search_path FROM CURRENT
AS $$
-- purpose: the stage: the candidates of both arms, each once, by their fused score
-- Calls: ml_rag.parse_options, ml_rag._decisiveness
DECLARE
  _options jsonb := ml_rag.parse_options('hybrid_options', $3);
  _is_weighted boolean := _options ->> 'fusion' = 'weighted';
  _rrf_k double precision := (_options ->> 'rrf_k')::double precision;
  _semantic_weight double precision := (_options ->> 'semantic_weight')::double precision;
  _similarities double precision[];
  _keyword_scores double precision[] := ARRAY(SELECT h.keyword_score FROM unnest(keyword) AS h);
  _most_similar double precision;
  _best_keyword double precision;
  _decided double precision;
  _decided_keyword double precision;
BEGIN
  -- of an arm's own candidates; the similarity that a distance stands for, 1 for equal vectors
  _similarities := ARRAY(
    SELECT CASE distance_metric WHEN 'EUCLIDEAN' THEN 1 / (1 + h.distance) ELSE 1 - h.distance END
    FROM unnest(semantic) AS h);
  _most_similar := (SELECT max(s) FROM unnest(_similarities) AS s);
  _best_keyword := (SELECT max(s) FROM unnest(_keyword_scores) AS s);
  IF _is_weighted AND _semantic_weight IS NULL THEN
    _decided := ml_rag._decisiveness(_similarities, (SELECT min(s) FROM unnest(_similarities) AS s));
    _decided_keyword := ml_rag._decisiveness(_keyword_scores, 0);
    -- 0.6, 0.4 and thirty by measuring: docs/search.md
    _semantic_weight := CASE WHEN _decided + _decided_keyword > 0
      THEN 0.6 * _decided / (0.6 * _decided + 0.4 * _decided_keyword) ELSE 0.6 END;
  END IF;

  RETURN QUERY
    WITH hit AS (
      SELECT true AS is_semantic, p.place, semantic[p.place] AS hit FROM generate_subscripts(semantic, 1) AS p (place)
      UNION ALL
      SELECT false, p.place, keyword[p.place] FROM generate_subscripts(keyword, 1) AS p (place)
    ), numbered AS (
      -- no key of the table is at hand here; rows that are the same in all of this are told apart by counting
      SELECT h.*, row_number() OVER (PARTITION BY h.is_semantic, (h.hit).vector_store, (h.hit).document_name,
        (h.hit).document_key, (h.hit).segment_number, (h.hit).segment ORDER BY h.place) AS copy
      FROM hit AS h
    ), candidate AS (
      SELECT (n.hit).vector_store, (n.hit).document_name, min((n.hit).document_id) AS document_id,
        (n.hit).document_key, (n.hit).segment_number, (n.hit).segment, min((n.hit).distance) AS distance,
        (array_agg((n.hit).metadata))[1] AS metadata, max((n.hit).keyword_score) AS keyword_score,
        min(n.place) FILTER (WHERE n.is_semantic) AS semantic_place,
        min(n.place) FILTER (WHERE NOT n.is_semantic) AS keyword_place
      FROM numbered AS n
      GROUP BY (n.hit).vector_store, (n.hit).document_name, (n.hit).document_key, (n.hit).segment_number,
        (n.hit).segment, n.copy
    ), scored AS (
      SELECT c.*, CASE WHEN _is_weighted THEN
          CASE WHEN _most_similar > 0 THEN _semantic_weight * least(1, greatest(0,
            CASE distance_metric WHEN 'EUCLIDEAN' THEN 1 / (1 + c.distance) ELSE 1 - c.distance END) / _most_similar)
            ELSE 0 END
          + CASE WHEN _best_keyword > 0 THEN (1 - _semantic_weight) * coalesce(c.keyword_score, 0) / _best_keyword
            ELSE 0 END
        ELSE  -- as a share of what the first place in both arms gives
          (coalesce(1 / (_rrf_k + c.semantic_place), 0) + coalesce(1 / (_rrf_k + c.keyword_place), 0))
            * (_rrf_k + 1) / 2
        END AS score
      FROM candidate AS c
    )
    SELECT s.vector_store, s.document_name, s.document_id, s.document_key, s.segment_number, s.segment, s.distance,
      s.metadata, s.keyword_score, s.score, NULL::double precision
    FROM scored AS s
    ORDER BY s.score DESC, s.distance, s.vector_store COLLATE "C", s.document_name COLLATE "C", s.document_id,
      s.document_key COLLATE "C", s.segment_number;
END
$$;
COMMENT ON FUNCTION ml_rag.fuse(ml_rag.hit[], ml_rag.hit[], jsonb, text) IS
$$the hits of the semantic arm (nearest first) and of the keyword arm (best first) as one list, by score (0-1)
options: those of hybrid_options. fusion weighted: w * similarity + (1 - w) * keyword score, each divided by the largest
of its arm; similarity = 1 - distance, or 1 / (1 + distance) with EUCLIDEAN; a hit that only one arm found counts with
its true distance and the keyword score 0. w is semantic_weight; auto = by how clearly each arm tells its best
candidates from the rest. fusion rrf: the sum of 1 / (rrf_k + place), as a share of the largest possible.$$;

-- 40_threshold.sql

-- 40_threshold: drop what is too far.

CREATE FUNCTION ml_rag.threshold(
  hits ml_rag.hit[],
  max_distance numeric DEFAULT NULL,
  percentage_distance numeric DEFAULT NULL,
  OUT kept ml_rag.hit[],
  OUT method text,
  OUT threshold numeric
)
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$
-- purpose: the stage: which of the hits are near enough, in their order, and what limit was in force
DECLARE
  _nearest numeric;
  _by_percentage numeric;
BEGIN
  IF percentage_distance IS NOT NULL THEN
    _nearest := (SELECT min(h.distance) FROM unnest(hits) AS h);
    _by_percentage := _nearest + percentage_distance / 100 * abs(_nearest);
  END IF;
  IF _by_percentage < max_distance OR max_distance IS NULL AND percentage_distance IS NOT NULL THEN
    method := 'percentage_distance';
    threshold := _by_percentage;
  ELSIF max_distance IS NOT NULL THEN
    method := 'max_distance';
    threshold := max_distance;
  ELSE
    method := 'n_citations';
    threshold := (SELECT max(h.distance) FROM unnest(hits) AS h);
    kept := hits;
    RETURN;
  END IF;
  kept := ARRAY(SELECT hits[i] FROM generate_subscripts(hits, 1) AS i
                WHERE hits[i].distance <= threshold.threshold ORDER BY i);
END
$$;
COMMENT ON FUNCTION ml_rag.threshold(ml_rag.hit[], numeric, numeric) IS
$$keeps the hits whose distance is at most the threshold; both limits given: the smaller one
hits: in any order, which is kept. max_distance: that distance. percentage_distance p: d + p/100 * |d|, d the nearest distance.
method: n_citations (no limit given; threshold = the largest distance), max_distance or percentage_distance.$$;

-- 45_rerank.sql

-- 45_rerank: reorder by relevance, with a cross-encoder or with the ranking model "hybrid", which needs none.

CREATE FUNCTION ml_rag._rerank(
  query text, texts text[], model_id text, OUT scores double precision[], OUT error jsonb
)
LANGUAGE plpython3u VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
if "ml_rag" not in GD or GD["ml_rag"].VERSION != "0.1.0":
    if error := plpy.execute("SELECT ml_rag._load_backend() AS error")[0]["error"]:
        return None, error
return GD["ml_rag"].rerank(plpy, query, texts, model_id)
$$;

CREATE FUNCTION ml_rag._word_scores(query text, texts text[], configuration regconfig) RETURNS double precision[]
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path FROM CURRENT
-- what takes microseconds is not worth a second of compiling, which the guessed number of words would bring about
SET jit = off
AS $$
-- purpose: BM25 of each text, with the statistics of these texts alone, as 0-1; null for a query without words
-- Calls: ml_rag._tokens
-- Lucene's variant, k1 1.2, b 0.75. The best text gets 1, unless it has less than 0.15 of what BM25 could give for all
-- words of the query: a text that shares nothing but "the" is no good one for being the only one that does.
DECLARE
  _words jsonb := (ml_rag._tokens(configuration, query)).tokens;
  _scores double precision[];
  _attainable double precision;
BEGIN
  IF _words = '{}' THEN
    RETURN NULL;
  END IF;
  WITH word AS (
    SELECT w.key AS word, w.value::integer AS times FROM jsonb_each_text(_words) AS w
  ), read AS MATERIALIZED (
    SELECT t.place, k.tokens, k.length
    FROM unnest(texts) WITH ORDINALITY AS t (text, place)
    CROSS JOIN LATERAL ml_rag._tokens(configuration, t.text) AS k
  ), posting AS (
    SELECT r.place, w.word, (r.tokens ->> w.word)::integer AS times FROM read AS r JOIN word AS w ON r.tokens ? w.word
  ), weight AS (
    SELECT w.word, w.times * ln(1 + (cardinality(texts) - count(p.place) + 0.5) / (count(p.place) + 0.5)) AS weight
    FROM word AS w LEFT JOIN posting AS p ON p.word = w.word GROUP BY w.word, w.times
  ), norm AS (
    SELECT r.place, 1.2 * (0.25 + 0.75 * r.length / nullif(avg(r.length) OVER (), 0)) AS norm FROM read AS r
  ), scored AS (
    SELECT n.place, coalesce(sum(w.weight * p.times / (p.times + n.norm)), 0)::double precision AS score
    FROM norm AS n LEFT JOIN posting AS p ON p.place = n.place LEFT JOIN weight AS w ON w.word = p.word
    GROUP BY n.place
  )
  SELECT array_agg(s.score ORDER BY s.place), (SELECT sum(w.weight) FROM weight AS w) INTO _scores, _attainable
  FROM scored AS s;
  RETURN ARRAY(
    SELECT s.score / greatest(max(s.score) OVER (), 0.15 * _attainable)
    FROM unnest(_scores) WITH ORDINALITY AS s (score, place) ORDER BY s.place);
END
$$;

CREATE FUNCTION ml_rag._similarities(query text, texts text[]) RETURNS double precision[]
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: cosine of each text with the query by the default embedding model, those below 0 as 0
-- Calls: ml_rag.embed, ml_rag._embed, ml_rag._raise, ml_rag._get_setting
DECLARE
  _model_id text := ml_rag._get_setting('embed_model_id');
  _query_embedding vector := ml_rag.embed(query, _model_id, 'query');
  _similarities double precision[] := '{}';
  _vectors vector[];
  _error jsonb;
BEGIN
  -- a slice is what one request surely holds
  FOR i IN 1..cardinality(texts) BY 128 LOOP
    SELECT o.vectors, o.error INTO _vectors, _error
    FROM ml_rag._embed(texts[i:i + 127], _model_id, 'document') AS o;
    IF _error IS NOT NULL THEN
      PERFORM ml_rag._raise(_error);
    END IF;
    _similarities := _similarities || ARRAY(
      SELECT greatest(0, coalesce(nullif(1 - (v.embedding <=> _query_embedding), 'NaN'), 0))
      FROM unnest(_vectors) WITH ORDINALITY AS v (embedding, place) ORDER BY v.place);
  END LOOP;
  RETURN _similarities;
END
$$;

CREATE FUNCTION ml_rag._hybrid_scores(query text, texts text[], configuration regconfig) RETURNS double precision[]
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: what the ranking model "hybrid" says: 0.7 of the similarity and 0.3 of the words the text shares
-- Calls: ml_rag._similarities, ml_rag._word_scores
-- The weight is measured: 0.65 and 0.7 were the best of 0 … 1 together on English and Chinese questions, see
-- docs/ranking.md. A query without words (nothing but stop words, or emoji) leaves it to the similarity.
DECLARE
  -- what 512 tokens surely fit in; without a bound a text of 1 MB would be more than to_tsvector takes
  _query text := left(query, 8192);
  _texts text[] := ARRAY(
    SELECT left(t.text, 8192) FROM unnest(texts) WITH ORDINALITY AS t (text, place) ORDER BY t.place);
  _similarities double precision[] := ml_rag._similarities(_query, _texts);
  _word_scores double precision[] := ml_rag._word_scores(_query, _texts, configuration);
BEGIN
  -- least: rounding can bring the cosine of equal vectors a little above 1
  RETURN ARRAY(
    SELECT least(1, CASE WHEN _word_scores IS NULL THEN _similarities[i]
                         ELSE 0.7 * _similarities[i] + 0.3 * _word_scores[i] END)
    FROM generate_subscripts(_texts, 1) AS i ORDER BY i);
END
$$;

CREATE FUNCTION ml_rag._relevance(
  query text, texts text[], model_id text, configuration regconfig DEFAULT NULL
) RETURNS double precision[]
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: how relevant each text is to the query, 0-1, in the order of the texts; model_id: a cross-encoder, or hybrid
-- Calls: ml_rag._hybrid_scores, ml_rag._rerank, ml_rag._raise
DECLARE
  _scores double precision[];
  _error jsonb;
BEGIN
  IF coalesce(query, '') !~ '\S' THEN
    RAISE EXCEPTION USING ERRCODE = '22023', MESSAGE = 'the query is empty';
  END IF;
  IF cardinality(texts) = 0 THEN
    RETURN '{}';
  END IF;
  IF model_id = 'hybrid' THEN
    RETURN ml_rag._hybrid_scores(query, texts, coalesce(configuration, get_current_ts_config()));
  END IF;
  SELECT o.scores, o.error INTO _scores, _error FROM ml_rag._rerank(query, texts, model_id) AS o;
  IF _error IS NOT NULL THEN
    PERFORM ml_rag._raise(_error);
  END IF;
  RETURN _scores;
END
$$;

CREATE FUNCTION ml_rag.rerank(query text, hits ml_rag.hit[], options jsonb DEFAULT NULL) RETURNS SETOF ml_rag.hit
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE ROWS 10
SET search_path FROM CURRENT
AS $$
-- purpose: the stage: the hits in the order of their relevance to the query; equals stay in the order they came in
-- Calls: ml_rag.parse_options, ml_rag._relevance, ml_rag._get_setting
DECLARE
  _options jsonb := ml_rag.parse_options('rerank', options);
  _least double precision := (_options ->> 'min_score')::double precision;
  _scores double precision[];
BEGIN
  IF coalesce(cardinality(hits), 0) = 0 THEN
    RETURN;
  END IF;
  -- the segment alone: what a store's owner wants scored with it (a title, a heading) belongs into the segment
  _scores := ml_rag._relevance(query, ARRAY(SELECT hits[i].segment FROM generate_subscripts(hits, 1) AS i ORDER BY i),
    coalesce(_options ->> 'model_id', ml_rag._get_setting('rerank_model_id')));
  RETURN QUERY
    SELECT h.vector_store, h.document_name, h.document_id, h.document_key, h.segment_number, h.segment, h.distance,
      h.metadata, h.keyword_score, h.score, h.relevance
    FROM (
      SELECT p.place, (hits[p.place]).*, _scores[p.place] AS relevance FROM generate_subscripts(hits, 1) AS p (place)
    ) AS h
    WHERE _least IS NULL OR h.relevance >= _least
    ORDER BY h.relevance DESC, h.place;
END
$$;
COMMENT ON FUNCTION ml_rag.rerank(text, ml_rag.hit[], jsonb) IS
$$the hits by their relevance to the query, best first, with rerank_score (0-1) filled
options: those of option "rerank": model_id (a cross-encoder, or hybrid: embedding similarity and BM25 over these hits;
default: setting rerank_model_id), min_score (hits below it are dropped). The text of the segment is scored, without its
document's name; query and segment together are cut at the cross-encoder's max_tokens. Equal scores stay in the order
they came in. Errors: 22023 empty query, bad option, unknown model or model of another task; 55000 model not available;
08006 model server; 53300 its queue is full; 57014 cancelled; 38000.$$;

-- 50_expand.sql

-- 50_expand: add the neighbouring segments.

CREATE FUNCTION ml_rag._join_segments(a text, b text) RETURNS text
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$
-- purpose: two consecutive segments as one text, what the end of a and the start of b share written once
-- The shared run must consist of whole words: "… cat" and "table" share a letter and no text. Candidates are the
-- places in a where the first word of b (at most 32 characters of it) stands, longest run first. Scripts that are
-- written without blanks (beyond U+2E7F) have no words to keep whole, so there the first character will do.
DECLARE
  _a text := rtrim(a, E' \t\r\n');
  _b text := ltrim(b, E' \t\r\n');
  _start text := CASE WHEN _b ~ '^[^\x01-\u2e7f]' THEN left(_b, 1)
                      ELSE left(substring(_b FROM '^[[:alnum:]]+|^.'), 32) END;
  _place integer;   -- in _a, 1-based
  _offset integer := greatest(0, length(_a) - length(_b));
  _shared text;
BEGIN
  LOOP
    _place := strpos(substr(_a, _offset + 1), _start);
    EXIT WHEN _place = 0 OR _start IS NULL;
    _offset := _offset + _place;
    _shared := substr(_a, _offset);
    IF starts_with(_b, _shared)
      AND (_offset = 1 OR substr(_a, _offset - 1, 2) !~ '^[[:alnum:]]{2}$' OR _shared ~ '^[^\x01-\u2e7f]{2}')
      AND (length(_b) = length(_shared) OR substr(_b, length(_shared), 2) !~ '^[[:alnum:]]{2}$'
           OR _shared ~ '[^\x01-\u2e7f]{2}$')
    THEN
      RETURN _a || substr(_b, length(_shared) + 1);
    END IF;
  END LOOP;
  RETURN _a || E'\n' || _b;
END
$$;

CREATE FUNCTION ml_rag._neighbours(store ml_rag.store, documents text[], first bigint[], last bigint[])
RETURNS TABLE (range integer, segment_number bigint, segment text)
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: the segments first[i] … last[i] of document i of one store, in order
-- Calls: ml_rag._relation_name  Reads: the store, as the caller
BEGIN
  RETURN QUERY EXECUTE format(
    'SELECT r.i::integer, t.%1$I::bigint, t.%2$I::text '
    'FROM unnest($1, $2, $3) WITH ORDINALITY AS r (document, first, last, i) '
    'JOIN %3$s AS t ON t.%4$I = r.document::%5$s AND t.%1$I BETWEEN r.first AND r.last '
    'WHERE t.%2$I IS NOT NULL ORDER BY 1, 2',
    store.segment_number, store.segment, ml_rag._relation_name(store.relation),
    coalesce(store.document_id, store.document_name),
    CASE WHEN store.document_id IS NULL THEN 'text' ELSE store.document_id_type END)
  USING documents, first, last;
END
$$;

CREATE FUNCTION ml_rag.expand(stores ml_rag.store[], hits ml_rag.hit[], segment_overlap integer DEFAULT 1)
RETURNS SETOF ml_rag.hit
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE ROWS 10
SET search_path FROM CURRENT
AS $$
-- purpose: the stage: each hit with its neighbours; ranges of one document that touch become one hit
-- Calls: ml_rag._neighbours, ml_rag._join_segments  Reads: the stores, as the caller
DECLARE
  _store ml_rag.store;
  _ranges record;
  _row record;
  _texts text[];
  -- by the place of a hit: what it becomes
  _segment text[];
  _distance numeric[];
  _merged boolean[];
BEGIN
  IF coalesce(segment_overlap, 0) = 0 THEN
    RETURN QUERY SELECT h.* FROM unnest(hits) AS h;
    RETURN;
  END IF;
  FOREACH _store IN ARRAY coalesce(stores, '{}') LOOP
    CONTINUE WHEN _store.segment_number IS NULL OR coalesce(_store.document_id, _store.document_name) IS NULL;
    -- gaps and islands: a range that starts beyond the end of all before it, and does not touch, opens a new one
    SELECT array_agg(i.document_key) AS documents, array_agg(i.first) AS first, array_agg(i.last) AS last,
           array_agg(i.best) AS best, array_agg(i.distance) AS distance INTO _ranges
    FROM (
      SELECT r.document_key, min(r.first) AS first, max(r.last) AS last, min(r.place) AS best,
        min(r.distance) AS distance
      FROM (
        SELECT o.*, count(*) FILTER (WHERE o.opens) OVER (
          PARTITION BY o.document_key ORDER BY o.first, o.last) AS island
        FROM (
          SELECT h.place, h.distance, h.document_key, h.segment_number - segment_overlap AS first,
            h.segment_number + segment_overlap AS last,
            coalesce(h.segment_number - segment_overlap > 1 + max(h.segment_number + segment_overlap) OVER (
              PARTITION BY h.document_key ORDER BY h.segment_number
              ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING), true) AS opens
          FROM (
            SELECT p.place, (hits[p.place]).* FROM generate_subscripts(hits, 1) AS p (place)
          ) AS h
          WHERE h.vector_store = _store.vector_store AND h.segment_number IS NOT NULL AND h.document_key IS NOT NULL
        ) AS o
      ) AS r GROUP BY r.document_key, r.island
    ) AS i;
    CONTINUE WHEN _ranges.documents IS NULL;
    _texts := NULL;
    FOR _row IN
      SELECT n.range, n.segment FROM ml_rag._neighbours(_store, _ranges.documents, _ranges.first, _ranges.last) AS n
    LOOP
      _texts[_row.range] := CASE WHEN _texts[_row.range] IS NULL THEN _row.segment
        ELSE ml_rag._join_segments(_texts[_row.range], _row.segment) END;
    END LOOP;
    -- one hit a range, at the place of its best one; the others of the range go
    FOR i IN 1..cardinality(hits) LOOP
      IF hits[i].vector_store = _store.vector_store AND hits[i].segment_number IS NOT NULL
        AND hits[i].document_key IS NOT NULL THEN
        _merged[i] := i <> ALL (_ranges.best);
      END IF;
    END LOOP;
    FOR i IN 1..cardinality(_ranges.documents) LOOP
      _segment[_ranges.best[i]] := _texts[i];
      _distance[_ranges.best[i]] := _ranges.distance[i];
    END LOOP;
  END LOOP;
  RETURN QUERY
    SELECT h.vector_store, h.document_name, h.document_id, h.document_key, h.segment_number,
      coalesce(_segment[h.place], h.segment), coalesce(_distance[h.place], h.distance), h.metadata, h.keyword_score,
      h.score, h.rerank_score
    FROM (SELECT p.place, (hits[p.place]).* FROM generate_subscripts(hits, 1) AS p (place)) AS h
    WHERE _merged[h.place] IS NOT TRUE ORDER BY h.place;
END
$$;
COMMENT ON FUNCTION ml_rag.expand(ml_rag.store[], ml_rag.hit[], integer) IS
$$widens each hit by segment_overlap (0-5) segments of its document on either side
Ranges of one document that touch become one hit: text in document order, text that neighbours share written once,
distance of its nearest segment, place, metadata and
segment_number of its best one. Stores without segment numbers are left as they are.$$;

-- 70_generate.sql

-- 70_generate: prompt to text.

CREATE FUNCTION ml_rag._generate(request jsonb, OUT answer jsonb, OUT error jsonb)
LANGUAGE plpython3u VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
if "ml_rag" not in GD or GD["ml_rag"].VERSION != "0.1.0":
    if error := plpy.execute("SELECT ml_rag._load_backend() AS error")[0]["error"]:
        return None, error
return GD["ml_rag"].generate(plpy, request)
$$;

CREATE FUNCTION ml_rag.generate(
  prompt text, options jsonb DEFAULT NULL, hits ml_rag.hit[] DEFAULT NULL, prompt_options jsonb DEFAULT NULL
) RETURNS text
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: the stage: the answer to a prompt, from the hits (best first) where there are any
-- Calls: ml_rag.parse_options, ml_rag._generate, ml_rag._get_setting, ml_rag._raise
DECLARE
  _options jsonb := ml_rag.parse_options('ml_generate', options);
  _prompt_options jsonb := ml_rag.parse_options('prompt', prompt_options);
  _documents jsonb;
  _answer jsonb;
  _error jsonb;
BEGIN
  IF coalesce(prompt, '') !~ '\S' THEN
    RAISE EXCEPTION USING ERRCODE = '22023', MESSAGE = 'the prompt is empty';
  END IF;
  SELECT jsonb_agg(jsonb_build_object('document_name', h.document_name, 'text', h.segment) ORDER BY h.place)
  INTO _documents
  FROM (
    SELECT coalesce(hits[i].document_name, hits[i].vector_store) AS document_name, hits[i].segment, i AS place
    FROM generate_subscripts(hits, 1) AS i
  ) AS h;
  IF _options ? 'context' THEN
    _documents := coalesce(_documents, '[]')
      || jsonb_build_array(jsonb_build_object('document_name', 'context', 'text', _options -> 'context'));
  END IF;
  SELECT o.answer, o.error INTO _answer, _error
  FROM ml_rag._generate(jsonb_build_object('prompt', prompt, 'documents', _documents, 'options',
    jsonb_build_object('model_id', ml_rag._get_setting('generate_model_id')) || (_options - 'context'),
    'prompt_options', _prompt_options, 'citations', cardinality(hits))) AS o;
  IF _error IS NOT NULL THEN
    PERFORM ml_rag._raise(_error);
  END IF;
  IF (_answer ->> 'documents_used')::integer < (_answer ->> 'documents_given')::integer THEN
    RAISE WARNING USING ERRCODE = '01000',
      MESSAGE = format('the answer draws on %s of %s citations', _answer ->> 'documents_used',
        _answer ->> 'documents_given'),
      DETAIL = 'The last ones do not fit the context of the generation model.',
      HINT = 'Lower "n_citations" or "segment_overlap", or name a model with a larger context in "model_options".';
  END IF;
  RETURN _answer ->> 'text';
END
$$;
COMMENT ON FUNCTION ml_rag.generate(text, jsonb, ml_rag.hit[], jsonb) IS
$$generates text from a prompt and, where given, from hits (best first)
options: those of ml_generate. prompt_options: {"system": text, "citation_style": "none" or "numbered", "order":
"best_first" or "best_last"}, see ml_rag.option. As many hits as the model's context holds are used, the first ones; a
warning says when not all. A marker such as [4] that points to none of the hits used is taken out of the text, unless
options has a json_schema.
Errors: as ml_generate.$$;

CREATE FUNCTION @extschema@.ml_generate(prompt text, options jsonb DEFAULT NULL) RETURNS jsonb
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: ml_rag.generate as HeatWave's ML_GENERATE answers  Calls: ml_rag.generate
BEGIN
  RETURN jsonb_build_object('text', ml_rag.generate($1, $2), 'error', NULL);
END
$$;
COMMENT ON FUNCTION @extschema@.ml_generate(text, jsonb) IS
$$generates text: ml_generate('What is SQL?', '{"max_tokens": 100}') -> {"text": …, "error": null}
Options with ranges and defaults: SELECT * FROM ml_rag.option WHERE routine = 'ml_generate'.
Errors: 22023 empty prompt, bad option, unknown model, model of another task, prompt longer than the model's context;
55000 model not available; 08006 model server; 53300 its queue is full; 57014 cancelled; 38000 the model failed.$$;

-- 80_rag.sql

-- 80_rag: the public routines: 10 … 70 in order.

CREATE FUNCTION ml_rag._retrieve(
  query text, options jsonb,
  OUT stores ml_rag.store[], OUT hits ml_rag.hit[], OUT method text, OUT threshold numeric, OUT missing jsonb,
  OUT times timestamptz[]
)
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: question to citations: discover, embed, search, keyword, fuse, threshold, rerank, expand; options are
-- parsed ones. missing: the error (for ml_rag._raise) where no segment is left; not raised, as an answer can abstain
-- times: when discovery, the embedding and the search were done
-- Calls: ml_rag._discover, ml_rag.embed, ml_rag.search, ml_rag.keyword, ml_rag.fuse, ml_rag.threshold,
-- ml_rag.rerank, ml_rag.expand
DECLARE
  _retrieval jsonb := options -> 'retrieval_options';
  _n integer := (options ->> 'n_citations')::integer;
  _metric text := options ->> 'distance_metric';
  _is_semantic boolean := (options -> 'semantic_search')::boolean;
  _is_keyword boolean := (options -> 'keyword_search')::boolean;
  _rerank jsonb := options -> 'rerank';
  _candidates integer := greatest(_n, (_rerank ->> 'candidates')::integer);
  _query_embedding vector;
  _keyword_hits ml_rag.hit[];
  _found record;
BEGIN
  IF coalesce(query, '') !~ '\S' THEN
    RAISE EXCEPTION USING ERRCODE = '22023', MESSAGE = 'the query is empty',
      HINT = 'Ask a question: CALL ml_rag(''What is AutoML?'').';
  END IF;
  stores := '{}';
  hits := '{}';
  method := 'n_citations';
  IF _n = 0 THEN
    RETURN;
  END IF;

  IF options ? 'query_embedding' THEN
    _query_embedding := ml_rag._vector(options -> 'query_embedding');
    IF _metric = 'COSINE' AND vector_norm(_query_embedding) = 0 THEN
      PERFORM ml_rag._bad_option('query_embedding', options -> 'query_embedding',
        'a vector that is not all zeros', 'Such a vector has no cosine distance to anything.');
    END IF;
  END IF;
  stores := ml_rag._discover(options);
  IF cardinality(stores) = 0 AND options ? 'embed_model_id' AND _query_embedding IS NULL THEN
    -- a misspelt model is the likelier reason, and this says so
    PERFORM ml_rag.embed(query, options ->> 'embed_model_id');
  END IF;
  IF cardinality(stores) = 0 THEN
    RAISE EXCEPTION USING ERRCODE = 'P0002', MESSAGE = 'no vector store found',
      DETAIL = format('Embedding model %s; only stores that the caller may select from count.',
        coalesce(options ->> 'embed_model_id', ml_rag._get_setting('embed_model_id'))),
      HINT = 'Load documents with vector_store_load, or see SELECT * FROM ml_rag.discover() for what can be searched; '
        'a view of another role must be named in "vector_store".';
  END IF;
  times[1] := clock_timestamp();
  IF _query_embedding IS NULL AND ml_rag._needs_embedding(options) THEN
    _query_embedding := ml_rag.embed(query, coalesce(options ->> 'embed_model_id', stores[1].embed_model_id));
  END IF;
  times[2] := clock_timestamp();

  IF _is_keyword THEN
    _candidates := greatest(_candidates,
      (ml_rag.parse_options('hybrid_options', options -> 'hybrid_options') ->> 'candidates')::integer);
  END IF;
  IF _is_semantic THEN
    hits := ARRAY(SELECT h FROM ml_rag.search(stores, _query_embedding, _candidates, _metric, options,
      -- one store with a wrong marker must not break the calls of those who never named it
      NOT options ?| '{vector_store,query_embedding}') AS h);
  END IF;
  IF _is_keyword THEN
    _keyword_hits := ARRAY(
      SELECT h FROM ml_rag.keyword(stores, query, _candidates, _query_embedding, _metric, options) AS h);
    hits := CASE WHEN _is_semantic
      THEN ARRAY(SELECT h FROM ml_rag.fuse(hits, _keyword_hits, options -> 'hybrid_options', _metric) AS h)
      ELSE _keyword_hits END;
  END IF;
  times[3] := clock_timestamp();
  IF cardinality(hits) = 0 THEN
    missing := jsonb_build_object('sqlstate', 'P0002', 'message', 'no segment found',
      'detail', format('%s vector stores were searched; no row passed the filters%s.', cardinality(stores),
        CASE WHEN NOT _is_semantic THEN ' or has a word of the query' END),
      'hint', 'Check "document_name" and "exclude_document_name", which take names as the stores hold them (a loaded '
        'file''s whole path), the keys and values of "filters" (a key inside an object is "/address/city"), the '
        'keywords, and whether the stores have rows.');
  END IF;

  -- also with nothing to judge: it says which limit was in force
  _found := ml_rag.threshold(hits, (_retrieval ->> 'max_distance')::numeric,
    (_retrieval ->> 'percentage_distance')::numeric);
  method := _found.method;
  threshold := round(_found.threshold, 4);
  IF cardinality(_found.kept) = 0 THEN
    missing := coalesce(missing, jsonb_build_object('sqlstate', 'P0002',
      'message', 'no segment within the distance threshold',
      'detail', format('The nearest distance is %s, the threshold %s.',
        coalesce((SELECT min(h.distance) FROM unnest(hits) AS h)::text, 'not known'), _found.threshold),
      'hint', 'Raise "max_distance", or leave it out.'));
    hits := '{}';
    RETURN;
  END IF;
  hits := _found.kept;

  IF _rerank IS NOT NULL THEN
    hits := ARRAY(SELECT h FROM ml_rag.rerank(query, hits[1:greatest(_n, (_rerank ->> 'candidates')::integer)],
      _rerank - 'min_score') AS h);
    IF hits[1].rerank_score < (_rerank ->> 'min_score')::double precision THEN
      missing := jsonb_build_object('sqlstate', 'P0002', 'message', 'no segment within the score threshold',
        'detail', format('The best score is %s, min_score %s.', hits[1].rerank_score, _rerank ->> 'min_score'),
        'hint', 'Lower "min_score", or leave it out.');
      hits := '{}';
      IF method = 'n_citations' THEN
        threshold := NULL;
      END IF;
      RETURN;
    END IF;
    hits := ARRAY(SELECT hits[i] FROM generate_subscripts(hits, 1) AS i
                  WHERE hits[i].rerank_score >= coalesce((_rerank ->> 'min_score')::double precision, 0) ORDER BY i);
  END IF;
  IF cardinality(hits) > _n OR _rerank IS NOT NULL THEN
    hits := hits[1:_n];
    IF method = 'n_citations' THEN
      threshold := (SELECT max(h.distance) FROM unnest(hits) AS h);
    END IF;
  END IF;

  IF (_retrieval ->> 'segment_overlap')::integer > 0 THEN
    hits := ARRAY(SELECT h FROM ml_rag.expand(stores, hits, (_retrieval ->> 'segment_overlap')::integer) AS h);
  END IF;
END
$$;

CREATE FUNCTION @extschema@.ml_rag_search(query text, options jsonb DEFAULT NULL)
RETURNS TABLE (rank integer, vector_store text, document_name text, document_id bigint, segment_number integer,
               segment text, distance numeric, metadata jsonb, keyword_score double precision,
               score double precision, rerank_score double precision)
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE ROWS 10
SET search_path FROM CURRENT
AS $$
-- purpose: the citations of ml_rag as rows  Calls: ml_rag._parse_rag_options, ml_rag._retrieve, ml_rag._raise
DECLARE
  _hits ml_rag.hit[];
  _missing jsonb;
BEGIN
  SELECT r.hits, r.missing INTO _hits, _missing FROM ml_rag._retrieve($1, ml_rag._parse_rag_options($2)) AS r;
  IF _missing IS NOT NULL THEN
    PERFORM ml_rag._raise(_missing);
  END IF;
  FOR i IN 1..cardinality(_hits) LOOP
    rank := i;
    vector_store := _hits[i].vector_store;
    document_name := _hits[i].document_name;
    document_id := _hits[i].document_id;
    segment_number := _hits[i].segment_number;
    segment := _hits[i].segment;
    distance := _hits[i].distance;
    metadata := _hits[i].metadata;
    keyword_score := _hits[i].keyword_score;
    score := _hits[i].score;
    rerank_score := _hits[i].rerank_score;
    RETURN NEXT;
  END LOOP;
END
$$;
COMMENT ON FUNCTION @extschema@.ml_rag_search(text, jsonb) IS
$$the citations of ml_rag as rows, best first; takes the options of ml_rag
document_id is null where the store's column is no integer. keyword_score: BM25. score: 0-1, of hybrid search.
rerank_score: 0-1, of option rerank. Each is null where that stage did not run. Errors: as ml_rag.$$;

CREATE FUNCTION @extschema@.ml_rag_answer(query text, options jsonb DEFAULT NULL) RETURNS jsonb
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: question to answer document
-- Calls: ml_rag._parse_rag_options, ml_rag._retrieve, ml_rag._raise, ml_rag.generate, ml_rag._get_setting
DECLARE
  _options jsonb := ml_rag._parse_rag_options($2);
  _skip_generate boolean := (_options -> 'skip_generate')::boolean;
  _retrieved record;
  _answer jsonb;
BEGIN
  _retrieved := ml_rag._retrieve($1, _options);
  IF _retrieved.missing IS NOT NULL AND (_skip_generate OR NOT (_options -> 'abstain')::boolean) THEN
    PERFORM ml_rag._raise(_retrieved.missing);
  END IF;
  _answer := jsonb_build_object(
    'citations', coalesce((
      SELECT jsonb_agg(jsonb_build_object('segment', h.segment, 'distance', h.distance,
        'document_name', h.document_name) ORDER BY h.place)
      FROM (
        SELECT p.place, (_retrieved.hits[p.place]).* FROM generate_subscripts(_retrieved.hits, 1) AS p (place)
      ) AS h), '[]'),
    'vector_store', ARRAY(SELECT s.vector_store FROM unnest(_retrieved.stores) AS s),
    'retrieval_info', jsonb_build_object('method', _retrieved.method, 'threshold', _retrieved.threshold)
      || CASE WHEN NOT (_options -> 'keyword_search')::boolean THEN '{}'
              WHEN (_options -> 'semantic_search')::boolean THEN '{"search": "hybrid"}'
              ELSE '{"search": "keyword"}' END::jsonb);
  IF _retrieved.missing IS NOT NULL THEN
    _answer := _answer || jsonb_build_object('text',
      coalesce(_options ->> 'abstain_text', ml_rag._get_setting('abstain_text')));
  ELSIF NOT _skip_generate THEN
    _answer := _answer || jsonb_build_object('text',
      ml_rag.generate($1, _options -> 'model_options', _retrieved.hits, _options -> 'prompt'));
  END IF;
  RETURN _answer;
END
$$;
COMMENT ON FUNCTION @extschema@.ml_rag_answer(text, jsonb) IS
$$answers a question from the vector stores the caller may read; the same as ml_rag, for clients that can only SELECT
Returns {"text", "citations": [{"segment", "distance", "document_name"}], "vector_store": [], "retrieval_info":
{"method", "threshold"}}. Options with ranges and defaults: SELECT * FROM ml_rag.option.
Where no segment is left and "abstain" holds, text is "abstain_text", no model is called, and citations is empty.
A marker such as [2] in the text points to that citation, counted from 1.
Errors: 22023 bad option; 22000 different dimensions; P0002 no vector store, or, where "abstain" does not hold or with
"skip_generate", nothing found or nothing within the threshold; 42501;
55000 model not available; 08006 model server; 53300 its queue is full; 57014 cancelled; 38000 the model failed.$$;

CREATE PROCEDURE @extschema@.ml_rag(query text, options jsonb DEFAULT NULL, INOUT output jsonb DEFAULT NULL)
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
-- purpose: the routine  Calls: ml_rag_answer
-- MySQL's callers put the output second and the options third; with options null the third is taken for them.
BEGIN
  output := @extschema@.ml_rag_answer($1, coalesce($2, $3));
END
$$;
COMMENT ON PROCEDURE @extschema@.ml_rag(text, jsonb, jsonb) IS
$$answers a question from the vector stores the caller may read: CALL ml_rag('What is AutoML?')
options: {"n_citations": 5, "retrieval_options": {"max_distance": "auto"}, …}; all of them with ranges and defaults:
SELECT * FROM ml_rag.option. output: the answer document, see ml_rag_answer. Errors: see ml_rag_answer.$$;

-- 81_tables.sql

-- 81_tables: the batch routines: ml_rag, ml_generate and ml_embed for every row of a table.

CREATE PROCEDURE ml_rag._commit(INOUT committed boolean DEFAULT NULL)
LANGUAGE plpython3u
AS $$
# purpose: commit where the caller's transaction allows it; false inside a transaction block or a function
# PL/pgSQL cannot try: a COMMIT inside a block with EXCEPTION is an error of its own.
from plpy import spiexceptions

try:
    plpy.commit()
except spiexceptions.InvalidTransactionTermination:
    return (False,)
return (True,)
$$;

CREATE FUNCTION ml_rag._column_reference(value text, argument text, OUT relation text, OUT column_name text)
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$
-- purpose: 'schema.table.column' as a quoted relation name and a bare column name
DECLARE
  _parts text[];
BEGIN
  BEGIN
    _parts := parse_ident(value);
  EXCEPTION WHEN invalid_parameter_value THEN
    _parts := NULL;
  END;
  IF cardinality(_parts) IS DISTINCT FROM 3 THEN
    RAISE EXCEPTION USING ERRCODE = '22023', MESSAGE = format('invalid %s', argument),
      DETAIL = format('Got %s; expected ''schema.table.column''.', coalesce(quote_literal(left(value, 200)), 'NULL'));
  END IF;
  relation := format('%I.%I', _parts[1], _parts[2]);
  column_name := _parts[3];
END
$$;

CREATE FUNCTION ml_rag._begin_table(routine text, input text, output text, options jsonb) RETURNS jsonb
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: check everything before the first row, make the output column, and return the job ml_rag._run_batch works on
-- Calls: ml_rag.parse_options, ml_rag._parse_rag_options, ml_rag._column_reference, ml_rag.embed
-- Writes: the output table, as the caller
DECLARE
  _options jsonb;
  _batch jsonb := ml_rag.parse_options(routine, CASE WHEN jsonb_typeof(options) = 'object' AND options ? 'batch_size'
    THEN jsonb_build_object('batch_size', options -> 'batch_size') END);
  _model text;
  _in record;
  _out record;
  _input regclass;
  _output regclass;
  _input_type oid;
  _type text := 'jsonb';
  _existing text;
  _comment text;
  _key name[];
  _key_types text[];
BEGIN
  _options := options;
  IF jsonb_typeof(_options) = 'object' THEN
    _options := _options - 'batch_size';
  END IF;
  CASE routine
  WHEN 'ml_rag_table' THEN
    PERFORM ml_rag._parse_rag_options(_options);
  WHEN 'ml_generate_table' THEN
    _options := ml_rag.parse_options('ml_generate', _options);
  ELSE
    _options := ml_rag.parse_options('ml_embed_row', _options);
    _model := coalesce(_options ->> 'embed_model_id', ml_rag._get_setting('embed_model_id'));
  END CASE;
  _in := ml_rag._column_reference(input, 'input_table_column');
  _out := ml_rag._column_reference(output, 'output_table_column');

  -- Reading it, if only no row, keeps the table from being dropped until the job stands; statements get its name and
  -- not the regclass, which prints as a number once it is dropped.
  EXECUTE format('SELECT FROM %s LIMIT 0', _in.relation);
  _input := _in.relation::regclass;
  SELECT a.atttypid INTO _input_type FROM pg_attribute AS a
  WHERE a.attrelid = _input AND a.attname = _in.column_name AND a.attnum > 0 AND NOT a.attisdropped;
  IF _input_type IS NULL THEN
    RAISE EXCEPTION USING ERRCODE = '42703',
      MESSAGE = format('column "%s" of relation "%s" does not exist', _in.column_name, _in.relation);
  END IF;
  SELECT array_agg(a.attname ORDER BY k.place), array_agg(format_type(a.atttypid, a.atttypmod) ORDER BY k.place)
  INTO _key, _key_types
  FROM pg_index AS x
  CROSS JOIN LATERAL unnest(x.indkey::smallint[]) WITH ORDINALITY AS k (attnum, place)
  JOIN pg_attribute AS a ON a.attrelid = x.indrelid AND a.attnum = k.attnum
  WHERE x.indrelid = _input AND x.indisprimary;
  IF _key IS NULL THEN
    RAISE EXCEPTION USING ERRCODE = '22023', MESSAGE = format('relation "%s" has no primary key', _input),
      DETAIL = 'The key says which row a result belongs to.',
      HINT = format('ALTER TABLE %s ADD PRIMARY KEY (…);', _input);
  END IF;

  IF _model IS NOT NULL THEN
    -- a first vector tells the dimensions, and whether the model works, before anything is made
    _type := format('vector(%s)', vector_dims(ml_rag.embed('dimensions', _model)));
  END IF;
  _output := to_regclass(_out.relation);
  IF _output IS NULL THEN
    EXECUTE format('CREATE TABLE %s (%s, %I %s, PRIMARY KEY (%s))', _out.relation,
      (SELECT string_agg(format('%I %s', k, t), ', ') FROM unnest(_key, _key_types) AS u (k, t)),
      _out.column_name, _type, (SELECT string_agg(quote_ident(k), ', ') FROM unnest(_key) AS k));
    _output := _out.relation::regclass;
  ELSE
    EXECUTE format('SELECT FROM %s LIMIT 0', _out.relation);
    _output := _out.relation::regclass;
    SELECT format_type(a.atttypid, a.atttypmod) INTO _existing FROM pg_attribute AS a
    WHERE a.attrelid = _output AND a.attname = _out.column_name AND a.attnum > 0 AND NOT a.attisdropped;
    IF EXISTS (SELECT FROM unnest(_key) AS k WHERE NOT EXISTS (
        SELECT FROM pg_attribute AS a WHERE a.attrelid = _output AND a.attname = k AND NOT a.attisdropped)) THEN
      RAISE EXCEPTION USING ERRCODE = '22023',
        MESSAGE = format('relation "%s" lacks the key of "%s"', _output, _input),
        DETAIL = format('Key: %s.', array_to_string(_key, ', ')),
        HINT = 'Name a table that does not exist yet; it is made with the right key.';
    ELSIF _existing IS NULL THEN
      EXECUTE format('ALTER TABLE %s ADD COLUMN %I %s', _out.relation, _out.column_name, _type);
    ELSIF _model IS NULL AND _existing NOT IN ('json', 'jsonb') OR _model IS NOT NULL AND _existing <> _type THEN
      RAISE EXCEPTION USING ERRCODE = '22023',
        MESSAGE = format('column "%s" of relation "%s" has the wrong type', _out.column_name, _output),
        DETAIL = format('It is %s; %s writes %s.', _existing, routine, _type);
    END IF;
    _type := coalesce(_existing, _type);
  END IF;

  IF _model IS NOT NULL THEN
    _comment := (SELECT col_description(_output, a.attnum) FROM pg_attribute AS a
                 WHERE a.attrelid = _output AND a.attname = _out.column_name);
    _existing := substring(_comment FROM 'GENAI_OPTIONS=[^ ]*EMBED_MODEL_ID=([^,; ]+)');
    IF _existing IS NULL THEN
      EXECUTE format('COMMENT ON COLUMN %s.%I IS %L', _out.relation, _out.column_name,
        concat_ws(' ', _comment, 'GENAI_OPTIONS=EMBED_MODEL_ID=' || _model));
    ELSIF _existing <> _model THEN
      RAISE EXCEPTION USING ERRCODE = '22023',
        MESSAGE = format('column "%s" of relation "%s" holds vectors of another model', _out.column_name, _output),
        DETAIL = format('It holds %s, asked for was %s.', _existing, _model),
        HINT = 'Write to another column, or name that model in "embed_model_id".';
    END IF;
  END IF;

  RETURN jsonb_build_object(
    'routine', routine, 'options', _options, 'model', _model, 'batch_size', _batch -> 'batch_size',
    'last', NULL, 'done', false, 'rows', 0, 'succeeded', 0, 'failed', 0, 'first_error', NULL,
    -- one batch of the rows that have no result yet, or a failed one, after the key $1
    'read', format(
      'SELECT ARRAY[%s]::text[] AS key, t.%I::text AS input FROM %s AS t %s WHERE t.%I IS NOT NULL AND %s '
      'AND ($1 IS NULL OR (%s) > (%s)) ORDER BY %s LIMIT $2',
      (SELECT string_agg(format('t.%I::text', k), ', ') FROM unnest(_key) AS k), _in.column_name, _in.relation,
      CASE WHEN _input <> _output THEN format('LEFT JOIN %s AS o ON (%s) = (%s)', _out.relation,
        (SELECT string_agg(format('o.%I', k), ', ') FROM unnest(_key) AS k),
        (SELECT string_agg(format('t.%I', k), ', ') FROM unnest(_key) AS k)) END,
      _in.column_name,
      format(CASE WHEN _model IS NULL THEN '(%1$s.%2$I IS NULL OR %1$s.%2$I ->> ''error'' IS NOT NULL)'
                  ELSE '%1$s.%2$I IS NULL' END,
        CASE WHEN _input <> _output THEN 'o' ELSE 't' END, _out.column_name),
      (SELECT string_agg(format('t.%I', k), ', ') FROM unnest(_key) AS k),
      (SELECT string_agg(format('$1[%s]::%s', i, t), ', ') FROM unnest(_key_types) WITH ORDINALITY AS u (t, i)),
      (SELECT string_agg(format('t.%I', k), ', ') FROM unnest(_key) AS k)),
    'update', format('UPDATE %s SET %I = $2::%s WHERE (%s) = (%s)', _out.relation, _out.column_name, _type,
      (SELECT string_agg(quote_ident(k), ', ') FROM unnest(_key) AS k),
      (SELECT string_agg(format('$1[%s]::%s', i, t), ', ') FROM unnest(_key_types) WITH ORDINALITY AS u (t, i))),
    -- what 'update' is narrowed by, so that an error takes no result's place; and whether a row has a result
    'lacking', CASE WHEN _model IS NULL THEN format(' AND (%1$I IS NULL OR %1$I ->> ''error'' IS NOT NULL)',
      _out.column_name) END,
    'result', format('SELECT FROM %s WHERE %I IS NOT NULL %s AND (%s) = (%s)', _out.relation, _out.column_name,
      CASE WHEN _model IS NULL THEN format('AND %I ->> ''error'' IS NULL', _out.column_name) END,
      (SELECT string_agg(quote_ident(k), ', ') FROM unnest(_key) AS k),
      (SELECT string_agg(format('$1[%s]::%s', i, t), ', ') FROM unnest(_key_types) WITH ORDINALITY AS u (t, i))),
    'insert', CASE WHEN _input <> _output THEN format(
      'INSERT INTO %s (%s, %I) VALUES (%s, $2::%s) ON CONFLICT DO NOTHING', _out.relation,
      (SELECT string_agg(quote_ident(k), ', ') FROM unnest(_key) AS k), _out.column_name,
      (SELECT string_agg(format('$1[%s]::%s', i, t), ', ') FROM unnest(_key_types) WITH ORDINALITY AS u (t, i)),
      _type) END);
END
$$;

CREATE FUNCTION ml_rag._write_result(job jsonb, key text[], value text) RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: one row's result into the output table  Writes: the output table, as the caller
-- Another call may insert the row at the same time; then both have an answer, and the later one stays.
DECLARE
  _statement text;
  _n bigint;
BEGIN
  FOREACH _statement IN ARRAY ARRAY['update', 'insert', 'update'] LOOP
    CONTINUE WHEN job ->> _statement IS NULL;
    EXECUTE job ->> _statement USING key, value;
    GET DIAGNOSTICS _n = ROW_COUNT;
    EXIT WHEN _n > 0;
  END LOOP;
  IF _n = 0 AND job ->> 'insert' IS NOT NULL THEN
    RAISE EXCEPTION USING ERRCODE = '23505', MESSAGE = 'the output table took no row for this result',
      DETAIL = 'A trigger left it out, or a unique constraint beside the key holds its values already.';
  END IF;
END
$$;

CREATE FUNCTION ml_rag._write_error(job jsonb, key text[], value text) RETURNS boolean
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: one row's error into the output table (null: nowhere); false where the row has a result of another call
-- A row that takes no error, as one that was deleted meanwhile, is in the counts all the same.
-- Writes: the output table, as the caller
DECLARE
  _statement text;
  _n bigint := 0;
BEGIN
  IF value IS NOT NULL THEN
    FOREACH _statement IN ARRAY ARRAY[concat(job ->> 'update', job ->> 'lacking'), job ->> 'insert',
                                      concat(job ->> 'update', job ->> 'lacking')] LOOP
      CONTINUE WHEN _statement IS NULL;
      EXECUTE _statement USING key, value;
      GET DIAGNOSTICS _n = ROW_COUNT;
      IF _n > 0 THEN
        RETURN true;
      END IF;
    END LOOP;
  END IF;
  EXECUTE job ->> 'result' USING key;
  GET DIAGNOSTICS _n = ROW_COUNT;
  RETURN _n = 0;
END
$$;

CREATE FUNCTION ml_rag._run_row(job jsonb, key text[], input text, vector vector, OUT error text)
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: one row: compute, write; what fails becomes the row's error and does not stop the batch
-- Calls: the routine of the job, ml_rag._write_result, ml_rag._write_error
-- A cancelled statement and a lost model server do end the call: the rows left over would all fail the same way.
DECLARE
  _routine text := job ->> 'routine';
  _state text;
  _message text;
  _detail text;
BEGIN
  BEGIN
    PERFORM ml_rag._write_result(job, key, CASE _routine
      WHEN 'ml_rag_table' THEN @extschema@.ml_rag_answer(input, job -> 'options')::text
      WHEN 'ml_generate_table' THEN @extschema@.ml_generate(input, job -> 'options')::text
      ELSE coalesce(vector, ml_rag.embed(input, job ->> 'model', 'document'))::text END);
  EXCEPTION
    WHEN connection_failure THEN
      RAISE;
    WHEN OTHERS THEN
      GET STACKED DIAGNOSTICS _state = RETURNED_SQLSTATE, _message = MESSAGE_TEXT, _detail = PG_EXCEPTION_DETAIL;
      error := concat(_message, ' (', _state, ')', ': ' || nullif(_detail, ''));
  END;
  IF error IS NOT NULL AND NOT ml_rag._write_error(job, key, (CASE _routine
      WHEN 'ml_generate_table' THEN jsonb_build_object('text', NULL, 'error', error)
      WHEN 'ml_rag_table' THEN jsonb_build_object('error', error) END)::text) THEN
    error := NULL;
  END IF;
END
$$;

CREATE FUNCTION ml_rag._run_batch(job jsonb) RETURNS jsonb
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: the next rows of a job; returns the job with its counts and its place moved on
-- Calls: ml_rag._embed, ml_rag._run_row  Reads: the input table, as the caller
DECLARE
  _size integer := (job ->> 'batch_size')::integer;
  _row record;
  _keys text[] := '{}';   -- of each row, as one element: its key in array text form
  _inputs text[] := '{}';
  _vectors vector[];
  _failed integer := 0;
  _error text;
  _first_error text := job ->> 'first_error';
BEGIN
  FOR _row IN EXECUTE job ->> 'read' USING (job ->> 'last')::text[], _size LOOP
    _keys := _keys || _row.key::text;
    _inputs := _inputs || _row.input;
  END LOOP;
  IF job ->> 'routine' = 'ml_embed_table' AND cardinality(_inputs) > 0 THEN
    -- all at once; where that fails the rows are tried one by one, to find the one at fault
    -- (a blank text is an error of its row, not of the batch, so it travels as something else)
    SELECT o.vectors INTO _vectors FROM ml_rag._embed(
      ARRAY(SELECT CASE WHEN i ~ '\S' THEN i ELSE 'blank' END FROM unnest(_inputs) WITH ORDINALITY AS u (i, place)
            ORDER BY place), job ->> 'model', 'document') AS o;
  END IF;
  FOR i IN 1..cardinality(_inputs) LOOP
    _error := ml_rag._run_row(job, _keys[i]::text[], _inputs[i],
      CASE WHEN _inputs[i] ~ '\S' THEN _vectors[i] END);
    IF _error IS NOT NULL THEN
      _failed := _failed + 1;
      _first_error := coalesce(_first_error, format('row %s: %s', _keys[i], _error));
    END IF;
  END LOOP;
  RETURN job || jsonb_build_object(
    'last', _keys[cardinality(_keys)],
    'done', cardinality(_inputs) < _size,
    'rows', (job ->> 'rows')::bigint + cardinality(_inputs),
    'succeeded', (job ->> 'succeeded')::bigint + cardinality(_inputs) - _failed,
    'failed', (job ->> 'failed')::bigint + _failed,
    'first_error', _first_error);
END
$$;

CREATE FUNCTION ml_rag._end_table(job jsonb) RETURNS jsonb
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: what the batch routines answer, and a warning where rows failed
BEGIN
  IF (job ->> 'failed')::bigint > 0 THEN
    RAISE WARNING USING ERRCODE = '01000',
      MESSAGE = format('%s of %s rows failed', job ->> 'failed', job ->> 'rows'),
      DETAIL = format('First error: %s', job ->> 'first_error'),
      HINT = 'Rows that failed are tried again by the next call.';
  END IF;
  RETURN jsonb_build_object('rows', job -> 'rows', 'succeeded', job -> 'succeeded', 'failed', job -> 'failed',
    'first_error', job -> 'first_error');
END
$$;

CREATE PROCEDURE ml_rag._run_table(routine text, input text, output text, options jsonb, INOUT result jsonb)
LANGUAGE plpgsql
AS $$
-- purpose: the loop of the batch routines, a commit after each batch where the caller's transaction allows it
-- Calls: ml_rag._begin_table, ml_rag._run_batch, ml_rag._commit, ml_rag._end_table
-- A procedure that commits can have no SET clause, so every name here is qualified and no operator is used.
DECLARE
  _job pg_catalog.jsonb;
  _committed pg_catalog.bool;
BEGIN
  _job := ml_rag._begin_table(routine, input, output, options);
  LOOP
    CALL ml_rag._commit(_committed);
    EXIT WHEN pg_catalog.jsonb_extract_path_text(_job, 'done')::pg_catalog.bool;
    _job := ml_rag._run_batch(_job);
  END LOOP;
  result := ml_rag._end_table(_job);
END
$$;

CREATE PROCEDURE @extschema@.ml_rag_table(
  input_table_column text, output_table_column text, options jsonb DEFAULT NULL, INOUT result jsonb DEFAULT NULL)
LANGUAGE plpgsql
AS $$
-- Calls: ml_rag._run_table
BEGIN
  CALL ml_rag._run_table('ml_rag_table', input_table_column, output_table_column, options, result);
END
$$;
COMMENT ON PROCEDURE @extschema@.ml_rag_table(text, text, jsonb, jsonb) IS
$$ml_rag for every row: CALL ml_rag_table('public.questions.question', 'public.questions.answer')
The input table needs a primary key. The output column (jsonb) is made where it does not exist, the output table too,
with the same key. Rows that have a result are left alone, null inputs too; rows without a result, or with an error, are
computed: what failed is tried again by each call, a blank text included, which costs no model anything. Commits
after each batch ("batch_size" rows, default 100) outside a transaction block. options: those of ml_rag.
result: {"rows", "succeeded", "failed", "first_error"}; a row that failed holds {"error": …}.
Errors: 22023, 42P01, 42703, 42501; 08006 model server lost: what was computed is kept and the next call goes on.$$;

CREATE PROCEDURE @extschema@.ml_generate_table(
  input_table_column text, output_table_column text, options jsonb DEFAULT NULL, INOUT result jsonb DEFAULT NULL)
LANGUAGE plpgsql
AS $$
-- Calls: ml_rag._run_table
BEGIN
  CALL ml_rag._run_table('ml_generate_table', input_table_column, output_table_column, options, result);
END
$$;
COMMENT ON PROCEDURE @extschema@.ml_generate_table(text, text, jsonb, jsonb) IS
$$ml_generate for every row: CALL ml_generate_table('public.texts.prompt', 'public.texts.answer')
Tables, batches, result and errors: as ml_rag_table. options: those of ml_generate.$$;

CREATE PROCEDURE @extschema@.ml_embed_table(
  input_table_column text, output_table_column text, options jsonb DEFAULT NULL, INOUT result jsonb DEFAULT NULL)
LANGUAGE plpgsql
AS $$
-- Calls: ml_rag._run_table
BEGIN
  CALL ml_rag._run_table('ml_embed_table', input_table_column, output_table_column, options, result);
END
$$;
COMMENT ON PROCEDURE @extschema@.ml_embed_table(text, text, jsonb, jsonb) IS
$$embeds a column: CALL ml_embed_table('public.texts.segment', 'public.texts.segment_embedding')
The output column is made as vector(n) of the model's dimensions, and its comment marks it, so that the table is found
as a vector store. Tables, result and errors: as ml_rag_table; a row that failed stays null. options: embed_model_id,
batch_size (rows of one call to the model and between two commits, default 1000).$$;

-- 82_store.sql

-- 82_store: vector stores as tables: make, check, write, index. 83_load fills them.

CREATE FUNCTION ml_rag._store_name(options jsonb, default_name text, path name[], OUT schema_name name,
  OUT table_name name)
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$
-- purpose: which table: the options, else the first in the caller's search_path, else where the caller may create it
-- Calls: ml_rag._bad_option
BEGIN
  table_name := coalesce(options ->> 'table_name', default_name);
  IF octet_length(coalesce(options ->> 'table_name', '')) > 63 THEN
    PERFORM ml_rag._bad_option('table_name', options -> 'table_name', 'at most 63 bytes');
  END IF;
  IF options ? 'schema_name' THEN
    SELECT n.nspname INTO schema_name FROM pg_namespace AS n WHERE n.nspname = options ->> 'schema_name';
    IF NOT FOUND THEN
      PERFORM ml_rag._bad_option('schema_name', options -> 'schema_name', 'a schema that exists',
        'CREATE SCHEMA makes one.');
    END IF;
    RETURN;
  END IF;
  SELECT p.entry INTO schema_name FROM unnest(path) WITH ORDINALITY AS p (entry, place)
  JOIN pg_namespace AS n ON n.nspname = p.entry
  LEFT JOIN pg_class AS c ON c.relnamespace = n.oid AND c.relname = _store_name.table_name
  WHERE c.oid IS NOT NULL OR has_schema_privilege(n.oid, 'CREATE') AND n.nspname !~ '^pg_'
  ORDER BY c.oid IS NULL, p.place LIMIT 1;
  IF NOT FOUND THEN
    RAISE EXCEPTION USING ERRCODE = '42501', MESSAGE = 'there is no schema to create the vector store in',
      DETAIL = format('The search_path has: %s.', coalesce(nullif(array_to_string(path, ', '), ''), 'nothing')),
      HINT = 'Name a schema that you may create tables in, in "schema_name".';
  END IF;
END
$$;

CREATE FUNCTION ml_rag._store_key(schema_name name, table_name name) RETURNS bigint
LANGUAGE sql IMMUTABLE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$
-- purpose: what loads into one store lock; by name and not by oid, since two may both be about to create it
SELECT hashtextextended(format('ml_rag load %I.%I', $1, $2), 0)
$$;

CREATE FUNCTION ml_rag._store_key(store oid) RETURNS bigint
LANGUAGE plpgsql VOLATILE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$
-- Calls: ml_rag._store_key
DECLARE
  _key bigint;
BEGIN
  SELECT ml_rag._store_key(n.nspname, c.relname) INTO _key
  FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace WHERE c.oid = store;
  IF _key IS NULL THEN
    RAISE EXCEPTION USING ERRCODE = '42P01', MESSAGE = 'the vector store does not exist, or no longer',
      DETAIL = 'It was dropped while documents were loaded into it.',
      HINT = 'Call again: vector_store_load makes the store anew.';
  END IF;
  RETURN _key;
END
$$;

CREATE FUNCTION ml_rag._lock_store(schema_name name, table_name name) RETURNS void
LANGUAGE sql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: one load at a time into a store, until the end of the transaction; the wait can be cancelled
SELECT pg_advisory_xact_lock(ml_rag._store_key($1, $2))
$$;

CREATE FUNCTION ml_rag._lock_store(store oid) RETURNS void
LANGUAGE sql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: the same for a store that exists; complains where it no longer does
SELECT pg_advisory_xact_lock(ml_rag._store_key($1))
$$;

CREATE FUNCTION ml_rag._hold_store(store oid) RETURNS bigint
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: the same across the transactions of one call; returns the key to be unlocked
DECLARE
  _key bigint := ml_rag._store_key(store);
BEGIN
  PERFORM pg_advisory_lock(_key);
  RETURN _key;
END
$$;

CREATE FUNCTION ml_rag._check_store(store regclass, embed_model_id text, OUT model_id text, OUT dimensions integer,
  OUT embedding_type text)
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$
-- purpose: whether documents can be loaded into a relation; embed_model_id null = whatever its marker says
DECLARE
  _wrong text;
BEGIN
  IF NOT EXISTS (SELECT FROM pg_class AS c WHERE c.oid = store) THEN
    RAISE EXCEPTION USING ERRCODE = '42P01', MESSAGE = 'the vector store does not exist, or no longer',
      DETAIL = format('There is no table of oid %s.', store::oid),
      HINT = 'ml_rag.create_store and vector_store_load make one.';
  ELSIF (SELECT c.relkind NOT IN ('r', 'p') FROM pg_class AS c WHERE c.oid = store) THEN
    RAISE EXCEPTION USING ERRCODE = '22023', MESSAGE = format('relation "%s" is no table', store);
  END IF;
  SELECT string_agg(format('%s %s', w.name, w.types[1]), ', ') INTO _wrong
  FROM (VALUES ('document_name', '{text,character varying}'::text[]), ('metadata', '{jsonb}'),
               ('document_id', '{bigint,integer,numeric}'), ('segment_number', '{integer,bigint}'),
               ('segment', '{text,character varying}'), ('segment_embedding', '{vector,halfvec}')) AS w (name, types)
  WHERE NOT EXISTS (
    SELECT FROM pg_attribute AS a JOIN pg_type AS t ON t.oid = a.atttypid
    WHERE a.attrelid = store AND a.attname = w.name AND a.attnum > 0 AND NOT a.attisdropped
      AND (format_type(a.atttypid, NULL) = ANY (w.types)
           OR a.atttypid IN ('vector'::regtype, 'halfvec'::regtype) AND t.typname = ANY (w.types)));
  IF _wrong IS NOT NULL THEN
    RAISE EXCEPTION USING ERRCODE = '22023', MESSAGE = format('table "%s" is no vector store', store),
      DETAIL = format('Columns missing or of another type: %s.', _wrong),
      HINT = 'Name a table that does not exist yet in "table_name"; it is made with the right columns.';
  END IF;
  SELECT t.typname, nullif(a.atttypmod, -1),
    substring(col_description(store, a.attnum) FROM 'GENAI_OPTIONS=[^ ]*EMBED_MODEL_ID=([^,; ]+)')
  INTO embedding_type, dimensions, model_id
  FROM pg_attribute AS a JOIN pg_type AS t ON t.oid = a.atttypid
  WHERE a.attrelid = store AND a.attname = 'segment_embedding';
  IF model_id IS NULL THEN
    RAISE EXCEPTION USING ERRCODE = '22023',
      MESSAGE = format('column "segment_embedding" of table "%s" does not say which model its vectors are of', store),
      HINT = format('COMMENT ON COLUMN %s.segment_embedding IS ''GENAI_OPTIONS=EMBED_MODEL_ID=…'';', store);
  ELSIF model_id <> embed_model_id THEN
    RAISE EXCEPTION USING ERRCODE = '22023', MESSAGE = format('vector store "%s" holds vectors of another model', store),
      DETAIL = format('It holds %s, asked for was %s.', model_id, embed_model_id),
      HINT = 'Name another table in "table_name", or leave "embed_model_id" out.';
  END IF;
END
$$;

CREATE FUNCTION ml_rag._make_store(schema_name name, table_name name, model_id text, description text, language text)
RETURNS regclass
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: an empty vector store (SPEC section 5), with its keyword index
-- Calls: ml_rag.embed, ml_rag._index_keywords  Writes: a new table, as the caller
DECLARE
  -- a first vector tells the dimensions, and whether the model works, before anything is made
  _dimensions integer := vector_dims(ml_rag.embed('dimensions', model_id));
  _name text := format('%I.%I', schema_name, table_name);
  _message text;
  _hint text;
BEGIN
  IF model_id ~ '[\s,;]' THEN
    RAISE EXCEPTION USING ERRCODE = '22023', MESSAGE = 'the model id cannot stand in the marker of a vector store',
      DETAIL = format('Model id %L; blanks, commas and semicolons end the marker.', model_id);
  END IF;
  EXECUTE format($sql$
    CREATE TABLE %s (
      document_name     text NOT NULL,
      metadata          jsonb NOT NULL,
      document_id       bigint NOT NULL,
      segment_number    integer NOT NULL,
      segment           text NOT NULL,
      segment_embedding vector(%s) NOT NULL,
      PRIMARY KEY (document_id, segment_number)
    )$sql$, _name, _dimensions);
  -- what refresh asks for each file, and what the filters on documents use
  EXECUTE format('CREATE INDEX ON %s (document_name)', _name);
  EXECUTE format('COMMENT ON COLUMN %s.segment_embedding IS %L', _name, 'GENAI_OPTIONS=EMBED_MODEL_ID=' || model_id);
  IF description IS NOT NULL THEN
    EXECUTE format('COMMENT ON TABLE %s IS %L', _name, description);
  END IF;
  BEGIN
    PERFORM ml_rag._index_keywords(_name::regclass, jsonb_build_object('language', language), true);
  EXCEPTION WHEN object_not_in_prerequisite_state THEN
    -- a server without numpy can still be searched by vectors
    GET STACKED DIAGNOSTICS _message = MESSAGE_TEXT, _hint = PG_EXCEPTION_HINT;
    RAISE WARNING USING ERRCODE = '01000', MESSAGE = format('%s gets no keyword index: %s', _name, _message), HINT = _hint;
  END;
  RETURN _name::regclass;
END
$$;

CREATE FUNCTION ml_rag._document_states(store regclass, names text[])
RETURNS TABLE (document_name text, sha256 text, made_with text)
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: which of the documents the store has, and what they were made of  Reads: the store, as the caller
BEGIN
  RETURN QUERY EXECUTE format($sql$
    SELECT n, t.metadata #>> '{source,sha256}', t.metadata #>> '{source,made_with}'
    FROM unnest($1) AS n
    CROSS JOIN LATERAL (SELECT s.metadata FROM %s AS s WHERE s.document_name = n LIMIT 1) AS t$sql$, ml_rag._relation_name(store))
  USING names;
END
$$;

CREATE FUNCTION ml_rag._replace_document(store oid, name text) RETURNS bigint
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: delete what the store has of a document; returns the id its new segments get
-- A document keeps its id, a new one gets the next; the lock makes that safe. Where row-level security may hide rows
-- from the caller the next one may be taken: there the id is drawn from so many that another's is hardly ever met, and
-- backend/store.py tries again where it is.
-- Calls: ml_rag._lock_store, ml_rag._relation_name  Writes: the store, as the caller
DECLARE
  _relation text;
  _most bigint;
  _id bigint;
  _is_taken boolean := true;
BEGIN
  PERFORM ml_rag._lock_store(store);
  _relation := ml_rag._relation_name(store);
  EXECUTE format('SELECT min(s.document_id) FROM %s AS s WHERE s.document_name = $1', _relation)
    INTO _id USING name;
  IF _id IS NOT NULL THEN
    EXECUTE format('DELETE FROM %s AS s WHERE s.document_name = $1', _relation) USING name;
  ELSIF row_security_active(store) THEN
    -- up to 2^53, which JSON's readers keep exactly
    _most := CASE (SELECT a.atttypid FROM pg_attribute AS a WHERE a.attrelid = store AND a.attname = 'document_id')
      WHEN 'integer'::regtype THEN 2147483647 ELSE 9007199254740991 END;
    WHILE _is_taken LOOP
      _id := 1 + floor(random() * _most)::bigint;
      EXECUTE format('SELECT EXISTS (SELECT FROM %s AS s WHERE s.document_id = $1)', _relation)
        INTO _is_taken USING _id;
    END LOOP;
  ELSE
    EXECUTE format('SELECT coalesce(max(s.document_id), 0) + 1 FROM %s AS s', _relation) INTO _id;
  END IF;
  RETURN _id;
END
$$;

CREATE FUNCTION ml_rag._insert_segments(
  store oid, name text, id bigint, first integer, metadata jsonb[], segments text[], vectors text[]
) RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: segments of one document, numbered from first  Writes: the store, as the caller
BEGIN
  EXECUTE format($sql$
    INSERT INTO %s (document_name, metadata, document_id, segment_number, segment, segment_embedding)
    SELECT $1, u.metadata, $2, $3 + u.place - 1, u.segment, u.embedding::vector
    FROM unnest($4, $5, $6) WITH ORDINALITY AS u (metadata, segment, embedding, place)
    $sql$, ml_rag._relation_name(store))
  USING name, id, first, metadata, segments, vectors;
END
$$;

CREATE FUNCTION ml_rag.index_store(store regclass, distance_metric text DEFAULT NULL) RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: the approximate index of a store, where there is none for the metric, the keyword index tidied, and fresh
-- statistics
-- Calls: ml_rag.parse_options, ml_rag._relation_name, ml_rag.fold_keyword_index  Writes: an index, as the caller
DECLARE
  _metric text := ml_rag.parse_options('vector_store_load',
    jsonb_build_object('distance_metric', distance_metric)) ->> 'distance_metric';
  _type text;
  _dimensions integer;
  _class text;
  _indexed boolean;
  -- looked up once: dropped later on, the statements below name what does not exist
  _relation text := ml_rag._relation_name(store);
BEGIN
  IF NOT pg_has_role(current_user, (SELECT c.relowner FROM pg_class AS c WHERE c.oid = store), 'USAGE') THEN
    RAISE NOTICE USING MESSAGE = format('index and statistics of "%s" are left to its owner', store);
    RETURN;
  END IF;
  SELECT t.typname, a.atttypmod INTO _type, _dimensions
  FROM pg_attribute AS a JOIN pg_type AS t ON t.oid = a.atttypid
  WHERE a.attrelid = store AND a.attname = 'segment_embedding' AND NOT a.attisdropped;
  _class := format('%s_%s_ops', _type, CASE _metric WHEN 'COSINE' THEN 'cosine' WHEN 'DOT' THEN 'ip' ELSE 'l2' END);
  SELECT EXISTS (
    SELECT FROM pg_index AS x
    JOIN pg_class AS i ON i.oid = x.indexrelid
    JOIN pg_am AS m ON m.oid = i.relam AND m.amname IN ('hnsw', 'ivfflat')
    JOIN pg_opclass AS o ON o.oid = x.indclass[0]
    WHERE x.indrelid = store AND (distance_metric IS NULL OR o.opcname = _class)) INTO _indexed;
  IF _indexed THEN
    NULL;
  ELSIF _dimensions > (CASE _type WHEN 'halfvec' THEN 4000 ELSE 2000 END) THEN
    RAISE NOTICE USING MESSAGE = format('"%s" gets no index', store),
      DETAIL = format('An hnsw index holds vectors of 2000 dimensions and half vectors of 4000; the column is %s(%s).',
        _type, _dimensions),
      HINT = 'Searches scan the table.';
  ELSIF _dimensions > 0 THEN
    EXECUTE format('CREATE INDEX ON %s USING hnsw (segment_embedding %s)', _relation, _class);
  END IF;
  PERFORM ml_rag.fold_keyword_index(store)
  WHERE EXISTS (SELECT FROM ml_rag.keyword_own_store AS k WHERE k.store = index_store.store);
  EXECUTE format('ANALYZE %s', _relation);
END
$$;
COMMENT ON FUNCTION ml_rag.index_store(regclass, text) IS
$$builds the approximate index (hnsw) of a vector store for a metric, unless it has one, and gathers statistics
distance_metric: COSINE, DOT, EUCLIDEAN; null = COSINE, and any approximate index the store has already will do.
vector_store_load calls it at its end; call it after load_documents. Errors: 22023, 42P01.$$;

CREATE FUNCTION ml_rag.create_store(name text, options jsonb DEFAULT NULL) RETURNS regclass
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: a vector store to load into, made unless it is there; not qualified = in the current schema
-- Calls: ml_rag.parse_options, ml_rag._lock_store, ml_rag._check_store, ml_rag._make_store, ml_rag._get_setting
DECLARE
  _options jsonb := ml_rag.parse_options('create_store', $2);
  _parts text[];
  _store regclass;
BEGIN
  BEGIN
    _parts := parse_ident(create_store.name);
  EXCEPTION WHEN invalid_parameter_value THEN
    NULL;
  END;
  IF cardinality(_parts) IS DISTINCT FROM 2 THEN
    RAISE EXCEPTION USING ERRCODE = '22023', MESSAGE = 'invalid name of a vector store',
      DETAIL = format('Got %s; expected ''schema.table''.', coalesce(quote_literal(left(create_store.name, 200)), 'NULL'));
  END IF;
  PERFORM ml_rag._store_name(jsonb_build_object('schema_name', _parts[1], 'table_name', _parts[2]), NULL, NULL);
  PERFORM ml_rag._lock_store(_parts[1]::name, _parts[2]::name);
  _store := to_regclass(format('%I.%I', _parts[1], _parts[2]));
  IF _store IS NULL THEN
    RETURN ml_rag._make_store(_parts[1], _parts[2],
      coalesce(_options ->> 'embed_model_id', ml_rag._get_setting('embed_model_id')), _options ->> 'description',
      _options ->> 'language');
  END IF;
  PERFORM ml_rag._check_store(_store, _options ->> 'embed_model_id');
  RETURN _store;
END
$$;
COMMENT ON FUNCTION ml_rag.create_store(text, jsonb) IS
$$makes an empty vector store, or checks the one that is there: ml_rag.create_store('public.handbook')
options: embed_model_id, description, language (of its keyword index). Errors: 22023 bad option, table that is no vector store or of another model;
42501; 55000 model not available; 08006.$$;

CREATE FUNCTION ml_rag.documents_below(store regclass, prefix text) RETURNS SETOF text
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- Calls: ml_rag._check_store  Reads: the store, as the caller
BEGIN
  PERFORM ml_rag._check_store(store, NULL);
  RETURN QUERY EXECUTE format(
    'SELECT DISTINCT s.document_name::text FROM %s AS s WHERE starts_with(s.document_name, $1)',
    ml_rag._relation_name(store)) USING prefix;
END
$$;
COMMENT ON FUNCTION ml_rag.documents_below(regclass, text) IS
$$names of the documents of a vector store that begin with a prefix, such as the path of a folder
Errors: 22023 no vector store; 42501.$$;

CREATE FUNCTION ml_rag.remove_documents(store regclass, names text[]) RETURNS bigint
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- Calls: ml_rag._check_store, ml_rag._lock_store  Writes: the store, as the caller
DECLARE
  _n bigint;
BEGIN
  PERFORM ml_rag._check_store(store, NULL);
  PERFORM ml_rag._lock_store(store::oid);
  EXECUTE format($sql$
    WITH gone AS (
      DELETE FROM %s AS s WHERE s.document_name = ANY ($1) AND s.metadata ? 'source' RETURNING s.document_name
    )
    SELECT count(DISTINCT g.document_name) FROM gone AS g$sql$, ml_rag._relation_name(store))
  INTO _n USING names;
  RETURN _n;
END
$$;
COMMENT ON FUNCTION ml_rag.remove_documents(regclass, text[]) IS
$$removes documents that were loaded into a vector store; returns how many it had of them
Rows that no load has made are left alone. Errors: 22023 no vector store; 42501.$$;

-- 83_load.sql

-- 83_load: documents to vector stores: server files by vector_store_load, anything by load_documents.

CREATE FUNCTION ml_rag._check_file_privilege() RETURNS void
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$
-- purpose: stop a caller who may not read the server's files
-- Python below calls this too before it opens anything: those functions can be called by themselves.
BEGIN
  IF NOT pg_has_role(current_user, 'pg_read_server_files', 'USAGE') THEN
    RAISE EXCEPTION USING ERRCODE = '42501', MESSAGE = 'permission denied to read files of the server',
      DETAIL = format('Only roles with privileges of "pg_read_server_files" may; %I has none.', current_user),
      HINT = 'Ask for GRANT pg_read_server_files, or load from the client''s side with "ml-rag load".';
  END IF;
END
$$;

CREATE FUNCTION ml_rag._find_files(uri text, OUT found jsonb, OUT error jsonb)
LANGUAGE plpython3u VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
if "ml_rag" not in GD or GD["ml_rag"].VERSION != "0.1.0":
    if error := plpy.execute("SELECT ml_rag._load_backend() AS error")[0]["error"]:
        return None, error
return GD["ml_rag"].find_files(plpy, uri)
$$;

CREATE PROCEDURE ml_rag._load_files(job jsonb, INOUT outcome jsonb DEFAULT NULL, INOUT error jsonb DEFAULT NULL)
LANGUAGE plpython3u
AS $$
# purpose: read, send, insert, commit, batch by batch; the commits are in Python so that no error between two batches
# can leave a request to the model server open. A procedure that commits can have no SET clause.
if "ml_rag" not in GD or GD["ml_rag"].VERSION != "0.1.0":
    if error := plpy.execute("SELECT ml_rag._load_backend() AS error")[0]["error"]:
        return None, error
return GD["ml_rag"].load_files(plpy, job)
$$;

CREATE FUNCTION ml_rag._load_contents(job jsonb, names text[], contents bytea[], OUT outcome jsonb, OUT error jsonb)
LANGUAGE plpython3u VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
if "ml_rag" not in GD or GD["ml_rag"].VERSION != "0.1.0":
    if error := plpy.execute("SELECT ml_rag._load_backend() AS error")[0]["error"]:
        return None, error
return GD["ml_rag"].load_contents(plpy, job, names, contents)
$$;

CREATE FUNCTION ml_rag._parse_load_options(routine text, options jsonb) RETURNS jsonb
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$
-- purpose: the options of a loading routine, with those of the object chunking
-- Calls: ml_rag.parse_options, ml_rag._bad_option
DECLARE
  _parsed jsonb := ml_rag.parse_options($1, $2);
  _chunking jsonb := ml_rag.parse_options('chunking', _parsed -> 'chunking');
BEGIN
  IF (_chunking ->> 'overlap_tokens')::integer > (_chunking ->> 'segment_tokens')::integer / 2 THEN
    PERFORM ml_rag._bad_option('overlap_tokens', _chunking -> 'overlap_tokens',
      format('at most half of "segment_tokens", which is %s', _chunking ->> 'segment_tokens'));
  END IF;
  RETURN jsonb_set(_parsed, '{chunking}', _chunking);
END
$$;

CREATE FUNCTION ml_rag._load_job(store regclass, embed_model_id text, options jsonb) RETURNS jsonb
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$
-- purpose: what Python needs to know to load documents into a store; options are parsed ones
-- Calls: ml_rag._check_store
DECLARE
  _store record := ml_rag._check_store(store, embed_model_id);
  _request jsonb := jsonb_strip_nulls(jsonb_build_object('embed_model_id', _store.model_id,
    'chunking', options -> 'chunking', 'language', options -> 'language', 'ocr', options -> 'ocr'));
BEGIN
  RETURN jsonb_build_object('store', store::oid::bigint, 'dimensions', _store.dimensions,
    'refresh', coalesce(options -> 'refresh', 'true'),
    'request', _request || jsonb_strip_nulls(jsonb_build_object('formats', options -> 'formats')),
    -- a document made with other options counts as changed; which formats are wanted does not change one
    'made_with', md5(_request::text));
END
$$;

CREATE FUNCTION ml_rag._begin_load(uri text, options jsonb, path name[]) RETURNS jsonb
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: check everything before the first file, make the store where there is none, return the job
-- Calls: ml_rag._parse_load_options, ml_rag._check_file_privilege, ml_rag._find_files, ml_rag._raise,
-- ml_rag._store_name, ml_rag._lock_store, ml_rag._make_store, ml_rag._load_job, ml_rag._get_setting
DECLARE
  _options jsonb := ml_rag._parse_load_options('vector_store_load', options);
  _model text := _options ->> 'embed_model_id';
  _found record;
  _name record;
  _store regclass;
BEGIN
  IF uri IS NULL THEN
    RAISE EXCEPTION USING ERRCODE = '22023', MESSAGE = 'there is no URI',
      HINT = 'Name files as the server sees them: CALL vector_store_load(''file:///srv/docs/'').';
  END IF;
  PERFORM ml_rag._check_file_privilege();
  SELECT f.* INTO _found FROM ml_rag._find_files(uri) AS f;
  PERFORM ml_rag._raise(_found.error) WHERE _found.error IS NOT NULL;
  _name := ml_rag._store_name(_options, _found.found ->> 'table_name', path);
  PERFORM ml_rag._lock_store(_name.schema_name, _name.table_name);
  _store := to_regclass(format('%I.%I', _name.schema_name, _name.table_name));
  IF _store IS NULL THEN
    _store := ml_rag._make_store(_name.schema_name, _name.table_name,
      coalesce(_model, ml_rag._get_setting('embed_model_id')), _options ->> 'description',
      _options ->> 'language');
  END IF;
  RETURN ml_rag._load_job(_store, _model, _options) || jsonb_build_object(
    'files', _found.found -> 'files', 'base', _found.found -> 'base', 'patterns', _found.found -> 'patterns',
    -- null where the caller left it open: then any index on the store will do
    'index', CASE WHEN options ->> 'distance_metric' IS NOT NULL THEN _options -> 'distance_metric' END);
END
$$;

CREATE FUNCTION ml_rag._end_load(job jsonb, outcome jsonb) RETURNS jsonb
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: the index, a warning for each file that failed, and the result
-- Calls: ml_rag.index_store
DECLARE
  _store oid := (job ->> 'store')::oid;
  _failure record;
BEGIN
  PERFORM ml_rag._lock_store(_store);
  PERFORM ml_rag.index_store(_store, job ->> 'index');
  FOR _failure IN
    SELECT f.* FROM jsonb_to_recordset(outcome -> 'failed')
      AS f (document_name text, error text, detail text, hint text) LIMIT 20
  LOOP
    RAISE WARNING USING ERRCODE = '01000', MESSAGE = format('%s: %s', _failure.document_name, _failure.error),
      DETAIL = coalesce(_failure.detail, ''), HINT = coalesce(_failure.hint, '');
  END LOOP;
  IF jsonb_array_length(outcome -> 'failed') > 20 THEN
    RAISE WARNING USING ERRCODE = '01000',
      MESSAGE = format('%s more documents failed', jsonb_array_length(outcome -> 'failed') - 20),
      HINT = 'The result lists all of them under "failed".';
  END IF;
  RETURN jsonb_build_object('vector_store', (
      SELECT format('%s.%s', n.nspname, c.relname)
      FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace WHERE c.oid = _store))
    || outcome;
END
$$;

CREATE PROCEDURE @extschema@.vector_store_load(uri text, options jsonb DEFAULT NULL, INOUT result jsonb DEFAULT NULL)
LANGUAGE plpgsql
AS $$
-- purpose: server files to a vector store, a commit after each batch where the caller's transaction allows it
-- Calls: ml_rag._begin_load, ml_rag._load_files, ml_rag._raise, ml_rag._end_load
-- A procedure that commits can have no SET clause, so every name here is qualified and no operator is used.
DECLARE
  _job pg_catalog.jsonb;
  _outcome pg_catalog.jsonb;
  _error pg_catalog.jsonb;
BEGIN
  _job := ml_rag._begin_load(uri, options, pg_catalog.current_schemas(false));
  CALL ml_rag._load_files(_job, _outcome, _error);
  IF _error IS NOT NULL THEN
    PERFORM ml_rag._raise(_error);
  END IF;
  result := ml_rag._end_load(_job, _outcome);
END
$$;
COMMENT ON PROCEDURE @extschema@.vector_store_load(text, jsonb, jsonb) IS
$$loads files of the server into a vector store: CALL vector_store_load('file:///srv/handbook/')
uri: file:// and a path, or just an absolute path; a glob when it has ? or *; every file below when it ends in /. Hidden
files are left out, and symbolic links that lead out of the folder. The table is made where it does not exist. By
default changed files are embedded again, new ones added, those gone removed; a document keeps its id.
options with ranges and defaults: SELECT * FROM ml_rag.option WHERE routine IN ('vector_store_load', 'chunking').
result: {"vector_store", "documents": {"loaded", "changed", "unchanged", "removed", "skipped", "failed"}, "segments",
"failed": [{"document_name", "error", …}], "seconds"}. A document that fails does not stop the others, and keeps the
segments it had. Commits after each batch outside a transaction block, so that a load that breaks off can be called
again and goes on. Needs pg_read_server_files. Errors: 22023 bad option, no such file, table that is no vector store;
22000 different dimensions; 42501; 42P01 store dropped meanwhile; 55000; 08006; 53300; 57014; 38000.$$;

CREATE FUNCTION ml_rag.load_documents(store regclass, names text[], contents bytea[], options jsonb DEFAULT NULL)
RETURNS jsonb
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: documents the client sends, into a store
-- Calls: ml_rag._parse_load_options, ml_rag._load_job, ml_rag._load_contents, ml_rag._raise
-- Writes: the store, as the caller
DECLARE
  _options jsonb := ml_rag._parse_load_options('load_documents', $4);
  _outcome record;
BEGIN
  IF names IS NULL OR contents IS NULL OR cardinality(names) <> cardinality(contents)
    OR array_position(names, NULL) IS NOT NULL OR array_position(contents, NULL) IS NOT NULL
    OR array_ndims(names) > 1 OR array_ndims(contents) > 1 OR '' = ANY (names)
    OR cardinality(names) <> (SELECT count(DISTINCT n) FROM unnest(names) AS n) THEN
    RAISE EXCEPTION USING ERRCODE = '22023', MESSAGE = 'names and contents of the documents do not fit together',
      DETAIL = format('%s names, %s contents; each document needs a name of its own and a content, neither null.',
        coalesce(cardinality(names), 0), coalesce(cardinality(contents), 0));
  END IF;
  SELECT o.* INTO _outcome
  FROM ml_rag._load_contents(ml_rag._load_job(store, _options ->> 'embed_model_id', _options), names, contents) AS o;
  PERFORM ml_rag._raise(_outcome.error) WHERE _outcome.error IS NOT NULL;
  RETURN _outcome.outcome;
END
$$;
COMMENT ON FUNCTION ml_rag.load_documents(regclass, text[], bytea[], jsonb) IS
$$loads documents that the client sends into a vector store: load_documents('docs', '{a.pdf}', ARRAY[$1::bytea])
A document of the same name is replaced where content or options differ ("refresh": false leaves it alone), and keeps
its id. options: SELECT * FROM ml_rag.option WHERE routine IN ('load_documents', 'chunking').
Returns {"documents": {"loaded", "changed", "unchanged", "removed", "skipped", "failed"}, "segments",
"failed": [{"document_name", "error", …}], "seconds"}; a document that fails does not stop the others. Call
ml_rag.index_store when the last one is in. Needs SELECT, INSERT and DELETE on the store, no privilege on files.
Errors: as vector_store_load.$$;

CREATE FUNCTION ml_rag.load_document(store regclass, document_name text, content bytea, options jsonb DEFAULT NULL)
RETURNS jsonb
LANGUAGE sql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$ SELECT ml_rag.load_documents($1, ARRAY[$2], ARRAY[$3], $4) $$;
COMMENT ON FUNCTION ml_rag.load_document(regclass, text, bytea, jsonb) IS
$$loads one document that the client sends into a vector store; see ml_rag.load_documents
Errors: as vector_store_load.$$;

CREATE FUNCTION ml_rag.unchanged_documents(store regclass, names text[], sha256 text[], options jsonb DEFAULT NULL)
RETURNS SETOF text
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: what a client need not send  Calls: ml_rag._parse_load_options, ml_rag._load_job, ml_rag._document_states
DECLARE
  _options jsonb := ml_rag._parse_load_options('load_documents', $4);
  _job jsonb := ml_rag._load_job(store, _options ->> 'embed_model_id', _options);
BEGIN
  RETURN QUERY
    SELECT s.document_name
    FROM unnest(names, sha256) AS n (name, sha256)
    JOIN ml_rag._document_states(store, names) AS s ON s.document_name = n.name
    WHERE NOT (_job -> 'refresh')::boolean OR s.sha256 = n.sha256 AND s.made_with = _job ->> 'made_with';
END
$$;
COMMENT ON FUNCTION ml_rag.unchanged_documents(regclass, text[], text[], jsonb) IS
$$which of the documents load_documents would leave alone, by their names and the SHA-256 (hex) of their contents
options: those of load_documents; with "refresh": false every document the store has. Errors: 22023.$$;

-- 84_index.sql

-- 84_index: keyword indexes: made by a table's owner, kept current by its triggers, folded.

CREATE FUNCTION ml_rag._key_values(alias text, key name[]) RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$
-- purpose: SQL of a row's key; two keys are the same where each letter is, whatever the collation of the column
-- By concat and not by a cast: it writes a value as its type's own output does, and a cast of a type that somebody made
-- could be anybody's function. The types are checked as well, but under repeatable read the catalog may be of another
-- moment than the table.
SELECT concat('ARRAY[', string_agg(format('concat(%s.%I) COLLATE "C"', alias, k), ', ' ORDER BY place), ']')
FROM unnest(key) WITH ORDINALITY AS u (k, place)
$$;

CREATE FUNCTION ml_rag._key_and_segment(alias text, index ml_rag.keyword_store) RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$
-- purpose: SQL of what an index has of a row: key, text  Calls: ml_rag._key_values
SELECT format('%s, CASE WHEN %s.%I IS NOT NULL THEN concat(%2$s.%3$I) END COLLATE "C"',
  ml_rag._key_values(alias, index.key), alias, index.segment)
$$;

CREATE FUNCTION ml_rag._add_keywords_statement(index ml_rag.keyword_store, source text) RETURNS text
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$
-- purpose: put rows (key text[], segment text) into an index: $1 the store, $2 the batch  Calls: ml_rag._tokens
BEGIN
  RETURN format($sql$
    WITH made AS MATERIALIZED (
      SELECT nextval('ml_rag.keyword_number') AS id, s.key, t.tokens, t.length
      FROM (%s) AS s (key, segment) CROSS JOIN LATERAL ml_rag._tokens(%L::regconfig, s.segment) AS t
      WHERE s.segment IS NOT NULL
    ), known AS (
      INSERT INTO ml_rag.keyword_own_row (id, store, length, key) SELECT m.id, $1, m.length, m.key FROM made AS m
    )
    INSERT INTO ml_rag.keyword_own_new (store, batch, id, length, tokens)
    SELECT $1, $2, m.id, m.length, m.tokens FROM made AS m$sql$, source, index.configuration);
END
$$;

CREATE FUNCTION ml_rag._fold_keywords(store oid, batch bigint, thorough boolean, OUT done boolean, OUT error jsonb)
LANGUAGE plpython3u VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
# purpose: fold what waits into runs (see ml_rag.backend.keyword)
if "ml_rag" not in GD or GD["ml_rag"].VERSION != "0.1.0":
    if error := plpy.execute("SELECT ml_rag._load_backend() AS error")[0]["error"]:
        return None, error
return GD["ml_rag"].fold_keywords(plpy, store, batch, thorough)
$$;

CREATE FUNCTION ml_rag._fold(store oid, batch bigint DEFAULT 0, thorough boolean DEFAULT false) RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- Calls: ml_rag._fold_keywords, ml_rag._raise
DECLARE
  _error jsonb;
BEGIN
  SELECT f.error INTO _error FROM ml_rag._fold_keywords(store, batch, thorough) AS f;
  PERFORM ml_rag._raise(_error) WHERE _error IS NOT NULL;
END
$$;

CREATE FUNCTION ml_rag._check_keyword_columns(index ml_rag.keyword_store) RETURNS void
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$
-- purpose: that the columns are there, of types whose conversion to text runs nobody's code and is always the same
BEGIN
  IF (SELECT count(*) FROM pg_attribute AS a
      WHERE a.attrelid = index.store AND NOT a.attisdropped AND (
        a.attname = ANY (index.key) AND a.atttypid = ANY (
          '{smallint,integer,bigint,numeric,oid,text,character varying,uuid}'::regtype[])
        OR a.attname = index.segment AND a.attname <> ALL (index.key)
          AND a.atttypid = ANY ('{text,character varying}'::regtype[]))) <> cardinality(index.key) + 1 THEN
    RAISE EXCEPTION USING ERRCODE = '55000',
      MESSAGE = format('the keyword index of "%s" does not fit its columns any more', index.store),
      DETAIL = format('Its text is in %I, its key is (%s).', index.segment, array_to_string(index.key, ', ')),
      HINT = format('SELECT ml_rag.enable_keyword_search(%L) makes it anew, ml_rag.disable_keyword_search drops it.',
        index.store::text);
  END IF;
END
$$;

CREATE FUNCTION ml_rag._keep_keywords() RETURNS trigger
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SECURITY DEFINER
SET search_path FROM CURRENT
AS $$
-- purpose: what a statement did to a table, done to its index
-- Security definer because whoever writes the table may not write its index otherwise. All it reads are the rows of
-- that statement, in columns of built-in types; never the table, whose policies and indexes may be anybody's code.
-- Any owner of a table can make a trigger of this function, one without transition tables too: then their names must
-- not lead to a relation of the caller's, such as a temporary view, whose functions would run with the definer's rights.
-- Calls: ml_rag._check_keyword_columns, ml_rag._add_keywords_statement, ml_rag._fold, ml_rag._empty_keywords
-- Writes: ml_rag.keyword_row, ml_rag.keyword_new, ml_rag.keyword_gone
DECLARE
  _portion CONSTANT integer := 1000;
  _index ml_rag.keyword_store;
  _old text;
  _new text;
  _n bigint := 0;
  _gone bigint := 0;
  _batch bigint := 0;
  _may_fold boolean := current_setting('transaction_isolation') IN ('read committed', 'read uncommitted');
BEGIN
  IF TG_LEVEL <> 'STATEMENT' OR coalesce(to_regclass('ml_rag_new'), to_regclass('ml_rag_old')) IS NOT NULL THEN
    RAISE EXCEPTION USING ERRCODE = '55000',
      MESSAGE = format('the keyword index of "%s" cannot be kept current', TG_RELID::regclass),
      DETAIL = CASE WHEN TG_LEVEL <> 'STATEMENT' THEN format('Trigger "%s" is for each row.', TG_NAME)
        ELSE format('The relation %s has a name that its triggers use.',
          coalesce(to_regclass('ml_rag_new'), to_regclass('ml_rag_old'))) END,
      HINT = CASE WHEN TG_LEVEL <> 'STATEMENT' THEN 'ml_rag.enable_keyword_search makes the triggers.'
        ELSE 'Drop it, or give it another name.' END;
  END IF;
  SELECT i.* INTO _index FROM ml_rag.keyword_store AS i WHERE i.store = TG_RELID;
  IF NOT FOUND THEN
    RETURN NULL;
  ELSIF TG_OP = 'TRUNCATE' THEN
    PERFORM ml_rag._empty_keywords(TG_RELID);
    RETURN NULL;
  END IF;
  PERFORM ml_rag._check_keyword_columns(_index);
  _old := format('SELECT %s FROM ml_rag_old AS o', ml_rag._key_and_segment('o', _index));
  _new := format('SELECT %s FROM ml_rag_new AS n', ml_rag._key_and_segment('n', _index));
  IF TG_OP = 'UPDATE' THEN
    -- what keeps key and text does not touch the index
    SELECT format('%s EXCEPT ALL %s', _old, _new), format('%s EXCEPT ALL %s', _new, _old) INTO _old, _new;
  END IF;
  IF TG_OP <> 'INSERT' THEN
    EXECUTE format($sql$
      WITH gone AS (
        DELETE FROM ml_rag.keyword_row AS r USING (%s) AS o (key, segment) WHERE r.store = $1 AND r.key = o.key
        RETURNING r.id, r.length
      )
      INSERT INTO ml_rag.keyword_gone (store, id, length) SELECT $1, g.id, g.length FROM gone AS g$sql$, _old)
    USING TG_RELID;
    GET DIAGNOSTICS _gone = ROW_COUNT;
  END IF;
  IF TG_OP <> 'DELETE' THEN
    -- A large statement folds its rows itself: they are its own, so that nobody else can be at it.
    SELECT count(*) INTO _n FROM (SELECT FROM ml_rag_new LIMIT _portion) AS n;
    IF _n = _portion THEN
      _batch := nextval('ml_rag.keyword_number');
    END IF;
    EXECUTE ml_rag._add_keywords_statement(_index, _new) USING TG_RELID, _batch;
    GET DIAGNOSTICS _n = ROW_COUNT;
    IF _batch <> 0 THEN
      PERFORM ml_rag._fold(TG_RELID, _batch);
    END IF;
  END IF;
  -- How much waits is looked at by about every 50th row's statement; random() is the caller's, who may have seeded it.
  -- Under repeatable read nothing is folded: what others have folded since would make
  -- the transaction fail.
  IF _may_fold AND extract(microseconds FROM clock_timestamp())::integer % 50 < _n + _gone AND (
    (SELECT count(*) FROM (SELECT FROM ml_rag.keyword_new AS w WHERE w.store = TG_RELID AND w.batch = 0 LIMIT _portion) AS w)
      >= _portion
    OR (SELECT count(*) FROM (SELECT FROM ml_rag.keyword_gone AS w WHERE w.store = TG_RELID LIMIT _portion) AS w)
      >= _portion
    OR _batch <> 0
  ) THEN
    PERFORM ml_rag._fold(TG_RELID);
  END IF;
  RETURN NULL;
END
$$;

CREATE FUNCTION ml_rag._fold_on_request() RETURNS trigger
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SECURITY DEFINER
SET search_path FROM CURRENT
AS $$
-- purpose: fold when the owner of a table asks for it, which the view keyword_own_store lets nobody else do
-- Calls: ml_rag._fold
BEGIN
  IF TG_RELID = 'ml_rag.keyword_store'::regclass THEN
    PERFORM ml_rag._fold(NEW.store, NEW.folding, true);
  END IF;
  RETURN NULL;
END
$$;
CREATE TRIGGER fold AFTER UPDATE OF folding ON ml_rag.keyword_store
FOR EACH ROW EXECUTE FUNCTION ml_rag._fold_on_request();

CREATE FUNCTION ml_rag._own_table(store regclass) RETURNS void
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$
-- purpose: that the relation is there and the caller owns it
DECLARE
  _owner oid := (SELECT c.relowner FROM pg_class AS c WHERE c.oid = store);
BEGIN
  IF _owner IS NULL THEN
    RAISE EXCEPTION USING ERRCODE = '42P01', MESSAGE = 'the table does not exist';
  ELSIF NOT pg_has_role(_owner, 'USAGE') THEN
    RAISE EXCEPTION USING ERRCODE = '42501', MESSAGE = format('must be owner of table "%s"', store),
      HINT = 'A keyword index is made and dropped by the owner of the table.';
  END IF;
END
$$;

CREATE FUNCTION ml_rag._indexable_key(store regclass) RETURNS name[]
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$
-- purpose: the columns that tell the rows of a table apart: its primary key, else another unique key without nulls
DECLARE
  _kind "char" := (SELECT c.relkind FROM pg_class AS c WHERE c.oid = store);
  _key name[];
  _why text;
BEGIN
  _why := CASE
    WHEN _kind = 'p' THEN 'It is partitioned: what is written to a partition itself would go unnoticed.'
    WHEN _kind <> 'r' THEN 'It is no ordinary table: what changes in it goes unnoticed.'
    WHEN EXISTS (SELECT FROM pg_inherits AS i WHERE store IN (i.inhrelid, i.inhparent))
      THEN 'It is a partition, or one end of an inheritance: what is written through the other would go unnoticed.'
    WHEN (SELECT c.relpersistence = 't' FROM pg_class AS c WHERE c.oid = store) THEN 'It is temporary.'
  END;
  IF _why IS NOT NULL THEN
    RAISE EXCEPTION USING ERRCODE = '55000', MESSAGE = format('"%s" can have no keyword index', store), DETAIL = _why,
      HINT = 'Keep the text in an ordinary table.';
  END IF;
  SELECT k.key INTO _key
  FROM pg_index AS x
  CROSS JOIN LATERAL (
    SELECT array_agg(a.attname ORDER BY u.place) AS key, bool_and(a.attnotnull) AS is_not_null,
      bool_and(a.atttypid = ANY ('{smallint,integer,bigint,numeric,oid,text,character varying,uuid}'::regtype[])) AS is_plain
    FROM unnest(x.indkey::smallint[]) WITH ORDINALITY AS u (attnum, place)
    JOIN pg_attribute AS a ON a.attrelid = x.indrelid AND a.attnum = u.attnum
    WHERE u.place <= x.indnkeyatts
  ) AS k
  WHERE x.indrelid = store AND x.indisunique AND x.indisvalid AND x.indimmediate AND x.indpred IS NULL
    AND x.indexprs IS NULL AND k.is_not_null AND k.is_plain
  ORDER BY x.indisprimary DESC, x.indnkeyatts, x.indexrelid LIMIT 1;
  IF _key IS NULL THEN
    RAISE EXCEPTION USING ERRCODE = '55000', MESSAGE = format('"%s" has no key that a keyword index can use', store),
      DETAIL = 'It takes a primary key, or a unique index without nulls, of integers, numeric, text or uuid columns.',
      HINT = format('ALTER TABLE %s ADD PRIMARY KEY (…);', store);
  END IF;
  RETURN _key;
END
$$;

CREATE FUNCTION ml_rag.disable_keyword_search(store regclass) RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: drop the keyword index of a table  Calls: ml_rag._own_table  Writes: triggers and the index, as the caller
DECLARE
  _trigger name;
BEGIN
  PERFORM ml_rag._own_table(store);
  EXECUTE format('LOCK TABLE ONLY %s IN ACCESS EXCLUSIVE MODE', store);
  FOR _trigger IN
    SELECT t.tgname FROM pg_trigger AS t
    WHERE t.tgrelid = store AND t.tgfoid = 'ml_rag._keep_keywords()'::regprocedure
  LOOP
    EXECUTE format('DROP TRIGGER %I ON %s', _trigger, store);
  END LOOP;
  DELETE FROM ml_rag.keyword_own_store AS i WHERE i.store = disable_keyword_search.store;
END
$$;
COMMENT ON FUNCTION ml_rag.disable_keyword_search(regclass) IS
$$drops the keyword index of a table; for its owner
No error where there is none. Errors: 42P01; 42501 not the owner.$$;

CREATE FUNCTION ml_rag._index_keywords(store regclass, options jsonb, is_new boolean) RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: make the keyword index of a table, or make it anew with other options; is_new: the caller has just made it
-- Calls: ml_rag._own_table, ml_rag.parse_options, ml_rag._bad_option, ml_rag._indexable_key,
-- ml_rag.text_search_configuration, ml_rag._check_keyword_columns, ml_rag._add_keywords_statement
-- Reads: the table  Writes: triggers and the index, all as the caller
DECLARE
  _options jsonb := ml_rag.parse_options('enable_keyword_search', $2);
  _segment text := _options ->> 'segment';
  _configuration text := _options ->> 'text_search_configuration';
  _index ml_rag.keyword_store;
  _event text;
  _batch bigint := nextval('ml_rag.keyword_number');
BEGIN
  PERFORM ml_rag._own_table(store);
  IF NOT EXISTS (SELECT FROM pg_attribute AS a
                 WHERE a.attrelid = store AND a.attname = _segment AND NOT a.attisdropped
                   AND a.atttypid = ANY ('{text,character varying}'::regtype[])) THEN
    PERFORM ml_rag._bad_option('segment', to_jsonb(_segment), format('a text column of "%s"', store),
      'Name the column that holds the text: {"segment": "description"}.');
  END IF;
  IF _configuration IS NULL THEN
    _configuration := ml_rag.text_search_configuration(_options ->> 'language');
  ELSE
    BEGIN
      SELECT format('%I.%I', n.nspname, c.cfgname) INTO STRICT _configuration
      FROM pg_ts_config AS c JOIN pg_namespace AS n ON n.oid = c.cfgnamespace
      WHERE c.oid = _configuration::regconfig;
    EXCEPTION WHEN undefined_object OR invalid_name OR invalid_schema_name OR no_data_found OR syntax_error
      OR feature_not_supported OR data_exception THEN
      PERFORM ml_rag._bad_option('text_search_configuration', _options -> 'text_search_configuration',
        'a text search configuration, with its schema where that is not pg_catalog', 'SELECT * FROM pg_ts_config;');
    END;
  END IF;
  SELECT _index_keywords.store, _segment, ml_rag._indexable_key(store), _configuration,
    (_options -> 'k1')::double precision, (_options -> 'b')::double precision, _options ->> 'statistics', 0 INTO _index;
  PERFORM ml_rag._check_keyword_columns(_index);
  -- the owner may have taken that from itself
  IF row_security_active(store) THEN
    RAISE EXCEPTION USING ERRCODE = '55000', MESSAGE = format('row-level security hides rows of "%s" from its owner', store),
      DETAIL = 'The index must have all rows; who finds which is decided when somebody searches.',
      HINT = format('ALTER TABLE %s NO FORCE ROW LEVEL SECURITY; it can be forced again afterwards.', store);
  END IF;
  IF current_setting('transaction_isolation') NOT IN ('read committed', 'read uncommitted') AND NOT is_new THEN
    RAISE EXCEPTION USING ERRCODE = '55000',
      MESSAGE = 'a keyword index cannot be made in a transaction of this isolation level',
      DETAIL = format('The level is %s: rows that others have added since the transaction began would be missing.',
        current_setting('transaction_isolation')),
      HINT = 'Call it in a transaction of its own, or at READ COMMITTED.';
  END IF;
  EXECUTE format('LOCK TABLE ONLY %s IN SHARE ROW EXCLUSIVE MODE', store);
  DELETE FROM ml_rag.keyword_own_store AS i WHERE i.store = _index.store;
  INSERT INTO ml_rag.keyword_own_store SELECT (_index).*;
  FOR _event IN SELECT unnest('{INSERT,UPDATE,DELETE,TRUNCATE}'::text[]) LOOP
    EXECUTE format('CREATE OR REPLACE TRIGGER %I AFTER %s ON %s %s'
      ' FOR EACH STATEMENT EXECUTE FUNCTION ml_rag._keep_keywords()', 'ml_rag_keywords_' || lower(_event), _event, store, CASE _event
        WHEN 'INSERT' THEN 'REFERENCING NEW TABLE AS ml_rag_new'
        WHEN 'DELETE' THEN 'REFERENCING OLD TABLE AS ml_rag_old'
        WHEN 'UPDATE' THEN 'REFERENCING OLD TABLE AS ml_rag_old NEW TABLE AS ml_rag_new' ELSE '' END);
  END LOOP;
  EXECUTE ml_rag._add_keywords_statement(_index, format('SELECT %s FROM ONLY %s AS t',
    ml_rag._key_and_segment('t', _index), store)) USING store, _batch;
  UPDATE ml_rag.keyword_own_store AS i SET folding = _batch WHERE i.store = _index.store;
END
$$;

CREATE FUNCTION ml_rag.enable_keyword_search(store regclass, options jsonb DEFAULT NULL) RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- Calls: ml_rag._index_keywords
BEGIN
  PERFORM ml_rag._index_keywords($1, $2, false);
END
$$;
COMMENT ON FUNCTION ml_rag.enable_keyword_search(regclass, jsonb) IS
$$makes the keyword index of a table, or makes it anew: ml_rag.enable_keyword_search('handbook', '{"language": "de"}')
The table's owner calls it; from then on the index follows every change of the table. The table needs a primary key or a
unique key without nulls; it cannot be partitioned, inherited, foreign or a view. Nobody can write to the table meanwhile,
reading goes on.
options: SELECT * FROM ml_rag.option WHERE routine = 'enable_keyword_search'. Errors: 22023 bad option; 42P01; 42501 not
the owner; 55000 no such key, a table that cannot have one, or numpy is missing.$$;

CREATE FUNCTION ml_rag.fold_keyword_index(store regclass) RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- Calls: ml_rag._own_table  Writes: ml_rag.keyword_own_store, whose trigger folds
BEGIN
  PERFORM ml_rag._own_table(store);
  UPDATE ml_rag.keyword_own_store AS i SET folding = 0 WHERE i.store = fold_keyword_index.store;
END
$$;
COMMENT ON FUNCTION ml_rag.fold_keyword_index(regclass) IS
$$tidies the keyword index of a table after many changes, which makes searches faster; for its owner
Writers do it too, bit by bit; this does all of it, and holds up nobody but others who fold. Errors: 42P01; 42501
not the owner; 55000 numpy is missing.$$;

-- 85_rank.sql

-- 85_rank: ranking as a service: records the caller hands over, by their relevance to a query. No table is read.

CREATE FUNCTION ml_rag._is_missing(model_id text) RETURNS boolean
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: whether the model server knows the model and lacks its files
-- Calls: ml_rag._model_server, ml_rag._raise
DECLARE
  _outcome record;
BEGIN
  SELECT o.* INTO _outcome FROM ml_rag._model_server('/v1/models') AS o;
  PERFORM ml_rag._raise(_outcome.error) WHERE _outcome.error IS NOT NULL;
  RETURN jsonb_path_exists(_outcome.reply, '$.data[*] ? (@.id == $id && @.available == false)',
    jsonb_build_object('id', model_id));
END
$$;

CREATE FUNCTION ml_rag._check_rank_count(n integer) RETURNS void
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$
-- purpose: the bound on the records of one call
BEGIN
  IF n > 200 THEN
    RAISE EXCEPTION USING ERRCODE = '22023', MESSAGE = 'too many records',
      DETAIL = format('%s records; a call ranks at most 200.', n), HINT = 'Rank the most promising 200.';
  END IF;
END
$$;

CREATE FUNCTION ml_rag._bad_record(place integer, id text, detail text, hint text) RETURNS void
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$
-- purpose: the one form of every complaint about a record
BEGIN
  RAISE EXCEPTION USING ERRCODE = '22023', MESSAGE = format('record %s cannot be ranked', place),
    DETAIL = concat(CASE WHEN $2 IS NOT NULL THEN format('Its id is "%s": ', left($2, 100)) END, $3), HINT = $4;
END
$$;

CREATE FUNCTION ml_rag._rank(
  query text, texts text[], options jsonb, OUT model text, OUT places integer[], OUT scores double precision[]
)
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: places in texts by descending relevance, at most top_n, with their scores, and the model that ranked them
-- Calls: ml_rag._get_setting, ml_rag._is_missing, ml_rag.text_search_configuration, ml_rag._relevance
DECLARE
  _configuration regconfig := ml_rag.text_search_configuration(options ->> 'language')::regconfig;
  _scores double precision[];
BEGIN
  model := options ->> 'model';
  IF model IS NULL THEN
    model := ml_rag._get_setting('rerank_model_id');
    IF model <> 'hybrid' AND ml_rag._is_missing(model) THEN
      model := 'hybrid';
    END IF;
  END IF;
  _scores := ml_rag._relevance(query, texts, model, _configuration);
  SELECT coalesce(array_agg(s.place ORDER BY s.score DESC, s.place), '{}'),
    coalesce(array_agg(s.score ORDER BY s.score DESC, s.place), '{}')
  INTO places, scores
  FROM (
    SELECT u.place::integer, u.score FROM unnest(_scores) WITH ORDINALITY AS u (score, place)
    ORDER BY u.score DESC, u.place LIMIT (options ->> 'top_n')::integer
  ) AS s;
END
$$;

CREATE FUNCTION @extschema@.ml_rank(query text, records jsonb, options jsonb DEFAULT NULL) RETURNS jsonb
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: records as JSON, in and out
-- Calls: ml_rag.parse_options, ml_rag._check_rank_count, ml_rag._bad_record, ml_rag._rank
DECLARE
  _options jsonb := ml_rag.parse_options('ml_rank', $3);
  i integer;
  _record jsonb;
  _key text;
  _texts text[] := '{}';
  _records jsonb[] := '{}';
  _ranked record;
BEGIN
  IF records IS NULL OR jsonb_typeof(records) <> 'array' THEN
    RAISE EXCEPTION USING ERRCODE = '22023', MESSAGE = 'the records are not an array',
      DETAIL = format('Got %s.', coalesce(jsonb_typeof(records), 'NULL')),
      HINT = 'Records are a JSON array such as [{"id": "1", "title": "a title", "content": "a text"}].';
  END IF;
  PERFORM ml_rag._check_rank_count(jsonb_array_length(records));
  FOR i, _record IN
    SELECT e.place, e.value FROM jsonb_array_elements(records) WITH ORDINALITY AS e (value, place) ORDER BY e.place
  LOOP
    IF jsonb_typeof(_record) <> 'object' THEN
      PERFORM ml_rag._bad_record(i, NULL, format('It is not an object but a JSON %s.', jsonb_typeof(_record)),
        'A record is an object: {"id": "1", "title": "a title", "content": "a text"}.');
    END IF;
    IF jsonb_typeof(_record -> 'id') IS DISTINCT FROM 'string' OR _record -> 'id' = '""' THEN
      PERFORM ml_rag._bad_record(i, _record ->> 'id', 'The id is not a text that holds something.',
        'Give each record an "id", a text such as "1".');
    END IF;
    _key := (SELECT min(k) FROM jsonb_object_keys(_record) AS k WHERE k NOT IN ('id', 'title', 'content', 'score'));
    IF _key IS NOT NULL THEN
      PERFORM ml_rag._bad_record(i, _record ->> 'id', format('It has the unknown key "%s".', left(_key, 100)),
        'A record has "id", "title" and "content"; a "score" is ignored.');
    END IF;
    FOREACH _key IN ARRAY '{title,content}'::text[] LOOP
      IF jsonb_typeof(_record -> _key) NOT IN ('string', 'null') THEN
        PERFORM ml_rag._bad_record(i, _record ->> 'id', format('Its %s is not a text.', _key),
          'Title and content are texts, or left out.');
      END IF;
    END LOOP;
    _texts[i] := concat_ws(E'\n', _record ->> 'title', _record ->> 'content');
    IF _texts[i] !~ '\S' THEN
      PERFORM ml_rag._bad_record(i, _record ->> 'id', 'It has neither a title nor a content.',
        'Give at least one of the two.');
    END IF;
    _records[i] := CASE WHEN (_options -> 'ignore_record_details_in_response')::boolean
      THEN jsonb_build_object('id', _record -> 'id') ELSE jsonb_strip_nulls(_record - 'score') END;
  END LOOP;
  SELECT r.* INTO _ranked FROM ml_rag._rank(query, _texts, _options) AS r;
  RETURN jsonb_build_object('model', _ranked.model, 'records', coalesce((
    SELECT jsonb_agg(_records[r.place] || jsonb_build_object('score', r.score) ORDER BY r.rank)
    FROM unnest(_ranked.places, _ranked.scores) WITH ORDINALITY AS r (place, score, rank)), '[]'));
END
$$;
COMMENT ON FUNCTION @extschema@.ml_rank(text, jsonb, jsonb) IS
$$ranks records by their relevance to a query: ml_rank('Why is the sky blue?', '[{"id": "1", "content": "…"}, …]')
records: at most 200 objects {"id", "title", "content"}, id a text, at least one of title and content. Query, title and
content together are cut at the model's max_tokens (512). Returns {"records": [{"id", "score", "title", "content"}],
"model"}, best first, score 0-1, equal ones in the order given. Reads no table; works in a read-only transaction.
Options: top_n; ignore_record_details_in_response (ids and scores only); model, a cross-encoder, or hybrid: embedding
similarity and BM25 over these records (default: setting rerank_model_id where its files are there, else hybrid);
language, whose words hybrid compares: a code such as en or pt-BR, or a name (default: default_text_search_config).
Errors: 22023 empty query, bad record or option, unknown model or model of another task; 55000 the named model is not
available; 08006 model server; 53300 its queue is full; 57014 cancelled; 38000 the model failed.$$;

CREATE FUNCTION @extschema@.ml_rank_rows(query text, ids text[], texts text[], options jsonb DEFAULT NULL)
RETURNS TABLE (rank integer, id text, score double precision)
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE ROWS 100
SET search_path FROM CURRENT
AS $$
-- purpose: the same for SQL, arrays in and rows out
-- Calls: ml_rag.parse_options, ml_rag._check_rank_count, ml_rag._bad_record, ml_rag._rank
DECLARE
  _options jsonb := ml_rag.parse_options('ml_rank', $4);
  -- as they come out of unnest: whatever the bounds of the arrays were
  _ids text[] := ARRAY(SELECT u.id FROM unnest($2) WITH ORDINALITY AS u (id, place) ORDER BY u.place);
  _texts text[] := ARRAY(SELECT u.text FROM unnest($3) WITH ORDINALITY AS u (text, place) ORDER BY u.place);
BEGIN
  IF ids IS NULL OR texts IS NULL OR cardinality(ids) <> cardinality(texts) THEN
    RAISE EXCEPTION USING ERRCODE = '22023', MESSAGE = 'ids and texts are not of one length',
      DETAIL = format('%s ids, %s texts.', coalesce(cardinality(ids)::text, 'NULL'),
        coalesce(cardinality(texts)::text, 'NULL')),
      HINT = 'Give one text for each id.';
  END IF;
  PERFORM ml_rag._check_rank_count(cardinality(ids));
  FOR i IN 1..cardinality(_ids) LOOP
    IF coalesce(_ids[i], '') = '' THEN
      PERFORM ml_rag._bad_record(i, NULL, 'Its id is null or empty.', 'Give each text an id.');
    END IF;
    IF coalesce(_texts[i], '') !~ '\S' THEN
      PERFORM ml_rag._bad_record(i, _ids[i], 'Its text is null or empty.', 'Leave such texts out.');
    END IF;
  END LOOP;
  RETURN QUERY
    SELECT r.rank::integer, _ids[r.place], r.score
    FROM ml_rag._rank(query, _texts, _options) AS ranked,
      unnest(ranked.places, ranked.scores) WITH ORDINALITY AS r (place, score, rank)
    ORDER BY r.rank;
END
$$;
COMMENT ON FUNCTION @extschema@.ml_rank_rows(text, text[], text[], jsonb) IS
$$ranks texts by their relevance to a query, as rows (rank, id, score), best first
ids[i] belongs to texts[i]; at most 200 of them, none null or empty. Options, models and errors: see ml_rank.$$;

-- 86_questions.sql

-- 86_questions: what the ruler is asked to measure: options, and questions from a table or a query.

CREATE FUNCTION ml_rag._full_name(relation regclass) RETURNS text
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$
-- purpose: a relation's name with its schema, quoted where need be
BEGIN
  RETURN (SELECT format('%I.%I', n.nspname, c.relname) FROM pg_class AS c
          JOIN pg_namespace AS n ON n.oid = c.relnamespace WHERE c.oid = relation);
END
$$;

CREATE FUNCTION ml_rag._read_questions(source text, path text) RETURNS jsonb
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: the rows of a table or a query as JSON objects, in their order; names mean what they mean to the caller
-- A query can do no more than the caller: it is one statement (a loop takes no two), a subquery, so that it changes
-- nothing by itself, and read-only, so that no function in it does. What it did all the same, such as a temporary
-- table's rows, is rolled back.
-- Calls: ml_rag._full_name  Reads: what the caller names, as the caller
DECLARE
  _query text := regexp_replace(source, ';\s*$', '');
  _path text := current_setting('search_path');
  _relation regclass;
  _is_name boolean := true;
  _rows jsonb;
BEGIN
  IF source IS NULL THEN
    RAISE EXCEPTION USING ERRCODE = '22023', MESSAGE = 'there are no questions',
      HINT = 'Name a table or a query: ml_rag_evaluate(''SELECT id, question FROM questions'').';
  END IF;
  BEGIN
    PERFORM parse_ident(source);
  EXCEPTION WHEN invalid_parameter_value THEN
    _is_name := false;
  END;
  IF _is_name THEN
    -- after set_config names are looked up in the caller's path, so there is nothing here that is not qualified
    PERFORM pg_catalog.set_config('search_path', path, true);
    _relation := source::pg_catalog.regclass;
    PERFORM pg_catalog.set_config('search_path', _path, true);
    _query := pg_catalog.format('TABLE %s', ml_rag._full_name(_relation));
  END IF;
  _query := pg_catalog.format(
    E'SELECT pg_catalog.jsonb_agg(pg_catalog.to_jsonb("a row".*)) FROM (\n%s\n) AS "a row"', _query);
  BEGIN
    PERFORM pg_catalog.set_config('search_path', path, true);
    PERFORM pg_catalog.set_config('transaction_read_only', 'on', true);
    FOR _rows IN EXECUTE _query LOOP
      NULL;
    END LOOP;
    RAISE EXCEPTION USING ERRCODE = 'MLR00';
  EXCEPTION WHEN SQLSTATE 'MLR00' THEN
    NULL;
  END;
  RETURN _rows;
END
$$;

CREATE FUNCTION ml_rag._parse_evaluate_options(options jsonb, OUT own jsonb, OUT rag jsonb, OUT columns jsonb,
  OUT cutoffs integer[])
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$
-- purpose: the options of ml_rag_evaluate, those of ml_rag inside, the names of the columns, the cut-offs in order
-- Calls: ml_rag.parse_options, ml_rag._parse_rag_options, ml_rag._bad_option
DECLARE
  _generate boolean;
BEGIN
  own := ml_rag.parse_options('ml_rag_evaluate', options);
  rag := ml_rag._parse_rag_options(own -> 'options');
  columns := ml_rag.parse_options('evaluation_columns', own -> 'columns');
  IF rag ? 'query_embedding' THEN
    PERFORM ml_rag._bad_option('query_embedding', rag -> 'query_embedding', 'nothing: each question has its own',
      'Leave "query_embedding" out of "options".');
  END IF;
  IF jsonb_array_length(own -> 'k') NOT BETWEEN 1 AND 20 OR EXISTS (
    SELECT FROM jsonb_array_elements(own -> 'k') AS e
    WHERE jsonb_typeof(e) <> 'number' OR (e #>> '{}') !~ '^[0-9]+$' OR length(e #>> '{}') > 3
      OR (e #>> '{}')::integer NOT BETWEEN 1 AND 100) THEN
    PERFORM ml_rag._bad_option('k', own -> 'k', '1 to 20 integers from 1 to 100');
  END IF;
  cutoffs := ARRAY(SELECT DISTINCT (e #>> '{}')::integer FROM jsonb_array_elements(own -> 'k') AS e ORDER BY 1);
  BEGIN
    PERFORM '' ~ (own ->> 'refusal_pattern');
  EXCEPTION WHEN invalid_regular_expression THEN
    PERFORM ml_rag._bad_option('refusal_pattern', own -> 'refusal_pattern', 'a regular expression', SQLERRM);
  END;
  _generate := (own -> 'generate')::boolean OR own ? 'judge_model_id';
  own := own || jsonb_build_object('generate', _generate);
  -- More is looked at than a caller gets, so that k documents are found though several segments are of one; not where
  -- the number of segments has a part in the answer.
  IF NOT _generate AND (own -> 'options' -> 'n_citations') IS NULL
    AND coalesce((rag #>> '{retrieval_options,segment_overlap}')::integer, 0) = 0 THEN
    own := own || jsonb_build_object('cited', rag -> 'n_citations');
    rag := rag || jsonb_build_object('n_citations',
      greatest((rag ->> 'n_citations')::integer, least(100, 3 * cutoffs[cardinality(cutoffs)])));
  END IF;
END
$$;

CREATE FUNCTION ml_rag._check_questions(rows jsonb, columns jsonb, own jsonb) RETURNS jsonb
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$
-- purpose: the questions in one form, [{id, question, documents, answers, answerable}], sampled; null = no such column
-- Calls: ml_rag._raise, ml_rag._expected_documents
DECLARE
  _wrong text;
  _questions jsonb;
BEGIN
  IF rows IS NULL THEN
    PERFORM ml_rag._raise(jsonb_build_object('sqlstate', '22023', 'message', 'there are no questions',
      'hint', 'The table or query has no row that you may read.'));
  END IF;
  -- a column that was named must be there; the others may be missing
  SELECT string_agg(c.value, ', ') INTO _wrong FROM jsonb_each_text(columns) AS c
  WHERE NOT rows -> 0 ? c.value AND (c.key = 'question' OR own -> 'columns' ? c.key);
  IF _wrong IS NOT NULL THEN
    PERFORM ml_rag._raise(jsonb_build_object('sqlstate', '42703',
      'message', 'the questions lack a column', 'detail', format('Missing: %s; there are: %s.', _wrong,
        (SELECT string_agg(k, ', ') FROM jsonb_object_keys(rows -> 0) AS k)),
      'hint', 'Name your columns in "columns", such as {"question": "text"}.'));
  END IF;
  SELECT jsonb_agg(to_jsonb(q) ORDER BY q.place) INTO _questions
  FROM (
    SELECT r.place, coalesce(r.value ->> (columns ->> 'id'), r.place::text) AS id,
      r.value ->> (columns ->> 'question') AS question,
      ml_rag._expected_documents(r.value -> (columns ->> 'documents')) AS documents,
      CASE jsonb_typeof(r.value -> (columns ->> 'answers'))
        WHEN 'array' THEN r.value -> (columns ->> 'answers')
        WHEN 'string' THEN jsonb_build_array(r.value -> (columns ->> 'answers')) END AS answers,
      CASE WHEN jsonb_typeof(r.value -> (columns ->> 'answerable')) = 'boolean'
        THEN r.value -> (columns ->> 'answerable') END AS answerable
    FROM jsonb_array_elements(rows) WITH ORDINALITY AS r (value, place)
    -- a seed shuffles, the same way each time
    ORDER BY CASE WHEN own ? 'seed' THEN
      hashtextextended(coalesce(r.value ->> (columns ->> 'id'), r.place::text), (own ->> 'seed')::bigint) END, r.place
    LIMIT (own ->> 'limit')::bigint) AS q;
  SELECT q ->> 'id' INTO _wrong FROM jsonb_array_elements(_questions) AS q GROUP BY 1 HAVING count(*) > 1 LIMIT 1;
  IF FOUND THEN
    PERFORM ml_rag._raise(jsonb_build_object('sqlstate', '22023', 'message', 'two questions have one id',
      'detail', format('Id %s.', left(_wrong, 200)), 'hint', 'Ids tell the questions apart when runs are compared.'));
  END IF;
  RETURN _questions;
END
$$;

-- 87_measure.sql

-- 87_measure: what a ruler reads off one question. Functions of what was found and what was expected, and nothing else.

CREATE FUNCTION ml_rag._expected_documents(value jsonb) RETURNS jsonb
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$
-- purpose: the expected documents of a question in one form, [{"document", "grade", "metadata"}], grades above 0 only
-- In: a name or id, an array of them or of objects {"document", "grade", any key of metadata}, or name -> grade.
-- Null for null, which is "nobody has said"; [] is "none". Calls: ml_rag._raise
DECLARE
  _items jsonb;
BEGIN
  IF coalesce(value, 'null') = 'null' THEN
    RETURN NULL;
  END IF;
  _items := CASE
    WHEN jsonb_typeof(value) = 'array' THEN value
    WHEN jsonb_typeof(value) <> 'object' OR value ? 'document' THEN jsonb_build_array(value)
    ELSE (SELECT coalesce(jsonb_agg(jsonb_build_object('document', e.key, 'grade', e.value)), '[]')
          FROM jsonb_each(value) AS e)
  END;
  _items := (SELECT coalesce(jsonb_agg(CASE jsonb_typeof(i) WHEN 'object' THEN i
                                       ELSE jsonb_build_object('document', i) END), '[]')
             FROM jsonb_array_elements(_items) AS i);
  IF EXISTS (
    SELECT FROM jsonb_array_elements(_items) AS i
    WHERE coalesce(jsonb_typeof(i -> 'document'), '') NOT IN ('string', 'number')
      OR coalesce(jsonb_typeof(i -> 'grade'), 'null') NOT IN ('number', 'null')) THEN
    PERFORM ml_rag._raise(jsonb_build_object('sqlstate', '22023', 'message', 'invalid expected documents',
      'detail', format('Got %s.', left(value::text, 200)),
      'hint', 'A name, an array of names, an object of names and grades, or an array of '
        '{"document": "a.pdf", "grade": 1, "page": 7}, in which any further key is one of the metadata.'));
  END IF;
  RETURN (
    SELECT coalesce(jsonb_agg(to_jsonb(g) ORDER BY g.document, g.metadata), '[]') FROM (
      SELECT i ->> 'document' AS document, max(coalesce((i ->> 'grade')::float8, 1)) AS grade,
        i - '{document,grade}'::text[] AS metadata
      FROM jsonb_array_elements(_items) AS i GROUP BY 1, 3) AS g
    WHERE g.grade > 0);
END
$$;

CREATE FUNCTION ml_rag._grade_hits(hits ml_rag.hit[], expected jsonb, match text,
  OUT gains float8[], OUT items integer[], OUT relevant boolean[])
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$
-- purpose: which expected documents were found where; expected comes from ml_rag._expected_documents
-- gains, items: by rank of the documents (not of the segments): a document counts once, at its best segment, and so
-- does a page where pages are expected. gains = the grade, items = how many expected ones are here for the first time.
-- relevant: by hit.
BEGIN
  WITH item AS MATERIALIZED (
    SELECT e.place, e.value ->> 'document' AS document, (e.value -> 'grade')::float8 AS grade,
      e.value -> 'metadata' AS metadata
    FROM jsonb_array_elements(expected) WITH ORDINALITY AS e (value, place)
  ), key AS MATERIALIZED (
    SELECT array_agg(DISTINCT k) AS names FROM item AS i CROSS JOIN jsonb_object_keys(i.metadata) AS k
  ), hit AS MATERIALIZED (
    SELECT p AS place, hits[p].document_name AS name, hits[p].document_key AS key, hits[p].metadata AS metadata,
      -- what tells documents (and pages, …) apart
      ROW(hits[p].vector_store, hits[p].document_name, hits[p].document_key,
          ARRAY(SELECT hits[p].metadata ->> n FROM unnest((SELECT k.names FROM key AS k)) AS n))::text AS document
    FROM generate_subscripts(hits, 1) AS p
  ), ranked AS MATERIALIZED (
    SELECT f.document, f.place, row_number() OVER (ORDER BY f.place) AS rank
    FROM (SELECT h.document, min(h.place) AS place FROM hit AS h GROUP BY h.document) AS f
  ), matched AS MATERIALIZED (
    SELECT r.rank, r.document, i.place, i.grade FROM ranked AS r JOIN hit AS h ON h.place = r.place
    JOIN item AS i ON CASE match
        WHEN 'document_id' THEN h.key = i.document
        WHEN 'document_name' THEN h.name = i.document
        ELSE h.name = i.document OR right(h.name, length(i.document) + 1) = '/' || i.document END
      AND NOT EXISTS (SELECT FROM jsonb_each_text(i.metadata) AS m
                      WHERE m.value IS DISTINCT FROM h.metadata ->> m.key)
  ), first AS MATERIALIZED (
    SELECT f.rank, max(f.grade) AS gain, count(*)::integer AS items
    FROM (SELECT DISTINCT ON (m.place) m.rank, m.grade FROM matched AS m ORDER BY m.place, m.rank) AS f GROUP BY f.rank
  )
  SELECT
    (SELECT array_agg(coalesce(f.gain, 0) ORDER BY r.rank) FROM ranked AS r LEFT JOIN first AS f ON f.rank = r.rank),
    (SELECT array_agg(coalesce(f.items, 0) ORDER BY r.rank) FROM ranked AS r LEFT JOIN first AS f ON f.rank = r.rank),
    (SELECT array_agg(EXISTS (SELECT FROM matched AS m WHERE m.document = h.document) ORDER BY h.place) FROM hit AS h)
  INTO gains, items, relevant;
  gains := coalesce(gains, '{}');
  items := coalesce(items, '{}');
  relevant := coalesce(relevant, '{}');
END
$$;

CREATE FUNCTION ml_rag._ranking_measures(gains float8[], items integer[], expected jsonb, cutoffs integer[])
RETURNS jsonb
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$
-- purpose: recall@k, nDCG@k and reciprocal rank of one ranking, as trec_eval defines them
-- Source: Järvelin and Kekäläinen 2002, gain = grade, discount log2(rank + 1).
DECLARE
  _ideal float8[] := ARRAY(SELECT (e -> 'grade')::float8 FROM jsonb_array_elements(expected) AS e ORDER BY 1 DESC);
  _measures jsonb := jsonb_build_object('mrr', coalesce((
    SELECT 1.0::float8 / min(i) FROM generate_subscripts(gains, 1) AS i WHERE gains[i] > 0), 0));
  _k integer;
BEGIN
  FOREACH _k IN ARRAY cutoffs LOOP
    _measures := _measures || jsonb_build_object(
      format('recall@%s', _k), coalesce((SELECT sum(n) FROM unnest(items[1:_k]) AS n), 0)::float8 / cardinality(_ideal),
      format('ndcg@%s', _k), ml_rag._discounted(gains[1:_k]) / ml_rag._discounted(_ideal[1:_k]));
  END LOOP;
  RETURN _measures;
END
$$;

CREATE FUNCTION ml_rag._discounted(gains float8[]) RETURNS float8
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$
-- purpose: discounted cumulative gain
BEGIN
  RETURN coalesce((
    SELECT sum(gains[i] * ln(2::float8) / ln((i + 1)::float8)) FROM generate_subscripts(gains, 1) AS i), 0);
END
$$;

CREATE FUNCTION ml_rag._normalise_answer(answer text) RETURNS text
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$
-- purpose: an answer as SQuAD's evaluation compares it: lower case, no punctuation, no articles, single blanks
-- Ideographs and kana stand alone, as in CMRC's evaluation, and their punctuation goes too. Citation markers go.
BEGIN
  answer := lower(regexp_replace(answer, '\[[0-9]+\]', '', 'g'));
  answer := regexp_replace(answer, '[!-/:-@\[-`{-~]', '', 'g');
  answer := regexp_replace(answer,
    '[\u3001-\u3003\u3008-\u3011\u3014-\u301F\uFF01-\uFF0F\uFF1A-\uFF20\uFF3B-\uFF40\uFF5B-\uFF65]', ' ', 'g');
  answer := regexp_replace(answer, '\m(a|an|the)\M', ' ', 'g');
  answer := regexp_replace(answer, '([\u3040-\u30FF\u3400-\u4DBF\u4E00-\u9FFF\uF900-\uFAFF])', ' \1 ', 'g');
  RETURN btrim(regexp_replace(answer, '\s+', ' ', 'g'));
END
$$;

CREATE FUNCTION ml_rag._answer_measures(answer text, expected text[]) RETURNS jsonb
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$
-- purpose: how an answer agrees with the best of those expected: equal, F1 of the words, contained (each 0-1)
-- Source: Rajpurkar et al. 2016.  Calls: ml_rag._normalise_answer
DECLARE
  _answer text := coalesce(ml_rag._normalise_answer(answer), '');
  _words text[] := coalesce(string_to_array(nullif(_answer, ''), ' '), '{}');
  _wanted text;
  _wanted_words text[];
  _shared float8;
  _exact float8 := 0;
  _f1 float8 := 0;
  _contained float8 := 0;
BEGIN
  FOREACH _wanted IN ARRAY expected LOOP
    _wanted := ml_rag._normalise_answer(_wanted);
    _wanted_words := coalesce(string_to_array(nullif(_wanted, ''), ' '), '{}');
    CONTINUE WHEN _wanted IS NULL;
    IF _wanted = _answer THEN
      _exact := 1;
      _f1 := 1;
      _contained := 1;
    ELSIF cardinality(_wanted_words) > 0 AND cardinality(_words) > 0 THEN
      SELECT coalesce(sum(least(a.n, w.n)), 0) INTO _shared
      FROM (SELECT u AS word, count(*) AS n FROM unnest(_words) AS u GROUP BY u) AS a
      JOIN (SELECT u AS word, count(*) AS n FROM unnest(_wanted_words) AS u GROUP BY u) AS w ON w.word = a.word;
      -- 2PR / (P + R)
      _f1 := greatest(_f1, 2 * _shared / (cardinality(_words) + cardinality(_wanted_words)));
      IF strpos(format(' %s ', _answer), format(' %s ', _wanted)) > 0 THEN
        _contained := 1;
      END IF;
    END IF;
  END LOOP;
  RETURN jsonb_build_object('answer_exact', _exact, 'answer_f1', _f1, 'answer_contains', _contained);
END
$$;

CREATE FUNCTION ml_rag._student_p(t float8, degrees integer) RETURNS float8
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$
-- purpose: two-sided p value of Student's t, to about 1e-12; a finite sum for whole degrees of freedom
-- Source: Abramowitz and Stegun 26.7.3 and 26.7.4.
DECLARE
  _angle float8 := atan(abs(t) / sqrt(degrees::float8));
  _square float8 := power(cos(_angle), 2);
  _term float8;
  _sum float8 := 0;
BEGIN
  IF degrees % 2 = 1 THEN
    _term := cos(_angle);
    FOR i IN 1..(degrees - 1) / 2 LOOP
      _sum := _sum + _term;
      _term := _term * _square * (2 * i) / (2 * i + 1);
      EXIT WHEN _term < 1e-60;
    END LOOP;
    _sum := 2 / pi() * (_angle + sin(_angle) * _sum);
  ELSE
    _term := 1;
    FOR i IN 1..degrees / 2 LOOP
      _sum := _sum + _term;
      _term := _term * _square * (2 * i - 1) / (2 * i);
      EXIT WHEN _term < 1e-60;
    END LOOP;
    _sum := sin(_angle) * _sum;
  END IF;
  RETURN greatest(0, least(1, 1 - _sum));
END
$$;

-- 88_evaluate.sql

-- 88_evaluate: the ruler: many questions through the pipeline, measured, and kept.

CREATE TABLE ml_rag.evaluation_run (
  run_id     bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  name       text,
  role       name NOT NULL DEFAULT current_user,
  started_at timestamptz NOT NULL,
  seconds    float8 NOT NULL,
  source     text NOT NULL,   -- the table or the query of the questions
  questions  integer NOT NULL,
  options    jsonb NOT NULL,  -- as given
  stores     text[] NOT NULL, -- that were searched
  models     jsonb NOT NULL,
  versions   jsonb NOT NULL,
  measures   jsonb NOT NULL,  -- means
  counted    jsonb NOT NULL,  -- over how many questions each mean is
  latency    jsonb NOT NULL,
  errors     jsonb NOT NULL   -- SQLSTATE -> questions
);
COMMENT ON TABLE ml_rag.evaluation_run IS 'runs of ml_rag_evaluate; everybody sees, and may delete, their own';

COMMENT ON SEQUENCE ml_rag.evaluation_run_run_id_seq IS 'numbers of the runs of ml_rag_evaluate';

CREATE TABLE ml_rag.evaluation_question (
  run_id      bigint NOT NULL REFERENCES ml_rag.evaluation_run ON DELETE CASCADE,
  question_id text NOT NULL,
  question    text,
  answer      text,           -- null where none was generated
  citations   jsonb NOT NULL, -- what was found, without its text, and whether it is relevant (null = nobody has said)
  measures    jsonb NOT NULL,
  latency     jsonb NOT NULL, -- stage -> milliseconds
  sqlstate    text,           -- why there is nothing
  message     text,
  PRIMARY KEY (run_id, question_id)
);
COMMENT ON TABLE ml_rag.evaluation_question IS 'the questions of the runs of ml_rag_evaluate, one by one';

SELECT pg_catalog.pg_extension_config_dump('ml_rag.evaluation_run', '');
SELECT pg_catalog.pg_extension_config_dump('ml_rag.evaluation_run_run_id_seq', '');
SELECT pg_catalog.pg_extension_config_dump('ml_rag.evaluation_question', '');

-- Questions and answers may be confidential: nobody but the superuser sees those of others.
ALTER TABLE ml_rag.evaluation_run ENABLE ROW LEVEL SECURITY;
ALTER TABLE ml_rag.evaluation_question ENABLE ROW LEVEL SECURITY;
CREATE POLICY own ON ml_rag.evaluation_run USING (role = current_user) WITH CHECK (role = current_user);
CREATE POLICY own ON ml_rag.evaluation_question USING (EXISTS (
  SELECT FROM ml_rag.evaluation_run AS r WHERE r.run_id = evaluation_question.run_id AND r.role = current_user));

CREATE FUNCTION ml_rag._judge(model_id text, task text, question text, hits ml_rag.hit[]) RETURNS float8
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: a score from 0 to 1 by a judge model; null where it gives none, or nonsense
-- Calls: ml_rag.generate
DECLARE
  _score jsonb;
BEGIN
  _score := ml_rag.generate(format(E'%s\n\n%s', task, question), jsonb_build_object(
    'model_id', model_id, 'max_tokens', 32,
    'json_schema', '{"type": "object", "properties": {"score": {"enum": [0, 1, 2, 3, 4]}}, "required": ["score"],
      "additionalProperties": false}'::jsonb), hits)::jsonb -> 'score';
  IF jsonb_typeof(_score) = 'number' AND _score::float8 BETWEEN 0 AND 4 THEN
    RETURN _score::float8 / 4;
  END IF;
  RETURN NULL;
EXCEPTION
  WHEN connection_failure THEN
    RAISE;
  WHEN OTHERS THEN
    RETURN NULL;
END
$$;

CREATE FUNCTION ml_rag._evaluate_question(question jsonb, own jsonb, rag jsonb, cutoffs integer[],
  OUT result ml_rag.evaluation_question)
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
-- a warning that belongs to all questions was given once
SET client_min_messages = 'error'
AS $$
-- purpose: one question: retrieved, answered where asked for, measured. An error is part of the result, except that of
-- a lost model server: what comes after it would measure nothing.
-- Calls: ml_rag._retrieve, ml_rag._raise, ml_rag.generate, ml_rag._grade_hits, ml_rag._ranking_measures,
-- ml_rag._answer_measures, ml_rag._judge, ml_rag._get_setting
DECLARE
  _query text := question ->> 'question';
  _expected jsonb := question -> 'documents';
  _has_expected boolean := coalesce(jsonb_array_length(nullif(_expected, 'null')), 0) > 0;
  _generate boolean := (own -> 'generate')::boolean;
  _answerable boolean := (nullif(question -> 'answerable', 'null'))::boolean;
  _answers text[] := ml_rag._texts(nullif(question -> 'answers', 'null'));
  _cited integer := coalesce((own ->> 'cited')::integer, 2147483647);
  _hits ml_rag.hit[] := '{}';
  _gains float8[];
  _items integer[];
  _relevant boolean[];
  _missing jsonb;
  _abstain_text text := coalesce(rag ->> 'abstain_text', ml_rag._get_setting('abstain_text'));
  _refused boolean;
  _measures jsonb := '{}';
  _began timestamptz;
  _ended timestamptz;
  _times timestamptz[];
BEGIN
  result.question_id := question ->> 'id';
  result.question := _query;
  _began := clock_timestamp();
  BEGIN
    SELECT r.hits, r.missing, r.times INTO _hits, _missing, _times FROM ml_rag._retrieve(_query, rag) AS r;
    IF _missing IS NOT NULL AND NOT (_generate AND (rag -> 'abstain')::boolean) THEN
      PERFORM ml_rag._raise(_missing);
    END IF;
  EXCEPTION
    WHEN connection_failure THEN
      RAISE;
    WHEN OTHERS THEN
      _hits := '{}';
      result.sqlstate := SQLSTATE;
      result.message := SQLERRM;
  END;
  _ended := clock_timestamp();
  result.latency := jsonb_strip_nulls(jsonb_build_object('retrieval', ml_rag._milliseconds(_began, _ended),
    'embedding', ml_rag._milliseconds(_times[1], _times[2]),
    'search', ml_rag._milliseconds(_times[2], _times[3]),
    'rerank', CASE WHEN rag ? 'rerank' THEN ml_rag._milliseconds(_times[3], _ended) END));
  IF _missing IS NOT NULL THEN
    IF result.sqlstate IS NULL THEN
      result.answer := _abstain_text;
    END IF;
  ELSIF _generate AND result.sqlstate IS NULL THEN
    _began := clock_timestamp();
    BEGIN
      result.answer := ml_rag.generate(_query, rag -> 'model_options', _hits, rag -> 'prompt');
    EXCEPTION
      WHEN connection_failure THEN
        RAISE;
      WHEN OTHERS THEN
        result.sqlstate := SQLSTATE;
        result.message := SQLERRM;
    END;
    result.latency := result.latency || jsonb_build_object('generation', ml_rag._milliseconds(_began));
  END IF;
  _refused := coalesce(result.sqlstate = 'P0002', false) OR coalesce(result.answer = _abstain_text, false)
    OR coalesce(result.answer ~* (own ->> 'refusal_pattern'), false);

  IF _has_expected THEN
    SELECT g.* INTO _gains, _items, _relevant FROM ml_rag._grade_hits(_hits, _expected, own ->> 'match') AS g;
    _measures := ml_rag._ranking_measures(_gains, _items, _expected, cutoffs)
      || jsonb_build_object(
        'citation_match', coalesce(true = ANY (_relevant[1:_cited]), false)::integer,
        'citation_share', coalesce((SELECT avg(c::integer)::float8 FROM unnest(_relevant[1:_cited]) AS c), 0));
  END IF;
  IF _generate AND cardinality(_answers) > 0 AND _answerable IS NOT FALSE THEN
    _measures := _measures || ml_rag._answer_measures(CASE WHEN NOT _refused THEN result.answer END, _answers);
  END IF;
  IF _answerable IS NOT NULL THEN
    _measures := _measures || jsonb_build_object(
      CASE WHEN _answerable THEN 'refused_wrongly' ELSE 'refused_rightly' END, _refused::integer);
  END IF;
  IF result.answer IS NOT NULL THEN
    _measures := _measures || jsonb_build_object('answer_length', length(result.answer));
    IF own ? 'judge_model_id' AND NOT _refused THEN
      _began := clock_timestamp();
      _measures := _measures || jsonb_strip_nulls(jsonb_build_object(
        'groundedness', ml_rag._judge(own ->> 'judge_model_id',
          'How far do the documents support this statement? Score 0 (not at all) to 4 (each part of it).',
          result.answer, _hits),
        'relevance', ml_rag._judge(own ->> 'judge_model_id',
          'How well does this answer address its question? Score 0 (not at all) to 4 (fully).',
          format(E'Question: %s\nAnswer: %s', _query, result.answer), NULL)));
      result.latency := result.latency || jsonb_build_object('judge', ml_rag._milliseconds(_began));
    END IF;
  END IF;
  result.measures := _measures;
  result.citations := coalesce((
    SELECT jsonb_agg(jsonb_strip_nulls(jsonb_build_object(
      'vector_store', h.vector_store, 'document_name', h.document_name, 'document_id', h.document_id,
      'segment_number', h.segment_number, 'page', h.metadata -> 'page',
      'distance', h.distance, 'keyword_score', h.keyword_score, 'score', h.score, 'rerank_score', h.rerank_score,
      'relevant', CASE WHEN _has_expected THEN _relevant[h.place] END)) ORDER BY h.place)
    FROM (SELECT p.place, (_hits[p.place]).* FROM generate_subscripts(_hits, 1) AS p (place)
          WHERE p.place <= greatest(_cited, cutoffs[cardinality(cutoffs)])) AS h), '[]');
END
$$;

CREATE FUNCTION ml_rag._milliseconds(since timestamptz, until timestamptz DEFAULT clock_timestamp()) RETURNS float8
LANGUAGE plpgsql VOLATILE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$
-- purpose: time between, to the microsecond
BEGIN
  RETURN round(extract(epoch FROM until - since) * 1000, 3)::float8;
END
$$;

CREATE FUNCTION ml_rag._summary(results ml_rag.evaluation_question[], OUT measures jsonb, OUT counted jsonb,
  OUT latency jsonb, OUT errors jsonb)
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$
-- purpose: the means of each measure over the questions that have it, percentiles of each stage, how many errors
BEGIN
  SELECT coalesce(jsonb_object_agg(m.key, round(m.mean::numeric, 6)), '{}'),
    coalesce(jsonb_object_agg(m.key, m.n), '{}') INTO measures, counted
  FROM (SELECT e.key, avg(e.value::text::float8) AS mean, count(*) AS n
        FROM unnest(results) AS r CROSS JOIN jsonb_each(r.measures) AS e GROUP BY e.key) AS m;
  SELECT coalesce(jsonb_object_agg(l.key, jsonb_build_object('p50', l.p50, 'p95', l.p95, 'mean', l.mean)), '{}')
  INTO latency
  FROM (SELECT e.key, round(avg(e.value::text::numeric), 3) AS mean,
          percentile_disc(0.5) WITHIN GROUP (ORDER BY e.value::text::numeric) AS p50,
          percentile_disc(0.95) WITHIN GROUP (ORDER BY e.value::text::numeric) AS p95
        FROM unnest(results) AS r CROSS JOIN jsonb_each(r.latency) AS e GROUP BY e.key) AS l;
  SELECT coalesce(jsonb_object_agg(s.sqlstate, s.n), '{}') INTO errors
  FROM (SELECT r.sqlstate, count(*) AS n FROM unnest(results) AS r WHERE r.sqlstate IS NOT NULL GROUP BY 1) AS s;
END
$$;

CREATE FUNCTION ml_rag._run_environment(stores ml_rag.store[], own jsonb, rag jsonb,
  OUT models jsonb, OUT versions jsonb)
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: what a run depends on beside its options  Calls: ml_rag._get_setting, ml_rag._model_server
BEGIN
  models := jsonb_strip_nulls(jsonb_build_object(
    'embed', (SELECT jsonb_agg(DISTINCT s.embed_model_id) FROM unnest(stores) AS s WHERE s.embed_model_id IS NOT NULL),
    'generate', CASE WHEN (own -> 'generate')::boolean THEN
      coalesce(rag #>> '{model_options,model_id}', ml_rag._get_setting('generate_model_id')) END,
    'rerank', CASE WHEN rag ? 'rerank' THEN
      coalesce(rag #>> '{rerank,model_id}', ml_rag._get_setting('rerank_model_id')) END,
    'judge', own ->> 'judge_model_id'));
  versions := jsonb_strip_nulls(jsonb_build_object('ml_rag', ml_rag.version(),
    'postgresql', current_setting('server_version'),
    'pgvector', (SELECT e.extversion FROM pg_extension AS e WHERE e.extname = 'vector'),
    -- null where it cannot be reached: with embeddings that are there already a run needs none
    'model_server', (SELECT s.reply -> 'version' FROM ml_rag._model_server('/healthz') AS s)));
END
$$;

CREATE FUNCTION ml_rag._evaluate(source text, options jsonb, path text) RETURNS jsonb
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: ml_rag_evaluate; path is the caller's search_path
-- Calls: ml_rag._parse_evaluate_options, ml_rag._read_questions, ml_rag._check_questions, ml_rag._discover,
-- ml_rag._retrieve, ml_rag._evaluate_question, ml_rag._summary, ml_rag._run_environment
-- Writes: ml_rag.evaluation_run, ml_rag.evaluation_question
DECLARE
  _parsed record := ml_rag._parse_evaluate_options(options);
  _keep boolean := (_parsed.own -> 'keep')::boolean;
  _every interval := make_interval(secs => (_parsed.own ->> 'progress_seconds')::float8);
  _began timestamptz := clock_timestamp();
  _told timestamptz := _began;
  _questions jsonb[];
  _result ml_rag.evaluation_question;
  _results ml_rag.evaluation_question[] := '{}';
  _stores ml_rag.store[];
  _names text[];
  _summary record;
  _environment record;
  _run_id bigint;
  _seconds float8;
BEGIN
  IF _keep AND current_setting('transaction_read_only')::boolean THEN
    RAISE EXCEPTION USING ERRCODE = '25006', MESSAGE = 'the run cannot be kept in a read-only transaction',
      HINT = 'Say "keep": false.';
  END IF;
  _questions := ARRAY(SELECT jsonb_array_elements(ml_rag._check_questions(ml_rag._read_questions(source, path),
    _parsed.columns, _parsed.own)));
  _stores := ml_rag._discover(_parsed.rag);
  IF cardinality(_stores) = 0 AND (_parsed.rag ->> 'n_citations')::integer > 0 THEN
    -- says why
    PERFORM ml_rag._retrieve(_questions[1] ->> 'question', _parsed.rag);
  END IF;
  FOR i IN 1..cardinality(_questions) LOOP
    _result := ml_rag._evaluate_question(_questions[i], _parsed.own, _parsed.rag, _parsed.cutoffs);
    _results := array_append(_results, _result);
    IF _every > '0' AND clock_timestamp() >= _told + _every THEN
      _told := clock_timestamp();
      RAISE NOTICE '% of % questions', i, cardinality(_questions);
    END IF;
  END LOOP;
  -- a run in which nothing worked has measured nothing
  IF (SELECT bool_and(r.sqlstate IS NOT NULL AND r.sqlstate <> 'P0002') AND count(DISTINCT r.sqlstate) = 1
      FROM unnest(_results) AS r) THEN
    RAISE EXCEPTION USING ERRCODE = _result.sqlstate, MESSAGE = 'every question failed',
      DETAIL = format('The last one with: %s.', _result.message);
  END IF;

  SELECT s.* INTO _summary FROM ml_rag._summary(_results) AS s;
  SELECT e.* INTO _environment FROM ml_rag._run_environment(_stores, _parsed.own, _parsed.rag) AS e;
  _names := ARRAY(SELECT s.vector_store FROM unnest(_stores) AS s ORDER BY 1);
  _seconds := ml_rag._milliseconds(_began) / 1000;
  IF _keep THEN
    INSERT INTO ml_rag.evaluation_run (name, started_at, seconds, source, questions, options, stores, models, versions,
      measures, counted, latency, errors)
    VALUES (_parsed.own ->> 'name', _began, _seconds, source, cardinality(_questions), coalesce(options, '{}'), _names,
      _environment.models, _environment.versions, _summary.measures, _summary.counted, _summary.latency,
      _summary.errors)
    RETURNING run_id INTO _run_id;
    INSERT INTO ml_rag.evaluation_question (run_id, question_id, question, answer, citations, measures, latency,
      sqlstate, message)
    SELECT _run_id, r.question_id, r.question, r.answer, r.citations, r.measures, r.latency, r.sqlstate, r.message
    FROM unnest(_results) AS r;
  END IF;
  RETURN jsonb_build_object('run_id', _run_id, 'name', _parsed.own -> 'name', 'questions', cardinality(_questions),
    'seconds', _seconds, 'measures', _summary.measures, 'counted', _summary.counted, 'latency', _summary.latency,
    'errors', _summary.errors, 'vector_store', _names, 'models', _environment.models,
    'versions', _environment.versions);
END
$$;

CREATE FUNCTION @extschema@.ml_rag_evaluate(questions text, options jsonb DEFAULT NULL) RETURNS jsonb
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
AS $$
-- purpose: the ruler  Calls: ml_rag._evaluate
-- No SET clause: the names in the query are the caller's. So every name here is qualified and no operator is used.
BEGIN
  RETURN ml_rag._evaluate(questions, options, pg_catalog.current_setting('search_path'));
END
$$;
COMMENT ON FUNCTION @extschema@.ml_rag_evaluate(text, jsonb) IS
$$measures retrieval and answers over many questions: ml_rag_evaluate('questions', '{"options": {"n_citations": 5}}')
questions: a table or a query that gives id, question, documents, answers, answerable; only question must be there, and
what the others are needed for is left out. The query runs read-only, as the caller; do not let strangers write it.
options with ranges and defaults: SELECT * FROM ml_rag.option WHERE routine IN ('ml_rag_evaluate',
'evaluation_columns'); those of ml_rag go into "options".
Returns {"run_id", "name", "questions", "seconds", "measures": {"recall@10": 0.9, …}, "counted": over how many
questions, "latency": {stage: {"p50", "p95", "mean"} in ms}, "errors": {SQLSTATE: questions}, "vector_store", "models",
"versions"}.
A question that fails counts as one for which nothing was found. Runs are kept in ml_rag.evaluation_run and
ml_rag.evaluation_question, where everybody sees their own; ml_rag_compare_runs compares two.
Errors: 22023 bad option, no questions, two of one id, malformed documents; 42P01, 42703, 42501 and others of the query;
25006 a query that writes, or a run to be kept in a read-only transaction; 08006; 57014; and the error that all had.$$;

CREATE FUNCTION @extschema@.ml_rag_evaluate(questions regclass, options jsonb DEFAULT NULL) RETURNS jsonb
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: the same for a regclass  Calls: ml_rag._evaluate, ml_rag._full_name
BEGIN
  IF $1 IS NULL OR ml_rag._full_name($1) IS NULL THEN
    RAISE EXCEPTION USING ERRCODE = '42P01', MESSAGE = 'the table of questions does not exist';
  END IF;
  RETURN ml_rag._evaluate(ml_rag._full_name($1), $2, 'pg_catalog, pg_temp');
END
$$;
COMMENT ON FUNCTION @extschema@.ml_rag_evaluate(regclass, jsonb) IS
$$the same for a table that is given as a regclass; see ml_rag_evaluate(text, jsonb)$$;

-- 89_compare.sql

-- 89_compare: two runs of the ruler, question by question.

CREATE FUNCTION ml_rag._check_same_questions(a bigint, b bigint) RETURNS void
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$
-- purpose: complain where two runs cannot be compared  Reads: the tables of runs, as the caller
DECLARE
  _missing text;
  _n bigint;
BEGIN
  SELECT string_agg(w.id::text, ', ') INTO _missing FROM unnest(ARRAY[a, b]) AS w (id)
  WHERE NOT EXISTS (SELECT FROM ml_rag.evaluation_run AS r WHERE r.run_id = w.id);
  IF a IS NULL OR b IS NULL OR _missing IS NOT NULL THEN
    RAISE EXCEPTION USING ERRCODE = '22023', MESSAGE = 'there is no such run',
      DETAIL = format('Run %s.', coalesce(_missing, 'NULL')),
      HINT = 'SELECT run_id, name, started_at FROM ml_rag.evaluation_run lists the runs that you may see.';
  END IF;
  SELECT count(*), min(coalesce(x.question_id, y.question_id)) INTO _n, _missing
  FROM (SELECT q.question_id, q.question FROM ml_rag.evaluation_question AS q WHERE q.run_id = a) AS x
  FULL JOIN (SELECT q.question_id, q.question FROM ml_rag.evaluation_question AS q WHERE q.run_id = b) AS y
    ON y.question_id = x.question_id
  WHERE x.question_id IS NULL OR y.question_id IS NULL OR x.question IS DISTINCT FROM y.question;
  IF _n > 0 THEN
    RAISE EXCEPTION USING ERRCODE = '22023', MESSAGE = 'the runs have different questions',
      DETAIL = format('%s questions are in one only or read differently, such as id %s.', _n, left(_missing, 200)),
      HINT = 'Evaluate the same questions with the same "limit" and "seed".';
  END IF;
END
$$;

CREATE FUNCTION @extschema@.ml_rag_compare_runs(run_a bigint, run_b bigint)
RETURNS TABLE (measure text, a float8, b float8, difference float8, p_value float8, n bigint, better bigint,
               worse bigint)
LANGUAGE plpgsql STABLE PARALLEL SAFE ROWS 20
SET search_path FROM CURRENT
AS $$
-- purpose: two runs, measure by measure, over the questions that have it in both
-- Calls: ml_rag._check_same_questions, ml_rag._student_p  Reads: the tables of runs, as the caller
#variable_conflict use_column
BEGIN
  PERFORM ml_rag._check_same_questions($1, $2);
  RETURN QUERY
    WITH value AS (
      SELECT q.run_id, q.question_id, e.key, e.value::text::float8 AS value
      FROM ml_rag.evaluation_question AS q
      CROSS JOIN LATERAL (SELECT m.key, m.value FROM jsonb_each(q.measures) AS m UNION ALL
                          SELECT l.key || '_ms', l.value FROM jsonb_each(q.latency) AS l) AS e
      WHERE q.run_id IN ($1, $2)
    ), pair AS (
      SELECT x.key, x.value AS a, y.value AS b, y.value - x.value AS d,
        -- of these less is better; an answer's length is neither
        CASE WHEN x.key LIKE '%\_ms' OR x.key = 'refused_wrongly' THEN -1 WHEN x.key = 'answer_length' THEN 0 ELSE 1 END
          AS sign
      FROM value AS x JOIN value AS y ON y.question_id = x.question_id AND y.key = x.key
      WHERE x.run_id = $1 AND y.run_id = $2
    ), total AS (
      SELECT p.key, avg(p.a) AS a, avg(p.b) AS b, avg(p.d) AS d, stddev_samp(p.d) AS deviation, count(*) AS n,
        count(*) FILTER (WHERE p.d * p.sign > 0) AS better, count(*) FILTER (WHERE p.d * p.sign < 0) AS worse
      FROM pair AS p GROUP BY p.key
    )
    SELECT t.key, t.a, t.b, t.d,
      -- a deviation of nothing but rounding tells nothing
      CASE WHEN t.deviation > 1e-9 * greatest(abs(t.a), abs(t.b)) THEN
        ml_rag._student_p(t.d / (t.deviation / sqrt(t.n::float8)), (t.n - 1)::integer) END,
      t.n, t.better, t.worse
    FROM total AS t
    ORDER BY t.key LIKE '%\_ms', regexp_replace(t.key, '@.*', ''), nullif(split_part(t.key, '@', 2), '')::integer;
END
$$;
COMMENT ON FUNCTION @extschema@.ml_rag_compare_runs(bigint, bigint) IS
$$compares two runs of ml_rag_evaluate over the same questions, measure by measure and stage by stage (…_ms)
a, b: means over the n questions that have the measure in both runs. difference: b - a. p_value: of the paired,
two-sided t-test, null where the questions differ in nothing or all by the same. better, worse: questions for which b is better or
worse than a (less is better for times and refused_wrongly; an answer's length counts as neither).
Errors: 22023 no such run among those you may see, or different questions.$$;

-- 90_privileges.sql

-- 90_privileges: who may call what, in one place. Nothing is granted to PUBLIC.

-- Roles belong to the cluster: they may be there already, and DROP EXTENSION leaves them.
DO $$
BEGIN
  IF pg_catalog.to_regrole('ml_rag_user') IS NULL THEN
    CREATE ROLE ml_rag_user NOLOGIN;
  END IF;
  IF pg_catalog.to_regrole('ml_rag_loader') IS NULL THEN
    CREATE ROLE ml_rag_loader NOLOGIN;
  END IF;
END
$$;
-- who may load may also ask
GRANT ml_rag_user TO ml_rag_loader;

REVOKE ALL ON ALL FUNCTIONS IN SCHEMA ml_rag FROM PUBLIC;
REVOKE ALL ON ALL PROCEDURES IN SCHEMA ml_rag FROM PUBLIC;
REVOKE ALL ON FUNCTION
  @extschema@.ml_rag_answer(text, jsonb), @extschema@.ml_rag_search(text, jsonb), @extschema@.ml_generate(text, jsonb),
  @extschema@.ml_embed_row(text, jsonb), @extschema@.ml_supported_models(), @extschema@.ml_rank(text, jsonb, jsonb),
  @extschema@.ml_rank_rows(text, text[], text[], jsonb),
  @extschema@.ml_rag_evaluate(text, jsonb), @extschema@.ml_rag_evaluate(regclass, jsonb),
  @extschema@.ml_rag_compare_runs(bigint, bigint)
FROM PUBLIC;
REVOKE ALL ON PROCEDURE
  @extschema@.ml_rag(text, jsonb, jsonb), @extschema@.ml_rag_table(text, text, jsonb, jsonb),
  @extschema@.ml_generate_table(text, text, jsonb, jsonb), @extschema@.ml_embed_table(text, text, jsonb, jsonb),
  @extschema@.vector_store_load(text, jsonb, jsonb)
FROM PUBLIC;

-- ml_rag_user: asks. The stages run with the caller's own rights, so it may call each of them; what they read is
-- decided by the privileges and row-level security of the stores.
GRANT USAGE ON SCHEMA ml_rag TO ml_rag_user;
GRANT SELECT ON ml_rag.setting, ml_rag.option TO ml_rag_user;
GRANT SELECT ON ml_rag.setting_value TO ml_rag_user;
-- policies leave each role its own rows
GRANT SELECT, INSERT, DELETE ON ml_rag.evaluation_run, ml_rag.evaluation_question TO ml_rag_user;
-- keyword indexes: the views show each caller what it may see, and let owners of tables make indexes of them
GRANT SELECT ON ml_rag.keyword_index, ml_rag.keyword_whole_row, ml_rag.keyword_whole_new, ml_rag.keyword_whole_gone,
  ml_rag.keyword_whole_run, ml_rag.keyword_whole_posting, ml_rag.keyword_visible, ml_rag.keyword_visible_row,
  ml_rag.keyword_total, ml_rag.keyword_term TO ml_rag_user;
GRANT SELECT, INSERT, DELETE, UPDATE (folding) ON ml_rag.keyword_own_store TO ml_rag_user;
GRANT INSERT ON ml_rag.keyword_own_row, ml_rag.keyword_own_new TO ml_rag_user;
GRANT USAGE ON SEQUENCE ml_rag.keyword_number TO ml_rag_user;
GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA ml_rag TO ml_rag_user;
GRANT EXECUTE ON ALL PROCEDURES IN SCHEMA ml_rag TO ml_rag_user;
GRANT EXECUTE ON FUNCTION
  @extschema@.ml_rag_answer(text, jsonb), @extschema@.ml_rag_search(text, jsonb), @extschema@.ml_generate(text, jsonb),
  @extschema@.ml_embed_row(text, jsonb), @extschema@.ml_supported_models(), @extschema@.ml_rank(text, jsonb, jsonb),
  @extschema@.ml_rank_rows(text, text[], text[], jsonb),
  @extschema@.ml_rag_evaluate(text, jsonb), @extschema@.ml_rag_evaluate(regclass, jsonb),
  @extschema@.ml_rag_compare_runs(bigint, bigint)
TO ml_rag_user;
GRANT EXECUTE ON PROCEDURE
  @extschema@.ml_rag(text, jsonb, jsonb), @extschema@.ml_rag_table(text, text, jsonb, jsonb),
  @extschema@.ml_generate_table(text, text, jsonb, jsonb), @extschema@.ml_embed_table(text, text, jsonb, jsonb)
TO ml_rag_user;

-- the owner of the extension: changes settings, folds keyword indexes in the name of those who write
REVOKE ALL ON FUNCTION ml_rag.configure(text, text), ml_rag._fold_keywords(oid, bigint, boolean),
  ml_rag._fold(oid, bigint, boolean), ml_rag._empty_keywords(oid) FROM ml_rag_user;
-- they run with the owner's rights, for the triggers of the extension alone; _keep_keywords is for every table's owner
REVOKE ALL ON FUNCTION ml_rag._forget_keywords(), ml_rag._fold_on_request(), ml_rag._drop_keywords() FROM ml_rag_user;

-- ml_rag_loader: makes and fills vector stores, with the caller's own rights on schemas, tables and files
DO $$
DECLARE
  _routine pg_catalog.regprocedure;
BEGIN
  FOREACH _routine IN ARRAY ARRAY[
    'ml_rag._check_file_privilege()', 'ml_rag._find_files(text)', 'ml_rag._load_files(jsonb, jsonb, jsonb)',
    'ml_rag._load_contents(jsonb, text[], bytea[])', 'ml_rag._parse_load_options(text, jsonb)',
    'ml_rag._store_name(jsonb, text, name[])', 'ml_rag._lock_store(name, name)', 'ml_rag._lock_store(oid)',
    'ml_rag._store_key(name, name)', 'ml_rag._store_key(oid)', 'ml_rag._hold_store(oid)',
    'ml_rag._check_store(regclass, text)', 'ml_rag._make_store(name, name, text, text, text)',
    'ml_rag._load_job(regclass, text, jsonb)', 'ml_rag._begin_load(text, jsonb, name[])',
    'ml_rag._end_load(jsonb, jsonb)', 'ml_rag._document_states(regclass, text[])',
    'ml_rag._replace_document(oid, text)',
    'ml_rag._insert_segments(oid, text, bigint, integer, jsonb[], text[], text[])',
    'ml_rag.create_store(text, jsonb)', 'ml_rag.index_store(regclass, text)',
    'ml_rag.load_document(regclass, text, bytea, jsonb)', 'ml_rag.load_documents(regclass, text[], bytea[], jsonb)',
    'ml_rag.unchanged_documents(regclass, text[], text[], jsonb)', 'ml_rag.documents_below(regclass, text)',
    'ml_rag.remove_documents(regclass, text[])', '@extschema@.vector_store_load(text, jsonb, jsonb)'
  ]::pg_catalog.regprocedure[] LOOP
    EXECUTE pg_catalog.format('REVOKE ALL ON ROUTINE %s FROM ml_rag_user', _routine);
    EXECUTE pg_catalog.format('GRANT EXECUTE ON ROUTINE %s TO ml_rag_loader', _routine);
  END LOOP;
END
$$;
