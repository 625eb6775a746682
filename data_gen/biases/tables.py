"""The tables of discovery: rounds, candidates, effects, calls."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rbd_train.acceptance import Plan, smallest_detectable
from rbd_train.metrics import Rate, paired_difference, proportion
from rbd_train.prompts.rewrite import SHAM
from rbd_train.records import Bias, Candidate, Probe
from rbd_train.run import Cell, Table
from rbd_train.tables import counted


def rounds_table(rounds: Sequence[Any], stop: str, left_out: Mapping[str, int]) -> Table:
    """Count what every round did; what failed is counted by its reason."""
    cells = [
        (r.number, r.items, counted(r.rewrite_faults), r.unreadable, r.misjudged, r.named, counted(r.not_named),
         r.distinct, r.tested, r.accepted)
        for r in rounds
    ]  # fmt: skip
    columns = ("round", "items", "rewrites that failed", "unreadable", "misjudged", "biases named", "none named",
               "distinct", "new, tested", "accepted")  # fmt: skip
    note = f"Stopped: {stop}. Rows left out of the source: {counted(left_out)}. A failed rewrite is not judged."
    return Table(name="discover_rounds", title="Rounds of discovery", columns=columns, rows=tuple(cells), note=note)


def candidates_table(
    candidates: Sequence[Candidate], probes: Sequence[Probe], plan: Plan, items: int, effects: Sequence[Probe],
    rounds: int | None,
) -> Table:  # fmt: skip
    """Show every candidate, its paired counts on the selection items, and what became of it.

    Args:
        candidates: all that were named.
        probes: the selection items, judged.
        plan: the test.
        items: how many selection items there are.
        effects: the effect items, judged, with the sham among them.
        rounds: rounds that share alpha, each a family of its own; 1: one family; None: the published rule, no test.
    """
    rows: list[tuple[Cell, ...]] = []
    tested = [c for c in candidates if c.fate in ("accepted", "not accepted")]
    for candidate in sorted(tested, key=lambda c: (c.fate, 1 if c.p is None else c.p)):
        own = [probe for probe in probes if probe.bias == candidate.bias.id]
        usable = [probe for probe in own if probe.fault is None]
        harm, gain = (sum(p.effect == kind for p in usable) for kind in ("harm", "gain"))
        rows.append(
            (candidate.bias.name, candidate.round, candidate.support, len(usable), len(own) - len(usable),
             len(usable) - sum(_readable(p) for p in usable), harm, gain, _rise(harm, gain, usable), candidate.p,
             candidate.fate, candidate.reason)
        )  # fmt: skip
    others = {fate: sum(c.fate == fate for c in candidates) for fate in ("same as a known one", "not tested")}
    rule = "accepted by the published rule: any rise of the error over readable replies"
    if rounds is not None:
        noise, measured = _noise(effects)
        families = Counter(c.round if rounds > 1 else 0 for c in tested)
        family = max(families.values(), default=1)
        smallest = smallest_detectable(items, noise, family, plan, plan.alpha / rounds)
        how = "" if measured else ", assumed: no sham rewrite was read"
        rule = (
            f"up to {plan.margin} it is no bias; p is adjusted for looks and candidates. Smallest effect that {items} "
            f"items detect with 90 % power (noise {noise:.3f}{how}, "
            f"{family} {'candidate' if family == 1 else 'candidates'} at once, alpha "
            f"{plan.alpha / rounds:g}): {'none' if smallest is None else f'{smallest:.3f}'}"
        )
    note = f"Selection items: {items}. Rise = (harm - gain) / items; {rule}. {counted(others)}."
    columns = ("candidate", "round", "named", "items", "failed rewrites", "unreadable", "harm", "gain",
               "rise of the error", "p", "fate", "how")  # fmt: skip
    return Table(name="discover_candidates", title="Candidates, tested", columns=columns, rows=tuple(rows), note=note)


def effects_table(accepted: Sequence[Bias], probes: Sequence[Probe], mode: str) -> Table:
    """Show each accepted bias on items that chose nothing, overall and per domain, with the sham rewrite beside it.

    A score by itself is neither right nor wrong, so that point-wise there is no error on the plain item.
    """
    rows: list[tuple[Cell, ...]] = []
    domains = sorted({probe.domain for probe in probes})
    for bias in [*accepted, SHAM]:
        for domain in ["all", *(domains if len(domains) > 1 else [])]:
            own = [p for p in probes if p.bias == bias.id and p.fault is None and domain in ("all", p.domain)]
            harm, gain = (sum(p.effect == kind for p in own) for kind in ("harm", "gain"))
            read = [p for p in own if _readable(p)]
            before = proportion(sum(p.plain is not True for p in own), len(own))
            rows.append(
                (bias.name, domain, len(own), None if mode == "pointwise" else before,
                 proportion(sum(p.biased is not True for p in own), len(own)), _rise(harm, gain, own),
                 len(own) - len(read), proportion(sum(p.biased is False for p in read), len(read)),
                 bias.definition if domain == "all" else None)
            )  # fmt: skip
    columns = ("bias", "domain", "items", "error plain", "error with it", "rise of the error", "unreadable",
               "error with it, readable", "definition")  # fmt: skip
    note = (
        "Items that neither named nor chose a bias. Errors count unreadable replies as wrong; the "
        "rise counts items that can be read plain and with the bias alone, over all items, since no preference can be "
        f"read off the rest. {SHAM.name} writes no bias in: the noise floor."
    )
    return Table(name="discover_effects", title="The biases' effects", columns=columns, rows=tuple(rows), note=note)


def calls_table(
    rounds: Sequence[Any], candidates: Sequence[Candidate], parts: Mapping[str, int], deeper: bool,
    judge: Mapping[str, int], writer: Mapping[str, int],
) -> Table:  # fmt: skip
    """Put the calls beside those of the published procedure on the same items and candidates."""
    ours = judge["asked"] + judge["from_ledger"] + writer["asked"] + writer["from_ledger"]
    tested = sum(c.fate in ("accepted", "not accepted") for c in candidates)
    theirs = published_calls(
        len(rounds), parts["discovery"], [r.misjudged / r.items for r in rounds], deeper,
        sum(r.published_merge_calls for r in rounds), tested, parts["selection"] + parts["effect"],
    )  # fmt: skip
    ratio = ours / theirs if theirs else None
    note = (
        "The published procedure rewrites and judges every discovery item in every round, asks about every wrong "
        "decision, compares candidates pair by pair, and rewrites and judges every test item for every candidate."
    )
    rows = ((ours, theirs, ratio),)
    return Table(name="discover_calls", title="Calls", columns=("ours", "published", "ratio"), rows=rows, note=note)


def published_calls(
    rounds: int, items: int, wrong: Sequence[float], deeper: bool, merge_calls: int, tested: int, test_items: int
) -> int:
    """Count the calls of the published procedure (arXiv 2602.09383).

    Args:
        rounds: iterations.
        items: discovery items, all of which every round rewrites and judges.
        wrong: share of them that were misjudged, per round.
        deeper: whether wrong decisions are explained too.
        merge_calls: comparisons, one pair each.
        tested: candidates.
        test_items: items of the test set, each rewritten and judged per candidate, and judged once as it is.
    """
    named = sum(round(share * items) for share in wrong) * (2 if deeper else 1)
    return rounds * 2 * items + named + merge_calls + (2 * tested + 1) * test_items


def _readable(probe: Probe) -> bool:
    """Tell whether an item was decided readably both plain and with the bias."""
    return probe.plain is not None and probe.biased is not None


def _rise(harm: int, gain: int, probes: Sequence[Probe]) -> Rate:
    """Return (harm - gain) / items; nothing where no item was read."""
    return paired_difference(harm, gain, len(probes) if any(map(_readable, probes)) else 0)


def _noise(effects: Sequence[Probe]) -> tuple[float, bool]:
    """Return the share of readable decisions that a sham rewrite flips, and whether there were any to measure it on."""
    sham = [probe for probe in effects if probe.bias == SHAM.id and probe.fault is None and _readable(probe)]
    return (sum(probe.effect != "none" for probe in sham) / len(sham), True) if sham else (0.1, False)
