"""Names of attributes, putting sets of them together, and the types of their values."""

from __future__ import annotations

import importlib
import logging
import subprocess
import sys
from importlib import metadata
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import clean_environment

# Every constant that some generation of the API defines, and its value.
TABLE = """\
SEMCONV_VERSION 1.29.0
DL_RANK dl.rank
DL_WORLD_SIZE dl.world_size
DL_LOCAL_RANK dl.local_rank
DL_DATA_PARALLEL_RANK dl.data_parallel.rank
DL_DATA_PARALLEL_SIZE dl.data_parallel.size
DL_TENSOR_PARALLEL_RANK dl.tensor_parallel.rank
DL_TENSOR_PARALLEL_SIZE dl.tensor_parallel.size
DL_PIPELINE_PARALLEL_RANK dl.pipeline_parallel.rank
DL_PIPELINE_PARALLEL_SIZE dl.pipeline_parallel.size
DL_ITERATION dl.iteration
DL_LOSS dl.loss
DL_GRAD_NORM dl.grad_norm
DL_LEARNING_RATE dl.learning_rate
DL_THROUGHPUT_TFLOPS dl.throughput_tflops
DL_THROUGHPUT_TOKENS_PER_SEC dl.throughput_tokens_per_sec
DL_BATCH_SIZE dl.batch_size
DL_SEQUENCE_LENGTH dl.sequence_length
DL_MICROBATCH_ID dl.microbatch_id
GENAI_OPERATION_NAME gen_ai.operation.name
GENAI_PROVIDER_NAME gen_ai.provider.name
GENAI_REQUEST_MODEL gen_ai.request.model
GENAI_TOKEN_TYPE gen_ai.token.type
RL_ALGORITHM rl.algorithm
RL_REWARD rl.reward
RL_REWARD_MEAN rl.reward.mean
RL_KL_DIVERGENCE rl.kl_divergence
RL_POLICY_LOSS rl.policy_loss
RL_VALUE_LOSS rl.value_loss
RL_ENTROPY rl.entropy
RL_GENERATION_BACKEND rl.generation.backend
RL_NUM_ROLLOUTS rl.num_rollouts
RL_RESPONSE_LENGTH_MEAN rl.response_length.mean
RL_GRAD_NORM rl.grad_norm
RL_LEARNING_RATE rl.learning_rate
RL_THROUGHPUT_TOKENS_PER_SEC rl.throughput.tokens_per_sec
GYM_SERVER_NAME gym.server.name
GYM_SERVER_TYPE gym.server.type
GYM_NUM_SERVERS gym.num_servers
GYM_ROLLOUT_BATCH_SIZE gym.rollout.batch_size
GYM_VERIFY_SUCCESS_RATE gym.verify.success_rate
SLURM_JOB_ID slurm.job.id
SLURM_JOB_NAME slurm.job.name
SLURM_NODELIST slurm.nodelist
SLURM_NNODES slurm.nnodes
SLURM_NTASKS slurm.ntasks
SLURM_PARTITION slurm.partition
SLURM_CLUSTER_NAME slurm.cluster.name
NEMO_RUN_ID nemo.run.id
NEMO_USER_ID nemo.user.id
NEMO_SPAN_TRUNCATED nemo.span.truncated
WANDB_ENTITY wandb.entity
WANDB_PROJECT wandb.project
K8S_NAMESPACE_NAME k8s.namespace.name
K8S_POD_NAME k8s.pod.name
K8S_POD_UID k8s.pod.uid
K8S_NODE_NAME k8s.node.name
K8S_CONTAINER_NAME k8s.container.name
K8S_JOB_NAME k8s.job.name
HOST_NAME host.name
INVERTED_SKEW inverted.skew
INVERTED_START_EPOCH_SECONDS inverted.start_epoch_seconds
INVERTED_END_EPOCH_SECONDS inverted.end_epoch_seconds
INVERTED_DELTA_SECONDS inverted.delta_seconds
NV_DL_RANK nv.dl.rank
NV_DL_WORLD_SIZE nv.dl.world_size
NV_DL_LOCAL_RANK nv.dl.local_rank
NV_DL_ROLE nv.dl.role
NV_DL_PROVIDER_NAME nv.dl.provider.name
NV_DL_TOPOLOGY_SIZE_TP nv.dl.topology.size.tp
NV_DL_TOPOLOGY_SIZE_PP nv.dl.topology.size.pp
NV_DL_TOPOLOGY_SIZE_DP nv.dl.topology.size.dp
NV_DL_TRAINING_CONFIG_GLOBAL_BATCH_SIZE nv.dl.training.config.global_batch_size
NV_DL_TRAINING_CONFIG_MICRO_BATCH_SIZE nv.dl.training.config.micro_batch_size
NV_DL_TRAINING_CONFIG_SEQUENCE_LENGTH nv.dl.training.config.sequence_length
NV_DL_TRAINING_CONFIG_OPTIMIZER nv.dl.training.config.optimizer
NV_DL_TRAINING_CONFIG_RECOMPUTE_GRANULARITY nv.dl.training.config.recompute_granularity
NV_DL_TRAINING_TARGET_TRAIN_ITERS nv.dl.training.target.train_iters
NV_DL_TRAINING_TARGET_TRAIN_SAMPLES nv.dl.training.target.train_samples
NV_DL_TRAINING_TARGET_TRAIN_TOKENS nv.dl.training.target.train_tokens
NV_DL_SOFTWARE_TORCH nv.dl.software.torch
NV_DL_SOFTWARE_CUDA nv.dl.software.cuda
NV_DL_SOFTWARE_NCCL nv.dl.software.nccl
NV_DL_SOFTWARE_TRANSFORMER_ENGINE nv.dl.software.transformer_engine
NV_DL_LAUNCH_CONTAINER_IMAGE nv.dl.launch.container.image
NV_DL_JOB_UUID nv.dl.job.uuid
NV_DL_RUN_UUID nv.dl.run.uuid
NV_GPU_UUID nv.gpu.uuid
NV_GPU_INDEX nv.gpu.index
NV_GPU_PCI_BUS_ID nv.gpu.pci_bus_id
NV_GPU_SERIAL nv.gpu.serial
NV_GPU_MODEL nv.gpu.model
NV_GPU_COMPUTE_CAPABILITY nv.gpu.compute_capability
NV_GPU_MEMORY_TOTAL nv.gpu.memory_total
NV_GPU_DRIVER_VERSION nv.gpu.driver_version
SLURM_JOB_ID_RAW slurm.job.id.raw
SLURM_ARRAY_JOB_ID slurm.array.job_id
SLURM_ARRAY_TASK_ID slurm.array.task_id
SLURM_ARRAY_COUNT slurm.array.count
SLURM_ARRAY_SLUID slurm.array.sluid
SLURM_SLUID slurm.sluid
SLURM_HEAD_NODE_NAME slurm.head_node.name
SLURM_RESTART_COUNT slurm.restart_count
SLURM_JOB_USER slurm.job.user
SLURM_JOB_ACCOUNT slurm.job.account
SLURM_JOB_QOS slurm.job.qos
SLURM_JOB_RESERVATION slurm.job.reservation
SLURM_SEGMENT slurm.segment
SLURM_TOPOLOGY_ADDR slurm.topology.addr
SLURM_TOPOLOGY_ADDR_PATTERN slurm.topology.addr_pattern
SLURM_CLUSTER slurm.cluster
SLURM_TORCHELASTIC_RESTART_COUNT slurm.torchelastic.restart_count
"""
CONSTANTS = dict(line.split() for line in TABLE.splitlines())

INTEGERS = {
    "slurm.array.count",
    "slurm.nnodes",
    "slurm.ntasks",
    "slurm.restart_count",
    "nv.dl.rank",
    "nv.dl.world_size",
    "nv.dl.local_rank",
    "nv.dl.topology.size.tp",
    "nv.dl.topology.size.pp",
    "nv.dl.topology.size.dp",
    "nv.dl.training.config.global_batch_size",
    "nv.dl.training.config.micro_batch_size",
    "nv.dl.training.config.sequence_length",
    "nv.dl.training.target.train_iters",
    "nv.dl.training.target.train_samples",
    "nv.dl.training.target.train_tokens",
    "nv.gpu.index",
    "nv.gpu.memory_total",
}


def public(module: ModuleType) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if name.isupper()}


def test_constants(lensfast: ModuleType) -> None:
    assert public(lensfast.semconv) == CONSTANTS
    assert public(lensfast.semconv.attributes) == CONSTANTS


def test_constants_of_nemo_lens() -> None:
    try:
        theirs = public(importlib.import_module("nemo.lens.semconv"))
        version = metadata.version("nemo-lens")
    except ImportError:
        pytest.skip("nemo-lens is not installed here (it needs Python 3.13)")
    assert theirs.items() <= CONSTANTS.items()
    if version == "0.1.0":
        assert len(theirs) == 55


def test_importing_the_package_does_not_import_semconv(lensfast: ModuleType) -> None:
    code = "import lensfast, sys; print([m for m in sys.modules if m.startswith('lensfast.' + sys.argv[1])])"
    for module in ("semconv", "resources"):
        result = subprocess.run(
            [sys.executable, "-c", code, module],
            env=clean_environment(lensfast.backend),
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert (result.stdout, result.stderr) == ("[]\n", "")


def test_types(lensfast: ModuleType) -> None:
    types = lensfast.semconv.resources
    assert {key for key, kind in types.RESOURCE_TYPES.items() if kind is int} == INTEGERS
    assert set(types.RESOURCE_TYPES.values()) == {int, str}
    for prefix, table in (
        ("slurm.", types.SLURM_RESOURCE_TYPES),
        ("nv.dl.", types.DL_RESOURCE_TYPES),
        ("nv.gpu.", types.GPU_RESOURCE_TYPES),
    ):
        known = {value for value in CONSTANTS.values() if value.startswith(prefix)}
        assert set(table) == known - types.SLURM_RETIRED_RESOURCE_ATTRIBUTE_KEYS
        assert table.items() <= types.RESOURCE_TYPES.items()
    assert types.SLURM_RETIRED_RESOURCE_ATTRIBUTE_KEYS == {
        "slurm.nodelist",
        "slurm.cluster",
        "slurm.torchelastic.restart_count",
    }
    assert set(types.SLURM_RESOURCE_ATTRIBUTE_KEYS) == set(types.SLURM_RESOURCE_TYPES)
    assert types.SLURM_RESOURCE_ATTRIBUTE_NORMALIZERS == types.SLURM_RESOURCE_TYPES


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("7", 7),
        ("007", 7),
        ("+7", 7),
        ("-7", -7),
        (" 7\n", 7),
        (7, 7),
        (-(2**63), -(2**63)),
        ("9223372036854775807", 2**63 - 1),
    ],
)
def test_integers(lensfast: ModuleType, caplog: pytest.LogCaptureFixture, value: Any, expected: int) -> None:
    normalized = lensfast.semconv.resources.normalize_resource_attributes({"nv.dl.rank": value})
    assert normalized == {"nv.dl.rank": expected}
    assert type(normalized["nv.dl.rank"]) is int
    assert caplog.messages == []


@pytest.mark.parametrize(
    "value",
    [
        True, 2.0, "1_0", "1.0", "", "0x10", "²", "٣", "- 7", None, [1], "9223372036854775808", 2**63, "9" * 5000
    ],
)  # fmt: skip
def test_what_is_no_integer_is_kept(lensfast: ModuleType, caplog: pytest.LogCaptureFixture, value: Any) -> None:
    normalized = lensfast.semconv.resources.normalize_resource_attributes({"nv.gpu.index": value, "nv.dl.rank": "1"})
    assert normalized == {"nv.gpu.index": value, "nv.dl.rank": 1}
    assert type(normalized["nv.gpu.index"]) is type(value)
    [message] = caplog.messages
    assert "nv.gpu.index requires a base-10 integer" in message
    assert caplog.records[0].levelno == logging.WARNING


def test_what_normalizing_leaves_alone(lensfast: ModuleType, caplog: pytest.LogCaptureFixture) -> None:
    given = {"slurm.nnodes": "4", "slurm.ntasks": "x", "dl.rank": "1", "mine": "2", "nv.dl.role": "3", "nv.gpu.uuid": 4}
    normalized = lensfast.semconv.resources.normalize_resource_attributes(given)
    assert normalized == given
    assert normalized is not given
    assert caplog.messages == []


def test_compose(lensfast: ModuleType) -> None:
    compose = lensfast.semconv.encoding.compose_attributes
    current = {"a": "current", "none": None, "blank": ""}
    result = compose(
        current,
        defaults={"a": "default", "none": 1, "blank": 2, "d": 3},
        overrides={"o": None, "a": "override"},
    )
    assert result == {"a": "override", "none": None, "blank": "", "d": 3, "o": None}
    assert current == {"a": "current", "none": None, "blank": ""}
    assert compose(current) == current
    assert compose(current) is not current
    assert compose(None) == {}
    with pytest.raises(TypeError):
        compose(current, {})


def test_convert(lensfast: ModuleType) -> None:
    convert = lensfast.semconv.encoding.convert_attribute
    converters = {"n": int, "text": str, "upper": str.upper}
    assert convert("other", "7", converters) == "7"
    assert convert("n", " 7 ", converters) == 7
    assert convert("text", 7, converters) == "7"
    assert convert("upper", "a", converters) == "A"
    with pytest.raises(ValueError, match=r"n requires a base-10 integer, not '1_0'"):
        convert("n", "1_0", converters)


def test_integers_of_any_size(lensfast: ModuleType) -> None:
    convert = lensfast.semconv.encoding.convert_attribute

    @settings(deadline=None)
    @given(st.integers(-(2**65), 2**65))
    def check(number: int) -> None:
        if -(2**63) <= number < 2**63:
            assert convert("n", str(number), {"n": int}) == number
        else:
            with pytest.raises(ValueError, match="base-10 integer"):
                convert("n", str(number), {"n": int})

    check()
