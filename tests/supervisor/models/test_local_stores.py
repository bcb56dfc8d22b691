"""Where models are looked for follows the variables of each program."""

from __future__ import annotations

from pathlib import Path

import pytest

from supervisor.models.local_stores import roots


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def of(store: str, environ: dict[str, str] | None = None) -> list[str]:
    found = roots(Path("/ours"), [Path("/a"), Path("/b")], environ or {})
    return [str(path) for owner, path in found if owner == store]


def test_without_variables_all_are_in_the_home_directory(home: Path) -> None:
    assert of("corral") == ["/ours"]
    assert of("models_dir") == ["/a", "/b"]
    assert of("huggingface") == [f"{home}/.cache/huggingface/hub"]
    assert of("lmstudio") == [f"{home}/.lmstudio/models", f"{home}/.cache/lm-studio/models"]
    assert of("ollama") == [f"{home}/.ollama/models", "/usr/share/ollama/.ollama/models"]


@pytest.mark.parametrize(
    ("store", "environ", "path"),
    [
        ("huggingface", {"HF_HOME": "/hf"}, "/hf/hub"),
        ("huggingface", {"HF_HOME": "/hf", "HF_HUB_CACHE": "/hub"}, "/hub"),
        ("huggingface", {"XDG_CACHE_HOME": "/x"}, "/x/huggingface/hub"),
        ("llama.cpp", {"LLAMA_CACHE": "/l"}, "/l"),
        ("ollama", {"OLLAMA_MODELS": "/o"}, "/o"),
    ],
)
def test_variables_say_where(store: str, environ: dict[str, str], path: str) -> None:
    assert of(store, environ) == [path]


@pytest.mark.parametrize(
    ("text", "is_followed"), [("/elsewhere\n", True), ("relative", False), ("/a\0b", False)]
)
def test_lm_studio_may_live_elsewhere(home: Path, text: str, *, is_followed: bool) -> None:
    (home / ".lmstudio-home-pointer").write_text(text)
    assert ("/elsewhere/models" in of("lmstudio")) is is_followed
    assert len(of("lmstudio")) == 2 + is_followed
