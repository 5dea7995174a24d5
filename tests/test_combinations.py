"""The page of combinations says what tests and rules say."""

from scripts import combinations


def test_the_page_of_combinations_is_current():
    text = combinations.Page().text()
    assert combinations.PAGE.read_text(encoding="utf-8") == text, "run python -m scripts.combinations"


def test_cases_and_refusals_are_found():
    cases = combinations.parity_cases()
    assert any(case.axes == {"fsdp", "tensor"} and case.test == "meshes" for case in cases)
    assert any(case.settings.get("pipeline.schedule") == "interleaved" for case in cases)
    dense_blocks = next(f for f in combinations.FEATURES if f.key == "model.first_dense_layers")
    assert any(dense_blocks.is_in(case) for case in cases)
    assert "together with pipeline stages" in combinations.refusal(frozenset({"pipeline"}), dense_blocks)
    assert combinations.refusal(frozenset({"pipeline", "expert", "context"}), None) is None
