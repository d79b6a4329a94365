"""Resource attributes that come from SLURM, a GPU or OTEL_RESOURCE_ATTRIBUTES, as the nightly generation has them.

Those of the older generations, and of the host and Kubernetes, are in test_setup.py.
"""

from __future__ import annotations

import enum
import hashlib
import importlib
import os
import socket
import sys
import uuid
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from opentelemetry.sdk.resources import OTELResourceDetector

VARIABLE = "OTEL_RESOURCE_ATTRIBUTES"


@pytest.fixture
def codec(lensfast: ModuleType) -> ModuleType:
    return importlib.import_module("lensfast.resources.attributes")


@pytest.fixture
def slurm(lensfast: ModuleType) -> ModuleType:
    return importlib.import_module("lensfast.resources.slurm")


# The codec of OTEL_RESOURCE_ATTRIBUTES


@pytest.mark.parametrize(
    ("text", "attributes"),
    [
        (None, {}),
        ("", {}),
        (" , ,", {}),
        ("a=1", {"a": "1"}),
        (" a = 1 ,b=2", {"a": "1", "b": "2"}),
        ("a=1,junk,=5, =6,b=", {"a": "1", "b": ""}),
        ("a=x=y==", {"a": "x=y=="}),
        ("a=1,b=2,a=3", {"a": "3", "b": "2"}),
        ("a%20b=c%20d%2C%3D%E2%9C%93+e", {"a%20b": "c d,=✓+e"}),
        ("a=%20 x %20,b=50%,c=%zz", {"a": "  x  ", "b": "50%", "c": "%zz"}),
        ("a=%FF", {"a": "\ufffd"}),
    ],
)
def test_parse(codec: ModuleType, text: str | None, attributes: dict[str, str]) -> None:
    assert codec.parse_otel_resource_attributes(text) == attributes


def sdk_attributes(text: str) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, text)
        return dict(OTELResourceDetector().detect().attributes)


def test_parse_agrees_with_the_sdk(codec: ModuleType) -> None:
    characters = st.characters(exclude_categories=["Cs"], exclude_characters="\0") | st.sampled_from(",=% +")

    @settings(deadline=None)
    @given(st.text(characters))
    def check(text: str) -> None:
        assert codec.parse_otel_resource_attributes(text) == sdk_attributes(text)

    check()


class Color(str, enum.Enum):
    RED = "red"


class Number(enum.IntEnum):
    TWO = 2


class Half(float):
    def __str__(self) -> str:
        return "half"


@pytest.mark.parametrize(
    ("attributes", "text"),
    [
        ({}, ""),
        ({"a": "1", "b": ""}, "a=1,b="),
        ({"a": None, "b": 5}, "b=5"),
        ({"t": True, "f": False, "i": -3, "x": 0.1, "big": 10**9}, "t=True,f=False,i=-3,x=0.1,big=1000000000"),
        ({"e": Color.RED, "n": Number.TWO, "h": Half(0.5)}, "e=red,n=2,h=0.5"),
        ({"path": "/a b,c=d%e/✓"}, "path=%2Fa%20b%2Cc%3Dd%25e%2F%E2%9C%93"),
        ({"a.b-c_d~e": "-._~"}, "a.b-c_d~e=-._~"),
    ],
)  # fmt: skip
def test_format(codec: ModuleType, caplog: pytest.LogCaptureFixture, attributes: dict[str, Any], text: str) -> None:
    assert codec.format_otel_resource_attributes(attributes) == text
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (5, "x"),
        ("", "x"),
        ("  ", "x"),
        ("a,b", "x"),
        ("a=b", "x"),
        ("line\nbreak", "x"),
        ("nul\0", "x"),
        ("\ud800", "x"),
        ("list", ["x"]),
        ("bytes", b"x"),
        ("dict", {}),
        ("half", "\ud800"),
        pytest.param("digits", 10**5000, id="digits"),
    ],
)
def test_what_can_not_be_carried(codec: ModuleType, caplog: pytest.LogCaptureFixture, key: Any, value: Any) -> None:
    assert codec.format_otel_resource_attributes({"a": 1, key: value, "b": 2}) == "a=1,b=2"
    [message] = caplog.messages
    assert "left out" in message
    assert repr(key).strip("'") in message


def test_round_trip(codec: ModuleType) -> None:
    printable = st.characters(exclude_categories=["C", "Z"], include_characters=" ", exclude_characters=",=")
    keys = st.text(printable, min_size=1).filter(lambda key: key == key.strip())
    values = st.text() | st.integers() | st.booleans() | st.floats(allow_nan=False) | st.none()

    @settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(st.dictionaries(keys, values))
    def check(attributes: dict[str, Any]) -> None:
        text = codec.format_otel_resource_attributes(attributes)
        expected = {key: str(value) for key, value in attributes.items() if value is not None}
        assert codec.parse_otel_resource_attributes(text) == expected
        assert sdk_attributes(text) == expected
        assert text.isprintable()

    check()


def test_duplicates(codec: ModuleType) -> None:
    duplicates = codec.duplicate_otel_resource_attribute_keys
    assert duplicates("b=1,a=2, a =3,c=4,b=5,a=6") == ("b", "a")
    assert duplicates("a=1,a,=1,=2") == ()
    assert duplicates(None) == ()


def test_get(codec: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    assert codec.get_otel_resource_attributes() == {}
    monkeypatch.setenv(VARIABLE, "a=%31")
    assert codec.get_otel_resource_attributes() == {"a": "1"}
    assert codec.get_otel_resource_attributes(environ={}) == {}
    assert codec.get_otel_resource_attributes(environ={VARIABLE: "b=2"}) == {"b": "2"}
    assert codec.OTEL_RESOURCE_ATTRIBUTES_ENV == VARIABLE


def test_extend(codec: ModuleType) -> None:
    extend, parse = codec.extend_otel_resource_attributes, codec.parse_otel_resource_attributes
    text = extend("a=1,b=,junk", defaults={"a": 8, "b": 8, "d": "x y"}, overrides={"o": True})
    assert parse(text) == {"a": "1", "b": "", "d": "x y", "o": "True"}
    assert parse(extend("a=1,b=2", overrides={"a": None})) == {"b": "2"}
    assert extend(None) == extend("") == ""
    # The older call form.
    assert parse(extend("a=1", {"a": 2, "b": 3})) == {"a": "1", "b": "3"}
    assert parse(extend("a=1", {"a": 2, "b": 3}, overwrite=True)) == {"a": "2", "b": "3"}


def test_merge(codec: ModuleType) -> None:
    base = {"a": 1, "b": None}
    assert codec.merge_resource_attributes(base, {"a": 2, "b": 3, "c": 4}) == {"a": 1, "b": None, "c": 4}
    assert codec.merge_resource_attributes(base, {"a": 2, "c": 4}, overwrite=True) == {"a": 2, "b": None, "c": 4}
    assert codec.merge_resource_attributes(None, None) == {}
    assert base == {"a": 1, "b": None}


def test_set(codec: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "a=1,b=2")
    assert codec.set_otel_resource_attributes({"c": "x y"}) == "c=x%20y"
    assert os.environ[VARIABLE] == "c=x%20y"
    environ = {VARIABLE: "a=1,b=2", "OTHER": "o"}
    assert codec.set_otel_resource_attributes({"a": 5}, environ=environ) == "a=5"
    assert environ == {VARIABLE: "a=5", "OTHER": "o"}
    assert os.environ[VARIABLE] == "c=x%20y"
    # The older call form, as far as it can be told apart.
    text = codec.set_otel_resource_attributes({"a": 6, "b": 7}, environ=environ, overwrite=False)
    assert codec.parse_otel_resource_attributes(text) == {"a": "5", "b": "7"}
    text = codec.set_otel_resource_attributes({"a": 6}, environ=environ, overwrite=True)
    assert environ[VARIABLE] == text
    assert codec.parse_otel_resource_attributes(text) == {"a": "6", "b": "7"}


@pytest.mark.parametrize("before", [None, "", " a = 1,junk,a=2"])
def test_publish_restores_exactly(codec: ModuleType, monkeypatch: pytest.MonkeyPatch, before: str | None) -> None:
    if before is not None:
        monkeypatch.setenv(VARIABLE, before)
    with pytest.raises(KeyError), codec.publish_otel_resource_attributes({"outer": 1}) as text:
        assert os.environ[VARIABLE] == text == "outer=1"
        with codec.publish_otel_resource_attributes({"inner": 2}, overwrite=False):
            assert codec.get_otel_resource_attributes() == {"outer": "1", "inner": "2"}
            del os.environ[VARIABLE]
        assert os.environ[VARIABLE] == "outer=1"
        raise KeyError
    assert os.environ.get(VARIABLE) == before


def test_publish_in_an_environment_of_its_own(codec: ModuleType) -> None:
    environ: dict[str, str] = {}
    with codec.publish_otel_resource_attributes({"a": 1}, environ=environ):
        assert environ == {VARIABLE: "a=1"}
        assert VARIABLE not in os.environ
    assert environ == {}


def test_check(codec: ModuleType) -> None:
    found = codec.check_resource_attributes(
        {"a": "1", "blank": " ", "none": None, "zero": 0, "bad": 1},
        required=(key for key in ("gone", "a", "blank", "zero", "none")),
        forbidden=["bad", "worse"],
        env_value="x=1,y=2,x=3",
    )
    assert found == codec.ResourceAttributeCheck(
        missing=("gone",), empty=("blank", "none"), forbidden=("bad",), duplicates=("x",)
    )
    assert not found.ok
    assert codec.check_resource_attributes({"a": ""}).ok
    for problem in ("missing", "empty", "forbidden", "duplicates"):
        assert not codec.ResourceAttributeCheck(**{problem: ("a",)}).ok
    with pytest.raises(AttributeError):
        found.missing = ()


# SLURM

JOB = {"SLURM_JOB_ID": "4711", "SLURM_CLUSTER_NAME": "east"}
TASK = {**JOB, "SLURM_ARRAY_JOB_ID": "4700", "SLURM_ARRAY_TASK_ID": "3", "SLURM_ARRAY_TASK_COUNT": "8"}


def url_uuid(name: str) -> str:
    return str(uuid.uuid5(uuid.NAMESPACE_URL, name))


def test_derive_in_a_plain_job(slurm: ModuleType) -> None:
    assert slurm.derive_slurm_resource_attributes({"SLURM_JOB_NAME": "x", "SLURM_ARRAY_JOB_ID": "5"}) == {}
    assert slurm.derive_slurm_resource_attributes({"SLURM_JOB_ID": "4711"}) == {
        "slurm.job.id": "4711",
        "slurm.job.id.raw": "4711",
        "slurm.array.job_id": "4711",
        "slurm.array.task_id": "0",
        "slurm.array.count": 1,
        "slurm.restart_count": 0,
        "nv.dl.job.uuid": url_uuid("nemo.lens.job/nocluster/4711"),
    }


def test_derive_everything(slurm: ModuleType) -> None:
    environ = {
        **TASK,
        "LENS_SLURM_SLUID": "s1",
        "NV_LAUNCH_SLUID": "s2",
        "NV_LAUNCH_ARRAY_SLUID": "as2",
        "SLURM_JOB_NAME": "pretrain",
        "SLURM_JOB_PARTITION": "batch",
        "SLURM_PARTITION": "old",
        "SLURM_JOB_NUM_NODES": "4",
        "SLURM_NNODES": "5",
        "SLURM_NTASKS": "32",
        "SLURM_RESTART_COUNT": "2",
        "SLURM_JOB_USER": "ada",
        "SLURM_JOB_ACCOUNT": "team",
        "SLURM_JOB_QOS": "high",
        "SLURM_JOB_RESERVATION": "res",
        "SLURM_SEGMENT": "16",
        "SLURM_TOPOLOGY_ADDR": "s0.s1.n1",
        "SLURM_TOPOLOGY_ADDR_PATTERN": "switch.switch.node",
        "SLURMD_NODENAME": "n1",
        "SLURM_NODELIST": "n[1-4]",
        "TORCHELASTIC_RESTART_COUNT": "1",
    }
    expected = {
        "slurm.job.id": "4700_3",
        "slurm.job.id.raw": "4711",
        "slurm.array.job_id": "4700",
        "slurm.array.task_id": "3",
        "slurm.array.count": 8,
        "slurm.sluid": "s1",
        "slurm.array.sluid": "as2",
        "slurm.job.name": "pretrain",
        "slurm.cluster.name": "east",
        "slurm.partition": "batch",
        "slurm.nnodes": 4,
        "slurm.ntasks": 32,
        "slurm.restart_count": 2,
        "slurm.job.user": "ada",
        "slurm.job.account": "team",
        "slurm.job.qos": "high",
        "slurm.job.reservation": "res",
        "slurm.segment": "16",
        "slurm.topology.addr": "s0.s1.n1",
        "slurm.topology.addr_pattern": "switch.switch.node",
        "slurm.head_node.name": "n1",
        "nv.dl.job.uuid": url_uuid("nemo.lens.job/east/4700"),
    }
    derived = slurm.derive_slurm_resource_attributes(environ)
    assert derived == expected
    types = importlib.import_module("lensfast.semconv.resources").RESOURCE_TYPES
    assert {key: type(value) for key, value in derived.items()} == {key: types[key] for key in expected}


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"SLURM_PARTITION": "old"}, {"slurm.partition": "old"}),
        ({"SLURM_JOB_PARTITION": "", "SLURM_PARTITION": "old"}, {"slurm.partition": "old"}),
        ({"SLURM_NNODES": "5"}, {"slurm.nnodes": 5}),
        ({"NV_LAUNCH_SLUID": "s2", "LENS_SLURM_ARRAY_SLUID": "as1"}, {"slurm.sluid": "s2", "slurm.array.sluid": "as1"}),
        ({"SLURM_NTASKS": "many", "SLURM_JOB_NAME": ""}, {}),
        ({"SLURMD_NODENAME": "n1"}, {"slurm.head_node.name": "n1"}),
        ({"SLURMD_NODENAME": "n1", "SLURM_STEP_ID": "0"}, {}),
        ({"SLURMD_NODENAME": "n1", "SLURM_STEPID": "0"}, {}),
        ({"SLURM_RESTART_COUNT": "3"}, {"slurm.restart_count": 3}),
    ],
)
def test_derive_by_variable(slurm: ModuleType, variables: dict[str, str], expected: dict[str, Any]) -> None:
    plain = slurm.derive_slurm_resource_attributes(JOB)
    assert slurm.derive_slurm_resource_attributes({**JOB, **variables}) == {**plain, **expected}


def test_derive_reads_the_process_environment(slurm: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    assert slurm.derive_slurm_resource_attributes() == {}
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert slurm.derive_nv_dl_run_uuid() is None
    for name, value in TASK.items():
        monkeypatch.setenv(name, value)
    assert slurm.derive_slurm_resource_attributes()["slurm.job.id"] == "4700_3"
    assert slurm.derive_nv_dl_job_uuid() == url_uuid("nemo.lens.job/east/4700")
    assert slurm.derive_nv_dl_run_uuid() == slurm.derive_nv_dl_run_uuid(dict(os.environ)) is not None


@pytest.mark.parametrize(
    ("environ", "name"),
    [
        ({}, "nocluster/nojob"),
        ({"SLURM_CLUSTER_NAME": "east"}, "east/nojob"),
        (JOB, "east/4711"),
        ({**JOB, "SLURM_RESTART_COUNT": "2", "SLURM_STEP_ID": "1"}, "east/4711"),
        (TASK, "east/4700"),
    ],
)
def test_job_uuid(slurm: ModuleType, environ: dict[str, str], name: str) -> None:
    assert slurm.derive_nv_dl_job_uuid(environ) == url_uuid(f"nemo.lens.job/{name}")


@pytest.mark.parametrize(
    ("environ", "run_id", "name"),
    [
        ({}, None, None),
        ({"TORCHELASTIC_RESTART_COUNT": "1"}, "", None),
        ({}, "r1", "local/r1/te0"),
        ({"TORCHELASTIC_RUN_ID": "t1", "TORCHELASTIC_RESTART_COUNT": "2"}, None, "local/t1/te2"),
        ({"TORCHELASTIC_RUN_ID": "t1"}, "r1", "local/r1/te0"),
        (JOB, "r1", "east/4711/sr0"),
        ({"SLURM_JOB_ID": "4711", "SLURM_RESTART_COUNT": "2"}, None, "nocluster/4711/sr2"),
        ({**JOB, "TORCHELASTIC_RUN_ID": "t1", "TORCHELASTIC_RESTART_COUNT": "0"}, None, "east/4711/sr0/te0"),
        ({**TASK, "SLURM_RESTART_COUNT": "2"}, None, "east/4700_3"),
        ({**TASK, "TORCHELASTIC_RESTART_COUNT": "5"}, None, "east/4700_3/te5"),
    ],
)
def test_run_uuid(slurm: ModuleType, environ: dict[str, str], run_id: str | None, name: str | None) -> None:
    expected = name and url_uuid(f"nemo.lens.run/{name}")
    assert slurm.derive_nv_dl_run_uuid(environ, run_id=run_id) == expected


def test_uuid_value(slurm: ModuleType) -> None:
    # Worked out by hand: SHA-1 of the namespace's bytes and the name, by RFC 9562.
    digest = hashlib.sha1(uuid.NAMESPACE_URL.bytes + b"nemo.lens.job/east/4711").digest()[:16]
    assert uuid.UUID(bytes=digest, version=5) == uuid.UUID(slurm.derive_nv_dl_job_uuid(JOB))


def test_detect_with_an_environment(slurm: ModuleType) -> None:
    inherited = (
        "slurm.job.id=4000_1,slurm.nnodes=%2B16,slurm.ntasks=many,slurm.job.name=,slurm.nodelist=n1,slurm.cluster=old,"
        "nv.dl.job.uuid=u,nv.dl.rank=5,other=1"
    )
    environ = {**JOB, "SLURM_NTASKS": "8", "SLURM_JOB_NAME": "derived", VARIABLE: inherited}
    assert slurm.detect_slurm(environ) == {
        **slurm.derive_slurm_resource_attributes(environ),
        "slurm.job.id": "4000_1",
        "slurm.job.id.raw": "4711",
        "slurm.nnodes": 16,
        "slurm.ntasks": 8,
        "slurm.job.name": "derived",
        "nv.dl.job.uuid": "u",
    }
    # A container into which only that variable was passed.
    assert slurm.detect_slurm({VARIABLE: inherited}) == {
        "slurm.job.id": "4000_1",
        "slurm.nnodes": 16,
        "nv.dl.job.uuid": "u",
    }
    assert slurm.detect_slurm({}) == {}


def test_detect_without_an_environment(slurm: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    inherited = "slurm.job.id=4700_3,slurm.nnodes=16,slurm.partition=,slurm.job.user=ada,slurm.nodelist=n%5B1-4%5D"
    monkeypatch.setenv(VARIABLE, inherited)
    assert slurm.detect_slurm() == {}
    variables = {**TASK, "SLURM_NNODES": "4", "SLURM_PARTITION": "batch", "SLURM_JOB_NUM_NODES": "4"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert slurm.detect_slurm() == {
        "slurm.job.id": "4700_3",
        "slurm.nnodes": "16",
        "slurm.partition": "batch",
        "slurm.nodelist": "n[1-4]",
        "slurm.cluster.name": "east",
    }


# A GPU


class NVML(SimpleNamespace):
    """Stands in for pynvml on a machine with four GPUs."""

    def __init__(self) -> None:
        self.started = 0
        super().__init__(
            nvmlInit=lambda: self.count(1),
            nvmlShutdown=lambda: self.count(-1),
            nvmlDeviceGetHandleByIndex=lambda index: ["g0", "g1", "g2", "g3"][index],
            nvmlDeviceGetName=lambda device: f"NVIDIA {device}",
            nvmlDeviceGetUUID=lambda device: f"GPU-{device}".encode(),
            nvmlDeviceGetSerial=lambda device: f"serial {device}",
            nvmlDeviceGetPciInfo=lambda device: SimpleNamespace(busId=b"00000000:9A:00.0"),
            nvmlDeviceGetCudaComputeCapability=lambda device: (9, 0),
            nvmlDeviceGetMemoryInfo=lambda device: SimpleNamespace(total=150_754_820_096),
            nvmlSystemGetDriverVersion=lambda: "570.1",
        )

    def count(self, change: int) -> None:
        self.started += change


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> NVML:
    stand_in = NVML()
    monkeypatch.setitem(sys.modules, "pynvml", stand_in)
    return stand_in


@pytest.fixture
def detect_gpu(lensfast: ModuleType) -> Callable[..., dict[str, Any]]:
    return importlib.import_module("lensfast.resources.gpu").detect_gpu


def test_detect_gpu(detect_gpu: Any, nvml: NVML) -> None:
    assert detect_gpu(2, {}) == {
        "nv.gpu.index": 2,
        "nv.gpu.model": "NVIDIA g2",
        "nv.gpu.uuid": "GPU-g2",
        "nv.gpu.serial": "serial g2",
        "nv.gpu.pci_bus_id": "00000000:9A:00.0",
        "nv.gpu.compute_capability": "9.0",
        "nv.gpu.memory_total": 150_754_820_096,
        "nv.gpu.driver_version": "570.1",
    }
    assert nvml.started == 0


@pytest.mark.parametrize(
    ("local_rank", "environ", "index"),
    [
        (None, {}, 0),
        (None, {"LOCAL_RANK": "1", "SLURM_LOCALID": "2"}, 1),
        (None, {"LOCAL_RANK": "", "SLURM_LOCALID": "2"}, 2),
        (3, {"LOCAL_RANK": "1"}, 3),
        (0, {"LOCAL_RANK": "1"}, 0),
        (1, {"CUDA_VISIBLE_DEVICES": "3, 2"}, 2),
        (None, {"LOCAL_RANK": "1", "CUDA_VISIBLE_DEVICES": "0,3"}, 3),
        (2, {"CUDA_VISIBLE_DEVICES": "0,1"}, None),
        (-1, {"CUDA_VISIBLE_DEVICES": "0,1"}, None),
        (-1, {}, None),
        (0, {"CUDA_VISIBLE_DEVICES": "-1"}, None),
        (0, {"CUDA_VISIBLE_DEVICES": ""}, None),
        (0, {"CUDA_VISIBLE_DEVICES": "GPU-g0"}, None),
        (0, {"CUDA_VISIBLE_DEVICES": "7"}, None),
        (None, {"LOCAL_RANK": "first"}, None),
        (9, {}, None),
    ],
)
def test_which_gpu(
    detect_gpu: Any, nvml: NVML, local_rank: int | None, environ: dict[str, str], index: int | None
) -> None:
    assert detect_gpu(local_rank, environ).get("nv.gpu.index") == index
    assert nvml.started == 0
    assert (detect_gpu(local_rank, environ) == {}) == (index is None)


def test_gpu_by_the_process_environment(detect_gpu: Any, nvml: NVML, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    assert detect_gpu()["nv.gpu.index"] == 3


def fail(*args: Any) -> None:
    raise RuntimeError("NVML_ERROR_NOT_SUPPORTED")


def test_what_a_gpu_does_not_tell_is_left_out(detect_gpu: Any, nvml: NVML) -> None:
    nvml.nvmlDeviceGetSerial = nvml.nvmlDeviceGetCudaComputeCapability = nvml.nvmlDeviceGetMemoryInfo = fail
    assert set(detect_gpu(0, {})) == {
        f"nv.gpu.{key}" for key in ("index", "model", "uuid", "pci_bus_id", "driver_version")
    }


@pytest.mark.parametrize(
    "function", ["nvmlInit", "nvmlDeviceGetHandleByIndex", "nvmlDeviceGetUUID", "nvmlDeviceGetName"]
)
def test_no_gpu(detect_gpu: Any, nvml: NVML, function: str) -> None:
    setattr(nvml, function, fail)
    assert detect_gpu(0, {}) == {}
    assert nvml.started == 0


def test_no_gpu_library(detect_gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert detect_gpu(0, {}) == {}


def test_detect_resource_does_not_ask_for_the_gpu(lensfast: ModuleType, nvml: NVML) -> None:
    assert not any(key.startswith("nv.gpu") for key in lensfast.resources.detect_resource())


# The resource of a caller of the nightly generation


def build(lensfast: ModuleType, resource_attributes: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    config = lensfast.NemoLensConfig(**options)
    providers = importlib.import_module("lensfast.providers")
    resource = providers._build_resource(config, 0, 1, resource_attributes)
    other = ("telemetry.sdk.", "host.gpu.count", "k8s.")
    return {key: value for key, value in resource.attributes.items() if not key.startswith(other)}


@pytest.fixture
def no_deployment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DEPLOYMENT_ENV", "ENVIRONMENT"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("no_deployment")
def test_resource_of_a_rank_that_the_caller_names(lensfast: ModuleType) -> None:
    assert build(lensfast, {"nv.dl.rank": 5, "nv.dl.world_size": 8}, run_id="r") == {
        "service.name": "nemo",
        "service.version": lensfast.__version__,
        "service.instance.id": "r-rank5",
        "nemo.run.id": "r",
        "nv.dl.rank": 5,
        "nv.dl.world_size": 8,
        "host.name": socket.gethostname(),
        "process.pid": os.getpid(),
    }
    # Newer SDKs draw one at random.
    assert "-rank" not in build(lensfast, {"nv.dl.rank": 5}).get("service.instance.id", "")


@pytest.mark.usefixtures("no_deployment")
def test_resource_of_a_rank_that_the_launcher_names(
    lensfast: ModuleType, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(VARIABLE, "nv.dl.rank=3,nv.gpu.index=1,mine=2,dl.rank=9,service.name=env,nv.dl.world_size=all")
    assert build(lensfast, run_id="r", service_name="configured") == {
        "service.name": "configured",
        "service.version": lensfast.__version__,
        "service.instance.id": "r-rank3",
        "nemo.run.id": "r",
        "nv.dl.rank": 3,
        "nv.dl.world_size": "all",
        "nv.gpu.index": 1,
        "mine": "2",
        "dl.rank": "9",
        "host.name": socket.gethostname(),
        "process.pid": os.getpid(),
    }
    [message] = caplog.messages
    assert "nv.dl.world_size requires a base-10 integer" in message


def test_resource_precedence_of_the_nightly(lensfast: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**TASK, "SLURM_NNODES": "4"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv(
        VARIABLE, "nv.dl.rank=3,nemo.user.id=env,mine=env,host.name=env,slurm.nnodes=16,slurm.job.name=env,only=env"
    )
    resource = build(
        lensfast,
        {"nv.dl.rank": 5, "mine": "caller", "host.name": "caller", "slurm.nnodes": 1, "nemo.run.id": "caller"},
        user="config",
        run_id="r",
    )
    assert resource["only"] == "env"
    assert resource["nemo.user.id"] == "config"
    assert (resource["nv.dl.rank"], resource["mine"], resource["nemo.run.id"]) == (5, "caller", "caller")
    assert resource["service.instance.id"] == "r-rank5"
    assert resource["host.name"] == socket.gethostname()
    assert (resource["slurm.nnodes"], resource["slurm.job.name"]) == (
        16,
        "env",
    )  # detected: inherited from the launcher
    assert (resource["slurm.job.id"], resource["slurm.array.count"]) == ("4700_3", 8)
    assert not resource.keys() & {"dl.rank", "dl.world_size", "slurm.nodelist"}


@pytest.mark.parametrize(
    ("inherited", "given", "expected"),
    [
        ("nv.dl.rank=3,service.instance.id=env", {}, "env"),
        ("nv.dl.rank=3,service.instance.id=env", {"service.instance.id": "caller"}, "caller"),
        ("service.instance.id=env", {"nv.dl.rank": 0}, "env"),
        ("", {"nv.dl.rank": 0, "service.instance.id": "caller"}, "caller"),
        ("service.instance.id=", {"nv.dl.rank": 0}, "r-rank0"),
        # The older generations: the environment comes last.
        ("service.instance.id=env", {}, "r-rank0"),
        ("nv.dl.rank=", {"nv.dl.rank": None}, "r-rank0"),
    ],
)
def test_explicit_instance_id(
    lensfast: ModuleType, monkeypatch: pytest.MonkeyPatch, inherited: str, given: dict[str, Any], expected: str
) -> None:
    monkeypatch.setenv(VARIABLE, inherited)
    assert build(lensfast, given, run_id="r")["service.instance.id"] == expected


def test_slurm_in_the_resource_of_the_older_generations(lensfast: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**TASK, "SLURM_NNODES": "4"}.items():
        monkeypatch.setenv(name, value)
    resource = build(lensfast)
    assert {key: value for key, value in resource.items() if key.startswith(("slurm.", "nv."))} == {
        "slurm.job.id": "4711",
        "slurm.nnodes": "4",
        "slurm.cluster.name": "east",
    }
    assert resource["dl.rank"] == 0


@pytest.mark.parametrize(("deployment", "environment", "expected"), [("", "staging", "staging"), ("prod", "x", "prod")])
def test_deployment_of_the_nightly(
    lensfast: ModuleType, monkeypatch: pytest.MonkeyPatch, deployment: str, environment: str, expected: str
) -> None:
    monkeypatch.setenv("DEPLOYMENT_ENV", deployment)
    monkeypatch.setenv("ENVIRONMENT", environment)
    assert build(lensfast, {"nv.dl.rank": 0})["deployment.environment"] == expected
