"""Texts to measure with: plain English of several kinds, written for this purpose."""

from __future__ import annotations

from typing import Final

_TEXTS: Final = """
The harbour was quiet when the first boats came in before sunrise. Two men carried crates of fish
across the wet stones while a third counted them and wrote the numbers on a slate. By seven the
market had opened, and the smell of coffee drifted over from the small house at the corner.
Children on their way to school stopped to look at the crabs. Nobody spoke much; the work was old
and everyone knew what had to be done. Later in the morning, the captain said,
----
A heat pump moves heat from a cold place to a warm one. It works like a refrigerator turned
around: a liquid evaporates outside at a low pressure and takes up heat, a compressor raises the
pressure of the vapour, and inside it condenses and gives that heat to the water of the radiators.
For each unit of electricity the machine delivers three or four units of heat, as long as the
difference in temperature is small. On very cold days the efficiency falls because
----
def merge(left, right):
    result = []
    i = j = 0
    while i < len(left) and j < len(right):
        if left[i] <= right[j]:
            result.append(left[i])
            i += 1
        else:
            result.append(right[j])
            j += 1
    result.extend(left[i:])
    result.extend(right[j:])
    return result


def merge_sort(values):
    if len(values) < 2:
        return values
    middle =
----
Question: A train leaves the city at 9:40 and arrives at the coast at 12:10. It stops three times
on the way, for five minutes each. How long does it move?
Answer: From 9:40 to 12:10 are two hours and thirty minutes, which is 150 minutes. The stops take
15 minutes together, so the train moves for 135 minutes, or two hours and a quarter.

Question: A shop sells pencils in boxes of twelve. A teacher needs 100 pencils. How many boxes
must she buy?
Answer: She
----
Dear neighbours, the yearly meeting of our house takes place on the first Thursday of March at
half past six in the evening, in the large room on the ground floor. We want to speak about the
repair of the roof, the costs of heating, the new bicycle stands and the question whether the
garden may be used for parties in summer. Whoever cannot come may give a written vote to another
owner. Proposals should reach us a week earlier, so that everybody can read them. We
"""
TEXTS: Final = tuple(_TEXTS.strip("\n").split("\n----\n"))
LONG_TEXT: Final = "\n\n".join(TEXTS)
