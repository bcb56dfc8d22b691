"""`corral run`: a chat in a terminal, one answer in a pipe, with a daemon and without."""

import json
import subprocess
from base64 import b64decode
from pathlib import Path

import pytest
from support import tiny_clip
from support.corral_cli import PATIENCE_S, CorralCli, until
from support.terminal import Terminal

PROMPT = "a message; /help for help"


def run(corral: CorralCli, *words: str, given: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        corral.argv("run", *words),
        env=corral.env,
        cwd=corral.root,
        input=given,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


def answer_of(corral: CorralCli, *words: str) -> str:
    text = corral.data("run", *words)["text"]
    assert isinstance(text, str)
    return text


FEW = ("--set", "max_tokens=8", "--set", "temperature=0")


def test_a_pipe_gets_only_the_answer_and_no_daemon_stays(
    corral: CorralCli, tiny_model: Path
) -> None:
    asked = run(corral, str(tiny_model), "and then?", *FEW, given="once upon a time\n")
    assert asked.returncode == 0, asked.stderr
    assert "loading tiny.0" in asked.stderr
    assert "max_tokens" in asked.stderr
    assert not corral.is_running()
    until(lambda: not corral.engines())
    corral.configure(f'[models.tiny]\npath = "{tiny_model}"\n')
    corral.ok("start")
    whole = answer_of(corral, "tiny", "once upon a time\n\nand then?", *FEW)
    assert asked.stdout == f"{whole}\n"
    assert answer_of(corral, "tiny", "other words", *FEW) != whole


def test_a_daemon_that_runs_answers_and_stays(corral: CorralCli, tiny_model: Path) -> None:
    corral.configure(f'[models.tiny]\npath = "{tiny_model}"\npreload = false\n')
    corral.ok("start")
    pid = corral.daemon_pid
    corral.ok("unload")
    assert answer_of(corral, "tiny", "hello", *FEW)
    corral.ok("stop", "tiny")
    assert answer_of(corral, "tiny", "hello", *FEW)
    other = corral.root / "other.gguf"
    other.symlink_to(tiny_model)
    assert answer_of(corral, "other.gguf", "hello", *FEW)
    assert corral.daemon_pid == pid
    assert corral.model_states() == {"tiny": "loaded", "other": "loaded"}


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("broken.gguf", "hi"), 78, "broken.0 did not start"),
        (("gone.gguf", "hi"), 78, "gone.gguf not found"),
        (("nothing", "hi"), 4, "no model is named 'nothing'"),
        (("broken.gguf",), 2, "give a prompt"),
        (("broken.gguf", "hi", "--set", "temprature=1"), 78, "did you mean temperature?"),
        (("broken.gguf", "hi", "--set", "top_k=many"), 78, "top_k is an integer"),
    ],
)
def test_a_failure_has_its_cause_and_leaves_no_daemon(
    corral: CorralCli, words: tuple[str, ...], code: int, said: str
) -> None:
    (corral.root / "broken.gguf").write_bytes(b"GGUF")
    failed = corral("run", *words)
    assert (failed.returncode, failed.stdout) == (code, "")
    assert said in failed.stderr
    until(lambda: not corral.is_running())


def test_a_chat_in_a_terminal(corral: CorralCli, slow_model: Path) -> None:
    with Terminal(corral, "run", str(slow_model), "--set", "temperature=0") as terminal:
        until(lambda: PROMPT in terminal.text())
        terminal.press_until("/set max_tokens 6\r", "max_tokens 6")
        terminal.press_until("hello\r", "6 tokens", PROMPT)
        first = corral.data("requests", "--last", "1")[0]
        terminal.press_until("/set max_tokens\r", "temperature 0.0", PROMPT)
        terminal.press_until("\x1b[A\x1b[A", "hello")
        terminal.press("\r")
        until(corral.client.requests)
        until(lambda: corral.client.requests()[0].decoded_tokens > 1)
        [request] = corral.client.requests()
        assert request.prompt_tokens is not None
        assert request.prompt_tokens > first["prompt_tokens"]
        terminal.press("typed ahead")
        terminal.press_until("\x03", "stopped", PROMPT)
        assert "typed ahead" not in terminal.text()
        until(lambda: not corral.client.requests())
        until(lambda: corral.data("requests", "--last", "1")[0]["id"] != first["id"])
        terminal.press_until("/explain\r", "499", "prefill", PROMPT)
        terminal.press_until("/hepl\r", "did you mean /help?", PROMPT)
        terminal.press_until("two\x1b\rlines\x03", PROMPT)
        terminal.press("\x04")
        assert terminal.end() == 0
    until(lambda: not corral.is_running())
    until(lambda: not corral.engines())


def test_two_chats_share_a_daemon_that_ends_with_the_last(
    corral: CorralCli, tiny_model: Path
) -> None:
    words = ("run", str(tiny_model))
    with Terminal(corral, *words) as first, Terminal(corral, *words) as second:
        until(lambda: PROMPT in first.text() and PROMPT in second.text())
        first.press("\x04")
        assert first.end() == 0
        second.press_until("/set max_tokens 4\r", "max_tokens 4")
        second.press_until("hello\r", "4 tokens", PROMPT)
        second.process.kill()
        until(lambda: not corral.is_running())
    until(lambda: not corral.engines())


def test_start_keeps_the_daemon_of_a_chat(corral: CorralCli, tiny_model: Path) -> None:
    other = corral.root / "other.gguf"
    other.symlink_to(tiny_model)
    with Terminal(corral, "run", str(tiny_model)) as terminal:
        until(lambda: PROMPT in terminal.text())
        wrong = corral("start", "othr.gguf")
        assert "did you mean other.gguf?" in wrong.stderr
        started = corral("start", str(other))
        assert "it now runs until corral stop, and requests need the API key in" in started.stderr
        terminal.press("\x04")
        assert terminal.end() == 0
    assert corral.model_states() == {"tiny": "loaded", "other": "loaded"}
    assert answer_of(corral, "other", "hello", *FEW)
    assert corral.is_running()


def test_an_image_is_sent_by_its_path(corral: CorralCli, tiny_model: Path) -> None:
    clip = tiny_clip.make(corral.root / "clip.gguf")
    corral.configure(
        f'[models.sees]\npath = "{tiny_model}"\nflags = {{ mmproj = "{clip}" }}\n'
        f'[models.blind]\npath = "{tiny_model}"\n'
    )
    url = tiny_clip.picture((255, 0, 0))
    (corral.root / "a picture.png").write_bytes(b64decode(url.partition(",")[2]))
    corral.ok("start")
    question = f"what is in '{corral.root}/a picture.png'?"
    seen = corral.data("run", "sees", question, *FEW)
    timings = seen["timings"]
    assert timings["prompt_n"] + timings["cache_n"] > tiny_clip.TOKENS
    refused = corral("run", "blind", question, *FEW)
    assert refused.returncode == 1
    assert "image" in refused.stderr


def test_a_failing_daemon_ends_the_answer_with_its_error(
    corral: CorralCli, slow_model: Path
) -> None:
    corral.configure(f'[models.slow]\npath = "{slow_model}"\n')
    corral.ok("start")
    with subprocess.Popen(
        corral.argv("run", "slow", "hello"),
        env=corral.env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as asking:
        assert asking.stdout
        asking.stdout.read(1)
        corral.kill()
        _, said = asking.communicate(timeout=PATIENCE_S)
    assert asking.returncode == 69
    assert "the daemon does not answer" in said


def test_ctrl_c_ends_a_single_answer(corral: CorralCli, slow_model: Path) -> None:
    with Terminal(corral, "run", str(slow_model), "hello") as terminal:
        until(lambda: corral.is_running() and corral.client.requests())
        until(lambda: corral.client.requests()[0].decoded_tokens > 1)
        terminal.press("\x03")
        assert terminal.end() == 130
    until(lambda: not corral.is_running())


def test_json_has_the_answer_and_its_request(corral: CorralCli, tiny_model: Path) -> None:
    done = json.loads(corral.ok("run", str(tiny_model), "hello", *FEW, "--json"))
    assert done["command"] == "run"
    data = done["data"]
    assert (data["model"], data["finish_reason"]) == ("tiny", "length")
    assert data["timings"]["predicted_n"] == 8
    past = corral.data("requests", "--last", "1")[0]
    assert past["id"] == data["request"]
    short = data["request"].removeprefix("req_")[:8]
    assert corral.data("requests", "show", short)["id"] == data["request"]
    assert short in corral.ok("explain", short)
