-- metric: the distances between vectors. A metric is defined by its row alone.

-- Materialized: every search reads it.
CREATE MATERIALIZED VIEW ml_rag.metric AS
SELECT d.name, d.operator, d.operator_class, d.shift, d.is_complement, d.is_angle
FROM (VALUES
  ('COSINE', '<=>', 'cosine', 0, true, true),
  -- 1 - inner product: smaller is nearer, and normalised vectors get the cosine distance
  ('DOT', '<#>', 'ip', 1, true, false),
  ('EUCLIDEAN', '<->', 'l2', 0, false, false),
  ('MANHATTAN', '<+>', 'l1', 0, false, false)
) AS d (name, operator, operator_class, shift, is_complement, is_angle);
CREATE UNIQUE INDEX metric_key ON ml_rag.metric (name);
COMMENT ON MATERIALIZED VIEW ml_rag.metric IS
$$the values of distance_metric: pgvector's operator, and its operator class without the type; distance = shift + operator
similarity = 1 - distance where is_complement, else 1 / (1 + distance). is_angle: of a vector of zeros it is
undefined.$$;
