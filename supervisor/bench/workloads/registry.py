"""All workloads by name, in the order in which a round runs them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from supervisor.bench.workloads.batch import BATCH
from supervisor.bench.workloads.chat import CHAT
from supervisor.bench.workloads.concurrent import CONCURRENT
from supervisor.bench.workloads.embedding import EMBEDDING
from supervisor.bench.workloads.generation import GENERATION
from supervisor.bench.workloads.long_prompt import LONG_PROMPT
from supervisor.bench.workloads.workload import Workload
from supervisor.bench.workloads.yours import YOURS

_ALL: Final = (CHAT, LONG_PROMPT, GENERATION, CONCURRENT, BATCH, EMBEDDING, YOURS)
WORKLOADS: Final[Mapping[str, Workload]] = MappingProxyType({one.name: one for one in _ALL})
