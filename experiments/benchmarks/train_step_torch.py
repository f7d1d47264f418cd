"""The train steps of `train_step.py` in torch: torch.nn.Transformer, and a plain GPT; AdamW and clipping.

That file starts this one, a process for each size. Two libraries in one process may load different versions of cuDNN,
and their threads wait for work on the same cores. The argument is JSON: `size` and `optimizer` as they are there, kind,
dtype, platform (as jax names it) and threads. Each line of the input is a number of steps, and the line that answers
says how long they took.
"""

import json
import sys
import time
from types import SimpleNamespace

import torch
from torch import nn
from torch.nn import functional as F


class EncoderDecoder(nn.Module):
    """torch.nn.Transformer with one embedding for both sides and the output layer."""

    def __init__(self, model: SimpleNamespace, length: int):
        super().__init__()
        width, rate = model.d_model, model.dropout.residual
        self.embedding = nn.Embedding(model.vocab_size, width)
        nn.init.normal_(self.embedding.weight, std=width**-0.5)
        angles = torch.arange(length)[:, None] / 10_000 ** (torch.arange(0, width, 2) / width)
        self.register_buffer("positions", torch.stack([angles.sin(), angles.cos()], -1).flatten(1))
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length))
        self.dropout = nn.Dropout(rate)
        layers = (model.num_encoder_layers, model.num_decoder_layers)
        self.transformer = nn.Transformer(width, model.num_heads, *layers, model.d_ff, rate, batch_first=True)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        return self.dropout(self.embedding(ids) * self.embedding.embedding_dim**0.5 + self.positions)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        x = self.transformer(self.embed(source), self.embed(target), tgt_mask=self.mask, tgt_is_causal=True)
        return F.linear(x, self.embedding.weight)


class Block(nn.Module):
    """Causal attention and a feed-forward network, each after a norm."""

    def __init__(self, model: SimpleNamespace):
        super().__init__()
        width, self.heads, self.rate = model.d_model, model.num_heads, model.dropout.attention
        self.attention_norm, self.feed_forward_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.projections = nn.Linear(width, 3 * width, bias=False)
        self.output = nn.Linear(width, width, bias=False)
        up, down = nn.Linear(width, model.d_ff, bias=False), nn.Linear(model.d_ff, width, bias=False)
        self.feed_forward = nn.Sequential(up, nn.GELU(), down)
        self.dropout = nn.Dropout(model.dropout.residual)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.projections(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(*heads, dropout_p=self.rate, is_causal=True)
        x = x + self.dropout(self.output(attended.transpose(1, 2).flatten(2)))
        return x + self.dropout(self.feed_forward(self.feed_forward_norm(x)))


class GPT(nn.Module):
    """Blocks over learned positions, the output layer tied to the embedding."""

    def __init__(self, model: SimpleNamespace, length: int):
        super().__init__()
        self.embedding = nn.Embedding(model.vocab_size, model.d_model)
        self.positions = nn.Parameter(0.02 * torch.randn(length, model.d_model))
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.dropout = nn.Dropout(model.dropout.embedding)
        self.blocks = nn.Sequential(*(Block(model) for _ in range(model.num_layers)), nn.LayerNorm(model.d_model))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return F.linear(self.blocks(self.dropout(self.embedding(ids) + self.positions)), self.embedding.weight)


def device_of(platform: str) -> torch.device:
    """Where torch finds what jax runs on."""
    if platform == "gpu" and torch.cuda.is_available():
        # as jax does with float32 where there are tensor cores; on a CPU neither rounds
        torch.set_float32_matmul_precision("high")
        return torch.device("cuda")
    if platform == "cpu":
        return torch.device("cpu")
    raise SystemExit(f"jax runs on {platform!r}, torch {torch.__version__} cannot: install another or compare on a CPU")


class Training:
    """A model with random weights, a random batch, and steps on it."""

    def __init__(self, work: SimpleNamespace):
        self.work, self.device, size, settings = work, device_of(work.platform), work.size, work.optimizer
        torch.set_num_threads(work.threads)
        torch.manual_seed(0)
        model, sides = {"encoder-decoder": (EncoderDecoder, 2), "decoder": (GPT, 1)}[work.kind]
        self.model = model(size.model, size.length).to(self.device)
        shape = (sides + 1, size.rows, size.length)
        *self.inputs, self.targets = torch.randint(3, size.model.vocab_size, shape, device=self.device)
        # fused, one kernel for the whole update: the fastest that torch has
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            settings.learning_rate,
            (settings.b1, settings.b2),
            settings.eps,
            settings.weight_decay,
            fused=True,
        )

    def step(self) -> None:
        """One update."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.work.dtype == "bfloat16"):
            logits = self.model(*self.inputs).flatten(0, 1)
        loss = F.cross_entropy(logits.float(), self.targets.flatten(), label_smoothing=self.work.size.label_smoothing)
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.work.optimizer.clip_norm)
        self.optimizer.step()

    def steps(self, count: int) -> float:
        """Seconds of so many steps."""
        began = time.perf_counter()
        for _ in range(count):
            self.step()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began


def main(work: SimpleNamespace) -> None:
    """Answer until the input ends."""
    training = Training(work)
    parameters = sum(parameter.numel() for parameter in training.model.parameters())
    print(json.dumps({"version": torch.__version__, "parameters": parameters}), flush=True)
    for line in sys.stdin:
        seconds = training.steps(int(line))
        peak = torch.cuda.max_memory_allocated() if training.device.type == "cuda" else None
        print(json.dumps({"seconds": seconds, "peak_memory": peak}), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1], object_hook=lambda fields: SimpleNamespace(**fields)))
