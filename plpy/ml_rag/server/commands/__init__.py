"""``ml-rag serve`` and ``ml-rag models``."""
