"""How patiently a model is restarted: the supervisor's table, and where the model differs."""

from pathlib import Path

import pytest

from supervisor.errors import NoSuchModel
from supervisor.fleet.planner import LaunchPlanner
from supervisor.settings.schema import Settings
from supervisor.settings.tables import RestartPolicy
from supervisor.system.paths import Directories

MODELS = {
    "plain": {"path": "a.gguf"},
    "patient": {"path": "a.gguf", "restart": {"max_failures": 50, "failure_half_life_s": 60}},
}


def planner(directory: Path, **supervisor: object) -> LaunchPlanner:
    where = Directories(directory, directory, directory, directory, directory)
    return LaunchPlanner(Settings(models=MODELS, supervisor={"restart": supervisor}), where)


def test_without_a_word_the_policys_own_defaults_stand(tmp_path: Path) -> None:
    assert planner(tmp_path).restart_policy("plain") == RestartPolicy()


def test_what_a_model_says_wins_over_the_table_and_the_rest_is_the_tables(tmp_path: Path) -> None:
    shop = planner(tmp_path, backoff_initial_s=2, max_failures=9)
    assert shop.restart_policy("plain") == RestartPolicy(backoff_initial_s=2, max_failures=9)
    assert shop.restart_policy("patient") == RestartPolicy(
        backoff_initial_s=2, max_failures=50, failure_half_life_s=60
    )


def test_an_unknown_model_has_no_policy(tmp_path: Path) -> None:
    with pytest.raises(NoSuchModel):
        planner(tmp_path).restart_policy("other")
