from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest


@pytest.fixture
def runtime() -> Iterator[Path]:
    """Return a directory whose path is short enough for sockets."""
    with TemporaryDirectory(prefix="corral-") as name:
        yield Path(name)
