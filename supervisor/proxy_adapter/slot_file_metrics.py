"""Metrics of slot files on disk, for Prometheus."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from prometheus_client import Metric
from prometheus_client.core import GaugeMetricFamily

from supervisor.slot_store.catalogue import CataloguedFile


def slot_file_metrics(files: Iterable[CataloguedFile]) -> Iterator[Metric]:
    """Yield how many there are of each model, and their size."""
    counts, sizes_bytes = Counter[str](), Counter[str]()
    for one in files:
        counts[one.manifest.model] += 1
        sizes_bytes[one.manifest.model] += one.manifest.size_bytes
    text = "Saved conversations and shared prefixes on disk."
    yield _by_model("corral_slot_files", text, counts)
    yield _by_model("corral_slot_file_disk_bytes", "Their size.", sizes_bytes)


def _by_model(name: str, text: str, values: Counter[str]) -> Metric:
    family = GaugeMetricFamily(name, text, labels=("model",))
    for model, value in values.items():
        family.add_metric((model,), value)
    return family
