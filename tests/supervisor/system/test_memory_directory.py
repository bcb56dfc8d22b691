import sys
from pathlib import Path

import pytest

from supervisor.system import files
from supervisor.system.files import is_in_memory, kind_of_device, memory_directory

MOUNTS = """\
23 27 0:22 / /sys rw,relatime - sysfs sysfs rw
25 24 0:23 / /dev/shm rw,relatime shared:3 master:1 - tmpfs tmpfs rw,size=24684084k
27 1 254:0 / / rw,relatime - ext4 /dev/vda rw,discard
"""
SHARED = Path("/dev/shm")  # noqa: S108 (nothing is written)
linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux lists its mounts there")


def test_the_kind_of_a_device_is_that_of_its_mount() -> None:
    assert kind_of_device(MOUNTS, "0:23") == "tmpfs"
    assert kind_of_device(MOUNTS, "254:0") == "ext4"
    assert kind_of_device(MOUNTS, "8:1") is None


@linux
def test_dev_shm_is_in_memory_and_proc_is_not() -> None:
    assert is_in_memory(SHARED / "none" / "of" / "these")
    assert not is_in_memory(Path("/proc/self"))


def test_the_runtime_directory_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = {Path("/run/corral"), SHARED}
    monkeypatch.setattr(files, "is_in_memory", memory.__contains__)
    assert memory_directory(Path("/run/corral"), "slots") == Path("/run/corral/slots")
    one, two = (memory_directory(Path(word), "slots") for word in ("/home/a", "/home/b"))
    assert one
    assert two
    assert one.parent == SHARED
    assert one != two
    memory.clear()
    assert memory_directory(Path("/run/corral"), "slots") is None
