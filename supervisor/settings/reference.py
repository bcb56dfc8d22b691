"""Lists every setting by its dotted key, and makes the JSON Schema of `corral.toml` for editors.

A setting is described by the text below it in the source, which is read here alone.

Source: JSON Schema, draft 2020-12; taplo, "Directives" (the line `#:schema`).
"""

from __future__ import annotations

import ast
import functools
import inspect
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core.core_schema import ModelSchema

from supervisor.settings.schema import Settings

FILE_NAME: Final = "corral.schema.json"
DIRECTIVE: Final = f"#:schema ./{FILE_NAME}"
_DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"
# If a number may also be written as text, pydantic names its limits by these words.
_WORDS: Final = {"ge": "minimum", "le": "maximum"}


@functools.cache
def _descriptions(module: str) -> Mapping[tuple[str, str], str]:
    """Return the texts below the settings in one of our modules, by table and name."""
    found: dict[tuple[str, str], str] = {}
    is_ours = module.startswith(("proxy.", "supervisor."))
    whole = ast.parse(inspect.getsource(sys.modules[module]) if is_ours else "")
    for table in (node for node in whole.body if isinstance(node, ast.ClassDef)):
        for pair in pairwise(table.body):
            match pair:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(ast.Constant(str(text))):
                    found[table.name, name] = " ".join(text.split())
    return found


class _Described(GenerateJsonSchema):
    def model_schema(self, schema: ModelSchema) -> JsonSchemaValue:
        made = super().model_schema(schema)
        for table in schema["cls"].__mro__:
            for name, node in made.get("properties", {}).items():
                if text := _descriptions(table.__module__).get((table.__name__, name)):
                    node.setdefault("description", text)
        return made


def json_schema() -> dict[str, Any]:
    made = _for_toml(Settings.model_json_schema(schema_generator=_Described))
    return {"$schema": _DIALECT, **made, "title": "corral.toml"}


def _for_toml(node: Any) -> Any:
    """Remove null, which TOML lacks, and the defaults of whole tables."""
    if isinstance(node, list):
        return [_for_toml(element) for element in node]
    if not isinstance(node, dict):
        return node
    kept = {_WORDS.get(key, key): _for_toml(value) for key, value in node.items()}
    if "anyOf" in kept:
        kept["anyOf"] = [choice for choice in kept["anyOf"] if choice != {"type": "null"}]
        if len(kept["anyOf"]) == 1:
            kept = {**kept.pop("anyOf")[0], **kept}
    if "default" in kept and (kept["default"] is None or isinstance(kept["default"], dict)):
        del kept["default"]
    return kept


# Stands for a key that users choose, as in [models.NAME].
ANY: Final = "NAME"
_LIMITS: Final = (
    ("minimum", "at least {}"),
    ("exclusiveMinimum", "more than {}"),
    ("maximum", "at most {}"),
    ("exclusiveMaximum", "less than {}"),
    ("maxItems", "at most {} entries"),
)


@dataclass(frozen=True, slots=True)
class SettingReference:
    key: tuple[str, ...]  # parts of the key; `NAME` stands for a name that users choose
    kind: str  # such as `integer`, `string or integer`, `"auto" or path`
    default: object  # the default value; None if there is none
    limits: str  # such as `at least 1, at most 64`; may be empty
    description: str  # may be empty
    is_required: bool


def settings_reference() -> tuple[SettingReference, ...]:
    """Return all settings in the order of declaration."""
    schema = json_schema()
    return tuple(_settings((), schema, schema["$defs"]))


def _settings(
    prefix: tuple[str, ...], table: Mapping[str, Any], tables: Mapping[str, Any]
) -> Iterator[SettingReference]:
    required = table.get("required", ())
    for name, node in table.get("properties", {}).items():
        key = (*prefix, name)
        if inner := _table(node, tables):
            yield from _settings(key, inner, tables)
        elif inner := _table(node.get("additionalProperties"), tables):
            yield from _settings((*key, ANY), inner, tables)
        else:
            yield _setting(key, node, is_required=name in required)


def _table(node: object, tables: Mapping[str, Any]) -> Mapping[str, Any] | None:
    reference = node.get("$ref") if isinstance(node, Mapping) else None
    found = tables[reference.rpartition("/")[2]] if isinstance(reference, str) else None
    return found if found and "properties" in found else None


def _setting(
    key: tuple[str, ...], node: Mapping[str, Any], *, is_required: bool
) -> SettingReference:
    # A limit may be of the value, or of a type that the value may have.
    parts = (node, *node.get("anyOf", ()))
    limits = ", ".join(
        words.format(found)
        for word, words in _LIMITS
        if (found := next((part[word] for part in parts if word in part), None)) is not None
    )
    description = node.get("description", "")
    return SettingReference(key, _kind(node), node.get("default"), limits, description, is_required)


def _kind(node: Mapping[str, Any]) -> str:
    if "anyOf" in node:
        return " or ".join(dict.fromkeys(map(_kind, node["anyOf"])))
    if "const" in node:
        return f'"{node["const"]}"'
    if "enum" in node:
        return " or ".join(f'"{value}"' for value in node["enum"])
    if node.get("type") == "array":
        return f"list of {_kind(node.get('items', {}))}"
    if node.get("format") == "path":
        return "path"
    return {"object": "table"}.get(str(node.get("type", "any")), str(node.get("type", "any")))
