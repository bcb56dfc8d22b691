"""Writes a tiny llama model that the real engine loads in milliseconds.

Mode `random` has random weights: every earlier token matters, so a wrong KV cache changes the text.
Mode `cycle` says the alphabet over and over, so a lost or doubled token shows. Neither ever samples
a control or byte token at temperature 0: an answer is as long as `max_tokens` allows.
"""

from __future__ import annotations

import string
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final, Literal

import gguf
import numpy as np
from numpy.typing import NDArray

Mode = Literal["random", "cycle"]
Array = NDArray[Any]

CHAT_TEMPLATE: Final = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# It leaves out the reasoning of earlier answers.
REASONING_TEMPLATE: Final = (
    "{% for message in messages %}"
    "{% set content = message['content'] %}"
    "{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + content + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
)
# An answer that begins with reasoning.
REASONED: Final = 'root ::= "abcdefgh</think>a river and a stone"'

# Dimension 0 of the residual stream is this constant: no layer writes to it, so that an output row
# can forbid its token by a large negative weight there.
_CONSTANT: Final = 4.0
_FORBID: Final = -100.0
_WORDS: Final = ("the", "an", "in", "of", "on", "er", "th", "he", "user", "system", "assistant")


def make(
    path: Path,
    *,
    mode: Mode = "random",
    embd: int = 64,
    layers: int = 2,
    heads: int = 2,
    kv_heads: int | None = None,
    ff: int = 128,
    ctx: int = 2048,
    seed: int = 0,
    extra_tokens: int = 0,
    window: int | None = None,
    chat_template: str | None = CHAT_TEMPLATE,
) -> Path:
    """Write a GGUF of architecture `client`, with a window `gemma3`, and return its path.

    Args:
        path: Where to write.
        mode: The text that the model generates.
        embd: Width of the residual stream; `embd / heads` is the head size.
        layers: Number of blocks.
        heads: Query heads a layer.
        kv_heads: Key and value heads a layer; None means as many as query heads.
        ff: Width of the feed-forward part.
        ctx: Context length the model claims to be trained for, in tokens.
        seed: Of the weights.
        extra_tokens: Tokens added to the vocabulary; with any, it fits no model without them.
        window: Tokens that five layers of six look back; None for all, in all layers.
        chat_template: The template to store; None stores none.
    """
    kv_heads = kv_heads or heads
    tokens, types = vocabulary(extra_tokens)
    writer = gguf.GGUFWriter(path, "gemma3" if window else "llama")
    writer.add_name(f"tiny {mode}")
    writer.add_context_length(ctx)
    writer.add_embedding_length(embd)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(ff)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_rope_dimension_count(embd // heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    add_tokenizer(writer, tokens, types, chat_template)
    if window:
        writer.add_sliding_window(window)
        writer.add_key_length(embd // heads)
        writer.add_value_length(embd // heads)
    sizes = embd, layers, kv_heads * embd // heads, ff
    norms = _gemma_norms(layers, embd, embd // heads) if window else ()
    write(writer, [*_tensors(mode, tokens, types, sizes, seed), *norms])
    return path


def write(writer: gguf.GGUFWriter, tensors: Iterable[tuple[str, Array]]) -> None:
    """Write the file of a writer that has all but its tensors."""
    for name, weights in tensors:
        writer.add_tensor(name, weights)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def make_slow(path: Path) -> Path:
    """Write a model that generates some 500 tokens a second of the alphabet, up to 32 768."""
    return make(path, embd=256, heads=8, kv_heads=2, layers=12, ff=1024, ctx=32_768, mode="cycle")


def vocabulary(extra: int) -> tuple[list[str], list[int]]:
    control = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    letters = [*string.ascii_letters, *string.digits, *".,:;!?'\"()-_/\\@#$%&*+=<>|[]{}~^`", "▁"]
    words = [
        *_WORDS,
        *(f"▁{word}" for word in _WORDS),
        *(f"▁{letter}" for letter in string.ascii_lowercase),
    ]
    normal = [*letters, *words, *(f"▁extra{number}" for number in range(extra))]
    tokens = ["<unk>", *control, *(f"<0x{byte:02X}>" for byte in range(256)), *normal]
    kind = gguf.TokenType
    types = [kind.UNKNOWN, *[kind.CONTROL] * 4, *[kind.BYTE] * 256, *[kind.NORMAL] * len(normal)]
    return tokens, types


def add_tokenizer(writer: Any, tokens: list[str], types: list[int], template: str | None) -> None:
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    # Longer pieces win, as a trained SentencePiece model would have it.
    writer.add_token_scores([float(len(token)) for token in tokens])
    writer.add_token_types(types)
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(4)
    writer.add_add_bos_token(value=True)
    if template is not None:
        writer.add_chat_template(template)


def _tensors(
    mode: Mode, tokens: list[str], types: list[int], sizes: tuple[int, int, int, int], seed: int
) -> list[tuple[str, Array]]:
    embd, layers, kv, ff = sizes
    random = np.random.default_rng(seed)

    def matrix(rows: int, columns: int) -> Array:
        weights: Array = random.standard_normal((rows, columns)) / np.sqrt(columns)
        return weights.astype(np.float16)

    def onto_stream(columns: int) -> Array:
        weights = matrix(embd, columns) * np.float16(mode == "random")
        weights[0] = 0
        return weights

    norm = np.ones(embd, np.float32)
    embedding, output = ends(mode, tokens, types, embd, random)
    found: list[tuple[str, Array]] = [
        ("token_embd.weight", embedding),
        ("output_norm.weight", norm),
        ("output.weight", output),
    ]
    for layer in range(layers):
        block: dict[str, Array] = {
            "attn_norm": norm,
            "attn_q": matrix(embd, embd) * np.float16(2),
            "attn_k": matrix(kv, embd) * np.float16(2),
            "attn_v": matrix(kv, embd) * np.float16(2),
            "attn_output": onto_stream(embd),
            "ffn_norm": norm,
            "ffn_gate": matrix(ff, embd),
            "ffn_up": matrix(ff, embd),
            "ffn_down": onto_stream(ff),
        }
        found += [(f"blk.{layer}.{name}.weight", weights) for name, weights in block.items()]
    return found


def ends(
    mode: Mode, tokens: list[str], types: list[int], embd: int, random: np.random.Generator
) -> tuple[Array, Array]:
    """Return the embeddings and the output rows of a model that generates the text of `mode`."""
    embedding = random.standard_normal((len(tokens), embd)).astype(np.float16)
    embedding[:, 0] = _CONSTANT
    rows: Array = random.standard_normal((len(tokens), embd)) / np.sqrt(embd)
    return embedding, _output(mode, tokens, types, embedding, rows.astype(np.float16))


def _gemma_norms(layers: int, embd: int, head: int) -> list[tuple[str, Array]]:
    sizes = {"attn_q_norm": head, "attn_k_norm": head, "post_attention_norm": embd}
    sizes["post_ffw_norm"] = embd
    return [
        (f"blk.{layer}.{name}.weight", np.ones(size, np.float32))
        for layer in range(layers)
        for name, size in sizes.items()
    ]


def _output(
    mode: Mode,
    tokens: list[str],
    types: list[int],
    embedding: Array,
    output: Array,
) -> Array:
    """Return the output rows, where row i scores token i as the next one."""
    alphabet = [tokens.index(letter) for letter in string.ascii_lowercase]
    if mode == "cycle":
        for before, after in zip(alphabet, alphabet[1:] + alphabet[:1], strict=True):
            output[after] = embedding[before]
        allowed = set(alphabet)
    else:
        allowed = {i for i, kind in enumerate(types) if kind == gguf.TokenType.NORMAL}
    for token in range(len(tokens)):
        output[token, 0] = 0 if token in allowed else _FORBID
    return output
