"""The statistics do what they promise: intervals cover, paired tests keep their error, oracles agree, cases by hand."""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from scipy.stats import binom, binomtest, norm, t
from sklearn.metrics import average_precision_score, brier_score_loss, roc_auc_score
from statsmodels.stats.contingency_tables import mcnemar
from statsmodels.stats.multitest import multipletests

from eval.grading import graded_table
from rbd_train.agreement import kappa, kappa_rate, krippendorff
from rbd_train.calibration import best_threshold, graded, reliability, roc_auc
from rbd_train.intervals import wilson
from rbd_train.metrics import (
    Paired,
    Rate,
    Scored,
    bootstrap_sums,
    cluster_bootstrap,
    detectable,
    f1_rate,
    fleiss_kappa,
    holm,
    macro_f1,
    mean_rate,
    paired_change,
    paired_difference,
    paired_test,
    proportion,
)
from tests.examples import example  # type: ignore[import-not-found]

REPETITIONS = [300, pytest.param(2000, marks=pytest.mark.slow)]


def covered(draw: Callable[[np.random.Generator], Rate], truth: float, repetitions: int, seed: str) -> None:
    """Assert that 93 to 97 % of the intervals hold the truth; few repetitions get three standard errors."""
    generator = np.random.default_rng(list(seed.encode()))
    found = [draw(generator) for _ in range(repetitions)]
    held = sum(rate.low is not None and rate.high is not None and rate.low <= truth <= rate.high for rate in found)
    slack = 0.0 if repetitions >= 2000 else 3 * (0.95 * 0.05 / repetitions) ** 0.5
    assert 0.93 - slack <= held / repetitions <= 0.97 + slack, f"{held} of {repetitions} intervals hold {truth}"


def clustered(generator: np.random.Generator, p: float, clusters: int = 60) -> tuple[list[float], list[str]]:
    """Draw 1 to 5 rows of 0 and 1 per cluster; the clusters' own rates vary (intra-class correlation 0.3)."""
    rates = generator.beta(p * 0.7 / 0.3, (1 - p) * 0.7 / 0.3, clusters)
    sizes = generator.integers(1, 6, clusters)
    values = [float(generator.random() < rate) for rate, size in zip(rates, sizes, strict=True) for _ in range(size)]
    return values, [f"g{k}" for k, size in enumerate(sizes) for _ in range(size)]


@pytest.mark.parametrize("repetitions", REPETITIONS)
@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_wilson_covers(p: float, repetitions: int) -> None:
    covered(lambda g: proportion(int(g.binomial(200, p)), 200), p, repetitions, f"wilson{p}")


@pytest.mark.parametrize("repetitions", REPETITIONS)
@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_clustered_shares_cover(p: float, repetitions: int) -> None:
    covered(lambda g: mean_rate(*clustered(g, p)), p, repetitions, f"clusters{p}")


@pytest.mark.parametrize("repetitions", [60, pytest.param(2000, marks=pytest.mark.slow)])
def test_clustered_gains_cover(repetitions: int) -> None:
    def draw(generator: np.random.Generator) -> Rate:
        after, groups = clustered(generator, 0.7)
        before = generator.random(len(after)) < 0.5
        return paired_change(list(before), [bool(a) for a in after], groups)

    covered(draw, 0.7 - 0.5, repetitions, "gain")


@pytest.mark.parametrize("repetitions", [60, pytest.param(2000, marks=pytest.mark.slow)])
def test_f1_covers(repetitions: int) -> None:
    """Prevalence .5, recall .8, false alarms .2: F1 is .8."""

    def draw(generator: np.random.Generator) -> Rate:
        labels = generator.random(200) < 0.5
        said = np.where(generator.random(200) < 0.8, labels, ~labels)
        return f1_rate(
            [Scored("b", f"g{k}", bool(a), bool(b)) for k, (a, b) in enumerate(zip(labels, said, strict=True))]
        )

    covered(draw, 0.8, repetitions, "f1")


def detected(generator: np.random.Generator, yes: float, clusters: int = 60, bias: str = "b") -> list[Scored]:
    """Draw labels and verdicts, eight of ten right, a question's alike: F1 is 1.6 yes / (1.6 yes + .2)."""
    labels, groups = clustered(generator, yes, clusters)
    rates = generator.beta(0.8 * 0.7 / 0.3, 0.2 * 0.7 / 0.3, clusters)
    right = generator.random(len(labels)) < rates[[int(group[1:]) for group in groups]]
    return [
        Scored(bias, f"{bias}{g}", x > 0, (x > 0) == bool(ok)) for x, g, ok in zip(labels, groups, right, strict=True)
    ]


@pytest.mark.parametrize("repetitions", [60, pytest.param(2000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("biases", ["b", "abcd"])
def test_clustered_f1_covers(biases: str, repetitions: int) -> None:
    """One bias, and the mean of four with 60 questions each, 30 % Yes: both are .706."""
    measure = f1_rate if biases == "b" else macro_f1
    covered(
        lambda g: measure([row for bias in biases for row in detected(g, 0.3, 60, bias)]),
        0.48 / 0.68, repetitions, f"f1 of {biases}",
    )  # fmt: skip


@pytest.mark.parametrize("repetitions", REPETITIONS)
@pytest.mark.parametrize("lead", [1.0, 2.5])
def test_ranking_covers(lead: float, repetitions: int) -> None:
    """Normal scores, three tenths of their variance the question's: the area is Phi(lead / sqrt 2), .760 and .961."""

    def draw(generator: np.random.Generator) -> Rate:
        labels, groups = clustered(generator, 0.5)
        shared = generator.normal(0, 0.3**0.5, 60)[[int(group[1:]) for group in groups]]
        scores = shared + generator.normal(0, 0.7**0.5, len(labels)) + lead * np.array(labels)
        return roc_auc([float(p) for p in norm.cdf(scores)], [x > 0 for x in labels], groups)

    covered(draw, float(norm.cdf(lead / 2**0.5)), repetitions, f"area {lead}")


@pytest.mark.parametrize("repetitions", REPETITIONS)
@pytest.mark.parametrize("kind", ["exact", "mid-p", "clustered"])
def test_paired_tests_keep_their_error(kind: str, repetitions: int) -> None:
    """Two equally good methods that differ on a third of the rows; a one-sided exact test doesn't reject 5 %."""
    generator = np.random.default_rng(len(kind))
    rejected = 0
    for _ in range(repetitions):
        first = generator.random(120) < 0.7
        swap = generator.random(120) < 0.35
        second = np.where(swap, generator.random(120) < 0.7, first)
        groups = None
        if kind == "clustered":  # three rows of a group agree: 40 questions, not 120
            first, second = (np.repeat(x[:40], 3) for x in (first, second))
            groups = [f"g{k // 3}" for k in range(120)]
        found = paired_test([bool(x) for x in first], [bool(x) for x in second], groups)
        rejected += (found.mid_p if kind == "mid-p" else found.p) <= 0.05
    assert binomtest(rejected, repetitions, 0.05, alternative="greater").pvalue > 0.05, rejected


def test_rows_taken_for_questions_would_find_differences_that_are_not_there() -> None:
    first, second = [True] * 6 + [False] * 24, [False] * 30
    assert paired_test(first, second).p == pytest.approx(2 / 2**6)
    assert paired_test(first, second, [f"g{k // 6}" for k in range(30)]).p == 1.0  # one question of five


@pytest.mark.parametrize("sizes", [(1, 1, 1, 2), (2, 2, 3), (3, 1, 1, 1, 1, 1), (4,)])
def test_the_sign_flip_test_by_enumeration(sizes: tuple[int, ...]) -> None:
    first = [True] * sum(sizes[:-1]) + [False] * sizes[-1]
    second = [not x for x in first]
    groups = [f"g{k}" for k, size in enumerate(sizes) for _ in range(size)]
    lead = abs(sum(sizes[:-1]) - sizes[-1])
    flips = [
        abs(sum(s * z for s, z in zip(signs, sizes, strict=True)))
        for signs in itertools.product((-1, 1), repeat=len(sizes))
    ]
    found = paired_test(first, second, groups)
    assert found.p == pytest.approx(sum(t >= lead for t in flips) / len(flips))
    assert found.mid_p == pytest.approx(found.p - sum(t == lead for t in flips) / len(flips) / 2)


@pytest.mark.parametrize(("b", "c"), [(0, 0), (1, 0), (4, 4), (9, 2), (30, 51)])
def test_mid_p_against_its_definition(b: int, c: int) -> None:
    found = paired_test([True] * b + [False] * c, [False] * b + [True] * c)
    table = [[0, b], [c, 0]]
    pmf = float(binom.pmf(min(b, c), b + c, 0.5))
    exact = float(mcnemar(table, exact=True).pvalue)
    assert found.p == pytest.approx(exact, rel=1e-9)
    assert found.mid_p == pytest.approx(exact - (pmf if b != c else pmf / 2))


def test_large_groups_stay_exact_enough() -> None:
    """Sums of unequal groups over ten thousand rows: within a hair of the normal law."""
    generator = np.random.default_rng(3)
    first = [bool(x) for x in generator.random(20_000) < 0.5]
    second = [bool(x) for x in generator.random(20_000) < 0.5]
    groups = [f"g{k // (1 + k % 3)}" for k in range(20_000)]
    lead: dict[str, int] = {}
    for a, b, g in zip(first, second, groups, strict=True):
        lead[g] = lead.get(g, 0) + a - b
    spread = sum(x * x for x in lead.values()) ** 0.5
    expected = 2 * norm.sf(abs(sum(lead.values())) / spread)
    assert paired_test(first, second, groups).mid_p == pytest.approx(expected, abs=0.01)


def test_holm_leaves_out_what_is_undefined() -> None:
    ps = [0.01, None, 0.04, 0.03]
    expected = [float(p) for p in multipletests([0.01, 0.04, 0.03], method="holm")[1]]
    assert holm(ps) == [expected[0], None, expected[1], expected[2]]
    assert holm([]) == [] and holm([None]) == [None]


@pytest.mark.parametrize(("each", "count", "low"), [(1, 300, 0.07), (2, 150, 0.11)])
def test_the_smallest_detectable_effect_is_detected_four_times_in_five(each: int, count: int, low: float) -> None:
    """By simulation: the effect that the formula names is found in about 80 % of draws, also of rows that agree.

    Of 300 rows 30 % are discordant; by twos, both orders of a question differ alike.
    """

    def tested(kind: Any) -> Paired:
        groups = [f"g{k // each}" for k in range(300)]
        return paired_test(list(np.repeat(kind == 0, each)), list(np.repeat(kind == 1, each)), groups)

    effect = detectable(tested(np.minimum(np.arange(count) % 20 // 3, 2)))
    assert effect is not None and low < effect < low + 0.04
    generator, found = np.random.default_rng(5), 0
    for _ in range(300):
        drawn = generator.choice(3, size=count, p=[(0.3 + effect) / 2, (0.3 - effect) / 2, 0.7])
        found += tested(drawn).mid_p <= 0.05
    assert 0.72 <= found / 300 <= 0.88


def test_what_no_row_could_show_has_no_smallest_effect() -> None:
    for first, groups in (([], None), ([False] * 50, None), ([True] + [False] * 9, None), ([True, False], ["g", "g"])):
        assert detectable(paired_test(first, [False] * len(first), groups)) is None


def test_sums_and_rows_give_the_same_bootstrap() -> None:
    values, groups = clustered(np.random.default_rng(1), 0.4, 30)
    rows = np.column_stack([values, np.ones(len(values))])
    slow = cluster_bootstrap(values, groups, lambda part: sum(part) / len(part))
    assert bootstrap_sums(rows, groups, lambda s: s[..., 0] / s[..., 1]) == pytest.approx(slow)


def test_a_perfect_score_has_an_interval() -> None:
    """A bootstrap of equal rows has no width, yet 40 of 40 doesn't prove 1."""
    rows = [Scored("ab"[k % 2], f"g{k}", k % 4 < 2, k % 4 < 2) for k in range(80)]
    for rate in (mean_rate([1.0] * 40, [f"g{k}" for k in range(40)]), f1_rate(rows), macro_f1(rows)):
        assert rate.value == rate.high == 1.0 and rate.low is not None and 0.8 < rate.low < 0.96
    doubled = mean_rate([1.0] * 40, [f"g{k // 2}" for k in range(40)])
    alone = mean_rate([1.0] * 20, [f"g{k}" for k in range(20)])
    assert doubled.low == alone.low  # forty rows of twenty questions know what twenty know


@pytest.mark.parametrize(("repaired", "broken"), [(1, 0), (0, 1), (0, 0), (3, 0), (30, 10)])
def test_a_change_may_have_either_sign(repaired: int, broken: int) -> None:
    """One repaired of 200 is no gain above 0, and none is no proof that there can't be a loss."""
    before = [False] * repaired + [True] * (200 - repaired)
    after = [True] * repaired + [False] * broken + [True] * (200 - repaired - broken)
    groups = [str(k) for k in range(200)]
    found, plain = paired_change(before, after, groups), paired_difference(repaired, broken, 200)
    assert found.value == plain.value == (repaired - broken) / 200
    assert (found.low, found.high) == pytest.approx((plain.low, plain.high), abs=0.001)
    assert found.low is not None and found.high is not None and found.high > 0
    assert (found.low > 0) == (repaired - broken > 10)
    assert (found.low > 0) == (paired_test(after, before, groups).p < 0.05)
    copied = paired_change(before * 2, after * 2, groups * 2)
    assert (copied.low, copied.high) == pytest.approx((found.low, found.high), abs=0.003), "a copy tells nothing"
    assert paired_change([], [], []).value is None and paired_change([True], [False], ["a"]).low is None


def test_kappa_by_hand() -> None:
    """Observed .7; expected .5 * .6 + .5 * .4 = .5."""
    first, second = "aaaaabbbbb", "aaaabaabbb"
    assert kappa(first, second) == pytest.approx((0.7 - 0.5) / 0.5)
    assert kappa("aaa", "aaa") is None and kappa("", "") is None
    assert kappa([True, None], [True, None]) == 1.0  # None is a value: unreadable


def test_fleiss_kappa_by_hand() -> None:
    """Pairs of raters agree in 1, 1/3, 1 and 1/3 of an item, by chance in a half."""
    found = fleiss_kappa([[3, 0], [2, 1], [0, 3], [1, 2]])
    assert found.value == pytest.approx((2 / 3 - 1 / 2) / (1 - 1 / 2)) and found.n == 4
    assert fleiss_kappa([[3, 0], [3, 0]]).value is None, "one verdict for all: chance is certain"
    assert fleiss_kappa([[1, 0], [0, 1]]).value is None and fleiss_kappa([]).value is None


def test_krippendorff_against_the_published_example() -> None:
    """Krippendorff 2011, example C: four observers, twelve units, nominal, missing values: .743."""
    rows = ["1 2 3 3 2 1 4 1 2 . . .", "1 2 3 3 2 2 4 1 2 5 . 3", ". 3 3 3 2 3 4 2 2 5 1 .", "1 2 3 3 2 4 4 1 2 5 1 ."]
    units = list(zip(*([None if x == "." else x for x in row.split()] for row in rows), strict=True))
    assert krippendorff(units) == pytest.approx(0.743, abs=0.0005)
    assert krippendorff([("a", "a"), ("a", None)]) is None and krippendorff([]) is None


def test_graded_by_hand_and_against_scikit_learn() -> None:
    p_yes, labels = [0.05, 0.05, 0.85, 0.95, 0.95], [False, True, True, True, True]
    found = graded(p_yes, labels, list("abcde"))
    assert found.ece == pytest.approx((2 * 0.45 + 1 * 0.15 + 2 * 0.05) / 5)
    assert [(round(b.mean, 2), b.yes.value, b.yes.n) for b in reliability(p_yes, labels, list("abcde"))] == [
        (0.05, 0.5, 2),
        (0.85, 1.0, 1),
        (0.95, 1.0, 2),
    ]
    assert roc_auc(p_yes, labels, list("abcde")).value == pytest.approx(roc_auc_score(labels, p_yes))
    assert found.average_precision.value == pytest.approx(average_precision_score(labels, p_yes))
    assert found.brier.value == pytest.approx(brier_score_loss(labels, p_yes))
    alone = graded([0.2, 0.9], [True, True], ["a", "b"])
    assert roc_auc([0.2, 0.9], [True, True], ["a", "b"]).value is None
    assert alone.average_precision == Rate(value=None, n=2) and alone.brier.value is not None
    assert graded([], [], []) == (Rate(value=None, n=0), Rate(value=None, n=0), None)
    assert graded([1.0], [True], ["a"]).ece == 0.0


def test_ranking_against_scikit_learn_with_ties() -> None:
    generator = np.random.default_rng(2)
    labels = [bool(x) for x in generator.random(200) < 0.3]
    p_yes = [round(float(generator.random() + label / 2), 1) / 2 for label in labels]
    groups = [f"g{k // 3}" for k in range(200)]
    area, precision = roc_auc(p_yes, labels, groups), graded(p_yes, labels, groups).average_precision
    assert area.value == pytest.approx(roc_auc_score(labels, p_yes))
    assert precision.value == pytest.approx(average_precision_score(labels, p_yes))
    for rate in (area, precision):
        assert rate.low is not None and rate.value is not None and rate.high is not None
        assert 0.05 < rate.high - rate.low < 0.35 and rate.low < rate.value < rate.high


@pytest.mark.parametrize("copies", [1, 2])
def test_a_ranking_in_which_no_question_differs_has_an_interval(copies: int) -> None:
    """Perfect, upside down, and all alike: 30 questions prove none of the three, and a copy of each adds nothing."""
    labels, groups = [k % 3 == 0 for k in range(30)] * copies, [f"g{k}" for k in range(30)] * copies
    for p_yes in ([0.9 if label else 0.1 for label in labels], [0.1 if label else 0.9 for label in labels], [0.5] * 30):
        rate = roc_auc((p_yes * copies)[: len(labels)], labels, groups)
        low, high = wilson(rate.value or 0.0, 10, t.ppf(0.975, 29))
        assert (rate.low, rate.high) == pytest.approx((low, high)), "ten questions have a Yes"
    best = graded([0.9 if label else 0.1 for label in labels], labels, groups).average_precision
    assert best.value == best.high == 1.0 and best.low == pytest.approx(10 / (10 + 1.96**2), abs=1e-3)
    assert roc_auc([0.9, 0.1, 0.2], [True, False, False], ["a", "b", "c"]) == Rate(value=1.0, n=3), "one with a Yes"


def test_an_f1_that_no_resample_changes_lies_in_its_interval() -> None:
    """Every question has one found Yes and one false alarm: F1 is 2/3 whichever are drawn, and no proof of it."""
    rows = [Scored("b", f"g{k // 2}", k % 2 == 0, True) for k in range(40)]
    for rate in (f1_rate(rows), macro_f1(rows)):
        assert rate.value == pytest.approx(2 / 3) and rate.low is not None and rate.high is not None
        assert 0.4 < rate.low < 0.6 and 0.75 < rate.high < 0.9


def test_kappas_interval() -> None:
    """Rows of one question count once; of a perfect agreement 30 questions leave something open."""
    generator = np.random.default_rng(4)
    first = [bool(x) for x in generator.random(60) < 0.5]
    second = [x if generator.random() < 0.8 else not x for x in first]
    groups = [f"g{k}" for k in range(60)]
    one, two = kappa_rate(first, second, groups), kappa_rate(first * 2, second * 2, groups * 2)
    assert one.value == two.value == kappa(first, second)
    assert (one.low, one.high) == pytest.approx((two.low, two.high))
    assert one.low is not None and one.high is not None and one.low < (one.value or 0.0) < one.high < 1
    perfect = kappa_rate(first[:30], first[:30], groups[:30])
    assert perfect.value == perfect.high == 1.0 and 0.6 < (perfect.low or 0.0) < 0.95
    assert kappa_rate([True], [True], ["a"]) == Rate(value=None, n=1)


def test_a_threshold_of_zero_is_one() -> None:
    """Where P(yes) is 0 throughout, Yes from 0 on is the best that can be had: that is no missing threshold."""
    examples = [example(k, k % 2 == 0) for k in range(40)]
    said = {example.case.id: False for example in examples}
    table = graded_table(examples, {"mine": said}, {"mine": dict.fromkeys(said, 0.0)})
    found = dict(zip(table.columns, table.rows[0], strict=True))
    assert found["threshold"] == 0.0 and isinstance(found["F1, threshold"], Rate) and found["F1, threshold"].value


@pytest.mark.parametrize(
    ("p_yes", "labels", "threshold"),
    [
        ([0.1, 0.2, 0.6, 0.9], [False, False, True, True], 0.4),
        ([0.01, 0.02, 0.03], [False, True, True], 0.015),  # a detector that leans to No
        ([0.3, 0.3], [True, False], 0.15),  # all or none: all
        ([0.3], [False], None),
    ],
)
def test_the_threshold_lies_between_the_rows_that_it_parts(p_yes: Any, labels: Any, threshold: Any) -> None:
    assert best_threshold(p_yes, labels) == (pytest.approx(threshold) if threshold else None)
