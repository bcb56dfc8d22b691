"""The parser of llama-server's `/metrics`."""

from proxy.upstream.engine_state import parse_metrics, plain_values

TEXT = """\
# HELP llamacpp:a_total First.
# TYPE llamacpp:a_total counter
llamacpp:a_total 1
llamacpp:b{position="0",kind="x"} 2.5
llamacpp:b{position="1"} NaN 1700000000
other:e 1
"""


def test_metrics_have_help_type_and_labels() -> None:
    first, second, third = parse_metrics(TEXT)
    assert (first.documentation, first.type) == ("First.", "counter")
    assert [(sample.name, sample.value) for sample in first.samples] == [("llamacpp:a_total", 1)]
    assert second.samples[0].labels == {"position": "0", "kind": "x"}
    assert third.samples[0].value != third.samples[0].value  # NaN


def test_a_page_that_holds_no_metrics_has_none() -> None:
    assert parse_metrics("<html>not found</html>") == []
    assert parse_metrics(TEXT + "llamacpp:c one\n") == []


def test_plain_values_have_no_labels_and_no_prefix() -> None:
    assert plain_values(TEXT) == {"a_total": 1.0}
