from pathlib import Path

import pytest

from supervisor.errors import SettingsInvalid
from supervisor.slot_store.encryption import (
    KEYS_MAX,
    new_key,
    parse_key_ring,
    read_key_ring,
    with_newest,
)

PATH = Path("slots.key")


def test_the_first_key_encrypts_and_all_are_known() -> None:
    old, new = new_key(), new_key()
    text = with_newest(new, with_newest(old, "# made for a test\n\n"))
    ring = parse_key_ring(text.encode(), PATH)
    assert list(ring.items()) == [(new.id, new), (old.id, old)]


def test_a_key_shows_nothing_of_itself() -> None:
    key = new_key()
    assert key.secret.hex()[:8] not in f"{key!r} {key.id}"


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"# none\n",
        b"\xff" * 64,
        b"SECRET" * 10,
        b"ab" * 33,
        b"\n".join(new_key().secret.hex().encode() for _ in range(KEYS_MAX + 1)),
    ],
)
def test_a_wrong_file_is_refused_without_its_content(text: bytes) -> None:
    with pytest.raises(SettingsInvalid) as caught:
        parse_key_ring(text, PATH)
    assert "SECRET" not in f"{caught.value.message} {caught.value.hint}"
    assert caught.value.hint
    assert "64 hexadecimal digits" in caught.value.hint


def test_the_file_must_be_private(tmp_path: Path) -> None:
    path = tmp_path / "slots.key"
    with pytest.raises(SettingsInvalid, match="cannot be read") as missing:
        read_key_ring(path)
    assert "corral slots new-key" in (missing.value.hint or "")
    path.write_text(with_newest(new_key(), ""))
    path.chmod(0o640)
    with pytest.raises(SettingsInvalid, match=r"open to others \(mode 640\)"):
        read_key_ring(path)
    path.chmod(0o600)
    assert len(read_key_ring(path)) == 1
