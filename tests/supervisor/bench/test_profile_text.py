from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from supervisor.bench.tune_space import Variant, render_profile
from supervisor.plan import tuned_profile
from supervisor.plan.tuned_profile import Evidence

HOSTILE = 'x"\n[flags]\nrpc = "evil" # \x1b[31m \\ \udcff é'


def written(tmp_path: Path, text: str) -> tuned_profile.Tuned:
    (tmp_path / "chat.toml").write_text(text, "utf-8")
    found = tuned_profile.read("chat", tmp_path)
    assert found
    return found


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    flags: tuple[tuple[str, str | int | float | bool], ...] = (
        ("threads", 3),
        ("repack", False),
        ("flash-attn", "off"),
        ("spec-draft-p-min", 0.5),
    )
    evidence = Evidence("latency", "2026-11-22", "1.3 times faster", "m", "e", "none", "0" * 32)
    text = render_profile(
        "chat",
        "base",
        Variant(flags=flags, replicas=2),
        evidence,
        "corral tune chat --seed 0",
        (("decoding", "100 tokens/s before, 130 tokens/s now"),),
    )
    found = written(tmp_path, text)
    assert dict(found.flags) == dict(flags)
    assert (found.replicas, found.extends, found.evidence) == (2, "base", evidence)
    assert "# decoding: 100 tokens/s before, 130 tokens/s now" in text
    assert "# Written by: corral tune chat --seed 0" in text


def test_no_text_from_outside_becomes_a_setting(tmp_path: Path) -> None:
    evidence = Evidence(**dict.fromkeys(asdict(Evidence()), HOSTILE))
    text = render_profile(HOSTILE, HOSTILE, Variant(), evidence, HOSTILE, ((HOSTILE, HOSTILE),))
    found = written(tmp_path, text)
    assert dict(found.flags) == {}
    assert found.evidence.engine == HOSTILE.replace("\udcff", "?")
