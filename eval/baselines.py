"""Content-blind rules: none reads the question or knows the right option.

On the official test set they reach 438 of 500, the 671B teacher 407: they stand in every detection table.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rbd_train import cues
from rbd_train.biases import KNOWN
from rbd_train.detector import Detector, TemplateTeacher
from rbd_train.ledger import Ledger
from rbd_train.records import Case, Example

Rule = Callable[[Case], bool]


def chose_the_longer(case: Case) -> bool:
    """Say Yes where the judge chose the longest option."""
    view = case.views[-1]
    return view.choice is not None and cues.longer(view.options) == view.choice


def same_letter_twice(case: Case) -> bool:
    """Say Yes where the judge chose the same place in both orders."""
    first, *rest = (view.choice for view in case.views)
    return first is not None and rest == [first]


def followed_the_crowd(case: Case) -> bool:
    """Say Yes where the judge chose what the statement favours."""
    view = case.views[-1]
    return view.choice is not None and cues.crowd(view.statement) == view.choice


def chose_the_cheerful(case: Case) -> bool:
    """Say Yes where the chosen option sounds cheerful."""
    view = case.views[-1]
    return view.choice is not None and cues.mood(view.options[view.choice]) > 0


RULES: dict[str, Rule] = {
    "verbosity": chose_the_longer, "position": same_letter_twice,
    "bandwagon": followed_the_crowd, "sentiment": chose_the_cheerful,
}  # fmt: skip


CONSTANTS: dict[str, Rule] = {"always Yes": lambda case: True, "always No": lambda case: False}


def rule_of(bias: str) -> Rule | None:
    """Return a bias's rule, of several parts (joined by +) that any part's rule fires; None where no part has one."""
    parts = [RULES[part] for part in bias.split("+") if part in RULES]
    if len(parts) < 2:
        return parts[0] if parts else None

    def any_fires(case: Case) -> bool:
        return any(rule(case) for rule in parts)

    any_fires.__name__ = "_or_".join(rule.__name__ for rule in parts)
    return any_fires


def name_of(rule: Rule) -> str:
    """Say what a rule looks at, as the tables name it."""
    return rule.__name__.replace("_", " ")


def majority_classes(examples: Sequence[Example]) -> dict[str, bool]:
    """Return the label most rows of a bias have: chosen on the rows themselves, so no constant does better."""
    labels: dict[str, list[bool]] = {}
    for example in examples:
        labels.setdefault(example.bias, []).append(example.label)
    return {bias: 2 * sum(found) >= len(found) for bias, found in labels.items()}


def rule_feedback(case: Case) -> tuple[str, bool]:
    """Say which of the rules of the biases that a case's prompt lists fire, as a detector's reasoning and verdict."""
    listed = {definition.name for definition in case.definitions}
    rules = [rule for bias in KNOWN if bias.name in listed and (rule := RULES.get(bias.id))]
    fired = [name_of(rule) for rule in rules if rule(case)]
    return (f"The judge {' and '.join(fired)}." if fired else "No cue was followed."), bool(fired)


@dataclass
class RulesConfig:
    """Detector that is the content-blind rules."""

    name: str = "content-blind rules"  # author written into its traces

    def open(self, ledger: Ledger) -> Detector:
        """Return the detector; it makes no calls and knows which bias is under test."""
        detector = TemplateTeacher(rule_feedback, self.name)
        detector.definitions = "known"
        return detector
