"""Draw the state diagram of an instance from its tables, as in supervisor/DESIGN.md."""

from __future__ import annotations

from supervisor.instance.states import (
    AFTER_EXIT,
    NOT_FAILURES,
    STATES,
    STOP_REASONS,
    TRANSITIONS,
    Event,
    State,
)


def diagram() -> str:
    rows = [
        _arrow(before, after, str(event) + (" †" if _is_failure(before, event) else ""))
        for before, row in TRANSITIONS.items()
        for event, after in row.items()
    ]
    ends = [_arrow("exited", after, str(ending)) for ending, after in AFTER_EXIT.items()]
    exits = [_arrow(state, "exited", "exited") for state in State if STATES[state].process]
    return "\n".join(["stateDiagram-v2", *rows, *exits, "    state exited <<choice>>", *ends])


def _is_failure(state: State, event: Event) -> bool:
    reason = STOP_REASONS.get((state, event))
    return reason is not None and reason not in NOT_FAILURES


def _arrow(before: str, after: str, label: str) -> str:
    return f"    {before} --> {after}: {label}"


if __name__ == "__main__":
    print(diagram())
