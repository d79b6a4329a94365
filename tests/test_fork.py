"""The gate over fork."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from conftest import FREE_THREADED

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning"),
]


def in_child(function):
    """Whether `function()` is true in a forked child; a child that hangs is killed, which is false."""
    pid = os.fork()
    if pid == 0:
        # Else it may be pytest-timeout's handler, in Python, which a child that hangs in C would not come to.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(20)
        try:
            os._exit(0 if function() else 1)
        except BaseException:
            os._exit(2)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_child_inherits_the_groups_and_switches_its_own(lensfast):
    layer = lensfast.span_group("layer")
    lensfast.set_enabled_span_groups({"layer", "step"})

    def child():
        inherited = layer.enabled and lensfast.is_span_group_enabled("step")
        lensfast.set_enabled_span_groups({"job"})
        return inherited and not layer and lensfast.is_span_group_enabled("job")

    assert in_child(child)
    assert layer.enabled
    assert not lensfast.is_span_group_enabled("job")


@pytest.mark.skipif(
    FREE_THREADED, reason="a child gets the locks of dicts as other threads held them: CPython's own limit"
)
def test_a_fork_while_other_threads_hold_the_locks(lensfast):
    """As it happens when a data loader forks while another thread registers or switches groups."""
    stop = threading.Event()

    def churn(number):
        count = 0
        while not stop.is_set():
            count += 1
            lensfast.SpanRegistry.register(f"lib_{number}", {f"group_{number}_{count % 50}"}, allow_override=True)
            lensfast.span_group(f"group_{number}_{count % 50}")

    lensfast.state.set_span_group_spec("all")
    threads = [threading.Thread(target=churn, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()

    def child():
        lensfast.set_enabled_span_groups({"child"})
        lensfast.SpanRegistry.clear()
        lensfast.SpanRegistry.register("child", {"later"})
        handle = lensfast.span_group("new in the child")
        return lensfast.enabled_span_groups() == {"child"} and lensfast.span_group("child").enabled and not handle

    try:
        assert all(in_child(child) for _ in range(20))
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_a_child_makes_spans(lensfast, exporter):
    lensfast.set_enabled_span_groups({"on"})
    with lensfast.managed_span("on", "parent") as parent:

        def child():
            exporter.clear()
            with lensfast.managed_span("on", "child"):
                pass
            (span,) = exporter.get_finished_spans()
            return span.name == "child" and span.parent.span_id == parent.get_span_context().span_id

        assert in_child(child)
    assert [span.name for span in exporter.get_finished_spans()] == ["parent"]
