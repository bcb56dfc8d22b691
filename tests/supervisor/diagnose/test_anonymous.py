"""Users, machines and secrets are taken out of a report."""

from __future__ import annotations

import pytest

from supervisor.diagnose.report import anonymize


@pytest.mark.parametrize(
    ("text", "cleaned"),
    [
        ("/home/ada/models/a.gguf", "~/models/a.gguf"),
        ("owned by ada, not adamant", "owned by USER, not adamant"),
        ("host ada-laptop", "host HOST"),
        ("a topsecretvalue b", "a [hidden] b"),
        ("http://me:word@box:80/v1", "http://[hidden]@box:80/v1"),
        ("url = me:word@box:80/v1", "url = [hidden]@box:80/v1"),
        ("mail bob@box.test at 10:30 @noon", "mail bob@box.test at 10:30 @noon"),
        ("--api-key abc --hf-token=def -c 5", "--api-key [hidden] --hf-token=[hidden] -c 5"),
        ("Authorization: Bearer abcdef123", "Authorization: Bearer [hidden]"),
        ("key sk-corral-0123456789abcdef", "key [hidden]"),
    ],
)
def test_what_is_private_is_replaced(text: str, cleaned: str) -> None:
    assert anonymize(text, "/home/ada", "ada", "ada-laptop", ["topsecretvalue"]) == cleaned


def test_a_common_user_name_is_no_secret() -> None:
    assert anonymize("root@localhost", "/root", "root", "localhost") == "root@localhost"
