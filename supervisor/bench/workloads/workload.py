"""What a workload is, and what it gets."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from random import Random

from supervisor.bench.figures import Figure
from supervisor.bench.sizes import Sizes
from supervisor.engine_client.client import EngineClient
from supervisor.host.paths import Directories


class WorkloadFailed(Exception):
    """The engine rejected a request, or did not finish it in time; the text says which."""


@dataclass(frozen=True, slots=True)
class MeasuredEngine:
    """A ready engine that nothing else uses.

    Attributes:
        client: Opens a client with connections of its own, one for each simulated client.
        sizes: Of the requests; the same for all variants.
        model: Its name in the settings.
        names_slots: Whether a turn is to name the slot of the turn before, as the proxy does for
            an engine that does not look for it.
    """

    client: Callable[[], EngineClient]
    sizes: Sizes
    model: str
    directories: Directories
    names_slots: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one run of a workload found.

    Attributes:
        values: By figure name. One that could not be read is absent.
        tokens: Computed in all, of prompts and answers.
    """

    values: Mapping[str, float]
    tokens: int


@dataclass(frozen=True, slots=True)
class Workload:
    """One workload.

    Attributes:
        name: Of lower-case letters and hyphens.
        description: One line for people.
        figures: All that it may return.
        run: Sends the requests. Equal generators make equal requests.
        for_embedding: Whether it needs a model that makes embeddings, or one that generates.
        unavailable: Why it cannot run for a model, as a clause; None if it can.
    """

    name: str
    description: str
    figures: tuple[Figure, ...]
    run: Callable[[MeasuredEngine, Random], Awaitable[Outcome]]
    for_embedding: bool = False
    unavailable: Callable[[str, Directories], str | None] = lambda _model, _directories: None
