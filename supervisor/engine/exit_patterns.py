"""Table of failure messages of engines, which `exit_cause.py` searches.

Within a table the first row that matches a line wins, so specific rows come before general ones.

Source: output of builds 10434 and 11434 for 46 provoked cases, kept with the tests; rows without a
case follow the text in llama.cpp's and ggml's sources.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class LogPattern:
    """One row; the other fields are those of FailureCause."""

    code: str
    # A regular expression, searched in one line. `{group}` in the texts stands for a named group.
    pattern: str
    sentence: str
    hint: str
    permanent: bool = True

    def read(self, line: str) -> tuple[str, str] | None:
        found = re.search(self.pattern, line)
        if found is None:
            return None
        groups = {name: (text or "").strip() for name, text in found.groupdict().items()}
        return self.sentence.format_map(groups), self.hint.format_map(groups)


# Lines that name the file or part that failed; they win over all other lines.
SPECIFIC_PATTERNS: Final = (
    LogPattern(
        "draft_invalid",
        r"failed to load draft model, '(?P<path>[^']*)'",
        "the draft model {path} cannot be loaded",
        "check the path of `draft`; it must be a whole GGUF",
    ),
    LogPattern(
        "projector_mismatch",
        r"mismatch between text model \(n_embd = (?P<text>\d+)\) and mmproj"
        r"|(?:load_model|mtmd|clip).*(?:mmproj|projector).*mismatch",
        "the multimodal projector was made for another model",
        "use the mmproj file that belongs to this GGUF",
    ),
    LogPattern(
        "projector_invalid",
        r"failed to load multimodal model, '(?P<path>[^']*)'"
        r"|failed to load (?:mmproj|CLIP model) from (?P<other>\S+)",
        "the multimodal projector {path}{other} cannot be loaded",
        "check the path of `mmproj`; it must be a whole GGUF projector",
    ),
    LogPattern(
        "model_shard",
        r"failed to load GGUF split from (?P<path>\S+)",
        "the shard {path} of the split model is missing or cannot be read",
        "put all shards of one download side by side, under their own names",
    ),
    LogPattern(
        "adapter_invalid",
        r"failed to (?:load|apply) lora adapter '(?P<path>[^']*)'"
        r"|failed to load lora adapter file from (?P<other>\S+)",
        "the LoRA adapter {path}{other} cannot be loaded",
        "check the path of `lora`",
    ),
)

# Lines that decide by coming first.
FAILURE_PATTERNS: Final = (
    LogPattern(
        "flag_removed",
        r'error while handling argument "(?P<flag>[^"]+)": the argument has been removed\. use '
        r"(?P<instead>.+)",
        "this engine has removed the flag {flag}",
        "use {instead}, or leave it to a profile, which renders what the engine has",
    ),
    LogPattern(
        "flag_removed",
        r'error while handling argument "(?P<flag>[^"]+)": the argument has been removed',
        "this engine has removed the flag {flag}",
        "leave it out; `corral engine help` lists what it has",
    ),
    LogPattern(
        "flag_unknown",
        r"error: invalid argument: (?P<flag>\S+)",
        "this engine has no flag {flag}",
        "`corral engine help` lists what it has; flags set by a profile are checked against it",
    ),
    LogPattern(
        "path_denied",
        r'error while handling argument "(?P<flag>[^"]+)": .*'
        r"(?:not a directory: (?P<dir>.+)|failed to open file '(?P<file>[^']*)')",
        "{flag} names {dir}{file}, which cannot be used",
        "make it exist and readable, or name another",
    ),
    LogPattern(
        "device_unknown",
        r'error while handling argument "(?P<flag>[^"]+)": invalid device: (?P<device>.+)',
        "this engine sees no device {device}",
        "`corral engine list` shows the devices it sees",
    ),
    LogPattern(
        "value_missing",
        r'error while handling argument "(?P<flag>[^"]+)": expected value for argument',
        "the flag {flag} was given no value",
        "give it one, or leave it out",
    ),
    LogPattern(
        "value_invalid",
        r'error while handling argument "(?P<flag>[^"]+)": (?:error: )?(?P<reason>.+)',
        "the engine refuses the value of {flag}: {reason}",
        "correct it in `flags`; `corral engine help` shows the values it takes",
    ),
    LogPattern(
        "value_invalid",
        r"error: (?P<reason>--?[\w-]+ .+)",
        "the engine refuses its flags: {reason}",
        "correct them in `flags`",
    ),
    LogPattern(
        "library_missing",
        r"error while loading shared libraries: (?P<library>[^:]+): (?P<reason>.+)",
        "the engine needs the library {library}: {reason}",
        "install the library, or use another engine (`corral engine list`)",
    ),
    LogPattern(
        "library_missing",
        r"(?P<library>\S+): version [`'](?P<reason>[^']+)' not found",
        "the engine needs {reason}, which {library} here does not have",
        "use an engine built for this system (`corral engine list`)",
    ),
    LogPattern(
        "model_missing",
        r"failed to open GGUF file '?(?P<path>[^'()]*)'? ?\((?P<reason>No such file[^)]*)\)",
        "there is no file {path}",
        "check the path of the model, or fetch one with `corral model get`",
    ),
    LogPattern(
        "model_denied",
        r"failed to open GGUF file '?(?P<path>[^'()]*)'? ?\((?P<reason>[^)]*)\)",
        "the model {path} cannot be opened: {reason}",
        "make it readable for the user that runs the daemon",
    ),
    LogPattern(
        "model_not_gguf",
        r"invalid magic characters: '(?P<magic>.*?)'",
        "the model's file is no GGUF: it begins with {magic!r}",
        "name a GGUF file; `corral model show FILE` shows what a file contains",
    ),
    LogPattern(
        "model_not_gguf",
        r"failed to read magic",
        "the model is an empty file or a directory",
        "name a GGUF file; `corral model show FILE` shows what a file contains",
    ),
    LogPattern(
        "model_truncated",
        r"tensor '(?P<tensor>[^']+)' data is not within the file bounds",
        "the model's file is cut short: tensor {tensor} is not in it",
        "fetch or copy it again and compare its size or SHA-256",
    ),
    LogPattern(
        "model_truncated",
        r"failed to read (?:key-value pairs|tensor info|header)|gguf_init.*unexpected end",
        "the model's file is cut short within its header",
        "fetch or copy it again and compare its size or SHA-256",
    ),
    LogPattern(
        "model_shard",
        r"illegal split file idx: (?P<index>\d+)|model must be loaded with the first split",
        "the model's file is a later shard of a split model",
        "name the first shard, the one that ends in -00001-of-NNNNN.gguf",
    ),
    LogPattern(
        "model_shard",
        r"invalid split (?:count|file name|file)",
        "a shard of the split model is missing or does not belong to it",
        "put all shards of one download side by side, under their own names",
    ),
    LogPattern(
        "model_version",
        r"GGUF ?v?(?P<version>\d+) is no longer supported|failed to read version"
        r"|this GGUF file is version (?P<other>\d+) but this software only supports",
        "the engine cannot read this version of the GGUF format",
        "use a newer engine, or convert the model again",
    ),
    LogPattern(
        "architecture_unknown",
        r"unknown model architecture: '(?P<architecture>[^']*)'",
        "this engine does not know models of architecture {architecture}",
        "use a newer engine (`corral engine list`), or another model",
    ),
    LogPattern(
        "model_unsupported",
        r"unknown (?:pre-tokenizer type|tokenizer): '(?P<tokenizer>[^']*)'",
        "this engine does not know the tokenizer {tokenizer}",
        "use a newer engine (`corral engine list`)",
    ),
    LogPattern(
        "model_unsupported",
        r"error loading model: (?P<reason>(?:missing tensor|done_getting_tensors|check_tensor_dims"
        r"|wrong number of tensors|invalid ggml type|unsupported).*)",
        "the engine cannot use this model: {reason}",
        "use the engine version the model was converted for, or convert it again",
    ),
    LogPattern(
        "model_unsupported",
        r"exactly one out metadata, path_model, and file must be defined",
        "the engine was given no model file",
        "set `path`; names from a hub are not fetched",
    ),
    LogPattern(
        "draft_mismatch",
        r"(?:draft model vocab type must match|draft vocab.*(?:differ|not match|incompatible)"
        r"|speculative decoding.*vocab)",
        "the draft model has another vocabulary than the model",
        "use a draft of the same family, or speculation without one",
    ),
    LogPattern(
        "cache_type_needs_flash_attention",
        r"quantized V cache requires flash_attn",
        "a quantised V cache needs flash attention, which is off",
        "set flash-attn to on, or cache-type-v to f16",
    ),
    LogPattern(
        "device_memory",
        r"failed to allocate RPC\d+\[",
        "the memory of an RPC worker is full",
        "lower ctx-size or parallel, quantise the cache (profile low-memory), or add a worker",
        permanent=False,
    ),
    LogPattern(
        "device_memory",
        r"(?:CUDA error|HIP error|hipError|cudaMalloc).*out of memory|cudaMalloc failed"
        r"|(?:ErrorOutOfDeviceMemory|out of device memory)"
        r"|failed to allocate (?:CUDA|ROCm|Vulkan|Metal|MTL|SYCL)\d* buffer"
        r"|allocating [\d.]+ MiB on device \d+: .*out of memory",
        "the device's memory is full",
        "lower ctx-size, parallel or gpu-layers, or quantise the cache (profile low-memory)",
        permanent=False,
    ),
    LogPattern(
        "host_memory",
        r"insufficient memory \(attempted to allocate (?P<size>[^)]+)\)",
        "there is no room in memory for {size}",
        "lower ctx-size or parallel, or quantise the cache (profile low-memory)",
        permanent=False,
    ),
    LogPattern(
        "host_memory",
        r"failed to allocate (?:CPU )?buffer|std::bad_alloc|mmap failed: Cannot allocate memory"
        r"|failed to allocate buffer for kv cache",
        "there is no room in memory for the model and its cache",
        "lower ctx-size or parallel, or quantise the cache (profile low-memory)",
        permanent=False,
    ),
    LogPattern(
        "mlock_refused",
        r"(?:failed to (?:mlock|VirtualLock)|mlock failed).*(?:fatal|abort)",
        "the system refused to lock the model in memory",
        "raise the memlock limit (ulimit -l), or turn locking off",
    ),
    LogPattern(
        "socket_unusable",
        r"couldn't bind HTTP server socket, hostname: (?P<path>\S+\.sock)",
        "the engine cannot listen on the socket {path}",
        "check the permissions of its directory, and which other process uses it",
    ),
    LogPattern(
        "port_in_use",
        r"couldn't bind HTTP server socket, hostname: (?P<host>[^,]+), port: (?P<port>\d+)",
        "the engine cannot listen on {host}:{port}: the port is taken or the address not ours",
        "free the port, or leave host and port to llama-corral",
    ),
    LogPattern(
        "path_denied",
        r"static assets path not found: (?P<path>.+)",
        "there is no directory {path}",
        "correct the flag `path`, or leave it out",
    ),
    LogPattern(
        "build_lacks_ssl",
        r"built without SSL",
        "this engine was built without SSL",
        "leave the ssl flags out: engines are reached over private sockets",
    ),
    LogPattern(
        "template_invalid",
        r"supplied chat template is not supported|failed to initialize chat template"
        r"|common_chat_templates_init: error: (?P<reason>.+)",
        "the chat template cannot be read",
        "correct chat-template or chat-template-file, or leave it to the model's own",
    ),
    LogPattern(
        "rpc_unreachable",
        r"Failed to connect to (?P<worker>\S+:\d+)",
        "the RPC worker {worker} does not answer",
        "start the worker, or leave it out of `rpc`",
        permanent=False,
    ),
    LogPattern(
        "rpc_lost",
        r"Remote RPC server crashed or returned malformed response",
        "an RPC worker that computes layers of the model was lost",
        "`corral status` shows workers; look at the worker's log, engine and worker must be of the "
        "same build",
        permanent=False,
    ),
    LogPattern(
        "assertion",
        r"(?P<where>\S+:\d+: )?GGML_ASSERT\((?P<claim>.+)\) failed",
        "the engine stopped at its own check {claim}",
        "try another build, or fewer special flags; the log has the details to report",
        permanent=False,
    ),
)

# What an engine goes without and only mentions.
WARNING_PATTERNS: Final = (
    LogPattern(
        "mlock_refused",
        r"failed to mlock|failed to VirtualLock",
        "the system refused to lock the model in memory; it can be swapped out",
        "raise the memlock limit (ulimit -l, LimitMEMLOCK=), or turn locking off",
    ),
    LogPattern(
        "draft_unused",
        r"failed to initialize speculative decoding context|draft model vocab type must match"
        r"|draft vocab.*(?:differ|not match|incompatible)"
        r"|target and draft.*(?:not compatible|incompatible)",
        "the draft model is loaded, but not used: its vocabulary differs",
        "use a draft of the same family, or speculation without one",
    ),
    LogPattern(
        "rpc_unused",
        r"Failed to connect to (?P<worker>\S+:\d+)",
        "the RPC worker {worker} does not answer; everything runs here",
        "start the worker and restart, or leave it out of `rpc`",
    ),
    LogPattern(
        "priority_refused",
        r"failed to set (?:process|thread) priority (?P<priority>-?\d+)",
        "the system refused priority {priority}",
        "allow it (LimitNICE=), or set prio to 0",
    ),
    LogPattern(
        "flag_deprecated",
        r"DEPRECATED: (?P<flag>--[\w-]+)",
        "the flag {flag} is deprecated in this engine",
        "leave it to a profile, which renders what the engine has",
    ),
    LogPattern(
        "no_model",
        r"\brouter mode\b",
        "the engine started without a model",
        "set `path` of the model",
    ),
)
