"""The Kubernetes files: they fit together, and what their containers run runs here."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from deployment import DEPLOY, SECRET, aggregator, as_here, page
from local_cluster import MPIRUN, READY_S, ROOT

from omnireduce.config import load_config, parse_address
from omnireduce.runtime.server import MAX_STRANGERS
from omnireduce.transport.stream import CONTROL_LIMIT, READ_BYTES, SMALL_LIMIT

PROGRAM_BYTES = 256 << 20  # of supervisor, monitor and shards before the first job, which share most of it
FOLDER = DEPLOY / "kubernetes"
Object = dict[str, Any]


def objects(name: str) -> dict[str, Object]:
    """The objects of a file by kind."""
    found = [each for each in yaml.safe_load_all((FOLDER / name).read_text()) if each]
    for each in found:
        assert {"apiVersion", "kind", "metadata"} <= each.keys()
        assert re.fullmatch(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?", each["metadata"]["name"])
    assert len({each["kind"] for each in found}) == len(found)
    return {each["kind"]: each for each in found}


@pytest.fixture
def settings(tmp_path: Path) -> Path:
    """The configuration that the pods mount."""
    [(name, text)] = objects("aggregator.yaml")["ConfigMap"]["data"].items()
    (tmp_path / name).write_text(text)
    return tmp_path / name


def pod_of(deployment: Object) -> Object:
    spec: Object = deployment["spec"]["template"]["spec"]
    return spec


def container_of(pod: Object) -> Object:
    assert pod["enableServiceLinks"] is False  # OMNIREDUCE_AGGREGATOR_PORT=tcp://… is no key of the configuration
    [container] = pod["containers"]
    mounts = {each["name"] for each in container.get("volumeMounts", [])}
    assert mounts == {each["name"] for each in pod.get("volumes", [])}
    assert re.fullmatch(r"registry\.example\.com/omnireduce(-mpi)?:\d+\.\d+\.\d+", container["image"])
    found: Object = container
    return found


def secret_of(container: Object) -> Object:
    """The variable with the secret, which comes from a Secret."""
    [found] = [each for each in container["env"] if each["name"] in SECRET]
    assert found["valueFrom"]["secretKeyRef"] == {"name": "omnireduce", "key": "secret"}
    assert "create secret generic omnireduce --from-literal=secret=" in (FOLDER / "aggregator.yaml").read_text()
    variable: Object = found
    return variable


def test_the_aggregator_its_service_and_its_configuration_fit_together(settings: Path) -> None:
    found, config = objects("aggregator.yaml"), load_config(settings, environ={})
    service, deployment = found["Service"], found["Deployment"]
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert labels == service["spec"]["selector"] == deployment["spec"]["selector"]["matchLabels"]
    first = parse_address(config.aggregator.listen)[1]
    shards = [first + shard for shard in range(config.aggregator.shards)]
    ports = {each["name"]: each["port"] for each in service["spec"]["ports"]}
    assert ports == {"shard-0": shards[0], "shard-1": shards[1], "metrics": parse_address(config.metrics.listen)[1]}
    container = container_of(pod_of(deployment))
    assert {each["name"]: each["containerPort"] for each in container["ports"]} == ports
    host = service["metadata"]["name"]
    assert list(config.cluster.aggregators) == [f"{host}:{port}" for port in shards]
    annotations = deployment["spec"]["template"]["metadata"]["annotations"]
    assert annotations["prometheus.io/port"] == str(ports["metrics"])
    assert pod_of(deployment)["terminationGracePeriodSeconds"] > config.aggregator.drain_s + 5
    [mount] = [each for each in container["volumeMounts"] if each["name"] == "configuration"]
    assert container["args"] == ["--config", f"{mount['mountPath']}/{settings.name}"]
    assert container["env"][0]["value"] == container["args"][1]


def test_the_pod_has_the_memory_that_its_configuration_allows_jobs_and_strangers(settings: Path) -> None:
    """As docs/security.md counts it."""
    allowed = load_config(settings, environ={}).aggregator
    ranks = allowed.max_ranks * (READ_BYTES + SMALL_LIMIT)
    strangers = MAX_STRANGERS * (READ_BYTES + CONTROL_LIMIT)  # each with an answer that it does not read
    need = allowed.shards * (2 * allowed.max_bytes + ranks + strangers) + PROGRAM_BYTES
    limit = container_of(pod_of(objects("aggregator.yaml")["Deployment"]))["resources"]["limits"]["memory"]
    assert need <= int(limit.removesuffix("Gi")) << 30


def test_the_aggregator_answers_its_probes(settings: Path) -> None:
    container = container_of(pod_of(objects("aggregator.yaml")["Deployment"]))
    command = as_here(["omnireduce-aggregator", "--config", str(settings)])
    environ = {"OMNIREDUCE_AGGREGATOR_LISTEN": "127.0.0.1:0", "OMNIREDUCE_METRICS_LISTEN": "127.0.0.1:0"}
    with aggregator(command, environ) as (process, addresses):
        assert len(addresses) == 2
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            assert container[probe]["httpGet"]["port"] == "metrics"
            assert container[probe]["timeoutSeconds"] > load_config(settings, environ={}).metrics.timeout_s
            assert page(process, container[probe]["httpGet"]["path"])
        template = objects("aggregator.yaml")["Deployment"]["spec"]["template"]
        metrics = page(process, template["metadata"]["annotations"]["prometheus.io/path"])
        assert metrics.count("omnireduce_shard_up{") == 2


@pytest.mark.skipif(not MPIRUN, reason="no mpirun here; the extra `mpi` brings one")
def test_the_training_runs_what_its_launcher_says(settings: Path) -> None:
    """On this host, with the command and the variables of the launcher; only the steps are fewer."""
    job = objects("training.yaml")["MPIJob"]
    assert job["apiVersion"] == "kubeflow.org/v2beta1"
    assert job["spec"]["mpiImplementation"] in ("OpenMPI", "Intel", "MPICH")
    replicas = job["spec"]["mpiReplicaSpecs"]
    launcher, worker = (container_of(replicas[each]["template"]["spec"]) for each in ("Launcher", "Worker"))
    program, count, ranks, *rest = launcher["command"]
    assert (program, count) == ("mpirun", "-n")
    assert int(ranks) == replicas["Worker"]["replicas"] * job["spec"]["slotsPerWorker"]
    assert launcher["image"] == worker["image"]
    assert worker["readinessProbe"]["tcpSocket"]["port"] == 2222
    start = as_here(["omnireduce-aggregator", "--config", str(settings)])
    here = {"OMNIREDUCE_AGGREGATOR_LISTEN": "127.0.0.1:0", "OMNIREDUCE_METRICS_LISTEN": ""}
    with aggregator(start, here) as (_, addresses):
        assert launcher["env"][-1] == secret_of(container_of(pod_of(objects("aggregator.yaml")["Deployment"])))
        variables = SECRET | {each["name"]: each["value"] for each in launcher["env"] if "value" in each}
        assert variables.pop("OMNIREDUCE_CONFIG").endswith(f"/{settings.name}")
        quoted = ", ".join(f'"{address}"' for address in addresses)
        variables |= {"OMNIREDUCE_CONFIG": str(settings), "OMNIREDUCE_CLUSTER_AGGREGATORS": f"[{quoted}]"}
        few = {"OMNIREDUCE_TRAIN_STEPS": "3", "OMNIREDUCE_TRAIN_DIM": "16", "OMNIREDUCE_TRAIN_MAX_FILES": "20"}
        assert MPIRUN is not None
        done = subprocess.run(
            [MPIRUN, count, "2", *as_here(rest)],
            cwd=ROOT, env=os.environ | variables | few, capture_output=True, text=True, timeout=READY_S, check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "bit-identical on all workers" in done.stdout
