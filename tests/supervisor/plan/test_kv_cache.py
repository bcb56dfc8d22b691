import pytest
from support.samples import model

from supervisor.plan import kv_cache
from supervisor.plan.kv_cache import Cache


@pytest.mark.parametrize(
    ("type_", "mib"),
    [("f16", 45.0), ("q8_0", 23.90625)],
)
def test_a_cache_is_as_large_as_the_engine_reports(type_: str, mib: float) -> None:
    cache = Cache(2048, type_k=type_, type_v=type_)
    assert kv_cache.cache_bytes(model(), cache) == mib * 1024**2


def test_every_slot_is_rounded_up_on_its_own() -> None:
    assert kv_cache.cache_bytes(model(), Cache(1000, streams=4, slots=4)) == 4 * 1024 * 23040


def test_layers_without_a_cache_take_no_memory() -> None:
    sparse = model(kv_heads=(0, 2, 0))
    assert kv_cache.layer_bytes(sparse, Cache(256)) == (0, 256 * 2 * 128 * 2, 0)
    assert kv_cache.cache_bytes(model(kv_heads=()), Cache(4096)) == 0


def test_heads_of_odd_sizes_cannot_be_quantised() -> None:
    assert kv_cache.can_quantise(model())
    assert not kv_cache.can_quantise(model(key_length=80))
    assert not kv_cache.can_quantise(model(value_length=80))
