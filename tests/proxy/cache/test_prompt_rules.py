"""Clients' changes of their prompts are recognised, and rules undo them."""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any, get_args

import pytest
from support.growth import is_linear

from proxy.cache.prompt import Outline, read_prompt, shared_blocks
from proxy.cache.prompt_rules import (
    KINDS,
    PromptRules,
    ValueHashes,
    apply_rules,
    blocks_of,
    find_changes,
    system_texts,
    values_of,
)
from proxy.observe.cache_finding import Change
from proxy.settings import PromptRule
from proxy.upstream.endpoint_kinds import EndpointKind

RULES = "Answer briefly, and only what you know of the river by the old stone bridge.\n" * 4
HEADER = "x-anthropic-billing-header: cc_version=2.1.197.1c0; cc_entrypoint=cli;"
DATED = f"You help.\nToday's date: Tue Nov 24 2026\n{RULES}"
KIND_CHAT, KIND_MESSAGES = EndpointKind.CHAT, EndpointKind.MESSAGES


def chat(system: str, *more: dict[str, Any], **members: Any) -> dict[str, Any]:
    first = {"role": "system", "content": system}
    asked = {"role": "user", "content": "What is there?"}
    return {"messages": [first, asked, *more], **members}


def named(*names: str) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": name}} for name in names]


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        (f"Hello.\n{HEADER}\nYou help.", "header", HEADER),
        ("session 01a20f0a-dcbe-76e1-87cc-ca791e58fefc.", "uuid", None),
        ("now 2026-11-24T19:32:43.125Z.", "time", "2026-11-24T19:32:43.125Z"),
        ("now 2026-11-24 19:32 or so", "time", "2026-11-24 19:32"),
        ("at 9:05 PM.", "time", "9:05 PM"),
        ("Today's date: Tue Nov 24 2026", "date", "Tue Nov 24 2026"),
        ("It is Tuesday, November 24, 2026.", "date", "Tuesday, November 24, 2026"),
        ("on 24 November 2026", "date", "24 November 2026"),
        ("on 24.11.2026", "date", "24.11.2026"),
        ("on 2026-11-24.", "date", "2026-11-24"),
        ("Working directory: /home/ann/river-7", "path", "/home/ann/river-7"),
        (r"in C:\Users\ann", "path", r"C:\Users\ann"),
        ("in ~/src/river/", "path", "~/src/river/"),
        ("commit 1a2b3c4d5e", "number", "1a2b3c4d5e"),
        ("load 0.75", "number", "0.75"),
    ],
)
def test_values_are_recognised(text: str, kind: str, value: str | None) -> None:
    found = [(name, text[start:end]) for name, start, end in values_of(text)]
    assert [name for name, _ in found] == [kind]
    assert value in {None, found[0][1]}


@pytest.mark.parametrize(
    "text", ["version 6.18.44-fc", "a/b", "</description>", "ratio 2:1", "x-y"]
)
def test_other_texts_are_no_dates_times_and_paths(text: str) -> None:
    assert not {kind for kind, _, _ in values_of(text)} & {"date", "time", "path", "header"}


@pytest.mark.parametrize(
    "piece", ["1", "1 ", "a/", "/a", "2026-11-2", "x-a\n", "Mon, ", "12:", "a0"]
)
def test_recognition_takes_linear_time(piece: str) -> None:
    assert is_linear(lambda size: values_of(piece * size), 2000)


def changes(
    before: dict[str, Any],
    now: dict[str, Any],
    hashes: ValueHashes | None = None,
    kind: EndpointKind = KIND_CHAT,
) -> tuple[tuple[Change, ...], ValueHashes]:
    earlier, later = (read_prompt(kind, "chat", members) for members in (before, now))
    assert earlier
    assert later
    old: Outline = earlier.outline
    pairs = zip(old.hashes, later.outline.hashes, strict=False)
    part = next(at for at, (was, is_now) in enumerate(pairs) if was != is_now)
    same_bytes = 64 * shared_blocks(earlier.blocks, later.blocks)
    same_bytes = max(same_bytes, sum(old.sizes_bytes[:part]))
    return find_changes(kind, now, later.outline, part, same_bytes, hashes)


def test_the_value_at_the_first_difference_is_named_with_its_characters() -> None:
    now = chat(DATED.replace("Nov 24", "Nov 25"))
    (change,), _ = changes(chat(DATED), now)
    kind, start, end = change
    assert (kind, now["messages"][0]["content"][start:end]) == ("date", "Tue Nov 25 2026")


def test_in_a_block_of_a_system_prompt_too() -> None:
    def members(day: int) -> dict[str, Any]:
        texts = RULES, f"Day: 2026-11-{day}\n{RULES}"
        blocks = [{"type": "text", "text": text} for text in texts]
        return {"system": blocks, "messages": [{"role": "user", "content": RULES}]}

    (change,), _ = changes(members(24), members(25), kind=KIND_MESSAGES)
    text = "\n".join(system_texts(KIND_MESSAGES, members(25)))
    assert (change[0], text[change[1] : change[2]]) == ("date", "2026-11-25")


def test_with_the_hashes_of_the_change_before_all_changes_are_named() -> None:
    def dated(day: int, place: str, count: int) -> dict[str, Any]:
        text = f"{RULES}On 2026-11-{day}\nin /home/ann/{place}\nwith {count} files\n{RULES}"
        return chat(text)

    _, hashes = changes(dated(23, "a", 3), dated(24, "b", 3))
    found, _ = changes(dated(24, "b", 3), dated(25, "b", 4), hashes)
    assert [kind for kind, _, _ in found] == ["date", "number"]


def test_other_text_is_named_by_its_place() -> None:
    found, _ = changes(chat(RULES), chat(f"{RULES[:160]}Swans swim. {RULES[160:]}"))
    ((kind, start, end),) = found
    assert kind == "text"
    assert start <= 160 <= end


def test_tools_in_another_order_are_told_from_other_tools() -> None:
    first, second = (chat(RULES, tools=named(*names)) for names in ("ab", "ba"))
    found, hashes = changes(first, second)
    assert found == (("tools", 0, 2),)
    found, hashes = changes(second, first, hashes)
    assert found == (("order", 0, 2),)
    found, _ = changes(first, chat(RULES, tools=named("a")), hashes)
    assert found == (("tools", 0, 1),)


def test_findings_contain_no_text() -> None:
    found = changes(chat(DATED), chat(DATED.replace("24", "25")))
    assert "25" not in str(found[0][0][0])
    assert not any(isinstance(value, str) for value in (found[1][0], *found[1][1]))


def test_lines_with_a_date_go_to_the_end_of_the_system_prompt() -> None:
    members = chat(DATED)
    kept = copy.deepcopy(members)
    found, rules, _ = apply_rules(["move:date", "move:path"], KIND_CHAT, members)
    assert found["messages"][0]["content"] == f"You help.\n{RULES}Today's date: Tue Nov 24 2026"
    assert found["messages"][1:] == members["messages"][1:]
    assert (rules, members) == (("move:date",), kept)
    again, rules, _ = apply_rules(["move:date"], KIND_CHAT, found)
    assert (again, rules) == (found, ())


def test_a_line_that_begins_with_an_element_stays() -> None:
    members = chat(f"<cwd>/home/ann/river</cwd>\n{RULES}")
    assert apply_rules(["move:path"], KIND_CHAT, members)[0] is members


def test_a_block_with_nothing_but_a_header_line_is_left_out() -> None:
    cached = {"cache_control": {"type": "ephemeral"}}
    blocks = [{"type": "text", "text": HEADER}, {"type": "text", "text": RULES, **cached}]
    members = {"system": blocks, "messages": []}
    found, rules, _ = apply_rules(["move:header"], KIND_MESSAGES, members)
    assert found["system"] == [{"type": "text", "text": f"{RULES}{HEADER}", **cached}]
    assert rules == ("move:header",)


NOTE = "The files of this project, in the order in which they were changed, newest first:"


def environment(*files: str, day: int = 24) -> str:
    """Return a system prompt as coding agents write it."""
    listed = "\n".join(f"  {file}" for file in files)
    env = f"<env>\n  Today's date: 2026-11-{day}\n  Platform: linux\n</env>"
    files_block, example = f"<files>\n{listed}\n</files>", "<example>\n  a.py\n</example>"
    return f"You help.\n{env}\n{NOTE}\n{files_block}\n{RULES}{example}"


def test_several_lines_about_the_environment_go_to_the_end_as_they_are() -> None:
    found, rules, _ = apply_rules(["move:block", "move:date"], KIND_CHAT, chat(environment("a.py")))
    other, _, _ = apply_rules(["move:block"], KIND_CHAT, chat(environment("b.py", "c.py", day=25)))
    texts = [members["messages"][0]["content"] for members in (found, other)]
    before = f"You help.\n{NOTE}\n{RULES}<example>\n  a.py\n</example>\n"
    assert [text.startswith(before) for text in texts] == [True, True]
    assert texts[1].removeprefix(before) == (
        "<env>\n  Today's date: 2026-11-25\n  Platform: linux\n</env>\n"
        "<files>\n  b.py\n  c.py\n</files>"
    )
    assert rules == ("move:block",)
    assert apply_rules(["move:block"], KIND_CHAT, found)[0] == found


def test_a_frozen_block_is_that_of_the_first_request() -> None:
    rules = ["freeze:block"]
    first, _, frozen = apply_rules(rules, KIND_CHAT, chat(environment("a.py")))
    second, applied, _ = apply_rules(rules, KIND_CHAT, chat(environment("b.py", "c.py")), frozen)
    assert (second, applied) == (first, ("freeze:block",))


@pytest.mark.parametrize(
    ("text", "blocks"),
    [
        ("<env>\na\n</env>", 1),
        ("<files>\n<files>\n</files>\n<env>\n</env>\n</files>", 2),  # to the first end
        ("<env>\n<git_status>\n M a\n</git_status>\n</env>", 1),
        ("<env>\na", 0),
        ("a\n</env>", 0),
        ("<env>\n</files>", 0),
        ("see <env> and\n</env>", 0),
        ("<example>\na\n</example>", 0),
    ],
)
def test_blocks_have_tags_on_lines_of_their_own(text: str, blocks: int) -> None:
    found = blocks_of(text)
    assert len(found) == blocks
    assert all(before[2] <= after[1] for before, after in pairwise(found))


@pytest.mark.parametrize("piece", ["<env>\n", "</env>\n", "<env>\n</env>\n", "<env>\n<files>\n"])
def test_blocks_are_found_in_linear_time(piece: str) -> None:
    assert is_linear(lambda size: blocks_of(piece * size), 2000)


def test_a_change_that_is_no_value_is_that_of_the_lines_around_it() -> None:
    now = chat(environment("river.py"))
    (change,), hashes = changes(chat(environment("stone.py")), now)
    kind, start, end = change
    text = now["messages"][0]["content"]
    assert (kind, text[start:end]) == ("block", "<files>\n  river.py\n</files>")
    # A number is near, and has changed in the same place, but other text has changed as well.
    more = chat(environment("lake 7", "river.py"))
    assert changes(now, more, hashes)[0][0][0] == "block"
    # A value alone is named as such.
    day = chat(environment("river.py", day=25))
    assert [kind for kind, _, _ in changes(now, day)[0]] == ["date"]


def test_instructions_and_developers_items_are_a_system_prompt() -> None:
    content = [{"type": "input_text", "text": DATED}]
    item = {"type": "message", "role": "developer", "content": content}
    asked = {"type": "message", "role": "user", "content": "On 2026-11-24?"}
    members = {"instructions": "You help.\nIt is 9:05 PM.", "input": [item, asked]}
    found, rules, _ = apply_rules(["move:date", "move:time"], EndpointKind.RESPONSES, members)
    assert found["instructions"] == "You help."
    (text,) = (part["text"] for part in found["input"][0]["content"])
    assert text.endswith("bridge.\nIt is 9:05 PM.\nToday's date: Tue Nov 24 2026")
    assert found["input"][1] is asked
    assert rules == ("move:time", "move:date")


def test_frozen_values_are_those_of_the_first_request() -> None:
    rules = ["freeze:time", "freeze:date"]
    first, applied, frozen = apply_rules(rules, KIND_CHAT, chat("It is 9:05 on 2026-11-24."))
    assert (first["messages"][0]["content"], applied) == ("It is 9:05 on 2026-11-24.", ())
    then = chat("It is 9:17 on 2026-11-24.")
    second, applied, frozen = apply_rules(rules, KIND_CHAT, then, frozen)
    assert (second["messages"][0]["content"], applied) == (
        "It is 9:05 on 2026-11-24.",
        ("freeze:time",),
    )
    other = chat("Now it is 9:18 on 2026-11-24.")
    third, applied, frozen = apply_rules(rules, KIND_CHAT, other, frozen)
    assert (third, applied) == (other, ())
    again, applied, frozen = apply_rules(rules, KIND_CHAT, then, frozen)
    assert (again, applied) == (second, ("freeze:time",))
    for number in range(20):
        _, _, frozen = apply_rules(rules, KIND_CHAT, chat(f"Prompt {chr(97 + number)}."), frozen)
    assert len(frozen) == 8


def test_a_system_message_without_text_stays_beside_a_changed_one() -> None:
    members = {"messages": [{"role": "system", "content": None}, *chat(DATED)["messages"]]}
    found, _, _ = apply_rules(["move:date"], KIND_CHAT, members)
    first, second, _ = found["messages"]
    assert first["content"] is None
    assert second["content"].endswith("2026")


def test_tools_are_sorted_by_name() -> None:
    members = chat(RULES, tools=named("write", "read"))
    found, rules, _ = apply_rules(["sort-tools"], KIND_CHAT, members)
    assert (found["tools"], rules) == (named("read", "write"), ("sort-tools",))
    plain = [{"name": "b", "input_schema": {}}, {"name": "a", "input_schema": {}}]
    found, _, _ = apply_rules(["sort-tools"], KIND_MESSAGES, {"tools": plain, "messages": []})
    assert [tool["name"] for tool in found["tools"]] == ["a", "b"]
    assert apply_rules(["sort-tools"], KIND_CHAT, found)[0] is found


@pytest.mark.parametrize("kind", [KIND_CHAT, KIND_MESSAGES, EndpointKind.RESPONSES])
@pytest.mark.parametrize("value", [None, 7, "text", [], [7], [{"role": "system"}], {"a": 1}])
def test_members_of_any_type_stay_for_the_engine(kind: EndpointKind, value: object) -> None:
    rules = [*get_args(PromptRule)]
    members = dict.fromkeys(("messages", "system", "instructions", "input", "tools"), value)
    assert apply_rules(rules, kind, members)[0] == members


def test_a_session_is_frozen_by_its_name_or_its_first_message() -> None:
    rules = PromptRules({"editor": ("freeze:time",)})
    chosen = rules.of("127.0.0.1", "editor/1.0 (linux)")
    assert chosen == ("freeze:time",)
    assert rules.of("127.0.0.1", "curl/8") == ()

    def text(clock: str, session: str | None, client: str = "127.0.0.1") -> str:
        found, _ = rules.apply(chosen, KIND_CHAT, chat(f"It is {clock}."), client, session)
        content: str = found["messages"][0]["content"]
        return content

    assert text("9:05", "a") == text("9:06", "a") == "It is 9:05."
    assert text("9:07", "b") == "It is 9:07."
    assert text("9:08", None) == text("9:09", None) == "It is 9:08."
    assert text("9:10", None, "other") == "It is 9:10."


def test_frozen_values_of_a_bounded_number_of_sessions_are_kept() -> None:
    rules = PromptRules({"editor": ("freeze:time",)})

    def apply(clock: str, session: int) -> tuple[str, ...]:
        members = chat(f"It is {clock}.")
        return rules.apply(("freeze:time",), KIND_CHAT, members, "a", str(session))[1]

    for session in range(257):
        apply("9:05", session)
    assert apply("9:06", 256) == ("freeze:time",)
    assert apply("9:06", 0) == ()  # the oldest has been forgotten, and begins again


def test_each_kind_of_value_has_its_rules() -> None:
    rules = {f"{verb}:{kind}" for verb in ("freeze", "move") for kind in KINDS}
    assert {*get_args(PromptRule)} == {*rules, "sort-tools"}
