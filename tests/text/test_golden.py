"""The golden files are what transformers gives now; the Rust side reads the same files."""

import difflib
import json

import make_golden
import pytest


@pytest.mark.parametrize("name", sorted(make_golden.FILES))
def test_golden_file_is_what_transformers_gives(name: str, request: pytest.FixtureRequest) -> None:
    if name == "default_model":
        assert request.getfixturevalue("default_model") == make_golden.DEFAULT_MODEL
    committed = (make_golden.GOLDEN / f"{name}.json").read_text(encoding="utf-8")
    current = make_golden.generate(name)
    difference = "\n".join(
        difflib.unified_diff(committed.splitlines(), current.splitlines(), lineterm="", n=1)
    )
    assert committed == current, f"run make_golden.py if this is meant:\n{difference[:4000]}"


def test_every_template_has_a_case() -> None:
    templates = {path.stem for path in (make_golden.HERE / "templates").glob("*.jinja")}
    cases = json.loads((make_golden.GOLDEN / "templates.json").read_text(encoding="utf-8"))
    assert templates == {case["template"] for case in cases}
    assert any(case.get("error") == "raised" for case in cases)
