"""How ``jaxpar plan --compile`` prints what the compiler says."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from jaxpar.plan.memory import GIB


def print_compiled(console: Console, compiled: dict) -> None:
    """Print ``compiled`` of a report: memory next to the arithmetic, collectives, lints."""
    console.print(f"\ncompiled for {compiled['target']}", style="italic", soft_wrap=True, markup=False)
    console.print(
        f"peak {compiled['peak_bytes'] / GIB:.2f} GiB per device (arguments {compiled['argument_bytes'] / GIB:.2f}, "
        f"temporaries {compiled['temp_bytes'] / GIB:.2f}); arithmetic without reserve "
        f"{compiled['arithmetic_bytes'] / GIB:.2f} GiB ({compiled['difference']:+.1%})",
        soft_wrap=True,
    )
    share = compiled["hidden_share"]
    hidden = "" if share is None else f", {share:.0%} of it while something else computes"
    console.print(
        f"{compiled['wire_bytes'] / GIB:.2f} GiB sent per device and step{hidden}; {compiled['conditionals']} "
        f"conditionals; compiled in {compiled['compile_s']:.0f} s ({compiled['cpu_s']:.0f} CPU-seconds, "
        f"{compiled['max_rss_bytes'] / GIB:.1f} GiB)",
        soft_wrap=True,
    )
    options = ", ".join(f"{name}={value}" for name, value in compiled["options"].items())
    for chosen in filter(None, (compiled["attention"], compiled["grouped"])):
        console.print(chosen, style="dim", soft_wrap=True, markup=False)
    console.print(f"compiler options: {options or 'none'}", style="dim", soft_wrap=True, markup=False)
    console.print(_collectives(compiled["collectives"]))
    for lint in compiled["lints"]:
        line = Text(f"{lint['rule']}: ", style="yellow")
        console.print(line.append(lint["message"], style="default"), soft_wrap=True)
    if not compiled["lints"]:
        console.print("no lint finds anything wrong with the program", style="green")


def _collectives(rows: list[dict]) -> Table:
    table = Table(box=None)
    for column in ("collective", "axis", "loop", "type"):
        table.add_column(column)
    for column in ("trips", "count", "MiB"):
        table.add_column(column, justify="right")
    table.add_column("async")
    table.add_column("compute before its end", justify="right")
    for row in rows:
        table.add_row(
            row["op"],
            row["axis"] or "?",
            row["loop"] or "-",
            row["dtype"],
            str(row["trips"]),
            str(row["count"]),
            f"{row['bytes'] / 2**20:,.2f}",
            "yes" if row["async"] else "no",
            f"{row['overlapped']}+" if row["count"] > 1 and row["overlapped"] else str(row["overlapped"]),
        )
    return table
