"""What a client hears of the models."""

from dataclasses import replace

from support.proxy_harness import model_info

from proxy.apis.llama_server import ShownState, event_text, events_between, shown_state


def test_a_change_is_an_event_with_the_new_state() -> None:
    before = {"a": ShownState("unloaded"), "b": ShownState("loaded"), "c": ShownState("loaded")}
    after = {
        "a": ShownState("loading", progress=0.5),
        "b": ShownState("unloaded", is_failed=True),
        "c": ShownState("unloaded"),
    }
    progress = {"stages": ["text_model"], "current": "text_model", "value": 0.5}
    assert list(events_between(before, after)) == [
        {
            "model": "a",
            "event": "status_change",
            "data": {"status": "loading", "progress": progress},
        },
        {"model": "b", "event": "status_change", "data": {"status": "unloaded", "exit_code": 1}},
        {"model": "c", "event": "status_change", "data": {"status": "unloaded", "exit_code": 0}},
    ]
    assert list(events_between(after, after)) == []


def test_a_loaded_model_is_described() -> None:
    (event,) = events_between({"a": ShownState("loading")}, {"a": shown_state(model_info("a"))})
    data = event["data"]
    assert isinstance(data, dict)
    assert (data["status"], data["info"]["id"], data["info"]["meta"]["n_ctx"]) == (
        "loaded",
        "a",
        2048,
    )


def test_models_that_come_and_go_are_events() -> None:
    assert list(events_between({"a": ShownState("loaded")}, {"b": ShownState("loading")})) == [
        {"model": "a", "event": "model_remove"},
        {"model": "*", "event": "models_reload"},
    ]


def test_a_failed_model_is_unloaded() -> None:
    assert shown_state(model_info("a", "failed")) == ShownState("unloaded", is_failed=True)
    loading = replace(model_info("a", "loading"), load_progress=0.25)
    assert shown_state(loading) == ShownState("loading", progress=0.25)


def test_an_event_is_one_line_of_data() -> None:
    assert event_text({"model": "a\n"}) == b'data: {"model":"a\\n"}\n\n'
