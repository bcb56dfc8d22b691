"""`corral plan`: the exact command of a model, and where each part of it comes from."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from pathlib import Path

from supervisor.commands.choice import choose
from supervisor.fleet.workshop import Workshop
from supervisor.host.paths import directories
from supervisor.profile.plan import Plan
from supervisor.show import Outcome, paint


def plan(word: str, config: Path | None) -> Outcome:
    """Plan a model as a start would, and start nothing.

    Raises:
        CorralError: It could not be started; says why.
    """
    where = directories()
    choice = choose([word], config, where)
    workshop = Workshop(choice.loaded.settings, where)
    (name,) = choice.names
    made = workshop.plan(name)
    return Outcome(_data(made, workshop), _render(made, workshop), made.warnings)


def _argv(made: Plan, workshop: Workshop) -> tuple[str, ...]:
    return workshop.launch_argv(made, f"{made.model}.0")


def _data(made: Plan, workshop: Workshop) -> dict[str, object]:
    return {
        "model": made.model,
        "engine": str(made.engine.path),
        "argv": _argv(made, workshop),
        "slots": made.slots,
        "ctx_size": made.ctx_size,
        "lines": [asdict(line) for line in made.lines],
        "omitted": [asdict(line) for line in made.omitted],
        "warnings": made.warnings,
    }


def _render(made: Plan, workshop: Workshop) -> str:
    words = [" ".join(filter(None, (line.flag, line.value))) for line in made.lines]
    width = max(map(len, words), default=0)
    lines = [
        f"  {word:{width}}  {paint(line.origin, 'dim')}" + (f": {line.why}" if line.why else "")
        for word, line in zip(words, made.lines, strict=True)
    ]
    left_out = [
        f"  {line.flag} {line.value or ''}".rstrip() + f"  {paint(line.origin, 'dim')}: {line.why}"
        for line in made.omitted
    ]
    parts = [
        f"{made.model}: {made.slots} slots, {made.ctx_size} tokens of context in all",
        *lines,
        *(["", "left out:", *left_out] if left_out else []),
        "",
        shlex.join(_argv(made, workshop)),
    ]
    return "\n".join(parts)
