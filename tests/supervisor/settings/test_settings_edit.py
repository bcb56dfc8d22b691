"""A trial is taken out of corral.toml, in every way to write it, and the rest stays."""

from __future__ import annotations

import stat
import tomllib
from pathlib import Path

import pytest

from supervisor.errors import AccessDenied, SettingsInvalid
from supervisor.settings.edit import change_file, remove_trial

TABLES = """\
# mine
[models.chat]
path = "/m/chat.gguf"  # small
profile = "base"   # of every day

[models.chat.trial]
profile = "speculative"
share = 0.2

[models.code]
path = "/m/code.gguf"
"""
INLINE = """\
[models]
chat = { path = "/m/chat.gguf", trial = { flags = { poll = 0 }, share = 0.2 } }
"""
DOTTED = """\
[models.chat]
path = "/m/chat.gguf"
trial.profile = "speculative"
trial.share = 0.2
trial.flags.poll = 0
flags.poll = 50 # often
"""
ENGINE = """\
[models.chat]
path = "/m/chat.gguf"
engine = "/opt/old/llama-server"  # of last month
trial = { engine = "/opt/new/llama-server", share = 0.2 }
"""
FIRST = """\
[models.chat.trial]
profile = "speculative"
share = 0.2
flags = { poll = 0, ctx-size = 4096 }

[models.chat]
path = "/m/chat.gguf"

[models.chat.variants.short]
max_tokens = 20
"""


@pytest.mark.parametrize("text", [TABLES, INLINE, DOTTED, ENGINE, FIRST])
def test_an_applied_trial_becomes_the_models_own(text: str) -> None:
    before, after = (
        tomllib.loads(case)["models"]["chat"]
        for case in (text, remove_trial(text, "chat", is_applied=True)[0])
    )
    trial = before.pop("trial")
    wanted = before | {name: trial[name] for name in ("profile", "engine") if name in trial}
    if "flags" in trial:
        wanted["flags"] = before.get("flags", {}) | trial["flags"]
    assert after == wanted


@pytest.mark.parametrize("text", [TABLES, INLINE, DOTTED, ENGINE, FIRST])
def test_a_trial_that_is_ended_leaves_nothing(text: str) -> None:
    after = tomllib.loads(remove_trial(text, "chat", is_applied=False)[0])
    wanted = tomllib.loads(text)
    del wanted["models"]["chat"]["trial"]
    assert after == wanted


def test_comments_and_other_tables_stay() -> None:
    edit = remove_trial(TABLES, "chat", is_applied=True)
    for kept in ("# mine", "# small", "# of every day", "[models.code]"):
        assert kept in edit[0]
    assert edit[1] == (
        'models.chat.profile = "speculative"',
        "models.chat.trial is gone",
    )


def test_a_trial_that_is_not_in_the_file_is_refused() -> None:
    for name, applied in (("code", True), ("code", False), ("nothing", True)):
        with pytest.raises(SettingsInvalid):
            remove_trial(TABLES, name, is_applied=applied)


def test_what_cannot_be_changed_safely_is_told_line_by_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("supervisor.settings.edit.tomlkit.dumps", lambda _: "[models]\n")
    with pytest.raises(SettingsInvalid) as refused:
        remove_trial(DOTTED, "chat", is_applied=True)
    assert refused.value.hint == (
        'write profile = "speculative" and flags.poll = 0 into [models.chat], '
        "remove [models.chat.trial] from it, then run corral reload"
    )


def test_a_name_with_other_signs_is_quoted() -> None:
    text = TABLES.replace("models.chat", 'models."owner/chat:7b"')
    edit = remove_trial(text, "owner/chat:7b", is_applied=True)
    assert edit[1] == (
        'models."owner/chat:7b".profile = "speculative"',
        'models."owner/chat:7b".trial is gone',
    )
    with pytest.raises(SettingsInvalid) as refused:
        remove_trial("[models", "owner/chat:7b", is_applied=False)
    assert 'remove [models."owner/chat:7b".trial]' in str(refused.value.hint)


def test_the_file_keeps_its_mode_and_can_be_put_back(tmp_path: Path) -> None:
    path = tmp_path / "corral.toml"
    path.write_text(TABLES)
    path.chmod(0o644)
    changed = change_file(path, lambda text: remove_trial(text, "chat", is_applied=False))
    assert "trial" not in path.read_text()
    assert changed.backup.read_text() == TABLES
    assert stat.S_IMODE(changed.backup.stat().st_mode) == 0o600
    changed.restore()
    assert path.read_text() == TABLES
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_cannot_be_changed_is_reported(tmp_path: Path) -> None:
    with pytest.raises(AccessDenied, match="cannot be changed"):
        change_file(tmp_path / "none" / "corral.toml", lambda _: ("", ()))
