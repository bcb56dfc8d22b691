"""Tells the event stream what happens to one instance, in the fields that `events.py` lists."""

from __future__ import annotations

from pathlib import Path

from proxy.upstream.timings import Timings
from supervisor.engine_client.client import ErrorResponse
from supervisor.events import Emit
from supervisor.instance.states import Lifecycle, State
from supervisor.process.child import Exit
from supervisor.process.exit_cause import FailureCause
from supervisor.process.load_progress import Progress
from supervisor.warmup.prompts import WarmPrompt


class InstanceEvents:
    """Speaks for one instance.

    Args:
        name: The instance.
        model: The model it serves.
        emit: Where events go.
    """

    def __init__(self, name: str, model: str, emit: Emit) -> None:
        self._name = name
        self._model = model
        self._emit = emit
        self._told: tuple[int, int] = (0, 0)

    def changed(self, before: State, life: Lifecycle, reason: str) -> None:
        """Tell that it entered a state, and for what reason."""
        self._emit(
            "instance.state_changed",
            instance=self._name,
            model=self._model,
            before=before.value,
            after=life.state.value,
            run=life.run,
            reason=reason,
        )

    def progressed(self, run: int, progress: Progress) -> None:
        """Tell how far loading is, once for each whole percent."""
        now = (run, int(progress.value * 100))
        if now == self._told:
            return
        self._told = now
        self._emit(
            "instance.load_progress",
            instance=self._name,
            model=self._model,
            run=run,
            stage=progress.stage,
            value=progress.value,
        )

    def withdrawn(self, run: int, in_flight: int) -> None:
        """Tell that it gets no more requests, and how many it still holds."""
        self._emit(
            "instance.withdrawn",
            instance=self._name,
            model=self._model,
            run=run,
            in_flight=in_flight,
        )

    def drained(self, run: int) -> None:
        """Tell that it holds no more requests."""
        self._emit("instance.drained", instance=self._name, model=self._model, run=run)

    def cut(self, run: int, in_flight: int) -> None:
        """Tell that the requests it still held are cut, and how many these are."""
        self._emit(
            "instance.requests_aborted",
            instance=self._name,
            model=self._model,
            run=run,
            in_flight=in_flight,
        )

    def asked(self, run: int, how: str) -> None:
        """Tell how its process was asked, or made, to leave."""
        self._emit(
            "instance.exit_requested",
            instance=self._name,
            model=self._model,
            run=run,
            how=how,
        )

    def warmed(self, run: int, prompt: WarmPrompt, found: Timings | ErrorResponse) -> None:
        """Tell that a prompt was read ahead, or why not."""
        if isinstance(found, ErrorResponse):
            reason = found.message or f"status {found.status}"
            self._emit(
                "prompt.rejected",
                instance=self._name,
                model=self._model,
                run=run,
                prompt=prompt.name,
                reason=reason,
            )
            return
        self._emit(
            "prompt.prefilled",
            instance=self._name,
            model=self._model,
            run=run,
            prompt=prompt.name,
            tokens=found.prompt_tokens,
            cached=found.cached_tokens,
        )

    def exited(self, run: int, how: Exit, up_s: float, *, is_fault: bool) -> None:
        """Tell that its process ended, and whether it should not have."""
        self._emit(
            "instance.exited",
            instance=self._name,
            model=self._model,
            run=run,
            code=how.code,
            signal=how.signal,
            up_s=round(up_s, 3),
            fault=is_fault,
        )

    def failed(self, cause: FailureCause, failures: int, log_path: Path | None) -> None:
        """Tell that it is given up, and what to do about it."""
        self._emit(
            "instance.failed",
            instance=self._name,
            model=self._model,
            failures=failures,
            reason=cause.sentence,
            hint=cause.hint,
            log=None if log_path is None else str(log_path),
        )
