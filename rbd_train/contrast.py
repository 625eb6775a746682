"""Contrastive scoring: every setting is arithmetic in float64 over stored `ScoreRow`s, with no model call.

    log p = log p_main - strength * log softmax(assistant logits / temperature)        (arXiv 2510.18196)

The formula is one of tokens. A score sums its tokens; the spellings of a score (bare, spaced) are then summed as
probabilities. Where every spelling is one token the assistant's normaliser is the same for all of them, so that
decisions depend on strength / temperature alone. `as_released` is what the published code does (arXiv 2510.18196): it
divides the main model's logits by the temperature, keeps 1000 tokens whatever the cut, and reuses the assistant's
log-probabilities of the first step.
"""

import math
import re
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

from pydantic import Field, ValidationError

from rbd_train.engine import Engine, Family
from rbd_train.errors import UsageError
from rbd_train.prompts.direct import TEMPLATE
from rbd_train.records import Graded, Position, Readings, Record, ScoreRow, Step, uniform
from rbd_train.scoring import Range, ask, check_family, parse_ranges, questions, rows_of

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Values = NDArray[np.float64]

STRENGTHS, TEMPERATURES = (0.01, 0.1, 0.5, 1.0), (0.5, 1.0, 2.0, 3.0, 4.0, 5.0)  # the published grid
RELEASED_CUT = 0.1
CONTENT_FREE = ("N/A", "[MASK]", "(no text)")  # what a range is given to show its prior


class Setting(Record):
    """How two models are combined; `alpha` cuts tokens less likely than alpha times the main model's best."""

    mode: Literal["paper", "as_released"] = "paper"
    strength: float = Field(default=0.5, ge=0)
    temperature: float = Field(default=1.0, gt=0)
    alpha: float | None = Field(default=None, gt=0, le=1)

    @property
    def ratio(self) -> float:
        """Return strength / temperature: the one parameter of single-token scores in paper mode."""
        return self.strength / self.temperature

    def __str__(self) -> str:
        """Name the setting as every table does."""
        return f"{self.mode}, lambda {self.strength:g}, t {self.temperature:g}{self.cut}"

    @property
    def cut(self) -> str:
        """Name the plausibility cut; nothing where there is none."""
        return f", alpha {self.alpha:g}" if self.alpha is not None else ""


def setting_of(mode: str, strength: float, temperature: float, alpha: float | None) -> Setting:
    """Check the setting.

    Raises:
        UsageError: names the key.
    """
    try:
        return Setting.model_validate({"mode": mode, "strength": strength, "temperature": temperature, "alpha": alpha})
    except ValidationError as error:
        first = error.errors()[0]
        raise UsageError(f"{first['loc'][0]} is {first['input']!r}: {first['msg']}") from error


def check_mode(setting: Setting, families: Sequence[Family | None]) -> None:
    """Refuse, before anything is asked, what only full logits can give.

    Raises:
        UsageError: as_released with a model behind a server.
    """
    if setting.mode == "as_released" and None in families:
        raise UsageError("mode=as_released needs full logits, which no server gives: use engine=local, or mode=paper")


MAIN_ALONE = Setting(strength=0.0)


class Decision(NamedTuple):
    """What a setting says of a row: the likeliest score, the expected one, and the share of each; None if nothing."""

    argmax: int | None
    expected: float | None
    shares: tuple[float, ...]
    bounded: bool = False  # a log-probability that is only bounded could change the argmax


def paper_grid(mode: Literal["paper", "as_released"] = "paper") -> list[Setting]:
    """Return the 24 published settings; in paper mode they are 18 for single-token scores."""
    return [Setting(mode=mode, strength=s, temperature=t) for s in STRENGTHS for t in TEMPERATURES]


def single_token(row: ScoreRow) -> bool:
    """Say whether every spelling of every score is one token."""
    return row.main is not None and all(len(steps) == 1 for steps in row.main.choices)


def decide(row: ScoreRow, setting: Setting) -> Decision:
    """Decide a row; a tie goes to the lowest score."""
    return _decision(row, log_scores(row, setting), _bounded(row, setting))


def decide_alone(row: ScoreRow) -> Decision:
    """Decide by the assistant alone."""
    return _decision(row, _per_score(row, _alone(row.assistant)), False)


def log_scores(row: ScoreRow, setting: Setting) -> "Values":
    """Return the combined log-score of every score of the range, lowest first; minus infinity where it is cut.

    Raises:
        UsageError: the temperature's normalisers are needed and were not stored, or a model said nothing.
    """
    return _per_score(row, _combined(row, setting, certain=False))


def _combined(row: ScoreRow, setting: Setting, certain: bool) -> list[float]:
    """Return each choice's value; `certain` takes the main model's bounded tokens as impossible.

    A spelling that the main model doesn't list is left out where it lists another one of the same score: at most the
    least listed one's share, but subtracting the assistant's bound from it could make it the larger part.
    """
    main = _said(row, row.main, "main model")
    if setting.strength == 0 and setting.mode == "paper":
        assistant, others = main, main.choices
    else:
        assistant = _said(row, row.assistant, "assistant")
        others = assistant.choices
    combine = _paper if setting.mode == "paper" else _released
    left_out = _unlisted(main) if certain else _spelled_otherwise(row, main)
    return [
        -math.inf if k in left_out else combine(row, setting, main, assistant, ours, theirs)
        for k, (ours, theirs) in enumerate(zip(main.choices, others, strict=True))
    ]


def _unlisted(main: Readings) -> set[int]:
    """Return the choices that the main model's server didn't list."""
    return {k for k, steps in enumerate(main.choices) if any(step.bound for step in steps)}


def _spelled_otherwise(row: ScoreRow, main: Readings) -> set[int]:
    """Return the unlisted choices whose score is listed in another spelling."""
    unlisted = _unlisted(main)
    listed = {score for k, score in enumerate(row.scores) if k not in unlisted}
    return {k for k in unlisted if row.scores[k] in listed}


def _paper(
    row: ScoreRow, setting: Setting, main: Readings, assistant: Readings, ours: Sequence[Step], theirs: Sequence[Step]
) -> float:
    total, t = 0.0, setting.temperature
    for mine, other in zip(ours, theirs, strict=True):
        if setting.alpha is not None and mine.logprob < main.positions[mine.position].best + math.log(setting.alpha):
            return -math.inf
        total += mine.logprob
        if setting.strength:
            normaliser = _normaliser(row, assistant.positions[other.position], t)
            total -= setting.strength * (other.logprob / t - normaliser)
    return total


def _released(
    row: ScoreRow, setting: Setting, main: Readings, assistant: Readings, ours: Sequence[Step], theirs: Sequence[Step]
) -> float:
    total, t = 0.0, setting.temperature
    for mine, other in zip(ours, theirs, strict=True):
        place = main.positions[mine.position]
        if place.thousandth is None:
            raise UsageError(f"row {row.item_id}: mode as_released needs full logits: use a local engine")
        least = min(place.best + t * math.log(setting.alpha or RELEASED_CUT), place.thousandth)
        if mine.logprob < least:
            return -math.inf
        stale = other.first if other.first is not None else other.logprob
        total += mine.logprob / t - _normaliser(row, place, t) - setting.strength * stale
    return total


def _normaliser(row: ScoreRow, place: Position, temperature: float) -> float:
    if temperature == 1:
        return 0.0  # log-probabilities are normalised
    if temperature in row.temperatures and place.normalisers:
        return place.normalisers[row.temperatures.index(temperature)]
    if single_token(row):
        return 0.0  # the same for every candidate, so that no decision depends on it
    raise UsageError(
        f"row {row.item_id}, range {row.low}-{row.high}: scores of several tokens need the normalisers at temperature "
        f"{temperature:g}, which top log-probabilities don't give (stored: {list(row.temperatures)}); "
        "use temperature 1, a local engine, or a range of one-token scores"
    )


def _per_score(row: ScoreRow, values: Sequence[float]) -> "Values":
    """Sum the spellings of each score."""
    import numpy as np

    every = np.asarray(values, dtype=np.float64)
    scores = np.asarray(row.scores)
    return np.asarray([np.logaddexp.reduce(every[scores == s]) for s in range(row.low, row.high + 1)])


def _decision(row: ScoreRow, values: "Values", bounded: bool) -> Decision:
    import numpy as np

    if not np.isfinite(values).any():
        return Decision(None, None, (0.0,) * len(values), bounded)
    shares = np.exp(values - values.max())
    shares /= shares.sum()
    expected = float(shares @ np.arange(row.low, row.high + 1))
    return Decision(row.low + int(values.argmax()), expected, tuple(map(float, shares)), bounded)


def _bounded(row: ScoreRow, setting: Setting) -> bool:
    """Say whether tokens that the servers didn't list could change the argmax.

    The main model's unlisted tokens may be as unlikely as one likes, so their value can only fall; the assistant's can
    only rise. The decision stands where the best score is fully known and beats every other at its highest.
    """
    main, assistant = row.main, row.assistant
    left_out = _spelled_otherwise(row, main) if main else set()
    theirs = [any(s.bound for s in steps) for steps in assistant.choices] if assistant and setting.strength else []
    if not (main and _unlisted(main)) and not any(theirs):
        return False
    sure, most = (
        _per_score(row, _combined(row, setting, certain=True)),
        _per_score(row, _combined(row, setting, certain=False)),
    )
    for choice, loose in enumerate(theirs):
        if loose and choice not in left_out:
            most[row.scores[choice] - row.low] = math.inf
    best = int(sure.argmax())
    return bool(math.isinf(sure[best]) or any(most[k] > sure[best] for k in range(len(most)) if k != best))


def _alone(said: Readings | None) -> list[float]:
    return [sum(step.logprob for step in steps) for steps in said.choices] if said else []


def _said(row: ScoreRow, readings: Readings | None, who: str) -> Readings:
    if readings is None:
        raise UsageError(
            f"row {row.item_id}, range {row.low}-{row.high}: no word of the {who} ({row.fault or 'unasked'})"
        )
    return readings


def covered(row: ScoreRow, who: Literal["main", "assistant"] = "main") -> float | None:
    """Return the probability that a model's reply is one of the range's scores."""
    said = row.main if who == "main" else row.assistant
    return None if said is None else math.fsum(math.exp(value) for value in _alone(said))


# reading a reply, and the cheap rivals ---------------------------------------------------------------------------


def parse_score(text: str, low: int, high: int, as_published: bool = False) -> int | None:
    """Read the number that a reply starts with; None if there is none in the range.

    `as_published` takes the lowest score for what can't be read and clamps the rest (arXiv 2510.18196).
    """
    found = re.match(r"[\W_]*?(?:\w+\s*[:=]\s*)?(-?\d+)(?![\d.]*\d)", text.strip())
    if as_published:
        return low if found is None else min(max(int(found[1]), low), high)
    return int(found[1]) if found and low <= int(found[1]) <= high else None


def greedy(row: ScoreRow, setting: Setting = MAIN_ALONE, as_published: bool = False) -> int | None:
    """Take the best of the main model's 20 likeliest tokens, in the range or not, and parse it.

    What the assistant doesn't list among its own 20 counts at their least. A first digit that several scores share is
    followed to the likeliest of them.
    """
    main = _said(row, row.main, "main model")
    values = dict(main.top)
    if setting.alpha is not None:
        least = max(values.values()) + math.log(setting.alpha)
        values = {token: value for token, value in values.items() if value >= least}
    if setting.strength:
        other = _said(row, row.assistant, "assistant").top
        floor = min(other.values())
        weight = setting.ratio if setting.mode == "paper" else setting.strength * setting.temperature
        values = {token: value - weight * other.get(token, floor) for token, value in values.items()}
    token = max(values, key=lambda name: values[name])
    longer = [s for s in range(row.low, row.high + 1) if token.strip() and str(s).startswith(token.strip())]
    if len(longer) > 1:
        shares = decide(row, setting).shares
        return max(longer, key=lambda s: shares[s - row.low])
    return parse_score(token, row.low, row.high, as_published)


def sampled(row: ScoreRow, draws: int = 20, temperature: float = 2.0) -> float | None:
    """Average draws of the main model at a temperature; draws that are no score of the range are left out.

    The draws are made from the stored probabilities, which is what sampling a reply would do, by a hash of the row.
    None if no draw can be read, or the temperature's normalisers were not stored.
    """
    main = row.main
    if main is None or temperature not in row.temperatures or not all(p.normalisers for p in main.positions):
        return None
    k = row.temperatures.index(temperature)
    chances = [
        math.exp(sum(s.logprob / temperature - main.positions[s.position].normalisers[k] for s in steps))
        for steps in main.choices
    ]
    said = []
    for draw in range(draws):
        place = uniform("draw", row.item_id, row.dimension, row.low, row.high, draw)
        for score, chance in zip(row.scores, chances, strict=True):
            place -= chance
            if place < 0:
                said.append(score)
                break
    return sum(said) / len(said) if said else None


def prior_of(rows: Sequence[ScoreRow]) -> "Values":
    """Return a range's prior: the mean log of the shares that the main model gives its scores on no content."""
    import numpy as np

    with np.errstate(divide="ignore"):
        return np.asarray(np.mean([np.log(decide(row, MAIN_ALONE).shares) for row in rows], axis=0), dtype=np.float64)


def without_prior(row: ScoreRow, prior: "Values") -> Decision:
    """Decide by the main model with its range's prior subtracted."""
    return _decision(row, log_scores(row, MAIN_ALONE) - prior, False)


def calibration(scores: Sequence[float], human: Sequence[float]) -> tuple[float, float]:
    """Fit human = slope * score + intercept; a constant score predicts the mean."""
    import numpy as np

    if len(set(scores)) < 2:
        return 0.0, float(np.mean(human))
    slope, intercept = np.polyfit(scores, human, 1)
    return float(slope), float(intercept)


def shifted(human: float, native: tuple[int, int], low: int, high: int) -> float:
    """Map a human score from the range that people used to another one."""
    return low + (human - native[0]) * (high - low) / (native[1] - native[0])


# the library call -------------------------------------------------------------------------------------------------


class Given(NamedTuple):
    """One score as `contrastive_scores` gives it; None where a model gave no answer, and `row` says why."""

    item_id: str
    range: Range
    argmax: int | None
    expected: float | None
    covered: float | None
    row: ScoreRow


def contrastive_scores(
    main: Engine, assistant: Engine, items: Sequence[Graded], ranges: Sequence[str], setting: Setting | None = None,
    template: str = TEMPLATE, spaced: str = "auto", reviews: Sequence[str | None] | None = None,
) -> list[Given]:  # fmt: skip
    """Score items in ranges by a main model and a smaller relative of it, item by item and range by range.

    Args:
        main: the model whose scores are wanted.
        assistant: a smaller model with the same tokenizer.
        items: what is to be scored.
        ranges: such as 1-5; a range of several-token scores needs local engines.
        setting: how the two are combined; by default lambda 0.5, temperature 1, as in the paper's formula.
        template: the prompt, with `$name` placeholders.
        spaced: whether a score with a space before it counts: auto (where it is one token), always or never.
        reviews: a reviewer's remark per item, shown to both models.

    Warns:
        UserWarning: an assistant that isn't smaller, templates that differ, a family that can't be checked.

    Raises:
        UsageError: a range that isn't one, models of two families, a setting that the engines can't give.
    """
    chosen, spans = setting or Setting(), parse_ranges(ranges)
    families = (main.family(), assistant.family())
    for note in check_family(*families, spans):
        warnings.warn(note, stacklevel=2)
    check_mode(chosen, families)
    asked = questions(items, spans, families, template, spaced, None, reviews)
    temperatures = tuple(sorted({1.0, chosen.temperature}))
    rows = rows_of(asked, ask(main, asked, temperatures), ask(assistant, asked, temperatures), temperatures)
    given = []
    for question, row in zip(asked, rows, strict=True):
        said = decide(row, chosen) if row.main and row.assistant else Decision(None, None, ())
        given.append(Given(row.item_id, question.range, said.argmax, said.expected, covered(row), row))
    return given
