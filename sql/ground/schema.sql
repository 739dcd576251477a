-- schema: the schema of everything private, its types, the settings.

CREATE SCHEMA ml_rag;
COMMENT ON SCHEMA ml_rag IS 'retrieval-augmented generation: stages, settings and helpers behind the public routines';

-- The script itself looks nowhere else; CREATE EXTENSION puts the session's path back when it ends.
SET LOCAL search_path = pg_catalog, pg_temp;

-- for the types
SELECT set_config('search_path', format('pg_catalog, ml_rag, %s, pg_temp', extnamespace::regnamespace), true)
FROM pg_extension WHERE extname = 'vector';

DO $$
DECLARE
  _schema regnamespace := (SELECT extnamespace FROM pg_extension WHERE extname = 'vector');
BEGIN
  IF has_schema_privilege('public', _schema, 'CREATE') THEN
    RAISE WARNING USING MESSAGE = format('everybody may create objects in schema %s, where pgvector is installed', _schema),
      DETAIL = 'That schema is in the search_path of functions of ml_rag: whoever may create objects in it can run code as '
        'whoever calls them.',
      HINT = format('REVOKE CREATE ON SCHEMA %s FROM PUBLIC;', _schema);
  END IF;
END
$$;

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
  segment_number_type    text,
  found                  text,      -- named (with its schema); else its owner is trusted or untrusted. null = named
  is_table               boolean,   -- a table or materialized view without children, not one of Citus: ctid tells its rows apart
  missing                regclass[] -- shards that do not answer, and are left out; null = none
);
COMMENT ON TYPE ml_rag.store IS
$$a vector store as ml_rag.discover found it
vector_store: schema.table, as shown in the output. embed_model_id: from the marker comment; null where an unmarked relation was
named. segment_embedding to metadata: the columns by their logical names, null where the relation has none. embedding_type:
vector or halfvec. dimensions: null where the column declares none. found: named (with its schema), or by its owner trusted or
untrusted. missing: shards that are left out, as they do not answer.$$;

CREATE TYPE ml_rag.hit AS (
  vector_store   text,
  document_name  text,
  document_id    bigint,            -- null where the column is no integer
  document_key   text,              -- what tells the store's documents apart, as text
  segment_number bigint,
  segment        text,              -- null in a candidate whose text is read once it is known to be wanted, see row_key
  distance       numeric,           -- rounded to 4 decimals; null where there is no query embedding to measure from
  metadata       jsonb,             -- as segment
  keyword_score  double precision,  -- BM25; null where the keyword arm did not look or the segment has none of the words
  score          double precision,  -- 0-1, of fuse: what hybrid search orders by; null without it
  rerank_score   double precision,  -- 0-1, of the reranker; null without it
  row_key        text,              -- of a candidate without its text: the ctid of its row, of use within one snapshot
  first_segment  bigint,            -- of expand: the range of segments whose text this is; null without it
  last_segment   bigint
);
COMMENT ON TYPE ml_rag.hit IS
$$a segment on its way through the pipeline; an array of them is in the order of the citations, the best one first
document_id: null where the column is no integer. document_key: what tells the store's documents apart, as text. distance:
rounded to 4 decimals; null where there is no query embedding to measure from. keyword_score: BM25; null where the keyword arm
did not look or the segment has none of the words. score: 0-1, of ml_rag.fuse. rerank_score: 0-1, of ml_rag.rerank.$$;

CREATE TYPE ml_rag.arm AS (
  name            text,              -- how it is reported: its search, numbered from the second of a kind on
  search          text,              -- semantic, keyword or function
  query_key       text,              -- what it is to search with, as the option says; null = a text, or the question
  query           text[],            -- what is searched with: the mean of the embeddings, any of the words; null = the question
  query_embedding vector,            -- semantic: the vector that is searched with; null = that of the question
  weight          double precision,  -- share in a weighted fusion; null = by how clear the arms are about the question
  candidates      integer,           -- how many segments it brings
  max_distance    numeric,           -- semantic: farther ones are dropped before anything else; null = none
  min_score       double precision,  -- keyword: lower ones are; null = none
  part            integer,           -- arms of one part share what is the part's; null = the only one
  share           double precision,  -- of the part, in a weighted fusion; null = 1
  function        text,              -- of the caller's: its name as it is written into a statement
  form            text,              -- what it takes: text, texts, vector or vectors, see ml_rag._find_function
  is_descending   boolean,           -- whether more is better
  node_group      text               -- which texts are searched; null = the segments
);
COMMENT ON TYPE ml_rag.arm IS
$$one arm of a search: what is searched with what, and how much it counts; see option arms$$;

CREATE TYPE ml_rag.ranking AS (
  arm  ml_rag.arm,
  hits ml_rag.hit[]
);
COMMENT ON TYPE ml_rag.ranking IS
$$what one arm found, the best hit first$$;

CREATE TYPE ml_rag.rewritten AS (
  question               text,     -- what is searched with; null = the question as asked
  history                text,     -- earlier turns that are searched with beside the question
  synonyms               text[],
  hypothetical_documents text[],   -- passages that could answer the question
  sub_questions          text[],
  filters                jsonb,    -- conditions that the model has chosen, joined by AND to those of the call
  document_names         text[],   -- documents that the question names, and that alone are searched
  is_summary             boolean,  -- whether it asks for nothing but a summary of them
  model_id               text,     -- the model that was asked; null = none
  prompt_tokens          integer,  -- null where the model server does not tell
  generated_tokens       integer
);
COMMENT ON TYPE ml_rag.rewritten IS
$$what is searched with, as ml_rag.rewrite made it of a question and its history; null or empty where it was not asked for$$;

CREATE TYPE ml_rag.request AS (
  question            text,              -- as asked, or as it was rewritten
  rewritten           ml_rag.rewritten,  -- null without query_options
  options             jsonb,             -- all of them, checked and with defaults
  arms                ml_rag.arm[],
  query_embedding     vector,            -- of the question; null until it is embedded, or where none is needed
  distance_metric     text,
  fusion              text,              -- weighted or rrf
  rrf_k               double precision,
  n_citations         integer,
  max_distance        numeric,           -- thresholds; null = none
  percentage_distance numeric,
  rerank_model_id     text,              -- null = no reranking
  rerank_candidates   integer,
  min_score           double precision,
  segment_overlap     integer,           -- neighbours on either side; 0 = none
  skips_dimensions    boolean,           -- whether a store of other dimensions than the query embedding is left out
  explain             boolean,
  call                integer            -- what ml_rag._begin has returned
);
COMMENT ON TYPE ml_rag.request IS
$$the question and the options of a call, as ml_rag._request reads them; each stage uses its own part$$;

CREATE TYPE ml_rag.step AS (
  stage text,
  ended timestamptz,
  facts jsonb
);
COMMENT ON TYPE ml_rag.step IS
$$a stage that has run; it took the time since the step before it$$;

CREATE TYPE ml_rag.retrieval AS (
  stores    ml_rag.store[],
  skipped   text[],        -- names of stores that no arm could search
  rankings  ml_rag.ranking[],
  hits      ml_rag.hit[],
  missing_shards text[],   -- with option partial: those that did not answer; null = none
  method    text,          -- what limited the hits: n_citations, max_distance or percentage_distance; document_order: whole documents
  threshold numeric,       -- the largest distance that it left
  missing   jsonb,         -- where no hit is left: the error that says so, for ml_rag._raise
  trace     ml_rag.step[]  -- in the order in which it went
);
COMMENT ON TYPE ml_rag.retrieval IS
$$the result of a request so far; a stage takes both and returns this one$$;

-- Every function below is created with SET search_path FROM CURRENT, and this is the path they get: nothing a caller
-- can write to. Those from store/marker on have pgvector's schema on it too.
SET LOCAL search_path = pg_catalog, ml_rag, pg_temp;

CREATE FUNCTION ml_rag.version() RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE
AS $$ SELECT '@ML_RAG_VERSION@'::pg_catalog.text $$;
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
  IF _name IS NULL THEN
    RAISE EXCEPTION USING ERRCODE = '42P01', MESSAGE = 'table does not exist', DETAIL = 'The table is NULL.',
      HINT = 'Name a table.';
  ELSIF _name ~ '^([0-9]+|-)$' THEN
    RAISE EXCEPTION USING ERRCODE = '42P01', MESSAGE = 'table does not exist',
      DETAIL = format('There is no table with OID %s; it may have been dropped during the call.', relation::oid),
      HINT = 'Try again.';
  END IF;
  RETURN _name;
END
$$;

CREATE FUNCTION ml_rag._check_writable(what text, relation regclass DEFAULT NULL) RETURNS void
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$
-- purpose: stop what writes before it asks a model, where the transaction cannot write (but to temporary tables)
BEGIN
  IF current_setting('transaction_read_only')::boolean
    AND NOT EXISTS (SELECT FROM pg_class AS c WHERE c.oid = relation AND c.relpersistence = 't') THEN
    RAISE EXCEPTION USING ERRCODE = '25006', MESSAGE = format('%s in a read-only transaction', what),
      DETAIL = CASE WHEN pg_is_in_recovery() THEN 'This server is a standby.'
        ELSE 'transaction_read_only is on, perhaps by default_transaction_read_only.' END,
      HINT = CASE WHEN pg_is_in_recovery() THEN 'Connect to the primary server.'
        ELSE 'Use BEGIN READ WRITE, or SET default_transaction_read_only = off.' END;
  END IF;
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

CREATE FUNCTION ml_rag._is_distributed(relation oid) RETURNS boolean
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$
-- purpose: whether Citus has distributed a table: its rows are in shards then, and rows of two shards can have the same ctid
-- Reads: the catalog. A statement of PL/pgSQL is not parsed before it runs, and without Citus there is no such table.
BEGIN
  IF to_regclass('pg_catalog.pg_dist_partition') IS NULL THEN
    RETURN false;
  END IF;
  RETURN EXISTS (SELECT FROM pg_catalog.pg_dist_partition AS d WHERE d.logicalrelid = relation);
END
$$;
