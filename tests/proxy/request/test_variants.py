"""The request that a variant makes of a client's."""

from typing import Any

import pytest

from proxy.request.variants import Variant

HIGH = Variant(
    temperature=0.9,
    chat_template_kwargs={"thinking": True, "depth": 3},
    set={"top_k": 20},
    strip=("seed",),
)


@pytest.mark.parametrize(
    ("given", "becomes"),
    [
        pytest.param({}, {"temperature": 0.9, "top_k": 20}, id="nothing given"),
        pytest.param({"temperature": 0}, {"temperature": 0, "top_k": 20}, id="the client's counts"),
        pytest.param({"temperature": None}, {"temperature": 0.9, "top_k": 20}, id="null is none"),
        pytest.param({"top_k": 1}, {"temperature": 0.9, "top_k": 20}, id="forced"),
        pytest.param({"seed": 7}, {"temperature": 0.9, "top_k": 20}, id="stripped"),
        pytest.param({"a": 1}, {"a": 1, "temperature": 0.9, "top_k": 20}, id="others pass"),
    ],
)
def test_members_get_the_values_of_the_variant(
    given: dict[str, Any], becomes: dict[str, Any]
) -> None:
    applied = HIGH.apply_to(given)
    assert applied.pop("chat_template_kwargs") == {"thinking": True, "depth": 3}
    assert applied == becomes


def test_an_object_is_filled_up_member_by_member() -> None:
    applied = HIGH.apply_to({"chat_template_kwargs": {"thinking": False}})
    assert applied["chat_template_kwargs"] == {"thinking": False, "depth": 3}
