"""ml_rag: retrieval-augmented generation inside PostgreSQL.

``ml_rag.backend`` runs inside the PostgreSQL backend and imports the standard library only;
``ml_rag.server`` is the model server; ``ml_rag.ingest`` parses and splits documents for it.
Importing this package imports nothing else.
"""

__version__ = "0.1.0"
