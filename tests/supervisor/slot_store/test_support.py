from typing import Any

import pytest
from samples import engine, model

from supervisor.flags.plan import Plan
from supervisor.memory.estimate import MemoryInputs
from supervisor.slot_store.support import unsupported_reason


def reason_for(chosen: dict[str, Any] | None = None, *, build: str = "b10434", **facts: Any) -> str:
    gguf, made = model(**facts), engine(build)
    memory_inputs = MemoryInputs(gguf, chosen or {}, made, frozenset(), None)
    plan = Plan("chat", made, gguf, (), (), (), slots=2, ctx_size=2048, memory_inputs=memory_inputs)
    return unsupported_reason(plan) or ""


@pytest.mark.parametrize(
    ("chosen", "facts", "reason"),
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
    chosen: dict[str, Any], facts: dict[str, Any], reason: str
) -> None:
    found = reason_for(chosen, **facts)
    assert bool(found) == bool(reason)
    assert reason in found
