"""`corral requests` shows what the real engine computes, and ends it."""

from __future__ import annotations

from pathlib import Path

from corral_cli import CorralCli, begin_stream, rest_of, until


def test_a_stream_is_listed_and_cancelled(corral: CorralCli, slow_model: Path) -> None:
    flags = "{ ctx-size = 4096, parallel = 1, threads = 1 }"
    corral.configure(f'[models.m]\npath = "{slow_model}"\nflags = {flags}\n')
    assert corral("requests").returncode == 3
    corral.ok("start")
    assert "no request is in flight" in corral("requests").stdout
    with begin_stream(corral, 30_000, "m") as stream:
        until(lambda: b'"content"' in stream.readline())
        (found,) = corral.data("requests")
        assert (found["model"], found["instance"], found["phase"]) == ("m", "m.0", "decode")
        assert f"{found['id']}  " in corral("requests").stdout
        assert "cancelled" in corral("requests", "cancel", found["id"]).stdout
        assert "request_cancelled" in rest_of(stream)
    until(lambda: corral.data("requests") == [])
    unknown = corral("requests", "cancel", "nothing")
    assert unknown.returncode == 4
    assert "no request in flight has the id nothing" in unknown.stderr
