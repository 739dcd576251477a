"""The SQLSTATE of an error of SPI."""

from __future__ import annotations

from typing import Any


def sqlstate(error: Any) -> str:
    """Its five characters. Of a code that PostgreSQL has no name for (RAISE can take any), PL/Python gives the number
    alone: six bits a character, as MAKE_SQLSTATE in utils/elog.h has it.
    """
    known: str | None = getattr(error, "sqlstate", None)
    if known is not None:
        return known
    number: int = error.spidata[0]
    return "".join(chr((number >> 6 * place & 0x3F) + ord("0")) for place in range(5))
