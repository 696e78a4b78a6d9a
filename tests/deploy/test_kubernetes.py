"""The Kubernetes files: they fit together, and what their containers run runs here."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from deployment import DEPLOY, aggregator, as_here, memory_bytes, page
from local_cluster import MPIRUN, READY_S, ROOT, WAIT_S, Process, eventually
from pod_here import need_pods, pod_command

from omnireduce.support.addresses import parse_address, parse_listen
from omnireduce.support.config import load_config

FOLDER = DEPLOY / "kubernetes"
SECRET = "whatever the operator has chosen\n"
Object = dict[str, Any]


def objects(name: str) -> dict[str, Object]:
    """The objects of a file by kind."""
    results = [each for each in yaml.safe_load_all((FOLDER / name).read_text()) if each]
    for result in results:
        assert {"apiVersion", "kind", "metadata"} <= result.keys()
        assert re.fullmatch(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?", result["metadata"]["name"])
    assert len({result["kind"] for result in results}) == len(results)
    return {result["kind"]: result for result in results}


@pytest.fixture
def settings(tmp_path: Path) -> Path:
    """The configuration that the pods mount, with the secret in a file of this host."""
    [(name, text)] = objects("aggregator.yaml")["ConfigMap"]["data"].items()
    (tmp_path / "secret").write_text(SECRET)
    (tmp_path / "secret").chmod(0o600)
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
    result: Object = container
    return result


def pods() -> dict[str, Object]:
    replicas = objects("training.yaml")["MPIJob"]["spec"]["mpiReplicaSpecs"]
    results = {name.lower(): pod_of({"spec": replicas[name]}) for name in ("Launcher", "Worker")}
    return results | {"aggregator": pod_of(objects("aggregator.yaml")["Deployment"])}


def test_images_go_by_digests_that_the_operator_fills_in() -> None:
    """A tag alone may be another image tomorrow. Nothing starts with the digest that the files have."""
    named = [
        line for file in DEPLOY.rglob("*.yaml") for line in re.findall(r"(?m)^[^#\n]*\bimage:.*$", file.read_text())
    ]
    assert len(named) == len(POD)
    images = {container_of(pod)["image"] for pod in pods().values()}
    assert images == {f"registry.example.com/omnireduce{kind}@sha256:DIGEST" for kind in ("", "-mpi")}
    assert not any(re.search(r"@sha256:[0-9a-f]{64}$", line) for line in named)


POD = ("launcher", "worker", "aggregator")


@pytest.mark.parametrize("name", POD)
def test_a_pod_may_do_little(name: str) -> None:
    pod = pods()[name]
    assert pod["automountServiceAccountToken"] is False
    rights = dict(pod["securityContext"])
    assert rights.pop("seccompProfile") == {"type": "RuntimeDefault"}
    assert rights == {"runAsNonRoot": True, "runAsUser": 10001, "runAsGroup": 10001, "fsGroup": 10001}
    container = container_of(pod)
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
    assert container["resources"]["limits"]["memory"]
    assert container["resources"]["requests"].keys() >= {"cpu", "memory"}
    for volume in pod["volumes"]:
        assert volume.keys() & {"emptyDir", "configMap", "secret"}
        assert "emptyDir" not in volume or volume["emptyDir"]["sizeLimit"]


def test_the_secret_is_a_file_that_a_group_reads(settings: Path) -> None:
    """No variable has it, and no command line when it is made."""
    path = load_config(settings, environ={}).security.secret_file
    for name in ("aggregator", "worker"):
        container, pod = container_of(pods()[name]), pods()[name]
        [mount] = [each for each in container["volumeMounts"] if each["name"] == "secret"]
        assert f"{mount['mountPath']}/secret" == path
        assert mount["readOnly"]
        [volume] = [each["secret"] for each in pod["volumes"] if each["name"] == "secret"]
        assert volume == {"secretName": "omnireduce", "defaultMode": 0o440}
    assert "secret" not in str(pods()["launcher"])  # the launcher is no rank


@pytest.mark.skipif(not shutil.which("kubectl"), reason="no kubectl here")
def test_the_secret_is_made_as_the_file_says() -> None:
    [line] = [each for each in (FOLDER / "aggregator.yaml").read_text().splitlines() if "create secret" in each]
    command = f"{line.removeprefix('#').strip()} --dry-run=client -o yaml"
    result = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=WAIT_S, check=True)
    made = yaml.safe_load(result.stdout)
    assert made["metadata"]["name"] == "omnireduce"
    assert len(made["data"]["secret"]) >= 64
    assert list(made["data"]) == ["secret"]


def test_only_the_jobs_and_monitoring_reach_the_aggregator(settings: Path) -> None:
    result, config = objects("aggregator.yaml"), load_config(settings, environ={})
    policy, labels = result["NetworkPolicy"]["spec"], result["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert policy["podSelector"] == {"matchLabels": labels}
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    assert policy["egress"] == []
    jobs, monitoring = policy["ingress"]
    [training] = jobs["from"]
    shards = [parse_address(each)[1] for each in config.cluster.aggregators]
    assert jobs["ports"] == [{"port": port, "protocol": "TCP"} for port in shards]
    assert monitoring["from"] == [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}]
    assert config.metrics.listen is not None
    assert monitoring["ports"] == [{"port": parse_listen(config.metrics.listen).port, "protocol": "TCP"}]

    job = objects("training.yaml")
    own = {"podSelector": job["NetworkPolicy"]["spec"]["podSelector"]}
    assert job["NetworkPolicy"]["spec"]["ingress"] == [{"from": [own]}]
    for each in job["MPIJob"]["spec"]["mpiReplicaSpecs"].values():
        carried = each["template"]["metadata"]["labels"].items()
        assert own["podSelector"]["matchLabels"].items() <= carried
        assert training == {"podSelector": {"matchLabels": {"app": "omnireduce-training"}}}
        assert ("app", "omnireduce-training") in carried
    budget = result["PodDisruptionBudget"]["spec"]
    assert budget == {"maxUnavailable": 0, "selector": {"matchLabels": labels}}


def test_the_aggregator_its_service_and_its_configuration_fit_together(settings: Path) -> None:
    result, config = objects("aggregator.yaml"), load_config(settings, environ={})
    service, deployment = result["Service"], result["Deployment"]
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert labels == service["spec"]["selector"] == deployment["spec"]["selector"]["matchLabels"]
    first = parse_listen(config.aggregator.listen).port
    shards = [first + shard for shard in range(config.aggregator.shards)]
    ports = {port["name"]: port["port"] for port in service["spec"]["ports"]}
    assert ports == {"shard-0": shards[0], "shard-1": shards[1], "metrics": parse_listen(config.metrics.listen).port}
    container = container_of(pod_of(deployment))
    assert {port["name"]: port["containerPort"] for port in container["ports"]} == ports
    host = service["metadata"]["name"]
    assert list(config.cluster.aggregators) == [f"{host}:{port}" for port in shards]
    annotations = deployment["spec"]["template"]["metadata"]["annotations"]
    assert annotations["prometheus.io/port"] == str(ports["metrics"])
    assert (
        pod_of(deployment)["terminationGracePeriodSeconds"]
        > config.aggregator.drain_s + config.aggregator.finish_s + 10
    )
    [mount] = [each for each in container["volumeMounts"] if each["name"] == "configuration"]
    assert container["args"] == ["--config", f"{mount['mountPath']}/{settings.name}"]
    assert container["env"][0]["value"] == container["args"][1]


def test_the_pod_has_the_memory_that_its_configuration_allows_jobs_and_strangers(settings: Path) -> None:
    limit = container_of(pods()["aggregator"])["resources"]["limits"]["memory"]
    need = memory_bytes(load_config(settings, environ={}).aggregator)
    assert need <= int(limit.removesuffix("Gi")) << 30 < 2 * need


def test_the_aggregator_answers_its_probes(settings: Path) -> None:
    container = container_of(pod_of(objects("aggregator.yaml")["Deployment"]))
    command = as_here(["omnireduce", "aggregator", "--config", str(settings)])
    environ = {"OMNIREDUCE_AGGREGATOR_LISTEN": "127.0.0.1:0", "OMNIREDUCE_METRICS_LISTEN": "127.0.0.1:0"}
    paths = {"startupProbe": "/readyz", "readinessProbe": "/readyz", "livenessProbe": "/healthz"}
    assert {probe: container[probe]["httpGet"]["path"] for probe in paths} == paths
    secret = {"OMNIREDUCE_SECURITY_SECRET_FILE": str(settings.parent / "secret")}
    with aggregator(command, environ, secret) as (process, addresses):
        assert len(addresses) == 2
        for probe in paths:
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
    launcher, worker = (container_of(replicas[name]["template"]["spec"]) for name in ("Launcher", "Worker"))
    program, count, ranks, *rest = launcher["command"]
    assert (program, count) == ("mpirun", "-n")
    assert int(ranks) == replicas["Worker"]["replicas"] * job["spec"]["slotsPerWorker"]
    assert launcher["image"] == worker["image"]
    assert worker["readinessProbe"]["tcpSocket"]["port"] == 2222
    start = as_here(["omnireduce", "aggregator", "--config", str(settings)])
    overrides = {"OMNIREDUCE_AGGREGATOR_LISTEN": "127.0.0.1:0", "OMNIREDUCE_METRICS_LISTEN": ""}
    here_secret = {"OMNIREDUCE_SECURITY_SECRET_FILE": str(settings.parent / "secret")}
    with aggregator(start, overrides, here_secret) as (_, addresses):
        variables = here_secret | {each["name"]: each["value"] for each in launcher["env"] if "value" in each}
        assert variables.pop("OMNIREDUCE_CONFIG").endswith(f"/{settings.name}")
        quoted = ", ".join(f'"{address}"' for address in addresses)
        variables |= {"OMNIREDUCE_CONFIG": str(settings), "OMNIREDUCE_CLUSTER_AGGREGATORS": f"[{quoted}]"}
        few = {"OMNIREDUCE_TRAIN_STEPS": "3", "OMNIREDUCE_TRAIN_DIM": "16", "OMNIREDUCE_TRAIN_MAX_FILES": "20"}
        assert MPIRUN is not None
        result = subprocess.run(
            [MPIRUN, count, "2", *as_here(rest)],
            cwd=ROOT, env=os.environ | variables | few, capture_output=True, text=True, timeout=READY_S, check=False,
        )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert "bit-identical on all workers" in result.stdout


@pytest.fixture
def mounted() -> dict[str, dict[str, str]]:
    """Files that Kubernetes and the operator mount, beside empty folders."""
    return {"configuration": objects("aggregator.yaml")["ConfigMap"]["data"], "secret": {"secret": SECRET}}


def test_an_aggregator_runs_in_its_pod(tmp_path: Path, mounted: dict[str, dict[str, str]]) -> None:
    """As a user of no rights, on a file system that it cannot change, with a secret that its group may read."""
    need_pods()
    pod = pods()["aggregator"]
    command = as_here(["omnireduce", "aggregator", *pod["containers"][0]["args"]])
    pod["containers"][0]["env"] += [{"name": "OMNIREDUCE_AGGREGATOR_LISTEN", "value": "127.0.0.1:0"}]
    pod["containers"][0]["env"] += [{"name": "OMNIREDUCE_METRICS_LISTEN", "value": "127.0.0.1:0"}]
    with aggregator(pod_command(tmp_path, pod, mounted, command), {}, {}) as (process, addresses):
        status = Path(f"/proc/{process.pid}/status").read_text()
        assert re.search(r"^Uid:(\t10001){4}$", status, re.MULTILINE)
        assert re.search(r"^Groups:\t10001 $", status, re.MULTILINE)
        assert re.search(r"^CapBnd:\t0+$", status, re.MULTILINE)
        assert re.search(r"^NoNewPrivs:\t1$", status, re.MULTILINE)
        assert page(process, "/readyz") == "ready\n"
        assert len(addresses) == 2


def with_teams(pod: Object) -> Object:
    """The pod with a Secret of teams, mounted as that of the aggregator's own secret is."""
    pod["volumes"].append({"name": "teams", "secret": {"secretName": "teams", "defaultMode": 0o440}})
    pod["containers"][0]["volumeMounts"].append({"name": "teams", "mountPath": "/run/secrets/teams", "readOnly": True})
    return pod


@pytest.mark.parametrize(("mount", "status"), [("ro", 0), ("rw", 1)])
def test_teams_are_a_mounted_secret(
    tmp_path: Path, mounted: dict[str, dict[str, str]], mount: str, status: int
) -> None:
    """All may write to the folder as far as its mode goes: it counts that the mount lets nobody."""
    need_pods()
    code = """
from omnireduce.support.config.schema import Security
from omnireduce.support.teams import load_teams
teams = load_teams(Security(teams_folder="/run/secrets/teams"), {})
print(len(teams), teams.of("vision").terms.max_jobs)
"""
    teams = {"vision": SECRET, "vision.toml": "max_jobs = 3\n", "speech": f"other than {SECRET}"}
    command = pod_command(
        tmp_path, with_teams(pods()["aggregator"]), mounted | {"teams": teams}, [sys.executable, "-c", code]
    )
    command[-1] = command[-1].replace("remount,ro root/run/secrets/teams", f"remount,{mount} root/run/secrets/teams")
    result = subprocess.run(command, capture_output=True, text=True, timeout=READY_S, check=False)
    assert result.returncode == status, result.stderr
    if status:
        assert "/run/secrets/teams: mode 3777 lets others than its owner add teams" in result.stderr
    else:
        assert result.stdout == "2 3\n"


def test_a_pod_of_the_test_refuses_what_a_pod_refuses(tmp_path: Path, mounted: dict[str, dict[str, str]]) -> None:
    need_pods()
    pod = pods()["aggregator"]
    code = """
import os
for path in ("/etc", "/opt", "/run/secrets/omnireduce", "/var/cache/omnireduce", os.path.dirname(os.__file__)):
    try: open(path + "/x", "w"); print("written", path)
    except OSError as error: print(error.strerror)
print(oct(os.stat("/run/secrets/omnireduce/secret").st_mode & 0o777))
"""
    with Process(*pod_command(tmp_path, pod, mounted, [sys.executable, "-c", code])) as process:
        lines = [process.line() for _ in range(6)]
    refused = {"Read-only file system", "Permission denied"}
    assert {lines[0], lines[1], lines[2], lines[4]} <= refused
    assert lines[3] == "written /var/cache/omnireduce"
    assert lines[5] == "0o440"


def test_the_launcher_reaches_a_worker_and_none_that_is_not_of_the_job(
    tmp_path: Path, mounted: dict[str, dict[str, str]]
) -> None:
    """The real ssh and sshd, as users of no rights: mpirun needs nothing else of the pods."""
    need_pods()
    if missing := [tool for tool in ("ssh", "ssh-keygen", "sshd") if shutil.which(tool, path=PATH) is None]:
        pytest.skip(f"no {missing[0]} here")
    keys = {name: key_pair(tmp_path / name) for name in ("job", "other")}
    host = "word-embeddings-worker-0.word-embeddings.default.svc"
    hosts = f"127.0.0.1 {host}.cluster.local {host} {host.split('.')[0]}\n"

    def in_pod(name: str, part: str, key: dict[str, str], command: list[str]) -> list[str]:
        pod = with_keys(pods()[name])
        (tmp_path / part).mkdir()
        return pod_command(tmp_path / part, pod, mounted | {"ssh": key}, command, IMAGE, hosts)

    def ssh(part: str, key: dict[str, str], *options: str) -> tuple[int, str, str]:
        arguments = (
            "id -u; id -G; cat /run/secrets/omnireduce/secret; echo $PATH; touch /run/omnireduce/home/x && echo made"
        )
        command = in_pod("launcher", part, key, ["ssh", *options, host, arguments])
        enter = ["nsenter", f"--net=/proc/{sshd.pid}/ns/net", *command]
        result = subprocess.run(enter, capture_output=True, text=True, timeout=WAIT_S, check=False)
        return result.returncode, result.stdout, result.stderr

    name = f'hostname {host.split(".")[0]} && ip link set lo up && exec "$@"'
    start = ["unshare", "--net", "--uts", "sh", "-c", name, "sh", *in_pod("worker", "w", keys["job"], ["start-sshd"])]
    with Process(*start) as sshd:
        assert eventually(lambda: "Server listening" in sshd.log or sshd.popen.poll() is not None)
        assert sshd.popen.poll() is None, sshd.log
        assert ssh("1", keys["job"]) == (0, f"10001\n10001\n{SECRET}{IMAGE_PATH}\nmade\n", "")
        stranger = keys["job"] | {"id_rsa": keys["other"]["id_rsa"]}  # has the private key of another job
        status, output, why = ssh("2", stranger)
        assert (status, output) == (255, "")
        assert "Permission denied (publickey)" in why
        mixed = keys["job"] | {
            "id_rsa.pub": keys["other"]["id_rsa.pub"]
        }  # a host whose key another job's key has signed
        status, output, why = ssh("3", mixed)
        assert (status, output) == (255, "")
        assert "Host key verification failed" in why
        status, output, why = ssh("4", keys["job"], "-oUser=root")
        assert (status, output) == (255, "")


PATH = "/usr/sbin:/usr/bin:/sbin:/bin"
IMAGE_PATH = "/opt/omnireduce/bin:/usr/local/bin:/usr/bin:/bin"
CONTAINER = DEPLOY / "container"
IMAGE = {
    "/usr/local/bin/start-sshd": CONTAINER / "start-sshd",
    "/etc/ssh/sshd_omnireduce": CONTAINER / "sshd_config",
    "/etc/ssh/ssh_config.d/omnireduce.conf": CONTAINER / "ssh_config",
}


def key_pair(folder: Path) -> dict[str, str]:
    """The files that the operator mounts: a key of the kind that it makes, and what may log in."""
    folder.mkdir()
    make = ["ssh-keygen", "-q", "-t", "ecdsa", "-b", "521", "-m", "PEM", "-N", "", "-C", "", "-f", folder / "id_rsa"]
    subprocess.run(make, check=True, timeout=WAIT_S)
    private, public = (folder / "id_rsa").read_text(), (folder / "id_rsa.pub").read_text()
    return {"id_rsa": private, "id_rsa.pub": public, "authorized_keys": public}


def with_keys(pod: Object) -> Object:
    """The pod as the operator starts it: it adds the volume with the keys."""
    path = objects("training.yaml")["MPIJob"]["spec"]["sshAuthMountPath"]
    pod["volumes"].append({"name": "ssh", "secret": {}})
    pod["containers"][0]["volumeMounts"].append({"name": "ssh", "mountPath": path})
    return pod
