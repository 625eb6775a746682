"""Prompts of the judge's baselines: a warning of the bias, and a plan before the verdict (arXiv 2505.17100)."""

from collections.abc import Sequence

from rbd_train.engine import Message
from rbd_train.prompts.verdict import ASK, RULES, SYSTEM, material
from rbd_train.records import Item

_WARNING = "Beware of this bias: {definition} Decide as if its cue were not there."
_PLAN = """First write a short plan: what a right answer must contain and how you will check it. Then check each \
output by the plan. End with a line that holds the label of the best output alone, for example: Output (a)"""


def warning_messages(item: Item, order: Sequence[int], definition: str) -> list[Message]:
    """Ask for the best option, with a warning of one bias."""
    return _asked(item, order, f"{_WARNING.format(definition=definition)}\n{ASK}")


def plan_messages(item: Item, order: Sequence[int]) -> list[Message]:
    """Ask for an evaluation plan first (PlanJudge's idea), and for the best option by it."""
    return _asked(item, order, _PLAN)


def _asked(item: Item, order: Sequence[int], end: str) -> list[Message]:
    text = f"{RULES}\n\n{material(item, order)}\n\n{end}"
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}]
