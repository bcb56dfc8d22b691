"""A program that prints as llama-server does, and serves nothing."""

from __future__ import annotations

from supervisor.builds.help import recorded_builds

HELP = recorded_builds()["b10434"]


def engine_program(build: int) -> bytes:
    return (
        "#!/bin/sh\ncase $1 in\n"
        f"--version) echo 'version: 0.5.0-dev (build {build}, commit abc1234)' >&2;;\n"
        f"--help) cat '{HELP}';;\n"
        "--list-devices) echo 'Available devices:';;\n"
        "esac\n"
    ).encode()
