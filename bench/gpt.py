"""A small GPT and its training step, with call sites as Megatron has them. variants.py loads it, once per variant.

Without its sites it is the uninstrumented program: variants.py takes them out of this source.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import torch
from opentelemetry import trace
from torch import Tensor, nn
from torch.nn import functional

from lensfast import is_span_group_enabled, managed_span, safe_set_span_attributes, span_cm, trace_fn

VOCABULARY = 512
HEADS = 4


class Layer(nn.Module):
    def __init__(self, width: int, layer_number: int) -> None:
        super().__init__()
        self.layer_number = layer_number
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def self_attention(self, hidden: Tensor) -> Tensor:
        q, k, v = self.qkv(self.attention_norm(hidden)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return hidden + self.projection(attended.transpose(1, 2).flatten(2))

    def mlp(self, hidden: Tensor) -> Tensor:
        return hidden + self.down(functional.gelu(self.up(self.mlp_norm(hidden))))

    def forward(self, hidden: Tensor) -> Tensor:
        with managed_span("layer", "megatron.layer.forward", **{"megatron.layer_number": self.layer_number}):
            with managed_span("layer", "megatron.layer.self_attention"):
                hidden = self.self_attention(hidden)
            with managed_span("layer", "megatron.layer.mlp"):
                hidden = self.mlp(hidden)
        return hidden


class GPT(nn.Module):
    def __init__(self, layers: int, width: int, sequence: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(sequence, width)
        self.layers = nn.ModuleList(Layer(width, number) for number in range(1, layers + 1))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, batch: Tensor) -> Tensor:
        hidden = self.tokens(batch[:, :-1]) + self.positions.weight
        for layer in self.layers:
            hidden = layer(hidden)
        logits = self.head(self.norm(hidden))
        return functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


class DistributedDataParallel:
    """Of one rank: nothing is transferred."""

    @trace_fn("communication", "megatron.grad_sync.start")
    def start_grad_sync(self) -> None: ...

    @trace_fn("communication", "megatron.grad_sync.finish")
    def finish_grad_sync(self) -> None: ...


ddp = DistributedDataParallel()


@trace_fn("microbatch", "megatron.microbatch.forward")
def forward_step(model: nn.Module, batch: Tensor, microbatch_id: int) -> Tensor:
    if is_span_group_enabled("microbatch"):
        safe_set_span_attributes(trace.get_current_span(), {"megatron.microbatch_id": microbatch_id})
    loss: Tensor = model(batch)
    return loss


@trace_fn("microbatch", "megatron.microbatch.backward")
def backward_step(loss: Tensor) -> float:
    loss.backward()
    return float(loss.detach())


def optimizer_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    grad_norm = float(nn.utils.clip_grad_norm_(model.parameters(), 1.0))
    optimizer.step()
    optimizer.zero_grad()
    return grad_norm


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Sequence[Tensor], iteration: int) -> float:
    """The mean loss of the microbatches."""
    with managed_span("step", "megatron.train_step", **{"megatron.iteration": iteration}) as step:
        with (
            span_cm("megatron.forward_backward", **{"megatron.num_microbatches": len(batches)})  # type: ignore[arg-type]
            if is_span_group_enabled("forward_backward")
            else nullcontext()
        ):
            losses = []
            for microbatch_id, batch in enumerate(batches):
                losses.append(backward_step(forward_step(model, batch, microbatch_id)))
        ddp.start_grad_sync()
        ddp.finish_grad_sync()
        with span_cm("megatron.optimizer_step") if is_span_group_enabled("optimizer") else nullcontext() as update:
            grad_norm = optimizer_step(model, optimizer)
            if update is not None:
                safe_set_span_attributes(update, {"megatron.grad_norm": grad_norm})
        loss = sum(losses) / len(losses)
        if step is not None:
            safe_set_span_attributes(step, {"megatron.loss": loss})
    return loss
