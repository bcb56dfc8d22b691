"""Print the figures by which the structure of the code is judged, of this checkout or of others.

`scripts/house [DIRECTORY ...]`; a DIRECTORY is the root of a checkout. All figures are read from
the sources of `supervisor/` and `proxy/`, but for the files that a streaming chat touches: those
are the files in the output of the checkout's own `scripts/trace_request.py`.

A code line has a token that is not of a comment or a docstring; a string after an assignment in a
class documents that attribute. The lines of a function are its code lines. A value type is a
dataclass, a TypedDict, a NamedTuple or an enum. A module has one importer if one other module of
the two packages imports it.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles
from typing import Final

PACKAGES: Final = ("supervisor", "proxy")
SHORT_FILE_LINES: Final = 40
SHORT_BODY_LINES: Final = 5

_NO_CODE: Final = frozenset(
    {
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENCODING,
        tokenize.ENDMARKER,
    }
)
_VALUE_BASES: Final = frozenset(
    {"TypedDict", "NamedTuple", "Enum", "StrEnum", "IntEnum", "Flag", "IntFlag", "Message"}
)
# "where" of a place or a moment is English; "None where it waits" is not.
_CONDITION: Final = re.compile(r"\bwhere\b")
_PLACE: Final = re.compile(
    r"(?:\b(?:place|places|point|line|directory|folder|file|page|position|moment|table|list"
    r"|from|to|knows?|tells?|says?|shows?|told|find|finds|see|of|and)|[`)])\s+where\b",
    re.IGNORECASE,
)

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(slots=True)
class Module:
    """One source file.

    Attributes:
        code: Numbers of its code lines.
        docstring_lines: How many lines its docstrings take.
    """

    path: Path
    name: str
    tree: ast.Module
    code: set[int] = field(default_factory=set)
    docstring_lines: int = 0
    docstrings: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, path: Path, root: Path) -> Module:
        text = path.read_text("utf-8")
        name = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
        module = cls(path, name, ast.parse(text))
        documented: set[int] = set()
        for node in module.docstring_nodes():
            documented |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
            module.docstrings.append(node.value if isinstance(node.value, str) else "")
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type not in _NO_CODE:
                module.code |= set(range(token.start[0], token.end[0] + 1)) - documented
        module.docstring_lines = len(documented)
        return module

    def docstring_nodes(self) -> Iterator[ast.Constant]:
        for node in ast.walk(self.tree):
            body = getattr(node, "body", None)
            if not isinstance(body, list):
                continue
            for before, statement in zip([None, *body], body, strict=False):
                if before and not isinstance(node, ast.ClassDef):
                    break
                match before, statement:
                    case None | ast.Assign() | ast.AnnAssign(), ast.Expr(
                        ast.Constant(str()) as text
                    ):
                        yield text

    def lines(self, node: ast.AST, first: int) -> int:
        """Return how many code lines a node has from line `first` on."""
        last = getattr(node, "end_lineno", first)
        return len(self.code & set(range(first, last + 1)))

    def functions(self) -> Iterator[Function]:
        for node in ast.walk(self.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield node

    def classes(self) -> Iterator[ast.ClassDef]:
        return (node for node in ast.walk(self.tree) if isinstance(node, ast.ClassDef))


def read_modules(root: Path) -> list[Module]:
    return [
        Module.read(path, root)
        for package in PACKAGES
        for path in sorted((root / package).rglob("*.py"))
    ]


def importers(modules: Sequence[Module]) -> dict[str, set[str]]:
    """Return, for each module, the other modules that import it or its names."""
    names = {module.name for module in modules}
    found: dict[str, set[str]] = defaultdict(set)
    for module in modules:
        for node in ast.walk(module.tree):
            for name in _imported(node, names):
                if name != module.name:
                    found[name].add(module.name)
    return found


def _imported(node: ast.AST, names: set[str]) -> Iterator[str]:
    if isinstance(node, ast.ImportFrom) and node.module:
        for alias in node.names:
            full = f"{node.module}.{alias.name}"
            yield full if full in names else node.module
    elif isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)


def import_lines(module: Module) -> int:
    imports = (
        node for node in ast.walk(module.tree) if isinstance(node, ast.Import | ast.ImportFrom)
    )
    return sum(module.lines(node, node.lineno) for node in imports)


def function_lines(module: Module) -> list[int]:
    return [module.lines(node, node.lineno) for node in module.functions()]


def small_private_functions(module: Module) -> tuple[int, int]:
    """Return how many private functions are used once with a short body, and how many there are."""
    uses = Counter(
        node.id if isinstance(node, ast.Name) else node.attr
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Name | ast.Attribute)
    )
    private = [
        node
        for node in module.functions()
        if node.name.startswith("_") and not node.name.endswith("__")
    ]
    small = [
        node
        for node in private
        if uses[node.name] == 1 and module.lines(node, node.body[0].lineno) <= SHORT_BODY_LINES
    ]
    return len(small), len(private)


def _name(node: ast.expr) -> str:
    node = node.func if isinstance(node, ast.Call) else node
    node = node.value if isinstance(node, ast.Subscript) else node
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def value_types(module: Module) -> int:
    return sum(
        any(_name(base) in _VALUE_BASES for base in node.bases)
        or any(_name(decorator) == "dataclass" for decorator in node.decorator_list)
        for node in module.classes()
    )


def protocols(module: Module) -> int:
    return sum(any(_name(base) == "Protocol" for base in node.bases) for node in module.classes())


def things_called_one(module: Module) -> int:
    """Count the loops, comprehensions, parameters and lambdas whose variable is `one`."""
    targets = (
        name.id
        for node in ast.walk(module.tree)
        if isinstance(node, ast.For | ast.AsyncFor | ast.comprehension)
        for name in ast.walk(node.target)
        if isinstance(name, ast.Name)
    )
    parameters = (node.arg for node in ast.walk(module.tree) if isinstance(node, ast.arg))
    return sum(name == "one" for name in (*targets, *parameters))


def conditional_wheres(module: Module) -> int:
    """Count the docstrings' uses of "where" that are not about a place: mostly for "if"."""
    return sum(
        len(_CONDITION.findall(text)) - len(_PLACE.findall(text)) for text in module.docstrings
    )


def files_of_a_chat(root: Path) -> str:
    """Return how many files of the checkout one streaming chat touches, "-" if it cannot be run."""
    script = root / "scripts/trace_request.py"
    if not script.is_file():
        return "-"
    ran = subprocess.run(
        [sys.executable, script], cwd=root, capture_output=True, text=True, timeout=120, check=False
    )
    files = set(re.findall(r"^[* ] ((?:proxy|supervisor)/\S+\.py):", ran.stdout, re.MULTILINE))
    return str(len(files)) if files else "-"


def folders(root: Path, package: str) -> int:
    return sum(path.is_dir() for path in (root / package).glob("[!_]*"))


def loose_files(root: Path, package: str) -> int:
    return sum(path.name != "__init__.py" for path in (root / package).glob("*.py"))


def figures(root: Path) -> dict[str, str]:
    """Return the figures of a checkout by their names."""
    modules = read_modules(root)
    sizes = [len(module.code) for module in modules if module.path.name != "__init__.py"]
    code = sum(len(module.code) for module in modules)
    lengths = [length for module in modules for length in function_lines(module)]
    used_by = importers(modules)
    alone = [module for module in modules if len(used_by[module.name]) == 1]
    small, private = map(sum, zip(*map(small_private_functions, modules), strict=True))

    def share(part: float, whole: float) -> str:
        return f"{part / whole:.1%}" if whole else "-"

    def total(count: Callable[[Module], int]) -> str:
        return str(sum(map(count, modules)))

    return {
        "files": str(len(modules)),
        "median code lines of a file": f"{median(sizes):.0f}",
        f"files under {SHORT_FILE_LINES} code lines": share(
            sum(size < SHORT_FILE_LINES for size in sizes), len(sizes)
        ),
        "modules with one importer": share(len(alone), len(modules)),
        "folders in proxy; in supervisor": "; ".join(
            str(folders(root, package)) for package in reversed(PACKAGES)
        ),
        "loose files in proxy; in supervisor": "; ".join(
            str(loose_files(root, package)) for package in reversed(PACKAGES)
        ),
        "import lines, share of code": share(sum(map(import_lines, modules)), code),
        f"private functions used once, at most {SHORT_BODY_LINES} lines": share(small, private),
        "longest function; 90th percentile": f"{max(lengths)}; {quantiles(lengths, n=10)[-1]:.0f}",
        "value types; Protocols": f"{total(value_types)}; {total(protocols)}",
        "files that one streaming chat touches": files_of_a_chat(root),
        "things called `one`": total(things_called_one),
        '"where" for "if" in docstrings': total(conditional_wheres),
        "code lines; docstring lines": f"{code}; {total(lambda module: module.docstring_lines)}",
    }


def table(columns: Mapping[str, Mapping[str, str]]) -> str:
    """Return a Markdown table: a row for each figure, a column for each checkout."""
    rows = next(iter(columns.values()))
    lines = ["| figure |" + "".join(f" {name} |" for name in columns)]
    lines.append("| --- |" + " --: |" * len(columns))
    lines += [
        f"| {row} |" + "".join(f" {values[row]} |" for values in columns.values()) for row in rows
    ]
    return "\n".join(lines)


def main(directories: Sequence[str]) -> int:
    roots = [Path(directory).resolve() for directory in directories or ["."]]
    missing = [root for root in roots if not all((root / name).is_dir() for name in PACKAGES)]
    if missing:
        print(f"{missing[0]} is no checkout: it has no supervisor/ and proxy/", file=sys.stderr)
        return 2
    print(table({root.name: figures(root) for root in roots}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
