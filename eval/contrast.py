"""Score texts in several ranges by a main model and a smaller relative, and measure contrast beside cheap rivals.

In: a source of texts with people's scores (`conf/source`). Out: `scores.jsonl` (ScoreRow: log-probabilities of every
score by both models, so that every setting is arithmetic), tables.

    rbd contrast source=summeval source.path=summeval_dev.json
    rbd contrast source=newsroom source.path=newsroom.json 'ranges=[1-5,2-6,1-10]' choose=cross
    rbd contrast experiment=contrast_llama_8b_1b launch=ddp processes=8
"""

import resource
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eval.contrast_methods import CONTRAST, GREEDY, MAIN, PRIOR, Scored, Texts, score_all
from eval.contrast_tables import (
    chosen_table,
    cost_table,
    curve_table,
    grid_table,
    histogram_table,
    methods_table,
    named,
    pooled_table,
    published_table,
    quality,
    ranges_table,
    rows_table,
    stability,
    stability_table,
)
from rbd_train.app import BaseConfig, stage
from rbd_train.contrast import CONTENT_FREE, TEMPERATURES, Setting, check_mode, decide, setting_of
from rbd_train.engine import Engine, Family
from rbd_train.errors import DataError
from rbd_train.exchange import ChoiceLogprobs
from rbd_train.prompts.direct import read_template, with_criteria
from rbd_train.records import Graded, ScoreRow, uniform
from rbd_train.run import Run, Table
from rbd_train.scoring import Question, Range, ask, check_family, parse_ranges, questions, rows_of


@dataclass
class ContrastConfig(BaseConfig):
    """Settings of contrast."""

    source: Any = None  # texts with people's scores
    main: Any = None  # engine of the model whose scores are wanted
    assistant: Any = None  # engine of a smaller model with the same tokenizer
    ranges: list[str] = field(default_factory=list)  # integer ranges, such as 1-5
    mode: str = "paper"  # paper (temperature on the assistant), or as_released (what the published code does)
    strength: float = 0.5  # lambda
    temperature: float = 1.0  # t; for one-token scores in paper mode only strength / temperature matters
    alpha: float | None = None  # cut tokens less likely than alpha times the main model's best; null: no cut
    choose: str = "fixed"  # fixed: as above; split: on a development split; cross: on the other folds
    per_range: bool = False  # choose a setting for each range by itself, as published
    dev_share: float = 0.1  # share of documents of the development split
    prompt: str | None = None  # file of a prompt of one's own, with $name placeholders; null: ours
    criteria: str | None = None  # YAML file of one's own criteria and steps, by dimension; null: ours
    spaced: str = "auto"  # count a score with a space before it: auto (where that is one token), always, never
    context: int | None = None  # tokens of a prompt at most; a longer document is cut; null: what the models allow
    limit: int | None = None  # documents; null: all
    published: dict[str, float] = field(default_factory=dict)  # published figures to stand beside ours


@stage("contrast", ContrastConfig)
def main(cfg: ContrastConfig, run: Run) -> float | None:
    """Ask both models once, decide every setting by arithmetic, compare."""
    setting = setting_of(cfg.mode, cfg.strength, cfg.temperature, cfg.alpha)
    spans, template = parse_ranges(cfg.ranges), read_template(cfg.prompt)
    items = with_criteria(texts_of(cfg.source, cfg.seed, cfg.limit, run), cfg.criteria)
    with cfg.main.open(run.ledger) as model, cfg.assistant.open(run.ledger) as assistant:
        families = (model.family(), assistant.family())
        notes = check_family(*families, spans)
        check_mode(setting, families)
        temperatures = tuple(sorted({*TEMPERATURES, setting.temperature}))
        asked = questions([*items, *content_free(items)], spans, families, template, cfg.spaced, cfg.context)
        said = [
            timed(engine, asked, temperatures, name, run)
            for name, engine in (("main", model), ("assistant", assistant))
        ]
    if not run.main:
        return None
    rows = rows_of(asked, said[0], said[1], temperatures)
    run.write("scores.jsonl", rows)
    texts = by_range(items, rows, spans)
    scored = score_all(texts, setting, cfg.choose, cfg.dev_share, cfg.per_range)
    run.facts["setting"] = named(setting, cfg.choose)
    show(run, texts, scored, setting, cfg.published)
    show_asked(run, texts, rows, setting, notes, families)
    return summarise(run, texts, scored, setting)


def texts_of(source: Any, seed: int, limit: int | None, run: Run) -> list[Graded]:
    """Read the source; a limit draws documents by a hash, so that a larger one keeps the smaller one's."""
    loaded = source.load(seed)
    for path in loaded.files:
        run.note_input(Path(path), len(loaded.graded))
    run.facts["licence"] = loaded.licence
    if not loaded.graded:
        raise DataError("contrast: the source holds no texts with scores; choose source=summeval, newsroom or graded")
    groups = sorted({item.group for item in loaded.graded}, key=lambda g: uniform("limit", g))
    kept = set(groups[:limit])
    return [item for item in loaded.graded if item.group in kept]


def content_free(items: Sequence[Graded]) -> list[Graded]:
    """Make, per dimension, the texts without content that show a range's prior."""
    first = {item.dimension: item for item in reversed(items)}
    return [
        item.model_copy(
            update={"id": f"content-free-{k}-{dimension}", "group": "content-free", "document": text, "text": text,
                    "reference": None, "human": None}
        )
        for dimension, item in first.items() for k, text in enumerate(CONTENT_FREE)
    ]  # fmt: skip


def timed(
    engine: Engine, asked: Sequence[Question], temperatures: Sequence[float], name: str, run: Run
) -> list[ChoiceLogprobs]:  # fmt: skip
    """Ask one model, then free it; several processes share the calls and meet in the ledger."""
    started = time.perf_counter()
    said = ask(engine, asked, temperatures)
    engine.backend.close()
    seconds = round(time.perf_counter() - started, 3)
    where, most = peak_memory()
    run.facts |= {
        f"{name} calls": dict(engine.calls), f"{name} seconds": seconds, f"{name} peak MB": most, "memory": where,
    }  # fmt: skip
    return said


def peak_memory() -> tuple[str, int | None]:
    """Return whose memory is counted and its most in MB: tensors on the GPU since the last call, or this process's.

    None: nothing was computed on the GPU, since the ledger held it all, or by another process (vLLM).
    """
    torch: Any = sys.modules.get("torch")  # a run over HTTP never loads it
    if torch is None or not torch.cuda.is_available():
        return "host", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    most = int(torch.cuda.max_memory_allocated()) // 2**20
    if torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats()
    return "GPU", most or None


def by_range(items: Sequence[Graded], rows: Sequence[ScoreRow], spans: Sequence[Range]) -> Texts:
    """Arrange rows by range in the order of the texts, the content-free ones apart."""
    found = {(row.item_id, row.low, row.high): row for row in rows if row.fault is None}
    empty: dict[tuple[str, Range], list[ScoreRow]] = {}
    for row in found.values():
        if row.group == "content-free":
            empty.setdefault((row.dimension, Range(row.low, row.high)), []).append(row)
    return Texts(list(items), {span: [found.get((i.id, *span)) for i in items] for span in spans}, empty)


def show(run: Run, texts: Texts, scored: Scored, setting: Setting, published: Mapping[str, float]) -> None:
    """Show agreement, stability and the sweep; what is of one setting says so in its title, as its plot does."""
    for table in (
        methods_table(texts, scored), pooled_table(texts, scored), ranges_table(texts, scored),
        stability_table(texts, scored), histogram_table(texts, scored),
    ):  # fmt: skip
        run.table(titled(table, run))
    run.table(curve_table(texts, scored, setting))
    run.table(grid_table(texts, scored, setting))
    if scored.chosen:
        run.table(titled(chosen_table(scored), run))
    if published:
        run.table(titled(published_table(texts, scored, published), run))


def show_asked(
    run: Run, texts: Texts, rows: Sequence[ScoreRow], setting: Setting, notes: Sequence[str],
    families: Sequence[Family | None],
) -> None:  # fmt: skip
    """Show what was asked, and what it cost; the contrast is timed by itself, without its rivals and the choosing."""
    run.table(titled(rows_table(texts, rows, setting, notes), run))
    started = time.perf_counter()
    for span in texts.rows:
        texts.every(span, lambda row: decide(row, setting).expected)
    run.table(titled(cost_table(run.facts, families, time.perf_counter() - started), run))


def titled(table: Table, run: Run) -> Table:
    """Name the run's setting in a table's title."""
    return table.model_copy(update={"title": f"{table.title}: {run.facts['setting']}"})


def summarise(run: Run, texts: Texts, scored: Scored, setting: Setting) -> float | None:
    """Keep the headline figures: mean Spearman per document over ranges and dimensions, and its stability."""
    contrast = f"contrast_{setting.mode}"
    for key, method in {"greedy": GREEDY, "main": MAIN, contrast: CONTRAST, "prior": PRIOR}.items():
        run.figure(f"contrast.spearman.{key}", quality(texts, scored, method))
        run.figure(f"contrast.disagreement.{key}", stability(texts, scored, method))
    return run.summary[f"contrast.spearman.{contrast}"].value
