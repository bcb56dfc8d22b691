"""Files that flags name: where relative paths start, and which files are missing."""

from __future__ import annotations

from pathlib import Path

import pytest

from supervisor.builds.help import FlagValue, parse, recorded_builds
from supervisor.errors import SettingsInvalid
from supervisor.plan.loras import absolute, check_files

BASE = Path("/etc/corral")
# Options of any recorded build that name a file or a directory and that users may set.
OPTIONS = {
    "binary-file",
    "chat-template-file",
    "control-vector",
    "control-vector-scaled",
    "file",
    "grammar-file",
    "json-schema-file",
    "log-prompts-dir",
    "lookup-cache-dynamic",
    "lookup-cache-static",
    "lora",
    "lora-scaled",
    "media-path",
    "mmproj",
    "model-draft",
    "model-vocoder",
    "spec-draft-model",
    "system-prompt-file",
    "ui-config-file",
    "video-ffmpeg-dir",
    "webui-config-file",
}


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("chat-template-file", "agent.jinja", "/etc/corral/agent.jinja"),
        ("mmproj", "models/eyes.gguf", "/etc/corral/models/eyes.gguf"),
        ("--mmproj", "/eyes.gguf", "/eyes.gguf"),
        ("mm", "eyes.gguf", "/etc/corral/eyes.gguf"),
        ("grammar_file", "a.gbnf", "/etc/corral/a.gbnf"),
        ("json-schema-file", "~/a.json", f"{Path.home()}/a.json"),
        ("model-draft", "small.gguf", "/etc/corral/small.gguf"),
        ("model-vocoder", "voice.gguf", "/etc/corral/voice.gguf"),  # not in the newest build
        ("lora", "a.gguf,/b.gguf", "/etc/corral/a.gguf,/b.gguf"),
        ("lora", '"a,b.gguf",c.gguf', '"/etc/corral/a,b.gguf",/etc/corral/c.gguf'),
        ("lora-scaled", "a.gguf:0.5,/b.gguf:1", "/etc/corral/a.gguf:0.5,/b.gguf:1"),
        ("control-vector", "a.gguf", "/etc/corral/a.gguf"),
        ("control-vector-scaled", "a.gguf:-1", "/etc/corral/a.gguf:-1"),
        ("chat-template-file", "", ""),
        ("lora-scaled", "a.gguf", "a.gguf"),  # the engine explains the form
        ("lora", "a\nb", "/etc/corral/a\nb"),
        ("chat-template", "chatml", "chatml"),
        ("mmproj-url", "https://a/b", "https://a/b"),
        ("no-such-flag", "a.gguf", "a.gguf"),
        ("ctx-size", 4096, 4096),
        ("mmproj-auto", False, False),
    ],
)
def test_relative_paths_start_at_the_directory(
    name: str, value: FlagValue, expected: FlagValue
) -> None:
    assert absolute({name: value}, BASE) == {name: expected}


def test_every_option_of_every_build_that_names_a_file_is_known() -> None:
    texts = (path.read_text("utf-8") for path in recorded_builds().values())
    keys = {flag.key for text in texts for flag in parse(text).entries}
    changed = {key for key in keys if absolute({key: "a:1"}, BASE) != {key: "a:1"}}
    reserved = {
        *("api-key-file", "hf-file", "hf-file-v", "log-file", "mcp-servers-config", "model"),
        *("models-dir", "models-preset", "path", "slot-save-path", "ssl-cert-file", "ssl-key-file"),
    }
    assert changed - reserved == OPTIONS


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "a.gguf").write_bytes(b"x")
    (tmp_path / "secret.gguf").write_bytes(b"x")
    return tmp_path


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("mmproj", "gone.gguf", "{dir}/gone.gguf does not exist"),
        ("chat-template-file", ".", "{dir} is a directory"),
        ("lora", "a.gguf,gone.gguf", "{dir}/gone.gguf does not exist"),
        ("lora-scaled", "gone.gguf:2", "{dir}/gone.gguf does not exist"),
        ("media-path", "a.gguf", "{dir}/a.gguf is not a directory"),
        ("grammar-file", "x" * 300, "{dir}/" + "x" * 300 + " cannot be read: File name too long"),
    ],
)
def test_a_file_that_cannot_be_read_is_named_with_its_key(
    files: Path, name: str, value: str, expected: str
) -> None:
    flags = absolute({"poll": 9, name: value}, files)
    with pytest.raises(SettingsInvalid) as caught:
        check_files("chat", flags, flags)
    assert caught.value.message == f"models.chat.flags.{name}: {expected.format(dir=files)}"
    with pytest.raises(SettingsInvalid, match=rf"^models\.chat\.trial\.flags\.{name}: "):
        check_files("chat", flags, {})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("mmproj", "a.gguf"),
        ("lora-scaled", "a.gguf:0.5,a.gguf:1"),
        ("media-path", "."),
        ("lookup-cache-dynamic", "new.bin"),  # the engine writes it
        ("log-prompts-dir", "new"),
        ("chat-template", "gone.jinja"),
        ("mmproj", ""),
    ],
)
def test_files_that_are_there_or_will_be_are_accepted(files: Path, name: str, value: str) -> None:
    flags = absolute({name: value}, files)
    check_files("chat", flags, flags)
