"""Compare a base model with what DPO made of it: as a prompted judge, and by the reward it came to hold implicitly.

In: `test.jsonl` (Preference) and the dpo stages of some runs, for example plain DPO and DPO with biases written in.
Out: `judgements.jsonl` (Judgement), tables per bias and domain; plain pairs show whether anything got worse. Runs that
differ in their seed alone are one arm: arms are compared over their seeds together.

    rbd before_after from=data 'runs=[plain-0,augmented-0,plain-1,augmented-1]'
    rbd before_after from=data 'runs=[plain,augmented]' judge=generative engine@judge.engine=local
"""

import dataclasses
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from rbd_train.acceptance import holm
from rbd_train.app import BaseConfig, stage
from rbd_train.errors import DataError, UsageError
from rbd_train.judge import Shown
from rbd_train.manifest import read_manifest
from rbd_train.metrics import Paired, Rate, mean_rate, paired_change, paired_test
from rbd_train.modelling import resolve_model
from rbd_train.records import Item, Judgement, Preference, Reward, uniform
from rbd_train.run import Cell, Run, Table
from rbd_train.store import fingerprint


@dataclass
class BeforeAfterConfig(BaseConfig):
    """Settings of before_after."""

    runs: list[str] = field(default_factory=list)  # runs whose stage dpo is compared; the base is what they began with
    test: str | None = None  # path of the held-out pairs; default: the output of stage preferences
    judge: Any = None  # how a model is asked; its engine's model is replaced by each one's
    prompted: bool = True  # ask the models as judges, in both orders; false: implicit rewards alone


class Row(NamedTuple):
    """One held-out pair under one model: right or wrong, once per order for a prompted judge, None if unreadable."""

    pair: Preference
    right: bool | None


Methods = Mapping[str, Sequence[Row]]
Arms = Mapping[str, Sequence[str]]  # what is compared, and its runs: one per seed, in the order of the seeds
HEADLINES = ("plain", "with a bias")


@stage("before_after", BeforeAfterConfig)
def main(cfg: BeforeAfterConfig, run: Run) -> float | None:
    """Judge with every model, read the rewards, compare pair by pair."""
    if not cfg.runs:
        raise UsageError("runs is empty; name the runs to compare: 'runs=[plain,augmented]'")
    if "base" in cfg.runs or len(set(cfg.runs)) < len(cfg.runs):
        raise UsageError(f"runs is {cfg.runs}; name each run once, and none base: what they began with is called so")
    path = Path(cfg.test) if cfg.test else run.output_of("preferences", "test.jsonl")
    pairs = run.read(path, Preference)
    rewards = {name: run.read(run.output_of("dpo", "rewards.jsonl", name), Reward) for name in cfg.runs}
    compared, base = arms(run, cfg.runs), base_of(run, cfg.runs)
    implicit = implicit_rows(pairs, rewards)
    prompted: dict[str, list[Row]] = {}
    if cfg.prompted:
        judgements = []
        models = {"base": resolve_model(base)} | {name: str(run.root / name / "dpo" / "model") for name in cfg.runs}
        for name, model in models.items():
            decided = ask(cfg.judge, name, model, pairs, run)
            both = zip(pairs, decided, strict=True)
            prompted[name] = [Row(pair, j.right(gold_of(pair))) for pair, judged in both for j in judged]
            judgements += [judgement for judged in decided for judgement in judged]
        run.write("judgements.jsonl", judgements)
    for title, methods in (("prompted", prompted), ("implicit", implicit)):
        if methods:
            run.table(errors_table(title, methods, base))
            if any(row.right is None for rows in methods.values() for row in rows):
                run.table(readable_table(title, methods))
            run.table(changes_table(title, methods, compared))
            if any(len(names) > 1 for names in compared.values()):
                run.table(seeds_table(title, methods, compared))
        for name, rows in methods.items():
            for kind in ("plain", "biased"):
                part = [row for row in rows if (row.pair.bias is None) == (kind == "plain")]
                run.figure(f"before_after.{title}.{kind}.{name}", error(part))
    return error(implicit[cfg.runs[-1]]).value


def base_of(run: Run, names: Sequence[str]) -> str:
    """Return what all runs began with.

    Raises:
        DataError: they did not begin with the same model.
    """
    bases = dict[str, str]()
    for name in names:
        manifest = read_manifest(run.root / name / "dpo")
        assert manifest is not None  # its rewards were read
        bases[name] = manifest["config"]["model"]["path"]
    if len(set(bases.values())) > 1:
        raise DataError(f"before_after: the runs began with other models: {bases}; compare runs of one base")
    return next(iter(bases.values()))


def arms(run: Run, names: Sequence[str]) -> dict[str, list[str]]:
    """Put runs together that differ in their seed alone; where not all arms have the same seeds, each run is one."""
    seeds, alike = dict[str, int](), dict[str, list[str]]()
    for name in names:
        manifest = read_manifest(run.root / name / "dpo")
        assert manifest is not None  # its rewards were read
        config, data = manifest["config"], [entry["sha256"] for entry in manifest["inputs"].values()]
        seeds[name] = config["seed"]
        key = fingerprint([data, *(config[setting] for setting in ("model", "trainer", "plain_only"))])
        alike.setdefault(key, []).append(name)
    found = [sorted(members, key=lambda name: seeds[name]) for members in alike.values()]
    drawn = [[seeds[name] for name in members] for members in found]
    if any(have != drawn[0] or len(set(have)) < len(have) for have in drawn):
        return {name: [name] for name in names}
    named = {re.sub(r"[-_. ]+\d*$", "", os.path.commonprefix(members)): members for members in found}
    told = len(drawn[0]) > 1 and len(named) == len(found) and not {"", "base"} & set(named)
    return named if told else {"+".join(members): members for members in found}


def implicit_rows(pairs: Sequence[Preference], rewards: Mapping[str, Sequence[Reward]]) -> dict[str, list[Row]]:
    """Say which pairs each run's implicit reward orders rightly, and which the base's log-probability does.

    Raises:
        DataError: the runs measured other pairs.
    """
    by_id = {pair.id: pair for pair in pairs}
    ids = {name: {reward.id for reward in found} for name, found in rewards.items()}
    common = set.intersection(*ids.values())
    if not common or any(found != common for found in ids.values()) or not common <= set(by_id):
        raise DataError("before_after: the runs measured other held-out pairs; give them the same preferences")
    first = next(iter(rewards.values()))
    rows = {"base (log-probability)": [Row(by_id[r.id], r.reference_margin > 0) for r in sorted(first, key=_id)]}
    for name, found in rewards.items():
        rows[name] = [Row(by_id[r.id], r.margin > 0) for r in sorted(found, key=_id)]
    return rows


def ask(config: Any, name: str, model: str, pairs: Sequence[Preference], run: Run) -> list[tuple[Judgement, Judgement]]:
    """Let a model judge every pair in both orders."""
    if not hasattr(getattr(config, "engine", None), "model"):
        raise UsageError(
            f"judge {config.name!r} asks no model that the trained ones could replace; choose judge=embedded, or "
            "judge=generative engine@judge.engine=local, or prompted=false"
        )
    engine = dataclasses.replace(config.engine, model=model)
    judge = dataclasses.replace(config, engine=engine, name=name).open(run.ledger)
    items = [item_of(pair) for pair in pairs]
    with judge.engine:
        judged = judge.judge([Shown(item, order) for item in items for order in ((0, 1), (1, 0))])
    run.facts[f"calls of {name}"] = judge.engine.calls
    return list(zip(judged[::2], judged[1::2], strict=True))


def item_of(pair: Preference) -> Item:
    """Lay a pair out; the gold side is drawn from its id."""
    answers = (pair.chosen[-1].content, pair.rejected[-1].content)
    gold = gold_of(pair)
    return Item(
        id=pair.id, question=pair.prompt[-1].content, options=answers if gold == 0 else answers[::-1], gold=gold,
        group=pair.group, domain=pair.domain,
    )  # fmt: skip


def gold_of(pair: Preference) -> int:
    """Draw the side of the chosen answer."""
    return int(uniform("gold side", pair.id) < 0.5)


def error(rows: Sequence[Row]) -> Rate:
    """Return the share of wrong rows; unreadable counts as wrong."""
    return mean_rate([float(row.right is not True) for row in rows], [row.pair.group for row in rows])


def parts(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Sort rows: without a bias, with one, then by bias and by domain."""
    found = {"plain": [r for r in rows if r.pair.bias is None], "with a bias": [r for r in rows if r.pair.bias]}
    for bias in sorted({row.pair.bias for row in rows if row.pair.bias}):
        found[f"bias: {bias}"] = [row for row in rows if row.pair.bias == bias]
    domains = sorted({row.pair.domain for row in rows})
    for domain in domains if len(domains) > 1 else []:
        found[f"domain: {domain or '(none)'}"] = [row for row in rows if row.pair.domain == domain]
    return {name: part for name, part in found.items() if part}


def errors_table(title: str, methods: Methods, base: str) -> Table:
    """Show the error of every model, without and with a bias, per bias and domain."""
    split = {name: parts(rows) for name, rows in methods.items()}
    first = next(iter(split.values()))
    rows: list[tuple[Cell, ...]] = []
    for part in first:
        unreadable = sum(row.right is None for found in split.values() for row in found[part])
        rows.append((part, len(first[part]), *(error(found[part]) for found in split.values()), unreadable))
    told = {
        "prompted": "Each pair is judged in both orders; unreadable replies count as wrong.",
        "implicit": "Right where chosen gained more over the reference than rejected; the base has gained nothing, "
        "so that its own log-probabilities stand beside.",
    }[title]
    columns = ("pairs", "rows", *methods, "unreadable, all models")
    note = f"{told} All began with {base}."
    return Table(name=f"before_after_{title}", title=f"Error, {title}", columns=columns, rows=tuple(rows), note=note)


def readable_table(title: str, methods: Methods) -> Table:
    """Show the error of every model over the replies that can be read alone, with the share that can."""
    split = {name: parts(rows) for name, rows in methods.items()}
    rows: list[tuple[Cell, ...]] = []
    for part in next(iter(split.values())):
        cells: list[Cell] = []
        for found in split.values():
            read = [row for row in found[part] if row.right is not None]
            cells += [error(read), len(read) / len(found[part])]
        rows.append((part, *cells))
    columns = ("pairs", *(word for name in methods for word in (name, f"{name}: coverage")))
    note = "Replies that can't be read are left out; models that are read less often are not compared on equal rows."
    name, told = f"before_after_{title}_readable", f"Error over readable replies, {title}"
    return Table(name=name, title=told, columns=columns, rows=tuple(rows), note=note)


def changes_table(title: str, methods: Methods, compared: Arms) -> Table:
    """Compare arms pair by pair, all seeds together, per bias and domain too: exact tests, Holm in two families."""
    lists = with_base(methods, compared)
    names = list(lists)
    found = []
    for a, b in [(names[i], names[j]) for i in range(len(names)) for j in range(i + 1, len(names))]:
        first, second = (parts([row for name in lists[arm] for row in methods[name]]) for arm in (a, b))
        found += [(f"{a} -> {b}", kind, first[kind], second[kind]) for kind in first]
    tests = [_paired(first, second) for *_, first, second in found]
    adjusted: dict[int, float | None] = {}
    for headline in (True, False):
        family = [k for k, (_, kind, *_) in enumerate(found) if (kind in HEADLINES) == headline]
        adjusted |= dict(zip(family, holm([tests[k].p for k in family]), strict=True))
    rows: list[tuple[Cell, ...]] = []
    for k, ((models, kind, old, new), test) in enumerate(zip(found, tests, strict=True)):
        change, groups = _change(old, new), len({row.pair.group for row in old})
        rows.append((models, kind, test.n, groups, change, test.only_second, test.only_first, test.p, adjusted[k]))
    columns = (
        "models", "pairs", "rows", "questions", "change of the error", "mended", "broken", "p (McNemar)", "p (Holm)",
    )  # fmt: skip
    seeds = max(len(members) for members in compared.values())
    note = (
        "A negative change is fewer errors. Tests and intervals go by question, however many rows it has. Holm: over "
        "the rows plain and with a bias, and over those per bias and domain."
        + (
            " The base's row asks another thing, its own log-probability: a change from it is no gain of training."
            if title == "implicit"
            else ""
        )
        + (f" Each arm is {seeds} runs that differ in their seed, paired seed by seed." if seeds > 1 else "")
    )
    name = f"before_after_{title}_paired"
    return Table(name=name, title=f"Models compared, {title}", columns=columns, rows=tuple(rows), note=note)


def seeds_table(title: str, methods: Methods, compared: Arms) -> Table:
    """Show the changes of every seed by itself: what questions alone can't say is how far seeds differ."""
    lists = with_base(methods, compared)
    names = list(lists)
    rows: list[tuple[Cell, ...]] = []
    for a, b in [(names[i], names[j]) for i in range(len(names)) for j in range(i + 1, len(names))]:
        for before, after in zip(lists[a], lists[b], strict=True):
            old, new = parts(methods[before]), parts(methods[after])
            for kind in HEADLINES:
                if kind in old:
                    rows.append((f"{before} -> {after}", kind, len(old[kind]), _change(old[kind], new[kind])))
    columns = ("models", "pairs", "rows", "change of the error")
    note = "Not tested one by one: the table above tests all seeds together."
    name = f"before_after_{title}_seeds"
    return Table(name=name, title=f"Seed by seed, {title}", columns=columns, rows=tuple(rows), note=note)


def with_base(methods: Methods, compared: Arms) -> dict[str, list[str]]:
    """Return the arms with the base before them, as often as they have seeds."""
    base = next(iter(methods))
    return {base: [base] * max(len(members) for members in compared.values())} | {k: [*v] for k, v in compared.items()}


def _paired(first: Sequence[Row], second: Sequence[Row]) -> Paired:
    groups = [row.pair.group for row in first]
    return paired_test([row.right is True for row in first], [row.right is True for row in second], groups)


def _change(first: Sequence[Row], second: Sequence[Row]) -> Rate:
    before, after = ([row.right is not True for row in rows] for rows in (first, second))
    return paired_change(before, after, [row.pair.group for row in first])


def _id(reward: Reward) -> str:
    return reward.id
