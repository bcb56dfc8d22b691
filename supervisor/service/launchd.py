"""A launch agent for macOS. Pure. Nobody has tried it; it says so.

Source: launchd.plist(5).
"""

from __future__ import annotations

import plistlib
from typing import Final

from supervisor.service.facts import NAME, ServiceFacts

_NOTE: Final = (
    "<!-- UNTESTED: written from Apple's documentation, never run. Save it as\n"
    f"     ~/Library/LaunchAgents/{NAME}.plist, then: launchctl load -w FILE -->\n"
)
_RESTART_S: Final = 15


def launch_agent(facts: ServiceFacts, log: str) -> str:
    content = {
        "Label": NAME,
        "ProgramArguments": list(facts.serve),
        "EnvironmentVariables": dict(facts.environment),
        "RunAtLoad": True,
        "KeepAlive": {"SuccessfulExit": False},
        "ThrottleInterval": _RESTART_S,
        "ExitTimeOut": facts.stop_timeout_s,
        "StandardErrorPath": log,
        "Umask": 0o077,
    }
    head, end, body = plistlib.dumps(content).decode().partition('.dtd">\n')
    return f"{head}{end}{_NOTE}{body}"
