"""Tables of ggml's tensor types and llama.cpp's file types.

Source: ggml.h (enum ggml_type), ggml-common.h (the blocks' structs), llama.h (enum llama_ftype);
gguf-py's constants.py has the same, and the tests compare them.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, NamedTuple


class GgmlType(NamedTuple):
    """How a tensor type stores values: in blocks of `block_elements` that take `block_bytes`."""

    name: str
    block_elements: int
    block_bytes: int


UNKNOWN: Final = GgmlType("unknown", 1, 0)

GGML_TYPES: Final[Mapping[int, GgmlType]] = MappingProxyType(
    {
        0: GgmlType("F32", 1, 4),
        1: GgmlType("F16", 1, 2),
        2: GgmlType("Q4_0", 32, 18),
        3: GgmlType("Q4_1", 32, 20),
        6: GgmlType("Q5_0", 32, 22),
        7: GgmlType("Q5_1", 32, 24),
        8: GgmlType("Q8_0", 32, 34),
        9: GgmlType("Q8_1", 32, 40),
        10: GgmlType("Q2_K", 256, 84),
        11: GgmlType("Q3_K", 256, 110),
        12: GgmlType("Q4_K", 256, 144),
        13: GgmlType("Q5_K", 256, 176),
        14: GgmlType("Q6_K", 256, 210),
        15: GgmlType("Q8_K", 256, 292),
        16: GgmlType("IQ2_XXS", 256, 66),
        17: GgmlType("IQ2_XS", 256, 74),
        18: GgmlType("IQ3_XXS", 256, 98),
        19: GgmlType("IQ1_S", 256, 50),
        20: GgmlType("IQ4_NL", 32, 18),
        21: GgmlType("IQ3_S", 256, 110),
        22: GgmlType("IQ2_S", 256, 82),
        23: GgmlType("IQ4_XS", 256, 136),
        24: GgmlType("I8", 1, 1),
        25: GgmlType("I16", 1, 2),
        26: GgmlType("I32", 1, 4),
        27: GgmlType("I64", 1, 8),
        28: GgmlType("F64", 1, 8),
        29: GgmlType("IQ1_M", 256, 56),
        30: GgmlType("BF16", 1, 2),
        34: GgmlType("TQ1_0", 256, 54),
        35: GgmlType("TQ2_0", 256, 66),
        39: GgmlType("MXFP4", 32, 17),
        40: GgmlType("NVFP4", 64, 36),
        41: GgmlType("Q1_0", 128, 18),
    }
)
_BY_NAME: Final = {one.name: one for one in GGML_TYPES.values()}

# By `general.file_type`.
FILE_TYPES: Final[Mapping[int, str]] = MappingProxyType(
    dict(enumerate(("F32", "F16", "Q4_0", "Q4_1")))
    | dict(enumerate(("Q8_0", "Q5_0", "Q5_1", "Q2_K", "Q3_K_S", "Q3_K_M", "Q3_K_L"), start=7))
    | dict(enumerate(("Q4_K_S", "Q4_K_M", "Q5_K_S", "Q5_K_M", "Q6_K"), start=14))
    | dict(enumerate(("IQ2_XXS", "IQ2_XS", "Q2_K_S", "IQ3_XS", "IQ3_XXS", "IQ1_S"), start=19))
    | dict(enumerate(("IQ4_NL", "IQ3_S", "IQ3_M", "IQ2_S", "IQ2_M", "IQ4_XS", "IQ1_M"), start=25))
    | dict(enumerate(("BF16",), start=32))
    | dict(enumerate(("TQ1_0", "TQ2_0", "MXFP4_MOE", "NVFP4", "Q1_0"), start=36))
    | {1024: "GUESSED"}
)


def block_bytes(name: str) -> int:
    """Bytes of a block of a known type."""
    return _BY_NAME[name].block_bytes
