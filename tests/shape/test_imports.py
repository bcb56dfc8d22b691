"""Rules beyond import-linter: imports that cost a running daemon memory or time."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.sources import ROOT, imported_modules


def test_a_daemon_loads_no_optional_module(tiny_model: Path, tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; import supervisor.daemon.daemon\n"
        "from supervisor.models import metadata\n"
        f"metadata.read(Path({str(tiny_model)!r}), cache_dir=Path({str(tmp_path)!r}))\n"
        "unneeded = {'numpy', 'httpx', 'huggingface_hub', 'dns', 'zeroconf', 'opentelemetry'}\n"
        "unneeded |= {'plistlib', 'pydantic_settings'}\n"
        "sys.exit(bool(unneeded & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", program], check=False, cwd=ROOT)
    assert done.returncode == 0


@pytest.mark.parametrize("given", [None, "/nonexistent.pem"])
def test_a_daemon_does_not_keep_the_certificates_of_the_system(given: str | None) -> None:
    program = (
        "import os, sys; from supervisor.cli.serve import import_daemon\n"
        "import_daemon(); from aiohttp import connector\n"
        f"assert os.environ.get('SSL_CERT_FILE') == {given!r}\n"
        "sys.exit(connector._SSL_CONTEXT_VERIFIED.cert_store_stats()['x509'])"
    )
    environ = {name: value for name, value in os.environ.items() if name != "SSL_CERT_FILE"}
    environ |= {"SSL_CERT_FILE": given} if given else {}
    done = subprocess.run([sys.executable, "-c", program], check=False, cwd=ROOT, env=environ)
    assert done.returncode == 0


def test_typer_stays_in_the_command_line() -> None:
    sources = (ROOT / "supervisor").rglob("*.py")
    assert {path.parent.name for path in sources if "typer" in imported_modules(path)} == {"cli"}
