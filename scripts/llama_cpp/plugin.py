"""A plugin for pytest: the programs and files that llama.cpp's server tests start and download.

A server is started by `StandIn`. `load_all` of the presets, which downloads every model before the
first test, does nothing, and a test that downloads a file is skipped. With ONLY, tests run that
passed in the run of that JUnit file.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, NoReturn

import pytest
from support.fork_server import ForkServer

from scripts.llama_cpp.outcomes import read_outcomes
from scripts.llama_cpp.stand_in import Server, StandIn
from supervisor.builds.discover import load
from supervisor.system.paths import directories

ONLY: Final = "LLAMA_CPP_TESTS_ONLY"
MODELS: Final = "LLAMA_CPP_TESTS_MODELS"
IS_CORRAL: Final = "LLAMA_CPP_TESTS_CORRAL"


def pytest_collection() -> None:
    utils: Any = sys.modules["utils"]
    forks = ForkServer() if os.environ.get(IS_CORRAL) else None
    stand_in = StandIn(load(None, cache_dir=directories().cache), Path(os.environ[MODELS]), forks)

    def start(argv: Sequence[str], *, env: dict[str, str], **_: object) -> Server:
        return stand_in.start(argv[1:], env)

    # The tests get the module by the star that they import.
    utils.subprocess = SimpleNamespace(**{**vars(subprocess), "Popen": start})
    utils.ServerPreset.load_all = staticmethod(lambda: None)
    utils.download_file = _skip


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if junit := os.environ.get(ONLY):
        outcomes = read_outcomes(Path(junit))
        left_out = [item for item in items if outcomes.get(_name(item)) != "passed"]
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=left_out)


def _name(item: pytest.Item) -> str:
    """As JUnit files of pytest have it."""
    file = item.nodeid.partition("::")[0].removesuffix(".py")
    return f"{file.replace('/', '.')}::{item.name}"


def _skip(url: str, *_: object) -> NoReturn:
    pytest.skip(f"{url} is not here", allow_module_level=True)
