"""A variable has the name of its thing."""

import runpy

from support.sources import ROOT, parse


def test_no_loop_parameter_or_lambda_calls_its_thing_one() -> None:
    house = runpy.run_path(str(ROOT / "scripts/house.py"))
    paths = [path for name in house["PACKAGES"] for path in (ROOT / name).rglob("*.py")]
    assert paths
    modules = [house["Module"](path, str(path), parse(path)) for path in paths]
    assert [module.name for module in modules if house["things_called_one"](module)] == []
