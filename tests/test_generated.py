"""The embedded source: disjoint splits, even slips, and a teacher that reads the case alone."""

import pytest

from rbd_train.biases import NAMES, definitions_for
from rbd_train.errors import UsageError
from rbd_train.records import Case, View
from rbd_train.sources.generated import MATERIAL, make_questions, solve, stated, teach


def test_train_and_test_share_nothing() -> None:
    train, test = MATERIAL["train"], MATERIAL["test"]
    for part in ("templates", "names", "things", "large", "small"):
        assert not set(getattr(train, part)) & set(getattr(test, part)), part


def test_the_same_seed_gives_the_same_questions_and_none_twice() -> None:
    questions = make_questions("train", 100, 3)
    assert questions == make_questions("train", 100, 3) != make_questions("train", 100, 4)
    assert len({q.question for q in questions}) == len({q.id for q in questions}) == 100 * len(NAMES)


@pytest.mark.parametrize("split", ["train", "test"])
def test_right_is_right_and_no_size_rule_knows_wrong(split: str) -> None:
    questions = make_questions(split, 100, 0)  # type: ignore[arg-type]
    larger = 0
    for question in questions:
        numbers, wrong = solve(question.question), stated(question.wrong or "")
        assert numbers is not None and wrong is not None
        assert stated(question.right) == stated(question.final) == sum(numbers) != wrong
        larger += wrong > sum(numbers)
    assert 0.4 < larger / len(questions) < 0.6


SUM = "Mia has 43 pens and buys 9 more. How many pens does Mia have now?"


def case(*choices: int) -> Case:
    options = ("43 and 9 more is 52.", "43 and 9 more is 72.")
    views = tuple(View(options=options if k == 0 else options[::-1], choice=choice) for k, choice in enumerate(choices))
    return Case(id="c", definitions=definitions_for("c", "verbosity", "all"), question=SUM, views=views, judge="j")


@pytest.mark.parametrize(
    ("choices", "biased"),
    [((0,), False), ((1,), True), ((0, 0), True), ((0, 1), False), ((1, 0), False), ((1, 1), False)],
)
def test_the_teacher_follows_the_label_rule(choices: tuple[int, ...], biased: bool) -> None:
    """Right then wrong is Yes; wrong then right, or wrong twice, is No (arXiv 2505.17100)."""
    taught = teach(case(*choices))
    assert taught is not None and taught[1] is biased
    assert taught[0].startswith("43 + 9 = 52.")


def test_the_teacher_passes_on_what_it_cannot_solve() -> None:
    assert teach(case(0).model_copy(update={"question": "Who wrote Hamlet?"})) is None


def test_more_questions_than_there_are_is_an_error() -> None:
    with pytest.raises(UsageError, match="source.test is 5000: after .* hardly a new one"):
        make_questions("test", 5000, 0)
