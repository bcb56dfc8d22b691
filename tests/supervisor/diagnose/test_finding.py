from pathlib import Path
from typing import Any

import pytest

from supervisor.diagnose.host_checks import Finding, failure_finding, redact, secrets_of
from supervisor.errors import EngineMissing
from supervisor.settings.schema import ModelSettings, Settings


def settings(**model: Any) -> Settings:
    return Settings(models={"m": ModelSettings(path=Path("m.gguf"), **model)})


def test_an_error_is_a_failure_with_its_hint_as_fix() -> None:
    finding = failure_finding("engine", EngineMissing("there is none", hint="get one"))
    assert finding == Finding("engine", "fail", "there is none", "get one")


def test_the_home_directory_is_not_shown() -> None:
    finding = Finding("x", "ok", "in /home/ada/x and /home/ada/y", "see /home/ada")
    hidden = redact(finding, Path("/home/ada"), [])
    assert hidden == Finding("x", "ok", "in ~/x and ~/y", "see ~")


def test_a_home_at_the_root_directory_changes_no_path() -> None:
    assert redact(Finding("x", "ok", "/etc"), Path("/"), []).text == "/etc"


@pytest.mark.parametrize(
    "model",
    [
        {"flags": {"api-key": "hunter2"}},
        {"flags": {"hf-token": "hunter2"}},
        {"args": ("--api-key", "hunter2")},
        {"args": ("--hf-token=hunter2",)},
    ],
)
def test_a_secret_of_the_settings_is_not_shown(model: dict[str, object]) -> None:
    secrets = secrets_of(settings(**model))
    assert "hunter2" not in redact(Finding("x", "ok", "it is hunter2"), Path("/h"), secrets).text


def test_other_values_are_shown() -> None:
    assert secrets_of(settings(flags={"ctx-size": 8}, args=("--temp", "1"))) == ()
