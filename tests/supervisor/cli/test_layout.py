"""Which rows fit."""

import pytest

from supervisor.cli.top_view import first_row, share_rows


@pytest.mark.parametrize(
    ("rows", "instances", "requests", "expected"),
    [
        (20, 2, 5, (2, 5)),
        (20, 2, 50, (2, 18)),
        (20, 50, 5, (15, 5)),
        (20, 50, 50, (10, 10)),
        (2, 50, 50, (2, 0)),
        (-5, 2, 2, (0, 0)),
    ],
)
def test_rows_are_shared(
    rows: int, instances: int, requests: int, expected: tuple[int, int]
) -> None:
    assert share_rows(rows, instances, requests) == expected


@pytest.mark.parametrize(
    ("selected", "first"), [(None, 0), (0, 0), (4, 0), (50, 45), (95, 90), (99, 90)]
)
def test_the_selected_row_is_listed(selected: int | None, first: int) -> None:
    assert first_row(selected, 100, 10) == first
