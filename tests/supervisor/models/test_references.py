"""A model that settings name by its repository is found in the store of any program."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.stores_layout import HuggingFace, Ollama, copied

from supervisor.models import model_lookup
from supervisor.models.local_stores import Root
from supervisor.models.stored_model import StoredModel

Files = dict[str, Path]


def find(reference: str, *places: Root, cache: Path) -> StoredModel | None:
    return model_lookup.find(model_lookup.check(Path(reference)), places, cache)


@pytest.fixture
def places(tmp_path: Path, files: Files) -> tuple[Root, ...]:
    content = files["model"].read_bytes()
    hub = HuggingFace(tmp_path / "hub")
    for quantisation in ("Q4_K_M", "Q8_0", "UD-Q4_K_XL"):
        hub.add("org/Tiny-GGUF", f"tiny-{quantisation}.gguf", content)
    hub.add("org/odd-GGUF", "odd-Q8_0.gguf", content)
    copied(files["model"], tmp_path / "lmstudio" / "org" / "studio-GGUF" / "studio-Q6_K.gguf")
    ollama = Ollama(tmp_path / "ollama")
    ollama.model("hf.co/org/pulled-GGUF/Q5_K_M", model=files["model"])
    ollama.model("registry.ollama.ai/library/llama3.2/latest", model=files["model"])
    ollama.model(
        "registry.ollama.ai/library/eyes/4b", model=files["model"], projector=files["clip"]
    )
    return (
        ("huggingface", hub.root),
        ("lmstudio", tmp_path / "lmstudio"),
        ("ollama", ollama.root),
    )


@pytest.mark.parametrize(
    ("reference", "store", "name"),
    [
        ("hf:org/Tiny-GGUF", "huggingface", "tiny-Q4_K_M.gguf"),
        ("hf:org/Tiny-GGUF:q8_0", "huggingface", "tiny-Q8_0.gguf"),
        ("hf:org/tiny-gguf:Q4_K_XL", "huggingface", "tiny-UD-Q4_K_XL.gguf"),
        ("hf:org/Tiny-GGUF:tiny-Q8_0.gguf", "huggingface", "tiny-Q8_0.gguf"),
        ("hf:org/odd-GGUF", "huggingface", "odd-Q8_0.gguf"),
        ("hf:org/studio-GGUF:Q6_K", "lmstudio", "studio-Q6_K.gguf"),
        ("hf:org/pulled-GGUF:Q5_K_M", "ollama", "sha256-"),
        ("ollama:llama3.2", "ollama", "sha256-"),
        ("ollama:eyes:4b", "ollama", "sha256-"),
    ],
)
def test_it_is_found(
    reference: str, store: str, name: str, places: tuple[Root, ...], tmp_path: Path
) -> None:
    found = find(reference, *places, cache=tmp_path / "cache")
    assert found is not None
    assert (found.store, found.problem) == (store, None)
    assert found.path.name.startswith(name)
    assert ("mmproj" in found.flags) == (reference == "ollama:eyes:4b")


@pytest.mark.parametrize(
    "reference",
    ["hf:org/Tiny-GGUF:Q2_K", "hf:org/Tiny-GGUF:a.gguf", "hf:org/none", "ollama:llama3.2:1b"],
)
def test_what_is_not_stored_names_the_command_that_fetches_it(
    reference: str, places: tuple[Root, ...], tmp_path: Path
) -> None:
    path = Path(reference)
    assert find(reference, *places, cache=tmp_path / "cache") is None
    error = model_lookup.missing_model_error(path, None)
    assert error.message == f"{reference} is not stored on this machine"
    command = "corral model get " if reference.startswith("hf:") else "ollama pull "
    assert error.hint
    assert error.hint.startswith(command + reference.partition(":")[2])


@pytest.mark.parametrize("reference", ["hf:tiny", "hf:a/b/c", "hf:https://x/y.gguf", "ollama:../x"])
def test_what_names_no_model_is_refused(reference: str) -> None:
    with pytest.raises(ValueError, match=r"names no repository|not hf:|not ollama:"):
        model_lookup.check(Path(reference))


def test_a_path_is_no_reference() -> None:
    assert model_lookup.check(Path("hf/a.gguf")) == Path("hf/a.gguf")
    assert not model_lookup.is_reference(Path("/m/hf:a.gguf"))
