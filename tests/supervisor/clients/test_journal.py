"""Changes of settings files can be undone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from supervisor.clients.journal import (
    JOURNAL,
    TEXTS,
    apply_file_settings,
    is_empty,
    undo_entries,
)
from supervisor.clients.programs import (
    ABSENT,
    CLIENTS,
    Facts,
    FileSettings,
    Place,
    Places,
    ServedModel,
)

CHAT = ServedModel("chat", 16_384, sees_images=True)
SMALL = ServedModel("small")
FACTS = Facts("http://127.0.0.1:8080", (CHAT, SMALL), CHAT, SMALL)
PLACES = Places(Path("/home/me"), {}, Path("/home/me/.config/llama-corral"))
# Content that a user may have in a file of each format.
OWN = {
    "json": '// mine\n{\n  "env": {"EDITOR": "vi"},\n  "model": "opus" // best\n}\n',
    "toml": '# mine\nmodel = "gpt" # best\n\n[tui]\ntheme = "x"\n',
    "yaml": "# mine\nmodel: gpt   # best\n",
    "env": "# mine\nOPENAI_API_KEY=secret\n",
}
FILES = [
    pytest.param(file, id=f"{client.name}-{file.path.name}")
    for client in CLIENTS
    for file in client.files(FACTS, PLACES)
]


def own_of(wanted: FileSettings) -> str:
    is_list = wanted.path.name == "extra-openai-models.yaml"
    return "# mine\n- model_id: other\n" if is_list else OWN[wanted.format]


@pytest.mark.parametrize("wanted", FILES)
def test_every_file_is_as_it_was_before(wanted: FileSettings) -> None:
    own = own_of(wanted)
    text, written = apply_file_settings(own, wanted, None, is_new=False)
    read, _, _ = TEXTS[wanted.format]
    for place, value in wanted.values.items():
        assert read(text, place) == value
    assert "mine" in text
    (again,) = JOURNAL.validate_json(JOURNAL.dump_json([written]))
    assert again == written
    found = undo_entries(text, again)
    assert (found[0].split(), found[1]) == (own.split(), ())


@pytest.mark.parametrize("wanted", FILES)
def test_a_file_that_was_made_is_left_empty(wanted: FileSettings) -> None:
    text, written = apply_file_settings("", wanted, None, is_new=True)
    assert is_empty(undo_entries(text, written)[0])


@pytest.mark.parametrize("wanted", FILES)
def test_what_was_written_twice_is_taken_back_once(wanted: FileSettings) -> None:
    own = own_of(wanted)
    text, first = apply_file_settings(own, wanted, None, is_new=False)
    again, second = apply_file_settings(text, wanted, first, is_new=False)
    assert again.split() == text.split()
    assert undo_entries(again, second)[0].split() == own.split()


def wanted(values: Any, **defaults: Any) -> FileSettings:
    made: dict[Place, Any] = {(name,): value for name, value in defaults.items()}
    return FileSettings(Path("/f"), "json", values, made)


def test_what_somebody_changed_since_stays() -> None:
    given = wanted({("env", "A"): "1", ("env", "B"): "2"})
    text, written = apply_file_settings('{"env": {"B": "0"}}', given, None, is_new=False)
    edited = text.replace('"1"', '"9"').replace('"B"', '"C": 3, "B"')
    found = undo_entries(edited, written)
    assert json.loads(found[0]) == {"env": {"A": "9", "B": "0", "C": 3}}
    assert found[1] == (("env", "A"),)


def test_what_somebody_removed_since_is_gone() -> None:
    text, written = apply_file_settings("{}", wanted({("a", "b"): 1}), None, is_new=False)
    assert text != "{}"
    assert undo_entries("{}", written) == ("{}", ())


def test_a_table_that_was_there_empty_stays() -> None:
    text, written = apply_file_settings(
        '{"env": {}}', wanted({("env", "A"): 1}), None, is_new=False
    )
    assert json.loads(undo_entries(text, written)[0]) == {"env": {}}


def test_what_a_file_needs_is_set_once_and_goes_with_all_else() -> None:
    given = wanted({("a",): 1}, schema="v1")
    kept, _ = apply_file_settings('{"schema": "v9"}', given, None, is_new=False)
    assert json.loads(kept)["schema"] == "v9"
    text, written = apply_file_settings("", given, None, is_new=True)
    assert json.loads(text) == {"schema": "v1", "a": 1}
    assert is_empty(undo_entries(text, written)[0])
    more = text.replace('"a": 1', '"a": 1,\n  "mine": 2')
    assert json.loads(undo_entries(more, written)[0]) == {"schema": "v1", "mine": 2}


def test_undo_after_another_model_restores_the_first_value() -> None:
    text, first = apply_file_settings(
        '{"model": "opus"}', wanted({("model",): "a"}), None, is_new=False
    )
    text, second = apply_file_settings(text, wanted({("model",): "b"}), first, is_new=False)
    assert json.loads(text) == {"model": "b"}
    assert json.loads(undo_entries(text, second)[0]) == {"model": "opus"}
    assert TEXTS["json"][0](text, ("other",)) is ABSENT
