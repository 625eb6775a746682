"""Prompts of the judge's baselines: a warning of the bias, and a plan before the verdict (arXiv 2505.17100)."""

from collections.abc import Sequence

from rbd_train.exchange import Message
from rbd_train.prompts.verdict import RULES, SYSTEM, ask_for, material, own_messages
from rbd_train.records import Item

_WARNING = "Beware of this bias: {definition} Decide as if its cue were not there."
_PLAN = """First write a short plan: what a right answer must contain and how you will check it. Then check each \
output by the plan."""
_LABEL = "End with a line that holds the label of the best output alone, for example: Output (a)"


def warning_messages(
    item: Item, order: Sequence[int], definition: str, prompt: str | None = None, allow_tie: bool = False,
    reason: bool = False,
) -> list[Message]:  # fmt: skip
    """Ask as the judge does, by a prompt of its own where it has one, with a warning of one bias."""
    return _asked(
        item, order, _WARNING.format_map({"definition": definition}), "\n" + ask_for(allow_tie, reason), prompt
    )


def plan_messages(item: Item, order: Sequence[int], prompt: str | None = None) -> list[Message]:
    """Ask for an evaluation plan first (PlanJudge's idea), and for the best option by it."""
    return _asked(item, order, _PLAN, f" {_LABEL}", prompt)


def _asked(item: Item, order: Sequence[int], end: str, label: str, prompt: str | None) -> list[Message]:
    """Add to the judge's prompt; one of its own has said itself how the best option is named."""
    if prompt is not None:
        return own_messages(item, order, prompt, end)
    end += label
    text = f"{RULES}\n\n{material(item, order)}\n\n{end}"
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}]
