"""Add the Debian packages of an image to the CycloneDX document of its Python packages.

Reads the document from stdin, and the packages from the files of the given directory, each of which
has the control fields of one package; writes the document to stdout.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from urllib.parse import quote


def component(control: str) -> dict[str, str]:
    """Return a package's entry, from its control fields."""
    pairs = (line.split(": ", 1) for line in control.splitlines() if ": " in line)
    fields = {name: value for name, value in pairs if not name.startswith(" ")}
    name, version = fields["Package"], fields["Version"]
    architecture = fields["Architecture"]
    purl = f"pkg:deb/debian/{quote(name)}@{quote(version)}?arch={architecture}"
    return {
        "type": "library",
        "bom-ref": purl,
        "name": name,
        "version": version,
        "purl": purl,
    }


def merge(document: dict[str, Any], controls: list[str]) -> dict[str, Any]:
    return {**document, "components": [*document["components"], *map(component, controls)]}


def main() -> None:
    controls = [path.read_text("utf-8") for path in sorted(Path(sys.argv[1]).iterdir())]
    json.dump(merge(json.load(sys.stdin), controls), sys.stdout, indent=1)


if __name__ == "__main__":
    main()
