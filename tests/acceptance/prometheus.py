"""Let a real Prometheus read `/metrics`, in each format, and ask it for its series.

Every series of `docs/metrics.md` must be there, by that name and with those labels, type and help;
`promtool check metrics` must have no complaint but that the engine's own names have a colon.
Every panel of the Grafana dashboard must have values, and every alert must fire at its fault in
`alerts_test.yaml`. Exits with 1 if something is missing.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

import httpx
from acceptance.prometheus_server import INTERVAL_S, Binaries, Prometheus, find, relay, running
from support import tiny_gguf
from support.corral_cli import CorralCli
from support.documented_metrics import Documented, documented_metrics

from supervisor.rpc.address import free_port
from supervisor.system.paths import directories

SETTINGS: Final = """
[workers.here]
local = true

[models.tiny]
path = "{path}"
[models.tiny.flags]
threads = 1
parallel = 2
spec-type = "ngram-mod"

[models.split]
path = "{path}"
workers = ["here"]
[models.split.flags]
threads = 1
parallel = 2

[models.gone]
path = "{path}.gone"
preload = false
fallback = ["tiny"]
"""
# What Prometheus 3 asks for, and what a version asks for that is set to PrometheusText0.0.4.
PROMETHEUS_3: Final = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,"
    "application/openmetrics-text;version=0.0.1;q=0.5,"
    "text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
)
TEXT: Final = "text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
# Prometheus keeps colons for names of recording rules; these names are llama-server's.
_ENGINES_COLON: Final = "should not contain ':'"
_OWN_LABELS: Final = frozenset({"__name__", "job", "instance", "le"})
_DASHBOARD: Final = Path(__file__).parents[2] / "scripts/deploy/monitoring/grafana-dashboard.json"
_ALERTS_TEST: Final = Path(__file__).with_name("alerts_test.yaml")
# Series that begin with an event that this run does not cause.
_NO_EVENT: Final = re.compile(
    r"DCGM_|corral_(device_|prompts_changed|broken_tool_calls|estimate_error|slot_file_|next_turn"
    r"|slot_holds)"
)
# Grafana's variables; panels of such events may stay empty.
_VARIABLES: Final = {"$__rate_interval": f"{4 * INTERVAL_S}s", "$instance": ".*", "$model": ".*"}
_MAY_BE_EMPTY: Final = frozenset({"Saves and restores", "Routing"})


def main() -> int:
    options = _options()
    try:
        binaries = find(options.binaries, directories().cache / "debian-prometheus")
        print(binaries.version())
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"Prometheus cannot be run: {error}; run apt-get update, or use --binaries DIRECTORY")
        return 1
    with tempfile.TemporaryDirectory(prefix="metrics-") as directory, _corral(directory) as corral:
        faults = _scrape(binaries, Path(directory), corral, options.seconds)
        page = httpx.get(f"{corral.url}/metrics").text
    colons = 0
    for line in binaries.complaints(page):
        is_engines = line.startswith("llamacpp:") and line.endswith(_ENGINES_COLON)
        faults += [] if is_engines else [f"promtool: {line}"]
        colons += is_engines
    print(f"promtool: {colons} names of llama-server have a colon")
    faults += [f"promtool: {line}" for line in binaries.failed_alert_tests(_ALERTS_TEST)]
    print("\n".join(faults) or "nothing is missing")
    return int(bool(faults))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60, help="how long it reads")
    parser.add_argument("--binaries", type=Path, help="directory of prometheus and promtool")
    return parser.parse_args()


@contextmanager
def _corral(directory: str) -> Iterator[CorralCli]:
    """Serve two models, one of them split."""
    corral = CorralCli(Path(directory))
    corral.configure(SETTINGS.format(path=tiny_gguf.make(Path(directory, "tiny.gguf"), layers=4)))
    try:
        corral.serve()
        yield corral
    finally:
        corral.end()


def _scrape(binaries: Binaries, home: Path, corral: CorralCli, seconds: float) -> list[str]:
    with ExitStack() as stack:
        targets = {
            "OpenMetrics": corral.url.removeprefix("http://"),
            "Prometheus 3": stack.enter_context(relay(corral.url, PROMETHEUS_3)),
            "text": stack.enter_context(relay(corral.url, TEXT)),
        }
        server = stack.enter_context(running(binaries, home, free_port(), targets))
        _send_requests(corral, seconds)
        errors = [f"{target['scrapePool']}: {target['lastError']}" for target in server.targets()]
        faults = [error for error in errors if not error.endswith(": ")]
        for job in targets:
            missing = list(_missing(server, job))
            series = len(server.labels(job))
            print(f"{job}: {series} names, {len(missing)} of the documented ones missing or wrong")
            faults += missing
        return faults + list(_empty_panels(server))


def _empty_panels(server: Prometheus) -> Iterator[str]:
    dashboard = json.loads(_DASHBOARD.read_text("utf-8"))
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            query = re.sub(r"\$\w+", lambda name: _VARIABLES[name[0]], target["expr"])
            if not server.query(query) and panel["title"] not in _MAY_BE_EMPTY:
                yield f"dashboard: {panel['title']} has no value: {query}"


def _send_requests(corral: CorralCli, seconds: float) -> None:
    """Send one of each kind for so long, and until Prometheus has read twice after the first."""
    began_at_s = time.monotonic()
    while True:
        for model, status in (("tiny", 200), ("split", 200), ("gone", 503)):
            body = {"model": model, "prompt": "the sea " * 200, "max_tokens": 20}
            found = httpx.post(f"{corral.url}/v1/completions", json=body, timeout=60)
            if found.status_code != status:
                found.raise_for_status()
        chat = {"model": "gone", "messages": [{"role": "user", "content": "the"}], "max_tokens": 5}
        httpx.post(f"{corral.url}/v1/chat/completions", json=chat, timeout=60).raise_for_status()
        many = {"model": "tiny", "prompts": ["the", "sea"], "max_tokens": 5}
        httpx.post(f"{corral.url}/v1/batch/completions", json=many, timeout=60).raise_for_status()
        corral.ok("slots", "save", "tiny")
        time.sleep(2 * INTERVAL_S)
        if time.monotonic() - began_at_s > seconds:
            return


def _missing(server: Prometheus, job: str) -> Iterator[str]:
    labels, metadata = server.labels(job), server.metadata(job)
    for documented_metric in documented_metrics():
        name = documented_metric.name if job == "text" else documented_metric.family
        if metadata.get(name) != (documented_metric.type, documented_metric.help):
            yield f"{job}: metadata of {name} is {metadata.get(name)}"
        yield from _wrong_series(job, documented_metric, labels)


def _wrong_series(
    job: str, documented: Documented, labels: Mapping[str, AbstractSet[str]]
) -> Iterator[str]:
    for series in documented.series:
        if series not in labels:
            if not _NO_EVENT.match(series):
                yield f"{job}: no series {series}"
        elif found := (labels[series] - _OWN_LABELS) ^ documented.labels:
            yield f"{job}: {series} differs in its labels: {', '.join(sorted(found))}"


if __name__ == "__main__":
    sys.exit(main())
