"""Implements `corral run`: a chat in the terminal, or one answer.

A running daemon answers, and continues afterwards. Without one, a daemon starts as for a desktop
application: on any free port, with an API key, and it ends with the last `corral run` that uses it,
even if that is killed.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from typer import BadParameter

from supervisor import errors
from supervisor.cli import history, start
from supervisor.cli.batch import ask, connect
from supervisor.cli.chat import OPTIONS, Answer, Chat, read_option, take_images
from supervisor.cli.desktop_host import LISTEN, join
from supervisor.cli.serve import settings_options
from supervisor.daemon.control_client import Client
from supervisor.daemon.model_commands import resolve_running, unknown_words
from supervisor.output import CommandResult, colored, describe, write
from supervisor.system.paths import directories

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession

_INPUT_MAX_BYTES: Final = 64 * 1024**2


def run(
    model: str, words: Sequence[str], options: Sequence[str], config: Path | None, *, as_json: bool
) -> CommandResult:
    """Chat until Ctrl-D, or answer once if there is a prompt; exit code 130 if Ctrl-C stops it."""
    given = dict(_split_option(option) for option in options)
    values = {name: read_option(name, text) for name, text in given.items()}
    text = "\n\n".join(filter(None, (_read_input(), " ".join(words))))
    if not text and (as_json or not (sys.stdin.isatty() and sys.stdout.isatty())):
        raise BadParameter("give a prompt, here or on standard input")
    with _serve(model, config, is_quiet=bool(text)) as (name, key), connect(key) as http:
        chat = Chat(http, name, values)
        if not text:
            _Terminal(chat).run()
            return CommandResult(None)
        _answer(chat, text, is_shown=not as_json)
        return CommandResult(_data(chat), notes=tuple(_notes(chat.answer)))


def _split_option(option: str) -> tuple[str, str]:
    name, is_given, value = option.partition("=")
    if not is_given:
        raise BadParameter(f"--set {option}: write NAME=VALUE")
    return name.strip(), value.strip()


def _read_input() -> str:
    """Return the piped input; empty from a terminal, or if standard input is closed."""
    if sys.stdin is None or sys.stdin.closed or sys.stdin.isatty():
        return ""
    content = sys.stdin.buffer.read(_INPUT_MAX_BYTES + 1)
    if len(content) > _INPUT_MAX_BYTES:
        raise BadParameter(f"standard input has more than {_INPUT_MAX_BYTES >> 20} MiB")
    return content.decode(errors="replace").strip()


@contextmanager
def _serve(word: str, config: Path | None, *, is_quiet: bool) -> Iterator[tuple[str, str | None]]:
    """Have a model served for the block; yields its name, and the API key of our own daemon."""
    client = Client(directories().control_socket)
    try:
        messages, host, started = join(
            client, directories(), [word], settings_options(config, LISTEN)
        )
    except errors.DaemonBusy:  # it is the user's own, or hangs
        yield _load(client, word, config, is_quiet=is_quiet), None
        return
    # The daemon's events are of no interest, but a host that reads none looks dead.
    threading.Thread(target=deque, args=(messages, 0), daemon=True).start()
    try:
        if started:
            start.command(client, "start", started, wait=True)
        name = started[0] if started else _load(client, word, config, is_quiet=True)
        yield name, Path(host.api_key_file).read_text("ascii")
    except errors.Interrupted as interrupt:  # its message is about a daemon that continues
        raise KeyboardInterrupt from interrupt
    finally:
        with suppress(errors.NotRunning, errors.DaemonBusy):
            client.leave(host.host)


def _load(client: Client, word: str, config: Path | None, *, is_quiet: bool) -> str:
    """Load a model in a running daemon, which gets it if it is missing; return its name."""
    status = client.status()
    start.check_same(status, config, None)
    if unknown_words([word], status) and word in _served_names():  # a node's, or a variant
        return word
    result = start.command_adding(client, "start", [word], status, wait=True)
    for note in () if is_quiet else result.notes:
        write(colored(note, "yellow", sys.stderr), sys.stderr)
    return resolve_running([word], client.status())[0]


def _served_names() -> list[str]:
    with suppress(errors.CorralError):
        return [model["id"] for model in ask("GET", "/v1/models")["data"]]
    return []


def _answer(chat: Chat, text: str, *, is_shown: bool = True) -> None:
    """Ask, and show the answer as it arrives: rendered on a terminal, otherwise unchanged."""
    message, images = take_images(text)
    with closing(chat.ask(message, images)) as pieces:
        if not is_shown:
            deque(pieces, maxlen=0)
        elif sys.stdout.isatty() and os.environ.get("TERM") != "dumb":
            from supervisor.cli.answer_view import AnswerView

            with AnswerView() as view:
                for piece in pieces:
                    view.add(piece)
        else:
            for piece in pieces:
                if piece.kind == "text":
                    write(piece.text, end="", raw=not sys.stdout.isatty())
            write("")


def _data(chat: Chat) -> Mapping[str, Any]:
    answer = chat.answer
    return {
        "model": chat.model,
        "request": answer.request_id,
        "text": answer.text,
        "thoughts": answer.thoughts or None,
        "finish_reason": answer.finish_reason,
        "timings": answer.timings,
    }


def _notes(answer: Answer) -> Iterator[str]:
    if answer.finish_reason == "length":
        yield "the answer reached the limit of tokens (max_tokens, or the context)"


_HELP: Final = f"""\
/set                  show the options
/set NAME VALUE       {", ".join(OPTIONS)}
/set NAME             unset an option
/explain              why the latest answer took so long
/clear                begin another conversation
/bye, Ctrl-D          end
Ctrl-C                stop the answer, or discard the input
Alt-Enter             a new line; so is a pasted one, and Enter between \"\"\" and \"\"\"
Up, Down, Ctrl-R      earlier input
The path of an image in a message sends the image."""
_WORDS: Final = ["/help", "/explain", "/clear", "/bye", "/set", *(f"/set {n}" for n in OPTIONS)]
_QUOTES: Final = '"""'


@dataclass
class _Terminal:
    """The input line of a chat, and its commands. Input is kept in memory, and never on disk."""

    _chat: Chat
    _session: PromptSession[str] = field(init=False)

    def run(self) -> None:
        """Chat until Ctrl-D or `/bye`."""
        self._session = _input_line()
        is_over = False
        while not is_over:
            try:
                is_over = self._take(self._session.prompt("> "))
            except EOFError:
                return
            except errors.CorralError as error:
                write(describe(error, sys.stderr), sys.stderr)
            except KeyboardInterrupt:  # the next input is a new one
                continue

    def _take(self, text: str) -> bool:
        """Carry out a command, or send a message; returns whether the chat is over."""
        word, _, rest = text.strip().partition(" ")
        if word in {"/bye", "/exit", "/quit"}:
            return True
        commands: Mapping[str, Callable[[str], str]] = {
            "/help": lambda _: _HELP,
            "/?": lambda _: _HELP,
            "/set": self._set,
            "/explain": self._explain,
            "/clear": self._clear,
        }
        if word in commands:
            write(commands[word](rest.strip()))
        elif word.startswith("/") and word.count("/") == 1 and not Path(word).exists():
            known = errors.did_you_mean(word, commands)
            write(f"no command is named {word}{known}; /help lists them")
        elif message := text.strip().removeprefix(_QUOTES).removesuffix(_QUOTES).strip():
            self._send(message)
        return False

    def _send(self, message: str) -> None:
        write("")
        try:
            _answer(self._chat, message)
        except KeyboardInterrupt:
            write(colored("stopped", "dim"))
        answer = self._chat.answer
        for note in _notes(answer):
            write(colored(note, "yellow"))
        if speed := answer.timings.get("predicted_per_second"):
            tokens = answer.timings["predicted_n"]
            write(colored(f"{tokens} tokens, {speed:.1f} tokens/s", "dim"))
        write("")

    def _set(self, given: str) -> str:
        options = self._chat.options
        name, _, value = given.partition(" ")
        if value:
            options[name] = read_option(name, value.strip())
        elif name in OPTIONS:
            options.pop(name, None)
        elif name:
            read_option(name, "")
        lines = (f"{name} {value}" for name, value in options.items())
        return "\n".join(lines) or f"no option is set; there are {', '.join(OPTIONS)}"

    def _explain(self, _: str) -> str:
        if self._chat.answer.request_id is None:
            return "there is no answer yet"
        return history.explain_request(self._chat.answer.request_id).text

    def _clear(self, _: str) -> str:
        self._chat.clear()
        return "a new conversation"


def _input_line() -> PromptSession[str]:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import WordCompleter
    from prompt_toolkit.formatted_text import FormattedText
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

    keys = KeyBindings()

    @keys.add("enter")
    def accept(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        text = buffer.text.strip()
        is_quoted = text.startswith(_QUOTES)
        if is_quoted and (text == _QUOTES or not text.endswith(_QUOTES)):
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    # Not Ctrl-J too: Enter that is typed during an answer arrives as that.
    @keys.add("escape", "enter")
    def begin_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return PromptSession(
        multiline=True,
        key_bindings=keys,
        completer=WordCompleter(_WORDS, sentence=True),
        complete_while_typing=True,
        prompt_continuation="  ",
        placeholder=FormattedText([("ansibrightblack", "a message; /help for help")]),
    )
