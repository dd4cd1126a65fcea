"""The text of a report: places by their names, sizes in units that show them."""

from __future__ import annotations

from oxytorch.rewriting.report import Entry, Report


def report(*modules: str, before: int = 0, after: int = 0) -> str:
    entries = [Entry("pack", module, True, "Linear") for module in modules]
    return str(Report("Model", "bfloat16", ["pack"], entries, 0.5, before, after))


def test_numbers_of_several_modules_become_stars() -> None:
    assert report("layers.0.up", "layers.1.up").endswith(" layers.*.up")


def test_a_single_module_keeps_its_number() -> None:
    assert report("layers.3.up").endswith(" layers.3.up")


def test_a_path_of_numbers_stays_as_it_is() -> None:
    """A lone star says nothing."""
    assert report("0", "2").endswith(" 0, 2")
    assert report("0", "2", "4.1").endswith(" 0, 2, and 1 more")


def test_the_model_itself_is_named() -> None:
    assert report("").endswith("(the model)")


def test_small_models_have_a_size() -> None:
    assert "parameters 2.1 KiB -> 100 bytes" in report("0", before=2150, after=100)
    assert "parameters 1.5 MiB -> 2.00 GiB" in report("0", before=3 << 19, after=2 << 30)
