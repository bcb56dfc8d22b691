"""llama.cpp's unified program `llama` as the engine: `llama serve`."""

from pathlib import Path

from support.corral_cli import CorralCli, begin_stream
from support.engine_scripts import library_exports

from supervisor.builds.discover import Engine


def test_the_unified_program_serves(corral: CorralCli, tiny_model: Path, engine: Engine) -> None:
    """No package has the program, so a script calls llama-server as that does."""
    app = corral.root / "llama"
    app.write_text(
        "#!/bin/sh\n"
        '[ "$1" = serve ] || { echo "error: unknown command \'$1\'" >&2; exit 1; }\n'
        + library_exports(engine.path, engine.library_dirs)
        + f'shift\nLLAMA_APP_CMD=serve exec "{engine.path}" "$@"\n'
    )
    app.chmod(0o700)
    corral.configure(f'engine = "{app}"\n[models.tiny]\npath = "{tiny_model}"\n')
    corral.ok("start")
    assert b"[DONE]" in begin_stream(corral, 4).read()
    assert corral.ok("engine", "path").strip() == str(app)
    assert f"{app} serve" in corral.ok("engine", "list")
    assert corral.data("plan", "tiny")["argv"][:2] == [str(app), "serve"]
