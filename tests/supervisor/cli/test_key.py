"""`corral key add|list|remove`: one file, whole or not at all, and no key kept in it."""

import hashlib
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from proxy.auth.keys_file import Key
from supervisor.backend.proxy_settings import api_keys
from supervisor.cli.key import add, list_keys, remove
from supervisor.errors import AccessDenied, SettingsInvalid

TOOLS = Key("tools", b"", 4, 60, frozenset({"qwen3"}), "batch")
ME = Key("me", b"")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("CONFIG", "DATA", "CACHE", "LOG", "RUNTIME"):
        monkeypatch.setenv(f"CORRAL_{name}_DIR", str(tmp_path))
    monkeypatch.delenv("CORRAL_CONFIG", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def added(key: Key) -> Any:
    return add(key, None).data


def test_a_key_is_shown_once_and_stored_as_its_digest(home: Path) -> None:
    outcome = add(TOOLS, None)
    secret = outcome.text
    assert secret.startswith("corral-")
    assert len(secret) > 40
    path = home / "keys.toml"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert secret not in path.read_text("utf-8")
    (key,) = api_keys(path)
    assert key == replace(TOOLS, digest=hashlib.sha256(secret.encode()).digest())


def test_two_keys_are_never_the_same(home: Path) -> None:
    assert added(ME)["key"] != added(TOOLS)["key"]
    assert [key.name for key in api_keys(home / "keys.toml")] == ["me", "tools"]


def test_the_first_key_comes_with_notes_on_the_next_steps() -> None:
    outcome = add(TOOLS, None)
    assert any("api_keys_file = " in note for note in outcome.notes)
    assert any("no model qwen3" in note for note in outcome.notes)


def test_a_key_goes_to_the_file_of_the_settings(home: Path) -> None:
    (home / "corral.toml").write_text('[proxy]\napi_keys_file = "clients.toml"\n')
    outcome = add(ME, None)
    assert (home / "clients.toml").exists()
    assert not any("api_keys_file = " in note for note in outcome.notes)


def test_a_second_key_of_one_name_is_rejected() -> None:
    add(ME, None)
    with pytest.raises(SettingsInvalid, match="already has a key me") as error:
        add(ME, None)
    assert error.value.hint == "corral key remove me removes it"


@pytest.mark.parametrize("name", ["", "a b", "../x", "-x", "x" * 65, "a\nb"])
def test_an_invalid_name_changes_nothing(home: Path, name: str) -> None:
    with pytest.raises(SettingsInvalid, match="invalid name"):
        add(Key(name, b""), None)
    assert not (home / "keys.toml").exists()


NO_TOKEN_LIMITS = {"tokens_per_minute": None, "tokens_per_day": None, "max_context": None}


def test_the_list_shows_limits_and_no_secret() -> None:
    secret = added(TOOLS)["key"]
    add(ME, None)
    shown = list_keys(None)
    assert secret not in shown.text
    assert hashlib.sha256(secret.encode()).hexdigest() not in shown.text
    assert "qwen3" in shown.text
    assert shown.data == [
        {
            "name": "tools",
            "models": ["qwen3"],
            "max_in_flight": 4,
            "requests_per_minute": 60,
            "priority": "batch",
            "admin": False,
            "tools": False,
            **NO_TOKEN_LIMITS,
        },
        {
            "name": "me",
            "models": None,
            "max_in_flight": None,
            "requests_per_minute": None,
            "priority": "interactive",
            "admin": False,
            "tools": False,
            **NO_TOKEN_LIMITS,
        },
    ]


def test_an_empty_list_names_the_command_that_adds_a_key() -> None:
    assert "corral key add NAME" in list_keys(None).text


def test_remove_takes_one_key_and_keeps_the_rest(home: Path) -> None:
    add(ME, None)
    add(TOOLS, None)
    assert remove("me", None).notes == ()
    assert [key.name for key in api_keys(home / "keys.toml")] == ["tools"]
    assert "will be rejected" in remove("tools", None).notes[0]


def test_an_unknown_key_cannot_be_removed() -> None:
    add(ME, None)
    with pytest.raises(SettingsInvalid, match="has no key you") as error:
        remove("you", None)
    assert error.value.hint == "its keys are: me"


def test_a_key_written_by_hand_becomes_its_digest(home: Path) -> None:
    path = home / "keys.toml"
    path.touch(0o600)
    path.write_text('[keys.old]\nkey = "hunter2hunter2"\n')
    add(ME, None)
    assert "hunter2" not in path.read_text("utf-8")
    assert api_keys(path)[0].digest == hashlib.sha256(b"hunter2hunter2").digest()


def test_a_file_that_others_can_read_is_rejected(home: Path) -> None:
    path = home / "keys.toml"
    path.touch(0o644)
    with pytest.raises(SettingsInvalid, match="open to others"):
        add(ME, None)
    assert path.read_text() == ""


def test_an_error_names_the_file_that_cannot_be_written(home: Path) -> None:
    (home / "file").touch()
    (home / "corral.toml").write_text('[proxy]\napi_keys_file = "file/keys.toml"\n')
    with pytest.raises(AccessDenied, match=r"file/keys\.toml"):
        add(ME, None)
