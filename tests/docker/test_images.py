"""What the files of docker/ must agree in, and the health check. `make docker-test` runs the images themselves."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ml_rag.server.catalogue import load_catalogue
from ml_rag.testing import running_server

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
    services = re.split(
        r"^  (?=\w+:$)", COMPOSE.split("\nservices:\n")[1].split("\nvolumes:\n")[0], flags=re.MULTILINE
    )[1:]
    assert [service.split(":")[0] for service in services] == ["models", "server", "db", "worker"]
    for service in services:
        assert "cap_drop: [ALL]" in service
        assert "no-new-privileges:true" in service
