"""The reference page of the config, generated from the schema: ``jaxpar config --reference > docs/config.md``."""

from __future__ import annotations

from jaxpar.config.keys import SECTIONS, Key
from jaxpar.config.toml_text import toml_value

_INTRODUCTION = """\
# Configuration

Generated from the schema by `jaxpar config --reference > docs/config.md`.

A config is a TOML file with the sections below. Every key has a default, except that a model needs its dimensions: from
`model.preset`, from `model.init_from`, or given one by one. Unknown keys are errors. Paths are relative to the working
directory.

Overrides on the command line win over the file: `jaxpar train configs/x.toml mesh.fsdp=8 'data.paths=["a.txt"]'`. The
right side is a TOML value; strings need no quotes, and the bare word `none` clears a key that may be absent.

The order, later wins: defaults, `model.preset`, the model of `model.init_from`, file, overrides.

`jaxpar config CONFIG [KEY=VALUE...]` prints the resolved config and where each value came from;
`jaxpar config --presets` lists the models that `model.preset` knows.
"""


def reference_page() -> str:
    """The page as Markdown: per section, each key with what it accepts, its default and its meaning."""
    parts = [_INTRODUCTION]
    for section in SECTIONS.values():
        parts += [
            f"\n## {section.name}\n\n{section.doc}\n\n",
            "| key | accepts | default | meaning |\n|---|---|---|---|\n",
        ]
        parts += [_row(key) for key in section.keys]
    return "".join(parts)


def _row(key: Key) -> str:
    cells = (f"`{key.name}`", key.accepted, _default(key), key.doc)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def _default(key: Key) -> str:
    return "absent" if key.default is None else f"`{toml_value(key.default)}`"
