-- What the first start does in the database PGDATABASE. Further files: /docker-entrypoint-initdb.d/*.sql
CREATE EXTENSION ml_rag CASCADE;
SET client_min_messages = error; -- the model server may start after it
SELECT ml_rag.configure('model_server', 'unix:/run/ml_rag/ml_rag.sock');
