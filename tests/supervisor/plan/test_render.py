from __future__ import annotations

import pytest
from support.samples import flags

from supervisor.builds.help import FlagValue, parse
from supervisor.errors import SettingsInvalid
from supervisor.plan.render import canonical, render


def rendered(build: str, **settings: FlagValue) -> str:
    """The words of a build for settings, and the omitted ones behind a bar."""
    known = flags(build)
    lines, omitted = render(
        dict(canonical(name, value, known) for name, value in settings.items()), known
    )
    words = [word for line in lines for word in (line.flag, line.value) if word is not None]
    return " ".join([*words, *(["|", *(key for key, _, _ in omitted)] if omitted else [])])


@pytest.mark.parametrize(
    ("build", "settings", "words"),
    [
        ("b10434", {"spec-draft-n-max": 8}, "--spec-draft-n-max 8"),
        ("b10434", {"draft-max": 8}, "--spec-draft-n-max 8"),
        ("b8954", {"spec-draft-n-max": 8}, "--draft-max 8"),
        ("b10434", {"model-draft": "d.gguf"}, "--spec-draft-model d.gguf"),
        ("b6324", {"spec-draft-model": "d.gguf"}, "--model-draft d.gguf"),
        ("b6324", {"flash-attn": "on"}, "--flash-attn"),
        ("b6325", {"flash-attn": "on"}, "--flash-attn on"),
        ("b6325", {"flash-attn": True}, "--flash-attn on"),
        ("b6324", {"flash-attn": "auto"}, "| flash-attn"),
        ("b10434", {"mlock": True}, "--load-mode mmap+mlock"),
        ("b10104", {"load-mode": "mmap+mlock"}, "--mlock"),
        ("b10104", {"load-mode": "none"}, "--no-mmap"),
        ("b6324", {"no-mmap": True}, "--no-mmap"),
        ("b11434", {"no-mmap": True}, "--load-mode none"),
        ("b11434", {"direct-io": True}, "--load-mode dio"),
        ("b10104", {"load-mode": "auto"}, "| load-mode"),
        ("b10434", {"no-webui": True}, "--no-ui"),
        ("b6324", {"ui": False}, "--no-webui"),
        ("b10434", {"gpu-layers": "all"}, "--gpu-layers all"),
        ("b6324", {"gpu-layers": "all"}, "--gpu-layers 999"),
        ("b10434", {"ngl": 12}, "--gpu-layers 12"),
        ("b6324", {"ctx-checkpoints": 3}, "--swa-checkpoints 3"),
        ("b8500", {"checkpoint-min-step": 64}, "--checkpoint-every-n-tokens 64"),
        ("b10434", {"defrag-thold": 0.1}, "| defrag-thold"),
        ("b10434", {"spec-ngram-size-n": 12}, "| spec-ngram-size-n"),
        ("b6324", {"cache-ram": 100}, "| cache-ram"),
        ("b6324", {"kv-unified": False}, "| kv-unified"),
        ("b10434", {"kv-unified": False}, "--no-kv-unified"),
        ("b6324", {"cont-batching": False}, "--no-cont-batching"),
        ("b6324", {"spec-type": "draft-simple"}, "| spec-type"),
        ("b10434", {"spec-type": "draft"}, "--spec-type draft-simple"),
        ("b10434", {"no-host": True}, "--no-host"),
        ("b10434", {"cache_type_k": "q8_0"}, "--cache-type-k q8_0"),
        ("b10434", {"threads": "4"}, "--threads 4"),
    ],
)
def test_a_setting_is_rendered_in_the_builds_words(
    build: str, settings: dict[str, FlagValue], words: str
) -> None:
    """Seed 002: flash-attn takes a value; the words of a draft model and of mlock."""
    assert rendered(build, **settings) == words


def test_translations_are_noted() -> None:
    (line,) = render({"spec-draft-n-max": 8}, flags("b8954"))[0]
    assert line.note == "this build names --spec-draft-n-max --draft-max"


@pytest.mark.parametrize(
    ("build", "settings", "reason"),
    [
        ("b10434", {"defrag-thold": 0.1}, "deprecated"),
        ("b10434", {"spec-ngram-size-n": 1}, "removed it: use the respective"),
        ("b6324", {"cache-ram": 1}, "has no --cache-ram"),
        ("b6324", {"spec-type": "draft-simple"}, "a draft model alone"),
        ("b6324", {"kv-unified": False}, "no form of --kv-unified"),
    ],
)
def test_omitted_flags_have_a_reason(
    build: str, settings: dict[str, FlagValue], reason: str
) -> None:
    """Seed 002: defrag-thold, which is deprecated."""
    ((_, _, found),) = render(settings, flags(build))[1]
    assert reason in found


def test_a_word_of_newer_builds_is_omitted() -> None:
    text = "--load-mode MODE   how\n" + " " * 40 + "- mmap: map\n" + " " * 40 + "- dio: direct\n"
    ((_, _, reason),) = render({"load-mode": "mlock"}, parse(text))[1]
    assert "does not accept mlock" in reason


def test_an_unknown_flag_is_rejected_with_the_nearest_name() -> None:
    with pytest.raises(
        SettingsInvalid, match="no llama-server build has the flag ctx-sise"
    ) as caught:
        render({"ctx-sise": 1}, flags("b10434"))
    assert caught.value.hint == "did you mean ctx-size?"


@pytest.mark.parametrize(
    ("settings", "hint"),
    [
        ({"cache-type-k": "q3_0"}, "allowed: f32, f16, bf16, q8_0"),
        ({"ctx-size": "many"}, "allowed: an integer"),
        ({"ctx-size": 0.5}, "allowed: an integer"),
        ({"slot-prompt-similarity": "much"}, "allowed: a number"),
        ({"gpu-layers": "some"}, "allowed: a number, auto, all"),
        ({"spec-type": "ngram-mod,magic"}, "allowed: none, draft-simple"),
        ({"ctx-size": True}, "allowed: an integer"),
        ({"metrics": "yes"}, "metrics = true"),
    ],
)
def test_an_invalid_value_is_rejected_with_the_valid_ones(
    settings: dict[str, FlagValue], hint: str
) -> None:
    with pytest.raises(SettingsInvalid) as caught:
        render(settings, flags("b10434"))
    assert hint in (caught.value.hint or "")


def test_a_nul_character_never_reaches_a_command_line() -> None:
    with pytest.raises(SettingsInvalid, match="NUL"):
        render({"chat-template": "a\0b"}, flags("b10434"))


@pytest.mark.parametrize(
    "name",
    [
        "host",
        "port",
        "--api-key",
        "m",
        "alias",
        "ssl-key-file",
        "models-dir",
        "tools",
        "no-agent",
        "mcp-servers-json",
        "hf",
        "log-file",
        "help",
        "sleep-idle-seconds",
        "gpt-oss-20b-default",
    ],
)
def test_reserved_options_cannot_be_set(name: str) -> None:
    with pytest.raises(SettingsInvalid, match="cannot be set"):
        canonical(name, True, flags("b10434"))  # noqa: FBT003 (a setting's value)


def test_an_error_names_the_profile_that_has_the_setting() -> None:
    known, wrong = flags("b10434"), {"ctx-sise": 1}
    with pytest.raises(SettingsInvalid, match=r"^profile mine: no llama-server build has"):
        render(wrong, known, {"ctx-sise": "profile mine"})
    with pytest.raises(SettingsInvalid, match=r"^no llama-server build has"):
        render(wrong, known, {"ctx-sise": "model chat"})


def test_two_spellings_of_one_option_are_one_setting() -> None:
    known = flags("b10434")
    assert canonical("temperature", 1, known)[0] == canonical("temp", 1, known)[0]
    assert canonical("no-kv-unified", True, known) == ("kv-unified", False)  # noqa: FBT003 (as above)
