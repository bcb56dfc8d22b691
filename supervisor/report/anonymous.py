"""Takes the user, the machine and secrets out of texts. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

HIDDEN: Final = "[hidden]"
# Shorter names, and these, are in ordinary words and paths.
_NAME_MIN: Final = 3
_COMMON: Final = frozenset({"root", "localhost", "user", "llama", "corral"})
_SECRET_MIN: Final = 6
_PASSWORD: Final = re.compile(r"://[^/@\s\"']{1,256}@")
# The same without a scheme, as curl and git take it.
_USER: Final = re.compile(r"(?<![\w.+/@-])[\w.+-]{1,64}:[^\s/@:\"']{1,256}@(?=\[?\w)")
# Options of llama-server and of programs beside it; `--api-key-file` names a file.
_OPTION: Final = re.compile(r"(--?[a-z][a-z-]{0,40}(?:key|token|password|secret))([ =])(?=\S)\S+")
_BEARER: Final = re.compile(r"\b(Bearer|Basic) [A-Za-z0-9._~+/=-]{6,}")
_KEY: Final = re.compile(r"\b(sk|hf|ghp|key)([-_])[A-Za-z0-9_-]{12,}")


@dataclass(frozen=True, slots=True)
class Anonymizer:
    """`secrets`: whatever else must not be seen, such as values of settings."""

    home: str
    user: str
    host: str
    secrets: Sequence[str] = ()

    def clean(self, text: str) -> str:
        for secret in sorted(self.secrets, key=len, reverse=True):
            if len(secret) >= _SECRET_MIN:
                text = text.replace(secret, HIDDEN)
        text = _PASSWORD.sub(f"://{HIDDEN}@", text)
        text = _USER.sub(f"{HIDDEN}@", text)
        text = _OPTION.sub(rf"\1\2{HIDDEN}", text)
        text = _BEARER.sub(rf"\1 {HIDDEN}", text)
        text = _KEY.sub(HIDDEN, text)
        if len(self.home) > 1:
            text = text.replace(self.home, "~")
        for name, instead in ((self.host, "HOST"), (self.user, "USER")):
            if len(name) >= _NAME_MIN and name.lower() not in _COMMON:
                text = re.sub(rf"(?<![^\W_]){re.escape(name)}(?![^\W_])", instead, text)
        return text
