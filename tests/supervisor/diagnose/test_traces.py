"""Findings about the collector of traces."""

from __future__ import annotations

import socket

from proxy.settings import TracingSettings
from supervisor.diagnose.host_checks import check_traces


def test_a_collector_that_takes_no_connection_is_found() -> None:
    assert list(check_traces(TracingSettings())) == []
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        (finding,) = check_traces(TracingSettings(endpoint=url))
        assert (finding.level, finding.text) == ("ok", f"sent to {url}")
    (finding,) = check_traces(TracingSettings(endpoint=url))
    assert (finding.level, finding.text) == (
        "warn",
        f"the collector {url} takes no connection: Connection refused",
    )
