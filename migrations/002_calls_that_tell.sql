-- after 0.1.0
-- Functions that take, beside all else, the call they tell of.
DROP FUNCTION ml_rag._retrieve(text, jsonb);
DROP FUNCTION ml_rag._rank(text, text[], jsonb);
DROP FUNCTION ml_rag._index_keywords(regclass, jsonb, boolean);
DROP FUNCTION ml_rag._evaluate_question(jsonb, jsonb, jsonb, integer[]);
