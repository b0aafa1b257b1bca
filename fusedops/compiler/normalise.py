"""Dynamo graph -> canonical pre-dispatch ATen graph.

Dynamo's graph has many spellings of one operation (methods, functions, modules). Tracing it again *before* dispatch
leaves ATen operators that autograd has not touched yet, and keeps composite ones (linear, cross_entropy_loss) whole.
Patterns of rules go through the same two steps, so that a model and a rule spell alike.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch._functorch.predispatch as predispatch
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.fx import GraphModule, Interpreter, Node, Proxy
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx, track_tensor_tree
from torch.utils._pytree import tree_map

aten = torch.ops.aten

_VMAP = {
    predispatch._add_batch_dim,
    predispatch._remove_batch_dim,
    predispatch._vmap_increment_nesting,
    predispatch._vmap_decrement_nesting,
    torch._functorch.vmap.lazy_load_decompositions,
}
ENTER_AUTOCAST, EXIT_AUTOCAST = torch.amp.autocast_mode._enter_autocast, torch.amp.autocast_mode._exit_autocast
_CASTS = {aten.to.dtype, aten.to.dtype_layout, aten.to.device, aten.to.other, aten.type_as.default}
_PRODUCTS = {aten.matmul.default, aten.mm.default}
_TRANSPOSES = {
    aten.t.default,
    aten.numpy_T.default,
    aten.mT.default,
    aten.transpose.int,
    aten.permute.default,
}
# Switches of modes that make_fx records by itself.
_RECORDED = {ENTER_AUTOCAST, EXIT_AUTOCAST, torch._C._set_grad_enabled}
# Key in the meta of a node that was copied as it stands.
_VERBATIM = "fusedops_verbatim"
# Key in a body's meta: the autocast regions around its call.
REGIONS = "fusedops_autocast_regions"
# What Dynamo knows of a graph input and AOTAutograd wants to know again.
_PLACEHOLDER_META = ("grapharg", "example_value", "tensor_dict", "_dynamo_source")


def normalise(gm: GraphModule) -> GraphModule:
    """A canonical pre-dispatch ATen copy of a Dynamo graph; ``gm`` stays as it is.

    Bodies of higher-order operators (activation checkpointing, cond, flex_attention) are normalised on their own and
    the calls copied verbatim, so that what they mean to autograd is kept.
    """
    placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    values = [example_value(n) for n in placeholders]
    retrace = _Retrace(gm, _normalised_bodies(gm))
    try:
        out = trace(retrace.run, values)
    finally:
        retrace.leave_autocast()
    for old, new in zip(placeholders, (n for n in out.graph.nodes if n.op == "placeholder"), strict=True):
        new.meta.update({k: old.meta[k] for k in _PLACEHOLDER_META if k in old.meta})
        if hasattr(old, "_dynamo_source"):
            new._dynamo_source = old._dynamo_source
    for name in ("_param_name_to_source", "_source_to_user_stacks"):
        if hasattr(gm, name):
            setattr(out, name, getattr(gm, name))
    out.meta.update(gm.meta)
    return out


def trace(function: Callable[..., Any], values: Sequence[Any]) -> GraphModule:
    """The canonical pre-dispatch graph of a Python function on fake inputs."""
    mode, grad_mode = fake_mode(values), torch.is_grad_enabled()
    try:
        with mode or contextlib.nullcontext(), torch.fx.traceback.preserve_node_meta():
            gm = make_fx(function, pre_dispatch=True, tracing_mode="real", _allow_non_fake_inputs=True)(*values)
    finally:
        # A graph may leave grad mode switched; that is for the compiled graph to do, not for its tracing.
        torch._C._set_grad_enabled(grad_mode)
    _canonicalise(gm)
    return gm


def example_value(node: Node) -> Any:
    """The fake value of a node, whether Dynamo or make_fx wrote it."""
    return node.meta["example_value"] if "example_value" in node.meta else node.meta.get("val")


def fake_mode(values: Sequence[Any]) -> FakeTensorMode | None:
    """The mode the values were made in: the only one they may be mixed with."""
    return next((v.fake_mode for v in values if isinstance(v, FakeTensor)), None)


def is_impure(node: Node) -> bool:
    return node.is_impure() or (node.meta.get(_VERBATIM, False) and not isinstance(example_value(node), torch.Tensor))


def eliminate_dead_code(gm: GraphModule) -> None:
    gm.graph.eliminate_dead_code(is_impure_node=is_impure)


def _normalised_bodies(gm: GraphModule) -> dict[GraphModule, GraphModule]:
    """Bodies of higher-order operators, each traced in the autocast regions that its call stands in."""
    bodies: dict[GraphModule, GraphModule] = {}
    for node in gm.graph.nodes:
        if node.op != "get_attr":
            continue
        body = _fetch(gm, node.target)
        if isinstance(body, GraphModule) and body not in bodies:
            inputs = [n for n in body.graph.nodes if n.op == "placeholder"]
            if all(example_value(n) is not None for n in inputs):
                regions = [*gm.meta.get(REGIONS, ()), *open_autocast(min(node.users, default=node))]
                body.meta[REGIONS] = regions
                with autocast_regions(regions):
                    bodies[body] = normalise(body)
    return bodies


def open_autocast(node: Node) -> list[tuple[Any, ...]]:
    """Arguments of the autocast regions of its own graph that are open at a node, outermost first."""
    regions: list[Node] = []
    for before in node.graph.nodes:
        if before is node:
            break
        if before.target is ENTER_AUTOCAST:
            regions.append(before)
        elif before.target is EXIT_AUTOCAST:
            regions.remove(before.args[0])
    return [r.args for r in regions]


@contextlib.contextmanager
def autocast_regions(regions: Sequence[tuple[Any, ...]]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for device, dtype, enabled, cache in regions:
            stack.enter_context(torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=cache))
        yield


def _fetch(module: torch.nn.Module, target: str) -> Any:
    value: Any = module
    for part in target.split("."):
        value = getattr(value, part)
    return value


class _Retrace(Interpreter):
    """Runs a Dynamo graph under make_fx, copying higher-order operators and vmap regions instead of running them."""

    def __init__(self, gm: GraphModule, bodies: dict[GraphModule, GraphModule]) -> None:
        super().__init__(gm)
        self.bodies = bodies
        self.vmap_depth = 0
        self.outer_autocast: dict[Any, tuple[str, bool, torch.dtype]] = {}

    def run_node(self, n: Node) -> Any:
        if n.target is ENTER_AUTOCAST:
            device, dtype, enabled, _ = n.args
            self.outer_autocast[n] = (device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
            _set_autocast(device, enabled, dtype)
        elif n.target is EXIT_AUTOCAST:
            _set_autocast(*self.outer_autocast.pop(n.args[0]))
        if n.op == "get_attr":
            value = self.fetch_attr(n.target)
            if isinstance(value, GraphModule):
                return self.bodies.get(value, value)
        elif n.op == "call_function" and n.target in _VMAP:
            return self._vmap(n)
        elif self.vmap_depth and n.op in ("call_function", "call_method"):
            return self._copy(n)
        elif isinstance(n.target, torch._ops.HigherOrderOperator) and "example_value" in n.meta:
            return self._copy(n)
        elif n.target is torch._C._autograd._get_data_attr:  # type: ignore[attr-defined]
            return self._copy(n)  # make_fx would not know what it returns
        elif _is_switch(n):
            return self._copy(n, tracked=False)
        return super().run_node(n)

    def leave_autocast(self) -> None:
        """Undo the autocast switches of a graph that does not undo them itself."""
        for outer in reversed(self.outer_autocast.values()):
            _set_autocast(*outer)
        self.outer_autocast.clear()

    def _vmap(self, n: Node) -> Any:
        if n.target is predispatch._vmap_increment_nesting:
            self.vmap_depth += 1
        elif n.target is predispatch._vmap_decrement_nesting:
            self.vmap_depth -= 1
        # What leaves the outermost vmap is an ordinary tensor again and has to be traced as one.
        leaves = n.target is predispatch._remove_batch_dim and self.vmap_depth == 1
        return self._copy(n, tracked=leaves)

    def _copy(self, n: Node, tracked: bool | None = None) -> Any:
        """Emit the call as it stands; its value is the fake that Dynamo recorded."""
        tracer = get_proxy_mode().tracer

        def unwrap(x: Any) -> Any:
            if isinstance(x, GraphModule):
                return self._body(tracer, x)
            if isinstance(x, torch.Tensor | torch.SymInt | torch.SymFloat | torch.SymBool):
                return tracer.unwrap_proxy(x)
            return x

        args, kwargs = tree_map(unwrap, self.fetch_args_kwargs_from_env(n))
        proxy = tracer.create_proxy(n.op, n.target, args, kwargs)
        proxy.node.meta[_VERBATIM] = True
        value = n.meta.get("example_value")
        tracked = self.vmap_depth == 0 if tracked is None else tracked
        if tracked and isinstance(value, torch.Tensor | tuple | list):
            return track_tensor_tree(value, proxy, constant=None, tracer=tracer)
        return proxy  # inside vmap nobody needs the value

    def _body(self, tracer: Any, body: GraphModule) -> Proxy:
        for name, module in tracer.root._modules.items():
            if module is body:
                return tracer.create_proxy("get_attr", name, (), {})
        name = tracer.get_fresh_qualname("body")
        tracer.root.register_module(name, body)
        return tracer.create_proxy("get_attr", name, (), {})


def _is_switch(n: Node) -> bool:
    """Whether a call changes a mode (inference mode, the choice of attention kernels, determinism) and not a tensor.

    make_fx would throw the switch now and forget it. The graph has to throw it when AOTAutograd traces it.
    """
    if n.op != "call_function" or n.target in _RECORDED or example_value(n) is not None:
        return False
    if isinstance(n.target, torch._ops.OpOverload):
        return False
    if getattr(n.target, "__module__", None) == "torch._C._functorch":
        raise NotImplementedError(f"{n.target.__name__}: transforms of torch.func inside a graph are left as they are")
    return not any(isinstance(example_value(a), torch.Tensor) for a in n.all_input_nodes)


def _set_autocast(device: str, enabled: bool, dtype: torch.dtype | None) -> None:
    """make_fx records a switch of autocast without throwing it, and fakes traced after it would have wrong dtypes."""
    with torch._C.DisableTorchFunction():
        torch.set_autocast_enabled(device, enabled)
        if dtype is not None:
            torch.set_autocast_dtype(device, dtype)
        torch.clear_autocast_cache()


def _canonicalise(gm: GraphModule) -> None:
    for node in list(gm.graph.nodes):
        if node.op == "call_function" and node.target in _CASTS:
            _canonicalise_cast(gm, node)
        elif node.op == "call_function" and node.target in _PRODUCTS:
            _canonicalise_product(gm, node)
        elif node.op == "get_attr" and "_tensor_constant" in str(node.target):
            _emit_constant(gm, node)
    eliminate_dead_code(gm)
    gm.recompile()


def _canonicalise_cast(gm: GraphModule, node: Node) -> None:
    """Every change of dtype alone is ``aten.to.dtype``; a cast that changes nothing is its input."""
    source = node.args[0]
    before, after = source.meta.get("val"), node.meta.get("val")
    if not isinstance(before, torch.Tensor) or before.device != after.device or _forces_copy(node):
        return
    if before.dtype == after.dtype:
        # to() returned its very input, and make_fx let later users of the input read the cast instead.
        if before.stride() == after.stride():
            node.replace_all_uses_with(source)
            gm.graph.erase_node(node)
    elif before.stride() == after.stride():
        node.target, node.args, node.kwargs = aten.to.dtype, (source, after.dtype), {}


def _canonicalise_product(gm: GraphModule, node: Node) -> None:
    """A product with the transpose of a matrix is the linear map by that matrix, which it is computed as."""
    x, transposed = node.args
    is_plain = all(type(a.meta.get("val")) is FakeTensor for a in node.args)
    if not is_plain or x.meta["val"].dim() < 2 or not _transposes_a_matrix(transposed):
        return
    with gm.graph.inserting_before(node):
        linear = gm.graph.call_function(aten.linear.default, (x, transposed.args[0]))
    linear.meta.update(node.meta)
    node.replace_all_uses_with(linear)
    gm.graph.erase_node(node)


def _transposes_a_matrix(node: Node) -> bool:
    if node.op != "call_function" or node.target not in _TRANSPOSES or node.args[0].meta["val"].dim() != 2:
        return False
    dims = node.args[1:]
    return not dims or sorted(d % 2 for d in (dims[0] if isinstance(dims[0], list | tuple) else dims)) == [0, 1]


def _forces_copy(node: Node) -> bool:
    names = [a.name for a in node.target._schema.arguments]
    given = dict(zip(names, node.args, strict=False)) | node.kwargs
    return bool(given.get("copy")) or given.get("memory_format") not in (None, torch.preserve_format)


def _emit_constant(gm: GraphModule, node: Node) -> None:
    """AOTAutograd refuses attributes that Dynamo did not name: spell a small constant as the call that makes it."""
    value = getattr(gm, node.target)
    if isinstance(value, FakeTensor):
        raise NotImplementedError("the graph reads a tensor that make_fx lost track of")
    if value.numel() > 65536:
        return
    made = {"dtype": value.dtype, "device": value.device}
    with gm.graph.inserting_before(node):
        if value.numel():
            call = gm.graph.call_function(torch.tensor, (value.tolist(),), made)
        else:  # a list has no shape but its first zero
            call = gm.graph.call_function(torch.empty, (list(value.shape),), made)
    call.meta.update(node.meta)
    node.replace_all_uses_with(call)
    gm.graph.erase_node(node)
    if not any(n.op == "get_attr" and n.target == node.target for n in gm.graph.nodes):
        delattr(gm, node.target)
