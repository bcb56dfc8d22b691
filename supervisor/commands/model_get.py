"""`corral model get`: downloads a model by its pinned name, from the hub, or by its URL."""

from __future__ import annotations

from dataclasses import dataclass

from supervisor.commands import model
from supervisor.errors import CorralError, Interrupted, NoSuchModel
from supervisor.host.paths import directories
from supervisor.hub import reference
from supervisor.hub.file_names import FileKind
from supervisor.model_stores.references import OLLAMA
from supervisor.output import CommandResult, to_json


@dataclass(frozen=True, slots=True)
class GetOptions:
    """What to leave out.

    Attributes:
        projector: Whether the projector of a model comes with it.
        draft: Whether its draft model, or draft heads, come with it.
        dry_run: Show what would come; fetch nothing.
        as_lines: Write JSON lines to stdout: the progress, then `result` or `error`.
    """

    projector: bool = True
    draft: bool = True
    dry_run: bool = False
    as_lines: bool = False

    @property
    def left_out(self) -> frozenset[FileKind]:
        kinds = {FileKind.PROJECTOR: self.projector, FileKind.DRAFT: self.draft}
        return frozenset(kind for kind, wanted in kinds.items() if not wanted)


def get(word: str, options: GetOptions) -> CommandResult:
    """Fetch a model, with progress on stderr.

    Raises:
        NoSuchModel, DownloadFailed, HubAccessDenied, DiskFull, OutOfMemory, ModelInvalid: It does
            not come; says what to do.
        Interrupted: Ctrl-C; what came is kept.
    """
    if options.as_lines:
        return _as_lines(word, options)
    return _get(word, options)


def _as_lines(word: str, options: GetOptions) -> CommandResult:
    try:
        data = _get(word, options).data
    except CorralError as error:
        text = to_json({"error": error.as_json()})
        return CommandResult(None, text, exit_code=error.exit_code)
    return CommandResult(data, to_json({"result": data}))


def _get(word: str, options: GetOptions) -> CommandResult:
    if word.startswith(OLLAMA):
        name = word.removeprefix(OLLAMA)
        raise NoSuchModel(
            f"models of Ollama's registry are not downloaded, such as {name}",
            hint=f"ollama pull {name} stores it, and corral start {name} serves it from there; "
            "or corral model get OWNER/NAME:QUANT downloads one of Hugging Face",
        )
    if not reference.is_remote(word):
        return model.get(word, dry_run=options.dry_run)
    # They import huggingface_hub, which takes a quarter of a second.
    from supervisor.commands.hub_model import get_from_hub
    from supervisor.commands.url_model import get_from_url
    from supervisor.hub.client import HubClient

    found = reference.parse(word, HubClient().endpoint)
    try:
        if isinstance(found, reference.UrlReference):
            return get_from_url(found, directories(), options)
        return get_from_hub(found, directories(), options)
    except KeyboardInterrupt:
        raise Interrupted(
            f"stopped; what came of {found} is kept",
            hint=f"corral model get {word} continues where it stopped",
        ) from None
