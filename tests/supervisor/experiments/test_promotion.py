"""The engine of a canary becomes the model's own in corral.toml, however that is written."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from supervisor.errors import AccessDenied, SettingsInvalid, StartFailed
from supervisor.experiments.canaries import Canary, keep_engine, with_engine
from supervisor.fleet.launches import ReplicaId
from supervisor.fleet.reload import Difference, ReloadResult

TABLE = '[models.chat]\npath = "/m/chat.gguf"  # small\n\n[models.code]\npath = "/m/code.gguf"\n'
OLD = '[models.chat]\nengine = "b10000-cpu"  # of last month\npath = "/m/chat.gguf"\n'
INLINE = '[models]\nchat = { path = "/m/chat.gguf" }\n'
CANARY = Canary("chat", "b10434-cpu", 0.1, None, 0.1)


def result(*changed: str) -> ReloadResult:
    places = tuple(ReplicaId(name, 0) for name in changed)
    return ReloadResult(Difference((), (), places, ()), ())


@pytest.mark.parametrize("text", [TABLE, OLD, INLINE])
def test_only_the_engine_changes(text: str) -> None:
    edit = with_engine(text, "chat", Path("/opt/new/llama-server"))
    wanted = tomllib.loads(text)
    wanted["models"]["chat"]["engine"] = "/opt/new/llama-server"
    assert tomllib.loads(edit[0]) == wanted
    assert [line for line in text.splitlines() if "#" in line and "engine" not in line] == [
        line for line in edit[0].splitlines() if "#" in line and "engine" not in line
    ]
    assert edit[1] == ('models.chat.engine = "/opt/new/llama-server"',)


def test_for_a_file_without_the_model_the_error_has_the_lines_to_write() -> None:
    with pytest.raises(SettingsInvalid) as refused:
        with_engine("[models]\n", "chat", "b10434-cpu")
    assert refused.value.hint == (
        'write engine = "b10434-cpu" into [models.chat], then run corral reload'
    )


def test_a_hint_quotes_a_name_as_toml_does() -> None:
    with pytest.raises(SettingsInvalid) as refused:
        with_engine("[models]\n", "owner/chat:7b", "b10434-cpu")
    assert 'into [models."owner/chat:7b"]' in str(refused.value.hint)
    edit = with_engine('[models."a:b"]\npath = "/m/a.gguf"\n', "a:b", "b10434-cpu")
    assert edit[1] == ('models."a:b".engine = "b10434-cpu"',)


def test_a_file_with_other_changes_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "corral.toml"
    path.write_text(TABLE)
    with pytest.raises(SettingsInvalid, match=r"not applied yet, of code\.0"):
        keep_engine(CANARY, path, result("code"))
    with pytest.raises(StartFailed):
        keep_engine(CANARY, path, StartFailed("no"))
    assert path.read_text() == TABLE
    changed = keep_engine(CANARY, path, result())
    assert changed
    assert changed.backup.read_text() == TABLE
    assert 'engine = "b10434-cpu"' in path.read_text()


def test_what_a_command_has_written_is_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "corral.toml"
    path.write_text(OLD.replace("b10000-cpu", "b10434-cpu"))
    before = path.stat().st_mtime_ns
    assert keep_engine(CANARY, path, result("chat")) is None
    assert path.stat().st_mtime_ns == before
    with pytest.raises(SettingsInvalid, match=r"code\.0"):
        keep_engine(CANARY, path, result("chat", "code"))


def test_a_file_that_is_gone_is_reported(tmp_path: Path) -> None:
    with pytest.raises(AccessDenied, match="cannot be changed"):
        keep_engine(CANARY, tmp_path / "corral.toml", result())
