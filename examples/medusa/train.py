"""Train Medusa heads on the sources of Python's own standard library.

Usage: python -m examples.medusa.train [--model NAME] [--heads K] [--stage 1|2] [--steps N]

With a model of the HuggingFace hub or a folder its tokenizer is used. Without one a tiny Llama of random weights is trained
along (stage 2), whose tokens are bytes: that shows the path without a download.
"""

import argparse
import sys
from collections.abc import Callable, Sequence

import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from bench.training import corpus
from examples.medusa.medusa import Medusa

TINY = {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
BYTES_A_TOKEN = 6  # at most, of source code, as a rule


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, encode = load(options.model, device)
    stage = options.stage or (1 if options.model else 2)
    medusa = Medusa(model, options.heads, stage)
    optimizer = torch.optim.AdamW([p for p in medusa.parameters() if p.requires_grad], lr=options.learning_rate)
    wanted = options.steps * options.batch * options.tokens
    ids = encode(corpus(wanted * BYTES_A_TOKEN))[:wanted]
    if len(ids) < wanted:
        raise ValueError(
            f"{wanted} tokens are asked for and the text has {len(ids)}: lower --steps, --batch or --tokens."
        )
    batches = torch.tensor(ids).view(options.steps, options.batch, options.tokens)
    console = Console()
    for step, batch in enumerate(batches):
        batch = batch.to(device)
        losses = medusa.backward(batch, batch)
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0 or step == len(batches) - 1:  # reading a loss makes the host wait
            shown = ", ".join(f"{loss:.3f}" for loss in losses.heads.tolist())
            own = f"; the model itself: {losses.model:.3f}" if stage == 2 else ""
            console.print(f"step {step}: losses of the heads {shown}{own}", highlight=False)
    return 0


def load(name: str | None, device: torch.device) -> tuple[LlamaForCausalLM, Callable[[bytes], list[int]]]:
    """The model, and how text becomes its tokens."""
    if name is None:
        torch.manual_seed(0)
        return LlamaForCausalLM(LlamaConfig(**TINY)).to(device), list
    tokenizer = AutoTokenizer.from_pretrained(name)
    model = AutoModelForCausalLM.from_pretrained(name, dtype="auto").to(device)
    return model, lambda text: tokenizer(text.decode(errors="replace"))["input_ids"]


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="examples.medusa.train", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", help="name or folder of a Llama; default: a tiny one of random weights")
    parser.add_argument("--heads", type=int, default=3, help="default: %(default)s")
    parser.add_argument(
        "--stage", type=int, choices=(1, 2), help="default: 1 for a model that is given, 2 for the tiny one"
    )
    parser.add_argument("--steps", type=int, default=100, help="default: %(default)s")
    parser.add_argument("--batch", type=int, default=4, help="default: %(default)s")
    parser.add_argument("--tokens", type=int, default=128, help="default: %(default)s")
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="default: %(default)s")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
