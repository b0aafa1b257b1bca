"""Errors of the weight's gradient in a training, at a tiny size on a CPU."""

import json

import pytest
import torch

from bench import accumulation, publish, recording
from bench.training import Preset
from tests.bench.tiny import CPU

STEPS = 4
TINY = Preset(32, 64, 1, 2, 256, 4, 32, STEPS, "bfloat16", 1e-2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("results")
    accumulation.measure(TINY, CPU, recording.saving(made / "accumulation.json"), None)
    return made


@pytest.fixture
def record(folder):
    return json.loads((folder / "accumulation.json").read_text())


def test_sums_in_bfloat16_lose_with_every_chunk_and_those_in_float32_nothing(record):
    assert len(record["steps"]) == STEPS and not record["not_run"]
    for step in record["steps"]:
        exact, rounded = (step["error_ratios"][sums] for sums in accumulation.SUMS)
        assert exact[0] == rounded[0] == 1.0 and len(exact) == len(rounded) == len(accumulation.CHUNKS)
        assert exact == pytest.approx([1.0] * len(exact), rel=0.05)
        assert rounded == sorted(rounded) and rounded[-1] > 1.5
    assert record["steps"][-1]["loss"] < record["steps"][0]["loss"]


def test_record_becomes_a_table_and_a_figure(record, tmp_path):
    table = accumulation.table(record)
    assert list(table.columns[0].cells) == [str(count) for count in accumulation.CHUNKS]
    assert {next(iter(column.cells)) for column in table.columns[1:]} == {"1.000"}
    pytest.importorskip("matplotlib")
    (line,) = accumulation.draw(record, tmp_path)
    assert "Figure" in line and (tmp_path / accumulation.FIGURE).read_bytes().startswith(b"\x89PNG")


def test_published_where_it_was_recorded(folder, tmp_path):
    part = publish.pages(folder)["benchmarks.md"].partition("## Chunks")[2].partition("## Sweeps")[0]
    assert "python -m bench.accumulation" in part and accumulation.FIGURE in part and "| 64 |" in part
    assert "bench.accumulation" not in publish.pages(tmp_path)["benchmarks.md"]


def test_out_of_time_names_the_steps_that_are_left():
    record = accumulation.measure(TINY, CPU, lambda record: None, seconds=0)
    assert record["not_run"] == list(range(STEPS)) and not accumulation.table(record).row_count


def test_walks_follow_the_chain():
    ids = accumulation.walks(TINY, CPU.generator())
    assert ids.shape == (STEPS, TINY.batch, TINY.sequence + 1) and ids.min() >= 0 and ids.max() < TINY.vocabulary
    pairs = ids.unfold(-1, 2, 1).reshape(-1, 2).unique(dim=0)
    assert pairs[:, 0].bincount().max() <= accumulation.SUCCESSORS


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what it needs where there is no GPU")
def test_without_a_gpu_it_says_what_it_needs(tmp_path, capsys):
    assert accumulation.main(["--output", str(tmp_path)]) == 2
    assert "GPU" in capsys.readouterr().out
