"""How much of a detector's decisions the content-blind rules explain."""

from collections.abc import Sequence

from eval.baselines import rule_of
from eval.verdicts import Verdicts, biases_of
from rbd_train.agreement import kappa_rate
from rbd_train.metrics import mean_rate
from rbd_train.records import Example
from rbd_train.run import Cell, Table


def reliance_table(examples: Sequence[Example], said: Verdicts) -> Table:
    """Compare every detector's verdicts with the rule's, above all where the rule is wrong.

    Who reads the case leaves the rule there; who follows the rule, or was right by it, does not.
    """
    rows: list[tuple[Cell, ...]] = []
    known = [name for name in said if not name.startswith(("best rule", "majority class", "rule"))]
    rules = {bias: rule for bias in biases_of(examples) if (rule := rule_of(bias)) is not None}
    for name in known:
        for bias in [*rules, "all"]:
            part = [e for e in examples if bias in ("all", e.bias) and e.bias in rules and e.case.id in said[name]]
            if not part:
                continue
            fires = [rules[e.bias](e.case) for e in part]
            verdict = [said[name][e.case.id] for e in part]
            same = [float(v == r) for v, r in zip(verdict, fires, strict=True)]
            groups = [e.group for e in part]
            wrong = [k for k, e in enumerate(part) if fires[k] != e.label]
            rows.append(
                (name, bias, len(part), mean_rate(same, groups), kappa_rate(verdict, fires, groups), len(wrong),
                 mean_rate([same[k] for k in wrong], [groups[k] for k in wrong]))
            )  # fmt: skip
    return Table(
        name="detection_reliance", title="How far the detector follows the rules", rows=tuple(rows),
        columns=("method", "bias", "cases", "says what the rule says", "kappa with the rule", "rule wrong",
                 "follows it there"),
        note="The last column tells: near 0, the verdict comes from elsewhere than the rule; near 1, it is the rule's, "
        "whatever the F1 says. Few cases there: a diagnostic set (congruent_share=1) has more.",
    )  # fmt: skip
