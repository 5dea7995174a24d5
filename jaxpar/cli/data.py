"""``jaxpar data``: prepare a token store, verify one, say what is in one. Starts without JAX."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from jaxpar.cli.exit_codes import FAILED, INTERRUPTED

PREPARE_EPILOG = """
Examples:

\b
  jaxpar data prepare 'corpus/*.jsonl.gz' --out tokens --tokenizer tokenizer.json --workers 8
  jaxpar data prepare 'books/**/*.txt' --out tokens
  jaxpar train CONFIG data.source=store 'data.paths=["tokens"]'

Interrupted or killed, the same command goes on: finished shards are checked and kept. The store is the same, byte for
byte, whatever the number of workers.
"""

data = typer.Typer(help="Tokenize documents into a store on disk, and check one.", no_args_is_help=True)

Store = Annotated[Path, typer.Argument(metavar="STORE", help="Directory that `jaxpar data prepare` has written.")]
AsJson = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]


@data.command("prepare", epilog=PREPARE_EPILOG)
def prepare(
    patterns: Annotated[
        list[str],
        typer.Argument(
            metavar="FILES...",
            help="Globs: JSONL (also .gz, .bz2, .xz), Parquet, or text, one document per file; hf:NAME[:CONFIG]:SPLIT.",
        ),
    ],
    out: Annotated[Path, typer.Option("--out", help="Directory of the store; must not exist.")],
    tokenizer: Annotated[str, typer.Option(help='A tokenizer.json, or "bytes".')] = "bytes",
    field: Annotated[str, typer.Option(help="Field (JSONL) or column (Parquet, hf:) that holds the text.")] = "text",
    file_format: Annotated[
        Literal["auto", "jsonl", "parquet", "text"],
        typer.Option("--format", help="What the files are; auto goes by their names."),
    ] = "auto",
    workers: Annotated[int, typer.Option(min=0, help="Processes; 0: one per CPU core.")] = 0,
    shard_mib: Annotated[int, typer.Option("--shard-mib", min=1, help="MiB of input per shard, about.")] = 256,
    skip_invalid: Annotated[
        bool, typer.Option("--skip-invalid", help="Leave out records that cannot be read, and count them.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Tokenize documents into a store: memory-mapped shards with checksums, which data.source = "store" trains on."""
    module = importlib.import_module("jaxpar.data.prepare")
    request = module.Request(
        patterns=tuple(patterns),
        out=out,
        tokenizer=tokenizer,
        format=file_format,
        field=field,
        skip_invalid=skip_invalid,
        shard_bytes=shard_mib * 2**20,
    )
    try:
        with _Display(f"{out}") as display:
            manifest = module.prepare(request, num_workers=workers or _num_cores(), progress=display)
    except KeyboardInterrupt:
        print(f"interrupted; finished shards are kept in {out}.partial: the same command goes on", file=sys.stderr)
        raise typer.Exit(INTERRUPTED) from None
    if as_json:
        typer.echo(json.dumps({"out": str(out), "shards_kept": display.num_kept, **_summary(manifest)}))
        return
    kept = f" ({display.num_kept} from an earlier run)" if display.num_kept else ""
    typer.echo(
        f"{out}: {manifest.num_tokens:,} tokens in {manifest.num_documents:,} documents, "
        f"{len(manifest.shards)} shards{kept}"
    )
    for reason, count in manifest.skipped.items():
        typer.echo(f"left out: {count:,} {reason}", err=True)
    typer.echo(f"next: jaxpar train CONFIG data.source=store 'data.paths=[\"{out}\"]'", err=True)


@data.command("verify")
def verify(store: Store, as_json: AsJson = False) -> None:
    """Recompute every checksum of a store; exit 1 and name the damaged files if one is wrong."""
    module = importlib.import_module("jaxpar.data.store")
    manifest = module.read_manifest(store, key="STORE")
    size = sum((store / name).stat().st_size for name in _files(store, manifest))
    with _Display(f"{store}") as display:
        display.start(len(manifest.shards), size)
        damaged = list(
            module.damaged_parts(
                store, manifest, num_threads=_num_cores(), advance=lambda read: display.advance(read, 0, 0)
            )
        )
    if as_json:
        typer.echo(json.dumps({"store": str(store), "shards": len(manifest.shards), "damaged": damaged}))
    elif not damaged:
        typer.echo(f"{store}: {len(manifest.shards)} shards, {manifest.num_tokens:,} tokens: every checksum is right")
    for problem in damaged:
        typer.echo(f"damaged: {problem}", err=True)
    if damaged:
        raise typer.Exit(FAILED)


@data.command("inspect")
def inspect(store: Store, as_json: AsJson = False) -> None:
    """Say what a store holds and what it was made from."""
    manifest = importlib.import_module("jaxpar.data.store").read_manifest(store, key="STORE")
    if as_json:
        typer.echo(json.dumps({"store": str(store), **dataclasses.asdict(manifest)}, indent=1))
        return
    tokenizer, sources = manifest.tokenizer, manifest.sources
    left_out = ", ".join(f"{count:,} {reason}" for reason, count in manifest.skipped.items()) or "nothing"
    lines = {
        "tokens": f"{manifest.num_tokens:,} ({manifest.dtype})",
        "documents": f"{manifest.num_documents:,}",
        "shards": f"{len(manifest.shards):,}",
        "tokenizer": f"{tokenizer['name']} ({tokenizer['vocab_size']:,} ids, {str(tokenizer['fingerprint'])[:12]})",
        "sources": f"{sources['num_files']:,} files, {sources['num_bytes']:,} bytes: {' '.join(sources['patterns'])}",
        "left out": left_out,
        "content": manifest.content[:12],
    }
    for name, value in lines.items():
        typer.echo(f"{name:10} {value}")


def _num_cores() -> int:
    """Cores that this process may use, which a scheduler may have made fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _summary(manifest: object) -> dict[str, object]:
    return {
        "num_tokens": manifest.num_tokens,
        "num_documents": manifest.num_documents,
        "num_shards": len(manifest.shards),
        "dtype": manifest.dtype,
        "skipped": dict(manifest.skipped),
        "content": manifest.content,
    }


def _files(store: Path, manifest: object) -> Iterator[str]:
    for shard in manifest.shards:
        yield from (name for name in (shard.tokens_name, shard.documents_name) if (store / name).is_file())


class _Display:
    """A bar on standard error while a terminal is there to show it."""

    def __init__(self, title: str):
        self.num_kept = 0
        self._title = title
        self._num_shards = self._num_done = self._num_documents = self._num_tokens = 0
        console = Console(stderr=True)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )

    def __enter__(self) -> _Display:
        self._stack = contextlib.ExitStack()
        self._stack.enter_context(self._bar)
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def start(self, num_shards: int, num_bytes: int) -> None:
        """The work: shards and bytes in all."""
        self._num_shards = num_shards
        self._task = self._bar.add_task(self._title, total=num_bytes)

    def advance(self, num_bytes: int, num_documents: int, num_tokens: int) -> None:
        """So much more is done."""
        self._num_documents += num_documents
        self._num_tokens += num_tokens
        self._bar.update(self._task, advance=num_bytes, description=self._description())

    def shard(self, kept: bool) -> None:
        """One more shard is done."""
        self._num_done += 1
        self.num_kept += kept
        self._bar.update(self._task, description=self._description())

    def _description(self) -> str:
        if not self._num_documents:
            return self._title
        return (
            f"{self._title}: shard {self._num_done}/{self._num_shards}, {self._num_documents:,} documents, "
            f"{self._num_tokens:,} tokens"
        )
