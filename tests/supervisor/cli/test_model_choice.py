from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest
from support import tiny_gguf
from support.hub import FakeHub

from supervisor.cli import hub_model
from supervisor.cli.hub_model import Fit, ModelChoice
from supervisor.errors import NoSuchModel, OutOfMemory
from supervisor.models import reference
from supervisor.models.file_names import FileKind
from supervisor.models.hub import HubClient
from supervisor.models.metadata import Gguf
from supervisor.models.reference import HubReference
from supervisor.plan.fit import MemoryCapacity

REPO = "org/m-GGUF"


@dataclass
class Machine:
    """A machine that takes models up to a size."""

    most_bytes: int
    asked: list[tuple[str, int]] = field(default_factory=list)

    @property
    def room(self) -> MemoryCapacity:
        return MemoryCapacity(self.most_bytes, {})

    def fit_of(self, model: Gguf, projector_bytes: int) -> Fit:
        self.asked.append((model.path.name, projector_bytes))
        needs = model.size_bytes + 100_000
        return f"needs {needs}", "too large" if needs > self.most_bytes else None


def content(tmp_path: Path, layers: int) -> bytes:
    return tiny_gguf.make(tmp_path / "m.gguf", layers=layers).read_bytes()


def chosen(
    files: dict[str, bytes],
    here: Machine,
    wanted: str = "",
    left_out: frozenset[FileKind] = frozenset(),
) -> ModelChoice:
    with FakeHub({REPO: files}).running() as hub:
        client = HubClient(hub.url)
        asked = reference.parse_reference(f"{REPO}:{wanted}" if wanted else REPO)
        assert isinstance(asked, HubReference)
        repository = client.repository(REPO, "main")
        return hub_model.choose(repository, asked, left_out, here, client)  # type: ignore[arg-type] # a stand-in


def test_the_first_that_fits_is_taken_and_larger_ones_are_not_asked_for(tmp_path: Path) -> None:
    four, three, eight = (content(tmp_path, layers) for layers in (4, 2, 9))
    files = {"m-Q4_K_M.gguf": four, "m-Q3_K_M.gguf": three, "m-F16.gguf": eight}
    here = Machine(len(four) + 1)
    found = chosen(files, here)
    assert found.model.first.path == "m-Q3_K_M.gguf"
    assert found.reason.endswith("; Q4_K_M can never fit: too large")
    assert [name for name, _ in here.asked] == ["m-Q4_K_M.gguf", "m-Q3_K_M.gguf"]


def test_nothing_that_fits_is_an_error_with_a_way_on(tmp_path: Path) -> None:
    files = {"m-Q4_K_M.gguf": content(tmp_path, 2)}
    for most_bytes in (1, len(files["m-Q4_K_M.gguf"]) + 1):
        with pytest.raises(OutOfMemory) as caught:
            chosen(files, Machine(most_bytes))
        assert f"{REPO}:Q4_K_M fetches it" in (caught.value.hint or "")


def test_what_is_named_is_taken_with_a_warning(tmp_path: Path) -> None:
    files = {"m-Q4_K_M.gguf": content(tmp_path, 2)}
    found = chosen(files, Machine(1), "q4_k_m")
    assert found.warning == "it will not fit: too large"


def test_projector_and_draft_come_along_unless_left_out(tmp_path: Path) -> None:
    model = content(tmp_path, 4)
    files = {"m-Q8_0.gguf": model, "mmproj-F16.gguf": b"p" * 1000, "mtp-m-Q8_0.gguf": b"d" * 500}
    here = Machine(10**9)
    found = chosen(files, here)
    assert [companion.first.path for companion in found.companions] == [
        "mmproj-F16.gguf",
        "mtp-m-Q8_0.gguf",
    ]
    assert here.asked == [("m-Q8_0.gguf", 1000)]
    both: frozenset[FileKind] = frozenset({"projector", "draft"})
    assert chosen(files, here, left_out=both).companions == ()


def test_a_part_may_be_named_by_its_file(tmp_path: Path) -> None:
    files = {"m-Q8_0.gguf": content(tmp_path, 2), "mmproj-F16.gguf": b"p" * 1000}
    here = Machine(10**9)
    found = chosen(files, here, "mmproj-F16.gguf")
    assert (found.model.first.path, found.companions, here.asked) == ("mmproj-F16.gguf", (), [])
    with pytest.raises(NoSuchModel):
        chosen(files, here, "mmproj-F32.gguf")
