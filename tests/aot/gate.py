"""Compiling a recorded launch for a target without that target, and judging what comes out."""

import dataclasses
import re
import subprocess
import tempfile
from collections.abc import Sequence
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.compiler import make_backend
from triton.runtime.jit import create_function_from_signature

from tests.aot.record import Launch, all_launches

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
# Bytes of registers that a thread may spill: what versions of the compiler differ by.
FEW_SPILLS = 32
# By beginnings of cases. Rows of 16384 elements with sums of two gradients take nearly all registers of a processor: what
# spills stays in its first-level cache. So do sums of a product, of which every option at once is then made.
ALLOWED_SPILLS = {"layer_norm 16384": 160, "linear_cross_entropy losses, all options": 160}
# Tiles from this size on are a kernel's main data; smaller ones hold weights of short rows, statistics and labels.
MAIN_ELEMENTS = 1024


@dataclasses.dataclass(frozen=True)
class Unit:
    """One compilation: a launch as a target sees it."""

    target: str
    launch: Launch
    signature: dict[str, str]
    constants: dict[tuple[int, ...], Any]
    attributes: dict[tuple[int, ...], Any]
    options: dict[str, Any]

    @property
    def key(self) -> str:
        parts = (
            self.target,
            self.launch.kernel.__name__,
            self.signature,
            self.constants,
            self.attributes,
            self.options,
        )
        return str(parts)

    @property
    def aligned(self) -> bool:
        """All pointers and strides are known to be multiples of 16, so that nothing forbids 16-byte accesses."""
        names = list(self.signature)
        divisible = {names[path[0]] for path, found in self.attributes.items() if ["tt.divisibility", 16] in found}
        sizes = [n for n in names if n.endswith(("_stride_m", "logits_stride_t")) or n in ("N", "V")]
        pointers = [n for n, kind in self.signature.items() if kind.startswith("*")]
        constants = {names[path[0]]: value for path, value in self.constants.items()}
        return all(n in divisible or (n in constants and constants[n] % 16 == 0) for n in (*pointers, *sizes))


@dataclasses.dataclass(frozen=True)
class Verdict:
    target: str
    kernel: str
    case: str
    registers: int = 0
    spilled: int = 0
    vector_loads: int = 0
    wanted_loads: int = 0
    problem: str = ""


def units(launches: list[Launch], targets: dict[str, GPUTarget] = TARGETS) -> list[Unit]:
    """Every launch for every target, the same compilation once."""
    found: dict[str, Unit] = {}
    for name, target in targets.items():
        backend = make_backend(target)
        for launch in launches:
            unit = _specialise(name, backend, launch)
            found.setdefault(unit.key, unit)
    return list(found.values())


def _specialise(target: str, backend: Any, launch: Launch) -> Unit:
    """Types, constants and alignment of the arguments, found by the code that Triton itself launches with."""
    kernel, given = launch.kernel, {"debug": False, **launch.options}
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, _ = bind(*launch.args, **given)
    options, signature, constants, attributes = kernel._pack_args(backend, given, bound, specialization, None)
    return Unit(target, launch, signature, constants, attributes, dict(options.__dict__))


def judge(unit: Unit) -> Verdict:
    verdict = Verdict(unit.target, unit.launch.kernel.__name__, unit.launch.case)
    target = TARGETS[unit.target]
    source = ASTSource(unit.launch.kernel, unit.signature, unit.constants, unit.attributes)
    try:
        compiled = triton.compile(source, target=target, options=unit.options)
    except Exception as e:
        return dataclasses.replace(verdict, problem=f"does not compile: {type(e).__name__}: {str(e)[:500]}")
    registers, spilled, loads = (_cuda_usage if target.backend == "cuda" else _hip_usage)(compiled)
    # Kernels that assert read labels alone, and call a printing function that has a stack of its own.
    asserts = unit.options["debug"]
    wanted = _main_loads(compiled, target.warp_size) if unit.aligned and not asserts else 0
    problem = ""
    allowed = max((n for case, n in ALLOWED_SPILLS.items() if unit.launch.case.startswith(case)), default=FEW_SPILLS)
    if spilled > allowed and not asserts:
        problem = f"spills {spilled} bytes or registers"
    elif loads < wanted:
        problem = f"{loads} of {wanted} main loads are 16 bytes wide"
    return dataclasses.replace(
        verdict, registers=registers, spilled=spilled, vector_loads=loads, wanted_loads=wanted, problem=problem
    )


def all_units(ops: Sequence[str] | None = None) -> list[Unit]:
    """Every compilation for every target, each as its own launches are configured."""
    launches = ((name, all_launches(name, ops)) for name in TARGETS)
    return [unit for name, recorded in launches for unit in units(recorded, {name: TARGETS[name]})]


def judge_share(index: int, shares: int, ops: Sequence[str] | None = None) -> list[Verdict]:
    """Every so manieth compilation. Launches hold kernels and tensors: each process records its own."""
    return [judge(unit) for unit in all_units(ops)[index::shares]]


def _main_loads(compiled: Any, warp_size: int) -> int:
    """How many 16-byte loads a thread needs for the large tiles that the kernel reads."""
    threads = compiled.metadata.num_warps * warp_size
    total = 0
    for shape, pointee in re.findall(r"tt\.load .*: tensor<([\dx]+)x!tt\.ptr<(\w+)>", compiled.asm["ttir"]):
        elements = 1
        for size in shape.split("x"):
            elements *= int(size)
        if elements >= MAIN_ELEMENTS:
            total += elements * int(re.sub(r"\D", "", pointee)) // 8 // threads // 16
    return total


def _cuda_usage(compiled: Any) -> tuple[int, int, int]:
    from triton.backends.nvidia.compiler import get_ptxas

    cuobjdump = re.sub(r"ptxas(-blackwell)?$", "cuobjdump", get_ptxas(compiled.metadata.target.arch).path)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = subprocess.run([cuobjdump, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    registers, stack, local = map(int, re.search(r"REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)", usage).groups())
    ptx = compiled.asm["ptx"]
    loads = len(re.findall(r"ld\.global\S*\.(?:v4\.[bfu]32|v2\.[bfu]64)", ptx))
    loads += 2 * len(re.findall(r"ld\.global\S*\.(?:v8\.[bfu]32|v4\.[bfu]64)", ptx))
    # Loads of later stages of a loop: one in the text for each stage that is loaded before the loop, and one in it.
    loads += len(re.findall(r"cp\.async\.c[ag]\.shared\.global \[[^]]*\], \[[^]]*\], 0x10", ptx))
    return registers, stack + local, loads


def _hip_usage(compiled: Any) -> tuple[int, int, int]:
    text = compiled.asm["amdgcn"]

    def number(name: str) -> int:
        return int(re.search(rf"\.{name}:\s+(\d+)", text)[1])

    loads = len(re.findall(r"(?:global|buffer)_load_dwordx4", text))
    return number("vgpr_count"), number("vgpr_spill_count") + number("sgpr_spill_count"), loads
