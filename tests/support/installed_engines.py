"""Installed builds without a download: the engine of the tests under the names of builds."""

from pathlib import Path

from supervisor.builds.installed import InstalledBuild, files_of, write_build


def install(engines_dir: Path, name: str, binary: Path) -> Path:
    """Install a program, with the files beside it, as a build; return its path there."""
    directory = engines_dir / name
    directory.mkdir(parents=True)
    files_of(directory).symlink_to(binary.parent)
    variant = name.partition("-")[2]
    build = InstalledBuild(
        name,
        int(name.partition("-")[0].removeprefix("b")),
        variant,
        binary.name,
        {},
        "2026-11-22T20:00:00Z",
    )
    write_build(directory, build)
    engines_dir.chmod(0o700)
    return build.path(engines_dir)
