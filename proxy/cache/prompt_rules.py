"""Values in a prompt's beginning that clients change, and the rules that keep it equal.

A client that puts a date, a path or a header line into its system prompt, or its tools in another
order, has all that follows computed again. `values_of` recognises such values; `find_changes` says
which of them changed, from hashes of the earlier prompt. A rule undoes the change:

    freeze:KIND    the values of a kind stay those of the session's first request
    move:KIND      lines with a value of a kind go to the end of the system prompt, unless they
                   begin with an XML element, which only has a meaning at its place
    move:block     elements such as `<env>` go there, with all their lines (`blocks_of`)
    sort-tools     tools are sorted by name

The system prompt is that of a chat (its first messages of the roles system and developer), of
Anthropic's `system` with all its blocks, or of the Responses API (`instructions`, and the first
items of these roles). All but `PromptRules` is pure, and that holds values in memory only.

Source: Claude Code writes a line `x-anthropic-billing-header: …` with a hash of the request;
anthropics/claude-code issue 32636.
"""

from __future__ import annotations

import re
import threading
from array import array
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from operator import itemgetter
from types import MappingProxyType
from typing import Any, Final

from xxhash import xxh3_64_intdigest

from proxy.cache.prompt import BLOCK_BYTES, CONVERSATIONS, Outline, is_system, json_bytes
from proxy.observe.cache_finding import Change, ChangeKind
from proxy.upstream.endpoint_kinds import EndpointKind

_MONTH: Final = "(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]{0,6}"
_DAY: Final = "(?:(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun)[a-z]{0,6},? )?"
_CLOCK: Final = r"\d{1,2}:\d\d(?::\d\d(?:\.\d{1,9})?)?(?: ?[AaPp][Mm]\b)?"
# The first that matches at a place; each takes time in proportion to the text.
_PATTERNS: Final[Mapping[ChangeKind, str]] = {
    "header": r"^[Xx]-[A-Za-z0-9-]{1,64}:[^\n]*",
    "uuid": r"\b[0-9A-Fa-f]{8}-(?:[0-9A-Fa-f]{4}-){3}[0-9A-Fa-f]{12}\b",
    "time": rf"\b\d{{4}}-\d\d-\d\d[T ]{_CLOCK}(?:Z|[+-]\d\d:?\d\d)?|\b{_CLOCK}(?![\d:])",
    "date": rf"\b\d{{4}}[-/]\d\d[-/]\d\d\b|\b\d{{1,2}}[./]\d{{1,2}}[./]\d{{4}}\b"
    rf"|\b{_DAY}{_MONTH} \d{{1,2}},? \d{{4}}\b|\b{_DAY}\d{{1,2}}\.? {_MONTH},? \d{{4}}\b",
    "path": r"(?<![\w/\\.~<])(?:~|[A-Za-z]:)?(?:[/\\][\w.@+-]{1,255}){2,64}[/\\]?",
    "number": r"\b(?=[a-f]{0,40}\d)[0-9a-f]{7,64}\b|(?<![\w.])\d{1,18}(?:\.\d{1,18})?(?![\w.])",
}
_VALUE: Final = re.compile(
    "|".join(f"(?P<{kind}>{pattern})" for kind, pattern in _PATTERNS.items()), re.MULTILINE
)
_VALUE_KINDS: Final = tuple(_PATTERNS)
KINDS: Final = (*_VALUE_KINDS, "block")
# Elements in which clients describe where they run, with lists of files, changes or settings. Their
# tags have lines of their own. Examples and instructions have other names, and stay.
_TAG: Final = re.compile(
    r"^[ \t]*<(/?)(env|environment|environment_(?:context|details|info)|system_info(?:rmation)?"
    r"|user_info|workspace(?:_info)?|project_(?:layout|structure)|repo(?:sitory)?_(?:info|map)"
    r"|git_?status|git_info|files?|file_tree|directories|directory_structure|open_files)>[ \t]*$",
    re.MULTILINE,
)
SORT_TOOLS: Final = "sort-tools"
_FREEZE, _MOVE = "freeze:", "move:"
# Values of later characters are not looked for, nor more values than this.
_TEXT_MAX: Final = 256 * 1024
_VALUES_MAX: Final = 512
_CHANGES_MAX: Final = 8
# The rest of a part of a prompt, besides its text: its role and its type.
_PART_BYTES: Final = len(b"system\x1ftext\x1f")

# A value's kind, and its first character and the one after its last.
_Value = tuple[ChangeKind, int, int]
# The hash of a text without its values, and the hash of each value.
ValueHashes = tuple[int, Sequence[int]]
# The values of a session's first request with each system prompt, by the hashes of its texts
# without values.
Frozen = Mapping[tuple[int, ...], tuple[str, ...]]
_NOTHING: Final[Frozen] = MappingProxyType({})
# A session may ask for titles with another system prompt; the oldest goes first.
_FROZEN_MAX: Final = 8
Members = dict[str, Any]


def _hash(text: str) -> int:
    return xxh3_64_intdigest(text.encode(errors="surrogatepass"))


def values_of(text: str, kinds: Sequence[str] = _VALUE_KINDS) -> list[_Value]:
    """Return the values in a text, in order; none overlaps another, and none is in a block."""
    blocks = blocks_of(text) if "block" in kinds else []
    found: list[_Value] = []
    left = deque(blocks)
    for match in _VALUE.finditer(text, 0, _TEXT_MAX):
        while left and left[0][2] <= match.start():
            left.popleft()
        is_apart = not left or match.end() <= left[0][1]
        if is_apart and match.lastgroup in kinds:
            found.append((match.lastgroup, *match.span()))  # type: ignore[arg-type]
            if len(found) == _VALUES_MAX:
                break
    return sorted([*blocks, *found], key=itemgetter(1))


def blocks_of(text: str) -> list[_Value]:
    """Return the elements that describe a client's environment, in order; the outermost alone."""
    found: list[_Value] = []
    opened: dict[str, int] = {}
    for match in _TAG.finditer(text, 0, _TEXT_MAX):
        is_end, name = match.groups()
        if not is_end:
            opened.setdefault(name, match.start())
        elif (start := opened.get(name)) is not None:
            while found and found[-1][1] >= start:
                found.pop()
            found.append(("block", start, match.end()))
            opened = {other: at for other, at in opened.items() if at < start}
    return found[:_VALUES_MAX]


def _mask(text: str, values: Sequence[_Value]) -> int:
    """Return the hash of a text with its values replaced by their kinds."""
    pieces, at = [], 0
    for kind, start, end in values:
        pieces += [text[at:start], "\0", kind, "\0"]
        at = end
    return _hash("".join([*pieces, text[at:]]))


# Changes.


def find_changes(
    kind: EndpointKind,
    members: Mapping[str, Any],
    outline: Outline,
    part: int,
    same_bytes: int,
    before: ValueHashes | None,
) -> tuple[tuple[Change, ...], ValueHashes]:
    """Return the differences in a part of a prompt, and the part's hashes for the next call.

    The first `same_bytes` of the prompt equal those of the earlier one. The changes are exact if
    `before` are the hashes of the same text with other values; otherwise the change is the first
    value near that place, or the block around it, or `text`.
    """
    if outline.role(part) == "tools":
        return _tools_change(members.get("tools"), before)
    message = outline.messages[part]
    text = _text_of(kind, members, message)
    values = values_of(text)
    hashes = array("Q", (_hash(text[start:end]) for _, start, end in values))
    now = _mask(text, values), hashes
    if before and before[0] == now[0]:
        pairs = zip(values, before[1], hashes, strict=True)
        changed = tuple(value for value, was, is_now in pairs if was != is_now)
        if changed:
            return changed[:_CHANGES_MAX], now
    same = same_bytes
    for at in range(part + 1):
        if outline.messages[at] == message and outline.role(at) != "tools":
            same -= _PART_BYTES
        else:
            same -= outline.sizes_bytes[at]
    place = len(text.encode(errors="surrogatepass")[: max(0, same)].decode(errors="ignore"))
    after = min(place + BLOCK_BYTES, len(text))
    # If more than values changed since `before`, the change in a block is not a value of it.
    found = [*blocks_of(text), *values] if before else [*values, *blocks_of(text)]
    near = (value for value in found if value[1] < after and value[2] > place)
    return (next(near, ("text", place, after)),), now


def _tools_change(
    tools: object, before: ValueHashes | None
) -> tuple[tuple[Change, ...], ValueHashes]:
    given = tools if isinstance(tools, list) else []
    now = xxh3_64_intdigest(b"".join(sorted(map(json_bytes, given)))), ()
    is_order = before is not None and before[0] == now[0]
    return (("order" if is_order else "tools", 0, len(given)),), now


def _text_of(kind: EndpointKind, members: Mapping[str, Any], message: int) -> str:
    """Return the texts of a message, or with -1 those of the system prompt."""
    if kind not in CONVERSATIONS:
        return ""
    if message < 0:
        return "\n".join(system_texts(kind, members))
    given = members.get(CONVERSATIONS[kind][1])
    if isinstance(given, str):
        return given
    found = given[message] if isinstance(given, list) and message < len(given) else None
    return "\n".join(_texts(found.get("content"))) if isinstance(found, dict) else ""


def _texts(content: object) -> list[str]:
    if isinstance(content, str):
        return [content]
    items = content if isinstance(content, list) else ()
    texts = [item.get("text") for item in items if isinstance(item, dict)]
    return [text for text in texts if isinstance(text, str)]


# Rules.


def apply_rules(
    rules: Sequence[str], kind: EndpointKind, members: Members, frozen: Frozen = _NOTHING
) -> tuple[Members, tuple[str, ...], Frozen]:
    """Return the members, the rules that changed them, and the values that later requests keep.

    The same members if nothing changes.
    """
    if kind not in CONVERSATIONS:
        return members, (), frozen
    applied: list[str] = []
    before = system_texts(kind, members)
    texts = before
    frozen_kinds = [rule.removeprefix(_FREEZE) for rule in rules if rule.startswith(_FREEZE)]
    if frozen_kinds and before:
        texts, kinds, frozen = _freeze(texts, frozen_kinds, frozen)
        applied += [f"{_FREEZE}{kind}" for kind in kinds]
    moved_kinds = [rule.removeprefix(_MOVE) for rule in rules if rule.startswith(_MOVE)]
    if moved_kinds and before:
        texts, kinds = _move(texts, moved_kinds)
        applied += [f"{_MOVE}{kind}" for kind in kinds]
    if texts != before:
        members = _with_system_texts(kind, members, texts)
    tools = members.get("tools")
    if SORT_TOOLS in rules and isinstance(tools, list):
        ordered = sorted(tools, key=_tool_name)
        if ordered != tools:
            members, applied = {**members, "tools": ordered}, [*applied, SORT_TOOLS]
    return members, tuple(applied), frozen


def _freeze(
    texts: Sequence[str], kinds: Sequence[str], frozen: Frozen
) -> tuple[list[str], list[str], Frozen]:
    """Replace values by frozen ones if the texts differ in nothing else; otherwise freeze them."""
    values = [values_of(text, kinds) for text in texts]
    mask = tuple(map(_mask, texts, values))
    if mask not in frozen:
        spans = zip(texts, values, strict=True)
        kept = tuple(text[start:end] for text, found in spans for _, start, end in found)
        latest = [*frozen.items()][-_FROZEN_MAX + 1 :]
        return [*texts], [], {**dict(latest), mask: kept}
    first, written, changed = iter(frozen[mask]), [], dict[str, None]()
    for text, found in zip(texts, values, strict=True):
        pieces, at = [], 0
        for kind, start, end in found:
            value = next(first)
            if value != text[start:end]:
                changed[kind] = None
            pieces += [text[at:start], value]
            at = end
        written.append("".join([*pieces, text[at:]]))
    return written, [*changed], frozen


def _move(texts: Sequence[str], kinds: Sequence[str]) -> tuple[list[str], list[str]]:
    """Move lines with values to the end of the last text; their order stays."""
    left, moved, found = [], list[str](), dict[str, None]()
    for text in texts:
        lines = text.split("\n")
        starts, at = [], 0
        for line in lines:
            starts.append(at)
            at += len(line) + 1
        taken: dict[int, str] = {}
        values = values_of(text, kinds)
        for number, (start, line) in enumerate(zip(starts, lines, strict=True)):
            while values and values[0][2] <= start:
                values.pop(0)
            if values and values[0][1] <= start + len(line):
                is_block = values[0][0] == "block"
                if is_block or not line.lstrip().startswith("<"):
                    taken[number] = values[0][0]
        moved += [lines[number] for number in taken]
        found |= dict.fromkeys(taken.values())
        left.append("\n".join(line for at, line in enumerate(lines) if at not in taken))
    last = max((at for at, text in enumerate(left) if text.strip()), default=len(left) - 1)
    if moved:
        left[last] = "\n".join([left[last].rstrip("\n"), *moved]).lstrip("\n")
    return left, [*found] if left != [*texts] else []


def _tool_name(tool: object) -> str:
    match tool:
        case {"function": {"name": str(name)}} | {"name": str(name)}:
            return name
    return ""


def system_texts(kind: EndpointKind, members: Mapping[str, Any]) -> list[str]:
    """Return the texts of a request's system prompt."""
    system, messages = CONVERSATIONS[kind]
    found = _texts(members.get(system)) if system else []
    given = members.get(messages)
    for message in takewhile(is_system, given if isinstance(given, list) else ()):
        found += _texts(message.get("content"))
    return found


def prompt_lines(kind: EndpointKind, members: Mapping[str, Any]) -> list[str]:
    """Return the lines of a request's system prompt, and the names of its tools."""
    tools = members.get("tools")
    names = [f"tool {_tool_name(tool)}" for tool in (tools if isinstance(tools, list) else ())]
    return "\n".join([*system_texts(kind, members), *names]).split("\n")


def _with_system_texts(kind: EndpointKind, members: Members, texts: Sequence[str]) -> Members:
    """Replace the texts of the system prompt; a block without text is left out."""
    system, messages = CONVERSATIONS[kind]
    left, changed = iter(texts), dict(members)
    if system and members.get(system):
        changed[system] = _with_texts(members[system], left)
    given = members.get(messages)
    if isinstance(given, list):
        leading = [*takewhile(is_system, given)]
        written = [{**item, "content": _with_texts(item.get("content"), left)} for item in leading]
        changed[messages] = [*written, *given[len(leading) :]]
    return changed


def _with_texts(content: object, texts: Iterator[str]) -> Any:
    if isinstance(content, str):
        return next(texts)
    if not isinstance(content, list):
        return content
    found = [
        {**item, "text": next(texts)}
        if isinstance(item, dict) and isinstance(item.get("text"), str)
        else item
        for item in content
    ]
    return [item for item in found if not isinstance(item, dict) or item.get("text") != ""]


_SESSIONS_MAX: Final = 256


class PromptRules:
    """The rules by client: an API key, an address, or the program that User-Agent begins with.

    Keeps the frozen values of the latest sessions, in memory only. Safe in threads.
    """

    def __init__(self, rules: Mapping[str, Sequence[str]]) -> None:
        self.rules = rules
        self._frozen: OrderedDict[int, Frozen] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, client: str, agent: str) -> Sequence[str]:
        """Return the rules of a client; `agent` is its User-Agent."""
        program = re.split(r"[/\s]", agent.strip(), maxsplit=1)[0]
        return self.rules.get(client) or self.rules.get(program) or ()

    def apply(
        self,
        rules: Sequence[str],
        kind: EndpointKind,
        members: Members,
        client: str,
        session: str | None,
    ) -> tuple[Members, tuple[str, ...]]:
        """Return the members, and the rules that changed them, as `apply_rules`.

        `session` is the client's name of the conversation; None: its first message tells.
        """
        key = _hash(f"{client}\0{session or _first_message(kind, members)}")
        with self._lock:
            members, applied, frozen = apply_rules(
                rules, kind, members, self._frozen.get(key, _NOTHING)
            )
            if frozen:
                self._frozen[key] = frozen
                self._frozen.move_to_end(key)
            if len(self._frozen) > _SESSIONS_MAX:
                self._frozen.popitem(last=False)
        return members, applied


def _first_message(kind: EndpointKind, members: Members) -> str:
    """Return the first message that is not the system prompt, which a session keeps."""
    given = members.get(CONVERSATIONS[kind][1]) if kind in CONVERSATIONS else None
    if not isinstance(given, list):
        return str(given)
    first = next((item for item in given if not is_system(item)), None)
    return json_bytes(first).decode()
