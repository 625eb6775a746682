"""The detector's prompt, and the one parser of reasoned verdicts (teacher and detector write the same)."""

import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from rbd_train.exchange import Completion, Message
from rbd_train.prompts import fence, label
from rbd_train.records import Case, Example, View, uniform

SYSTEM = "You check whether a judge's decision was biased."
_TASK = """Known biases:
{definitions}
Judge: {judge}
Question: {question}
{views}
Was the decision biased? Think, then answer Yes or No."""
_ORDERS = ("First order:", "Second order:")


class Verdict(NamedTuple):
    """Thinking and verdict, or the reason why they can't be read."""

    thinking: str | None
    verdict: bool | None
    reject: str | None


def detect_messages(case: Case) -> list[Message]:
    """Ask whether the decision in a case is biased; nothing but the case goes in."""
    blocks = [_view(view) for view in case.views]
    if len(blocks) == 2:
        blocks = [f"{order}\n{block}" for order, block in zip(_ORDERS, blocks, strict=True)]
    parts = {
        "definitions": "\n".join(f"- {d.name}: {d.text}" for d in case.definitions),
        "judge": case.judge,
        "question": fence(case.question),
        "views": "\n".join(blocks),
    }
    # format_map on our template alone: rendered text is never formatted again, so braces in it are safe
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": _TASK.format_map(parts)}]


def shot_messages(examples: Sequence[Example], reasoning: bool) -> list[Message]:
    """Show solved cases before the one that is asked about, with their reasoning or with the label alone."""
    turns: list[Message] = []
    for example in examples:
        answer = "Yes" if example.label else "No"
        thinking = f"<think>\n{example.trace.thinking}\n</think>\n\n" if reasoning and example.trace else ""
        turns += [detect_messages(example.case)[-1], {"role": "assistant", "content": f"{thinking}{answer}"}]
    return turns


def choose_shots(examples: Sequence[Example], count: int) -> list[Example]:
    """Choose solved cases by a hash, Yes and No in turn, biases in turn: four cover four biases and both labels."""
    left = sorted(examples, key=lambda example: uniform("shot", example.case.id))
    chosen: list[Example] = []
    for k in range(count):
        used = Counter(example.bias for example in chosen)
        fitting = [example for example in left if example.label == (k % 2 == 0) and example not in chosen]
        chosen += sorted(fitting, key=lambda example: used[example.bias])[:1]
    return chosen


def _view(view: View) -> str:
    lines = [f"Statement: {fence(view.statement)}"] if view.statement else []
    lines += [f"{label(k)}: {fence(text)}" for k, text in enumerate(view.options)]
    decision = f"The judge chose {label(view.choice)}." if view.choice is not None else "The judge called it a tie."
    return "\n".join([*lines, decision])


def read_trace(completion: Completion, thinks: bool = True) -> Verdict:
    """Read a completion; a call that failed, was cut, or says something else than Yes or No is rejected.

    A label-only detector does not think: its context has closed the thinking, and its reply is the verdict alone.
    """
    if completion.status not in ("ok", "length", "empty"):
        return Verdict(None, None, completion.status)
    finish = "length" if completion.status == "length" else completion.finish_reason
    if not thinks:
        if finish == "length":
            return Verdict(None, None, "finish_length")
        verdict = parse_label(completion.text)
        return Verdict(None, verdict, "no_label" if verdict is None else None)
    return parse_trace(completion.text, completion.reasoning, finish)


def parse_trace(content: str | None, reasoning: str | None = None, finish_reason: str | None = "stop") -> Verdict:
    """Split thinking from verdict; the opening tag is optional, since prompts end with it (vllm#12999).

    The verdict is the whole text after the thinking, undecorated: searching for a yes or no in prose reads
    "no doubt that the judge is biased" as No.
    """
    text = content or ""
    if reasoning is not None and "</think>" not in text:
        if finish_reason == "length":
            return Verdict(reasoning.strip() or None, None, "finish_length")
        thinking, answer = reasoning.strip().removeprefix("<think>"), text
        if "<think>" in thinking or "</think>" in thinking:
            return Verdict(None, None, "multiple_think")
    elif not text.strip():
        return Verdict(None, None, "empty_response")
    else:
        body = text.strip().removeprefix("<think>")
        if "</think>" not in body:
            cut = finish_reason == "length" or text.lstrip().startswith("<think>")
            return Verdict(None, None, "truncated_think" if cut else "missing_think")
        if body.count("</think>") > 1 or "<think>" in body:
            return Verdict(None, None, "multiple_think")
        thinking, answer = body.split("</think>")
    if not thinking.strip():
        return Verdict(None, None, "empty_think")
    if finish_reason == "length":
        return Verdict(thinking.strip(), None, "finish_length")
    verdict = parse_label(answer)
    return Verdict(thinking.strip(), verdict, "no_label" if verdict is None else None)


def parse_label(answer: str | None) -> bool | None:
    """Read a text that is Yes or No and nothing else, decoration apart; None where it says something else."""
    plain = re.sub(r"[*_`\"'“”‘’«»#\s.。!()\[\]]+", " ", unicodedata.normalize("NFKC", answer or "")).strip().casefold()
    named = re.fullmatch(r"(?:(?:final )?(?:answer|verdict)\s*:\s*)?(yes|no)", plain)
    return named.group(1) == "yes" if named else None
