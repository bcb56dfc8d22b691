"""A model that follows a script: it calls a tool twice, then answers.

Its next token depends on the last one alone. Its template counts the results of tools in the
conversation, and ends the prompt with the token that the next line of the script follows. The
engine is the real one: it parses the calls and speaks every API.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np
from numpy.typing import NDArray
from support import tiny_gguf

_EMBD: Final = 64
# Of a head.
_WIDTH: Final = 32
ANSWER: Final = "The word in the notes is heron."


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool that runs shell commands, as one client offers it."""

    name: str
    argument: str
    is_list: bool = False  # the command is a list of words
    more: tuple[tuple[str, object], ...] = ()  # other arguments that it requires

    def call(self, command: str) -> str:
        words: object = ["bash", "-lc", command] if self.is_list else command
        arguments = {self.argument: words, **dict(self.more)}
        return json.dumps({"name": self.name, "arguments": arguments})


# Claude Code; opencode; Codex, by version.
TOOLS: Final = (
    Tool("Bash", "command", more=(("description", "Run a command"),)),
    Tool("bash", "command"),
    Tool("exec_command", "cmd"),
    Tool("shell_command", "command"),
    Tool("shell", "command", is_list=True),
)


@dataclass(frozen=True, slots=True)
class Line:
    """The text after a token of the prompt; one token itself: a vocabulary has no doubles."""

    start: str
    text: str
    otherwise: str = ""  # the text if a grammar forbids the other one
    words: int = 0  # Tokens that are said before the text.


def script(commands: Sequence[str]) -> list[Line]:
    calls = [
        Line(f"<|call {tool.name} {step}|>", f"<tool_call>\n{tool.call(command)}\n</tool_call>")
        for tool in TOOLS
        for step, command in enumerate(commands)
    ]
    return [*calls, Line("<|answer|>", ANSWER)]


def template(steps: int) -> str:
    """A template for tools; the prompt ends with the start of a line.

    A conversation that contains the answer gets it again: a compacted conversation has no results.
    """
    names = json.dumps([tool.name for tool in TOOLS])
    return (
        "{%- set seen = namespace(tool='', results=0, is_done=false) %}"
        "{%- if tools %}{{- '<|im_start|>system\\n' }}"
        "{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}"
        f"{{%- if tool.function.name in {names} and not seen.tool %}}"
        "{%- set seen.tool = tool.function.name %}{%- endif %}{%- endfor %}"
        '{{- \'\\n<tool_call>\\n{"name": NAME, "arguments": OBJECT}\\n</tool_call>\' }}'
        "{{- '<|im_end|>\\n' }}"
        "{%- endif %}"
        "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' }}"
        "{%- if message.role == 'tool' %}{%- set seen.results = seen.results + 1 %}{%- endif %}"
        "{%- if message.content %}{{- message.content }}"
        f"{{%- if {json.dumps(ANSWER)} in message.content %}}"
        "{%- set seen.is_done = true %}{%- endif %}{%- endif %}"
        "{%- for call in message.tool_calls or [] %}"
        "{%- if call.function %}{%- set call = call.function %}{%- endif %}"
        '{{- \'\\n<tool_call>\\n{"name": "\' }}{{- call.name }}{{- \'", "arguments": \' }}'
        "{{- call.arguments | tojson }}{{- '}\\n</tool_call>' }}{%- endfor %}"
        "{{- '<|im_end|>\\n' }}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}"
        f"{{%- if seen.tool and not seen.is_done and seen.results < {steps} %}}"
        "{{- '<|call ' ~ seen.tool ~ ' ' ~ seen.results ~ '|>' }}"
        "{%- else %}{{- '<|answer|>' }}{%- endif %}{%- endif %}"
    )


def make(path: Path, vocabulary_of: Path, commands: Sequence[str], *, ctx: int) -> Path:
    """Write the model that calls tools with these commands, with the vocabulary of another one."""
    return write(path, vocabulary_of, script(commands), template(len(commands)), ctx=ctx)


def write(  # noqa: PLR0913 (all by name)
    path: Path,
    vocabulary_of: Path,
    lines: Sequence[Line],
    chat_template: str,
    *,
    ctx: int,
    layers: int = 1,
    embd: int = _EMBD,
) -> Path:
    """Write a model with the vocabulary of another one and the tokens of its script.

    `layers` and `embd` determine the cost of a token.
    """
    fields = gguf.GGUFReader(vocabulary_of).fields
    tokens: list[str] = list(fields["tokenizer.ggml.tokens"].contents())
    types: list[int] = list(fields["tokenizer.ggml.token_type"].contents())
    end = tokens.index("<|im_end|>")
    follows: list[tuple[int, int, float]] = []  # with a weight
    for number, line in enumerate(lines):
        words = [f"hm{number}-{word} " for word in range(line.words)]
        said = [line.start, *map(_written, [*words, line.text])]
        first = len(tokens)
        tokens += said
        types += [gguf.TokenType.CONTROL, *[gguf.TokenType.NORMAL] * (len(said) - 1)]
        order = [*range(first, len(tokens)), end]
        follows += [(before, after, 1.0) for before, after in pairwise(order)]
        if line.otherwise:
            follows += [(order[-3], len(tokens), 0.5), (len(tokens), end, 1.0)]
            tokens.append(_written(line.otherwise))
            types.append(gguf.TokenType.NORMAL)
    writer = gguf.GGUFWriter(path, "llama")
    _add_facts(writer, ctx, layers, embd)
    _add_vocabulary(writer, fields, tokens, types, end)
    writer.add_chat_template(chat_template)
    tiny_gguf.write(writer, _tensors(len(tokens), follows, layers, embd).items())
    return path


def _add_facts(writer: Any, ctx: int, layers: int, embd: int) -> None:
    writer.add_name("scripted")
    writer.add_context_length(ctx)
    writer.add_embedding_length(embd)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(embd)
    writer.add_head_count(embd // _WIDTH)
    writer.add_head_count_kv(1)
    writer.add_rope_dimension_count(_WIDTH)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)


def _add_vocabulary(
    writer: Any, fields: Any, tokens: list[str], types: list[int], end: int
) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(fields["tokenizer.ggml.pre"].contents())
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(fields["tokenizer.ggml.merges"].contents())
    writer.add_bos_token_id(end)
    writer.add_eos_token_id(end)
    writer.add_add_bos_token(value=False)


def _written(text: str) -> str:
    """A text as a vocabulary of bytes writes it. Source: GPT-2, encoder.py, bytes_to_unicode."""
    kept = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in kept]
    letters = {byte: chr(byte) for byte in kept} | {
        byte: chr(256 + at) for at, byte in enumerate(others)
    }
    return "".join(letters[byte] for byte in text.encode())


def _tensors(
    tokens: int, follows: Sequence[tuple[int, int, float]], layers: int, embd: int
) -> dict[str, NDArray[Any]]:
    random = np.random.default_rng(0)
    embedding = random.standard_normal((tokens, embd)).astype(np.float16)
    output = np.zeros((tokens, embd), np.float16)
    for before, after, weight in follows:
        output[after] += np.float16(weight) * embedding[before]
    nothing = {
        "attn_q": (embd, embd),
        "attn_k": (_WIDTH, embd),
        "attn_v": (_WIDTH, embd),
        "attn_output": (embd, embd),
        "ffn_gate": (embd, embd),
        "ffn_up": (embd, embd),
        "ffn_down": (embd, embd),
    }
    ones = np.ones(embd, np.float32)
    return {
        "token_embd.weight": embedding,
        "output_norm.weight": ones,
        "output.weight": output,
        **{
            f"blk.{layer}.{name}.weight": ones
            for layer in range(layers)
            for name in ("attn_norm", "ffn_norm")
        },
        **{
            f"blk.{layer}.{name}.weight": np.zeros(shape, np.float16)
            for layer in range(layers)
            for name, shape in nothing.items()
        },
    }
