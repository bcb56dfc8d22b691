"""`corral slots new-key`."""

import stat
from pathlib import Path
from typing import Any

import pytest

from supervisor.cli.key import new
from supervisor.errors import SettingsInvalid
from supervisor.slot_store.encryption import read_key_ring


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("CONFIG", "DATA", "CACHE", "LOG", "RUNTIME"):
        monkeypatch.setenv(f"CORRAL_{name}_DIR", str(tmp_path))
    monkeypatch.delenv("CORRAL_CONFIG", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_new_key_is_private_and_never_shown(home: Path) -> None:
    done = new(None, None)
    data: Any = done.data
    path = home / "slots.key"
    secret = path.read_text().strip()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert secret not in f"{done.text} {done.data} {done.notes}"
    assert next(iter(read_key_ring(path))) == data["key_id"]
    assert any("slots_key_file = " in note for note in done.notes)


def test_a_second_key_comes_first_in_the_file_of_the_settings(home: Path) -> None:
    (home / "corral.toml").write_text('[supervisor]\nslots_key_file = "our.key"\n')
    first, second = new(None, None), new(None, None)
    older: Any = first.data
    newer: Any = second.data
    ring = read_key_ring(home / "our.key")
    assert list(ring) == [newer["key_id"], older["key_id"]]
    assert newer["older_keys"] == 1
    assert not any("slots_key_file = " in note for note in second.notes)


def test_what_is_no_key_file_stays(home: Path) -> None:
    path = home / "notes.txt"
    path.write_text("dear diary\n")
    path.chmod(0o600)
    with pytest.raises(SettingsInvalid, match="line 1 of the slot key file"):
        new(path, None)
    assert path.read_text() == "dear diary\n"
