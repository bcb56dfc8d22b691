from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import aclosing, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from support.hub import CONTENT, FILE, REPO, FakeHub

from proxy.errors import NotServed, ProxyError
from proxy.request.models import Progress
from supervisor.backend import ollama
from supervisor.backend.ollama import OllamaHostAdapter
from supervisor.errors import CorralError
from supervisor.settings.schema import Settings


def adapter(*, serve_found: bool = True) -> OllamaHostAdapter:
    async def reload() -> None:
        return

    settings = Settings.model_construct(serve_found=serve_found, models={})
    fleet: Any = SimpleNamespace(planner=SimpleNamespace(settings=settings))
    admission: Any = SimpleNamespace(command=lambda *_: lambda: True)
    return OllamaHostAdapter(fleet, admission, lambda: nullcontext(asyncio.Event()), reload)


async def pulled(files: OllamaHostAdapter, name: str) -> list[Progress]:
    return [step async for step in files.pull(name)]


@pytest.mark.parametrize("name", ["qwen3:8b", "https://files.test/a.gguf", "../x", "-x/y", ""])
async def test_only_names_of_the_hub_are_pulled(name: str) -> None:
    with pytest.raises(NotServed, match="OWNER/NAME:QUANT"):
        await pulled(adapter(), name)


async def test_files_are_left_alone_where_they_are_not_served() -> None:
    with pytest.raises(NotServed, match="serve_found"):
        await pulled(adapter(serve_found=False), REPO)
    with pytest.raises(NotServed, match="serve_found"):
        await adapter(serve_found=False).delete("x")


async def test_a_model_of_the_settings_is_not_deleted() -> None:
    with pytest.raises(NotServed, match=r"\[models\.x\]"):
        await adapter().delete("x")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeHub]:
    with FakeHub({REPO: {"mmproj-F16.gguf": CONTENT, FILE: CONTENT}}).running() as one:
        monkeypatch.setenv("HF_ENDPOINT", one.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path))
        for name in ("CONFIG", "DATA", "RUNTIME", "LOG", "CACHE"):
            monkeypatch.setenv(f"CORRAL_{name}_DIR", str(tmp_path / name.lower()))
        yield one


def downloads() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if "get" in child.cmdline()]


async def test_a_client_that_leaves_ends_its_download(hub: FakeHub, tmp_path: Path) -> None:
    hub.gate.clear()
    async with aclosing(adapter().pull(f"hf.co/{REPO}:mmproj-F16.gguf")) as steps:
        assert (await anext(steps)).status == "pulling manifest"
        hub.cuts = [100_000]
        hub.gate.set()
        assert (await anext(steps)).total_bytes == len(CONTENT)
        assert downloads()
    assert downloads() == []
    assert len(list(tmp_path.rglob("*.incomplete"))) == 1


async def test_the_error_of_a_download_reaches_the_client(hub: FakeHub) -> None:
    with pytest.raises(ProxyError, match="not a GGUF"):
        await pulled(adapter(), f"{REPO}:Q8_0")


async def test_a_command_that_says_something_else_is_an_error() -> None:
    lines: Any = ollama.command_lines(["--version"])
    with pytest.raises(CorralError, match="something unexpected"):
        await anext(lines)


async def test_a_command_imports_no_file_of_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "supervisor").mkdir()
    for name, text in (("__init__", ""), ("cli", "print('{}')")):
        (tmp_path / "supervisor" / f"{name}.py").write_text(text, "utf-8")
    monkeypatch.chdir(tmp_path)
    lines: Any = ollama.command_lines(["--version"])
    with pytest.raises(CorralError, match="something unexpected"):
        await anext(lines)
