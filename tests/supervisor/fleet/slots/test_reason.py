from typing import Any

import pytest
from samples import engine, model

from supervisor.fleet.slots.reason import reason_against
from supervisor.profile.memory import Burden
from supervisor.profile.plan import Plan


def reason(chosen: dict[str, Any] | None = None, *, build: str = "b10434", **facts: Any) -> str:
    gguf, made = model(**facts), engine(build)
    burden = Burden(gguf, chosen or {}, made, frozenset(), None)
    plan = Plan("chat", made, gguf, (), (), (), slots=2, ctx_size=2048, burden=burden)
    return reason_against(plan) or ""


@pytest.mark.parametrize(
    ("chosen", "facts", "why"),
    [
        ({}, {}, ""),
        ({}, {"sliding_window": 512}, "sliding window"),
        ({"swa-full": True}, {"sliding_window": 512}, ""),
        ({}, {"recurrent": True}, "state"),
        ({}, {"kv_heads": (3, 0, 3)}, "state"),
        ({"embedding": True}, {}, "no conversations"),
        ({"mmproj": "a.gguf"}, {}, "pictures"),
        ({"spec-draft-model": "a.gguf", "spec-type": "draft-simple"}, {}, "draft"),
        ({"spec-type": "draft-mtp"}, {}, "draft"),
        ({"spec-type": "ngram-mod,draft-eagle3"}, {}, "draft"),
        ({"spec-type": "ngram-mod"}, {}, ""),
        ({"spec-type": "none"}, {}, ""),
        ({"slot-prompt-similarity": 0, "cache-ram": 0}, {}, "cache-ram"),
        ({"slot-prompt-similarity": 0, "cache-ram": 64}, {}, ""),
        ({"slot-prompt-similarity": 0.5, "cache-ram": 0}, {}, ""),
        ({"cache-ram": 0}, {}, ""),
    ],
)
def test_what_would_be_in_vain_is_not_pretended(
    chosen: dict[str, Any], facts: dict[str, Any], why: str
) -> None:
    found = reason(chosen, **facts)
    assert bool(found) == bool(why)
    assert why in found
