"""A database of the load test's own: roles, a store of many segments with both indexes, one of real documents."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import psycopg
from pgvector import Vector
from pgvector.psycopg import register_vector
from psycopg.conninfo import make_conninfo
from psycopg.types.json import Jsonb

from bench import corpus

DATABASE = "ml_rag_load"
ROWS, DIMENSIONS = 20_000, 384
PARAGRAPHS = 600
MODEL = "all_minilm_l6_v2"
SAMPLES = Path(__file__).parents[2] / "docs" / "samples"
#: who asks and who loads; they belong to the cluster, hence the prefix
ASKER, LOADER = "ml_rag_load_asker", "ml_rag_load_loader"


def make(dsn: str, rows: int, loading_sessions: int) -> str:
    """Make it anew; its DSN. One store a loading session: loads of one store wait for each other."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        row = connection.execute("SELECT value FROM ml_rag.setting WHERE name = 'model_server'").fetchone()
        assert row is not None
        connection.execute(f"DROP DATABASE IF EXISTS {DATABASE} WITH (FORCE)")
        connection.execute(f"CREATE DATABASE {DATABASE}")
    own = make_conninfo(dsn, dbname=DATABASE)
    with psycopg.connect(own, autocommit=True) as connection:
        connection.execute("SET client_min_messages = warning")
        connection.execute("CREATE EXTENSION ml_rag CASCADE")
        connection.execute("SELECT ml_rag.configure('model_server', %s)", row)
        for role, group in ((ASKER, "ml_rag_user"), (LOADER, "ml_rag_loader, pg_read_server_files")):
            if connection.execute("SELECT FROM pg_roles WHERE rolname = %s", (role,)).fetchone() is None:
                connection.execute(f"CREATE ROLE {role}")
                connection.execute(f"GRANT {group.split(', ')[0]} TO {role}")
                if "," in group:
                    connection.execute(f"GRANT {group.split(', ')[1]} TO {role}")
        connection.execute(f"GRANT CREATE ON SCHEMA public TO {LOADER}")
        # calls that name no store search those that are being loaded, too
        searched = f"SELECT ml_rag.configure('searched_owners', quote_ident(current_user) || ', {LOADER}')"
        connection.execute(searched)
        _segments(connection, rows)
        connection.execute(f"SET SESSION AUTHORIZATION {LOADER}")
        stores = ["samples", *(f"loaded_{n}" for n in range(loading_sessions))]
        for store in stores:
            connection.execute("SELECT ml_rag.create_store(%s)", (f"public.{store}",))
            connection.execute(f"GRANT SELECT ON {store} TO {ASKER}")
        for path in sorted(SAMPLES.iterdir()):
            connection.execute("SELECT ml_rag.load_document('samples', %s, %s)", (path.name, path.read_bytes()))
        connection.execute("SELECT ml_rag.index_store('samples')")
    return own


def _segments(connection: psycopg.Connection, rows: int) -> None:
    """Texts with the word frequencies of real ones; vectors around 200 centres, so that neighbours exist."""
    register_vector(connection)
    connection.execute(
        "CREATE TABLE segments (document_name text NOT NULL, metadata jsonb NOT NULL, document_id bigint, "
        f"segment_number integer, segment text NOT NULL, segment_embedding vector({DIMENSIONS}), "
        "PRIMARY KEY (document_id, segment_number))"
    )
    random = np.random.default_rng(7)
    centres = random.normal(size=(200, DIMENSIONS))
    with connection.cursor().copy("COPY segments FROM STDIN WITH (FORMAT BINARY)") as copy:
        copy.set_types(["text", "jsonb", "int8", "int4", "text", "vector"])
        for i, text in enumerate(corpus.segments(rows)):
            vector = centres[random.integers(200)] + random.normal(size=DIMENSIONS)
            name, metadata = f"document {i // 10}", Jsonb({"part": i % 7})
            copy.write_row((name, metadata, i // 10, i % 10, text, Vector(vector / np.linalg.norm(vector))))
    connection.execute(f"COMMENT ON COLUMN segments.segment_embedding IS 'GENAI_OPTIONS=EMBED_MODEL_ID={MODEL}'")
    connection.execute("SELECT ml_rag.enable_keyword_search('segments')")
    connection.execute("SELECT ml_rag.index_store('segments')")
    connection.execute(f"GRANT SELECT ON segments TO {ASKER}")
    connection.execute("VACUUM ANALYZE segments")


def questions() -> list[str]:
    """Questions to ask, as people ask them; of this project's own pages where the evaluation data is not there."""
    return [text[:200] for text in itertools.islice(corpus.questions(), 2000) if any(c.isalpha() for c in text)]


def paragraphs() -> list[str]:
    """Paragraphs of about 100 words, to make documents of."""
    return list(corpus.segments(PARAGRAPHS, seed=11))
