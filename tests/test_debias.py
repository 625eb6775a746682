"""The debias loop as a user plugs it in: judges and detectors are functions of their prompts."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eval.debias import cost_of
from eval.debias_tables import Cost
from rbd_train.classifier import ClassifierDetector
from rbd_train.cost import Cost as PricedCost
from rbd_train.debias import Decision, debias, decide
from rbd_train.detector import EngineDetector
from rbd_train.engine import Engine
from rbd_train.engines.function import FunctionBackend, function_judge
from rbd_train.errors import UsageError
from rbd_train.exchange import Completion, Sampling
from rbd_train.judge import ContentJudge, GenerativeJudge
from rbd_train.ledger import Ledger
from rbd_train.prompts.verdict import SYSTEM
from rbd_train.records import Item, Outcome, Revision

Prompted = Callable[[str], str]
YES = "It followed the crowd, not the facts.\n</think>\n\nYes"
NO = "It chose by the facts.\n</think>\n\nNo"
UNSURE = "Hard to say.\n</think>\n\nPerhaps"


class World:
    """A judge and a detector that are functions of a prompt; what they are asked is noted."""

    def __init__(self, folder: Path, judge: Prompted, detector: Prompted, samples: int = 1) -> None:
        ledger = Ledger(folder / "l.sqlite")
        self.judged: list[str] = []
        self.detected: list[str] = []

        def asked_judge(messages: Any) -> str:
            assert messages[0]["content"] == SYSTEM
            self.judged.append(messages[-1]["content"])
            return judge(self.judged[-1])

        def asked_detector(messages: Any) -> str:
            self.detected.append(messages[-1]["content"])
            return detector(self.detected[-1])

        self.judge = GenerativeJudge(Engine(FunctionBackend(asked_judge, "judge"), ledger), "my judge")
        self.detector = EngineDetector(
            Engine(FunctionBackend(asked_detector, "detector"), ledger), "d", Sampling(max_new_tokens=9),
            samples=samples,
        )  # fmt: skip

    def decide(self, items: list[Item], bias: str = "bandwagon") -> list[Decision]:
        decisions = decide(self.judge, bias, items)
        self.judged.clear()
        return decisions


def item(number: int = 0, gold: int = 0) -> Item:
    options = (f"right {number}", f"wrong {number}")
    return Item(
        id=f"i{number}", group=f"g{number}", question=f"Question {number}?", gold=gold,
        options=options if gold == 0 else options[::-1], statement=f"90% believe that [[option:{1 - gold}]] is better.",
    )  # fmt: skip


def always(text: str) -> Prompted:
    return lambda prompt: text


def is_again(prompt: str) -> bool:
    return "A reviewer who looked for bias" in prompt


def choices(revision: Revision, turn: int = -1) -> list[int | None]:
    return [judgement.outcome.choice for judgement in revision.rounds[turn].judgements]


def test_no_bias_seen_and_the_decision_stands(tmp_path: Path) -> None:
    world = World(tmp_path, always("Output (b)"), always(NO))
    (decision,) = world.decide([item()])
    (revision,) = debias([decision], world.judge, world.detector, max_rounds=3)
    assert (revision.id, revision.stop, revision.calls, len(revision.rounds)) == ("i0", "no_bias", 1, 1)
    assert revision.rounds[0].judgements == decision.judgements
    assert revision.rounds[0].trace is not None and revision.rounds[0].trace.verdict is False
    assert world.judged == []


def test_bias_seen_and_its_reasoning_reaches_the_judge(tmp_path: Path) -> None:
    world = World(tmp_path, lambda p: "Output (a)" if is_again(p) else "Output (b)", always(YES))
    (revision,) = debias(world.decide([item()]), world.judge, world.detector)
    assert (choices(revision, 0), choices(revision)) == ([1], [0])
    (prompt,) = world.judged
    assert "It followed the crowd, not the facts." in prompt and "You decided: Output (b)" in prompt
    assert "Yes" not in prompt  # the reasoning, not the label
    assert (revision.stop, revision.calls) == ("max_rounds", 2)


def test_the_detector_sees_no_gold(tmp_path: Path) -> None:
    asked = []
    for gold in (0, 1):
        folder = tmp_path / str(gold)
        world = World(folder, always("Output (b)"), always(NO))
        same = item().model_copy(update={"gold": gold})
        debias(world.decide([same]), world.judge, world.detector)
        asked.append(world.detected)
    assert asked[0] == asked[1] and len(asked[0]) == 1


@pytest.mark.parametrize("rounds", [0, 1, 2, 3])
def test_rounds_are_bounded_and_their_calls_counted(tmp_path: Path, rounds: int) -> None:
    """The detector always sees bias and the judge flips at every review."""
    world = World(tmp_path, lambda p: "Output (a)" if "You decided: Output (b)" in p else "Output (b)", always(YES))
    (revision,) = debias(world.decide([item()]), world.judge, world.detector, max_rounds=rounds)
    assert [choices(revision, turn) for turn in range(len(revision.rounds))] == [[1], [0], [1], [0]][: rounds + 1]
    assert (revision.stop, revision.calls) == ("max_rounds", 2 * rounds)
    assert [entry.trace is None for entry in revision.rounds] == [False] * rounds + [True]


def test_the_loop_ends_when_the_detector_is_content(tmp_path: Path) -> None:
    """It sees bias while (b) is chosen; the judge gives in at once, and the new decision is looked at again."""
    world = World(
        tmp_path, lambda p: "Output (a)" if is_again(p) else "Output (b)",
        lambda p: YES if "chose Output (b)" in p else NO,
    )  # fmt: skip
    (revision,) = debias(world.decide([item()]), world.judge, world.detector, max_rounds=5)
    verdicts = [entry.trace.verdict if entry.trace else None for entry in revision.rounds]
    assert (verdicts, revision.stop, revision.calls) == ([True, False], "no_bias", 3)
    assert len(world.detected) == 2 and len(world.judged) == 1


@pytest.mark.parametrize("reply", [UNSURE, "no thinking at all", "<think>\ncut"], ids=["no label", "no tag", "cut"])
def test_an_unreadable_detector_changes_nothing_and_is_counted(tmp_path: Path, reply: str) -> None:
    world = World(tmp_path, always("Output (b)"), always(reply))
    (revision,) = debias(world.decide([item()]), world.judge, world.detector, max_rounds=3)
    assert (revision.stop, revision.calls, len(revision.rounds)) == ("unreadable", 1, 1)
    assert revision.rounds[0].trace is not None and revision.rounds[0].trace.reject
    assert world.judged == []


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_unreadable_judgement_ends_the_loop(tmp_path: Path, when: str) -> None:
    world = World(
        tmp_path, lambda p: "Hm, both." if when == "before" or is_again(p) else "Output (b)", always(YES)
    )  # fmt: skip
    (revision,) = debias(world.decide([item()]), world.judge, world.detector, max_rounds=3)
    assert revision.stop == "unreadable"
    assert revision.rounds[-1].judgements[0].outcome == Outcome(kind="unreadable", reason="no_verdict")
    assert (revision.calls, len(world.detected)) == ((0, 0) if when == "before" else (2, 1))


def test_a_readable_sample_is_used_where_the_first_is_not(tmp_path: Path) -> None:
    world = World(
        tmp_path, lambda p: "Output (a)" if is_again(p) else "Output (b)",
        lambda p: UNSURE if len(world.detected) == 1 else YES, samples=3,
    )  # fmt: skip
    (revision,) = debias(world.decide([item()]), world.judge, world.detector)
    assert choices(revision) == [0] and len(world.detected) == 3
    assert revision.calls == 4  # three samples and a judgement


def first_place(prompt: str) -> str:
    """A judge with position bias; after a review it names the right text, wherever it stands."""
    if "judged in two orders" in prompt:
        return "First order: Output (a)\nSecond order: Output (b)"
    if not is_again(prompt):
        return "Output (a)"
    return "Output (a)" if re.search(r'Output \(a\): """right', prompt) else "Output (b)"


def test_several_samples_vote_and_the_majority_speaks(tmp_path: Path) -> None:
    world = World(
        tmp_path, lambda p: "Output (b)", lambda p: YES if len(world.detected) == 1 else NO, samples=3,
    )  # fmt: skip
    (revision,) = debias(world.decide([item()]), world.judge, world.detector)
    trace = revision.rounds[0].trace
    assert revision.stop == "no_bias" and trace is not None and trace.sample == 1


@pytest.mark.parametrize(("cut", "warned"), [(1, False), (2, True)])
def test_cut_replies_are_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture, cut: int, warned: bool) -> None:
    """A09: a limit that cuts more than a few per cent of the thinking is a wrong setting, not a result."""

    class Cutting(FunctionBackend):
        def run(self, requests: Any, missing: Any, commit: Any) -> None:
            for index in missing:
                status: Any = "length" if index < cut else "ok"
                commit(index, Completion(status=status, text="x"))

    engine = Engine(Cutting(lambda m: "x", "c"), Ledger(tmp_path / "l.sqlite"))
    engine.generate([[{"role": "user", "content": str(k)}] for k in range(40)], Sampling(max_new_tokens=7))
    assert ("2 of 40 replies end at the limit of 7 new tokens" in caplog.text) == warned


@pytest.mark.parametrize("position_calls", [2, 1])
def test_position_is_judged_again_in_both_orders(tmp_path: Path, position_calls: int) -> None:
    world = World(tmp_path, first_place, always(YES))
    decisions = world.decide([item(0, gold=0)], "position")
    (revision,) = debias(decisions, world.judge, world.detector, position_calls=position_calls)
    assert "First order:" in world.detected[0] and "Second order:" in world.detected[0]
    assert choices(revision, 0) == [0, 1] and choices(revision) == [0, 0]  # stored indices, whatever order was shown
    assert [judgement.order for judgement in revision.rounds[-1].judgements] == [(0, 1), (1, 0)]
    assert len(world.judged) == position_calls and revision.calls == 1 + position_calls


def test_both_kinds_of_decision_at_once_keep_their_order(tmp_path: Path) -> None:
    """In one call for position, alone for the rest; each revision belongs to its decision."""
    world = World(tmp_path, first_place, always(YES))
    decisions = [
        *world.decide([item(0)], "bandwagon"), *world.decide([item(1)], "position"),
        *world.decide([item(2, gold=1)], "bandwagon"), *world.decide([item(3)], "position"),
    ]  # fmt: skip
    revisions = debias(decisions, world.judge, world.detector, position_calls=1)
    assert [revision.id for revision in revisions] == ["i0", "i1", "i2", "i3"]
    assert [choices(revision) for revision in revisions] == [[0], [0, 0], [1], [0, 0]]
    assert [revision.calls for revision in revisions] == [2, 2, 2, 2]


@pytest.mark.parametrize("flagged", [True, False])
def test_one_call_for_both_orders_needs_a_judge_in_words(tmp_path: Path, flagged: bool) -> None:
    """Said before anything is asked, not after the detector was paid."""
    world = World(tmp_path, first_place, always(YES if flagged else NO))
    judge = ContentJudge(world.judge.engine, "c", part="whole", normalise="mean", leaning={})
    decisions = world.decide([item()], "position")
    with pytest.raises(UsageError, match="position_calls=1 asks for two decisions in words"):
        debias(decisions, judge, world.detector, position_calls=1)
    assert world.detected == []
    assert len(debias(decisions, judge, world.detector, position_calls=2)) == 1
    for own in ({"reason": True}, {"prompt": "$question $a $b"}):  # which one call for both would pass over
        with pytest.raises(UsageError, match="set it to 2"):
            debias(decisions, GenerativeJudge(world.judge.engine, "own", **own), world.detector, position_calls=1)


@pytest.mark.parametrize("kind", ["label", "classifier"])
def test_a_detector_without_reasoning_needs_another_feedback(tmp_path: Path, kind: str) -> None:
    """Said before anything is asked: the judge would read that there are no remarks."""
    world = World(tmp_path, lambda p: "Output (a)" if is_again(p) else "Output (b)", always("Yes"))
    world.detector.thinks = False
    classifier = ClassifierDetector("tiny", "c", "all", 1)
    decisions = world.decide([item()])
    with pytest.raises(UsageError, match="feedback=label"):
        debias(decisions, world.judge, world.detector if kind == "label" else classifier)
    assert world.detected == []
    (revision,) = debias(decisions, world.judge, world.detector, feedback="label")
    assert choices(revision) == [0] and "Biased: Yes." in world.judged[0]


@pytest.mark.parametrize("without_name", [False, True])
def test_the_judge_can_go_unnamed_in_every_round(tmp_path: Path, without_name: bool) -> None:
    world = World(tmp_path, lambda p: "Output (a)" if "You decided: Output (b)" in p else "Output (b)", always(YES))
    debias(world.decide([item()]), world.judge, world.detector, max_rounds=2, without_name=without_name)
    assert ["Judge: my judge\n" not in prompt for prompt in world.detected] == [without_name] * 2


def test_a_number_of_position_calls_that_is_none(tmp_path: Path) -> None:
    world = World(tmp_path, first_place, always(NO))
    with pytest.raises(UsageError, match="position_calls is 3"):
        debias([], world.judge, world.detector, position_calls=3)
    assert debias([], world.judge, world.detector) == []


BIASED = set(range(0, 40, 5))  # every fifth item: a planted bias rate of 8 in 40


def planted(prompt: str) -> str:
    """A judge that follows the crowd on planted items, until it is told."""
    number = int(re.search(r"Question (\d+)", prompt)[1])  # type: ignore[index]
    right = re.search(r'Output \(([ab])\): """right', prompt)[1]  # type: ignore[index]
    wrong = "b" if right == "a" else "a"
    return f"Output ({wrong if number in BIASED and not is_again(prompt) else right})"


def perfect(prompt: str) -> str:
    """A detector that sees that a wrong text was chosen with the crowd."""
    chosen = re.search(r"The judge chose Output \(([ab])\)", prompt)[1]  # type: ignore[index]
    return YES if re.search(rf'Output \({chosen}\): """wrong', prompt) else NO


@pytest.mark.parametrize(("detector", "repaired"), [(perfect, True), (always(NO), False)], ids=["perfect", "blind"])
def test_a_planted_world(tmp_path: Path, detector: Prompted, repaired: bool) -> None:
    world = World(tmp_path, planted, detector)
    items = [item(number, gold=number % 2) for number in range(40)]
    decisions = world.decide(items)
    revisions = debias(decisions, world.judge, world.detector, max_rounds=3)
    wrong = [n for n, (i, r) in enumerate(zip(items, revisions, strict=True)) if choices(r, 0) != [i.gold]]
    still = [n for n, (i, r) in enumerate(zip(items, revisions, strict=True)) if choices(r) != [i.gold]]
    assert wrong == sorted(BIASED) and still == ([] if repaired else wrong)
    changed = [n for n, (d, r) in enumerate(zip(decisions, revisions, strict=True))
               if r.rounds[-1].judgements != d.judgements]  # fmt: skip
    assert changed == (wrong if repaired else [])
    assert sum(r.calls for r in revisions) == 40 + (2 * len(BIASED) if repaired else 0)
    assert sum(r.calls for r in revisions) == len(world.judged) + world.detector.calls()["asked"]


class Counting(FunctionBackend):
    """Answers with usage: a hundred tokens read, ten written."""

    def run(self, requests: Any, missing: Any, commit: Any) -> None:
        for index in sorted(missing):
            text = self.reply(requests[index].messages)
            commit(index, Completion(status="ok", text=text, prompt_tokens=100, completion_tokens=10))


def test_what_the_loop_took_holds_what_was_paid_before(tmp_path: Path) -> None:
    """Asked anew or stored by another stage, the same tokens and dollars; the seconds alone are then unknown."""
    ledger = Ledger(tmp_path / "l.sqlite")

    def loop() -> Cost:
        priced = Engine(Counting(lambda m: "Output (a)", "judge"), ledger, cost=PricedCost(1.0, 10.0))
        judge = GenerativeJudge(priced, "my judge")
        decisions = decide(GenerativeJudge(Engine(FunctionBackend(lambda m: "Output (b)", "j"), ledger), "j"),
                           "bandwagon", [item()])  # fmt: skip
        detector = EngineDetector(Engine(Counting(lambda m: YES, "d"), ledger), "d", Sampling(max_new_tokens=9))
        return cost_of(judge, detector, 1.5, debias(decisions, judge, detector))

    first, again = loop(), loop()
    assert first == Cost(2, 200, 20, 1.5, 2e-4)  # the detector has no price
    assert again == first._replace(seconds=None)


def test_tokens_that_no_backend_names_are_unknown(tmp_path: Path) -> None:
    world = World(tmp_path, always("Output (b)"), always(YES))
    revisions = debias(world.decide([item()]), world.judge, world.detector)
    assert cost_of(world.judge, world.detector, 1.5, revisions) == Cost(2, None, None, 1.5, None)


def test_another_function_is_another_judge(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "l.sqlite")
    first = function_judge(lambda messages: "Output (b)", ledger, "mine")
    second = function_judge(lambda messages: "Output (a)", ledger, "mine")
    assert [decide(j, "verbosity", [item()])[0].judgements[0].outcome.choice for j in (first, second)] == [1, 0]
