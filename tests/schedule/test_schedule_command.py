"""``jaxpar schedule``: the drawing says what the table says, at any width, and the numbers are those of the table."""

import json
import re
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from jaxpar.schedule import build_schedule
from tests.cli.command import Command

DOCS = Path(__file__).parents[2] / "docs" / "schedules.md"
ESCAPES = re.compile(r"\x1b\[[0-9;]*m")


@pytest.fixture
def jaxpar(monkeypatch, capsys, tmp_path) -> Command:
    """The command as it behaves in a pipe of 80 columns."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    for name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    return Command(monkeypatch, capsys)


def arguments(schedule):
    sizes = {"stages": schedule.num_stages, "microbatches": schedule.num_microbatches, "chunks": schedule.num_chunks}
    return ["schedule", schedule.kind, *(f"--{name}={size}" for name, size in sizes.items())]


def lanes_of(drawing, schedule):
    """(tick, stage, lane) -> (microbatch, chunk), read from a drawing."""
    found, ticks, stage = {}, [], None
    for line in drawing.splitlines():
        if line.startswith("tick "):
            ticks = list(map(int, line.split()[1:]))
        elif match := re.match(r"(?:stage (\d+))? +([FB]) (.*)", line):
            stage = stage if match[1] is None else int(match[1])
            cells = match[3].split()
            assert len(cells) == len(ticks)
            for tick, cell in zip(ticks, cells, strict=True):
                if cell != ".":
                    assert (tick, stage, match[2]) not in found
                    letter = cell[-1] if schedule.num_chunks > 1 else "a"
                    microbatch = int(cell.removesuffix(letter) if schedule.num_chunks > 1 else cell)
                    found[tick, stage, match[2]] = (microbatch, ord(letter) - ord("a"))
    return found


def lanes_in(schedule):
    """The same, read from the table."""
    tables = schedule.stage_tables()
    return {
        (tick, stage, lane[0].upper()): (
            int(tables[f"{lane}_microbatch"][tick, stage]),
            int(tables[f"{lane}_chunk"][tick, stage]),
        )
        for lane in ("forward", "backward")
        for tick, stage in np.argwhere(tables[f"{lane}_microbatch"] >= 0).tolist()
    }


SCHEDULES = [
    ("gpipe", 4, 2, 1),
    ("1f1b", 4, 8, 1),
    ("1f1b", 12, 101, 1),
    ("interleaved", 4, 8, 2),
    ("breadth_first", 3, 11, 3),
]


@pytest.mark.parametrize("width", [20, 80, 200])
@pytest.mark.parametrize("sizes", SCHEDULES)
def test_the_drawing_is_the_table_at_any_width(jaxpar, monkeypatch, sizes, width):
    kind, stages, microbatches, chunks = sizes
    schedule = build_schedule(kind, num_stages=stages, num_microbatches=microbatches, num_chunks=chunks)
    monkeypatch.setenv("COLUMNS", str(width))
    result = jaxpar(*arguments(schedule))
    assert (result.code, result.err) == (0, "")
    assert lanes_of(result.out, schedule) == lanes_in(schedule)
    drawing = [line for line in result.out.splitlines() if re.match(r"(tick|stage| +B) .*\d", line)]
    assert max(map(len, drawing)) <= width
    assert "\x1b" not in result.out
    if width >= 80:
        assert max(map(len, result.out.splitlines())) <= width


def test_numbers_below_the_drawing(jaxpar):
    result = jaxpar("schedule", "1f1b", "--stages", "4", "--microbatches", "8")
    numbers = dict(re.split(r"  +", line, maxsplit=1) for line in result.out.splitlines()[-5:])
    assert numbers == {
        "ticks": "14; forward lane in 11, backward in 11",
        "idle share": "27.3% = 3/11, as (p-1)/(vM+p-1) says",
        "in flight": "at most 7 5 3 1 on stages 0 to 3",
        "slots per stage": "5 activations, 1 gradients",
        "below 10% idle": "from 28 microbatches on",
    }
    enough = jaxpar("schedule", "1f1b", "--stages", "4", "--microbatches", "28")
    assert "9.7% = 3/31" in enough.out
    assert "below 10% idle" not in enough.out


def test_gpipe_runs_with_few_microbatches_and_says_what_that_costs(jaxpar):
    result = jaxpar("schedule", "gpipe", "--stages", "4", "--microbatches", "2")
    assert result.code == 0
    assert "60.0% = 3/5" in result.out


def test_colours_only_add_to_the_text(jaxpar, monkeypatch):
    command = ["schedule", "interleaved", "--stages=2", "--microbatches=2", "--chunks=2"]
    plain = jaxpar(*command).out
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLORTERM", "truecolor")
    monkeypatch.setenv("TERM", "xterm")
    coloured = jaxpar(*command).out
    assert ESCAPES.sub("", coloured) == plain
    forward, backward = coloured.splitlines()[2:4]
    # Each microbatch has its colour: behind the letters going forward (48), of the letters going backward (38).
    assert len(set(re.findall(r"48;2;[\d;]*\d", forward))) == 2
    assert set(re.findall(r"38;2;[\d;]*\d", backward)) == {
        colour.replace("48", "38", 1) for colour in re.findall(r"48;2;[\d;]*\d", forward)
    }


def test_json_has_the_table_and_its_numbers(jaxpar):
    schedule = build_schedule("interleaved", num_stages=4, num_microbatches=10, num_chunks=2)
    result = jaxpar(*arguments(schedule), "--json")
    report = json.loads(result.out)
    tables = report.pop("tables")
    assert tables == {
        name: table.tolist() for name, table in (schedule.stage_tables() | schedule.tick_tables()).items()
    }
    share = float(Fraction(3, 23))
    assert report == {
        "schedule": "interleaved",
        "stages": 4,
        "microbatches": 10,
        "chunks": 2,
        "ticks": 31,
        "forward_ticks": 23,
        "backward_ticks": 23,
        "idle_share": share,
        "closed_form_idle_share": share,
        "activation_slots": 10,
        "gradient_slots": 2,
        "peak_in_flight": list(schedule.peak_in_flight()),
    }


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("1f1b --stages 4 --microbatches 2", ("--microbatches = 2", "2 < 4 stages", "--microbatches to at least 4")),
        ("interleaved --stages 4 --microbatches 8", ("--chunks = 1", "at least 2 chunks", "set --chunks to 2")),
        ("gpipe --stages 4 --microbatches 8 --chunks 2", ("--chunks = 2", "schedule to breadth_first")),
        ("zigzag --stages 4 --microbatches 8", ("schedule = 'zigzag'", "interleaved")),
        ("1f1b --stages 0 --microbatches 8", ("--stages = 0", "at least 1")),
    ],
)
def test_bad_input_names_the_option(jaxpar, command, words):
    result = jaxpar("schedule", *command.split())
    assert (result.code, result.out) == (2, "")
    assert all(word in result.err for word in words), result.err
    assert "Traceback" not in result.err


def test_png(jaxpar, tmp_path):
    result = jaxpar("schedule", "1f1b", "--stages=2", "--microbatches=2", "--json", "--png", "small.png")
    assert result.code == 0
    assert json.loads(result.out)["ticks"] == 4
    jaxpar("schedule", "1f1b", "--stages=2", "--microbatches=6", "--png", "large.png")
    sizes = []
    for name in ("small.png", "large.png"):
        content = (tmp_path / name).read_bytes()
        assert content.startswith(b"\x89PNG\r\n\x1a\n")
        sizes.append((int.from_bytes(content[16:20]), int.from_bytes(content[20:24])))
    # 30 dots a tick: 4 more microbatches are 4 more ticks.
    assert sizes[1][0] - sizes[0][0] == 120
    assert sizes[1][1] == sizes[0][1]


def test_png_that_cannot_be_written(jaxpar):
    result = jaxpar("schedule", "1f1b", "--stages=2", "--microbatches=2", "--png", "no/such/x.png")
    assert (result.code, result.out) == (2, "")
    assert "--png = 'no/such/x.png': cannot be written: No such file or directory" in result.err


def test_png_without_matplotlib_names_the_extra(jaxpar, monkeypatch, tmp_path):
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = jaxpar("schedule", "1f1b", "--stages=2", "--microbatches=2", "--png", "x.png")
    assert (result.code, result.out) == (2, "")
    assert "pip install 'jaxpar[plots]'" in result.err
    assert not (tmp_path / "x.png").exists()


def test_neither_jax_nor_matplotlib_is_imported():
    program = (
        "import sys\n"
        "sys.argv[1:] = 'schedule 1f1b --stages 4 --microbatches 8'.split()\n"
        "from jaxpar.cli.main import main\n"
        "try:\n"
        "    main()\n"
        "finally:\n"
        "    print({name.partition('.')[0] for name in sys.modules} & {'jax', 'flax', 'optax', 'matplotlib'})\n"
    )
    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=DOCS.parents[1])
    assert finished.stdout.splitlines()[-1] == "set()", finished.stderr


def test_the_drawings_in_the_docs_are_what_their_commands_print(jaxpar):
    blocks = re.findall(r"```\n\$ jaxpar (schedule .*)\n((?:.*\n)*?)```", DOCS.read_text())
    assert len(blocks) >= 4
    for command, shown in blocks:
        assert jaxpar(*command.split()).out == shown, command


def test_the_numbers_in_the_docs_are_what_their_commands_print(jaxpar):
    rows = re.findall(r"\| `(schedule .*?)` \| (.*?)% \| (\d+) \| (\d+) \|", DOCS.read_text())
    assert len(rows) >= 6
    for command, *shown in rows:
        report = json.loads(jaxpar(*command.split(), "--json").out)
        numbers = [f"{report['idle_share']:.1%}".rstrip("%"), report["activation_slots"], report["gradient_slots"]]
        assert list(map(str, numbers)) == shown, command
