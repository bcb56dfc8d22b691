"""Whether work grows with the size of its input: told by two sizes, not by seconds."""

import gc
import time
from collections.abc import Callable
from typing import Final

FACTOR: Final = 8
# Linear work takes 8 times as long for the larger input, quadratic work 64 times.
_LIMIT: Final = 24
_TRIES: Final = 7
_FLOOR_S: Final = 1e-4  # below that, constant work counts most


def is_linear(work: Callable[[int], object], size: int) -> bool:
    """Return whether work for `FACTOR` times a size takes about as many times as long.

    The processor time of this thread counts, and the least of some tries: others may slow it.
    """
    small_s = large_s = float("inf")
    for _ in range(_TRIES):
        small_s = min(small_s, _took_s(work, size))
        large_s = min(large_s, _took_s(work, FACTOR * size))
        if large_s < _LIMIT * max(small_s, _FLOOR_S):
            return True
    return False


def _took_s(work: Callable[[int], object], size: int) -> float:
    gc.disable()  # a collection takes as long as all objects of the test run are many
    try:
        began_s = time.thread_time()
        work(size)
        return time.thread_time() - began_s
    finally:
        gc.enable()
