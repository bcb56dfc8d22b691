"""One tuning of a model: searches the best variant, checks its answers, and shows the result.

The quality check compares a variant's probabilities with those of a reference whose cache is not
rounded. Greedy tokens alone say little: another number of threads changes the last bits of a sum,
and between two tokens of almost equal probability the text takes another course without being
worse. After a different token the comparison continues from the reference's token, so that both
sides always have the same text before them.
"""

from __future__ import annotations

import asyncio
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter, itemgetter
from typing import Any, Final, Literal

import orjson

from supervisor.bench import tune_search
from supervisor.bench.figures import TOO_FEW, Words
from supervisor.bench.own_engine import private_client
from supervisor.bench.tune_measure import NO_MEMORY, TEXTS, Measurements, Sizes, VariantPlans
from supervisor.bench.tune_space import BASE, GoalName, Situation, Variant, candidates
from supervisor.bench.workload import WorkloadFailed, post, tokenize
from supervisor.engine.client import EngineClient, EngineUnreachable
from supervisor.errors import EngineFailed, ModelInvalid, StartFailed
from supervisor.output import size
from supervisor.plan.draft import offered_types, usable_type
from supervisor.plan.kv_cache import UNQUANTISED
from supervisor.plan.placement import layers_with_experts_kept
from supervisor.settings.schema import Settings
from supervisor.system import machine
from supervisor.system.paths import Directories

# An engine reports the most probable tokens; all others together count as one.
_EPSILON: Final = 1e-6


def kl_divergence(reference: Mapping[int, float], other: Mapping[int, float]) -> float:
    """Return the Kullback-Leibler divergence of `other` from `reference`, in nats.

    Both are log-probabilities of the most probable tokens. A token that `other` lacks counts
    like its least probable one.
    """
    lowest = min(other.values(), default=math.log(_EPSILON))
    known = [(p, other.get(token, lowest)) for token, p in reference.items()]
    total = math.fsum(math.exp(p) * (p - q) for p, q in known)
    rest, other_rest = (
        max(_EPSILON, 1 - math.fsum(math.exp(p) for p in logs))
        for logs in ([p for p, _ in known], [q for _, q in known])
    )
    return max(0.0, total + rest * math.log(rest / other_rest))


LIMIT: Final = 0.02  # nats, the mean over all tokens
# A text that differs at more tokens is not compared to its end.
_PARTS_MAX: Final = 16
_GREEDY: Final[Mapping[str, Any]] = {
    "temperature": 0,
    "n_probs": 40,
    "ignore_eos": True,
    "return_tokens": True,
}


# A generated token and the log-probabilities of the most probable tokens, which are not known of a
# token that was drafted and accepted. Source: llama-server, builds 10434 and 11434.
Position = tuple[int, Mapping[int, float]]
# A prompt and the answer to it.
Answer = tuple[list[int], tuple[Position, ...]]


@dataclass(frozen=True, slots=True)
class Quality:
    """How many of `total` tokens equal the reference's; mean KL divergence in nats, or None."""

    equal: int
    total: int
    divergence: float | None

    def __str__(self) -> str:
        if self.divergence is None:
            return f"{self.equal} of {self.total} tokens equal"
        if self.equal == self.total:
            return f"answers equal on {self.total} tokens, KL divergence {self.divergence:.5f}"
        text = f"KL divergence {self.divergence:.5f} on {self.total} tokens"
        return f"{text}, {self.total - self.equal} of them differ"

    def reason_against(self, limit: float = LIMIT) -> str | None:
        if self.divergence is None or self.divergence <= limit:
            return None
        return f"its answers change too much: {self}, the limit is {limit:g}"


async def record(client: EngineClient, tokens: int) -> tuple[Answer, ...]:
    answers = []
    for text in TEXTS:
        prompt = await tokenize(client, text, add_special=True)
        answers.append((prompt, await _greedy(client, prompt, tokens)))
    return tuple(answers)


async def compare(client: EngineClient, reference: Sequence[Answer]) -> Quality:
    pairs = [pair for answer in reference for pair in await _compare_positions(client, answer)]
    tops = [(ours, theirs) for (_, ours), (_, theirs) in pairs if ours and theirs]
    divergences = [kl_divergence(ours, theirs) for ours, theirs in tops]
    return Quality(
        equal=sum(ours[0] == theirs[0] for ours, theirs in pairs),
        total=len(pairs),
        divergence=sum(divergences) / len(divergences) if divergences else None,
    )


async def _compare_positions(
    client: EngineClient, reference: Answer
) -> list[tuple[Position, Position]]:
    prompt, positions = reference
    pairs: list[tuple[Position, Position]] = []
    for _ in range(_PARTS_MAX):
        wanted = positions[len(pairs) :]
        if not wanted:
            break
        done = [token for token, _ in positions[: len(pairs)]]
        found = await _greedy(client, [*prompt, *done], len(wanted))
        for ours, theirs in zip(wanted, found, strict=True):
            pairs.append((ours, theirs))
            if ours[0] != theirs[0]:
                break
    return pairs


async def _greedy(client: EngineClient, prompt: Sequence[int], tokens: int) -> tuple[Position, ...]:
    body = {"prompt": list(prompt), "n_predict": tokens, **_GREEDY}
    found = tuple(_positions(orjson.loads(await post(client, "/completion", body))))
    if len(found) != tokens:
        raise WorkloadFailed(f"/completion reported {len(found)} of {tokens} tokens")
    return found


def _positions(content: Mapping[str, Any]) -> Iterator[Position]:
    for entry in content.get("completion_probabilities", ()):
        match entry:
            case {"id": int(token), "top_logprobs": list(top)}:
                yield token, {int(t["id"]): float(t["logprob"]) for t in top}
            case _:
                raise WorkloadFailed("/completion reported a token without probabilities")


# A variant's divergence may be this many times that of the profile it extends.
_MORE_THAN_BASE: Final = 1.25
# An f16 cache, which is not rounded, and no drafts.
REFERENCE: Final = Variant(
    flags=(("cache-type-k", "f16"), ("cache-type-v", "f16"), ("spec-type", "none"))
)


class QualityChecks:
    """The quality checks of one search; `found` has the results by variant."""

    def __init__(
        self, plans: VariantPlans, directories: Directories, tokens_each: Callable[[], int]
    ) -> None:
        """`tokens_each` returns how many tokens to check for each text."""
        self._plans = plans
        self._directories = directories
        self._tokens_each = tokens_each
        self._reference: Sequence[Answer] = ()
        self.found: dict[Variant, Quality] = {}

    async def check(self, variant: Variant, limit_s: float) -> str | None:
        """Return why a variant is excluded, as a clause; None if it is as good as the profile."""
        try:
            async with asyncio.timeout(limit_s):
                return await self._reason_against(variant)
        except TimeoutError:
            return tune_search.NO_TIME
        except (EngineFailed, EngineUnreachable, StartFailed, WorkloadFailed) as error:
            return f"{tune_search.UNCHECKED}{error}"

    async def _reason_against(self, variant: Variant) -> str | None:
        reference_plan = self._plans.plan(REFERENCE)
        if not self._reference:
            async with private_client(reference_plan, self._directories) as client:
                self._reference = await record(client, self._tokens_each())
        limit = LIMIT
        chosen = self._plans.base.memory_inputs.chosen
        types = {str(chosen.get(f"cache-type-{letter}", "f16")) for letter in "kv"}
        if not types <= UNQUANTISED:
            of_base = (await self._quality(BASE)).divergence or 0.0
            limit = max(limit, of_base * _MORE_THAN_BASE)
        return (await self._quality(variant)).reason_against(limit)

    async def _quality(self, variant: Variant) -> Quality:
        if variant not in self.found:
            async with private_client(self._plans.plan(variant), self._directories) as client:
                self.found[variant] = await compare(client, self._reference)
        return self.found[variant]


# Ending an engine in the middle of a request takes this long on a busy machine.
_ENDING_S: Final = 2.0


class TuneJob:
    """One `corral tune`; its parts can be read after an interrupt."""

    def __init__(  # noqa: PLR0913 (the subject and the ways of tuning)
        self,
        settings: Settings,
        directories: Directories,
        model: str,
        goal: GoalName = "latency",
        minutes: float = 5.0,
        seed: int = 0,
        *,
        first: tuple[Variant, ...] = (),
        only: Variant | None = None,
    ) -> None:
        """Plan the profile and its variants, `first` before all others; raises CorralError.

        With `only`, the job checks this variant instead of searching.
        """
        ends_at_s = time.monotonic() + minutes * 60
        self.minutes = minutes
        self.seed = seed
        self.goal = tune_search.GOALS[goal]
        self.plans = VariantPlans(settings, directories, model)
        _check_generates(self.plans)
        self._only = only
        wanted = (only,) if only else (*first, *candidates(goal, _situation(self.plans)))
        usable = self.plans.usable(wanted)
        self.refused: Mapping[Variant, str] = {
            variant: reason for variant, reason in usable.items() if reason
        }
        self.candidates = tuple(variant for variant, reason in usable.items() if reason is None)
        self._measurements = Measurements(self.goal, self.plans, directories)
        self.checks = QualityChecks(self.plans, directories, lambda: self.sizes.quality)
        self.search = tune_search.Search(
            self.goal,
            self.candidates,
            self._measurements.measure,
            self.checks.check,
            budget_s=ends_at_s - _ENDING_S - time.monotonic(),
            clock=time.monotonic,
            seed=seed,
        )
        self.trials = self.search.trials

    @property
    def sizes(self) -> Sizes:
        """The sizes of the requests; raises StartFailed before the base was measured."""
        if self._measurements.sizes is None:
            raise StartFailed("nothing was measured yet")
        return self._measurements.sizes

    async def run(self, progress: tune_search.Progress) -> tune_search.Outcome:
        """Search, or check; raises StartFailed if nothing could be measured."""
        more = f"--minutes {math.ceil(self.minutes * 4)}"
        try:
            outcome = await (
                self.search.check(self._only, progress) if self._only else self.search.run(progress)
            )
        except tune_search.BaseFailed as error:
            raise StartFailed(
                f"{self.plans.model} could not be measured with its profile: {error}",
                hint=f"give it more time ({more}), or see whether it starts: "
                f"corral start {self.plans.model}",
            ) from error
        if self.trials.is_empty and not self._only:
            raise StartFailed(
                f"no variant of {self.plans.model} could be measured in {self.minutes:g} minutes",
                hint=f"give it more time ({more}), and end other programs",
            )
        return outcome


Judgement = Literal["better", "as good", "worse", "uncertain"]


# A variant that may be worse by more is not called as good.
_AS_GOOD: Final = 0.95


def judge(outcome: tune_search.Outcome, failure: str | None, words: Words) -> Judgement:
    """Return what a check says of a variant; `failure` is why the variant was given up."""
    found = outcome.comparison
    if outcome.winner:
        return "better"
    if failure and failure.startswith((tune_search.UNCHECKED, NO_MEMORY)):
        return "uncertain"
    if failure or (found and found.is_different):
        return "worse"
    if found is None or found.verdict == TOO_FEW:
        return "uncertain"
    at_worst = found.low if words.is_above_better else 1 / found.high
    return "as good" if at_worst >= _AS_GOOD else "uncertain"


def _check_generates(plans: VariantPlans) -> None:
    use = plans.base.embedding
    if use and use.is_only:
        raise ModelInvalid(
            f"{plans.model} makes embeddings, and tuning measures generated text",
            hint=f"corral plan {plans.model} shows how it runs",
        )
    if reason := plans.reason_against(BASE):
        raise StartFailed(
            f"{plans.model} cannot be measured with its profile: {reason}",
            hint="end other programs, or unload models: corral unload",
        )


def _situation(plans: VariantPlans) -> Situation:
    plan = plans.base
    here = machine.read()
    return Situation(
        chosen=plan.memory_inputs.chosen,
        flags=plan.engine.flags,
        physical_cores=here.physical_cores,
        logical_cores=here.logical_cores,
        slots=plan.slots,
        ctx_slot=plan.ctx_size // plan.slots,
        layers=plan.gguf.layers,
        experts_kept=len(layers_with_experts_kept(plan.gguf, plan.estimate.placement)),
        devices=tuple(device.name for device in plan.engine.devices),
        draft_type=usable_type(
            plan.memory_inputs.draft, plan.gguf, offered_types(plan.engine.flags)
        ),
    )


HEAD: Final = ("VARIANT", "ROUNDS", "AGAINST BASE", "NOTE")
# Below this ratio, noise alone explains that the best of many looks better than the base.
_BETTER: Final = 1.03


def figure_lines(
    trials: tune_search.Trials, variant: Variant, rounds: Iterable[int], prompt_tokens: int
) -> Iterator[tuple[str, str]]:
    """Yield the name and the values of each figure that matters for the goal."""
    base, other = trials.pairs(variant, rounds)
    first = f"first token after a prompt of {prompt_tokens}"
    decode = ("decoding, one stream", attrgetter("decode"), "{:.1f} tokens/s".format)
    shown: dict[
        GoalName, Sequence[tuple[str, Callable[[tune_search.Figures], float], Callable[..., str]]]
    ] = {
        "latency": (decode, (first, lambda found: found.first_token_s * 1000, "{:.0f} ms".format)),
        "throughput": (("all streams together", attrgetter("total"), "{:.1f} tokens/s".format),),
        "memory": (("peak memory", attrgetter("peak_bytes"), size), decode),
    }
    for name, read, text in shown[trials.goal.name] if base else ():
        texts = []
        for found in (base, other):
            values = list(map(read, found))
            low, high = text(min(values)), text(max(values))
            texts.append(f"{text(statistics.median(values))} ({low} to {high})")
        yield name, f"{texts[0]} before, {texts[1]} now; {len(base)} rounds"


def rows(job: TuneJob, untried: Sequence[Variant]) -> list[tuple[str, ...]]:
    """Return a row for each variant, the best first, the untried and the refused ones last."""
    trials, qualities = job.trials, job.checks.found
    found: list[tuple[float, tuple[str, ...]]] = []
    for trial in trials:
        ratio = trials.ratio(trial.variant)
        shown = "-" if trial.variant == BASE or math.isnan(ratio) else f"{ratio:.2f} ×"
        note = trial.failure or str(qualities.get(trial.variant, ""))
        place = 1.0 if math.isnan(ratio) else -ratio
        found.append((place, (trial.variant.name, str(len(trial.rounds)), shown, note)))
    others = dict.fromkeys(untried, "no time to try it") | dict(job.refused)
    rows = [row for _, row in sorted(found, key=itemgetter(0))]
    return [*rows, *((variant.name, "0", "-", reason) for variant, reason in others.items())]


def data(
    trials: tune_search.Trials, qualities: Mapping[Variant, Quality]
) -> list[dict[str, object]]:
    return [
        {
            "variant": trial.variant.name,
            "flags": dict(trial.variant.flags),
            "replicas": trial.variant.replicas,
            "rounds": len(trial.rounds),
            "ratio": None if math.isnan(ratio := trials.ratio(trial.variant)) else ratio,
            "failure": trial.failure,
            "quality": str(qualities[trial.variant]) if trial.variant in qualities else None,
        }
        for trial in trials
    ]


def best_so_far(trials: tune_search.Trials) -> tune_search.Trial | None:
    """Return the best variant measured, if it seemed better than the base, even if rejected."""
    known = [(trials.ratio(trial.variant), trial) for trial in trials if trial.variant != BASE]
    better = [(ratio, trial) for ratio, trial in known if ratio > _BETTER]
    return max(better, key=lambda pair: pair[0])[1] if better else None
