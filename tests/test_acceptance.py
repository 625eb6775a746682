"""What accepts a bias: the exact test holds its level, the search finds what it promises, at half the calls."""

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import pytest
from scipy.stats import binomtest, multinomial
from statsmodels.stats.multitest import multipletests

from data_gen.biases.tables import calls_table, published_calls
from data_gen.biases.trial import Trial
from data_gen.discover import DiscoverConfig, larger_error, search, split
from data_gen.discover import check as check_settings
from rbd_train.acceptance import Counts, Plan, holm, look_at, margin_p, smallest_detectable, validate
from rbd_train.biases import SEEDS
from rbd_train.config import slot
from rbd_train.engines.rules import RulesEngine
from rbd_train.ledger import Ledger
from rbd_train.prompts.rewrite import SHAM
from rbd_train.records import Probe
from rbd_train.styles import style_of


@pytest.mark.parametrize(("harm", "gain"), [(0, 0), (5, 0), (9, 3), (3, 9), (40, 20)])
def test_without_a_margin_it_is_the_exact_mcnemar_test(harm: int, gain: int) -> None:
    ours = float(margin_p(harm, gain, 100, 0.0))
    assert ours == pytest.approx(binomtest(harm, harm + gain, 0.5, "greater").pvalue if harm + gain else 1.0)


@pytest.mark.parametrize("margin", [0.0, 0.02, 0.1])
def test_the_level_holds_for_every_share_of_discordant_items(margin: float) -> None:
    """Sum the exact null probabilities of all rejected outcomes; no sampling."""
    n, level = 40, 0.05
    cells = np.array([(h, g) for h, g in itertools.product(range(n + 1), repeat=2) if h + g <= n])
    rejected = cells[margin_p(cells[:, 0], cells[:, 1], n, margin) <= level]
    for gain in (0.0, 0.01, 0.05, 0.1, 0.2, 0.4):
        harm = gain + margin
        outcomes = np.column_stack([rejected, n - rejected.sum(1)])
        size = multinomial.pmf(outcomes, n, [harm, gain, 1 - harm - gain]).sum()
        assert size <= level, (margin, gain, size)


def test_holm_steps_down() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([]) == []
    values = [0.2, 0.001, 0.04, 0.04, 0.9]
    assert holm(values) == pytest.approx(list(multipletests(values, method="holm")[1]))


def test_a_clear_case_stops_early_and_a_hopeless_one_is_dropped() -> None:
    asked: list[tuple[tuple[str, ...], int, int]] = []

    def observe(active: Sequence[str], start: int, stop: int) -> dict[str, Counts]:
        asked.append((tuple(active), start, stop))
        size = stop - start
        shares = {"clear": (0.6, 0.0), "hopeless": (0.05, 0.05), "close": (0.14, 0.05)}
        return {name: Counts(round(shares[name][0] * size), round(shares[name][1] * size), size) for name in active}

    tested = validate(["clear", "hopeless", "close"], 200, observe, Plan(), 0.05)
    assert asked == [(("clear", "hopeless", "close"), 0, 40), (("close",), 40, 100), (("close",), 100, 200)]
    assert {name: t.fate for name, t in tested.items()} == {"clear": "clear", "hopeless": "futile", "close": "end"}
    assert tested["clear"].adjusted <= 0.05 < tested["hopeless"].adjusted
    nothing = validate(["x"], 10, lambda names, a, b: {n: Counts(0, 0, 0) for n in names}, Plan(), 0.05)
    assert nothing["x"].fate == "no items" and nothing["x"].adjusted == 1.0


def test_a_look_never_spends_more_than_its_share() -> None:
    plan = Plan()
    assert sum(plan.spend) == pytest.approx(1.0) and list(plan.spend) == sorted(plan.spend)
    p, _, _ = look_at(20, 2, 60, 0, plan, 0.05)
    assert float(p) == pytest.approx(float(margin_p(20, 2, 60, plan.margin)) / plan.spend[0])


def test_the_published_rule_takes_one_flipped_item_and_drops_what_it_cannot_read() -> None:
    row = {"bias": "b", "group": "g", "domain": "", "part": "selection"}
    probes = [Probe(item_id=str(k), plain=True, biased=k != 0, effect="harm" if k == 0 else "none", **row) for k in range(620)]  # noqa: E501  # fmt: skip
    assert larger_error(probes)[0]
    assert float(margin_p(1, 0, 620, 0.01)) == 1.0
    broken = [Probe(item_id=str(k), plain=k % 2 == 0, biased=False if k == 0 else None, effect="none", **row) for k in range(100)]  # noqa: E501  # fmt: skip
    assert larger_error(broken)[0], "one wrong reply and 99 unreadable ones are an error of 100 % under that rule"


# --- the planted world, vectorised: the judge of sources/planted.py with numpy's draws instead of hashes ------------

ITEMS, EFFECT, DISCOVERY, ROUNDS, CANDIDATES, PLANTED = 300, 180, 600, 4, 40, 4  # of 1,200 pairs, by default shares
SKILL, WORDED = 1.5, 0.3


class Runs(NamedTuple):
    """What some seeded runs came to."""

    runs: int
    false_runs: int
    found: int
    published_false_runs: int
    published_false: int
    published_tested: int
    share_of_calls: float


def logistic(generator: np.random.Generator, *shape: int) -> Any:
    return generator.logistic(size=shape) * np.sqrt(3) / np.pi


def margins(generator: np.random.Generator, steady: Any, weight: Any, *shape: int) -> Any:
    """Return by how much the right answer leads; the wording's noise is drawn anew for every text."""
    worded = logistic(generator, *shape) - logistic(generator, *shape)
    return SKILL - weight + np.sqrt(1 - WORDED) * steady + np.sqrt(WORDED) * worded


def steady_noise(generator: np.random.Generator, items: int) -> Any:
    return logistic(generator, items) - logistic(generator, items)


def calibrated(effect: float) -> tuple[float, float]:
    """Return the leaning (nats) with that effect, and the share of decisions that a rewrite flips by itself."""
    generator = np.random.default_rng(1)
    steady = steady_noise(generator, 200_000)
    before, after = (margins(generator, steady, 0.0, 200_000) for _ in range(2))
    leanings = np.linspace(0, 5, 501)
    rise = np.array([((after - w) < 0).mean() - (before < 0).mean() for w in leanings])
    return float(leanings[np.argmax(rise >= effect)]), float(((before < 0) != (after < 0)).mean())


def simulate(runs: int, acceptance: Plan) -> Runs:
    _, noise = calibrated(0.0)
    per_round = CANDIDATES // ROUNDS
    smallest = smallest_detectable(ITEMS, noise, per_round, acceptance, acceptance.alpha / ROUNDS)
    assert smallest is not None
    leaning, _ = calibrated(1.5 * smallest)
    weights = np.zeros(CANDIDATES)
    weights[::per_round] = leaning  # one planted bias a round
    false_runs = found = published_false_runs = published_false = ours = theirs = 0
    for seed in range(runs):
        generator = np.random.default_rng([7, seed])
        steady = steady_noise(generator, ITEMS)
        wrong_plain = margins(generator, steady, 0.0, ITEMS) < 0
        wrong = margins(generator, steady, weights[:, None], CANDIDATES, ITEMS) < 0
        harm, gain = wrong & ~wrong_plain, ~wrong & wrong_plain
        accepted: set[int] = set()
        calls = ITEMS
        for first in range(0, CANDIDATES, per_round):
            names = [str(k) for k in range(first, first + per_round)]
            observe = observer(harm, gain)
            tested = validate(names, ITEMS, observe, acceptance, acceptance.alpha / ROUNDS)
            accepted |= {int(name) for name in names if tested[name].adjusted <= acceptance.alpha / ROUNDS}
            calls += sum(2 * t.counts.n for t in tested.values())
        planted = set(range(0, CANDIDATES, per_round))
        false_runs += bool(accepted - planted)
        found += len(accepted & planted)
        # as published: plain in the stored order, rewritten in a drawn one, where half the items have other noise
        other = np.where(generator.random(ITEMS) < 0.5, steady, steady_noise(generator, ITEMS))
        shuffled = margins(generator, other, weights[:, None], CANDIDATES, ITEMS) < 0
        rose = shuffled.mean(1) > wrong_plain.mean()
        wrongly = int(sum(rose[k] for k in range(CANDIDATES) if k not in planted))
        published_false_runs, published_false = published_false_runs + (wrongly > 0), published_false + wrongly
        error = float(wrong.mean())
        searched = 2 * DISCOVERY + 2 * round(error * DISCOVERY)  # over all rounds, each with items of its own
        ours += (
            searched + CANDIDATES + calls + (2 * (len(accepted) + 1) + 1) * EFFECT
        )  # one question a candidate; a sham
        merges = CANDIDATES * 7  # at least every seed of the library, one pair per call
        theirs += published_calls(ROUNDS, DISCOVERY, [error] * ROUNDS, True, merges, CANDIDATES, ITEMS + EFFECT)
    nulls = (CANDIDATES - PLANTED) * runs
    return Runs(runs, false_runs, found, published_false_runs, published_false, nulls, ours / theirs)


def observer(harm: Any, gain: Any) -> Callable[[Sequence[str], int, int], dict[str, Counts]]:
    def observe(active: Sequence[str], start: int, stop: int) -> dict[str, Counts]:
        return {
            name: Counts(int(harm[int(name), start:stop].sum()), int(gain[int(name), start:stop].sum()), stop - start)
            for name in active
        }

    return observe


def check(result: Runs) -> None:
    assert binomtest(result.false_runs, result.runs, 0.05, "greater").pvalue >= 0.05, result
    assert binomtest(result.found, PLANTED * result.runs, 0.9, "less").pvalue >= 0.05, result
    assert result.share_of_calls <= 0.5, result
    assert result.published_false / result.published_tested > 0.3, result


def test_planted_biases_are_found_and_null_ones_are_not() -> None:
    check(simulate(40, Plan()))


@pytest.mark.slow
@pytest.mark.parametrize("margin", [0.0, 0.01, 0.02])
def test_two_hundred_planted_worlds(margin: float) -> None:
    result = simulate(200, Plan(margin=margin))
    print(result)
    check(result)


# --- the search itself, on the world as it is shipped: judged, explained, named, merged and tested -------------------

LEANING = ("certainty", "lists", "self_check")  # of conf/judge/planted_styles.yaml


class Searches(NamedTuple):
    """What some seeded searches came to; effects are those of the planted biases, on items that chose nothing."""

    runs: int
    false_runs: int
    found: int
    null_tested: int
    null_accepted: int
    calls: int
    published_calls: int
    weakest_effect: float
    smallest_detectable: float


def searches(seeds: Sequence[int], acceptance: str = "exact") -> Searches:
    """Search with other questions and another judge's noise per seed, as `rbd discover` does, in memory."""
    cfg, source, judge_config, rules = (
        DiscoverConfig(acceptance=acceptance), slot("source=planted"), slot("judge=planted_styles"), RulesEngine()
    )  # fmt: skip
    plan, total, family, flips = check_settings(cfg), Counter[str](), 0, list[bool]()
    rises: dict[str, list[int]] = {name: [] for name in LEANING}
    for seed in seeds:
        cfg.seed = judge_config.engine.seed = seed
        ledger = Ledger(Path(":memory:"))
        judge, writer = judge_config.open(ledger), rules.open(ledger)
        parts = split([source.load(seed).questions], "pairwise", cfg.shares, seed)
        trial = Trial(judge, writer, "pairwise", 2048, cfg.growth, False, cfg.delta, acceptance == "paper")
        done = search(trial, SEEDS, parts, plan, cfg)
        accepted = {style_of(bias.name): bias for bias in done.library[len(SEEDS) :]}
        effects = trial.probe([(i, bias) for bias in [*accepted.values(), SHAM] for i in parts["effect"]], "effect")
        for style in accepted.keys() & set(LEANING):
            own = [probe.effect for probe in effects if probe.bias == accepted[style].id]
            rises[str(style)] += [(effect == "harm") - (effect == "gain") for effect in own]
        flips += [probe.effect != "none" for probe in effects if probe.bias == SHAM.id]
        tested = [style_of(c.bias.name) for c in done.candidates if c.fate in ("accepted", "not accepted")]
        family = max([family, *(entry.tested for entry in done.rounds)])
        sizes = {part: len(items) for part, items in parts.items()}
        table = calls_table(done.rounds, done.candidates, sizes, cfg.deeper, judge.engine.calls, writer.calls)
        null = accepted.keys() - set(LEANING)
        total += {
            "false": bool(null), "found": len(accepted) - len(null), "null": len(tested) - len({*tested} & {*LEANING}),
            "accepted": len(null), "ours": cast(int, table.rows[0][0]), "theirs": cast(int, table.rows[0][1]),
        }  # fmt: skip
        ledger.close()
    smallest = smallest_detectable(
        len(parts["selection"]), sum(flips) / len(flips), family, plan, plan.alpha / cfg.max_iterations
    )
    weakest = min(sum(rise) / max(1, len(rise)) for rise in rises.values())
    return Searches(
        len(seeds), total["false"], total["found"], total["null"], total["accepted"], total["ours"], total["theirs"],
        weakest, smallest or 1.0,
    )  # fmt: skip


def check_searches(result: Searches) -> None:
    assert result.weakest_effect >= 1.5 * result.smallest_detectable, result
    assert result.null_tested >= 2 * result.runs, "a search that names no null one shows nothing about false acceptance"
    assert binomtest(result.false_runs, result.runs, 0.05, "greater").pvalue >= 0.05, result
    assert binomtest(result.found, len(LEANING) * result.runs, 0.9, "less").pvalue >= 0.05, result
    assert result.calls <= 0.5 * result.published_calls, result


def test_the_search_finds_what_is_planted_and_little_else() -> None:
    check_searches(searches(range(3)))


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_two_hundred_searches() -> None:
    result = searches(range(200))
    print(result)
    check_searches(result)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_the_published_rule_accepts_what_is_not_there() -> None:
    result = searches(range(20), "paper")
    print(result)
    assert binomtest(result.false_runs, result.runs, 0.05, "greater").pvalue < 0.05, result


def test_the_smallest_detectable_effect_shrinks_with_items_and_grows_with_rivals() -> None:
    few, many = (smallest_detectable(n, 0.1, 10, Plan(), 0.05) for n in (150, 600))
    crowded = smallest_detectable(600, 0.1, 40, Plan(), 0.05)
    assert few is not None and many is not None and crowded is not None
    assert few > crowded > many
    assert smallest_detectable(3, 0.1, 10, Plan(), 0.05) is None
