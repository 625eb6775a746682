"""What goes out with curated data: a card that says what it is, and rows in the columns that TRL reads."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rbd_train.prompts.detect import detect_messages
from rbd_train.records import Dropped, Example, Record
from rbd_train.run import Cell, Table


class TrlRow(Record):
    """A conversational prompt and completion, as TRL's SFTTrainer takes them."""

    prompt: list[dict[str, str]]
    completion: list[dict[str, str]]


def trl_rows(examples: Sequence[Example]) -> list[TrlRow]:
    """Render examples; the thinking stays in the completion, in tags, since templates may strip it elsewhere (A01)."""
    rows = []
    for example in examples:
        if example.trace is None or not example.trace.thinking:
            continue
        answer = f"<think>\n{example.trace.thinking}\n</think>\n\n{'Yes' if example.label else 'No'}"
        prompt: list[dict[str, str]] = [
            {"role": message["role"], "content": message["content"]} for message in detect_messages(example.case)
        ]
        rows.append(TrlRow(prompt=prompt, completion=[{"role": "assistant", "content": answer}]))
    return rows


def confounding_table(examples: Sequence[Example]) -> Table:
    """Count judges per bias: where each bias has one judge of its own, a judge's name gives the bias away."""
    cells = Counter((example.bias, example.case.judge) for example in examples)
    judges = sorted({judge for _, judge in cells})
    biases = sorted({bias for bias, _ in cells})
    rows: list[tuple[Cell, ...]] = [(bias, *(cells[bias, judge] for judge in judges)) for bias in biases]
    alone = [bias for bias in biases if sum(cells[bias, judge] > 0 for judge in judges) == 1]
    confounded = len(judges) > 1 and bool(alone)
    note = (
        f"{', '.join(alone)}: one judge each, so that what a detector knows of the judge can't be told from what it "
        "knows of the bias"
        if confounded
        else "no bias has a judge of its own"
    )
    return Table(name="curate_judges", title="Judges per bias", columns=("bias", *judges), rows=tuple(rows), note=note)


def card(
    train: Sequence[Example],
    test: Sequence[Example],
    dropped: Sequence[Dropped],
    facts: Mapping[str, Any],
    judges: Table,
) -> str:
    """Write the data card, in Markdown."""
    authors = sorted({example.trace.author for example in train if example.trace})
    template = any(example.trace and example.trace.provenance.get("template") for example in train)
    lines = [
        "# Bias-detection traces",
        "",
        "Cases of a judge's decisions, each with reasoning that ends in Yes (biased) or No.",
        "",
        f"- Licence of the source: {facts.get('licence') or 'unknown; it was not recorded, so it is not guessed'}",
        f"- Reasoning by: {', '.join(authors) or 'nobody'}{' (a template, not a model)' if template else ''}; "
        "a model's output is under its provider's terms too",
        f"- Training rows: {len(train)} ({sum(e.label for e in train)} Yes), test rows: {len(test)} "
        f"({sum(e.label for e in test)} Yes); no question is in both",
        f"- Left out: {len(dropped)} rows",
        *(f"  - {reason}: {count}" for reason, count in sorted(Counter(row.reason for row in dropped).items())),
        f"- Confounding: {judges.note}",
        "- Columns: `trl.jsonl` has TRL's conversational `prompt` and `completion`; `train.jsonl` and `test.jsonl` "
        "hold case, label, quadrant and trace",
        "",
        "| bias | train | Yes | test | Yes |",
        "|---|---|---|---|---|",
    ]
    for bias in sorted({example.bias for example in [*train, *test]}):
        parts = [[e for e in part if e.bias == bias] for part in (train, test)]
        lines.append("| " + " | ".join([bias, *(f"{len(p)} | {sum(e.label for e in p)}" for p in parts)]) + " |")
    return "\n".join(lines) + "\n"
