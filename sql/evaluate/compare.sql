-- compare: two runs of the ruler, question by question.

CREATE FUNCTION @extschema@.ml_rag_compare_runs(run_a bigint, run_b bigint)
RETURNS TABLE (measure text, a float8, b float8, difference float8, p_value float8, n bigint, better bigint,
               worse bigint)
LANGUAGE plpgsql STABLE PARALLEL UNSAFE ROWS 20 SET search_path FROM CURRENT AS $$
-- purpose: two runs, measure by measure, over the questions that have it in both
-- Reads: the tables of runs, as the caller
#variable_conflict use_column
DECLARE
  _missing text;
  _n bigint;
BEGIN
  SELECT string_agg(w.id::text, ', ' ORDER BY w.place) INTO _missing
  FROM unnest(ARRAY[$1, $2]) WITH ORDINALITY AS w (id, place)
  WHERE NOT EXISTS (SELECT FROM ml_rag.evaluation_run AS r WHERE r.run_id = w.id);
  IF $1 IS NULL OR $2 IS NULL OR _missing IS NOT NULL THEN
    RAISE EXCEPTION USING ERRCODE = '22023', MESSAGE = 'evaluation run does not exist',
      DETAIL = format('Run %s.', coalesce(_missing, 'NULL')),
      HINT = 'SELECT run_id, name, started_at FROM ml_rag.evaluation_run lists the runs that you may see.';
  END IF;
  SELECT count(*), min(coalesce(x.question_id, y.question_id)) INTO _n, _missing
  FROM (SELECT q.question_id, q.question FROM ml_rag.evaluation_question AS q WHERE q.run_id = $1) AS x
  FULL JOIN (SELECT q.question_id, q.question FROM ml_rag.evaluation_question AS q WHERE q.run_id = $2) AS y
    ON y.question_id = x.question_id
  WHERE x.question_id IS NULL OR y.question_id IS NULL OR x.question IS DISTINCT FROM y.question;
  IF _n > 0 THEN
    RAISE EXCEPTION USING ERRCODE = '22023', MESSAGE = 'the runs have different questions',
      DETAIL = format('%s questions are in only one of them or have another text, such as id %s.', _n,
        left(_missing, 200)),
      HINT = 'Evaluate the same questions with the same "limit" and "seed".';
  END IF;
  RETURN QUERY
    WITH value AS (
      SELECT q.run_id, q.question_id, e.key, e.value::text::float8 AS value
      FROM ml_rag.evaluation_question AS q
      CROSS JOIN LATERAL (SELECT m.key, m.value FROM jsonb_each(q.measures) AS m UNION ALL
                          SELECT l.key || '_ms', l.value FROM jsonb_each(q.latency) AS l) AS e
      WHERE q.run_id IN ($1, $2)
    ), pair AS (
      SELECT x.key, x.question_id, x.value AS a, y.value AS b, y.value - x.value AS d,
        -- of these less is better; an answer's length is neither
        CASE WHEN x.key LIKE '%\_ms' OR x.key = 'refused_wrongly' THEN -1
          WHEN x.key = 'answer_length' THEN 0 ELSE 1 END
          AS sign
      FROM value AS x JOIN value AS y ON y.question_id = x.question_id AND y.key = x.key
      WHERE x.run_id = $1 AND y.run_id = $2
    ), total AS (
      -- in one order, or the last digit would depend on the plan
      SELECT p.key, avg(p.a ORDER BY p.question_id) AS a, avg(p.b ORDER BY p.question_id) AS b,
        avg(p.d ORDER BY p.question_id) AS d,
        stddev_samp(p.d ORDER BY p.question_id) AS deviation, count(*) AS n,
        count(*) FILTER (WHERE p.d * p.sign > 0) AS better, count(*) FILTER (WHERE p.d * p.sign < 0) AS worse
      FROM pair AS p GROUP BY p.key
    )
    SELECT t.key, round(t.a::numeric, 4)::float8, round(t.b::numeric, 4)::float8,
      round(t.d::numeric, 4)::float8,
      -- a deviation of nothing but rounding tells nothing
      CASE WHEN t.deviation > 1e-9 * greatest(abs(t.a), abs(t.b)) THEN
        round(ml_rag._student_p(t.d / (t.deviation / sqrt(t.n::float8)), (t.n - 1)::integer)::numeric,
          6)::float8 END,
      t.n, t.better, t.worse
    FROM total AS t
    ORDER BY t.key LIKE '%\_ms', regexp_replace(t.key, '@.*', ''),
      nullif(split_part(t.key, '@', 2), '')::integer;
@CATCH@
END
$$;
COMMENT ON FUNCTION @extschema@.ml_rag_compare_runs(bigint, bigint) IS
$$compares two runs of ml_rag_evaluate over the same questions, measure by measure and stage by stage (…_ms)
a, b: means over the n questions that have the measure in both runs, rounded to 4 decimals. difference: b - a.
p_value: of the paired, two-sided t-test, null where the questions differ in nothing or all by the same.
better, worse: questions for which b is better or worse than a (less is better for times and refused_wrongly;
an answer's length counts as neither).
Errors: 22023 no such run among those you may see, or different questions.$$;
