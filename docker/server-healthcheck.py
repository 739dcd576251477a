#!/opt/ml_rag/bin/python -I
"""Exit status 0 when the model server answers on its socket, or with the argument ``worker`` when the worker has looked
at its tables lately; what is wrong goes to standard error."""

import http.client
import json
import os
import re
import socket
import sys
import time

PATH = os.environ.get("ML_RAG_SOCKET", "/run/ml_rag/ml_rag.sock")
SECONDS = 4
WORKER = "http://127.0.0.1:9187/metrics"
#: since the worker last looked: it looks every 30 s, and after a few batches of a table
WORKER_SECONDS = 300


def status() -> str:
    connection = http.client.HTTPConnection("localhost", timeout=SECONDS)
    connection.sock = socket.socket(socket.AF_UNIX)
    connection.sock.settimeout(SECONDS)
    connection.sock.connect(PATH)
    connection.request("GET", "/healthz")
    return str(json.loads(connection.getresponse().read())["status"])


def worker() -> str:
    host, path = re.fullmatch("http://([^/]*)(.*)", WORKER).groups()
    connection = http.client.HTTPConnection(host, timeout=SECONDS)
    connection.request("GET", path)
    found = re.search(r"^ml_rag_worker_looked_timestamp_seconds (\S+)$", connection.getresponse().read().decode(), re.M)
    ago = time.time() - float(found[1])
    return "ok" if ago <= WORKER_SECONDS else f"it has not looked for {ago:.0f} s"


where, check = (WORKER, worker) if sys.argv[1:] == ["worker"] else (PATH, status)
try:
    found = check()
except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError) as error:
    sys.exit(f"{where}: {error!r}")
sys.exit(None if found == "ok" else f"{where}: {found}")
