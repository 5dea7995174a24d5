"""How ``jaxpar plan`` prints a report for people."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from jaxpar.cli.compiled_tables import print_compiled
from jaxpar.cli.output import output_console
from jaxpar.plan.memory import GIB
from jaxpar.plan.report import CATALOGUE_LINKS, COMPUTE_PARTS, memory_components
from jaxpar.plan.search import mesh_words

_SHOWN = 10
"""Ranked meshes that are printed."""

_STYLES = {"error": "bold red", "unwise": "yellow", "hint": "cyan"}
_COLOURS = {"fits": "bold green", "does not fit": "bold red", "legal but unwise": "bold yellow"}


def print_report(report: dict) -> None:
    """Print a report of :mod:`jaxpar.plan.report`."""
    console = output_console(highlight=False)
    console.print(_subject(report))
    if report["links"] != CATALOGUE_LINKS:
        console.print(f"links: {report['links']}", style="dim", soft_wrap=True, markup=False)
    console.print(Text(report["verdict_text"], style=_COLOURS[report["verdict"]]))
    if report["mode"] == "train":
        _print_training(console, report)
    elif report["mode"] == "inference":
        _print_inference(console, report)
    if "compiled" in report:
        print_compiled(console, report["compiled"])
    if "ranked" in report:
        _print_search(console, report)
    for problem in report["problems"]:
        line = Text(f"{problem['severity']}: ", style=_STYLES[problem["severity"]])
        console.print(line.append(problem["message"], style="default"), soft_wrap=True)
        console.print(f"    -> {problem['remedy']}", soft_wrap=True, markup=False)


def _subject(report: dict) -> str:
    params = report["params"]
    active = f", {params['active'] / 1e9:.2f} B active" if params["active"] != params["total"] else ""
    nodes = f" in {report['num_nodes']} nodes" if report["num_nodes"] > 1 else ""
    return (
        f"{report['model']}: {params['total']:,} parameters ({params['padded_total']:,} padded{active}) "
        f"on {report['num_devices']} x {report['gpu']}{nodes}"
    )


def _print_training(console: Console, report: dict) -> None:
    time, band = report["time"], report["error_band"]
    console.print(
        f"{mesh_words(report['mesh'])}; {report['global_batch_size']} rows x {report['seq_len']} tokens in "
        f"{report['microbatches']} microbatches ({report['rows_per_device']} rows per device each), remat "
        f"{report['remat']}, schedule {report['schedule']}, sharding {report['strategy']}, {report['precision']}",
        soft_wrap=True,
    )
    console.print(
        f"step {time['step_s']:.3g} s, {report['tokens_per_s_per_device']:,.0f} tokens/s per device, MFU "
        f"{report['mfu']:.1%} (convention {report['flops_convention']})",
        soft_wrap=True,
    )
    console.print(
        f"predicted times are off by {band['median']:.0%} (median), {band['p90']:.0%} (90% of runs) on published runs "
        f"of this class, {band['class']}{'; ' + band['note'] if band['note'] else ''}",
        style="dim",
        soft_wrap=True,
    )
    _print_table(console, f"memory of the fullest device, at {report['memory']['moment']}", _memory(report))
    chunked = report["memory"]["whole_logits"] / GIB
    console.print(f" (float32 logits of a microbatch are never whole; they would take {chunked:.2f} GiB)", style="dim")
    _print_table(console, "time of a step", _time(report))
    if report["communication"]:
        _print_table(console, "communication per step and device", _communication(report["communication"]))


def _print_inference(console: Console, report: dict) -> None:
    time = report["time"]
    console.print(
        f"{report['batch']} sequences of {report['context']} tokens, weights {report['weights']}: "
        f"{report['tokens_per_s']:,.0f} tokens/s ({time['decode_step_s'] * 1e3:.3g} ms per token), prompt "
        f"{time['prefill_s']:.3g} s"
    )
    _print_table(console, "memory of a device", _memory(report))


def _print_search(console: Console, report: dict) -> None:
    searched = report["searched"]
    table = Table(box=None)
    for column in ("mesh", "microbatches", "remat", "schedule", "sharding"):
        table.add_column(column)
    for column in ("GiB", "step s", "tokens/s per device", "MFU"):
        table.add_column(column, justify="right")
    table.add_column("trains today")
    for entry in report["ranked"][:_SHOWN]:
        table.add_row(
            mesh_words(entry["mesh"]),
            str(entry["microbatches"]),
            entry["remat"],
            entry["schedule"],
            entry["strategy"],
            f"{entry['memory'] / GIB:.1f}",
            f"{entry['time']:.3g}",
            f"{entry['tokens_per_s_per_device']:,.0f}",
            f"{entry['mfu']:.1%}",
            "yes" if entry["trains_today"] else "no",
        )
    title = f"best of {searched['layouts']:,} layouts that fit, on {searched['meshes']:,} legal meshes"
    _print_table(console, title, table)
    for text in report["explanation"]:
        console.print(f"- {text}", soft_wrap=True, markup=False)
    console.print("\nrejected", style="italic")
    for rejection in report["rejected"]:
        line = f"- {rejection['name']} ({mesh_words(rejection['mesh'])}): {rejection['reason']}"
        console.print(line, soft_wrap=True, markup=False)
    if report["ranked"]:
        console.print(f"\nuse it: {report['ranked'][0]['overrides']}", soft_wrap=True, markup=False)


def _print_table(console: Console, title: str, table: Table) -> None:
    console.print(f"\n{title}", style="italic")
    console.print(table)


def _memory(report: dict) -> Table:
    memory = report["memory"]
    table = Table(box=None)
    table.add_column("component")
    table.add_column("GiB", justify="right")
    table.add_column("of the device", justify="right")
    for name, size in [
        *memory_components(report),
        ("total", memory["total_bytes"]),
        ("device", memory["device_bytes"]),
    ]:
        style = "bold" if name in ("total", "device") else None
        table.add_row(name, f"{size / GIB:.2f}", f"{size / memory['device_bytes']:.1%}", style=style)
    return table


def _time(report: dict) -> Table:
    time = report["time"]
    table = Table(box=None)
    table.add_column("part")
    table.add_column("ms", justify="right")
    table.add_column("of the step", justify="right")
    names = {
        **COMPUTE_PARTS,
        "exposed_comm_s": "exposed communication",
        "bubble_s": f"pipeline idle ({time['bubble_fraction']:.1%} of the schedule)",
        "step_s": "step",
    }
    for key, name in names.items():
        if time[key]:
            style = "bold" if key == "step_s" else None
            table.add_row(name, f"{time[key] * 1e3:,.1f}", f"{time[key] / time['step_s']:.1%}", style=style)
    return table


def _communication(rows: list[dict]) -> Table:
    table = Table(box=None)
    for column in ("axis", "operation", "what"):
        table.add_column(column)
    for column in ("messages", "GiB sent"):
        table.add_column(column, justify="right")
    table.add_column("link")
    for column in ("ms alone", "ms exposed"):
        table.add_column(column, justify="right")
    table.add_column("overlaps")
    for row in rows:
        table.add_row(
            row["axis"],
            row["op"],
            row["what"],
            f"{row['count']:,.0f}",
            f"{row['bytes'] / GIB:.2f}",
            row["link"],
            f"{row['seconds'] * 1e3:,.1f}",
            f"{row['exposed_s'] * 1e3:,.1f}",
            "yes" if row["overlappable"] else "no",
        )
    return table
