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
  ('ml_rag', 'explain', 'boolean', NULL, NULL, NULL, 'false', NULL,
   'add how the answer came about: stores, plans, candidates, thresholds, tokens, milliseconds'),

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
  ('reembed', 'batch_size', 'integer', 1, 10000, NULL, '256', NULL, 'rows of one call to the model and between two commits'),
  ('reembed', 'lock_seconds', 'number', 0.1, 3600, NULL, '10', NULL,
   'longest wait for the lock of the table, behind which others wait; before it is tried again they are let through'),
  ('reembed', 'switch', 'boolean', NULL, NULL, NULL, 'true', NULL,
   'build indexes and switch when all rows have a new embedding; false = only fill the new column'),
  ('reembed', 'vector_store_columns', 'object', NULL, NULL, NULL, NULL, NULL,
   'segment, segment_embedding: the names of the columns'),
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
-- Of options that hold texts it tells the length only: PostgreSQL writes details into its log.
DECLARE
  _got text := coalesce($2::text, 'null');
BEGIN
  IF $1 IN ('context', 'system', 'abstain_text', 'stop_sequences', 'required_keywords', 'excluded_keywords') THEN
    _got := CASE jsonb_typeof($2) WHEN 'string' THEN format('a text of %s characters', length($2 #>> '{}'))
      WHEN 'array' THEN format('an array of %s', jsonb_array_length($2)) WHEN 'object' THEN 'an object' ELSE _got END;
  ELSIF length(_got) > 200 THEN
    _got := left(_got, 200) || '…';
  END IF;
  RAISE EXCEPTION USING ERRCODE = '22023',
    MESSAGE = format('invalid value for option "%s"', $1),
    DETAIL = format('Got %s; allowed: %s.', _got, $3),
    HINT = coalesce(left($4, 500), 'SELECT * FROM ml_rag.option lists the options with their ranges and defaults.');
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
