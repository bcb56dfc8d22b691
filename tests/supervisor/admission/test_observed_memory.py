"""What instances really took is remembered."""

from dataclasses import replace
from pathlib import Path

from supervisor.admission.observed_memory import ObservedMemory
from supervisor.fleet.launch_id import FileVersion, LaunchFingerprint

RECIPE = LaunchFingerprint(
    engine=FileVersion(Path("/opt/llama-server"), 1, 1),
    library_dirs=(),
    model=FileVersion(Path("/models/chat.gguf"), 1, 1),
    draft=None,
    flags={"ctx-size": 4096, "parallel": 2},
    args=(),
)
OTHER = replace(RECIPE, flags={"ctx-size": 8192})


def test_what_was_seen_counts_for_the_same_fingerprint_only() -> None:
    measured = ObservedMemory()
    measured.note(RECIPE, 500)
    same = replace(RECIPE, flags={"parallel": 2, "ctx-size": 4096})
    assert measured.own_bytes(same) == 500
    assert measured.own_bytes(OTHER) == 0


def test_the_most_that_was_seen_stands() -> None:
    measured = ObservedMemory()
    for seen in (500, 900, 700):
        measured.note(RECIPE, seen)
    assert measured.own_bytes(RECIPE) == 900


def test_fingerprints_that_nobody_asked_for_in_long_are_forgotten() -> None:
    measured = ObservedMemory(kept=2)
    measured.note(RECIPE, 1)
    measured.note(OTHER, 2)
    assert measured.own_bytes(RECIPE) == 1
    measured.note(replace(RECIPE, args=("--verbose",)), 3)
    assert measured.own_bytes(RECIPE) == 1
    assert measured.own_bytes(OTHER) == 0
