-- types: what stages hand on to each other.

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
  found                  text,      -- named (with its schema), or trusted; null counts as named
  -- a table or materialized view without children, not one of Citus: ctid tells its rows apart
  is_table               boolean,
  missing                regclass[] -- shards that do not answer, and are left out; null if none
);
COMMENT ON TYPE ml_rag.store IS
$$a vector store as ml_rag.discover found it
vector_store: schema.table, as shown in the output. embed_model_id: from the marker comment; null where an
unmarked relation was named. segment_embedding to metadata: the columns by their logical names, null where the
relation has none. embedding_type: vector or halfvec. dimensions: null where the column declares none. found:
named (with its schema), or trusted. missing: shards that are left out, as they do not answer.$$;

CREATE TYPE ml_rag.hit AS (
  vector_store   text,
  document_name  text,
  document_id    bigint,            -- null if the column is not an integer
  document_key   text,              -- what tells the store's documents apart, as text
  segment_number bigint,
  -- null in a candidate whose text is read once it is known to be wanted, see row_key
  segment        text,
  -- rounded to 4 decimals; null without a query embedding to measure from
  distance       numeric,
  metadata       jsonb,             -- as segment
  -- BM25; null if the keyword arm did not look or the segment has none of the words
  keyword_score  double precision,
  score          double precision,  -- 0-1, of fuse: what hybrid search orders by; null without it
  rerank_score   double precision,  -- 0-1, of the reranker; null without it
  -- of a candidate without its text: the ctid of its row, of use within one snapshot
  row_key        text,
  first_segment  bigint,            -- of expand: the range of segments whose text this is; null without it
  last_segment   bigint,
  node           text,              -- the nearest node that it was found by; null if none
  node_distance  numeric            -- of that node; null if it has no vector of the store's model
);
COMMENT ON TYPE ml_rag.hit IS
$$a segment on its way through the pipeline; an array of them is in the order of the citations, the best one first
document_id: null if the column is not an integer. document_key: what tells the store's documents apart, as
text. distance: rounded to 4 decimals; null without a query embedding to measure from. keyword_score: BM25;
null if the keyword arm did not look or the segment has none of the words. score: 0-1, of fusing.
rerank_score: 0-1, of ml_rag.rerank. node, node_distance: the nearest node that it was found by; distance is
the smaller of that and the segment's own, or the node's if that is cited.$$;

CREATE TYPE ml_rag.arm AS (
  name            text,              -- how it is reported: its search, numbered from the second of a kind on
  search          text,              -- semantic, keyword or function
  -- what it is to search with, as the option says; null if that is a text, or the question
  query_key       text,
  -- what is searched with: the mean of the embeddings, any of the words; if null, the question
  query           text[],
  -- semantic: the vector that is searched with; if null, that of the question
  query_embedding @vector@.vector,
  -- share in a weighted fusion; if null, by how clear the arms are about the question
  weight          double precision,
  candidates      integer,           -- how many segments it brings
  max_distance    numeric,           -- semantic: farther ones are dropped before anything else; null if none
  min_score       double precision,  -- keyword: lower ones are; null if none
  part            integer,           -- arms of one part share what is the part's; null if it is the only one
  share           double precision,  -- of the part, in a weighted fusion; if null, 1
  function        text,              -- of the caller's: its name as it is written into a statement
  -- what it takes: text, texts, vector or vectors, see ml_rag._find_function
  form            text,
  is_descending   boolean,           -- whether more is better
  node_group      text,              -- which texts are searched; if null, the segments
  -- which embedding of the store is searched; if null, the one it was found with
  embedding       text,
  arguments       jsonb,             -- for the function; null if none
  is_alone        boolean            -- whether a hypothetical document is searched with without the question
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
  question               text,     -- what is searched with; if null, the question as asked
  asked                  text,     -- the question as asked, if conditions were taken out of it
  history                text,     -- earlier turns that are searched with beside the question
  synonyms               text[],
  hypothetical_documents text[],   -- passages that could answer the question
  sub_questions          text[],
  filters                jsonb,    -- conditions that the model has chosen, joined by AND to those of the call
  document_names         text[],   -- documents that the question names, and that alone are searched
  is_summary             boolean,  -- whether it asks for nothing but a summary of them
  model_id               text,     -- the model that was asked; null if none
  prompt_tokens          integer,  -- null if the model server does not report them
  generated_tokens       integer
);
COMMENT ON TYPE ml_rag.rewritten IS
$$what is searched with, as ml_rag.rewrite made it of a question and its history; null or empty where it was not asked for$$;

CREATE TYPE ml_rag.request AS (
  question            text,              -- as asked, or as it was rewritten
  rewritten           ml_rag.rewritten,  -- null without query_options
  options             jsonb,             -- all of them, checked and with defaults
  arms                ml_rag.arm[],
  -- of the question; null until it is embedded, or where none is needed
  query_embedding     @vector@.vector,
  distance_metric     text,
  fusion              text,              -- weighted or rrf
  rrf_k               double precision,
  n_citations         integer,
  max_distance        numeric,           -- thresholds; null if none
  percentage_distance numeric,
  rerank_model_id     text,              -- null without reranking
  rerank_candidates   integer,
  min_score           double precision,
  segment_overlap     integer,           -- neighbours on either side; 0 = none
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
  rankings  ml_rag.ranking[],  -- what each arm has found, where that is asked for, and all of it as one list
  ranked    ml_rag.hit[],
  hits      ml_rag.hit[],
  missing_shards text[],   -- with option partial: those that did not answer; null if none
  -- what limited the hits: n_citations, max_distance or percentage_distance; document_order: whole documents
  method    text,
  threshold numeric,       -- the largest distance that it left
  statement text,          -- with explain: what has retrieved, with its values in it
  missing   jsonb,         -- where no hit is left: the error that says so, for ml_rag._raise
  trace     ml_rag.step[]  -- in the order in which it went
);
COMMENT ON TYPE ml_rag.retrieval IS
$$the result of a request so far; a stage takes both and returns this one$$;
