"""The check of the model of the host cache passes on the engine that is here."""

from acceptance import host_cache_check


def test_the_engine_holds_the_expected_content() -> None:
    assert host_cache_check.main(["--turns", "--steps", "16", "--limits", "4"]) == 0
