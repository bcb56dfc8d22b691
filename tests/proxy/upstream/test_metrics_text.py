"""The parser of llama-server's `/metrics`."""

from proxy.upstream.engine_state import EngineMetric, parse_metrics, plain_values

TEXT = """\
# HELP llamacpp:a_total First.
# TYPE llamacpp:a_total counter
llamacpp:a_total 1
llamacpp:b{position="0",kind="x"} 2.5
llamacpp:b{position="1"} NaN 1700000000
llamacpp:c one
llamacpp:d 1 2 3
other:e 1
"""


def test_metrics_have_help_type_and_labels() -> None:
    first, second = parse_metrics(TEXT)
    assert first == EngineMetric("llamacpp:a_total", "First.", "counter", [({}, 1.0)])
    assert (second.help, second.type) == ("", "untyped")
    assert second.samples[0] == ({"position": "0", "kind": "x"}, 2.5)
    assert second.samples[1][1] != second.samples[1][1]  # NaN


def test_plain_values_have_no_labels_and_no_prefix() -> None:
    assert plain_values(TEXT) == {"a_total": 1.0}
