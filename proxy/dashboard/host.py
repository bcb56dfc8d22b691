"""The dashboard's interface to the supervisor."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Literal, Protocol

from proxy.nodes.gather import NodeAnswer, Question
from proxy.nodes.nodes import NodeStats
from proxy.observe.past import ForgottenConversation

Verb = Literal["load", "unload", "restart"]


@dataclass(frozen=True, slots=True)
class HostModel:
    """Facts about a local model that clients do not see."""

    profile: str
    # time until it is unloaded; None if it is busy or has no limit
    unload_in_s: float | None = None
    # position among the models that wait for memory, from 1; None if it does not wait
    place: int | None = None
    leaving: tuple[str, ...] = ()  # models that are being unloaded for it


@dataclass(frozen=True, slots=True)
class HostInstance:
    """A replica of a model, with or without a running llama-server process."""

    name: str
    model: str
    state: str
    since_s: float  # monotonic time at which it entered its state
    run: int = 0  # number of its latest process, from 1; 0 before the first
    restarts: int = 0
    # whether it only finishes its requests, because new settings replaced it
    is_retiring: bool = False
    pid: int | None = None
    rss_bytes: int | None = None
    retry_in_s: float | None = None
    load_progress: float | None = None
    engine: str | None = None
    error: Mapping[str, str] | None = None  # why it does not serve: `code`, `message` and `hint`
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Bytes of one memory by purpose; the rest of `total` is free, mapped files apart."""

    total: int
    weights: int  # of the models in it
    caches: int  # KV caches of slots, and prompts without a slot
    buffers: int  # all else that engines hold
    others: int  # other programs


@dataclass(frozen=True, slots=True)
class StartOptions:
    """Settings that a model is planned or started with; None leaves the model's own."""

    profile: str | None = None
    ctx_size: int | None = None  # tokens of all slots together
    slots: int | None = None


class MachineModels(Protocol):
    """The models on this machine: those of the settings, and others in the stores of programs.

    A model's id is looked up among them, and never becomes a path.
    """

    async def list_models(self) -> Mapping[str, object]:
        """Return `models`, `profiles`, and `notes` on places that cannot be searched.

        Of each model: `id`, `name`, `store` (None for a model of the settings), `size_bytes`,
        `quantisation`, `kind`, `profile`, and whether it `fits` with a clause in `fit`; `fits` is
        None if it cannot be planned.
        """

    async def plan(self, model: str, options: StartOptions, /) -> Mapping[str, object]:
        """Return a model's `command`, its flags in `lines`, `omitted`, `warnings`, `fits`, `fit`.

        Raises UnknownModel; BadRequest: there is no such profile; Conflict: it cannot be planned.
        """

    async def start(self, model: str, options: StartOptions, /, *, save: bool) -> None:
        """Begin to start a model; a running one restarts with the options.

        They hold until the daemon ends, unless `save` writes them to the settings file. Raises as
        `plan`; Unavailable: the daemon is stopping.
        """


@dataclass(frozen=True, slots=True)
class BenchWish:
    """A comparison to make; `force`: although the machine is not free."""

    model: str
    profiles: tuple[str, ...]
    workload: str  # empty for all that suit the model
    minutes: float
    force: bool


@dataclass(frozen=True, slots=True)
class BenchJob:
    """The latest comparison; `error` says why it failed.

    Of each row: `workload`, `figure`, `variant`, `values` and `verdict` as texts, and the `class`
    of the verdict: better, worse or same.
    """

    model: str
    profiles: tuple[str, ...]
    state: Literal["running", "done", "cancelled", "failed"] = "running"
    share: float = 0.0  # of the time, as estimated
    detail: str = ""
    rows: Sequence[Mapping[str, object]] = ()
    notes: Sequence[str] = ()
    error: str | None = None


class BenchRunner(Protocol):
    """Compares profiles of a model by `corral bench`, on separate engines; one at a time."""

    def job(self) -> BenchJob | None: ...

    async def start(self, wish: BenchWish, /) -> None:
        """Begin a comparison.

        Raises as `MachineModels.plan`; Conflict: one is running; Unavailable: the daemon is
        stopping.
        """

    def cancel(self) -> None:
        """Cancel the comparison; raises NotFound."""

    async def report(self) -> str:
        """Return the report of the latest comparison, an HTML page; raises NotFound."""


class SettingsFile(Protocol):
    """The settings file that the daemon has read; all raise NotFound if there is none."""

    async def read(self) -> Mapping[str, object]:
        """Return its `path`, its `text`, and the `etag` of its content; raises Conflict."""

    async def check(self, text: str, /) -> Mapping[str, object]:
        """Return the `problems` of a text, each with `line` (or None) and `message`.

        Without problems, also the replicas that a reload would have `added`, `removed`, `changed`
        and `kept`, and `notes`. Raises BadRequest: the text is too long; Unavailable: a reload
        runs.
        """

    async def save(self, text: str, etag: str, /) -> Mapping[str, object]:
        """Write a text without problems, and begin a reload; return as `check`, and the new `etag`.

        Raises as `check`; Conflict: the content is no longer that of `etag`, or cannot be written.
        """


@dataclass(frozen=True, slots=True)
class HostSlotFile:
    """A conversation on disk, or a beginning that conversations share (`is_prefix`)."""

    name: str
    model: str
    is_prefix: bool
    is_encrypted: bool
    tokens: int
    size_bytes: int
    saved_at: datetime
    used_at: datetime


@dataclass(frozen=True, slots=True)
class Download:
    """A download from the hub; `error` says why it failed."""

    name: str
    state: Literal["running", "done", "cancelled", "failed"] = "running"
    file: str = ""  # the present one
    done_bytes: int = 0  # of it
    size_bytes: int = 0
    error: str | None = None


@dataclass(frozen=True, slots=True)
class PinnedModel:
    """A model that llama-corral knows by its checksum; `name` downloads it."""

    name: str
    description: str
    size_bytes: int
    license: str


class Hub(Protocol):
    """Searches Hugging Face, and downloads models from it, and pinned models."""

    async def search(self, words: str, /) -> Sequence[Mapping[str, object]]:
        """Return repositories with the size of each quantisation, and whether it fits.

        Raises ProxyError: the hub does not answer.
        """

    async def fit(self, name: str, /) -> Mapping[str, object]:
        """Plan the model that `download` would choose; return `name`, `fits`, and a clause `fit`.

        Raises NotServed: the name is not on the hub; ProxyError: the hub does not answer, or none
        of the repository's models fits.
        """

    def pinned(self) -> Sequence[PinnedModel]:
        """Return the pinned models that are not on this machine."""

    def downloads(self) -> Sequence[Download]:
        """Return the latest downloads, in the order in which they began."""

    def download(self, name: str, /) -> None:
        """Begin the download of OWNER/NAME, OWNER/NAME:QUANT or a pinned model, or continue it.

        Raises NotServed: the name is not on the hub; Conflict: it is running; Unavailable: too many
        are running, or the daemon is stopping.
        """

    def cancel(self, name: str, /) -> None:
        """Cancel a download, and keep the data received so far. Raises NotFound."""


class HostEvent(Protocol):
    """An event of the daemon; no field contains a prompt or a secret."""

    @property
    def name(self) -> str: ...

    @property
    def at(self) -> datetime: ...

    @property
    def level(self) -> str: ...

    @property
    def fields(self) -> Mapping[str, object]: ...


class DashboardHost(Protocol):
    @property
    def vendor(self) -> Path:
        """The folder with the libraries of the page."""

    @property
    def version(self) -> str: ...

    @property
    def machine_models(self) -> MachineModels: ...

    @property
    def bench(self) -> BenchRunner: ...

    @property
    def settings_file(self) -> SettingsFile: ...

    @property
    def hub(self) -> Hub: ...

    def models(self) -> Mapping[str, HostModel]: ...

    def instances(self) -> Sequence[HostInstance]: ...

    def memory(self) -> Mapping[str, HostMemory]:
        """Return this machine's memories, the main memory (`host`) first, then devices."""

    def devices(self) -> Sequence[Mapping[str, object]]:
        """Return this machine's cards: `id`, `name`, and the figures that are known.

        `load` (0 to 1), `memory_used_bytes`, `memory_total_bytes`, `temperature_c`, `power_w`,
        `power_limit_w`, `throttled` (why it computes more slowly than it could), and a `problem`.
        """

    def nodes(self) -> Sequence[NodeStats]: ...

    async def ask_nodes(
        self, question: Question, query: Mapping[str, str], /
    ) -> Sequence[NodeAnswer]:
        """Ask all nodes, within 2 s; see `nodes.gather`."""

    async def caches(self) -> object:
        """Return the places of the prompts of each model, as `corral slots --json` does."""

    def observe(self, take: Callable[[HostEvent], None], /) -> None:
        """Call `take`, which does not block, for each event from now on."""

    def command(self, verb: Verb, model: str, /) -> None:
        """Begin a command on a model.

        Raises UnknownModel: the model is not configured; Unavailable: the daemon is stopping.
        """

    def slot_files(self) -> Sequence[HostSlotFile]:
        """Return the files of conversations on disk, the latest used first."""

    async def forget(self, file: str, /) -> ForgottenConversation:
        """Delete the caches of a file's conversation; raises NotFound."""

    def log_sources(self) -> Sequence[str]:
        """Return the names of the existing logs."""

    async def log_tail(self, source: str, lines: int, /) -> Sequence[str]:
        """Return the last lines of a log; raises NotFound."""

    def log_lines(self, source: str, lines: int, /) -> AsyncGenerator[str, None]:
        """Yield the last lines of a log, then each new line; raises NotFound at once."""

    async def clients(
        self, model: str | None, url: str, /, *, needs_key: bool
    ) -> Mapping[str, object]:
        """Return the settings of client programs for the proxy's URL; raises UnknownModel.

        Its members: `models` that answer chats, the chosen `model`, the `key_variable` of the
        environment, and `clients`, each with `name`, `title`, `files` (`path`, `content`), `notes`,
        the `command` that writes them here, and the command to `run` the program.
        """
