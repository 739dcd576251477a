"""How cost grows with rows, stores, sessions and tenants, always beside bare pgvector: docs/scale.md."""
