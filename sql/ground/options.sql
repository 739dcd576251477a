-- options: what callers may say, a record each: type, range, default. The tables of options in README.md and
-- docs/ are made from them by make docs, and tests/sql/test_parse.py tries each at its limits.

CREATE TABLE ml_rag.option (
  routine text,
  name text,
  type text NOT NULL
    CHECK (type IN ('text', 'text[]', 'integer', 'number', 'boolean', 'object', 'array', 'choice',
      'vector', 'any')),
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
routine: the routine, or the object among its options that has the option as a key. minimum, maximum: both
included.
default_value: taken if the option is absent or null. default_rule: the same in words, if it depends on other
things. auto_value: what "auto" stands for; null if the option does not accept "auto", JSON null if it is
decided for each question.
keys_of: whose options are the keys of an object, or of those in an array. is_private: errors do not repeat
the value, as they go into the log.$$;

CREATE FUNCTION ml_rag._add_options(routine text, records text) RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SET search_path FROM CURRENT AS $function$
-- purpose: options of a routine, a record a line, further lines of it indented: name | type | default |
-- description
-- type: followed by the range of a number (1..9, 0..), by the words of a choice (a,b, or "of metric"), or by
-- what the keys of an object or of an array's objects are ("of …"); then auto=… and private. default: "= "
-- and the value in JSON, or the rule in words; both with " -- " between; - for neither
-- Writes: ml_rag.option
DECLARE
  f text[];
BEGIN
  -- one by one: cmin is their order in docs/options.md
  FOR f IN
    SELECT string_to_array(regexp_replace(r.record, '\s+', ' ', 'g'), ' | ')
    FROM regexp_split_to_table(btrim($2, E'\n'), '\n(?=\S)') WITH ORDINALITY AS r (record, place)
    ORDER BY r.place
  LOOP
    IF cardinality(f) <> 4
        OR f[2] !~ '^[a-z]+(\[\])?( -?[0-9.]*[0-9]?\.\.[0-9.]*| of \w+| \w+(,\w+)+)?( auto=\S+)?( private)?$'
          THEN
      RAISE EXCEPTION USING ERRCODE = '22023',
        MESSAGE = format('cannot read a record of an option of %s', $1),
        DETAIL = array_to_string(f, ' | ');
    END IF;
    INSERT INTO ml_rag.option (routine, name, type, minimum, maximum, choices, default_value, auto_value,
      description, default_rule, keys_of, is_private)
    VALUES ($1, f[1], split_part(f[2], ' ', 1), substring(f[2] FROM ' (-?[0-9.]*[0-9])\.\.')::numeric,
      substring(f[2] FROM '\.\.([0-9.]+)')::numeric,
      CASE WHEN f[2] = 'choice of metric' THEN ARRAY(SELECT m.name FROM ml_rag.metric AS m ORDER BY m.name)
        ELSE string_to_array(substring(f[2] FROM '^\S+ (\w+(?:,\w+)+)'), ',') END,
      CASE WHEN f[3] LIKE '= %' THEN substr(split_part(f[3], ' -- ', 1), 3)::jsonb END,
      substring(f[2] FROM ' auto=(\S+)')::jsonb, f[4],
      nullif(CASE WHEN f[3] LIKE '= %' THEN split_part(f[3], ' -- ', 2) ELSE nullif(f[3], '-') END, ''),
      substring(f[2] FROM ' of (?!metric$)(\w+)'), f[2] LIKE '% private');
  END LOOP;
END
$function$;

-- ml_rag, ml_rag_answer, ml_rag_search: which stores and rows

SELECT ml_rag._add_options('ml_rag', $$
vector_store | text[] | all that qualify | search only these stores: "schema.table", or "table", which is the
  tables of that name in all schemas; a name that does not qualify is ignored with a warning
exclude_vector_store | text[] | none | leave these stores out
schema | text[] | all | look for vector stores in these schemas; in loads the option is schema_name
document_name | text[] | all | search only these documents, by their names as stored (a loaded file's whole
  path)
exclude_document_name | text[] | none | leave these documents out
filters | object | none | search only rows for which these conditions on columns and metadata hold, such as
  {"author": ["A", "B"], "year": {"gte": 2002}}: docs/search.md#filters-and-keywords
required_keywords | text[] private | none | search only segments that have all of these words or phrases; at
  most 20
excluded_keywords | text[] private | none | leave out segments that have one of these words or phrases; at
  most 20
$$);

-- how the search goes

SELECT ml_rag._add_options('ml_rag', $$
n_citations | integer 0..100 | 3; 10 with max_distance or percentage_distance | how many segments are cited; 0
  = no retrieval, the model answers alone
distance_metric | choice of metric | = "COSINE" | distance between the question and a segment; DOT is 1 -
  inner product
embed_model_id | text | setting embed_model_id | embeds the question; only stores made with this model are
  searched
query_embedding | vector | none | used instead of embedding the question
vector_store_columns | object of vector_store_columns | - | the real names of the columns of a store; also a
  filter: only relations that have them are stores
semantic_search | boolean | = true | search by meaning: the nearest embeddings
keyword_search | boolean | = false | search by words: BM25; with semantic_search both, which is hybrid search:
  docs/search.md
hybrid_options | object of hybrid_options | - | how the results of semantic_search and keyword_search become
  one list
index_options | object of index_options | none | how approximate indexes are searched:
  docs/embeddings.md#indexes
arms | array of arm | what semantic_search and keyword_search say | what is searched, arm by arm, in place of
  semantic_search, keyword_search and hybrid_options: 1 to 16 objects, such as [{"search": "semantic"},
  {"search": "keyword", "weight": 0.3}]: docs/search.md#arms
citation_fields | text[] | none | further keys of each citation, any of ["document_id", "segment_number",
  "segment_range", "vector_store", "metadata", "score", "keyword_score", "rerank_score", "rank", "node",
  "node_distance", "highlights"], and keys of the metadata such as "metadata.page": docs/answers.md#highlights
return | choice segment,node,document | = "segment" | what is cited: segments; the nodes that arms have found
  in node groups; or the document around each segment, up to 200 segments on either side
retrieval_options | object of retrieval_options | - | limits on the distance, and neighbours of what is found
query_options | object of query_options | none | what is searched with beside or in place of the question as
  it was asked: docs/questions.md
rerank | object of rerank | none | reorder by a cross-encoder what was found; {} = with the defaults
$$);

-- what comes out

SELECT ml_rag._add_options('ml_rag', $$
skip_generate | boolean | = false | retrieval only; the output has no text
model_options | object of ml_generate | - | any option of ml_generate except context
prompt | object of prompt private | - | instructions, markers and order of the segments in the prompt
abstain | boolean | true with max_distance or min_score, else false | answer with abstain_text instead of
  failing where nothing relevant is found; true without max_distance and min_score sets max_distance to "auto"
abstain_text | text private | setting abstain_text | the answer where nothing relevant is found
grounding | object of ml_check_grounding | none | check the answer by its citations, in
  retrieval_info.grounding; {} = with the defaults: docs/answers.md#grounding
min_support | number 0..1 | none | support_score that the check of the answer must reach; with less the call
  abstains if "abstain" is true, else it warns
remove_unsupported | boolean | false | remove sentences that the citations do not support from the answer
preset | text | none | options of this name, over which those of the call are laid:
  docs/answers.md#options-by-name-and-for-everybody
partial | boolean | = false | search without the shards that do not answer; they are listed in
  retrieval_info.missing_shards
return_prompt | boolean | false | add the messages that the model answered: prompt
return_usage | boolean | = false | add what the answer took and why it ended: usage, with prompt_tokens,
  generated_tokens and finish_reason
explain | boolean | = false | add how the answer came about: stores, plans, candidates, thresholds, tokens,
  milliseconds: docs/monitoring.md#how-an-answer-came-about
$$);

-- objects among the options of ml_rag

SELECT ml_rag._add_options('retrieval_options', $$
max_distance | number 0..999999.9999 auto=0.6 | no such limit | largest distance of a segment that is kept;
  ml_rag.calibrate proposes one for your documents, and with "keep" it makes that the one of "auto"
percentage_distance | number 0..999999.9999 auto=20 | no such limit | the same, in per cent above the nearest
  distance; with both, the smaller limit counts
segment_overlap | integer 0..5 auto=1 | = 1 -- 1 if the call has retrieval_options, otherwise 0 | neighbours
  that each segment brings on either side
$$);

SELECT ml_rag._add_options('arm', $$
search | choice semantic,keyword,function | must be given | by meaning (kNN), by words (BM25), or by a
  function of yours
in | text | = "segment" | which texts are searched: the segments, or a node group, whose hits count for the
  segments they came from: docs/nodes.md
embedding | text | that of the store | of a semantic arm: which embedding of the store is searched, by its
  name; its model embeds the question: docs/embeddings.md
query | any | = "question" | what is searched with: "question", "hypothetical_document", "synonyms",
  "sub_questions", which query_options must ask for, or {"text": "…"}
alone | boolean | false | of "query": "hypothetical_document": search with it without the question
query_embedding | vector | of what is searched with | of a semantic arm: used instead of embedding what is
  searched with
function | text | must be given with "search": "function" | "schema.function", which scores all rows that pass
  the filters: docs/functions.md
arguments | object | none | for a function whose last parameter is of type jsonb
descending | boolean | true with "function" | whether a larger number of the function is better
weight | number 0..1 auto=null | equal shares | share in the fused score; weights are divided by their sum.
  "auto", for all arms: by how clear each arm is about the question, and how much of the texts its model takes
  in
candidates | integer 1..10000 | = 100 | segments that the arm brings
max_distance | number 0..999999.9999 | none | of a semantic arm: what is farther away is dropped before
  fusing; of a function that is not "descending": what it gives more
min_score | number -1000000000.. | none | of a keyword arm: what has a lower BM25 score is dropped before
  fusing; of a function: what it gives less
$$);

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

SELECT ml_rag._add_options('query_options', $$
history | array private | none | earlier turns of the conversation, oldest first, at most 1000: {"role":
  "user" or "assistant", "content": "…"}
history_tokens | integer 0..1000000 | a quarter of the model's context; 512 where no model rewrites the
  question | longest prompt in tokens of the model: instructions and question always, then the newest turns
  that fit, whole ones
rewrite | boolean | true with history and a model named here or by setting query_model_id, else false | let
  the model make a question that stands alone, in correct spelling; without it the history is searched with
  beside the question
synonyms | any | none | at most this many terms that the documents may use instead, 1 to 20 (true = 8): a
  keyword arm beside those of the question
hypothetical_document | any | none | passages that could answer the question, 1 to 4 of them (true = 1):
  semantic arms search with the mean of their embeddings and the question's
sub_questions | integer 1..5 | none | at most this many simpler questions, each searched beside the question
filters | any | none | columns and metadata keys on which the model may choose conditions; true = those that a
  condition can be about, and those described by ml_rag.describe_filter or COMMENT ON COLUMN
document_names | boolean | = false | search only the documents that the question names, by file name, title or
  part of a path; needs no model
model_id | text | setting query_model_id, else generate_model_id | a generation model
prompts | object of query_prompts private | none | instructions of yours for what the model is asked for; the
  form of its answer stays
fallback | boolean | = true | where the model fails or answers nonsense, search with the question as it was
  asked, with a warning; false = fail
$$);

SELECT ml_rag._add_options('query_prompts', $$
rewrite | text private | ours | what the rewritten question is to be
synonyms | text private | ours | which terms
hypothetical_document | text private | ours | what the passages are to be
sub_questions | text private | ours | which questions
$$);

SELECT ml_rag._add_options('hybrid_options', $$
fusion | choice weighted,rrf | = "weighted" | weighted sum of the scores, or reciprocal rank fusion
semantic_weight | number 0..1 auto=null | by how clear each arm is about this question, and how much of the
  texts the model takes in | weight of the semantic arm in a weighted fusion
rrf_k | integer 1..1000000 | = 60 | constant of reciprocal rank fusion
candidates | integer 1..10000 | = 100 | how many segments each arm finds
$$);

SELECT ml_rag._add_options('rerank', $$
model_id | text | setting rerank_model_id | a cross-encoder, or "hybrid", a model that needs no files; in
  ml_rank the option is "model"
function | text | none | instead of a model a function of yours, "schema.function": docs/functions.md
candidates | integer 1..1000 | = 50 | how many segments of the search are scored; at least n_citations
min_score | number 0..1 | none | segments that score less are dropped; if none is left, abstain decides
$$);

SELECT ml_rag._add_options('prompt', $$
system | text private | none | your own instructions. They follow the constant ones, which stay: only facts
  from the documents, documents are never instructions
length | choice short,medium,long | short for small models, which the catalogue marks "brief", else medium |
  of the answer: one or two sentences, as the model sees fit, several paragraphs
metadata | any | true for tables with a vectorizer, else false | which metadata stand beside each document in
  the prompt: an array of keys, true (all) or false
citation_style | choice none,numbered | = "none" | numbered asks the model for [1] after a statement from the
  first citation
order | choice best_first,best_last | = "best_last" | where the best segment stands in the prompt; best_last
  is beside the question. The numbers are those of citations in either order, and the worst segments are left
  out where the context is too small
$$);

SELECT ml_rag._add_options('vector_store_columns', $$
segment | text | = "segment" | column of the text
segment_embedding | text | = "segment_embedding" | vector or halfvec column
document_name | text | = "document_name" | column of the name shown in citations
document_id | text | = "document_id" | column that tells documents apart
segment_number | text | = "segment_number" | column of the order within a document
metadata | text | = "metadata" | json or jsonb column
$$);

-- ml_generate, and model_options of ml_rag

SELECT ml_rag._add_options('ml_generate', $$
model_id | text | setting generate_model_id | a generation model
system | text private | none | instructions, in place of the usual ones where the text is not made of
  documents
task | choice generation,summarization | = "generation" | what to do
max_tokens | integer 1..1000000 | = 256 | longest answer, in tokens
temperature | number 0.. | = 0 | 0 = always the likeliest token
top_k | integer 0..32000 | the model's | sample among the k likeliest tokens; 0 = among all
top_p | number 0..1 | the model's | sample among the likeliest tokens that have this probability together
repeat_penalty | number 0..2 | the model's | factor against repeated tokens; 1 = none
frequency_penalty | number 0..1 | the model's | penalty that grows with each repetition
presence_penalty | number 0..1 | the model's | penalty for any repetition
stop_sequences | text[] private | none | texts that end the answer
language | text | none | language of the answer, such as en
seed | integer 0..4294967295 | none | makes sampling repeatable
json_schema | object | none | the answer is valid JSON of this schema, which may have 64 kB, 64 levels, 1000
  values, and lengths, counts and repetitions (also of a pattern) up to 1000
speculative_decoding | boolean | the model's | look answer tokens up in the prompt: faster, same text
max_sentences | integer 1..10 | 2; 3 for summarization | sentences of an answer of the model "extractive"
min_support | number 0..1 | 0.3; 0.16 without an embedding model | how well a sentence must answer the
  question; if none does, the model "extractive" abstains where "abstain" is true, else it warns
context | text private | none | text that the answer is drawn from; ml_generate only
$$);

-- ml_rank, ml_rank_rows

SELECT ml_rag._add_options('ml_rank', $$
top_n | integer 1..2147483647 | all | return only the best n; in ml_rag the option is n_citations
ignore_record_details_in_response | boolean | = false | return ids and scores only
model | text | setting rerank_model_id where its files are there, else "hybrid" | a cross-encoder, or the
  model "hybrid"; a model named here whose files are missing is error 55000. Elsewhere the option is model_id
language | text | default_text_search_config | a code such as en or pt-BR, or a name: what the model "hybrid"
  takes for a word
$$);

-- ml_check_grounding

SELECT ml_rag._add_options('ml_check_grounding', $$
citation_threshold | number 0..1 | = 0.6 | score that makes a claim a supported one
model | text | = "hybrid" | "hybrid", which needs no files and no model server; a cross-encoder; or a
  generation model as judge
language | text | default_text_search_config | a code such as en or pt-BR, or a name: whose stop words do not
  count
claims | boolean | = true | list the claims; false = support_score and cited_chunks only
$$);

-- ml_nl_sql, nl_sql, ml_retrieve_schema_metadata

SELECT ml_rag._add_options('ml_retrieve_schema_metadata', $$
schemas | text[] | all | tables of these schemas
tables | array | all | these tables: names such as "shop.orders", or {"schema_name": "shop", "table_name":
  "orders"}
n_tables | integer 1..100 | = 8 | at most this many tables, the most relevant ones
include_comments | boolean | = true | with the comments of tables and columns
embed_model_id | text | setting embed_model_id | embedding model that chooses the tables
$$);

SELECT ml_rag._add_options('ml_nl_sql', $$
execute | boolean | = true | run the statement; false = only write and check it
max_rows | integer 1..100000 | = 1000 | at most this many rows, with a warning if there are more
schemas | text[] | all | query tables of these schemas
tables | array | all | query these tables: names such as "shop.orders", or {"schema_name": "shop",
  "table_name": "orders"}
n_tables | integer 1..100 | = 8 | how many tables the model is shown, the most relevant ones
include_comments | boolean | = true | show the model the comments of tables and columns
examples | array of nl_sql_example | none | at most 20 questions with their statements: [{"question": "…",
  "sql": "…"}]
use_retry | boolean | = true | up to 3 attempts; the model sees why the one before failed
verbose | integer 0..2 | = 0 | 1 = a notice with each statement and why it failed, 2 = also with the prompt
model_id | text | setting generate_model_id | generation model that writes the statement
embed_model_id | text | setting embed_model_id | embedding model that chooses the tables
$$);

SELECT ml_rag._add_options('nl_sql_example', $$
question | text | must be given | a question
sql | text | must be given | the statement that answers it
$$);

-- a column of a table: each takes the options of the routine for one row too

SELECT ml_rag._add_options('ml_rag_table', $$
batch_size | integer 1..10000 | = 100 | rows between two commits
embed_column | text | none: questions are embedded | column of the input table that has the embeddings of the
  questions (vector or halfvec); a question whose embedding is null is embedded
fail_on_embedding_error | boolean | = false | end the call where a question cannot be embedded; false = that
  is the error of its row
$$);
SELECT ml_rag._add_options('ml_generate_table', $$
batch_size | integer 1..10000 | = 100 | rows between two commits
context_column | text | none | column of the input table whose text each answer is drawn from; in place of
  context
$$);
SELECT ml_rag._add_options('ml_embed_table', $$
batch_size | integer 1..10000 | = 1000 | rows of one call to the model and between two commits
embed_model_id | text | setting embed_model_id | embedding model
dimensions | integer 1..16000 | those of the model | shorten embeddings to n numbers; for models trained for
  that (Matryoshka)
truncate | boolean | = true | cut texts that are longer than the model takes in; false = that is the error of
  the row
details_column | text | none | column of the output table for the error of each row that fails; it is created
  where it does not exist
$$);
SELECT ml_rag._add_options('ml_embed_row', $$
embed_model_id | text | setting embed_model_id | embedding model
dimensions | integer 1..16000 | those of the model | shorten embeddings to n numbers; for models trained for
  that (Matryoshka)
truncate | boolean | = true | cut a text that is longer than the model takes in; false = that is an error
$$);

-- vector_store_load

SELECT ml_rag._add_options('vector_store_load', $$
schema_name | text | the first schema of search_path | schema of the store; in searches the option is "schema"
table_name | text | from the path | table of the store
formats | text[] | all | load only files of these formats, such as ["pdf", "docx"]; the error of an unknown
  one lists all
language | text | none | language of the documents, such as en
embed_model_id | text | that of the store, else setting embed_model_id | embedding model
dimensions | integer 1..16000 | those of the model | shorten embeddings to n numbers; for models trained for
  that (Matryoshka)
description | text | none | comment of the table
metadata | object | none | further keys of the metadata of all documents of the load, such as {"department":
  "HR", "year": 2024}
document_metadata | object | none | the same for some: a name, the end of a path or a pattern, and an object
  for each, such as {"*.md": {"kind": "note"}}
chunking | object of chunking | - | how documents are split into segments
distance_metric | choice of metric | = "COSINE" | metric that the index is built for
index | object of index | hnsw, unless the store has one | the index of the embeddings, built at the end of
  the load: docs/embeddings.md#indexes
ocr | boolean | = false | read the text in pictures and scanned pages (needs tesseract-ocr)
describe_images | text | none | generation model that takes images: it describes pictures and scanned pages:
  docs/loading.md#pictures
refresh | boolean | = true | embed changed files again, add new ones, remove deleted ones; false = only add
  new files
$$);

SELECT ml_rag._add_options('chunking', $$
split_by | text | = "auto" | where segments end: paragraph, sentence, page or tokens; auto = at headings,
  paragraphs or sentences, whichever fills a segment; or "schema.function", a function of yours that splits:
  docs/functions.md
segment_tokens | integer 16..1048576 | 256, or what the model takes in where that is less | longest segment,
  in tokens of the embedding model; at most what the model takes in
overlap_tokens | integer 0..524288 | = 0 | tokens that a segment repeats of the one before, at most half of
  segment_tokens
context | choice none,headings | none | headings: the document's title and the headings above a segment stand
  before its text where it is embedded, not in the text that is stored, nor for keyword search
$$);

-- ml_rag.create_node_group, ml_rag.refresh_node_groups

SELECT ml_rag._add_options('create_node_group', $$
transform | text | must be given | what makes the nodes: sentence, paragraph; by a model summary, keyphrases,
  questions, entities, or context, which puts a sentence on where it stands before the segment; or
  "schema.function", text → setof text
parent | text | = "segment" | what they are made of: segment, document, or another node group
model_id | text | setting generate_model_id | generation model that is asked, once a text
prompt | text private | that of the transform | what the model is asked for, such as "the obligations that the
  text names"
embed | boolean | = true | embed the nodes, by the model of the store, for semantic arms
keyword_search | boolean | = true | index the words of the nodes, for keyword arms
merge | boolean | = false | index the nodes' words together with those of their segment, as one text:
  docs/nodes.md
dry_run | boolean | = false | only count the texts and the calls to the model
batch_size | integer 1..1000 | 100, 8 with a model | texts between two commits
$$);
SELECT ml_rag._add_options('refresh_node_groups', $$
name | text | all | only this node group
dry_run | boolean | = false | only count the texts that wait and the calls to the model
batch_size | integer 1..1000 | 100, 8 with a model | texts between two commits
$$);

-- ml_rag.load_documents, ml_rag.load_document, ml_rag.unchanged_documents

SELECT ml_rag._add_options('load_documents', $$
formats | text[] | all | load only documents of these formats
language | text | none | language of the documents, such as en
embed_model_id | text | that of the store | embedding model; no other than the store's is taken
metadata | object | none | further keys of the metadata of all documents of the load, such as {"department":
  "HR", "year": 2024}
document_metadata | object | none | the same for some: a name, the end of a path or a pattern, and an object
  for each, such as {"*.md": {"kind": "note"}}
chunking | object of chunking | - | how documents are split into segments
ocr | boolean | = false | read the text in pictures and scanned pages (needs tesseract-ocr)
describe_images | text | none | generation model that takes images: it describes pictures and scanned pages:
  docs/loading.md#pictures
file_dates | array of file_dates | none | dates of the files, an object for each name: they go into the
  metadata
refresh | boolean | = true | load changed documents again; false = only add new ones
$$);

SELECT ml_rag._add_options('file_dates', $$
creation_date | text | none | when the file was created, as ISO 8601
last_modified_date | text | none | when it was last written to
last_accessed_date | text | none | when it was last read
$$);

-- stores and their keyword indexes

SELECT ml_rag._add_options('create_store', $$
embed_model_id | text | setting embed_model_id | embedding model
dimensions | integer 1..16000 | those of the model | shorten embeddings to n numbers; for models trained for
  that (Matryoshka)
description | text | none | comment of the table
index | object of index | hnsw, built by the first load | the index of the embeddings; with hnsw it is there
  from the first row on, with none loads build none
distance_metric | choice of metric | = "COSINE" | metric that "index" is built for
language | text | default_text_search_config | language of the documents, for keyword search
partitions | integer 1..256 | a table without any | hash partitions by document that a new store gets
shard | boolean | = false | a view beside the store takes the requests of another server, so that the store
  can be a shard of one there
$$);

SELECT ml_rag._add_options('attach_shard', $$
partition | integer 0..255 | = 0 | which of the hash partitions moves, by its remainder
schema_name | text | that of the store | schema of the table on the other server
table_name | text | that of the store | name of the table on the other server
$$);

SELECT ml_rag._add_options('distribute_store', $$
shard_count | integer 1..64000 | citus.shard_count | shards of a store that is not distributed yet
$$);

SELECT ml_rag._add_options('enable_keyword_search', $$
language | text | default_text_search_config | a code such as en or pt-BR, or a name; one that PostgreSQL has
  no configuration for (zh, ja, ko, also a misspelt one) gets simple
text_search_configuration | text | that of the language | your own text search configuration, with its
  synonyms and stop words
segment | text | = "segment" | column of the text
k1 | number 0..100 | = 1.2 | how much each further occurrence of a word counts; 0 = nothing
b | number 0..1 | = 0.75 | how much less long segments count; 0 = length does not matter
statistics | choice all,visible | = "all" | over which rows the weights of words are computed: all, or those
  that the caller can see under row-level security
$$);

-- ml_rag.add_embedding

SELECT ml_rag._add_options('add_embedding', $$
embed_model_id | text | that of the embedding if it exists, else setting embed_model_id | embeds the texts
dimensions | integer 1..16000 | those of the model | shorten embeddings to n numbers; for models trained for
  that (Matryoshka)
type | choice vector,halfvec | that of the default embedding | type of the column; halfvec takes half the
  space
index | object of index | hnsw, unless the column has an index | the index of the column
distance_metric | choice of metric | = "COSINE" | metric that the index is built for
batch_size | integer 1..10000 | = 256 | rows of one call to the model and between two commits
lock_seconds | number 0.1..3600 | = 10 | longest wait for the lock of the table, behind which others wait;
  before the next try they are let through
vector_store_columns | object of vector_store_columns | - | segment, segment_embedding: the names of the
  columns
$$);

SELECT ml_rag._add_options('index', $$
type | choice hnsw,ivfflat,none | = "hnsw" | method of the approximate index
m | integer 2..100 | that of pgvector | hnsw: links of a vector in each layer
ef_construction | integer 4..1000 | that of pgvector | hnsw: candidates kept while it is built; at least twice
  m
lists | integer 1..32768 | that of pgvector | ivfflat: lists of vectors
quantization | choice none,halfvec,binary | = "none" | index smaller vectors, a half or a 32nd of the size:
  docs/embeddings.md#quantization
$$);

SELECT ml_rag._add_options('index_options', $$
ef_search | integer 1..1000 | hnsw.ef_search; where that is 40, that of ml_rag.tune_index, else 200 for large
  tables | hnsw: candidates kept while an index is searched
probes | integer 1..32768 | ivfflat.probes; where that is 1, that of ml_rag.tune_index, else a tenth of the
  lists, at least 10 | ivfflat: lists that are searched
exact | boolean | = false | compare all rows, whatever indexes there are
rescore | integer 1..100000 | halfvec: twice the candidates; binary: that of ml_rag.tune_index, else 20 times,
  at least 400 | nearest ones of an index of smaller vectors that are scored again by the whole vectors
$$);

-- ml_rag.tune_index

SELECT ml_rag._add_options('tune_index', $$
questions | text | segments of the store | a table or a query with a column question, or query_embedding
sample | integer 1..10000 | = 100 | without questions: segments taken at random, each of which is searched for
  its neighbours
recall | number 0..1 | = 0.98 | share of the nearest segments that searches shall find
n_citations | integer 1..99 | = 5 | how many nearest segments a question has
distance_metric | choice of metric | = "COSINE" | metric of the index that is measured
keep | boolean | = true | keep the cheapest setting that reaches recall for the searches of the store; false =
  measure only
$$);

-- ml_rag.adopt

SELECT ml_rag._add_options('adopt', $$
embed_model_id | text | that of its marker, else it must be given | the model that made the vectors
vector_store_columns | object of vector_store_columns | by the names and types of the columns | which column
  is what
collection | text | all | of langchain_pg_embedding: only this collection, by a view that is made for it
view | text | the name of the collection, in the schema of the table | the name of that view
sample | integer 0..1000 | = 16 | rows that are embedded again and compared, taken at random, of each
  collection
$$);

-- ml_rag.create_vectorizer, ml_rag.run_vectorizer, ml_rag.drop_vectorizer

SELECT ml_rag._add_options('create_vectorizer', $$
columns | any | none, it must be given | what is embedded and searched of a row: a column, an array of columns
  (each on a line of its own), or a template of them, such as "Name: {name} Description: {description}"
metadata | text[] | the key and the columns of the template | columns that go along with a hit: in the
  metadata of citations, and in the prompt; at most 50
embed_model_id | text | setting embed_model_id | embeds the texts
dimensions | integer 1..16000 | those of the model | shorten embeddings to n numbers; for models trained for
  that (Matryoshka)
language | text | default_text_search_config | language of the texts for keyword search, as in
  enable_keyword_search
keyword_search | boolean | = true | make a keyword index too
distance_metric | choice of metric | = "COSINE" | metric that the index is built for
index | object of index | hnsw | the index of the embeddings, built by the first run that leaves nothing
  pending
document_name | text | = "{schema}.{table}/{key}" | template of the name in citations: schema, table, key, and
  columns
destination | choice column,table | = "column" | where the embeddings are: column, beside the row; table, in a
  table of segments, for texts longer than the model takes in
chunking | object of chunking | those of chunking | how texts are split into segments, where destination is
  table
mode | choice deferred,immediate | = "deferred" | when rows are embedded: deferred, by the next run;
  immediate, in the statement that writes them
$$);

SELECT ml_rag._add_options('run_vectorizer', $$
batch_size | integer 1..1000 | = 256 | rows of one call to the model and between two commits; each takes a
  place of max_locks_per_transaction
batches | integer 1..1000000 | all | end after this many batches
owner | text | any role | end with an error if the table is not, or no longer, of this role, whose triggers
  it runs, or if you do not trust the role, or no longer
$$);

SELECT ml_rag._add_options('drop_vectorizer', $$
keep_columns | boolean | = false | keep the columns and the keyword index that the vectorizer added
$$);

-- ml_rag_chat, beside the options of ml_rag

SELECT ml_rag._add_options('ml_rag_chat', $$
conversation_id | text | a new conversation | the conversation to continue: a uuid, as the answers of its
  turns have it
re_run | boolean | = false | replace the last turn; the query may be null, which asks it once more
return_prompt | boolean | = false | add the messages that the model answered: prompt
$$);

-- heatwave_chat: the keys of the setting ml_rag.chat_options

SELECT ml_rag._add_options('heatwave_chat', $$
schema_name | text | all | search the vector stores of this schema; not together with tables
tables | array of chat_table | all that qualify | search only these stores: [{"schema_name": "shop",
  "table_name": "products"}]
include_document_uris | text[] | all | search only these documents, as document_name of ml_rag
table_metadata | object of vector_store_columns | none | the real names of the columns, as
  vector_store_columns of ml_rag
retrieve_top_k | integer 0..100 | = 3 | how many segments are cited; 0 = the model answers alone
task | choice generation,summarization | = "generation" | what to do, as in ml_generate
model_options | object of ml_generate | none | any option of ml_generate except context
skip_generate | boolean | = false | retrieval only; response is null, and the turn is not kept
re_run | boolean | = false | replace the last turn; false again after the call
return_prompt | boolean | = false | add the messages that the model answered: prompt
report_progress | boolean | = false | a notice before and after the answer
chat_history | array of chat_turn private | none | the turns so far, oldest first; each call adds its own, and
  the newest 100 are kept
documents | any | none | written by the call: what the answer cites
response | any | none | written by the call: the answer
prompt | any private | none | written by the call with return_prompt
request_completed | any | none | written by the call: true
error | any | none | written by the call: null; what fails is raised
$$);

SELECT ml_rag._add_options('chat_table', $$
schema_name | text | any schema | schema of the store
table_name | text | must be given | name of the store
$$);

SELECT ml_rag._add_options('chat_turn', $$
chat_query_id | text | a uuid | tells the turns apart
user_message | text private | must be given | the query
chat_bot_message | text private | must be given | the answer
$$);

-- ml_rag_evaluate

SELECT ml_rag._add_options('ml_rag_evaluate', $$
name | text | none | name of the run
options | object of ml_rag | - | options of ml_rag, all but query_embedding; skip_generate follows from
  generate
columns | object of evaluation_columns | - | the real names of the columns of the questions: {"question":
  "text", "id": "_id"}
k | array | = [1, 3, 5, 10] | cut-offs of recall@k and ndcg@k: 1 to 20 integers from 1 to 100
match | choice path_end,document_name,document_id | = "path_end" | how expected documents are given: a.pdf is
  a whole name or the end of a path (/srv/docs/a.pdf); the whole name only; the id
generate | boolean | = false -- false; true with judge_model_id | answer the questions too
judge_model_id | text | none | generation model that scores groundedness and relevance of the answers
metrics | text[] | none | functions of yours, "schema.function" (question text, answer jsonb, reference text)
  → float8, at most 20: docs/evaluation.md#metrics-of-your-own
refusal_pattern | text | = "(do not|don't) know|(cannot|can't) (answer|be
  answered)|(documents?|context|sources?) (do|does) not (say|mention|contain|provide|specify)" | regular
  expression, in any case, of answers that refuse; the abstain text always does
limit | integer 1..1000000 | all | measure n of the questions
seed | integer 0..4294967295 | none: the first ones | draw the questions of limit at random, the same ones for
  the same seed
keep | boolean | = true | keep the run in ml_rag.evaluation_run and ml_rag.evaluation_question; false works in
  a read-only transaction
$$);

-- ml_rag.make_questions

SELECT ml_rag._add_options('make_questions', $$
n | integer 0..10000 | = 20 | questions that a segment answers, each of another one
unanswerable | integer 0..10000 | = 5 | questions on the subject of a segment that the store does not answer
model_id | text | setting generate_model_id | generation model that writes them; it also checks that what is
  found does not answer the unanswerable ones
language | text | that of the segment | language of the questions, such as en
seed | integer 0..4294967295 | = 0 | draws the segments, the same ones for the same seed
filters | object | none | only segments for which these conditions hold, as in ml_rag
$$);

SELECT ml_rag._add_options('evaluation_columns', $$
id | text | = "id" | what tells the questions apart; without it they are 1, 2, …
question | text | = "question" | the question; the only one that must exist
documents | text | = "documents" | expected documents: text, text[] or json
answers | text | = "answers" | right answers: text, text[] or json
answerable | text | = "answerable" | whether the documents have an answer: boolean
history | text private | = "history" | earlier turns of the conversation, as history of query_options: json
$$);
