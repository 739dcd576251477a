"""What the files of docker/ must agree in, and the health check. `make docker-test` runs the images themselves."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, start_http_server

from ml_rag.client.worker import Metrics
from ml_rag.server.catalogue import load_catalogue
from support.servers import running_server

ROOT = Path(__file__).resolve().parents[2]
DOCKER = ROOT / "docker"
COMPOSE = (DOCKER / "compose.yaml").read_text()


def ids(file: str) -> dict[str, str]:
    """User or group -> its number, as a Dockerfile makes them."""
    text = (DOCKER / file).read_text()
    users = re.findall(r"useradd .*--uid (\d+) .* (\w+)(?: \\)?$", text, re.MULTILINE)
    groups = re.findall(r"groupadd --system --gid (\d+) (\w+)", text)
    return {f"user {name}": number for number, name in users} | {f"group {name}": number for number, name in groups}


def test_both_images_number_users_alike() -> None:
    server, database = ids("server.Dockerfile"), ids("database.Dockerfile")
    assert set(database) == {"user postgres", "group postgres"}
    assert {name: server[name] for name in database} == database
    # the folder of the socket is made by whichever container comes first
    made = re.findall(
        r"install -d -o (\S+) -g postgres -m 2750 /run/ml_rag", (DOCKER / "database.Dockerfile").read_text()
    )
    assert made == [server["user ml_rag"]]
    uid, gid = database["user postgres"], database["group postgres"]
    assert f"/run/postgresql:uid={uid},gid={gid},mode=2775" in COMPOSE


def test_the_models_that_are_fetched_are_those_that_are_preloaded() -> None:
    catalogue = load_catalogue(DOCKER / "ml_rag.toml")
    fetched = re.search(r"command: \[models, pull, (.*)\]", COMPOSE)
    assert fetched is not None
    assert tuple(fetched[1].split(", ")) == catalogue.server.preload
    assert all(catalogue.get(model) for model in catalogue.server.preload)


def test_the_database_looks_for_the_socket_where_the_server_makes_it() -> None:
    socket = load_catalogue(DOCKER / "ml_rag.toml").server.socket
    assert f"'unix:{socket}'" in (DOCKER / "initdb.sql").read_text()
    assert f'"{socket}"' in (DOCKER / "server-healthcheck.py").read_text()
    assert f"socket:{Path(socket).parent}" in COMPOSE


def test_the_tests_that_are_run_in_containers_are_there() -> None:
    named = re.findall(r"(?<![\w/])tests/[\w/.]+", re.sub(r"(?m)^ *#.*", "", (ROOT / "mk" / "docker.sh").read_text()))
    assert len(named) > 10
    assert [name for name in named if not (ROOT / name).exists()] == []


def healthcheck(socket: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-I", DOCKER / "server-healthcheck.py"],
        env={**os.environ, "ML_RAG_SOCKET": str(socket)},
        capture_output=True,
        text=True,
        timeout=30,
    )


def test_the_health_check_of_a_server_that_answers_and_of_one_that_does_not(tmp_path: Path) -> None:
    with running_server(socket=tmp_path / "s.sock") as server:
        found = healthcheck(server.socket)
        assert (found.returncode, found.stderr) == (0, "")
        server.stop()
        found = healthcheck(server.socket)
        assert found.returncode == 1
        assert str(server.socket) in found.stderr


@pytest.mark.parametrize("file", ["compose.yaml", "compose.test.yaml"])
def test_no_container_gets_more_than_it_needs(file: str) -> None:
    text = (DOCKER / file).read_text()
    assert "privileged" not in text
    assert "docker.sock" not in text


def test_every_service_gives_up_its_capabilities() -> None:
    common, services = COMPOSE.split("\nx-service: &service\n")[1].split("\nservices:\n")
    for line in ("read_only: true", "cap_drop: [ALL]", '["no-new-privileges:true"]', "pids_limit:", "driver: local"):
        assert line in common
    each = re.split(r"^  (?=\w+:$)", services.split("\nvolumes:\n")[0], flags=re.MULTILINE)[1:]
    assert [service.split(":")[0] for service in each] == ["models", "server", "db", "worker"]
    for service in each:
        assert "\n    <<: *service\n" in service
        assert not re.findall(r"read_only: false|cap_|security_opt|pids_limit", service)
        # in memory, and bounded
        folders = re.findall(r'"(/[^"]+)"', re.findall(r"tmpfs: \[(.*)\]", service)[0])
        assert [folder for folder in folders if "size=" not in folder] == []


def test_every_volume_of_an_image_is_a_named_one_or_in_memory() -> None:
    """Docker makes an anonymous one of each other, and leaves it behind."""
    services = re.split(r"^  (?=\w+:$)", COMPOSE.split("\nservices:\n")[1], flags=re.MULTILINE)[1:]
    for service in services[:4]:
        file = "database.Dockerfile" if "ml_rag-database" in service else "server.Dockerfile"
        declared = re.findall(r"^VOLUME \[(.*)\]", (DOCKER / file).read_text(), re.MULTILINE)[0]
        for folder in re.findall(r'"(.+?)"', declared):
            assert re.search(rf"\w:{folder}\b|\"{folder}:size=", service), (service.split(":")[0], folder)


def test_each_image_is_built_for_one_service() -> None:
    """Compose gives the same build another label for each service, so that the one before is left without a tag."""
    services = re.split(r"^  (?=\w+:$)", COMPOSE.split("\nservices:\n")[1], flags=re.MULTILINE)[1:5]
    images = {name: [text for text in services if name in text] for name in ("ml_rag-server", "ml_rag-database")}
    assert {name: len(texts) for name, texts in images.items()} == {"ml_rag-server": 3, "ml_rag-database": 1}
    # the service that all others of it come after
    assert [[text.split(":")[0] for text in texts if "    build:" in text] for texts in images.values()] == [
        ["models"],
        ["db"],
    ]


@pytest.mark.parametrize(
    ("ago", "status"), [(0, 0), (299, 0), (302, 1), (None, 1)], ids=["now", "lately", "too long ago", "never"]
)
def test_the_health_check_of_a_worker(ago: int | None, status: int) -> None:
    text = (DOCKER / "server-healthcheck.py").read_text()
    port = int(re.findall(r"127\.0\.0\.1:(\d+)", text)[0])
    assert f'command: [worker, --metrics-port, "{port}"]' in COMPOSE
    registry = CollectorRegistry()
    metrics = Metrics(registry)
    if ago is not None:
        metrics.looked.set(time.time() - ago)
    server, thread = start_http_server(0, "127.0.0.1", registry)
    try:
        found = subprocess.run(
            [sys.executable, "-I", "-c", text.replace(str(port), str(server.server_port)), "worker"],
            capture_output=True,
            text=True,
            timeout=30,
        )
        assert found.returncode == status, found.stderr
        assert ("has not looked" in found.stderr) == (status == 1)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
