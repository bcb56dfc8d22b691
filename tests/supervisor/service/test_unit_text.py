import pytest
from support.service_facts import facts

from supervisor.errors import SettingsInvalid
from supervisor.service.units import (
    MARK,
    SYSTEM_PATHS,
    assignment,
    command_line,
    escape_unit,
    service_files,
)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["/usr/bin/corral", "serve", "--config", "/etc/a.toml"], None),
        (["/opt/my corral/corral"], '"/opt/my corral/corral"'),
        (["/a", "50%n"], '/a "50%%n"'),
        (["/a", "$HOME"], '/a "$$HOME"'),
        (["/a", 'say "hi"\\'], '/a "say \\"hi\\"\\\\"'),
        (["/a", "", ";"], '/a "" ";"'),
    ],
)
def test_words_reach_the_program_as_they_are(words: list[str], line: str | None) -> None:
    assert command_line(words) == (line or " ".join(words))


def test_a_name_cannot_add_a_line() -> None:
    with pytest.raises(SettingsInvalid, match="control characters"):
        escape_unit("a\nExecStart=/bin/evil")


def test_an_assignment_keeps_a_specifier() -> None:
    assert assignment("KEY", "%d/a") == '"KEY=%d/a"'


def test_a_file_says_who_wrote_it_and_has_no_gaps() -> None:
    for text in service_files(facts(), SYSTEM_PATHS).values():
        assert text.startswith(MARK)
        assert "{" not in text
