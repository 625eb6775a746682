"""Readers of public and generated sets. A source gives questions to make pairs from, pairs, or texts with scores."""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from rbd_train.records import BiasPair, Graded, Question


class Loaded(NamedTuple):
    """What a source holds; `left_out` counts the rows that were not taken, by reason."""

    questions: list[Question]
    pairs: list[BiasPair]
    left_out: dict[str, int]
    licence: str
    files: list[str]
    graded: Sequence[Graded] = ()


def with_two_answers(loaded: Loaded) -> Loaded:
    """Leave out the questions without a wrong answer, or with the right one for it, and count them."""
    left_out, kept = Counter(loaded.left_out), []
    for question in loaded.questions:
        if question.wrong is None:
            left_out["no wrong answer"] += 1
        elif question.wrong.split() == question.right.split():
            left_out["answers are the same"] += 1
        else:
            kept.append(question)
    return loaded._replace(questions=kept, left_out=dict(left_out))
