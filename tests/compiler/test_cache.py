"""torch's compile caches: a second process finds the rewritten graphs, and an edited library does not."""

import os
import subprocess
import sys

import torch

from fusedops.cache_key import sources_digest, tag_compile_caches

# Spelt as transformers does, whose import takes longer than all else here.
SCRIPT = """
import torch, fusedops
import torch.nn.functional as F
from torch._dynamo.utils import counters

norm, head = torch.nn.Parameter(torch.ones(24)), torch.nn.Linear(24, 40, bias=False)

def model(x, labels):
    scaled = x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)
    logits = head(norm * scaled.to(x.dtype))
    labels = F.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
    return F.cross_entropy(logits.float().view(-1, 40), labels.view(-1), ignore_index=-100), logits

x, labels, report = torch.randn(2, 5, 24), torch.randint(0, 40, (2, 5)), fusedops.Report()
gradients = []
for call in (model, torch.compile(model, backend="fusedops", options={"report": report})):
    loss, logits = call(x, labels)
    gradients.append(torch.autograd.grad(loss + logits.pow(2).mean(), [norm, head.weight]))
torch.testing.assert_close(*gradients)
assert report.counts() == {"linear_cross_entropy": 1, "rms_norm": 1} and not report.failures
print("hits", counters["aot_autograd"]["autograd_cache_hit"])
"""


def test_warm_start_finds_the_rewritten_graph(tmp_path) -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TORCHINDUCTOR_")}
    environment |= {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}

    def hits(script: str = SCRIPT) -> str:
        command = [sys.executable, "-c", script]
        done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
        return done.stdout.splitlines()[-1]

    assert hits() == "hits 0"
    assert hits() == "hits 1"
    edited = "import fusedops.cache_key as k; k.sources_digest = lambda: 'edited'\nimport torch\n"
    edited += "torch.compiler.config.cache_key_tag = ''\nk.tag_compile_caches()\n"
    assert hits(edited + SCRIPT) == "hits 0"


def test_the_tag_is_added_once() -> None:
    tag_compile_caches()
    assert torch.compiler.config.cache_key_tag.count(sources_digest()) == 1
