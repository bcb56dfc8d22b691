from datetime import UTC, datetime

from supervisor.events import Event
from supervisor.service.notifier import LoadStatus

AT = datetime(2026, 11, 21, 9, tzinfo=UTC)


def entered(instance: str, state: str) -> Event:
    return Event("instance.state_changed", AT, {"instance": instance, "after": state})


def loaded(instance: str, value: float) -> Event:
    return Event("instance.load_progress", AT, {"instance": instance, "value": value})


def text_after(*events: Event) -> str:
    status = LoadStatus()
    for event in events:
        assert status.observe(event)
    return status.text


def test_no_instance() -> None:
    assert text_after() == "no model is loaded"
    assert text_after(entered("a.0", "ready"), entered("a.0", "stopped")) == "no model is loaded"


def test_progress_is_shown_while_a_model_loads_and_not_of_an_earlier_load() -> None:
    begun = [entered("a.0", "ready"), entered("b.0", "starting"), loaded("b.0", 0.478)]
    assert text_after(*begun) == "1 of 2 instances ready; loading b.0 47 %"
    again = [*begun, entered("b.0", "exited"), entered("b.0", "starting")]
    assert text_after(*again) == "1 of 2 instances ready; loading b.0"


def test_failures_are_named_and_long_lists_cut() -> None:
    events = [entered(f"m.{number}", "failed") for number in range(6)]
    assert text_after(*events) == "0 of 6 instances ready; failed: m.0, m.1, m.2, m.3 and 2 more"


def test_other_events_are_ignored() -> None:
    assert not LoadStatus().observe(Event("request.finished", AT, {}))
