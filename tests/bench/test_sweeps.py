"""The sweeps' logic and figures, at tiny sizes on a CPU."""

import dataclasses
import json

import pytest
import torch

from bench import recording, sweep_figures, sweeps
from bench.peers.operator import COMPILE, EAGER, OURS
from tests.bench.tiny import CPU, KINDS_HERE

TINY = [
    sweeps.Panel("rms_norm", "hidden size", "6 tokens", (8, 16, 24), lambda n: (6, n)),
    sweeps.Panel("cross_entropy", "vocabulary", "5 tokens", (10, 20, 30), lambda n: (5, n)),
]


def run(tmp_path, seconds=None):
    tasks = [dataclasses.replace(t, kinds=KINDS_HERE) for t in sweeps.tasks(TINY, None)]
    recording.measure(tasks, CPU, recording.saving(tmp_path / "sweeps.json"), seconds)
    return json.loads((tmp_path / "sweeps.json").read_text())


def test_points_become_json_figures_and_a_table(tmp_path):
    record = run(tmp_path)
    shown = sweep_figures.panels(record)
    assert [panel["op"] for panel, _ in shown] == ["rms_norm", "cross_entropy"]
    assert [[case["x"] for case in cases] for _, cases in shown] == [[8, 16, 24], [10, 20, 30]]
    assert all({EAGER, OURS} <= {p["kind"] for p in case["peers"] if "device" in p} for case in record["cases"])
    assert sweep_figures.table(record).row_count == 6
    assert not list(tmp_path.glob("*.part"))
    lines = list(sweep_figures.draw(record, tmp_path))
    pytest.importorskip("matplotlib")
    assert len(lines) == 2
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in sweep_figures.MEASURES)


def test_stopped_run_says_what_it_left(tmp_path):
    record = run(tmp_path, seconds=0.0)
    assert len(record["not_run"]) == 6
    assert not any("Figure" in line for line in sweep_figures.draw(record, tmp_path))
    assert sweep_figures.table(record).columns[3]._cells == ["not run"] * 6


def test_ends_come_first_and_alone_are_compiled():
    tasks = list(sweeps.tasks(TINY, None))
    assert [task.told["x"] for task in tasks] == [8, 24, 10, 30, 16, 20]
    assert [COMPILE in task.kinds for task in tasks] == [True] * 4 + [False] * 2
    assert {task.op.name for task in sweeps.tasks(TINY, ["rms_norm"])} == {"rms_norm"}


def test_panels_are_the_papers():
    ranges = {(panel.op, panel.axis): (panel.points[0], panel.points[-1]) for panel in sweeps.PANELS}
    assert ranges.pop(("cross_entropy", "vocabulary")) == (40960, 163840)
    assert set(ranges.values()) == {(4096, 16384)}
    assert {axis for _, axis in ranges} == {"hidden size", "intermediate size", "sequence length"}
    for task in sweeps.tasks(sweeps.PANELS, None):
        assert len(task.shape) == len(task.op.letters.split(" x "))


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what it needs where there is no GPU")
def test_without_a_gpu_it_says_what_it_needs(tmp_path, capsys):
    assert sweeps.main(["--output", str(tmp_path)]) == 2
    assert "GPU" in capsys.readouterr().out
