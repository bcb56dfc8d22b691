"""From nothing to a served model: the settings file is made, and the daemon takes it."""

from __future__ import annotations

import shutil
from pathlib import Path

from support.corral_cli import CorralCli


def test_the_models_of_this_machine_are_served(corral: CorralCli, tiny_model: Path) -> None:
    models = corral.root / "data" / "models"
    models.mkdir(parents=True)
    shutil.copy(tiny_model, models / "first.gguf")
    (models / "broken.gguf").write_bytes(b"GGUF")
    made = corral("init")
    path = corral.root / "config" / "corral.toml"
    text = path.read_text("utf-8")
    assert made.returncode == 0, made.stderr
    assert text.startswith("#:schema ./corral.schema.json\n")
    assert path.with_name("corral.schema.json").is_file()
    assert "broken" not in text
    path.write_text(text.replace("127.0.0.1:8080", "127.0.0.1:0"), "utf-8")
    corral.ok("start")
    assert corral.instances()["first.0"].state == "ready"


def test_a_file_of_the_user_is_kept(corral: CorralCli, tiny_model: Path) -> None:
    corral.configure("# mine\n")
    refused = corral("init", str(tiny_model))
    assert refused.returncode == 78
    assert "there is a settings file already" in refused.stderr
    path = corral.root / "config" / "corral.toml"
    assert path.read_text("utf-8").startswith("# mine\n")
    corral.ok("init", str(tiny_model), "--force")
    assert str(tiny_model) in path.read_text("utf-8")
    (backup,) = path.parent.glob("*.bak")
    assert backup.read_text("utf-8").startswith("# mine\n")
    missing = corral("init", "nowhere", "--force")
    assert missing.returncode == 4
    assert "no model is named 'nowhere'" in missing.stderr
