"""Options, images and events of a chat."""

from pathlib import Path

import httpx
import pytest

from supervisor.cli.chat import Answer, Chat, Piece, read_option, take_images
from supervisor.errors import CorralError, SettingsInvalid


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("system", "Be brief.", "Be brief."),
        ("think", "off", False),
        ("temperature", "0", 0.0),
        ("max_tokens", "12", 12),
    ],
)
def test_an_option_has_the_type_of_its_member(name: str, text: str, value: object) -> None:
    found = read_option(name, text)
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("temprature", "1", "did you mean temperature?"),
        ("think", "perhaps", "think is on or off, not 'perhaps'"),
        ("seed", "1.5", "seed is an integer, not '1.5'"),
        ("top_p", "", "top_p is a number, not ''"),
    ],
)
def test_a_wrong_option_is_refused(name: str, text: str, said: str) -> None:
    with pytest.raises(SettingsInvalid, match=said.replace("?", r"\?")):
        read_option(name, text)


@pytest.mark.parametrize(
    ("text", "rest", "count"),
    [
        ("{plain}", "", 1),
        ("compare {plain} and '{spaced}'.", "compare  and .", 2),
        ('"{spaced}" in a word?', "in a word?", 1),
        (r"{escaped} it's what?", "it's what?", 1),
        ("no/such.png is text, don't you think", "no/such.png is text, don't you think", 0),
        ("{other} too", "{other} too", 0),
    ],
)
def test_paths_of_images_are_taken_out(tmp_path: Path, text: str, rest: str, count: int) -> None:
    plain, spaced, other = (tmp_path / name for name in ("a.png", "b c.JPG", "d.txt"))
    for path in (plain, spaced, other):
        path.write_bytes(b"")
    escaped = str(spaced).replace(" ", r"\ ")
    names = {"plain": plain, "spaced": spaced, "escaped": escaped, "other": other}
    found, images = take_images(text.format(**names))
    assert (found, len(images)) == (rest.format(**names), count)


def test_events_become_pieces() -> None:
    answer = Answer()
    early, late = (
        {"prompt_progress": {"total": 200, "processed": 50, "time_ms": time_ms}}
        for time_ms in (10, 900)
    )
    thought = {"choices": [{"delta": {"reasoning_content": "hm"}, "finish_reason": None}]}
    text = {"choices": [{"delta": {"content": "yes"}, "finish_reason": None}]}
    end = {"choices": [{"delta": {}, "finish_reason": "stop"}], "timings": {"predicted_n": 2}}
    pieces = [piece for event in (early, late, thought, text, end) for piece in answer.add(event)]
    assert pieces == [
        Piece("progress", "reading the prompt, 25%"),
        Piece("thought", "hm"),
        Piece("text", "yes"),
    ]
    assert (answer.text, answer.thoughts, answer.finish_reason) == ("yes", "hm", "stop")
    assert answer.timings == {"predicted_n": 2}
    with pytest.raises(CorralError, match="the answer broke off: no memory"):
        list(answer.add({"error": {"message": "no memory"}}))


def test_a_conversation_continues_from_the_text_that_has_arrived() -> None:
    sent: list[httpx.Request] = []

    def respond(request: httpx.Request) -> httpx.Response:
        sent.append(request)
        lines = (f'data: {{"choices":[{{"delta":{{"content":"{word}"}}}}]}}\n\n' for word in "ab")
        return httpx.Response(200, text="".join(lines))

    http = httpx.Client(transport=httpx.MockTransport(respond), base_url="http://corral")
    chat = Chat(http, "m", {"system": "short", "think": False})
    stopped = chat.ask("one", [])
    assert next(stopped) == Piece("text", "a")
    stopped.close()
    list(chat.ask("two", []))
    body = httpx.Response(200, content=sent[-1].content).json()
    assert [message["content"] for message in body["messages"]] == ["short", "one", "a", "two"]
    assert body["chat_template_kwargs"] == {"enable_thinking": False}
    assert "system" not in body
    chat.clear()
    list(chat.ask("three", []))
    messages = httpx.Response(200, content=sent[-1].content).json()["messages"]
    assert [message["content"] for message in messages] == ["short", "three"]
