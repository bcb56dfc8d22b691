"""The settings of each client."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest

from supervisor.clients.journal import notes_of
from supervisor.clients.programs import (
    CLIENTS,
    Api,
    Facts,
    FileSettings,
    Places,
    ServedModel,
    body,
    headers,
    is_complete,
)

CHAT = ServedModel("chat", 16_384, sees_images=True)
SMALL = ServedModel("small")
FACTS = Facts("http://127.0.0.1:8080", (CHAT, SMALL), CHAT, SMALL)
HOME = Path("/home/me")
BY_NAME = {client.name: client for client in CLIENTS}


def places(**environ: str) -> Places:
    return Places(HOME, environ, HOME / "corral")


def files(name: str, facts: Facts = FACTS) -> list[FileSettings]:
    return list(BY_NAME[name].files(facts, places()))


def values(name: str, facts: Facts = FACTS) -> dict[Any, Any]:
    return {place: value for file in files(name, facts) for place, value in file.values.items()}


@pytest.mark.parametrize("name", BY_NAME)
def test_each_has_the_address_and_the_model(name: str) -> None:
    written = str(values(name))
    assert "http://127.0.0.1:8080" in written
    assert "chat" in written
    assert BY_NAME[name].run(FACTS)


@pytest.mark.parametrize("name", BY_NAME)
def test_none_holds_a_key(name: str) -> None:
    """A key stands in no file: clients find it in a variable."""
    with_key = values(name, replace(FACTS, needs_key=True))
    assert "'none'" not in str(with_key)
    assert BY_NAME[name].key_variable.endswith("_API_KEY")


@pytest.mark.parametrize(
    ("name", "variable", "path"),
    [
        ("claude", "CLAUDE_CONFIG_DIR", "/x/settings.json"),
        ("codex", "CODEX_HOME", "/x/config.toml"),
        ("opencode", "XDG_CONFIG_HOME", "/x/opencode/opencode.json"),
        ("opencode", "OPENCODE_CONFIG", "/x"),
        ("continue", "CONTINUE_GLOBAL_DIR", "/x/config.yaml"),
        ("zed", "XDG_CONFIG_HOME", "/x/zed/settings.json"),
        ("llm", "LLM_USER_PATH", "/x/extra-openai-models.yaml"),
        ("llm", "XDG_CONFIG_HOME", "/x/io.datasette.llm/extra-openai-models.yaml"),
    ],
)
def test_a_directory_of_the_environment_is_used(name: str, variable: str, path: str) -> None:
    found = BY_NAME[name].files(FACTS, places(**{variable: "/x"}))
    assert str(found[0].path) == path


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("claude", ".claude/settings.json"),
        ("codex", ".codex/config.toml"),
        ("opencode", ".config/opencode/opencode.json"),
        ("aider", ".aider.conf.yml"),
        ("continue", ".continue/config.yaml"),
        ("openwebui", "corral/open-webui.env"),
        ("zed", ".config/zed/settings.json"),
        ("llm", ".config/io.datasette.llm/extra-openai-models.yaml"),
    ],
)
def test_without_one_it_is_in_the_home_directory(name: str, path: str) -> None:
    assert files(name)[0].path == HOME / path


def test_opencode_keeps_a_file_with_comments(tmp_path: Path) -> None:
    path = tmp_path / "opencode" / "opencode.jsonc"
    path.parent.mkdir()
    path.touch()
    found = BY_NAME["opencode"].files(FACTS, places(XDG_CONFIG_HOME=str(tmp_path)))
    assert found[0].path == path


def test_claude_code_has_a_small_model_and_the_size_of_the_context() -> None:
    found = values("claude")
    assert found["env", "ANTHROPIC_DEFAULT_HAIKU_MODEL"] == "small"
    assert found["env", "CLAUDE_CODE_AUTO_COMPACT_WINDOW"] == "16384"
    assert found["env", "ANTHROPIC_AUTH_TOKEN"] == "none"
    with_key = values("claude", replace(FACTS, needs_key=True))
    assert with_key["apiKeyHelper",] == "printenv CORRAL_API_KEY"
    assert ("env", "ANTHROPIC_AUTH_TOKEN") not in with_key


def test_a_certificate_is_named() -> None:
    facts = replace(FACTS, certificate=Path("/c.pem"))
    assert values("claude", facts)["env", "NODE_EXTRA_CA_CERTS"] == "/c.pem"
    place = "models", ("name", "chat (llama-corral)")
    assert values("continue", facts)[place]["requestOptions"] == {"caBundlePath": "/c.pem"}


def test_codex_finds_the_key_in_a_variable() -> None:
    provider = values("codex", replace(FACTS, needs_key=True))["model_providers", "corral"]
    assert (provider["env_key"], provider["wire_api"]) == ("CORRAL_API_KEY", "responses")
    assert values("codex")["model_context_window",] == 16_384


def test_an_unknown_context_is_left_out() -> None:
    facts = replace(FACTS, models=(SMALL,), model=SMALL)
    for name in ("claude", "codex", "aider", "opencode"):
        assert "None" not in str(values(name, facts))


@pytest.mark.parametrize("api", get_args(Api))
def test_a_probe_is_a_request_of_its_api(api: Api) -> None:
    sent = body(api, "chat")
    assert (sent["model"], sent["stream"]) == ("chat", True)
    assert not is_complete(api, "data: {}\n\n")
    assert ("anthropic-version" in headers(api)) == (api == "/v1/messages")


@pytest.mark.parametrize(
    ("context_tokens", "is_told"), [(8192, True), (16_384, False), (None, False)]
)
def test_a_context_too_small_for_an_agent_is_told(
    context_tokens: int | None, *, is_told: bool
) -> None:
    model = ServedModel("chat", context_tokens)
    facts = Facts("http://127.0.0.1:8080", (model,), model, model)
    notes = [note for note in notes_of(BY_NAME["claude"], facts) if "context" in note]
    assert [note.startswith("chat has a context of 8192 tokens") for note in notes] == (
        [True] if is_told else []
    )
    assert notes_of(BY_NAME["llm"], facts) == []
