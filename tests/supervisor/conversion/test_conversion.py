"""Settings of other programs say here what they said there."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from supervisor.conversion.converted import Converted
from supervisor.conversion.source import convert, kind_of
from supervisor.conversion.text import render
from supervisor.errors import SettingsInvalid

BASE = Path("/base")

LLAMA_SWAP = """\
healthCheckTimeout: 400
globalTTL: 30
macros:
  server: "/opt/llama-server --port ${PORT}"
  ctx: 4096
  common: "--ctx-size ${ctx} -np 2"
models:
  big:
    macros: {ctx: 16384}
    cmd: |
      ${server}   # of our own build
      --model path/to/big.gguf ${common}
      --temp 0.7
    ttl: 60
    aliases: [gpt-4o-mini]
    env: ["CUDA_VISIBLE_DEVICES=1"]
    filters:
      stripParams: "top_p"
      setParamsByID:
        "${MODEL_ID}:high": {chat_template_kwargs: {reasoning_effort: high}}
  small: {cmd: "${server} -m ${env.MODELS}/s.gguf -ngl 99", ttl: -1}
  other: {cmd: "docker run --rm ghcr.io/x"}
hooks: {on_startup: {preload: [small]}}
peers:
  far: {proxy: "http://192.168.1.23", models: [m], apiKey: sk-1}
groups:
  always: {persistent: true, members: [small]}
"""
PRESET = """\
version = 1

[*]
c = 8192
n-gpu-layers = 99

[one]
model = one.gguf
LLAMA_ARG_N_PARALLEL = 2
mmap = off
load-on-startup = on

[two]
model = /m/two.gguf
c = 2048
stop-timeout = 10

[ggml-org/gemma-GGUF:Q4_K_M]
jinja = true
"""
MODELFILE = """\
# mine
FROM ./m.gguf
ADAPTER a.gguf
PARAMETER num_ctx 4096
PARAMETER temperature 0.7
PARAMETER stop "<|end|>"
PARAMETER stop "###"
PARAMETER penalize_newline true
TEMPLATE \"\"\"{{ .Prompt }}
PARAMETER temperature 3
\"\"\"
SYSTEM You are a llama.
"""


def converted(text: str) -> Converted:
    return convert(text, kind_of(text), BASE, {"MODELS": "/models"})


def models(text: str) -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads(render(converted(text)))["models"]
    return found


def test_a_pasted_command() -> None:
    text = (
        "CUDA_VISIBLE_DEVICES=0 /opt/llama-server -m m.gguf -c 8192 -ngl 99 -fa --no-mmap \\\n"
        " -ctk q8_0 -np 2 --alias 'chat,large' --host 0.0.0.0 --port 9 --draft-max 8 --seed -1"
    )
    made = tomllib.loads(render(converted(text)))
    assert made == {
        "engine": "/opt/llama-server",
        "proxy": {"listen": "0.0.0.0:9"},
        "models": {
            "chat": {
                "path": "/base/m.gguf",
                "aliases": ["large"],
                "flags": {
                    "ctx-size": 8192,
                    "gpu-layers": 99,
                    "flash-attn": "on",
                    "load-mode": "none",
                    "cache-type-k": "q8_0",
                    "parallel": 2,
                    "spec-draft-n-max": 8,
                    "seed": -1,
                },
            }
        },
    }


@pytest.mark.parametrize(
    ("options", "flags"),
    [
        ("--lora a.gguf --lora b.gguf", {"lora": "a.gguf,b.gguf"}),
        ("--flash-attn off", {"flash-attn": "off"}),
        ("-fa -np 1", {"flash-attn": "on", "parallel": 1}),
        ("-c 1 -c 2 -np 1", {"ctx-size": 2, "parallel": 1}),
        ("--chat_template chatml", {"chat-template": "chatml"}),
    ],
)
def test_options_as_llama_server_reads_them(options: str, flags: dict[str, Any]) -> None:
    assert models(f"llama-server -m m.gguf {options}")["m"]["flags"] == flags


def test_the_unified_program_and_wrappers_are_llama_server_too() -> None:
    for program in ("llama serve", "nice -n 5 ./llama-server", "/x/llama-server.exe"):
        assert models(f"{program} -m /m/a.gguf -np 2")["a"]["flags"] == {"parallel": 2}


def test_what_a_command_cannot_keep_is_named_without_secrets() -> None:
    (model,) = converted("llama-server -m a.gguf --api-key sk-1 --wat 3 -c 10 stray").models
    assert [one.partition(":")[0] for one in model.notes] == [
        "--api-key",
        "--wat 3",
        "stray",
        "slots",
    ]
    assert "sk-1" not in render(converted("llama-server -m a.gguf --api-key sk-1"))


def test_a_model_of_the_hub_has_to_be_fetched() -> None:
    found = converted("llama-server -hf ggml-org/gemma:Q4_0")
    assert not found.models
    assert "corral model get ggml-org/gemma:Q4_0" in found.notes[0]


def test_llama_swap() -> None:
    made = tomllib.loads(render(converted(LLAMA_SWAP)))
    assert made["supervisor"] == {"load_timeout_s": 400}
    assert made["nodes"] == {"far": {"url": "http://192.168.1.23", "models": ["m"]}}
    assert made["models"] == {
        "big": {
            "path": "/base/path/to/big.gguf",
            "aliases": ["gpt-4o-mini"],
            "preload": False,
            "ttl_s": 60,
            "variants": {
                "high": {
                    "set": {"chat_template_kwargs": {"reasoning_effort": "high"}},
                    "strip": ["top_p"],
                }
            },
            "flags": {"ctx-size": 16384, "parallel": 2, "temp": 0.7},
        },
        "small": {
            "path": "/models/s.gguf",
            "preload": True,
            "ttl_s": 30,
            "pinned": True,
            "flags": {"gpu-layers": 99},
        },
    }
    found = converted(LLAMA_SWAP)
    assert "other: its cmd does not start llama-server" in found.notes
    assert "sk-1" not in render(found)
    assert any("CUDA_VISIBLE_DEVICES=1" in note for note in found.models[0].notes)


def test_macros_that_grow_without_end_are_refused() -> None:
    macros = "".join(f"  m{one}: '${{m{one - 1}}}${{m{one - 1}}}'\n" for one in range(1, 40))
    with pytest.raises(SettingsInvalid, match="makes a text longer than"):
        converted(f"macros:\n  m0: x\n{macros}models:\n  a: {{cmd: '${{m39}}'}}\n")


def test_a_router_preset() -> None:
    assert models(PRESET) == {
        "one": {
            "path": "/base/one.gguf",
            "preload": True,
            "flags": {"ctx-size": 8192, "gpu-layers": 99, "parallel": 2, "load-mode": "none"},
        },
        "two": {
            "path": "/m/two.gguf",
            "preload": False,
            "flags": {"ctx-size": 2048, "gpu-layers": 99},
        },
    }
    assert "corral model get ggml-org/gemma-GGUF:Q4_K_M" in converted(PRESET).notes[0]


def test_a_modelfile() -> None:
    assert models(MODELFILE) == {
        "m": {
            "path": "/base/m.gguf",
            "batching": {"max_context_length": 4096},
            "variants": {"ollama": {"stop": ["<|end|>", "###"]}},
            "flags": {"lora": "/base/a.gguf", "temp": 0.7},
        }
    }
    named = [one.split(":")[0] for one in converted(MODELFILE).models[0].notes]
    assert named == ["no equivalent", "TEMPLATE", "SYSTEM", "stop counts for requests of NAME"]


def test_a_model_that_only_ollama_knows_has_no_file() -> None:
    found = converted("FROM llama3.2\nPARAMETER num_ctx 10\n")
    assert not found.models
    assert "corral model list" in found.notes[0]


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        ("models: [", "llama-swap", "this is not YAML"),
        ("- a\n", "llama-swap", "there is no models"),
        ("[a\n", "router", "this is not an INI file"),
        ("SYSTEM x", "modelfile", "it has no FROM"),
        ("vllm serve x", "command", "vllm is not llama-server"),
        ("llama-server -m 'x", "command", "the command cannot be read"),
    ],
)
def test_what_is_wrong_is_said(text: str, kind: Any, message: str) -> None:
    with pytest.raises(SettingsInvalid, match=message):
        convert(text, kind, BASE, {})


def test_a_text_of_no_kind() -> None:
    with pytest.raises(SettingsInvalid, match="this is not a llama-server command"):
        kind_of("hello")
