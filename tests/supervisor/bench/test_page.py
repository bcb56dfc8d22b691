import dataclasses
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from support.bench_result import FIGURES, result

from supervisor.bench.figures import BenchResult
from supervisor.bench.html_report import report, write_report

_REPEAT = "corral bench smollm2 --profiles base"
_VOID = {"meta", "br"}
_COORDINATES = ("x", "y", "x1", "x2", "y1", "y2", "cx", "cy", "width", "height")


class Page(HTMLParser):
    """A page whose tags all match, with its content."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.texts: list[tuple[str, str]] = []
        self._open: list[str] = []
        self.feed(html)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = [name for name, _ in attrs]
        assert len(names) == len(set(names)), f"{tag}: {names}"
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in _VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: object) -> None:
        del attrs
        raise AssertionError(f"<{tag}/>: HTML does not close elements this way")

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open and data.strip():
            self.texts.append((self._open[-1], data))

    def all(self, tag: str) -> list[dict[str, str]]:
        return [attributes for name, attributes in self.elements if name == tag]

    def text(self, *tags: str) -> list[str]:
        return [text for tag, text in self.texts if not tags or tag in tags]


def _page(of: BenchResult) -> Page:
    return Page(report(of, _REPEAT))


_SHAPES = {
    "four variants": result(1, 1.4, 0.9, 1),
    "one variant": result(1),
    "one round": result(1, 1.4, rounds=1),
    "no round": result(1, 1.4, rounds=0),
    "wide intervals": result(1, 1.1, rounds=3, noise=0.3),
    "the same variant twice": result(1, 1, names=("base", "base")),
    "exact values": result(1, 2, noise=0),
    "far apart": result(1, 1e-4),
    "many rounds": result(1, 1.1, rounds=40),
    "no figure": dataclasses.replace(result(1, 1.4), figures=()),
    "zeros": dataclasses.replace(
        result(1, 1),
        variants=tuple(
            dataclasses.replace(variant, rounds=[{FIGURES[0].name: 0.0}] * 4)
            for variant in result(1, 1).variants
        ),
    ),
}


@pytest.mark.parametrize("of", _SHAPES.values(), ids=_SHAPES)
def test_a_page_is_whole_and_its_marks_lie_inside_their_plots(of: BenchResult) -> None:
    page = _page(of)
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    box = (0.0, 0.0)
    for tag, attributes in page.elements:
        if tag == "svg":
            is_bar = attributes.get("class") == "bar"
            assert is_bar or set(attributes["aria-labelledby"].split()) <= set(ids)
            left, top, *rest = map(float, attributes["viewbox"].split())
            box = (rest[0], rest[1])
            assert (left, top) == (0, 0)
        for name in _COORDINATES:
            if name in attributes:
                limit = box[0] if name.startswith(("x", "cx", "w")) else box[1]
                assert 0 <= float(attributes[name]) <= limit, (tag, attributes)


def test_a_page_loads_nothing_and_runs_nothing() -> None:
    html = report(result(1, 1.4), _REPEAT)
    page = Page(html)
    assert page.all("meta")[1] == {
        "http-equiv": "Content-Security-Policy",
        "content": "default-src 'none'; style-src 'unsafe-inline'",
    }
    assert not {tag for tag, _ in page.elements} & {"script", "link", "img", "iframe", "a", "use"}
    attributes = {name for _, named in page.elements for name in named}
    assert not [name for name in attributes if name.startswith("on") or name in {"src", "href"}]
    assert not re.search(r"https?:|url\(|@import", html)


def test_every_plot_has_an_axis_with_unit_and_a_description() -> None:
    page = _page(result(1, 1.4))
    assert len(page.all("svg")) == 2 * len(FIGURES)  # a plot and a bar of each
    units = [text for text in page.text("text") if text.endswith("is better")]
    assert units == [
        "ms, lower is better",
        "ms, lower is better",
        "tokens/s, higher is better",
        "tokens, lower is better",
        "tokens/s, higher is better",
        "MiB, lower is better",
        "ms, lower is better",
    ]
    (alone,) = [text for text in page.text("desc") if "82." in text and "First" not in text]
    assert re.fullmatch(
        r"engine: median 82\.\d tokens/s of 5 rounds, from \d\d\.\d to \d\d\.\d\. "
        r"base: median 11\d tokens/s of 5 rounds, from 11\d to 11\d; 1\.4.? × faster \(.*\)\.",
        alone,
    )
    assert len([entry for entry in page.text("title") if entry.startswith("round 5: ")]) == 2 * len(
        FIGURES
    )


def test_a_page_has_the_measurements_and_the_command_that_repeats_them() -> None:
    of = result(1, 1.4)
    texts = " ".join(_page(of).text())
    for expected in (
        of.machine.processor,
        "2 physical cores",
        "24.0 GiB",
        of.engine,
        of.model_file,
        "22 November 2026, 10:30 UTC",
        "llama-server --model model.gguf --parallel 2",
        _REPEAT,
        *of.notes,
    ):
        assert expected in texts


def test_an_interrupted_bench_and_a_failed_variant_say_so() -> None:
    of = result(1, 1.4)
    failed = dataclasses.replace(of.variants[1], failure="it did not start: no memory")
    texts = " ".join(
        _page(
            dataclasses.replace(of, is_interrupted=True, variants=(of.variants[0], failed))
        ).text()
    )
    assert "interrupted in round 5" in texts
    assert "Not measured to the end: it did not start: no memory" in texts


def test_the_headline_of_too_few_rounds_says_so() -> None:
    headlines = {rounds: _page(result(1, 1, rounds=rounds)).text("p") for rounds in (1, 2, 5)}
    assert "One round: nothing can be compared." in headlines[1]
    assert " against engine: too few values to compare" in headlines[2]
    assert " against engine: no difference seen" in headlines[5]


def test_names_from_outside_are_text() -> None:
    hostile = "</style><script>alert(1)</script>\"'><img src=x onerror=alert(1)>\x1b[31m\x00"
    of = result(1, 1.4, names=(hostile, hostile))
    variants = tuple(
        dataclasses.replace(variant, failure=hostile, argv=(hostile,)) for variant in of.variants
    )
    machine = dataclasses.replace(of.machine, processor=hostile, devices=(hostile,))
    page = _page(
        dataclasses.replace(
            of, model=hostile, variants=variants, machine=machine, notes=(hostile,), engine=hostile
        )
    )
    assert not page.all("script") + page.all("img")
    assert len(page.all("style")) == 1
    assert not re.search(r"[\x00-\x08\x0b-\x1f]", report(of, hostile))
    assert "<script>alert(1)</script>" in " ".join(page.text("h1"))


def test_a_report_is_a_file_of_the_user_alone(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    unencodable = dataclasses.replace(result(1, 1.4), model="\ud800")
    write_report(unencodable, path, _REPEAT)
    assert path.read_text("utf-8").startswith('<!doctype html>\n<html lang="en">')
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(FileNotFoundError):
        write_report(result(1, 1.4), tmp_path / "missing" / "report.html", _REPEAT)
