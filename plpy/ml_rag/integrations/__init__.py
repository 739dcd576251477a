"""ml_rag in frameworks and for agents. Each module translates, and the database searches."""
