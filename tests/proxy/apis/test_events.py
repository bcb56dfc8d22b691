"""The events of models that a client gets."""

from dataclasses import replace

from support.proxy_harness import model_info

from proxy.apis.llama_server import events_between

LOADED = model_info("a")
UNLOADED = model_info("a", "unloaded")
LOADING = replace(model_info("a", "loading"), load_progress=0.5)
FAILED = replace(model_info("a", "failed"), load_progress=0.5)


def test_a_change_is_an_event_with_the_new_state() -> None:
    before = {"a": UNLOADED, "b": LOADED, "c": LOADED}
    after = {"a": LOADING, "b": FAILED, "c": UNLOADED}
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
    (event,) = events_between({"a": LOADING}, {"a": LOADED})
    data = event["data"]
    assert isinstance(data, dict)
    assert (data["status"], data["info"]["id"], data["info"]["meta"]["n_ctx"]) == (
        "loaded",
        "a",
        2048,
    )


def test_other_facts_of_a_model_are_no_change() -> None:
    assert list(events_between({"a": LOADED}, {"a": replace(LOADED, context_length=1)})) == []


def test_models_that_come_and_go_are_events() -> None:
    assert list(events_between({"a": LOADED}, {"b": LOADING})) == [
        {"model": "a", "event": "model_remove"},
        {"model": "*", "event": "models_reload"},
    ]
