"""Kill a daemon with SIGKILL at random moments of one batch: each line must have one result.

The engine is the real one, with a tiny model. Exits with 1 if a line has no result or two.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from support import tiny_gguf  # noqa: E402 (found by the line above, as those after it)
from support.corral_cli import CorralCli, until  # noqa: E402

SETTINGS = """
[models.tiny]
path = "{path}"
[models.tiny.flags]
parallel = 4
threads = 1
"""
# Long enough for a new daemon to compute some lines.
_UP_MAX_S = 2.0


def main() -> int:
    options = _options()
    with tempfile.TemporaryDirectory(prefix="kills-") as directory:
        corral = CorralCli(Path(directory))
        corral.configure(SETTINGS.format(path=tiny_gguf.make(Path(directory, "tiny.gguf"))))
        try:
            return _report(options.lines, *_run(corral, options))
        finally:
            corral.end()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lines", type=int, default=200)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def _run(corral: CorralCli, options: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """The batch at its end, and the ids of its results."""
    moments = random.Random(options.seed)  # noqa: S311 (the same for the same seed)
    daemon = corral.serve()
    batch = _create(corral.url, options.lines)
    for kill in range(options.kills):
        time.sleep(moments.uniform(0, _UP_MAX_S))
        counts = _get(corral.url, batch["id"])["request_counts"]
        daemon.kill()
        daemon.wait()
        print(f"kill {kill + 1}: {counts['completed']} of {counts['total']} lines were done")
        daemon = corral.serve()
    until(lambda: _get(corral.url, batch["id"])["status"] == "completed", within_s=600)
    batch = _get(corral.url, batch["id"])
    text = httpx.get(f"{corral.url}/v1/files/{batch['output_file_id']}/content").text
    return batch, [json.loads(line)["custom_id"] for line in text.splitlines()]


def _create(url: str, count: int) -> dict[str, Any]:
    body = {"model": "tiny", "prompt": "the", "max_tokens": 200}
    line = {"method": "POST", "url": "/v1/completions", "body": body}
    text = "".join(json.dumps({"custom_id": f"r{i}", **line}) + "\n" for i in range(count))
    files = {"file": ("kills.jsonl", text.encode())}
    file = httpx.post(f"{url}/v1/files", data={"purpose": "batch"}, files=files).json()
    members = {"endpoint": "/v1/completions", "completion_window": "24h"}
    created: dict[str, Any] = httpx.post(
        f"{url}/v1/batches", json={"input_file_id": file["id"], **members}
    ).json()
    return created


def _get(url: str, batch_id: str) -> dict[str, Any]:
    found: dict[str, Any] = httpx.get(f"{url}/v1/batches/{batch_id}").json()
    return found


def _report(lines: int, batch: dict[str, Any], ids: list[str]) -> int:
    found = Counter(ids)
    missing = [name for name in (f"r{i}" for i in range(lines)) if name not in found]
    repeated = [name for name, count in found.items() if count > 1]
    print(f"{batch['request_counts']}; {len(ids)} results of {lines} lines")
    print(f"without a result: {missing or 'none'}; with several: {repeated or 'none'}")
    return int(bool(missing or repeated))


if __name__ == "__main__":
    sys.exit(main())
