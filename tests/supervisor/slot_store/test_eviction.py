from dataclasses import replace
from datetime import timedelta

from support.slot_files import NOON, catalogued

from proxy.cache.fingerprint import ConversationFingerprint
from supervisor.slot_store.file_index import CataloguedFile
from supervisor.slot_store.policy import DiskBudget
from supervisor.slot_store.save_limits import to_evict

BUDGET = DiskBudget(10_000, model_share=1, files=4, files_a_model=3)
NOW = NOON + timedelta(hours=2)
FIRST = ConversationFingerprint((1,), tuple(range(40))).to_ascii()
OTHER = ConversationFingerprint((2,), tuple(range(40))).to_ascii()
PREFIX = ConversationFingerprint((), tuple(range(30))).to_ascii()


def evicted(kept: list[CataloguedFile], budget: DiskBudget = BUDGET) -> set[str]:
    return {entry.file.name for entry in to_evict(kept, budget, NOW)}


def test_what_was_used_longest_ago_leaves_first() -> None:
    assert evicted([catalogued(str(minutes), minutes) for minutes in range(5)]) == {"0", "1"}


def test_what_is_too_old_leaves_though_there_is_room() -> None:
    budget = replace(BUDGET, max_age=timedelta(hours=1))
    assert evicted([catalogued("old", 59), catalogued("young", 60)], budget) == {"old"}


def test_one_model_takes_no_more_than_its_share() -> None:
    kept = [
        catalogued("a", 1),
        catalogued("b", 2),
        catalogued("c", 3),
        catalogued("d", 0, model="other"),
    ]
    assert evicted(kept, replace(BUDGET, model_share=0.2)) == {"a"}


def test_all_models_together_take_no_more_than_there_is() -> None:
    assert evicted([catalogued("a", 1), catalogued("b", 2, model="other", size_bytes=9500)]) == {
        "b"
    }


def test_what_saves_fewer_tokens_for_its_bytes_leaves_first() -> None:
    kept = [
        catalogued("dear", 3, size_bytes=2000),
        catalogued("a", 1),
        catalogued("b", 2),
        catalogued("c"),
    ]
    assert evicted(kept) == {"dear"}


def test_what_was_restored_lately_stays() -> None:
    restored = replace(catalogued("restored"), restored_tokens=600)
    assert evicted([restored, *(catalogued(name, 1) for name in "abc")]) != {"restored"}


def test_a_prefix_of_many_conversations_stays() -> None:
    prefix = catalogued("prefix", fingerprint=PREFIX)
    assert evicted([prefix, *(catalogued(name, 60) for name in "bcd")]) == {"prefix"}
    shared = [catalogued("a", 60, fingerprint=FIRST), catalogued("other", 60, fingerprint=OTHER)]
    assert evicted([prefix, *shared, catalogued("b", 60)]) != {"prefix"}
