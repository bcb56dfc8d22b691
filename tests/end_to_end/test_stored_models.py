"""Models that other programs keep are found, served by name and removed, by the real engine."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from support import tiny_bert, tiny_clip, tiny_gguf
from support.corral_cli import CorralCli
from support.stores_layout import HuggingFace, Ollama, copied


@pytest.fixture
def home(corral: CorralCli, tmp_path: Path) -> Path:
    """Return a home directory with the stores of five programs."""
    home = tmp_path / "home"
    (tmp_path / "made").mkdir()
    model = tiny_gguf.make(tmp_path / "made" / "model.gguf", mode="cycle")
    clip = tiny_clip.make(tmp_path / "made" / "clip.gguf")
    vectors = tiny_bert.make(tmp_path / "made" / "vectors.gguf", "mean")
    ollama = Ollama(home / ".ollama" / "models")
    ollama.model("registry.ollama.ai/library/tiny/1b", model=model, projector=clip)
    ollama.manifest("registry.ollama.ai/library/gone/1b", [("model", "sha256:" + "0" * 64, 1)])
    studio = home / ".lmstudio" / "models" / "lmstudio-community" / "Tiny-GGUF"
    copied(model, studio / "Tiny-Q4_K_M.gguf")
    hub = HuggingFace(home / ".cache" / "huggingface" / "hub")
    hub.add("org/Eyes-GGUF", "Eyes-Q8_0.gguf", model.read_bytes())
    hub.add("org/Eyes-GGUF", "mmproj-Eyes-F16.gguf", clip.read_bytes())
    copied(model, home / ".cache" / "llama.cpp" / "someone_tiny.gguf")
    copied(vectors, home / "own" / "vectors.gguf")
    names = [name for name in corral.env if name.startswith(("HF_", "LLAMA_", "OLLAMA_", "XDG_C"))]
    for name in names:
        del corral.env[name]
    corral.env["HOME"] = str(home)
    return home


def ask(corral: CorralCli, page: str, **body: Any) -> Any:
    request = urllib.request.Request(
        f"{corral.url}{page}", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)


def says(corral: CorralCli, model: str, content: object = "a b c") -> str:
    messages = [{"role": "user", "content": content}]
    body = {"model": model, "messages": messages, "max_tokens": 4, "temperature": 0}
    answer = ask(corral, "/v1/chat/completions", **body)
    return str(answer["choices"][0]["message"]["content"])


def test_found_models_are_served_by_name(corral: CorralCli, home: Path) -> None:
    corral.configure(f'serve_found = true\nmodels_dir = "{home}/own"\n')
    listed = {model["name"]: model for model in corral.data("model", "list")["models"]}
    assert {name: entry["store"] for name, entry in listed.items()} == {
        "vectors": "models_dir",
        "org/Eyes-GGUF:Q8_0": "huggingface",
        "someone_tiny": "llama.cpp",
        "lmstudio-community/Tiny-GGUF:Q4_K_M": "lmstudio",
        "gone:1b": "ollama",
        "tiny:1b": "ollama",
    }
    assert "is missing" in listed["gone:1b"]["problem"]
    corral.ok("start", "tiny:1b")
    picture = {"type": "image_url", "image_url": {"url": tiny_clip.picture((255, 0, 0))}}
    content = [{"type": "text", "text": "a b c"}, picture]
    for name in ("tiny:1b", "org/Eyes-GGUF:Q8_0"):
        assert len(says(corral, name, content)) == 4
    assert len(says(corral, "lmstudio-community/Tiny-GGUF:Q4_K_M")) == 4
    vectors = ask(corral, "/v1/embeddings", model="vectors", input="a")["data"]
    assert len(vectors[0]["embedding"]) == 64
    assert corral.model_states()["someone_tiny"] == "unloaded"
    assert "gone:1b" not in corral.model_states()


def test_a_model_is_removed_once_no_engine_serves_it(corral: CorralCli, home: Path) -> None:
    corral.configure("")
    name, repository = "org/Eyes-GGUF:Q8_0", home / ".cache/huggingface/hub/models--org--Eyes-GGUF"
    corral.ok("start", name)
    refused = corral("model", "remove", name, "--yes")
    assert refused.returncode == 69
    assert "corral stop org--Eyes-GGUF:Q8_0" in refused.stderr
    kept = corral("model", "remove", "tiny:1b", "--yes")
    assert (kept.returncode, "ollama rm tiny:1b" in kept.stderr) == (1, True)
    corral.ok("stop", "org--Eyes-GGUF:Q8_0")
    unasked = corral("model", "remove", name)
    assert (unasked.returncode, "add --yes" in unasked.stderr) == (2, True)
    assert repository.exists()
    (path,) = (row["path"] for row in corral.data("model", "list")["models"] if row["name"] == name)
    corral.configure(f'[models.eyes]\npath = "{path}"\n')
    assert corral.data("model", "remove", "eyes", "--yes")["freed_bytes"] > 200_000
    assert not repository.exists()
    assert corral("model", "remove", name, "--yes").returncode == 4
    assert corral.data("model", "prune", "--dry-run")["files"] == []


def test_the_draft_of_a_running_model_is_not_removed(
    corral: CorralCli, home: Path, tmp_path: Path
) -> None:
    corral.configure("")
    name = "org/Eyes-GGUF:Q8_0"
    (draft,) = (row for row in corral.data("model", "list")["models"] if row["name"] == name)
    link = tmp_path / "draft.gguf"
    model = tiny_gguf.make(tmp_path / "large.gguf", embd=256, heads=8, layers=4, ff=512)
    link.symlink_to(draft["path"])
    corral.configure(f'[models.chat]\npath = "{model}"\ndraft = "{link}"\n')
    corral.ok("start", "chat")
    refused = corral("model", "remove", name, "--yes")
    assert (refused.returncode, "is the draft of chat" in refused.stderr) == (69, True)
    corral.ok("stop", "chat")
    assert corral.data("model", "remove", name, "--yes")["freed_bytes"] > 200_000
