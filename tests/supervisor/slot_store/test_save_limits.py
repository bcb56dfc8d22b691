from supervisor.slot_store.save_limits import SaveLimits

HOUR = 1000 * 1024**2
FILE = 8 * 1024**2


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_the_bytes_of_an_hour_come_back_within_an_hour() -> None:
    limits = SaveLimits(clock := Clock())
    assert limits.may_write(HOUR, HOUR)
    limits.note_written(HOUR, HOUR)
    assert not limits.may_write(1, HOUR)
    clock.now_s = 1800
    assert limits.may_write(HOUR / 2, HOUR)
    assert not limits.may_write(HOUR / 2 + 1, HOUR)


def test_what_was_saved_at_a_stop_counts_but_not_for_hours() -> None:
    limits = SaveLimits(clock := Clock())
    for _ in range(9):
        limits.note_written(HOUR, HOUR)
    clock.now_s = 3600
    assert not limits.may_write(1, HOUR)
    clock.now_s = 3700
    assert limits.may_write(1, HOUR)


def test_a_budget_of_nothing_saves_nothing() -> None:
    assert not SaveLimits().may_write(1, 0)


def test_pauses_become_longer_until_a_file_is_stored() -> None:
    limits = SaveLimits(clock := Clock())
    assert limits.pause.begin() == 60
    assert limits.pause.begin() is None
    assert not limits.may_write(1, HOUR)
    clock.now_s = 60
    assert limits.may_write(1, HOUR)
    assert limits.pause.begin() == 120
    clock.now_s = 180
    assert not limits.note_stored(FILE, 0.1)
    assert limits.pause.begin() == 60


def test_a_disk_is_slow_by_its_average() -> None:
    limits = SaveLimits()
    assert not limits.note_stored(FILE, 0.1)
    assert not limits.note_stored(FILE, 2)
    assert not limits.note_stored(1, 60)  # too small to tell
    slow = [limits.note_stored(FILE, 2) for _ in range(9)]
    assert slow[-1] == "" or "MiB a second" in slow[-1]
    assert any("the disk stores" in entry for entry in slow)


def test_restores_do_not_lower_the_bytes_written_in_the_last_hour() -> None:
    limits = SaveLimits(clock := Clock())
    for clock.now_s in (0, 10, 1800):
        limits.note_written(FILE, HOUR)
    assert limits.written_bytes == 3 * FILE
    clock.now_s = 3660
    assert limits.written_bytes == FILE
