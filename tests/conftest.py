"""The real engine and the models that tests run. All are found, or fetched, once a session."""

import functools
import gc
import os
import signal
from collections.abc import Generator, Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import hypothesis
import pytest
from filelock import FileLock
from support import software_device, tiny_gguf
from support.corral_cli import CorralCli
from support.fork_server import ForkServer

from supervisor.builds.discover import Engine, list_devices, load
from supervisor.models import pinned
from supervisor.system.paths import directories

# A shell that runs the tests in the background has them ignore Ctrl-C, and so would all that they
# start. Source: POSIX shell, "Asynchronous Lists".
signal.signal(signal.SIGINT, signal.default_int_handler)

# Files and directories of tests have the modes that tests name, whatever the shell's umask.
os.umask(0o022)

# The threads of an engine spin while they wait for each other, which takes 0.3 s of a processor at
# each start where other tests run. Source: libgomp, OMP_WAIT_POLICY.
os.environ["OMP_WAIT_POLICY"] = "passive"

# Loading the Vulkan drivers takes half of an engine's start; the tests of devices show them again
# (`software_device.SHOW`). Source: Vulkan-Loader, LoaderInterfaceArchitecture.md.
os.environ["VK_LOADER_DRIVERS_DISABLE"] = "*"

# Every httpx client would parse all certificates of the system, which takes 30 ms.
httpx._transports.default.create_ssl_context = functools.cache(  # type: ignore[attr-defined]
    httpx.create_ssl_context
)

# Every run has the same examples: what once failed stands as an @example beside its property. A
# machine that does other work takes long for any example; what hangs meets the limit of its test.
_SAME = hypothesis.settings(
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.register_profile("same", _SAME)
# More and new examples: scripts/fuzz --only properties
hypothesis.settings.register_profile("search", _SAME, derandomize=False, max_examples=1000)
hypothesis.settings.load_profile("same")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Import the test modules in half the time: their objects stay, so none is looked at again."""
    gc.disable()
    collected = yield
    gc.freeze()
    gc.enable()
    return collected


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """Return the engine that llama-corral itself would take on this machine."""
    return load(None, cache_dir=tmp_path_factory.mktemp("cache"))


@pytest.fixture
def device_engine(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    """Return the engine with a software Vulkan device, which the environment then shows to all.

    One test at a time has it: two that compute on it at once take twenty times as long.
    """
    for name, value in software_device.SHOW.items():
        monkeypatch.setenv(name, value)
    with FileLock(tmp_path_factory.getbasetemp().parent / "device.lock"):
        devices = list_devices(engine)
        if not software_device.is_one(devices):
            pytest.skip(software_device.HOW_TO_INSTALL)
        yield replace(engine, devices=tuple(replace(device, free_mib=None) for device in devices))


@pytest.fixture(scope="session")
def engine_path(engine: Engine) -> Path:
    """Return the engine's llama-server."""
    return engine.path


@pytest.fixture(scope="session")
def engine_library_dirs(engine: Engine) -> tuple[Path, ...]:
    """Return the directories that go first in LD_LIBRARY_PATH for quantised models to run here."""
    return engine.library_dirs


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model that loads in milliseconds; its F16 weights need no AVX-VNNI."""
    return tiny_gguf.make(tmp_path_factory.mktemp("models") / "tiny.gguf")


@pytest.fixture(scope="session")
def slow_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model that generates for a minute when it may, so that streams overlap."""
    return tiny_gguf.make_slow(tmp_path_factory.mktemp("models") / "slow.gguf")


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """Return the demo model, 98 MB, kept where `corral model get` keeps it."""
    pin = pinned.find_pin("smollm2")
    return pinned.fetch(pin, directories().models, lambda *_: None)


@pytest.fixture(scope="session")
def fork_server() -> Iterator[ForkServer]:
    server = ForkServer()
    yield server
    server.close()


@pytest.fixture
def corral(
    tmp_path_factory: pytest.TempPathFactory, fork_server: ForkServer
) -> Iterator[CorralCli]:
    # Short, because unix socket paths are.
    corral = CorralCli(tmp_path_factory.mktemp("c"), fork_server)
    yield corral
    corral.end()
