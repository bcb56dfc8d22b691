"""What the proxy needs of the fleet: the models there are, and one made ready."""

from __future__ import annotations

from datetime import UTC, datetime

from proxy.carry.variant import Variant
from proxy.errors import Unavailable, UnknownModel
from proxy.loader import ModelCard
from supervisor.bridge.redact import without_directories
from supervisor.events import EventStream
from supervisor.fleet.fleet import Fleet
from supervisor.fleet.presence import availability
from supervisor.fleet.replica import Model
from supervisor.fleet.steward import Steward
from supervisor.fleet.workshop import Workshop
from supervisor.settings.model import VariantTable


class Catalogue:
    """What the proxy needs of the fleet (proxy.loader.Loader).

    Attributes:
        created: When it was made: Unix time in whole seconds.
    """

    def __init__(self, fleet: Fleet, steward: Steward, events: EventStream) -> None:
        self._fleet = fleet
        self._steward = steward
        self._events = events
        self.created = int(datetime.now(tz=UTC).timestamp())
        self._workshop: Workshop | None = None
        self._variants: dict[str, dict[str, Variant]] = {}

    def models(self) -> list[ModelCard]:
        """Return every configured model, up or not."""
        self._read_variants(self._fleet.workshop)
        models = self._fleet.models.values()
        return [self._card(model) for model in models if model.is_configured]

    async def ensure_ready(self, model: str) -> None:
        """Have a model brought up, and wait until it serves; the caller sets the deadline.

        Raises:
            Unavailable: It will not: stopped, failed, or without memory for it.
            UnknownModel: It is configured no more.
        """
        found = self._find(model)
        with self._steward.calling(found), self._events.listen() as changes:
            while availability(found)[0] in {"loading", "unloaded"}:
                await changes.next()
                found = self._find(model)
        state, reason = availability(found)
        if state != "loaded":
            told = _told(found, reason)
            raise Unavailable(f"{model} cannot answer: {told}", retry_after_s=10)

    def _find(self, name: str) -> Model:
        """Return a model, which may have gone since the request was read."""
        found = self._fleet.models.get(name)
        if found is None or not found.is_configured:
            raise UnknownModel(name, [card.id for card in self.models()])
        return found

    def _card(self, model: Model) -> ModelCard:
        plan = model.plan
        state, reason = availability(model)
        return ModelCard(
            id=model.entry.name,
            aliases=model.entry.aliases,
            state=state,
            created=self.created,
            context_length=plan.ctx_size // plan.slots if plan else None,
            slots=plan.slots * len(model.replicas) if plan else 0,
            reason=_told(model, reason),
            variants=self._variants.get(model.entry.name, {}),
        )

    def _read_variants(self, workshop: Workshop) -> None:
        """Take in the variants of these settings, where that was not done yet."""
        if workshop is not self._workshop:
            self._workshop = workshop
            self._variants = {
                model: {name: _variant(one) for name, one in workshop.variants(model).items()}
                for model in workshop.entries
            }


def _told(model: Model, reason: str | None) -> str | None:
    """Return a reason as clients may know it."""
    return reason and without_directories(reason, [model.entry.path])


def _variant(table: VariantTable) -> Variant:
    return Variant(table.defaults, table.set, frozenset(table.strip))
