from __future__ import annotations

from pathlib import Path

import pytest

from supervisor.errors import SettingsInvalid
from supervisor.settings.load import load
from supervisor.settings.schema import Settings

CHAT = '[models.chat]\npath = "chat.gguf"\n'


def read(text: str, directory: Path) -> Settings:
    path = directory / "corral.toml"
    path.write_text(text, "utf-8")
    return load(path, config_dir=directory, environ={}).settings


def test_seed_000_workers_are_an_address_or_local(tmp_path: Path) -> None:
    text = f"""{CHAT}workers = ["far", "near"]
on_worker_loss = "without"
[workers.far]
address = "192.168.1.7:50052"
memory = "8 GiB"
[workers.near]
local = true
threads = 2
"""
    found = read(text, tmp_path)
    assert found.models["chat"].workers == ("far", "near")
    assert found.workers["far"].memory == 8 * 1024**3
    assert found.workers["near"].port == 0


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ("", "needs either address"),
        ('address = "10.0.0.1:1"\nlocal = true', "needs either address"),
        ('address = "10.0.0.1"', "not HOST:PORT"),
        ('address = "10.0.0.1:0"', "not HOST:PORT"),
        ('address = "10.0.0.1:65536"', "not HOST:PORT"),
        ('address = "-x:1"', "not HOST:PORT"),
        ('address = "a,b:1"', "not HOST:PORT"),
        ('address = "[::1]:1"', "not HOST:PORT"),
        ('address = "8.8.8.8:50052"', "a public address"),
        ('address = "0.0.0.0:50052"', "not the address of one machine"),
        ('address = "10.0.0.1:1"\nthreads = 2', "threads is for local = true"),
    ],
)
def test_other_workers_are_refused(tmp_path: Path, table: str, says: str) -> None:
    with pytest.raises(SettingsInvalid, match=says):
        read(f"{CHAT}[workers.a]\n{table}\n", tmp_path)


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ('workers = ["b"]', r"models.chat.workers: no worker is named b"),
        ('workers = ["a", "a"]', "names one twice"),
        ('workers = ["a"]\nreplicas = 2', "one replica and no trial"),
        ('workers = ["a"]\non_worker_loss = "panic"', "on_worker_loss"),
    ],
)
def test_a_model_cannot_use_others(tmp_path: Path, model: str, says: str) -> None:
    with pytest.raises(SettingsInvalid, match=says):
        read(f"{CHAT}{model}\n[workers.a]\nlocal = true\n", tmp_path)
