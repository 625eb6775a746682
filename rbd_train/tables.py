"""Tables in four dresses: for the terminal, as Markdown, CSV and LaTeX."""

import csv
import io
from collections.abc import Mapping
from typing import Any

from rbd_train.engine import Engine
from rbd_train.errors import DataError, printable
from rbd_train.metrics import Rate
from rbd_train.run import Cell, Table


def cell_text(cell: Cell) -> str:
    """Write a cell as a person reads it; undefined is a dash, never 0."""
    if cell is None:
        return "–"
    if isinstance(cell, Rate):
        if cell.value is None:
            return f"– (n={cell.n})"
        interval = "" if cell.low is None or cell.high is None else f" [{cell.low:.3f}, {cell.high:.3f}]"
        return f"{cell.value:.3f}{interval}"
    if isinstance(cell, float):
        return f"{cell:.3g}" if abs(cell) < 0.001 and cell else f"{cell:.3f}"
    return printable(str(cell))


def listed(values: Mapping[str, object]) -> str:
    """Say named values in a sentence: `a 1, b 2`; nothing where there are none."""
    return ", ".join(f"{name} {value}" for name, value in values.items()) or "nothing"


def counted(counts: Mapping[str, int]) -> str:
    """Say what was counted, what wasn't there passed over: `a: 1, b: 2`, or nothing."""
    return ", ".join(f"{reason}: {count}" for reason, count in sorted(counts.items()) if count) or "nothing"


def declared(judge: Any) -> str:
    """Name a judge and declare what is planted or simulated, in every table that shows it."""
    leaning, rates = getattr(judge, "leaning", {}), getattr(judge, "planted", {})
    if rates:
        return f"Judge {judge.name}: simulated, planted: {listed(rates)}"
    return f"Judge {judge.name}: {f'planted leaning in nats: {listed(leaning)}' if leaning else 'as it is'}"


WIDTH = 118  # of a table in the terminal


def _narrowest(lines: list[list[str]]) -> list[list[str]]:
    """Turn a table that is too wide on its side, head and all, where it is less wide so."""

    def width(lines: list[list[str]]) -> int:
        return sum(max(len(cell) for cell in column) + 3 for column in zip(*lines, strict=True)) + 1

    turned = [list(column) for column in zip(*lines, strict=True)]
    return turned if width(lines) > WIDTH and width(turned) < width(lines) else lines


def show(table: Table) -> str:
    """Draw a table for the terminal, lines as columns where it would be too wide."""
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text

    note = Text(table.note) if table.note else None  # Text: what a person named may hold square brackets
    drawn = RichTable(title=Text(table.title), caption=note, title_justify="left", caption_justify="left")
    head, *rows = _narrowest([list(table.columns), *([cell_text(cell) for cell in row] for row in table.rows)])
    for column in head:
        drawn.add_column(Text(column), overflow="fold")
    for row in rows:
        drawn.add_row(*map(Text, row))
    buffer = io.StringIO()
    Console(file=buffer, width=WIDTH, highlight=False).print(drawn)
    return buffer.getvalue().rstrip()


def markdown(table: Table) -> str:
    """Write a table as Markdown."""

    def line(cells: list[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"

    rows = [line([cell_text(cell) for cell in row]) for row in table.rows]
    head = [line(list(table.columns)), "|" + "---|" * len(table.columns)]
    note = ["", printable(table.note)] if table.note else []
    return "\n".join([f"**{table.title}**", "", *head, *rows, *note]) + "\n"


def as_csv(table: Table) -> str:
    """Write a table as CSV; a figure takes four columns (value, n, low, high), so that nothing is rounded away."""
    wide = [any(isinstance(row[k], Rate) for row in table.rows) for k in range(len(table.columns))]
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    head: list[str] = []
    for name, is_wide in zip(table.columns, wide, strict=True):
        head += [name, f"{name} n", f"{name} low", f"{name} high"] if is_wide else [name]
    writer.writerow(head)
    for row in table.rows:
        cells: list[object] = []
        for cell, is_wide in zip(row, wide, strict=True):
            if isinstance(cell, Rate):
                cells += [cell.value, cell.n, cell.low, cell.high]
            else:
                cells += [cell, None, None, None] if is_wide else [cell]
        writer.writerow(["" if cell is None else plain_cell(cell) if isinstance(cell, str) else cell for cell in cells])
    return buffer.getvalue()


def plain_cell(text: str) -> str:
    """Keep a spreadsheet from taking a text for a formula: judged texts and names that models gave are untrusted."""
    return f"'{text}" if text.startswith(("=", "+", "-", "@", "\t", "\r")) else text


def latex(table: Table) -> str:
    """Write a table as LaTeX (booktabs), every special character escaped."""
    special = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "–": "--"}
    special |= {character: f"\\{character}" for character in "&%$#_{}"}

    def line(cells: list[str]) -> str:
        texts = ["".join(special.get(character, character) for character in cell.replace("\n", " ")) for cell in cells]
        return " & ".join(texts) + r" \\"

    rows = [line([cell_text(cell) for cell in row]) for row in table.rows]
    body = [r"\toprule", line(list(table.columns)), r"\midrule", *rows, r"\bottomrule"]
    caption = line([f"{table.title}. {table.note}".strip()]).removesuffix(r" \\")
    return "\n".join(
        [r"% needs \usepackage{booktabs}", r"\begin{table}", rf"\caption{{{caption}}}",
         rf"\begin{{tabular}}{{{'l' * len(table.columns)}}}", *body, r"\end{tabular}", r"\end{table}", ""]
    )  # fmt: skip


def replies_table(stage: str, engine: Engine, states: Mapping[str, int], read: Mapping[str, int]) -> Table:
    """Count the rows on both axes: what the server did, and what its replies mean.

    Args:
        stage: whose rows they are.
        engine: whose calls they were.
        states: rows by what the server did (`Engine.states`).
        read: rows by what was read.

    Raises:
        DataError: a row was lost or doubled on the way.
    """
    if sum(states.values()) != sum(read.values()):
        raise DataError(
            f"{sum(states.values())} replies, but {sum(read.values())} rows were read from them: "
            f"{dict(states)} and {dict(read)}"
        )
    rows = [("server", state, count) for state, count in sorted(states.items())]
    rows += [("reply", state, count) for state, count in sorted(read.items())]
    calls = engine.calls
    note = (
        f"{calls['asked']} calls made, {calls['from_ledger']} rows from the ledger, {calls['asked_again']} asked again "
        f"that a kill had lost in flight; {engine.cost.told()}"
    )
    columns = ("axis", "state", "rows")
    return Table(name=f"{stage}_rows", title="Every row on both axes", columns=columns, rows=tuple(rows), note=note)
