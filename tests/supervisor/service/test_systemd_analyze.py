"""systemd's own programs accept the generated files (Debian's package `systemd`)."""

import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from support.service_facts import facts

from supervisor.service.units import SERVICE, ServiceFacts, service_files, user_paths

KEYS = {"api_keys_file": "/etc/llama-corral/keys.toml"}
NODES = {"big-box": {"url": "http://10.0.0.2:8080", "key_file": "/etc/llama-corral/big.key"}}
SERVICES = {
    "system": facts(),
    "system with keys and GPUs": replace(facts(proxy=KEYS, nodes=NODES), groups=("video",)),
    "system with a model in a home": facts(models={"a": {"path": "/home/me/a.gguf"}}),
    "system without a socket": facts(proxy={"listen": "localhost:8080"}),
    "user": replace(facts("user"), environment={"PATH": "/usr/bin:/opt/50% more"}),
}

pytestmark = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed"
)


def written(service: ServiceFacts, directory: Path) -> list[Path]:
    files = service_files(service, user_paths(directory))
    for path, text in files.items():
        path.write_text(text, "utf-8")
    return list(files)


def analyze(*words: str | Path) -> subprocess.CompletedProcess[str]:
    program = shutil.which("systemd-analyze")
    assert program
    return subprocess.run([program, *words], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("name", SERVICES)
def test_verify_says_nothing(name: str, tmp_path: Path) -> None:
    done = analyze("verify", *written(SERVICES[name], tmp_path))
    # It exits with 0 also where it ignores a line.
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("name", [name for name in SERVICES if name != "user"])
def test_the_exposure_of_a_system_service_is_2_5_at_most(name: str, tmp_path: Path) -> None:
    written(SERVICES[name], tmp_path)
    done = analyze("security", "--offline=true", "--threshold=25", tmp_path / SERVICE)
    assert done.returncode == 0, done.stdout[-300:]
