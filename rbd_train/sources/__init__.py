"""Readers of public and generated sets. A source gives questions to make pairs from, pairs, or texts with scores."""

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
