"""`[proxy.batch]`, and the interface that its values come from."""

import pytest
from pydantic import ValidationError

from proxy.settings import BatchConfig, BatchSettings

# window_ms, min_batch, optimal_batch, max_batch, queue_size, gpu_threshold
DEFAULT = (50, 4, 32, 64, 1024, 32)
LOW_LATENCY = (5, 2, 8, 16, 512, 32)
HIGH_THROUGHPUT = (100, 8, 32, 128, 2048, 32)


def values(config: BatchConfig) -> tuple[int, ...]:
    return (
        config.window_ms,
        config.min_batch,
        config.optimal_batch,
        config.max_batch,
        config.queue_size,
        config.gpu_threshold,
    )


def test_the_default() -> None:
    """seed 003: BatchConfig::default."""
    assert values(BatchConfig()) == DEFAULT


def test_the_preset_for_low_latency() -> None:
    """seed 003: BatchConfig::low_latency."""
    assert values(BatchConfig.low_latency()) == LOW_LATENCY


def test_the_preset_for_high_throughput() -> None:
    """seed 003: BatchConfig::high_throughput."""
    assert values(BatchConfig.high_throughput()) == HIGH_THROUGHPUT


@pytest.mark.parametrize(("batch_size", "expected"), [(0, False), (31, False), (32, True)])
def test_so_many_wait_for_no_more(batch_size: int, *, expected: bool) -> None:
    """seed 003: BatchConfig::should_process."""
    assert BatchConfig().should_process(batch_size) is expected


@pytest.mark.parametrize(("batch_size", "expected"), [(0, False), (3, False), (4, True)])
def test_so_many_are_a_batch(batch_size: int, *, expected: bool) -> None:
    """seed 003: BatchConfig::meets_minimum."""
    assert BatchConfig().meets_minimum(batch_size) is expected


@pytest.mark.parametrize(
    ("preset", "expected"),
    [("default", DEFAULT), ("low_latency", LOW_LATENCY), ("high_throughput", HIGH_THROUGHPUT)],
)
def test_a_preset_is_set_by_name(preset: str, expected: tuple[int, ...]) -> None:
    assert values(BatchSettings.model_validate({"preset": preset}).config) == expected


def test_single_values_win_over_the_preset() -> None:
    settings = BatchSettings(preset="low_latency", window_ms=0, queue_size=9)
    assert values(settings.config) == (0, 2, 8, 16, 9, 32)


def test_a_minimum_above_the_maximum_is_refused() -> None:
    with pytest.raises(ValidationError, match=r"min_batch \(17\) is more than max_batch \(16\)"):
        BatchSettings(preset="low_latency", min_batch=17)
