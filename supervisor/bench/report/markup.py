"""Builds HTML and SVG elements; text and attributes are escaped when they are written."""

from __future__ import annotations

from xml.etree.ElementTree import Element, tostring

from supervisor.output import printable

Child = Element | str


def element(tag: str, *children: Child, **attributes: str | float) -> Element:
    """Make an element; `class_` is the class, and `_` in a name of an attribute stands for `-`.

    Characters that cannot be printed, which names from outside may hold, are replaced by escapes.
    """
    made = Element(tag, {_attribute(name): _value(value) for name, value in attributes.items()})
    for child in children:
        _append(made, child)
    return made


def document(page: Element) -> str:
    # The method `html` writes void elements without an end, and the text of <style> as it is.
    return f"<!doctype html>\n{tostring(page, encoding='unicode', method='html')}\n"


def _append(parent: Element, child: Child) -> None:
    if not isinstance(child, str):
        parent.append(child)
        return
    text = printable(child)
    if len(parent):
        parent[-1].tail = (parent[-1].tail or "") + text
    else:
        parent.text = (parent.text or "") + text


def _attribute(name: str) -> str:
    return name.rstrip("_").replace("_", "-")


def _value(value: str | float) -> str:
    return printable(value) if isinstance(value, str) else f"{value:.1f}".removesuffix(".0")
