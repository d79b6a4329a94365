"""Telemetry in the worker processes of a DataLoader."""

from __future__ import annotations

import atexit
import functools
import gc
import os
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, fields
from multiprocessing import util
from typing import Any, Literal

from opentelemetry import context as context_api

from ... import handle, state
from ..._spans import report_failure, usable_attributes
from ...config import NemoLensConfig
from ...helpers import _scoped_attributes
from ...propagation import extract_context, inject_context

WORKER_ID = "torch.dataloader.worker.id"
# Less than the 5 s after which a DataLoader kills a worker that it waits for.
_SHUTDOWN_MS = 2000


class WorkerTelemetry:
    """The `worker_init_fn` of a DataLoader whose workers make spans.

    ``DataLoader(..., worker_init_fn=WorkerTelemetry(config, then=my_worker_init_fn))``

    A forked worker inherits this process's telemetry; one that forkserver or spawn starts knows nothing of it. There,
    this repeats what setup_telemetry did here: same rank, world size, resource attributes and run id, and the span
    groups that are enabled here when the worker starts. If this process does not export, its workers don't. If
    telemetry is not set up here, they are set up by `config` alone. A worker delivers spans and log records, but no
    metrics, and has 2 seconds for that when it ends.

    The worker's number is `torch.dataloader.worker.id`, in the resource, or on each span where the worker is forked.

    A program that ends while such a loader is in use ends its workers first; without this, they would be killed.
    Telemetry that fails in a worker is logged there, and the worker goes on. Not thread-safe.
    """

    def __init__(
        self,
        config: NemoLensConfig,
        then: Callable[[int], object] | None = None,
        *,
        parent: Literal["here", "iterator"] = "here",
    ) -> None:
        """
        Args:
            config: says where spans go; usually what setup_telemetry was given. An exporter that was given to that by
                itself is not taken along.
            then: called in the worker with its number, afterwards; its errors come through. For spawn and forkserver it
                must be picklable.
            parent: which span those of the workers are children of: the one that is current `"here"`, where this is
                made, for as long as there are workers, or the one that is current where the loader starts them, which
                is where it is iterated over. The latter counts also if there is no span here.

        Raises:
            TypeError: `config` is not a NemoLensConfig, or `then` can't be called.
            ValueError: another `parent`.
        """
        try:
            NemoLensConfig.check(config)
        except AttributeError as error:
            raise TypeError(f"WorkerTelemetry() takes a NemoLensConfig, not {type(config).__name__}: {error}") from None
        if then is not None and not callable(then):
            raise TypeError(f"WorkerTelemetry(then=...) is called with the worker's number; {then!r} can't be")
        if parent not in ("here", "iterator"):
            raise ValueError(f"WorkerTelemetry(parent=...) must be 'here' or 'iterator', not {parent!r}")
        handle.ensure_run_id(config)  # else it would be another one in each worker
        self._config = config
        self._then = then
        self._carrier: dict[str, Any] = {}
        if parent == "here":
            inject_context(self._carrier)
        self._given: _SetUp | None = None
        _end_workers_before_exit()

    def __getstate__(self) -> dict[str, Any]:
        """What a worker that starts now gets. Does not raise: that would keep the loader from starting it."""
        given = dict(self.__dict__)
        if not self._carrier:
            given["_carrier"] = {}
            inject_context(given["_carrier"])
        try:
            given["_given"] = self._set_up()
        except Exception as failure:
            report_failure("hand on the telemetry of", "this process to DataLoader workers", failure)
            given["_given"] = _SetUp(NemoLensConfig())
        given["_config"] = given["_given"].config
        return given

    def _set_up(self) -> _SetUp:
        if self._given is not None and not handle._INITIALIZED:
            return self._given
        return _set_up_here(self._config)

    def __call__(self, worker_id: int) -> None:
        """For the DataLoader, in the worker."""
        try:
            if handle._INITIALIZED:  # in the process that this one was forked from, or here, by the program itself
                _scoped_attributes.set({**_scoped_attributes.get(), WORKER_ID: worker_id})
            else:
                self._set_up().repeat(worker_id)
            if handle._exporting_as is not None:
                util.Finalize(None, handle._exporting_as[0].shutdown, args=(_SHUTDOWN_MS,), exitpriority=1)
            if self._carrier:
                context_api.attach(extract_context(self._carrier))
        except Exception as failure:
            report_failure("set up the telemetry of", f"DataLoader worker {worker_id}", failure)
        if self._then is not None:
            self._then(worker_id)


@dataclass
class _SetUp:
    """What a worker repeats."""

    config: NemoLensConfig
    groups: frozenset[str] = frozenset()
    rank: int | None = None
    world_size: int | None = None
    resource_attributes: dict[str, Any] | None = None
    exports: bool = False
    """Whether it is decided that this rank does; else the config's strategy decides."""

    def repeat(self, worker_id: int) -> None:
        # The parent's instance id would be that of several processes at once.
        own = {WORKER_ID: worker_id, "service.instance.id": str(uuid.uuid4())}
        telemetry = handle.setup_telemetry(
            self.config,
            self.rank,
            self.world_size,
            {**(self.resource_attributes or {}), **own},
            export_strategy=(lambda *_: True) if self.exports else None,
        )
        if telemetry.is_exporting:
            state.set_enabled_span_groups(self.groups)


def _set_up_here(config: NemoLensConfig) -> _SetUp:
    """What a worker is to repeat of this process's set-up; of `config`, if there has been none."""
    parents = handle._exporting_as if handle._INITIALIZED else None
    if not config.enabled or (handle._INITIALIZED and parents is None):
        return _SetUp(NemoLensConfig())
    # A copy, for it may be a stand-in that pickle can't find, as its group class may be: groups go by name.
    values: dict[str, Any] = {field.name: getattr(config, field.name, None) for field in fields(NemoLensConfig)}
    own = NemoLensConfig(**values)
    groups = own.resolved_span_groups if parents is None else state.enabled_span_groups()
    own.span_groups, own._span_group_cls, own.metrics_enabled = "", None, False
    if parents is None:
        return _SetUp(own, groups)
    _, parents_config, rank, world_size, attributes = parents
    own.run_id = parents_config.run_id
    return _SetUp(own, groups, rank, world_size, usable_attributes(attributes or {}, frozenset()), exports=True)


@functools.cache
def _end_workers_before_exit() -> None:
    """Have the workers of loaders that are in use at the program's end leave as at the end of an iteration.

    multiprocessing kills them otherwise, with the spans in their queues. They can be told to leave only before torch's
    own exit hook runs, so this one is registered after it.
    """
    from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

    pid = os.getpid()

    def end_workers() -> None:
        # In a forked child, the workers are its parent's.
        if os.getpid() != pid or handle._exporting_as is None:
            return
        used = [found for found in gc.get_objects() if type(found) is _MultiProcessingDataLoaderIter]
        threads = [threading.Thread(target=iterator._shutdown_workers, daemon=True) for iterator in used]
        deadline = time.monotonic() + _SHUTDOWN_MS / 1000 + 1
        for thread in threads:
            try:
                thread.start()
            except RuntimeError:
                thread.run()  # Python 3.12.0 and 3.12.1 start no thread in atexit functions
        for thread in threads:
            if thread.ident is not None:
                thread.join(max(0.0, deadline - time.monotonic()))

    atexit.register(end_workers)
    # A child process of multiprocessing leaves past atexit.
    util.Finalize(None, end_workers, exitpriority=1)
