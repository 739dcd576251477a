"""store/marker: the comment that says which model a column has vectors of; see test_fuzz_marker."""

from __future__ import annotations

import pytest

from support.cluster import Connection, value_of


def ask(connection: Connection, call: str, *values: str | None) -> object:
    return value_of(connection, f"SELECT ml_rag.{call}", values)


M = "GENAI_OPTIONS="


@pytest.mark.parametrize(
    ("comment", "model", "name"),
    [
        (None, None, None),
        ("", None, None),
        ("EMBED_MODEL_ID=a", None, None),
        (f"{M}EMBED_MODEL_ID=", None, None),
        (f"{M}EMBED_MODEL_ID=a", "a", None),
        (f"{M}EMBED_MODEL_ID=a;b", "a", None),
        (f"é {M}EMBED_MODEL_ID=é\x0bb", "é", None),
        (f"{M}EMBED_MODEL_ID=,EMBED_MODEL_ID=b", "b", None),
        (f"{M}EMBED_MODEL_ID= {M}EMBED_MODEL_ID=c", "c", None),
        (f"vectors. {M}X=1,EMBED_MODEL_ID=a,Y=2 and so on", "a", None),
        (f"{M}EMBED_MODEL_ID=a,EMBEDDING=b;X=c", "a", "b"),
        (f"{M}EMBED_MODEL_ID=a\tEMBEDDING=b", "a", None),
        (f"{M}EMBEDDING=b,EMBED_MODEL_ID=a", "a", "b"),
        (f"{M}EMBED_MODEL_ID=a,NO_EMBEDDING=b", "a", None),
        (f"{M}EMBEDDING=b", None, None),
        (f"{M}X=1 {M}EMBED_MODEL_ID=a,EMBEDDING=b\n{M}EMBED_MODEL_ID=c,EMBEDDING=d", "a", "b"),
    ],
)
def test_reading(module_asker: Connection, comment: str | None, model: str | None, name: str | None) -> None:
    assert ask(module_asker, "_marked_model(%s)", comment) == model
    assert ask(module_asker, "_marked_key(%s, 'EMBEDDING')", comment) == name


@pytest.mark.parametrize(
    ("comment", "name", "changed"),
    [
        (f"{M}EMBED_MODEL_ID=a", "b", f"{M}EMBED_MODEL_ID=a,EMBEDDING=b"),
        (f"{M}EMBED_MODEL_ID=a,EMBEDDING=c,DEFAULT=true", "b", f"{M}EMBED_MODEL_ID=a,EMBEDDING=b"),
        (f"{M}EMBEDDING=c;EMBED_MODEL_ID=a;X=1", "b", f"{M}EMBED_MODEL_ID=a,X=1,EMBEDDING=b"),
        (f"x {M}EMBED_MODEL_ID=a.*;K=1 y", r"c\1&", f"x {M}EMBED_MODEL_ID=a.*,K=1,EMBEDDING=c\\1& y"),
        (
            f"{M}X {M}EMBED_MODEL_ID=a\n{M}EMBED_MODEL_ID=a",
            "b",
            f"{M}X {M}EMBED_MODEL_ID=a,EMBEDDING=b\n{M}EMBED_MODEL_ID=a",
        ),
        ("no marker", "b", f"no marker {M}EMBEDDING=b"),
        (None, "b", f"{M}EMBEDDING=b"),
    ],
)
def test_changing(module_asker: Connection, comment: str | None, name: str, changed: str) -> None:
    keys = "jsonb_build_object('EMBEDDING', %s::text, 'DEFAULT', nullif(%s, false))"
    assert ask(module_asker, f"_mark_keys(%s, {keys})", comment, name, False) == changed
    as_default = ask(module_asker, f"_mark_keys(%s, {keys})", comment, name, True)
    assert isinstance(as_default, str)
    assert as_default.replace(",DEFAULT=true", "") == changed
    assert ask(module_asker, "_marked_model(%s)", changed) == ask(module_asker, "_marked_model(%s)", comment)
    if ask(module_asker, "_marked_model(%s)", comment) is not None:
        assert ask(module_asker, "_marked_key(%s, 'DEFAULT')", as_default) == "true"
        assert ask(module_asker, "_marked_key(%s, 'EMBEDDING')", changed) == name
