"""The limits themselves, as one frozen value. Each is far above honest use.

What lies beyond them crashes llama-server or stops its one computing thread, and with it the
answers of all other clients. Source: llama-server, build 10434, a tiny model and SmolLM2-135M on
one core of a shared machine:

| what | last that went well | first that did not |
| --- | --- | --- |
| parentheses inside one another, grammar or expression | 10 000 | 30 000: SIGSEGV |
| rules of which each is the next one | 30 000 | 100 000: SIGSEGV |
| alternatives of a grammar, three tokens | 1 000: 0.7 s | 10 000: 9.6 s |
| ways to go on at once, two tokens | 513: 0.9 s | 1 025: 3.5 s; 2^18: over 60 s |
| optional parts in a row, three tokens | 64: 0.6 s | 100: 4.7 s; 200: over 15 s |
| `(a*)*` in a row in a trigger, then `b` | | 20: over 130 s |
| characters of a trigger's expression, or word | 30 000 | 100 000: SIGSEGV |
| optional properties of an object | 300: 0.3 s | 1 000: 5.3 s; 2 000: over 15 s |
| levels of a schema | 1 000: 0.3 s, 0.3 GB | 10 000: SIGSEGV |
| values of an `enum`, three tokens | 1 000: 0.7 s | 10 000: 5.6 s |
| `repeat_last_n` with a penalty | 10 000 000: 0.04 GB | 1 000 000 000: 5 GB |
| `dry_sequence_breakers` | 10: 0.3 s | 100: 2.5 s; 1 000: over 15 s |
| `n_probs`, 30 tokens | 1 000: 0.3 s more | 10 000: 5.5 s |
| texts in `logit_bias` | 10 000: 1.3 s | 100 000: 9 s, 1.6 GB |

Sizes of repetitions (`{1,100000}`, `maxItems`) need no limit: the engine refuses or ignores those
above 2 000. Nor do levels of JSON outside of schemas: a body that is read here has at most 1 024.
"""

from __future__ import annotations

from dataclasses import dataclass

from proxy.errors import LimitExceeded


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """What one request may hold at most; every limit but `trigger_patterns` is at least 1.

    Attributes:
        grammar_bytes: Characters of a grammar.
        grammar_depth: Parentheses inside one another, in a grammar or a regular expression.
        grammar_rules: Rules of a grammar.
        grammar_alternatives: Alternatives of a grammar, or of a regular expression.
        grammar_ways: Ways to go on that an engine follows at once, in a grammar or a schema.
        grammar_optionals: Optional or repeated parts in a row, in a grammar or an expression.
        pattern_bytes: Characters of all regular expressions together.
        schema_values: Values in all JSON schemas together, keys not counted.
        schema_depth: Levels of JSON in a schema.
        schema_optional: Properties of one object that are not required.
        schema_choices: Entries of one list in a schema, such as `enum` or `anyOf`.
        triggers: Grammar triggers, and preserved tokens.
        trigger_patterns: Regular expressions among them; 0 refuses all, for an engine matches
            each against all of the answer at each token, and some take it 2^n steps.
        stop: Texts that end an answer.
        logit_bias: Tokens that are made more or less likely.
        text_chars: Characters of one of these texts, triggers and sequence breakers.
        n_predict: Tokens of an answer.
        last_n: Tokens that penalties look back on (`repeat_last_n`, `dry_penalty_last_n`).
        dry_sequence_breakers: Texts that end a repetition.
        samplers: Samplers.
        lora: Adapters.
        prompts: Prompts of one request.
        answers: Answers of one request (`n`).
        n_probs: Tokens whose probability is told at each place (`n_probs`, `top_logprobs`).
    """

    grammar_bytes: int = 65_536
    grammar_depth: int = 128
    grammar_rules: int = 4096
    grammar_alternatives: int = 2000
    grammar_ways: int = 1000
    grammar_optionals: int = 64
    pattern_bytes: int = 16_384
    schema_values: int = 50_000
    schema_depth: int = 128
    schema_optional: int = 300
    schema_choices: int = 2000
    triggers: int = 1024
    trigger_patterns: int = 0
    stop: int = 256
    logit_bias: int = 10_000
    text_chars: int = 4096
    n_predict: int = 2**31 - 1
    last_n: int = 2**20
    dry_sequence_breakers: int = 64
    samplers: int = 64
    lora: int = 64
    prompts: int = 2048
    answers: int = 64
    n_probs: int = 1000

    def enforce(self, member: str, unit: str, amount: float, setting: str) -> None:
        """Check one limit.

        Args:
            member: The member of the body.
            unit: What `amount` counts; empty where `amount` is the member's own value.
            setting: The limit's name.

        Raises:
            LimitExceeded: `amount` is larger.
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
