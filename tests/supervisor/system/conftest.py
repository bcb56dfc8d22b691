from pathlib import Path

import pytest
from support.host_files import HostFiles


@pytest.fixture
def host(tmp_path: Path) -> HostFiles:
    (tmp_path / "sys").mkdir()
    return HostFiles(tmp_path)
