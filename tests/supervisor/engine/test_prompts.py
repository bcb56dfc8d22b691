import json
from pathlib import Path

import pytest

from supervisor.engine import prompts
from supervisor.errors import SettingsInvalid


def test_a_text_is_a_system_prompt(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("be kind")
    found = prompts.read(tmp_path / "a.txt")
    assert found.name == "a.txt"
    system, user = found.body["messages"]
    assert system == {"role": "system", "content": "be kind"}
    assert user["role"] == "user"  # some templates refuse a prompt without one


def test_only_prompt_members_of_a_chat_request_are_used(tmp_path: Path) -> None:
    shapes = {"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function"}]}
    how = {"model": "m", "stream": False, "max_tokens": 9, "id_slot": 1}
    (tmp_path / "a.json").write_text(json.dumps({**shapes, **how}))
    assert dict(prompts.read(tmp_path / "a.json").body) == shapes


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.json", b"{", "not JSON"),
        ("a.json", b"[]", "not a chat request"),
        ("a.json", b'{"messages": 1}', "not a chat request"),
        ("a.txt", b"\xff", "UTF-8"),
        ("a.txt", b"x" * (prompts.SIZE_MAX_BYTES + 1), "larger than 1 MiB"),
        ("", b"", "cannot read the prompt"),
    ],
)
def test_invalid_prompts_are_rejected(
    tmp_path: Path, name: str, content: bytes, reason: str
) -> None:
    if name:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(SettingsInvalid, match=reason):
        prompts.read(tmp_path / (name or "none"))
