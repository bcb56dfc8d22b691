"""One value of corral.toml is changed, in every way to write it, and the rest stays."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from supervisor.cli.config import set_value, unset_value
from supervisor.errors import SettingsInvalid
from supervisor.settings.edit import key_parts, with_value, without_value

TEXT = """\
# mine
[proxy]
listen = "127.0.0.1:8080"  # the usual one

[models.chat]
path = "/m/chat.gguf"
flags = { poll = 0 }
"""


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("CONFIG", "DATA", "CACHE", "LOG", "RUNTIME"):
        monkeypatch.setenv(f"CORRAL_{name}_DIR", str(tmp_path))
    monkeypatch.delenv("CORRAL_CONFIG", raising=False)
    monkeypatch.chdir("/")
    return tmp_path


@pytest.mark.parametrize(
    ("key", "parts"),
    [
        ("proxy.listen", ("proxy", "listen")),
        ('models."b.c".path', ("models", "b.c", "path")),
        ("models.qwen3:8b.path", ("models", "qwen3:8b", "path")),
    ],
)
def test_a_key_is_read_as_toml_reads_it(key: str, parts: tuple[str, ...]) -> None:
    assert key_parts(key) == parts


@pytest.mark.parametrize("key", ["", "a..b", ".a", "a\nb = 1\nc"])
def test_what_is_no_key_is_refused(key: str) -> None:
    with pytest.raises(SettingsInvalid, match="is not the key of a setting"):
        key_parts(key)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (("engine",), "/opt/llama-server"),
        (("proxy", "listen"), "127.0.0.1:1"),
        (("models", "chat", "flags", "ctx-size"), 4096),
        (("models", "new", "flags", "ctx-size"), 4096),
        (("supervisor", "restart", "max_failures"), 3),
    ],
)
def test_a_value_is_set_and_taken_out_again(key: tuple[str, ...], value: object) -> None:
    text, _ = with_value(TEXT, key, value)
    found = tomllib.loads(text)
    for part in key:
        found = found[part]
    assert found == value
    assert "# mine\n" in text
    assert "# the usual one\n" in text
    without = without_value(text, key)[0]
    assert key[-1] not in without.replace("# the usual one", "")


@given(st.text(st.characters(codec="utf-8", categories=("L", "N", "P", "S", "Zs")), max_size=20))
def test_any_text_is_a_value(text: str) -> None:
    edited = tomllib.loads(with_value(TEXT, ("models", "chat", "profile"), text)[0])
    assert edited["models"]["chat"]["profile"] == text


def test_a_value_is_no_table() -> None:
    with pytest.raises(SettingsInvalid, match=r"proxy\.listen\.port: a part of this key is not"):
        with_value(TEXT, ("proxy", "listen", "port"), 1)


def test_a_word_is_a_value_or_else_a_text(home: Path) -> None:
    path = home / "corral.toml"
    set_value("models.a.path", "/m/a.gguf", None)
    set_value("models.a.preload", "false", None)
    set_value("models.a.profile", "123", None)
    set_value("supervisor.memory_budget", "12 GiB", None)
    assert tomllib.loads(path.read_text("utf-8")) == {
        "models": {"a": {"path": "/m/a.gguf", "preload": False, "profile": "123"}},
        "supervisor": {"memory_budget": "12 GiB"},
    }


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("proxi.listen", "3", "proxi is unknown; did you mean proxy?"),
        ("models.chat.preload", "maybe", "models.chat.preload: must be a valid boolean"),
        ("models.b.profile", "base", "models.b.path is missing"),
    ],
)
def test_invalid_settings_are_refused_and_nothing_changes(
    home: Path, key: str, value: str, message: str
) -> None:
    path = home / "corral.toml"
    path.write_text(TEXT, "utf-8")
    with pytest.raises(SettingsInvalid) as caught:
        set_value(key, value, None)
    assert message in caught.value.message
    assert "nothing was changed" in str(caught.value.hint)
    assert path.read_text("utf-8") == TEXT
    assert [path.name for path in home.iterdir()] == ["corral.toml"]


def test_a_file_is_not_made_for_an_invalid_value(home: Path) -> None:
    with pytest.raises(SettingsInvalid):
        set_value("proxi.listen", "3", None)
    assert not list(home.iterdir())


def test_what_is_not_set_cannot_be_taken_out(home: Path) -> None:
    with pytest.raises(SettingsInvalid, match="there is no settings file"):
        unset_value("proxy.listen", None)
    (home / "corral.toml").write_text(TEXT, "utf-8")
    with pytest.raises(SettingsInvalid, match=r"does not set models\.b"):
        unset_value("models.b", None)
    unset_value("models.chat", None)
    assert tomllib.loads((home / "corral.toml").read_text("utf-8")).keys() == {"proxy"}


def test_a_value_of_the_environment_wins_and_is_named(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CORRAL_PROXY__LISTEN", "127.0.0.1:2")
    shown = set_value("proxy.listen", "127.0.0.1:1", None)
    assert shown.notes == ("the environment sets proxy.listen too, and takes precedence",)
    assert "127.0.0.1:1" in (home / "corral.toml").read_text("utf-8")
