import io
import json

import pytest

from supervisor.errors import CorralError, ModelInvalid, from_json
from supervisor.output import (
    CommandResult,
    ProgressMeter,
    colored,
    duration,
    run_command,
    size,
    table,
    write,
)

KEYS = {"schema", "command", "status", "exit_code", "data", "notes", "error"}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def fail() -> CommandResult:
    raise ModelInvalid("x.gguf is cut short", hint="fetch it again", log="x.log")


def test_a_result_is_text_on_stdout_and_notes_on_stderr(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert (
        run_command("status", lambda: CommandResult({}, "all well", ("but slow",)), as_json=False)
        == 0
    )
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("all well\n", "but slow\n")


def test_an_error_shows_message_hint_and_log(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run_command("start", fail, as_json=False) == 78
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err == "error: x.gguf is cut short\n hint: fetch it again\n  log: x.log\n"


@pytest.mark.parametrize("call", [lambda: CommandResult({"a": 1}), fail])
def test_the_envelope_has_the_same_keys_for_success_and_failure(
    call: object, capsys: pytest.CaptureFixture[str]
) -> None:
    code = run_command("start", call, as_json=True)  # type: ignore[arg-type]  # one of two callables
    envelope = json.loads(capsys.readouterr().out)
    assert set(envelope) == KEYS
    assert envelope["exit_code"] == code
    assert (envelope["status"] == "ok") == (envelope["error"] is None) == (code == 0)


def test_an_interrupt_exits_with_130() -> None:
    def interrupted() -> CommandResult:
        raise KeyboardInterrupt

    assert run_command("logs", interrupted, as_json=False) == 130


def test_an_error_keeps_its_class_through_json() -> None:
    with pytest.raises(ModelInvalid) as caught:
        fail()
    back = from_json(caught.value.as_json())
    assert type(back) is ModelInvalid
    assert back.as_json() == caught.value.as_json()
    assert type(from_json({"code": "from_the_future", "message": "?"})) is CorralError


def painted(text: str, stream: io.StringIO) -> str:
    write(colored(text, "red", stream), stream, end="")
    return stream.getvalue()


def test_colour_is_used_on_terminals_that_want_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert painted("x", Terminal()) == "\x1b[31mx\x1b[0m"
    assert painted("x", io.StringIO()) == "x"
    monkeypatch.setenv("TERM", "dumb")
    assert painted("x", Terminal()) == "x"
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert painted("x", io.StringIO()) == "\x1b[31mx\x1b[0m"
    monkeypatch.setenv("NO_COLOR", "1")
    assert painted("x", Terminal()) == "x"


HOSTILE = (
    "\x1b[2J\x1b]0;t\x07 \r \x7f \x9b31m \u202etxt \u2066 \udcff \u2028 "
    "\ufeff \U000e0001 \x1b[31mred"
)


def test_control_characters_are_made_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert painted(HOSTILE, Terminal()) == (
        "\x1b[31m"
        r"\x1b[2J\x1b]0;t\x07 \x0d \x7f \x9b31m \u202etxt \u2066 \udcff \u2028 "
        r"\ufeff \U000e0001 \x1b[31mred"
        "\x1b[0m"
    )


def test_raw_text_is_written_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        run_command("logs", lambda: CommandResult({}, "\x1b[1ma", is_raw=True), as_json=False) == 0
    )
    assert capsys.readouterr().out == "\x1b[1ma\n"


@pytest.mark.parametrize("as_json", [False, True])
def test_no_output_of_a_command_passes_an_escape(
    capsys: pytest.CaptureFixture[str], *, as_json: bool
) -> None:
    def failing() -> CommandResult:
        raise ModelInvalid(HOSTILE, hint=HOSTILE, log=HOSTILE)

    run_command(
        "model show", lambda: CommandResult({"name": HOSTILE}, HOSTILE, (HOSTILE,)), as_json=as_json
    )
    run_command("model show", failing, as_json=as_json)
    shown = capsys.readouterr()
    for text in (shown.out, shown.err):
        assert text.replace("\n", "").isprintable()
    if as_json:
        first, _ = json.JSONDecoder().raw_decode(shown.out)
        assert first["data"]["name"] == HOSTILE


def test_a_table_keeps_each_row_on_one_line() -> None:
    assert len(table(("NAME",), [("a\nb\t",)]).splitlines()) == len(("NAME", "row"))


def test_a_number_of_more_than_64_bits_is_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command("plan", lambda: CommandResult({"bytes": 2**80}), as_json=True) == 0
    assert json.loads(capsys.readouterr().out)["data"]["bytes"] == 2**80


def test_a_table_aligns_names_left_and_numbers_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    assert (
        table(("NAME", "N"), [("a", "1"), ("bcd ef", "10")]) == "NAME     N\na        1\nbcd ef  10"
    )


@pytest.mark.parametrize(
    ("count", "said"),
    [(None, "-"), (5, "5 B"), (2048, "2.0 KiB"), (98_362_432, "93.8 MiB"), (3 << 30, "3.0 GiB")],
)
def test_sizes(count: int | None, said: str) -> None:
    assert size(count) == said


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(None, "-"), (7.9, "7s"), (245, "4m 05s"), (3_720, "1h 02m"), (183_600, "2d 3h")],
)
def test_durations(seconds: float | None, said: str) -> None:
    assert duration(seconds) == said


def test_a_meter_redraws_one_line_on_a_terminal_and_clears_it() -> None:
    stream = Terminal()
    meter = ProgressMeter(stream)
    meter.show("loading chat", 0.1)
    meter.show("loading chat", 0.101)
    meter.show("loading chat", 0.2)
    meter.clear()
    assert stream.getvalue() == (
        "\r\x1b[2Kloading chat [#-----------] 10 %"
        "\r\x1b[2Kloading chat [##----------] 20 %\r\x1b[2K"
    )


def test_a_meter_redraws_a_new_detail_and_never_wraps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    stream = Terminal()
    meter = ProgressMeter(stream)
    meter.show("bench", 1.0, "9s left")
    meter.show("bench", 1.0, "8s left, " + 50 * "x")
    first, second = stream.getvalue().split("\r\x1b[2K")[1:]
    assert first == "bench [############] 100 % · 9s left"
    assert "8s left" in second
    assert len(second) == 39


def test_a_meter_writes_a_line_each_quarter_elsewhere() -> None:
    stream = io.StringIO()
    meter = ProgressMeter(stream)
    for percent in range(101):
        meter.show("fetching", percent / 100)
    assert stream.getvalue().splitlines() == [
        f"fetching · {percent} %" for percent in (0, 25, 50, 75, 100)
    ]
