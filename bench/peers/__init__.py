"""The operators that are measured, a file each, with their peers."""

from bench.peers import (
    add_rms_norm,
    cross_entropy,
    gated,
    layer_norm,
    linear_cross_entropy,
    rms_norm,
    rotary_embedding,
)

OPERATORS = (
    rms_norm.OPERATOR,
    add_rms_norm.OPERATOR,
    layer_norm.OPERATOR,
    rotary_embedding.OPERATOR,
    gated.SWIGLU,
    gated.PACKED_SWIGLU,
    gated.GEGLU,
    cross_entropy.OPERATOR,
    linear_cross_entropy.OPERATOR,
)
