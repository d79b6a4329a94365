"""The call sites that are timed, and the loops around them."""

from __future__ import annotations

from itertools import repeat
from time import perf_counter_ns

# instructions.py counts a process that imports this: what only the timings need is imported where it is used.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType
    from typing import Any

    Loop = Callable[[int], None]

DISABLED = {
    "managed_span": "with managed_span('layer', 'megatron.layer.mlp'): pass",
    "two attributes": "with managed_span('layer', 'megatron.layer.mlp', iteration=3, loss=1.5): pass",
    "dict attribute": "with managed_span('layer', 'megatron.layer.forward', **{'megatron.layer_number': n}): pass",
    "is_span_group_enabled": "is_span_group_enabled('layer')",
    "trace_fn": "traced(n)",
    "if handle": "if handle: pass",
}

ENABLED = "with managed_span('layer', 'megatron.layer.mlp', iteration=n, loss=1.5): pass"
SDK_ENABLED = "with tracer.start_as_current_span('megatron.layer.mlp', attributes={'iteration': n, 'loss': 1.5}): pass"

# Enabled sites that make native spans; what they take is counted.
NATIVE = {
    "empty": "pass",
    "no attributes": "with managed_span('layer', 'megatron.layer.mlp'): pass",
    "two attributes": ENABLED,
    "nested": "with managed_span('layer', 'megatron.layer'):\n            " + ENABLED,
    "set_attribute": "span.set_attribute('loss', 1.5)",
}

# One training step of a rank with 96 layers and 64 microbatches: the sites entered, all of them disabled.
LAYERS, MICROBATCHES = 96, 64
STEP = """
def run(steps):
    for iteration in range(steps):
        {iteration}
            {gates}
            for microbatch in range(microbatches):
                {forward}
                for n in range(layers):
                    {layer}
                        {attention}
                            pass
                        {mlp}
                            pass
                {backward}
            {grad_sync}
"""
STEP_SITES = {
    "iteration": "with managed_span('step', 'megatron.train_step', **{'megatron.iteration': iteration}):",
    "gates": "is_span_group_enabled('forward_backward'); is_span_group_enabled('optimizer'); "
    "is_span_group_enabled('step'); is_span_group_enabled('communication')",
    "forward": "traced(microbatch)",
    "layer": "with managed_span('layer', 'megatron.layer.forward', **{'megatron.layer_number': n}):",
    "attention": "with managed_span('layer', 'megatron.layer.self_attention'):",
    "mlp": "with managed_span('layer', 'megatron.layer.mlp'):",
    "backward": "traced(microbatch)",
    "grad_sync": "traced(iteration); traced(iteration)",
}
BARE_STEP_SITES = {
    "iteration": "if True:",
    "gates": "pass",
    "forward": "plain(microbatch)",
    "layer": "if True:",
    "attention": "if True:",
    "mlp": "if True:",
    "backward": "plain(microbatch)",
    "grad_sync": "plain(iteration); plain(iteration)",
}


def plain(value: object) -> object:
    """What trace_fn wraps."""
    return value


def names(library: ModuleType) -> dict[str, Any]:
    """What the statements above refer to, from lensfast on one backend or from nemo.lens."""
    found: dict[str, Any] = {
        "managed_span": library.managed_span,
        "is_span_group_enabled": library.is_span_group_enabled,
        "traced": library.trace_fn("microbatch", "megatron.microbatch.forward")(plain),
        "plain": plain,
        "layers": LAYERS,
        "microbatches": MICROBATCHES,
    }
    if hasattr(library, "span_group"):
        found["handle"] = library.span_group("layer")
    return found


def loop(statement: str, namespace: dict[str, Any]) -> Loop:
    """A function of its own, with bytecode the interpreter has specialised for nobody else."""
    # repeat() rather than range(): it makes no int objects, so less is subtracted.
    source = f"def run(times):\n    n = 7\n    for _ in repeat(None, times):\n        {statement}\n"
    return function(source, {"repeat": repeat, **namespace})


def step(sites: dict[str, str], namespace: dict[str, Any]) -> Loop:
    return function(STEP.format(**sites), namespace)


def function(source: str, namespace: dict[str, Any]) -> Loop:
    scope = dict(namespace)
    exec(source, scope)
    run: Loop = scope["run"]
    return run


def nanoseconds(run: Loop, times: int) -> float:
    """How long one pass of the loop takes, in ns."""
    start = perf_counter_ns()
    run(times)
    return (perf_counter_ns() - start) / times


def build_floor() -> Any:
    """An object of the type in floor.c; raises OSError or CalledProcessError where there is no C compiler."""
    import importlib.util
    import subprocess
    import sysconfig
    import tempfile
    from pathlib import Path

    directory = Path(tempfile.mkdtemp(prefix="lensfast-floor-"))
    target = directory / f"floor{sysconfig.get_config_var('EXT_SUFFIX')}"
    include = sysconfig.get_path("include")
    source = Path(__file__).with_name("floor.c")
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", f"-I{include}", str(source), "-o", str(target)], check=True)
    spec = importlib.util.spec_from_file_location("floor", target)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Floor()
