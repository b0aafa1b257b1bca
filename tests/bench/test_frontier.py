"""The frontier of chunk sizes, at a tiny size on a CPU."""

import json

import pytest
import torch

from bench import frontier, frontier_figure, recording
from csrc_meta import chunks
from tests.bench.tiny import CPU

SHAPE = (48, 16, 300)


@pytest.fixture
def record(monkeypatch, tmp_path):
    monkeypatch.setattr(frontier, "FEWEST_ROWS", 8)
    monkeypatch.setattr(chunks, "SMALL_CHUNK_BYTES", 0)
    monkeypatch.setattr(chunks, "FEWEST_CHUNK_ROWS", 8)
    monkeypatch.setattr(chunks, "WHOLE", 1)
    made = {"machine": {"device": "cpu"}, "cases": [frontier.measure(SHAPE, CPU)], "not_run": [[1, 2, 3]]}
    recording.saving(tmp_path / "frontier.json")(made)
    return json.loads((tmp_path / "frontier.json").read_text())


def test_every_chunk_size_is_measured_with_both_sums(record):
    (case,) = record["cases"]
    points = {(p["accum_dtype"], p["rows"]): p for p in case["points"]}
    assert set(points) == {("float32", r) for r in (4, 8, 16, 32, 48)} | {("bfloat16", r) for r in (4, 8, 16, 32)}
    assert points["float32", 48]["error_ratio"] == 1.0
    assert points["bfloat16", 4]["error_ratio"] > points["float32", 4]["error_ratio"] > 0.9
    assert [frontier_figure.taken_rows(SHAPE, sums) for sums in frontier_figure.COLOURS] == [16, 16]


def test_record_becomes_a_table_and_a_figure(record, tmp_path):
    assert frontier_figure.table(record).row_count == 3
    pytest.importorskip("matplotlib")
    (line,) = frontier_figure.draw(record, tmp_path)
    assert "Figure" in line and (tmp_path / frontier_figure.FIGURE).read_bytes().startswith(b"\x89PNG")
    assert not list(frontier_figure.draw(record | {"cases": []}, tmp_path))


@pytest.mark.parametrize(("shape", "wants"), [((8192, 4096, 128256), 256), ((4096, 4096, 4096), 4096)])
def test_paper_rows(shape, wants):
    """One chunk for each hidden size in the vocabulary, rounded up to a power of two of rows."""
    assert frontier_figure.paper_rows(shape) == wants


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what it needs where there is no GPU")
def test_without_a_gpu_it_says_what_it_needs(tmp_path, capsys):
    assert frontier.main(["--output", str(tmp_path)]) == 2
    assert "GPU" in capsys.readouterr().out
