"""How an answer looks on a terminal."""

import io

import pytest

from supervisor.cli.answer_view import AnswerView, plain, split_blocks
from supervisor.cli.chat import Piece


@pytest.mark.parametrize(
    "blocks",
    [
        ["one"],
        ["one\n", "two"],
        ["# one", "two"],
        ["- a\n- b\n\n- c"],
        ["- a\n\n  more of it\n", "end"],
        ["one\n", "```python\na = 1\n\nb = 2"],
        ["```\na\n\nb\n```", "end"],
        ["<div>\nhello\n</div>\n", "end"],
        [""],
    ],
)
def test_a_text_is_split_into_blocks(blocks: list[str]) -> None:
    assert split_blocks("\n".join(blocks)) == blocks


def test_control_characters_reach_no_terminal() -> None:
    assert plain("a\x1b[31mb\r\u202e\u00a0c\u200dd") == r"a\x1b[31mb \u202e c" "\u200dd"


def printed(monkeypatch: pytest.MonkeyPatch, *pieces: Piece) -> str:
    """Text that is printed to stay; a file gets no text that is drawn again."""
    file = io.StringIO()
    monkeypatch.setattr("sys.stdout", file)
    monkeypatch.setenv("COLUMNS", "40")
    with AnswerView() as view:
        for piece in pieces:
            view.add(piece)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines())


def test_blocks_are_printed_once_however_they_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "A list:\n\n1. **one**\n2. two\n\n```sh\nls\n\npwd\n```\n\nand <b>text</b>"
    letters = [Piece("text", letter) for letter in text]
    thought, progress = Piece("thought", "let me\n\nsee"), Piece("progress", "reading")
    found = printed(monkeypatch, progress, thought, *letters)
    assert found == printed(monkeypatch, thought, Piece("text", text))
    assert found == ("let me\n\nsee\n\nA list:\n\n 1 one\n 2 two\n\n ls\n\n pwd\n\nand <b>text</b>")
