"""The demo: the text it reads, runs that fail half way, and what it shows and leaves behind."""

import json

import pytest
import torch

from bench import demo, demo_tables, training

pytest.importorskip("transformers")
TINY = training.Preset(32, 64, 1, 2, 256, 2, 16, 5, "float32", 1e-3)


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setitem(training.PRESETS, "tiny", TINY)
    monkeypatch.setattr(demo, "CORPUS_BYTES", 10_000)


def test_batches_come_from_the_text_and_the_seed():
    text = training.corpus(10_000)
    assert len(text) >= 10_000
    a, b, other = (training.batches(text, TINY, 3, seed) for seed in (0, 0, 1))
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    assert not torch.equal(a[0], other[0])
    assert bytes(a[0][0].tolist()) in text


def test_same_seed_same_losses_and_failures_are_told(tiny, monkeypatch, tmp_path, capsys):
    calls = []

    def breaks_at_third_step(model):
        def step(**batch):
            calls.append(batch)
            if len(calls) == 3:
                raise RuntimeError("out of something")
            return model(**batch)

        return step

    plans = {"eager": lambda model: model, "broken": breaks_at_third_step, "fusedops": lambda model: model}
    monkeypatch.setattr(demo, "plans", lambda device, report: plans)
    assert demo.main(["--device", "cpu", "--output", str(tmp_path)]) == 1
    record = json.loads((tmp_path / "demo.json").read_text())
    eager, broken, ours = record["runs"]
    assert eager["losses"] == ours["losses"]
    assert len(eager["losses"]) == TINY.steps
    assert broken["losses"] == eager["losses"][:2]
    assert eager["step_ms"]["median"] > 0
    assert broken["step_ms"] is None
    assert (tmp_path / "losses.png").stat().st_size > 0
    shown = capsys.readouterr().out
    assert "broken ended after 2 steps: RuntimeError: out of something" in shown
    assert "largest difference from eager" in shown


def test_tables_name_sites_and_reasons():
    norm = {"rule": "rms_norm.llama", "op": "rms_norm", "module": "model.layers.0.norm"}
    other = {**norm, "module": "model.layers.1.norm"}
    left = {"anchor": "aten.rsqrt.default", "module": "", "reason": "it has no weight"}
    record = {"runs": [{"sites": [norm, other], "declined": [left]}]}
    columns = [list(c.cells) for c in demo_tables.sites(record).columns]
    assert columns == [["rms_norm"], ["rms_norm.llama"], ["model.layers.*.norm"], ["2"]]
    assert [list(c.cells) for c in demo_tables.declined(record).columns][2] == ["it has no weight"]


def test_too_few_steps_are_refused(capsys):
    assert demo.main(["--device", "cpu", "--steps", "2"]) == 2
    assert "warm-up" in capsys.readouterr().out


def test_summary_compares_with_the_last_plain_run():
    def run(name, peak, step):
        return {
            "name": name,
            "peak_mib": peak,
            "step_ms": step and {"median": step},
            "sites": ["a", "b"],
            "declined": [],
        }

    runs = [run("eager", 40.0, 9.0), run("torch.compile", 20.0, 4.0), run("fusedops", 10.0, 5.0)]
    sites, memory, time = demo_tables.summary({"runs": runs})
    assert sites == "2 sites were replaced and 0 declined."
    assert memory == "fusedops takes 0.50 times the peak memory of torch.compile."
    assert time == "fusedops takes 1.25 times the time of a step of torch.compile."
    assert demo_tables.summary({"runs": [run("eager", None, 9.0), run("fusedops", None, None)]}) == [sites]
