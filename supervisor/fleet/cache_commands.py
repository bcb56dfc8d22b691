"""What is done to the caches of instances that serve: saved now, or filled with a prompt now."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Final

from proxy.models import PrefillResult
from proxy.upstream.timings import Timings
from supervisor.engine_client.client import EngineClient, ErrorResponse
from supervisor.errors import CorralError, SettingsInvalid, StartFailed
from supervisor.fleet.model import Model, Replica
from supervisor.instance.interfaces import Traffic
from supervisor.instance.snapshot import InstanceSnapshot
from supervisor.instance.states import State
from supervisor.slot_store.config import SlotPersistence
from supervisor.slot_store.manifest import Manifest, cache_key
from supervisor.slot_store.task import ReplicaRef
from supervisor.warmup.prompts import WarmPrompt
from supervisor.warmup.queue import PrefillQueue

# How long clients may keep an instance from reading a prompt ahead.
_PATIENCE_S: Final = 60.0
_AWAY: Final = frozenset(State) - {State.READY}


def replica_ref(model: Model, replica: Replica) -> ReplicaRef:
    """Return whose conversations a replica's are."""
    return ReplicaRef(
        instance=replica.name,
        model=model.entry.name,
        replica=replica.place.number,
        replicas=max(1, len(model.replicas)),
    )


async def save_predecessors(model: Model, young: Replica) -> None:
    """Have those that serve in a replica's place save what it could take up."""
    for one in model.all_replicas:
        if one is not young and one.place == young.place and _share_cache_key(one, young):
            await _save(one)


async def save(replicas: Iterable[Replica], persistence: SlotPersistence) -> list[Manifest]:
    """Have instances that serve save what their idle slots hold; return all that is kept then."""
    replicas = list(replicas)
    for one in replicas:
        await _save(one)
    saved: list[Manifest] = []
    for model in dict.fromkeys(one.place.model for one in replicas):
        saved += await asyncio.to_thread(persistence.store.saved, model)
    return saved


async def warm(
    replicas: Sequence[Replica], prompt: WarmPrompt, traffic: Traffic
) -> list[PrefillResult] | CorralError:
    """Have each instance that serves read a prompt; an error where one did not, or none serves.

    Clients come first: an instance is asked while it has nothing else to do, for a minute at most.
    """
    serving = [one for one in replicas if _serving(one)]
    if not serving:
        return StartFailed("no instance is ready", hint="corral start brings them up")
    done = []
    for replica in serving:
        found = await _read(replica, prompt, traffic)
        if isinstance(found, ErrorResponse):
            return SettingsInvalid(
                f"{replica.name} refused the prompt {prompt.name}: {found.message or found.status}"
            )
        if found is None:
            return StartFailed(
                f"{replica.name} did not come to the prompt {prompt.name}",
                hint="clients go first: ask again when it is up and idle",
            )
        done.append(PrefillResult(replica.name, found.prompt_tokens, found.cached_tokens))
    return done


async def _read(
    replica: Replica, prompt: WarmPrompt, traffic: Traffic
) -> Timings | ErrorResponse | None:
    """Have one instance read a prompt; None where it did not come to that, or left."""
    facts = _serving(replica)
    if facts is None:
        return None
    found: list[Timings | ErrorResponse] = []
    reading = PrefillQueue([prompt], lambda _, what: found.append(what))
    async with EngineClient(facts.endpoint, facts.api_key) as client, asyncio.TaskGroup() as first:
        reads = first.create_task(reading.resume(client, traffic, facts.name, _PATIENCE_S))
        leaves = first.create_task(replica.instance.wait(_AWAY))
        await asyncio.wait((reads, leaves), return_when=asyncio.FIRST_COMPLETED)
        reads.cancel()
        leaves.cancel()
    return found[0] if found else None


async def _save(replica: Replica) -> None:
    if facts := _serving(replica):
        async with EngineClient(facts.endpoint, facts.api_key) as client:
            await replica.slots.save(client, facts.run)


def _serving(replica: Replica) -> InstanceSnapshot | None:
    facts = replica.instance.snapshot()
    return facts if facts.state is State.READY else None


def _share_cache_key(one: Replica, other: Replica) -> bool:
    if one.plan is None or other.plan is None:
        return False
    return cache_key(one.plan) == cache_key(other.plan)
