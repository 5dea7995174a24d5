"""``jaxpar plot``: charts in the terminal, a picture, numbers for programs, and what it says of bad input."""

import json
import sys

import pytest

from jaxpar.cli.plot_terminal import Curve, chart, short
from jaxpar.events.history import Series
from tests.cli.command import Command


@pytest.fixture
def jaxpar(monkeypatch, capsys):
    return Command(monkeypatch, capsys)


def a_run(directory, losses, **more):
    directory.mkdir()
    rows = [
        {"step": step, "loss": loss, "lr": 1e-3 * step, "tokens_per_s": 100.0, **more}
        for step, loss in enumerate(losses, start=1)
    ]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(directory)


def test_curves_of_several_runs_are_overlaid(tmp_path, jaxpar):
    seconds = {"device_wait_s": 3.0, "host_s": 1.0}
    first = a_run(tmp_path / "first", [4, 3, 2, 1], memory_peak_bytes=2**30, **seconds)
    second = a_run(tmp_path / "second", [4, 4, 4, 4])
    (tmp_path / "first" / "eval.jsonl").write_text('{"step": 4, "eval_loss": 1.5, "eval_tokens": 9}\n')
    result = jaxpar("plot", first, second)
    assert result.code == 0
    for shown in (
        "loss  (capitals: eval_loss)",
        "tokens per second",
        "highest memory",
        "learning rate",
        f"a  {first}  step 4, training loss 1.0000, validation loss 1.5000",
        f"b  {second}  step 4, training loss 4.0000",
        "time of the steps 0:00:16: device 75.0%, host 25.0%",
    ):
        assert shown in result.out
    top, bottom = result.out.splitlines()[1], result.out.splitlines()[9]
    assert top.count("b") > 60  # the run that stays at the top of the chart
    assert "a" not in top
    assert bottom.rstrip().endswith("a")
    assert "A" in result.out


def test_one_run_is_drawn_in_dots(tmp_path, jaxpar):
    result = jaxpar("plot", a_run(tmp_path / "run", [2.0, 1.0]), "--metrics", "loss")
    lines = result.out.splitlines()
    assert "learning rate" not in result.out
    assert lines[1].strip().startswith("2 │⠉")
    assert lines[9].strip().startswith("1 │")
    assert lines[9].endswith("⣀")


def test_numbers_for_programs(tmp_path, jaxpar):
    run = a_run(tmp_path / "run", [2.0, 1.0])
    with open(tmp_path / "run" / "metrics.jsonl", "a") as file:
        file.write('{"step": 3, "los')
    result = jaxpar("plot", run, "--json", "--metrics", "loss")
    (report,) = json.loads(result.out)["runs"]
    assert report["series"] == {"loss": {"step": [1, 2], "value": [2.0, 1.0]}}
    assert report["run"] == run
    assert "cut off" in report["notes"][0]
    assert "note: " in result.err


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_a_picture_is_drawn(tmp_path, jaxpar, suffix):
    run = a_run(tmp_path / "run", [2.0, 1.0], device_wait_s=1.0, host_s=1.0)
    out = tmp_path / f"curves.{suffix}"
    result = jaxpar("plot", run, run, "--out", out)
    assert (result.code, result.out) == (0, "")
    start = {"png": b"\x89PNG", "svg": b"<?xml"}[suffix]
    assert out.read_bytes().startswith(start)
    assert out.stat().st_size > 5000


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["{run}", "--out", "curves.gif"], "end its name in .png"),
        (["{run}", "--out", "nowhere/curves.png"], "the directory nowhere does not exist"),
        (["{run}", "--metrics", "los"], "did you mean loss?"),
        (["{run}", "--metrics", ","], "no run has recorded this"),
        (["{run}", "{run}x"], "there is no such run"),
    ],
)
def test_bad_input_is_named(tmp_path, jaxpar, arguments, said):
    run = a_run(tmp_path / "run", [2.0])
    result = jaxpar("plot", *(argument.format(run=run) for argument in arguments))
    assert result.code == 2
    assert said in result.err


def test_only_a_picture_needs_matplotlib(tmp_path, jaxpar, monkeypatch):
    run = a_run(tmp_path / "run", [2.0, 1.0])
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert jaxpar("plot", run).code == 0
    result = jaxpar("plot", run, "--out", tmp_path / "a.png")
    assert result.code == 2
    assert "pip install 'jaxpar[plots]'" in result.err


def test_a_chart_in_colour():
    curves = [Curve(run=run, series=Series([1, 2], [run, run + 1])) for run in (0, 1)]
    text = chart("loss", curves, width=40, height=4, in_colour=True)
    assert {str(span.style) for span in text.spans} >= {"not bold cyan", "not bold yellow"}
    assert "a" not in text.plain.replace("loss", "").replace("step", "")
    assert max(map(len, text.plain.splitlines())) == 40


@pytest.mark.parametrize("values", [[1.0], [0.0, 0.0], [-1e300, 1e300], [5e-324, 1.0]])
def test_any_numbers_can_be_drawn(values):
    text = chart(
        "x", [Curve(run=0, series=Series(list(range(len(values))), values))], width=40, height=3, in_colour=False
    )
    assert any(0x2800 < ord(character) < 0x2900 for character in text.plain)


def test_short_numbers():
    numbers = (0, 1.23456, 123456, 2.5e9, 3e-4, -7e-5, 1e300)
    assert [short(n) for n in numbers] == ["0", "1.235", "123k", "2.5G", "3.00e-04", "-7.00e-05", "1.00e+300"]
