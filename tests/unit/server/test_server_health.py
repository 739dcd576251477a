"""What a running server tells about itself."""

from __future__ import annotations

import httpx

from support.processes import wait_until
from support.sandboxing import find_missing
from support.servers import running_server


def test_health_tells_whether_parsers_are_confined() -> None:
    """Before a document has come: the server finds it out when it starts."""
    missing = find_missing()
    assert missing is not None
    with running_server(tcp=True) as server:

        def parsers() -> dict[str, object]:
            found: dict[str, object] = httpx.get(f"{server.url}/healthz", timeout=10).json()["parsers"]
            return found

        wait_until(lambda: parsers()["confined"] is not None, 30)
        assert parsers() == {"confined": not missing, "missing": missing}
