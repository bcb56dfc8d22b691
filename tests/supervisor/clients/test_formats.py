"""Values of TOML, YAML and env files."""

from __future__ import annotations

from typing import Any

import pytest

from supervisor.clients import journal
from supervisor.clients.journal import TEXTS
from supervisor.clients.programs import ABSENT, FileFormat

read_toml, put_toml, drop_toml = TEXTS["toml"]
read_yaml, put_yaml, drop_yaml = TEXTS["yaml"]

TOML = """\
# my own
approval = "never" # always

[projects."/home/me"]
trust = true
"""
YAML = """\
# my own
name: Mine
models:
  # the first
  - name: other
    model: "x"   # quoted
rules: [a, b]
"""
ENV = "# my own\nexport A=1\nB='two words'\n"


def test_a_value_before_the_first_table_is_one_of_the_file() -> None:
    text = put_toml(TOML, ("model",), "chat")
    text = put_toml(text, ("model_providers", "corral"), {"name": "x", "n": 1})
    assert read_toml(text, ("model",)) == "chat"
    assert read_toml(text, ("model_providers", "corral")) == {"name": "x", "n": 1}
    assert read_toml(text, ("projects", "/home/me")) == {"trust": True}
    assert "# always\n" in text
    back = drop_toml(drop_toml(text, ("model",)), ("model_providers",))
    assert back.split() == TOML.split()


def test_an_item_of_a_list_is_found_by_its_name() -> None:
    place = "models", ("name", "ours")
    text = put_yaml(YAML, place, {"name": "ours", "model": "chat"})
    assert read_yaml(text, place) == {"name": "ours", "model": "chat"}
    assert read_yaml(text, (*place, "model")) == "chat"
    changed = put_yaml(text, place, {"name": "ours", "model": "other"})
    assert read_yaml(changed, ("models",)) == [
        {"name": "other", "model": "x"},
        {"name": "ours", "model": "other"},
    ]
    assert drop_yaml(changed, place) == YAML


def test_a_list_may_be_the_whole_file() -> None:
    place = (("model_id", "corral/chat"),)
    text = put_yaml("# my own\n", place, {"model_id": "corral/chat"})
    assert read_yaml(text, place) == {"model_id": "corral/chat"}
    assert drop_yaml(put_yaml("", place, {"model_id": "corral/chat"}), place) == ""


def test_variables_are_lines() -> None:
    assert journal.read_env(ENV, ("A",)) == "1"
    assert journal.read_env(ENV, ("B",)) == "two words"
    assert journal.read_env(ENV, ("C",)) is ABSENT
    text = journal.put_env(journal.put_env(ENV, ("C",), "a b"), ("A",), "2")
    assert text == "# my own\nA=2\nB='two words'\nC='a b'\n"
    assert journal.drop_env(text, ("C",)) == "# my own\nA=2\nB='two words'\n"


@pytest.mark.parametrize(
    ("file_format", "text"),
    [("toml", "a = ["), ("yaml", "a: [b"), ("json", "{")],
)
def test_a_text_of_another_format_is_refused(file_format: FileFormat, text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        TEXTS[file_format][0](text, ("a",))


@pytest.mark.parametrize("place", [("a", "b"), (("a", "b"),), ("a", ("b", "c"))])
def test_a_way_through_another_kind_of_value_is_refused(place: Any) -> None:
    texts: list[tuple[FileFormat, str]] = [("toml", 'a = "x"'), ("yaml", "a: x")]
    for file_format, text in texts:
        with pytest.raises(TypeError):
            TEXTS[file_format][1](text, place, 1)
