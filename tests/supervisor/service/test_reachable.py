from pathlib import Path

from supervisor.service.units import reasons_unreachable


def test_what_keeps_another_user_out_is_named_once(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    (reason,) = reasons_unreachable([tmp_path / "a", tmp_path / "b"])
    assert reason.startswith("others cannot enter /")


def test_a_missing_file_is_named_and_a_public_one_is_not() -> None:
    assert list(reasons_unreachable([Path("/bin/sh"), Path("/bin/no-such")])) == [
        "/bin/no-such is not there"
    ]
