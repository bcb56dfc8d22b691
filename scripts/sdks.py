"""Try the Responses API, and Ollama's, with the client libraries that speak them.

A separate daemon serves SmolLM2, with stored responses. Its template has examples of a tool's
use, so that the small model calls the tool and repeats its result. Each
library runs a program of `scripts/sdk_checks` that says of each feature whether it works. Exits
with 1 if one does not.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from support.corral_cli import CorralCli  # noqa: E402 (found by the line above)

from supervisor.models import pinned  # noqa: E402
from supervisor.system.paths import directories  # noqa: E402

CHECKS: Final = ROOT / "scripts" / "sdk_checks"
NODE_PACKAGES: Final = ("openai", "ai", "@ai-sdk/openai", "zod", "ollama")
# By environment: instructor wants an older openai.
PYTHON_PACKAGES: Final = {
    "python": ("pydantic-ai-slim[openai]", "openai-agents"),
    "instructor": ("instructor",),
}
# `combined` is a request with tools and a format.
FEATURES: Final = ("whole", "stream", "parse", "tools", "combined", "turns", "stored")
OLLAMA_FEATURES: Final = (*FEATURES[:-1], "generate", "embed", "models")
INSTRUCTOR_FEATURES: Final = ("whole", "stream", "items")  # each is `combined`
OLLAMA: Final = "ollama-js"
INSTRUCTOR: Final = "instructor"
TIMEOUT_S: Final = 300
SETTINGS: Final = """
[models.smollm2]
path = "{model}"
[models.smollm2.flags]
chat-template-file = "{template}"
ctx-size = 8192
parallel = 2

[models.vectors]
path = "{model}"
preload = false
[models.vectors.flags]
embeddings = true
pooling = "mean"

[proxy.ollama]
enabled = true

[proxy.stored_responses]
enabled = true
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=_programs(Path()))
    parser.add_argument("--url", help="ask this server, such as a bare llama-server")
    options = parser.parse_args()
    if shutil.which("npm") is None:
        parser.error("npm is not installed; install Node.js 20 or newer")
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"), "llama-corral", "sdks")
    _install(cache)
    with nullcontext(options.url) if options.url else _served() as url:
        own = {"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": "none", "OLLAMA_HOST": url}
        environment = {**os.environ, **own}
        found = {
            name: _run(program, environment, _features(name))
            for name, program in _programs(cache).items()
            if options.only in {None, name}
        }
    _print(found)
    return int(any(set(results.values()) != {"ok"} for results in found.values()))


def _programs(cache: Path) -> Mapping[str, Sequence[str]]:
    python, instructor = (str(cache / name / "bin" / "python") for name in PYTHON_PACKAGES)
    return {
        "openai-python": (sys.executable, "-m", "scripts.sdk_checks.check_openai_python"),
        "openai-node": ("node", str(cache / "node" / "openai_node.mjs")),
        "ai-sdk": ("node", str(cache / "node" / "ai_sdk.mjs")),
        OLLAMA: ("node", str(cache / "node" / "ollama_node.mjs")),
        "pydantic-ai": (python, "-m", "scripts.sdk_checks.check_pydantic_ai"),
        "openai-agents": (python, "-m", "scripts.sdk_checks.check_openai_agents"),
        INSTRUCTOR: (instructor, "-m", "scripts.sdk_checks.check_instructor"),
    }


def _install(cache: Path) -> None:
    node = cache / "node"
    node.mkdir(parents=True, exist_ok=True)
    npm = ["npm", "install", "--silent", "--no-fund", "--no-audit", "--prefix", str(node)]
    subprocess.run([*npm, *NODE_PACKAGES], check=True)
    for program in CHECKS.glob("*.mjs"):  # node looks for packages beside the program
        (node / program.name).write_bytes(program.read_bytes())
    for name, packages in PYTHON_PACKAGES.items():
        environment = cache / name
        if not environment.exists():
            subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
        pip = [str(environment / "bin" / "pip"), "install", "--quiet", "--upgrade"]
        subprocess.run([*pip, *packages], check=True)


@contextmanager
def _served() -> Iterator[str]:
    """Yield the address of a daemon that serves the model."""
    template = CHECKS / "tools.jinja"
    with tempfile.TemporaryDirectory(prefix="sdks-") as directory:
        corral = CorralCli(Path(directory))
        model = pinned.fetch(pinned.find_pin("smollm2"), directories().models, lambda *_: None)
        corral.configure(SETTINGS.format(model=model, template=template))
        try:
            corral.serve()
            yield corral.url
        finally:
            corral.end()


def _features(name: str) -> Sequence[str]:
    return {OLLAMA: OLLAMA_FEATURES, INSTRUCTOR: INSTRUCTOR_FEATURES}.get(name, FEATURES)


def _run(
    program: Sequence[str], environment: Mapping[str, str], features: Sequence[str]
) -> dict[str, str]:
    """Return a program's result for each feature."""
    ran = subprocess.run(
        program,
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    lines = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]
    said = {line["feature"]: line["result"] for line in lines}
    missing = ran.stderr.strip().splitlines()[-1:] or ["no result"]
    return {feature: said.get(feature, missing[0]) for feature in features}


def _print(found: Mapping[str, Mapping[str, str]]) -> None:
    for features in dict.fromkeys(map(_features, found)):
        rows: list[tuple[str, ...]] = [("client", *features)]
        named = [name for name in found if _features(name) == features]
        rows += [(name, *(found[name][feature] for feature in features)) for name in named]
        for name, *cells in rows:
            print(f"{name:<15}", *(f"{'failed' if len(cell) > 8 else cell:<8}" for cell in cells))
    for name, results in found.items():
        for feature, result in results.items():
            if result != "ok":
                print(f"{name}, {feature}: {result}")


if __name__ == "__main__":
    sys.exit(main())
