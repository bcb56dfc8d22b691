"""The way of one request through the code is reported."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def test_the_trace_of_a_chat_ends_with_its_figures() -> None:
    script = [sys.executable, "scripts/trace_request.py"]
    ran = subprocess.run(script, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    lines = ran.stdout.splitlines()
    figures = re.fullmatch(
        r"(\d+) functions in (\d+) files; \d+ steps, \d+ changes of package", lines.pop()
    )
    calls = re.fullmatch(
        r"(\d+) calls: (\d+) until the engine has it, (\d+) until its first token, "
        r"(\d+) until its last byte, (\d+) after it",
        lines.pop(),
    )
    assert figures
    assert calls
    total, *parts = map(int, calls.groups())
    assert total == sum(parts)
    assert int(figures[1]) == len(lines)
    assert any("proxy/forward/forward.py" in line for line in lines)
