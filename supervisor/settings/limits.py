"""`[proxy.limits]`: how much work one request may ask of an engine."""

from __future__ import annotations

from typing import Final

from pydantic import BaseModel, ConfigDict, Field

# Numbers of the engine have 32 bits.
_MAX: Final = 2**31 - 1


class LimitsTable(BaseModel):
    """What lies beyond the defaults has crashed or stopped an engine; more gets 400."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    grammar_bytes: int = Field(65_536, ge=1, le=_MAX, description="characters of a grammar")
    grammar_depth: int = Field(
        128,
        ge=1,
        le=_MAX,
        description="parentheses inside one another, in a grammar or a regular expression",
    )
    grammar_rules: int = Field(4096, ge=1, le=_MAX, description="rules of a grammar")
    grammar_alternatives: int = Field(
        2000, ge=1, le=_MAX, description="alternatives of a grammar or of a regular expression"
    )
    grammar_ways: int = Field(
        1000,
        ge=1,
        le=_MAX,
        description="ways to go on that an engine follows at once, in a grammar or a schema",
    )
    grammar_optionals: int = Field(
        64,
        ge=1,
        le=_MAX,
        description="optional or repeated parts in a row, in a grammar or a regular expression",
    )
    pattern_bytes: int = Field(
        16_384, ge=1, le=_MAX, description="characters of all regular expressions together"
    )
    schema_values: int = Field(
        50_000, ge=1, le=_MAX, description="values in all JSON schemas together"
    )
    schema_depth: int = Field(128, ge=1, le=_MAX, description="levels of JSON in a schema")
    schema_optional: int = Field(
        300, ge=1, le=_MAX, description="properties of one object of a schema that are not required"
    )
    schema_choices: int = Field(
        2000, ge=1, le=_MAX, description="entries of one list in a schema, such as enum"
    )
    triggers: int = Field(1024, ge=1, le=_MAX, description="grammar triggers, and preserved tokens")
    trigger_patterns: int = Field(
        0,
        ge=0,
        le=_MAX,
        description="regular expressions among grammar triggers; some keep an engine for minutes",
    )
    stop: int = Field(256, ge=1, le=_MAX, description="texts that end an answer")
    logit_bias: int = Field(
        10_000, ge=1, le=_MAX, description="tokens that are made more or less likely"
    )
    text_chars: int = Field(
        4096, ge=1, le=_MAX, description="characters of one such text, trigger or sequence breaker"
    )
    n_predict: int = Field(_MAX, ge=1, le=_MAX, description="tokens of an answer")
    last_n: int = Field(2**20, ge=1, le=_MAX, description="tokens that penalties look back on")
    dry_sequence_breakers: int = Field(64, ge=1, le=_MAX, description="texts that end a repetition")
    samplers: int = Field(64, ge=1, le=_MAX, description="samplers")
    lora: int = Field(64, ge=1, le=_MAX, description="adapters")
    prompts: int = Field(2048, ge=1, le=_MAX, description="prompts of one request")
    answers: int = Field(64, ge=1, le=_MAX, description="answers of one request (n)")
    n_probs: int = Field(
        1000, ge=1, le=_MAX, description="tokens whose probability is told at each place"
    )
