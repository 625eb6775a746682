"""Tables in three dresses: for the terminal, as Markdown and as CSV."""

import csv
import io

from rbd_train.errors import printable
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


def show(table: Table) -> str:
    """Draw a table for the terminal."""
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text

    note = Text(table.note) if table.note else None  # Text: what a person named may hold square brackets
    drawn = RichTable(title=Text(table.title), caption=note, title_justify="left", caption_justify="left")
    for column in table.columns:
        drawn.add_column(Text(column), overflow="fold")
    for row in table.rows:
        drawn.add_row(*(Text(cell_text(cell)) for cell in row))
    buffer = io.StringIO()
    Console(file=buffer, width=118, highlight=False).print(drawn)
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
        writer.writerow(["" if cell is None else cell for cell in cells])
    return buffer.getvalue()
