"""Makes launches: a plan with a key, a place to listen, a log and the prompts to prefill."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from proxy.adapter import Adapter, with_adapter
from supervisor.engine_client.endpoint import Endpoint
from supervisor.engines.discover import Engine
from supervisor.flags.loras import Lora, loras_of
from supervisor.flags.plan import Plan, unix_sockets
from supervisor.host.paths import Directories, make_private
from supervisor.process.launch import Launch, ProcessTag, clean_environment
from supervisor.settings.schema import Settings
from supervisor.shards.run import ShardRun
from supervisor.slot_store.config import slot_persistence
from supervisor.warmup import prompts
from supervisor.warmup.learned import LearnedPrompts
from supervisor.warmup.prompts import WarmPrompt

_LOOPBACK: Final = "127.0.0.1"


class Launches:
    """Makes the launches of one version of the settings."""

    def __init__(self, settings: Settings, directories: Directories) -> None:
        self._models = settings.models
        self._directories = directories
        self.slot_persistence = slot_persistence(directories, settings.supervisor)
        self.learned = LearnedPrompts(directories.prompts)

    def launch(self, plan: Plan, instance: str, shards: ShardRun | None = None) -> Launch:
        """Make one run of a plan, with a random key and its own socket or port.

        The engine reaches its workers through the relays of `shards`, if there are any.

        Raises:
            SettingsInvalid: A warm prompt is missing.
            AccessDenied: The log directory cannot be used.
        """
        endpoint = self._endpoint(plan.engine, instance)
        api_key = secrets.token_hex(16)
        rpc = ",".join(map(str, shards.addresses)) if shards else None
        argv = (*_argv(plan, endpoint, rpc), *self.slot_persistence.prepare(plan, instance))
        make_private(self._directories.log)
        return Launch(
            argv=argv,
            env=clean_environment(
                os.environ,
                program=plan.engine.path,
                library_dirs=plan.engine.library_dirs,
                api_key=api_key,
                marker=ProcessTag(self._directories.runtime, instance, Path(argv[0])).text,
            ),
            cwd=plan.engine.path.parent,
            endpoint=endpoint,
            api_key=api_key,
            log_path=self._directories.engine_log(instance),
            prompts=self._prompts(plan.model),
            has_prompt_cache=plan.has_prompt_cache,
            surroundings=shards.serve if shards else nullcontext,
        )

    def argv(self, plan: Plan, instance: str) -> tuple[str, ...]:
        """Return the command line of a launch."""
        argv = _argv(plan, self._endpoint(plan.engine, instance))
        return (*argv, *self.slot_persistence.arguments(plan, instance))

    def learns_prompts(self, model: str) -> bool:
        table = self._models.get(model)
        return table is not None and table.learn_prompts

    def _prompts(self, model: str) -> tuple[WarmPrompt, ...]:
        table = self._models[model]
        learned = self.learned.prompts(model) if table.learn_prompts else []
        found = (*map(prompts.read, table.warm_prompts), *learned)
        return tuple(replace(one, body=self._without_adapters(model, one.body)) for one in found)

    def _without_adapters(self, model: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        adapters = adapters_of(loras_of(self._models[model].loras))
        return with_adapter(body, adapters, "") if adapters else body

    def _endpoint(self, engine: Engine, instance: str) -> Endpoint:
        socket = self._directories.engine_socket(instance) if unix_sockets(engine) else None
        return Endpoint(socket=socket, host=_LOOPBACK, port=0)


def adapters_of(found: Sequence[Lora]) -> tuple[Adapter, ...]:
    """Return the adapters of a model as the proxy knows them."""
    return tuple(Adapter(one.name, one.scale) for one in found)


def _argv(plan: Plan, endpoint: Endpoint, rpc: str | None = None) -> tuple[str, ...]:
    if endpoint.socket:
        return plan.argv(host=str(endpoint.socket), port=None, rpc=rpc)
    return plan.argv(host=endpoint.host, port=endpoint.port, rpc=rpc)
