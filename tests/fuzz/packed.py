"""Large bodies, compressed bodies, and forms."""

from __future__ import annotations

import functools
import gzip
import zlib
from collections.abc import Callable, Sequence
from random import Random
from typing import Final

from fuzz.bodies import PAGES, body
from fuzz.mutate import TEXTS, changed_bytes, encode
from fuzz.request import Input, credentials, head, post

_MIB: Final = 1024**2
_BLOCK: Final = 65_536


@functools.lru_cache(maxsize=32)
def _bomb(piece: bytes, size: int, container: int) -> bytes:
    """Compress `{"prompt":[…` of this size; `wbits` 31 is gzip, 15 zlib, -15 raw deflate."""
    packer = zlib.compressobj(9, zlib.DEFLATED, container)
    packed = [packer.compress(b'{"model":"m","prompt":[')]
    block = piece * (_BLOCK // len(piece))
    packed += [packer.compress(block) for _ in range(size // len(block))]
    packed += [packer.compress(b'1],"n_predict":1}'), packer.flush()]
    return b"".join(packed)


def _gzip(data: bytes) -> bytes:
    return gzip.compress(data, mtime=0)  # the time differs in each run


def compressed(random: Random) -> Input:
    """A body with Content-Encoding: small, large, broken, or of another encoding."""
    path = random.choice(PAGES)
    small = encode(body(random, path))
    makers: Sequence[Callable[[], tuple[str, bytes]]] = (
        lambda: ("gzip", _gzip(small)),
        lambda: ("deflate", zlib.compress(small)),
        lambda: ("gzip", changed_bytes(random, _gzip(small))),
        lambda: ("gzip", _gzip(small)[:-4]),
        lambda: ("gzip", _gzip(_gzip(small))),
        lambda: ("gzip, gzip", _gzip(_gzip(small))),
        lambda: ("gzip", _gzip(small) * 50),
        lambda: (random.choice(("br", "zstd", "compress", "x", "")), random.randbytes(200)),
        lambda: ("gzip", small),
        lambda: ("gzip", _bomb(b"1,", random.choice((1, 12, 60)) * _MIB, 31)),
        lambda: ("gzip", _bomb(b"[],", random.choice((1, 12, 60)) * _MIB, 31)),
        lambda: ("gzip", _bomb(b'"",', random.choice((1, 12, 60)) * _MIB, 31)),
        lambda: (
            "deflate",
            _bomb(b" ", random.choice((1, 12, 100)) * _MIB, random.choice((15, -15))),
        ),
    )
    coding, data = random.choice(makers)()
    given = (*credentials(random), f"Content-Encoding: {coding}")
    return Input("compressed", (post(path, data, given),), is_whole=False)


def large(random: Random) -> Input:
    """A large body: arrays, text, nesting, spaces, many members."""
    path = random.choice(PAGES)
    size = random.choice((100_000, _MIB, 3 * _MIB, 15 * _MIB, 17 * _MIB))
    makers: Sequence[Callable[[], bytes]] = (
        lambda: b'{"model":"m","prompt":[' + b"1," * (size // 2) + b"1]}",
        lambda: b'{"model":"m","x":[' + b"[]," * (size // 3) + b"1]}",
        lambda: b'{"model":"m","x":[' + b'{"a":1},' * (size // 8) + b"1]}",
        lambda: b'{"model":"m","prompt":"' + b"a b " * (size // 4) + b'"}',
        lambda: b'{"model":"m","prompt":"' + b"\\u00e9" * (size // 6) + b'"}',
        lambda: b'{"model":"m","x":' + b"[" * (size // 2) + b"]" * (size // 2) + b"}",
        lambda: b'{"model":"m","x":' + b'{"a":' * (size // 6) + b"1" + b"}" * (size // 6) + b"}",
        lambda: b" " * size + b'{"model":"m"}',
        lambda: b"{" + b",".join(b'"k%d":1' % i for i in range(size // 10)) + b"}",
        lambda: b'{"model":"' + b"m" * size + b'"}',
        lambda: (
            b'{"model":"m","messages":[' + b'{"role":"user","content":"a"},' * (size // 30) + b"1]}"
        ),
        lambda: b'{"model":"m","x":' + b"9" * size + b"}",
        lambda: b"\xff" * size,
    )
    return Input("large", (post(path, random.choice(makers)(), credentials(random)),))


_DISPOSITIONS: Final = (
    'form-data; name="model"',
    'form-data; name="file"; filename="a.wav"',
    'form-data; name="' + "a" * 3000 + '"',
    "form-data",
    "form-data; name",
    'form-data; name="model',
    "form-data; name*=utf-8''model",
    'attachment; name="model"; name="file"',
    'form-data; filename="../../x"; name="file"',
)


def forms(random: Random) -> Input:
    boundary = random.choice(("b", "b", "b", "x" * 70, "x" * 200, "a b", ""))
    makers: Sequence[Callable[[], bytes]] = (
        lambda: _parts(random, boundary),
        lambda: changed_bytes(random, _parts(random, boundary), (b"--b", b"--", b"\r\n")),
        lambda: b'Content-Disposition: form-data; name="model"\r\n' * random.choice((10, 8_000)),
        lambda: (
            b'--b\r\nContent-Disposition: form-data; name="model"'
            + b" ;" * random.choice((9, 90_000))
        ),
        lambda: f"--{boundary}\r\n".encode() * random.choice((10, 50_000)),
        lambda: b"--b\r\n" + b"X-A: b\r\n" * random.choice((10, 50_000)),
        lambda: b"--b\r\n" + b"X" * random.choice((10, 500_000)),
        lambda: b"-" * random.choice((10, 2_000_000)),
        lambda: encode(body(random, "/v1/chat/completions")),
        lambda: b"",
    )
    kinds = (
        "multipart/form-data",
        "multipart/form-data",
        "multipart/mixed",
        "multipart/x",
        "Multipart/Form-Data",
    )
    said = random.choice((boundary, boundary, f'"{boundary}"', "c"))
    kind = f"{random.choice(kinds)}; boundary={said}"
    if random.random() < 0.1:
        kind = random.choice(kinds)
    path = random.choice(("/v1/audio/transcriptions", "/v1/audio/transcriptions", *PAGES))
    data = random.choice(makers)()
    if random.random() < 0.2:
        chunked = (*credentials(random), f"Content-Type: {kind}", "Transfer-Encoding: chunked")
        framed = b"%x\r\n%b\r\n0\r\n\r\n" % (len(data), data) if data else b"0\r\n\r\n"
        return Input("forms", (head("POST", path, chunked) + framed,))
    return Input("forms", (post(path, data, credentials(random), kind),))


def _parts(random: Random, boundary: str) -> bytes:
    parts = []
    for _ in range(random.choice((1, 2, 3, 300))):
        lines = [f"--{boundary}", f"Content-Disposition: {random.choice(_DISPOSITIONS)}"]
        lines += random.choice(
            ((), ("Content-Type: audio/wav",), ("Content-Transfer-Encoding: base64",))
        )
        content = random.choice(("m", "later", "absent", *TEXTS))
        parts.append("\r\n".join((*lines, "", content, "")).encode())
    return b"".join(parts) + f"--{boundary}--\r\n".encode()
