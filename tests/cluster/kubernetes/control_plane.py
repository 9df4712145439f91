"""A real control plane: etcd, API server, controller manager and scheduler as child processes.

Everything listens on loopback, in a network namespace of the tests' own: no port is taken,
nothing reaches another network. The programs are those of `make cluster-tools`.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import time
from pathlib import Path

from api import Api, ApiError

TOOLS = Path(os.environ.get("TASUKI_CLUSTER_TOOLS", Path.home() / ".cache/tasuki/cluster-tools"))
PROGRAMS = (
    "etcd",
    "kube-apiserver",
    "kube-controller-manager",
    "kube-scheduler",
    "kubectl",
    "helm",
)
URL = "https://127.0.0.1:6443"
HOST = "10.88.0.1"  # the API server's in objects, which have no loopback addresses
ADMIN = "admin-token"
START_DEADLINE_S = 300.0
_CLONE_NEWNET, _CLONE_NEWNS = 0x40000000, 0x00020000


def missing_programs() -> list[str]:
    """What `make cluster-tools` would make."""
    return [name for name in PROGRAMS if not os.access(TOOLS / name, os.X_OK)]


def enter_network_namespace() -> None:
    """Give this thread, and all that it starts from now on, a network of its own.

    Raises:
        OSError: It takes the right to do so (root).
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNET) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"cannot make a network namespace: {os.strerror(code)}")
    run("ip", "link", "set", "lo", "up")
    run("ip", "addr", "add", f"{HOST}/32", "dev", "lo")


def own_hosts_file(folder: Path) -> None:
    """Give this thread, and all that it starts, an /etc/hosts in which kubelets name their pods."""
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.unshare(_CLONE_NEWNS) == 0, os.strerror(ctypes.get_errno())
    file = folder / "hosts"
    file.write_text(Path("/etc/hosts").read_text())
    run("mount", "--make-rprivate", "/")
    run("mount", "--bind", str(file), "/etc/hosts")


def run(*words: str) -> str:
    """Run a program and give its output.

    Raises:
        AssertionError: It failed; with what it said.
    """
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, f"{' '.join(words)}\n{done.stdout}{done.stderr}"
    return done.stdout


def kubeconfig(token: str, namespace: str = "default") -> str:
    """A client's configuration, as JSON, which is YAML too."""
    cluster = {"server": URL, "insecure-skip-tls-verify": True}
    return json.dumps(
        {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "tests", "cluster": cluster}],
            "users": [{"name": "user", "user": {"token": token}}],
            "contexts": [
                {
                    "name": "tests",
                    "context": {"cluster": "tests", "user": "user", "namespace": namespace},
                }
            ],
            "current-context": "tests",
        }
    )


class ControlPlane:
    """Starts on construction; `stop` ends it.

    Attributes:
        api: With all rights.
        kubeconfig: Of the same user, for programs.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self.api = Api(URL, ADMIN)
        self.kubeconfig = folder / "kubeconfig"
        self._write_secrets()
        try:
            self._start_etcd()
            self.start_api_server()
            self._start_controllers()
            self._await(lambda: self.api.get("/api/v1/namespaces/default/serviceaccounts/default"))
        except BaseException:
            self.stop()
            raise

    def _write_secrets(self) -> None:
        key, public = str(self._folder / "sa.key"), str(self._folder / "sa.pub")
        run("openssl", "genrsa", "-out", key, "2048")
        run("openssl", "rsa", "-in", key, "-pubout", "-out", public)
        (self._folder / "tokens.csv").write_text(f"{ADMIN},admin,admin,system:masters\n")
        self.kubeconfig.write_text(kubeconfig(ADMIN))

    def _start_etcd(self) -> None:
        client, peer = "http://127.0.0.1:2379", "http://127.0.0.1:2380"
        self._start(
            "etcd",
            f"--data-dir={self._folder / 'etcd'}",
            "--unsafe-no-fsync",
            f"--listen-client-urls={client}",
            f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peer}",
        )

    def start_api_server(self) -> None:
        """Start it, also again after `kill_api_server`, and wait until it is ready."""
        self._start(
            "kube-apiserver",
            "--etcd-servers=http://127.0.0.1:2379",
            f"--cert-dir={self._folder / 'certs'}",
            "--bind-address=127.0.0.1",
            f"--advertise-address={HOST}",
            "--secure-port=6443",
            "--service-cluster-ip-range=10.96.0.0/16",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={self._folder / 'sa.pub'}",
            f"--service-account-signing-key-file={self._folder / 'sa.key'}",
            f"--token-auth-file={self._folder / 'tokens.csv'}",
            "--authorization-mode=RBAC",
        )
        self._await(self.api.check_ready)

    def kill_api_server(self) -> None:
        """SIGKILL; watches break."""
        process = self._processes.pop("kube-apiserver")
        process.kill()
        process.wait()

    def _start_controllers(self) -> None:
        common = (f"--kubeconfig={self.kubeconfig}", "--leader-elect=false")
        self._start(
            "kube-controller-manager",
            *common,
            "--bind-address=127.0.0.1",
            f"--service-account-private-key-file={self._folder / 'sa.key'}",
            f"--root-ca-file={self._folder / 'certs/apiserver.crt'}",
            "--use-service-account-credentials",
            "--node-monitor-grace-period=20s",
        )
        self._start("kube-scheduler", *common, "--bind-address=127.0.0.1")

    def _start(self, name: str, *arguments: str) -> None:
        with (self._folder / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                [str(TOOLS / name), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self._folder,
                start_new_session=True,
            )

    def _await(self, ask: object) -> None:
        assert callable(ask)
        deadline_s = time.monotonic() + START_DEADLINE_S
        while True:
            for name, process in self._processes.items():
                assert process.poll() is None, f"{name} ended:\n{self.tail(name)}"
            try:
                ask()
                return
            except ApiError as error:
                if time.monotonic() > deadline_s:
                    raise TimeoutError(f"{error}\n{self.tail('kube-apiserver')}") from error
            time.sleep(0.2)

    def tail(self, name: str) -> str:
        """The end of a program's log."""
        text = (self._folder / f"{name}.log").read_text(errors="replace")
        return "\n".join(text.splitlines()[-10:])

    def stop(self) -> None:
        """End all programs, the last started first."""
        for process in reversed(self._processes.values()):
            process.kill()
            process.wait()
        self._processes.clear()
