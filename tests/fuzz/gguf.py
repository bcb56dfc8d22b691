"""GGUF headers with changes: counts, lengths, types, hyper-parameters, bytes.

Source: docs/gguf.md of ggml.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Final

from fuzz.case import Case
from fuzz.mutate import changed_bytes

_UINT32, _FLOAT32, _BOOL, _STRING, _ARRAY, _UINT64 = 4, 6, 7, 8, 9, 10
_FORMATS: Final = {_UINT32: "<I", _FLOAT32: "<f", _BOOL: "<?", _UINT64: "<Q"}
_HUGE: Final = (
    *(0, 1, 2, 31, 255, 1023, 1024, 1025, 65_535, 10**6, 10**7, 16_777_215, 16_777_216, 16_777_217),
    *(10**8, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**40, 2**53, 2**63 - 1, 2**63, 2**64 - 1),
)
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
_NAMES: Final = (
    "tiny",
    "\x1b]0;title\x07",
    "a\nb",
    "\u202eevil",
    "",
    "x" * 100_000,
    "\ud7ff\x00",
    "🦙",
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


@dataclass(frozen=True)
class _Number:
    """A number of the header that may be changed on its own."""

    form: str
    value: Any

    def packed(self) -> bytes:
        size = struct.calcsize(self.form) * 8
        value = self.value
        if isinstance(value, int) and self.form in {"<I", "<Q"}:
            value %= 1 << size
        return struct.pack(self.form, value)


_Atom = _Number | bytes


def data(seed: int, number: int) -> bytes:
    """Return the file of a number."""
    random = Random(f"{seed}/gguf/{number}")
    atoms = _header(random)
    places = [at for at, atom in enumerate(atoms) if isinstance(atom, _Number)]
    for at in random.sample(places, min(len(places), random.choice((0, 1, 1, 1, 2, 3)))):
        old = atoms[at]
        assert isinstance(old, _Number)
        value = random.choice((*_HUGE, random.getrandbits(64), random.randrange(14)))
        form = old.form if old.form in {"<I", "<Q"} else "<I"
        atoms[at] = _Number(form, value)
    whole = b"".join(atom.packed() if isinstance(atom, _Number) else atom for atom in atoms)
    if random.random() < 0.2:
        whole = whole[: random.randrange(len(whole) + 1)]
    if random.random() < 0.2:
        whole = changed_bytes(random, whole, (b"GGUF", b"\xff" * 8, b"\0" * 8, b"\xff" * 4))
    if random.random() < 0.3:
        whole += bytes(random.choice((1, 1000, 300_000)))
    return whole


def _header(random: Random) -> list[_Atom]:
    architecture = random.choice(_ARCHITECTURES)
    pairs: list[_Atom] = []
    own = [(f"{architecture}.{key}", random) for key in _KEYS if random.random() < 0.5]
    chosen = random.random() < 0.95
    texts = {"general.architecture": architecture} if chosen else {}
    texts |= {"general.name": random.choice(_NAMES), "tokenizer.ggml.model": "llama"}
    texts["tokenizer.chat_template"] = random.choice(_NAMES)
    for key, text in texts.items():
        pairs += [*_string(key), _Number("<I", _STRING), *_string(text)]
    for key, source in own:
        pairs += _pair(source, key)
    tokens: list[_Atom] = [_Number("<I", _ARRAY), _Number("<I", _STRING), _Number("<Q", 3)]
    pairs += [
        *_string("tokenizer.ggml.tokens"),
        *tokens,
        *_string("a"),
        *_string("b"),
        *_string("c"),
    ]
    more = [
        ("general.file_type", 1),
        ("general.alignment", 32),
        ("split.count", 1),
        ("split.no", 0),
    ]
    numbers = [(key, one) for key, one in more if random.random() < 0.4]
    for key, one in numbers:
        pairs += [*_string(key), _Number("<I", _UINT32), _Number("<I", one)]
    count = len(texts) + len(own) + 1 + len(numbers)
    tensors = _tensors(random)
    head: list[_Atom] = [b"GGUF", _Number("<I", random.choice((3, 3, 3, 2, 1, 9)))]
    return [
        *head,
        _Number("<Q", len(tensors)),
        _Number("<Q", count),
        *pairs,
        *itertools.chain(*tensors),
    ]


def _string(text: str) -> list[_Atom]:
    encoded = text.encode("utf-8", "surrogatepass")
    return [_Number("<Q", len(encoded)), encoded]


def _pair(random: Random, key: str) -> list[_Atom]:
    """Return a hyper-parameter: mostly small, at times an array or of another type."""
    head = _string(key)
    chance = random.random()
    small = random.choice((1, 2, 4, 8, 64, 128))
    if chance < 0.70:
        return [*head, _Number("<I", _UINT32), _Number("<I", small)]
    if chance < 0.80:
        return [*head, _Number("<I", _UINT64), _Number("<Q", random.choice(_HUGE))]
    if chance < 0.90:
        kind = random.choice((_UINT32, _BOOL, _FLOAT32, _UINT64))
        numbers: Sequence[_Atom] = [_Number(_FORMATS[kind], 1)] * small
        return [*head, _Number("<I", _ARRAY), _Number("<I", kind), _Number("<Q", small), *numbers]
    if chance < 0.95:
        value = random.choice((0.0, -1.0, float("nan"), float("inf"), 1e38))
        return [*head, _Number("<I", _FLOAT32), _Number("<f", value)]
    return [*head, _Number("<I", _STRING), *_string(random.choice(_NAMES))]


def _tensors(random: Random) -> list[list[_Atom]]:
    names = (
        "token_embd.weight",
        "output.weight",
        "blk.0.attn_q.weight",
        "blk.1.ffn_up.weight",
        "x",
    )
    return [
        [
            *_string(name),
            _Number("<I", 2),
            _Number("<Q", random.choice((8, 32, 256))),
            _Number("<Q", random.choice((1, 3, 256))),
            _Number("<I", random.choice((0, 1, 2, 8, 12, 99))),
            _Number("<Q", 0),
        ]
        for name in names[: random.randrange(len(names) + 1)]
    ]


def case(seed: int, number: int) -> Case:
    """Return the input of a number."""
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
