"""How to run the daemon at logon on Windows. Pure. Nobody has tried it; it says so.

Source: schtasks, "schtasks create".
"""

from __future__ import annotations

import subprocess

from supervisor.service.facts import NAME, ServiceFacts


def windows_note(facts: ServiceFacts) -> str:
    command = subprocess.list2cmdline(facts.serve)
    task = subprocess.list2cmdline(
        ["schtasks", "/create", "/tn", NAME, "/sc", "onlogon", "/tr", command]
    )
    return (
        "UNTESTED: llama-corral has never run on Windows. With the Task Scheduler:\n\n"
        f"    {task}\n"
        f"    schtasks /run /tn {NAME}\n\n"
        "schtasks /end kills the daemon and cuts running answers: use corral stop before it.\n"
        "For a restart after failures and a start without a logon, run the same command as a\n"
        "service by NSSM or WinSW.\n"
    )
