"""Agreement with people and stability across ranges: undefined stays undefined, a statistic sees what it names."""

import pytest

from rbd_train.correlation import (
    by_document,
    correlations,
    defined,
    disagreement,
    histogram,
    mean_of,
    paired,
    pooled,
    preferred_number,
)


def test_b49() -> None:
    """A60: constant predictions have no correlation: not 0, not 1; a mean leaves them out and says so."""
    assert correlations([3, 3, 3, 3], [1, 2, 3, 4]) == (None, None, None)
    tables = [{"a": None, "b": 0.4}]
    assert mean_of(tables).value == 0.4 and mean_of(tables).n == 1 and defined(tables) == "1 of 2"
    assert mean_of([{"a": None}]).value is None
    found = pooled([3.0, 3.0, 3.0], [1, 2, 3], ["a", "b", "c"], ["d"] * 3)
    assert all(rate.value is None and rate.low is None for rate in found.values())


def test_two_pairs_are_no_correlation_and_missing_ones_are_left_out() -> None:
    assert correlations([1, 2], [1, 2]).spearman is None
    assert correlations([1, None, 2, 3, 9], [2, 5, 3, 4, None]).spearman == pytest.approx(1.0)


def test_documents_are_correlated_by_themselves() -> None:
    scores, human = [1.0, 2, 3, 7, 8, 9], [1.0, 2, 3, 3, 2, 1]
    found = by_document(scores, human, ["a"] * 3 + ["b"] * 3)
    assert found["a"].spearman == pytest.approx(1.0) and found["b"].spearman == pytest.approx(-1.0)
    assert found["a"].kendall == pytest.approx(1.0) and found["a"].pearson == pytest.approx(1.0)


def test_a_document_counts_once_however_many_tables_it_is_in() -> None:
    rate = mean_of([{"a": 1.0, "b": 0.0}, {"a": 1.0, "b": None}, {"a": 1.0}])
    assert rate.value == 0.5 and rate.n == 2 and rate.low == 0.0 and rate.high == 1.0


def test_dimensions_of_other_levels_are_no_agreement() -> None:
    """Two dimensions of noise, people and judge both stricter on one: all rows at once correlate, neither does."""
    import numpy as np

    noise = np.random.default_rng(0).normal(size=(2, 2, 200))
    levels = np.asarray([0.0, 4.0])[:, None]
    scores, human = (list(map(float, (side + levels).ravel())) for side in noise)
    groups, dimensions = [f"d{k % 20}" for k in range(400)], ["a"] * 200 + ["b"] * 200
    mixed, found = correlations(scores, human), pooled(scores, human, groups, dimensions)
    assert all(value is not None and value > 0.4 for value in mixed)
    for kind, rate in found.items():
        assert rate.value is not None and abs(rate.value) < 0.15 and rate.n == 400, kind
        assert rate.low is not None and rate.high is not None and rate.low < 0 < rate.high
    apart = [correlations(scores[k : k + 200], human[k : k + 200]).kendall or 0 for k in (0, 200)]
    assert found["kendall"].value == pytest.approx(sum(apart) / 2)


def test_undefined_dimensions_are_left_out_of_a_pooled_mean() -> None:
    scores, human = [1.0, 2, 3, 5, 5, 5], [1.0, 2, 3, 1, 2, None]
    found = pooled(scores, human, ["g"] * 6, ["a"] * 3 + ["b"] * 3)
    assert found["pearson"].value == pytest.approx(1.0) and found["pearson"].n == 5
    assert found["pearson"].low is None  # one document has no interval


def test_methods_are_compared_where_both_are_defined() -> None:
    first = [{str(k): 0.1 * k + 0.1 for k in range(8)}]
    second = [{str(k): 0.1 * k if k else None for k in range(8)}]
    found = paired(first, second)
    assert found.rate.value == pytest.approx(0.1) and found.rate.n == 7 and found.p == pytest.approx(0.015625)
    assert paired(first, first).p is None


def test_ranges_that_agree_after_their_shift_have_no_disagreement() -> None:
    groups = ["a", "b"]
    assert disagreement({(0, 4): [1.0, 3.0], (2, 6): [3.0, 5.0]}, groups).value == 0.0
    assert disagreement({(0, 4): [1.0, None], (1, 10): [10.0, 5.0]}, groups).value == pytest.approx(0.75)


def test_a_preferred_number_is_seen_and_a_preferred_place_is_none() -> None:
    place = {(0, 4): [3.0] * 4, (1, 5): [4.0] * 4, (2, 6): [5.0] * 4}
    found = preferred_number(place)
    assert found is not None and found[1] == pytest.approx(0.0)
    number = {(0, 4): [4.0] * 4, (1, 5): [4.0] * 4, (2, 6): [4.0] * 4}
    found = preferred_number(number)
    assert found is not None and found[0] == 4 and found[1] == pytest.approx(2 / 3)
    assert preferred_number({(1, 5): [3.0]}) is None


def test_a_histogram_counts_known_scores() -> None:
    assert histogram([1, 2, 2.4, None], 1, 3) == pytest.approx([1 / 3, 2 / 3, 0.0]) and histogram([None], 1, 2) == [
        0,
        0,
    ]


def test_few_documents_widen_the_interval() -> None:
    """A percentile of resampled means of ten documents is as narrow as the normal law with the biased variance."""
    import numpy as np
    from scipy.stats import t as student

    values = {str(k): float(v) for k, v in enumerate(np.random.default_rng(3).normal(0.4, 0.2, 10))}
    rate = mean_of([values])
    spread = np.std(list(values.values()), ddof=1) / 10**0.5 * float(student.ppf(0.975, 9))
    assert rate.low is not None and rate.high is not None
    assert (rate.high - rate.low) / 2 == pytest.approx(spread, rel=0.08)
