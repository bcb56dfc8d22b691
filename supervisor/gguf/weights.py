"""How large tensors are, and what they are for. Pure, but for reading a table of constants once.

The numbers come from the `gguf` package, of which only its constants are loaded.
"""

from __future__ import annotations

import functools
import importlib.util
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from supervisor.gguf.header import Tensor

_EMBEDDING: Final = "token_embd.weight"
_OUTPUT: Final = "output.weight"
# Layouts that interleave rows take eight of them together. Source: ggml-cpu/repack.cpp.
_ROWS: Final = 8

MatrixBytes = tuple[tuple[str, bool, int], ...]


def tensor_bytes(tensor: Tensor) -> int:
    """Return the size of a tensor; 0 for a type that this version does not know."""
    block, size = _block(tensor.kind)
    return tensor.elements // block * size


def embedding_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the size of the table of token embeddings."""
    return sum(tensor_bytes(one) for one in tensors if one.name == _EMBEDDING)


def output_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the size of the output matrix; 0 where the embeddings serve as one."""
    return sum(tensor_bytes(one) for one in tensors if one.name == _OUTPUT)


def matrix_bytes(tensors: Iterable[Tensor]) -> MatrixBytes:
    """Return the size of the matrices that are multiplied with.

    Returns:
        Triples of the type, whether the rows are a multiple of eight, and bytes.
    """
    sizes: Counter[tuple[str, bool]] = Counter()
    for tensor in tensors:
        if len(tensor.shape) > 1 and tensor.name != _EMBEDDING:
            sizes[_type(tensor.kind), tensor.shape[1] % _ROWS == 0] += tensor_bytes(tensor)
    return tuple((kind, is_whole, size) for (kind, is_whole), size in sorted(sizes.items()))


def file_type(number: int) -> str:
    """Return the name of a file's type, such as `Q4_1`."""
    try:
        name: str = tables().LlamaFileType(number).name
    except ValueError:
        return "unknown"
    return name.removeprefix("MOSTLY_").removeprefix("ALL_")


@functools.lru_cache(maxsize=256)
def _block(kind: int) -> tuple[int, int]:
    """Return the weights of a block and its bytes; no bytes for an unknown type."""
    constants = tables()
    try:
        block, size = constants.GGML_QUANT_SIZES[constants.GGMLQuantizationType(kind)]
    except (ValueError, KeyError):
        return 1, 0
    return int(block), int(size)


@functools.lru_cache(maxsize=256)
def _type(kind: int) -> str:
    try:
        name: str = tables().GGMLQuantizationType(kind).name
    except ValueError:
        return "unknown"
    return name


@functools.cache
def tables() -> Any:
    """Return the module of constants of the `gguf` package, loaded by itself.

    The package imports numpy on top, which costs a daemon 14 MB for as long as it lives.
    """
    package = importlib.util.find_spec("gguf")
    assert package  # noqa: S101 (for mypy: it is one of our dependencies)
    assert package.origin  # noqa: S101 (as above)
    path = Path(package.origin).with_name("constants.py")
    spec = importlib.util.spec_from_file_location("gguf_constants", path)
    assert spec  # noqa: S101 (as above)
    assert spec.loader  # noqa: S101 (as above)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
