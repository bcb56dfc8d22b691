"""Which models may be loaded at the same time, whatever memory allows: `[groups.NAME]`. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Self

from pydantic import Field, model_validator

from proxy.common.toml_types import SettingsTable
from supervisor.settings.tables import ModelName

GROUP_MAX: Final = 256  # models of one group


class GroupSettings(SettingsTable):
    """`[groups.NAME]`: which models may be loaded at the same time, whatever memory allows."""

    models: tuple[ModelName, ...] = Field(min_length=1, max_length=GROUP_MAX)
    """names of [models]"""
    max_loaded: int | None = Field(None, ge=1, le=GROUP_MAX)
    """how many of them may be loaded at the same time; unset: all"""
    exclusive: bool = False
    """while one of them is loaded, no other model is, except those with pinned = true"""
    together: bool = False
    """a request for one of these models unloads none of the others"""

    @model_validator(mode="after")
    def _has_a_rule(self) -> Self:
        if len(set(self.models)) < len(self.models):
            raise ValueError("models names one twice")
        if not self.rules:
            raise ValueError("it has no rule: set max_loaded, exclusive or together")
        return self

    @property
    def rules(self) -> Mapping[str, str]:
        """Its rules as clauses, by the key that sets each."""
        models = ", ".join(self.models)
        clauses = {
            "max_loaded": f"at most {self.max_loaded} of {models} may be loaded at the same time",
            "exclusive": f"no other model may be loaded beside {models}",
            "together": f"a request for one of {models} unloads no other of them",
        }
        return {key: clause for key, clause in clauses.items() if getattr(self, key)}


class Rule(NamedTuple):
    group: str
    clause: str

    def __str__(self) -> str:
        return f"{self.clause} (groups.{self.group})"


@dataclass(frozen=True, slots=True)
class Groups:
    """The rules of all groups; `pinned` are the models that are never unloaded for another."""

    settings: Mapping[str, GroupSettings] = field(default_factory=dict)
    pinned: frozenset[str] = frozenset()

    def rules(self, model: str | None = None) -> list[str]:
        """Return the rules of all groups, or of those that a model belongs to."""
        return [
            str(Rule(name, clause))
            for name, group in self.settings.items()
            if model is None or model in group.models
            for clause in group.rules.values()
        ]

    def rule_against(self, model: str, others: Collection[str]) -> Rule | None:
        """Return the first rule that forbids loading a model beside these others, or None."""
        others = {*others} - {model}
        for name, group in self.settings.items():
            members, is_member = others.intersection(group.models), model in group.models
            if is_member and group.max_loaded and len(members) >= group.max_loaded:
                return Rule(name, group.rules["max_loaded"])
            strangers = others - members if is_member else {model} if members else set[str]()
            if group.exclusive and strangers - self.pinned:
                return Rule(name, group.rules["exclusive"])
        return None

    def kept_for(self, model: str) -> frozenset[str]:
        """Return the models that no request for this one unloads."""
        groups = (set(group.models) for group in self.settings.values() if group.together)
        kept = (members for members in groups if model in members)
        return self.pinned.union(*kept) - {model}

    def allowed(self, models: Iterable[str]) -> list[str]:
        """Return the models that may be loaded together: pinned ones first, then in order."""
        chosen: list[str] = []
        for model in sorted(models, key=lambda name: name not in self.pinned):
            if not self.rule_against(model, chosen):
                chosen.append(model)
        return chosen

    def contradictions(self, models: Iterable[str]) -> Iterator[Rule]:
        """Yield, for each group, a rule by which one of these models could never be loaded."""
        found = dict[str, Rule]()
        for model in models:
            kept = self.kept_for(model)
            if rule := self.rule_against(model, kept):
                stays = [other for other in kept if self.rule_against(model, {other})] or kept
                reason = f"{model} could never be loaded: {rule.clause}, and no request for it "
                reason += f"unloads {', '.join(sorted(stays))}"
                found.setdefault(rule.group, Rule(rule.group, reason))
        yield from found.values()
