"""The chart's renders: what is promised of them, and that they are what the templates give.

The golden files are rendered by `tools/render_chart.sh HELM tests/deploy/golden`.
"""

from __future__ import annotations

import functools
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from chart_rendering import CHART, REPOSITORY, helm, render
from fake_cluster import fake_cluster

GOLDEN = Path(__file__).parent / "golden"
VALUES = sorted((Path(__file__).parent / "values").glob("*.yaml"))
NAMES = [path.stem for path in VALUES]
UNSCALED = "worker.autoscaling.enabled=false"

Object = dict[str, Any]


@functools.cache
def objects(name: str) -> list[Object]:
    text = (GOLDEN / f"{name}.yaml").read_text()
    documents = yaml.load_all(text, Loader=yaml.CSafeLoader)
    return [document for document in documents if document]


def of_kind(name: str, kind: str) -> list[Object]:
    return [each for each in objects(name) if each["kind"] == kind]


def workloads(name: str) -> list[Object]:
    return [*of_kind(name, "Deployment"), *of_kind(name, "StatefulSet")]


def pods(name: str) -> Iterator[tuple[str, Object]]:
    """Each pod's component and specification."""
    for workload in workloads(name):
        template = workload["spec"]["template"]
        yield template["metadata"]["labels"]["tasuki.dev/component"], template["spec"]


def containers(name: str) -> Iterator[Object]:
    for _, pod in pods(name):
        yield from [*pod.get("initContainers", []), *pod["containers"]]


def flags(container: Object) -> dict[str, str]:
    words = [word.partition("=") for word in container.get("args", []) if word.startswith("--")]
    return {flag: value for flag, _, value in words}


@pytest.mark.system
def test_the_golden_files_are_what_the_templates_give(tmp_path: Path) -> None:
    command = [str(REPOSITORY / "tools/render_chart.sh"), helm(), str(tmp_path)]
    subprocess.run(command, check=True, timeout=120)
    assert sorted(path.stem for path in GOLDEN.iterdir()) == NAMES
    for name in NAMES:
        rendered = (tmp_path / f"{name}.yaml").read_text()
        assert rendered == (GOLDEN / f"{name}.yaml").read_text(), name


@pytest.mark.parametrize("name", NAMES)
def test_every_container_is_confined(name: str) -> None:
    for _, pod in pods(name):
        assert pod["securityContext"]["runAsNonRoot"]
        assert pod["securityContext"]["runAsUser"] > 0
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in containers(name):
        context = container["securityContext"]
        assert context["readOnlyRootFilesystem"]
        assert not context["allowPrivilegeEscalation"]
        assert context["capabilities"]["drop"] == ["ALL"]
        assert set(context["capabilities"]) <= {"drop", "add"}
        assert context["capabilities"].get("add", ["IPC_LOCK"]) == ["IPC_LOCK"]
        mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
        assert {"/tmp", "/cache"} <= mounts, "what it writes has a place"


@pytest.mark.parametrize("name", NAMES)
def test_the_only_right_is_to_watch_endpoint_slices(name: str) -> None:
    kinds = {each["kind"] for each in objects(name)}
    assert kinds <= {
        "Deployment",
        "StatefulSet",
        "Service",
        "ServiceAccount",
        "Role",
        "RoleBinding",
        "PodDisruptionBudget",
        "ScaledObject",
        "PodMonitor",
    }, "nothing cluster-wide, no resource of our own"
    (role,) = of_kind(name, "Role")
    assert role["rules"] == [
        {
            "apiGroups": ["discovery.k8s.io"],
            "resources": ["endpointslices"],
            "verbs": ["get", "list", "watch"],
        }
    ]
    for component, pod in pods(name):
        assert pod["automountServiceAccountToken"] == (component == "router")


@pytest.mark.parametrize("name", NAMES)
def test_a_pod_has_the_time_that_its_drain_takes(name: str) -> None:
    for component, pod in pods(name):
        said = flags(pod["containers"][0])
        drain_s = int(said["--drain-s"]) + int(said.get("--readiness-grace-s", 0))
        assert pod["terminationGracePeriodSeconds"] == drain_s + 10, component
        assert "lifecycle" not in pod["containers"][0]


@pytest.mark.parametrize("name", NAMES)
def test_liveness_asks_only_the_process_itself_and_is_slow_to_judge(name: str) -> None:
    for component, pod in pods(name):
        (container,) = pod["containers"]
        if component == "worker-host":
            assert not {"livenessProbe", "startupProbe"} & container.keys(), "it has no port"
            continue
        liveness, startup = container["livenessProbe"], container["startupProbe"]
        if component == "router":
            assert liveness["httpGet"]["path"] == "/live"
            assert container["readinessProbe"]["httpGet"]["path"] == "/ready"
        assert liveness["periodSeconds"] * liveness["failureThreshold"] >= 60
        least_s = 3600 if component == "worker" else 60
        assert startup.get("periodSeconds", 10) * startup["failureThreshold"] >= least_s


@pytest.mark.parametrize("name", NAMES)
def test_an_old_worker_goes_once_routers_know_the_new_one(name: str) -> None:
    for component, pod in pods(name):
        probe = pod["containers"][0]["readinessProbe"]
        if component == "worker":
            known_after_s = probe["periodSeconds"] * (probe["successThreshold"] - 1)
            assert known_after_s >= 2, "a router's longest pause between connections is 1 s"
    for budget in of_kind(name, "PodDisruptionBudget"):
        limits = {"minAvailable", "maxUnavailable"} & budget["spec"].keys()
        assert len(limits) == 1, "Kubernetes takes one of them"


@pytest.mark.parametrize("name", NAMES)
def test_selectors_find_the_pods(name: str) -> None:
    labels = [each["spec"]["template"]["metadata"]["labels"] for each in workloads(name)]
    components = [each["tasuki.dev/component"] for each in labels]

    def found(selector: dict[str, str]) -> int:
        return sum(selector.items() <= each.items() for each in labels)

    for workload in workloads(name):
        assert found(workload["spec"]["selector"]["matchLabels"]) == 1
    for budget in of_kind(name, "PodDisruptionBudget"):
        pool = budget["spec"]["selector"]["matchLabels"].get("tasuki.dev/pool")
        hosts = sum(each.get("tasuki.dev/pool") == pool for each in labels) if pool else 1
        assert found(budget["spec"]["selector"]["matchLabels"]) == hosts
    for service in of_kind(name, "Service"):
        if service["metadata"]["name"].endswith("-hosts"):
            assert found(service["spec"]["selector"]) > 1
            assert service["spec"]["publishNotReadyAddresses"]
        else:
            is_workers = service["spec"].get("clusterIP") == "None"
            expected = components.count("worker") if is_workers else 1
            assert found(service["spec"]["selector"]) == expected
    for monitor in of_kind(name, "PodMonitor"):
        assert found(monitor["spec"]["selector"]["matchLabels"]) == 1


@pytest.mark.parametrize("name", NAMES)
def test_flags_metrics_and_volumes_exist(name: str) -> None:
    known = (REPOSITORY / "docs/configuration.md").read_text()
    for container in containers(name):
        for flag in flags(container):
            assert f"`{flag}" in known, flag
    metrics = (REPOSITORY / "docs/metrics.md").read_text()
    for scaled in of_kind(name, "ScaledObject"):
        for trigger in scaled["spec"]["triggers"]:
            for metric in re.findall(r"tasuki_\w+", trigger["metadata"]["query"]):
                assert f"`{metric}`" in metrics, metric
    for _, pod in pods(name):
        volumes = {volume["name"] for volume in pod["volumes"]}
        used = [c["volumeMounts"] for c in [*pod.get("initContainers", []), *pod["containers"]]]
        assert {mount["name"] for mounts in used for mount in mounts} == volumes


def test_pools_scale_by_the_measure_of_their_role() -> None:
    scaled = of_kind("autoscaling", "ScaledObject")
    queries = {
        each["spec"]["scaleTargetRef"]["name"]: [
            re.findall(r"tasuki_\w+", trigger["metadata"]["query"])[0]
            for trigger in each["spec"]["triggers"]
        ]
        for each in scaled
    }
    queue, blocks = "tasuki_admission_waiting_prompt_tokens", "tasuki_worker_free_blocks"
    assert queries == {
        "demo-tasuki-prefill": [queue],
        "demo-tasuki-decode": [blocks],
        "demo-tasuki-both": [queue, blocks],
    }


def replicas(done: subprocess.CompletedProcess[str]) -> dict[str, int]:
    """Of each Deployment of a render."""
    assert done.returncode == 0, done.stderr
    documents = yaml.load_all(done.stdout, Loader=yaml.CSafeLoader)
    made = [each for each in documents if each and each["kind"] == "Deployment"]
    return {each["metadata"]["name"]: each["spec"]["replicas"] for each in made}


@pytest.mark.system
def test_an_upgrade_keeps_the_replicas_of_scaled_pools() -> None:
    values = VALUES[NAMES.index("autoscaling")]
    more = ("--set", "pools.prefill.replicas=3")
    first = {"demo-tasuki-both": 1, "demo-tasuki-decode": 2, "demo-tasuki-prefill": 3}
    routers = {"demo-tasuki-router": 2}
    assert replicas(render("demo", values, *more)) == {**first, **routers}

    running = {"demo-tasuki-decode": 8, "demo-tasuki-prefill": 1, "demo-tasuki-router": 9}
    with fake_cluster(running) as url:
        at = ("--dry-run=server", "--kube-apiserver", url)
        scaled = replicas(render("demo", values, *more, *at))
        fixed = replicas(render("demo", values, *more, *at, "--set", UNSCALED))
    assert scaled == {**first, **running, **routers}
    assert fixed == {**first, **routers, "demo-tasuki-decode": 1}


def test_no_data_and_an_unknown_speed_are_not_no_load() -> None:
    for scaled in of_kind("autoscaling", "ScaledObject"):
        for trigger in scaled["spec"]["triggers"]:
            given = trigger["metadata"]
            assert given["ignoreNullValues"] == "false", "KEDA reads an empty result as 0 otherwise"
            assert "vector(" not in given["query"]
            if "tokens_per_second" in given["query"]:
                queue, _, rest = given["query"].partition(" / ")
                assert rest.endswith(f"> 0) or ({queue} == 0)"), "0 at rest, else nothing"


def notes(where: Path, values: Path, *settings: str) -> str:
    """What `helm install` would say; `helm template` shows it from an object of a copy."""
    chart = where / "chart"
    shutil.copytree(CHART, chart)
    (chart / "templates/NOTES.txt").rename(chart / "notes.txt")
    shown = chart / "templates/shown.yaml"
    shown.write_text('kind: Notes\ntext: {{ tpl (.Files.Get "notes.txt") . | quote }}\n')
    words = [word for each in settings for word in ("--set", each)]
    done = render("demo", values, "--show-only", "templates/shown.yaml", *words, chart=chart)
    assert done.returncode == 0, done.stderr
    return str(yaml.safe_load(done.stdout)["text"])


@pytest.mark.system
@pytest.mark.parametrize(("monitored", "warned"), [("false", True), ("true", False)])
def test_scaling_without_a_pod_monitor_is_warned_of(
    monitored: str, warned: bool, tmp_path: Path
) -> None:
    values = VALUES[NAMES.index("autoscaling")]
    text = notes(tmp_path, values, f"podMonitor.enabled={monitored}")
    assert ("WARNING: KEDA scales both, decode, prefill by metrics" in text) == warned, text


@pytest.mark.system
@pytest.mark.parametrize(
    ("settings", "asks"),
    [
        ((), "curl localhost:8000/v1/models"),
        (("router.tls.secretName=web",), "curl -k https://localhost:8000/v1/models"),
        (
            ("router.tls.secretName=web", "router.apiKeys.secretName=keys"),
            'curl -H "Authorization: Bearer $TASUKI_API_KEY" -k https://localhost:8000/v1/models',
        ),
    ],
)
def test_the_notes_ask_as_the_router_serves(
    settings: tuple[str, ...], asks: str, tmp_path: Path
) -> None:
    text = notes(tmp_path, VALUES[NAMES.index("gpus")], *settings)
    assert asks in [line.strip() for line in text.splitlines()], text


def test_what_gpus_need_is_plain_values() -> None:
    (decode,) = [pod for _, pod in pods("gpus") if pod.get("priorityClassName") == "tasuki-decode"]
    (container,) = decode["containers"]
    assert container["resources"]["limits"] == {
        "nvidia.com/gpu": "4",
        "rdma/hca": "1",
        "hugepages-2Mi": "1Gi",
    }
    assert flags(container)["--tp"] == "4"
    assert container["securityContext"]["capabilities"]["add"] == ["IPC_LOCK"]
    volumes = {volume["name"]: volume for volume in decode["volumes"]}
    assert volumes["shm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "16Gi"}
    assert volumes["model"]["hostPath"] == {"path": "/var/lib/models", "type": "Directory"}


def test_the_hosts_of_a_worker_are_pods_of_one_ordinal() -> None:
    first, second = of_kind("hosts", "StatefulSet")
    service = first["spec"]["serviceName"]
    (named,) = [s for s in of_kind("hosts", "Service") if s["metadata"]["name"] == service]
    assert named["spec"]["clusterIP"] == "None"
    for rank, workload in enumerate((first, second)):
        assert workload["spec"]["replicas"] == 2
        assert workload["spec"]["podManagementPolicy"] == "Parallel"
        (container,) = workload["spec"]["template"]["spec"]["containers"]
        said = flags(container)
        assert (said["--tp"], said["--rank"]) == ("16", str(rank))
        names = [f"{w['metadata']['name']}-$(POD_INDEX).{service}" for w in (first, second)]
        assert said["--nodes"] == f"{names[0]}:7100,{names[1]}"
        variables = [each["name"] for each in container["env"]]
        assert {"POD_INDEX", "TASUKI_NODES_KEY"} <= set(variables)
        assert container["resources"]["limits"]["nvidia.com/gpu"] == "8"


@pytest.mark.parametrize("name", NAMES)
def test_a_new_version_of_the_chart_restarts_no_pod(name: str) -> None:
    stays = {"app.kubernetes.io/name", "app.kubernetes.io/instance"}
    for workload in workloads(name):
        labels = workload["spec"]["template"]["metadata"]["labels"]
        assert {label for label in labels if not label.startswith("tasuki.dev/")} == stays


def test_one_worker_over_several_hosts_goes_at_a_time() -> None:
    name = "demo-tasuki-prefill"
    budgets = of_kind("hosts", "PodDisruptionBudget")
    (budget,) = [b for b in budgets if b["metadata"]["name"].startswith(name)]
    assert budget["spec"]["maxUnavailable"] == 1
    assert "minAvailable" not in budget["spec"]
    wanted = budget["spec"]["selector"]["matchLabels"].items()
    for workload in of_kind("hosts", "StatefulSet"):
        assert wanted <= workload["spec"]["template"]["metadata"]["labels"].items()


@pytest.mark.system
@pytest.mark.parametrize(
    ("name", "given", "says"),
    [
        ("hosts", "worker.nodesKey.secretName=", "pools.prefill has 2 hosts for each worker: give"),
        ("hosts", "worker.autoscaling.enabled=true", "which KEDA does not scale together"),
        ("autoscaling", "worker.autoscaling.minReplicas=9", "minReplicas is 9, maxReplicas is"),
        ("hub", "router.metricsPort=8000", "router.port and router.metricsPort are both 8000"),
    ],
)
def test_values_that_exclude_one_another_are_refused(name: str, given: str, says: str) -> None:
    done = render("demo", VALUES[NAMES.index(name)], "--set", given)
    assert done.returncode != 0 and says in done.stderr, done.stderr


def test_the_router_fetches_with_its_own_settings() -> None:
    (pod,) = [pod for component, pod in pods("hub") if component == "router"]
    (fetches,), (serves,) = pod["initContainers"], pod["containers"]
    assert {"name": "HTTPS_PROXY", "value": "http://proxy:3128"} in serves["env"]
    assert {"name": "HTTPS_PROXY", "value": "http://proxy:3128"} in fetches["env"]
    assert fetches["resources"] == serves["resources"]
    assert fetches["resources"]["limits"], "a namespace with a quota refuses a pod without"


def test_certificates_close_the_way_for_plain_probes() -> None:
    for component, pod in pods("secrets"):
        said = flags(pod["containers"][0])
        assert "--fleet-cert" in said
        probe = pod["containers"][0]["readinessProbe"]
        if component == "router":
            assert probe["httpGet"]["scheme"] == "HTTPS"
        else:
            assert "tcpSocket" in probe, "a grpc probe has no certificate"


class TestValues:
    validator = jsonschema.Draft202012Validator(
        json.loads((CHART / "values.schema.json").read_text())
    )
    defaults: Any = yaml.safe_load((CHART / "values.yaml").read_text())

    @pytest.mark.parametrize("path", VALUES, ids=NAMES)
    def test_every_default_and_every_file_is_valid(self, path: Path) -> None:
        self.validator.validate(self.defaults)
        self.validator.validate(merge(self.defaults, yaml.safe_load(path.read_text())))

    @pytest.mark.parametrize(
        ("given", "says"),
        [
            ({"worker": {"gpu": 1}}, "'gpu' was unexpected"),
            ({"pools": {"decode": {"role": "both"}}}, "'both' is not one of"),
            ({"pools": {"more": {"role": "decode"}}}, "'replicas' is a required property"),
            ({"router": {"replicas": 0}}, "0 is less than the minimum of 1"),
            ({"model": {"source": "llama"}}, "does not match"),
            ({"model": {"name": "a=b"}}, "'a=b' does not match"),
            ({"cache": {"volume": {"emptyDir": {}, "hostPath": {}}}}, "is not valid under any"),
            ({"worker": {"pdb": {"minAvailable": "half"}}}, "is not valid under any"),
            ({"podSecurity": {"runAsUser": 0}}, "0 is less than the minimum of 1"),
        ],
    )
    def test_what_is_wrong_is_refused(self, given: Object, says: str) -> None:
        with pytest.raises(jsonschema.ValidationError, match=re.escape(says)):
            self.validator.validate(merge(self.defaults, given))


def merge(base: Any, over: Any) -> Any:
    """As Helm merges values: objects by key, null removes."""
    if not isinstance(base, dict) or not isinstance(over, dict):
        return over
    merged = dict(base)
    for key, value in over.items():
        if value is None:
            merged.pop(key, None)
        else:
            merged[key] = merge(base.get(key), value)
    return merged
