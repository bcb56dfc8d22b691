from dataclasses import replace
from typing import Any

from proxy.cache.fingerprint import ConversationFingerprint, SlotFile
from proxy.cache.holders import SavedPrompt, SlotFileIndex
from proxy.cache.prompt import CacheOwner, Prompt, read_prompt
from proxy.observe.cache_finding import NoFile
from proxy.upstream.endpoint_kinds import EndpointKind

SYSTEM = {"role": "system", "content": "word " * 200}


def prompt(*texts: str) -> Prompt:
    said: list[dict[str, Any]] = [SYSTEM]
    said += [
        {"role": "assistant" if at % 2 else "user", "content": text}
        for at, text in enumerate(texts)
    ]
    found = read_prompt(EndpointKind.CHAT, "m", {"messages": said})
    assert found
    return found


def file(
    name: str, of: Prompt, *turns: int, tokens: int = 500, recurrent: bool = False
) -> SlotFile:
    fingerprint = ConversationFingerprint(turns, of.blocks)
    return SlotFile(name, "k", tokens, 10 * tokens, fingerprint, recurrent)


def of(found: SavedPrompt | None) -> tuple[str, bool] | None:
    return (found.file.name, found.is_whole) if found else None


def test_a_conversation_finds_its_latest_file() -> None:
    first = prompt("one")
    answered = first.hash_with_reply({"role": "assistant", "content": "two"})
    index = SlotFileIndex(1000)
    index.add(file("a", first, first.turn_hashes[-1], answered))
    later = prompt("one", "two", "three")
    assert of(index.find("k", later)) == ("a", True)
    assert index.find("other", later) is None
    index.remove(["a", "unknown"])
    assert index.find("k", later) is None
    assert not len(index)


def test_a_new_conversation_finds_the_smallest_file_that_begins_as_it_does() -> None:
    index, one, other = SlotFileIndex(1000), prompt("a" * 200), prompt("b" * 200)
    index.add(file("long", one, 1, tokens=900))
    index.add(file("short", other, 2, tokens=600))
    found = index.find("k", prompt("c"))
    assert found
    assert of(found) == ("short", False)
    assert 200 <= found.tokens <= 260


def test_a_new_conversation_finds_the_prefix_and_not_one_of_many_conversations() -> None:
    index, opening = SlotFileIndex(10_000), "Please tell me, as briefly as you can, of "
    for at in range(40):
        said = prompt(f"{opening}{at} and of much else")
        index.add(replace(file(f"long{at}", said, at + 1, tokens=9000), size_bytes=10**8))
    shared = ConversationFingerprint((), prompt("x").blocks[:15])
    index.add(SlotFile("prefix", "k", 250, 10**6, shared))
    assert of(index.find("k", prompt(f"{opening}the sea"))) == ("prefix", False)
    assert of(index.find("k", prompt("x"))) == ("prefix", False)
    index.remove(["prefix"])
    found = index.find("k", prompt(f"{opening}the sea"))
    assert found
    assert found.file.name.startswith("long")


def test_a_file_that_holds_much_more_is_read_although_it_is_larger() -> None:
    index, one = SlotFileIndex(1000), prompt("a" * 2000, "b")
    index.add(replace(file("long", one, 1, tokens=9000), size_bytes=10**8))
    shared = ConversationFingerprint((), one.blocks[:15])
    index.add(SlotFile("prefix", "k", 250, 10**6, shared))
    assert of(index.find("k", prompt("a" * 2000, "c"))) == ("long", False)


def test_a_recurrent_file_serves_only_prompts_that_continue_it() -> None:
    index, one = SlotFileIndex(1000), prompt("a" * 200)
    index.add(file("a", one, one.turn_hashes[-1], recurrent=True))
    assert index.find("k", prompt("c")) is None
    assert of(index.find("k", prompt("a" * 200, "b", "c"))) == ("a", True)


def test_a_recurrent_file_is_not_cut_back_to_answer_its_last_message_again() -> None:
    index, first = SlotFileIndex(1000), prompt("a" * 200)
    answered = first.hash_with_reply({"role": "assistant", "content": "b"})
    index.add(file("a", first, first.turn_hashes[-1], answered, recurrent=True))
    assert index.find("k", first) is None
    assert of(index.find("k", prompt("a" * 200, "b", "c"))) == ("a", True)


def test_an_edited_conversation_does_not_find_its_file_by_a_session() -> None:
    index, one = SlotFileIndex(1000), prompt("a" * 2000)
    index.add(file("a", one, 77, recurrent=True))
    assert index.find("k", prompt("b" * 2000), session=77) is None


def test_why_no_file_of_a_conversation_fits_is_known() -> None:
    index, one = SlotFileIndex(1000), prompt("one")
    assert index.why_missing("k", (1,)) is None
    index.add(file("a", one, 1, 2))
    assert index.why_missing("other", (2,)) is NoFile.OTHER_BUILD
    index.add(file("b", one, 2, 3))
    index.remove(["a"])
    assert index.why_missing("k", (1,)) is NoFile.DELETED
    assert index.why_missing("k", (2, 3)) is None  # replaced, not gone


def test_a_beginning_that_is_used_as_a_whole_is_found_by_exactly_that_beginning() -> None:
    def ask(system: str, name: str = "") -> Prompt:
        messages = [{"role": "system", "content": system}, {"role": "user", "content": "why?"}]
        owner = CacheOwner(name)
        found = read_prompt(EndpointKind.CHAT, "m", {"messages": messages}, owner)
        assert found
        return found

    index, text = SlotFileIndex(1000), "word " * 200
    one, other = ask(text + "Monday"), ask(text + "Tuesday")
    blocks = one.blocks[: one.beginning_blocks]
    assert other.blocks[: len(blocks)] == blocks  # they differ behind the last block
    fingerprint = ConversationFingerprint((), blocks, beginning=one.shared_hashes[-1])
    index.add(SlotFile("a", "k", 250, 10**6, fingerprint, is_recurrent=True))
    assert of(index.find("k", one)) == of(index.find("k", ask(text + "Monday", "Ann")))
    assert of(index.find("k", one)) == ("a", True)
    assert index.find("k", other) is None
    assert index.find("other", one) is None
    index.remove(["a"])
    assert index.find("k", one) is None
