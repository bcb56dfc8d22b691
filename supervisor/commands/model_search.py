"""`corral model search`: repositories of the hub that have GGUF files."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Final

from supervisor.errors import CorralError
from supervisor.hub import choice
from supervisor.hub.repository import FoundRepository
from supervisor.output import CommandResult, size, table

if TYPE_CHECKING:
    from supervisor.hub.client import HubClient

# Sizes take a request for each repository.
_REQUESTS_AT_ONCE: Final = 8


@dataclass(frozen=True, slots=True)
class _Row:
    """A repository, and the bytes of each quantisation; none if they could not be read."""

    found: FoundRepository
    quantisations: Mapping[str, int]


def search(words: str, limit: int) -> CommandResult:
    """Search by words; raises DownloadFailed or HubAccessDenied."""
    from supervisor.hub.client import HubClient

    client = HubClient()
    found = client.search(words, limit)
    with ThreadPoolExecutor(_REQUESTS_AT_ONCE) as pool:
        sizes = pool.map(lambda one: _quantisations(one.repo, client), found)
        rows = [_Row(*pair) for pair in zip(found, sizes, strict=True)]
    notes = () if rows else (f"the hub has no GGUF repository for {words!r}",)
    data = [{**asdict(row.found), "quantisations": row.quantisations} for row in rows]
    return CommandResult(data, _render(rows) if rows else "", notes)


def _quantisations(repo: str, client: HubClient) -> Mapping[str, int]:
    try:
        repository = client.repository(repo, "main")
    except CorralError:  # gated, or gone meanwhile: its row stays
        return {}
    return {
        one.first.quantisation or one.first.path: repository.size_bytes(one)
        for one in choice.models(repository)
    }


def _render(rows: list[_Row]) -> str:
    head = ("REPOSITORY", "PARAMETERS", "SIZES", "DOWNLOADS", "CHANGED")
    return table(head, [_cells(row.found, row.quantisations) for row in rows])


def _cells(found: FoundRepository, quantisations: Mapping[str, int]) -> tuple[str, ...]:
    return (
        found.repo + (" (gated)" if found.is_gated else ""),
        f"{found.parameters / 1e9:.1f} B" if found.parameters else "-",
        _sizes(quantisations),
        str(found.downloads),
        found.date or "-",
    )


def _sizes(quantisations: Mapping[str, int]) -> str:
    """Return the smallest and the largest, such as `Q2_K 1.2 GiB to F16 6.0 GiB`."""
    if not quantisations:
        return "-"
    ordered = sorted(quantisations.items(), key=lambda one: one[1])
    ends = dict([ordered[0], ordered[-1]])
    return " to ".join(f"{name} {size(amount)}" for name, amount in ends.items())
