from io import BytesIO

import pytest
from support.slot_files import content

from supervisor.slot_store.slot_file import NotASlotFile, SlotFileHeader, read


@pytest.mark.parametrize("record", [True, False])
def test_tokens_are_read_as_builds_write_them(*, record: bool) -> None:
    assert read(BytesIO(content((5, 6, 7), record=record))) == SlotFileHeader(2, (5, 6, 7))


@pytest.mark.parametrize(
    "harmed",
    [
        b"",
        content((5, 6, 7))[:11],
        content((5, 6, 7))[:20],
        b"GGUF" + content((5, 6, 7))[4:],
        content((5, 6, 7))[:8] + b"\xff\xff\xff\x7f",
        content((5, 6, 7), after=(1,)),
        content((5, 6, 7), after=()),
        content((5, 6, 7), after=(0, 0)),
        content((5, -1, 7)),
        content((5, -1, 7), after=(1, 0, 4, 9)),
        content((5, -1, 7), after=(1, 3, 4, 9)),
        content((5, -1, 7), after=(1, 1, 8, 9)),
        content((5, -1, 7), after=(2, 1, 4, 9)),
        content((5, -1, 7), after=(-1, 1, 4, 9)),
        content((-1, 1, -2, 0), record=False),
        content((-1, 1), record=False),
        content((-1, 9, 0, 0), record=False),
    ],
)
def test_what_is_no_slot_file_is_refused(harmed: bytes) -> None:
    with pytest.raises(NotASlotFile):
        read(BytesIO(harmed))


def pictured(picture: int) -> SlotFileHeader:
    """A file of five tokens, two of them a picture."""
    return read(BytesIO(content((5, -1, -1, 6, 7), after=(1, 1, 6, picture, 0))))


def test_pictures_are_told_apart() -> None:
    one, other = (pictured(picture) for picture in (3, 4))
    assert one == pictured(3)
    assert [at for at, _ in one.media] == [1]
    assert one.digest != other.digest
    assert (one.shared_with(other), one.shared_with(one)) == (1, 5)
    assert one.shared_with(SlotFileHeader(2, (5, -1, -1, 6, 7))) == 1


def test_the_digest_is_of_the_tokens_alone() -> None:
    assert SlotFileHeader(2, (5, 6)).digest == SlotFileHeader(4, (5, 6)).digest
    assert SlotFileHeader(2, (5, 6)).digest != SlotFileHeader(2, (6, 5)).digest


@pytest.mark.parametrize(
    ("entry", "other", "shared"),
    [((1, 2, 3), (1, 2, 4), 2), ((1, 2), (1, 2, 3), 2), ((), (1,), 0), ((2,), (1,), 0)],
)
def test_what_two_begin_with_is_counted(
    entry: tuple[int, ...], other: tuple[int, ...], shared: int
) -> None:
    assert SlotFileHeader(2, entry).shared_with(SlotFileHeader(2, other)) == shared
