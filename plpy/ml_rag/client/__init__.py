"""The client: ``ml-rag load``, ``doctor``, ``eval``. Needs psycopg and no package of the model server."""
