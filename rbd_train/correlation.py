"""How scores agree with people's, and with themselves across ranges. Undefined is None, never 0 and never NaN."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from rbd_train.intervals import RESAMPLES, interval
from rbd_train.metrics import Rate

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

KINDS = ("pearson", "spearman", "kendall")
Score = float | None


class Correlations(NamedTuple):
    """Pearson, Spearman and Kendall's tau-b; None where a side is constant or fewer than three pairs are left."""

    pearson: float | None
    spearman: float | None
    kendall: float | None


def correlations(scores: Sequence[Score], human: Sequence[Score]) -> Correlations:
    """Correlate the pairs in which both sides are known (of two pairs a rank correlation is always 1 or -1)."""
    import numpy as np

    return _three(np.asarray([(s, h) for s, h in zip(scores, human, strict=True) if s is not None and h is not None]))


def by_document(
    scores: Sequence[Score], human: Sequence[Score], groups: Sequence[str]
) -> dict[str, Correlations]:  # fmt: skip
    """Correlate within each document."""
    rows: dict[str, list[int]] = {}
    for index, group in enumerate(groups):
        rows.setdefault(group, []).append(index)
    return {g: correlations([scores[i] for i in part], [human[i] for i in part]) for g, part in rows.items()}


def mean_of(values: Sequence[Mapping[str, float | None]]) -> Rate:
    """Average over documents what is defined, first within each document over tables (ranges, dimensions).

    `n` counts the documents that have a value; the interval resamples documents.
    """
    import numpy as np

    means = [float(np.mean(known)) for known in _per_document(values).values() if known]
    if not means:
        return Rate(value=None, n=0)
    if len(means) < 2:
        return Rate(value=means[0], n=1)
    drawn = np.random.default_rng(0).integers(len(means), size=(RESAMPLES, len(means)))
    low, high = interval(np.asarray(means)[drawn].mean(axis=1), len(means))
    return Rate(value=float(np.mean(means)), n=len(means), low=low, high=high)


def defined(values: Sequence[Mapping[str, float | None]]) -> str:
    """Say how many of the correlations are defined."""
    every = [value for table in values for value in table.values()]
    return f"{sum(value is not None for value in every)} of {len(every)}"


class Difference(NamedTuple):
    """A paired difference of document means, and the Wilcoxon signed-rank p; None where no document differs."""

    rate: Rate
    p: float | None


def paired(first: Sequence[Mapping[str, float | None]], second: Sequence[Mapping[str, float | None]]) -> Difference:
    """Compare two methods on the correlations that are defined for both, document by document."""
    from scipy.stats import wilcoxon

    apart = [
        {g: a[g] - b[g] for g in a if a[g] is not None and b.get(g) is not None}  # type: ignore[operator]
        for a, b in zip(first, second, strict=True)
    ]
    means = [sum(known) / len(known) for known in _per_document(apart).values() if known]
    differ = [value for value in means if abs(value) > 1e-12]
    p = float(wilcoxon(differ).pvalue) if differ else None
    return Difference(mean_of(apart), p)


def pooled(
    scores: Sequence[Score], human: Sequence[Score], groups: Sequence[str], dimensions: Sequence[str]
) -> dict[str, Rate]:  # fmt: skip
    """Correlate a dimension's documents all at once, and average over dimensions; intervals resample documents.

    Dimensions are not mixed: where people are stricter on one, a judge that knows no more than that would correlate.
    """
    import numpy as np

    rows: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for s, h, group, dimension in zip(scores, human, groups, dimensions, strict=True):
        if s is not None and h is not None:
            rows.setdefault(dimension, {}).setdefault(group, []).append((s, h))
    parts = [{group: np.asarray(pairs) for group, pairs in part.items()} for part in rows.values()]
    names = sorted({group for part in parts for group in part})
    count = sum(len(pairs) for part in parts for pairs in part.values())
    values = _means(parts, names)
    drawn: list[list[float | None]] = []
    if len(names) > 1 and any(value is not None for value in values):
        generator = np.random.default_rng(0)
        for _ in range(RESAMPLES // (4 if count <= 2000 else 10)):
            drawn.append(_means(parts, [names[k] for k in generator.integers(len(names), size=len(names))]))
    found = {}
    for k, (kind, value) in enumerate(zip(KINDS, values, strict=True)):
        known = [means[k] for means in drawn if means[k] is not None]
        low, high = interval(known, len(names)) if value is not None else (None, None)  # type: ignore[arg-type]
        found[kind] = Rate(value=value, n=count, low=low, high=high)
    return found


# stability across ranges -----------------------------------------------------------------------------------------


def relative(score: float, low: int, high: int) -> float:
    """Place a score in its range: 0 is the lowest, 1 the highest."""
    return (score - low) / (high - low)


def disagreement(scores: Mapping[tuple[int, int], Sequence[Score]], groups: Sequence[str]) -> Rate:
    """Return how far a text's scores in two ranges lie apart, as a share of the range, on average over pairs of ranges.

    0: every range says the same after its shift. The interval resamples documents.
    """
    spans = sorted(scores)
    tables: list[dict[str, float | None]] = []
    for k, one in enumerate(spans):
        for other in spans[k + 1 :]:
            apart: dict[str, list[float]] = {}
            for group, a, b in zip(groups, scores[one], scores[other], strict=True):
                if a is not None and b is not None:
                    apart.setdefault(group, []).append(abs(relative(a, *one) - relative(b, *other)))
            tables.append({group: sum(values) / len(values) for group, values in apart.items()})
    return mean_of(tables)


def histogram(scores: Sequence[Score], low: int, high: int) -> list[float]:
    """Return the share of every integer score; expected scores go to the nearest one."""
    known = Counter(min(max(round(s), low), high) for s in scores if s is not None)
    total = sum(known.values())
    return [known[n] / total if total else 0.0 for n in range(low, high + 1)]


def preferred_number(scores: Mapping[tuple[int, int], Sequence[Score]]) -> tuple[int, float] | None:
    """Return the number that is given more often than its places in the ranges explain, and by how much.

    A number's share in the ranges of one width that hold it, less the mean share that its places (lowest, second
    lowest, ...) have over all of them. 0: scores depend on the place alone. None with fewer than two such ranges.
    """
    best: tuple[int, float] | None = None
    for width in {high - low for low, high in scores}:
        spans = [span for span in scores if span[1] - span[0] == width]
        if len(spans) < 2:
            continue
        shares = {span: histogram(scores[span], *span) for span in spans}
        place = [sum(shares[span][k] for span in spans) / len(spans) for k in range(width + 1)]
        for number in {n for low, high in spans for n in range(low, high + 1)}:
            own = [shares[s][number - s[0]] - place[number - s[0]] for s in spans if s[0] <= number <= s[1]]
            excess = sum(own) / len(own)
            if best is None or excess > best[1]:
                best = number, excess
    return best


def _per_document(values: Sequence[Mapping[str, float | None]]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for table in values:
        for group, value in table.items():
            found.setdefault(group, [])
            if value is not None:
                found[group].append(value)
    return found


def _means(parts: "Sequence[Mapping[str, NDArray[np.float64]]]", names: Sequence[str]) -> list[float | None]:
    """Average each kind over the parts in which it is defined, each part made of the named groups."""
    import numpy as np

    found = [
        _three(np.concatenate(drawn)) for part in parts if (drawn := [part[name] for name in names if name in part])
    ]
    known = [[own[k] for own in found if own[k] is not None] for k in range(len(KINDS))]
    return [float(np.mean(values)) if values else None for values in known]  # type: ignore[arg-type]


def _three(pairs: "NDArray[np.float64]") -> Correlations:
    """Correlate in the three ways; the ranks are made once."""
    import numpy as np
    from scipy.stats import kendalltau, rankdata

    if len(pairs) < 3 or (np.ptp(pairs, axis=0) <= 1e-12).any():
        return Correlations(None, None, None)
    ranks = np.stack([rankdata(pairs[:, 0]), rankdata(pairs[:, 1])])
    pearson, spearman = (float(np.corrcoef(*sides)[0, 1]) for sides in (pairs.T, ranks))
    return Correlations(pearson, spearman, float(kendalltau(*ranks).statistic))
