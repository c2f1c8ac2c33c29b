"""Plain text in columns, laid out by rich and free of colours, for what is printed and for what is tested."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

_LINE_BELOW_HEAD = "    \n    \n -- \n    \n    \n    \n    \n    \n"


def columns(head: Sequence[str], rows: Iterable[Sequence[str]], *, right: Collection[str] = ()) -> str:
    """Lay rows out below a head, however wide they are.

    Args:
        head: Names of the columns.
        rows: Cells.
        right: Names of the columns that are flush right.

    Example:
        >>> print(columns(("name", "bytes"), [("w", "12")], right=("bytes",)))
        name   bytes
        ------------
        w         12
    """
    from rich.box import Box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=Box(_LINE_BELOW_HEAD, ascii=True), show_edge=False, pad_edge=False)
    for name in head:
        table.add_column(name, no_wrap=True, justify="right" if name in right else "left")
    for row in rows:
        table.add_row(*row)
    console = Console(width=10_000, color_system=None, markup=False, highlight=False, emoji=False)
    with console.capture() as captured:
        console.print(table)
    return "\n".join(line.rstrip() for line in captured.get().splitlines())
