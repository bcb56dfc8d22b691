"""The JSON Schema of `corral.toml`, for editors and for the reference of settings.

Source: JSON Schema, draft 2020-12; taplo, "Directives" (the line `#:schema`).
"""

from __future__ import annotations

from typing import Any, Final

from supervisor.settings.schema import Settings

FILE_NAME: Final = "corral.schema.json"
DIRECTIVE: Final = f"#:schema ./{FILE_NAME}"
_DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"
# pydantic leaves the limits of a number that may be written as text under its own words.
_WORDS: Final = {"ge": "minimum", "le": "maximum"}


def json_schema() -> dict[str, Any]:
    """Return the schema, with a description of every setting."""
    made = _for_toml(Settings.model_json_schema())
    return {"$schema": _DIALECT, **made, "title": "corral.toml"}


def _for_toml(node: Any) -> Any:
    """Leave out null, which TOML does not have, and the values of whole tables."""
    if isinstance(node, list):
        return [_for_toml(one) for one in node]
    if not isinstance(node, dict):
        return node
    kept = {_WORDS.get(key, key): _for_toml(value) for key, value in node.items()}
    if "anyOf" in kept:
        kept["anyOf"] = [one for one in kept["anyOf"] if one != {"type": "null"}]
        if len(kept["anyOf"]) == 1:
            kept = {**kept.pop("anyOf")[0], **kept}
    if "default" in kept and (kept["default"] is None or isinstance(kept["default"], dict)):
        del kept["default"]
    return kept
