"""What the compiled forward keeps for the backward, as Inductor's partitioner decides it."""

import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd
from torch.fx import Graph

from fusedops.compiler.backend import Settings, compile_graph
from tests.rewriting import SIZES, distance, step, tiny, tokens


class Partitions:
    """A compiler that partitions as Inductor does, runs the parts as they are, and keeps them."""

    def __init__(self) -> None:
        self.kept: list[torch.Tensor] = []
        self.backward = Graph()

    def __call__(self, gm, example_inputs):
        def compiler(gm, inputs):
            return make_boxed_func(gm.forward)

        return aot_autograd(fw_compiler=compiler, bw_compiler=compiler, partition_fn=self.partition)(gm, example_inputs)

    def partition(self, joint, inputs, *, num_fwd_outputs, **kwargs):
        kwargs["compiler"] = "inductor"
        forward, backward = min_cut_rematerialization_partition(
            joint, inputs, num_fwd_outputs=num_fwd_outputs, **kwargs
        )
        outputs = forward.graph.output_node().args[0][num_fwd_outputs:]
        self.kept = [o.meta["val"] for o in outputs if o.op != "placeholder"]
        self.backward = backward.graph
        return forward, backward

    def wide(self) -> int:
        """How many of the kept tensors are as wide as the gated MLPs."""
        return sum(t.dim() > 1 and t.shape[-1] == SIZES["intermediate_size"] for t in self.kept)

    def calls(self, name: str) -> int:
        return sum(str(n.target) == name for n in self.backward.nodes)


def trained(model, ids, rewrites: bool = True):
    """The parts of one compiled step, and its gradients."""
    torch._dynamo.reset()
    parts = Partitions()

    def backend(gm, example_inputs):
        return compile_graph(gm, example_inputs, Settings(), parts)

    return parts, step(model, torch.compile(model, backend=backend if rewrites else parts), ids)[1]


def test_gated_results_are_computed_again() -> None:
    """Of gate, up and their product a layer keeps the first two, from which its own backward starts anyway."""
    model, ids = tiny(), tokens()
    plain, expected = trained(model, ids, rewrites=False)
    rewritten, gradients = trained(model, ids)
    assert distance(expected, gradients) < 1e-5
    assert (plain.wide(), rewritten.wide()) == (6, 4)
    assert rewritten.calls("fusedops.swiglu_forward.default") == 2


def test_frozen_projections_need_no_product() -> None:
    model, ids = tiny(), tokens()
    for layer in model.model.layers:
        layer.mlp.down_proj.requires_grad_(False)
    rewritten, _ = trained(model, ids)
    assert rewritten.wide() == 4 and rewritten.calls("fusedops.swiglu_forward.default") == 0


def test_checkpointed_layers_say_themselves_what_is_computed_again() -> None:
    model, ids = tiny().train(), tokens()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    _, expected = step(model, model, ids)
    rewritten, gradients = trained(model, ids)
    assert distance(expected, gradients) < 1e-5
    assert rewritten.wide() == 0
