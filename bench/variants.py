"""The program in gpt.py, with the sites of a library or without them, and the training that all variants share."""

from __future__ import annotations

import ast
import functools
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

SOURCE = Path(__file__).with_name("gpt.py")
sys.path.insert(0, str(SOURCE.parent.parent))
from conftest import BACKENDS, load_backend  # noqa: E402

PRIMITIVES = {"is_span_group_enabled", "managed_span", "safe_set_span_attributes", "span_cm", "trace_fn"}
# The block under such a condition serves telemetry only: these are the gate, and the names of gpt.py's spans.
CONDITIONS = {"is_span_group_enabled", "step", "update"}


@functools.cache
def libraries() -> dict[str, ModuleType]:
    """Those that are here: lensfast on each backend, nemo-lens."""
    found = {f"lensfast ({backend})": load_backend(backend)["lensfast"] for backend in BACKENDS}
    try:
        found["nemo-lens"] = importlib.import_module("nemo.lens")
    except ImportError:
        print("nemo-lens is not installed (it needs Python 3.13): its rows are left out\n")
    return found


class WithoutSites(ast.NodeTransformer):
    """Takes out of a program the statements and decorators that are there for telemetry."""

    def visit_With(self, node: ast.With) -> Any:
        self.generic_visit(node)
        return node.body if names(node.items[0].context_expr) & PRIMITIVES else node

    def visit_If(self, node: ast.If) -> Any:
        return None if names(node.test) & CONDITIONS else self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> Any:
        node.decorator_list = [decorator for decorator in node.decorator_list if not names(decorator) & PRIMITIVES]
        return self.generic_visit(node)


def names(node: ast.AST) -> set[str]:
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}


def load(name: str, library: ModuleType | None) -> ModuleType:
    """The program as a module of its own called `name`: with the sites of `library`, or uninstrumented."""
    tree = ast.parse(SOURCE.read_text())
    tree.body = [node for node in tree.body if not (isinstance(node, ast.ImportFrom) and node.module == "lensfast")]
    module = ModuleType(name)
    if library is None:
        tree = ast.fix_missing_locations(WithoutSites().visit(tree))
        left = names(tree) & {*PRIMITIVES, *CONDITIONS, "trace", "nullcontext"}
        if left:
            raise AssertionError(f"not every site was taken out of {SOURCE.name}: {left}")
    else:
        vars(module).update({primitive: getattr(library, primitive) for primitive in PRIMITIVES})
    sys.modules[name] = module  # where torch.compile looks for it
    exec(compile(tree, str(SOURCE), "exec"), vars(module))
    return module


class Training:
    """One set of parameters, one optimizer and one batch for all variants: they differ in their code alone."""

    def __init__(self, layers: int, width: int, sequence: int, microbatches: int) -> None:
        torch.manual_seed(0)
        self.size = layers, width, sequence
        program = load("gpt_uninstrumented", None)
        self.model = program.GPT(*self.size)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
        self.batches = [torch.randint(0, program.VOCABULARY, (1, sequence + 1)) for _ in range(microbatches)]

    def step(self, program: ModuleType, compiled: bool = False) -> Callable[[], float]:
        """One training step of that program."""
        model = program.GPT(*self.size)
        model.load_state_dict(self.model.state_dict(keep_vars=True), assign=True)
        if compiled:
            model = torch.compile(model)
        return functools.partial(program.train_step, model, self.optimizer, self.batches, 1)
