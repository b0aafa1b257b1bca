"""The ahead-of-time gate: every kernel as launched, compiled for GPUs that this machine doesn't have.

``python -m tests.aot`` fails on a kernel that doesn't compile, spills registers, or reads its main data in pieces of less
than 16 bytes.
"""
