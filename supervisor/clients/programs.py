"""The table of client programs: the files and values of each one's settings, and a probe's request.

Continue reads secrets from the environment or from the file .env beside its settings. Source: its
documentation, "config.yaml reference".

Open WebUI is set by variables; changes in its pages win over them. Source: its documentation,
"Environment configuration".

Zed reads a provider's key from NAME_API_KEY, for `corral` CORRAL_API_KEY. Source: its
documentation, "Use API access", OpenAI-compatible endpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

KEY_VARIABLE: Final = "CORRAL_API_KEY"
# For clients that want a key although the daemon needs none.
NO_KEY: Final = "none"


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that answers chats; `context_tokens` limits one request, None if not known yet."""

    name: str
    context_tokens: int | None = None
    sees_images: bool = False


@dataclass(frozen=True, slots=True)
class Facts:
    """The daemon, for clients."""

    url: str  # without a path
    models: tuple[ServedModel, ...]
    model: ServedModel  # for most requests; one of `models`
    small: ServedModel  # for short requests, such as titles
    needs_key: bool = False  # clients read the key from the variable CORRAL_API_KEY
    # PEM file to trust for https if it is self-signed; otherwise None.
    certificate: Path | None = None
    ruled: frozenset[str] = frozenset()  # clients that have prompt rules

    @property
    def api(self) -> str:
        """The address of OpenAI's API."""
        return f"{self.url}/v1"


@dataclass(frozen=True, slots=True)
class Places:
    """The directories of a user's settings."""

    home: Path
    environ: Mapping[str, str]
    corral: Path  # the directory of corral.toml

    @property
    def config(self) -> Path:
        return self.named("XDG_CONFIG_HOME", self.home / ".config")

    def named(self, variable: str, default: Path) -> Path:
        """Return the directory that a variable names; an empty variable names none."""
        return Path(value) if (value := self.environ.get(variable)) else default


# The name of a table's member, or of a list the object whose member has this value.
Step = str | tuple[str, str]
Place = tuple[Step, ...]
# Stands for a value that is not there.
ABSENT: Final[Any] = object()


def nest_value(place: Place, value: Any) -> Any:
    """Wrap a value in the tables and lists that lead to it."""
    for step in reversed(place):
        value = {step: value} if isinstance(step, str) else [value]
    return value


FileFormat = Literal["json", "toml", "yaml", "env"]  # JSON with comments or without
# The endpoint that a client sends its requests to.
Api = Literal["/v1/messages", "/v1/responses", "/v1/chat/completions"]


@dataclass(frozen=True, slots=True)
class FileSettings:
    """Values of one settings file, in order; `defaults` are written only if the file has none."""

    path: Path
    format: FileFormat
    values: Mapping[Place, Any]
    defaults: Mapping[Place, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ClientProgram:
    name: str
    title: str
    directory: Callable[[Places], Path]  # returns the directory of its settings
    files: Callable[[Facts, Places], Sequence[FileSettings]]  # returns its settings
    run: Callable[[Facts], str]  # returns the command that starts it then, for people
    ca_variable: str  # the variable that names a file of trusted certificates
    programs: tuple[str, ...] = ()  # names of its commands; empty: its own name
    api: Api = "/v1/chat/completions"
    key_variable: str = KEY_VARIABLE  # the variable from which it reads the API key
    writes_ca: bool = False  # whether its settings name that file
    context_least: int = 0  # tokens of its own prompt and some turns; 0 if any context will do
    agent: str = ""  # the program that its User-Agent begins with; empty without prompt rules
    # Rules that let its sessions share more of their prompts. Source: Claude Code 2.1.197 and
    # opencode 1.18.33, two sessions in two directories; Codex 0.169.0 needs none.
    prompt_rules: tuple[str, ...] = ()


_PROMPT: Final = "Say hello."
# The Responses API's minimum is 16.
_MAX_TOKENS: Final = 16
_ENDS: Final[Mapping[Api, Sequence[str]]] = {
    "/v1/messages": ("message_stop",),
    "/v1/responses": ("response.completed", "response.incomplete"),
    "/v1/chat/completions": ("[DONE]",),
}


def body(api: Api, model: str) -> Mapping[str, Any]:
    """Return a short streaming request as the client sends it."""
    messages = [{"role": "user", "content": _PROMPT}]
    if api == "/v1/responses":
        return {
            "model": model,
            "input": [{"type": "message", **messages[0]}],
            "max_output_tokens": _MAX_TOKENS,
            "stream": True,
            "store": False,
        }
    return {"model": model, "messages": messages, "max_tokens": _MAX_TOKENS, "stream": True}


def headers(api: Api) -> Mapping[str, str]:
    return {"anthropic-version": "2023-06-01"} if api == "/v1/messages" else {}


def is_complete(api: Api, stream: str) -> bool:
    """Return whether a stream has an answer's last event."""
    return any(end in stream for end in _ENDS[api])


def self_signed(path: str | None) -> Path | None:
    """Return the certificate if it is self-signed: then clients can trust it alone."""
    if path is None:
        return None
    # Imported here: few daemons have a certificate.
    from cryptography.x509 import load_pem_x509_certificates  # noqa: PLC0415

    try:
        found = load_pem_x509_certificates(Path(path).read_bytes())[0]
    except (OSError, ValueError, IndexError):  # the daemon reports it
        return None
    return Path(path) if found.issuer == found.subject else None


def _aider_files(facts: Facts, places: Places) -> Sequence[FileSettings]:
    values: dict[Place, Any] = {
        ("model",): _name(facts.model),
        ("weak-model",): _name(facts.small),
        ("openai-api-base",): facts.api,
        # It knows no costs of these models and would ask about each.
        ("show-model-warnings",): False,
    }
    if not facts.needs_key:
        values["openai-api-key",] = NO_KEY
    sizes: dict[Place, Any] = {
        (_name(model),): {
            "max_input_tokens": model.context_tokens,
            "max_output_tokens": model.context_tokens,
            "litellm_provider": "openai",
            "mode": "chat",
        }
        for model in facts.models
        if model.context_tokens
    }
    files = [FileSettings(places.home / ".aider.conf.yml", "yaml", values)]
    if sizes:
        files.append(FileSettings(places.home / ".aider.model.metadata.json", "json", sizes))
    return files


def _name(model: ServedModel) -> str:
    return f"openai/{model.name}"


# A long prompt on a slow machine takes longer than its ten minutes.
_TIMEOUT_MS: Final = 3_600_000


def _claude_directory(places: Places) -> Path:
    return places.named("CLAUDE_CONFIG_DIR", places.home / ".claude")


def _claude_files(facts: Facts, places: Places) -> Sequence[FileSettings]:
    values: dict[Place, Any] = {("env", name): value for name, value in _variables(facts).items()}
    if facts.needs_key:
        values["apiKeyHelper",] = f"printenv {KEY_VARIABLE}"
    return [FileSettings(_claude_directory(places) / "settings.json", "json", values)]


def _variables(facts: Facts) -> dict[str, str]:
    main, small = facts.model.name, facts.small.name
    found = {
        "ANTHROPIC_BASE_URL": facts.url,
        "ANTHROPIC_MODEL": main,
        "ANTHROPIC_DEFAULT_OPUS_MODEL": main,
        "ANTHROPIC_DEFAULT_SONNET_MODEL": main,
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": small,
        "ANTHROPIC_SMALL_FAST_MODEL": small,  # the name in older versions
        "CLAUDE_CODE_SUBAGENT_MODEL": main,
        "API_TIMEOUT_MS": str(_TIMEOUT_MS),
        # Otherwise a line before the system prompt differs each time, so no prompt is found cached.
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }
    if not facts.needs_key:
        found["ANTHROPIC_AUTH_TOKEN"] = NO_KEY
    if facts.model.context_tokens:
        found["CLAUDE_CODE_AUTO_COMPACT_WINDOW"] = str(facts.model.context_tokens)
    if facts.certificate:
        found["NODE_EXTRA_CA_CERTS"] = str(facts.certificate)
    return found


# A long prompt on a slow machine sends nothing for a while.
_IDLE_MS: Final = 3_600_000


def _codex_directory(places: Places) -> Path:
    return places.named("CODEX_HOME", places.home / ".codex")


def _codex_files(facts: Facts, places: Places) -> Sequence[FileSettings]:
    provider = {
        "name": "llama-corral",
        "base_url": facts.api,
        "wire_api": "responses",
        "stream_idle_timeout_ms": _IDLE_MS,
    }
    if facts.needs_key:
        provider["env_key"] = KEY_VARIABLE
    values: dict[Place, Any] = {("model",): facts.model.name, ("model_provider",): "corral"}
    if facts.model.context_tokens:
        values["model_context_window",] = facts.model.context_tokens
    values["model_providers", "corral"] = provider
    return [FileSettings(_codex_directory(places) / "config.toml", "toml", values)]


def _continue_dev_directory(places: Places) -> Path:
    return places.named("CONTINUE_GLOBAL_DIR", places.home / ".continue")


def _continue_dev_files(facts: Facts, places: Places) -> Sequence[FileSettings]:
    values: dict[Place, Any] = {
        ("models", ("name", _title(model))): _continue_dev_model(model, facts)
        for model in facts.models
    }
    required: dict[Place, Any] = {("name",): "Local", ("version",): "0.0.1", ("schema",): "v1"}
    return [FileSettings(_continue_dev_directory(places) / "config.yaml", "yaml", values, required)]


def _continue_dev_model(model: ServedModel, facts: Facts) -> dict[str, Any]:
    found: dict[str, Any] = {
        "name": _title(model),
        "provider": "openai",
        "model": model.name,
        "apiBase": facts.api,
        "apiKey": f"${{{{ secrets.{KEY_VARIABLE} }}}}" if facts.needs_key else NO_KEY,
        "roles": ["chat", "edit", "apply"],
        "capabilities": ["tool_use", *(["image_input"] if model.sees_images else [])],
    }
    if model.context_tokens:
        found["defaultCompletionOptions"] = {"contextLength": model.context_tokens}
    if facts.certificate:
        found["requestOptions"] = {"caBundlePath": str(facts.certificate)}
    return found


def _title(model: ServedModel) -> str:
    return f"{model.name} (llama-corral)"


def _llm_directory(places: Places) -> Path:
    return places.named("LLM_USER_PATH", places.config / "io.datasette.llm")


def _llm_files(facts: Facts, places: Places) -> Sequence[FileSettings]:
    values: dict[Place, Any] = {
        (("model_id", _id(model)),): _llm_model(model, facts) for model in facts.models
    }
    return [FileSettings(_llm_directory(places) / "extra-openai-models.yaml", "yaml", values)]


def _llm_model(model: ServedModel, facts: Facts) -> dict[str, Any]:
    found: dict[str, Any] = {
        "model_id": _id(model),
        "model_name": model.name,
        "api_base": facts.api,
        "can_stream": True,
        "supports_schema": True,
        "supports_tools": True,
        "vision": model.sees_images,
    }
    return {**found, "api_key_name": "openai"} if facts.needs_key else found


def _id(model: ServedModel) -> str:
    return f"corral/{model.name}"


_FILE: Final = "open-webui.env"


def _open_webui_files(facts: Facts, places: Places) -> Sequence[FileSettings]:
    variables = {
        "OPENAI_API_BASE_URL": facts.api,
        "ENABLE_OPENAI_API": "true",
        "ENABLE_OLLAMA_API": "false",
        "DEFAULT_MODELS": facts.model.name,
        "TASK_MODEL_EXTERNAL": facts.small.name,
    }
    if not facts.needs_key:
        variables["OPENAI_API_KEY"] = NO_KEY
    if facts.certificate:
        variables["SSL_CERT_FILE"] = str(facts.certificate)
    values: dict[Place, Any] = {(name,): value for name, value in variables.items()}
    return [FileSettings(places.corral / _FILE, "env", values)]


# Of the context, what an answer may take.
_ANSWER_SHARE: Final = 4


def _opencode_directory(places: Places) -> Path:
    return places.config / "opencode"


def _path(places: Places) -> Path:
    if given := places.environ.get("OPENCODE_CONFIG"):
        return Path(given)
    commented = _opencode_directory(places) / "opencode.jsonc"
    return commented if commented.exists() else _opencode_directory(places) / "opencode.json"


def _opencode_files(facts: Facts, places: Places) -> Sequence[FileSettings]:
    key = f"{{env:{KEY_VARIABLE}}}" if facts.needs_key else NO_KEY
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "llama-corral",
        "options": {"baseURL": facts.api, "apiKey": key},
        "models": {model.name: _opencode_model(model) for model in facts.models},
    }
    values: dict[Place, Any] = {
        ("provider", "corral"): provider,
        ("model",): f"corral/{facts.model.name}",
        ("small_model",): f"corral/{facts.small.name}",
    }
    defaults: dict[Place, Any] = {("$schema",): "https://opencode.ai/config.json"}
    return [FileSettings(_path(places), "json", values, defaults)]


def _opencode_model(model: ServedModel) -> dict[str, Any]:
    found: dict[str, Any] = {"name": model.name, "tool_call": True}
    if tokens := model.context_tokens:
        found["limit"] = {"context": tokens, "output": tokens // _ANSWER_SHARE}
    if model.sees_images:
        found |= {
            "attachment": True,
            "modalities": {"input": ["text", "image"], "output": ["text"]},
        }
    return found


# It wants a figure for each model.
_CONTEXT_TOKENS: Final = 32_768


def _zed_files(facts: Facts, places: Places) -> Sequence[FileSettings]:
    provider = {
        "api_url": facts.api,
        "available_models": [_zed_model(model) for model in facts.models],
    }
    values: dict[Place, Any] = {
        ("language_models", "openai_compatible", "corral"): provider,
        ("agent", "default_model"): {"provider": "corral", "model": facts.model.name},
    }
    return [FileSettings(places.config / "zed" / "settings.json", "json", values)]


def _zed_model(model: ServedModel) -> dict[str, Any]:
    able = {"tools": True, "images": model.sees_images}
    able |= {"parallel_tool_calls": False, "prompt_cache_key": False}
    return {
        "name": model.name,
        "display_name": model.name,
        "max_tokens": model.context_tokens or _CONTEXT_TOKENS,
        "capabilities": able,
    }


CLIENTS: Final[Sequence[ClientProgram]] = (
    ClientProgram(
        name="claude",
        title="Claude Code",
        api="/v1/messages",
        directory=_claude_directory,
        files=_claude_files,
        run=lambda _: "claude",
        ca_variable="NODE_EXTRA_CA_CERTS",
        writes_ca=True,
        context_least=16_384,
        agent="claude-cli",
        prompt_rules=("move:header", "move:date", "move:path"),
    ),
    ClientProgram(
        name="codex",
        title="Codex",
        api="/v1/responses",
        directory=_codex_directory,
        files=_codex_files,
        run=lambda _: "codex",
        ca_variable="CODEX_CA_CERTIFICATE",
        context_least=16_384,
    ),
    ClientProgram(
        name="opencode",
        title="opencode",
        directory=_opencode_directory,
        files=_opencode_files,
        run=lambda _: "opencode",
        ca_variable="NODE_EXTRA_CA_CERTS",
        context_least=16_384,
        agent="opencode",
        prompt_rules=("move:date", "move:path"),
    ),
    ClientProgram(
        name="aider",
        title="aider",
        directory=lambda places: places.home,
        files=_aider_files,
        run=lambda _: "aider",
        key_variable="OPENAI_API_KEY",
        ca_variable="SSL_CERT_FILE",
    ),
    ClientProgram(
        name="continue",
        title="Continue",
        programs=("cn",),
        directory=_continue_dev_directory,
        files=_continue_dev_files,
        run=lambda facts: f"choose {_title(facts.model)} in the list of models",
        ca_variable="NODE_EXTRA_CA_CERTS",
        writes_ca=True,
    ),
    ClientProgram(
        name="openwebui",
        title="Open WebUI",
        programs=("open-webui",),
        directory=lambda places: places.corral,
        files=_open_webui_files,
        run=lambda _: f"set -a; . the file {_FILE}; set +a; open-webui serve",
        key_variable="OPENAI_API_KEY",
        ca_variable="SSL_CERT_FILE",
        writes_ca=True,
    ),
    ClientProgram(
        name="zed",
        title="Zed",
        programs=("zed", "zeditor"),
        directory=lambda places: places.config / "zed",
        files=_zed_files,
        run=lambda _: "zed (with CORRAL_API_KEY set to any text where the daemon needs no key)",
        ca_variable="SSL_CERT_FILE",
    ),
    ClientProgram(
        name="llm",
        title="llm",
        directory=_llm_directory,
        files=_llm_files,
        run=lambda facts: f"llm -m {_id(facts.model)} 'Why do llamas hum?'",
        key_variable="OPENAI_API_KEY",
        ca_variable="SSL_CERT_FILE",
    ),
)
