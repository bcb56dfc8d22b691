"""Causes, on output recorded from builds 10434 and 11434 (`failure_signatures.json`).

The texts in `WRITTEN` could not be provoked where those were recorded; they follow the sources of
llama.cpp, ggml and the dynamic loader.
"""

import errno
import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from supervisor.engine.exit_cause import (
    Table,
    diagnose,
    known_cause,
    not_launchable,
    patterns,
    spawn_failed,
    warnings,
)
from supervisor.errors import AccessDenied

RECORDED: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parent / "failure_signatures.json").read_text()
)

# The cause of each recorded failure; a build that starts all the same has no entry.
CAUSES = {
    "missing_model": "model_missing",
    "truncated_tensors": "model_truncated",
    "truncated_header": "model_truncated",
    "not_gguf": "model_not_gguf",
    "empty_file": "model_not_gguf",
    "dir_as_model": "model_not_gguf",
    "port_in_use": "port_in_use",
    "bad_host": "port_in_use",
    "unknown_flag": "flag_unknown",
    "removed_draft_max": "flag_removed",
    "removed_mlock": "flag_unknown",
    "removed_no_mmap": "flag_unknown",
    "bare_fa": "value_invalid",
    "fa_bad": "value_invalid",
    "bad_int": "value_invalid",
    "missing_value": "value_invalid",
    "bad_ctk": "value_invalid",
    "ctv_q8_no_fa": "cache_type_needs_flash_attention",
    "np_zero": "value_invalid",
    "ctx_huge_smol": "host_memory",
    "ctx_huge_smol_fit": "host_memory",
    "ctx_as_limit": "host_memory",
    "slot_save_missing": "path_denied",
    "slot_save_file": "path_denied",
    "api_key_file_missing": "path_denied",
    "draft_missing": "draft_invalid",
    "chat_template_bad": "template_invalid",
    "path_missing": "path_denied",
    "ssl": "build_lacks_ssl",
    "lm_bad": "value_invalid",
    "lora_missing": "adapter_invalid",
    "rpc_unreachable": "rpc_unreachable",
    "device_bad": "device_unknown",
    "hf_offline": "model_unsupported",
}
HEALABLE = {"host_memory", "rpc_unreachable"}

CUDA = "ggml_backend_cuda_buffer_type_alloc_buffer: allocating 9 MiB on device 0:"
VULKAN = "ggml_vulkan: vk::Device::allocateMemory:"
LOADER = "llama-server: error while loading shared libraries:"
WRITTEN = [
    (1, "llama_model_load: error loading model: illegal split file idx: 1", "model_shard"),
    (1, "error loading model: unknown model architecture: 'moon'", "architecture_unknown"),
    (1, "error loading model: missing tensor 'blk.0.attn_q.weight'", "model_unsupported"),
    # Of libstdc++, in a pattern of override-tensor.
    (1, "error loading model: Unexpected character in bracket expression.", "override_invalid"),
    (1, "error loading model: Invalid range in '{}' in regular expression", "override_invalid"),
    (1, f"{CUDA} cudaMalloc failed: out of memory", "device_memory"),
    (1, f"{VULKAN} ErrorOutOfDeviceMemory", "device_memory"),
    (1, "failed to allocate RPC0[127.0.0.1:50990] buffer of size 16777216", "device_memory"),
    (1, "terminate called after throwing an instance of 'std::bad_alloc'", "host_memory"),
    (1, "draft model vocab type must match target model", "draft_mismatch"),
    (1, "mismatch between text model (n_embd = 6) and mmproj (n_embd = 8)", "projector_mismatch"),
    (127, f"{LOADER} libggml.so: cannot open shared object file", "library_missing"),
    (1, "/lib/libc.so.6: version `GLIBC_2.38' not found (required by x)", "library_missing"),
    (-6, "/src/ggml.c:123: GGML_ASSERT(a->ne[0] == b->ne[0]) failed", "assertion"),
    (-6, "Remote RPC server crashed or returned malformed response", "rpc_lost"),
    (1, "failed to open GGUF file 'x.gguf' (Permission denied)", "model_denied"),
    (1, 'error while handling argument "-c": expected value for argument', "value_missing"),
]


# Lines of build 10434, recorded for these tests; what else it does wrong is provoked anew each time
# in test_causes.py.
HERE = {
    "mlock": "0.00.032.166 W warning: failed to mlock 65536-byte buffer (after previously locking "
    "0 bytes): Operation not permitted",
    "priority": "warn: failed to set thread priority 3 : Operation not permitted (1)",
    "draft": "0.00.013.786 E spec common_specu: the target and draft vocabs are not compatible",
}


def failures() -> Iterator[tuple[str, str]]:
    for case, builds in RECORDED.items():
        for build, recorded in builds.items():
            if recorded["outcome"] == "exit":
                yield case, build


@pytest.mark.parametrize(("case", "build"), list(failures()))
def test_every_recorded_failure_has_its_cause(case: str, build: str) -> None:
    recorded = RECORDED[case][build]
    cause = diagnose(recorded["rc"], [*recorded["error_lines"], *recorded["last_lines"]])
    assert cause.code == CAUSES[case]
    assert cause.permanent is (cause.code not in HEALABLE)
    assert "{" not in cause.sentence.replace("{%", "") + cause.hint
    assert not cause.sentence.endswith(".")


@pytest.mark.parametrize(("returncode", "line", "code"), WRITTEN)
def test_every_cause_that_is_only_known_from_the_sources_is_found(
    returncode: int, line: str, code: str
) -> None:
    assert diagnose(returncode, ["0.00.001.000 I loading", line]).code == code


def test_the_sentence_names_the_subject_of_the_engines_message() -> None:
    recorded = RECORDED["missing_model"]["b10434"]
    cause = diagnose(1, recorded["error_lines"])
    assert cause.sentence == "there is no file /nope/x.gguf"


def test_the_cause_of_a_killed_engine_is_not_read_from_its_first_lines() -> None:
    said = RECORDED["rpc_unreachable"]["b10434"]["warnings"]
    assert diagnose(-signal.SIGKILL, said).code == "killed"


def test_a_removed_flag_comes_with_its_replacement() -> None:
    recorded = RECORDED["removed_draft_max"]["b10434"]
    assert "--spec-draft-n-max" in diagnose(1, recorded["error_lines"]).hint


def test_a_removed_flag_without_a_successor_is_to_be_left_out() -> None:
    line = 'error while handling argument "--x": the argument has been removed'
    assert diagnose(1, [line]).hint.startswith("leave it out")


def test_the_first_error_decides_and_not_the_last() -> None:
    lines = [
        "error: invalid argument: --x",
        "couldn't bind HTTP server socket, hostname: h, port: 1",
    ]
    assert diagnose(1, lines).sentence == "this engine has no flag --x"


def test_a_socket_that_cannot_be_bound_is_told_from_a_port() -> None:
    line = "E srv start: couldn't bind HTTP server socket, hostname: /run/a.sock, port: 8080"
    assert diagnose(1, [line]).code == "socket_unusable"


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGILL, "illegal_instruction"),
        (signal.SIGSEGV, "memory_fault"),
        (signal.SIGBUS, "model_changed"),
        (signal.SIGFPE, "arithmetic_fault"),
        (signal.SIGKILL, "killed"),
        (signal.SIGTERM, "signalled"),
        (99, "signalled"),
    ],
)
def test_a_signal_is_a_separate_cause(number: int, code: str) -> None:
    assert diagnose(-number, []).code == code


def test_only_an_illegal_instruction_is_beyond_retrying() -> None:
    assert diagnose(-signal.SIGILL, []).permanent
    assert not diagnose(-signal.SIGSEGV, []).permanent


@pytest.mark.parametrize("number", [4, 7, 8, 9, 11])
def test_the_cause_of_a_signal_names_it(number: int) -> None:
    assert f"({signal.Signals(number).name}, signal {number})" in diagnose(-number, []).sentence


def test_failures_of_the_processor_come_with_the_no_repack_hint() -> None:
    assert "no-repack" in diagnose(-signal.SIGILL, []).hint
    assert "no-repack" in diagnose(-signal.SIGSEGV, []).hint


def test_an_unknown_failure_quotes_the_last_error() -> None:
    cause = diagnose(1, ["0.00.1 I fine", "0.00.2 E srv: the moon fell down", "0.00.3 I bye"])
    assert (cause.code, cause.permanent) == ("exited", False)
    assert cause.sentence.endswith("its last error: 0.00.2 E srv: the moon fell down")


def test_an_unknown_failure_without_a_word_tells_its_code() -> None:
    assert diagnose(3, []).sentence == "the engine ended with code 3"
    assert diagnose(None, []).sentence == "the engine ended"


def test_leaving_with_nothing_wrong_is_told_so() -> None:
    assert diagnose(0, ["I cleaning up"]).code == "left"


@pytest.mark.parametrize(
    ("number", "code", "permanent"),
    [
        (errno.ENOENT, "engine_missing", True),
        (errno.EACCES, "engine_denied", True),
        (errno.ENOEXEC, "engine_broken", True),
        (errno.EAGAIN, "spawn_failed", False),
    ],
)
def test_an_engine_that_cannot_be_spawned_has_a_cause(
    number: int, code: str, *, permanent: bool
) -> None:
    cause = spawn_failed(OSError(number, "no"), "/opt/llama-server")
    assert (cause.code, cause.permanent) == (code, permanent)
    assert "/opt/llama-server" in cause.sentence


def test_our_own_errors_before_the_spawn_keep_their_words() -> None:
    cause = not_launchable(AccessDenied("cannot write the log", hint="make it writable"))
    assert (cause.code, cause.sentence) == ("state_denied", "cannot write the log")
    assert cause.hint == "make it writable"
    assert cause.permanent


def test_failures_we_find_ourselves_say_how_long_it_was_silent() -> None:
    assert "300 s" in known_cause("load_stalled", silent_s=300.0).sentence
    assert "60 s" in known_cause("unresponsive", silent_s=60.0).sentence


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("W warning: failed to mlock 9-byte buffer: Cannot allocate memory", "mlock_refused"),
        ("E failed to initialize speculative decoding context: draft model vocab type must match",
         "draft_unused"),
        (RECORDED["rpc_unreachable"]["b10434"]["warnings"][0], "rpc_unused"),
        (RECORDED["prio_unpriv"]["b10434"]["warnings"][0], "priority_refused"),
        (RECORDED["prio_unpriv"]["b10434"]["warnings"][1], "priority_refused"),
        (RECORDED["defrag_thold"]["b10434"]["warnings"][0], "flag_deprecated"),
        (RECORDED["removed_mlock"]["b10434"]["warnings"][0], "flag_deprecated"),
        (HERE["mlock"], "mlock_refused"),
        (HERE["priority"], "priority_refused"),
        (HERE["draft"], "draft_unused"),
        (RECORDED["no_model_router"]["b10434"]["warnings"][1], "no_model"),
    ],
)  # fmt: skip
def test_a_silent_degradation_is_found(line: str, code: str) -> None:
    assert [found.code for found in warnings(["I fine", line])] == [code]


def test_a_degradation_is_told_once_however_often_it_is_said() -> None:
    lines = RECORDED["prio_unpriv"]["b10434"]["warnings"]
    assert len(warnings(lines)) == 1


def test_a_good_start_has_no_warnings() -> None:
    lines = [
        line
        for case in ("ctk_q8_fa_on", "threads_0")
        for line in RECORDED[case]["b10434"]["last_lines"]
    ]
    assert warnings(lines) == ()


@pytest.mark.parametrize("table", ["specific", "failure", "warning", "worker"])
def test_the_texts_of_a_row_name_only_groups_of_its_pattern(table: Table) -> None:
    for pattern, cause in patterns(table):
        groups = dict.fromkeys(re.compile(pattern).groupindex, "x")
        assert cause.fill(groups).code.isidentifier()
