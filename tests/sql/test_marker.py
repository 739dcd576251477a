"""store/marker: the comment that says which model a column has vectors of; see test_fuzz_marker."""

from __future__ import annotations

import pytest

from support.cluster import Connection


def ask(connection: Connection, call: str, *values: str | None) -> object:
    row = connection.execute(f"SELECT ml_rag.{call}", values).fetchone()
    assert row is not None
    return row[0]


M = "GENAI_OPTIONS="


@pytest.mark.parametrize(
    ("comment", "model", "former"),
    [
        (None, None, []),
        ("", None, []),
        ("EMBED_MODEL_ID=a", None, []),
        (f"{M}EMBED_MODEL_ID=", None, []),
        (f"{M}EMBED_MODEL_ID=a", "a", []),
        (f"{M}EMBED_MODEL_ID=a;b", "a", []),
        (f"é {M}EMBED_MODEL_ID=é\x0bb", "é", []),
        (f"{M}EMBED_MODEL_ID=,EMBED_MODEL_ID=b", "b", []),
        (f"{M}EMBED_MODEL_ID= {M}EMBED_MODEL_ID=c", "c", []),
        (f"vectors. {M}X=1,EMBED_MODEL_ID=a,Y=2 and so on", "a", []),
        (f"{M}EMBED_MODEL_ID=a,REEMBEDDED_FROM=b;REEMBEDDED_FROM=c", "a", ["b", "c"]),
        (f"{M}EMBED_MODEL_ID=a\tREEMBEDDED_FROM=b", "a", []),
        (f"{M}REEMBEDDED_FROM=b,EMBED_MODEL_ID=a", "a", []),
        (f"{M}X=1 {M}EMBED_MODEL_ID=a,REEMBEDDED_FROM=b\n{M}EMBED_MODEL_ID=c,REEMBEDDED_FROM=d", "a", ["b"]),
    ],
)
def test_reading(module_asker: Connection, comment: str | None, model: str | None, former: list[str]) -> None:
    assert ask(module_asker, "_marked_model(%s)", comment) == model
    assert ask(module_asker, "_former_models(%s)", comment) == former


@pytest.mark.parametrize(
    ("comment", "model", "changed"),
    [
        (f"{M}EMBED_MODEL_ID=a", "b", f"{M}EMBED_MODEL_ID=b,REEMBEDDED_FROM=a"),
        # there and back again: each former model is remembered once
        (f"{M}EMBED_MODEL_ID=b,REEMBEDDED_FROM=a", "a", f"{M}EMBED_MODEL_ID=a,REEMBEDDED_FROM=b"),
        (f"{M}EMBED_MODEL_ID=b,REEMBEDDED_FROM=ab", "a", f"{M}EMBED_MODEL_ID=a,REEMBEDDED_FROM=b,REEMBEDDED_FROM=ab"),
        # what is special in a pattern or in what replaces it
        (f"x {M}EMBED_MODEL_ID=a.*;K=1 y", r"c\1&", f"x {M}EMBED_MODEL_ID=c\\1&,REEMBEDDED_FROM=a.*;K=1 y"),
        (
            f"{M}EMBED_MODEL_ID=b,REEMBEDDED_FROM=a/1",
            "a.1",
            f"{M}EMBED_MODEL_ID=a.1,REEMBEDDED_FROM=b,REEMBEDDED_FROM=a/1",
        ),
        ("no marker", "a", "no marker"),
        (None, "a", None),
    ],
)
def test_changing(module_asker: Connection, comment: str | None, model: str, changed: str | None) -> None:
    assert ask(module_asker, "_remark_model(%s, %s)", comment, model) == changed
    if changed and M in changed:
        assert ask(module_asker, "_marked_model(%s)", changed) == model
