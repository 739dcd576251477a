"""archives.py: compressed files and archives as folders, within their bounds whatever they claim."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import random
import struct
import tarfile
import time
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard

from ml_rag import archives, files, zstd
from ml_rag.errors import DocumentError
from ml_rag.ingest.parse import parse
from support.office import docx, text_pdf, zipped

zstd.install()
PACK: dict[str, Callable[[bytes], bytes]] = {
    "gz": gzip.compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
    "zst": zstandard.compress,
}


def nothing() -> None:
    pass


def tar(members: dict[str, bytes], kind: str = "") -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size, member.mtime = len(content), 86400
            archive.addfile(member, io.BytesIO(content))
    return PACK[kind](out.getvalue()) if kind else out.getvalue()


def find(path: Path) -> tuple[dict[str, str], list[tuple[str, str]]]:
    """Names below a folder and the texts of the files, and what is left out, each with its error."""
    left_out: list[tuple[str, str]] = []
    location = files.parse(f"{path}/" if path.is_dir() else str(path))
    paths = files.find(location, nothing, lambda name, e: left_out.append((os.path.basename(name), e.message)))
    base = None if location.file else location.base
    with files.Reading() as reading:
        found = {name: reading.read(name, base, 10_000_000, nothing).content.decode() for name in paths}
    return {os.path.relpath(name, path): text for name, text in found.items()}, left_out


@pytest.mark.parametrize("ending", PACK)
def test_any_format_is_read_from_a_compressed_file(ending: str) -> None:
    pack = PACK[ending]
    assert parse(f"a.md.{ending}", pack(b"# Grebes\n\ndive")).format == "markdown"
    assert parse(f"b.{ending}", pack(text_pdf(["Grebes dive"]))).blocks[0].text == "Grebes dive"
    assert parse("c", pack(docx("<w:p><w:r><w:t>Terns</w:t></w:r></w:p>"))).blocks[0].text == "Terns"
    # in several parts, as programs that write in parallel make them
    assert parse(f"d.txt.{ending}", pack(b"one ") + pack(b"two")).blocks[0].text == "one two"
    assert parse(f"e.txt.{ending}", pack(b"x" * 3_000_000)).blocks[0].text == "x" * 3_000_000


@pytest.mark.parametrize("ending", PACK)
def test_bombs_and_damaged_files_are_refused_in_a_moment(ending: str) -> None:
    pack = PACK[ending]
    bomb = pack(b"\0" * 30_000_000)
    began = time.process_time()
    with pytest.raises(DocumentError, match="unpacks to too much data"):
        parse(f"a.txt.{ending}", bomb)
    assert time.process_time() - began < 5
    whole = pack(random.Random(1).randbytes(10_000).hex().encode())
    for cut in (30, len(whole) // 2, len(whole) - 3):
        with pytest.raises(DocumentError, match="truncated or damaged"):
            parse(f"a.txt.{ending}", whole[:cut])


def test_what_is_packed_twice_is_not_unpacked_twice() -> None:
    with pytest.raises(DocumentError) as caught:
        parse("a.txt.gz.gz", gzip.compress(gzip.compress(b"text")))
    assert "gzip file in another" in (caught.value.detail or "")
    with pytest.raises(DocumentError) as caught:
        parse("backup.gz", tar({"a.txt": b"text"}, "gz"))
    assert ".tar.gz" in (caught.value.hint or "")


def test_bz_at_the_start_of_a_text_is_text() -> None:
    assert parse("a.txt", b"BZh is a name").format == "text"


def test_a_broken_name_in_an_archive_takes_no_other_file_away(tmp_path: Path) -> None:
    archive = zipped({"caf\u00e9.txt": b"1", "d\u00e9j\u00e0.txt": b"2", "three.txt": b"3"})
    (tmp_path / "a.zip").write_bytes(archive.replace("caf\u00e9".encode(), b"caf\xc3("))
    names = [os.path.relpath(path, tmp_path) for path in files.find(files.parse(f"{tmp_path}/"), nothing)]
    assert sorted(names) == ["a.zip/caf├(.txt", "a.zip/déjà.txt", "a.zip/three.txt"]
    with files.Reading() as reading:
        assert reading.read(f"{tmp_path}/a.zip/three.txt", None, 700, nothing).content == b"3"
        assert reading.read(f"{tmp_path}/a.zip/déjà.txt", None, 700, nothing).content == b"2"
        with pytest.raises(DocumentError, match="damaged"):
            reading.read(f"{tmp_path}/a.zip/caf├(.txt", None, 700, nothing)


def test_archives_are_folders(tmp_path: Path) -> None:
    (tmp_path / "a.zip").write_bytes(
        zipped({"sub/one.txt": b"1", "two.txt": b"2", ".hidden": b"h", "__MACOSX/x": b"x"})
    )
    for ending in ("", *PACK):
        name = "b.tar" + (ending and f".{ending}")
        (tmp_path / name).write_bytes(tar({"./sub/one.txt": b"1", "two.txt": b"2" * 700}, ending))
    (tmp_path / "c.txt").write_text("plain")
    found, left_out = find(tmp_path)
    tars = ["b.tar", *(f"b.tar.{ending}" for ending in sorted(PACK))]
    assert found == {
        "a.zip/sub/one.txt": "1",
        "a.zip/two.txt": "2",
        **{
            f"{name}/{member}": text for name in tars for member, text in (("sub/one.txt", "1"), ("two.txt", "2" * 700))
        },
        "c.txt": "plain",
    }
    assert left_out == []
    assert find(tmp_path / "a.zip") == ({"sub/one.txt": "1", "two.txt": "2"}, [])
    with files.Reading() as reading:
        assert reading.read(f"{tmp_path}/b.tar.gz/two.txt", None, 700, nothing).dates["last_modified_date"] == (
            "1970-01-02T00:00:00Z"
        )
        with pytest.raises(DocumentError, match="too large"):
            reading.read(f"{tmp_path}/b.tar.gz/two.txt", None, 699, nothing)
        assert reading.read(f"{tmp_path}/b.tar.gz/sub/one.txt", None, 9, nothing).content == b"1"  # back again
    assert files.sizes([f"{tmp_path}/a.zip/two.txt", f"{tmp_path}/c.txt", f"{tmp_path}/no"], nothing) == [
        (f"{tmp_path}/a.zip/two.txt", 1), (f"{tmp_path}/c.txt", 5), (f"{tmp_path}/no", 0),
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["u.zip", "u.tar", "u.tar.gz"])
def test_of_a_file_that_is_there_twice_the_last_counts(tmp_path: Path, name: str) -> None:
    texts = ["a.txt", "the old text"], ["b.txt", "other"], ["a.txt", "new"]
    if name.endswith(".zip"):
        with zipfile.ZipFile(tmp_path / name, "w") as archive:
            for path, text in texts[:2]:
                archive.writestr(path, text)
            with pytest.warns(UserWarning, match="Duplicate"):
                archive.writestr(*texts[2])
    else:
        with tarfile.open(tmp_path / name, "w:gz" if name.endswith("gz") else "w") as packed:
            for path, text in texts:
                member = tarfile.TarInfo(path)
                member.size = len(text)
                packed.addfile(member, io.BytesIO(text.encode()))
    assert find(tmp_path / name) == ({"a.txt": "new", "b.txt": "other"}, [])


def test_files_that_are_there_twice_are_read_in_one_go(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for i in [*range(60), *reversed(range(60))]:
            archive.addfile(tarfile.TarInfo(f"{i}.txt"))
    paths = files.find(files.parse(f"{tmp_path}/a.tar"), nothing)
    looks = 0

    def interrupt() -> None:
        nonlocal looks
        looks += 1

    with files.Reading() as reading:
        for path in paths:
            reading.read(path, None, 9, interrupt)
    assert len(paths) == 60
    assert looks < 1000  # 120 a pass


def test_patterns_name_archives_and_what_is_in_them_can_be_gone(tmp_path: Path) -> None:
    (tmp_path / "a.zip").write_bytes(zipped({"one.txt": b"1"}))
    location = files.parse(f"{tmp_path}/*.zip")
    assert files.find(location, nothing) == [f"{tmp_path}/a.zip/one.txt"]
    assert location.matches(f"{tmp_path}/a.zip/sub/one.txt")
    assert not location.matches(f"{tmp_path}/a.txt/one.zip")
    assert files.parse(f"{tmp_path}/a.zip").is_folder
    assert not files.parse(f"{tmp_path}/a.txt").is_folder
    assert files.is_gone(f"{tmp_path}/a.zip/two.txt", nothing, files.Listings())
    assert not files.is_gone(f"{tmp_path}/a.zip/one.txt", nothing, files.Listings())
    (tmp_path / "a.zip").write_bytes(b"PK\x03\x04 no more")
    assert not files.is_gone(f"{tmp_path}/a.zip/two.txt", nothing, files.Listings())  # as nobody can tell
    (tmp_path / "a.zip").unlink()
    assert files.is_gone(f"{tmp_path}/a.zip/two.txt", nothing, files.Listings())


def test_an_archive_is_looked_through_once_and_can_be_interrupted(tmp_path: Path) -> None:
    (tmp_path / "a.tar.gz").write_bytes(tar({"one.txt": b"1"}, "gz"))
    looks = 0

    def interrupt() -> None:
        nonlocal looks
        looks += 1

    known = files.Listings()
    gone = [files.is_gone(f"{tmp_path}/a.tar.gz/{i}.txt", interrupt, known) for i in range(100)]
    assert all(gone)
    assert 0 < looks < 10
    assert files.sizes([f"{tmp_path}/a.tar.gz/one.txt"] * 100, interrupt)[99] == (f"{tmp_path}/a.tar.gz/one.txt", 1)
    assert looks < 20


def test_an_office_document_called_zip_is_a_document(tmp_path: Path) -> None:
    content = docx("<w:p><w:r><w:t>x</w:t></w:r></w:p>")
    (tmp_path / "a.zip").write_bytes(content)
    assert files.find(files.parse(f"{tmp_path}/"), nothing) == [f"{tmp_path}/a.zip"]
    with files.Reading() as reading:
        assert reading.read(f"{tmp_path}/a.zip", str(tmp_path), 10**6, nothing).content == content


def test_names_below_the_archive_are_read_and_others_reported(tmp_path: Path) -> None:
    names = ["../up.txt", "/etc/passwd", "a/../b.txt", "a//./b.txt", ".ssh/key", "..", "fine.txt"]
    (tmp_path / "a.zip").write_bytes(zipped(dict.fromkeys(names, b"x")))
    link = tarfile.TarInfo("link.txt")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        archive.addfile(link)
        for name in names:
            archive.addfile(tarfile.TarInfo(name))
    (tmp_path / "b.tar").write_bytes(out.getvalue())
    found, left_out = find(tmp_path)
    assert found == {
        f"{archive}/{name}": text
        for archive, text in (("a.zip", "x"), ("b.tar", ""))
        for name in ("etc/passwd", "a/b.txt", "fine.txt")
    }
    assert left_out == [(name, "the name in the archive has a part ..") for name in ("up.txt", "b.txt", "..")] * 2


def header(**fields: object) -> bytes:
    member = tarfile.TarInfo("x")
    for name, value in fields.items():
        setattr(member, name, value)
    return member.tobuf()


def directory(entries: int) -> bytes:
    """A zip file that is a directory and nothing else."""
    entry = b"PK\1\2" + bytes(24) + b"\1\0" + bytes(16) + b"a"
    listed = entry * entries
    return listed + struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 1, 1, len(listed), 0, 0)


def attributes(value: bytes, members: int) -> bytes:
    """A tar file of small members, each with an attribute of its own."""
    text = b" comment=" + value + b"\n"
    text = b"%d" % (len(text) + 5) + text if len(text) + 5 < 10**5 else b"%d" % (len(text) + 6) + text
    return (header(size=len(text), type=tarfile.XHDTYPE) + text + bytes(-len(text) % 512) + header()) * members


def holes(form: str, content: bytes) -> bytes:
    """A tar file whose only member says that a map of its holes follows, in the old form or in that of pax."""
    if form == "old":
        head = bytearray(header(type=tarfile.GNUTYPE_SPARSE))
        head[257:265], head[482] = b"ustar  \0", 1
    else:
        text = b"22 GNU.sparse.major=1\n22 GNU.sparse.minor=0\n"
        head = bytearray(header(size=len(content)))
    head[148:156] = b" " * 8
    head[148:156] = b"%06o\0 " % sum(head)
    before = header(size=len(text), type=tarfile.XHDTYPE) + text.ljust(512, b"\0") if form == "pax" else b""
    return before + bytes(head) + content


#: one block of such a map, which another follows
HOLE = (b"00000000001\0" * 42 + b"\1").ljust(512, b"\0")

HOSTILE = {
    "zeros.zip": zipped({"a": b"\0" * 20_000_000}),
    "many.zip": zipped({f"{i}": b"" for i in range(archives.MAX_FILES + 1)}),
    "cut.zip": zipped({"a": b"text"})[:-10],
    "none.zip": b"",
    "zeros.tar.gz": tar({"a": b"\0" * 20_000_000}, "gz"),
    "zeros.tar.xz": tar({"a": b"\0" * 20_000_000}, "xz"),
    "zeros.tar.zst": tar({"a": b"\0" * 20_000_000}, "zst"),
    "many.tar": tar({f"{i}": b"" for i in range(archives.MAX_FILES + 1)}),
    "huge.tar": header(size=2 * 1024**3),
    "attributes.tar": header(size=2**40, type=tarfile.XHDTYPE) + b"1" * 100_000,
    "long_name.tar.gz": gzip.compress(header(size=2**33, type=tarfile.GNUTYPE_LONGNAME) + b"x" * 3_000_000),
    "cut.tar.gz": tar({"a": random.Random(2).randbytes(9000)}, "gz")[:-2000],
    "directory.zip": directory(400_000),
    "folders.zip": directory(50_000),
    "nested.tar": header(type=tarfile.XHDTYPE) * 2000,
    "long_attributes.tar": attributes(b"x" * 200_000, 3),
    "names.tar.gz": tar({f"{i}{'x' * 100_000}": random.Random(i).randbytes(1000) for i in range(200)}, "gz"),
    "holes.tar": holes("old", HOLE * 40_000),
    "holes_cut.tar": holes("old", HOLE),
    "holes_pax.tar": holes("pax", b"999999999\n" + b"0\n" * 10_000_000),
    "noise.tar": random.Random(3).randbytes(5000),
    "dictionary.tar.xz": lzma.compress(
        b"x" * 100, filters=[{"id": lzma.FILTER_LZMA2, "dict_size": 1024**3}], format=lzma.FORMAT_XZ
    ),
}


def test_hostile_archives_are_left_out_and_the_others_read(tmp_path: Path) -> None:
    for name, content in HOSTILE.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "fine.txt").write_text("text")
    began = time.process_time()
    found, left_out = find(tmp_path)
    assert time.process_time() - began < 20
    assert found == {"fine.txt": "text"}
    assert {name for name, _ in left_out} == HOSTILE.keys()
    bombs = {"zeros.zip", "many.zip", "zeros.tar.gz", "zeros.tar.xz", "zeros.tar.zst", "many.tar", "huge.tar"}
    bombs |= {"directory.zip", "folders.zip", "names.tar.gz"}
    assert {name for name, error in left_out if "too much data" in error} == bombs


def test_a_file_that_does_not_open_is_damaged(tmp_path: Path) -> None:
    for number, content in enumerate(
        (
            zipped({"abc": b"text"}).replace(b"abc", b"abd", 1),
            zipped({"a": b"text"}).replace(b"\x14\0\0\0\x08\0", b"\x14\0\x20\0\x08\0"),
            zipped({"a": b"text"}).replace(b"PK\3\4", b"PK\3\5"),
        )
    ):
        (tmp_path / f"{number}.zip").write_bytes(content)
        with pytest.raises(DocumentError, match="truncated or damaged"):
            find(tmp_path / f"{number}.zip")


def test_attributes_of_files_are_not_kept(tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(attributes(b"x" * 90_000, 200))
    with open(tmp_path / "a.tar", "rb") as file:
        tracemalloc.start()
        try:
            assert [one.size for one in archives.members(file, "a.tar", nothing)] == [0]
            assert tracemalloc.get_traced_memory()[1] < 8_000_000
        finally:
            tracemalloc.stop()


def test_the_names_of_many_archives_are_bounded(tmp_path: Path) -> None:
    """They compress well, and each is held in memory several times while files are loaded."""
    # two bytes each
    content = tar({f"{i}{'é' * 50_000}": random.Random(i).randbytes(1000) for i in range(30)}, "gz")
    for number in range(30):
        (tmp_path / f"{number:02}.tar.gz").write_bytes(content)
    left_out: list[str | None] = []
    found = files.find(files.parse(f"{tmp_path}/"), nothing, lambda _, error: left_out.append(error.detail))
    assert len(found) == 22 * 30
    assert left_out == ["With it the paths of files in archives have more than 67108864 bytes."] * 8
    # whether one is gone is not known of those that were not looked through
    known = files.Listings()
    gone = [files.is_gone(f"{tmp_path}/{number:02}.tar.gz/a", nothing, known) for number in range(30)]
    assert gone == [True] * 22 + [False] * 8


@pytest.mark.parametrize("name", ["holes.tar", "holes_pax.tar"])
def test_a_map_of_holes_is_bounded(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(HOSTILE[name])
    with open(tmp_path / name, "rb") as file:
        tracemalloc.start()
        try:
            with pytest.raises(DocumentError, match="truncated or damaged"):
                archives.members(file, name, nothing)
            assert tracemalloc.get_traced_memory()[1] < 16_000_000
        finally:
            tracemalloc.stop()


def directory(entries: int, extra: bytes = b"") -> bytes:
    """A zip file of nothing but its directory: no file in it opens."""
    out = b""
    for i in range(entries):
        name = b"%05d.txt" % i
        lengths = (len(name), len(extra), 0, 0, 0, 0, 0)
        out += b"PK\1\2" + struct.pack("<6H3L5H2L", 20, 20, 0, 0, 0, 33, 0, 0, 0, *lengths) + name + extra
    return out + b"PK\5\6" + struct.pack("<4H2LH", 0, 0, entries, entries, len(out), 0, 0)


def test_a_directory_of_many_small_fields_is_refused(tmp_path: Path) -> None:
    """zipfile copies what follows each field of an entry, in one go that nothing can interrupt."""
    fields = struct.pack("<HH", 0x9999, 0) * 16_000
    (tmp_path / "a.zip").write_bytes(directory(250, fields))
    with open(tmp_path / "a.zip", "rb") as file:
        started = time.monotonic()
        with pytest.raises(DocumentError) as caught:
            archives.members(file, "a.zip", nothing)
    assert caught.value.detail == "Its directory has more than 2097152 bytes beside the names."
    assert time.monotonic() - started < 1
    (tmp_path / "b.zip").write_bytes(directory(10_000, struct.pack("<HH", 0x9999, 96) + bytes(96)))
    with open(tmp_path / "b.zip", "rb") as file:
        assert len(archives.members(file, "b.zip", nothing)) == 10_000


def test_the_names_of_an_archive_are_bounded(tmp_path: Path) -> None:
    """A few bytes unpack to many long names, each of which is the path of a document."""
    content = tar({f"{i:04}/" + "a" * 100_000: b"" for i in range(100)}, "gz")
    (tmp_path / "a.tar.gz").write_bytes(content)
    (tmp_path / "b.txt").write_bytes(b"text")
    found, left_out = find(tmp_path)
    assert found == {"b.txt": "text"}
    assert [error for _, error in left_out] == ["the file unpacks to too much data"]


def test_files_that_do_not_open_do_not_have_their_archive_opened_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor do those of one that is written to again and again."""
    (tmp_path / "a.zip").write_bytes(directory(50))
    (tmp_path / "b.zip").write_bytes(zipped({f"{i}.txt": b"text" for i in range(50)}))
    paths = files.find(files.parse(f"file://{tmp_path}/"), nothing)
    opened = []
    monkeypatch.setattr(files, "_open", lambda path, base, real=files._open: opened.append(path) or real(path, base))
    with files.Reading() as reading:
        for path in paths[:50]:
            with pytest.raises(DocumentError, match="truncated or damaged"):
                reading.read(path, str(tmp_path), 1000, nothing)
        assert reading.read(paths[50], str(tmp_path), 1000, nothing).content == b"text"
        os.utime(tmp_path / "b.zip", (0, 0))
        for path in paths[51:]:
            with pytest.raises(DocumentError, match="changed while it was read"):
                reading.read(path, str(tmp_path), 1000, nothing)
    assert len(paths) == 100
    assert len(opened) == 2


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA, 99])
def test_a_file_whose_packing_zipfile_does_not_bound_is_not_unpacked(tmp_path: Path, method: int) -> None:
    """A few hundred bytes of bzip2 hold gigabytes, whatever size the archive tells of them."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("a.txt", bytes(50_000_000), method if method != 99 else None)
        archive.writestr("b.txt", "text", zipfile.ZIP_DEFLATED)
    content = bytearray(out.getvalue())
    entry = content.index(b"PK\1\2")
    content[entry + 10] = method
    content[entry + 24 : entry + 28] = struct.pack("<L", 1000)
    (tmp_path / "a.zip").write_bytes(content)
    with files.Reading() as reading:
        with pytest.raises(DocumentError, match="packed in a way that is not read"):
            reading.read(f"{tmp_path}/a.zip/a.txt", str(tmp_path), 10_000_000, nothing)
        assert reading.read(f"{tmp_path}/a.zip/b.txt", str(tmp_path), 10_000_000, nothing).content == b"text"


def test_an_encrypted_archive_says_so(tmp_path: Path) -> None:
    content = bytearray(zipped({"a.txt": b"text"}))
    for signature, place in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        content[content.index(signature) + place] |= 1
    (tmp_path / "a.zip").write_bytes(content)
    assert find(tmp_path) == ({}, [("a.zip", "the archive is encrypted")])


def test_unpacking_can_be_interrupted(tmp_path: Path) -> None:
    (tmp_path / "a.tar.gz").write_bytes(tar({f"{i}": os.urandom(100_000) for i in range(50)}, "gz"))
    calls = 0

    def interrupt() -> None:
        nonlocal calls
        calls += 1
        if calls == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        files.find(files.parse(f"{tmp_path}/a.tar.gz"), interrupt)


def test_the_database_s_process_does_not_load_a_library_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.tar.zst").write_bytes(tar({"a.txt": b"grebes"}, "zst"))
    assert find(tmp_path)[0] == {"a.tar.zst/a.txt": "grebes"}
    monkeypatch.setattr(archives, "zstd", None)
    assert find(tmp_path) == ({}, [("a.tar.zst", "Zstandard is not available here")])
