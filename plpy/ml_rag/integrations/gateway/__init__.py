"""An OpenAI-compatible endpoint whose answers come from ``ml_rag``. Needs ``pip install ".[gateway]"``.

A token stands for a role of the database: each statement is in a read-only transaction that has taken this role
(PostgREST's way), so a connection has no role of an earlier request. A model is a preset of options.
"""

from ml_rag.integrations.gateway.config import Config, digest
from ml_rag.integrations.gateway.serve import app

__all__ = ["Config", "app", "digest"]
