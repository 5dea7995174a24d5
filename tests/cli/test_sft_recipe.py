import json

import pytest

from tests.cli.command import ROOT, ended, finish, start


@pytest.mark.proof
def test_the_recipe_fine_tunes_a_hugging_face_directory(tmp_path):
    """As its header says: the loss of the responses that were held out falls from near ln 160 to below 1.3."""
    process = start("train", "configs/sft.toml", f"run.dir={tmp_path / 'run'}", "--json", cwd=ROOT)
    with ended(process):
        result = finish(process)
    assert result.code == 0, result.err
    losses = [json.loads(line)["eval_loss"] for line in (tmp_path / "run" / "eval.jsonl").read_text().splitlines()]
    assert losses[0] == pytest.approx(5.1, abs=0.3)
    assert losses[-1] < 1.3
    assert json.loads(result.out)["step"] == 60
