"""Command lines that people published mean the same here, flag by flag, or a note says why not."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.samples import engine, machine, model

from supervisor.builds.discover import Device
from supervisor.builds.help import newest_flags, recorded_builds, recorded_flag
from supervisor.errors import SettingsInvalid
from supervisor.plan.plan import make_plan
from supervisor.plan.profile import load
from supervisor.plan.render import canonical
from supervisor.plan.resolve import ModelEntry
from supervisor.settings.import_flags import Converted, ConvertedModel
from supervisor.settings.import_source import convert, render
from supervisor.settings.load import merge
from supervisor.system.paths import shipped_directory

LINES = tomllib.loads(Path(__file__).with_name("command_lines.toml").read_text("utf-8"))["command"]
NEWEST = list(recorded_builds())[-1]
DEVICES = [Device(f"CUDA{number}", "a GPU", 24_576) for number in range(4)]
# Options that become another key than a flag; `corral plan` has addresses and names of its own.
ELSEWHERE = {"model", "hf-repo", "hf-file", "alias", "host", "port", "api-key"}
WORDS = {"1": "on", "true": "on", "0": "off"}
Meaning = tuple[str, object]


def imported(line: dict[str, Any]) -> tuple[Converted, ConvertedModel]:
    text = line["text"]
    if line.get("kind") == "llama-swap":
        text = json.dumps({"models": {"a": {"cmd": text}}})  # JSON is YAML
    found = convert(text, line.get("kind", "command"), Path("/base"), {})
    (made,) = found.models
    return found, made


def given(line: dict[str, Any]) -> list[str]:
    """Return the words after the program's name, or after the image of a container."""
    words = shlex.split(line["text"].replace("\\\n", " "), comments=True)
    starts = [i for i, word in enumerate(words) if re.search(r"llama-server[\w.-]*$", word)]
    images = [i for i, word in enumerate(words) if "llama.cpp:server" in word]
    unified = [i for i, word in enumerate(words) if word == "serve"]
    rest = words[(images or unified or starts)[0] + 1 :]
    return [word for word in rest if word != "&"]


def options(words: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    """Read options by the recorded help alone, each with its value as one text."""
    rest = list(words)
    while rest:
        name = rest.pop(0)
        flag = recorded_flag(name) if name.startswith("-") else None
        takes = flag is not None and flag.hint is not None
        if flag and flag.key == "flash-attn":
            takes = rest[:1] in (["on"], ["off"], ["auto"], ["1"], ["0"], ["true"], ["$FA"])
        yield name, rest.pop(0) if takes else None


def meaning(name: str, value: str | None) -> Meaning:
    """Return an option as today's build has it; numbers are equal by their value."""
    flag = recorded_flag(name)
    assert flag is not None
    if flag.key in ELSEWHERE:
        return flag.key, None
    if value is None:
        typed: Any = "on" if flag.key == "flash-attn" else True
    elif flag.key == "flash-attn":
        typed = WORDS.get(value, value)
    elif flag.kind in {"int", "number", "unknown"} and re.fullmatch(r"-?[\d.]+", value):
        typed = float(value)
    elif flag.kind == "path" and not value.startswith("/"):
        typed = str(Path("/base") / value)
    else:
        typed = value
    return canonical(name, typed, newest_flags())


def planned(made: ConvertedModel, text: str) -> tuple[set[Meaning], dict[str, str]]:
    """Return the options of a model's plan, and the reason of each option that it omits."""
    (settings,) = merge(tomllib.loads(text), None).settings.models.values()
    entry = ModelEntry(made.name, Path("/m.gguf"), flags=settings.flags, args=settings.args)
    base = load("base", (shipped_directory("profiles"),))
    plan = make_plan(entry, base, engine(NEWEST, *DEVICES), model(), machine(), instances=1)
    have = {meaning(*option) for option in options(plan.argv(host="/a.sock", port=None)[1:])}
    return have, {line.flag: line.reason for line in plan.omitted}


@pytest.mark.parametrize(
    "line", LINES, ids=[f"{i} {line['source']}" for i, line in enumerate(LINES)]
)
def test_a_published_command_line_means_the_same(line: dict[str, Any]) -> None:
    found, made = imported(line)
    have, unplanned = planned(made, render(found))
    sentences = (*found.omitted, *made.omitted, *made.notes, *unplanned)
    lost = []
    for name, value in options(given(line)):
        key, typed = wanted(name, value)
        if key in ELSEWHERE or (key, typed) in have:
            continue
        if newer := line.get("becomes", {}).get(name):
            assert any(entry == newer and (value is None or float(value) == v) for entry, v in have)
            continue
        lost.append(name)
        assert any(sentence.startswith((name, f"{key} = ", f"--{key}")) for sentence in sentences)
    assert lost == line.get("lost", [])


def wanted(name: str, value: str | None) -> Meaning:
    try:
        return meaning(name, value)
    except (AssertionError, SettingsInvalid):  # it is no option, or users may not set it
        return name, None


def test_there_are_as_many_as_sixty() -> None:
    assert len({line["text"] for line in LINES}) >= 60
    assert all(line["source"] for line in LINES)
