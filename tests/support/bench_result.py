"""Results of a bench, made up."""

import random
from datetime import UTC, datetime

from supervisor.bench.figures import BenchMachine, BenchResult, Figure, Variant

FIGURES = (
    Figure("chat.first_token_p50_ms", "first token, half within", "ms"),
    Figure("chat.first_token_p95_ms", "first token, 95 % within", "ms"),
    Figure("chat.decode_rate", "tokens per second, alone", "tokens/s"),
    Figure("chat.prompt_tokens", "prompt tokens computed", "tokens"),
    Figure("concurrent.total_rate", "tokens per second, all", "tokens/s"),
    Figure("peak_memory_bytes", "peak memory", "bytes"),
    Figure("ready_s", "time to ready", "s"),
)
_TYPICAL = (212.0, 480.0, 82.0, 310.0, 141.0, 431e6, 0.84)


def result(
    *factors: float, rounds: int = 5, names: tuple[str, ...] = (), noise: float = 0.02
) -> BenchResult:
    """Make up a result: of each variant, a rate is `factor` times the first one's."""
    chance = random.Random(1)  # noqa: S311 (the same values each time)
    variants = tuple(
        Variant(
            name=names[i] if names else ("engine", "base", "low-latency", "speculative")[i],
            profile=None,
            argv=("llama-server", "--model", "model.gguf", "--parallel", str(i + 1)),
            rounds=[_round(chance, factor, noise) for _ in range(rounds)],
        )
        for i, factor in enumerate(factors)
    )
    return BenchResult(
        model="smollm2",
        model_file="SmolLM2.q8_0.gguf",
        engine="llama-server 10434 (portable)",
        machine=BenchMachine("AMD EPYC 7B13", 2, 2, 24 << 30, (), "Linux 6.1"),
        began_at=datetime(2026, 11, 22, 10, 30, tzinfo=UTC),
        duration_s=312.4,
        seed=1,
        workloads=("chat", "concurrent"),
        rounds_planned=rounds,
        is_interrupted=False,
        figures=FIGURES,
        variants=variants,
        notes=("1.2 GiB of swap is in use.",),
    )


def _round(chance: random.Random, factor: float, noise: float) -> dict[str, float]:
    return {
        figure.name: typical
        * (factor if figure.is_higher_better else 1 / factor)
        * (1 + chance.gauss(0, noise))
        for figure, typical in zip(FIGURES, _TYPICAL, strict=True)
    }
