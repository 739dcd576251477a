"""Parsers, one module per family of formats; ``ml_rag.ingest.parse`` chooses among them.

A parser takes ``(name, content, request)`` and gives an ``abc.Document``. Its libraries are imported inside the
parser, so that a text file never waits for an office library.
"""
