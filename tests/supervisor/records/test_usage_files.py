"""A journal is counted once, whatever happens while it is folded."""

from __future__ import annotations

import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest

from supervisor.records import usage_files
from supervisor.records.usage import Account, Usage
from supervisor.records.usage_files import Journal, fold, next_journal, read_all
from supervisor.system.files import write_atomic

OCTOBER = Account("2026-10-31", "anna", "chat")
NOVEMBER = Account("2026-11-01", "anna", "chat")
ONE = Usage(1, 10, 5, 3, 1.5, 0.25)


def opened(root: Path) -> Journal:
    journal = Journal(root)
    journal.begin(*journal.open_next())
    return journal


def written(root: Path, *accounts: Account) -> Journal:
    journal = opened(root)
    assert [journal.write(account, ONE) for account in accounts] == [None] * len(accounts)
    return journal


def test_the_sums_are_the_same_before_and_after_they_are_folded(tmp_path: Path) -> None:
    journal = written(tmp_path / "usage", OCTOBER, NOVEMBER, NOVEMBER)
    expected = {OCTOBER: ONE, NOVEMBER: ONE + ONE}
    assert read_all(tmp_path / "usage") == expected
    journal.begin(*journal.open_next())
    assert journal.fold() == []
    assert read_all(tmp_path / "usage") == expected
    journal.close()
    assert sorted(path.name for path in (tmp_path / "usage").glob("*.json*")) == [
        "2026-10.json",
        "2026-11.json",
    ]
    assert read_all(tmp_path / "usage") == expected


@pytest.mark.parametrize("step", range(4))
def test_a_crash_at_any_step_counts_nothing_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    root = tmp_path / "usage"
    written(root, OCTOBER, NOVEMBER).close()
    written(root, OCTOBER, NOVEMBER)
    steps = 0

    def crash_at(real: object) -> object:
        def call(*words: object, **options: object) -> object:
            nonlocal steps
            steps += 1
            if steps > step:
                raise OSError("killed")
            return real(*words, **options)  # type: ignore[operator]

        return call

    with monkeypatch.context() as crashing:
        crashing.setattr(usage_files, "write_atomic", crash_at(write_atomic))
        crashing.setattr(Path, "unlink", crash_at(Path.unlink))
        with pytest.raises(OSError, match="killed") if step < 3 else pytest.MonkeyPatch.context():
            fold(root, next_journal(root))
    expected = {OCTOBER: ONE + ONE, NOVEMBER: ONE + ONE}
    assert read_all(root) == expected
    fold(root, next_journal(root))
    assert read_all(root) == expected


def test_a_line_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    journal = written(tmp_path, NOVEMBER)
    with (tmp_path / "journal.1.jsonl").open("ab") as file:
        file.write(b'["2026-11-01","anna","ch')
    assert read_all(tmp_path) == {NOVEMBER: ONE}
    journal.close()


def test_folding_a_journal_takes_memory_for_its_accounts_not_for_its_lines(tmp_path: Path) -> None:
    journal = written(tmp_path, *[NOVEMBER] * 4000)
    journal.begin(*journal.open_next())
    tracemalloc.start()
    journal.fold()
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 100 * 1024
    assert read_all(tmp_path)[NOVEMBER].requests == 4000
    journal.close()


def test_a_damaged_month_is_set_aside(tmp_path: Path) -> None:
    journal = written(tmp_path, NOVEMBER)
    (tmp_path / "2026-11.json").write_bytes(b'{"folded": 0, "ro')
    assert read_all(tmp_path) == {NOVEMBER: ONE}
    journal.begin(*journal.open_next())
    assert journal.fold() == ["2026-11.json"]
    assert (tmp_path / "2026-11.json.damaged").exists()
    assert read_all(tmp_path) == {NOVEMBER: ONE}
    journal.close()


def test_what_does_not_fit_on_the_disk_is_written_later(tmp_path: Path) -> None:
    script = """
import resource, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from supervisor.records.usage_files import Journal
from supervisor.records.usage import Account, Usage
import signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
journal = Journal(Path(sys.argv[1]))
journal.begin(*journal.open_next())
one = Account("2026-11-01", "anna", "chat")
resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
failures = [journal.write(one, Usage(1, 2, 3, 4, 5.5, 6.5)) for _ in range(5)]
assert failures[0] is None and all(failures[3:]), failures
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
assert journal.write(one, Usage(1)) is None
"""
    root = Path(__file__).parents[3]
    subprocess.run([sys.executable, "-c", script, str(tmp_path), str(root)], check=True)
    (found,) = read_all(tmp_path).values()
    assert found == Usage(6, 10, 15, 20, 27.5, 32.5)


def test_the_directory_has_one_writer(tmp_path: Path) -> None:
    journal = opened(tmp_path)
    script = "import sys; sys.path.insert(0, sys.argv[2]); from pathlib import Path\n"
    script += (
        "from supervisor.records.usage_files import Journal; Journal(Path(sys.argv[1])).open_next()"
    )
    words = [sys.executable, "-c", script, str(tmp_path), str(Path(__file__).parents[3])]
    done = subprocess.run(words, check=False, capture_output=True, text=True)
    assert "another daemon records its usage" in done.stderr
    journal.close()
    assert tmp_path.stat().st_mode & 0o777 == 0o700
