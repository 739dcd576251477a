"""backend/answer: what is left of an answer that is checked."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ml_rag.backend import answer, grounding

SEGMENTS = ["Hotels are paid in full. The hotel limit is 180 euros in London.", "Trains are free."]
REPLY = dict.fromkeys(
    ("documents_given", "documents_used", "prompt_tokens", "generated_tokens", "support", "min_support", "prompt")
)


def check(text: str) -> dict[str, Any]:
    claims = grounding.check(text, SEGMENTS, "q", lambda words: {"are", "is", "in"} & set(words), lambda: None)
    supported = {"supported_text": grounding.supported(text, claims, 0.6)}
    return grounding.report(claims, SEGMENTS, 0.6, with_claims=True) | supported


@pytest.mark.parametrize(
    ("text", "options", "left", "warns"),
    [
        ("Trains are free. Pigs fly. Hotels are paid in full.", {}, "Trains are free. Hotels are paid in full.", False),
        ("Trains are free.", {"min_support": 0.9}, "Trains are free.", False),
        ("Pigs fly.", {}, "", True),
        ("Pigs fly.", {"abstain": True}, None, False),
        ("Pigs fly. Trains are free.", {"min_support": 0.9, "remove_unsupported": False, "abstain": True}, None, False),
        ("Pigs fly.", {"min_support": 0.9, "remove_unsupported": False}, "Pigs fly.", True),
        ("Pigs fly. Trains are free.", {"min_support": 0.9}, "Trains are free.", False),
    ],
)
def test_what_is_left_of_an_answer(text: str, options: dict[str, Any], left: str | None, warns: bool) -> None:
    warnings: list[str] = []
    plpy = SimpleNamespace(warning=lambda message, **_: warnings.append(message))
    given = {
        "options": {"model_id": "m"},
        "rag": {"asked": {"remove_unsupported": True, **options}, "grounding": {"claims": True}},
    }
    found = answer.write(plpy, lambda _: {**REPLY, "text": text, "finish_reason": "stop"}, check, given)
    assert found["text"] == left
    assert bool(warnings) == warns
    assert [step["stage"] for step in found["trace"]] == ["generate", "ground"]
    assert "supported_text" not in found["grounding"]
    if left:
        # the check is that of the text that is left
        assert found["grounding"]["claims"][-1]["end_pos"] == len(left)
