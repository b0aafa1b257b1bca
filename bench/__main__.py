"""Says what there is to run."""

import sys

USAGE = """The benchmarks of fusedops; each takes --help.

  python -m bench.demo          train a small Llama plainly and through fusedops and compare; runs on a CPU too
  python -m bench.operators     every operator beside its peers: time, memory, host time, errors; needs a GPU
  python -m bench.sweeps        time and memory over vocabulary, hidden size and sequence length, with plots; needs a GPU
  python -m bench.frontier      linear_cross_entropy by rows of a chunk: time, memory, error, with a plot; needs a GPU
  python -m bench.accumulation  the error of its weight's gradient in a training, by chunks, with a plot; needs a GPU
  python -m bench.medusa        training steps of the Medusa example beside its peers, with a plot; needs a GPU
  python -m bench.host          host time of small operators beside what a Python operator costs at least; needs a GPU
  python -m bench.tune          find launch configurations for the table that kernels are launched by; needs a GPU
  python -m bench.publish       write docs/demo.md and docs/benchmarks.md from what is recorded in docs/results

`nox -s demo` and `nox -s bench` do the set-up of the first three themselves."""

if __name__ == "__main__":
    print(USAGE)
    sys.exit(0 if len(sys.argv) == 1 or sys.argv[1] in ("-h", "--help") else 2)
