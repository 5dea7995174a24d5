"""A restart compiles nothing, in one process and in two, with nothing asked for in the config."""

import re
from pathlib import Path

import pytest

from jaxpar.config import config_to_toml
from tests.cli.command import finish, finish_all, start, start_all
from tests.trainer.runs import column, rows_of, tiny

pytestmark = pytest.mark.proof

MESH = {"data": 1, "fsdp": 2, "tensor": 1}


def seconds_of(log: str) -> float:
    return float(re.search(r"compiled in ([\d.]+) s", log)[1])


def test_a_restart_of_one_process_compiles_nothing(tmp_path):
    config = tiny(Path("run"), runtime={"cpu_devices": 2}, mesh=MESH, train={"stop_at": 2})
    (tmp_path / "config.toml").write_text(config_to_toml(config))
    environment = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "XLA_FLAGS": ""}
    logs = []
    for stop_at in (2, 4):
        process = start("train", "config.toml", f"train.stop_at={stop_at}", cwd=tmp_path, environment=environment)
        result = finish(process)
        assert result.code == 0, result.err
        logs.append(result.err)
    first, second = logs
    assert f"compiled programs are kept in {tmp_path / 'cache'}" in first
    assert "from the compilation cache" not in first
    assert re.search(r"compiled in [\d.]+ s, from the compilation cache", second)
    assert seconds_of(second) < seconds_of(first)
    assert column(rows_of(tmp_path / "run" / "metrics.jsonl"), "step") == [1, 2, 3, 4]


def test_two_processes_find_what_the_first_has_kept(tmp_path):
    config = tiny(Path("run"), runtime={"cpu_devices": 4})
    logs = []
    for stop_at in (2, 4):
        results = finish_all(start_all(config, f"train.stop_at={stop_at}", cwd=tmp_path))
        assert [result.code for result in results] == [0, 0], [result.err for result in results]
        logs.append(results[0].err)
    assert f"compiled programs are kept in {tmp_path / 'run' / 'compiled'}" in logs[0]
    assert "from the compilation cache" not in logs[0]
    assert "from the compilation cache" in logs[1]
    assert column(rows_of(tmp_path / "run" / "metrics.jsonl"), "step") == [1, 2, 3, 4]
