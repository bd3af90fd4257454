"""Tables of benchmark records, compared with known numbers."""

from __future__ import annotations

import csv
import io
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from selftpt.data.datasets import DATASETS
from selftpt.errors import SelfTPTError, SelfTPTWarning
from selftpt.evaluation import tables
from selftpt.evaluation.runs import Record, read_records
from selftpt.evaluation.tables import Cell, Row, Table, column_title, make_table, render
from selftpt.evaluation.tables.paper import method_order
from selftpt.evaluation.tables.render import escape_latex
from selftpt.methods import METHODS
from tests.helpers.commands import Run, refused

CLIP_B16 = {"name": "ViT-B-16-quickgelu", "pretrained": "openai", "digest": "0123456789abcdef"}
TINY = {"name": "selftpt-tiny", "pretrained": None, "digest": "fedcba9876543210"}
PAPER = json.loads(Path(tables.__file__).with_name("paper.json").read_text("utf-8"))
SOURCE = {"dataset": "imagenet", "published": True, "shots": 16, "share": 1.0, "classes": 1000, "unreadable": 0}
TEST_IMAGES = {
    "imagenet": 50000,
    "caltech101": 2465,
    "oxford_pets": 3669,
    "dtd": 1692,
    "eurosat": 8100,
    "imagenetv2": 10000,
}


def record(method: str, dataset: str, top1: float, seed: int | None = 1, **other: Any) -> Record:
    """Return the record of a cross-dataset run with the settings of the paper, except for the given ones."""
    source = None if seed is None else SOURCE
    result = {
        "top1": top1,
        "top5": top1 + 5,
        "ece": 100 - top1,
        "images": TEST_IMAGES.get(dataset, 100),
        "classes": 9,
    }
    plain = {
        "protocol": "cross-dataset",
        "method": method,
        "dataset": dataset,
        "seed": seed,
        "model": CLIP_B16,
        "data": {"published": True, "limit": None, "unreadable": 0},
        "source": source,
        "settings": {"adapt": {"lr": 0.1, "steps": 10}, "learn": {"seed": seed}},
        "random_init": False,
        "results": {"test": result},
    }
    return plain | other


def base_to_new(method: str, dataset: str, base: float, new: float, **other: Any) -> Record:
    images = TEST_IMAGES[dataset]
    results = {
        "base": {"top1": base, "top5": 90.0, "ece": 5.0, "images": images // 2},
        "new": {"top1": new, "top5": 90.0, "ece": 5.0, "images": images - images // 2},
        "harmonic": 2 * base * new / (base + new),
    }
    source = {**SOURCE, "dataset": dataset, "classes": {"oxford_pets": 19, "dtd": 24}[dataset]}
    return record(method, dataset, 0, **{"protocol": "base-to-new", "results": results, "source": source} | other)


def row(table: Table, name: str) -> Row:
    (found,) = [row for row in table.rows if row.name == name]
    return found


def names(table: Table) -> list[str]:
    return [row.name for row in table.rows]


def write(folder: Path, *records: Record) -> Path:
    folder.joinpath("records.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records), "utf-8")
    return folder


THREE_SEEDS = [
    record("clip", "oxford_pets", 88.0, None),
    record("clip", "dtd", 44.0, None),
    *(record("self-tpt", "oxford_pets", top1, seed) for seed, top1 in ((1, 90.0), (2, 91.0), (3, 92.0))),
    *(record("self-tpt", "dtd", top1, seed) for seed, top1 in ((1, 50.0), (2, 47.0), (3, 44.0))),
]


def test_means_standard_deviations_and_averages_over_seeds() -> None:
    table = make_table(THREE_SEEDS, "cross-dataset", paper="none")
    assert table.columns == ("oxford_pets", "dtd", "average")
    assert names(table) == ["clip", "self-tpt"]
    assert row(table, "clip").cells == {"oxford_pets": Cell(88), "dtd": Cell(44), "average": Cell(66)}
    assert row(table, "self-tpt").cells == {
        "oxford_pets": Cell(91, 1, 3),
        "dtd": Cell(47, 3, 3),
        "average": Cell(69, 1, 3),  # mean of 70, 69 and 68
    }
    assert row(table, "self-tpt").best == {"oxford_pets", "dtd", "average"}
    assert not row(table, "clip").best


def test_table_as_text() -> None:
    assert render(make_table(THREE_SEEDS, "cross-dataset")) == (
        """\
cross-dataset: top-1 accuracy (%) on the test images

method            seeds  Pets         DTD          Average
clip              -      88.00        44.00        66.00
CLIP (paper)      -      88.25        44.27        66.26
self-tpt          3      91.00*±1.00  47.00*±3.00  69.00*±1.00
Self-TPT (paper)  -      91.83 ±0.26  49.02 ±0.29  70.42

*: best of our runs
±: sample standard deviation over seeds; our runs use the same crops of an image with every seed
(paper): Efficient Test-Time Prompt Tuning for Vision-Language Models, tab:cmp_with_sota_cross_dataset; \
averages are over the columns shown
"""
    )


def test_table_as_markdown() -> None:
    lines = render(make_table(THREE_SEEDS, "cross-dataset", paper="none"), "markdown").splitlines()
    assert lines[2:6] == [
        "| method | seeds | Pets | DTD | Average |",
        "| --- | ---: | ---: | ---: | ---: |",
        "| clip | - | 88.00 | 44.00 | 66.00 |",
        "| self-tpt | 3 | **91.00** ±1.00 | **47.00** ±3.00 | **69.00** ±1.00 |",
    ]
    piped = make_table([record("a|b", "dtd", 1.0)], "cross-dataset", paper="none")
    assert r"| a\|b | 1 | 1.00 | 1.00 |" in render(piped, "markdown")


def test_latex_table_escapes_text_and_marks_the_best_in_bold() -> None:
    mine = [record("50%_#1", "my_set", top1, seed, model=TINY) for seed, top1 in ((1, 50.0), (2, 52.0))]
    text = render(make_table([*mine, record("clip", "my_set", 40.0, None)], "cross-dataset", paper="none"), "latex")
    lines = text.splitlines()
    assert r"method & seeds & my\_set & Average \\" in lines
    assert r"50\%\_\#1 \dag{} & 2 & \textbf{51.00} $\pm$1.41 & \textbf{51.00} $\pm$1.41 \\" in lines
    assert r"clip & - & 40.00 & 40.00 \\" in lines
    assert r"\begin{tabular}{lrr|r}" in lines
    assert r"\caption{cross-dataset: top-1 accuracy (\%) on the test images}" in lines
    assert any(line.startswith(r"\par\footnotesize \dag{} the model is selftpt-tiny") for line in lines)
    assert escape_latex(r"\&%$#_{}~^±†‡§¶") == (
        r"\textbackslash{}\&\%\$\#\_\{\}\textasciitilde{}\textasciicircum{}$\pm$\dag{}\ddag{}\S{}\P{}"
    )


def test_csv_table_can_be_parsed() -> None:
    odd = record('a "b", c', "oxford_pets", 70.123456, model=TINY)
    table = make_table([*THREE_SEEDS, odd], "cross-dataset")
    lines = list(csv.DictReader(io.StringIO(render(table, "csv"))))
    assert {line["protocol"] for line in lines} == {"cross-dataset"}
    assert {line["metric"] for line in lines} == {"test"}
    back = {(line["method"], line["dataset"]): line for line in lines}
    assert len(back) == len(lines) == 4 * 3 + 2
    ours, papers, other = (
        back[key] for key in (("self-tpt", "dtd"), ("Self-TPT (paper)", "oxford_pets"), ('a "b", c', "oxford_pets"))
    )
    assert [ours[key] for key in ("of", "mean", "std", "seeds", "notes")] == ["ours", "47.0", "3.0", "3", ""]
    assert [papers[key] for key in ("of", "mean", "std", "seeds")] == ["paper", "91.83", "0.26", ""]
    assert [other[key] for key in ("mean", "std", "seeds")] == ["70.1235", "", "1"]
    assert other["notes"].endswith("; average over 1 of 2 datasets")


def test_one_seed_has_no_standard_deviation() -> None:
    table = make_table([record("coop", "dtd", 41.256, 2)], "cross-dataset", paper="none")
    assert row(table, "coop").cells["dtd"] == Cell(41.256, None, 1)
    assert "coop    1      41.26  41.26" in render(table).splitlines()
    assert table.notes == ()


def test_incomplete_average_is_marked_and_never_the_best() -> None:
    runs = [
        record("coop", "oxford_pets", 99.0),
        record("tpt", "oxford_pets", 80.0),
        record("tpt", "dtd", 40.0),
        record("lasp", "oxford_pets", 60.0),
        record("lasp", "dtd", 20.0),
    ]
    table = make_table(runs, "cross-dataset", paper="none")
    assert render(table).splitlines()[2:6] == [
        "method  seeds  Pets    DTD     Average",
        "coop †  1      99.00*  -       99.00",
        "lasp    1      60.00   20.00   40.00",
        "tpt     1      80.00   40.00*  60.00*",
    ]
    assert table.marks == {"average over 1 of 2 datasets": "†"}


def test_different_numbers_of_seeds_are_shown_as_a_range() -> None:
    runs = [
        record("coop", "oxford_pets", 80.0, 1),
        record("coop", "oxford_pets", 82.0, 2),
        record("coop", "dtd", 41.0, 1),
    ]
    table = make_table(runs, "cross-dataset", paper="none")
    assert row(table, "coop").cells["average"] == Cell(61)
    assert "coop    1-2    81.00 ±1.41  41.00  61.00" in render(table).splitlines()


def test_last_of_several_records_of_a_run_is_used() -> None:
    again = [*THREE_SEEDS, record("clip", "dtd", 45.0, None, data={"published": False})]
    table = make_table(again, "cross-dataset", paper="none")
    assert row(table, "clip").cells["dtd"].mean == 45
    assert row(table, "clip").notes == ("the split is not the published one: DTD",)


def test_all_best_values_that_round_to_the_same_digits_are_marked() -> None:
    runs = [record("clip", "dtd", 44.001, None), record("coop", "dtd", 44.004), record("tpt", "dtd", 43.99)]
    best = {row.name: bool(row.best) for row in make_table(runs, "cross-dataset").rows if not row.paper}
    assert best == {"clip": True, "coop": True, "tpt": False}


def test_row_names_have_only_the_settings_that_differ() -> None:
    quick = {"adapt": {"lr": 1.0, "steps": 10}, "learn": {"seed": 1}}
    runs = [record("self-tpt", "dtd", 49.0), record("self-tpt", "dtd", 50.0, settings=quick)]
    assert names(make_table(runs, "cross-dataset", paper="none")) == [
        "self-tpt (adapt.lr 0.1)",
        "self-tpt (adapt.lr 1.0)",
    ]
    runs += [record("self-tpt", "dtd", 30.0, model=TINY)]
    assert names(make_table(runs, "cross-dataset", paper="none")) == [
        "self-tpt (ViT-B-16-quickgelu openai, adapt.lr 0.1)",
        "self-tpt (ViT-B-16-quickgelu openai, adapt.lr 1.0)",
        "self-tpt (selftpt-tiny)",
    ]
    runs = [record("coop", "dtd", 50.0), record("coop", "dtd", 40.0, source={**SOURCE, "share": 0.25})]
    assert names(make_table(runs, "cross-dataset", paper="none")) == [
        "coop (source.share 1.0)",
        "coop (source.share 0.25)",
    ]
    runs = [record("coop", "dtd", 50.0), record("coop", "dtd", 40.0, data={"published": True, "limit": 99})]
    assert names(make_table(runs, "cross-dataset", paper="none")) == ["coop (limit none)", "coop (limit 99)"]
    renewed = {**TINY, "digest": "00112233445566"}
    runs = [record("clip", "dtd", 30.0, model=TINY), record("clip", "dtd", 31.0, model=renewed)]
    assert names(make_table(runs, "cross-dataset", paper="none")) == [
        "clip (selftpt-tiny fedcba98)",
        "clip (selftpt-tiny 00112233)",
    ]


def test_setting_that_depends_on_the_dataset_is_noted_without_extra_rows() -> None:
    runs = [record("coop", name, 50.0, settings={"template": f"{name} {{}}."}) for name in ("dtd", "eurosat")]
    table = make_table(runs, "cross-dataset", paper="none")
    assert names(table) == ["coop"]
    assert table.marks == {"settings differ between datasets: template": "†"}


@pytest.mark.parametrize(
    ("changes", "note"),
    [
        ({}, None),
        ({"model": {**CLIP_B16, "name": "ViT-B-16"}}, None),
        ({"model": {**TINY, "name": "hf-hub:timm/vit_base_patch16_clip_224.openai"}}, None),
        ({"model": TINY}, "the model is selftpt-tiny, not the paper's CLIP ViT-B/16 with OpenAI's weights"),
        (
            {"model": {**CLIP_B16, "pretrained": "laion2b_s34b_b88k"}},
            "the model is ViT-B-16-quickgelu laion2b_s34b_b88k, not the paper's CLIP ViT-B/16 with OpenAI's weights",
        ),
        ({"data": {"published": False}}, "the split is not the published one"),
        ({"source": {**SOURCE, "published": False}}, "learned from images that are not the published 16 shots"),
        ({"source": {**SOURCE, "shots": 8}}, "learned from images that are not the published 16 shots"),
        ({"source": {**SOURCE, "share": 0.5}}, "learned from images that are not the published 16 shots"),
        ({"source": {**SOURCE, "classes": 999}}, "learned from images that are not the published 16 shots"),
        ({"source": {**SOURCE, "unreadable": 1}}, "learned from images that are not the published 16 shots"),
        (
            {"results": {"test": {"top1": 50.0, "images": 360}}, "data": {"published": True, "limit": 360}},
            "not the paper's number of images: DTD 360 of 1692",
        ),
        (
            {"data": {"published": True, "unreadable": 2}},
            "not the paper's number of images: DTD 1692 of 1692 (2 unreadable)",
        ),
        ({"random_init": True, "model": TINY}, "the weights were randomly initialised: the numbers have no meaning"),
    ],
)
def test_differences_from_the_paper_are_marked_with_a_note(changes: dict[str, Any], note: str | None) -> None:
    table = make_table([record("coop", "dtd", 50.0, **changes)], "cross-dataset")
    assert row(table, "coop").notes == ((note,) if note else ())
    assert len(row(table, "CoOp (paper)").notes) == 1  # the note on its training
    if note:
        assert "coop †" in render(table)
        assert f"\n† {note}\n" in render(table)


def test_dataset_that_is_not_in_the_paper_is_marked_only_if_it_was_limited() -> None:
    assert make_table([record("coop", "mine", 50.0)], "cross-dataset").marks == {}
    cut = record("coop", "mine", 50.0, data={"published": True, "limit": 100})
    assert list(make_table([cut], "cross-dataset").marks) == ["not the paper's number of images: mine 100"]


def test_marks_are_unique_and_equal_notes_share_a_mark() -> None:
    models = [{"name": f"model-{i}", "pretrained": None, "digest": f"{i:016}"} for i in range(6)]
    runs = [record("coop", "dtd", 50.0, model=model) for model in models] + [
        record("tpt", "dtd", 50.0, model=models[5])
    ]
    table = make_table(runs, "cross-dataset", paper="none")
    assert list(table.marks.values()) == ["†", "‡", "§", "¶", "††", "‡‡"]
    assert "\ntpt ‡‡ " in render(table)


def test_random_weights_are_never_the_best() -> None:
    runs = [record("clip", "dtd", 44.0), record("coop", "dtd", 99.0, random_init=True), record("tpt", "dtd", 43.0)]
    table = make_table(runs, "cross-dataset", paper="none")
    assert [bool(row.best) for row in table.rows] == [True, False, False]


def test_base_to_new_metrics_and_blocks() -> None:
    runs = [
        base_to_new("self-tpt", "oxford_pets", 60.0, 90.0),
        base_to_new("self-tpt", "dtd", 40.0, 20.0),
        base_to_new("clip", "oxford_pets", 50.0, 50.0, seed=None),
        base_to_new("clip", "dtd", 80.0, 20.0, seed=None),
    ]
    means = {
        metric: [cell.mean for cell in row(make_table(runs, "base-to-new", metric), "self-tpt").cells.values()]
        for metric in ("new", "base", "harmonic", "ece", "base-top5")
    }
    assert means == {
        "new": [90, 20, 55],
        "base": [60, 40, 50],
        "harmonic": [
            72,
            pytest.approx(80 / 3),
            pytest.approx(2 * 50 * 55 / 105),
        ],  # harmonic mean of the averages, as in papers
        "ece": [5, 5, 5],
        "base-top5": [90, 90, 90],
    }
    # Different seeds on the datasets do not change how harmonic means are averaged.
    runs[1] = base_to_new("self-tpt", "dtd", 40.0, 20.0, seed=2)
    assert row(make_table(runs, "base-to-new", "harmonic"), "self-tpt").cells["average"].mean == means["harmonic"][-1]
    table = make_table(runs, "base-to-new")
    assert table.title == "base-to-new: top-1 accuracy (%)"
    assert table.marks == {}  # both halves together have the paper's number of images
    assert {block.metric: [row.name for row in block.rows] for block in table.blocks} == {
        "base": ["clip", "self-tpt"],
        "new": ["clip", "CLIP (paper)", "self-tpt", "Self-TPT (paper)"],
        "harmonic": ["clip", "self-tpt"],
    }
    assert make_table(runs, "base-to-new", "new").title == "base-to-new: top-1 accuracy (%) on new classes"
    assert names(make_table(runs, "base-to-new", "harmonic")) == ["clip", "self-tpt"]


def test_changed_settings_are_noted() -> None:
    runs = [record("self-tpt", "dtd", 50.0, changes={"learn.lr": 1.0}), record("clip", "dtd", 44.0, None, changes={})]
    table = make_table(runs, "cross-dataset", paper="none")
    assert row(table, "self-tpt").notes == ("other settings than the method's own: learn.lr 1.0",)
    assert row(table, "clip").notes == ()


def test_only_rows_with_the_same_number_of_images_are_compared() -> None:
    """A result on a part of the test images is never marked as the best."""
    part = {"test": {"top1": 90.0, "top5": 95.0, "ece": 1.0, "images": 100, "classes": 47}}
    runs = [
        record("clip", "dtd", 44.0, None),
        record("coop", "dtd", 50.0),
        record("self-tpt-v", "dtd", 0, results=part),
    ]
    assert [row.name for row in make_table(runs, "cross-dataset").rows if row.best] == ["coop"]


def test_lowest_calibration_error_is_best() -> None:
    runs = [record("clip", "dtd", 44.0), record("coop", "dtd", 50.0)]  # calibration errors 56 and 50
    table = make_table(runs, "cross-dataset", "ece")
    assert [row.name for row in table.rows if row.best] == ["coop"]
    assert row(table, "coop").cells["dtd"].mean == 50


def test_source_of_the_protocol_is_shown_and_not_averaged() -> None:
    runs = [
        record("clip", "imagenetv2", 60.0, None, protocol="domain"),
        record("clip", "imagenet", 66.0, None, protocol="domain"),
    ]
    table = make_table(runs, "domain")
    assert [column_title(column) for column in table.columns] == ["ImageNet", "V2", "Average"]
    assert row(table, "clip").cells["average"] == Cell(60)
    assert row(table, "CLIP (paper)").cells == {"imagenetv2": Cell(60.86), "average": Cell(60.86)}
    assert "ImageNet, the source of the protocol, is not in the average" in table.notes


CALTECH = {**SOURCE, "dataset": "caltech101", "classes": 100}


def test_runs_from_different_sources_never_share_a_row() -> None:
    """Neither runs on the same dataset, which would be averaged, nor runs on different datasets."""
    runs = [record("coop", "dtd", 50.0), record("coop", "dtd", 30.0, 2, source=CALTECH)]
    table = make_table(runs, "cross-dataset", paper="none")
    assert {row.name: row.cells["dtd"].mean for row in table.rows} == {
        "coop (source imagenet)": 50,
        "coop (source caltech101)": 30,
    }
    runs = [record("coop", "oxford_pets", 80.0), record("coop", "dtd", 30.0, source=CALTECH)]
    table = make_table(runs, "cross-dataset", paper="none")
    assert {row.name: [*row.cells] for row in table.rows} == {
        "coop (source imagenet)": ["oxford_pets", "average"],
        "coop (source caltech101)": ["dtd", "average"],
    }
    assert row(table, "coop (source imagenet)").notes == ("learned from ImageNet", "average over 1 of 2 datasets")
    assert row(table, "coop (source caltech101)").notes == (
        "learned from Caltech, not from the paper's ImageNet",
        "average over 1 of 2 datasets",
    )


def test_source_of_the_records_is_not_in_the_average() -> None:
    """If all runs have one source, the rows of zero-shot CLIP and of the paper leave it out too."""
    runs = [
        *(record("clip", name, top1, None) for name, top1 in (("caltech101", 90.0), ("dtd", 40.0), ("eurosat", 20.0))),
        *(
            record("coop", name, top1, source=CALTECH)
            for name, top1 in (("caltech101", 99.0), ("dtd", 50.0), ("eurosat", 40.0))
        ),
    ]
    table = make_table(runs, "cross-dataset")
    assert row(table, "coop").cells["average"].mean == 45
    assert row(table, "clip").cells["average"].mean == 30
    assert row(table, "CLIP (paper)").cells["average"].mean == pytest.approx((44.27 + 42.01) / 2)
    assert row(table, "coop").best == {"caltech101", "dtd", "eurosat", "average"}
    assert row(table, "coop").notes == ("learned from Caltech, not from the paper's ImageNet",)
    assert row(table, "clip").notes == ()
    assert "Caltech is the source and not in the average" in table.notes
    assert "ImageNet" not in " ".join(table.notes)


def test_dataset_that_is_the_source_of_the_paper_only_is_averaged() -> None:
    runs = [record("coop", name, top1, source=CALTECH) for name, top1 in (("imagenet", 60.0), ("dtd", 40.0))]
    table = make_table(runs, "cross-dataset", paper="none")
    assert row(table, "coop").cells["average"].mean == 50
    assert table.notes == ()


def test_recorded_source_is_named_in_the_footer() -> None:
    runs = [record("coop", name, top1, protocol="domain") for name, top1 in (("imagenet", 70.0), ("imagenetv2", 60.0))]
    table = make_table(runs, "domain", paper="none")
    assert row(table, "coop").cells["average"].mean == 60
    assert table.notes == ("ImageNet is the source and not in the average",)


def test_averages_of_different_sources_are_compared_only_over_the_same_datasets() -> None:
    """The first two rows are averaged over the same two datasets, the third over others."""
    datasets = ("imagenet", "caltech101", "dtd")
    runs = [
        *(record("clip", name, top1, None) for name, top1 in zip(datasets, (60.0, 90.0, 40.0), strict=True)),
        *(record("coop", name, top1) for name, top1 in zip(datasets, (70.0, 92.0, 38.0), strict=True)),
        *(record("tpt", name, top1, source=CALTECH) for name, top1 in zip(datasets, (50.0, 99.0, 45.0), strict=True)),
    ]
    table = make_table(runs, "cross-dataset", paper="none")
    assert {row.name: row.cells["average"].mean for row in table.rows} == {"clip": 65, "coop": 65, "tpt": 47.5}
    assert {row.name: row.best for row in table.rows} == {
        "clip": {"average"},
        "coop": {"imagenet", "average"},
        "tpt": {"caltech101", "dtd"},
    }
    assert {row.name: row.notes for row in table.rows} == {
        "clip": ("ImageNet is not in the average",),
        "coop": ("learned from ImageNet; ImageNet is not in the average",),
        "tpt": ("learned from Caltech, not from the paper's ImageNet; Caltech is not in the average",),
    }
    assert table.notes == ()


def test_source_is_noted_for_random_weights_too() -> None:
    runs = [record("coop", "dtd", 50.0, source=CALTECH, random_init=True)]
    (only,) = make_table(runs, "cross-dataset", paper="none").rows
    assert only.notes[0] == "learned from Caltech, not from the paper's ImageNet"


def test_template_of_the_records_is_used() -> None:
    runs = [record("clip", "dtd", 44.0, None, template="a photo of a {}."), record("clip", "dtd", 46.0, None)]
    runs[1]["template"] = "{} texture."
    table = make_table(runs, "cross-dataset", paper="none")
    assert {row.name: row.notes for row in table.rows} == {
        "clip (template a photo of a {}.)": (),
        "clip (template {} texture.)": ("the template is not the protocol's",),
    }
    new = base_to_new("clip", "dtd", 50.0, 60.0, seed=None, template="{} texture.")
    assert make_table([new], "base-to-new", paper="none").marks == {}


def test_setting_with_the_name_of_a_record_field_separates_rows() -> None:
    runs = [record("own", "dtd", top1, settings={"limit": top1}) for top1 in (40.0, 50.0)]
    assert names(make_table(runs, "cross-dataset", paper="none")) == [
        "own (settings.limit 40.0)",
        "own (settings.limit 50.0)",
    ]


def test_control_characters_in_names_are_escaped() -> None:
    table = make_table([record("a\nb", "my\x1bset", 50.0)], "cross-dataset", paper="none")
    for format in ("text", "markdown", "latex"):
        text = render(table, format)
        assert "\x1b" not in text
        assert len([line for line in text.splitlines() if "50.00" in line]) == 1
    assert "a\\nb" in render(table)


def test_methods_are_in_the_order_of_the_method_table() -> None:
    order = method_order()
    assert [name for name in order if name in METHODS] == list(METHODS)
    assert len(set(order)) == len(order)
    for pair in (("lasp", "rpo"), ("maple", "promptsrc"), ("coop+tpt", "maple+tpt"), ("promptsrc+tpt", "promptalign")):
        assert order.index(pair[0]) < order.index(pair[1])


def test_columns_follow_the_paper_and_its_printed_average_is_used_if_complete() -> None:
    theirs = [name for name in DATASETS if not name.startswith("imagenet")]
    runs = [record("maple+tpt", name, 50.0) for name in reversed(theirs)]
    table = make_table(runs, "cross-dataset")
    assert table.columns == (*theirs, "average")
    assert row(table, "MaPLe+TPT (paper)").cells["average"] == Cell(66.50)  # as printed; its columns give 66.492
    fewer = make_table(runs[1:], "cross-dataset")  # without UCF101
    assert row(fewer, "MaPLe+TPT (paper)").cells["average"].mean == pytest.approx((664.92 - 69.19) / 9)
    more = make_table([*runs, record("maple+tpt", "mine", 50.0)], "cross-dataset")
    assert more.columns == (*theirs, "mine", "average")
    assert row(more, "MaPLe+TPT (paper)").cells["average"] == Cell(66.50)
    assert row(more, "MaPLe+TPT (paper)").notes == ("average over 10 of 11 datasets",)


def test_paper_option_selects_the_rows_of_the_paper() -> None:
    runs = [record("own", "dtd", 50.0), record("tpt", "dtd", 50.0)]
    assert names(make_table(runs, "cross-dataset", paper="none")) == ["tpt", "own"]
    assert names(make_table(runs, "cross-dataset")) == ["tpt", "TPT (paper)", "own"]
    everything = names(make_table(runs, "cross-dataset", paper="all"))
    assert len(everything) == 2 + 16
    assert everything[0] == "CLIP (paper)"
    assert everything[everything.index("tpt") + 1] == "TPT (paper)"
    assert everything[-2:] == ["Self-TPT-v (paper)", "own"]
    assert names(make_table([record("clip", "mine", 50.0, None)], "cross-dataset", paper="all")) == ["clip"]


def test_methods_option_selects_rows() -> None:
    table = make_table(THREE_SEEDS, "cross-dataset", methods=["clip", "tpt", "swapprompt"])
    assert names(table) == ["clip", "CLIP (paper)", "TPT (paper)"]
    assert "no run of swapprompt" in table.notes
    with pytest.raises(SelfTPTError, match="no method is called 'slef-tpt'"):
        make_table(THREE_SEEDS, "cross-dataset", methods=["clip", "slef-tpt"])


def test_unknown_protocol_or_metric_is_refused() -> None:
    with pytest.raises(
        SelfTPTError, match="no protocol is called 'few-shot': choose one of base-to-new, cross-dataset"
    ):
        make_table(THREE_SEEDS, "few-shot")
    with pytest.raises(SelfTPTError, match="cross-dataset has no metric 'new': choose one of test, top5, ece"):
        make_table(THREE_SEEDS, "cross-dataset", "new")
    with pytest.raises(SelfTPTError, match="no run of domain"):
        make_table(THREE_SEEDS, "domain")


def test_records_are_read_in_order(tmp_path: Path) -> None:
    assert read_records(write(tmp_path, *THREE_SEEDS)) == THREE_SEEDS


def test_truncated_last_line_is_left_out_with_a_warning(tmp_path: Path) -> None:
    file = write(tmp_path, *THREE_SEEDS) / "records.jsonl"
    whole = json.dumps(THREE_SEEDS[0] | {"method": "é"}, ensure_ascii=False).encode()
    for end in (30, whole.index("é".encode()) + 1):  # the second is inside a character
        file.write_bytes(json.dumps(THREE_SEEDS[0]).encode() + b"\n" + whole[:end])
        with pytest.warns(SelfTPTWarning, match="skipped line 2 of .*: it was cut short"):
            assert read_records(tmp_path) == THREE_SEEDS[:1]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ('{"protocol": "cross-da', "Invalid control character|Unterminated string"),
        ("[1, 2]", "not an object"),
        ("{}", "no protocol"),
        (json.dumps(THREE_SEEDS[0] | {"results": None}), "results is not an object"),
        (json.dumps(THREE_SEEDS[0] | {"model": {"name": "x"}}), "no model.digest"),
        (json.dumps(THREE_SEEDS[0] | {"protocol": "few-shot"}), "unknown protocol 'few-shot'"),
        (json.dumps(record("clip", "dtd", float("nan"))), "NaN is not a finite number"),
    ],
)
def test_damaged_line_is_refused_with_its_number(tmp_path: Path, line: str, why: str) -> None:
    first = json.dumps(THREE_SEEDS[0])
    tmp_path.joinpath("records.jsonl").write_text(f"{first}\n\n{line}\n{first}\n", "utf-8")
    with pytest.raises(SelfTPTError, match=f"line 3 is damaged .({why})"):
        read_records(tmp_path)


def test_folder_without_records_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SelfTPTError, match="nowhere does not exist"):
        read_records(tmp_path / "nowhere")
    with pytest.raises(SelfTPTError, match="`selftpt bench` makes them"):
        read_records(tmp_path)
    file = write(tmp_path) / "records.jsonl"
    with pytest.raises(SelfTPTError, match="no run has ended"):
        read_records(tmp_path)
    with pytest.raises(SelfTPTError, match="is not a folder"):
        read_records(file)


def test_tables_of_the_paper_have_a_value_for_each_column() -> None:
    labels = [table["label"] for table in PAPER["tables"]]
    assert len(set(labels)) == len(labels) == 14
    for table in PAPER["tables"]:
        assert table["rows"]
        assert {"title", "protocol", "model"} <= table.keys()
        for line in table["rows"]:
            assert len(line["values"]) == len(table["columns"])
            assert len(line.get("std", table["columns"])) == len(table["columns"])
            assert line.keys() >= {"printed"}
        if table["columns"][-1] == "average":
            assert set(table["columns"][:-1]) <= DATASETS.keys()
            assert {line["method"] for line in table["rows"]} <= set(method_order())
    statistics_of = next(table for table in PAPER["tables"] if table["label"] == "tab:dataset_stat")
    assert [line["dataset"] for line in statistics_of["rows"]] == list(DATASETS)


def test_averages_of_the_paper_are_the_means_of_their_rows_with_two_exceptions() -> None:
    exceptions = {
        (table["label"], line["method"])
        for table in PAPER["tables"]
        for line in table["rows"]
        if table["columns"][-1] == "average"
        and abs(statistics.fmean(line["values"][:-1]) - line["values"][-1]) > 0.005 + 1e-9
    }
    assert exceptions == {("tab:cmp_with_sota_cross_dataset", "maple+tpt"), ("tab:cross_dataset_error_bar", "self-tpt")}


def test_command_prints_one_table_per_protocol(tmp_path: Path, run: Run) -> None:
    write(tmp_path, *THREE_SEEDS, base_to_new("clip", "dtd", 50.0, 60.0, seed=None))
    answer = run("table", tmp_path)
    assert answer.code == 0
    assert answer.out.splitlines()[0] == "base-to-new: top-1 accuracy (%)"
    headings = [line for line in answer.out.splitlines() if line in ("base classes", "new classes")]
    assert headings == ["base classes", "new classes"]
    assert "\nharmonic mean of base and new\n" in answer.out
    assert "\n\ncross-dataset: top-1 accuracy (%) on the test images\n" in answer.out
    only = run("table", tmp_path, "--protocol", "cross-dataset", "--paper", "none")
    assert only.out == render(make_table(THREE_SEEDS, "cross-dataset", paper="none"))
    harmonic = run("table", tmp_path, "--metric", "harmonic")  # only base-to-new has this metric
    assert harmonic.out.startswith("base-to-new: harmonic mean")
    assert "cross-dataset" not in harmonic.out
    some = run("table", tmp_path, "--compare", "self-tpt, tpt")
    assert some.out.startswith("cross-dataset")
    assert "TPT (paper)" in some.out
    assert "clip" not in some.out


def test_command_writes_one_csv_of_all_protocols(tmp_path: Path, run: Run) -> None:
    write(tmp_path, *THREE_SEEDS, base_to_new("clip", "dtd", 50.0, 60.0, seed=None))
    out = tmp_path / "table.csv"
    answer = run("table", tmp_path, "--format", "csv", "--paper", "none", "--out", out)
    assert (answer.code, answer.out) == (0, "")
    lines = list(csv.DictReader(io.StringIO(out.read_text("utf-8"))))
    assert [line["protocol"] for line in lines] == ["base-to-new"] * 6 + ["cross-dataset"] * 6
    values = [(line["metric"], line["dataset"], line["mean"]) for line in lines[:6:2]]
    assert values == [("base", "dtd", "50.0"), ("new", "dtd", "60.0"), ("harmonic", "dtd", "54.5455")]


def test_command_errors_are_one_line(tmp_path: Path, run: Run) -> None:
    refused(run("table", tmp_path / "nowhere"), "nowhere does not exist")
    write(tmp_path, *THREE_SEEDS)
    refused(run("table", tmp_path, "--protocol", "few-shot"), "no protocol is called 'few-shot'")
    refused(run("table", tmp_path, "--protocol", "domain"), "no run of domain")
    refused(run("table", tmp_path, "--metric", "speed"), "no metric 'speed'")
    refused(run("table", tmp_path, "--compare", "slef-tpt"), "no method is called 'slef-tpt'")
    refused(run("table", tmp_path, "--format", "html"), "html")
    refused(run("table", tmp_path, "--out", tmp_path), "it is a folder")


def test_tables_do_not_import_torch() -> None:
    code = "import sys, selftpt.cli.table; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
