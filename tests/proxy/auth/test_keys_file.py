"""The file of API keys: its format and its permissions."""

import hashlib
import os
from pathlib import Path

import pytest

from proxy.auth.keys_file import Key, file_version, parse_keys, read_keys, render_keys
from proxy.errors import ConfigError

DIGEST = hashlib.sha256(b"corral-secret").digest()
HERE = Path("keys.toml")


def write(path: Path, text: str, mode: int = 0o600) -> Path:
    path.write_text(text, "utf-8")
    path.chmod(mode)
    return path


def test_an_entry_sets_the_limits_of_its_key() -> None:
    text = (
        f'[keys.tools]\nsha256 = "{DIGEST.hex().upper()}"\nmax_in_flight = 4\n'
        'requests_per_minute = 60\nmodels = ["qwen3"]\npriority = "batch"\n'
        '[keys."me@home"]\nkey = "corral-secret-2"\nadmin = true\n'
    )
    tools, me = parse_keys(text.encode(), HERE)
    assert tools == Key("tools", DIGEST, 4, 60, frozenset({"qwen3"}), "batch")
    assert me == Key("me@home", hashlib.sha256(b"corral-secret-2").digest(), admin=True)


def test_rendered_keys_parse_to_the_same_keys() -> None:
    keys = (
        Key("a", DIGEST, 4, 60, frozenset({"qwen3", "vendor/x"}), "batch"),
        Key("b.c@d", bytes(32), models=frozenset(), admin=True),
    )
    text = render_keys(keys)
    assert text.startswith("#")
    assert parse_keys(text.encode(), HERE) == keys


def test_no_key_is_rendered_or_shown() -> None:
    assert "corral-secret" not in render_keys(parse_keys(b'[keys.a]\nkey = "corral-secret"', HERE))
    assert DIGEST.hex() not in repr(Key("a", DIGEST))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[keys.a", "is not TOML"),
        ("[clients.a]", "unexpected key 'clients'; expected tables named [keys.NAME]"),
        ("keys = 3", "'keys' must be tables named [keys.NAME]"),
        ("[keys.a]", "keys.a: needs either key or sha256"),
        (f'[keys.a]\nkey="hunter2hunter2"\nsha256="{DIGEST.hex()}"', "either key or sha256"),
        ('[keys.a]\nkey = "hunter2"', "keys.a.key must be 8 to 512 printable"),
        ('[keys.a]\nkey = "hunter2 hunter2"', "keys.a.key must be 8 to 512 printable"),
        ('[keys.a]\nsha256 = "abc"', "keys.a.sha256 must be 64 hexadecimal digits"),
        ('[keys.a]\nkye = "hunter2hunter2"', "keys.a.kye is unknown; did you mean key?"),
        ('[keys.a]\nkey="hunter2hunter2"\nmax_inflight=1', "did you mean max_in_flight?"),
        ('[keys.a]\nkey="hunter2hunter2"\nmax_in_flight=0', "keys.a.max_in_flight: "),
        ('[keys.a]\nkey="hunter2hunter2"\nrequests_per_minute="9"', "keys.a.requests_per_minute: "),
        ('[keys.a]\nkey="hunter2hunter2"\nmodels="x"', "keys.a.models: "),
        ('[keys.a]\nkey="hunter2hunter2"\npriority="fast"', "keys.a.priority: "),
        ('[keys."a b"]\nkey="hunter2hunter2"', "invalid name 'a b'"),
        ('[keys.a]\nkey="hunter2hunter2"\n[keys.b]\nkey="hunter2hunter2"', "a and b are the same"),
        ('keys.a = "hunter2hunter2"', "keys.a"),
    ],
)
def test_an_invalid_entry_is_named_without_its_key(text: str, expected: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_keys(text.encode(), HERE)
    assert expected in error.value.message
    assert "keys.toml" in error.value.message
    assert "hunter2" not in error.value.message
    assert error.value.hint


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o660, 0o610])
def test_a_file_accessible_to_others_is_rejected(tmp_path: Path, mode: int) -> None:
    path = write(tmp_path / "keys.toml", "", mode)
    with pytest.raises(ConfigError, match=f"open to others \\(mode {mode:o}\\)") as error:
        read_keys(path)
    assert error.value.hint == f"chmod 600 {path}"


def test_a_missing_file_is_named_with_the_command_that_creates_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing\.toml cannot be read") as error:
        read_keys(tmp_path / "nothing.toml")
    assert "corral key add" in error.value.hint


def test_a_pipe_in_its_place_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(ConfigError, match="not a regular file"):
        read_keys(tmp_path / "pipe")


def test_a_file_that_is_too_large_is_not_read_whole(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="larger than 1 MiB"):
        read_keys(write(tmp_path / "keys.toml", "#" * (1024**2 + 1)))


def test_a_changed_file_has_another_version(tmp_path: Path) -> None:
    path = write(tmp_path / "keys.toml", "")
    _, version = read_keys(path)
    assert version == file_version(path)
    write(tmp_path / "new", "#").replace(path)
    assert version != file_version(path)
    path.unlink()
    assert file_version(path) is None
