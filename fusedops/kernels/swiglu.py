"""The launchers of swiglu: fusedops/kernels/gated.py has the kernels."""

from fusedops.kernels.gated import gated_bwd as swiglu_bwd
from fusedops.kernels.gated import gated_bwd_ as swiglu_bwd_
from fusedops.kernels.gated import gated_bwd_kernel, gated_fwd_kernel
from fusedops.kernels.gated import gated_fwd as swiglu_fwd

__all__ = ["gated_bwd_kernel", "gated_fwd_kernel", "swiglu_bwd", "swiglu_bwd_", "swiglu_fwd"]
