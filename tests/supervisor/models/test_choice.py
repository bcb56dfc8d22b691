from __future__ import annotations

import pytest

from supervisor.errors import NoSuchModel
from supervisor.models import reference
from supervisor.models import repository as repository_module
from supervisor.models.reference import HubReference
from supervisor.models.repository import RemoteFile, Repository

GIB = 1024**3


def repository(files: dict[str, float]) -> Repository:
    """A repository whose files have these sizes in GiB."""
    found = {path: RemoteFile(path, int(gib * GIB), "0" * 64) for path, gib in files.items()}
    return Repository("org/m", "main", "0" * 40, found)


def order(files: dict[str, float]) -> list[str]:
    return [
        rank_model.first.path for rank_model in repository_module.rank_models(repository(files))
    ]


def named(files: dict[str, float], wanted: str) -> str:
    asked = reference.parse_reference(f"org/m:{wanted}")
    assert isinstance(asked, HubReference)
    return repository_module.choose_named(repository(files), asked).first.path


def test_four_bits_come_first_then_more_then_less() -> None:
    sizes = {"IQ2_XS": 2.2, "Q3_K_M": 3.5, "Q4_K_S": 4.2, "Q4_K_M": 4.5, "Q4_0": 4.2}
    sizes |= {"Q5_K_M": 5.2, "Q8_0": 8, "BF16": 15}
    found = order({f"m-{size}.gguf": gib for size, gib in sizes.items()})
    labels = [path.removeprefix("m-").removesuffix(".gguf") for path in found]
    assert labels == ["Q4_K_M", "Q4_K_S", "Q4_0", "Q5_K_M", "Q8_0", "BF16", "Q3_K_M", "IQ2_XS"]


def test_small_models_get_eight_bits() -> None:
    assert order({"m-Q4_K_M.gguf": 0.4, "m-Q8_0.gguf": 0.7})[0] == "m-Q8_0.gguf"
    assert order({"m-Q4_K_M.gguf": 4.4, "m-Q8_0.gguf": 8.7})[0] == "m-Q4_K_M.gguf"


def test_other_parts_and_incomplete_models_are_no_choice() -> None:
    files = {"mmproj-F16.gguf": 1, "imatrix.gguf": 1, "mtp-m-Q4_K_M.gguf": 1}
    files |= {"m-Q4_K_M-00002-of-00002.gguf": 1, "m-Q4_0_4_8.gguf": 1, "m-Q6_K.gguf": 2}
    assert order({name: float(gib) for name, gib in files.items()}) == ["m-Q6_K.gguf"]


def test_a_repository_of_draft_heads_alone_has_those() -> None:
    assert order({"eagle3-m-Q4_K_M.gguf": 1.0, "imatrix.gguf": 1.0}) == ["eagle3-m-Q4_K_M.gguf"]


def test_a_repository_without_models_says_so() -> None:
    with pytest.raises(NoSuchModel, match="no GGUF model"):
        order({"mmproj-F16.gguf": 1})


def test_several_models_need_a_name() -> None:
    with pytest.raises(NoSuchModel, match="several models") as caught:
        order({"a-Q4_K_M.gguf": 1, "b-Q4_K_M.gguf": 1})
    assert caught.value.hint == "name one file: org/m:a-Q4_K_M.gguf"


def test_a_quantisation_is_named_in_any_case() -> None:
    files = {"m-UD-Q4_K_XL.gguf": 4.0, "m-Q8_0.gguf": 8.0, "Q8_0/m-Q8_0-00001-of-00001.gguf": 8.0}
    assert named(files, "q8_0") == "m-Q8_0.gguf"
    assert named(files, "Q4_K_XL") == "m-UD-Q4_K_XL.gguf"
    assert named(files, "Q8_0/m-Q8_0-00001-of-00001.gguf").startswith("Q8_0/")


def test_an_error_for_a_missing_quantisation_lists_the_existing_ones() -> None:
    with pytest.raises(NoSuchModel, match="has no Q5_K_M") as caught:
        named({"m-Q8_0.gguf": 8.0, "mmproj-F16.gguf": 1.0}, "Q5_K_M")
    assert caught.value.hint == "available: Q8_0 (8.0 GiB)"
    with pytest.raises(NoSuchModel, match=r"no file x\.gguf"):
        named({"m-Q8_0.gguf": 8.0}, "x.gguf")
    with pytest.raises(NoSuchModel, match="lacks shards"):
        named({"m-00001-of-00002.gguf": 8.0}, "m-00001-of-00002.gguf")
