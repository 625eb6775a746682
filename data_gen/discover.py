"""Find biases of a judge that nobody named before, and keep those that hold on items they were not found on.

A bias of the library is written into each wrong answer; where the judge then errs, an engine names what drew it; what
is new is written into the wrong answers of other items and tested there (arXiv 2602.09383, its faults mended).

In: a preference set (conf/source). Out: `library.jsonl` (Bias), `candidates.jsonl` (Candidate), `probes.jsonl` (Probe),
`parts.jsonl` (Placed: what each item was used for).

    rbd discover
    rbd discover source=preference source.path=judge_bench.parquet judge=embedded engine@rewriter=http rewriter.model=M
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, cast

from data_gen.biases.identify import Found, explained, merged, named
from data_gen.biases.tables import calls_table, candidates_table, effects_table, rounds_table
from data_gen.biases.trial import Mode, Trial, gold_of, item_of
from rbd_train.acceptance import Counts, Plan, Tested, check_plan, validate
from rbd_train.app import BaseConfig, stage
from rbd_train.biases import SEEDS, read_library
from rbd_train.errors import DataError, UsageError
from rbd_train.metrics import Rate, mean_rate, paired_difference
from rbd_train.prompts.rewrite import SHAM
from rbd_train.records import Bias, Candidate, Evidence, Item, Judgement, Outcome, Placed, Probe, Question, uniform
from rbd_train.run import Run
from rbd_train.sources import Loaded, with_two_answers
from rbd_train.sources.preference import label_balance
from rbd_train.tables import declared

PARTS = ("discovery", "selection", "effect", "benchmark")


@dataclass
class DiscoverConfig(BaseConfig):
    """Settings of discover."""

    source: Any = None  # preference pairs
    test_source: Any = None  # other pairs, for all parts but discovery (source@test_source=...); null: source's own
    judge: Any = None  # whose biases are looked for
    rewriter: Any = None  # engine that rewrites answers and names biases (the papers' teacher)
    seeds: str | None = None  # library to start from; default: the seven of arXiv 2602.09383
    mode: str = "pairwise"  # pairwise, reference (the judge sees the reference answer) or pointwise (a score each)
    delta: float = 1.0  # pointwise: points by which a score must rise to count as misjudged
    max_iterations: int = 4  # rounds, at most
    validation: str = "early"  # early: test each round's candidates at once; late: all at the end
    deeper: bool = True  # let the judge explain its wrong decisions at length first (DeeperExplain)
    acceptance: str = "exact"  # exact: paired test with margin, looks and Holm; paper: a strictly larger error
    alpha: float = 0.05  # chance of any false acceptance in the whole run
    margin: float = 0.01  # effect that is too small to count, as a share of the items
    looks: list[float] = field(default_factory=lambda: [0.2, 0.5, 1.0])  # shares of the items at which one looks
    max_candidates: int = 24  # candidates tested per round, those named most often first
    shares: list[float] = field(default_factory=lambda: [0.5, 0.25, 0.15, 0.1])  # of discovery, selection, effect, rest
    growth: float = 2.0  # factor by which a rewritten answer may grow or shrink
    same_length: bool = False  # cut rewritten answers to their old length
    rewrite_tokens: int = 2048  # tokens of a rewritten answer
    explain_tokens: int = 256  # tokens of an explanation, and of a named bias


@stage("discover", DiscoverConfig)
def main(cfg: DiscoverConfig, run: Run) -> float | None:
    """Search in rounds, test on other items, measure on yet others, write."""
    plan = check(cfg)
    library = read_library(Path(cfg.seeds)) if cfg.seeds else list(SEEDS)
    loaded = load(cfg, run)
    parts = split([each.questions for each in loaded], cast(Mode, cfg.mode), cfg.shares, cfg.seed)
    judge, writer = cfg.judge.open(run.ledger), cfg.rewriter.open(run.ledger)
    with judge.engine, writer:
        lengths = cfg.rewrite_tokens, cfg.growth, cfg.same_length
        trial = Trial(judge, writer, cast(Mode, cfg.mode), *lengths, cfg.delta, cfg.acceptance == "paper")
        found = search(trial, library, parts, plan, cfg)
        rows = [*found.library[len(library) :], SHAM]
        effects = trial.probe([(item, bias) for bias in rows for item in parts["effect"]], "effect")
    teacher = str(writer.identity["model"])
    library = with_evidence(found.library, effects, found.candidates, judge.name, teacher, trial.mode)
    run.facts |= {"judge": judge.name, "rewriter": teacher, "licence": " and ".join(each.licence for each in loaded)}
    run.facts |= {"judge_calls": judge.engine.calls, "rewriter_calls": writer.calls, "stop": found.stop}
    run.facts["planted"] = getattr(judge, "planted", {})
    run.write("library.jsonl", library)
    run.write("candidates.jsonl", found.candidates)
    run.write("probes.jsonl", [*found.probes, *effects])
    run.write("parts.jsonl", [Placed(item_id=i.id, group=i.group, part=p) for p, part in parts.items() for i in part])
    rounds = None if cfg.acceptance == "paper" else cfg.max_iterations if cfg.validation == "early" else 1
    accepted = library[len(library) - len(rows) + 1 :]  # the rest came with the seeds, from another judge perhaps
    sizes = {p: len(part) for p, part in parts.items()}
    left_out = sum((Counter(each.left_out) for each in loaded), Counter())
    left_out["another row of a question"] += sum(len(each.questions) for each in loaded) - sum(sizes.values())
    tables = [
        rounds_table(found.rounds, found.stop, left_out),
        candidates_table(found.candidates, found.probes, plan, sizes["selection"], effects, rounds),
        effects_table(accepted, effects, trial.mode),
        calls_table(found.rounds, found.candidates, sizes, cfg.deeper, judge.engine.calls, writer.calls),
    ]
    for table in tables:
        run.table(table.model_copy(update={"note": f"{declared(judge)}. Teacher: {teacher}. {table.note}"}))
    headline(run, accepted, len(library), effects, trial.mode)
    return float(len(rows) - 1)


def load(cfg: DiscoverConfig, run: Run) -> list[Loaded]:
    """Load the set to discover on and, where it is another one, the set to test on; note and describe them."""
    loaded = [with_two_answers(source.load(cfg.seed)) for source in (cfg.source, cfg.test_source) if source is not None]
    for file in [*(file for each in loaded for file in each.files), *([cfg.seeds] if cfg.seeds else [])]:
        run.note_input(Path(file))
    for each in loaded:
        run.say(label_balance(each.questions))
    known = {question.group for each in loaded[:-1] for question in each.questions}
    rest = [question for question in loaded[-1].questions if question.group not in known]
    shared = {"in test_source and in source": len(loaded[-1].questions) - len(rest)}  # discovered on, it proves nothing
    return [*loaded[:-1], loaded[-1]._replace(questions=rest, left_out=loaded[-1].left_out | shared)]


def headline(run: Run, accepted: Sequence[Bias], known: int, effects: Sequence[Probe], mode: Mode) -> None:
    """Keep the figures: how many biases, each one's effect, and the error without and with them on the effect items."""
    run.figure("discover.accepted", Rate(value=float(len(accepted)), n=known))
    for bias in accepted:
        seen = bias.evidence
        effect = Rate(value=seen.effect, n=seen.n, low=seen.low, high=seen.high) if seen else Rate(value=None, n=0)
        run.figure(f"discover.effect.{bias.id}", effect)
    ids = {bias.id for bias in accepted}
    own = [probe for probe in effects if probe.bias in ids and probe.fault is None]
    for kind in ("biased",) if mode == "pointwise" else ("plain", "biased"):
        wrong = [float(getattr(probe, kind) is not True) for probe in own]
        run.figure(f"discover.error_{kind}", mean_rate(wrong, [probe.group for probe in own]))


def check(cfg: DiscoverConfig) -> Plan:
    """Refuse settings that can't be meant, and return the plan of the test."""
    for key, allowed in (
        ("mode", ("pairwise", "reference", "pointwise")), ("validation", ("early", "late")),
        ("acceptance", ("exact", "paper")),
    ):  # fmt: skip
        if getattr(cfg, key) not in allowed:
            raise UsageError(f"{key} is {getattr(cfg, key)!r}; choose {', '.join(allowed)}")
    if len(cfg.shares) != len(PARTS) or min(cfg.shares) < 0 or abs(sum(cfg.shares) - 1) > 1e-6:
        raise UsageError(f"shares is {cfg.shares}: four shares ({', '.join(PARTS)}) that add up to 1")
    if cfg.max_iterations < 1 or cfg.max_candidates < 1 or cfg.growth < 1 or cfg.delta <= 0:
        raise UsageError("max_iterations and max_candidates must be 1 or more, growth 1 or more, delta above 0")
    plan = Plan(cfg.alpha, cfg.margin, tuple(cfg.looks) if cfg.acceptance == "exact" else (1.0,))
    check_plan(plan)
    return plan


def split(sets: Sequence[Sequence[Question]], mode: Mode, shares: Sequence[float], seed: int) -> dict[str, list[Item]]:
    """Give every group one purpose; outside discovery a group gives one item, so that the exact test's items are apart.

    Of two sets, which share no group, the first is for discovery and the second for the other parts.

    Raises:
        DataError: a part that is needed is empty.
    """
    parts: dict[str, list[Item]] = {part: [] for part in PARTS}
    part_of = {question.group: "discovery" for questions in sets[:-1] for question in questions}
    shares = [shares[0] if len(sets) == 1 else 0.0, *shares[1:]]
    groups = sorted({q.group for q in sets[-1]}, key=lambda group: uniform("part", seed, group))
    bounds = [round(sum(shares[: k + 1]) / (sum(shares) or 1.0) * len(groups)) for k in range(len(shares))]
    part_of |= {g: PARTS[min(sum(k >= bound for bound in bounds), 3)] for k, g in enumerate(groups)}
    taken: set[str] = set()
    every = [question for questions in sets for question in questions]
    for question in sorted(every, key=lambda q: uniform("turn", seed, q.id)):
        part = part_of[question.group]
        if part != "discovery" and question.group in taken:
            continue
        taken.add(question.group)
        parts[part].append(item_of(question, mode))
    for part in PARTS[:3]:
        if not parts[part]:
            raise DataError(f"discover: no item is left for {part} of {len(every)} pairs; give more, or other shares")
    return parts


class Round(NamedTuple):
    """What one round did, in counts."""

    number: int
    items: int
    rewrite_faults: dict[str, int]
    unreadable: int
    misjudged: int
    named: int
    not_named: dict[str, int]
    distinct: int
    merge_calls: int
    published_merge_calls: int
    tested: int
    accepted: int


class Search(NamedTuple):
    """What the search came to."""

    library: list[Bias]
    candidates: list[Candidate]
    probes: list[Probe]
    rounds: list[Round]
    stop: str


def search(
    trial: Trial, seeds: Sequence[Bias], parts: dict[str, list[Item]], plan: Plan, cfg: DiscoverConfig
) -> Search:
    """Run rounds until nothing is validated, nothing new is named, or max_iterations."""
    found = Search(list(seeds), [], [], [], "")
    held: list[Found] = []  # late validation: candidates wait here, and are written in meanwhile
    stop = "max_iterations"
    for number in range(1, cfg.max_iterations + 1):
        items = parts["discovery"][number - 1 :: cfg.max_iterations]  # every round has items of its own
        if not items:
            stop = "no items left"
            break
        tested = [c.bias for c in found.candidates if c.fate == "not accepted"]
        known = [*found.library, *(f.bias for f in held)]
        new, counted = one_round(trial, known, tested, items, number, cfg, found.candidates)
        if cfg.validation == "late":
            held += new
            found.rounds.append(counted)
            if not new:
                stop = "library unchanged"
                break
            continue
        accepted = test(trial, new, parts["selection"], plan, cfg.alpha / cfg.max_iterations, cfg.acceptance, found)
        found.rounds.append(counted)
        found.library.extend(accepted)
        if not accepted:
            stop = "library unchanged" if not new else "nothing validated"
            break
    if cfg.validation == "late":
        found.library.extend(test(trial, held, parts["selection"], plan, cfg.alpha, cfg.acceptance, found))
    of = Counter(c.round for c in found.candidates if c.fate == "accepted")
    return found._replace(rounds=[r._replace(accepted=of[r.number]) for r in found.rounds], stop=stop)


def one_round(
    trial: Trial, library: Sequence[Bias], rejected: Sequence[Bias], items: Sequence[Item], number: int,
    cfg: DiscoverConfig, told: list[Candidate],
) -> tuple[list[Found], Round]:  # fmt: skip
    """Write biases in, judge, let the wrong decisions be explained and named, merge; returns what is to be tested.

    What an earlier round tested and rejected is known, so that no candidate meets the selection items twice.
    """
    assigned = assign(library, items, cfg.seed + number)
    plain = trial.plain(items) if trial.mode == "pointwise" else [None] * len(items)
    shots = trial.biased(assigned)
    wrong = [
        (shot, before) for (item, _), before, shot in zip(assigned, plain, shots, strict=True)
        if shot.decided is not None and trial.wrong(item, shot.decided, before)
    ]  # fmt: skip
    views = [(shot.item, preferred(shot.item, shot.decided)) for shot, _ in wrong if shot.decided is not None]
    grounds = explained(trial.judge, views, cfg.explain_tokens) if cfg.deeper else [()] * len(views)
    names, rejects = named(trial.judge, trial.writer, views, grounds, cfg.explain_tokens)
    outcome = merged(trial.writer, names, library, number, rejected)
    told.extend(outcome.same)
    kept, rest = outcome.new[: cfg.max_candidates], outcome.new[cfg.max_candidates :]
    told.extend(
        Candidate(bias=f.bias, round=number, support=f.support, fate="not tested", reason="max_candidates")
        for f in rest
    )
    counted = Round(
        number, len(items), dict(Counter(s.rewritten.fault for s in shots if s.rewritten.fault)),
        sum(s.decided is not None and s.decided.outcome.kind == "unreadable" for s in shots), len(wrong), len(names),
        rejects, len(outcome.new) + len(outcome.same), outcome.calls, outcome.published_calls, len(kept), 0,
    )  # fmt: skip
    return kept, counted


def preferred(item: Item, judgement: Judgement) -> Judgement:
    """Say a score that rose as the choice that it amounts to: the wrong answer."""
    if judgement.outcome.kind != "score":
        return judgement
    return judgement.model_copy(update={"outcome": Outcome(kind="choice", choice=1 - gold_of(item))})


def assign(library: Sequence[Bias], items: Sequence[Item], seed: int) -> list[tuple[Item, Bias]]:
    """Give every item one bias from a shuffled pool in which each occurs equally often (arXiv 2602.09383, step 1)."""
    usable = [bias for bias in library if bias.operator is not None]
    if not usable:
        raise DataError("discover: no bias of the library has an operator, so nothing can be written in")
    turns = sorted(range(len(items)), key=lambda k: uniform("assign", seed, items[k].id))
    return [(items[k], usable[turn % len(usable)]) for turn, k in enumerate(turns)]


def test(
    trial: Trial, new: Sequence[Found], items: Sequence[Item], plan: Plan, alpha: float, acceptance: str, found: Search
) -> list[Bias]:
    """Test candidates on the selection items, note what became of them, and return the accepted ones."""
    if not new:
        return []
    biases = {entry.bias.id: entry.bias for entry in new}
    seen: list[Probe] = []

    def observe(active: Sequence[str], start: int, stop: int) -> dict[str, Counts]:
        probes = trial.probe([(item, biases[name]) for name in active for item in items[start:stop]], "selection")
        seen.extend(probes)
        return {name: counts_of([probe for probe in probes if probe.bias == name]) for name in active}

    tested = validate(list(biases), len(items), observe, plan, alpha)
    found.probes.extend(seen)
    accepted = []
    for entry in new:
        result = tested[entry.bias.id]
        own = [probe for probe in seen if probe.bias == entry.bias.id]
        good, reason = (
            larger_error(own)
            if acceptance == "paper"
            else (result.adjusted <= alpha and result.counts.n > 0, told(result))
        )
        if good:
            accepted.append(entry.bias)
        found.candidates.append(
            Candidate(
                bias=entry.bias, round=entry.round, support=entry.support, reason=reason,
                fate="accepted" if good else "not accepted", p=None if acceptance == "paper" else result.adjusted,
                looks=result.looks,
            )
        )  # fmt: skip
    return accepted


def told(result: Tested) -> str:
    """Say how a test ended."""
    words = {
        "clear": "clear",
        "futile": "stopped: no chance left",
        "end": "all items seen",
        "no items": "no usable rewrite",
    }
    return f"{words[result.fate]} after {result.counts.n} items ({result.counts.harm} harm, {result.counts.gain} gain)"


def counts_of(probes: Sequence[Probe]) -> Counts:
    """Count harm and gain; an item whose rewrite failed is no item."""
    usable = [probe for probe in probes if probe.fault is None]
    return Counts(sum(p.effect == "harm" for p in usable), sum(p.effect == "gain" for p in usable), len(usable))


def larger_error(probes: Sequence[Probe]) -> tuple[bool, str]:
    """Apply the published rule: the error over readable replies rose, by however little (arXiv 2602.09383)."""
    plain = [p.plain for p in probes if p.fault is None and p.plain is not None]
    biased = [p.biased for p in probes if p.biased is not None]
    if not plain or not biased:
        return False, "no readable reply"
    before, after = 1 - sum(plain) / len(plain), 1 - sum(biased) / len(biased)
    return after > before, f"published rule: error {before:.3f} -> {after:.3f}"


def with_evidence(
    library: Sequence[Bias], probes: Sequence[Probe], candidates: Sequence[Candidate], judge: str, writer: str,
    mode: Mode,
) -> list[Bias]:  # fmt: skip
    """Write into each accepted bias what the effect items showed: items that had no part in choosing it."""
    chosen = {c.bias.id: c for c in candidates if c.fate == "accepted"}
    done = []
    for bias in library:
        own = [probe for probe in probes if probe.bias == bias.id and probe.fault is None]
        if not own:
            done.append(bias)
            continue
        counts = counts_of(own)
        rate = paired_difference(counts.harm, counts.gain, counts.n)
        evidence = Evidence(
            judge=judge, n=counts.n, harm=counts.harm, gain=counts.gain,
            effect=rate.value, low=rate.low, high=rate.high,
            p=chosen[bias.id].p, looks=chosen[bias.id].looks,
            # a score by itself is neither right nor wrong: only its rise is
            error_plain=None if mode == "pointwise" else sum(x.plain is not True for x in own) / len(own),
            error_biased=sum(x.biased is not True for x in own) / len(own),
            unreadable=sum(x.biased is None for x in own),
        )  # fmt: skip
        operator = bias.operator.model_copy(update={"author": writer}) if bias.operator else None
        done.append(bias.model_copy(update={"evidence": evidence, "operator": operator}))
    return done
