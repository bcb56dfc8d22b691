"""Chooses what to take of a repository: the model that fits here, and what belongs to it."""

from __future__ import annotations

from dataclasses import dataclass

from supervisor.commands.model_fit import Fit, MachineFit
from supervisor.errors import OutOfMemory
from supervisor.hub import choice, file_names, remote_header
from supervisor.hub.client import HubClient
from supervisor.hub.file_names import FileGroup, FileKind
from supervisor.hub.reference import HubReference
from supervisor.hub.remote_header import RemotePart
from supervisor.hub.repository import RemoteFile, Repository
from supervisor.output import size

_COMPANIONS = (FileKind.PROJECTOR, FileKind.DRAFT)


@dataclass(frozen=True, slots=True)
class Chosen:
    """What to take of a repository.

    Attributes:
        model: The model, or another part that was named by its file.
        companions: Its projector and its draft, where there are any.
        reason: Why this one, as a clause.
        warning: Why it does not fit, as a sentence; None if it does.
    """

    model: FileGroup
    companions: tuple[FileGroup, ...] = ()
    reason: str = ""
    warning: str | None = None

    @property
    def groups(self) -> tuple[FileGroup, ...]:
        return (self.model, *self.companions)


def choose(
    repository: Repository,
    wanted: HubReference,
    left_out: frozenset[FileKind],
    here: MachineFit,
    client: HubClient,
) -> Chosen:
    """Choose by the names of files, and by the headers of models, which are requested.

    Raises:
        NoSuchModel: Nothing of that name is there, or no model at all.
        OutOfMemory: No model fits.
        CorralError: As remote_header.read.
    """
    chooser = _Chooser(repository, left_out, here, client)
    if wanted.file or wanted.quantisation:
        return chooser.named(choice.named(repository, wanted))
    return chooser.fitting()


def without_fit(
    repository: Repository, wanted: HubReference, left_out: frozenset[FileKind]
) -> Chosen:
    """Choose among files that are here."""
    is_named = wanted.file or wanted.quantisation
    model = choice.named(repository, wanted) if is_named else choice.preferred(repository)[0]
    return Chosen(model, companions(repository, model, left_out), "it is here")


def companions(
    repository: Repository, model: FileGroup, left_out: frozenset[FileKind]
) -> tuple[FileGroup, ...]:
    """The projector and the draft of a model; a part that was named alone has none."""
    if model.first.kind is not FileKind.MODEL:
        return ()
    kinds = (kind for kind in _COMPANIONS if kind not in left_out)
    found = (file_names.companion(repository.groups, model.first, kind) for kind in kinds)
    most_bytes = repository.size_bytes(model)
    return tuple(one for one in found if one and repository.size_bytes(one) < most_bytes)


class _Chooser:
    def __init__(
        self,
        repository: Repository,
        left_out: frozenset[FileKind],
        here: MachineFit,
        client: HubClient,
    ) -> None:
        self._repository = repository
        self._left_out = left_out
        self._here = here
        self._client = client

    def named(self, model: FileGroup) -> Chosen:
        others = companions(self._repository, model, self._left_out)
        if model.first.kind is not FileKind.MODEL:
            return Chosen(model, others, "as named")
        fit = self._fit(model, others)
        warning = f"it will not fit: {fit.misfit}" if fit.misfit else None
        return Chosen(model, others, f"as named, {fit.text}", warning)

    def fitting(self) -> Chosen:
        """Try the models in their order, without those that are as large as one that misfits."""
        most_bytes, misfit, tried = self._here.most_bytes, "", ""
        for model in choice.preferred(self._repository):
            size_bytes = self._repository.size_bytes(model)
            if size_bytes >= most_bytes:
                continue
            others = companions(self._repository, model, self._left_out)
            fit = self._fit(model, others)
            if fit.misfit is None:
                return Chosen(model, others, _reason(self._repository, model, fit, tried))
            most_bytes, misfit = size_bytes, fit.misfit
            tried = tried or f"{model.first.quantisation} can never fit: {fit.misfit}"
        raise self._nothing_fits(misfit)

    def _fit(self, model: FileGroup, others: tuple[FileGroup, ...]) -> Fit:
        parts = [self._part(self._repository.file(one)) for one in model.files]
        projectors = [one for one in others if one.first.kind is FileKind.PROJECTOR]
        beside_bytes = sum(self._repository.size_bytes(one) for one in projectors)
        return self._here.of(remote_header.read(parts, self._client), beside_bytes)

    def _part(self, file: RemoteFile) -> RemotePart:
        url = self._client.file_url(self._repository, file.path)
        return RemotePart(url, file.path, file.size_bytes)

    def _nothing_fits(self, misfit: str) -> OutOfMemory:
        least = min(choice.models(self._repository), key=self._repository.size_bytes)
        amount, most = size(self._repository.size_bytes(least)), size(self._here.room.host)
        name = least.first.quantisation or least.first.path
        why = misfit or f"the smallest, {name}, has {amount}, and models may use {most}"
        return OutOfMemory(
            f"no model of {self._repository.repo} fits this machine: {why}",
            hint=f"take a smaller model; {self._repository.repo}:{name} fetches it all the same",
        )


def _reason(repository: Repository, model: FileGroup, fit: Fit, tried: str) -> str:
    if tried:
        return f"{fit.text}; {tried}"
    is_small = repository.size_bytes(model) <= choice.EIGHT_BITS_MAX_BYTES
    if model.first.quantisation == "Q8_0" and is_small:
        return f"small enough for 8 bits, {fit.text}"
    return fit.text
