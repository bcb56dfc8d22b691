from __future__ import annotations

import pytest

from supervisor.errors import NoSuchModel
from supervisor.models import reference
from supervisor.models.reference import HubReference, UrlReference


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("org/m-GGUF", HubReference("org/m-GGUF")),
        ("org/m-GGUF:q4_k_m", HubReference("org/m-GGUF", quantisation="Q4_K_M")),
        ("hf:org/m:Q8_0", HubReference("org/m", quantisation="Q8_0")),
        ("hf.co/org/m:Q8_0", HubReference("org/m", quantisation="Q8_0")),
        ("huggingface.co/org/m", HubReference("org/m")),
        ("hf.co/org/m:latest", HubReference("org/m")),
        ("https://huggingface.co/org/m", HubReference("org/m")),
        ("org/m:dir/a-Q8_0.gguf", HubReference("org/m", file="dir/a-Q8_0.gguf")),
        (
            "https://huggingface.co/org/m/resolve/main/dir/a%20b.gguf?download=true",
            HubReference("org/m", file="dir/a b.gguf"),
        ),
        (
            "https://hf.co/org/m/blob/refs%2Fpr%2F1/a.gguf",
            HubReference("org/m", revision="refs/pr/1", file="a.gguf"),
        ),
        ("https://mirror.test/org/m:Q8_0", HubReference("org/m", quantisation="Q8_0")),
        (
            "https://files.test/x/a-Q8_0.gguf",
            UrlReference("https://files.test/x/a-Q8_0.gguf", "a-Q8_0.gguf"),
        ),
        ("http://127.0.0.1:80/a.gguf", UrlReference("http://127.0.0.1:80/a.gguf", "a.gguf")),
    ],
)
def test_words_that_name_a_model(word: str, expected: object) -> None:
    assert reference.parse_reference(word, "https://mirror.test") == expected


@pytest.mark.parametrize(
    "word",
    [
        "a/b/c",
        "../x",
        "org/..",
        "org/a--b",
        "/etc/x",
        "org/",
        "http://files.test/a.gguf",
        "ftp://files.test/a.gguf",
        "https://files.test/a.zip",
        "https://files.test/.gguf",
        "https://files.test/%2e%2e%2fa.gguf%00.gguf",
        "https://huggingface.co/org/m/tree/main",
        "https://huggingface.co/org/m/resolve/..%2F..%2Fx/a.gguf",
        "https://huggingface.co/datasets/org/m/resolve/main",
    ],
)
def test_words_that_name_none(word: str) -> None:
    with pytest.raises(NoSuchModel) as caught:
        reference.parse_reference(word)
    assert caught.value.hint


def test_a_url_of_a_shard_means_all_of_them() -> None:
    wanted = UrlReference("https://x.test/a-00002-of-00003.gguf?k=1", "a-00002-of-00003.gguf")
    assert [shard.url for shard in wanted.shards] == [
        f"https://x.test/a-0000{number}-of-00003.gguf?k=1" for number in (1, 2, 3)
    ]
    alone = UrlReference("https://x.test/a.gguf", "a.gguf")
    assert alone.shards == (alone,)


@pytest.mark.parametrize(
    "word",
    [
        "http://anna:geheim@host.example/m.gguf?token=geheim",
        "https://anna:geheim@host.example/m.bin?token=geheim#geheim",
        "https://anna:geheim@hub.example/a/b/c?token=geheim",
        "anna:geheim@hub.example/m.gguf",
    ],
)
def test_errors_quote_no_passwords_and_tokens_of_urls(word: str) -> None:
    with pytest.raises(NoSuchModel) as caught:
        reference.parse_reference(word, "https://anna:geheim@hub.example")
    assert "geheim" not in caught.value.message
    assert "m.gguf" in caught.value.message or ".example/" in caught.value.message
