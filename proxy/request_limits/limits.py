"""`[proxy.limits]`, each limit far above realistic requests.

Requests beyond them crash llama-server or stop its one computing thread, and with it the responses
to all other clients.
"""

from __future__ import annotations

from typing import Annotated, Final

from pydantic import Field

from proxy.config.types import SettingsTable
from proxy.errors import LimitExceeded

_INT32_MAX: Final = 2**31 - 1  # the engine's numbers have 32 bits
_Limit = Annotated[int, Field(ge=1, le=_INT32_MAX)]

# Source: llama-server, build 10434, a tiny model and SmolLM2-135M on one core of a shared machine.
#
# | request | last that succeeded | first that failed |
# | --- | --- | --- |
# | nested parentheses, grammar or expression | 10 000 | 30 000: SIGSEGV |
# | rules that reference the next one | 30 000 | 100 000: SIGSEGV |
# | alternatives of a grammar, three tokens | 1 000: 0.7 s | 10 000: 9.6 s |
# | parse stacks, two tokens | 513: 0.9 s | 1 025: 3.5 s; 2^18: over 60 s |
# | consecutive optional parts, three tokens | 64: 0.6 s | 100: 4.7 s; 200: over 15 s |
# | consecutive `(a*)*` in a trigger, then `b` | | 20: over 130 s |
# | characters of a trigger's expression, or word | 30 000 | 100 000: SIGSEGV |
# | optional properties of an object | 300: 0.3 s | 1 000: 5.3 s; 2 000: over 15 s |
# | levels of a schema | 1 000: 0.3 s, 0.3 GB | 10 000: SIGSEGV |
# | values of an `enum`, three tokens | 1 000: 0.7 s | 10 000: 5.6 s |
# | `repeat_last_n` with a penalty | 10 000 000: 0.04 GB | 1 000 000 000: 5 GB |
# | `dry_sequence_breakers` | 10: 0.3 s | 100: 2.5 s; 1 000: over 15 s |
# | `n_probs`, 30 tokens | 1 000: 0.3 s more | 10 000: 5.5 s |
# | texts in `logit_bias` | 10 000: 1.3 s | 100 000: 9 s, 1.6 GB |
#
# Sizes of repetitions (`{1,100000}`, `maxItems`) need no limit: the engine rejects or ignores those
# above 2 000. Nor do levels of JSON outside of schemas: `max_body_depth` limits them.


class RequestLimits(SettingsTable):
    """`[proxy.limits]`: how much work one request can cause in an engine; more gets 400."""

    grammar_bytes: _Limit = Field(65_536, description="characters of a grammar")
    grammar_depth: _Limit = Field(
        128, description="nested parentheses in a grammar or a regular expression"
    )
    grammar_rules: _Limit = Field(4096, description="rules of a grammar")
    grammar_alternatives: _Limit = Field(
        2000, description="alternatives of a grammar or of a regular expression"
    )
    grammar_stacks: _Limit = Field(
        1000, description="parse states that an engine follows at once, in a grammar or a schema"
    )
    grammar_optionals: _Limit = Field(
        64,
        description="consecutive optional or repeated parts in a grammar or a regular expression",
    )
    pattern_bytes: _Limit = Field(
        16_384, description="characters of all regular expressions together"
    )
    schema_values: _Limit = Field(50_000, description="values in all JSON schemas together")
    schema_depth: _Limit = Field(128, description="levels of JSON in a schema")
    schema_optional: _Limit = Field(
        300, description="properties of one object of a schema that are not required"
    )
    schema_choices: _Limit = Field(
        2000, description="entries of one list in a schema, such as enum"
    )
    triggers: _Limit = Field(1024, description="grammar triggers, and preserved tokens")
    trigger_patterns: Annotated[int, Field(ge=0, le=_INT32_MAX)] = Field(
        0,
        description="regular expressions among grammar triggers; some block an engine for minutes",
    )
    stop: _Limit = Field(256, description="stop texts")
    logit_bias: _Limit = Field(10_000, description="entries of logit_bias")
    text_chars: _Limit = Field(
        4096, description="characters of one such string, trigger or sequence breaker"
    )
    n_predict: _Limit = Field(_INT32_MAX, description="tokens of a response")
    last_n: _Limit = Field(2**20, description="tokens that penalties cover")
    dry_sequence_breakers: _Limit = Field(64, description="DRY sequence breakers")
    samplers: _Limit = Field(64, description="samplers")
    lora: _Limit = Field(64, description="LoRA adapters")
    prompts: _Limit = Field(2048, description="prompts of one request")
    answers: _Limit = Field(64, description="choices of one request (n)")
    n_probs: _Limit = Field(
        1000, description="tokens whose probabilities are returned at each position"
    )

    def enforce(self, member: str, unit: str, amount: float, setting: str) -> None:
        """Raise LimitExceeded if a member of the body has more `unit`s than a limit.

        `unit` is empty if `amount` is the member's own value.
        """
        limit: int = getattr(self, setting)
        if amount > limit:
            # A number may have a thousand digits.
            is_short = isinstance(amount, int) and amount < 10**18
            shown = f"{amount:d}" if is_short else f"{amount:.3g}"
            counted = f"has {shown} {unit}" if unit else f"is {shown}"
            raise LimitExceeded(
                f"{member} {counted}, more than {limit}; "
                f"send less, or raise {setting} under [proxy.limits]"
            )
