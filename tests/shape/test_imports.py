"""Who may import whom: the layers of the house, held by reading every import."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
# Each layer may import itself, the layers after it, and the leaves.
LAYERS = ["cli", "commands", "doctor", "daemon", "control", "fleet", "life", "profile"]
LEAVES = {"errors", "events", "failures", "host", "log", "settings", "show", "__init__"}
# psutil is read in few places, so that what it costs and where it lies stays known.
PSUTIL = {
    "life/child.py",
    "life/reaper.py",
    "fleet/devices.py",
    "host/owner.py",
    "profile/machine.py",
}


def sources(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def imports(path: Path) -> set[str]:
    tree = ast.parse(path.read_text("utf-8"))
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def layer(path: Path) -> str:
    first = path.relative_to(ROOT / "supervisor").parts[0]
    return first.removesuffix(".py")


def reached(path: Path) -> set[str]:
    """Return the parts of supervisor that a file imports."""
    parts = {name.split(".")[1] for name in imports(path) if name.startswith("supervisor.")}
    return parts & {layer(source) for source in sources("supervisor")}


@pytest.mark.parametrize("path", sources("proxy"), ids=lambda path: path.name)
def test_the_proxy_imports_nothing_of_the_supervisor(path: Path) -> None:
    assert not [name for name in imports(path) if name.split(".")[0] == "supervisor"]


@pytest.mark.parametrize(
    "path", sources("supervisor"), ids=lambda path: str(path.relative_to(ROOT))
)
def test_a_layer_imports_only_those_below_it(path: Path) -> None:
    here = layer(path)
    if here in LEAVES:
        allowed = LEAVES
    elif here == "bridge":
        allowed = {"bridge", "fleet", "life", *LEAVES}
    else:
        allowed = {*LAYERS[LAYERS.index(here) :], *LEAVES}
    if here in {"commands", "doctor", "daemon"}:
        allowed |= {"bridge"}
    assert reached(path) <= allowed


def test_few_files_know_both_packages() -> None:
    both = {
        path.relative_to(ROOT / "supervisor")
        for path in sources("supervisor")
        if any(name.split(".")[0] == "proxy" for name in imports(path))
    }
    beside = {path for path in both if path.parts[0] != "bridge"}
    # The file of API keys is the proxy's; a command writes it. TOML is bounded alike in all files.
    # Failures are counted in one place.
    toml = {Path("settings/load.py"), Path("settings/toml_file.py")}
    assert beside == {Path("commands/key.py"), Path("daemon.py"), Path("failures.py"), *toml}


@pytest.mark.parametrize("heavy", ["numpy", "structlog", "pygments"])
def test_a_daemon_does_not_keep_what_it_can_do_without(tiny_model: Path, heavy: str) -> None:
    program = (
        "import sys; from pathlib import Path; import supervisor.commands.serve\n"
        "from supervisor.profile import gguf\n"
        f"gguf.read(Path({str(tiny_model)!r}), cache_dir=Path('/nowhere'))\n"
        f"sys.exit({heavy!r} in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], check=False, cwd=ROOT)
    assert done.returncode == 0


def test_psutil_is_read_in_few_places() -> None:
    users = {
        str(path.relative_to(ROOT / "supervisor"))
        for path in sources("supervisor")
        if "psutil" in imports(path)
    }
    assert users <= PSUTIL


def test_typer_stays_in_the_command_line() -> None:
    users = {layer(path) for path in sources("supervisor") if "typer" in imports(path)}
    assert users <= {"cli", "commands"}
