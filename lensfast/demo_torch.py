"""The model of `lensfast demo --model torch`: a tiny GPT, trained on the CPU. No call site is in here."""

from __future__ import annotations

import importlib
import math
import warnings
from typing import Any

from .demo import MICRO_BATCH_SIZE

VOCABULARY = 64
SEQUENCE = 32
WIDTH = 96
HEADS = 4


def import_torch() -> Any:
    """The module torch, which importing lensfast must not load.

    Raises:
        ImportError: it is not installed; the text says how to get it.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Failed to initialize NumPy")  # which is not needed here
            return importlib.import_module("torch")
    except ImportError as error:
        raise ImportError(f"--model torch needs PyTorch: pip install 'lensfast[torch]' ({error})") from error


class TorchLayer:
    """One pre-norm transformer layer: about 111,000 parameters."""

    def __init__(self, torch: Any) -> None:
        nn = torch.nn
        self._attend = nn.functional.scaled_dot_product_attention
        self.modules = nn.ModuleDict(
            {
                "attention_norm": nn.LayerNorm(WIDTH),
                "query_key_value": nn.Linear(WIDTH, 3 * WIDTH),
                "projection": nn.Linear(WIDTH, WIDTH),
                "mlp": nn.Sequential(
                    nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
                ),
            }
        )

    def self_attention(self, hidden: Any) -> Any:
        batch, sequence, width = hidden.shape
        mixed = self.modules["query_key_value"](self.modules["attention_norm"](hidden))
        query, key, value = mixed.view(batch, sequence, 3, HEADS, width // HEADS).permute(2, 0, 3, 1, 4)
        attended = self._attend(query, key, value, is_causal=True)
        return hidden + self.modules["projection"](attended.transpose(1, 2).reshape(batch, sequence, width))

    def mlp(self, hidden: Any) -> Any:
        return hidden + self.modules["mlp"](hidden)


class TorchModel:
    """Learns to continue one fixed random sequence of tokens, from any place in it."""

    def __init__(self, layers: int) -> None:
        self._torch = torch = import_torch()
        # At this size more threads only wait for each other.
        torch.set_num_threads(1)
        torch.manual_seed(0)
        nn = torch.nn
        self.layers = [TorchLayer(torch) for _ in range(layers)]
        self._modules = nn.ModuleDict(
            {
                "tokens": nn.Embedding(VOCABULARY, WIDTH),
                "positions": nn.Embedding(SEQUENCE, WIDTH),
                "layers": nn.ModuleList(layer.modules for layer in self.layers),
                "head": nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)),
            }
        )
        self._optimizer = torch.optim.AdamW(self._modules.parameters(), lr=3e-3)
        self._pattern = torch.randperm(VOCABULARY)

    def next_batch(self) -> Any:
        torch = self._torch
        starts = torch.randint(VOCABULARY, (MICRO_BATCH_SIZE, 1))
        return self._pattern[(starts + torch.arange(SEQUENCE + 1)) % VOCABULARY]

    def embed(self, batch: Any) -> Any:
        return self._modules["tokens"](batch[:, :-1]) + self._modules["positions"].weight

    def loss(self, hidden: Any, batch: Any) -> Any:
        logits = self._modules["head"](hidden)
        return self._torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())

    def backward(self, loss: Any) -> float:
        loss.backward()
        return float(loss.detach())

    def optimizer_step(self) -> tuple[float, bool]:
        grad_norm = float(self._torch.nn.utils.clip_grad_norm_(self._modules.parameters(), 1.0))
        successful = math.isfinite(grad_norm)
        if successful:
            self._optimizer.step()
        self._optimizer.zero_grad()
        return grad_norm, successful

    def evaluate(self) -> float:
        with self._torch.no_grad():
            batch = self.next_batch()
            hidden = self.embed(batch)
            for layer in self.layers:
                hidden = layer.mlp(layer.self_attention(hidden))
            return float(self.loss(hidden, batch))

    def state_dict(self) -> Any:
        return {"model": self._modules.state_dict(), "optimizer": self._optimizer.state_dict()}

    def load_state_dict(self, state: Any) -> None:
        self._modules.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
