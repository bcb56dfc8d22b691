"""The shell completes names and keys, also where the settings cannot be read."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.corral_cli import CorralCli
from support.installed_engines import install


def completed(corral: CorralCli, words: str) -> list[str]:
    asked = {"_CORRAL_COMPLETE": "complete_bash", "COMP_WORDS": words}
    corral.env |= asked | {"COMP_CWORD": str(len(words.split(" ")) - 1)}
    return corral().stdout.split()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("corral start c", ["chat", "chat:short"]),
        ("corral plan d", ["dull"]),
        ("corral plan qwen/t", ["qwen/tiny"]),
        ("corral profile show ba", ["base"]),
        ("corral config set proxy.lis", ["proxy.listen"]),
        (
            "corral config set models.dull.res",
            [
                f"models.dull.restart.{name}"
                for name in (
                    "backoff_initial_s",
                    "backoff_max_s",
                    "failure_half_life_s",
                    "max_failures",
                )
            ],
        ),
        ("corral key remove t", ["tools"]),
        ("corral engine use b1", ["b11434-cpu"]),
    ],
)
def test_words_of_every_kind(corral: CorralCli, words: str, expected: list[str]) -> None:
    corral.configure(
        '[models.chat]\npath = "c.gguf"\nvariants.short.set.max_tokens = 3\n'
        '[models.dull]\npath = "d.gguf"\n[models."qwen/tiny"]\npath = "t.gguf"\n'
    )
    corral("key", "add", "tools")
    install(corral.root / "data" / "engines", "b11434-cpu", Path("/bin/true"))
    assert completed(corral, words) == expected


def test_files_and_directories(corral: CorralCli, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.gguf").touch()
    (tmp_path / "in" / "a.txt").touch()
    (tmp_path / "in" / "all").mkdir()
    found = completed(corral, f"corral start {tmp_path}/in/a")
    assert found == [f"{tmp_path}/in/a.gguf", f"{tmp_path}/in/all/"]


def test_invalid_settings_offer_nothing(corral: CorralCli) -> None:
    corral.configure("[models.chat]\n")
    assert completed(corral, "corral start c") == []
