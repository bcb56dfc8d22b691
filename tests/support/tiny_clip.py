"""Writes a tiny picture encoder (`mmproj`) for the models of tiny_gguf, and pictures for it."""

from __future__ import annotations

import struct
import zlib
from base64 import b64encode
from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np
from numpy.typing import NDArray
from support import tiny_gguf

Array = NDArray[Any]

_PATCH: Final = 14
_SIDE: Final = 8 * _PATCH
_EMBD: Final = 32
_FF: Final = 64
_LAYERS: Final = 2
_PNG: Final = b"\x89PNG\r\n\x1a\n"
TOKENS: Final = (_SIDE // _PATCH) ** 2  # of one picture


def make(path: Path, *, embd: int = 64) -> Path:
    """Write a GGUF of architecture `clip` for a model of width `embd`, and return its path."""
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_bool("clip.has_vision_encoder", val=True)
    writer.add_string("clip.projector_type", "mlp")
    writer.add_bool("clip.use_gelu", val=True)
    sizes = {"image_size": _SIDE, "patch_size": _PATCH, "embedding_length": _EMBD}
    sizes |= {"feed_forward_length": _FF, "block_count": _LAYERS, "projection_dim": embd}
    for name, number in (sizes | {"attention.head_count": 2}).items():
        writer.add_uint32(f"clip.vision.{name}", number)
    writer.add_float32("clip.vision.attention.layer_norm_epsilon", 1e-5)
    writer.add_array("clip.vision.image_mean", [0.5] * 3)
    writer.add_array("clip.vision.image_std", [0.5] * 3)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    tiny_gguf.write(writer, _tensors(embd).items())
    return path


def picture(colour: tuple[int, int, int]) -> str:
    """Return a picture of one colour as a data URL, as clients send them."""
    row = b"\0" + bytes(colour) * _SIDE
    head = struct.pack(">IIBBBBB", _SIDE, _SIDE, 8, 2, 0, 0, 0)
    pixels = zlib.compress(row * _SIDE)
    png = _PNG + _chunk(b"IHDR", head) + _chunk(b"IDAT", pixels) + _chunk(b"IEND", b"")
    return f"data:image/png;base64,{b64encode(png).decode()}"


def _chunk(kind: bytes, content: bytes) -> bytes:
    crc = zlib.crc32(kind + content)
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", crc)


def _tensors(embd: int) -> dict[str, Array]:
    random = np.random.default_rng(0)

    def matrix(*shape: int) -> Array:
        weights: Array = random.standard_normal(shape) / np.sqrt(np.prod(shape[1:]))
        return weights.astype(np.float32)

    found = {
        "v.patch_embd.weight": matrix(_EMBD, 3, _PATCH, _PATCH),
        "v.position_embd.weight": matrix(TOKENS, _EMBD),
        "mm.0.weight": matrix(embd, _EMBD),
        "mm.2.weight": matrix(embd, embd),
    }
    found |= {f"mm.{layer}.bias": np.zeros(embd, np.float32) for layer in (0, 2)}
    sizes = dict.fromkeys(("attn_q", "attn_k", "attn_v", "attn_out"), (_EMBD, _EMBD))
    sizes |= {"ffn_up": (_FF, _EMBD), "ffn_down": (_EMBD, _FF)}
    for layer in range(_LAYERS):
        for name, size in sizes.items():
            found[f"v.blk.{layer}.{name}.weight"] = matrix(*size)
            found[f"v.blk.{layer}.{name}.bias"] = np.zeros(size[0], np.float32)
        for name in ("ln1", "ln2"):
            found[f"v.blk.{layer}.{name}.weight"] = np.ones(_EMBD, np.float32)
            found[f"v.blk.{layer}.{name}.bias"] = np.zeros(_EMBD, np.float32)
    return found
