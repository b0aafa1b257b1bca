"""The launchers of geglu: fusedops/kernels/gated.py has the kernels."""

from fusedops.kernels.gated import gated_bwd as geglu_bwd
from fusedops.kernels.gated import gated_bwd_ as geglu_bwd_
from fusedops.kernels.gated import gated_bwd_kernel, gated_fwd_kernel
from fusedops.kernels.gated import gated_fwd as geglu_fwd

__all__ = ["gated_bwd_kernel", "gated_fwd_kernel", "geglu_bwd", "geglu_bwd_", "geglu_fwd"]
