from __future__ import annotations

import pytest
from support.samples import flags

from supervisor.builds.help import parse, recorded_builds, recorded_names

BUILDS = list(recorded_builds())


@pytest.mark.parametrize("build", BUILDS)
def test_every_name_in_a_recorded_text_is_found(build: str) -> None:
    text = recorded_builds()[build].read_text("utf-8")
    heads = [line for line in text.splitlines() if line.startswith("-") and "---" not in line]
    found = flags(build)
    assert len(found.entries) == len(heads) > 100
    assert all(
        entry.names and all(name[0] == "-" for name in entry.names) for entry in found.entries
    )


@pytest.mark.parametrize(("build", "names"), [("b10434", 405), ("b11434", 413)])
def test_the_recorded_texts_have_the_counted_number_of_spellings(build: str, names: int) -> None:
    assert sum(len(entry.names) for entry in flags(build).entries) == names


@pytest.mark.parametrize(
    ("name", "kind", "choices"),
    [
        ("metrics", "switch", ()),
        ("ctx-size", "int", ()),
        ("slot-prompt-similarity", "number", ()),
        ("flash-attn", "enum", ("on", "off", "auto")),
        ("cpu-strict", "enum", ("0", "1")),
        ("split-mode", "enum", ("none", "layer", "row", "tensor")),
        ("load-mode", "enum", ("auto", "none", "mmap", "mlock", "mmap+mlock", "dio")),
        ("reasoning-format", "enum", ("none", "deepseek", "deepseek-legacy", "auto")),
        ("gpu-layers", "number", ("auto", "all")),
        ("pooling", "enum", ("none", "mean", "cls", "last", "rank")),
        ("tensor-split", "list", ()),
        ("model", "path", ()),
        ("host", "string", ()),
        ("poll", "int", ()),
    ],
)
def test_kind_and_choices_are_read_from_the_help(
    name: str, kind: str, choices: tuple[str, ...]
) -> None:
    flag = flags("b10434").find(name)
    assert flag
    assert (flag.kind, flag.choices) == (kind, choices)


def test_a_list_of_words_keeps_its_words() -> None:
    flag = flags("b10434").find("spec-type")
    assert flag
    assert flag.kind == "list"
    assert {"none", "draft-simple", "ngram-mod"} <= set(flag.choices)


def test_default_and_environment_are_read() -> None:
    flag = flags("b10434").find("--cache-ram")
    assert flag
    assert (flag.default, flag.env) == ("8192", "LLAMA_ARG_CACHE_RAM")


def test_deprecated_and_removed_options_are_recognised() -> None:
    found = flags("b10434")
    mlock, draft_max, ctx = found.find("mlock"), found.find("draft-max"), found.find("ctx-size")
    assert mlock
    assert mlock.deprecated
    assert draft_max
    assert draft_max.removed == "use --spec-draft-n-max or --spec-ngram-mod-n-max"
    assert ctx
    assert ctx.is_usable


@pytest.mark.parametrize("spelling", ["ctx-size", "--ctx-size", "ctx_size", "c", "-c"])
def test_an_option_is_found_by_any_spelling(spelling: str) -> None:
    flag = flags("b10434").find(spelling)
    assert flag
    assert flag.key == "ctx-size"


def test_in_a_derived_list_the_kind_of_a_value_is_unknown() -> None:
    model, threads = flags("b6324").find("model"), flags("b6324").find("threads")
    assert model
    assert threads
    assert (model.kind, model.env) == ("unknown", "LLAMA_ARG_MODEL")
    assert (threads.kind, threads.hint) == ("number", "N")


def test_the_nearest_name_is_suggested() -> None:
    assert flags("b10434").nearest("ctxsize") == "ctx-size"
    assert flags("b10434").nearest("qqqqqqqq") is None


def test_names_of_old_builds_are_recorded() -> None:
    assert {"dump-kv-cache", "grp-attn-n", "mlock", "log-jsonl"} <= recorded_names()


def test_other_text_has_no_options() -> None:
    assert parse("hello\n  there\n").entries == ()
