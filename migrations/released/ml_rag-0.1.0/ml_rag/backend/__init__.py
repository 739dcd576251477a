"""What runs inside the PostgreSQL backend: the standard library only, and never ``import plpy``.

A PL/Python body hands ``plpy`` over as an argument, so every module here can be tested without a server.
"""
