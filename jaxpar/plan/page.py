"""A plan as one self-contained HTML page: plots drawn here, no script, nothing fetched."""

from __future__ import annotations

import html
from collections.abc import Sequence

from jaxpar.plan.memory import GIB
from jaxpar.plan.plots import Part, ranked_bars, stacked_bar
from jaxpar.plan.search import mesh_words

_STYLE = """
body { font-family: sans-serif; max-width: 900px; margin: 2em auto; padding: 0 1em; color: #222; }
table { border-collapse: collapse; margin: 0.5em 0; }
td, th { padding: 0.2em 0.8em 0.2em 0; text-align: left; vertical-align: top; font-size: 0.9em; }
td.n, th.n { text-align: right; }
.verdict { padding: 0.6em 1em; border-radius: 6px; font-weight: bold; }
.good { background: #d9ead3; } .bad { background: #f4cccc; } .unwise { background: #fff2cc; }
svg { max-width: 100%; height: auto; }
code { background: #f2f2f2; }
"""

_SHOWN = 14
"""Neighbours and ranked layouts drawn."""


def plan_page(report: dict) -> str:
    """The page of a report of :mod:`jaxpar.plan.report`; with a search in it, its ranking too."""
    bodies = {"train": _training, "inference": _inference, "search": _nothing_fits}
    body = bodies[report["mode"]](report)
    title = html.escape(f"jaxpar plan: {report['model']} on {report['num_devices']} x {report['gpu']}")
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f"<style>{_STYLE}</style></head><body><h1>{title}</h1>{body}</body></html>\n"
    )


def _training(report: dict) -> str:
    mesh = mesh_words(report["mesh"])
    time, band = report["time"], report["error_band"]
    facts = [
        ("mesh", mesh),
        ("parameters", f"{report['params']['total']:,} ({report['params']['active']:,} active)"),
        ("batch", f"{report['global_batch_size']} rows x {report['seq_len']} tokens"),
        ("microbatches, remat, schedule", f"{report['microbatches']}, {report['remat']}, {report['schedule']}"),
        ("step", f"{time['step_s']:.3g} s, {report['tokens_per_s_per_device']:,.0f} tokens/s per device"),
        ("MFU", f"{report['mfu']:.1%} ({report['flops_convention']})"),
        ("error of predicted times", f"median {band['median']:.0%}, 90% within {band['p90']:.0%} {band['note']}"),
    ]
    return "".join(
        [
            _verdict(report),
            _pairs(facts),
            "<h2>Memory of the fullest device</h2>",
            stacked_bar(_memory_parts(report), report["memory"]["device_bytes"], _limit(report)),
            "<h2>Where a step's time goes</h2>",
            stacked_bar(_time_parts(report)),
            "<h2>What if</h2><p>One change each; grey does not fit.</p>",
            ranked_bars(_neighbours(report)),
            _search(report),
            "<h2>Communication per step and device</h2>",
            _communication(report["communication"]),
            _problems(report),
            "<h2>Assumed</h2><ul>" + "".join(f"<li>{html.escape(text)}</li>" for text in report["assumptions"]),
            "</ul>",
        ]
    )


def _inference(report: dict) -> str:
    facts = [
        ("parameters", f"{report['params']['total']:,} ({report['params']['active']:,} active)"),
        ("batch, context, weights", f"{report['batch']}, {report['context']}, {report['weights']}"),
        ("prompt of full context", f"{report['time']['prefill_s']:.3g} s"),
        ("one token for every sequence", f"{report['time']['decode_step_s'] * 1e3:.3g} ms"),
        ("tokens/s, all sequences", f"{report['tokens_per_s']:,.0f}"),
    ]
    bar = stacked_bar(_memory_parts(report), report["memory"]["device_bytes"], _limit(report))
    return _verdict(report) + _pairs(facts) + "<h2>Memory of a device</h2>" + bar + _problems(report)


def _nothing_fits(report: dict) -> str:
    """A search without a winner."""
    rejected = "".join(
        f"<li>{html.escape(rejection['name'])}: {html.escape(rejection['reason'])}</li>"
        for rejection in report["rejected"]
    )
    return _verdict(report) + f"<h2>Rejected</h2><ul>{rejected}</ul>"


def _verdict(report: dict) -> str:
    kind = {"fits": "good", "does not fit": "bad"}.get(report["verdict"], "unwise")
    return f'<p class="verdict {kind}">{html.escape(report["verdict_text"])}</p>'


def _pairs(facts: Sequence[tuple[str, str]]) -> str:
    rows = "".join(f"<tr><th>{html.escape(name)}</th><td>{html.escape(value)}</td></tr>" for name, value in facts)
    return f"<table>{rows}</table>"


def _memory_parts(report: dict) -> list[Part]:
    skipped = ("total_bytes", "device_bytes", "free_bytes", "moment", "whole_logits")
    return [
        Part(name=name.replace("_", " "), value=value, label=f"{value / GIB:.2f} GiB")
        for name, value in report["memory"].items()
        if name not in skipped
    ]


def _limit(report: dict) -> str:
    return f"{report['gpu']}: {report['memory']['device_bytes'] / GIB:.1f} GiB"


def _time_parts(report: dict) -> list[Part]:
    time = report["time"]
    names = {
        "products_s": "matrix products",
        "attention_s": "attention",
        "elementwise_s": "elementwise",
        "head_s": "head and loss",
        "optimizer_s": "optimizer",
    }
    values = [(label, time[key]) for key, label in names.items()]
    by_axis: dict[str, float] = {}
    for collective in report["communication"]:
        by_axis[collective["axis"]] = by_axis.get(collective["axis"], 0.0) + collective["exposed_s"]
    values += [(f"{axis} communication", seconds) for axis, seconds in by_axis.items()]
    values.append(("pipeline idle", time["bubble_s"]))
    return [Part(name=name, value=value, label=f"{value / time['step_s']:.1%}") for name, value in values]


def _neighbours(report: dict) -> list[tuple[str, float, str, bool]]:
    here = ("this plan", report["tokens_per_s_per_device"], report["memory"]["total_bytes"], True)
    rows = [here] + [
        (row["name"], row["tokens_per_s_per_device"], row["total_bytes"], row["fits"]) for row in report["what_if"]
    ]
    return [(name, speed, f"{speed:,.0f} tok/s, {size / GIB:.1f} GiB", fits) for name, speed, size, fits in rows][
        :_SHOWN
    ]


def _search(report: dict) -> str:
    if "ranked" not in report:
        return ""
    rows = []
    for entry in report["ranked"][:_SHOWN]:
        mesh = " ".join(f"{axis}{size}" for axis, size in entry["mesh"].items() if size > 1) or "one device"
        label = f"{entry['tokens_per_s_per_device']:,.0f} tok/s, {entry['memory'] / GIB:.1f} GiB"
        rows.append(
            (f"{mesh} m{entry['microbatches']} {entry['remat']}", entry["tokens_per_s_per_device"], label, True)
        )
    rejected = [f"{rejection['name']}: {rejection['reason']}" for rejection in report["rejected"]]
    why, against = (
        "".join(f"<li>{html.escape(text)}</li>" for text in texts) for texts in (report["explanation"], rejected)
    )
    return f"<h2>Search</h2>{ranked_bars(rows)}<ul>{why}</ul><h3>Rejected</h3><ul>{against}</ul>"


def _communication(rows: Sequence[dict]) -> str:
    head = "".join(
        f"<th>{name}</th>" for name in ("axis", "operation", "messages", "sent", "link", "alone", "delays", "overlaps")
    )
    lines = []
    for row in rows:
        cells = (
            row["axis"],
            f"{row['op']} ({row['what']})",
            f"{row['count']:,.0f}",
            f"{row['bytes'] / GIB:.3g} GiB",
            row["link"],
            f"{row['seconds']:.3g} s",
            f"{row['exposed_s']:.3g} s",
            "yes" if row["overlappable"] else "no",
        )
        lines.append("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells) + "</tr>")
    return f"<table><tr>{head}</tr>{''.join(lines)}</table>" if rows else "<p>None: one device.</p>"


def _problems(report: dict) -> str:
    if not report["problems"]:
        return ""
    items = "".join(
        f"<li><b>{html.escape(problem['severity'])}</b> ({html.escape(problem['rule'])}): "
        f"{html.escape(problem['message'])}<br>&rarr; {html.escape(problem['remedy'])}</li>"
        for problem in report["problems"]
    )
    return f"<h2>Problems and advice</h2><ul>{items}</ul>"
