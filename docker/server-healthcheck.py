#!/opt/ml_rag/bin/python -I
"""Exit status 0 when the model server answers on its socket; what is wrong goes to standard error."""

import http.client
import json
import os
import socket
import sys

PATH = os.environ.get("ML_RAG_SOCKET", "/run/ml_rag/ml_rag.sock")
SECONDS = 4


def status() -> str:
    connection = http.client.HTTPConnection("localhost", timeout=SECONDS)
    connection.sock = socket.socket(socket.AF_UNIX)
    connection.sock.settimeout(SECONDS)
    connection.sock.connect(PATH)
    connection.request("GET", "/healthz")
    return str(json.loads(connection.getresponse().read())["status"])


try:
    found = status()
except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
    sys.exit(f"{PATH}: {error!r}")
sys.exit(None if found == "ok" else f"{PATH}: {found}")
