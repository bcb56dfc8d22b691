"""A variable has the name of its thing."""

import runpy
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def test_no_loop_parameter_or_lambda_calls_its_thing_one() -> None:
    house = runpy.run_path(str(ROOT / "scripts/house.py"))
    modules = house["read_modules"](ROOT)
    assert modules
    assert [module.name for module in modules if house["things_called_one"](module)] == []
