"""The JSON Schema accepts the same files as the settings, and describes each setting."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator
from jsonschema.exceptions import ValidationError

from supervisor.settings.reference import json_schema, settings_reference

ROOT = Path(__file__).parents[3]
EXAMPLE = "\n".join(
    block
    for block in re.findall(
        r"```toml\n(.*?)```", (ROOT / "docs/settings.md").read_text("utf-8"), re.DOTALL
    )
    if "[proxy]" in block
)


def test_the_documented_example_is_valid() -> None:
    Draft202012Validator.check_schema(json_schema())
    Draft202012Validator(json_schema()).validate(tomllib.loads(EXAMPLE))


@pytest.mark.parametrize(
    "text",
    [
        "[proxi]\n",
        "[proxy]\nlisten = 8080\n",
        "[models.a]\nprofile = 'base'\n",
        "[models.a]\npath = 'a.gguf'\nreplicas = 0\n",
        "[supervisor]\nmemory_budget = 1\n",
        "[workers.a]\nlocal = 'yes'\n",
    ],
)
def test_what_is_wrong_is_marked(text: str) -> None:
    with pytest.raises(ValidationError):
        Draft202012Validator(json_schema()).validate(tomllib.loads(text))


def test_a_size_is_a_number_or_a_text() -> None:
    for value in ("12 GiB", 12 * 1024**3):
        Draft202012Validator(json_schema()).validate({"supervisor": {"memory_budget": value}})


def test_every_setting_has_a_description() -> None:
    found = settings_reference()
    assert [entry.key for entry in found if not entry.description] == []
    one = next(entry for entry in found if entry.key == ("models", "NAME", "replicas"))
    assert (one.kind, one.default, one.limits) == ('integer or "auto"', 1, "at least 1, at most 64")
