"""What the owner of a batch may use at present."""

from __future__ import annotations

from proxy.auth.api_keys import ApiKeys
from proxy.auth.keys_file import Key
from proxy.models import ModelLoader, ModelNames

_NOBODY = "jobs"  # the client of batches without a key, for fairness between clients


def owner_of(key: Key | None) -> str:
    return key.name if key else ""


class Access:
    """The owners of batches: the names of API keys, or the empty one where no key is needed."""

    def __init__(self, keys: ApiKeys, loader: ModelLoader) -> None:
        self._keys = keys
        self._loader = loader

    def names(self, owner: str) -> ModelNames | None:
        """The models that an owner may use; None where one needs a key, and has none."""
        names = self._loader.names()
        if not self._keys.are_needed:
            return names
        key = self._keys.named(owner)
        return names.visible(key.models) if key else None

    @staticmethod
    def client(owner: str) -> str:
        return owner or _NOBODY
