"""Stand-ins for the programs that the documentation calls and a test machine has not: python docs_standins.py NAME ...

Each checks what it is given as far as it can, says on stderr what is wrong, and runs what the real one would, in small.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
JOB_ID = "4242"
MOST = 2
"""How many of the processes that it is to start a launcher does start: the first and the last."""


def ends(count: int) -> list[int]:
    """The first and the last of so many."""
    return sorted({0, count - 1})[:MOST]


def run(command: list[str], *variables: dict[str, object]) -> None:
    """The command, at once for each of some sets of variables."""
    texts = [{name: str(value) for name, value in one.items()} for one in variables or [{}]]
    processes = [subprocess.Popen(command, env={**os.environ, **one}) for one in texts]
    statuses = [process.wait() for process in processes]
    if any(statuses):
        sys.exit(f"{command} left with {statuses}")


def parser(name: str, options: str = "", flags: str = "") -> argparse.ArgumentParser:
    """Of the options that the documents use of a program; any other is an error."""
    result = argparse.ArgumentParser(prog=name, allow_abbrev=False)
    for option in options.split():
        result.add_argument(f"--{option}")
    for flag in flags.split():
        result.add_argument(f"--{flag}", action="store_true")
    return result


# Slurm


def sbatch(arguments: list[str]) -> None:
    """Runs a batch script as a job of two nodes; its output goes to slurm-4242.out, as on a cluster."""
    script = Path(arguments[0])
    text = script.read_text()
    if not text.startswith("#!"):
        sys.exit("sbatch: the script does not begin with #!")
    directives = " ".join(re.findall(r"^#SBATCH (.*?)(?: +#.*)?$", text, re.MULTILINE))
    options = parser(
        "#SBATCH",
        "job-name nodes ntasks-per-node gpus-per-node cpus-per-task time partition open-mode signal output",
        flags="requeue exclusive",
    ).parse_args(shlex.split(directives))
    if options.signal and not re.fullmatch(r"(?:[RB]*:)?\w+(?:@\d+)?", options.signal):
        sys.exit(f"sbatch: --signal={options.signal}")
    nodes = int(options.nodes)
    variables = {
        "SLURM_JOB_ID": JOB_ID,
        "SLURM_JOB_NAME": options.job_name,
        "SLURM_CLUSTER_NAME": "testcluster",
        "SLURM_JOB_PARTITION": options.partition or "batch",
        "SLURM_NNODES": nodes,
        "SLURM_NTASKS": nodes * int(options.ntasks_per_node),
        "SLURM_NTASKS_PER_NODE": options.ntasks_per_node,
        "SLURM_JOB_NODELIST": f"node[0-{nodes - 1}]",
        "SLURMD_NODENAME": "node0",
        "SLURM_RESTART_COUNT": 0,
    }
    output = Path((options.output or "slurm-%j.out").replace("%j", JOB_ID))
    with output.open("w") as file:
        environment = {**os.environ, **{name: str(value) for name, value in variables.items()}}
        result = subprocess.run(["bash", "-eu", script], env=environment, stdout=file, stderr=subprocess.STDOUT)
    if result.returncode != 0:
        sys.exit(f"the job left with {result.returncode}:\n{output.read_text()}")
    print(f"Submitted batch job {JOB_ID}")


def srun(arguments: list[str]) -> None:
    """Runs the command once for each task of the job."""
    options, command = known(
        parser("srun", "ntasks ntasks-per-node container-image", flags="kill-on-bad-exit"), arguments
    )
    tasks = int(options.ntasks or os.environ.get("SLURM_NTASKS", "1"))
    per_node = int(os.environ.get("SLURM_NTASKS_PER_NODE", "1"))
    places = [
        {
            "SLURM_PROCID": task,
            "SLURM_LOCALID": task % per_node,
            "SLURM_NODEID": task // per_node,
            "SLURM_STEP_ID": 0,
            "SLURMD_NODENAME": f"node{task // per_node}",
            "SLURM_TOPOLOGY_ADDR": f"switch0.node{task // per_node}",
        }
        for task in ends(tasks)
    ]
    run(command, *places)


def scontrol(arguments: list[str]) -> None:
    show, hostnames, nodes = arguments
    match = re.fullmatch(r"node\[0-(\d+)\]", nodes)
    if (show, hostnames) != ("show", "hostnames") or not match:
        sys.exit(f"scontrol: {arguments}")
    print(*(f"node{node}" for node in range(int(match[1]) + 1)), sep="\n")


def known(options: argparse.ArgumentParser, arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The options in front of a command, and the command."""
    options.add_argument("command", nargs=argparse.REMAINDER)
    parsed = options.parse_args(arguments)
    return parsed, parsed.command


# Launchers and clusters


def torchrun(arguments: list[str]) -> None:
    """Runs the script as the first and the last rank of this node."""
    options, (script, *rest) = known(
        parser("torchrun", "nnodes nproc-per-node node-rank max-restarts rdzv-id rdzv-backend rdzv-endpoint"), arguments
    )
    nodes, local_size = int(options.nnodes or 1), int(options.nproc_per_node or 1)
    if options.rdzv_backend not in {None, "c10d", "static"}:
        sys.exit(f"torchrun: --rdzv-backend {options.rdzv_backend}")
    hosts = os.environ.get("SLURM_JOB_NODELIST") and {f"node0:{port}" for port in (29400, 29500)}
    if hosts and options.rdzv_endpoint not in hosts:
        sys.exit(f"torchrun: --rdzv-endpoint {options.rdzv_endpoint} is not the job's first node")
    # What c10d's rendezvous would tell it.
    node = int(options.node_rank or os.environ.get("SLURM_NODEID", "0"))
    ranks = [
        {
            "RANK": node * local_size + local_rank,
            "WORLD_SIZE": nodes * local_size,
            "LOCAL_RANK": local_rank,
            "LOCAL_WORLD_SIZE": local_size,
            "TORCHELASTIC_RUN_ID": options.rdzv_id or "none",
            "TORCHELASTIC_RESTART_COUNT": 0,
        }
        for local_rank in ends(local_size)
    ]
    run(["python", script, *rest], *ranks)


def kubectl(arguments: list[str]) -> None:
    """apply: runs the command of each container, with the environment that the manifest gives it."""
    import yaml

    if arguments[:2] != ["apply", "-f"] or len(arguments) != 3:
        sys.exit(f"kubectl: {arguments}")
    for manifest in yaml.safe_load_all(Path(arguments[2]).read_text()):
        kind, name = manifest["kind"], manifest["metadata"]["name"]
        pod = manifest["spec"].get("template", {}) if "spec" in manifest else {}
        for container in pod.get("spec", {}).get("containers", []):
            for index in ends(int(manifest["spec"].get("completions", 1))):
                start_container(manifest, container, f"{name}-{index}", index)
        group = f".{manifest['apiVersion'].split('/')[0]}" if "/" in manifest["apiVersion"] else ""
        print(f"{kind.lower()}{group}/{name} created")


def start_container(manifest: dict[str, Any], container: dict[str, Any], pod: str, index: int) -> None:
    if "command" not in container:
        return  # the image's own
    labels = manifest["spec"]["template"]["metadata"].get("labels", {})
    # What the cluster adds to a Job's pods.
    labels |= {"batch.kubernetes.io/job-name": manifest["metadata"]["name"]}
    fields = {
        "metadata.name": pod,
        "metadata.namespace": "default",
        "metadata.uid": "6d5f-0000",
        "spec.nodeName": "node0",
        "status.hostIP": "127.0.0.1",
        **{f"metadata.labels['{key}']": value for key, value in labels.items()},
    }
    environment = {
        name: os.environ[name]
        for name in ("PATH", "PYTHONPATH", "LENSFAST_PURE_PYTHON", "PYTHONDONTWRITEBYTECODE")
        if name in os.environ
    }
    environment |= {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "HOSTNAME": pod, "JOB_COMPLETION_INDEX": str(index)}

    def expand(text: str) -> str:
        """$(NAME) as Kubernetes has it: only what was defined before is known."""
        return re.sub(r"\$\((\w+)\)", lambda match: environment[match[1]], text)

    for variable in container.get("env", []):
        source = variable.get("valueFrom")
        value = fields[source["fieldRef"]["fieldPath"]] if source else variable["value"]
        environment[variable["name"]] = expand(value)
    command = [expand(part) for part in (*container["command"], *container.get("args", ()))]
    subprocess.run(command, env=environment, check=True)


def ray(arguments: list[str]) -> None:
    """start: whether the workers that it would start run on lensfast."""
    if arguments[0] != "start":
        sys.exit(f"ray: {arguments}")
    parser("ray start", "address port", flags="head").parse_args(arguments[1:])
    code = "import nemo.lens; print('ray: nemo.lens of its workers is in', nemo.lens.__file__)"
    run([sys.executable, "-c", code])


def uv(arguments: list[str]) -> None:
    """run: the command; add: a requirement that can be met."""
    if arguments[0] == "run":
        run(arguments[1:])
    elif arguments[0] == "add":
        check_requirements(arguments[1:])
    else:
        sys.exit(f"uv: {arguments}")


# Installing and building


def pip(arguments: list[str]) -> None:
    if arguments[0] != "install":
        sys.exit(f"pip: {arguments}")
    options = parser("pip install", flags="no-deps")
    options.add_argument("requirements", nargs="+")
    check_requirements(options.parse_args(arguments[1:]).requirements)


def check_requirements(requirements: list[str]) -> None:
    """They can be parsed, and the extras of lensfast, or of `.` that stands for it, are there."""
    from packaging.requirements import Requirement

    extras = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    for text in requirements:
        requirement = Requirement(re.sub(r"^\.(?=\[|$)", "lensfast", text))
        if requirement.name not in {"lensfast", "rotel"}:
            sys.exit(f"{text}: not a package that the documents are about")
        if requirement.extras - extras:
            sys.exit(f"{text}: no such extra; there are {', '.join(sorted(extras))}")


def make(arguments: list[str]) -> None:
    """Whether the targets and variables are there."""
    makefile = (ROOT / "Makefile").read_text()
    for argument in arguments:
        variable = argument.partition("=")[0]
        pattern = rf"^{variable} \??=|\$\({variable}\)" if "=" in argument else rf"^{argument}:"
        if not re.search(pattern, makefile, re.MULTILINE):
            sys.exit(f"make: the Makefile has no {argument}")


def otelcol(arguments: list[str]) -> None:
    """A collector: whether its configuration hangs together."""
    import yaml

    (option,) = arguments
    for problem in collector_problems(yaml.safe_load(Path(option.removeprefix("--config=")).read_text())):
        sys.exit(f"{option}: {problem}")


def collector_problems(config: dict[str, Any]) -> Iterator[str]:
    """What of an OpenTelemetry Collector's configuration does not hang together."""
    kinds = ("receivers", "processors", "exporters")
    service = config["service"]
    if unknown := set(config) - {*kinds, "connectors", "extensions", "service"}:
        yield f"unknown sections {unknown}"
    used: dict[str, set[str]] = {kind: set() for kind in kinds}
    for name, pipeline in service["pipelines"].items():
        if name.partition("/")[0] not in {"traces", "metrics", "logs"}:
            yield f"the pipeline {name} is of no signal"
        if not {"receivers", "exporters"} <= set(pipeline) <= set(kinds):
            yield f"the pipeline {name} has {sorted(pipeline)}"
        for kind, components in pipeline.items():
            used[kind] |= set(components)
        processors = pipeline.get("processors", [])
        if "memory_limiter" in processors and processors[0] != "memory_limiter":
            yield f"memory_limiter is not the first processor of {name}"
    used["extensions"] = set(service.get("extensions", []))
    for kind, names in used.items():
        defined = set(config.get(kind) or {})
        if names != defined:
            yield f"{kind}: used {sorted(names)}, defined {sorted(defined)}"


# Programs of others, which the test writes into the folder under their names


def train(arguments: list[str]) -> None:
    """A program that imports nemo.lens: is it what LENSFAST_AUTO says?"""
    import importlib.metadata
    import importlib.util

    mode = os.environ.get("LENSFAST_AUTO", "off")
    there = bool(importlib.util.find_spec("nemo"))
    if mode != "install" and not there:
        try:
            importlib.metadata.version("nemo-lens")
        except importlib.metadata.PackageNotFoundError:
            return  # nothing to accelerate or to leave alone
    import nemo.lens

    import lensfast

    assert (nemo.lens is lensfast) == (mode == "install"), mode
    assert (nemo.lens.managed_span is lensfast.managed_span) == (mode != "off"), mode


def pretrain_gpt(arguments: list[str]) -> None:
    """Megatron-LM: its telemetry as the stand-in of the consumers' tests has it, and some of its call sites."""
    from consumers.megatron import LENS, initialize

    options = argparse.ArgumentParser(allow_abbrev=False)
    options.add_argument("--otel-enabled", action="store_true")
    options.add_argument("--otel-service-name")
    options.add_argument("--otel-span-groups")
    args, others = options.parse_known_args(arguments)
    if unknown := [other for other in others if other.startswith("--otel")]:
        sys.exit(f"pretrain_gpt.py: {unknown}")
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    handle = initialize("megatron-main", rank, world_size, args)
    with LENS.managed_span("job", "megatron.train"):
        for iteration in range(2):
            with (
                LENS.managed_span("step", "megatron.train.iteration", **{"megatron.iteration": iteration}),
                LENS.managed_span("forward_backward", "megatron.train.iteration.forward_backward"),
            ):
                for number in range(4):
                    with LENS.managed_span("layer", "megatron.layer.forward", **{"megatron.layer_number": number}):
                        pass
        with LENS.managed_span("checkpoint", "megatron.checkpoint.save"):
            pass
    if handle is not None:
        handle.shutdown()


def run_grpo(arguments: list[str]) -> None:
    """NeMo RL, likewise: the driver."""
    from consumers.nemo_rl_v2 import LENS, initialize, shut_down

    handle = initialize("rl-v2")
    with LENS.managed_span("job", "rl.grpo.job"):
        for _ in range(2):
            with (
                LENS.managed_span("step", "rl.grpo.step"),
                LENS.managed_span("policy_update", "rl.grpo.policy_training"),
                LENS.managed_span("per_prompt", "rl.sc.generate_and_push"),
            ):
                pass
    shut_down(handle)


PROGRAMS: dict[str, Callable[[list[str]], None]] = {
    function.__name__: function for function in (kubectl, make, otelcol, pip, ray, sbatch, scontrol, srun, torchrun, uv)
}
"""What is put on PATH."""
SCRIPTS = {"train.py": train, "pretrain_gpt.py": pretrain_gpt, "examples/run_grpo.py": run_grpo}
"""What a page that brings none of its own finds in its folder."""

if __name__ == "__main__":
    try:
        PROGRAMS[sys.argv[1]](sys.argv[2:])
    except subprocess.CalledProcessError as error:
        sys.exit(f"{sys.argv[1]}: {error}")
