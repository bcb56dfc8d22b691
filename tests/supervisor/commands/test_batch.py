"""`corral batch run`: its progress, and Ctrl-C before the daemon has accepted the batch."""

from pathlib import Path
from typing import Self

import pytest

from supervisor.commands import batch
from supervisor.commands.batch_progress import Pace
from supervisor.errors import Interrupted


def test_the_rest_takes_as_long_as_what_was_done_since_the_first_look() -> None:
    pace = Pace(10, 100.0)
    assert pace.left_s(10, 50, 110.0) is None
    assert pace.left_s(30, 50, 110.0) == 10.0
    assert pace.left_s(50, 50, 120.0) == 0.0


class InterruptedClient:
    """Ctrl-C comes while the file is sent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def upload(self, _path: Path) -> None:
        raise KeyboardInterrupt


def test_ctrl_c_while_the_file_is_sent_says_where_to_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch, "BatchClient", InterruptedClient)
    (tmp_path / "some.jsonl").write_text('{"url": "/v1/completions"}\n')
    with pytest.raises(Interrupted, match="was sent") as caught:
        batch.run(tmp_path / "some.jsonl", None)
    assert "corral batch list" in (caught.value.hint or "")
