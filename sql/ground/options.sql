-- options: what callers may say, a record each: type, range, default. The tables of options in README.md and docs/ are
-- made from them by make docs, and tests/sql/test_parse.py tries each at its limits.

CREATE TABLE ml_rag.option (
  routine text,
  name text,
  type text NOT NULL
    CHECK (type IN ('text', 'text[]', 'integer', 'number', 'boolean', 'object', 'array', 'choice', 'vector', 'any')),
  minimum numeric,
  maximum numeric,
  choices text[],
  default_value jsonb,
  auto_value jsonb,
  description text NOT NULL,
  default_rule text,
  keys_of text,
  is_private boolean NOT NULL,
  PRIMARY KEY (routine, name),
  CHECK ((type IN ('integer', 'number')) = (minimum IS NOT NULL)),
  CHECK (type <> 'integer' OR maximum IS NOT NULL),
  CHECK ((type = 'choice') = (choices IS NOT NULL)),
  CHECK (type IN ('object', 'array') OR keys_of IS NULL)
);
COMMENT ON TABLE ml_rag.option IS
$$every option of every routine: type, range, choices, default
routine: the routine, or the object among its options that has the option as a key. minimum, maximum: both included.
default_value: taken where the option is absent or null. default_rule: the same in words, where it depends on other
things. auto_value: what "auto" stands for; null where there is no such word, JSON null where it is decided for each question.
keys_of: whose options are the keys of an object, or of those in an array. is_private: errors do not repeat the value, as they go
into the log.$$;

CREATE FUNCTION ml_rag._add_option(
  routine text, name text, type text, minimum numeric DEFAULT NULL, maximum numeric DEFAULT NULL,
  choices text[] DEFAULT NULL, default_value jsonb DEFAULT NULL, default_rule text DEFAULT NULL,
  auto_value jsonb DEFAULT NULL, keys_of text DEFAULT NULL, is_private boolean DEFAULT false,
  description text DEFAULT NULL
) RETURNS void
LANGUAGE sql VOLATILE PARALLEL UNSAFE SET search_path FROM CURRENT AS $$
-- purpose: a record of ml_rag.option, with its fields by name
-- Writes: ml_rag.option
INSERT INTO ml_rag.option (routine, name, type, minimum, maximum, choices, default_value, auto_value, description,
  default_rule, keys_of, is_private)
VALUES ($1, $2, $3, $4, $5, $6, $7, $9, $12, $8, $10, $11)
$$;


-- ml_rag, ml_rag_answer, ml_rag_search: which stores and rows

SELECT ml_rag._add_option('ml_rag', 'vector_store', 'text[]', default_rule => 'all that qualify',
  description => 'search only these stores: "schema.table", or "table", which is the tables of that name in all'
    ' schemas; a name that does not qualify is ignored with a warning');
SELECT ml_rag._add_option('ml_rag', 'exclude_vector_store', 'text[]', default_rule => 'none',
  description => 'leave these stores out');
SELECT ml_rag._add_option('ml_rag', 'schema', 'text[]', default_rule => 'all',
  description => 'look for vector stores in these schemas; in loads the option is schema_name');
SELECT ml_rag._add_option('ml_rag', 'document_name', 'text[]', default_rule => 'all',
  description => 'search only these documents, by their names as stored (a loaded file''s whole path)');
SELECT ml_rag._add_option('ml_rag', 'exclude_document_name', 'text[]', default_rule => 'none',
  description => 'leave these documents out');
SELECT ml_rag._add_option('ml_rag', 'filters', 'object', default_rule => 'none',
  description => 'search only rows for which these conditions on columns and metadata hold, such as {"author": ["A",'
    ' "B"], "year": {"gte": 2002}}: docs/search.md#filters-and-keywords');
SELECT ml_rag._add_option('ml_rag', 'required_keywords', 'text[]', default_rule => 'none', is_private => true,
  description => 'search only segments that have all of these words or phrases; at most 20');
SELECT ml_rag._add_option('ml_rag', 'excluded_keywords', 'text[]', default_rule => 'none', is_private => true,
  description => 'leave out segments that have one of these words or phrases; at most 20');

-- how the search goes

SELECT ml_rag._add_option('ml_rag', 'n_citations', 'integer', minimum => 0, maximum => 100,
  default_rule => '3; 10 with max_distance or percentage_distance',
  description => 'how many segments are cited; 0 = no retrieval, the model answers alone');
SELECT ml_rag._add_option('ml_rag', 'distance_metric', 'choice',
  choices => ARRAY(SELECT m.name FROM ml_rag.metric AS m ORDER BY m.name),
  default_value => '"COSINE"',
  description => 'distance between the question and a segment; DOT is 1 - inner product');
SELECT ml_rag._add_option('ml_rag', 'embed_model_id', 'text', default_rule => 'setting embed_model_id',
  description => 'embeds the question; only stores made with this model are searched');
SELECT ml_rag._add_option('ml_rag', 'query_embedding', 'vector', default_rule => 'none',
  description => 'used instead of embedding the question');
SELECT ml_rag._add_option('ml_rag', 'vector_store_columns', 'object', keys_of => 'vector_store_columns',
  description => 'the real names of the columns of a store; also a filter: only relations that have them are stores');
SELECT ml_rag._add_option('ml_rag', 'semantic_search', 'boolean', default_value => 'true',
  description => 'search by meaning: the nearest embeddings');
SELECT ml_rag._add_option('ml_rag', 'keyword_search', 'boolean', default_value => 'false',
  description => 'search by words: BM25; with semantic_search both, which is hybrid search: docs/search.md');
SELECT ml_rag._add_option('ml_rag', 'hybrid_options', 'object', keys_of => 'hybrid_options',
  description => 'how the results of semantic_search and keyword_search become one list');
SELECT ml_rag._add_option('ml_rag', 'index_options', 'object', keys_of => 'index_options', default_rule => 'none',
  description => 'how approximate indexes are searched: docs/embeddings.md#indexes');
SELECT ml_rag._add_option('ml_rag', 'arms', 'array', keys_of => 'arm', default_rule => 'what semantic_search and keyword_search say',
  description => 'what is searched, arm by arm, in place of semantic_search, keyword_search and hybrid_options: 1 to 16'
    ' objects, such as [{"search": "semantic"}, {"search": "keyword", "weight": 0.3}]: docs/search.md#arms');
SELECT ml_rag._add_option('ml_rag', 'citation_fields', 'text[]', default_rule => 'none',
  description => 'further keys of each citation, any of ["document_id", "segment_number", "segment_range", "vector_store",'
    ' "metadata", "score", "keyword_score", "rerank_score", "rank", "node", "node_distance", "highlights"], and keys of the'
    ' metadata such as "metadata.page": docs/answers.md#highlights');
SELECT ml_rag._add_option('ml_rag', 'return', 'choice', choices => '{segment,node,document}', default_value => '"segment"',
  description => 'what is cited: segments; the nodes that arms have found in node groups; or the document around each'
    ' segment, up to 200 segments on either side');
SELECT ml_rag._add_option('ml_rag', 'retrieval_options', 'object', keys_of => 'retrieval_options',
  description => 'limits on the distance, and neighbours of what is found');
SELECT ml_rag._add_option('ml_rag', 'query_options', 'object', default_rule => 'none', keys_of => 'query_options',
  description => 'what is searched with beside or in place of the question as it was asked: docs/questions.md');
SELECT ml_rag._add_option('ml_rag', 'rerank', 'object', default_rule => 'none', keys_of => 'rerank',
  description => 'reorder by a cross-encoder what was found; {} = with the defaults');

-- what comes out

SELECT ml_rag._add_option('ml_rag', 'skip_generate', 'boolean', default_value => 'false',
  description => 'retrieval only; the output has no text');
SELECT ml_rag._add_option('ml_rag', 'model_options', 'object', keys_of => 'ml_generate',
  description => 'any option of ml_generate except context');
SELECT ml_rag._add_option('ml_rag', 'prompt', 'object', keys_of => 'prompt', is_private => true,
  description => 'instructions, markers and order of the segments in the prompt');
SELECT ml_rag._add_option('ml_rag', 'abstain', 'boolean',
  default_rule => 'true with max_distance or min_score, else false',
  description => 'answer with abstain_text instead of failing where nothing relevant is found; true without max_distance and '
    'min_score sets max_distance to "auto"');
SELECT ml_rag._add_option('ml_rag', 'abstain_text', 'text', default_rule => 'setting abstain_text', is_private => true,
  description => 'the answer where nothing relevant is found');
SELECT ml_rag._add_option('ml_rag', 'grounding', 'object', default_rule => 'none', keys_of => 'ml_check_grounding',
  description => 'check the answer by its citations, in retrieval_info.grounding; {} = with the defaults: docs/answers.md#grounding');
SELECT ml_rag._add_option('ml_rag', 'min_support', 'number', minimum => 0, maximum => 1, default_rule => 'none',
  description => 'support_score that the check of the answer must reach; with less the call abstains if "abstain" is true, else it'
    ' warns');
SELECT ml_rag._add_option('ml_rag', 'remove_unsupported', 'boolean', default_rule => 'false',
  description => 'remove sentences that the citations do not support from the answer');
SELECT ml_rag._add_option('ml_rag', 'preset', 'text', default_rule => 'none',
  description => 'options of this name, over which those of the call are laid: docs/answers.md#options-by-name-and-for-everybody');
SELECT ml_rag._add_option('ml_rag', 'partial', 'boolean', default_value => 'false',
  description => 'search without the shards that do not answer; they are listed in retrieval_info.missing_shards');
SELECT ml_rag._add_option('ml_rag', 'return_prompt', 'boolean', default_rule => 'false',
  description => 'add the messages that the model answered: prompt');
SELECT ml_rag._add_option('ml_rag', 'return_usage', 'boolean', default_value => 'false',
  description => 'add what the answer took and why it ended: usage, with prompt_tokens, generated_tokens and finish_reason');
SELECT ml_rag._add_option('ml_rag', 'explain', 'boolean', default_value => 'false',
  description => 'add how the answer came about: stores, plans, candidates, thresholds, tokens, milliseconds:'
    ' docs/monitoring.md#how-an-answer-came-about');

-- objects among the options of ml_rag

SELECT ml_rag._add_option('retrieval_options', 'max_distance', 'number', minimum => 0, maximum => 999999.9999,
  default_rule => 'no such limit', auto_value => '0.6',
  description => 'largest distance of a segment that is kept; ml_rag.calibrate proposes one for your documents, and with "keep"'
    ' it makes that the one of "auto"');
SELECT ml_rag._add_option('retrieval_options', 'percentage_distance', 'number', minimum => 0, maximum => 999999.9999,
  default_rule => 'no such limit', auto_value => '20',
  description => 'the same, in per cent above the nearest distance; with both, the smaller limit counts');
SELECT ml_rag._add_option('retrieval_options', 'segment_overlap', 'integer', minimum => 0, maximum => 5,
  default_value => '1', default_rule => '1 if the call has retrieval_options, otherwise 0', auto_value => '1',
  description => 'neighbours that each segment brings on either side');

SELECT ml_rag._add_option('arm', 'search', 'choice', choices => '{semantic,keyword,function}', default_rule => 'must be given',
  description => 'by meaning (kNN), by words (BM25), or by a function of yours');
SELECT ml_rag._add_option('arm', 'in', 'text', default_value => '"segment"',
  description => 'which texts are searched: the segments, or a node group, whose hits count for the segments they came from:'
    ' docs/nodes.md');
SELECT ml_rag._add_option('arm', 'embedding', 'text', default_rule => 'that of the store',
  description => 'of a semantic arm: which embedding of the store is searched, by its name; its model embeds the question:'
    ' docs/embeddings.md');
SELECT ml_rag._add_option('arm', 'query', 'any', default_value => '"question"',
  description => 'what is searched with: "question", "hypothetical_document", "synonyms", "sub_questions", which'
    ' query_options must ask for, or {"text": "…"}');
SELECT ml_rag._add_option('arm', 'alone', 'boolean', default_rule => 'false',
  description => 'of "query": "hypothetical_document": search with it without the question');
SELECT ml_rag._add_option('arm', 'query_embedding', 'vector', default_rule => 'of what is searched with',
  description => 'of a semantic arm: used instead of embedding what is searched with');
SELECT ml_rag._add_option('arm', 'function', 'text', default_rule => 'must be given with "search": "function"',
  description => '"schema.function", which scores all rows that pass the filters: docs/functions.md');
SELECT ml_rag._add_option('arm', 'arguments', 'object', default_rule => 'none',
  description => 'for a function whose last parameter is of type jsonb');
SELECT ml_rag._add_option('arm', 'descending', 'boolean', default_rule => 'true with "function"',
  description => 'whether a larger number of the function is better');
SELECT ml_rag._add_option('arm', 'weight', 'number', minimum => 0, maximum => 1, auto_value => 'null',
  default_rule => 'equal shares',
  description => 'share in the fused score; weights are divided by their sum. "auto", for all arms: by how clear each arm'
    ' is about the question, and how much of the texts its model takes in');
SELECT ml_rag._add_option('arm', 'candidates', 'integer', minimum => 1, maximum => 10000, default_value => '100',
  description => 'segments that the arm brings');
SELECT ml_rag._add_option('arm', 'max_distance', 'number', minimum => 0, maximum => 999999.9999, default_rule => 'none',
  description => 'of a semantic arm: what is farther away is dropped before fusing;'
    ' of a function that is not "descending": what it gives more');
SELECT ml_rag._add_option('arm', 'min_score', 'number', minimum => -1000000000, default_rule => 'none',
  description => 'of a keyword arm: what has a lower BM25 score is dropped before fusing; of a function: what it gives less');

CREATE FUNCTION ml_rag._arm_options(search text) RETURNS text[]
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE AS $$
-- purpose: the options that an arm of a kind takes, of those that not every arm does; null: all of these.
-- backend/retrieval/arms.py has the kinds
BEGIN
  RETURN CASE search
    WHEN 'semantic' THEN '{embedding,query_embedding,max_distance}'
    WHEN 'keyword' THEN '{min_score}'
    WHEN 'function' THEN '{function,arguments,descending,query_embedding,max_distance,min_score}'
    ELSE '{embedding,function,arguments,descending,query_embedding,max_distance,min_score}' END;
END
$$;

SELECT ml_rag._add_option('query_options', 'history', 'array', default_rule => 'none', is_private => true,
  description => 'earlier turns of the conversation, oldest first, at most 1000: {"role": "user" or "assistant",'
    ' "content": "…"}');
SELECT ml_rag._add_option('query_options', 'history_tokens', 'integer', minimum => 0, maximum => 1000000,
  default_rule => 'a quarter of the model''s context; 512 where no model rewrites the question',
  description => 'longest prompt in tokens of the model: instructions and question always, then the newest turns that fit,'
    ' whole ones');
SELECT ml_rag._add_option('query_options', 'rewrite', 'boolean',
  default_rule => 'true with history and a model named here or by setting query_model_id, else false',
  description => 'let the model make a question that stands alone, in correct spelling; without it the history is'
    ' searched with beside the question');
SELECT ml_rag._add_option('query_options', 'synonyms', 'any', default_rule => 'none',
  description => 'at most this many terms that the documents may use instead, 1 to 20 (true = 8): a keyword arm beside those'
    ' of the question');
SELECT ml_rag._add_option('query_options', 'hypothetical_document', 'any', default_rule => 'none',
  description => 'passages that could answer the question, 1 to 4 of them (true = 1): semantic arms search with the mean of'
    ' their embeddings and the question''s');
SELECT ml_rag._add_option('query_options', 'sub_questions', 'integer', minimum => 1, maximum => 5, default_rule => 'none',
  description => 'at most this many simpler questions, each searched beside the question');
SELECT ml_rag._add_option('query_options', 'filters', 'any', default_rule => 'none',
  description => 'columns and metadata keys on which the model may choose conditions; true = those that a'
    ' condition can be about, and those described by ml_rag.describe_filter or COMMENT ON COLUMN');
SELECT ml_rag._add_option('query_options', 'document_names', 'boolean', default_value => 'false',
  description => 'search only the documents that the question names, by file name, title or part of a path; needs no model');
SELECT ml_rag._add_option('query_options', 'model_id', 'text',
  default_rule => 'setting query_model_id, else generate_model_id', description => 'a generation model');
SELECT ml_rag._add_option('query_options', 'prompts', 'object', default_rule => 'none', keys_of => 'query_prompts',
  is_private => true,
  description => 'instructions of yours for what the model is asked for; the form of its answer stays');
SELECT ml_rag._add_option('query_options', 'fallback', 'boolean', default_value => 'true',
  description => 'where the model fails or answers nonsense, search with the question as it was asked, with a warning;'
    ' false = fail');

SELECT ml_rag._add_option('query_prompts', 'rewrite', 'text', default_rule => 'ours', is_private => true,
  description => 'what the rewritten question is to be');
SELECT ml_rag._add_option('query_prompts', 'synonyms', 'text', default_rule => 'ours', is_private => true,
  description => 'which terms');
SELECT ml_rag._add_option('query_prompts', 'hypothetical_document', 'text', default_rule => 'ours', is_private => true,
  description => 'what the passages are to be');
SELECT ml_rag._add_option('query_prompts', 'sub_questions', 'text', default_rule => 'ours', is_private => true,
  description => 'which questions');

SELECT ml_rag._add_option('hybrid_options', 'fusion', 'choice', choices => '{weighted,rrf}',
  default_value => '"weighted"',
  description => 'weighted sum of the scores, or reciprocal rank fusion');
SELECT ml_rag._add_option('hybrid_options', 'semantic_weight', 'number', minimum => 0, maximum => 1,
  default_rule => 'by how clear each arm is about this question, and how much of the texts the model takes in', auto_value => 'null',
  description => 'weight of the semantic arm in a weighted fusion');
SELECT ml_rag._add_option('hybrid_options', 'rrf_k', 'integer', minimum => 1, maximum => 1000000, default_value => '60',
  description => 'constant of reciprocal rank fusion');
SELECT ml_rag._add_option('hybrid_options', 'candidates', 'integer', minimum => 1, maximum => 10000,
  default_value => '100',
  description => 'how many segments each arm finds');

SELECT ml_rag._add_option('rerank', 'model_id', 'text', default_rule => 'setting rerank_model_id',
  description => 'a cross-encoder, or "hybrid", a model that needs no files; in ml_rank the option is "model"');
SELECT ml_rag._add_option('rerank', 'function', 'text', default_rule => 'none',
  description => 'instead of a model a function of yours, "schema.function": docs/functions.md');
SELECT ml_rag._add_option('rerank', 'candidates', 'integer', minimum => 1, maximum => 1000, default_value => '50',
  description => 'how many segments of the search are scored; at least n_citations');
SELECT ml_rag._add_option('rerank', 'min_score', 'number', minimum => 0, maximum => 1, default_rule => 'none',
  description => 'segments that score less are dropped; if none is left, abstain decides');

SELECT ml_rag._add_option('prompt', 'system', 'text', default_rule => 'none', is_private => true,
  description => 'your own instructions. They follow the constant ones, which stay: only facts from the documents,'
    ' documents are never instructions');
SELECT ml_rag._add_option('prompt', 'length', 'choice', choices => '{short,medium,long}',
  default_rule => 'short for small models, which the catalogue marks "brief", else medium',
  description => 'of the answer: one or two sentences, as the model sees fit, several paragraphs');
SELECT ml_rag._add_option('prompt', 'metadata', 'any', default_rule => 'true for tables with a vectorizer, else false',
  description => 'which metadata stand beside each document in the prompt: an array of keys, true (all) or false');
SELECT ml_rag._add_option('prompt', 'citation_style', 'choice', choices => '{none,numbered}', default_value => '"none"',
  description => 'numbered asks the model for [1] after a statement from the first citation');
SELECT ml_rag._add_option('prompt', 'order', 'choice', choices => '{best_first,best_last}',
  default_value => '"best_last"',
  description => 'where the best segment stands in the prompt; best_last is beside the question. The numbers are'
    ' those of citations in either order, and the worst segments are left out where the context is too small');

SELECT ml_rag._add_option('vector_store_columns', 'segment', 'text', default_value => '"segment"',
  description => 'column of the text');
SELECT ml_rag._add_option('vector_store_columns', 'segment_embedding', 'text', default_value => '"segment_embedding"',
  description => 'vector or halfvec column');
SELECT ml_rag._add_option('vector_store_columns', 'document_name', 'text', default_value => '"document_name"',
  description => 'column of the name shown in citations');
SELECT ml_rag._add_option('vector_store_columns', 'document_id', 'text', default_value => '"document_id"',
  description => 'column that tells documents apart');
SELECT ml_rag._add_option('vector_store_columns', 'segment_number', 'text', default_value => '"segment_number"',
  description => 'column of the order within a document');
SELECT ml_rag._add_option('vector_store_columns', 'metadata', 'text', default_value => '"metadata"',
  description => 'json or jsonb column');


-- ml_generate, and model_options of ml_rag

SELECT ml_rag._add_option('ml_generate', 'model_id', 'text', default_rule => 'setting generate_model_id',
  description => 'a generation model');
SELECT ml_rag._add_option('ml_generate', 'system', 'text', default_rule => 'none', is_private => true,
  description => 'instructions, in place of the usual ones where the text is not made of documents');
SELECT ml_rag._add_option('ml_generate', 'task', 'choice', choices => '{generation,summarization}',
  default_value => '"generation"', description => 'what to do');
SELECT ml_rag._add_option('ml_generate', 'max_tokens', 'integer', minimum => 1, maximum => 1000000,
  default_value => '256',
  description => 'longest answer, in tokens');
SELECT ml_rag._add_option('ml_generate', 'temperature', 'number', minimum => 0, default_value => '0',
  description => '0 = always the likeliest token');
SELECT ml_rag._add_option('ml_generate', 'top_k', 'integer', minimum => 0, maximum => 32000,
  default_rule => 'the model''s',
  description => 'sample among the k likeliest tokens; 0 = among all');
SELECT ml_rag._add_option('ml_generate', 'top_p', 'number', minimum => 0, maximum => 1, default_rule => 'the model''s',
  description => 'sample among the likeliest tokens that have this probability together');
SELECT ml_rag._add_option('ml_generate', 'repeat_penalty', 'number', minimum => 0, maximum => 2,
  default_rule => 'the model''s', description => 'factor against repeated tokens; 1 = none');
SELECT ml_rag._add_option('ml_generate', 'frequency_penalty', 'number', minimum => 0, maximum => 1,
  default_rule => 'the model''s', description => 'penalty that grows with each repetition');
SELECT ml_rag._add_option('ml_generate', 'presence_penalty', 'number', minimum => 0, maximum => 1,
  default_rule => 'the model''s', description => 'penalty for any repetition');
SELECT ml_rag._add_option('ml_generate', 'stop_sequences', 'text[]', default_rule => 'none', is_private => true,
  description => 'texts that end the answer');
SELECT ml_rag._add_option('ml_generate', 'language', 'text', default_rule => 'none',
  description => 'language of the answer, such as en');
SELECT ml_rag._add_option('ml_generate', 'seed', 'integer', minimum => 0, maximum => 4294967295, default_rule => 'none',
  description => 'makes sampling repeatable');
SELECT ml_rag._add_option('ml_generate', 'json_schema', 'object', default_rule => 'none',
  description => 'the answer is valid JSON of this schema, which may have 64 kB, 64 levels, 1000 values, and lengths,'
    ' counts and repetitions (also of a pattern) up to 1000');
SELECT ml_rag._add_option('ml_generate', 'speculative_decoding', 'boolean', default_rule => 'the model''s',
  description => 'look answer tokens up in the prompt: faster, same text');
SELECT ml_rag._add_option('ml_generate', 'max_sentences', 'integer', minimum => 1, maximum => 10,
  default_rule => '2; 3 for summarization', description => 'sentences of an answer of the model "extractive"');
SELECT ml_rag._add_option('ml_generate', 'min_support', 'number', minimum => 0, maximum => 1,
  default_rule => '0.3; 0.16 without an embedding model',
  description => 'how well a sentence must answer the question; if none does, the model "extractive" abstains where "abstain" is'
    ' true, else it warns');
SELECT ml_rag._add_option('ml_generate', 'context', 'text', default_rule => 'none', is_private => true,
  description => 'text that the answer is drawn from; ml_generate only');


-- ml_rank, ml_rank_rows

SELECT ml_rag._add_option('ml_rank', 'top_n', 'integer', minimum => 1, maximum => 2147483647, default_rule => 'all',
  description => 'return only the best n; in ml_rag the option is n_citations');
SELECT ml_rag._add_option('ml_rank', 'ignore_record_details_in_response', 'boolean', default_value => 'false',
  description => 'return ids and scores only');
SELECT ml_rag._add_option('ml_rank', 'model', 'text',
  default_rule => 'setting rerank_model_id where its files are there, else "hybrid"',
  description => 'a cross-encoder, or the model "hybrid"; a model named here whose files are missing is error 55000.'
    ' Elsewhere the option is model_id');
SELECT ml_rag._add_option('ml_rank', 'language', 'text', default_rule => 'default_text_search_config',
  description => 'a code such as en or pt-BR, or a name: what the model "hybrid" takes for a word');


-- ml_check_grounding

SELECT ml_rag._add_option('ml_check_grounding', 'citation_threshold', 'number', minimum => 0, maximum => 1, default_value => '0.6',
  description => 'score that makes a claim a supported one');
SELECT ml_rag._add_option('ml_check_grounding', 'model', 'text', default_value => '"hybrid"',
  description => '"hybrid", which needs no files and no model server; a cross-encoder; or a generation model as judge');
SELECT ml_rag._add_option('ml_check_grounding', 'language', 'text', default_rule => 'default_text_search_config',
  description => 'a code such as en or pt-BR, or a name: whose stop words do not count');
SELECT ml_rag._add_option('ml_check_grounding', 'claims', 'boolean', default_value => 'true',
  description => 'list the claims; false = support_score and cited_chunks only');


-- ml_nl_sql, nl_sql, ml_retrieve_schema_metadata

SELECT ml_rag._add_option('ml_retrieve_schema_metadata', 'schemas', 'text[]', default_rule => 'all',
  description => 'tables of these schemas');
SELECT ml_rag._add_option('ml_retrieve_schema_metadata', 'tables', 'array', default_rule => 'all',
  description => 'these tables: names such as "shop.orders", or {"schema_name": "shop", "table_name": "orders"}');
SELECT ml_rag._add_option('ml_retrieve_schema_metadata', 'n_tables', 'integer', minimum => 1, maximum => 100,
  default_value => '8', description => 'at most this many tables, the most relevant ones');
SELECT ml_rag._add_option('ml_retrieve_schema_metadata', 'include_comments', 'boolean', default_value => 'true',
  description => 'with the comments of tables and columns');
SELECT ml_rag._add_option('ml_retrieve_schema_metadata', 'embed_model_id', 'text', default_rule => 'setting embed_model_id',
  description => 'embedding model that chooses the tables');

SELECT ml_rag._add_option('ml_nl_sql', 'execute', 'boolean', default_value => 'true',
  description => 'run the statement; false = only write and check it');
SELECT ml_rag._add_option('ml_nl_sql', 'max_rows', 'integer', minimum => 1, maximum => 100000, default_value => '1000',
  description => 'at most this many rows, with a warning if there are more');
SELECT ml_rag._add_option('ml_nl_sql', 'schemas', 'text[]', default_rule => 'all',
  description => 'query tables of these schemas');
SELECT ml_rag._add_option('ml_nl_sql', 'tables', 'array', default_rule => 'all',
  description => 'query these tables: names such as "shop.orders", or {"schema_name": "shop", "table_name": "orders"}');
SELECT ml_rag._add_option('ml_nl_sql', 'n_tables', 'integer', minimum => 1, maximum => 100, default_value => '8',
  description => 'how many tables the model is shown, the most relevant ones');
SELECT ml_rag._add_option('ml_nl_sql', 'include_comments', 'boolean', default_value => 'true',
  description => 'show the model the comments of tables and columns');
SELECT ml_rag._add_option('ml_nl_sql', 'examples', 'array', keys_of => 'nl_sql_example', default_rule => 'none',
  description => 'at most 20 questions with their statements: [{"question": "…", "sql": "…"}]');
SELECT ml_rag._add_option('ml_nl_sql', 'use_retry', 'boolean', default_value => 'true',
  description => 'up to 3 attempts; the model is told why the one before failed');
SELECT ml_rag._add_option('ml_nl_sql', 'verbose', 'integer', minimum => 0, maximum => 2, default_value => '0',
  description => '1 = a notice with each statement and why it failed, 2 = also with the prompt');
SELECT ml_rag._add_option('ml_nl_sql', 'model_id', 'text', default_rule => 'setting generate_model_id',
  description => 'generation model that writes the statement');
SELECT ml_rag._add_option('ml_nl_sql', 'embed_model_id', 'text', default_rule => 'setting embed_model_id',
  description => 'embedding model that chooses the tables');

SELECT ml_rag._add_option('nl_sql_example', 'question', 'text', default_rule => 'must be given',
  description => 'a question');
SELECT ml_rag._add_option('nl_sql_example', 'sql', 'text', default_rule => 'must be given',
  description => 'the statement that answers it');


-- a column of a table: each takes the options of the routine for one row too

SELECT ml_rag._add_option('ml_rag_table', 'batch_size', 'integer', minimum => 1, maximum => 10000,
  default_value => '100',
  description => 'rows between two commits');
SELECT ml_rag._add_option('ml_rag_table', 'embed_column', 'text', default_rule => 'none: questions are embedded',
  description => 'column of the input table that has the embeddings of the questions (vector or halfvec); a question'
    ' whose embedding is null is embedded');
SELECT ml_rag._add_option('ml_rag_table', 'fail_on_embedding_error', 'boolean', default_value => 'false',
  description => 'end the call where a question cannot be embedded; false = that is the error of its row');
SELECT ml_rag._add_option('ml_generate_table', 'batch_size', 'integer', minimum => 1, maximum => 10000,
  default_value => '100', description => 'rows between two commits');
SELECT ml_rag._add_option('ml_generate_table', 'context_column', 'text', default_rule => 'none',
  description => 'column of the input table whose text each answer is drawn from; in place of context');
SELECT ml_rag._add_option('ml_embed_table', 'batch_size', 'integer', minimum => 1, maximum => 10000,
  default_value => '1000', description => 'rows of one call to the model and between two commits');
SELECT ml_rag._add_option('ml_embed_table', 'embed_model_id', 'text', default_rule => 'setting embed_model_id',
  description => 'embedding model');
SELECT ml_rag._add_option('ml_embed_table', 'dimensions', 'integer', minimum => 1, maximum => 16000,
  default_rule => 'those of the model', description => 'shorten embeddings to n numbers; for models trained for that (Matryoshka)');
SELECT ml_rag._add_option('ml_embed_table', 'truncate', 'boolean', default_value => 'true',
  description => 'cut texts that are longer than the model takes in; false = that is the error of the row');
SELECT ml_rag._add_option('ml_embed_table', 'details_column', 'text', default_rule => 'none',
  description => 'column of the output table for the error of each row that fails; it is created where it does not'
    ' exist');
SELECT ml_rag._add_option('ml_embed_row', 'embed_model_id', 'text', default_rule => 'setting embed_model_id',
  description => 'embedding model');
SELECT ml_rag._add_option('ml_embed_row', 'dimensions', 'integer', minimum => 1, maximum => 16000,
  default_rule => 'those of the model', description => 'shorten embeddings to n numbers; for models trained for that (Matryoshka)');
SELECT ml_rag._add_option('ml_embed_row', 'truncate', 'boolean', default_value => 'true',
  description => 'cut a text that is longer than the model takes in; false = that is an error');


-- vector_store_load

SELECT ml_rag._add_option('vector_store_load', 'schema_name', 'text', default_rule => 'the first schema of search_path',
  description => 'schema of the store; in searches the option is "schema"');
SELECT ml_rag._add_option('vector_store_load', 'table_name', 'text', default_rule => 'from the path',
  description => 'table of the store');
SELECT ml_rag._add_option('vector_store_load', 'formats', 'text[]', default_rule => 'all',
  description => 'load only files of these formats, such as ["pdf", "docx"]; the error of an unknown one lists all');
SELECT ml_rag._add_option('vector_store_load', 'language', 'text', default_rule => 'none',
  description => 'language of the documents, such as en');
SELECT ml_rag._add_option('vector_store_load', 'embed_model_id', 'text',
  default_rule => 'that of the store, else setting embed_model_id', description => 'embedding model');
SELECT ml_rag._add_option('vector_store_load', 'dimensions', 'integer', minimum => 1, maximum => 16000,
  default_rule => 'those of the model', description => 'shorten embeddings to n numbers; for models trained for that (Matryoshka)');
SELECT ml_rag._add_option('vector_store_load', 'description', 'text', default_rule => 'none',
  description => 'comment of the table');
SELECT ml_rag._add_option('vector_store_load', 'metadata', 'object', default_rule => 'none',
  description => 'further keys of the metadata of all documents of the load, such as {"department": "HR", "year": 2024}');
SELECT ml_rag._add_option('vector_store_load', 'document_metadata', 'object', default_rule => 'none',
  description => 'the same for some: a name, the end of a path or a pattern, and an object for each, such as {"*.md": {"kind": "note"}}');
SELECT ml_rag._add_option('vector_store_load', 'chunking', 'object', keys_of => 'chunking',
  description => 'how documents are split into segments');
SELECT ml_rag._add_option('vector_store_load', 'distance_metric', 'choice',
  choices => ARRAY(SELECT m.name FROM ml_rag.metric AS m ORDER BY m.name), default_value => '"COSINE"',
  description => 'metric that the index is built for');
SELECT ml_rag._add_option('vector_store_load', 'index', 'object', keys_of => 'index', default_rule => 'hnsw, unless the store has one',
  description => 'the index of the embeddings, built at the end of the load: docs/embeddings.md#indexes');
SELECT ml_rag._add_option('vector_store_load', 'ocr', 'boolean', default_value => 'false',
  description => 'read the text in pictures and scanned pages (needs tesseract-ocr)');
SELECT ml_rag._add_option('vector_store_load', 'describe_images', 'text', default_rule => 'none',
  description => 'generation model that takes images: it describes pictures and scanned pages: docs/loading.md#pictures');
SELECT ml_rag._add_option('vector_store_load', 'refresh', 'boolean', default_value => 'true',
  description => 'embed changed files again, add new ones, remove deleted ones; false = only add new files');

SELECT ml_rag._add_option('chunking', 'split_by', 'text', default_value => '"auto"',
  description => 'where segments end: paragraph, sentence, page or tokens; auto = at headings, paragraphs or sentences, whichever'
    ' fills a segment; or "schema.function", a function of yours that splits: docs/functions.md');
SELECT ml_rag._add_option('chunking', 'segment_tokens', 'integer', minimum => 16, maximum => 1048576,
  default_rule => '256, or what the model takes in where that is less',
  description => 'longest segment, in tokens of the embedding model; at most what the model takes in');
SELECT ml_rag._add_option('chunking', 'overlap_tokens', 'integer', minimum => 0, maximum => 524288,
  default_value => '0',
  description => 'tokens that a segment repeats of the one before, at most half of segment_tokens');
SELECT ml_rag._add_option('chunking', 'context', 'choice', choices => '{none,headings}', default_rule => 'none',
  description => 'headings: the document''s title and the headings above a segment stand before its text where it is embedded,'
    ' not in the text that is stored, nor for keyword search');

-- ml_rag.create_node_group, ml_rag.refresh_node_groups

SELECT ml_rag._add_option('create_node_group', 'transform', 'text', default_rule => 'must be given',
  description => 'what makes the nodes: sentence, paragraph; by a model summary, keyphrases, questions, entities, or context, which'
    ' puts a sentence on where it stands before the segment; or "schema.function", text → setof text');
SELECT ml_rag._add_option('create_node_group', 'parent', 'text', default_value => '"segment"',
  description => 'what they are made of: segment, document, or another node group');
SELECT ml_rag._add_option('create_node_group', 'model_id', 'text', default_rule => 'setting generate_model_id',
  description => 'generation model that is asked, once a text');
SELECT ml_rag._add_option('create_node_group', 'prompt', 'text', default_rule => 'that of the transform', is_private => true,
  description => 'what the model is asked for, such as "the obligations that the text names"');
SELECT ml_rag._add_option('create_node_group', 'embed', 'boolean', default_value => 'true',
  description => 'embed the nodes, by the model of the store, for semantic arms');
SELECT ml_rag._add_option('create_node_group', 'keyword_search', 'boolean', default_value => 'true',
  description => 'index the words of the nodes, for keyword arms');
SELECT ml_rag._add_option('create_node_group', 'merge', 'boolean', default_value => 'false',
  description => 'index the nodes'' words together with those of their segment, as one text: docs/nodes.md');
SELECT ml_rag._add_option('create_node_group', 'dry_run', 'boolean', default_value => 'false',
  description => 'only count the texts and the calls to the model');
SELECT ml_rag._add_option('create_node_group', 'batch_size', 'integer', minimum => 1, maximum => 1000,
  default_rule => '100, 8 with a model', description => 'texts between two commits');
SELECT ml_rag._add_option('refresh_node_groups', 'name', 'text', default_rule => 'all',
  description => 'only this node group');
SELECT ml_rag._add_option('refresh_node_groups', 'dry_run', 'boolean', default_value => 'false',
  description => 'only count the texts that wait and the calls to the model');
SELECT ml_rag._add_option('refresh_node_groups', 'batch_size', 'integer', minimum => 1, maximum => 1000,
  default_rule => '100, 8 with a model', description => 'texts between two commits');

-- ml_rag.load_documents, ml_rag.load_document, ml_rag.unchanged_documents

SELECT ml_rag._add_option('load_documents', 'formats', 'text[]', default_rule => 'all',
  description => 'load only documents of these formats');
SELECT ml_rag._add_option('load_documents', 'language', 'text', default_rule => 'none',
  description => 'language of the documents, such as en');
SELECT ml_rag._add_option('load_documents', 'embed_model_id', 'text', default_rule => 'that of the store',
  description => 'embedding model; no other than the store''s is taken');
SELECT ml_rag._add_option('load_documents', 'metadata', 'object', default_rule => 'none',
  description => 'further keys of the metadata of all documents of the load, such as {"department": "HR", "year": 2024}');
SELECT ml_rag._add_option('load_documents', 'document_metadata', 'object', default_rule => 'none',
  description => 'the same for some: a name, the end of a path or a pattern, and an object for each, such as {"*.md": {"kind": "note"}}');
SELECT ml_rag._add_option('load_documents', 'chunking', 'object', keys_of => 'chunking',
  description => 'how documents are split into segments');
SELECT ml_rag._add_option('load_documents', 'ocr', 'boolean', default_value => 'false',
  description => 'read the text in pictures and scanned pages (needs tesseract-ocr)');
SELECT ml_rag._add_option('load_documents', 'describe_images', 'text', default_rule => 'none',
  description => 'generation model that takes images: it describes pictures and scanned pages: docs/loading.md#pictures');
SELECT ml_rag._add_option('load_documents', 'file_dates', 'array', keys_of => 'file_dates', default_rule => 'none',
  description => 'dates of the files, an object for each name: they go into the metadata');
SELECT ml_rag._add_option('load_documents', 'refresh', 'boolean', default_value => 'true',
  description => 'load changed documents again; false = only add new ones');

SELECT ml_rag._add_option('file_dates', 'creation_date', 'text', default_rule => 'none',
  description => 'when the file was created, as ISO 8601');
SELECT ml_rag._add_option('file_dates', 'last_modified_date', 'text', default_rule => 'none',
  description => 'when it was last written to');
SELECT ml_rag._add_option('file_dates', 'last_accessed_date', 'text', default_rule => 'none',
  description => 'when it was last read');

-- stores and their keyword indexes

SELECT ml_rag._add_option('create_store', 'embed_model_id', 'text', default_rule => 'setting embed_model_id',
  description => 'embedding model');
SELECT ml_rag._add_option('create_store', 'dimensions', 'integer', minimum => 1, maximum => 16000,
  default_rule => 'those of the model', description => 'shorten embeddings to n numbers; for models trained for that (Matryoshka)');
SELECT ml_rag._add_option('create_store', 'description', 'text', default_rule => 'none',
  description => 'comment of the table');
SELECT ml_rag._add_option('create_store', 'index', 'object', keys_of => 'index', default_rule => 'hnsw, built by the first load',
  description => 'the index of the embeddings; with hnsw it is there from the first row on, with none loads build none');
SELECT ml_rag._add_option('create_store', 'distance_metric', 'choice',
  choices => ARRAY(SELECT m.name FROM ml_rag.metric AS m ORDER BY m.name), default_value => '"COSINE"',
  description => 'metric that "index" is built for');
SELECT ml_rag._add_option('create_store', 'language', 'text', default_rule => 'default_text_search_config',
  description => 'language of the documents, for keyword search');
SELECT ml_rag._add_option('create_store', 'partitions', 'integer', minimum => 1, maximum => 256, default_rule => 'a table without any',
  description => 'hash partitions by document that a new store gets');
SELECT ml_rag._add_option('create_store', 'shard', 'boolean', default_value => 'false',
  description => 'a view beside the store takes the requests of another server, so that the store can be a shard of one there');

SELECT ml_rag._add_option('attach_shard', 'partition', 'integer', minimum => 0, maximum => 255, default_value => '0',
  description => 'which of the hash partitions moves, by its remainder');
SELECT ml_rag._add_option('attach_shard', 'schema_name', 'text', default_rule => 'that of the store',
  description => 'schema of the table on the other server');
SELECT ml_rag._add_option('attach_shard', 'table_name', 'text', default_rule => 'that of the store',
  description => 'name of the table on the other server');

SELECT ml_rag._add_option('distribute_store', 'shard_count', 'integer', minimum => 1, maximum => 64000,
  default_rule => 'citus.shard_count', description => 'shards of a store that is not distributed yet');

SELECT ml_rag._add_option('enable_keyword_search', 'language', 'text', default_rule => 'default_text_search_config',
  description => 'a code such as en or pt-BR, or a name; one that PostgreSQL has no configuration for (zh, ja, ko,'
    ' also a misspelt one) gets simple');
SELECT ml_rag._add_option('enable_keyword_search', 'text_search_configuration', 'text',
  default_rule => 'that of the language',
  description => 'your own text search configuration, with its synonyms and stop words');
SELECT ml_rag._add_option('enable_keyword_search', 'segment', 'text', default_value => '"segment"',
  description => 'column of the text');
SELECT ml_rag._add_option('enable_keyword_search', 'k1', 'number', minimum => 0, maximum => 100, default_value => '1.2',
  description => 'how much each further occurrence of a word counts; 0 = nothing');
SELECT ml_rag._add_option('enable_keyword_search', 'b', 'number', minimum => 0, maximum => 1, default_value => '0.75',
  description => 'how much less long segments count; 0 = length does not matter');
SELECT ml_rag._add_option('enable_keyword_search', 'statistics', 'choice', choices => '{all,visible}',
  default_value => '"all"',
  description => 'over which rows the weights of words are computed: all, or those that the caller can see under'
    ' row-level security');

-- ml_rag.add_embedding

SELECT ml_rag._add_option('add_embedding', 'embed_model_id', 'text',
  default_rule => 'that of the embedding if it exists, else setting embed_model_id', description => 'embeds the texts');
SELECT ml_rag._add_option('add_embedding', 'dimensions', 'integer', minimum => 1, maximum => 16000,
  default_rule => 'those of the model', description => 'shorten embeddings to n numbers; for models trained for that (Matryoshka)');
SELECT ml_rag._add_option('add_embedding', 'type', 'choice', choices => '{vector,halfvec}',
  default_rule => 'that of the default embedding', description => 'type of the column; halfvec takes half the space');
SELECT ml_rag._add_option('add_embedding', 'index', 'object', keys_of => 'index',
  default_rule => 'hnsw, unless the column has an index', description => 'the index of the column');
SELECT ml_rag._add_option('add_embedding', 'distance_metric', 'choice',
  choices => ARRAY(SELECT m.name FROM ml_rag.metric AS m ORDER BY m.name),
  default_value => '"COSINE"', description => 'metric that the index is built for');
SELECT ml_rag._add_option('add_embedding', 'batch_size', 'integer', minimum => 1, maximum => 10000, default_value => '256',
  description => 'rows of one call to the model and between two commits');
SELECT ml_rag._add_option('add_embedding', 'lock_seconds', 'number', minimum => 0.1, maximum => 3600, default_value => '10',
  description => 'longest wait for the lock of the table, behind which others wait; before the next try they are let'
    ' through');
SELECT ml_rag._add_option('add_embedding', 'vector_store_columns', 'object', keys_of => 'vector_store_columns',
  description => 'segment, segment_embedding: the names of the columns');

SELECT ml_rag._add_option('index', 'type', 'choice', choices => '{hnsw,ivfflat,none}', default_value => '"hnsw"',
  description => 'method of the approximate index');
SELECT ml_rag._add_option('index', 'm', 'integer', minimum => 2, maximum => 100, default_rule => 'that of pgvector',
  description => 'hnsw: links of a vector in each layer');
SELECT ml_rag._add_option('index', 'ef_construction', 'integer', minimum => 4, maximum => 1000,
  default_rule => 'that of pgvector', description => 'hnsw: candidates kept while it is built; at least twice m');
SELECT ml_rag._add_option('index', 'lists', 'integer', minimum => 1, maximum => 32768, default_rule => 'that of pgvector',
  description => 'ivfflat: lists of vectors');
SELECT ml_rag._add_option('index', 'quantization', 'choice', choices => '{none,halfvec,binary}', default_value => '"none"',
  description => 'index smaller vectors, a half or a 32nd of the size: docs/embeddings.md#quantization');

SELECT ml_rag._add_option('index_options', 'ef_search', 'integer', minimum => 1, maximum => 1000,
  default_rule => 'hnsw.ef_search; where that is 40, that of ml_rag.tune_index, else 200 for large tables',
  description => 'hnsw: candidates kept while an index is searched');
SELECT ml_rag._add_option('index_options', 'probes', 'integer', minimum => 1, maximum => 32768,
  default_rule => 'ivfflat.probes; where that is 1, that of ml_rag.tune_index, else a tenth of the lists, at least 10',
  description => 'ivfflat: lists that are searched');
SELECT ml_rag._add_option('index_options', 'exact', 'boolean', default_value => 'false',
  description => 'compare all rows, whatever indexes there are');
SELECT ml_rag._add_option('index_options', 'rescore', 'integer', minimum => 1, maximum => 100000,
  default_rule => 'halfvec: twice the candidates; binary: that of ml_rag.tune_index, else 20 times, at least 400',
  description => 'nearest ones of an index of smaller vectors that are scored again by the whole vectors');

-- ml_rag.tune_index

SELECT ml_rag._add_option('tune_index', 'questions', 'text', default_rule => 'segments of the store',
  description => 'a table or a query with a column question, or query_embedding');
SELECT ml_rag._add_option('tune_index', 'sample', 'integer', minimum => 1, maximum => 10000, default_value => '100',
  description => 'without questions: segments taken at random, each of which is searched for its neighbours');
SELECT ml_rag._add_option('tune_index', 'recall', 'number', minimum => 0, maximum => 1, default_value => '0.98',
  description => 'share of the nearest segments that searches shall find');
SELECT ml_rag._add_option('tune_index', 'n_citations', 'integer', minimum => 1, maximum => 99, default_value => '5',
  description => 'how many nearest segments a question has');
SELECT ml_rag._add_option('tune_index', 'distance_metric', 'choice',
  choices => ARRAY(SELECT m.name FROM ml_rag.metric AS m ORDER BY m.name),
  default_value => '"COSINE"', description => 'metric of the index that is measured');
SELECT ml_rag._add_option('tune_index', 'keep', 'boolean', default_value => 'true',
  description => 'keep the cheapest setting that reaches recall for the searches of the store; false = measure only');

-- ml_rag.adopt

SELECT ml_rag._add_option('adopt', 'embed_model_id', 'text', default_rule => 'that of its marker, else it must be given',
  description => 'the model that made the vectors');
SELECT ml_rag._add_option('adopt', 'vector_store_columns', 'object', keys_of => 'vector_store_columns',
  default_rule => 'by the names and types of the columns', description => 'which column is what');
SELECT ml_rag._add_option('adopt', 'collection', 'text', default_rule => 'all',
  description => 'of langchain_pg_embedding: only this collection, by a view that is made for it');
SELECT ml_rag._add_option('adopt', 'view', 'text', default_rule => 'the name of the collection, in the schema of the table',
  description => 'the name of that view');
SELECT ml_rag._add_option('adopt', 'sample', 'integer', minimum => 0, maximum => 1000, default_value => '16',
  description => 'rows that are embedded again and compared, taken at random, of each collection');

-- ml_rag.create_vectorizer, ml_rag.run_vectorizer, ml_rag.drop_vectorizer

SELECT ml_rag._add_option('create_vectorizer', 'columns', 'any', default_rule => 'none, it must be given',
  description => 'what is embedded and searched of a row: a column, an array of columns (each on a line of its own), or a'
    ' template of them, such as'
    ' "Name: {name} Description: {description}"');
SELECT ml_rag._add_option('create_vectorizer', 'metadata', 'text[]', default_rule => 'the key and the columns of the template',
  description => 'columns that go along with a hit: in the metadata of citations, and in the prompt; at most 50');
SELECT ml_rag._add_option('create_vectorizer', 'embed_model_id', 'text', default_rule => 'setting embed_model_id',
  description => 'embeds the texts');
SELECT ml_rag._add_option('create_vectorizer', 'dimensions', 'integer', minimum => 1, maximum => 16000,
  default_rule => 'those of the model', description => 'shorten embeddings to n numbers; for models trained for that (Matryoshka)');
SELECT ml_rag._add_option('create_vectorizer', 'language', 'text', default_rule => 'default_text_search_config',
  description => 'language of the texts for keyword search, as in enable_keyword_search');
SELECT ml_rag._add_option('create_vectorizer', 'keyword_search', 'boolean', default_value => 'true',
  description => 'make a keyword index too');
SELECT ml_rag._add_option('create_vectorizer', 'distance_metric', 'choice',
  choices => ARRAY(SELECT m.name FROM ml_rag.metric AS m ORDER BY m.name),
  default_value => '"COSINE"', description => 'metric that the index is built for');
SELECT ml_rag._add_option('create_vectorizer', 'index', 'object', keys_of => 'index', default_rule => 'hnsw',
  description => 'the index of the embeddings, built by the first run that leaves nothing pending');
SELECT ml_rag._add_option('create_vectorizer', 'document_name', 'text', default_value => '"{schema}.{table}/{key}"',
  description => 'template of the name in citations: schema, table, key, and columns');
SELECT ml_rag._add_option('create_vectorizer', 'destination', 'choice', choices => '{column,table}', default_value => '"column"',
  description => 'where the embeddings are: column, beside the row; table, in a table of segments, for texts longer than the model'
    ' takes in');
SELECT ml_rag._add_option('create_vectorizer', 'chunking', 'object', keys_of => 'chunking', default_rule => 'those of chunking',
  description => 'how texts are split into segments, where destination is table');
SELECT ml_rag._add_option('create_vectorizer', 'mode', 'choice', choices => '{deferred,immediate}', default_value => '"deferred"',
  description => 'when rows are embedded: deferred, by the next run; immediate, in the statement that writes them');

SELECT ml_rag._add_option('run_vectorizer', 'batch_size', 'integer', minimum => 1, maximum => 1000, default_value => '256',
  description => 'rows of one call to the model and between two commits; each takes a place of max_locks_per_transaction');
SELECT ml_rag._add_option('run_vectorizer', 'batches', 'integer', minimum => 1, maximum => 1000000, default_rule => 'all',
  description => 'end after this many batches');

SELECT ml_rag._add_option('drop_vectorizer', 'keep_columns', 'boolean', default_value => 'false',
  description => 'keep the columns and the keyword index that the vectorizer added');


-- ml_rag_chat, beside the options of ml_rag

SELECT ml_rag._add_option('ml_rag_chat', 'conversation_id', 'text', default_rule => 'a new conversation',
  description => 'the conversation that goes on: a uuid, as the answers of its turns have it');
SELECT ml_rag._add_option('ml_rag_chat', 're_run', 'boolean', default_value => 'false',
  description => 'replace the last turn; the query may be null, which asks it once more');
SELECT ml_rag._add_option('ml_rag_chat', 'return_prompt', 'boolean', default_value => 'false',
  description => 'add the messages that the model answered: prompt');


-- heatwave_chat: the keys of the setting ml_rag.chat_options

SELECT ml_rag._add_option('heatwave_chat', 'schema_name', 'text', default_rule => 'all',
  description => 'search the vector stores of this schema; not together with tables');
SELECT ml_rag._add_option('heatwave_chat', 'tables', 'array', default_rule => 'all that qualify', keys_of => 'chat_table',
  description => 'search only these stores: [{"schema_name": "shop", "table_name": "products"}]');
SELECT ml_rag._add_option('heatwave_chat', 'include_document_uris', 'text[]', default_rule => 'all',
  description => 'search only these documents, as document_name of ml_rag');
SELECT ml_rag._add_option('heatwave_chat', 'table_metadata', 'object', keys_of => 'vector_store_columns', default_rule => 'none',
  description => 'the real names of the columns, as vector_store_columns of ml_rag');
SELECT ml_rag._add_option('heatwave_chat', 'retrieve_top_k', 'integer', minimum => 0, maximum => 100, default_value => '3',
  description => 'how many segments are cited; 0 = the model answers alone');
SELECT ml_rag._add_option('heatwave_chat', 'task', 'choice', choices => '{generation,summarization}',
  default_value => '"generation"', description => 'what to do, as in ml_generate');
SELECT ml_rag._add_option('heatwave_chat', 'model_options', 'object', keys_of => 'ml_generate', default_rule => 'none',
  description => 'any option of ml_generate except context');
SELECT ml_rag._add_option('heatwave_chat', 'skip_generate', 'boolean', default_value => 'false',
  description => 'retrieval only; response is null, and the turn is not kept');
SELECT ml_rag._add_option('heatwave_chat', 're_run', 'boolean', default_value => 'false',
  description => 'replace the last turn; false again after the call');
SELECT ml_rag._add_option('heatwave_chat', 'return_prompt', 'boolean', default_value => 'false',
  description => 'add the messages that the model answered: prompt');
SELECT ml_rag._add_option('heatwave_chat', 'report_progress', 'boolean', default_value => 'false',
  description => 'a notice before and after the answer');
SELECT ml_rag._add_option('heatwave_chat', 'chat_history', 'array', default_rule => 'none', keys_of => 'chat_turn',
  is_private => true, description => 'the turns so far, oldest first; each call adds its own, and the newest 100 are kept');
SELECT ml_rag._add_option('heatwave_chat', 'documents', 'any', default_rule => 'none',
  description => 'written by the call: what the answer cites');
SELECT ml_rag._add_option('heatwave_chat', 'response', 'any', default_rule => 'none',
  description => 'written by the call: the answer');
SELECT ml_rag._add_option('heatwave_chat', 'prompt', 'any', default_rule => 'none', is_private => true,
  description => 'written by the call with return_prompt');
SELECT ml_rag._add_option('heatwave_chat', 'request_completed', 'any', default_rule => 'none', description => 'written by the call: true');
SELECT ml_rag._add_option('heatwave_chat', 'error', 'any', default_rule => 'none',
  description => 'written by the call: null; what fails is raised');

SELECT ml_rag._add_option('chat_table', 'schema_name', 'text', default_rule => 'any schema', description => 'schema of the store');
SELECT ml_rag._add_option('chat_table', 'table_name', 'text', default_rule => 'must be given', description => 'name of the store');

SELECT ml_rag._add_option('chat_turn', 'chat_query_id', 'text', default_rule => 'a uuid', description => 'tells the turns apart');
SELECT ml_rag._add_option('chat_turn', 'user_message', 'text', default_rule => 'must be given', is_private => true,
  description => 'the query');
SELECT ml_rag._add_option('chat_turn', 'chat_bot_message', 'text', default_rule => 'must be given', is_private => true,
  description => 'the answer');


-- ml_rag_evaluate

SELECT ml_rag._add_option('ml_rag_evaluate', 'name', 'text', default_rule => 'none', description => 'name of the run');
SELECT ml_rag._add_option('ml_rag_evaluate', 'options', 'object', keys_of => 'ml_rag',
  description => 'options of ml_rag, all but query_embedding; skip_generate follows from generate');
SELECT ml_rag._add_option('ml_rag_evaluate', 'columns', 'object', keys_of => 'evaluation_columns',
  description => 'the real names of the columns of the questions: {"question": "text", "id": "_id"}');
SELECT ml_rag._add_option('ml_rag_evaluate', 'k', 'array', default_value => '[1, 3, 5, 10]',
  description => 'cut-offs of recall@k and ndcg@k: 1 to 20 integers from 1 to 100');
SELECT ml_rag._add_option('ml_rag_evaluate', 'match', 'choice', choices => '{path_end,document_name,document_id}',
  default_value => '"path_end"',
  description => 'how expected documents are given: a.pdf is a whole name or the end of a path (/srv/docs/a.pdf); the'
    ' whole name only; the id');
SELECT ml_rag._add_option('ml_rag_evaluate', 'generate', 'boolean', default_value => 'false',
  default_rule => 'false; true with judge_model_id', description => 'answer the questions too');
SELECT ml_rag._add_option('ml_rag_evaluate', 'judge_model_id', 'text', default_rule => 'none',
  description => 'generation model that scores groundedness and relevance of the answers');
SELECT ml_rag._add_option('ml_rag_evaluate', 'metrics', 'text[]', default_rule => 'none',
  description => 'functions of yours, "schema.function" (question text, answer jsonb, reference text) → float8, at most 20:'
    ' docs/evaluation.md#metrics-of-your-own');
SELECT ml_rag._add_option('ml_rag_evaluate', 'refusal_pattern', 'text',
  default_value => '"(do not|don''t) know|(cannot|can''t) (answer|be answered)'
    '|(documents?|context|sources?) (do|does) not (say|mention|contain|provide|specify)"',
  description => 'regular expression, in any case, of answers that refuse; the abstain text always does');
SELECT ml_rag._add_option('ml_rag_evaluate', 'limit', 'integer', minimum => 1, maximum => 1000000,
  default_rule => 'all',
  description => 'measure n of the questions');
SELECT ml_rag._add_option('ml_rag_evaluate', 'seed', 'integer', minimum => 0, maximum => 4294967295,
  default_rule => 'none: the first ones',
  description => 'draw the questions of limit at random, the same ones for the same seed');
SELECT ml_rag._add_option('ml_rag_evaluate', 'keep', 'boolean', default_value => 'true',
  description => 'keep the run in ml_rag.evaluation_run and ml_rag.evaluation_question; false works in a read-only'
    ' transaction');

-- ml_rag.make_questions

SELECT ml_rag._add_option('make_questions', 'n', 'integer', minimum => 0, maximum => 10000, default_value => '20',
  description => 'questions that a segment answers, each of another one');
SELECT ml_rag._add_option('make_questions', 'unanswerable', 'integer', minimum => 0, maximum => 10000, default_value => '5',
  description => 'questions on the subject of a segment that the store does not answer');
SELECT ml_rag._add_option('make_questions', 'model_id', 'text', default_rule => 'setting generate_model_id',
  description => 'generation model that writes them; it also checks that what is found does not answer the unanswerable ones');
SELECT ml_rag._add_option('make_questions', 'language', 'text', default_rule => 'that of the segment',
  description => 'language of the questions, such as en');
SELECT ml_rag._add_option('make_questions', 'seed', 'integer', minimum => 0, maximum => 4294967295, default_value => '0',
  description => 'draws the segments, the same ones for the same seed');
SELECT ml_rag._add_option('make_questions', 'filters', 'object', default_rule => 'none',
  description => 'only segments for which these conditions hold, as in ml_rag');

SELECT ml_rag._add_option('evaluation_columns', 'id', 'text', default_value => '"id"',
  description => 'what tells the questions apart; without it they are 1, 2, …');
SELECT ml_rag._add_option('evaluation_columns', 'question', 'text', default_value => '"question"',
  description => 'the question; the only one that must exist');
SELECT ml_rag._add_option('evaluation_columns', 'documents', 'text', default_value => '"documents"',
  description => 'expected documents: text, text[] or json');
SELECT ml_rag._add_option('evaluation_columns', 'answers', 'text', default_value => '"answers"',
  description => 'right answers: text, text[] or json');
SELECT ml_rag._add_option('evaluation_columns', 'answerable', 'text', default_value => '"answerable"',
  description => 'whether the documents have an answer: boolean');
SELECT ml_rag._add_option('evaluation_columns', 'history', 'text', default_value => '"history"',
  is_private => true,  -- as option history is
  description => 'earlier turns of the conversation, as history of query_options: json');
