"""Client programs are connected with a running daemon."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest
import trustme
from support import certificates
from support.corral_cli import CorralCli

SETTINGS = """
[models.tiny]
path = "{tiny}"
[models.tiny.flags]
ctx-size = 1024
parallel = 1

[models.vectors]
path = "{tiny}"
preload = false
[models.vectors.flags]
embeddings = true
"""
OWN = '{\n  // mine\n  "theme": "dark",\n  "env": {"EDITOR": "vi"}\n}\n'


@pytest.fixture
def home(corral: CorralCli) -> Path:
    home = corral.root / "home"
    home.mkdir()
    for name in ("XDG_CONFIG_HOME", "CLAUDE_CONFIG_DIR", "CODEX_HOME", "OPENCODE_CONFIG"):
        corral.env.pop(name, None)
    corral.env |= {"HOME": str(home)}
    return home


def test_settings_are_shown_checked_written_and_taken_back(
    corral: CorralCli, home: Path, tiny_model: Path
) -> None:
    settings = home / ".claude" / "settings.json"
    settings.parent.mkdir()
    settings.write_text(OWN)
    settings.chmod(0o644)
    stopped = corral("connect", "claude")
    assert stopped.returncode == 3
    assert "corral start starts it" in stopped.stderr
    corral.configure(SETTINGS.format(tiny=tiny_model))
    corral.ok("start", "tiny")

    shown = corral.ok("connect", "claude")
    assert f'"ANTHROPIC_BASE_URL": "{corral.url}"' in shown
    assert settings.read_text() == OWN

    written = corral.data("connect", "claude", "--write")
    assert (written["model"], written["is_checked"]) == ("tiny", True)
    assert "// mine" in settings.read_text()
    assert '"ANTHROPIC_MODEL": "tiny"' in settings.read_text()
    assert stat.S_IMODE(settings.stat().st_mode) == 0o644
    (backup,) = map(Path, written["backups"])
    assert backup.read_text() == OWN
    assert stat.S_IMODE(backup.stat().st_mode) == 0o600
    assert [connect["name"] for connect in corral.data("connect") if connect["connected"]] == [
        "claude"
    ]
    for model in ("vectors", "nobody"):
        unknown = corral("connect", "claude", "--model", model, "--write")
        assert unknown.returncode == 4
        assert "models with chats: tiny" in unknown.stderr

    settings.write_text(settings.read_text().replace("dark", "light"))
    corral.ok("connect", "claude", "--undo")
    assert settings.read_text() == OWN.replace("dark", "light")
    again = corral("connect", "claude", "--undo")
    assert again.returncode == 1
    assert "has written nothing" in again.stderr


@pytest.mark.parametrize("client", ["codex", "opencode", "aider", "continue", "zed", "llm"])
def test_a_request_of_each_api_is_sent_first(
    corral: CorralCli, home: Path, tiny_model: Path, client: str
) -> None:
    corral.configure(SETTINGS.format(tiny=tiny_model))
    corral.ok("start", "tiny")
    written = corral.data("connect", client, "--write")
    files = [Path(file) for file in written["files"]]
    assert all(file.is_file() for file in files)
    assert all(stat.S_IMODE(file.stat().st_mode) == 0o600 for file in files)
    corral.ok("connect", client, "--undo")
    assert not any(file.exists() for file in files)


def test_a_key_is_read_by_the_client_and_written_nowhere(
    corral: CorralCli, home: Path, tiny_model: Path
) -> None:
    keys = corral.root / "keys.toml"
    keys.touch(0o600)
    keys.write_text('[keys.me]\nkey = "corral-me-1234"\n')
    proxy = f'[proxy]\nlisten = "127.0.0.1:0"\napi_keys_file = "{keys}"\n'
    corral.configure(SETTINGS.format(tiny=tiny_model) + proxy)
    corral.ok("start", "tiny")
    without = corral("connect", "codex", "--write")
    assert without.returncode == 1
    assert "CORRAL_API_KEY" in without.stderr
    corral.env["CORRAL_API_KEY"] = "corral-me-1234"
    corral.ok("connect", "codex", "--write")
    config = (home / ".codex" / "config.toml").read_text()
    assert 'env_key = "CORRAL_API_KEY"' in config
    files = [path for path in corral.root.rglob("*") if path.is_file() and path != keys]
    assert not [file for file in files if b"corral-me-1234" in file.read_bytes()]


def test_https_is_connected_with_a_note_on_the_ca(
    corral: CorralCli, home: Path, tiny_model: Path
) -> None:
    files = certificates.write(corral.root, trustme.CA().issue_cert("127.0.0.1"))
    tls = f'[proxy.tls]\ncert = "{files["cert"]}"\nkey = "{files["key"]}"\n'
    proxy = '[proxy]\nlisten = "127.0.0.1:0"\n'
    corral.configure(SETTINGS.format(tiny=tiny_model) + proxy + tls)
    corral.ok("start", "tiny")
    written = corral("connect", "codex", "--write")
    assert written.returncode == 0
    assert "https://127.0.0.1" in (home / ".codex" / "config.toml").read_text()
    assert "export CODEX_CA_CERTIFICATE=FILE.pem" in written.stderr


def test_a_file_that_cannot_be_read_is_not_touched(
    corral: CorralCli, home: Path, tiny_model: Path
) -> None:
    corral.configure(SETTINGS.format(tiny=tiny_model))
    corral.ok("start", "tiny")
    settings = home / ".config" / "zed" / "settings.json"
    settings.parent.mkdir(parents=True)
    settings.write_text('{"theme": \n}')
    refused = corral("connect", "zed", "--write")
    assert refused.returncode == 78
    assert "Expecting value: line 2 column 1" in refused.stderr
    assert settings.read_text() == '{"theme": \n}'
    settings.unlink()
    corral.ok("connect", "zed", "--write", "--no-check")
    settings.unlink()
    assert "none of its files exists any more" in corral.ok("connect", "zed", "--undo")
    target = home / "dotfiles.json"
    target.write_text("{}")
    settings.symlink_to(target)
    corral.ok("connect", "zed", "--write", "--no-check")
    assert settings.is_symlink()
    assert json.loads(target.read_text())["agent"]["default_model"]["model"] == "tiny"


@pytest.mark.parametrize(
    "words", [("--write",), ("--undo",), ("claude", "--write", "--undo"), ("nobody",)]
)
def test_words_that_make_no_sense_are_refused(corral: CorralCli, words: tuple[str, ...]) -> None:
    assert corral("connect", *words).returncode in {1, 2}
