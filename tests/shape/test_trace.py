"""The way of one request through the code stays short."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def test_a_chat_request_stays_within_the_limits_of_trace_request() -> None:
    script = [sys.executable, "scripts/trace_request.py"]
    ran = subprocess.run(script, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 0, ran.stdout.splitlines()[-1:] + ran.stderr.splitlines()[-3:]
