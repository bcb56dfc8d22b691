"""The memory of cards that programs hold, by their open descriptors."""

import tomllib
from collections.abc import Mapping
from pathlib import Path

from supervisor.system.drm_clients import memory_by_card

TEXTS: Mapping[str, str] = tomllib.loads(
    Path(__file__).with_name("drm_clients.toml").read_text("utf-8")
)
KIB = 1024


def open_card(root: Path, pid: int, descriptor: int, text: str, card: str = "dri/card0") -> None:
    process = root / f"proc/{pid}"
    for name in ("fd", "fdinfo"):
        (process / name).mkdir(parents=True, exist_ok=True)
    (process / f"fd/{descriptor}").symlink_to(f"/dev/{card}")
    (process / f"fdinfo/{descriptor}").write_text(text, "utf-8")


def test_the_memory_of_a_card_that_all_its_clients_hold(tmp_path: Path) -> None:
    open_card(tmp_path, 10, 5, TEXTS["xe"])
    open_card(tmp_path, 10, 6, TEXTS["xe"])  # a copy of the descriptor: the same client
    open_card(tmp_path, 11, 5, TEXTS["xe"].replace("client-id:\t3", "client-id:\t4"))
    open_card(tmp_path, 12, 3, TEXTS["i915"])
    open_card(tmp_path, 12, 4, TEXTS["amdgpu"], card="dri/renderD128")
    assert memory_by_card(tmp_path) == {
        "0000:04:00.0": 2 * 20_000 * KIB,
        "0000:0a:00.0": 2 * KIB * KIB + KIB,
        "0000:03:00.0": 48_596 * KIB,
    }


def test_main_memory_and_other_files_do_not_count(tmp_path: Path) -> None:
    open_card(tmp_path, 10, 5, TEXTS["integrated"])
    open_card(tmp_path, 10, 6, TEXTS["xe"], card="null")
    open_card(tmp_path, 10, 7, TEXTS["xe"].replace("KiB", "GB").replace("MiB", "GB"))
    open_card(tmp_path, 10, 8, "")
    (tmp_path / "proc/11").mkdir()  # a process that has ended
    (tmp_path / "proc/uptime").touch()
    assert memory_by_card(tmp_path) == {}


def test_a_machine_without_processes_to_read(tmp_path: Path) -> None:
    assert memory_by_card(tmp_path) == {}
