"""The content of a frame, and that it fits."""

import re
from dataclasses import replace

import pytest
from rich.cells import cell_len
from support.top_samples import DEVICES, STATUS, instance, model, request

from supervisor.cli.top_view import Sample, View, render_once, screen, with_sample

MODELS = [
    model("chat", instance("chat.0"), instance("chat.1", state="starting", progress=0.43)),
    model("code", instance("code.0", state="failed", error={"message": "no room"})),
]
BUSY = replace(STATUS, models=MODELS)
REQUESTS = [
    request("first", age_s=65.0, tokens_per_second=4.0),
    request("second", age_s=2.0, phase="prefill", prompt_tokens=100, prompt_tokens_done=40),
    request("third", phase="queued", position=2, instance=None, slot=None),
]


def lines(
    sample: Sample, columns: int = 120, rows: int = 24, view: View | None = None
) -> list[str]:
    shown = with_sample(view or View(), sample)
    return screen(shown, sample, (columns, rows), has_colour=False)


def words(text: str) -> list[str]:
    return re.split(r" {2,}", text.strip())


def test_a_frame_has_instances_queues_and_requests() -> None:
    text = render_once(Sample(BUSY, REQUESTS), None, has_colour=False).splitlines()

    assert (
        "1 of 3 instances ready · 3 of 12 slots busy · 3 requests, 1 queued · 4.0 tokens" in text[1]
    )
    assert words(text[4])[:6] == ["chat", "1", "chat.0", "ready", "1/4", "█░░░"]
    assert words(text[5])[:2] == ["chat.1", "starting 43%"]
    assert text[7] == "code.0: no room"
    assert words(text[10])[:2] == ["first", "1m 05s"]
    assert "prefill 40 of 100" in text[11]
    assert "queued, place 2" in text[12]


def test_a_long_problem_has_several_lines() -> None:
    text = "the model file is damaged; " * 20
    failed = model("code", instance("code.0", state="failed", error={"message": text}))
    shown = [
        line for line in lines(Sample(replace(STATUS, models=[failed])), 60) if text[:4] in line
    ]
    assert len(shown) == 4
    assert shown[0].startswith("code.0: the model")
    assert shown[-1].endswith("…")


@pytest.mark.parametrize("columns", [1, 10, 20, 40, 60, 80, 100, 200])
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 10, 24, 60])
def test_a_frame_fits_the_terminal(columns: int, rows: int) -> None:
    many = [request(f"request-{number:03}-宽" * 3) for number in range(200)]
    shown = lines(
        Sample(BUSY, many), columns, rows, View(selected=many[150].id, ids=[many[150].id])
    )
    assert len(shown) == rows
    assert max(map(cell_len, shown)) <= columns


def test_the_selected_request_is_marked_and_listed() -> None:
    many = [request(f"r{number:03}", age_s=-float(number)) for number in range(100)]
    ids = [entry.id for entry in many]
    shown = lines(Sample(BUSY, many), view=View(selected="r080", ids=ids))
    assert [line.split()[:2] for line in shown if line.startswith(">")] == [[">", "r080"]]


@pytest.mark.parametrize("has_colour", [False, True])
def test_names_from_outside_have_no_control_characters(*, has_colour: bool) -> None:
    evil = "\x1b]0;owned\x07\x9b31m\r\n[red]\u202e"
    sample = Sample(
        replace(
            BUSY, models=[model(evil, instance(evil, state="failed", error={"message": evil}))]
        ),
        [request(evil, client=evil, model=evil)],
        note=evil,
    )
    for text in (
        render_once(sample, None, has_colour=has_colour),
        "\n".join(screen(with_sample(View(), sample), sample, (300, 30), has_colour=has_colour)),
    ):
        plain = re.sub(r"\x1b\[[0-9;]*m", "", text) if has_colour else text
        assert all(char == "\n" or char.isprintable() for char in plain)
        assert r"\x1b]0;owned" in plain
        assert "[red]" in plain


def test_the_order_is_told_in_a_narrow_terminal() -> None:
    view = View(order="tokens/s", is_reversed=True)
    assert "by tokens/s, reversed" in lines(Sample(BUSY, REQUESTS), 60, view=view)[-1]


def test_a_daemon_that_is_gone_is_told() -> None:
    shown = lines(Sample(problem="the daemon is not running"))
    assert shown[0] == "the daemon is not running; retrying"
    assert "INSTANCE" not in "".join(shown)


def test_devices_stand_between_instances_and_requests() -> None:
    sample = Sample(replace(BUSY, devices=DEVICES), REQUESTS)
    shown = [words(line)[0] for line in lines(sample) if line]
    place = shown.index("DEVICE")
    assert shown[place + 1 : place + 4] == ["NVIDIA H100", "AMD 73FF", "ID"]
    assert len(lines(sample, rows=12)) == 12
