"""Pictures of a sweep: measured beside predicted. Needs the plots extra."""

from __future__ import annotations

from pathlib import Path

from jaxpar.experiments.sweep import OK, Row

PLOTS = "sweep.png"
_GIB = 2**30
_LONGEST_NAME = 48


def save_plots(rows: list[Row], path: Path) -> bool:
    """Draws step time, tokens/s, memory and loss of the trials that worked.

    Returns:
        Whether it could: there is something to draw, and matplotlib is installed.
    """
    done = [row for row in rows if row["status"] == OK]
    if not done:
        return False
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    names = [str(row["name"]) for row in done]
    names = [name if len(name) <= _LONGEST_NAME else f"{name[:_LONGEST_NAME]}..." for name in names]
    figure = Figure(figsize=(14, 2 + 2 * 0.45 * len(done)), layout="constrained")
    axes = figure.subplots(2, 2)
    predicted = f"predicted for {done[0]['predicted_gpu']}"
    is_fake = done[0]["platform"] == "cpu"
    measured = "measured on fake CPU devices" if is_fake else f"measured ({done[0]['device_kind']})"
    panels = (
        ("step_s", "predicted_step_s", 1, "seconds per step"),
        ("tokens_per_s_per_device", "predicted_tokens_per_s_per_device", 1, "tokens/s per device"),
        ("peak_bytes", "predicted_bytes", _GIB, "peak GiB of a device"),
        ("loss", None, 1, "loss of the last step"),
    )
    for panel, (key, other, unit, title) in zip(axes.flat, panels, strict=True):
        places = range(len(done))
        values = [(row[key] or 0) / unit for row in done]
        panel.barh([place - 0.2 for place in places], values, height=0.4, label=measured)
        if other is not None:
            values = [(row[other] or 0) / unit for row in done]
            panel.barh([place + 0.2 for place in places], values, height=0.4, label=predicted)
            if is_fake:
                # Fake devices and a GPU differ by orders of magnitude; only the order of the bars can be compared.
                panel.set_xscale("log")
        panel.set_yticks(list(places), names, fontsize=7)
        panel.invert_yaxis()
        panel.set_title(title, fontsize=9)
    figure.legend(*axes.flat[0].get_legend_handles_labels(), loc="outside upper right", ncols=2, fontsize=8)
    figure.savefig(path, format="png", dpi=100)
    return True
