"""Settings of other programs keep their meaning."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from supervisor.errors import SettingsInvalid
from supervisor.settings.import_flags import Converted
from supervisor.settings.import_source import convert, kind_of, render
from supervisor.settings.load import merge

BASE = Path("/base")
CODER = "ggml-org/Qwen2.5-Coder"

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
GROUPS = """\
models:
  big: {cmd: llama-server -m big.gguf}
  code: {cmd: llama-server -m code.gguf}
  embed: {cmd: llama-server -m embed.gguf}
  rank: {cmd: llama-server -m rank.gguf}
  "an other": {cmd: llama-server -m other.gguf}
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
        "proxy": {"listen": "127.0.0.1:9"},
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
        ("--lora a.gguf --lora b.gguf", {"lora": "/base/a.gguf,/base/b.gguf"}),
        ("--flash-attn off", {"flash-attn": "off"}),
        ("-ot exps=CPU -c 4096", {"override-tensor": "exps=CPU", "ctx-size": 4096}),
        ("-ot a=CPU -ot b=CUDA0", {"override-tensor": "a=CPU,b=CUDA0"}),
        ("-fa 1 -ctk q8_0", {"flash-attn": "on", "cache-type-k": "q8_0"}),
        ("--flash-attn -m m.gguf", {"flash-attn": "on"}),
        ("--ctx-size=1 --temp=0.5", {"ctx-size": 1, "temp": 0.5}),
        ("--dry-sequence-breaker --x -s -1", {"dry-sequence-breaker": "--x", "seed": -1}),
        ("--mlock --no-mmap", {"load-mode": "mlock"}),
        ("-p 'a prompt' -n 3", {"p": "a prompt", "predict": 3}),
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


def test_options_that_a_command_cannot_keep_are_listed_apart_from_notes() -> None:
    (model,) = converted("llama-server -m a.gguf --wat 3 -c 10 stray").models
    assert [line.partition(":")[0] for line in model.omitted] == ["--wat 3", "stray"]
    assert [note.partition(":")[0] for note in model.notes] == ["slots"]
    text = render(converted("llama-server -m a.gguf -c 10"))
    assert "# Note: slots: ctx-size is divided among them" in text
    assert "Not taken over" not in text


@pytest.mark.parametrize(
    ("command", "host"),
    [
        ("llama-server -m a.gguf --host 0.0.0.0 --api-key sk-1,sk-2", "0.0.0.0"),  # noqa: S104 (what it says)
        ("llama-server -m a.gguf --host :: --api-key sk-1 --api-key sk-2", "[::]"),
        ("LLAMA_API_KEY=sk-1,sk-2 llama-server -m a.gguf --host 192.168.1.7", "192.168.1.7"),
        ("docker run -p 8080:8080 -e LLAMA_API_KEY=sk-1,sk-2 llama.cpp:server -m a", "0.0.0.0"),  # noqa: S104
    ],
)
def test_an_api_key_goes_to_the_keys_file_and_opens_the_address(command: str, host: str) -> None:
    found = converted(command)
    assert found.tables["proxy"] == {"listen": f"{host}:8080", "api_keys_file": "keys.toml"}
    assert found.keys == ("sk-1", "sk-2")
    assert "sk-1" not in render(found)
    assert "sk-1" not in repr(found)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.7", "llm.example.com"])  # noqa: S104 (no server)
def test_an_address_beyond_this_machine_needs_a_key(host: str) -> None:
    found = converted(f"llama-server -m a.gguf --host {host} --port 9")
    assert found.tables["proxy"] == {"listen": "127.0.0.1:9"}
    assert found.omitted[0].startswith(f"listening on {host}: without an API key")


def test_secrets_are_nowhere_in_the_result() -> None:
    commands = [
        "HF_TOKEN=hf_1 llama-server -m a.gguf --hf-token hf_1 --my-secret hf_1",
        "models:\n  a: {cmd: 'llama-server -m a --api-key hf_1', env: ['LLAMA_API_KEY=hf_1']}\n",
    ]
    for command in commands:
        found = converted(command)
        assert "hf_1" not in render(found)
        assert "hf_1" not in str([(model.omitted, model.notes) for model in found.models])


@pytest.mark.parametrize(
    ("command", "name", "path"),
    [
        ("-hf ggml-org/gemma-GGUF:Q4_0", "gemma", "hf:ggml-org/gemma-GGUF:Q4_0"),
        ("-hf Qwen/Qwen2.5-7B-GGUF", "Qwen2.5-7B", "hf:Qwen/Qwen2.5-7B-GGUF"),
        ("-hfr a/b:Q8_0 -hff b-Q8_0.gguf", "b-Q8_0", "hf:a/b:b-Q8_0.gguf"),
        ("--hf-repo a/b --alias c", "c", "hf:a/b"),
        ("-hf a/b -m c.gguf", "c", "/base/c.gguf"),
        ("--gpt-oss-20b-default -np 1", "gpt-oss-20b", "hf:ggml-org/gpt-oss-20b-GGUF"),
        ("--fim-qwen-7b-default", "Qwen2.5-Coder-7B-Q8_0", f"hf:{CODER}-7B-Q8_0-GGUF"),
    ],
)
def test_a_model_of_the_hub(command: str, name: str, path: str) -> None:
    ((found, table),) = models(f"llama-server {command} -np 1").items()
    assert (found, table["path"]) == (name, path)
    assert table["flags"]["parallel"] == 1
    if path.startswith("hf:"):  # llama-server names it so
        assert table["aliases"] == [path.removeprefix("hf:")]


def test_an_engine_that_sleeps_becomes_a_model_that_is_unloaded() -> None:
    for option, expected in (("600", 600), ("-1", None), ("0", None), ("9" * 5000, None)):
        (table,) = models(f"llama-server -m a.gguf -np 1 --sleep-idle-seconds {option}").values()
        assert table.get("ttl_s") == expected
        assert table["flags"] == {"parallel": 1}


def test_a_draft_of_the_hub() -> None:
    command = "llama-server -m a.gguf -hfd org/Small-GGUF:Q8_0 --draft-max 8"
    (made,) = converted(command).models
    assert made.table["draft"] == "hf:org/Small-GGUF:Q8_0"
    assert made.omitted == ()
    (spec,) = converted("llama-server --fim-qwen-7b-spec").models
    assert spec.table["draft"] == "hf:ggml-org/Qwen2.5-Coder-0.5B-Q8_0-GGUF"


def test_paths_of_a_command_become_absolute() -> None:
    options = (
        "-m m.gguf -md d.gguf --mmproj p/p.gguf --lora a.gguf,/b.gguf --lora-scaled c.gguf 0.5"
    )
    assert models(f"llama-server {options}")["m"]["flags"] == {
        "spec-draft-model": "/base/d.gguf",
        "mmproj": "/base/p/p.gguf",
        "lora": "/base/a.gguf,/b.gguf",
        "lora-scaled": "/base/c.gguf:0.5",
    }


def test_the_paths_of_a_container_are_those_of_its_volumes() -> None:
    found = converted(
        "sudo docker run -d --gpus all -v /srv/models:/models:ro -v cache:/root/.cache "
        "-p 127.0.0.1:9000:8080 --name llama-server -e LLAMA_ARG_CTX_SIZE=512 "
        "ghcr.io/ggml-org/llama.cpp:server-cuda -m /models/a.gguf --lora /l.gguf --host 0.0.0.0"
    )
    (model,) = found.models
    assert model.table == {
        "path": "/srv/models/a.gguf",
        "flags": {"ctx-size": 512, "lora": "/l.gguf"},
    }
    assert found.tables == {"proxy": {"listen": "127.0.0.1:9000"}}
    assert "/models/a.gguf is a path in the container, and /srv/models/a.gguf here" in model.notes
    assert "/l.gguf is a path in the container; set it to the file here" in model.notes
    assert any("not the image ghcr.io" in note for note in model.notes)


SCRIPT = """\
#!/bin/bash
# don't change
MODEL="/m/a b.gguf"
OPTIONS='-ngl 99 -np 2'  # both
cd /srv/llama.cpp && CUDA_VISIBLE_DEVICES=0 taskset -c 0-7 \\
  ./build/bin/llama-server -m "$MODEL" $OPTIONS -c ${CTX:-8192} "$@" > log 2>&1 &  # go
llama-server -m b.gguf --chat-template-kwargs '{"a": "b; c"}' 2>/dev/null | tee x; \\
  llama serve -m b.gguf
"""


def test_a_script() -> None:
    found = converted(SCRIPT)
    made = tomllib.loads(render(found))
    assert made["engine"] == "/srv/llama.cpp/build/bin/llama-server"
    assert made["models"] == {
        "a-b": {
            "path": "/m/a b.gguf",
            "flags": {"gpu-layers": 99, "parallel": 2, "ctx-size": 8192},
        },
        "b": {
            "path": "/srv/llama.cpp/b.gguf",
            "flags": {"chat-template-kwargs": '{"a": "b; c"}'},
        },
        "b-2": {"path": "/srv/llama.cpp/b.gguf"},
    }
    assert [line.partition(":")[0] for line in found.models[0].omitted] == [
        "CUDA_VISIBLE_DEVICES",
        "taskset -c 0-7",
    ]


def test_llama_swap() -> None:
    made = tomllib.loads(render(converted(LLAMA_SWAP)))
    assert made["supervisor"] == {"load_timeout_s": 400}
    assert made["nodes"] == {"far": {"url": "http://192.168.1.23", "models": ["m"]}}
    assert made["models"] == {
        "big": {
            "path": "/base/path/to/big.gguf",
            "aliases": ["gpt-4o-mini"],
            "engine": "/opt/llama-server",
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
            "engine": "/opt/llama-server",
            "preload": True,
            "ttl_s": 30,
            "pinned": True,
            "flags": {"gpu-layers": 99},
        },
    }
    found = converted(LLAMA_SWAP)
    assert "other: its cmd does not start llama-server" in found.omitted
    assert "sk-1" not in render(found)
    assert any("CUDA_VISIBLE_DEVICES" in note for note in found.models[0].omitted)


def test_the_keys_of_llama_swap_are_taken_over() -> None:
    found = converted("apiKeys: [sk-2, '${env.NONE}']\n" + LLAMA_SWAP)
    assert found.keys == ("sk-2",)
    assert found.tables["proxy"]["api_keys_file"] == "keys.toml"


def test_a_name_of_llama_swap_that_models_cannot_have() -> None:
    assert list(models("models:\n  'Qwen 3 (8B)': {cmd: llama-server -hf a/b}\n")) == ["Qwen-3-8B"]


def test_macros_that_grow_without_end_are_refused() -> None:
    macros = "".join(
        f"  m{number}: '${{m{number - 1}}}${{m{number - 1}}}'\n" for number in range(1, 40)
    )
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
        "ggml-org/gemma-GGUF:Q4_K_M": {
            "path": "hf:ggml-org/gemma-GGUF:Q4_K_M",
            "preload": False,
            "flags": {"ctx-size": 8192, "gpu-layers": 99, "jinja": True},
        },
    }


def test_a_modelfile() -> None:
    assert models(MODELFILE) == {
        "m": {
            "path": "/base/m.gguf",
            "batching": {"max_context_length": 4096},
            "variants": {"ollama": {"stop": ["<|end|>", "###"]}},
            "flags": {"lora": "/base/a.gguf", "temp": 0.7},
        }
    }
    (model,) = converted(MODELFILE).models
    assert [line.split(":")[0] for line in model.omitted] == ["no equivalent", "TEMPLATE", "SYSTEM"]
    assert [note.split(":")[0] for note in model.notes] == ["stop counts for requests of NAME"]


@pytest.mark.parametrize(
    ("source", "name", "path"),
    [
        ("llama3.2", "llama3.2", "ollama:llama3.2"),
        ("qwen3:8b", "qwen3:8b", "ollama:qwen3:8b"),
        ("me/mine:v1", "me-mine:v1", "ollama:me/mine:v1"),
        ("hf.co/a/b-GGUF:Q8_0", "b", "hf:a/b-GGUF:Q8_0"),
        ("./b.gguf", "b", "/base/b.gguf"),
    ],
)
def test_the_source_of_a_modelfile(source: str, name: str, path: str) -> None:
    ((found, table),) = models(f"FROM {source}\nPARAMETER num_ctx 10\n").items()
    assert (found, table["path"]) == (name, path)
    assert table["batching"] == {"max_context_length": 10}


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


def test_a_unit_of_systemd() -> None:
    unit = "[Service]\nUser=llm\nExecStart=-/usr/bin/llama-server -m /m/a.gguf \\\n  -np 2\n"
    made = tomllib.loads(render(converted(unit)))
    assert made["engine"] == "/usr/bin/llama-server"
    assert made["models"] == {"a": {"path": "/m/a.gguf", "flags": {"parallel": 2}}}


COMPOSE = """
services:
  chat:
    image: ghcr.io/ggml-org/llama.cpp:server-cuda
    ports: ["9000:8080"]
    volumes:
      - ./models:/m
      - {type: bind, source: /srv/more, target: /more}
    environment: {LLAMA_ARG_N_PARALLEL: 2}
    command: >
      -m /m/a.gguf --host 0.0.0.0 --api-key $KEY -c ${CTX:-4096}
  vectors:
    image: local
    network_mode: host
    entrypoint: [/app/llama-server]
    command: ["--model", "/more/b.gguf", "--embeddings"]
    volumes: [/srv/more:/more]
  database: {image: postgres, volumes: [/srv/llama:/data]}
  other: {image: ollama/ollama}
"""


def test_services_of_a_compose_file_are_models() -> None:
    assert kind_of(COMPOSE) == "compose"
    made = convert(COMPOSE, "compose", Path("/home/llm"), {"KEY": "secret-1"})
    document = made.document()
    assert {name: table["path"] for name, table in document["models"].items()} == {
        "a": "/home/llm/models/a.gguf",
        "b": "/srv/more/b.gguf",
    }
    assert document["models"]["a"]["flags"] == {"parallel": 2, "ctx-size": 4096}
    assert document["models"]["b"]["flags"] == {"embedding": True}
    assert document["proxy"]["listen"] == "0.0.0.0:9000"
    assert made.keys == ("secret-1",)
    assert made.omitted == (
        "service database: it is not llama-server",
        "service other: it is not llama-server",
    )


@pytest.mark.parametrize("text", ["services: []", "services: {a: {image: postgres}}", "services:"])
def test_a_compose_file_without_the_engine(text: str) -> None:
    with pytest.raises(SettingsInvalid, match="no service of this compose file is llama-server"):
        convert(text, "compose", Path("/"), {})


def test_a_file_of_api_keys_is_read(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("first-key\n\nsecond-key\n", "utf-8")
    line = "llama-server -m a.gguf --host 0.0.0.0 --api-key-file "
    made = convert(line + "keys", "command", tmp_path, {})
    assert made.keys == ("first-key", "second-key")
    assert made.document()["proxy"]["listen"] == "0.0.0.0:8080"
    missing = convert(line + "none", "command", tmp_path, {})
    assert missing.keys == ()
    assert missing.document()["proxy"]["listen"] == "127.0.0.1:8080"
    assert "cannot be read" in "\n".join(missing.models[0].omitted)


def test_a_directory_of_models_is_served_as_it_is() -> None:
    made = convert("llama-server --models-dir models -c 4096", "command", Path("/home/llm"), {})
    assert made.models == ()
    assert made.document() == {"models_dir": "/home/llm/models", "serve_found": True}
    assert "ctx-size: of all models" in made.omitted[0]
    beside = convert("llama-server --models-dir models -m a.gguf", "command", Path("/"), {})
    assert "models_dir" not in beside.document()


def test_the_url_of_a_model() -> None:
    hub = "https://huggingface.co/org/m-GGUF/resolve/main/m-Q8_0.gguf"
    made = convert(f"llama-server --model-url {hub} -c 4096", "command", Path("/"), {})
    assert [table["path"] for table in made.document()["models"].values()] == [
        "hf:org/m-GGUF:m-Q8_0.gguf"
    ]
    line = "llama-server -mu https://me:geheim@files.test/x.gguf?k=geheim"
    (omitted,) = convert(line, "command", Path("/"), {}).omitted
    assert "corral model get https://files.test/x.gguf" in omitted
    assert "geheim" not in omitted


def test_a_text_of_no_kind() -> None:
    with pytest.raises(SettingsInvalid, match="this is not a llama-server command"):
        kind_of("hello")


@pytest.mark.parametrize(
    ("text", "groups", "pinned"),
    [
        (
            "groups: {g: {members: [big, code], exclusive: false}}",
            {"g": (["big", "code"], "1")},
            [],
        ),
        (
            (
                "groups: {g: {members: [big, code]}, always: {members: [embed, rank], swap: false, "
                "persistent: true, exclusive: false}}"
            ),
            {"g": (["big", "code"], "1 exclusive"), "always": (["embed", "rank"], "together")},
            ["embed", "rank"],
        ),
        (
            "routing: {router: {settings: {groups: {a b: {members: [an other], swap: true}}}}}",
            {"a-b": (["an-other"], "exclusive")},
            [],
        ),
        # All models outside of the group are persistent.
        (
            (
                "groups: {g: {members: [big, code, an other]}, always: {members: [embed, rank], "
                "swap: false, persistent: true, exclusive: false}}"
            ),
            {"g": (["big", "code", "an-other"], "1"), "always": (["embed", "rank"], "together")},
            ["embed", "rank"],
        ),
        # Its own members still replace each other.
        (
            "groups: {g: {members: [big, code], persistent: true, exclusive: false}}",
            {"g": (["big", "code"], "1")},
            [],
        ),
        # It would keep all other models out for ever.
        ("groups: {g: {members: [big], persistent: true}}", {}, ["big"]),
        ("groups: {g: {members: [big, none], exclusive: false}}", {}, []),
        (
            "matrix: {vars: {o: an other}, sets: {llms: big | code, all: +llms & (embed | o)}}",
            {
                "matrix-1": (["big", "code"], "1"),
                "matrix-2": (["embed", "an-other"], "1"),
                "matrix-alone": (["rank"], "exclusive"),
            },
            [],
        ),
        (
            "matrix: {sets: {s: big | code | embed}}",
            {
                "matrix-1": (["big", "code", "embed"], "1"),
                "matrix-alone": (["rank", "an-other"], "exclusive 1"),
            },
            [],
        ),
        ("matrix: {sets: {s: big & code & embed & rank & o}}", {"matrix-alone": None}, []),
    ],
)
def test_groups_and_matrix_of_llama_swap(
    text: str, groups: dict[str, tuple[list[str], str] | None], pinned: list[str]
) -> None:
    made = tomllib.loads(render(convert(GROUPS + text, "llama-swap", BASE, {})))
    found = {
        name: (
            group["models"],
            " ".join(
                str(value) if key == "max_loaded" else key
                for key, value in group.items()
                if key != "models"
            ),
        )
        for name, group in made.get("groups", {}).items()
    }
    assert found == {name: group or (["an-other"], "exclusive") for name, group in groups.items()}
    assert [name for name, model in made["models"].items() if model.get("pinned")] == pinned
    merge(made, None)  # no rule contradicts another


@pytest.mark.parametrize("is_whole", [False, True])
def test_models_in_no_group_of_llama_swap_are_noted(*, is_whole: bool) -> None:
    members = "big, code, embed, rank, an other" if is_whole else "big, code"
    made = convert(f"{GROUPS}groups: {{g: {{members: [{members}]}}}}", "llama-swap", BASE, {})
    assert any("in no group" in note for note in made.notes) is not is_whole


@pytest.mark.parametrize("expression", ["", "big &", "big code", "big - code", "+s", "f(big)"])
def test_a_matrix_that_is_no_expression_is_refused(expression: str) -> None:
    with pytest.raises(SettingsInvalid, match=r"matrix\.sets\.s"):
        convert(f"{GROUPS}matrix: {{sets: {{s: '{expression}'}}}}", "llama-swap", BASE, {})
