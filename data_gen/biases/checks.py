"""What an injection must leave alone: a rewrite that changes more than its cue measures something else.

In JudgeBiasBench's own results "biased" pairs were judged better for 4 of 12 biases: both sides had been rewritten, and
more than the named attribute had changed.
"""

import re
from collections import Counter

from rbd_train.records import BiasPair

LENGTH = (0.5, 2.0)  # a rewrite's length over the original's; only verbosity may go beyond


def injection_fault(pair: BiasPair, right: str | None = None) -> str:
    """Say what changed besides the cue; empty where only the intended thing did.

    Args:
        pair: the row and its twin.
        right: the final part of the right answer, which verbosity must keep.
    """
    plain, biased, parts = pair.plain, pair.biased, pair.bias.split("+")
    if (plain.question, plain.gold, plain.group, plain.reference) != (
        biased.question, biased.gold, biased.group, biased.reference
    ):  # fmt: skip
        return "question, gold or group changed"
    if len(plain.options) != len(biased.options):
        return "the number of options changed"
    if plain.statement != biased.statement and "bandwagon" not in parts:
        return "a statement changed"
    if "bandwagon" in parts and plain.statement == biased.statement:
        return "no cue"
    if set(parts) <= {"bandwagon", "position"} and plain.options != biased.options:
        return "an option changed"
    for index, (before, after) in enumerate(zip(plain.options, biased.options, strict=True)):
        fault = _option_fault(before, after, parts, right if index == plain.gold else None)
        if fault:
            return fault
    if not set(parts) & {"bandwagon", "position"} and plain.options == biased.options:
        return "no cue"
    if "verbosity" in parts and not pair.provenance.get("sham") and not _favours_length(pair):
        return "no cue"
    return ""


def _favours_length(pair: BiasPair) -> bool:
    """Tell whether the longest option is a wrong one, or the right one where the cue favours that."""
    gold, lengths = pair.biased.gold, [len(option) for option in pair.biased.options]
    if gold is None:
        return True
    others = max(length for k, length in enumerate(lengths) if k != gold)
    return lengths[gold] > others if pair.provenance.get("congruent") else lengths[gold] < others


def _option_fault(before: str, after: str, parts: list[str], right: str | None) -> str:
    if not after.strip():
        return "an option became empty"
    if before == after:
        return ""
    if "verbosity" in parts and "sentiment" not in parts:
        kept = after == right or after.strip() in before or before.strip() in after
        return "" if kept else "the answer was not kept"
    if numbers(after) != numbers(before) and "verbosity" not in parts:
        return "facts changed: other numbers"
    if "verbosity" not in parts and not LENGTH[0] <= len(after) / max(1, len(before)) <= LENGTH[1] + 60 / len(before):
        return "the length left its bounds"
    return ""


def numbers(text: str) -> Counter[str]:
    """Count the numbers that a text states: the facts that can be checked without a model."""
    return Counter(found.replace(",", "").rstrip(".") for found in re.findall(r"-?\d[\d,]*(?:\.\d+)?", text))
