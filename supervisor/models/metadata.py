"""Reads the metadata of a GGUF model, and checks it against the size of the file.

The metadata is cached by path, size and modification time, because reading takes a tenth of a
second and commands need it often.

Source: gguf-py, GGUFType, the values of `general.type`; llama.cpp, tools/mtmd/clip.cpp.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, Final

from supervisor.errors import ModelInvalid
from supervisor.models import gguf, tensors
from supervisor.models.file_names import FileKind
from supervisor.models.gguf import Header, Tensor
from supervisor.models.tensors import MatrixBytes
from supervisor.system import files
from supervisor.system.files import NotRegular, open_regular, stat_regular

_KINDS: Final[Mapping[str, FileKind]] = MappingProxyType(
    {"adapter": "adapter", "mmproj": "projector", "clip-vision": "projector", "imatrix": "imatrix"}
)
_ENCODER: Final = "clip"


def file_kind(header: Header, *, drafts: bool) -> FileKind:
    """Return the kind of a file; `drafts` means that it has draft heads for another model."""
    if found := _KINDS.get(header.text("general.type")):
        return found
    if header.text("general.architecture") == _ENCODER:
        return "projector"
    return "draft" if drafts else "model"


def projection_width(header: Header) -> int:
    """Return the width of the model for which a projector makes tokens; 0 if unknown."""
    keys = (f"{_ENCODER}.{part}projection_dim" for part in ("vision.", "audio.", ""))
    return next((width for key in keys if (width := header.integer(key))), 0)


def holds_encoder(header: Header, tensors: Iterable[Tensor]) -> bool:
    """Return whether a text model has its picture encoder in the same file.

    Ollama's own engine reads such files, but llama.cpp refuses them because it counts the tensors.
    Source: llama-model-loader.cpp, done_getting_tensors.
    """
    if header.text("general.architecture") == _ENCODER:
        return False
    return any(tensor.name.startswith(("v.", "mm.", "a.")) for tensor in tensors)


# Increase it when a field of Gguf is added or changes its meaning.
_CACHE_VERSION: Final = "gguf 11"
# Shards are called PREFIX-00001-of-00003.gguf. Source: llama.cpp, llama_split_path.
_SHARD: Final = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
_SAMPLE_BYTES: Final = 64 * 1024
_CHUNK_BYTES: Final = 1024**2


@dataclass(frozen=True, slots=True)
class Gguf:
    path: Path  # the first shard of a split model
    size_bytes: int  # all shards together
    architecture: str
    name: str
    parameters: int  # number of weights
    layers: int
    heads: int  # query heads per layer, the most of any layer
    kv_heads: tuple[int, ...]  # per layer; 0 for a layer without a KV cache
    key_length: int  # values in one key head
    value_length: int  # values in one value head that the cache keeps; 0 if its keys hold them
    embedding_length: int  # width of the residual stream
    ctx_train: int  # tokens; 0 if unknown
    vocab_size: int
    tokenizer: str  # such as `gpt2`
    chat_template: str | None  # Jinja
    quantisation: str  # the file type, such as `Q4_1`
    # Values per token in the widest feed-forward layer, or in all experts that a token uses.
    feed_forward: int
    experts: int  # of a layer; 0 without experts
    experts_used: int  # per token
    sliding_window: int | None  # tokens that sliding-window layers see
    sliding: tuple[bool, ...]  # per layer
    recurrent: bool  # whether some layers keep a state instead of a KV cache
    state_values: int  # state of all recurrent layers for one sequence
    draft_layers: int  # layers at its end that draft for it (MTP)
    drafts_for: int  # width of the model whose draft heads it contains; 0 for a whole model
    shards: int
    tensor_bytes: int  # weights in all shards
    token_bytes: int  # weights that one token reads: of experts, only those that it uses
    embedding_bytes: int  # the table of token embeddings
    output_bytes: int  # the output matrix; 0 if the embeddings serve as one
    # Matrices used in multiplications: type, largest group of rows (32, 8, 1), bytes.
    matrix_bytes: MatrixBytes
    is_causal: bool  # whether a token sees only earlier tokens, so that the model generates text
    pooling: str | None  # `none`, `mean`, `cls`, `last` or `rank`; None if the file names none
    tensors: tuple[tuple[str, int], ...]  # names and bytes
    fingerprint: str  # hash of the header, the size and samples of the weights
    kind: FileKind = "model"
    projection_width: int = 0  # for a projector: width of the model that it makes tokens for
    has_markov_head: bool = False  # for draft heads: whether they are DSpark's
    has_confidence_head: bool = False  # of DSpark; without one, it drafts with p-min 0 only
    holds_encoder: bool = False  # has a picture encoder in the same file, which llama.cpp refuses


def read(path: Path, *, cache_dir: Path) -> Gguf:
    """Read the metadata of a model, given its file or first shard.

    Raises ModelInvalid: the file is missing, not a valid GGUF, truncated, or a later shard.
    """
    shards = shards_of(path.absolute())
    try:
        key = files.key_of(shards, _CACHE_VERSION)
    except OSError as error:
        raise _unreadable_model(path, error) from error
    cached = files.get(cache_dir / "models", key)
    if cached and cached.keys() == {field.name for field in dataclasses.fields(Gguf)}:
        return Gguf(
            **{key: _freeze(value) for key, value in cached.items()}
            | {"path": Path(cached["path"])}
        )
    found = _read(shards)
    files.put(cache_dir / "models", key, dataclasses.asdict(found) | {"path": str(found.path)})
    return found


def is_later_shard(path: Path) -> bool:
    split = _SHARD.fullmatch(path.name)
    return split is not None and int(split[2]) > 1


def _freeze(value: Any) -> Any:
    return tuple(map(_freeze, value)) if isinstance(value, list) else value


def shards_of(path: Path) -> tuple[Path, ...]:
    """Return the files of a model by its first; raises ModelInvalid if one is missing."""
    split = _SHARD.fullmatch(path.name)
    if not split:
        return (_check_exists(path),)
    prefix, number, count = split.groups()
    names = [f"{prefix}-{number:05d}-of-{count}.gguf" for number in range(1, int(count) + 1)]
    if int(number) != 1:
        raise _later_shard_error(path, path.with_name(names[0]))
    return tuple(_check_exists(path.with_name(name)) for name in names)


def _check_exists(path: Path) -> Path:
    try:
        stat_regular(path)
    except OSError as error:
        raise _unreadable_model(path, error) from error
    return path


def _unreadable_model(path: Path, error: OSError) -> ModelInvalid:
    if isinstance(error, FileNotFoundError):
        hint = "corral model list shows the available models"
        return ModelInvalid(f"model file {path} not found", hint=hint)
    if isinstance(error, NotRegular):
        return ModelInvalid(f"{path} {error.strerror}", hint="give the path of a .gguf file")
    return ModelInvalid(
        f"{path} cannot be read: {error.strerror}", hint="check its path and permissions"
    )


def _later_shard_error(path: Path, first: Path) -> ModelInvalid:
    return ModelInvalid(
        f"{path} is a later shard of a split model", hint=f"give the first shard: {first}"
    )


def _read(shards: Sequence[Path]) -> Gguf:
    digest = hashlib.sha256()
    headers: list[Header] = []
    for path in shards:
        try:
            with open_regular(path) as file:
                found = gguf.read(file, str(path))
                _check_size(path, found, os.fstat(file.fileno()).st_size)
                _sample(file, found.data_at, digest)
        except OSError as error:
            raise _unreadable_model(path, error) from error
        headers.append(found)
    _check_split(shards, headers[0])
    size_bytes = sum(path.stat().st_size for path in shards)
    return from_headers(shards[0], size_bytes, headers, digest.hexdigest()[:32])


def _check_size(path: Path, found: Header, size_bytes: int) -> None:
    ends = (
        found.data_at + tensor.offset + tensors.tensor_bytes(tensor) for tensor in found.tensors
    )
    expected = max(ends, default=0)
    if size_bytes < expected:
        raise ModelInvalid(
            f"{path} is truncated: it has {size_bytes:,} of at least {expected:,} bytes",
            hint="download the file again",
        )


def _sample(file: BinaryIO, data_at: int, digest: Any) -> None:
    """Hash the header and samples of the weights."""
    size = file.seek(0, os.SEEK_END)
    digest.update(str(size).encode())
    file.seek(0)
    for at in range(0, data_at, _CHUNK_BYTES):
        digest.update(file.read(min(_CHUNK_BYTES, data_at - at)))
    for at in (data_at, (data_at + size) // 2, max(data_at, size - _SAMPLE_BYTES)):
        file.seek(at)
        digest.update(file.read(_SAMPLE_BYTES))


def _check_split(shards: Sequence[Path], first: Header) -> None:
    """Reject shards whose names contradict llama.cpp's keys split.no (from 0) and split.count."""
    path = shards[0]
    number, count = first.integer("split.no"), first.integer("split.count")
    if number > 0:
        raise _later_shard_error(path, path.with_name(f"…-00001-of-{count:05d}.gguf"))
    if count > 1 and count != len(shards):
        raise ModelInvalid(
            f"{path} is one of {count} shards, but not named as one",
            hint=f"rename the shards to …-00001-of-{count:05d}.gguf and so on",
        )


def from_headers(path: Path, size_bytes: int, headers: Sequence[Header], fingerprint: str) -> Gguf:
    """Derive the metadata of a model from the headers of all its shards, in order. Pure."""
    first = headers[0]
    found = tuple(tensor for header in headers for tensor in header.tensors)
    architecture = first.text("general.architecture")
    own = f"{architecture}."
    count = first.integer(f"{own}block_count")
    heads = max(first.integers(f"{own}attention.head_count"), default=0)
    embedding = first.integer(f"{own}embedding_length")
    head_size = embedding // heads if heads else 0
    kv_heads = tensors.kv_heads(first, architecture, count, heads)
    is_causal = tensors.is_causal(first, architecture)
    drafts_for = tensors.drafts_for(first, architecture, found)
    return Gguf(
        path=path,
        size_bytes=size_bytes,
        architecture=architecture,
        name=first.text("general.name"),
        parameters=sum(tensor.elements for tensor in found),
        layers=count,
        heads=heads,
        kv_heads=kv_heads,
        key_length=first.integer(f"{own}attention.key_length", head_size),
        value_length=0
        if first.integer(f"{own}attention.value_length_mla")
        else first.integer(f"{own}attention.value_length", head_size),
        embedding_length=embedding,
        ctx_train=first.integer(f"{own}context_length"),
        vocab_size=first.integer(f"{own}vocab_size", first.lengths.get("tokenizer.ggml.tokens", 0)),
        tokenizer=first.text("tokenizer.ggml.model"),
        chat_template=first.text("tokenizer.chat_template") or None,
        quantisation=tensors.FILE_TYPES.get(
            first.integer("general.file_type", -1), tensors.UNKNOWN[0]
        ),
        feed_forward=tensors.feed_forward(first, architecture),
        experts=first.integer(f"{own}expert_count"),
        experts_used=first.integer(f"{own}expert_used_count"),
        sliding_window=first.integer(f"{own}attention.sliding_window") or None,
        sliding=tensors.sliding_layers(first, architecture, count),
        recurrent=tensors.is_recurrent(first, architecture),
        state_values=tensors.state_values(first, architecture, kv_heads),
        draft_layers=tensors.loaded_draft_layers(first, architecture, found),
        drafts_for=drafts_for,
        shards=len(headers),
        tensor_bytes=sum(map(tensors.tensor_bytes, found)),
        token_bytes=tensors.token_bytes(first, architecture, found),
        embedding_bytes=tensors.bytes_of(tensors.EMBEDDING, found),
        output_bytes=tensors.bytes_of(tensors.OUTPUT, found),
        matrix_bytes=tensors.matrix_bytes(found, generates=is_causal),
        is_causal=is_causal,
        pooling=tensors.pooling(first, architecture, found),
        tensors=tuple((tensor.name, tensors.tensor_bytes(tensor)) for tensor in found),
        fingerprint=fingerprint,
        kind=file_kind(first, drafts=drafts_for > 0),
        projection_width=projection_width(first),
        has_markov_head=tensors.has_markov_head(found),
        has_confidence_head=first.metadata.get("dflash.has_confidence_head") is not False,
        holds_encoder=holds_encoder(first, found),
    )
