from supervisor.events import EventStream
from supervisor.instance.events import InstanceEvents
from supervisor.process.load_progress import Progress


def test_each_percent_of_each_run_is_told_once() -> None:
    told: list[tuple[object, object]] = []
    stream = EventStream(lambda event: told.append((event.fields["run"], event.fields["value"])))
    voice = InstanceEvents("chat.0", "chat", stream.emit)
    for run, value in [(1, 0.0), (1, 0.001), (1, 0.011), (1, 0.019), (2, 0.019), (2, 1.0)]:
        voice.progressed(run, Progress("text_model", value))
    assert told == [(1, 0.0), (1, 0.011), (2, 0.019), (2, 1.0)]
