"""The benchmark of the Medusa example, at a tiny size on a CPU."""

import json

import pytest
import torch

from bench import medusa, recording
from bench.peers.operator import COMPILE, EAGER, LIGER, OURS
from tests.bench.tiny import CPU
from tests.rewriting import SIZES

WITHOUT = (COMPILE, LIGER, medusa.COMPILED)


@pytest.mark.parametrize("stage", medusa.STAGES)
def test_peers_agree_and_become_a_table_and_a_figure(stage, tmp_path):
    cases = [medusa.measure(SIZES, 2, stage, batch, 6, CPU, WITHOUT) for batch in (1, 2)]
    assert [[p["name"] for p in c["peers"]] for c in cases] == [[EAGER, OURS]] * 2
    assert all(p["failure"] is None and p["median"] > 0 for c in cases for p in c["peers"])
    record = {"machine": {"device": "cpu"}, "cases": cases, "not_run": [{"heads": 2, "stage": stage, "batch": 4}]}
    recording.saving(tmp_path / "medusa.json")(record)
    record = json.loads((tmp_path / "medusa.json").read_text())
    assert medusa.table(record).row_count == 5
    pytest.importorskip("matplotlib")
    assert len(list(medusa.draw(record, tmp_path))) == 1
    assert (tmp_path / medusa.FIGURE).read_bytes().startswith(b"\x89PNG")


def test_wrong_gradients_get_no_time(monkeypatch):
    real = medusa.Medusa.backward

    def wrong(self, ids, labels):
        losses = real(self, ids, labels)
        self.heads[-1].projection.weight.grad.mul_(2.0)
        return losses

    monkeypatch.setattr(medusa.Medusa, "backward", wrong)
    eager, ours = medusa.measure(SIZES, 2, 1, 1, 6, CPU, WITHOUT)["peers"]
    assert "median" in eager and "wrong gradient" in ours["failure"] and "median" not in ours


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what it needs where there is no GPU")
def test_without_a_gpu_it_says_what_it_needs(tmp_path, capsys):
    assert medusa.main(["--output", str(tmp_path)]) == 2
    assert "GPU" in capsys.readouterr().out
