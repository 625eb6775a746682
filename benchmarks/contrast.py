"""Seconds for four ranges and the 24-point grid, against plain transformers and against the published procedure.

    python benchmarks/contrast.py          # SmolLM2-135M and half of its layers
    python benchmarks/contrast.py quick    # a smaller job, under a minute on two free cores

Both sides answer the same prompts, in the same weights and dtype. Rival (a) computes each model's last-position logits
once per text and range, length-sorted, left-padded, at the best of several batch sizes, and does the same arithmetic.
Rival (b) is the published procedure (arXiv 2510.18196): for every grid point anew, both models on every prompt.
"""

import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from rbd_train.contrast import TEMPERATURES, decide, paper_grid
from rbd_train.engines.local import LocalEngine
from rbd_train.ledger import Ledger
from rbd_train.modelling import encode_context, load_model, load_tokenizer, pad_id, resolve_model
from rbd_train.records import Graded
from rbd_train.relative import kept_layers, without_layers
from rbd_train.scoring import Question, ask, parse_ranges, questions, rows_of

RANGES = ("0-4", "1-5", "2-6", "3-7")
WORDS = [
    "the",
    "a",
    "of",
    "to",
    "in",
    "and",
    "city",
    "river",
    "team",
    "plan",
    "report",
    "says",
    "that",
    "will",
    "new",
    "first",
    "year",
    "after",
    "people",
    "week",
    "game",
]


def texts(documents: int, systems: int, words: int) -> list[Graded]:
    """Make SummEval's shape: documents, each with several systems' summaries."""
    generator = random.Random(0)

    def some(count: int) -> str:
        return " ".join(generator.choice(WORDS) for _ in range(count)) + "."

    found = []
    for d in range(documents):
        document = some(words)
        found += [
            Graded(id=f"{d}-{s}", group=str(d), document=document, text=some(60), dimension="coherence")
            for s in range(systems)
        ]
    return found


def ours(models: Sequence[str], asked: Sequence[Question], dtype: str) -> tuple[float, list[list[int | None]]]:
    """Read every score by the trie, then decide the grid; loading isn't timed, the ledger is."""
    with tempfile.TemporaryDirectory() as folder:
        engines = [
            LocalEngine(model=m, dtype=dtype).open(Ledger(Path(folder) / f"{k}.sqlite")) for k, m in enumerate(models)
        ]
        for engine in engines:
            engine.backend._load()  # type: ignore[attr-defined]
        start = time.perf_counter()
        said = [ask(engine, asked, TEMPERATURES) for engine in engines]
        rows = rows_of(asked, said[0], said[1], TEMPERATURES)
        decisions = [[decide(row, setting).argmax for setting in paper_grid()] for row in rows]
        return time.perf_counter() - start, decisions


class Plain:
    """Plain transformers: the logits after every prompt, batched."""

    def __init__(self, model: str, dtype: str) -> None:
        self.tokenizer, self.model = load_tokenizer(model, False), load_model(model, dtype)
        self.model.train(False)

    def logits(self, asked: Sequence[Question], batch: int) -> torch.Tensor:
        ids = [encode_context(self.tokenizer, q.messages) for q in asked]
        order = sorted(range(len(ids)), key=lambda i: -len(ids[i]))
        found: dict[int, torch.Tensor] = {}
        with torch.inference_mode():
            for start in range(0, len(order), batch):
                part = order[start : start + batch]
                width = max(len(ids[i]) for i in part)
                fill = pad_id(self.tokenizer)
                rows = torch.tensor([[fill] * (width - len(ids[i])) + ids[i] for i in part])
                mask = torch.tensor([[0] * (width - len(ids[i])) + [1] * len(ids[i]) for i in part])
                places = (mask.cumsum(-1) - 1).clamp(min=0)
                out = self.model(input_ids=rows, attention_mask=mask, position_ids=places, logits_to_keep=1)
                found |= dict(zip(part, out.logits[:, -1].float(), strict=True))
        return torch.stack([found[i] for i in range(len(ids))])

    def digits(self, question: Question) -> list[int]:
        return [self.tokenizer.encode(t, add_special_tokens=False)[0] for t in question.choices.texts]


def once(models: Sequence[Plain], asked: Sequence[Question], batch: int) -> tuple[float, list[list[int | None]]]:
    """Be rival (a)."""
    start = time.perf_counter()
    main, assistant = (m.logits(asked, batch) for m in models)
    decisions: list[list[int | None]] = [[] for _ in asked]
    alone, digits = main.log_softmax(-1), [models[0].digits(q) for q in asked]
    for setting in paper_grid():
        values = alone - setting.strength * (assistant / setting.temperature).log_softmax(-1)
        for k, q in enumerate(asked):
            decisions[k].append(q.range.low + int(values[k, digits[k]].argmax()))
    return time.perf_counter() - start, decisions


def published(models: Sequence[Plain], asked: Sequence[Question], batch: int) -> float:
    """Time one grid point of rival (b): both models on every prompt, combined over the whole vocabulary."""
    start = time.perf_counter()
    main, assistant = (m.logits(asked, batch) for m in models)
    (main.log_softmax(-1) - 0.5 * assistant.log_softmax(-1)).argmax(-1).tolist()
    return time.perf_counter() - start


def equal(models: Sequence[str], asked: Sequence[Question]) -> float:
    """Return the share of equal decisions of ours and of rival (a) in float32, where both are sure of theirs."""
    _, mine = ours(models, asked, "float32")
    _, theirs = once([Plain(model, "float32") for model in models], asked, 4)
    pairs = [(a, b) for x, y in zip(mine, theirs, strict=True) for a, b in zip(x, y, strict=True)]
    return sum(a == b for a, b in pairs) / len(pairs)


def best_batch(run: Callable[[int], Any], sizes: Sequence[int]) -> int:
    """Time the same prompts in batches of each size, after a warm-up."""
    run(sizes[-1])
    times = {}
    for size in sizes:
        start = time.perf_counter()
        run(size)
        times[size] = time.perf_counter() - start
    return min(times, key=lambda size: times[size])


def main() -> None:
    quick = "quick" in sys.argv[1:]
    torch.set_num_threads(2)
    dtype = "bfloat16"
    source = resolve_model("embedded")
    with tempfile.TemporaryDirectory() as folder:
        small = without_layers(load_model(source, dtype), kept_layers(30, 4 if quick else 15))
        small.save_pretrained(folder)
        load_tokenizer(source, False).save_pretrained(folder)
        models = (source, folder) if not quick else (folder, folder)
        items = texts(*((1, 3, 250) if quick else (4, 8, 450)))
        family = LocalEngine(model=source).open(Ledger(Path(folder) / "l.sqlite")).family()
        asked = questions(items, parse_ranges(RANGES), (family,))
        plain = [Plain(m, dtype) for m in models]
        share = equal(models, asked[: 16 if quick else 32])
        if share < 0.99:
            sys.exit(f"error: {share:.3f} of the decisions are those of plain transformers, in float32")
        batch = best_batch(lambda n: plain[0].logits(asked[:32], n), (4,) if quick else (1, 2, 4, 8, 16))
        runs = 2 if quick else 3
        mine, theirs, wide = list[float](), list[float](), list[float]()
        for _ in range(runs):
            seconds, decided = ours(models, asked, dtype)
            mine.append(seconds)
            seconds, other = once(plain, asked, batch)
            theirs.append(seconds)
            wide.append(24 * published(plain, asked, batch))
        same = sum(a == b for x, y in zip(decided, other, strict=True) for a, b in zip(x, y, strict=True))
        a, b, c = (statistics.median(values) for values in (mine, theirs, wide))
        print(f"{len(asked)} prompts, rival's batch {batch}; decisions equal: {same} of {24 * len(asked)} ({dtype})")
        print(
            json.dumps(
                {"name": "contrast", "ratio": b / a, "ours": a, "theirs": b, "unit": "s",
                 "rival": "plain transformers, last-position logits once per text and range", "runs": runs,
                 "ratios": {"plain transformers": b / a, "published procedure (one grid point times 24)": c / a},
                 "equal": share, "quick": quick}
            )
        )  # fmt: skip


if __name__ == "__main__":
    main()
