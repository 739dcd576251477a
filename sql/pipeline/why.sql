-- why: where on its way through the stages an expected segment got lost, and which option would let it in.

CREATE TYPE ml_rag.why_step AS (
  stage    text,
  arm      text,              -- of search and keyword: the arm's name; else null
  is_kept  boolean,           -- whether the segment reaches the next stage
  rank     integer,           -- its place after the stage; null where it has none
  distance numeric,
  score    double precision,  -- keyword: BM25; function: what it gave; fuse, rerank: 0-1
  detail   text,
  hint     text               -- what would let it in; null where it is kept
);
COMMENT ON TYPE ml_rag.why_step IS 'what one stage did to a segment, of ml_rag.why_not';

CREATE FUNCTION ml_rag.why_not(query text, options jsonb, document text, segment_number bigint DEFAULT NULL,
  page integer DEFAULT NULL)
RETURNS SETOF ml_rag.why_step
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE ROWS 10 SET search_path FROM CURRENT AS $$
-- purpose: what became of a segment in a call
DECLARE
  _call integer := ml_rag._begin('ml_rag.why_not');
  _options jsonb;
  _steps jsonb;
BEGIN
  IF coalesce(document, '') !~ '[^[:space:]]' THEN
    RAISE EXCEPTION USING ERRCODE = '22023', MESSAGE = 'the name of the document is empty',
      HINT = 'Name it as citations do: SELECT * FROM ml_rag.why_not(''What is AutoML?'', ''{}'', '
        '''/docs/automl.pdf'', 3).';
  END IF;
  _options := ml_rag._parse_rag_options(options);
  IF _options -> 'n_citations' = '0' THEN
    PERFORM ml_rag._bad_option('n_citations', '0', '1 to 100: without retrieval nothing is searched');
  END IF;
  _steps := ml_rag._python('why_not', jsonb_build_array(to_jsonb(ml_rag._request(query, _options, _call)),
    document, segment_number, page));
  PERFORM ml_rag._end(_call);
  RETURN QUERY SELECT * FROM jsonb_populate_recordset(NULL::ml_rag.why_step, _steps);
@CATCH_AND_END@
END
$$;
COMMENT ON FUNCTION ml_rag.why_not(text, jsonb, text, bigint, integer) IS
$$why a call with this question and these options does not cite a segment, or cites it: one row a stage, in their order
document: its name, as the store has it and citations show it, or without its folders where one document only
has it.
segment_number: if null, the segment of the document that comes farthest. page: only segments of it, as key
page of the metadata has it. The call is made again, without an answer. is_kept: whether the segment reaches
the next stage; of several arms one that keeps it is enough. The last row is the stage that drops it, with the
option that would let it in as hint, or citations; it is expand if the text is cited all the same, as that of
a neighbour. rank, distance, score: after that stage; score is BM25 in keyword, what a function gave, and
0-1 in fuse and rerank. Of a document that the caller may not see, the rows are those of one that is not
there.
What fits the model's context is not told: see retrieval_info. Errors: as ml_rag_search, but for nothing
found; 22023 no name; 54000 a document of more than 10000 segments.$$;
