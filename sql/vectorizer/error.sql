-- error: the rows of vectorizers that could not be embedded, with the reason; they are tried again, later and
-- later.

CREATE TABLE ml_rag.vectorizer_error (
  relation     regclass NOT NULL,
  key          text COLLATE "C" NOT NULL,  -- of the row: the text of a text[]
  attempts     integer NOT NULL,           -- with the text that it has
  sqlstate     text NOT NULL,
  message      text NOT NULL,
  detail       text,
  failed_at    timestamptz NOT NULL,       -- last
  -- infinity: when the text changes, or after ml_rag.retry_vectorizer
  next_attempt timestamptz NOT NULL,
  text_hash    bigint NOT NULL,            -- of the text that failed: another one is tried at once
  PRIMARY KEY (relation, key)
);
COMMENT ON TABLE ml_rag.vectorizer_error IS
$$rows that a vectorizer could not embed; the owner of the table sees them
key: of the row, as the text of an array; of more than 2000 bytes the beginning and a hash. attempts: with the
text that it has. next_attempt: not before; infinity = when its text changes, or after
ml_rag.retry_vectorizer. A row that was embedded or deleted since is gone after the next run.$$;
-- its policy is in vectorizer/queue
ALTER TABLE ml_rag.vectorizer_error ENABLE ROW LEVEL SECURITY;
-- nor may estimates, which EXPLAIN shows too, tell of others' rows
ALTER TABLE ml_rag.vectorizer_error ALTER relation SET STATISTICS 0, ALTER key SET STATISTICS 0,
  ALTER attempts SET STATISTICS 0, ALTER sqlstate SET STATISTICS 0, ALTER message SET STATISTICS 0,
  ALTER detail SET STATISTICS 0, ALTER failed_at SET STATISTICS 0, ALTER next_attempt SET STATISTICS 0,
  ALTER text_hash SET STATISTICS 0;

-- How many texts of a vectorizer its model has cut; of the role that owns the table, as the failures.
CREATE TABLE ml_rag.vectorizer_truncated (
  relation regclass PRIMARY KEY,
  texts    bigint NOT NULL
);
COMMENT ON TABLE ml_rag.vectorizer_truncated IS
$$how many texts of a vectorizer its model has cut; the owner of the table sees them
Counted by runs since it was created; ml_rag.vectorizer shows it as truncated.$$;
ALTER TABLE ml_rag.vectorizer_truncated ENABLE ROW LEVEL SECURITY;
ALTER TABLE ml_rag.vectorizer_truncated ALTER relation SET STATISTICS 0, ALTER texts SET STATISTICS 0;

-- A row is forgotten by an UPDATE of its attempts, or texts, to 0: evaluate/forget.

CREATE FUNCTION ml_rag._text_hash(segment text) RETURNS bigint
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE SET search_path FROM CURRENT AS $$
BEGIN
  RETURN hashtextextended(coalesce(segment, '') COLLATE "C", 0);
END
$$;

CREATE FUNCTION ml_rag._error_key(key text) RETURNS text
LANGUAGE sql STABLE PARALLEL SAFE AS $$
-- purpose: a row's key as its failure has it: of one that is too long for the index, which has a table's name
-- beside it, the beginning, and a cryptographic hash, for which another key cannot be found. One expression,
-- which PostgreSQL puts in the place of the call
SELECT CASE WHEN pg_catalog.octet_length(key) OPERATOR(pg_catalog.<=) 2000 THEN key
  ELSE pg_catalog.concat(pg_catalog.left(key, 200), ' ',
    pg_catalog.encode(pg_catalog.sha256(pg_catalog.convert_to(key, 'UTF8')), 'hex')) END
$$;

CREATE FUNCTION ml_rag._note_failures(relation regclass, keys text[], texts text[],
  errors jsonb[]) RETURNS integer
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SET search_path FROM CURRENT AS $$
-- purpose: the errors of a batch's rows, null where there is none; those are forgotten that had one. Returns
-- how many have. text_hash: in the error of a text that is not there as a whole
-- A minute until the second attempt, twice as long until each further one, at most a day. What no attempt can
-- mend, an empty or too long text, waits for another text. It waits for no other transaction, as the caller
-- has locked the rows that failed: a run would hold up others with the rows that it has written.
-- Writes: ml_rag.vectorizer_error
DECLARE
  _n integer;
BEGIN
  -- most often none had one, which a look at the key of each tells
  IF EXISTS (
    SELECT FROM (SELECT ml_rag._error_key(u.key) AS key FROM unnest(keys, errors) AS u (key, error)
      WHERE u.error IS NULL OFFSET 0) AS k
    WHERE EXISTS (SELECT FROM ml_rag.vectorizer_error AS e
      WHERE e.relation = _note_failures.relation AND e.key = k.key OFFSET 0)) THEN
    -- IS TRUE: a hash. Of the table one row is expected, and a join would read all failures for each of them
    UPDATE ml_rag.vectorizer_error AS e SET attempts = 0
    WHERE e.relation = _note_failures.relation AND (e.key IN (
      SELECT n.key FROM ml_rag.vectorizer_error AS n
      WHERE n.relation = _note_failures.relation AND (n.key IN (
        SELECT ml_rag._error_key(u.key) FROM unnest(keys, errors) AS u (key, error)
        WHERE u.error IS NULL)) IS TRUE
      FOR UPDATE SKIP LOCKED)) IS TRUE;
  END IF;
  INSERT INTO ml_rag.vectorizer_error AS e (relation, key, attempts, sqlstate, message, detail, failed_at,
    next_attempt, text_hash)
  SELECT _note_failures.relation, ml_rag._error_key(u.key), 1, u.error ->> 'sqlstate', u.error ->> 'message',
    u.error ->> 'detail', now(),
    CASE WHEN u.error ? 'final' THEN 'infinity' ELSE now() + interval '1 minute' END,
      coalesce((u.error ->> 'text_hash')::bigint, ml_rag._text_hash(u.text))
  FROM unnest(keys, texts, errors) AS u (key, text, error) WHERE u.error IS NOT NULL
  ON CONFLICT ON CONSTRAINT vectorizer_error_pkey DO UPDATE SET
    attempts = CASE WHEN e.text_hash = excluded.text_hash THEN e.attempts + 1 ELSE 1 END,
    sqlstate = excluded.sqlstate, message = excluded.message, detail = excluded.detail,
    failed_at = excluded.failed_at,
    next_attempt = CASE WHEN excluded.next_attempt < 'infinity' AND e.text_hash = excluded.text_hash
      THEN now() + least(interval '1 day', interval '1 minute' * 2 ^ least(e.attempts, 20))
      ELSE excluded.next_attempt END,
    text_hash = excluded.text_hash;
  GET DIAGNOSTICS _n = ROW_COUNT;
  RETURN _n;
END
$$;
