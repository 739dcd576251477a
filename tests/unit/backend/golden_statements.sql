-- by meaning, as rows
-- $1 vector
WITH near_1 AS (
  SELECT 1 AS store, s.row_key, s.document_name, s.document_id, s.document_key, s.segment_number, s.segment, s.metadata, round((s.distance + 0)::numeric, 4) AS distance
  FROM (SELECT t.ctid AS row_key, t."document_name"::text AS document_name, t."document_id"::bigint AS document_id, t."document_id"::text AS document_key, t."segment_number"::bigint AS segment_number, t."segment"::text AS segment, to_jsonb(t."metadata") AS metadata, t."segment_embedding" OPERATOR(public.<=>) $1 AS distance
    FROM public.handbook AS t WHERE t."segment_embedding" IS NOT NULL AND t."segment" IS NOT NULL
    ORDER BY t."segment_embedding" OPERATOR(public.<=>) $1 LIMIT 4) AS s
  WHERE abs(s.distance) < 'Infinity'
),
near AS (
  SELECT * FROM (
  SELECT * FROM near_1
  ORDER BY distance, store, document_name COLLATE "C", document_id, document_key COLLATE "C", segment_number LIMIT 3) AS b
),
ranked AS (
  SELECT *, NULL::float8 AS keyword_score, NULL::float8 AS score FROM near
),
cited AS (
  SELECT *, row_number() OVER () AS place FROM (
    SELECT * FROM ranked
    ORDER BY distance, store, document_name COLLATE "C", document_id, document_key COLLATE "C", segment_number LIMIT 3) AS r
),
hit AS (
  SELECT * FROM cited
)
SELECT row_number() OVER (ORDER BY h.place)::integer AS rank, (ARRAY['public.handbook'])[h.store] AS vector_store, h.document_name, h.document_id, h.segment_number::integer AS segment_number, h.segment, h.distance, h.metadata, h.keyword_score, h.score, NULL::float8 AS rerank_score
FROM hit AS h ORDER BY h.place;

-- by meaning, a limit, as citations with fields
-- $1 vector, $2 max_distance, $3 percentage_distance
WITH near_1 AS (
  SELECT 1 AS store, s.row_key, s.document_name, s.document_id, s.document_key, s.segment_number, s.segment, s.metadata, round((s.distance + 0)::numeric, 4) AS distance
  FROM (SELECT t.ctid AS row_key, t."document_name"::text AS document_name, t."document_id"::bigint AS document_id, t."document_id"::text AS document_key, t."segment_number"::bigint AS segment_number, t."segment"::text AS segment, to_jsonb(t."metadata") AS metadata, t."segment_embedding" OPERATOR(public.<->) $1 AS distance
    FROM public.handbook AS t WHERE t."segment_embedding" IS NOT NULL AND t."segment" IS NOT NULL
    ORDER BY t."segment_embedding" OPERATOR(public.<->) $1 LIMIT 4) AS s
  WHERE abs(s.distance) < 'Infinity'
),
near AS (
  SELECT * FROM (
  SELECT * FROM near_1
  ORDER BY distance, store, document_name COLLATE "C", document_id, document_key COLLATE "C", segment_number LIMIT 3) AS b
),
ranked AS (
  SELECT *, NULL::float8 AS keyword_score, NULL::float8 AS score FROM near
),
threshold AS (
  SELECT CASE WHEN p.is_percentage THEN p.by_percentage ELSE p.most END AS distance, p.is_percentage
  FROM (SELECT b.*, coalesce(b.by_percentage < b.most, b.most IS NULL) AS is_percentage
    FROM (SELECT min(distance) + $3 / 100 * abs(min(distance)) AS by_percentage, $2 AS most FROM ranked) AS b) AS p
),
cited AS (
  SELECT *, row_number() OVER () AS place FROM (
    SELECT * FROM ranked
    WHERE distance <= (SELECT distance FROM threshold)
    ORDER BY distance, store, document_name COLLATE "C", document_id, document_key COLLATE "C", segment_number LIMIT 3) AS r
),
hit AS (
  SELECT * FROM cited
)
SELECT json_agg(json_build_object('segment', h.segment, 'distance', h.distance, 'document_name', h.document_name, 'document_id', coalesce(to_json(h.document_id), to_json(h.document_key)), 'rank', h.rank) ORDER BY h.place)::text AS hits, count(*) AS n,
  round((SELECT distance FROM threshold), 4)::text AS threshold, (SELECT is_percentage FROM threshold) AS is_percentage,
  ARRAY[(SELECT count(*) < 3 FROM near_1)]::boolean[] AS short, ARRAY[(SELECT count(*) = 4 AND max(distance) <= (SELECT max(distance) FROM near) FROM near_1)]::boolean[] AS tied, ARRAY[]::boolean[] AS missing
FROM (SELECT h.*, row_number() OVER (ORDER BY h.place) AS rank FROM hit AS h) AS h;

-- by meaning, two stores, one read without its index, hits
-- $1 vector
WITH near_1 AS (
  SELECT 1 AS store, s.row_key, s.document_name, s.document_id, s.document_key, s.segment_number, s.segment, s.metadata, round((s.distance + 0)::numeric, 4) AS distance
  FROM (SELECT t.ctid AS row_key, t."document_name"::text AS document_name, t."document_id"::bigint AS document_id, t."document_id"::text AS document_key, t."segment_number"::bigint AS segment_number, t."segment"::text AS segment, to_jsonb(t."metadata") AS metadata, t."segment_embedding" OPERATOR(public.<=>) $1 AS distance
    FROM public.handbook AS t WHERE t."segment_embedding" IS NOT NULL AND t."segment" IS NOT NULL
    ORDER BY t."segment_embedding" OPERATOR(public.<=>) $1 LIMIT 4) AS s
  WHERE abs(s.distance) < 'Infinity'
),
near_2 AS (
  SELECT 2 AS store, s.row_key, s.document_name, s.document_id, s.document_key, s.segment_number, s.segment, s.metadata, round((s.distance + 0)::numeric, 4) AS distance
  FROM (SELECT t.ctid AS row_key, coalesce(nullif(to_jsonb(t."metadata") ->> 'source', ''), nullif(to_jsonb(t."metadata") ->> 'file_path', ''), nullif(to_jsonb(t."metadata") ->> 'file_name', ''), nullif(to_jsonb(t."metadata") ->> 'url', ''), nullif(to_jsonb(t."metadata") ->> 'title', ''), 'kb.it''s') AS document_name, NULL::bigint AS document_id, t."key"::text AS document_key, NULL::bigint AS segment_number, t."segment"::text AS segment, to_jsonb(t."metadata") AS metadata, t."em""bedding" OPERATOR(public.<=>) $1::public.halfvec AS distance
    FROM kb."it's" AS t WHERE t."em""bedding" IS NOT NULL AND t."segment" IS NOT NULL
    ORDER BY round(((t."em""bedding" OPERATOR(public.<=>) $1::public.halfvec) + 0)::numeric, 4), (coalesce(nullif(to_jsonb(t."metadata") ->> 'source', ''), nullif(to_jsonb(t."metadata") ->> 'file_path', ''), nullif(to_jsonb(t."metadata") ->> 'file_name', ''), nullif(to_jsonb(t."metadata") ->> 'url', ''), nullif(to_jsonb(t."metadata") ->> 'title', ''), 'kb.it''s')) COLLATE "C", t."key"::text COLLATE "C", NULL::bigint LIMIT 3) AS s
  WHERE abs(s.distance) < 'Infinity'
),
near AS (
  SELECT * FROM (
  SELECT * FROM (
  SELECT * FROM near_1
  UNION ALL
  SELECT * FROM near_2) AS u
  ORDER BY distance, store, document_name COLLATE "C", document_id, document_key COLLATE "C", segment_number LIMIT 3) AS b
),
ranked AS (
  SELECT *, NULL::float8 AS keyword_score, NULL::float8 AS score FROM near
),
cited AS (
  SELECT *, row_number() OVER () AS place FROM (
    SELECT * FROM ranked
    ORDER BY distance, store, document_name COLLATE "C", document_id, document_key COLLATE "C", segment_number LIMIT 3) AS r
),
hit AS (
  SELECT * FROM cited
)
SELECT json_agg(json_build_object('segment', h.segment, 'distance', h.distance, 'document_name', h.document_name, 'vector_store', (ARRAY['public.handbook', 'kb.it''s'])[h.store], 'document_id', h.document_id, 'document_key', h.document_key, 'segment_number', h.segment_number, 'metadata', h.metadata, 'score', h.score, 'keyword_score', h.keyword_score) ORDER BY h.place)::text AS hits, count(*) AS n,
  round((SELECT max(distance) FROM cited), 4)::text AS threshold, false AS is_percentage, (SELECT min(distance) FROM ranked)::text AS nearest,
  ARRAY[(SELECT count(*) < 3 FROM near_1), (SELECT count(*) < 3 FROM near_2)]::boolean[] AS short, ARRAY[(SELECT count(*) = 4 AND max(distance) <= (SELECT max(distance) FROM near) FROM near_1), (SELECT count(*) = 3 AND max(distance) <= (SELECT max(distance) FROM near) FROM near_2)]::boolean[] AS tied, ARRAY[]::boolean[] AS missing
FROM (SELECT h.*, row_number() OVER (ORDER BY h.place) AS rank FROM hit AS h) AS h;

-- by meaning, by an index of smaller vectors
-- $1 vector
WITH near_1 AS (
  SELECT 1 AS store, s.row_key, s.document_name, s.document_id, s.document_key, s.segment_number, s.segment, s.metadata, round((s.distance + 0)::numeric, 4) AS distance
  FROM (SELECT t.ctid AS row_key, t."document_name"::text AS document_name, t."document_id"::bigint AS document_id, t."document_id"::text AS document_key, t."segment_number"::bigint AS segment_number, t."segment"::text AS segment, to_jsonb(t."metadata") AS metadata, t."segment_embedding" OPERATOR(public.<=>) $1 AS distance
    FROM (SELECT t.ctid, t."document_id", t."document_name", t."metadata", t."segment", t."segment_embedding", t."segment_number" FROM public.handbook AS t WHERE t."segment_embedding" IS NOT NULL AND t."segment" IS NOT NULL
      ORDER BY public.binary_quantize(t."segment_embedding")::bit(3) OPERATOR(public.<~>) public.binary_quantize($1::public.vector)::bit(3) LIMIT 400) AS t
    ORDER BY t."segment_embedding" OPERATOR(public.<=>) $1 LIMIT 4) AS s
  WHERE abs(s.distance) < 'Infinity'
),
near AS (
  SELECT * FROM (
  SELECT * FROM near_1
  ORDER BY distance, store, document_name COLLATE "C", document_id, document_key COLLATE "C", segment_number LIMIT 3) AS b
),
ranked AS (
  SELECT *, NULL::float8 AS keyword_score, NULL::float8 AS score FROM near
),
cited AS (
  SELECT *, row_number() OVER () AS place FROM (
    SELECT * FROM ranked
    ORDER BY distance, store, document_name COLLATE "C", document_id, document_key COLLATE "C", segment_number LIMIT 3) AS r
),
hit AS (
  SELECT * FROM cited
)
SELECT json_agg(json_build_object('segment', h.segment, 'distance', h.distance, 'document_name', h.document_name, 'vector_store', (ARRAY['public.handbook'])[h.store], 'document_id', h.document_id, 'document_key', h.document_key, 'segment_number', h.segment_number, 'metadata', h.metadata, 'score', h.score, 'keyword_score', h.keyword_score) ORDER BY h.place)::text AS hits, count(*) AS n,
  round((SELECT max(distance) FROM cited), 4)::text AS threshold, false AS is_percentage, (SELECT min(distance) FROM ranked)::text AS nearest,
  ARRAY[(SELECT count(*) < 3 FROM near_1)]::boolean[] AS short, ARRAY[(SELECT count(*) = 4 AND max(distance) <= (SELECT max(distance) FROM near) FROM near_1)]::boolean[] AS tied, ARRAY[]::boolean[] AS missing
FROM (SELECT h.*, row_number() OVER (ORDER BY h.place) AS rank FROM hit AS h) AS h;

-- by meaning, widened, citations
-- $1 vector
WITH near_1 AS (
  SELECT 1 AS store, s.row_key, s.document_name, s.document_id, s.document_key, s.segment_number, s.segment, s.metadata, round((s.distance + 0)::numeric, 4) AS distance
  FROM (SELECT t.ctid AS row_key, t."document_name"::text AS document_name, t."document_id"::bigint AS document_id, t."document_id"::text AS document_key, t."segment_number"::bigint AS segment_number, t."segment"::text AS segment, to_jsonb(t."metadata") AS metadata, t."segment_embedding" OPERATOR(public.<=>) $1 AS distance
    FROM public.handbook AS t WHERE t."segment_embedding" IS NOT NULL AND t."segment" IS NOT NULL
    ORDER BY t."segment_embedding" OPERATOR(public.<=>) $1 LIMIT 4) AS s
  WHERE abs(s.distance) < 'Infinity'
),
near_2 AS (
  SELECT 2 AS store, s.row_key, s.document_name, s.document_id, s.document_key, s.segment_number, s.segment, s.metadata, round((s.distance + 0)::numeric, 4) AS distance
  FROM (SELECT t.ctid AS row_key, coalesce(nullif(to_jsonb(t."metadata") ->> 'source', ''), nullif(to_jsonb(t."metadata") ->> 'file_path', ''), nullif(to_jsonb(t."metadata") ->> 'file_name', ''), nullif(to_jsonb(t."metadata") ->> 'url', ''), nullif(to_jsonb(t."metadata") ->> 'title', ''), 'kb.it''s') AS document_name, NULL::bigint AS document_id, t."key"::text AS document_key, NULL::bigint AS segment_number, t."segment"::text AS segment, to_jsonb(t."metadata") AS metadata, t."em""bedding" OPERATOR(public.<=>) $1::public.halfvec AS distance
    FROM kb."it's" AS t WHERE t."em""bedding" IS NOT NULL AND t."segment" IS NOT NULL
    ORDER BY t."em""bedding" OPERATOR(public.<=>) $1::public.halfvec LIMIT 4) AS s
  WHERE abs(s.distance) < 'Infinity'
),
near AS (
  SELECT * FROM (
  SELECT * FROM (
  SELECT * FROM near_1
  UNION ALL
  SELECT * FROM near_2) AS u
  ORDER BY distance, store, document_name COLLATE "C", document_id, document_key COLLATE "C", segment_number LIMIT 3) AS b
),
ranked AS (
  SELECT *, NULL::float8 AS keyword_score, NULL::float8 AS score FROM near
),
cited AS (
  SELECT *, row_number() OVER () AS place FROM (
    SELECT * FROM ranked
    ORDER BY distance, store, document_name COLLATE "C", document_id, document_key COLLATE "C", segment_number LIMIT 3) AS r
),
range AS (
  SELECT store, document_key, min(segment_number) - 1 AS first, max(segment_number) + 1 AS last, min(place) AS best
  FROM (SELECT d.*, count(*) FILTER (WHERE opens) OVER (PARTITION BY store, document_key ORDER BY segment_number) AS island
    FROM (SELECT store, document_key, segment_number, place,
        coalesce(segment_number > 3 + max(segment_number) OVER (PARTITION BY store, document_key ORDER BY segment_number ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING), true) AS opens
      FROM cited WHERE store IN (1) AND segment_number IS NOT NULL AND document_key IS NOT NULL) AS d) AS i
  GROUP BY store, document_key, island
),
widened AS (
  SELECT best, ml_rag._joined(segment ORDER BY segment_number) AS segment, min(segment_number) AS first_segment, max(segment_number) AS last_segment FROM (
    SELECT r.best, t."segment_number"::bigint AS segment_number, t."segment"::text AS segment
    FROM range AS r JOIN public.handbook AS t ON r.store = 1 AND t."document_id" = r.document_key::bigint AND t."segment_number" BETWEEN r.first AND r.last
    WHERE t."segment" IS NOT NULL) AS n
  GROUP BY best
),
hit AS (
  SELECT c.store, c.document_name, c.document_id, c.document_key, c.segment_number, c.distance, c.metadata, c.keyword_score, c.score, c.place, coalesce(w.segment, c.segment) AS segment, w.first_segment, w.last_segment
  FROM (SELECT * FROM cited) AS c
  LEFT JOIN range AS r ON r.store = c.store AND r.document_key = c.document_key
    AND c.segment_number BETWEEN r.first AND r.last
  LEFT JOIN widened AS w ON w.best = r.best
  WHERE r.best IS NULL OR r.best = c.place
)
SELECT json_agg(json_build_object('segment', h.segment, 'distance', h.distance, 'document_name', h.document_name, 'segment_range', json_build_array(coalesce(h.first_segment, h.segment_number), coalesce(h.last_segment, h.segment_number))) ORDER BY h.place)::text AS hits, count(*) AS n,
  round((SELECT max(distance) FROM cited), 4)::text AS threshold, false AS is_percentage,
  ARRAY[(SELECT count(*) < 3 FROM near_1), (SELECT count(*) < 3 FROM near_2)]::boolean[] AS short, ARRAY[(SELECT count(*) = 4 AND max(distance) <= (SELECT max(distance) FROM near) FROM near_1), (SELECT count(*) = 4 AND max(distance) <= (SELECT max(distance) FROM near) FROM near_2)]::boolean[] AS tied, ARRAY[]::boolean[] AS missing
FROM (SELECT h.*, row_number() OVER (ORDER BY h.place) AS rank FROM hit AS h) AS h;

-- by words, without a vector
-- $1 keys_1, $2 scores_1, $3 keyword_limit, $4 candidates_1
WITH words_1 AS (
  SELECT 1 AS store, t.ctid AS row_key, t."document_name"::text AS document_name, t."document_id"::bigint AS document_id, t."document_id"::text AS document_key, t."segment_number"::bigint AS segment_number, w.score, NULL::numeric AS distance
  FROM unnest($1, $2) AS w (key, score) JOIN ONLY public.handbook AS t ON t."document_id" = (w.key::text[])[1]::bigint AND t."segment_number" = (w.key::text[])[2]::integer
  WHERE t."segment" IS NOT NULL
),
words AS (
  SELECT * FROM (
  SELECT * FROM words_1
  ORDER BY score DESC, store, document_name COLLATE "C", document_id, document_key COLLATE "C", segment_number LIMIT 3) AS b WHERE score >= $3
),
ranked AS (
  SELECT w.store, w.row_key, w.document_name, w.document_id, w.document_key, w.segment_number, CASE WHEN abs(w.distance) < 'Infinity' THEN w.distance END AS distance, w.score AS keyword_score, NULL::float8 AS score FROM words AS w
),
cited AS (
  SELECT *, row_number() OVER () AS place FROM (
    SELECT * FROM ranked
    ORDER BY keyword_score DESC, store, document_name COLLATE "C", document_id, document_key COLLATE "C", segment_number LIMIT 3) AS r
),
hit AS (
  SELECT c.*, t."segment"::text AS segment, to_jsonb(t."metadata") AS metadata FROM cited AS c JOIN public.handbook AS t ON c.store = 1 AND t.ctid = c.row_key
)
SELECT json_agg(json_build_object('segment', h.segment, 'distance', h.distance, 'document_name', h.document_name, 'vector_store', (ARRAY['public.handbook'])[h.store], 'document_id', h.document_id, 'document_key', h.document_key, 'segment_number', h.segment_number, 'metadata', h.metadata, 'score', h.score, 'keyword_score', h.keyword_score) ORDER BY h.place)::text AS hits, count(*) AS n,
  round((SELECT max(distance) FROM cited), 4)::text AS threshold, false AS is_percentage, (SELECT min(distance) FROM ranked)::text AS nearest,
  ARRAY[]::boolean[] AS short, ARRAY[]::boolean[] AS tied, ARRAY[(SELECT count(*) < 3 AND cardinality($1) >= $4 FROM words_1)]::boolean[] AS missing
FROM (SELECT h.*, row_number() OVER (ORDER BY h.place) AS rank FROM hit AS h) AS h;

-- hybrid, weighted by how clear the arms are
-- $1 vector, $2 keys_1, $3 scores_1, $4 candidates_1
WITH near_1 AS (
  SELECT 1 AS store, s.row_key, s.document_name, s.document_id, s.document_key, s.segment_number, round((s.distance + 0)::numeric, 4) AS distance
  FROM (SELECT t.ctid AS row_key, t."document_name"::text AS document_name, t."document_id"::bigint AS document_id, t."document_id"::text AS document_key, t."segment_number"::bigint AS segment_number, t."segment_embedding" OPERATOR(public.<=>) $1 AS distance
    FROM public.handbook AS t WHERE t."segment_embedding" IS NOT NULL AND t."segment" IS NOT NULL
    ORDER BY t."segment_embedding" OPERATOR(public.<=>) $1 LIMIT 104) AS s
  WHERE abs(s.distance) < 'Infinity'
),
near AS (
  SELECT *, (1 - distance)::float8 AS similarity FROM (
  SELECT * FROM near_1
  ORDER BY distance, store, document_name COLLATE "C", document_id, document_key COLLATE "C", segment_number LIMIT 100) AS b
),
words_1 AS (
  SELECT 1 AS store, t.ctid AS row_key, t."document_name"::text AS document_name, t."document_id"::bigint AS document_id, t."document_id"::text AS document_key, t."segment_number"::bigint AS segment_number, w.score, round(((t."segment_embedding" OPERATOR(public.<=>) $1) + 0)::numeric, 4) AS distance
  FROM unnest($2, $3) AS w (key, score) JOIN ONLY public.handbook AS t ON t."document_id" = (w.key::text[])[1]::bigint AND t."segment_number" = (w.key::text[])[2]::integer
  WHERE t."segment" IS NOT NULL
),
words AS (
  SELECT * FROM (
  SELECT * FROM words_1
  ORDER BY score DESC, store, document_name COLLATE "C", document_id, document_key COLLATE "C", segment_number LIMIT 100) AS b
),
strength AS MATERIALIZED (
  SELECT n.best AS near_best, w.best AS words_best,
    coalesce((SELECT 1 - sum(greatest(b.v - n.nothing, 0) / (n.best - n.nothing)) / 30
      FROM (SELECT v FROM (SELECT similarity AS v FROM near) AS v ORDER BY v DESC LIMIT 30) AS b
      WHERE n.best > n.nothing), 0) AS near, coalesce((SELECT 1 - sum(greatest(b.v - w.nothing, 0) / (w.best - w.nothing)) / 30
      FROM (SELECT v FROM (SELECT score AS v FROM words) AS v ORDER BY v DESC LIMIT 30) AS b
      WHERE w.best > w.nothing), 0) AS words
  FROM (SELECT max(similarity) AS best, min(similarity) AS nothing FROM near) AS n,
    (SELECT max(score) AS best, 0::float8 AS nothing FROM words) AS w
),
weight AS MATERIALIZED (
  SELECT s.near_best, s.words_best, s.share AS near, 1 - s.share AS words
  FROM (SELECT s.*, CASE WHEN 0.6::float8 * s.near + 0.4::float8 * s.words > 0 THEN 0.6::float8 * s.near / (0.6::float8 * s.near + 0.4::float8 * s.words)
    ELSE 0.6::float8 / 1.0::float8 END AS share
    FROM strength AS s) AS s
),
ranked AS (
  SELECT b.*, CASE WHEN a.near_best > 0 AND a.near > 0
      THEN a.near * least(1, greatest(0, coalesce(b.similarity, (1 - b.distance)::float8)) / a.near_best) ELSE 0 END
    + coalesce(CASE WHEN a.words_best > 0 THEN a.words * b.keyword_score / a.words_best END, 0) AS score FROM (
    SELECT store, row_key, coalesce(n.document_name, w.document_name) AS document_name, coalesce(n.document_id, w.document_id) AS document_id, coalesce(n.document_key, w.document_key) AS document_key, coalesce(n.segment_number, w.segment_number) AS segment_number, coalesce(n.distance, CASE WHEN abs(w.distance) < 'Infinity' THEN w.distance END) AS distance,
      w.score AS keyword_score, n.similarity
    FROM near AS n FULL JOIN words AS w USING (store, row_key)) AS b, weight AS a
),
cited AS (
  SELECT *, row_number() OVER () AS place FROM (
    SELECT * FROM ranked
    ORDER BY score DESC, distance, store, document_name COLLATE "C", document_id, document_key COLLATE "C", segment_number LIMIT 3) AS r
),
hit AS (
  SELECT c.*, t."segment"::text AS segment, to_jsonb(t."metadata") AS metadata FROM cited AS c JOIN public.handbook AS t ON c.store = 1 AND t.ctid = c.row_key
)
SELECT json_agg(json_build_object('segment', h.segment, 'distance', h.distance, 'document_name', h.document_name) ORDER BY h.place)::text AS hits, count(*) AS n,
  round((SELECT max(distance) FROM cited), 4)::text AS threshold, false AS is_percentage,
  ARRAY[(SELECT count(*) < 100 FROM near_1)]::boolean[] AS short, ARRAY[(SELECT count(*) = 104 AND max(distance) <= (SELECT max(distance) FROM near) FROM near_1)]::boolean[] AS tied, ARRAY[(SELECT count(*) < 100 AND cardinality($2) >= $4 FROM words_1)]::boolean[] AS missing
FROM (SELECT h.*, row_number() OVER (ORDER BY h.place) AS rank FROM hit AS h) AS h;

-- hybrid, weighted
-- $1 vector, $2 keys_1, $3 scores_1, $4 near_weight, $5 words_weight, $6 candidates_1
WITH near_1 AS (
  SELECT 1 AS store, s.row_key, s.document_name, s.document_id, s.document_key, s.segment_number, round((s.distance + 0)::numeric, 4) AS distance
  FROM (SELECT t.ctid AS row_key, t."document_name"::text AS document_name, t."document_id"::bigint AS document_id, t."document_id"::text AS document_key, t."segment_number"::bigint AS segment_number, t."segment_embedding" OPERATOR(public.<->) $1 AS distance
    FROM public.handbook AS t WHERE t."segment_embedding" IS NOT NULL AND t."segment" IS NOT NULL
    ORDER BY t."segment_embedding" OPERATOR(public.<->) $1 LIMIT 104) AS s
  WHERE abs(s.distance) < 'Infinity'
),
near AS (
  SELECT *, (1 / (1 + distance))::float8 AS similarity FROM (
  SELECT * FROM near_1
  ORDER BY distance, store, document_name COLLATE "C", document_id, document_key COLLATE "C", segment_number LIMIT 100) AS b
),
words_1 AS (
  SELECT 1 AS store, t.ctid AS row_key, t."document_name"::text AS document_name, t."document_id"::bigint AS document_id, t."document_id"::text AS document_key, t."segment_number"::bigint AS segment_number, w.score, round(((t."segment_embedding" OPERATOR(public.<->) $1) + 0)::numeric, 4) AS distance
  FROM unnest($2, $3) AS w (key, score) JOIN ONLY public.handbook AS t ON t."document_id" = (w.key::text[])[1]::bigint AND t."segment_number" = (w.key::text[])[2]::integer
  WHERE t."segment" IS NOT NULL
),
words AS (
  SELECT * FROM (
  SELECT * FROM words_1
  ORDER BY score DESC, store, document_name COLLATE "C", document_id, document_key COLLATE "C", segment_number LIMIT 100) AS b
),
weight AS MATERIALIZED (
  SELECT (SELECT max(similarity) FROM near) AS near_best, (SELECT max(score) FROM words) AS words_best, $4 AS near, $5 AS words
),
ranked AS (
  SELECT b.*, CASE WHEN a.near_best > 0 AND a.near > 0
      THEN a.near * least(1, greatest(0, coalesce(b.similarity, (1 / (1 + b.distance))::float8)) / a.near_best) ELSE 0 END
    + coalesce(CASE WHEN a.words_best > 0 THEN a.words * b.keyword_score / a.words_best END, 0) AS score FROM (
    SELECT store, row_key, coalesce(n.document_name, w.document_name) AS document_name, coalesce(n.document_id, w.document_id) AS document_id, coalesce(n.document_key, w.document_key) AS document_key, coalesce(n.segment_number, w.segment_number) AS segment_number, coalesce(n.distance, CASE WHEN abs(w.distance) < 'Infinity' THEN w.distance END) AS distance,
      w.score AS keyword_score, n.similarity
    FROM near AS n FULL JOIN words AS w USING (store, row_key)) AS b, weight AS a
),
cited AS (
  SELECT *, row_number() OVER () AS place FROM (
    SELECT * FROM ranked
    ORDER BY score DESC, distance, store, document_name COLLATE "C", document_id, document_key COLLATE "C", segment_number LIMIT 3) AS r
),
hit AS (
  SELECT c.*, t."segment"::text AS segment, to_jsonb(t."metadata") AS metadata FROM cited AS c JOIN public.handbook AS t ON c.store = 1 AND t.ctid = c.row_key
)
SELECT json_agg(json_build_object('segment', h.segment, 'distance', h.distance, 'document_name', h.document_name) ORDER BY h.place)::text AS hits, count(*) AS n,
  round((SELECT max(distance) FROM cited), 4)::text AS threshold, false AS is_percentage,
  ARRAY[(SELECT count(*) < 100 FROM near_1)]::boolean[] AS short, ARRAY[(SELECT count(*) = 104 AND max(distance) <= (SELECT max(distance) FROM near) FROM near_1)]::boolean[] AS tied, ARRAY[(SELECT count(*) < 100 AND cardinality($2) >= $6 FROM words_1)]::boolean[] AS missing
FROM (SELECT h.*, row_number() OVER (ORDER BY h.place) AS rank FROM hit AS h) AS h;

-- hybrid, by ranks, widened
-- $1 vector, $2 keys_1, $3 scores_1, $4 rrf_k
WITH near_1 AS (
  SELECT 1 AS store, s.row_key, s.document_name, s.document_id, s.document_key, s.segment_number, round((s.distance + 0)::numeric, 4) AS distance
  FROM (SELECT t.ctid AS row_key, t."document_name"::text AS document_name, t."document_id"::bigint AS document_id, t."document_id"::text AS document_key, t."segment_number"::bigint AS segment_number, t."segment_embedding" OPERATOR(public.<=>) $1 AS distance
    FROM public.handbook AS t WHERE t."segment_embedding" IS NOT NULL AND t."segment" IS NOT NULL
    ORDER BY t."segment_embedding" OPERATOR(public.<=>) $1 LIMIT 104) AS s
  WHERE abs(s.distance) < 'Infinity'
),
near AS (
  SELECT *, row_number() OVER () AS place FROM (
  SELECT * FROM near_1
  ORDER BY distance, store, document_name COLLATE "C", document_id, document_key COLLATE "C", segment_number LIMIT 100) AS b
),
words_1 AS (
  SELECT 1 AS store, t.ctid AS row_key, t."document_name"::text AS document_name, t."document_id"::bigint AS document_id, t."document_id"::text AS document_key, t."segment_number"::bigint AS segment_number, w.score, round(((t."segment_embedding" OPERATOR(public.<=>) $1) + 0)::numeric, 4) AS distance
  FROM unnest($2, $3) AS w (key, score) JOIN ONLY public.handbook AS t ON t."document_id" = (w.key::text[])[1]::bigint AND t."segment_number" = (w.key::text[])[2]::integer
  WHERE t."segment" IS NOT NULL
),
words AS (
  SELECT *, row_number() OVER () AS place FROM (
  SELECT * FROM words_1
  ORDER BY score DESC, store, document_name COLLATE "C", document_id, document_key COLLATE "C", segment_number LIMIT 100) AS b
),
ranked AS (
  SELECT b.*, (coalesce(1 / ($4 + b.near), 0) + coalesce(1 / ($4 + b.words), 0)) * ($4 + 1) / 2 AS score FROM (
    SELECT store, row_key, coalesce(n.document_name, w.document_name) AS document_name, coalesce(n.document_id, w.document_id) AS document_id, coalesce(n.document_key, w.document_key) AS document_key, coalesce(n.segment_number, w.segment_number) AS segment_number, coalesce(n.distance, CASE WHEN abs(w.distance) < 'Infinity' THEN w.distance END) AS distance,
      w.score AS keyword_score, n.place AS near, w.place AS words
    FROM near AS n FULL JOIN words AS w USING (store, row_key)) AS b
),
cited AS (
  SELECT *, row_number() OVER () AS place FROM (
    SELECT * FROM ranked
    ORDER BY score DESC, distance, store, document_name COLLATE "C", document_id, document_key COLLATE "C", segment_number LIMIT 3) AS r
),
range AS (
  SELECT store, document_key, min(segment_number) - 2 AS first, max(segment_number) + 2 AS last, min(place) AS best
  FROM (SELECT d.*, count(*) FILTER (WHERE opens) OVER (PARTITION BY store, document_key ORDER BY segment_number) AS island
    FROM (SELECT store, document_key, segment_number, place,
        coalesce(segment_number > 5 + max(segment_number) OVER (PARTITION BY store, document_key ORDER BY segment_number ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING), true) AS opens
      FROM cited WHERE store IN (1) AND segment_number IS NOT NULL AND document_key IS NOT NULL) AS d) AS i
  GROUP BY store, document_key, island
),
widened AS (
  SELECT best, ml_rag._joined(segment ORDER BY segment_number) AS segment, min(segment_number) AS first_segment, max(segment_number) AS last_segment FROM (
    SELECT r.best, t."segment_number"::bigint AS segment_number, t."segment"::text AS segment
    FROM range AS r JOIN public.handbook AS t ON r.store = 1 AND t."document_id" = r.document_key::bigint AND t."segment_number" BETWEEN r.first AND r.last
    WHERE t."segment" IS NOT NULL) AS n
  GROUP BY best
),
hit AS (
  SELECT c.store, c.document_name, c.document_id, c.document_key, c.segment_number, c.distance, c.metadata, c.keyword_score, c.score, c.place, coalesce(w.segment, c.segment) AS segment, w.first_segment, w.last_segment
  FROM (SELECT c.*, t."segment"::text AS segment, to_jsonb(t."metadata") AS metadata FROM cited AS c JOIN public.handbook AS t ON c.store = 1 AND t.ctid = c.row_key) AS c
  LEFT JOIN range AS r ON r.store = c.store AND r.document_key = c.document_key
    AND c.segment_number BETWEEN r.first AND r.last
  LEFT JOIN widened AS w ON w.best = r.best
  WHERE r.best IS NULL OR r.best = c.place
)
SELECT row_number() OVER (ORDER BY h.place)::integer AS rank, (ARRAY['public.handbook'])[h.store] AS vector_store, h.document_name, h.document_id, h.segment_number::integer AS segment_number, h.segment, h.distance, h.metadata, h.keyword_score, h.score, NULL::float8 AS rerank_score
FROM hit AS h ORDER BY h.place;
