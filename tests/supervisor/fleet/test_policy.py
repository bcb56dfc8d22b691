"""How patiently a model is restarted: the supervisor's table, and where the model differs."""

from pathlib import Path

import pytest

from supervisor.errors import NoSuchModel
from supervisor.fleet.workshop import Workshop
from supervisor.host.paths import Directories
from supervisor.life.restart import Policy
from supervisor.settings.root import Settings

MODELS = {
    "plain": {"path": "a.gguf"},
    "patient": {"path": "a.gguf", "restart": {"breaker": 50, "half_life_s": 60}},
}


def workshop(directory: Path, **supervisor: object) -> Workshop:
    where = Directories(directory, directory, directory, directory, directory)
    return Workshop(Settings(models=MODELS, supervisor={"restart": supervisor}), where)


def test_without_a_word_the_policys_own_defaults_stand(tmp_path: Path) -> None:
    assert workshop(tmp_path).policy("plain") == Policy()


def test_what_a_model_says_wins_over_the_table_and_the_rest_is_the_tables(tmp_path: Path) -> None:
    shop = workshop(tmp_path, base_s=2, breaker=9)
    assert shop.policy("plain") == Policy(base_s=2, breaker=9)
    assert shop.policy("patient") == Policy(base_s=2, breaker=50, half_life_s=60)


def test_a_model_nobody_configured_has_no_policy(tmp_path: Path) -> None:
    with pytest.raises(NoSuchModel):
        workshop(tmp_path).policy("other")
