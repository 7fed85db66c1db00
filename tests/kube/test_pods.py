"""What the operator's Pods and Services are like."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from typing import Any

import pytest

from everstep.kube import pods, services, sidecar as autoscaler
from everstep.kube.pre_stop import say_goodbye
from everstep.kube.quantities import number, rounded_up
from everstep.kube.spec import parse
from kube.world import group, manifest, template
from processes import LIMIT_S, ours, wait_for


def worker(spec: dict[str, Any], index: int = 1, host: int = 2, **more: Any) -> dict[str, Any]:
    raw = manifest(spec, **more)
    cluster = parse(raw)
    return pods.worker_pod(cluster, cluster.groups[0], "a-name", "tpu-xxxxx", index, host)


def head(**more: Any) -> dict[str, Any]:
    return pods.head_pod(parse(manifest(group(), **more)), "a-head")


def command(pod: dict[str, Any]) -> str:
    return str(pod["spec"]["containers"][0]["args"][0])


def tpu_group(**more: Any) -> dict[str, Any]:
    made = group(**more)
    made["template"]["spec"]["nodeSelector"] = {
        "cloud.google.com/gke-tpu-topology": "4x4",
        "cloud.google.com/gke-tpu-accelerator": "tpu-v6e-slice",
    }
    made["template"]["spec"]["containers"][0]["resources"] = {
        "limits": {"google.com/tpu": 4, "cpu": "7500m", "memory": "8Gi"}
    }
    return made


def test_a_tpu_host_is_started_with_what_it_has_and_the_labels_of_its_slice() -> None:
    said = command(worker(tpu_group()))
    assert "--num-cpus=8 " in said
    assert f"--memory={8 << 30} " in said
    assert "--resources='{\"TPU\":4}'" in said
    for label in (
        "ray.io/tpu-slice-name=tpu-1",
        "ray.io/tpu-worker-id=2",
        "ray.io/tpu-topology=4x4",
        "ray.io/tpu-pod-type=v6e-16",
        "ray.io/accelerator-type=TPU-V6E",
        "everstep.dev/slice=tpu-1",
    ):
        assert label in said
    assert "--address=demo-head-svc.default.svc.cluster.local:6379" in said
    assert "--block" in said


def test_what_the_group_says_of_its_resources_wins_over_its_container() -> None:
    said = command(worker(tpu_group(resources={"CPU": "2", "TPU": "8", "special": "1"})))
    assert "--num-cpus=2 " in said
    assert '--resources=\'{"TPU":8,"special":1}\'' in said


def test_gpu_hosts_get_a_slice_and_nothing_of_tpus() -> None:
    made = group()
    made["template"]["spec"]["containers"][0]["resources"] = {"limits": {"nvidia.com/gpu": 8}}
    pod = worker(made)
    assert "--num-gpus=8" in command(pod)
    assert "everstep.dev/slice=tpu-1" in command(pod)
    assert not [v for v in pod["spec"]["containers"][0]["env"] if v["name"].startswith("TPU_")]


def test_a_command_of_the_containers_own_comes_first_unless_it_is_to_be_all() -> None:
    made = group()
    made["template"]["spec"]["containers"][0]["args"] = ["echo hello"]
    assert command(worker(made)).startswith(
        "echo hello && ulimit -n ${RAY_START_ULIMIT_OPEN_FILES:-65536}; ray start "
    )
    raw = manifest(made)
    raw["metadata"]["annotations"]["ray.io/overwrite-container-cmd"] = "true"
    cluster = parse(raw)
    pod = pods.worker_pod(cluster, cluster.groups[0], "a-name", "tpu-xxxxx", 0, 0)
    assert pod["spec"]["containers"][0]["args"] == ["echo hello"]
    generated = {v["name"]: v.get("value") for v in pod["spec"]["containers"][0]["env"]}
    assert str(generated["KUBERAY_GEN_RAY_START_CMD"]).startswith("ray start ")


def test_a_worker_waits_until_its_head_can_be_connected_to() -> None:
    with socket.socket() as head:
        head.bind(("127.0.0.1", 0))  # the port is taken, and nobody listens there
        port = head.getsockname()[1]
        spec = {"template": template(), "rayStartParams": {"port": str(port)}}
        cluster = parse(manifest(group(), headGroupSpec=spec))
        pod = pods.worker_pod(cluster, cluster.groups[0], "a-name", "tpu-xxxxx", 0, 0)
        first = pod["spec"]["initContainers"][-1]
        # Names of Services are addresses here.
        script = first["args"][0].replace(cluster.head_host, "127.0.0.1")
        waiting = subprocess.Popen([*first["command"], script], stdout=subprocess.PIPE, text=True)
        assert waiting.stdout is not None
        assert waiting.stdout.readline() == f"waiting for the head at 127.0.0.1:{port}\n"
        head.listen()
        waiting.communicate(timeout=LIMIT_S)
        assert waiting.returncode == 0


def test_another_port_is_known_to_everybody() -> None:
    spec = {"template": template(), "rayStartParams": {"port": "7000"}}
    raw = manifest(group(), headGroupSpec=spec, enableInTreeAutoscaling=True)
    cluster = parse(raw)
    pod = pods.worker_pod(cluster, cluster.groups[0], "a-name", "tpu-xxxxx", 0, 0)
    assert "svc.cluster.local:7000" in command(pod)
    assert "svc.cluster.local:7000" in pod["spec"]["initContainers"][-1]["args"][0]
    sidecar = pods.head_pod(cluster, "a-head")["spec"]["containers"][-1]
    assert "--gcs-address $(POD_IP):7000" in sidecar["args"][0]
    ports = {p["name"]: p["port"] for p in services.head_service(cluster)["spec"]["ports"]}
    assert ports["gcs-server"] == 7000


def test_the_autoscaler_is_the_heads_sidecar_with_an_account_and_few_rights() -> None:
    cluster = parse(manifest(group(), enableInTreeAutoscaling=True, autoscalerOptions={"image": "mine"}))
    pod = pods.head_pod(cluster, "a-head")
    assert pod["spec"]["restartPolicy"] == "Never"
    assert pod["spec"]["serviceAccountName"] == "demo"
    assert "--no-monitor" in command(pod)
    sidecar = pod["spec"]["containers"][-1]
    assert sidecar["image"] == "mine"
    assert "ray kuberay-autoscaler" in sidecar["args"][0]
    account, role, binding = autoscaler.account(cluster)
    assert (account["kind"], role["kind"], binding["kind"]) == ("ServiceAccount", "Role", "RoleBinding")
    assert {verb for rule in role["rules"] for verb in rule["verbs"]} == {"get", "list", "watch", "patch"}
    assert autoscaler.account(parse(manifest(group()))) == ()


def test_without_the_autoscaler_the_head_is_alone_and_may_restart() -> None:
    pod = head()
    assert len(pod["spec"]["containers"]) == 1
    assert "restartPolicy" not in pod["spec"]


def test_the_template_is_never_changed() -> None:
    raw = manifest(tpu_group())
    before = repr(raw)
    cluster = parse(raw)
    pods.worker_pod(cluster, cluster.groups[0], "a-name", "tpu-xxxxx", 0, 0)
    pods.head_pod(cluster, "a-head")
    services.head_service(cluster)
    assert repr(raw) == before


@pytest.mark.parametrize(
    ("text", "value"), [("2", 2), ("500m", 1), ("7500m", 8), ("4Gi", 4 << 30), ("1e3", 1000), ("1.5k", 1500)]
)
def test_quantities(text: str, value: int) -> None:
    assert rounded_up(text) == value


@pytest.mark.parametrize("text", ["", "many", "1.2.3", "4mi", "Gi"])
def test_what_is_no_quantity(text: str) -> None:
    with pytest.raises(ValueError, match="quantity|suffix"):
        number(text)


def environment(container: dict[str, Any]) -> dict[str, Any]:
    return {v["name"]: v.get("value", v.get("valueFrom")) for v in container.get("env") or ()}


def test_the_object_store_has_the_containers_memory_to_live_in() -> None:
    made = tpu_group()
    pod = worker(made)
    shm = {"name": "shared-mem", "emptyDir": {"medium": "Memory", "sizeLimit": "8Gi"}}
    assert shm in pod["spec"]["volumes"]
    assert {"name": "shared-mem", "mountPath": "/dev/shm"} in pod["spec"]["containers"][0]["volumeMounts"]
    assert {"name": "shared-mem", "emptyDir": {"medium": "Memory"}} in head()["spec"]["volumes"]
    # Where the user has seen to it, nothing is added.
    made["template"]["spec"]["containers"][0]["volumeMounts"] = [{"name": "mine", "mountPath": "/dev/shm"}]
    assert "volumes" not in worker(made)["spec"]
    assert "volumes" not in worker(group(rayStartParams={"plasma-directory": "/fast"}))["spec"]


def test_ports_are_there_for_prometheus_and_the_users_own_stay() -> None:
    made = group()
    made["template"]["spec"]["containers"][0]["ports"] = [{"name": "mine", "containerPort": 1234}]
    ports = {p["name"]: p["containerPort"] for p in worker(made)["spec"]["containers"][0]["ports"]}
    assert ports == {"mine": 1234, "metrics": 8080}
    spec = {"template": made["template"], "rayStartParams": {"metrics-export-port": "9090"}}
    ports = {
        p["name"]: p["containerPort"] for p in head(headGroupSpec=spec)["spec"]["containers"][0]["ports"]
    }
    assert ports == {"mine": 1234, "metrics": 9090}


def test_ports_of_the_heads_service_come_on_top_of_rays() -> None:
    own = {"name": "mine", "port": 80, "targetPort": 8000}
    spec = {"template": template(), "headService": {"metadata": {"name": "front"}, "spec": {"ports": [own]}}}
    cluster = parse(manifest(group(), headGroupSpec=spec))
    made = services.head_service(cluster)
    assert made["metadata"]["name"] == "front"
    assert {p["name"] for p in made["spec"]["ports"]} == {
        "mine", "gcs-server", "dashboard", "client", "metrics", "serve",
    }  # fmt: skip
    pod = pods.worker_pod(cluster, cluster.groups[0], "a-name", "tpu-xxxxx", 0, 0)
    assert environment(pod["spec"]["containers"][0])["RAY_ADDRESS"] == "front.default.svc.cluster.local:6379"


def test_every_container_that_comes_first_knows_the_head() -> None:
    made = template(initContainers=[{"name": "certificates", "image": "x"}])
    address = "demo-head-svc.default.svc.cluster.local"
    for pod in (worker(group(template=made)), head(headGroupSpec={"template": made})):
        known = environment(pod["spec"]["initContainers"][0])
        assert (known["FQ_RAY_IP"], known["RAY_IP"]) == (address, "demo-head-svc")


def test_ray_is_told_where_it_runs() -> None:
    for pod in (worker(group()), head()):
        told = environment(pod["spec"]["containers"][0])
        assert told["RAY_CLUSTER_NAMESPACE"] == {"fieldRef": {"fieldPath": "metadata.namespace"}}
        assert told["RAY_USAGE_STATS_KUBERAY_IN_USE"] == "1"
    assert "kuberay_crd=RayCluster" in told["RAY_USAGE_STATS_EXTRA_TAGS"]


@pytest.mark.parametrize("value", ["true", "True"])
def test_a_template_too_may_keep_its_command(value: str) -> None:
    made = group()
    made["template"]["metadata"] = {"annotations": {"ray.io/overwrite-container-cmd": value}}
    made["template"]["spec"]["containers"][0]["args"] = ["echo hello"]
    assert worker(made)["spec"]["containers"][0]["args"] == ["echo hello"]


def test_newer_rays_are_probed_without_wget() -> None:
    pod = worker(group(), rayVersion="2.60.0")
    probe = pod["spec"]["containers"][0]["livenessProbe"]
    assert probe["httpGet"] == {"path": "/api/healthz", "port": 52365}
    for version in ("2.52.1", "nightly"):
        old = worker(group(), rayVersion=version)["spec"]["containers"][0]["readinessProbe"]
        assert "local_raylet_healthz" in old["exec"]["command"][-1]


def test_labels_of_the_group_and_finalizers_of_the_template_reach_the_pods() -> None:
    made = group(labels={"zone": "here"})
    made["template"]["metadata"] = {"labels": {"zone": "there", "a": "b"}, "finalizers": ["example.com/x"]}
    meta = worker(made)["metadata"]
    assert (meta["labels"]["zone"], meta["labels"]["a"]) == ("here", "b")
    assert meta["finalizers"] == ["example.com/x"]


def test_groups_may_have_capitals_and_hosts_have_none() -> None:
    pod = worker(group("smallGroup"))
    assert pod["metadata"]["labels"]["ray.io/group"] == "smallGroup"
    assert pod["spec"]["hostname"] == "smallgroup-1-2"


def test_the_hook_that_tells_ray_is_python() -> None:
    ray: dict[str, Any] = {"name": "ray"}
    say_goodbye({}, ray)
    command = ray["lifecycle"]["preStop"]["exec"]["command"]
    compile(command[2], "hook", "exec")
    assert "+ 25" in command[2]
    # Where there is no time to say anything, or the user says it, nothing is added.
    for spec, own in (({"terminationGracePeriodSeconds": 3}, {}), ({}, {"lifecycle": {"preStop": {}}})):
        before = dict(own)
        say_goodbye(spec, own)
        assert own == before


@pytest.mark.parametrize("name", ["ray::IDLE", "ray::DashboardAgent", "ray::RuntimeEnvAgent", "ray::train"])
def test_the_hook_has_nothing_to_wait_for_beside_rays_own_processes(name: str) -> None:
    ray: dict[str, Any] = {"name": "ray"}
    say_goodbye({}, ray)
    pod = {**os.environ, "RAY_CLOUD_INSTANCE_ID": f"pod-of-{os.getpid()}"}
    pod.pop("RAY_ADDRESS", None)
    raylet = subprocess.Popen(
        ["ray/raylet/raylet", "-c", f"(exec -a {name} sleep 600) & wait"],
        executable="bash",
        env=pod,
        start_new_session=True,
    )
    try:
        wait_for(lambda: any(command.startswith(name) for command in ours().values()), name)
        script = ray["lifecycle"]["preStop"]["exec"]["command"][2]
        hook = subprocess.run([sys.executable, "-c", script], env=pod, capture_output=True, text=True)
    finally:
        os.killpg(raylet.pid, signal.SIGKILL)
        raylet.wait()
    # Before it waits, it has to reach Ray, which isn't there.
    assert ("RAY_ADDRESS" in hook.stderr) is (name == "ray::train"), hook.stderr
    assert (hook.returncode == 0) is (name != "ray::train")
