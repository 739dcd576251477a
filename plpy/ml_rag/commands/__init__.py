"""The subcommands of ``ml-rag``: module ``name`` holds the click command ``name``."""
