-- by meaning, as rows
-- $1 vector
WITH semantic_found AS (
  SELECT 1 AS store, s.row_key, s.document_name, s.document::bigint AS document_id, s.document::text AS document_key, s.segment_number, s.segment, s.metadata, round((s.distance + 0)::numeric, 4) AS distance
  FROM (SELECT t.ctid AS row_key, t."document_name"::text AS document_name, t."document_id" AS document, t."segment_number"::bigint AS segment_number, t."segment"::text AS segment, ml_rag._as_jsonb(t."metadata") AS metadata, t."segment_embedding" OPERATOR(public.<=>) $1 AS distance
    FROM ONLY public.handbook AS t WHERE t."segment_embedding" IS NOT NULL AND t."segment" IS NOT NULL
    ORDER BY t."segment_embedding" OPERATOR(public.<=>) $1 LIMIT 4) AS s
  WHERE abs(s.distance) < 'Infinity'
),
semantic AS (
  SELECT *, row_number() OVER () AS place FROM (
  SELECT * FROM semantic_found
  ORDER BY distance, store, document_name COLLATE "C", document_id, document_key COLLATE "C", segment_number LIMIT 3) AS b
),
ranked AS (
  SELECT store, row_key, document_name, document_id, document_key, segment_number, segment, metadata, distance, NULL::float8 AS keyword_score, NULL::float8 AS score, place FROM semantic
),
cited AS (
  SELECT * FROM ranked
),
hit AS (
  SELECT * FROM cited
)
SELECT row_number() OVER (ORDER BY h.place)::integer AS rank, (ARRAY['public.handbook'])[h.store] AS vector_store, h.document_name, h.document_id, CASE WHEN h.segment_number BETWEEN -2147483648 AND 2147483647 THEN h.segment_number END::integer AS segment_number, h.segment, h.distance, h.metadata, h.keyword_score, h.score, NULL::float8 AS rerank_score
FROM hit AS h ORDER BY h.place;

-- by meaning, a limit, as citations with fields
-- $1 vector, $2 max_distance, $3 percentage_distance
WITH semantic_found AS (
  SELECT 1 AS store, s.row_key, s.document_name, s.document::bigint AS document_id, s.document::text AS document_key, s.segment_number, s.segment, s.metadata, round((s.distance + 0)::numeric, 4) AS distance
  FROM (SELECT t.ctid AS row_key, t."document_name"::text AS document_name, t."document_id" AS document, t."segment_number"::bigint AS segment_number, t."segment"::text AS segment, ml_rag._as_jsonb(t."metadata") AS metadata, t."segment_embedding" OPERATOR(public.<->) $1 AS distance
    FROM ONLY public.handbook AS t WHERE t."segment_embedding" IS NOT NULL AND t."segment" IS NOT NULL
    ORDER BY t."segment_embedding" OPERATOR(public.<->) $1 LIMIT 4) AS s
  WHERE abs(s.distance) < 'Infinity'
),
semantic AS (
  SELECT *, row_number() OVER () AS place FROM (
  SELECT * FROM semantic_found
  ORDER BY distance, store, document_name COLLATE "C", document_id, document_key COLLATE "C", segment_number LIMIT 3) AS b
),
ranked AS (
  SELECT store, row_key, document_name, document_id, document_key, segment_number, segment, metadata, distance, NULL::float8 AS keyword_score, NULL::float8 AS score, place FROM semantic
),
threshold AS (
  SELECT CASE WHEN p.is_percentage THEN p.by_percentage ELSE p.most END AS distance, p.is_percentage
  FROM (SELECT b.*, coalesce(b.by_percentage < b.most, b.most IS NULL) AS is_percentage
    FROM (SELECT min(distance) + $3 / 100 * abs(min(distance)) AS by_percentage, $2 AS most FROM ranked) AS b) AS p
),
cited AS (
  SELECT * FROM ranked
    WHERE distance <= (SELECT distance FROM threshold)
),
hit AS (
  SELECT * FROM cited
)
SELECT json_agg(json_build_object('segment', h.segment, 'distance', h.distance, 'document_name', h.document_name, 'document_id', coalesce(to_json(h.document_id), to_json(h.document_key)), 'rank', h.rank) ORDER BY h.place)::text AS hits, count(*) AS n,
  round((SELECT distance FROM threshold), 4)::text AS threshold, (SELECT is_percentage FROM threshold) AS is_percentage,
  EXISTS (SELECT FROM ranked) AS has_candidates, (SELECT min(distance) FROM ranked)::text AS nearest, (SELECT distance FROM threshold)::text AS "limit",
  (ARRAY[(SELECT CASE WHEN coalesce(n.n, 0) < 3 THEN CASE WHEN w.most < 0 THEN 'missing' WHEN w.most > 0 THEN 'short' END WHEN n.n = w.most AND n.farthest <= (SELECT max(distance) FROM semantic) THEN 'tied' END FROM (SELECT count(*) AS n, max(distance) AS farthest FROM semantic_found) AS n, (SELECT 4 AS most) AS w)])::text[] AS checks
FROM (SELECT h.*, row_number() OVER (ORDER BY h.place) AS rank FROM hit AS h) AS h;

-- by meaning, two stores, one read without its index, hits
-- $1 vector
WITH semantic_found AS (
  SELECT 1 AS store, s.row_key, s.document_name, s.document::bigint AS document_id, s.document::text AS document_key, s.segment_number, s.segment, s.metadata, round((s.distance + 0)::numeric, 4) AS distance
  FROM (SELECT t.ctid AS row_key, t."document_name"::text AS document_name, t."document_id" AS document, t."segment_number"::bigint AS segment_number, t."segment"::text AS segment, ml_rag._as_jsonb(t."metadata") AS metadata, t."segment_embedding" OPERATOR(public.<=>) $1 AS distance
    FROM ONLY public.handbook AS t WHERE t."segment_embedding" IS NOT NULL AND t."segment" IS NOT NULL
    ORDER BY t."segment_embedding" OPERATOR(public.<=>) $1 LIMIT 4) AS s
  WHERE abs(s.distance) < 'Infinity'
  UNION ALL
  SELECT 2 AS store, s.row_key, s.document_name, NULL::bigint AS document_id, s.document::text AS document_key, s.segment_number, s.segment, s.metadata, round((s.distance + 0)::numeric, 4) AS distance
  FROM (SELECT t.ctid AS row_key, coalesce(nullif(ml_rag._as_jsonb(t."metadata") ->> 'source', ''), nullif(ml_rag._as_jsonb(t."metadata") ->> 'file_path', ''), nullif(ml_rag._as_jsonb(t."metadata") ->> 'file_name', ''), nullif(ml_rag._as_jsonb(t."metadata") ->> 'url', ''), nullif(ml_rag._as_jsonb(t."metadata") ->> 'title', ''), 'kb.it''s') AS document_name, t."key" AS document, NULL::bigint AS segment_number, t."segment"::text AS segment, ml_rag._as_jsonb(t."metadata") AS metadata, t."em""bedding" OPERATOR(public.<=>) $1::public.halfvec AS distance
    FROM ONLY kb."it's" AS t WHERE t."em""bedding" IS NOT NULL AND t."segment" IS NOT NULL
    ORDER BY round(((t."em""bedding" OPERATOR(public.<=>) $1::public.halfvec) + 0)::numeric, 4), (coalesce(nullif(ml_rag._as_jsonb(t."metadata") ->> 'source', ''), nullif(ml_rag._as_jsonb(t."metadata") ->> 'file_path', ''), nullif(ml_rag._as_jsonb(t."metadata") ->> 'file_name', ''), nullif(ml_rag._as_jsonb(t."metadata") ->> 'url', ''), nullif(ml_rag._as_jsonb(t."metadata") ->> 'title', ''), 'kb.it''s')) COLLATE "C", t."key"::text COLLATE "C", NULL::bigint LIMIT 3) AS s
  WHERE abs(s.distance) < 'Infinity'
),
semantic AS (
  SELECT *, row_number() OVER () AS place FROM (
  SELECT * FROM semantic_found
  ORDER BY distance, store, document_name COLLATE "C", document_id, document_key COLLATE "C", segment_number LIMIT 3) AS b
),
ranked AS (
  SELECT store, row_key, document_name, document_id, document_key, segment_number, segment, metadata, distance, NULL::float8 AS keyword_score, NULL::float8 AS score, place FROM semantic
),
cited AS (
  SELECT * FROM ranked
),
hit AS (
  SELECT * FROM cited
)
SELECT json_agg(json_build_object('segment', h.segment, 'distance', h.distance, 'document_name', h.document_name, 'vector_store', (ARRAY['public.handbook', 'kb.it''s'])[h.store], 'document_id', h.document_id, 'document_key', h.document_key, 'segment_number', h.segment_number, 'metadata', h.metadata, 'score', h.score, 'keyword_score', h.keyword_score) ORDER BY h.place)::text AS hits, count(*) AS n,
  round(max(h.distance), 4)::text AS threshold, false AS is_percentage,
  EXISTS (SELECT FROM ranked) AS has_candidates, (SELECT min(distance) FROM ranked)::text AS nearest, NULL::text AS "limit",
  (ARRAY(SELECT CASE WHEN coalesce(n.n, 0) < 3 THEN CASE WHEN w.most < 0 THEN 'missing' WHEN w.most > 0 THEN 'short' END WHEN n.n = w.most AND n.farthest <= (SELECT max(distance) FROM semantic) THEN 'tied' END FROM unnest(ARRAY[1, 2], ARRAY[4, 3]) AS w (store, most) LEFT JOIN (SELECT store, count(*) AS n, max(distance) AS farthest FROM semantic_found GROUP BY store) AS n USING (store) ORDER BY store))::text[] AS checks
FROM (SELECT h.*, row_number() OVER (ORDER BY h.place) AS rank FROM hit AS h) AS h;

-- by meaning, by an index of smaller vectors
-- $1 vector
WITH semantic_found AS (
  SELECT 1 AS store, s.row_key, s.document_name, s.document::bigint AS document_id, s.document::text AS document_key, s.segment_number, s.segment, s.metadata, round((s.distance + 0)::numeric, 4) AS distance
  FROM (SELECT t.ctid AS row_key, t."document_name"::text AS document_name, t."document_id" AS document, t."segment_number"::bigint AS segment_number, t."segment"::text AS segment, ml_rag._as_jsonb(t."metadata") AS metadata, t."segment_embedding" OPERATOR(public.<=>) $1 AS distance
    FROM (SELECT t.ctid, t."document_id", t."document_name", t."metadata", t."segment", t."segment_embedding", t."segment_number" FROM ONLY public.handbook AS t WHERE t."segment_embedding" IS NOT NULL AND t."segment" IS NOT NULL
      ORDER BY public.binary_quantize(t."segment_embedding")::bit(3) OPERATOR(public.<~>) public.binary_quantize($1::public.vector)::bit(3) LIMIT 400) AS t
    ORDER BY t."segment_embedding" OPERATOR(public.<=>) $1 LIMIT 4) AS s
  WHERE abs(s.distance) < 'Infinity'
),
semantic AS (
  SELECT *, row_number() OVER () AS place FROM (
  SELECT * FROM semantic_found
  ORDER BY distance, store, document_name COLLATE "C", document_id, document_key COLLATE "C", segment_number LIMIT 3) AS b
),
ranked AS (
  SELECT store, row_key, document_name, document_id, document_key, segment_number, segment, metadata, distance, NULL::float8 AS keyword_score, NULL::float8 AS score, place FROM semantic
),
cited AS (
  SELECT * FROM ranked
),
hit AS (
  SELECT * FROM cited
)
SELECT json_agg(json_build_object('segment', h.segment, 'distance', h.distance, 'document_name', h.document_name, 'vector_store', (ARRAY['public.handbook'])[h.store], 'document_id', h.document_id, 'document_key', h.document_key, 'segment_number', h.segment_number, 'metadata', h.metadata, 'score', h.score, 'keyword_score', h.keyword_score) ORDER BY h.place)::text AS hits, count(*) AS n,
  round(max(h.distance), 4)::text AS threshold, false AS is_percentage,
  EXISTS (SELECT FROM ranked) AS has_candidates, (SELECT min(distance) FROM ranked)::text AS nearest, NULL::text AS "limit",
  (ARRAY[(SELECT CASE WHEN coalesce(n.n, 0) < 3 THEN CASE WHEN w.most < 0 THEN 'missing' WHEN w.most > 0 THEN 'short' END WHEN n.n = w.most AND n.farthest <= (SELECT max(distance) FROM semantic) THEN 'tied' END FROM (SELECT count(*) AS n, max(distance) AS farthest FROM semantic_found) AS n, (SELECT 4 AS most) AS w)])::text[] AS checks
FROM (SELECT h.*, row_number() OVER (ORDER BY h.place) AS rank FROM hit AS h) AS h;

-- by meaning, widened, citations
-- $1 vector
WITH semantic_found AS (
  SELECT 1 AS store, s.row_key, s.document_name, s.document::bigint AS document_id, s.document::text AS document_key, s.segment_number, s.segment, s.metadata, round((s.distance + 0)::numeric, 4) AS distance
  FROM (SELECT t.ctid AS row_key, t."document_name"::text AS document_name, t."document_id" AS document, t."segment_number"::bigint AS segment_number, t."segment"::text AS segment, ml_rag._as_jsonb(t."metadata") AS metadata, t."segment_embedding" OPERATOR(public.<=>) $1 AS distance
    FROM ONLY public.handbook AS t WHERE t."segment_embedding" IS NOT NULL AND t."segment" IS NOT NULL
    ORDER BY t."segment_embedding" OPERATOR(public.<=>) $1 LIMIT 4) AS s
  WHERE abs(s.distance) < 'Infinity'
  UNION ALL
  SELECT 2 AS store, s.row_key, s.document_name, NULL::bigint AS document_id, s.document::text AS document_key, s.segment_number, s.segment, s.metadata, round((s.distance + 0)::numeric, 4) AS distance
  FROM (SELECT t.ctid AS row_key, coalesce(nullif(ml_rag._as_jsonb(t."metadata") ->> 'source', ''), nullif(ml_rag._as_jsonb(t."metadata") ->> 'file_path', ''), nullif(ml_rag._as_jsonb(t."metadata") ->> 'file_name', ''), nullif(ml_rag._as_jsonb(t."metadata") ->> 'url', ''), nullif(ml_rag._as_jsonb(t."metadata") ->> 'title', ''), 'kb.it''s') AS document_name, t."key" AS document, NULL::bigint AS segment_number, t."segment"::text AS segment, ml_rag._as_jsonb(t."metadata") AS metadata, t."em""bedding" OPERATOR(public.<=>) $1::public.halfvec AS distance
    FROM ONLY kb."it's" AS t WHERE t."em""bedding" IS NOT NULL AND t."segment" IS NOT NULL
    ORDER BY t."em""bedding" OPERATOR(public.<=>) $1::public.halfvec LIMIT 4) AS s
  WHERE abs(s.distance) < 'Infinity'
),
semantic AS (
  SELECT *, row_number() OVER () AS place FROM (
  SELECT * FROM semantic_found
  ORDER BY distance, store, document_name COLLATE "C", document_id, document_key COLLATE "C", segment_number LIMIT 3) AS b
),
ranked AS (
  SELECT store, row_key, document_name, document_id, document_key, segment_number, segment, metadata, distance, NULL::float8 AS keyword_score, NULL::float8 AS score, place FROM semantic
),
cited AS (
  SELECT * FROM ranked
),
range AS (
  SELECT store, document_key, greatest(min(segment_number), -9223372036854775807) - 1 AS first, least(max(segment_number), 9223372036854775806) + 1 AS last, min(place) AS best
  FROM (SELECT d.*, count(*) FILTER (WHERE opens) OVER (PARTITION BY store, document_key ORDER BY segment_number) AS island
    FROM (SELECT store, document_key, segment_number, place,
        coalesce(segment_number - max(segment_number) OVER (PARTITION BY store, document_key ORDER BY segment_number ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING)::numeric > 3, true) AS opens
      FROM cited WHERE store IN (1) AND segment_number IS NOT NULL AND document_key IS NOT NULL) AS d) AS i
  GROUP BY store, document_key, island
),
widened AS (
  SELECT best, ml_rag._joined(array_agg(segment ORDER BY segment_number)) AS segment, min(segment_number) AS first_segment, max(segment_number) AS last_segment FROM (
    SELECT r.best, t."segment_number"::bigint AS segment_number, t."segment"::text AS segment
    FROM range AS r JOIN ONLY public.handbook AS t ON r.store = 1 AND t."document_id" = r.document_key::bigint AND t."segment_number" BETWEEN r.first AND r.last
    WHERE t."segment" IS NOT NULL) AS n
  GROUP BY best
),
hit AS (
  SELECT c.store, c.document_name, c.document_id, c.document_key, c.segment_number, c.distance, c.keyword_score, c.score, c.place, c.metadata, coalesce(w.segment, c.segment) AS segment, w.first_segment, w.last_segment
  FROM (SELECT * FROM cited) AS c
  LEFT JOIN range AS r ON r.store = c.store AND r.document_key = c.document_key
    AND c.segment_number BETWEEN r.first AND r.last
  LEFT JOIN widened AS w ON w.best = r.best
  WHERE r.best IS NULL OR r.best = c.place
)
SELECT json_agg(json_build_object('segment', h.segment, 'distance', h.distance, 'document_name', h.document_name, 'segment_range', json_build_array(coalesce(h.first_segment, h.segment_number), coalesce(h.last_segment, h.segment_number))) ORDER BY h.place)::text AS hits, count(*) AS n,
  round((SELECT max(distance) FROM cited), 4)::text AS threshold, false AS is_percentage,
  (ARRAY(SELECT CASE WHEN coalesce(n.n, 0) < 3 THEN CASE WHEN w.most < 0 THEN 'missing' WHEN w.most > 0 THEN 'short' END WHEN n.n = w.most AND n.farthest <= (SELECT max(distance) FROM semantic) THEN 'tied' END FROM unnest(ARRAY[1, 2], ARRAY[4, 4]) AS w (store, most) LEFT JOIN (SELECT store, count(*) AS n, max(distance) AS farthest FROM semantic_found GROUP BY store) AS n USING (store) ORDER BY store))::text[] AS checks
FROM (SELECT h.*, row_number() OVER (ORDER BY h.place) AS rank FROM hit AS h) AS h;

-- by meaning, filtered, one store by few rows that pass
-- $1 vector, $2 nothing, $3 filter, $4 row_keys_2
WITH semantic_found AS (
  SELECT 1 AS store, s.row_key, s.document_name, s.document::bigint AS document_id, s.document::text AS document_key, s.segment_number, s.segment, s.metadata, round((s.distance + 0)::numeric, 4) AS distance
  FROM (SELECT t.ctid AS row_key, t."document_name"::text AS document_name, t."document_id" AS document, t."segment_number"::bigint AS segment_number, t."segment"::text AS segment, ml_rag._as_jsonb(t."metadata") AS metadata, t."segment_embedding" OPERATOR(public.<=>) $1 AS distance
    FROM ONLY public.handbook AS t WHERE t."segment_embedding" IS NOT NULL AND t."segment" IS NOT NULL AND t."document_id" = ANY ($3::bigint[])
    ORDER BY t."segment_embedding" OPERATOR(public.<=>) $1 LIMIT 11) AS s
  WHERE abs(s.distance) < 'Infinity'
  UNION ALL
  SELECT 2 AS store, s.row_key, s.document_name, NULL::bigint AS document_id, s.document::text AS document_key, s.segment_number, s.segment, s.metadata, round((s.distance + 0)::numeric, 4) AS distance
  FROM (SELECT t.ctid AS row_key, coalesce(nullif(ml_rag._as_jsonb(t."metadata") ->> 'source', ''), nullif(ml_rag._as_jsonb(t."metadata") ->> 'file_path', ''), nullif(ml_rag._as_jsonb(t."metadata") ->> 'file_name', ''), nullif(ml_rag._as_jsonb(t."metadata") ->> 'url', ''), nullif(ml_rag._as_jsonb(t."metadata") ->> 'title', ''), 'kb.it''s') AS document_name, t."key" AS document, NULL::bigint AS segment_number, t."segment"::text AS segment, ml_rag._as_jsonb(t."metadata") AS metadata, (t."em""bedding" OPERATOR(public.<=>) $1::public.halfvec) + 0 AS distance
    FROM ONLY kb."it's" AS t WHERE t."em""bedding" IS NOT NULL AND t."segment" IS NOT NULL AND t.ctid = ANY ($4::tid[])
    ORDER BY (t."em""bedding" OPERATOR(public.<=>) $1::public.halfvec) + 0 LIMIT 11) AS s
  WHERE abs(s.distance) < 'Infinity'
),
semantic AS (
  SELECT *, row_number() OVER () AS place FROM (
  SELECT * FROM semantic_found
  ORDER BY distance, store, document_name COLLATE "C", document_id, document_key COLLATE "C", segment_number LIMIT 3) AS b
),
ranked AS (
  SELECT store, row_key, document_name, document_id, document_key, segment_number, segment, metadata, distance, NULL::float8 AS keyword_score, NULL::float8 AS score, place FROM semantic
),
cited AS (
  SELECT * FROM ranked
),
hit AS (
  SELECT * FROM cited
)
SELECT json_agg(json_build_object('segment', h.segment, 'distance', h.distance, 'document_name', h.document_name, 'vector_store', (ARRAY['public.handbook', 'kb.it''s'])[h.store], 'document_id', h.document_id, 'document_key', h.document_key, 'segment_number', h.segment_number, 'metadata', h.metadata, 'score', h.score, 'keyword_score', h.keyword_score) ORDER BY h.place)::text AS hits, count(*) AS n,
  round(max(h.distance), 4)::text AS threshold, false AS is_percentage,
  EXISTS (SELECT FROM ranked) AS has_candidates, (SELECT min(distance) FROM ranked)::text AS nearest, NULL::text AS "limit",
  (ARRAY(SELECT CASE WHEN coalesce(n.n, 0) < 3 THEN CASE WHEN w.most < 0 THEN 'missing' WHEN w.most > 0 THEN 'short' END WHEN n.n = w.most AND n.farthest <= (SELECT max(distance) FROM semantic) THEN 'tied' END FROM unnest(ARRAY[1, 2], ARRAY[11, 11]) AS w (store, most) LEFT JOIN (SELECT store, count(*) AS n, max(distance) AS farthest FROM semantic_found GROUP BY store) AS n USING (store) ORDER BY store))::text[] AS checks
FROM (SELECT h.*, row_number() OVER (ORDER BY h.place) AS rank FROM hit AS h) AS h;

-- by words, without a vector
-- $1 keys_1_1, $2 scores_1_1, $3 limit_1, $4 candidates_1_1
WITH keyword_found AS (
  SELECT 1 AS store, s.row_key, s.document_name, s.document::bigint AS document_id, s.document::text AS document_key, s.segment_number, s.score, CASE WHEN abs(s.distance) < 'Infinity' THEN round((s.distance + 0)::numeric, 4) END AS distance
  FROM (SELECT t.ctid AS row_key, t."document_name"::text AS document_name, t."document_id" AS document, t."segment_number"::bigint AS segment_number, w.score, NULL::float8 AS distance
    FROM unnest($1, $2) AS w (key, score) JOIN ONLY public.handbook AS t ON t."document_id" = (w.key::text[])[1]::bigint AND t."segment_number" = (w.key::text[])[2]::integer
    WHERE t."segment" IS NOT NULL OFFSET 0) AS s
),
keyword AS (
  SELECT *, row_number() OVER () AS place FROM (
  SELECT * FROM keyword_found
  ORDER BY score DESC, store, document_name COLLATE "C", document_id, document_key COLLATE "C", segment_number LIMIT 3) AS b WHERE score >= $3
),
ranked AS (
  SELECT store, row_key, document_name, document_id, document_key, segment_number, distance, score AS keyword_score, NULL::float8 AS score, place FROM keyword
),
cited AS (
  SELECT * FROM ranked
),
hit AS (
  SELECT c.store, c.document_name, c.document_id, c.document_key, c.segment_number, c.distance, c.keyword_score, c.score, c.place, t."segment"::text AS segment, ml_rag._as_jsonb(t."metadata") AS metadata FROM cited AS c JOIN ONLY public.handbook AS t ON c.store = 1 AND t.ctid = c.row_key
)
SELECT json_agg(json_build_object('segment', h.segment, 'distance', h.distance, 'document_name', h.document_name, 'vector_store', (ARRAY['public.handbook'])[h.store], 'document_id', h.document_id, 'document_key', h.document_key, 'segment_number', h.segment_number, 'metadata', h.metadata, 'score', h.score, 'keyword_score', h.keyword_score) ORDER BY h.place)::text AS hits, count(*) AS n,
  round(max(h.distance), 4)::text AS threshold, false AS is_percentage,
  EXISTS (SELECT FROM ranked) AS has_candidates, (SELECT min(distance) FROM ranked)::text AS nearest, NULL::text AS "limit",
  (ARRAY[(SELECT CASE WHEN coalesce(n.n, 0) < 3 THEN CASE WHEN w.most < 0 THEN 'missing' WHEN w.most > 0 THEN 'short' END WHEN n.n = w.most AND n.farthest <= (SELECT max(distance) FROM keyword) THEN 'tied' END FROM (SELECT count(*) AS n, max(distance) AS farthest FROM keyword_found) AS n, (SELECT CASE WHEN cardinality($1) >= $4 THEN -1 END AS most) AS w)])::text[] AS checks
FROM (SELECT h.*, row_number() OVER (ORDER BY h.place) AS rank FROM hit AS h) AS h;

-- hybrid, weighted by how clear the arms are
-- $1 vector, $2 keys_2_1, $3 scores_2_1, $4 read_bytes, $5 candidates_2_1
WITH semantic_found AS (
  SELECT 1 AS store, s.row_key, s.document_name, s.document::bigint AS document_id, s.document::text AS document_key, s.segment_number, s.bytes, round((s.distance + 0)::numeric, 4) AS distance
  FROM (SELECT t.ctid AS row_key, t."document_name"::text AS document_name, t."document_id" AS document, t."segment_number"::bigint AS segment_number, octet_length(t."segment"::text) AS bytes, t."segment_embedding" OPERATOR(public.<=>) $1 AS distance
    FROM ONLY public.handbook AS t WHERE t."segment_embedding" IS NOT NULL AND t."segment" IS NOT NULL
    ORDER BY t."segment_embedding" OPERATOR(public.<=>) $1 LIMIT 104) AS s
  WHERE abs(s.distance) < 'Infinity'
),
semantic AS (
  SELECT *, row_number() OVER () AS place, (1 - distance)::float8 AS value FROM (
  SELECT * FROM semantic_found
  ORDER BY distance, store, document_name COLLATE "C", document_id, document_key COLLATE "C", segment_number LIMIT 100) AS b
),
keyword_found AS (
  SELECT 1 AS store, s.row_key, s.document_name, s.document::bigint AS document_id, s.document::text AS document_key, s.segment_number, s.score, CASE WHEN abs(s.distance) < 'Infinity' THEN round((s.distance + 0)::numeric, 4) END AS distance
  FROM (SELECT t.ctid AS row_key, t."document_name"::text AS document_name, t."document_id" AS document, t."segment_number"::bigint AS segment_number, w.score, t."segment_embedding" OPERATOR(public.<=>) $1 AS distance
    FROM unnest($2, $3) AS w (key, score) JOIN ONLY public.handbook AS t ON t."document_id" = (w.key::text[])[1]::bigint AND t."segment_number" = (w.key::text[])[2]::integer
    WHERE t."segment" IS NOT NULL OFFSET 0) AS s
),
keyword AS (
  SELECT *, row_number() OVER () AS place, score AS value FROM (
  SELECT * FROM keyword_found
  ORDER BY score DESC, store, document_name COLLATE "C", document_id, document_key COLLATE "C", segment_number LIMIT 100) AS b
),
found AS MATERIALIZED (
  SELECT 1 AS arm, place, value, store, row_key, document_name, document_id, document_key, segment_number, distance, NULL::float8 AS keyword_score, bytes FROM semantic
  UNION ALL SELECT 2 AS arm, place, value, store, row_key, document_name, document_id, document_key, segment_number, distance, score AS keyword_score, NULL::integer AS bytes FROM keyword
),
strength AS (
  SELECT b.arm, b.best, coalesce(
      1 - sum(greatest(f.value - b.nothing, 0) / nullif(b.best - b.nothing, 0)) / 30, 0) * power(b.read, 3) AS clear
  FROM (SELECT arm, best, read, CASE WHEN arm IN (1) THEN least ELSE 0 END AS nothing FROM (SELECT arm, max(value) AS best, min(value) AS least, coalesce(avg(least(1, $4 / nullif(bytes, 0))), 1) AS read FROM found GROUP BY arm) AS b) AS b
    JOIN found AS f ON f.arm = b.arm AND f.place <= 30
  GROUP BY b.arm, b.best, b.read, b.nothing
),
weight AS MATERIALIZED (
  SELECT arm, best, is_known, share * CASE WHEN is_last THEN 1 - coalesce(sum(weight) OVER before, 0) ELSE weight END AS weight
  FROM (SELECT a.arm, a.part, a.share, a.is_known, a.is_last, s.best, CASE WHEN sum(a.given * coalesce(s.clear, 0)) OVER part > 0 THEN a.given * coalesce(s.clear, 0) / sum(a.given * coalesce(s.clear, 0)) OVER part
      ELSE a.given / coalesce(nullif(sum(a.given) OVER part, 0), 1) END AS weight
    FROM (VALUES (1, 1, 0.5::float8, 1::float8, true, false), (2, 1, 0.5::float8, 1::float8, false, true)) AS a (arm, part, given, share, is_known, is_last) LEFT JOIN strength AS s USING (arm) WINDOW part AS (PARTITION BY a.part)) AS a
  WINDOW before AS (PARTITION BY part ORDER BY arm ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING)
),
known AS MATERIALIZED (
  SELECT sum(weight) AS weight, max(best) AS best FROM weight WHERE is_known AND best > 0
),
ranked AS (
  SELECT f.store, f.row_key, min(f.document_name) AS document_name, min(f.document_id) AS document_id, min(f.document_key) AS document_key, min(f.segment_number) AS segment_number, min(f.distance) AS distance, max(f.keyword_score) AS keyword_score,
    CASE WHEN k.weight > 0 THEN k.weight * least(1, greatest(0, (1 - min(f.distance))::float8) / k.best) ELSE 0 END + coalesce(sum(CASE WHEN w.best > 0 AND NOT w.is_known THEN w.weight * least(1, greatest(0, f.value) / w.best) END), 0) AS score
  FROM found AS f JOIN weight AS w USING (arm), known AS k
  GROUP BY f.store, f.row_key, k.weight, k.best
),
cited AS (
  SELECT *, row_number() OVER () AS place FROM (
    SELECT * FROM ranked
    ORDER BY score DESC, distance, store, document_name COLLATE "C", document_id, document_key COLLATE "C", segment_number LIMIT 3) AS r
),
hit AS (
  SELECT c.store, c.document_name, c.document_id, c.document_key, c.segment_number, c.distance, c.keyword_score, c.score, c.place, t."segment"::text AS segment, ml_rag._as_jsonb(t."metadata") AS metadata FROM cited AS c JOIN ONLY public.handbook AS t ON c.store = 1 AND t.ctid = c.row_key
)
SELECT json_agg(json_build_object('segment', h.segment, 'distance', h.distance, 'document_name', h.document_name) ORDER BY h.place)::text AS hits, count(*) AS n,
  round(max(h.distance), 4)::text AS threshold, false AS is_percentage,
  (ARRAY[(SELECT CASE WHEN coalesce(n.n, 0) < 100 THEN CASE WHEN w.most < 0 THEN 'missing' WHEN w.most > 0 THEN 'short' END WHEN n.n = w.most AND n.farthest <= (SELECT max(distance) FROM semantic) THEN 'tied' END FROM (SELECT count(*) AS n, max(distance) AS farthest FROM semantic_found) AS n, (SELECT 104 AS most) AS w)] || ARRAY[(SELECT CASE WHEN coalesce(n.n, 0) < 100 THEN CASE WHEN w.most < 0 THEN 'missing' WHEN w.most > 0 THEN 'short' END WHEN n.n = w.most AND n.farthest <= (SELECT max(distance) FROM keyword) THEN 'tied' END FROM (SELECT count(*) AS n, max(distance) AS farthest FROM keyword_found) AS n, (SELECT CASE WHEN cardinality($2) >= $5 THEN -1 END AS most) AS w)])::text[] AS checks
FROM (SELECT h.*, row_number() OVER (ORDER BY h.place) AS rank FROM hit AS h) AS h;

-- hybrid, weighted
-- $1 vector, $2 keys_2_1, $3 scores_2_1, $4 weight_1, $5 weight_2, $6 candidates_2_1
WITH semantic_found AS (
  SELECT 1 AS store, s.row_key, s.document_name, s.document::bigint AS document_id, s.document::text AS document_key, s.segment_number, round((s.distance + 0)::numeric, 4) AS distance
  FROM (SELECT t.ctid AS row_key, t."document_name"::text AS document_name, t."document_id" AS document, t."segment_number"::bigint AS segment_number, t."segment_embedding" OPERATOR(public.<->) $1 AS distance
    FROM ONLY public.handbook AS t WHERE t."segment_embedding" IS NOT NULL AND t."segment" IS NOT NULL
    ORDER BY t."segment_embedding" OPERATOR(public.<->) $1 LIMIT 104) AS s
  WHERE abs(s.distance) < 'Infinity'
),
semantic AS (
  SELECT *, row_number() OVER () AS place, (1 / (1 + distance))::float8 AS value FROM (
  SELECT * FROM semantic_found
  ORDER BY distance, store, document_name COLLATE "C", document_id, document_key COLLATE "C", segment_number LIMIT 100) AS b
),
keyword_found AS (
  SELECT 1 AS store, s.row_key, s.document_name, s.document::bigint AS document_id, s.document::text AS document_key, s.segment_number, s.score, CASE WHEN abs(s.distance) < 'Infinity' THEN round((s.distance + 0)::numeric, 4) END AS distance
  FROM (SELECT t.ctid AS row_key, t."document_name"::text AS document_name, t."document_id" AS document, t."segment_number"::bigint AS segment_number, w.score, t."segment_embedding" OPERATOR(public.<->) $1 AS distance
    FROM unnest($2, $3) AS w (key, score) JOIN ONLY public.handbook AS t ON t."document_id" = (w.key::text[])[1]::bigint AND t."segment_number" = (w.key::text[])[2]::integer
    WHERE t."segment" IS NOT NULL OFFSET 0) AS s
),
keyword AS (
  SELECT *, row_number() OVER () AS place, score AS value FROM (
  SELECT * FROM keyword_found
  ORDER BY score DESC, store, document_name COLLATE "C", document_id, document_key COLLATE "C", segment_number LIMIT 100) AS b
),
found AS MATERIALIZED (
  SELECT 1 AS arm, place, value, store, row_key, document_name, document_id, document_key, segment_number, distance, NULL::float8 AS keyword_score FROM semantic
  UNION ALL SELECT 2 AS arm, place, value, store, row_key, document_name, document_id, document_key, segment_number, distance, score AS keyword_score FROM keyword
),
strength AS (
  SELECT arm, max(value) AS best FROM found GROUP BY arm
),
weight AS MATERIALIZED (
  SELECT arm, best, is_known, share * CASE WHEN is_last THEN 1 - coalesce(sum(weight) OVER before, 0) ELSE weight END AS weight
  FROM (SELECT a.arm, a.part, a.share, a.is_known, a.is_last, s.best, CASE WHEN sum(a.given) OVER part > 0 THEN a.given / sum(a.given) OVER part
      ELSE a.given / coalesce(nullif(sum(a.given) OVER part, 0), 1) END AS weight
    FROM (VALUES (1, 1, $4, 1::float8, true, false), (2, 1, $5, 1::float8, false, false)) AS a (arm, part, given, share, is_known, is_last) LEFT JOIN strength AS s USING (arm) WINDOW part AS (PARTITION BY a.part)) AS a
  WINDOW before AS (PARTITION BY part ORDER BY arm ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING)
),
known AS MATERIALIZED (
  SELECT sum(weight) AS weight, max(best) AS best FROM weight WHERE is_known AND best > 0
),
ranked AS (
  SELECT f.store, f.row_key, min(f.document_name) AS document_name, min(f.document_id) AS document_id, min(f.document_key) AS document_key, min(f.segment_number) AS segment_number, min(f.distance) AS distance, max(f.keyword_score) AS keyword_score,
    CASE WHEN k.weight > 0 THEN k.weight * least(1, greatest(0, (1 / (1 + min(f.distance)))::float8) / k.best) ELSE 0 END + coalesce(sum(CASE WHEN w.best > 0 AND NOT w.is_known THEN w.weight * least(1, greatest(0, f.value) / w.best) END), 0) AS score
  FROM found AS f JOIN weight AS w USING (arm), known AS k
  GROUP BY f.store, f.row_key, k.weight, k.best
),
cited AS (
  SELECT *, row_number() OVER () AS place FROM (
    SELECT * FROM ranked
    ORDER BY score DESC, distance, store, document_name COLLATE "C", document_id, document_key COLLATE "C", segment_number LIMIT 3) AS r
),
hit AS (
  SELECT c.store, c.document_name, c.document_id, c.document_key, c.segment_number, c.distance, c.keyword_score, c.score, c.place, t."segment"::text AS segment, ml_rag._as_jsonb(t."metadata") AS metadata FROM cited AS c JOIN ONLY public.handbook AS t ON c.store = 1 AND t.ctid = c.row_key
)
SELECT json_agg(json_build_object('segment', h.segment, 'distance', h.distance, 'document_name', h.document_name) ORDER BY h.place)::text AS hits, count(*) AS n,
  round(max(h.distance), 4)::text AS threshold, false AS is_percentage,
  (ARRAY[(SELECT CASE WHEN coalesce(n.n, 0) < 100 THEN CASE WHEN w.most < 0 THEN 'missing' WHEN w.most > 0 THEN 'short' END WHEN n.n = w.most AND n.farthest <= (SELECT max(distance) FROM semantic) THEN 'tied' END FROM (SELECT count(*) AS n, max(distance) AS farthest FROM semantic_found) AS n, (SELECT 104 AS most) AS w)] || ARRAY[(SELECT CASE WHEN coalesce(n.n, 0) < 100 THEN CASE WHEN w.most < 0 THEN 'missing' WHEN w.most > 0 THEN 'short' END WHEN n.n = w.most AND n.farthest <= (SELECT max(distance) FROM keyword) THEN 'tied' END FROM (SELECT count(*) AS n, max(distance) AS farthest FROM keyword_found) AS n, (SELECT CASE WHEN cardinality($2) >= $6 THEN -1 END AS most) AS w)])::text[] AS checks
FROM (SELECT h.*, row_number() OVER (ORDER BY h.place) AS rank FROM hit AS h) AS h;

-- hybrid, by ranks, widened
-- $1 vector, $2 keys_2_1, $3 scores_2_1, $4 rrf_k, $5 weight_1, $6 weight_2
WITH semantic_found AS (
  SELECT 1 AS store, s.row_key, s.document_name, s.document::bigint AS document_id, s.document::text AS document_key, s.segment_number, round((s.distance + 0)::numeric, 4) AS distance
  FROM (SELECT t.ctid AS row_key, t."document_name"::text AS document_name, t."document_id" AS document, t."segment_number"::bigint AS segment_number, t."segment_embedding" OPERATOR(public.<=>) $1 AS distance
    FROM ONLY public.handbook AS t WHERE t."segment_embedding" IS NOT NULL AND t."segment" IS NOT NULL
    ORDER BY t."segment_embedding" OPERATOR(public.<=>) $1 LIMIT 104) AS s
  WHERE abs(s.distance) < 'Infinity'
),
semantic AS (
  SELECT *, row_number() OVER () AS place, (1 - distance)::float8 AS value FROM (
  SELECT * FROM semantic_found
  ORDER BY distance, store, document_name COLLATE "C", document_id, document_key COLLATE "C", segment_number LIMIT 100) AS b
),
keyword_found AS (
  SELECT 1 AS store, s.row_key, s.document_name, s.document::bigint AS document_id, s.document::text AS document_key, s.segment_number, s.score, CASE WHEN abs(s.distance) < 'Infinity' THEN round((s.distance + 0)::numeric, 4) END AS distance
  FROM (SELECT t.ctid AS row_key, t."document_name"::text AS document_name, t."document_id" AS document, t."segment_number"::bigint AS segment_number, w.score, t."segment_embedding" OPERATOR(public.<=>) $1 AS distance
    FROM unnest($2, $3) AS w (key, score) JOIN ONLY public.handbook AS t ON t."document_id" = (w.key::text[])[1]::bigint AND t."segment_number" = (w.key::text[])[2]::integer
    WHERE t."segment" IS NOT NULL OFFSET 0) AS s
),
keyword AS (
  SELECT *, row_number() OVER () AS place, score AS value FROM (
  SELECT * FROM keyword_found
  ORDER BY score DESC, store, document_name COLLATE "C", document_id, document_key COLLATE "C", segment_number LIMIT 100) AS b
),
found AS MATERIALIZED (
  SELECT 1 AS arm, place, value, store, row_key, document_name, document_id, document_key, segment_number, distance, NULL::float8 AS keyword_score FROM semantic
  UNION ALL SELECT 2 AS arm, place, value, store, row_key, document_name, document_id, document_key, segment_number, distance, score AS keyword_score FROM keyword
),
ranked AS (
  SELECT f.store, f.row_key, min(f.document_name) AS document_name, min(f.document_id) AS document_id, min(f.document_key) AS document_key, min(f.segment_number) AS segment_number, min(f.distance) AS distance, max(f.keyword_score) AS keyword_score,
    sum(w.weight / ($4 + f.place)) * ($4 + 1) AS score
  FROM found AS f JOIN (VALUES (1, 1.0 * coalesce($5, 0.5)), (2, 1.0 * coalesce($6, 0.5))) AS w (arm, weight) USING (arm)
  GROUP BY f.store, f.row_key
),
cited AS (
  SELECT *, row_number() OVER () AS place FROM (
    SELECT * FROM ranked
    ORDER BY score DESC, distance, store, document_name COLLATE "C", document_id, document_key COLLATE "C", segment_number LIMIT 3) AS r
),
range AS (
  SELECT store, document_key, greatest(min(segment_number), -9223372036854775806) - 2 AS first, least(max(segment_number), 9223372036854775805) + 2 AS last, min(place) AS best
  FROM (SELECT d.*, count(*) FILTER (WHERE opens) OVER (PARTITION BY store, document_key ORDER BY segment_number) AS island
    FROM (SELECT store, document_key, segment_number, place,
        coalesce(segment_number - max(segment_number) OVER (PARTITION BY store, document_key ORDER BY segment_number ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING)::numeric > 5, true) AS opens
      FROM cited WHERE store IN (1) AND segment_number IS NOT NULL AND document_key IS NOT NULL) AS d) AS i
  GROUP BY store, document_key, island
),
widened AS (
  SELECT best, ml_rag._joined(array_agg(segment ORDER BY segment_number)) AS segment, min(segment_number) AS first_segment, max(segment_number) AS last_segment FROM (
    SELECT r.best, t."segment_number"::bigint AS segment_number, t."segment"::text AS segment
    FROM range AS r JOIN ONLY public.handbook AS t ON r.store = 1 AND t."document_id" = r.document_key::bigint AND t."segment_number" BETWEEN r.first AND r.last
    WHERE t."segment" IS NOT NULL) AS n
  GROUP BY best
),
hit AS (
  SELECT c.store, c.document_name, c.document_id, c.document_key, c.segment_number, c.distance, c.keyword_score, c.score, c.place, c.metadata, coalesce(w.segment, c.segment) AS segment, w.first_segment, w.last_segment
  FROM (SELECT c.store, c.document_name, c.document_id, c.document_key, c.segment_number, c.distance, c.keyword_score, c.score, c.place, t."segment"::text AS segment, ml_rag._as_jsonb(t."metadata") AS metadata FROM cited AS c JOIN ONLY public.handbook AS t ON c.store = 1 AND t.ctid = c.row_key) AS c
  LEFT JOIN range AS r ON r.store = c.store AND r.document_key = c.document_key
    AND c.segment_number BETWEEN r.first AND r.last
  LEFT JOIN widened AS w ON w.best = r.best
  WHERE r.best IS NULL OR r.best = c.place
)
SELECT row_number() OVER (ORDER BY h.place)::integer AS rank, (ARRAY['public.handbook'])[h.store] AS vector_store, h.document_name, h.document_id, CASE WHEN h.segment_number BETWEEN -2147483648 AND 2147483647 THEN h.segment_number END::integer AS segment_number, h.segment, h.distance, h.metadata, h.keyword_score, h.score, NULL::float8 AS rerank_score
FROM hit AS h ORDER BY h.place;

-- three arms, weighted, one by a question of its own
-- $1 vector, $2 vector_2, $3 keys_3_1, $4 scores_3_1, $5 weight_1, $6 weight_2, $7 weight_3, $8 candidates_3_1
WITH semantic_found AS (
  SELECT 1 AS store, s.row_key, s.document_name, s.document::bigint AS document_id, s.document::text AS document_key, s.segment_number, round((s.distance + 0)::numeric, 4) AS distance
  FROM (SELECT t.ctid AS row_key, t."document_name"::text AS document_name, t."document_id" AS document, t."segment_number"::bigint AS segment_number, t."segment_embedding" OPERATOR(public.<=>) $1 AS distance
    FROM ONLY public.handbook AS t WHERE t."segment_embedding" IS NOT NULL AND t."segment" IS NOT NULL
    ORDER BY t."segment_embedding" OPERATOR(public.<=>) $1 LIMIT 104) AS s
  WHERE abs(s.distance) < 'Infinity'
),
semantic AS (
  SELECT *, row_number() OVER () AS place, (1 - distance)::float8 AS value FROM (
  SELECT * FROM semantic_found
  ORDER BY distance, store, document_name COLLATE "C", document_id, document_key COLLATE "C", segment_number LIMIT 100) AS b
),
arm2_found AS (
  SELECT 1 AS store, s.row_key, s.document_name, s.document::bigint AS document_id, s.document::text AS document_key, s.segment_number, round((s.own + 0)::numeric, 4)::float8 AS own, CASE WHEN abs(s.distance) < 'Infinity' THEN round((s.distance + 0)::numeric, 4) END AS distance
  FROM (SELECT t.ctid AS row_key, t."document_name"::text AS document_name, t."document_id" AS document, t."segment_number"::bigint AS segment_number, t."segment_embedding" OPERATOR(public.<=>) $1 AS distance, t."segment_embedding" OPERATOR(public.<=>) $2 AS own
    FROM ONLY public.handbook AS t WHERE t."segment_embedding" IS NOT NULL AND t."segment" IS NOT NULL
    ORDER BY t."segment_embedding" OPERATOR(public.<=>) $2 LIMIT 104) AS s
  WHERE abs(s.own) < 'Infinity'
),
arm2 AS (
  SELECT *, row_number() OVER () AS place, (1 - own)::float8 AS value FROM (
  SELECT * FROM arm2_found
  ORDER BY own, store, document_name COLLATE "C", document_id, document_key COLLATE "C", segment_number LIMIT 100) AS b
),
arm3_found AS (
  SELECT 1 AS store, s.row_key, s.document_name, s.document::bigint AS document_id, s.document::text AS document_key, s.segment_number, s.score, CASE WHEN abs(s.distance) < 'Infinity' THEN round((s.distance + 0)::numeric, 4) END AS distance
  FROM (SELECT t.ctid AS row_key, t."document_name"::text AS document_name, t."document_id" AS document, t."segment_number"::bigint AS segment_number, w.score, t."segment_embedding" OPERATOR(public.<=>) $1 AS distance
    FROM unnest($3, $4) AS w (key, score) JOIN ONLY public.handbook AS t ON t."document_id" = (w.key::text[])[1]::bigint AND t."segment_number" = (w.key::text[])[2]::integer
    WHERE t."segment" IS NOT NULL OFFSET 0) AS s
),
arm3 AS (
  SELECT *, row_number() OVER () AS place, score AS value FROM (
  SELECT * FROM arm3_found
  ORDER BY score DESC, store, document_name COLLATE "C", document_id, document_key COLLATE "C", segment_number LIMIT 100) AS b
),
found AS MATERIALIZED (
  SELECT 1 AS arm, place, value, store, row_key, document_name, document_id, document_key, segment_number, distance, NULL::float8 AS keyword_score FROM semantic
  UNION ALL SELECT 2 AS arm, place, value, store, row_key, document_name, document_id, document_key, segment_number, distance, NULL::float8 AS keyword_score FROM arm2
  UNION ALL SELECT 3 AS arm, place, value, store, row_key, document_name, document_id, document_key, segment_number, distance, score AS keyword_score FROM arm3
),
strength AS (
  SELECT arm, max(value) AS best FROM found GROUP BY arm
),
weight AS MATERIALIZED (
  SELECT arm, best, is_known, share * CASE WHEN is_last THEN 1 - coalesce(sum(weight) OVER before, 0) ELSE weight END AS weight
  FROM (SELECT a.arm, a.part, a.share, a.is_known, a.is_last, s.best, CASE WHEN sum(a.given) OVER part > 0 THEN a.given / sum(a.given) OVER part
      ELSE a.given / coalesce(nullif(sum(a.given) OVER part, 0), 1) END AS weight
    FROM (VALUES (1, 1, $5, 1::float8, true, false), (2, 1, $6, 1::float8, false, false), (3, 1, $7, 1::float8, false, false)) AS a (arm, part, given, share, is_known, is_last) LEFT JOIN strength AS s USING (arm) WINDOW part AS (PARTITION BY a.part)) AS a
  WINDOW before AS (PARTITION BY part ORDER BY arm ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING)
),
known AS MATERIALIZED (
  SELECT sum(weight) AS weight, max(best) AS best FROM weight WHERE is_known AND best > 0
),
ranked AS (
  SELECT f.store, f.row_key, min(f.document_name) AS document_name, min(f.document_id) AS document_id, min(f.document_key) AS document_key, min(f.segment_number) AS segment_number, min(f.distance) AS distance, max(f.keyword_score) AS keyword_score,
    CASE WHEN k.weight > 0 THEN k.weight * least(1, greatest(0, (1 - min(f.distance))::float8) / k.best) ELSE 0 END + coalesce(sum(CASE WHEN w.best > 0 AND NOT w.is_known THEN w.weight * least(1, greatest(0, f.value) / w.best) END), 0) AS score
  FROM found AS f JOIN weight AS w USING (arm), known AS k
  GROUP BY f.store, f.row_key, k.weight, k.best
),
cited AS (
  SELECT *, row_number() OVER () AS place FROM (
    SELECT * FROM ranked
    ORDER BY score DESC, distance, store, document_name COLLATE "C", document_id, document_key COLLATE "C", segment_number LIMIT 3) AS r
),
hit AS (
  SELECT c.store, c.document_name, c.document_id, c.document_key, c.segment_number, c.distance, c.keyword_score, c.score, c.place, t."segment"::text AS segment, ml_rag._as_jsonb(t."metadata") AS metadata FROM cited AS c JOIN ONLY public.handbook AS t ON c.store = 1 AND t.ctid = c.row_key
)
SELECT json_agg(json_build_object('segment', h.segment, 'distance', h.distance, 'document_name', h.document_name, 'vector_store', (ARRAY['public.handbook'])[h.store], 'document_id', h.document_id, 'document_key', h.document_key, 'segment_number', h.segment_number, 'metadata', h.metadata, 'score', h.score, 'keyword_score', h.keyword_score) ORDER BY h.place)::text AS hits, count(*) AS n,
  round(max(h.distance), 4)::text AS threshold, false AS is_percentage,
  EXISTS (SELECT FROM ranked) AS has_candidates, (SELECT min(distance) FROM ranked)::text AS nearest, NULL::text AS "limit",
  (ARRAY[(SELECT CASE WHEN coalesce(n.n, 0) < 100 THEN CASE WHEN w.most < 0 THEN 'missing' WHEN w.most > 0 THEN 'short' END WHEN n.n = w.most AND n.farthest <= (SELECT max(distance) FROM semantic) THEN 'tied' END FROM (SELECT count(*) AS n, max(distance) AS farthest FROM semantic_found) AS n, (SELECT 104 AS most) AS w)] || ARRAY[(SELECT CASE WHEN coalesce(n.n, 0) < 100 THEN CASE WHEN w.most < 0 THEN 'missing' WHEN w.most > 0 THEN 'short' END WHEN n.n = w.most AND n.farthest <= (SELECT max(own) FROM arm2) THEN 'tied' END FROM (SELECT count(*) AS n, max(own) AS farthest FROM arm2_found) AS n, (SELECT 104 AS most) AS w)] || ARRAY[(SELECT CASE WHEN coalesce(n.n, 0) < 100 THEN CASE WHEN w.most < 0 THEN 'missing' WHEN w.most > 0 THEN 'short' END WHEN n.n = w.most AND n.farthest <= (SELECT max(distance) FROM arm3) THEN 'tied' END FROM (SELECT count(*) AS n, max(distance) AS farthest FROM arm3_found) AS n, (SELECT CASE WHEN cardinality($3) >= $8 THEN -1 END AS most) AS w)])::text[] AS checks
FROM (SELECT h.*, row_number() OVER (ORDER BY h.place) AS rank FROM hit AS h) AS h;

-- three arms, by ranks, one by a function
-- $1 vector, $2 keys_2_1, $3 scores_2_1, $4 hits_3_1, $5 limit_3, $6 rrf_k, $7 weight_1, $8 weight_2, $9 weight_3
WITH semantic_found AS (
  SELECT 1 AS store, s.row_key::text AS row_key, s.document_name, s.document::bigint AS document_id, s.document::text AS document_key, s.segment_number, NULL::text AS segment, NULL::jsonb AS metadata, round((s.distance + 0)::numeric, 4) AS distance
  FROM (SELECT t.ctid AS row_key, t."document_name"::text AS document_name, t."document_id" AS document, t."segment_number"::bigint AS segment_number, t."segment_embedding" OPERATOR(public.<=>) $1 AS distance
    FROM ONLY public.handbook AS t WHERE t."segment_embedding" IS NOT NULL AND t."segment" IS NOT NULL
    ORDER BY t."segment_embedding" OPERATOR(public.<=>) $1 LIMIT 104) AS s
  WHERE abs(s.distance) < 'Infinity'
),
semantic AS (
  SELECT *, row_number() OVER () AS place, (1 - distance)::float8 AS value FROM (
  SELECT * FROM semantic_found
  ORDER BY distance, store, document_name COLLATE "C", document_id, document_key COLLATE "C", segment_number LIMIT 100) AS b
),
arm2_found AS (
  SELECT 1 AS store, s.row_key::text AS row_key, s.document_name, s.document::bigint AS document_id, s.document::text AS document_key, s.segment_number, NULL::text AS segment, NULL::jsonb AS metadata, s.score, CASE WHEN abs(s.distance) < 'Infinity' THEN round((s.distance + 0)::numeric, 4) END AS distance
  FROM (SELECT t.ctid AS row_key, t."document_name"::text AS document_name, t."document_id" AS document, t."segment_number"::bigint AS segment_number, w.score, t."segment_embedding" OPERATOR(public.<=>) $1 AS distance
    FROM unnest($2, $3) AS w (key, score) JOIN ONLY public.handbook AS t ON t."document_id" = (w.key::text[])[1]::bigint AND t."segment_number" = (w.key::text[])[2]::integer
    WHERE t."segment" IS NOT NULL OFFSET 0) AS s
),
arm2 AS (
  SELECT *, row_number() OVER () AS place, score AS value FROM (
  SELECT * FROM arm2_found
  ORDER BY score DESC, store, document_name COLLATE "C", document_id, document_key COLLATE "C", segment_number LIMIT 100) AS b
),
arm3_found AS (
  SELECT 1 AS store, coalesce(s.row_key, md5(concat_ws('|', coalesce(md5(s.document_name), '-'), coalesce(md5(s.document_key), '-'), coalesce(s.segment_number::text, '-'), md5(s.segment), row_number() OVER (PARTITION BY s.document_name, s.document_key, s.segment_number, s.segment ORDER BY s.place)))) AS row_key, s.document_name, s.document_id, s.document_key, s.segment_number, s.segment, s.metadata, s.score AS own, round(s.distance, 4) AS distance
  FROM ROWS FROM (jsonb_to_recordset($4) AS (vector_store text, document_name text, document_id bigint, document_key text, segment_number bigint, segment text, distance numeric, metadata jsonb, keyword_score float8, score float8, row_key text)) WITH ORDINALITY AS s (vector_store, document_name, document_id, document_key, segment_number, segment, distance, metadata, keyword_score, score, row_key, place)
),
arm3 AS (
  SELECT *, row_number() OVER () AS place, CASE WHEN min(own::float8) OVER () / 2 = max(own::float8) OVER () / 2 THEN 1 ELSE (own::float8 / 2 - max(own::float8) OVER () / 2) / (min(own::float8) OVER () / 2 - max(own::float8) OVER () / 2) END AS value FROM (
  SELECT * FROM arm3_found
  ORDER BY own, store, document_name COLLATE "C", document_id, document_key COLLATE "C", segment_number LIMIT 20) AS b WHERE own <= $5
),
found AS MATERIALIZED (
  SELECT 1 AS arm, place, value, store, row_key, document_name, document_id, document_key, segment_number, segment, metadata, distance, NULL::float8 AS keyword_score FROM semantic
  UNION ALL SELECT 2 AS arm, place, value, store, row_key, document_name, document_id, document_key, segment_number, segment, metadata, distance, score AS keyword_score FROM arm2
  UNION ALL SELECT 3 AS arm, place, value, store, row_key, document_name, document_id, document_key, segment_number, segment, metadata, distance, NULL::float8 AS keyword_score FROM arm3
),
ranked AS (
  SELECT f.store, f.row_key, min(f.document_name) AS document_name, min(f.document_id) AS document_id, min(f.document_key) AS document_key, min(f.segment_number) AS segment_number, (array_agg(f.segment ORDER BY w.weight / ($6 + f.place) DESC, f.arm) FILTER (WHERE f.segment IS NOT NULL))[1] AS segment, (array_agg(f.metadata ORDER BY w.weight / ($6 + f.place) DESC, f.arm) FILTER (WHERE f.metadata IS NOT NULL))[1] AS metadata, min(f.distance) AS distance, max(f.keyword_score) AS keyword_score,
    sum(w.weight / ($6 + f.place)) * ($6 + 1) AS score
  FROM found AS f JOIN (VALUES (1, 1.0 * coalesce($7, 0.3333333333333333)), (2, 1.0 * coalesce($8, 0.3333333333333333)), (3, 1.0 * coalesce($9, 0.3333333333333333))) AS w (arm, weight) USING (arm)
  GROUP BY f.store, f.row_key
),
cited AS (
  SELECT *, row_number() OVER () AS place FROM (
    SELECT * FROM ranked
    ORDER BY score DESC, distance, store, document_name COLLATE "C", document_id, document_key COLLATE "C", segment_number LIMIT 3) AS r
),
hit AS (
  SELECT c.store, c.document_name, c.document_id, c.document_key, c.segment_number, c.distance, c.keyword_score, c.score, c.place, coalesce(c.segment, t."segment"::text) AS segment, coalesce(c.metadata, ml_rag._as_jsonb(t."metadata")) AS metadata FROM cited AS c JOIN ONLY public.handbook AS t ON c.store = 1 AND t.ctid = c.row_key::tid
)
SELECT row_number() OVER (ORDER BY h.place)::integer AS rank, (ARRAY['public.handbook'])[h.store] AS vector_store, h.document_name, h.document_id, CASE WHEN h.segment_number BETWEEN -2147483648 AND 2147483647 THEN h.segment_number END::integer AS segment_number, h.segment, h.distance, h.metadata, h.keyword_score, h.score, NULL::float8 AS rerank_score
FROM hit AS h ORDER BY h.place;

-- two parts with shares, each weighted by how clear its arms are
-- $1 vector, $2 keys_2_1, $3 scores_2_1, $4 vector_3, $5 keys_4_1, $6 scores_4_1, $7 read_bytes, $8 share_1, $9 share_2, $10 share_3, $11 share_4, $12 candidates_2_1, $13 candidates_4_1
WITH part1semantic_found AS (
  SELECT 1 AS store, s.row_key, s.document_name, s.document::bigint AS document_id, s.document::text AS document_key, s.segment_number, s.bytes, round((s.distance + 0)::numeric, 4) AS distance
  FROM (SELECT t.ctid AS row_key, t."document_name"::text AS document_name, t."document_id" AS document, t."segment_number"::bigint AS segment_number, octet_length(t."segment"::text) AS bytes, t."segment_embedding" OPERATOR(public.<=>) $1 AS distance
    FROM ONLY public.handbook AS t WHERE t."segment_embedding" IS NOT NULL AND t."segment" IS NOT NULL
    ORDER BY t."segment_embedding" OPERATOR(public.<=>) $1 LIMIT 104) AS s
  WHERE abs(s.distance) < 'Infinity'
),
part1semantic AS (
  SELECT *, row_number() OVER () AS place, (1 - distance)::float8 AS value FROM (
  SELECT * FROM part1semantic_found
  ORDER BY distance, store, document_name COLLATE "C", document_id, document_key COLLATE "C", segment_number LIMIT 100) AS b
),
part1keyword_found AS (
  SELECT 1 AS store, s.row_key, s.document_name, s.document::bigint AS document_id, s.document::text AS document_key, s.segment_number, s.score, CASE WHEN abs(s.distance) < 'Infinity' THEN round((s.distance + 0)::numeric, 4) END AS distance
  FROM (SELECT t.ctid AS row_key, t."document_name"::text AS document_name, t."document_id" AS document, t."segment_number"::bigint AS segment_number, w.score, t."segment_embedding" OPERATOR(public.<=>) $1 AS distance
    FROM unnest($2, $3) AS w (key, score) JOIN ONLY public.handbook AS t ON t."document_id" = (w.key::text[])[1]::bigint AND t."segment_number" = (w.key::text[])[2]::integer
    WHERE t."segment" IS NOT NULL OFFSET 0) AS s
),
part1keyword AS (
  SELECT *, row_number() OVER () AS place, score AS value FROM (
  SELECT * FROM part1keyword_found
  ORDER BY score DESC, store, document_name COLLATE "C", document_id, document_key COLLATE "C", segment_number LIMIT 100) AS b
),
part2semantic_found AS (
  SELECT 1 AS store, s.row_key, s.document_name, s.document::bigint AS document_id, s.document::text AS document_key, s.segment_number, s.bytes, round((s.own + 0)::numeric, 4)::float8 AS own, CASE WHEN abs(s.distance) < 'Infinity' THEN round((s.distance + 0)::numeric, 4) END AS distance
  FROM (SELECT t.ctid AS row_key, t."document_name"::text AS document_name, t."document_id" AS document, t."segment_number"::bigint AS segment_number, t."segment_embedding" OPERATOR(public.<=>) $1 AS distance, octet_length(t."segment"::text) AS bytes, t."segment_embedding" OPERATOR(public.<=>) $4 AS own
    FROM ONLY public.handbook AS t WHERE t."segment_embedding" IS NOT NULL AND t."segment" IS NOT NULL
    ORDER BY t."segment_embedding" OPERATOR(public.<=>) $4 LIMIT 104) AS s
  WHERE abs(s.own) < 'Infinity'
),
part2semantic AS (
  SELECT *, row_number() OVER () AS place, (1 - own)::float8 AS value FROM (
  SELECT * FROM part2semantic_found
  ORDER BY own, store, document_name COLLATE "C", document_id, document_key COLLATE "C", segment_number LIMIT 100) AS b
),
part2keyword_found AS (
  SELECT 1 AS store, s.row_key, s.document_name, s.document::bigint AS document_id, s.document::text AS document_key, s.segment_number, s.score, CASE WHEN abs(s.distance) < 'Infinity' THEN round((s.distance + 0)::numeric, 4) END AS distance
  FROM (SELECT t.ctid AS row_key, t."document_name"::text AS document_name, t."document_id" AS document, t."segment_number"::bigint AS segment_number, w.score, t."segment_embedding" OPERATOR(public.<=>) $1 AS distance
    FROM unnest($5, $6) AS w (key, score) JOIN ONLY public.handbook AS t ON t."document_id" = (w.key::text[])[1]::bigint AND t."segment_number" = (w.key::text[])[2]::integer
    WHERE t."segment" IS NOT NULL OFFSET 0) AS s
),
part2keyword AS (
  SELECT *, row_number() OVER () AS place, score AS value FROM (
  SELECT * FROM part2keyword_found
  ORDER BY score DESC, store, document_name COLLATE "C", document_id, document_key COLLATE "C", segment_number LIMIT 100) AS b
),
found AS MATERIALIZED (
  SELECT 1 AS arm, place, value, store, row_key, document_name, document_id, document_key, segment_number, distance, NULL::float8 AS keyword_score, bytes FROM part1semantic
  UNION ALL SELECT 2 AS arm, place, value, store, row_key, document_name, document_id, document_key, segment_number, distance, score AS keyword_score, NULL::integer AS bytes FROM part1keyword
  UNION ALL SELECT 3 AS arm, place, value, store, row_key, document_name, document_id, document_key, segment_number, distance, NULL::float8 AS keyword_score, bytes FROM part2semantic
  UNION ALL SELECT 4 AS arm, place, value, store, row_key, document_name, document_id, document_key, segment_number, distance, score AS keyword_score, NULL::integer AS bytes FROM part2keyword
),
strength AS (
  SELECT b.arm, b.best, coalesce(
      1 - sum(greatest(f.value - b.nothing, 0) / nullif(b.best - b.nothing, 0)) / 30, 0) * power(b.read, 3) AS clear
  FROM (SELECT arm, best, read, CASE WHEN arm IN (1, 3) THEN least ELSE 0 END AS nothing FROM (SELECT arm, max(value) AS best, min(value) AS least, coalesce(avg(least(1, $7 / nullif(bytes, 0))), 1) AS read FROM found GROUP BY arm) AS b) AS b
    JOIN found AS f ON f.arm = b.arm AND f.place <= 30
  GROUP BY b.arm, b.best, b.read, b.nothing
),
weight AS MATERIALIZED (
  SELECT arm, best, is_known, share * CASE WHEN is_last THEN 1 - coalesce(sum(weight) OVER before, 0) ELSE weight END AS weight
  FROM (SELECT a.arm, a.part, a.share, a.is_known, a.is_last, s.best, CASE WHEN sum(a.given * coalesce(s.clear, 0)) OVER part > 0 THEN a.given * coalesce(s.clear, 0) / sum(a.given * coalesce(s.clear, 0)) OVER part
      ELSE a.given / coalesce(nullif(sum(a.given) OVER part, 0), 1) END AS weight
    FROM (VALUES (1, 1, 0.5::float8, $8, true, false), (2, 1, 0.5::float8, $9, false, true), (3, 2, 0.5::float8, $10, false, false), (4, 2, 0.5::float8, $11, false, true)) AS a (arm, part, given, share, is_known, is_last) LEFT JOIN strength AS s USING (arm) WINDOW part AS (PARTITION BY a.part)) AS a
  WINDOW before AS (PARTITION BY part ORDER BY arm ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING)
),
known AS MATERIALIZED (
  SELECT sum(weight) AS weight, max(best) AS best FROM weight WHERE is_known AND best > 0
),
ranked AS (
  SELECT f.store, f.row_key, min(f.document_name) AS document_name, min(f.document_id) AS document_id, min(f.document_key) AS document_key, min(f.segment_number) AS segment_number, min(f.distance) AS distance, max(f.keyword_score) AS keyword_score,
    CASE WHEN k.weight > 0 THEN k.weight * least(1, greatest(0, (1 - min(f.distance))::float8) / k.best) ELSE 0 END + coalesce(sum(CASE WHEN w.best > 0 AND NOT w.is_known THEN w.weight * least(1, greatest(0, f.value) / w.best) END), 0) AS score
  FROM found AS f JOIN weight AS w USING (arm), known AS k
  GROUP BY f.store, f.row_key, k.weight, k.best
),
cited AS (
  SELECT *, row_number() OVER () AS place FROM (
    SELECT * FROM ranked
    ORDER BY score DESC, distance, store, document_name COLLATE "C", document_id, document_key COLLATE "C", segment_number LIMIT 3) AS r
),
hit AS (
  SELECT c.store, c.document_name, c.document_id, c.document_key, c.segment_number, c.distance, c.keyword_score, c.score, c.place, t."segment"::text AS segment, ml_rag._as_jsonb(t."metadata") AS metadata FROM cited AS c JOIN ONLY public.handbook AS t ON c.store = 1 AND t.ctid = c.row_key
)
SELECT json_agg(json_build_object('segment', h.segment, 'distance', h.distance, 'document_name', h.document_name) ORDER BY h.place)::text AS hits, count(*) AS n,
  round(max(h.distance), 4)::text AS threshold, false AS is_percentage,
  (ARRAY[(SELECT CASE WHEN coalesce(n.n, 0) < 100 THEN CASE WHEN w.most < 0 THEN 'missing' WHEN w.most > 0 THEN 'short' END WHEN n.n = w.most AND n.farthest <= (SELECT max(distance) FROM part1semantic) THEN 'tied' END FROM (SELECT count(*) AS n, max(distance) AS farthest FROM part1semantic_found) AS n, (SELECT 104 AS most) AS w)] || ARRAY[(SELECT CASE WHEN coalesce(n.n, 0) < 100 THEN CASE WHEN w.most < 0 THEN 'missing' WHEN w.most > 0 THEN 'short' END WHEN n.n = w.most AND n.farthest <= (SELECT max(distance) FROM part1keyword) THEN 'tied' END FROM (SELECT count(*) AS n, max(distance) AS farthest FROM part1keyword_found) AS n, (SELECT CASE WHEN cardinality($2) >= $12 THEN -1 END AS most) AS w)] || ARRAY[(SELECT CASE WHEN coalesce(n.n, 0) < 100 THEN CASE WHEN w.most < 0 THEN 'missing' WHEN w.most > 0 THEN 'short' END WHEN n.n = w.most AND n.farthest <= (SELECT max(own) FROM part2semantic) THEN 'tied' END FROM (SELECT count(*) AS n, max(own) AS farthest FROM part2semantic_found) AS n, (SELECT 104 AS most) AS w)] || ARRAY[(SELECT CASE WHEN coalesce(n.n, 0) < 100 THEN CASE WHEN w.most < 0 THEN 'missing' WHEN w.most > 0 THEN 'short' END WHEN n.n = w.most AND n.farthest <= (SELECT max(distance) FROM part2keyword) THEN 'tied' END FROM (SELECT count(*) AS n, max(distance) AS farthest FROM part2keyword_found) AS n, (SELECT CASE WHEN cardinality($5) >= $13 THEN -1 END AS most) AS w)])::text[] AS checks
FROM (SELECT h.*, row_number() OVER (ORDER BY h.place) AS rank FROM hit AS h) AS h;

-- hybrid, a table beside a view
-- $1 vector, $2 keys_2_1, $3 scores_2_1, $4 keys_2_2, $5 scores_2_2, $6 read_bytes, $7 candidates_2_1, $8 candidates_2_2
WITH semantic_found AS (
  SELECT 1 AS store, s.row_key::text AS row_key, s.document_name, s.document::bigint AS document_id, s.document::text AS document_key, s.segment_number, NULL::text AS segment, NULL::jsonb AS metadata, s.bytes, round((s.distance + 0)::numeric, 4) AS distance
  FROM (SELECT t.ctid AS row_key, t."document_name"::text AS document_name, t."document_id" AS document, t."segment_number"::bigint AS segment_number, octet_length(t."segment"::text) AS bytes, t."segment_embedding" OPERATOR(public.<=>) $1 AS distance
    FROM ONLY public.handbook AS t WHERE t."segment_embedding" IS NOT NULL AND t."segment" IS NOT NULL
    ORDER BY t."segment_embedding" OPERATOR(public.<=>) $1 LIMIT 104) AS s
  WHERE abs(s.distance) < 'Infinity'
  UNION ALL
  SELECT 2 AS store, md5(concat_ws('|', coalesce(md5(s.document_name), '-'), coalesce(md5(s.document::text), '-'), coalesce(s.segment_number::text, '-'), md5(s.segment), row_number() OVER (PARTITION BY s.document_name, s.document::text, s.segment_number, s.segment ORDER BY s.distance))) AS row_key, s.document_name, s.document::bigint AS document_id, s.document::text AS document_key, s.segment_number, s.segment, s.metadata, s.bytes, round((s.distance + 0)::numeric, 4) AS distance
  FROM (SELECT t."document_name"::text AS document_name, t."document_id" AS document, t."segment_number"::bigint AS segment_number, t."segment"::text AS segment, ml_rag._as_jsonb(t."metadata") AS metadata, octet_length(t."segment"::text) AS bytes, t."segment_embedding" OPERATOR(public.<=>) $1 AS distance
    FROM public.seen AS t WHERE t."segment_embedding" IS NOT NULL AND t."segment" IS NOT NULL
    ORDER BY t."segment_embedding" OPERATOR(public.<=>) $1 LIMIT 104) AS s
  WHERE abs(s.distance) < 'Infinity'
),
semantic AS (
  SELECT *, row_number() OVER () AS place, (1 - distance)::float8 AS value FROM (
  SELECT * FROM semantic_found
  ORDER BY distance, store, document_name COLLATE "C", document_id, document_key COLLATE "C", segment_number LIMIT 100) AS b
),
keyword_found AS (
  SELECT 1 AS store, s.row_key::text AS row_key, s.document_name, s.document::bigint AS document_id, s.document::text AS document_key, s.segment_number, NULL::text AS segment, NULL::jsonb AS metadata, s.score, CASE WHEN abs(s.distance) < 'Infinity' THEN round((s.distance + 0)::numeric, 4) END AS distance
  FROM (SELECT t.ctid AS row_key, t."document_name"::text AS document_name, t."document_id" AS document, t."segment_number"::bigint AS segment_number, w.score, t."segment_embedding" OPERATOR(public.<=>) $1 AS distance
    FROM unnest($2, $3) AS w (key, score) JOIN ONLY public.handbook AS t ON t."document_id" = (w.key::text[])[1]::bigint AND t."segment_number" = (w.key::text[])[2]::integer
    WHERE t."segment" IS NOT NULL OFFSET 0) AS s
  UNION ALL
  SELECT 2 AS store, md5(concat_ws('|', coalesce(md5(s.document_name), '-'), coalesce(md5(s.document::text), '-'), coalesce(s.segment_number::text, '-'), md5(s.segment), row_number() OVER (PARTITION BY s.document_name, s.document::text, s.segment_number, s.segment ORDER BY s.score DESC))) AS row_key, s.document_name, s.document::bigint AS document_id, s.document::text AS document_key, s.segment_number, s.segment, s.metadata, s.score, CASE WHEN abs(s.distance) < 'Infinity' THEN round((s.distance + 0)::numeric, 4) END AS distance
  FROM (SELECT t."document_name"::text AS document_name, t."document_id" AS document, t."segment_number"::bigint AS segment_number, t."segment"::text AS segment, ml_rag._as_jsonb(t."metadata") AS metadata, w.score, t."segment_embedding" OPERATOR(public.<=>) $1 AS distance
    FROM unnest($4, $5) AS w (key, score) JOIN public.kept AS t ON t."id" = (w.key::text[])[1]::uuid
    WHERE t."segment" IS NOT NULL OFFSET 0) AS s
),
keyword AS (
  SELECT *, row_number() OVER () AS place, score AS value FROM (
  SELECT * FROM keyword_found
  ORDER BY score DESC, store, document_name COLLATE "C", document_id, document_key COLLATE "C", segment_number LIMIT 100) AS b
),
found AS MATERIALIZED (
  SELECT 1 AS arm, place, value, store, row_key, document_name, document_id, document_key, segment_number, segment, metadata, distance, NULL::float8 AS keyword_score, bytes FROM semantic
  UNION ALL SELECT 2 AS arm, place, value, store, row_key, document_name, document_id, document_key, segment_number, segment, metadata, distance, score AS keyword_score, NULL::integer AS bytes FROM keyword
),
strength AS (
  SELECT b.arm, b.best, coalesce(
      1 - sum(greatest(f.value - b.nothing, 0) / nullif(b.best - b.nothing, 0)) / 30, 0) * power(b.read, 3) AS clear
  FROM (SELECT arm, best, read, CASE WHEN arm IN (1) THEN least ELSE 0 END AS nothing FROM (SELECT arm, max(value) AS best, min(value) AS least, coalesce(avg(least(1, $6 / nullif(bytes, 0))), 1) AS read FROM found GROUP BY arm) AS b) AS b
    JOIN found AS f ON f.arm = b.arm AND f.place <= 30
  GROUP BY b.arm, b.best, b.read, b.nothing
),
weight AS MATERIALIZED (
  SELECT arm, best, is_known, share * CASE WHEN is_last THEN 1 - coalesce(sum(weight) OVER before, 0) ELSE weight END AS weight
  FROM (SELECT a.arm, a.part, a.share, a.is_known, a.is_last, s.best, CASE WHEN sum(a.given * coalesce(s.clear, 0)) OVER part > 0 THEN a.given * coalesce(s.clear, 0) / sum(a.given * coalesce(s.clear, 0)) OVER part
      ELSE a.given / coalesce(nullif(sum(a.given) OVER part, 0), 1) END AS weight
    FROM (VALUES (1, 1, 0.5::float8, 1::float8, true, false), (2, 1, 0.5::float8, 1::float8, false, true)) AS a (arm, part, given, share, is_known, is_last) LEFT JOIN strength AS s USING (arm) WINDOW part AS (PARTITION BY a.part)) AS a
  WINDOW before AS (PARTITION BY part ORDER BY arm ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING)
),
known AS MATERIALIZED (
  SELECT sum(weight) AS weight, max(best) AS best FROM weight WHERE is_known AND best > 0
),
ranked AS (
  SELECT f.store, f.row_key, min(f.document_name) AS document_name, min(f.document_id) AS document_id, min(f.document_key) AS document_key, min(f.segment_number) AS segment_number, (array_agg(f.segment ORDER BY coalesce(CASE WHEN w.best > 0 AND NOT w.is_known THEN w.weight * least(1, greatest(0, f.value) / w.best) END, f.value * w.weight) DESC, f.arm) FILTER (WHERE f.segment IS NOT NULL))[1] AS segment, (array_agg(f.metadata ORDER BY coalesce(CASE WHEN w.best > 0 AND NOT w.is_known THEN w.weight * least(1, greatest(0, f.value) / w.best) END, f.value * w.weight) DESC, f.arm) FILTER (WHERE f.metadata IS NOT NULL))[1] AS metadata, min(f.distance) AS distance, max(f.keyword_score) AS keyword_score,
    CASE WHEN k.weight > 0 THEN k.weight * least(1, greatest(0, (1 - min(f.distance))::float8) / k.best) ELSE 0 END + coalesce(sum(CASE WHEN w.best > 0 AND NOT w.is_known THEN w.weight * least(1, greatest(0, f.value) / w.best) END), 0) AS score
  FROM found AS f JOIN weight AS w USING (arm), known AS k
  GROUP BY f.store, f.row_key, k.weight, k.best
),
cited AS (
  SELECT *, row_number() OVER () AS place FROM (
    SELECT * FROM ranked
    ORDER BY score DESC, distance, store, document_name COLLATE "C", document_id, document_key COLLATE "C", segment_number LIMIT 3) AS r
),
range AS (
  SELECT store, document_key, greatest(min(segment_number), -9223372036854775807) - 1 AS first, least(max(segment_number), 9223372036854775806) + 1 AS last, min(place) AS best
  FROM (SELECT d.*, count(*) FILTER (WHERE opens) OVER (PARTITION BY store, document_key ORDER BY segment_number) AS island
    FROM (SELECT store, document_key, segment_number, place,
        coalesce(segment_number - max(segment_number) OVER (PARTITION BY store, document_key ORDER BY segment_number ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING)::numeric > 3, true) AS opens
      FROM cited WHERE store IN (1, 2) AND segment_number IS NOT NULL AND document_key IS NOT NULL) AS d) AS i
  GROUP BY store, document_key, island
),
widened AS (
  SELECT best, ml_rag._joined(array_agg(segment ORDER BY segment_number)) AS segment, min(segment_number) AS first_segment, max(segment_number) AS last_segment FROM (
    SELECT r.best, t."segment_number"::bigint AS segment_number, t."segment"::text AS segment
    FROM range AS r JOIN ONLY public.handbook AS t ON r.store = 1 AND t."document_id" = r.document_key::bigint AND t."segment_number" BETWEEN r.first AND r.last
    WHERE t."segment" IS NOT NULL
  UNION ALL
  SELECT r.best, t."segment_number"::bigint AS segment_number, t."segment"::text AS segment
    FROM range AS r JOIN public.seen AS t ON r.store = 2 AND t."document_id" = r.document_key::bigint AND t."segment_number" BETWEEN r.first AND r.last
    WHERE t."segment" IS NOT NULL AND t."segment_number" = ANY (ARRAY(SELECT generate_series(r.first, r.last) FROM range AS r WHERE r.store = 2))) AS n
  GROUP BY best
),
hit AS (
  SELECT c.store, c.document_name, c.document_id, c.document_key, c.segment_number, c.distance, c.keyword_score, c.score, c.place, c.metadata, coalesce(w.segment, c.segment) AS segment, w.first_segment, w.last_segment
  FROM (SELECT c.store, c.document_name, c.document_id, c.document_key, c.segment_number, c.distance, c.keyword_score, c.score, c.place, coalesce(c.segment, t."segment"::text) AS segment, coalesce(c.metadata, ml_rag._as_jsonb(t."metadata")) AS metadata FROM cited AS c JOIN ONLY public.handbook AS t ON c.store = 1 AND t.ctid = c.row_key::tid
  UNION ALL
  SELECT c.store, c.document_name, c.document_id, c.document_key, c.segment_number, c.distance, c.keyword_score, c.score, c.place, c.segment AS segment, c.metadata AS metadata FROM cited AS c WHERE c.store = 2) AS c
  LEFT JOIN range AS r ON r.store = c.store AND r.document_key = c.document_key
    AND c.segment_number BETWEEN r.first AND r.last
  LEFT JOIN widened AS w ON w.best = r.best
  WHERE r.best IS NULL OR r.best = c.place
)
SELECT json_agg(json_build_object('segment', h.segment, 'distance', h.distance, 'document_name', h.document_name) ORDER BY h.place)::text AS hits, count(*) AS n,
  round((SELECT max(distance) FROM cited), 4)::text AS threshold, false AS is_percentage,
  (ARRAY(SELECT CASE WHEN coalesce(n.n, 0) < 100 THEN CASE WHEN w.most < 0 THEN 'missing' WHEN w.most > 0 THEN 'short' END WHEN n.n = w.most AND n.farthest <= (SELECT max(distance) FROM semantic) THEN 'tied' END FROM unnest(ARRAY[1, 2], ARRAY[104, 104]) AS w (store, most) LEFT JOIN (SELECT store, count(*) AS n, max(distance) AS farthest FROM semantic_found GROUP BY store) AS n USING (store) ORDER BY store) || ARRAY(SELECT CASE WHEN coalesce(n.n, 0) < 100 THEN CASE WHEN w.most < 0 THEN 'missing' WHEN w.most > 0 THEN 'short' END WHEN n.n = w.most AND n.farthest <= (SELECT max(distance) FROM keyword) THEN 'tied' END FROM unnest(ARRAY[1, 2], ARRAY[CASE WHEN cardinality($2) >= $7 THEN -1 END, CASE WHEN cardinality($4) >= $8 THEN -1 END]) AS w (store, most) LEFT JOIN (SELECT store, count(*) AS n, max(distance) AS farthest FROM keyword_found GROUP BY store) AS n USING (store) ORDER BY store))::text[] AS checks
FROM (SELECT h.*, row_number() OVER (ORDER BY h.place) AS rank FROM hit AS h) AS h;

-- hybrid, partitions read one by one, one of other dimensions
-- $1 vector, $2 keys_2_2, $3 scores_2_2, $4 weight_1, $5 weight_2, $6 candidates_2_2
WITH semantic_found AS (
  SELECT 1 AS store, md5(concat_ws('|', coalesce(md5(s.document_name), '-'), coalesce(md5(s.document::text), '-'), coalesce(s.segment_number::text, '-'), md5(s.segment), row_number() OVER (PARTITION BY s.document_name, s.document::text, s.segment_number, s.segment ORDER BY s.distance))) AS row_key, s.document_name, s.document::bigint AS document_id, s.document::text AS document_key, s.segment_number, s.segment, s.metadata, round((s.distance + 0)::numeric, 4) AS distance
  FROM (SELECT u.* FROM ((SELECT t."document_name"::text AS document_name, t."document_id" AS document, t."segment_number"::bigint AS segment_number, t."segment"::text AS segment, ml_rag._as_jsonb(t."metadata") AS metadata, t."segment_embedding" OPERATOR(public.<=>) $1 AS distance FROM public.seen_1 AS t WHERE t."segment_embedding" IS NOT NULL AND t."segment" IS NOT NULL ORDER BY t."segment_embedding" OPERATOR(public.<=>) $1 LIMIT 104) UNION ALL (SELECT t."document_name"::text AS document_name, t."document_id" AS document, t."segment_number"::bigint AS segment_number, t."segment"::text AS segment, ml_rag._as_jsonb(t."metadata") AS metadata, t."segment_embedding" OPERATOR(public.<=>) $1 AS distance FROM public.seen_2 AS t WHERE t."segment_embedding" IS NOT NULL AND t."segment" IS NOT NULL ORDER BY t."segment_embedding" OPERATOR(public.<=>) $1 LIMIT 104)) AS u ORDER BY u.distance + 0 LIMIT 104) AS s
  WHERE abs(s.distance) < 'Infinity'
),
semantic AS (
  SELECT *, row_number() OVER () AS place, (1 - distance)::float8 AS value FROM (
  SELECT * FROM semantic_found
  ORDER BY distance, store, document_name COLLATE "C", document_id, document_key COLLATE "C", segment_number LIMIT 100) AS b
),
keyword_found AS (
  SELECT 2 AS store, s.row_key::text AS row_key, s.document_name, s.document::bigint AS document_id, s.document::text AS document_key, s.segment_number, NULL::text AS segment, NULL::jsonb AS metadata, s.score, CASE WHEN abs(s.distance) < 'Infinity' THEN round((s.distance + 0)::numeric, 4) END AS distance
  FROM (SELECT t.ctid AS row_key, t."document_name"::text AS document_name, t."document_id" AS document, t."segment_number"::bigint AS segment_number, w.score, NULL::float8 AS distance
    FROM unnest($2, $3) AS w (key, score) JOIN ONLY public.handbook AS t ON t."document_id" = (w.key::text[])[1]::bigint AND t."segment_number" = (w.key::text[])[2]::integer
    WHERE t."segment" IS NOT NULL OFFSET 0) AS s
),
keyword AS (
  SELECT *, row_number() OVER () AS place, score AS value FROM (
  SELECT * FROM keyword_found
  ORDER BY score DESC, store, document_name COLLATE "C", document_id, document_key COLLATE "C", segment_number LIMIT 100) AS b
),
found AS MATERIALIZED (
  SELECT 1 AS arm, place, value, store, row_key, document_name, document_id, document_key, segment_number, segment, metadata, distance, NULL::float8 AS keyword_score FROM semantic
  UNION ALL SELECT 2 AS arm, place, value, store, row_key, document_name, document_id, document_key, segment_number, segment, metadata, distance, score AS keyword_score FROM keyword
),
strength AS (
  SELECT arm, max(value) AS best FROM found GROUP BY arm
),
weight AS MATERIALIZED (
  SELECT arm, best, is_known, share * CASE WHEN is_last THEN 1 - coalesce(sum(weight) OVER before, 0) ELSE weight END AS weight
  FROM (SELECT a.arm, a.part, a.share, a.is_known, a.is_last, s.best, CASE WHEN sum(a.given) OVER part > 0 THEN a.given / sum(a.given) OVER part
      ELSE a.given / coalesce(nullif(sum(a.given) OVER part, 0), 1) END AS weight
    FROM (VALUES (1, 1, $4, 1::float8, true, false), (2, 1, $5, 1::float8, false, false)) AS a (arm, part, given, share, is_known, is_last) LEFT JOIN strength AS s USING (arm) WINDOW part AS (PARTITION BY a.part)) AS a
  WINDOW before AS (PARTITION BY part ORDER BY arm ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING)
),
known AS MATERIALIZED (
  SELECT sum(weight) AS weight, max(best) AS best FROM weight WHERE is_known AND best > 0
),
ranked AS (
  SELECT f.store, f.row_key, min(f.document_name) AS document_name, min(f.document_id) AS document_id, min(f.document_key) AS document_key, min(f.segment_number) AS segment_number, (array_agg(f.segment ORDER BY coalesce(CASE WHEN w.best > 0 AND NOT w.is_known THEN w.weight * least(1, greatest(0, f.value) / w.best) END, f.value * w.weight) DESC, f.arm) FILTER (WHERE f.segment IS NOT NULL))[1] AS segment, (array_agg(f.metadata ORDER BY coalesce(CASE WHEN w.best > 0 AND NOT w.is_known THEN w.weight * least(1, greatest(0, f.value) / w.best) END, f.value * w.weight) DESC, f.arm) FILTER (WHERE f.metadata IS NOT NULL))[1] AS metadata, min(f.distance) AS distance, max(f.keyword_score) AS keyword_score,
    CASE WHEN k.weight > 0 THEN k.weight * least(1, greatest(0, (1 - min(f.distance))::float8) / k.best) ELSE 0 END + coalesce(sum(CASE WHEN w.best > 0 AND NOT w.is_known THEN w.weight * least(1, greatest(0, f.value) / w.best) END), 0) AS score
  FROM found AS f JOIN weight AS w USING (arm), known AS k
  GROUP BY f.store, f.row_key, k.weight, k.best
),
cited AS (
  SELECT *, row_number() OVER () AS place FROM (
    SELECT * FROM ranked
    ORDER BY score DESC, distance, store, document_name COLLATE "C", document_id, document_key COLLATE "C", segment_number LIMIT 3) AS r
),
hit AS (
  SELECT c.store, c.document_name, c.document_id, c.document_key, c.segment_number, c.distance, c.keyword_score, c.score, c.place, c.segment AS segment, c.metadata AS metadata FROM cited AS c WHERE c.store = 1
  UNION ALL
  SELECT c.store, c.document_name, c.document_id, c.document_key, c.segment_number, c.distance, c.keyword_score, c.score, c.place, coalesce(c.segment, t."segment"::text) AS segment, coalesce(c.metadata, ml_rag._as_jsonb(t."metadata")) AS metadata FROM cited AS c JOIN ONLY public.handbook AS t ON c.store = 2 AND t.ctid = c.row_key::tid
)
SELECT json_agg(json_build_object('segment', h.segment, 'distance', h.distance, 'document_name', h.document_name, 'vector_store', (ARRAY['public.seen', 'public.handbook'])[h.store], 'document_id', h.document_id, 'document_key', h.document_key, 'segment_number', h.segment_number, 'metadata', h.metadata, 'score', h.score, 'keyword_score', h.keyword_score) ORDER BY h.place)::text AS hits, count(*) AS n,
  round(max(h.distance), 4)::text AS threshold, false AS is_percentage,
  EXISTS (SELECT FROM ranked) AS has_candidates, (SELECT min(distance) FROM ranked)::text AS nearest, NULL::text AS "limit",
  (ARRAY[(SELECT CASE WHEN coalesce(n.n, 0) < 100 THEN CASE WHEN w.most < 0 THEN 'missing' WHEN w.most > 0 THEN 'short' END WHEN n.n = w.most AND n.farthest <= (SELECT max(distance) FROM semantic) THEN 'tied' END FROM (SELECT count(*) AS n, max(distance) AS farthest FROM semantic_found) AS n, (SELECT 104 AS most) AS w)] || ARRAY[(SELECT CASE WHEN coalesce(n.n, 0) < 100 THEN CASE WHEN w.most < 0 THEN 'missing' WHEN w.most > 0 THEN 'short' END WHEN n.n = w.most AND n.farthest <= (SELECT max(distance) FROM keyword) THEN 'tied' END FROM (SELECT count(*) AS n, max(distance) AS farthest FROM keyword_found) AS n, (SELECT CASE WHEN cardinality($2) >= $6 THEN -1 END AS most) AS w)])::text[] AS checks
FROM (SELECT h.*, row_number() OVER (ORDER BY h.place) AS rank FROM hit AS h) AS h;

-- hits of shards, beside a table
-- $1 vector, $2 hits_1_2, $3 keys_2_1, $4 scores_2_1, $5 hits_2_2, $6 weight_1, $7 weight_2, $8 candidates_2_1
WITH semantic_found AS (
  SELECT 1 AS store, s.row_key::text AS row_key, s.document_name, s.document::bigint AS document_id, s.document::text AS document_key, s.segment_number, NULL::text AS segment, NULL::jsonb AS metadata, round((s.distance + 0)::numeric, 4) AS distance
  FROM (SELECT t.ctid AS row_key, t."document_name"::text AS document_name, t."document_id" AS document, t."segment_number"::bigint AS segment_number, t."segment_embedding" OPERATOR(public.<=>) $1 AS distance
    FROM ONLY public.handbook AS t WHERE t."segment_embedding" IS NOT NULL AND t."segment" IS NOT NULL
    ORDER BY t."segment_embedding" OPERATOR(public.<=>) $1 LIMIT 104) AS s
  WHERE abs(s.distance) < 'Infinity'
  UNION ALL
  SELECT 2 AS store, coalesce(s.row_key, md5(concat_ws('|', coalesce(md5(s.document_name), '-'), coalesce(md5(s.document_key), '-'), coalesce(s.segment_number::text, '-'), md5(s.segment), row_number() OVER (PARTITION BY s.document_name, s.document_key, s.segment_number, s.segment ORDER BY s.place)))) AS row_key, s.document_name, s.document_id, s.document_key, s.segment_number, s.segment, s.metadata, round(s.distance, 4) AS distance
  FROM ROWS FROM (jsonb_to_recordset($2) AS (vector_store text, document_name text, document_id bigint, document_key text, segment_number bigint, segment text, distance numeric, metadata jsonb, keyword_score float8, score float8, row_key text)) WITH ORDINALITY AS s (vector_store, document_name, document_id, document_key, segment_number, segment, distance, metadata, keyword_score, score, row_key, place)
),
semantic AS (
  SELECT *, row_number() OVER () AS place, (1 - distance)::float8 AS value FROM (
  SELECT * FROM semantic_found
  ORDER BY distance, store, document_name COLLATE "C", document_id, document_key COLLATE "C", segment_number LIMIT 100) AS b
),
keyword_found AS (
  SELECT 1 AS store, s.row_key::text AS row_key, s.document_name, s.document::bigint AS document_id, s.document::text AS document_key, s.segment_number, NULL::text AS segment, NULL::jsonb AS metadata, s.score, CASE WHEN abs(s.distance) < 'Infinity' THEN round((s.distance + 0)::numeric, 4) END AS distance
  FROM (SELECT t.ctid AS row_key, t."document_name"::text AS document_name, t."document_id" AS document, t."segment_number"::bigint AS segment_number, w.score, t."segment_embedding" OPERATOR(public.<=>) $1 AS distance
    FROM unnest($3, $4) AS w (key, score) JOIN ONLY public.handbook AS t ON t."document_id" = (w.key::text[])[1]::bigint AND t."segment_number" = (w.key::text[])[2]::integer
    WHERE t."segment" IS NOT NULL OFFSET 0) AS s
  UNION ALL
  SELECT 2 AS store, coalesce(s.row_key, md5(concat_ws('|', coalesce(md5(s.document_name), '-'), coalesce(md5(s.document_key), '-'), coalesce(s.segment_number::text, '-'), md5(s.segment), row_number() OVER (PARTITION BY s.document_name, s.document_key, s.segment_number, s.segment ORDER BY s.place)))) AS row_key, s.document_name, s.document_id, s.document_key, s.segment_number, s.segment, s.metadata, s.keyword_score AS score, round(s.distance, 4) AS distance
  FROM ROWS FROM (jsonb_to_recordset($5) AS (vector_store text, document_name text, document_id bigint, document_key text, segment_number bigint, segment text, distance numeric, metadata jsonb, keyword_score float8, score float8, row_key text)) WITH ORDINALITY AS s (vector_store, document_name, document_id, document_key, segment_number, segment, distance, metadata, keyword_score, score, row_key, place)
),
keyword AS (
  SELECT *, row_number() OVER () AS place, score AS value FROM (
  SELECT * FROM keyword_found
  ORDER BY score DESC, store, document_name COLLATE "C", document_id, document_key COLLATE "C", segment_number LIMIT 100) AS b
),
found AS MATERIALIZED (
  SELECT 1 AS arm, place, value, store, row_key, document_name, document_id, document_key, segment_number, segment, metadata, distance, NULL::float8 AS keyword_score FROM semantic
  UNION ALL SELECT 2 AS arm, place, value, store, row_key, document_name, document_id, document_key, segment_number, segment, metadata, distance, score AS keyword_score FROM keyword
),
strength AS (
  SELECT arm, max(value) AS best FROM found GROUP BY arm
),
weight AS MATERIALIZED (
  SELECT arm, best, is_known, share * CASE WHEN is_last THEN 1 - coalesce(sum(weight) OVER before, 0) ELSE weight END AS weight
  FROM (SELECT a.arm, a.part, a.share, a.is_known, a.is_last, s.best, CASE WHEN sum(a.given) OVER part > 0 THEN a.given / sum(a.given) OVER part
      ELSE a.given / coalesce(nullif(sum(a.given) OVER part, 0), 1) END AS weight
    FROM (VALUES (1, 1, $6, 1::float8, true, false), (2, 1, $7, 1::float8, false, false)) AS a (arm, part, given, share, is_known, is_last) LEFT JOIN strength AS s USING (arm) WINDOW part AS (PARTITION BY a.part)) AS a
  WINDOW before AS (PARTITION BY part ORDER BY arm ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING)
),
known AS MATERIALIZED (
  SELECT sum(weight) AS weight, max(best) AS best FROM weight WHERE is_known AND best > 0
),
ranked AS (
  SELECT f.store, f.row_key, min(f.document_name) AS document_name, min(f.document_id) AS document_id, min(f.document_key) AS document_key, min(f.segment_number) AS segment_number, (array_agg(f.segment ORDER BY coalesce(CASE WHEN w.best > 0 AND NOT w.is_known THEN w.weight * least(1, greatest(0, f.value) / w.best) END, f.value * w.weight) DESC, f.arm) FILTER (WHERE f.segment IS NOT NULL))[1] AS segment, (array_agg(f.metadata ORDER BY coalesce(CASE WHEN w.best > 0 AND NOT w.is_known THEN w.weight * least(1, greatest(0, f.value) / w.best) END, f.value * w.weight) DESC, f.arm) FILTER (WHERE f.metadata IS NOT NULL))[1] AS metadata, min(f.distance) AS distance, max(f.keyword_score) AS keyword_score,
    CASE WHEN k.weight > 0 THEN k.weight * least(1, greatest(0, (1 - min(f.distance))::float8) / k.best) ELSE 0 END + coalesce(sum(CASE WHEN w.best > 0 AND NOT w.is_known THEN w.weight * least(1, greatest(0, f.value) / w.best) END), 0) AS score
  FROM found AS f JOIN weight AS w USING (arm), known AS k
  GROUP BY f.store, f.row_key, k.weight, k.best
),
cited AS (
  SELECT *, row_number() OVER () AS place FROM (
    SELECT * FROM ranked
    ORDER BY score DESC, distance, store, document_name COLLATE "C", document_id, document_key COLLATE "C", segment_number LIMIT 3) AS r
),
hit AS (
  SELECT c.store, c.document_name, c.document_id, c.document_key, c.segment_number, c.distance, c.keyword_score, c.score, c.place, coalesce(c.segment, t."segment"::text) AS segment, coalesce(c.metadata, ml_rag._as_jsonb(t."metadata")) AS metadata FROM cited AS c JOIN ONLY public.handbook AS t ON c.store = 1 AND t.ctid = c.row_key::tid
  UNION ALL
  SELECT c.store, c.document_name, c.document_id, c.document_key, c.segment_number, c.distance, c.keyword_score, c.score, c.place, c.segment AS segment, c.metadata AS metadata FROM cited AS c WHERE c.store = 2
)
SELECT json_agg(json_build_object('segment', h.segment, 'distance', h.distance, 'document_name', h.document_name, 'vector_store', (ARRAY['public.handbook', 'public.seen'])[h.store], 'document_id', h.document_id, 'document_key', h.document_key, 'segment_number', h.segment_number, 'metadata', h.metadata, 'score', h.score, 'keyword_score', h.keyword_score) ORDER BY h.place)::text AS hits, count(*) AS n,
  round(max(h.distance), 4)::text AS threshold, false AS is_percentage,
  EXISTS (SELECT FROM ranked) AS has_candidates, (SELECT min(distance) FROM ranked)::text AS nearest, NULL::text AS "limit",
  (ARRAY(SELECT CASE WHEN coalesce(n.n, 0) < 100 THEN CASE WHEN w.most < 0 THEN 'missing' WHEN w.most > 0 THEN 'short' END WHEN n.n = w.most AND n.farthest <= (SELECT max(distance) FROM semantic) THEN 'tied' END FROM unnest(ARRAY[1, 2], ARRAY[104, NULL::integer]) AS w (store, most) LEFT JOIN (SELECT store, count(*) AS n, max(distance) AS farthest FROM semantic_found GROUP BY store) AS n USING (store) ORDER BY store) || ARRAY(SELECT CASE WHEN coalesce(n.n, 0) < 100 THEN CASE WHEN w.most < 0 THEN 'missing' WHEN w.most > 0 THEN 'short' END WHEN n.n = w.most AND n.farthest <= (SELECT max(distance) FROM keyword) THEN 'tied' END FROM unnest(ARRAY[1, 2], ARRAY[CASE WHEN cardinality($3) >= $8 THEN -1 END, NULL::integer]) AS w (store, most) LEFT JOIN (SELECT store, count(*) AS n, max(distance) AS farthest FROM keyword_found GROUP BY store) AS n USING (store) ORDER BY store))::text[] AS checks
FROM (SELECT h.*, row_number() OVER (ORDER BY h.place) AS rank FROM hit AS h) AS h;

-- nodes, of segments and of documents
-- $1 keys_1_1, $2 scores_1_1, $3 vector, $4 keys_2_1, $5 scores_2_1, $6 weight_1, $7 weight_2, $8 candidates_1_1, $9 candidates_2_1
WITH arm1_found AS (
  SELECT 1 AS store, s.row_key, s.document_name, s.document::bigint AS document_id, s.document::text AS document_key, s.segment_number, s.node, CASE WHEN abs(s.node_distance) < 'Infinity' THEN round((s.node_distance + 0)::numeric, 4) END AS node_distance, s.own, CASE WHEN abs(s.distance) < 'Infinity' THEN round((s.distance + 0)::numeric, 4) END AS distance
  FROM (SELECT t.ctid AS row_key, t."document_name"::text AS document_name, t."document_id" AS document, t."segment_number"::bigint AS segment_number, b.node, b.node_number, b.node_distance, b.node_key, b.own, t."segment_embedding" OPERATOR(public.<=>) $3 AS distance FROM (
      SELECT DISTINCT ON (n."document_id", n."segment_number") n."document_id", n."segment_number", n.node, n.node_number, n."node_embedding" OPERATOR(public.<=>) $3 AS node_distance, 'public.handbook_nodes' || u.row_key AS node_key, n.text_hash, u.own
      FROM unnest($1, $2) AS u (row_key, own) JOIN public.handbook_nodes AS n ON n.ctid = u.row_key::tid
      ORDER BY n."document_id", n."segment_number", u.own, n.node_number) AS b JOIN ONLY public.handbook AS t ON b."document_id" = t."document_id" AND b."segment_number" = t."segment_number"
    WHERE t."segment" IS NOT NULL AND b.text_hash = hashtextextended(concat(t."segment") COLLATE "C", 0)
    ORDER BY b.own, (t."document_name"::text) COLLATE "C", t."document_id", t."segment_number"::bigint, b.node_number LIMIT 100) AS s
),
arm1 AS (
  SELECT *, row_number() OVER () AS place, (1 - own)::float8 AS value FROM (
  SELECT * FROM arm1_found
  ORDER BY own, store, document_name COLLATE "C", document_id, document_key COLLATE "C", segment_number LIMIT 100) AS b
),
arm2_found AS (
  SELECT 1 AS store, s.row_key, s.document_name, s.document::bigint AS document_id, s.document::text AS document_key, s.segment_number, s.node, CASE WHEN abs(s.node_distance) < 'Infinity' THEN round((s.node_distance + 0)::numeric, 4) END AS node_distance, s.own AS score, CASE WHEN abs(s.distance) < 'Infinity' THEN round((s.distance + 0)::numeric, 4) END AS distance
  FROM (SELECT t.ctid AS row_key, t."document_name"::text AS document_name, t."document_id" AS document, t."segment_number"::bigint AS segment_number, b.node, b.node_number, b.node_distance, b.node_key, b.own, t."segment_embedding" OPERATOR(public.<=>) $3 AS distance FROM (
      SELECT DISTINCT ON (n."document_id", n."segment_number") n."document_id", n."segment_number", n.node, n.node_number, NULL::float8 AS node_distance, 'public.summaries' || u.row_key AS node_key, n.text_hash, u.own
      FROM unnest($4, $5) AS u (row_key, own) JOIN public.summaries AS n ON n.ctid = u.row_key::tid
      ORDER BY n."document_id", n."segment_number", u.own DESC, n.node_number) AS b JOIN ONLY public.handbook AS f ON b."document_id" = f."document_id" AND b."segment_number" = f."segment_number" JOIN ONLY public.handbook AS t ON t."document_id" = f."document_id"
    WHERE t."segment" IS NOT NULL
    ORDER BY b.own DESC, (t."document_name"::text) COLLATE "C", t."document_id", t."segment_number"::bigint, b.node_number LIMIT 100) AS s
),
arm2 AS (
  SELECT *, row_number() OVER () AS place, score AS value FROM (
  SELECT * FROM arm2_found
  ORDER BY score DESC, store, document_name COLLATE "C", document_id, document_key COLLATE "C", segment_number LIMIT 100) AS b
),
found AS MATERIALIZED (
  SELECT 1 AS arm, place, value, store, row_key, document_name, document_id, document_key, segment_number, node, node_distance, distance, NULL::float8 AS keyword_score FROM arm1
  UNION ALL SELECT 2 AS arm, place, value, store, row_key, document_name, document_id, document_key, segment_number, node, node_distance, distance, score AS keyword_score FROM arm2
),
strength AS (
  SELECT arm, max(value) AS best FROM found GROUP BY arm
),
weight AS MATERIALIZED (
  SELECT arm, best, is_known, share * CASE WHEN is_last THEN 1 - coalesce(sum(weight) OVER before, 0) ELSE weight END AS weight
  FROM (SELECT a.arm, a.part, a.share, a.is_known, a.is_last, s.best, CASE WHEN sum(a.given) OVER part > 0 THEN a.given / sum(a.given) OVER part
      ELSE a.given / coalesce(nullif(sum(a.given) OVER part, 0), 1) END AS weight
    FROM (VALUES (1, 1, $6, 1::float8, false, false), (2, 1, $7, 1::float8, false, false)) AS a (arm, part, given, share, is_known, is_last) LEFT JOIN strength AS s USING (arm) WINDOW part AS (PARTITION BY a.part)) AS a
  WINDOW before AS (PARTITION BY part ORDER BY arm ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING)
),
known AS MATERIALIZED (
  SELECT sum(weight) AS weight, max(best) AS best FROM weight WHERE is_known AND best > 0
),
ranked AS (
  SELECT f.store, f.row_key, min(f.document_name) AS document_name, min(f.document_id) AS document_id, min(f.document_key) AS document_key, min(f.segment_number) AS segment_number, (array_agg(f.node ORDER BY f.node_distance NULLS LAST, f.arm) FILTER (WHERE f.node IS NOT NULL))[1] AS node, min(f.node_distance) AS node_distance, least(min(f.distance), min(f.node_distance)) AS distance, max(f.keyword_score) AS keyword_score,
    CASE WHEN k.weight > 0 THEN k.weight * least(1, greatest(0, (1 - min(f.distance))::float8) / k.best) ELSE 0 END + coalesce(sum(CASE WHEN w.best > 0 AND NOT w.is_known THEN w.weight * least(1, greatest(0, f.value) / w.best) END), 0) AS score
  FROM found AS f JOIN weight AS w USING (arm), known AS k
  GROUP BY f.store, f.row_key, k.weight, k.best
),
cited AS (
  SELECT *, row_number() OVER () AS place FROM (
    SELECT * FROM ranked
    ORDER BY score DESC, distance, store, document_name COLLATE "C", document_id, document_key COLLATE "C", segment_number LIMIT 3) AS r
),
hit AS (
  SELECT c.store, c.document_name, c.document_id, c.document_key, c.segment_number, c.distance, c.keyword_score, c.score, c.place, c.node, c.node_distance, t."segment"::text AS segment, ml_rag._as_jsonb(t."metadata") AS metadata FROM cited AS c JOIN ONLY public.handbook AS t ON c.store = 1 AND t.ctid = c.row_key
)
SELECT json_agg(json_build_object('segment', h.segment, 'distance', h.distance, 'document_name', h.document_name, 'vector_store', (ARRAY['public.handbook'])[h.store], 'document_id', h.document_id, 'document_key', h.document_key, 'segment_number', h.segment_number, 'metadata', h.metadata, 'score', h.score, 'keyword_score', h.keyword_score, 'node', h.node, 'node_distance', h.node_distance) ORDER BY h.place)::text AS hits, count(*) AS n,
  round(max(h.distance), 4)::text AS threshold, false AS is_percentage,
  EXISTS (SELECT FROM ranked) AS has_candidates, (SELECT min(distance) FROM ranked)::text AS nearest, NULL::text AS "limit",
  (ARRAY[(SELECT CASE WHEN coalesce(n.n, 0) < 100 THEN CASE WHEN w.most < 0 THEN 'missing' WHEN w.most > 0 THEN 'short' END WHEN n.n = w.most AND n.farthest <= (SELECT max(distance) FROM arm1) THEN 'tied' END FROM (SELECT count(*) AS n, max(distance) AS farthest FROM arm1_found) AS n, (SELECT CASE WHEN cardinality($1) >= $8 THEN -1 END AS most) AS w)] || ARRAY[(SELECT CASE WHEN coalesce(n.n, 0) < 100 THEN CASE WHEN w.most < 0 THEN 'missing' WHEN w.most > 0 THEN 'short' END WHEN n.n = w.most AND n.farthest <= (SELECT max(distance) FROM arm2) THEN 'tied' END FROM (SELECT count(*) AS n, max(distance) AS farthest FROM arm2_found) AS n, (SELECT CASE WHEN cardinality($4) >= $9 THEN -1 END AS most) AS w)])::text[] AS checks
FROM (SELECT h.*, row_number() OVER (ORDER BY h.place) AS rank FROM hit AS h) AS h;

-- nodes as hits, beside segments
-- $1 keys_1_1, $2 scores_1_1, $3 vector, $4 keys_2_1, $5 scores_2_1, $6 vector_3, $7 read_bytes, $8 read_bytes_3, $9 candidates_1_1, $10 candidates_2_1
WITH arm1_found AS (
  SELECT 1 AS store, s.row_key, s.document_name, s.document::bigint AS document_id, s.document::text AS document_key, s.segment_number, s.node, CASE WHEN abs(s.node_distance) < 'Infinity' THEN round((s.node_distance + 0)::numeric, 4) END AS node_distance, s.node_key, s.own, CASE WHEN abs(s.distance) < 'Infinity' THEN round((s.distance + 0)::numeric, 4) END AS distance
  FROM (SELECT t.ctid AS row_key, t."document_name"::text AS document_name, t."document_id" AS document, t."segment_number"::bigint AS segment_number, b.node, b.node_number, b.node_distance, b.node_key, b.own, t."segment_embedding" OPERATOR(public.<=>) $3 AS distance FROM (
      SELECT n."document_id", n."segment_number", n.node, n.node_number, n."node_embedding" OPERATOR(public.<=>) $3 AS node_distance, 'public.handbook_nodes' || u.row_key AS node_key, n.text_hash, u.own
      FROM unnest($1, $2) AS u (row_key, own) JOIN public.handbook_nodes AS n ON n.ctid = u.row_key::tid) AS b JOIN ONLY public.handbook AS t ON b."document_id" = t."document_id" AND b."segment_number" = t."segment_number"
    WHERE t."segment" IS NOT NULL AND b.text_hash = hashtextextended(concat(t."segment") COLLATE "C", 0)
    ORDER BY b.own, (t."document_name"::text) COLLATE "C", t."document_id", t."segment_number"::bigint, b.node_number LIMIT 100) AS s
),
arm1 AS (
  SELECT *, row_number() OVER () AS place, (1 - own)::float8 AS value FROM (
  SELECT * FROM arm1_found
  ORDER BY own, store, document_name COLLATE "C", document_id, document_key COLLATE "C", segment_number, node COLLATE "C" LIMIT 100) AS b
),
arm2_found AS (
  SELECT 1 AS store, s.row_key, s.document_name, s.document::bigint AS document_id, s.document::text AS document_key, s.segment_number, s.node, CASE WHEN abs(s.node_distance) < 'Infinity' THEN round((s.node_distance + 0)::numeric, 4) END AS node_distance, s.node_key, s.own AS score, CASE WHEN abs(s.distance) < 'Infinity' THEN round((s.distance + 0)::numeric, 4) END AS distance
  FROM (SELECT s.* FROM (SELECT DISTINCT ON (b.node_key) t.ctid AS row_key, t."document_name"::text AS document_name, t."document_id" AS document, t."segment_number"::bigint AS segment_number, b.node, b.node_number, b.node_distance, b.node_key, b.own, t."segment_embedding" OPERATOR(public.<=>) $3 AS distance FROM (
      SELECT n."document_id", n."segment_number", n.node, n.node_number, NULL::float8 AS node_distance, 'public.summaries' || u.row_key AS node_key, n.text_hash, u.own
      FROM unnest($4, $5) AS u (row_key, own) JOIN public.summaries AS n ON n.ctid = u.row_key::tid) AS b JOIN ONLY public.handbook AS f ON b."document_id" = f."document_id" AND b."segment_number" = f."segment_number" JOIN ONLY public.handbook AS t ON t."document_id" = f."document_id"
    WHERE t."segment" IS NOT NULL ORDER BY b.node_key, (t."document_name"::text) COLLATE "C", t."document_id", t."segment_number"::bigint) AS s
    ORDER BY s.own DESC, s.document_name COLLATE "C", s.document, s.segment_number, s.node_number LIMIT 100) AS s
),
arm2 AS (
  SELECT *, row_number() OVER () AS place, score AS value FROM (
  SELECT * FROM arm2_found
  ORDER BY score DESC, store, document_name COLLATE "C", document_id, document_key COLLATE "C", segment_number, node COLLATE "C" LIMIT 100) AS b
),
arm3_found AS (
  SELECT 1 AS store, s.row_key, s.document_name, s.document::bigint AS document_id, s.document::text AS document_key, s.segment_number, NULL::text AS node, NULL::numeric AS node_distance, NULL::text AS node_key, s.bytes, round((s.own + 0)::numeric, 4)::float8 AS own, CASE WHEN abs(s.distance) < 'Infinity' THEN round((s.distance + 0)::numeric, 4) END AS distance
  FROM (SELECT t.ctid AS row_key, t."document_name"::text AS document_name, t."document_id" AS document, t."segment_number"::bigint AS segment_number, t."segment_embedding" OPERATOR(public.<=>) $3 AS distance, octet_length(t."segment"::text) AS bytes, t."e2" OPERATOR(public.<=>) $6::public.halfvec AS own
    FROM ONLY public.handbook AS t WHERE t."e2" IS NOT NULL AND t."segment" IS NOT NULL
    ORDER BY t."e2" OPERATOR(public.<=>) $6::public.halfvec LIMIT 104) AS s
  WHERE abs(s.own) < 'Infinity'
),
arm3 AS (
  SELECT *, row_number() OVER () AS place, CASE WHEN min(own::float8) OVER () / 2 = max(own::float8) OVER () / 2 THEN 1 ELSE (own::float8 / 2 - max(own::float8) OVER () / 2) / (min(own::float8) OVER () / 2 - max(own::float8) OVER () / 2) END AS value FROM (
  SELECT * FROM arm3_found
  ORDER BY own, store, document_name COLLATE "C", document_id, document_key COLLATE "C", segment_number, node COLLATE "C" LIMIT 100) AS b
),
found AS MATERIALIZED (
  SELECT 1 AS arm, place, value, store, row_key, document_name, document_id, document_key, segment_number, node, node_distance, node_key, distance, NULL::float8 AS keyword_score, NULL::integer AS bytes FROM arm1
  UNION ALL SELECT 2 AS arm, place, value, store, row_key, document_name, document_id, document_key, segment_number, node, node_distance, node_key, distance, score AS keyword_score, NULL::integer AS bytes FROM arm2
  UNION ALL SELECT 3 AS arm, place, value, store, row_key, document_name, document_id, document_key, segment_number, node, node_distance, node_key, distance, NULL::float8 AS keyword_score, bytes FROM arm3
),
noded AS MATERIALIZED (
  SELECT f.*, coalesce(f.node_key, n.node_key) AS hit_key FROM found AS f
  LEFT JOIN (SELECT DISTINCT store, row_key, node_key FROM found WHERE node_key IS NOT NULL AND NOT (arm = 2 AND store = 1)) AS n ON f.node_key IS NULL AND n.store = f.store AND n.row_key = f.row_key
),
strength AS (
  SELECT b.arm, b.best, coalesce(
      1 - sum(greatest(f.value - b.nothing, 0) / nullif(b.best - b.nothing, 0)) / 30, 0) * power(b.read, 3) AS clear
  FROM (SELECT arm, best, read, CASE WHEN arm IN (1, 3) THEN least ELSE 0 END AS nothing FROM (SELECT arm, max(value) AS best, min(value) AS least, coalesce(avg(least(1, CASE arm WHEN 3 THEN $8 ELSE $7 END / nullif(bytes, 0))), 1) AS read FROM found GROUP BY arm) AS b) AS b
    JOIN found AS f ON f.arm = b.arm AND f.place <= 30
  GROUP BY b.arm, b.best, b.read, b.nothing
),
weight AS MATERIALIZED (
  SELECT arm, best, is_known, share * CASE WHEN is_last THEN 1 - coalesce(sum(weight) OVER before, 0) ELSE weight END AS weight
  FROM (SELECT a.arm, a.part, a.share, a.is_known, a.is_last, s.best, CASE WHEN sum(a.given * coalesce(s.clear, 0)) OVER part > 0 THEN a.given * coalesce(s.clear, 0) / sum(a.given * coalesce(s.clear, 0)) OVER part
      ELSE a.given / coalesce(nullif(sum(a.given) OVER part, 0), 1) END AS weight
    FROM (VALUES (1, 1, 0.25::float8, 1::float8, false, false), (2, 1, 0.5::float8, 1::float8, false, false), (3, 1, 0.25::float8, 1::float8, false, true)) AS a (arm, part, given, share, is_known, is_last) LEFT JOIN strength AS s USING (arm) WINDOW part AS (PARTITION BY a.part)) AS a
  WINDOW before AS (PARTITION BY part ORDER BY arm ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING)
),
known AS MATERIALIZED (
  SELECT sum(weight) AS weight, max(best) AS best FROM weight WHERE is_known AND best > 0
),
ranked AS (
  SELECT f.store, f.row_key, min(f.document_name) AS document_name, min(f.document_id) AS document_id, min(f.document_key) AS document_key, min(f.segment_number) AS segment_number, (array_agg(f.node ORDER BY f.node_distance NULLS LAST, f.arm) FILTER (WHERE f.node IS NOT NULL))[1] AS node, min(f.node_distance) AS node_distance, coalesce(min(f.node_distance), min(f.distance)) AS distance, max(f.keyword_score) AS keyword_score,
    CASE WHEN k.weight > 0 THEN k.weight * least(1, greatest(0, (1 - min(f.distance))::float8) / k.best) ELSE 0 END + coalesce(sum(CASE WHEN w.best > 0 AND NOT w.is_known THEN w.weight * least(1, greatest(0, f.value) / w.best) END), 0) AS score
  FROM noded AS f JOIN weight AS w USING (arm), known AS k
  GROUP BY f.store, f.row_key, f.hit_key, k.weight, k.best
),
cited AS (
  SELECT *, row_number() OVER () AS place FROM (
    SELECT * FROM ranked
    ORDER BY score DESC, distance, store, document_name COLLATE "C", document_id, document_key COLLATE "C", segment_number, node COLLATE "C" LIMIT 3) AS r
),
hit AS (
  SELECT c.store, c.document_name, c.document_id, c.document_key, c.segment_number, c.distance, c.keyword_score, c.score, c.place, c.node, c.node_distance, coalesce(c.node, t."segment"::text) AS segment, ml_rag._as_jsonb(t."metadata") AS metadata FROM cited AS c JOIN ONLY public.handbook AS t ON c.store = 1 AND t.ctid = c.row_key
)
SELECT json_agg(json_build_object('segment', h.segment, 'distance', h.distance, 'document_name', h.document_name, 'node', h.node, 'node_distance', h.node_distance) ORDER BY h.place)::text AS hits, count(*) AS n,
  round(max(h.distance), 4)::text AS threshold, false AS is_percentage,
  (ARRAY[(SELECT CASE WHEN coalesce(n.n, 0) < 100 THEN CASE WHEN w.most < 0 THEN 'missing' WHEN w.most > 0 THEN 'short' END WHEN n.n = w.most AND n.farthest <= (SELECT max(distance) FROM arm1) THEN 'tied' END FROM (SELECT count(*) AS n, max(distance) AS farthest FROM arm1_found) AS n, (SELECT CASE WHEN cardinality($1) >= $9 THEN -1 END AS most) AS w)] || ARRAY[(SELECT CASE WHEN coalesce(n.n, 0) < 100 THEN CASE WHEN w.most < 0 THEN 'missing' WHEN w.most > 0 THEN 'short' END WHEN n.n = w.most AND n.farthest <= (SELECT max(distance) FROM arm2) THEN 'tied' END FROM (SELECT count(*) AS n, max(distance) AS farthest FROM arm2_found) AS n, (SELECT CASE WHEN cardinality($4) >= $10 THEN -1 END AS most) AS w)] || ARRAY[(SELECT CASE WHEN coalesce(n.n, 0) < 100 THEN CASE WHEN w.most < 0 THEN 'missing' WHEN w.most > 0 THEN 'short' END WHEN n.n = w.most AND n.farthest <= (SELECT max(own) FROM arm3) THEN 'tied' END FROM (SELECT count(*) AS n, max(own) AS farthest FROM arm3_found) AS n, (SELECT 104 AS most) AS w)])::text[] AS checks
FROM (SELECT h.*, row_number() OVER (ORDER BY h.place) AS rank FROM hit AS h) AS h;

-- keys of nodes
-- $1 vector
WITH semantic_found AS (
  SELECT 1 AS store, s.row_key, s.document_name, s.document::bigint AS document_id, s.document::text AS document_key, s.segment_number, s.segment, s.metadata, round((s.distance + 0)::numeric, 4) AS distance
  FROM (SELECT t.ctid AS row_key, t."document_name"::text AS document_name, t."document_id" AS document, t."segment_number"::bigint AS segment_number, t."segment"::text AS segment, ml_rag._as_jsonb(t."metadata") AS metadata, t."segment_embedding" OPERATOR(public.<=>) $1 AS distance
    FROM ONLY public.handbook AS t WHERE t."segment_embedding" IS NOT NULL AND t."segment" IS NOT NULL
    ORDER BY t."segment_embedding" OPERATOR(public.<=>) $1 LIMIT 4) AS s
  WHERE abs(s.distance) < 'Infinity'
),
semantic AS (
  SELECT *, row_number() OVER () AS place FROM (
  SELECT * FROM semantic_found
  ORDER BY distance, store, document_name COLLATE "C", document_id, document_key COLLATE "C", segment_number LIMIT 3) AS b
),
ranked AS (
  SELECT store, row_key, document_name, document_id, document_key, segment_number, segment, metadata, distance, NULL::float8 AS keyword_score, NULL::float8 AS score, place FROM semantic
)
SELECT coalesce(array_agg(row_key::text ORDER BY place), '{}') AS keys,
  coalesce(array_agg(coalesce(score, distance) ORDER BY place), '{}') AS scores, (ARRAY[(SELECT CASE WHEN coalesce(n.n, 0) < 3 THEN CASE WHEN w.most < 0 THEN 'missing' WHEN w.most > 0 THEN 'short' END WHEN n.n = w.most AND n.farthest <= (SELECT max(distance) FROM semantic) THEN 'tied' END FROM (SELECT count(*) AS n, max(distance) AS farthest FROM semantic_found) AS n, (SELECT 4 AS most) AS w)])::text[] AS checks
FROM ranked;

-- told what each arm has found
-- $1 vector, $2 keys_2_1, $3 scores_2_1, $4 weight_1, $5 weight_2, $6 max_distance, $7 candidates_2_1
WITH semantic_found AS (
  SELECT 1 AS store, s.row_key, s.document_name, s.document::bigint AS document_id, s.document::text AS document_key, s.segment_number, round((s.distance + 0)::numeric, 4) AS distance
  FROM (SELECT t.ctid AS row_key, t."document_name"::text AS document_name, t."document_id" AS document, t."segment_number"::bigint AS segment_number, t."segment_embedding" OPERATOR(public.<=>) $1 AS distance
    FROM ONLY public.handbook AS t WHERE t."segment_embedding" IS NOT NULL AND t."segment" IS NOT NULL
    ORDER BY t."segment_embedding" OPERATOR(public.<=>) $1 LIMIT 104) AS s
  WHERE abs(s.distance) < 'Infinity'
),
semantic AS (
  SELECT *, row_number() OVER () AS place, (1 - distance)::float8 AS value FROM (
  SELECT * FROM semantic_found
  ORDER BY distance, store, document_name COLLATE "C", document_id, document_key COLLATE "C", segment_number LIMIT 100) AS b
),
keyword_found AS (
  SELECT 1 AS store, s.row_key, s.document_name, s.document::bigint AS document_id, s.document::text AS document_key, s.segment_number, s.score, CASE WHEN abs(s.distance) < 'Infinity' THEN round((s.distance + 0)::numeric, 4) END AS distance
  FROM (SELECT t.ctid AS row_key, t."document_name"::text AS document_name, t."document_id" AS document, t."segment_number"::bigint AS segment_number, w.score, t."segment_embedding" OPERATOR(public.<=>) $1 AS distance
    FROM unnest($2, $3) AS w (key, score) JOIN ONLY public.handbook AS t ON t."document_id" = (w.key::text[])[1]::bigint AND t."segment_number" = (w.key::text[])[2]::integer
    WHERE t."segment" IS NOT NULL OFFSET 0) AS s
),
keyword AS (
  SELECT *, row_number() OVER () AS place, score AS value FROM (
  SELECT * FROM keyword_found
  ORDER BY score DESC, store, document_name COLLATE "C", document_id, document_key COLLATE "C", segment_number LIMIT 100) AS b
),
found AS MATERIALIZED (
  SELECT 1 AS arm, place, value, store, row_key, document_name, document_id, document_key, segment_number, distance, NULL::float8 AS keyword_score FROM semantic
  UNION ALL SELECT 2 AS arm, place, value, store, row_key, document_name, document_id, document_key, segment_number, distance, score AS keyword_score FROM keyword
),
strength AS (
  SELECT arm, max(value) AS best FROM found GROUP BY arm
),
weight AS MATERIALIZED (
  SELECT arm, best, is_known, share * CASE WHEN is_last THEN 1 - coalesce(sum(weight) OVER before, 0) ELSE weight END AS weight
  FROM (SELECT a.arm, a.part, a.share, a.is_known, a.is_last, s.best, CASE WHEN sum(a.given) OVER part > 0 THEN a.given / sum(a.given) OVER part
      ELSE a.given / coalesce(nullif(sum(a.given) OVER part, 0), 1) END AS weight
    FROM (VALUES (1, 1, $4, 1::float8, true, false), (2, 1, $5, 1::float8, false, false)) AS a (arm, part, given, share, is_known, is_last) LEFT JOIN strength AS s USING (arm) WINDOW part AS (PARTITION BY a.part)) AS a
  WINDOW before AS (PARTITION BY part ORDER BY arm ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING)
),
known AS MATERIALIZED (
  SELECT sum(weight) AS weight, max(best) AS best FROM weight WHERE is_known AND best > 0
),
ranked AS (
  SELECT f.store, f.row_key, min(f.document_name) AS document_name, min(f.document_id) AS document_id, min(f.document_key) AS document_key, min(f.segment_number) AS segment_number, min(f.distance) AS distance, max(f.keyword_score) AS keyword_score,
    CASE WHEN k.weight > 0 THEN k.weight * least(1, greatest(0, (1 - min(f.distance))::float8) / k.best) ELSE 0 END + coalesce(sum(CASE WHEN w.best > 0 AND NOT w.is_known THEN w.weight * least(1, greatest(0, f.value) / w.best) END), 0) AS score
  FROM found AS f JOIN weight AS w USING (arm), known AS k
  GROUP BY f.store, f.row_key, k.weight, k.best
),
threshold AS (
  SELECT $6 AS distance, false AS is_percentage
),
cited AS (
  SELECT *, row_number() OVER () AS place FROM (
    SELECT * FROM ranked
    WHERE distance <= (SELECT distance FROM threshold)
    ORDER BY score DESC, distance, store, document_name COLLATE "C", document_id, document_key COLLATE "C", segment_number LIMIT 3) AS r
),
hit AS (
  SELECT c.store, c.document_name, c.document_id, c.document_key, c.segment_number, c.distance, c.keyword_score, c.score, c.place, t."segment"::text AS segment, ml_rag._as_jsonb(t."metadata") AS metadata FROM cited AS c JOIN ONLY public.handbook AS t ON c.store = 1 AND t.ctid = c.row_key
)
SELECT json_agg(json_build_object('segment', h.segment, 'distance', h.distance, 'document_name', h.document_name, 'vector_store', (ARRAY['public.handbook'])[h.store], 'document_id', h.document_id, 'document_key', h.document_key, 'segment_number', h.segment_number, 'metadata', h.metadata, 'score', h.score, 'keyword_score', h.keyword_score) ORDER BY h.place)::text AS hits, count(*) AS n,
  round((SELECT distance FROM threshold), 4)::text AS threshold, (SELECT is_percentage FROM threshold) AS is_percentage,
  EXISTS (SELECT FROM ranked) AS has_candidates, (SELECT min(distance) FROM ranked)::text AS nearest, (SELECT distance FROM threshold)::text AS "limit",
  ARRAY[(SELECT count(*) FROM semantic), (SELECT count(*) FROM keyword), (SELECT count(*) FROM ranked), (SELECT count(*) FROM ranked WHERE distance <= (SELECT distance FROM threshold))] AS counts, (ARRAY[(SELECT coalesce(n.n, 0) FROM (SELECT count(*) AS n, max(distance) AS farthest FROM semantic_found) AS n, (SELECT 0 AS most) AS w)] || ARRAY[(SELECT coalesce(n.n, 0) FROM (SELECT count(*) AS n, max(distance) AS farthest FROM keyword_found) AS n, (SELECT 0 AS most) AS w)])::bigint[] AS found,
  json_build_array((SELECT json_agg(json_build_object('vector_store', (ARRAY['public.handbook'])[r.store], 'document_name', r.document_name, 'document_id', r.document_id, 'document_key', r.document_key, 'segment_number', r.segment_number, 'distance', r.distance) ORDER BY r.place) FROM semantic AS r), (SELECT json_agg(json_build_object('vector_store', (ARRAY['public.handbook'])[r.store], 'document_name', r.document_name, 'document_id', r.document_id, 'document_key', r.document_key, 'segment_number', r.segment_number, 'distance', r.distance, 'keyword_score', r.score) ORDER BY r.place) FROM keyword AS r), (SELECT json_agg(json_build_object('vector_store', (ARRAY['public.handbook'])[r.store], 'document_name', r.document_name, 'document_id', r.document_id, 'document_key', r.document_key, 'segment_number', r.segment_number, 'distance', r.distance, 'score', r.score, 'keyword_score', r.keyword_score) ORDER BY r.score DESC, r.distance, store, document_name COLLATE "C", document_id, document_key COLLATE "C", segment_number) FROM ranked AS r))::text AS lists,
  (ARRAY[(SELECT CASE WHEN coalesce(n.n, 0) < 100 THEN CASE WHEN w.most < 0 THEN 'missing' WHEN w.most > 0 THEN 'short' END WHEN n.n = w.most AND n.farthest <= (SELECT max(distance) FROM semantic) THEN 'tied' END FROM (SELECT count(*) AS n, max(distance) AS farthest FROM semantic_found) AS n, (SELECT 104 AS most) AS w)] || ARRAY[(SELECT CASE WHEN coalesce(n.n, 0) < 100 THEN CASE WHEN w.most < 0 THEN 'missing' WHEN w.most > 0 THEN 'short' END WHEN n.n = w.most AND n.farthest <= (SELECT max(distance) FROM keyword) THEN 'tied' END FROM (SELECT count(*) AS n, max(distance) AS farthest FROM keyword_found) AS n, (SELECT CASE WHEN cardinality($2) >= $7 THEN -1 END AS most) AS w)])::text[] AS checks
FROM (SELECT h.*, row_number() OVER (ORDER BY h.place) AS rank FROM hit AS h) AS h;
