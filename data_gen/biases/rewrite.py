"""Write biases into answers with an engine, and check every rewrite: what fails is counted, never used."""

from collections.abc import Sequence
from typing import NamedTuple

from rbd_train.engine import Engine
from rbd_train.errors import UsageError
from rbd_train.exchange import Sampling
from rbd_train.prompts.rewrite import cut_ending, join, length_fault, read_rewrite, rewrite_fault, rewrite_messages
from rbd_train.records import Bias


class Task(NamedTuple):
    """An answer to rewrite."""

    bias: Bias
    question: str
    answer: str


class Rewritten(NamedTuple):
    """A rewritten answer, or the fault for which it can't be used."""

    text: str
    fault: str


def check_amounts(limit: int | None, growth: float) -> None:
    """Refuse amounts that can't be meant.

    Raises:
        UsageError: no item, or a factor below 1.
    """
    if limit is not None and limit < 1:
        raise UsageError(f"limit is {limit}; it must be 1 or more, or null for all")
    if not growth >= 1:
        raise UsageError(f"growth is {growth}; it is the factor by which an answer may grow or shrink, 1 or more")


def rewrite(
    engine: Engine, tasks: Sequence[Task], max_new_tokens: int, growth: float = 2.0, same_length: bool = False
) -> list[Rewritten]:
    """Rewrite answers in one batch, their endings word for word.

    Args:
        engine: what writes.
        tasks: what to write.
        max_new_tokens: of a rewritten body.
        growth: by what factor an answer may grow or shrink.
        same_length: cut whole sentences until an answer is no longer than it was (the length-controlled variant); one
            that still is, or lost too much, is a fault.
    """
    parts = [cut_ending(task.answer) for task in tasks]
    prompts = [rewrite_messages(task.bias, task.question, cut) for task, cut in zip(tasks, parts, strict=True)]
    done = []
    for task, cut, reply in zip(tasks, parts, engine.generate(prompts, Sampling(max_new_tokens=max_new_tokens)), strict=True):  # type: ignore[arg-type]  # noqa: E501  # fmt: skip
        body, fault = read_rewrite(reply)
        fault = fault or rewrite_fault(task.bias, task.question, task.answer, cut, body, growth)
        text = "" if fault else join(cut, body, same_length)
        if not fault and text.split() == task.answer.split():
            fault = "unchanged"
        if not fault and same_length:
            fault = length_fault(task.answer, text, growth)
        done.append(Rewritten("" if fault else text, fault))
    return done
