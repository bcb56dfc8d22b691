from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from support.jobs_harness import JobsHarness


@pytest.fixture
async def jobs(tmp_path: Path) -> AsyncIterator[JobsHarness]:
    harness = JobsHarness(tmp_path)
    yield harness
    await harness.close()
