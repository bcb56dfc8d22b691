"""One daemon for all clients: a language model, one for embeddings, and others not loaded."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from support import tiny_clip
from support.corral_cli import CorralCli
from support.fork_server import ForkServer

from scripts.client_programs import scripted_model

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

# It writes BROKEN_CALL, or where a grammar forbids that, GOOD_CALL.
[models.broken]
path = "{broken}"
tool_calls = "repair"
[models.broken.flags]
ctx-size = 2048
threads = 1

# Its template takes arguments as objects.
[models.strict]
path = "{tiny}"
[models.strict.flags]
chat-template-file = "{strict_template}"
ctx-size = 2048
parallel = 1
threads = 1

[proxy.ollama]
enabled = true

[proxy.stored_responses]
enabled = true
"""


START = "<|im_start|>assistant\\n"
BROKEN_CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": }}\n</tool_call>'

GOOD_CALL = '{"name": "weather", "arguments": {"city": "Oslo"}}'


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
    calling = template.read_text("utf-8").replace(START, f"{START}<|say|>")
    lines = [scripted_model.Line("<|say|>", BROKEN_CALL, GOOD_CALL)]
    broken = scripted_model.write(corral.root / "broken.gguf", smollm2, lines, calling, ctx=2048)
    corral.configure(
        SETTINGS.format(
            smollm2=smollm2,
            tiny=tiny_model,
            template=template,
            clip=clip,
            broken=broken,
            strict_template=template.with_name("qwen2.5.jinja"),
        )
    )
    corral.ok("start", "smollm2", "embedder")
    yield corral.url
    corral.end()
