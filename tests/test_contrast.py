"""Contrastive arithmetic against a brute-force reference over whole vocabularies, and cases that catch shortcuts."""

import math
from typing import Any

import numpy as np
import pytest
from scipy.special import log_softmax, logsumexp

from rbd_train.contrast import (
    MAIN_ALONE,
    RELEASED_CUT,
    TEMPERATURES,
    Setting,
    check_mode,
    covered,
    decide,
    decide_alone,
    greedy,
    log_scores,
    paper_grid,
    parse_score,
    prior_of,
    sampled,
    shifted,
    single_token,
    without_prior,
)
from rbd_train.engine import Family
from rbd_train.engines.tree import Asked, plan
from rbd_train.errors import UsageError
from rbd_train.records import Position, Readings, ScoreRow, Step

VOCABULARY, PADDED = 1100, 1130  # more than 1000, so that the released cut has something to cut
DIGITS, SPACED, END = tuple(range(10, 20)), tuple(range(30, 40)), 2
Logits = dict[tuple[int, ...], Any]


def spelled(low: int, high: int, spaced: bool) -> list[tuple[int, tuple[int, ...]]]:
    """Spell scores in tokens: digits one by one, an end wherever one score begins another."""
    end = (END,) if high > 9 else ()
    found = [(n, tuple(DIGITS[int(d)] for d in str(n)) + end) for n in range(low, high + 1)]
    return found + ([(n, (SPACED[n], *end)) for n in range(low, min(high, 9) + 1)] if spaced else [])


def logits(seed: int, choices: list[tuple[int, tuple[int, ...]]], width: int) -> Logits:
    """Draw a model's raw logits after every beginning of a choice."""
    generator = np.random.default_rng(seed)
    begun = sorted({tokens[:k] for _, tokens in choices for k in range(len(tokens))})
    return {prefix: generator.normal(0, 3, width) for prefix in begun}


def readings(raw: Logits, choices: list[tuple[int, tuple[int, ...]]], temperatures: tuple[float, ...]) -> Readings:
    """Note what an engine notes."""
    logprobs = {prefix: log_softmax(row[:VOCABULARY]) for prefix, row in raw.items()}
    places = list(logprobs)
    top = np.argsort(-logprobs[()])[:20]
    return Readings(
        choices=tuple(
            tuple(
                Step(position=places.index(t[:k]), logprob=logprobs[t[:k]][t[k]], first=logprobs[()][t[k]])
                for k in range(len(t))
            )
            for _, t in choices
        ),
        positions=tuple(
            Position(normalisers=tuple(logsumexp(logprobs[p] / t) for t in temperatures), best=logprobs[p].max(),
                     thousandth=np.sort(logprobs[p])[-1000])
            for p in places
        ),
        top={str(token): float(logprobs[()][token]) for token in top},
    )  # fmt: skip


def row_of(seed: int, low: int, high: int, spaced: bool = False, strange: int = 0) -> tuple[ScoreRow, Logits, Logits]:
    choices = spelled(low, high, spaced)
    main, assistant = logits(seed, choices, PADDED), logits(seed + 1000, choices, PADDED + strange)
    row = ScoreRow(
        item_id="i", group="g", dimension="d", low=low, high=high, scores=tuple(n for n, _ in choices),
        temperatures=TEMPERATURES, main=readings(main, choices, TEMPERATURES),
        assistant=readings(assistant, choices, TEMPERATURES),
    )  # fmt: skip
    return row, main, assistant


def brute(main: Logits, assistant: Logits, low: int, high: int, spaced: bool, setting: Setting) -> list[float]:
    """Combine whole vocabularies as the paper and the published code do, then pick the scores out."""

    def combined(prefix: tuple[int, ...]) -> Any:
        ours, theirs = main[prefix][:VOCABULARY], assistant[prefix][:VOCABULARY]
        t = setting.temperature
        if setting.mode == "paper":
            out = log_softmax(ours) - setting.strength * log_softmax(theirs / t)
            if setting.alpha is not None:
                p = np.exp(log_softmax(ours))
                out[p < setting.alpha * p.max()] = -np.inf
            return out
        p = log_softmax(ours / t)
        least = min(p.max() + math.log(setting.alpha or RELEASED_CUT), np.sort(p)[::-1][999])
        first = assistant[()][:VOCABULARY]  # computed once, before the loop
        return np.where(p < least, -np.inf, p - setting.strength * log_softmax(first))

    values = {n: [] for n in range(low, high + 1)}  # type: dict[int, list[float]]
    for n, tokens in spelled(low, high, spaced):
        values[n].append(sum(combined(tokens[:k])[tokens[k]] for k in range(len(tokens))))
    return [float(logsumexp(v)) for v in values.values()]


@pytest.mark.parametrize("mode", ["paper", "as_released"])
@pytest.mark.parametrize(("low", "high"), [(0, 4), (1, 5), (3, 7), (1, 10), (8, 12)])
@pytest.mark.parametrize("spaced", [False, True])
def test_arithmetic_equals_brute_force(mode: Any, low: int, high: int, spaced: bool) -> None:
    for seed in range(2):
        row, main, assistant = row_of(seed, low, high, spaced, strange=seed)
        for setting in [
            *paper_grid(mode)[::5], Setting(mode=mode, strength=0.7, temperature=2.0, alpha=0.001),
            Setting(mode=mode, strength=0.5, alpha=1e-9),
        ]:  # fmt: skip
            expected = np.asarray(brute(main, assistant, low, high, spaced, setting))
            np.testing.assert_allclose(log_scores(row, setting), expected, atol=1e-6)
            said = decide(row, setting)
            if np.isfinite(expected).any():
                shares = np.exp(expected - logsumexp(expected))
                assert said.expected == pytest.approx(shares @ np.arange(low, high + 1), abs=1e-6)
                assert said.argmax == low + int(expected.argmax())
            else:
                assert (said.argmax, said.expected) == (None, None)


def test_padding_of_the_table_means_nothing() -> None:
    """A58, B46: a padded id with the largest logit of all is neither chosen nor part of the normaliser."""
    row, main, assistant = row_of(3, 1, 5)
    loud = {prefix: np.concatenate([v[:VOCABULARY], np.full(30, 99.0)]) for prefix, v in main.items()}
    again = row.model_copy(update={"main": readings(loud, spelled(1, 5, False), TEMPERATURES)})
    assert log_scores(again, Setting(temperature=2.0)) == pytest.approx(log_scores(row, Setting(temperature=2.0)))


def table(low: int, main: list[float], assistant: list[float], **values: Any) -> ScoreRow:
    """Make a row of one-token scores from log-probabilities."""

    def said(given: list[float]) -> Readings:
        return Readings(
            choices=tuple((Step(position=0, logprob=v, first=v),) for v in given),
            positions=(Position(best=max(given), normalisers=()),), top={str(low + k): v for k, v in enumerate(given)},
        )  # fmt: skip

    given = {
        "item_id": "i", "group": "g", "dimension": "d", "low": low, "high": low + len(main) - 1,
        "scores": tuple(range(low, low + len(main))), "temperatures": (1.0,), "main": said(main),
        "assistant": said(assistant),
    }  # fmt: skip
    return ScoreRow(**(given | values))


def test_b46() -> None:
    row = table(1, [2.0, 1.8, 0.5], [1.5, 0.2, 0.1])
    assert log_scores(row, Setting(strength=1.0)) == pytest.approx([0.5, 1.6, 0.4])
    assert decide(row, Setting(strength=1.0)).argmax == 2 and decide(row, MAIN_ALONE).argmax == 1


def test_b47() -> None:
    """Read as whole sequences 10 wins; its first token alone would say 1."""
    steps = {1: [-0.2, -2.4], **{n: [-2.0 - (n != 9), -0.1] for n in range(2, 10)}, 10: [-0.2, -0.1, 0.0]}
    main = Readings(
        choices=tuple(tuple(Step(position=0, logprob=v) for v in steps[n]) for n in range(1, 11)),
        positions=(Position(best=-0.2),), top={"1": -0.2, "9": -2.0},
    )  # fmt: skip
    row = ScoreRow(item_id="i", group="g", dimension="d", low=1, high=10, scores=tuple(range(1, 11)),
                   temperatures=(1.0,), main=main)  # fmt: skip
    values = log_scores(row, MAIN_ALONE)
    assert values[9] == pytest.approx(-0.3) and values[8] == pytest.approx(-2.1) and values[0] == pytest.approx(-2.6)
    assert decide(row, MAIN_ALONE).argmax == 10 and greedy(row) == 10


def test_single_tokens_have_one_parameter() -> None:
    """24 published settings are 18: argmax and expectation follow strength / temperature alone."""
    assert len({setting.ratio for setting in paper_grid()}) == 18
    row, _, _ = row_of(5, 1, 5, spaced=True)
    assert single_token(row)
    for ratio in {setting.ratio for setting in paper_grid()}:
        said = [decide(row, s) for s in paper_grid() if s.ratio == ratio]
        assert len({d.argmax for d in said}) == 1
        assert [d.expected for d in said] == pytest.approx([said[0].expected] * len(said), abs=1e-9)
    several, _, _ = row_of(5, 1, 10)
    same = [Setting(strength=0.5, temperature=0.5), Setting(strength=1.0, temperature=1.0)]
    assert decide(several, same[0]).expected != pytest.approx(decide(several, same[1]).expected, abs=1e-6)


def test_single_tokens_need_no_normaliser_and_several_do() -> None:
    row, _, _ = row_of(7, 1, 5)
    bare = row.model_copy(update={"temperatures": (1.0,)})
    for setting in paper_grid():
        assert decide(bare, setting).expected == pytest.approx(decide(row, setting).expected)
    several, _, _ = row_of(7, 1, 10)
    with pytest.raises(UsageError, match=r"1-10.*normalisers at temperature 2.*top log-probabilities"):
        decide(several.model_copy(update={"temperatures": (1.0,)}), Setting(temperature=2.0))


def test_a_missing_candidate_is_a_bound() -> None:
    """It can change the argmax or it can't; it never is minus infinity."""
    row = table(1, [-0.1, -3.0, -9.0], [-0.5, -2.0, -8.0])
    bound = Step(position=0, logprob=-9.0, bound=True)
    assert row.main is not None and row.assistant is not None
    hidden = row.main.model_copy(update={"choices": (*row.main.choices[:2], (bound,))})
    assert not decide(row.model_copy(update={"main": hidden}), Setting(strength=0.1)).bounded
    assert decide(row.model_copy(update={"main": hidden}), Setting(strength=1.0)).bounded is False
    close = table(1, [-3.0, -10.5, -9.0], [-0.5, -9.0, -8.0])
    hidden = close.main.model_copy(update={"choices": (*close.main.choices[:2], (bound,))})  # type: ignore[union-attr]
    said = decide(close.model_copy(update={"main": hidden}), Setting(strength=1.0))
    assert said.bounded and all(share > 0 for share in said.shares)
    unheard = row.assistant.model_copy(update={"choices": (*row.assistant.choices[:2], (bound,))})
    assert decide(row.model_copy(update={"assistant": unheard}), Setting(strength=0.5)).bounded
    assert not decide(row.model_copy(update={"assistant": unheard}), MAIN_ALONE).bounded


def test_an_unlisted_spelling_adds_nothing_to_a_listed_score() -> None:
    """Servers list 20 tokens: " 4" beyond them has a bound in both models, whose difference is no share of its own."""
    given = {1: (-3.0, -0.5), 2: (-0.2, -3.0)}  # main and assistant, bare; the spaced ones are not listed
    floor = Step(position=0, logprob=-9.0, bound=True)

    def said(k: int) -> Readings:
        choices = [step for pair in given.values() for step in ((Step(position=0, logprob=pair[k]),), (floor,))]
        return Readings(choices=tuple(choices), positions=(Position(best=-0.2),), top={"2": -0.2})

    row = ScoreRow(item_id="i", group="g", dimension="d", low=1, high=2, scores=(1, 1, 2, 2), temperatures=(1.0,),
                   main=said(0), assistant=said(1))  # fmt: skip
    bare = table(1, [-3.0, -0.2], [-0.5, -3.0])
    for ratio in (0.0, 0.5, 1.0, 2.0):
        setting = Setting(strength=ratio)
        assert decide(row, setting).expected == pytest.approx(decide(bare, setting).expected)
        assert not decide(row, setting).bounded


def test_a_model_that_said_nothing_is_an_error_with_its_reason() -> None:
    row = table(1, [-1.0, -2.0], [-1.0, -2.0]).model_copy(update={"assistant": None, "fault": "assistant: bad_request"})
    with pytest.raises(UsageError, match="bad_request"):
        decide(row, Setting())
    assert decide(row, MAIN_ALONE).argmax == 1


@pytest.mark.parametrize(
    ("text", "score"),
    [("4", 4), (" 4.", 4), ("**3**", 3), ("Score: 5", 5), ("Coherence: 2/5", 2), ("4.5", None), ("45", None),
     ("6", None), ("four", None), ("", None), ("I rate 3", None)],
)  # fmt: skip
def test_a_reply_is_read_or_unreadable(text: str, score: int | None) -> None:
    assert parse_score(text, 1, 5) == score


def test_as_published_what_cant_be_read_is_the_lowest_score() -> None:
    assert [parse_score(text, 2, 6, as_published=True) for text in ("none", "9", "1", "4")] == [2, 6, 2, 4]


def test_greedy_takes_the_best_token_in_the_range_or_not() -> None:
    row = table(1, [-2.0, -1.0], [-2.0, -1.0])
    assert row.main is not None and row.assistant is not None
    row = row.model_copy(update={"main": row.main.model_copy(update={"top": {"The": -0.5, "2": -1.0, "1": -2.0}})})
    assert greedy(row) is None and greedy(row, as_published=True) == 1
    said = row.assistant.model_copy(update={"top": {"The": -0.1, "1": -5.0, "2": -5.0}})  # type: ignore[union-attr]
    assert greedy(row.model_copy(update={"assistant": said}), Setting(strength=1.0)) == 2


def test_samples_follow_the_stored_distribution() -> None:
    """20,000 draws at temperature 2 over a whole vocabulary: the mean is the expectation over readable draws."""
    row, main, _ = row_of(2, 1, 5)
    p = np.exp(log_softmax(main[()][:VOCABULARY] / 2.0))
    scores = np.arange(1, 6)
    own = np.asarray([p[DIGITS[n]] for n in scores])
    assert sampled(row, 50_000) == pytest.approx(float(own @ scores / own.sum()), abs=0.15)
    assert sampled(row.model_copy(update={"temperatures": (1.0,)})) is None
    assert sampled(row, 0) is None


def test_prior_subtraction_undoes_a_planted_prior() -> None:
    quality, prior = np.asarray([-1.0, -0.2, -2.0]), np.asarray([0.0, -3.0, 0.0])
    row, empty = table(2, list(quality + prior), [0.0] * 3), table(2, list(prior), [0.0] * 3)
    assert decide(row, MAIN_ALONE).argmax == 2
    assert without_prior(row, prior_of([empty])).argmax == 3
    expected = np.exp(quality) / np.exp(quality).sum()
    assert without_prior(row, prior_of([empty])).shares == pytest.approx(expected)


def test_coverage_and_the_assistant_alone() -> None:
    row = table(1, [math.log(0.5), math.log(0.25)], [math.log(0.1), math.log(0.6)])
    assert covered(row) == pytest.approx(0.75) and covered(row, "assistant") == pytest.approx(0.7)
    assert decide_alone(row).argmax == 2


def test_equal_strength_cancels_by_algebra() -> None:
    """A prior that both models share vanishes at ratio 1: that shows the formula, and nothing about models."""
    prior = np.asarray([0.0, 4.0, 1.0])
    quality = np.asarray([-1.0, -1.5, -3.0])
    row = table(1, list(quality + prior), list(prior))
    assert log_scores(row, Setting(strength=1.0)) == pytest.approx(quality)


def test_human_scores_shift_with_the_range() -> None:
    assert shifted(3.5, (1, 5), 0, 4) == 2.5 and shifted(3.0, (1, 5), 1, 10) == 5.5


def test_what_no_server_gives_is_refused_before_it_is_asked_for() -> None:
    family = Family(None, None, 1)
    with pytest.raises(UsageError, match="mode=as_released needs full logits"):
        check_mode(Setting(mode="as_released"), (family, None))
    check_mode(Setting(mode="as_released"), (family, family))
    check_mode(Setting(), (None, None))


def test_a_context_beyond_the_limit_shares_with_its_neighbours() -> None:
    """Alone, each question about a long article would read it anew."""
    article = list(range(100))
    asked = {k: Asked([*article, 200 + k], [[1], [2]], ()) for k in range(8)} | {8: Asked([7, 8, 9], [[1]], ())}
    batches = list(plan(list(asked), asked, 40))
    assert any(set(range(8)) <= set(batch) for batch in batches)
    short = {k: Asked([k, 5, 6], [[1]], ()) for k in range(9)}
    assert max(map(len, plan(list(short), short, 9))) == 3
