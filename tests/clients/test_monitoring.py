"""Monitoring endpoints, with the real engine."""

import json
import urllib.request
from typing import Any

import openai
from prometheus_client.parser import text_string_to_metric_families as parse
from support.corral_cli import until
from support.documented_metrics import documented_metrics


def get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=60) as response:
        return json.load(response)


def test_our_metrics_agree_with_the_engines(url: str) -> None:
    # Growth, because the engine never counts the tokens of requests that other tests cancelled.
    before = figures_of(url, "smollm2.0")
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        client.completions.create(model="smollm2", prompt="The sea is", max_tokens=5)

    def has_both() -> bool:
        # The engine's own figures may be up to a second old.
        found = figures_of(url, "smollm2.0")
        assert found["corral_requests_finished_total"] >= 1
        assert found["corral_engine_scrape_success"] == 1
        growth = {name: value - before.get(name, 0) for name, value in found.items()}
        ours = growth["corral_decoded_tokens_total"]
        return growth["llamacpp:tokens_predicted_total"] >= ours >= 5

    until(has_both)


def figures_of(url: str, instance: str) -> dict[str, float]:
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as response:
        return {
            sample.name: sample.value
            for family in parse(response.read().decode())
            for sample in family.samples
            if sample.labels.get("model_instance") == instance
        }


def test_the_documented_metrics_are_those_that_are_exposed(url: str) -> None:
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as response:
        families = {entry.name: entry for entry in parse(response.read().decode())}
    documented = {
        documented_metric.family: documented_metric for documented_metric in documented_metrics()
    }
    assert documented.keys() == families.keys()
    for name, family in families.items():
        page = documented[name]
        assert (page.type, page.help) == (family.type, family.documentation)
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        assert labels == page.labels or not family.samples, name


def test_slots_lists_the_slots_of_all_models(url: str) -> None:
    slots = get(f"{url}/slots")
    for model in ("smollm2", "embedder"):
        ids = [slot["id"] for slot in slots if slot["model"] == model]
        assert ids == list(range(len(ids)))
    assert get(f"{url}/slots/0?model=smollm2")["model"] == "smollm2"
    assert {slot["model"] for slot in slots} == {"smollm2", "embedder"}
    assert not any(slot["is_processing"] for slot in slots)
    assert get(f"{url}/corral/v1/slots")["totals"]["num_slots"] == len(slots)


def test_health_counts_models_by_state(url: str) -> None:
    health = get(f"{url}/health")
    assert health["status"] == "ok"
    assert health["models"]["loaded"] == 2


def test_props_of_a_model_are_those_of_its_engine(url: str) -> None:
    assert get(f"{url}/props?model=gpt-4o-mini")["total_slots"] == 2


def test_the_overview_has_the_passes_that_the_engine_counted(url: str) -> None:
    """seed 001: MicroBatch.len, on average; BatchType::Decode where nothing runs."""
    instances = {
        instance["instance"]: instance for instance in get(f"{url}/corral/v1/slots")["instances"]
    }
    found = instances["smollm2.0"]
    assert found["passes"] >= 1
    assert found["prompt_tokens_per_pass"] > 0
    assert found["decode_tokens_per_pass"] > 0
    assert found["latest_pass"] == {"n_prompt_tokens": 0, "n_decode_tokens": 0}
    assert (found["batch_type"], found["is_full"], found["utilization"]) == ("decode", False, 0.0)
