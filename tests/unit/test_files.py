"""files.py: what a URI names, which files that is, reading them without leaving the folder, requests of them."""

from __future__ import annotations

import fnmatch
import os
import random
import re
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ml_rag import files
from ml_rag.errors import DocumentError, InvalidRequest
from ml_rag.files import Location


def nothing() -> None:
    pass


def make_deep(folder: Path, n: int) -> str:
    """A file below n folders, each with a name of 240 characters; its path, which may be too long to be used."""
    descriptor = os.open(folder, os.O_DIRECTORY)
    for _ in range(n):
        os.mkdir("x" * 240, dir_fd=descriptor)
        child = os.open("x" * 240, os.O_DIRECTORY, dir_fd=descriptor)
        os.close(descriptor)
        descriptor = child
    os.close(os.open("deep.txt", os.O_CREAT, dir_fd=descriptor))
    os.close(descriptor)
    return "/".join([str(folder), *["x" * 240] * n, "deep.txt"])


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for path in ("a.txt", "b.md", "sub/c.txt", "sub/deep/d.txt", ".hidden", ".dir/e.txt"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(path)
    return tmp_path


def found(tree: Path, uri: str) -> list[str]:
    return [os.path.relpath(path, tree) for path in files.find(files.parse(uri), nothing)]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("/", ["a.txt", "b.md", "sub/c.txt", "sub/deep/d.txt"]),
        ("", ["a.txt", "b.md", "sub/c.txt", "sub/deep/d.txt"]),
        ("/sub/", ["sub/c.txt", "sub/deep/d.txt"]),
        ("/a.txt", ["a.txt"]),
        ("//.//a.txt", ["a.txt"]),
        ("/sub/../a.txt", ["a.txt"]),
        ("/*", ["a.txt", "b.md"]),
        ("/?.txt", ["a.txt"]),
        ("/*/*.txt", ["sub/c.txt"]),
        ("/s*/d*/*", ["sub/deep/d.txt"]),
        ("/*/deep/d.txt", ["sub/deep/d.txt"]),
        ("/.h*", [".hidden"]),
        ("/.hidden", [".hidden"]),
        ("/.dir/*", [".dir/e.txt"]),
    ],
)
def test_uris_name_files(tree: Path, pattern: str, expected: list[str]) -> None:
    assert found(tree, f"{tree}{pattern}") == expected
    assert found(tree, f"file://{tree}{pattern}") == expected
    assert found(tree, f"FILE://localhost{tree}{pattern}") == expected


_names = st.text(st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1, max_size=12)


@given(_names.filter(lambda name: name not in (".", "..")))
def test_a_quoted_name_names_itself(name: str) -> None:
    location = files.parse(f"file:///nowhere/{quote(name, safe='')}")
    assert location.file == f"/nowhere/{name}"
    assert location.matches(f"/nowhere/{name}")
    assert files.exactly(f"/nowhere/{name}") == location


@given(st.text("ab?*\\[.", min_size=1, max_size=8), st.text("ab?*\\[.", min_size=1, max_size=8))
def test_only_question_mark_and_star_are_wild(pattern: str, name: str) -> None:
    if pattern in (".", "..") or not set(pattern) & set("?*"):
        return
    expression = "".join({"?": ".", "*": ".*"}.get(c) or re.escape(c) for c in pattern)
    assert files.parse(f"/nowhere/{pattern}").matches(f"/nowhere/{name}") == bool(re.fullmatch(expression, name))


def test_patterns_of_many_stars_take_no_time() -> None:
    """Nothing ends a regular expression in PostgreSQL's process."""
    name = "a" * 250
    began = time.process_time()
    for pattern in ("a*" * 60 + "b", "*" * 60 + "b", "*a?" * 40 + "*b", ("*a" * 20 + "/") * 3 + "b"):
        assert not files.parse(f"/x/{pattern}").matches(f"/x/{name}")
    assert time.process_time() - began < 2


def test_stars_match_as_the_simplest_matcher_has_it() -> None:
    rng = random.Random(7)
    for _ in range(5000):
        pattern = "".join(rng.choices("ab?*", k=rng.randint(1, 7)))
        name = "".join(rng.choices("ab", k=rng.randint(1, 8)))
        assert files.parse(f"/x/{pattern}").matches(f"/x/{name}") == fnmatch.fnmatchcase(name, pattern), (pattern, name)


def test_a_location_matches_nothing_beside_it() -> None:
    assert not Location("/a/docs", ()).matches("/a/docs2/x")
    assert not files.parse("/a/docs/*.txt").matches("/a/docs/sub/x.txt")
    assert Location("/", ()).matches("/x")


def test_links_that_leave_the_folder_are_not_followed(tree: Path) -> None:
    folder = tree / "sub"
    (folder / "out.txt").symlink_to(tree / "a.txt")
    (folder / "outdir").symlink_to(tree)
    (folder / "loop").symlink_to(folder)
    (folder / "broken").symlink_to(folder / "nothing")
    (folder / "twin.txt").symlink_to("c.txt")
    (folder / ".versions").mkdir()
    (folder / ".versions" / "v1.txt").write_text("v1")
    (folder / "current.txt").symlink_to(".versions/v1.txt")
    os.mkfifo(folder / "pipe")
    assert found(folder, f"{folder}/") == ["c.txt", "current.txt", "deep/d.txt"]
    assert found(folder, f"{folder}/*") == ["c.txt", "current.txt"]
    # one file that is named as it is may be a link
    assert found(folder, f"{folder}/out.txt") == ["out.txt"]


def test_what_goes_while_it_is_looked_at_is_left_to_reading(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tree / "link").symlink_to("b.md")
    (tree / "other").symlink_to(tree / ".hidden")
    realpath = os.path.realpath

    def swapped(path: bytes) -> bytes:
        if path.endswith(b"other"):
            raise FileNotFoundError(path)
        return realpath(path)

    monkeypatch.setattr("os.path.realpath", swapped)
    assert found(tree, str(tree)) == ["a.txt", "b.md", "sub/c.txt", "sub/deep/d.txt"]


def make_chain(folder: Path, n: int) -> list[Path]:
    """n links, each to the next one, the last to a file; the system follows 40."""
    links = [folder / f"link{i:04}" for i in range(n)]
    for link, to in zip(links, [*links[1:], folder / "a.txt"], strict=True):
        link.symlink_to(to.name)
    return links


def test_links_that_lead_to_too_many_others_are_reported(tree: Path) -> None:
    links = make_chain(tree, 1200)
    (tree / "self").symlink_to("self")
    left: dict[str, str] = {}

    def left_out(path: str, error: DocumentError) -> None:
        left[path] = f"{error.message}: {error.detail}"

    paths = files.find(Location(str(tree), ()), nothing, left_out)
    assert [os.path.relpath(path, tree) for path in paths] == ["a.txt", "b.md", "sub/c.txt", "sub/deep/d.txt"]
    assert list(left) == [str(link) for link in (*links[:-40], tree / "self")]
    assert set(left.values()) == {"the file cannot be read: Too many levels of symbolic links."}
    # links put in the place of what was found
    for base in (str(tree), None):
        with pytest.raises(DocumentError, match="cannot be read") as caught:
            files.read(str(links[0]), base, 100, nothing)
        assert caught.value.detail == "Too many levels of symbolic links."
        assert files.read(str(links[-40]), base, 100, nothing).content == b"a.txt"
    if sys.version_info < (3, 14):  # which resolves any number of links
        for uri in (f"{links[0]}", f"{links[0]}/../a.txt"):
            with pytest.raises(InvalidRequest):
                files.find(files.parse(uri), nothing)


def test_looking_for_files_can_be_interrupted_at_any_place(tmp_path: Path) -> None:
    for i in range(3000):
        (tmp_path / f"{i}.txt").touch()
    for i in range(50):
        (tmp_path / f"link{i}").symlink_to("0.txt")
    looks = 0

    def interrupt() -> None:
        nonlocal looks
        looks += 1

    assert len(files.find(Location(str(tmp_path), ()), interrupt)) == 3000
    assert looks > 3000 // 1000 + 50


def test_a_folder_that_cannot_be_read_is_reported(tree: Path) -> None:
    longest = make_deep(tree, 20)
    found: list[tuple[str, str, str | None]] = []
    paths = files.find(Location(str(tree), ()), nothing, lambda folder, e: found.append((folder, e.message, e.detail)))
    assert len(paths) == 4
    (folder, *why) = found[0]
    assert why == ["the folder cannot be read", "File name too long."]
    assert longest.startswith(folder)
    assert len(folder) > 4096
    assert len(found) == 1  # not those below it
    for name in ("a.txt", "b.md", "sub/c.txt", "sub/deep/d.txt"):
        (tree / name).unlink()
    with pytest.raises(InvalidRequest, match="no file to load") as caught:
        files.find(Location(str(tree), ()), nothing)
    assert str(caught.value.detail).endswith("; 1 folder cannot be read.")


def calls_of(name: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The first arguments with which a function of module os is called from now on."""
    calls: list[str] = []
    function = getattr(os, name)

    def counted(path: str, **options: object) -> object:
        calls.append(path)
        return function(path, **options)

    monkeypatch.setattr(os, name, counted)
    return calls


def test_folders_deep_within_one_another_are_no_trouble(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = os.open(tree, os.O_RDONLY)
    for _ in range(1200):
        os.mkdir("d", dir_fd=folder)
        below = os.open("d", os.O_RDONLY, dir_fd=folder)
        os.close(folder)
        folder = below
    os.close(os.open("deep.txt", os.O_CREAT | os.O_WRONLY, dir_fd=folder))
    os.close(folder)
    try:
        assert found(tree, str(tree)) == ["a.txt", "b.md", "d/" * 1200 + "deep.txt", "sub/c.txt", "sub/deep/d.txt"]
        # which a look at each folder above each of them would make quadratic
        looked = calls_of("lstat", monkeypatch)
        files.find(files.parse(str(tree)), nothing)
        files.read(str(tree / ("d/" * 1200) / "deep.txt"), str(tree), 100, nothing)
        assert len(looked) < 100
    finally:
        subprocess.run(["rm", "-r", tree / "d"], check=True)  # Python's own goes no deeper than the one before did


def test_a_file_is_read_only_below_its_folder(tree: Path) -> None:
    folder = tree / "sub"
    assert files.read(str(folder / "deep" / "d.txt"), str(folder), 100, nothing).content == b"sub/deep/d.txt"
    (folder / "c.txt").unlink()
    (folder / "c.txt").symlink_to(tree / "a.txt")  # swapped after it was found
    with pytest.raises(DocumentError, match="outside"):
        files.read(str(folder / "c.txt"), str(folder), 100, nothing)
    assert files.read(str(folder / "c.txt"), None, 100, nothing).content == b"a.txt"


def test_files_that_cannot_be_read_are_errors_of_their_own(tree: Path) -> None:
    with pytest.raises(DocumentError, match="cannot be read"):
        files.read(str(tree / "nothing"), None, 100, nothing)
    with pytest.raises(DocumentError, match="too large"):
        files.read(str(tree / "a.txt"), None, 4, nothing)
    assert files.read(str(tree / "a.txt"), None, 5, nothing).content == b"a.txt"
    os.mkfifo(tree / "pipe")
    with pytest.raises(DocumentError, match="not a regular file"):
        files.read(str(tree / "pipe"), None, 100, nothing)


def test_the_dates_of_a_file_are_read_with_it(tree: Path) -> None:
    path = tree / "a.txt"
    os.utime(path, (1_000_000_000, 86_399))
    dates = files.read(str(path), None, 100, nothing).dates
    assert dates["last_modified_date"] == "1970-01-01T23:59:59Z"
    assert dates["last_accessed_date"] == "2001-09-09T01:46:40Z"
    assert dates["creation_date"] <= dates["last_modified_date"]


def test_reading_can_be_interrupted(tree: Path) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        files.read(str(tree / "a.txt"), None, 100, interrupt)
    with pytest.raises(KeyboardInterrupt):
        files.find(Location(str(tree), ()), interrupt)


@pytest.mark.parametrize("how", ["written to", "replaced", "shortened"])
def test_a_file_that_changes_while_it_is_read_is_read_again(tree: Path, how: str) -> None:
    path = tree / "large"
    path.write_bytes(b"a" * 3_000_000)
    changes = iter([True])

    def change(data: bytes = b"b" * 3_000_000) -> None:
        if not next(changes, False):
            return
        if how == "written to":
            with path.open("r+b") as file:
                file.write(data)
        elif how == "replaced":  # what has been opened stays as it was
            (tree / "new").write_bytes(data)
            (tree / "new").replace(path)
        else:
            path.write_bytes(b"b" * 10)

    content = files.read(str(path), str(tree), 10_000_000, change).content
    assert content == {"written to": b"b" * 3_000_000, "replaced": b"a" * 3_000_000, "shortened": b"b" * 10}[how]


def test_a_file_that_never_rests_is_an_error(tree: Path) -> None:
    path = tree / "log"
    path.write_bytes(b"line\n")

    def append() -> None:
        with path.open("ab") as file:
            file.write(b"line\n")

    with pytest.raises(DocumentError, match="changed while it was read"):
        files.read(str(path), str(tree), 10_000_000, append)


@pytest.mark.parametrize(
    "uri",
    ["", "a", "./a", "http://x/a", "c:\\a", "file://host/a", "file:a", "file:///%", "file:///%0", "file:///%00",
     "file:///%ff", "/*/..", "/*/../a", "/a*/"],
)  # fmt: skip
def test_what_is_no_file_uri_is_refused(uri: str) -> None:
    with pytest.raises(InvalidRequest):
        files.parse(uri)


def test_what_is_not_there_is_refused(tree: Path) -> None:
    (tree / "empty").mkdir()
    for uri in ("/nothing", "/nothing/", "/empty/", "/*.pdf", "/nothing/*", "/a.txt/"):
        with pytest.raises(InvalidRequest):
            found(tree, f"{tree}{uri}")


@pytest.mark.parametrize(
    ("uri", "name"),
    [
        ("/srv/Hand Book/*.pdf", "hand_book"),
        ("/srv/Report-2024.final.pdf", "report_2024_final"),
        ("/srv/ÜBER.txt", "über"),
        ("/srv/--.txt", "documents"),
        ("/*", "documents"),
        ("/srv/" + "ü" * 40 + ".txt", "ü" * 31),
    ],
)
def test_table_names_come_from_the_path(uri: str, name: str) -> None:
    assert files.table_name(files.parse(uri)) == name


def test_gone_means_certainly_gone(tree: Path) -> None:
    assert files.is_gone(str(tree / "nothing"), lambda: None, {})
    assert files.is_gone(str(tree / "a.txt" / "below"), lambda: None, {})
    assert not files.is_gone(str(tree / "a.txt"), lambda: None, {})
    assert not files.is_gone("/" + "x" * 5000, lambda: None, {})
    assert not files.is_gone("nul\0", lambda: None, {})


@given(st.lists(st.tuples(st.text(max_size=3), st.integers(0, 12)), max_size=30))
def test_batches_keep_order_and_limits(documents: list[tuple[str, int]]) -> None:
    made = list(files.batches(documents, 4, 10))
    assert [name for batch in made for name in batch] == [name for name, _ in documents]
    sizes = iter(documents)
    for batch in made:
        total = sum(next(sizes)[1] for _ in batch)
        assert 1 <= len(batch) <= 4
        assert total <= 10 or len(batch) == 1
