"""DDP with a graph for each bucket of parameters, and FSDP2, in one process over gloo."""

import subprocess
import sys

import pytest
import torch

PRELUDE = """
import os, warnings
import torch, torch.distributed as dist
import fusedops
from tests.rewriting import sites, compiled, distance, tiny, tokens
warnings.simplefilter("error", fusedops.FusedopsWarning)
store = dist.HashStore()
dist.init_process_group("gloo", rank=0, world_size=1, store=store)
model, ids, report = tiny(), tokens(), fusedops.Report()
model(input_ids=ids, labels=ids).loss.backward()
expected = {n: p.grad.clone() for n, p in model.named_parameters()}
model.zero_grad()
"""

DDP = """
dist._DEFAULT_FIRST_BUCKET_BYTES = 4096
call = compiled(torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.02), report)
call(input_ids=ids, labels=ids).loss.backward()
assert report.graphs > 1, "one bucket: nothing was split"
assert report.counts() == sites(swiglu=1), report  # the end of a bucket is between the other's activation and product
"""

FSDP2 = """
from torch.distributed.fsdp import fully_shard
for layer in model.model.layers:
    fully_shard(layer)
fully_shard(model)
call = compiled(model, report)
out = call(input_ids=ids, labels=ids)
values = out.logits + 0
out.loss.backward()
again = call(input_ids=ids, labels=ids)
again.loss.backward()
try:
    again.logits + 0
except fusedops.StaleLogitsError:
    pass  # the gathered weight is gone
"""

CHECK = """
scale = 1 if "ddp" in {mode!r} else 2
gradients = {{n.removeprefix("_orig_mod."): p.grad for n, p in model.named_parameters()}}
gradients = {{n: (g.full_tensor() if hasattr(g, "full_tensor") else g) / scale for n, g in gradients.items()}}
assert distance(expected, gradients) < 1e-5
assert not report.failures
dist.destroy_process_group()
"""


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without distributed")
@pytest.mark.parametrize(("mode", "body"), [("ddp", DDP), ("fsdp2", FSDP2)])
def test_one_process(mode, body) -> None:
    script = PRELUDE + body + CHECK.format(mode=mode)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
