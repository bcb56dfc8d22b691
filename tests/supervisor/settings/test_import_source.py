"""Any source of settings becomes TOML or is refused with a message."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from supervisor.builds.help import newest_flags
from supervisor.errors import SettingsInvalid
from supervisor.settings.import_source import SourceKind, convert, render


def converts_or_refuses(text: str, kind: SourceKind) -> None:
    try:
        made = convert(text, kind, Path("/base"), {"X": "3"})
    except SettingsInvalid:
        return
    rendered = render(made).encode().decode()
    # In this form NaN is equal to itself.
    read = json.dumps(tomllib.loads(rendered), sort_keys=True)
    assert read == json.dumps(made.document(), sort_keys=True)


@given(st.text(max_size=200), st.sampled_from(["command", "llama-swap", "router", "modelfile"]))
@example(":", "llama-swap")
@example("-", "command")
def test_any_text(text: str, kind: SourceKind) -> None:
    converts_or_refuses(text, kind)


# Scalars of YAML that readers take for something else than text, or that they stumble over.
ODD = [
    *("~", "null", "true", "no", "=", "<<", "''", "'a:b'", "'a b'", "${m}", "${MODEL_ID}"),
    *("3", "-1", "1.5", ".nan", "-.inf", "1e400", "0x1F", "1_000", "12:30:45", "9" * 5000),
    *(
        "2024-01-02",
        "2024-01-02T03:04:05Z",
        "2024-13-45",
        "0x" + "f" * 5000,
        "18446744073709551616",
    ),
    *(r'"\ud800"', r'"\0"', r'"a\nb"', "!!binary aGk=", "!!set {a}", "!!bool maybe", "!!int ''"),
    *("!!timestamp x", "!!python/object:os.system x", "!x y", "&a [*a]", "*a"),
]
NAMES = ["a", "m", "a:high", "'${MODEL_ID}:high'", "'a b'", "1", "true", "~", "''", ".nan"]
MODEL = ("ttl", "aliases", "env", "filters", "macros", "stray")
PLACES = (
    *("models", "models.a", "models.1", *(f"models.a.{key}" for key in MODEL)),
    *("models.a.filters.setParams", "models.a.filters.setParams.x", "models.a.filters.stripParams"),
    *("models.a.filters.setParamsByID", "models.a.filters.setParamsByID.a:high"),
    *("models.a.filters.setParamsByID.a:high.x", "models.a.macros.m", "macros", "macros.m"),
    *("hooks", "hooks.on_startup", "hooks.on_startup.preload", "groups", "groups.g"),
    *("groups.g.persistent", "groups.g.members", "groups.g.swap", "groups.g.exclusive"),
    *("matrix", "matrix.vars", "matrix.sets", "matrix.sets.s", "peers", "peers.p", "peers.p.proxy"),
    *("peers.p.models", "peers.p.apiKey", "routing", "routing.router.settings.groups.g.members"),
    *("healthCheckTimeout", "globalTTL", "apiKeys", "stray", "~"),
)
scalars = st.sampled_from(ODD) | st.text(max_size=8) | st.integers().map(str)


def table(members: Iterable[tuple[str, str]]) -> str:
    return f"{{{', '.join(f'{key}: {value}' for key, value in members)}}}"


@st.composite
def values(draw: st.DrawFn) -> str:
    """Draw a value of any shape as YAML writes it in one line."""
    names = st.sampled_from([*NAMES, "2024-01-01", "[a]"])
    return draw(
        st.recursive(
            scalars,
            lambda inner: (
                st.lists(inner, max_size=3).map(lambda found: f"[{', '.join(found)}]")
                | st.lists(st.tuples(names, inner), max_size=3).map(table)
            ),
            max_leaves=6,
        )
    )


@st.composite
def llama_swaps(draw: st.DrawFn) -> str:
    """Draw a file with some odd values, each at a place that means something."""
    command = draw(st.sampled_from(["llama-server -m a.gguf", "llama-server -m ${m} --alias x"]))
    whole: dict[str, Any] = {"models": {"a": {"cmd": f"'{command}'"}}}
    for place in draw(st.lists(st.sampled_from(PLACES), max_size=5, unique=True)):
        *above, last = place.split(".")
        into = whole
        for key in above:
            if not isinstance(into.get(key), dict):
                into[key] = {}
            into = into[key]
        into[last] = draw(values())
    return "\n".join(f"{key}: {_flow(value)}" for key, value in whole.items())


def _flow(value: str | dict[str, Any]) -> str:
    if isinstance(value, str):
        return value
    return table((f"'{key}'", _flow(inner)) for key, inner in value.items())


@given(llama_swaps())
@example("models: &a [*a]\nmacros: &a [*a]")
@example("models: {a: {cmd: !!bool maybe}}")
@example("models: {a: {cmd: 'llama-server -m a.gguf'}}\nmatrix: {sets: {s: '+t', t: '+s'}}")
@example(f"models: {{a: {{cmd: 'llama-server -m a.gguf'}}}}\nmatrix: {{sets: {{s: {'(' * 999}a}}}}")
@example(
    f"models: {{a: {{cmd: 'llama-server -m a.gguf'}}}}\nmatrix: {{sets: {{s: {'a&' * 2000}a}}}}"
)
@example("models: {a: {cmd: 'llama-server -m a.gguf', ttl: 2024-01-02}}")
def test_any_value_at_any_place_of_a_llama_swap_file(text: str) -> None:
    converts_or_refuses(text, "llama-swap")


OPTIONS = [name for flag in newest_flags().entries for name in (f"--{flag.key}", flag.key)]
words = st.one_of(
    st.sampled_from(OPTIONS),
    st.text(max_size=20),
    st.sampled_from(["-m", "-c", "-ngl", "-ot", "-1", "nan", "-inf", "1e400", "9" * 5000, "0x10"]),
)


@given(st.lists(words, max_size=8))
@example(["-"])
@example(["--threads", "999999999999999999999999999999"])
def test_any_words_after_the_program(words: list[str]) -> None:
    quoted = " ".join("'" + word.replace("'", "") + "'" for word in words)
    converts_or_refuses(f"llama-server -m a.gguf {quoted}", "command")


lines = st.tuples(
    st.sampled_from(
        ["FROM", "PARAMETER", "PARAMETER stop", "PARAMETER num_ctx", "ADAPTER", "SYSTEM"]
    )
    | st.sampled_from(["PARAMETER temperature", "PARAMETER num_gpu", "TEMPLATE", "MESSAGE", "X"]),
    words | st.sampled_from(['"""a', '"""', '"', "~x/a.gguf", "²", "./m.gguf", "llama3.2"]),
).map(" ".join)


@given(st.lists(lines, max_size=8))
@example(["FROM ~0/"])
@example(["PARAMETER num_ctx 999999999999999999999999999999"])
def test_any_instructions_of_a_modelfile(lines: list[str]) -> None:
    converts_or_refuses("\n".join(["FROM ./m.gguf", *lines]), "modelfile")


entries = st.tuples(st.sampled_from(OPTIONS) | words, words).map(" = ".join) | st.text(max_size=20)


@given(st.lists(st.sampled_from(["[*]", "[a]", "[org/a:Q4]", "[]"]) | entries, max_size=10))
def test_any_entries_of_a_router_preset(entries: list[str]) -> None:
    converts_or_refuses("\n".join(["[m]", "model = a.gguf", *entries]), "router")
