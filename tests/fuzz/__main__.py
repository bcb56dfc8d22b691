"""Attack llama-corral with random inputs and report misbehaviour; `scripts/fuzz` runs this."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from random import SystemRandom
from typing import Final

from fuzz.finding import Findings
from fuzz.parts import PARTS, run

_INPUTS_MAX: Final = 10**9


def main() -> int:
    """Run the parts; exit code 1 after a finding."""
    words = _words()
    seed = SystemRandom().randrange(10**6) if words.seed is None else words.seed
    directory = words.out or Path(tempfile.mkdtemp(prefix="corral-fuzz-"))
    findings = Findings(directory, seed)
    parts = words.only.split(",") if words.only else list(PARTS)
    print(f"seed {seed}, {words.minutes:g} minutes: {', '.join(parts)}", flush=True)
    share = sum(PARTS[part].share for part in parts)
    for part in parts:
        seconds = words.minutes * 60 * PARTS[part].share / share
        report = run(part, seed, seconds, words.requests, words.first, findings)
        print(f"{part}: {report.inputs} inputs", flush=True)
        for name, value in report.figures.items():
            print(f"    {name:24} {value}", flush=True)
    return _sum_up(findings, seed)


def _sum_up(findings: Findings, seed: int) -> int:
    for cause, count in findings.counts.most_common():
        print(f"{count:6}  {cause}")
    total = sum(findings.counts.values())
    where = f"; the inputs are in {findings.directory}" if total else ""
    print(f"seed {seed}: {total} findings of {len(findings.counts)} causes{where}")
    return 1 if total else 0


def _words() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=5, help="for all parts together")
    parser.add_argument("--seed", type=int, help="of the inputs; else one at random, printed")
    parser.add_argument("--only", metavar="PART,PART", help=", ".join(PARTS))
    parser.add_argument(
        "--requests", type=int, default=_INPUTS_MAX, metavar="N", help="inputs of a part, at most"
    )
    parser.add_argument(
        "--first", type=int, default=0, metavar="N", help="number of a part's first input"
    )
    parser.add_argument("--out", type=Path, help="where the inputs of findings are written")
    words = parser.parse_args()
    if unknown := set((words.only or "http").split(",")) - set(PARTS):
        parser.error(f"no part: {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    return words


if __name__ == "__main__":
    sys.exit(main())
