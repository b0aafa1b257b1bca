"""What holds for every operator, over the samples of its SPEC: correctness, opcheck, and the rules of autograd."""

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map, tree_map_only

from csrc_meta import SPECS, Sample, Spec, registry
from csrc_meta.errors import DoubleBackwardError
from tests.conftest import INTERPRETED
from tests.ops.compare import Recorder, assert_close_to_eager, leaves, op, run, several, upstream_like

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def labels(name: str, dtype: torch.dtype) -> list[str]:
    return [sample.label for sample in SPECS[name].samples(torch.device("cpu"), dtype)]


def cases(*dtypes: torch.dtype, without: tuple[str, ...] = ()) -> list:
    return [
        pytest.param(name, dtype, label, id=f"{name}-{str(dtype)[6:]}-{label.replace(' ', '_')}")
        for name in SPECS
        for dtype in dtypes
        for label in labels(name, dtype)
        if label not in without
    ]


def find(name: str, dtype: torch.dtype, label: str, device: torch.device) -> tuple[Spec, Sample]:
    return SPECS[name], next(s for s in SPECS[name].samples(device, dtype) if s.label == label)


def first(name: str, device: torch.device) -> tuple[Spec, Sample]:
    return SPECS[name], next(iter(SPECS[name].samples(device, torch.float32)))


def variants(calls: Iterable[tuple[Any, tuple]]) -> Iterator[tuple[Any, tuple, Any, tuple]]:
    """Calls that have a mutating variant, all results wanted, and that variant with arguments of its own to write to.

    Formulas call it where nobody can see a difference, a recorder included.
    """
    for primitive, args in calls:
        name = primitive._schema.name.removeprefix("fusedops::") + "_"
        if name in registry.primitives():
            own = tree_map_only(torch.Tensor, lambda t: t.detach().clone(memory_format=torch.contiguous_format), args)
            if primitive._schema.arguments[-1].name == "output_mask":
                args, own = (*args[:-1], [True] * len(args[-1])), own[:-1]
            if primitive._schema.arguments[-1].name == "dtype":
                own = own[:-1]
            yield primitive, args, getattr(torch.ops.fusedops, name).default, own


each_op = pytest.mark.parametrize("name", SPECS)


@pytest.mark.parametrize(("name", "dtype", "label"), cases(*DTYPES))
def test_forward_and_backward(name, dtype, label, device):
    spec, sample = find(name, dtype, label, device)
    assert_close_to_eager(op(spec), spec.eager, sample)


# Traces each call several times: one dtype is enough. Kernels play no part in most of it.
@pytest.mark.parametrize(("name", "dtype", "label"), cases(torch.float32))
def test_opcheck(name, dtype, label, device):
    spec, sample = find(name, dtype, label, device)
    if not INTERPRETED:
        torch.library.opcheck(op(spec).default, sample.args, dict(sample.kwargs))
    output = op(spec)(*sample.args, **sample.kwargs)
    with Recorder() as recorder:
        run(op(spec), sample, upstream_like(output))
    assert recorder.calls
    for primitive, args in recorder.calls:
        # Schema and fake only: the public operator above has been through autograd with the same primitives.
        torch.library.opcheck(primitive, args, test_utils=("test_schema", "test_faketensor"))
    for _, _, variant, own in variants(recorder.calls):
        torch.library.opcheck(variant, own, test_utils=("test_schema", "test_faketensor"))


def test_opcheck_reaches_every_primitive(device):
    with Recorder() as recorder:
        for spec in SPECS.values():
            for sample in itertools.islice(spec.samples(device, torch.float32), 3):
                run(op(spec), sample, upstream_like(op(spec)(*sample.args, **sample.kwargs)))
    reached = [func for func, _ in recorder.calls] + [variant for _, _, variant, _ in variants(recorder.calls)]
    assert {func._schema.name.removeprefix("fusedops::") for func in reached} == set(registry.primitives())


@each_op
def test_mutating_variants_write_what_their_operators_return(name, device):
    with Recorder() as recorder:
        for sample in itertools.islice(SPECS[name].samples(device, torch.float32), 4):
            run(op(SPECS[name]), sample, upstream_like(op(SPECS[name])(*sample.args, **sample.kwargs)))
    for primitive, args, variant, own in variants(recorder.calls):
        with torch.no_grad():
            wanted = several(primitive(*args))
            assert variant(*own) is None
        written = [a for a, s in zip(own, variant._schema.arguments, strict=True) if s.alias_info is not None]
        written = [t for a in written for t in (a if isinstance(a, list) else [a])]
        for a, b in zip(written, wanted, strict=True):
            assert torch.equal(a, b) if a is not None else not b.numel()


# The numerical derivative perturbs elements in place: an expanded input has none of its own.
@pytest.mark.parametrize(("name", "dtype", "label"), cases(torch.float64, without=("expanded", "no rows")))
def test_gradcheck(name, dtype, label, device):
    spec, sample = find(name, dtype, label, device)
    torch.autograd.gradcheck(lambda *args: op(spec)(*args, **sample.kwargs), sample.args, fast_mode=True)


@each_op
def test_second_derivative_raises(name, device):
    spec, sample = first(name, device)
    output = op(spec)(*sample.args, **sample.kwargs)
    # The gradient of a linear operator depends on the upstream gradient alone.
    upstream = [u.requires_grad_() for u in several(upstream_like(output))]
    with pytest.raises(DoubleBackwardError, match="second derivative"):
        gradients = torch.autograd.grad(several(output), leaves(sample), upstream, create_graph=True)
        torch.autograd.grad(sum(g.sum() for g in gradients), (*leaves(sample), *upstream))


@each_op
def test_deterministic(name, device):
    for sample in itertools.islice(SPECS[name].samples(device, torch.float32), 4):
        upstream = upstream_like(op(SPECS[name])(*sample.args, **sample.kwargs))
        once, again = (run(op(SPECS[name]), sample, upstream).tensors() for _ in range(2))
        for a, b in zip(once, again, strict=True):
            assert torch.equal(a.nan_to_num(), b.nan_to_num()), sample.label


@each_op
def test_backward_twice_with_retain_graph(name, device):
    spec, sample = first(name, device)
    output = op(spec)(*sample.args, **sample.kwargs)
    upstream = several(upstream_like(output))
    once = torch.autograd.grad(several(output), leaves(sample), upstream, retain_graph=True)
    for a, b in zip(once, torch.autograd.grad(several(output), leaves(sample), upstream), strict=True):
        assert torch.equal(a, b)


@each_op
def test_gradients_only_for_what_needs_them(name, device):
    spec, sample = first(name, device)
    for kept in leaves(sample):
        args = tuple(a.detach() if isinstance(a, torch.Tensor) and a is not kept else a for a in sample.args)
        alone = Sample(sample.label, args, sample.kwargs)
        output = op(spec)(*args, **sample.kwargs)
        upstream = upstream_like(output)
        with Recorder() as recorder:
            got = run(op(spec), alone, upstream).gradients
        wanted = run(op(spec), sample, upstream).gradients
        index = next(i for i, leaf in enumerate(leaves(sample)) if leaf is kept)
        # Another kernel, without the other gradients: products may be rounded where they were not, and the reverse.
        torch.testing.assert_close(got[0], wanted[index])
        for func, call in recorder.calls:
            if func._schema.arguments[-1].name == "output_mask":
                assert sum(call[-1]) == 1, f"{func} computed {call[-1]}"


@each_op
def test_inputs_are_not_modified(name, device):
    for sample in itertools.islice(SPECS[name].samples(device, torch.bfloat16), 4):
        upstream = upstream_like(op(SPECS[name])(*sample.args, **sample.kwargs))
        tensors = [a for a in (*sample.args, *several(upstream)) if isinstance(a, torch.Tensor)]
        copies = [t.detach().clone() for t in tensors]
        run(op(SPECS[name]), sample, upstream)
        for tensor, copy in zip(tensors, copies, strict=True):
            assert torch.equal(tensor, copy), sample.label


@each_op
def test_compiles_in_one_graph(name, device):
    spec, sample = first(name, device)
    upstream = upstream_like(op(spec)(*sample.args, **sample.kwargs))

    def function(*args):
        return tree_map(lambda t: t * 1.0, op(spec)(*args, **sample.kwargs))

    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    got = run(compiled, Sample(sample.label, sample.args), upstream)
    for a, b in zip(got.tensors(), run(op(spec), sample, upstream).tensors(), strict=True):
        assert torch.equal(a, b)
