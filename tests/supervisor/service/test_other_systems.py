"""Service definitions for untested systems."""

import plistlib

from support.service_facts import facts

from supervisor.service.units import launch_agent, windows_note


def test_a_launch_agent_is_a_property_list_that_says_it_is_untested() -> None:
    text = launch_agent(facts("user", program="/opt/a & b/corral"), "/tmp/log")  # noqa: S108
    content = plistlib.loads(text.encode())
    assert content["ProgramArguments"][0] == "/opt/a & b/corral"
    assert content["KeepAlive"] == {"SuccessfulExit": False}
    assert "UNTESTED" in text


def test_the_note_for_windows_quotes_the_command() -> None:
    note = windows_note(facts("user", program=r"C:\Program Files\corral.exe"))
    assert r"\"C:\Program Files\corral.exe\" serve" in note
    assert note.startswith("UNTESTED")
