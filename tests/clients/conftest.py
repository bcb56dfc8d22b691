"""One daemon for all clients: a language model, one for embeddings, and others not loaded."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from support import tiny_clip
from support.corral_cli import CorralCli
from support.fork_server import ForkServer

# The model's own template knows no tools.
SETTINGS = """
[models.smollm2]
path = "{smollm2}"
aliases = ["gpt-4o-mini", "claude-haiku"]
[models.smollm2.flags]
chat-template-file = "{template}"
ctx-size = 4096
parallel = 2
threads = 1

[models.embedder]
path = "{tiny}"
[models.embedder.flags]
embeddings = true
pooling = "mean"
threads = 1

[models.resting]
path = "{tiny}"

[models.seeing]
path = "{tiny}"
[models.seeing.flags]
mmproj = "{clip}"
ctx-size = 512
threads = 1

[proxy.ollama]
enabled = true

[proxy.stored_responses]
enabled = true
"""


@pytest.fixture(scope="session")
def url(
    tmp_path_factory: pytest.TempPathFactory,
    fork_server: ForkServer,
    smollm2: Path,
    tiny_model: Path,
) -> Iterator[str]:
    """Serve the models on the real engine; return the address that clients connect to."""
    corral = CorralCli(tmp_path_factory.mktemp("c"), fork_server)
    template = Path(__file__).with_name("tools.jinja")
    clip = tiny_clip.make(corral.root / "clip.gguf")
    corral.configure(
        SETTINGS.format(
            smollm2=smollm2,
            tiny=tiny_model,
            template=template,
            clip=clip,
        )
    )
    corral.ok("start", "smollm2", "embedder")
    yield corral.url
    corral.end()
