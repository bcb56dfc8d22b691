"""A daemon's metrics of slots, host caches and slot files."""

from __future__ import annotations

import re
import urllib.request
from collections import Counter
from typing import Final

TIERS: Final = ("slot", "host_cache", "disk", "none")
_LINE: Final = r'^corral_{name}_total\{{[^}}]*\b{label}="([^"]+)"[^}}]*\}} (\S+)$'


def found_tokens(url: str) -> Counter[str]:
    """Return the prompt tokens of all models by the tier in which they were found."""
    return _sums(url, "prompt_tokens_by_tier", "tier")


def slot_file_operations(url: str) -> Counter[str]:
    """Return how many slots were saved and restored, while their models served."""
    return _sums(url, "slot_file_operations", "operation")


def _sums(url: str, name: str, label: str) -> Counter[str]:
    with urllib.request.urlopen(f"{url}/metrics") as response:  # noqa: S310 (loopback)
        text = response.read().decode()
    sums: Counter[str] = Counter()
    for value, count in re.findall(_LINE.format(name=name, label=label), text, re.MULTILINE):
        sums[value] += int(float(count))
    return sums
