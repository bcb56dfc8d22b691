"""What import-linter cannot say: imports that cost a running daemon memory or time."""

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def imports(path: Path) -> set[str]:
    tree = ast.parse(path.read_text("utf-8"))
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def test_a_daemon_does_not_load_what_it_may_not_need(tiny_model: Path, tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; import supervisor.daemon.daemon\n"
        "from supervisor.models import metadata\n"
        f"metadata.read(Path({str(tiny_model)!r}), cache_dir=Path({str(tmp_path)!r}))\n"
        "unneeded = {'numpy', 'httpx', 'huggingface_hub', 'dns', 'zeroconf', 'opentelemetry'}\n"
        "sys.exit(bool(unneeded & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", program], check=False, cwd=ROOT)
    assert done.returncode == 0


def test_typer_stays_in_the_command_line() -> None:
    sources = (ROOT / "supervisor").rglob("*.py")
    assert {path.parent.name for path in sources if "typer" in imports(path)} == {"cli"}
