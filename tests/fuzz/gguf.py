"""Mutated GGUF headers: counts, lengths, types, hyper-parameters, bytes.

Source: docs/gguf.md of ggml.
"""

from __future__ import annotations

import itertools
from random import Random
from typing import Final

from fuzz.atoms import ARRAY, HUGE, NAMES, STRING, UINT32, Atom, Number, pair, string, tensors
from fuzz.case import Case
from fuzz.mutate import changed_bytes

_ARCHITECTURES: Final = (
    *(
        "llama",
        "llama",
        "llama",
        "gemma3",
        "qwen2moe",
        "mamba",
        "rwkv6",
        "bert",
        "deepseek2",
        "jamba",
    ),
    *("clip", "nonsense", "", "\x1b[31mred", "a" * 300, "a.b", "gpt-oss", "nomic-bert", "t5"),
)
_KEYS: Final = (
    *("block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size"),
    *(
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
        "attention.value_length",
    ),
    *(
        "attention.sliding_window",
        "attention.sliding_window_pattern",
        "expert_count",
        "expert_used_count",
    ),
    *(
        "expert_feed_forward_length",
        "ssm.conv_kernel",
        "ssm.inner_size",
        "ssm.state_size",
        "ssm.group_count",
    ),
    *("ssm.time_step_rank", "wkv.head_size", "attention.kv_lora_rank", "rope.dimension_count"),
    *(
        "attention.shared_kv_layers",
        "leading_dense_block_count",
        "expert_shared_count",
        "pooling_type",
    ),
    *("nextn_predict_layers", "full_attention_interval", "attention.causal", "time_mix_extra_dim"),
)


_ONE: Final = (Number("<I", UINT32), Number("<I", 1))
_TOKENS: Final = (
    *string("tokenizer.ggml.tokens"),
    *(Number("<I", ARRAY), Number("<I", STRING), Number("<Q", 3)),
    *(*string("a"), *string("b"), *string("c")),
)


def data(seed: int, number: int) -> bytes:
    random = Random(f"{seed}/gguf/{number}")
    atoms = _header(random)
    places = [at for at, atom in enumerate(atoms) if isinstance(atom, Number)]
    for at in random.sample(places, min(len(places), random.choice((0, 1, 1, 1, 2, 3)))):
        old = atoms[at]
        assert isinstance(old, Number)
        value = random.choice((*HUGE, random.getrandbits(64), random.randrange(14)))
        form = old.form if old.form in {"<I", "<Q"} else "<I"
        atoms[at] = Number(form, value)
    whole = b"".join(atom.packed() if isinstance(atom, Number) else atom for atom in atoms)
    if random.random() < 0.2:
        whole = whole[: random.randrange(len(whole) + 1)]
    if random.random() < 0.2:
        whole = changed_bytes(random, whole, (b"GGUF", b"\xff" * 8, b"\0" * 8, b"\xff" * 4))
    if random.random() < 0.3:
        whole += bytes(random.choice((1, 1000, 300_000)))
    return whole


def _header(random: Random) -> list[Atom]:
    architecture = random.choice(_ARCHITECTURES)
    texts = {"general.name": random.choice(NAMES), "tokenizer.chat_template": random.choice(NAMES)}
    if random.random() < 0.95:
        texts["general.architecture"] = architecture
    own = [f"{architecture}.{key}" for key in _KEYS if random.random() < 0.5]
    more = ("general.file_type", "general.alignment", "split.count", "split.no")
    numbers = [key for key in more if random.random() < 0.4]
    weights = tensors(random)
    return [
        b"GGUF",
        Number("<I", random.choice((3, 3, 3, 2, 1, 9))),
        Number("<Q", len(weights)),
        Number("<Q", len(texts) + len(own) + len(numbers) + 1),
        *itertools.chain(
            *([*string(key), Number("<I", STRING), *string(texts[key])] for key in texts)
        ),
        *itertools.chain(*(pair(random, key) for key in own)),
        *itertools.chain(*([*string(key), *_ONE] for key in numbers)),
        *_TOKENS,
        *itertools.chain(*weights),
    ]


def case(seed: int, number: int) -> Case:
    random = Random(f"{seed}/gguf/{number}/case")
    settings = random.choice(("model", "draft", "auto"))
    commands = (
        ("model", "show", "{home}/fuzzed.gguf"),
        ("plan", "{home}/fuzzed.gguf"),
        ("config", "check", "--config", f"{{home}}/{settings}.toml"),
    )
    made_by = "write"
    if random.random() < 0.02:
        made_by = random.choice(("fifo", "directory", "link", "device", "sparse"))
    return Case("fuzzed.gguf", data(seed, number), commands, made_by)
