"""Model files with false headers: each is small, and claims much."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

U8, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64 = 0, 4, 5, 6, 7, 8, 9, 10, 11
MIB: Final = 1024**2


def text(value: bytes | str) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def pair(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def u32(key: str, value: int) -> bytes:
    return pair(key, U32, struct.pack("<I", value))


def u64(key: str, value: int) -> bytes:
    return pair(key, U64, struct.pack("<Q", value))


def array(key: str, kind: int, count: int, values: bytes = b"") -> bytes:
    return pair(key, ARRAY, struct.pack("<IQ", kind, count) + values)


def tensor(name: str, shape: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    sizes = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return text(name) + sizes + struct.pack("<IQ", kind, offset)


def file(pairs: list[bytes], tensors: list[bytes] = []) -> bytes:  # noqa: B006 (never changed)
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(pairs))
    return head + b"".join(pairs) + b"".join(tensors)


def client(*more: bytes) -> list[bytes]:
    """The metadata of a small model, and more; the last value of a key counts."""
    return [
        pair("general.architecture", STRING, text("llama")),
        u32("llama.block_count", 2),
        u32("llama.attention.head_count", 2),
        u32("llama.embedding_length", 64),
        u32("llama.context_length", 2048),
        *more,
    ]


def block_count(kind: int, value: bytes) -> bytes:
    return file(client(pair("llama.block_count", kind, value)))


# Headers that are refused, and a word of the reason.
REFUSED: Final[Mapping[str, tuple[bytes, str]]] = MappingProxyType(
    {
        "2^32 - 1 layers": (block_count(U32, b"\xff" * 4), "llama.block_count is 4294967295"),
        "2^64 - 1 layers": (block_count(U64, b"\xff" * 8), "not between 0 and 1024"),
        "10^8 layers": (block_count(U32, struct.pack("<I", 10**8)), "llama.block_count"),
        "-1 layers": (block_count(I32, b"\xff" * 4), "llama.block_count is -1"),
        "layers by name": (block_count(STRING, text("\x1b[2Jmany")), "not an integer"),
        "layers of NaN": (block_count(F32, struct.pack("<f", math.nan)), "not an integer"),
        "layers of infinity": (block_count(F32, struct.pack("<f", math.inf)), "is inf"),
        "layers of yes": (block_count(BOOL, b"\1"), "not an integer"),
        "no architecture": (
            file([u32("general.architecture", 5), u32(".block_count", 2**32 - 1)]),
            "block_count is 4294967295",
        ),
        "heads for other layers": (
            file(client(array("llama.attention.head_count_kv", U32, 3, bytes(12)))),
            "has 3 values for a block_count of 2",
        ),
        "too many heads": (
            file(client(u32("llama.attention.head_count", 2**31))),
            "not between 0 and",
        ),
        "too wide": (file(client(u32("llama.embedding_length", 2**32 - 1))), "not between 0"),
        "a context without end": (
            file(client(u64("llama.context_length", 2**63))),
            "not between 0 and",
        ),
        "states without end": (
            file(client(u64("llama.ssm.inner_size", 2**62))),
            "not between 0 and",
        ),
        "many tensors said": (
            b"GGUF" + struct.pack("<IQQ", 3, 2**64 - 1, 0),
            "18,446,744,073,709,551,615 tensors do not fit",
        ),
        "many keys said": (b"GGUF" + struct.pack("<IQQ", 3, 0, 10**7), "keys do not fit"),
        "a million keys": (
            b"GGUF" + struct.pack("<IQQ", 3, 0, 10**6) + pair("k", U8, b"\0") * 10**6,
            "1,000,000 keys, more than",
        ),
        "a string without end": (
            file([text("k") + struct.pack("<IQ", STRING, 2**63)]),
            "a string of 9,223,372,036,854,775,808 bytes do not fit",
        ),
        "an array without end": (file(client(array("a", U8, 2**63))), "do not fit"),
        "many strings said": (file(client(array("a", STRING, 2**40))), "do not fit"),
        "arrays of arrays": (file(client(array("a", ARRAY, 1, bytes(64)))), "unknown type 9"),
        "a type there is not": (file(client(pair("a", 99, bytes(64)))), "unknown type 99"),
        "a key too long": (file(client(pair("k" * 5000, U8, b"\0"))), "a key of 5,000 bytes"),
        "dimensions": (
            file(client(), [text("t") + struct.pack("<I", 2**32 - 1) + bytes(64)]),
            "4,294,967,295 dimensions",
        ),
        "weights that overflow": (
            file(client(), [tensor("t", (2**63, 2**63, 2**63, 2**63))]),
            "larger than the file",
        ),
        "weights of an unknown type": (
            file(client(), [tensor("t", (2**40,), kind=12345)]),
            "larger than the file",
        ),
        "weights far away": (
            file(client(), [tensor("t", (1,), offset=2**63)]),
            "is truncated",
        ),
        "an alignment of 0": (file(client(u32("general.alignment", 0))), "general.alignment"),
        "a vast alignment": (file(client(u32("general.alignment", 2**31))), "general.alignment"),
        "a split without end": (file(client(u32("split.count", 2**32 - 1))), "split.count"),
    }
)


# A model by its header, with the largest permitted number of everything.
def many_tensors() -> bytes:
    return (
        file(client(), [tensor(f"t{number}", (1, 1, 1, 1)) for number in range(65_536)])
        + b"\0" * 64
    )


def many_strings() -> bytes:
    tokens = array("tokenizer.ggml.tokens", STRING, 2**20, text("") * 2**20)
    return file(client(tokens, array("m", STRING, 2**20, text("") * 2**20)))


def much_text() -> bytes:
    long = text("\U0001f600" + "x" * (MIB - 8))
    return file(client(*(pair(f"t{number}", STRING, long) for number in range(7))))


def long_texts() -> bytes:
    return file(client(*(pair(f"t{number}", STRING, text(b"x" * 6 * MIB)) for number in range(10))))


def many_values() -> bytes:
    return file(client(*(array(f"a{number}", U8, 1024, bytes(1024)) for number in range(250))))


def many_keys() -> bytes:
    return file(client(*(pair(f"key {number}", U8, b"\0") for number in range(16_000))))


def most_of_everything() -> bytes:
    return file(
        client(
            u32("llama.block_count", 1024),
            u32("llama.attention.head_count", 2**14),
            u32("llama.attention.head_count_kv", 2**14),
            u32("llama.attention.key_length", 2**16),
            u32("llama.attention.value_length", 2**16),
            u32("llama.embedding_length", 2**20),
            u32("llama.context_length", 2**31 - 1),
            u32("llama.feed_forward_length", 2**24),
            u32("llama.vocab_size", 2**24),
            u32("llama.attention.sliding_window", 2**31 - 1),
            u32("llama.attention.sliding_window_pattern", 0),
        )
    )


ALLOWED: Final[tuple[Callable[[], bytes], ...]] = (
    many_tensors,
    many_strings,
    much_text,
    long_texts,
    many_values,
    many_keys,
    most_of_everything,
)


def write(directory: Path) -> list[Path]:
    """Write all of them into a directory."""
    contents = [content for content, _ in REFUSED.values()] + [make() for make in ALLOWED]
    paths = [directory / f"{number:02}.gguf" for number in range(len(contents))]
    for path, content in zip(paths, contents, strict=True):
        path.write_bytes(content)
    return paths
