"""What `corral replay` shows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from supervisor.output import CommandResult, one_line, table
from supervisor.replay.capture import Capture
from supervisor.replay.figures import Figures, figures_of, ratio, recorded_figures
from supervisor.replay.played_request import PlayedRequest
from supervisor.replay.run import Play

_SHOWN_MAX: Final = 20
_PIECE_MAX: Final = 40


@dataclass(frozen=True, slots=True)
class Outcome:
    """What was played.

    Attributes:
        name: What it was played with.
        baseline: With the model's present settings, where that was needed.
        recorded: How many captured answers are themselves the baseline.
    """

    name: str
    play: Play
    baseline: Play | None
    recorded: int
    notes: tuple[str, ...] = ()


def replay_result(
    capture: Capture, requests: Sequence[PlayedRequest], outcome: Outcome
) -> CommandResult:
    recorded = recorded_figures(one.captured for one in requests)
    found = figures_of(outcome.play.played)
    base = figures_of(outcome.baseline.played) if outcome.baseline else None
    columns = {"RECORDED": recorded, **({"PRESENT": base} if base else {}), "REPLAY": found}
    text = "\n".join(
        [
            f"{len(requests)} requests of {capture.model}, played with {outcome.name}",
            "",
            _table(columns),
            "",
            *_answers(outcome, len(requests)),
        ]
    )
    data = {
        "model": capture.model,
        "played_with": outcome.name,
        "skipped": dict(capture.skipped),
        "recorded": asdict(recorded),
        "present": asdict(base) if base else None,
        "replay": asdict(found),
        "ratios_to_recorded": _ratios(found, recorded),
        "ratios_to_present": _ratios(found, base) if base else None,
        "requests": _requests(requests, outcome),
    }
    return CommandResult(
        data, text, (*_notes(capture, outcome, requests),), int(bool(found.failed))
    )


def _table(columns: dict[str, Figures]) -> str:
    rows: list[tuple[str, ...]] = []
    for name, label, digits in (
        ("prefill_rate", "prefill, tokens/s", 1),
        ("decode_rate", "decode, tokens/s", 1),
        ("first_token_ms", "first token, median ms", 0),
    ):
        values = [getattr(one, name) for one in columns.values()]
        ratios = [_times(ratio(values[-1], one)) for one in values[:-1]]
        rows.append((label, *(_number(one, digits) for one in values), *ratios))
    blank = [""] * (len(columns) - 1)
    found = [f"{one.cached_tokens} of {one.prompt_tokens}" for one in columns.values()]
    rows.append(("tokens found in the cache", *found, *blank))
    generated = [str(one.generated_tokens) for one in columns.values()]
    rows.append(("tokens generated", *generated, *blank))
    rows.append(("failed requests", *(str(one.failed) for one in columns.values()), *blank))
    heads = [f"TIMES {name}" for name in list(columns)[:-1]]
    return table(("", *columns, *heads), rows)


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _answers(outcome: Outcome, requests: int) -> Iterator[str]:
    compared = outcome.play.comparisons
    if not compared:
        yield "no answer is compared: none was captured greedily (temperature 0)"
        return
    different = [one for one in compared if one.difference]
    of_capture = f"{outcome.recorded} captured ones" if outcome.recorded else ""
    of_present = "those of the present settings" if outcome.baseline else ""
    against = " and ".join(filter(None, [of_capture, of_present]))
    yield f"{len(compared) - len(different)} of {len(compared)} answers equal {against}"
    if len(compared) < requests:
        yield f"{requests - len(compared)} are not compared: sampled, broken off or failed"
    for one in different[:_SHOWN_MAX]:
        if at := one.difference:
            yield (
                f"  request {one.number}: token {at.token} of {at.tokens} differs: "
                f"{_piece(at.found)} instead of {_piece(at.expected)}"
            )
    if len(different) > _SHOWN_MAX:
        yield f"  and {len(different) - _SHOWN_MAX} more (--json has all)"


def _piece(text: str) -> str:
    return f"'{one_line(text)[:_PIECE_MAX]}'"


def _ratios(ours: Figures, theirs: Figures) -> dict[str, float | None]:
    names = ("prefill_rate", "decode_rate", "first_token_ms")
    return {name: ratio(getattr(ours, name), getattr(theirs, name)) for name in names}


def _requests(requests: Sequence[PlayedRequest], outcome: Outcome) -> list[dict[str, Any]]:
    compared = {one.number: one for one in outcome.play.comparisons}
    found = []
    for request, one in zip(requests, outcome.play.played, strict=True):
        number = request.captured.number
        comparison = compared.get(number)
        found.append(
            {
                "n": number,
                "failure": one.failure,
                "first_token_ms": one.first_token_ms,
                "timings": asdict(one.timings) if one.timings else None,
                "compared": comparison is not None,
                "difference": asdict(comparison.difference)
                if comparison and comparison.difference
                else None,
            }
        )
    return found


def _notes(capture: Capture, outcome: Outcome, requests: Sequence[PlayedRequest]) -> Iterator[str]:
    yield from outcome.notes
    for kind, count in capture.skipped.items():
        yield f"not played: {count} of kind {kind}"
    failures = [
        f"request {request.captured.number} failed: {one.failure}"
        for request, one in zip(requests, outcome.play.played, strict=True)
        if one.failure
    ]
    yield from failures[:_SHOWN_MAX]
