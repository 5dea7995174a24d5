"""``jaxpar config``: the resolved config and where every value comes from, the presets, the reference page."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from jaxpar.cli.output import output_console
from jaxpar.config import PRESETS, ConfigError, LoadedConfig, Problem, load_with_sources
from jaxpar.config.overrides import in_order, split_path
from jaxpar.config.reference import reference_page
from jaxpar.config.toml_text import toml_lines
from jaxpar.plan.parameters import param_count
from jaxpar.plan.resolve import check

_COMMENT_COLUMN = 56


def config(
    path: Annotated[str | None, typer.Argument(metavar="[CONFIG]", help="TOML file; may be left out.")] = None,
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="E.g. mesh.fsdp=8.")] = None,
    presets: Annotated[bool, typer.Option("--presets", help="List the models that model.preset knows.")] = False,
    reference: Annotated[
        bool, typer.Option("--reference", help="Print the page of all keys (docs/config.md).")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable output.")] = False,
) -> None:
    """Print the resolved config as TOML, each value with its origin, and check every rule that needs no device."""
    if reference:
        typer.echo(reference_page(), nl=False)
    elif presets:
        _print_presets(as_json)
    else:
        _print_config(path, overrides or [], as_json)


def _print_config(path: str | None, overrides: list[str], as_json: bool) -> None:
    """The config comes out even when rules are broken: it shows where the broken values are from.

    Raises:
        ConfigError: The config cannot be loaded (nothing is printed), or breaks a rule.
    """
    loaded = load_with_sources(*split_path(in_order(path, overrides)))
    warnings: tuple[str, ...] = loaded.warnings
    problems: tuple[Problem, ...] = ()
    try:
        warnings += check(loaded.config)
    except ConfigError as error:
        problems = error.problems
    if as_json:
        report = {
            "config": dataclasses.asdict(loaded.config),
            "sources": loaded.sources,
            "warnings": warnings,
            "problems": [{"key": p.key, "message": p.message, "remedy": p.remedy} for p in problems],
        }
        typer.echo(json.dumps(report, indent=2))
    else:
        Console().print(_annotated_toml(loaded), soft_wrap=True, end="")
        for warning in warnings:
            Console(stderr=True).print(Text(f"warning: {warning}", style="yellow"), soft_wrap=True)
    if problems:
        raise ConfigError(problems)


def _annotated_toml(loaded: LoadedConfig) -> Text:
    text = Text()
    for table, lines in toml_lines(loaded.config):
        text.append("\n" if text else "").append(f"[{table}]\n", style="bold")
        widths = [len(f"{name} = {value}") for _, name, value in lines]
        column = max((width for width in widths if width <= _COMMENT_COLUMN), default=0)
        for (key, name, value), width in zip(lines, widths, strict=True):
            source = loaded.sources[key]
            text.append(name, style="cyan").append(f" = {value}").append(" " * max(0, column - width))
            text.append(f"  # {source if source.isprintable() else repr(source)}", style=_style(source)).append("\n")
    return text


def _style(source: str) -> str:
    return "dim" if source == "default" else "green"


def _print_presets(as_json: bool) -> None:
    rows = []
    for name, preset in PRESETS.items():
        model = preset.model
        rows.append(
            {
                "preset": name,
                "family": model.family,
                "params": param_count(model),
                "vocab_size": model.vocab_size,
                "embed_dim": model.embed_dim,
                "num_layers": model.num_layers,
                "num_heads": model.num_heads,
                "num_kv_heads": model.num_kv_heads,
                "head_dim": model.head_dim,
                "mlp_dim": model.mlp_dim,
                "num_experts": model.num_experts,
            }
        )
    if as_json:
        typer.echo(json.dumps({"presets": rows}, indent=2))
        return
    table = Table(box=None, pad_edge=False)
    for heading, value in rows[0].items():
        table.add_column(heading, justify="right" if type(value) is int else "left", no_wrap=True)
    for row in rows:
        table.add_row(*(f"{v:,}" if isinstance(v, int) else v for v in row.values()))
    console = output_console()
    console.print(table)
