"""The little of a Kubernetes API server that Helm asks for a dry run; it reads JSON alone."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

_APPS = {"groupVersion": "apps/v1", "version": "v1"}
_DISCOVERY: dict[str, Any] = {
    "/version": {"major": "1", "minor": "37", "gitVersion": "v1.37.2"},
    "/api": {"kind": "APIVersions", "versions": ["v1"]},
    "/api/v1": {"kind": "APIResourceList", "groupVersion": "v1", "resources": []},
    "/apis": {
        "kind": "APIGroupList",
        "apiVersion": "v1",
        "groups": [{"name": "apps", "versions": [_APPS], "preferredVersion": _APPS}],
    },
    "/apis/apps/v1": {
        "kind": "APIResourceList",
        "groupVersion": "apps/v1",
        "resources": [
            {"name": "deployments", "namespaced": True, "kind": "Deployment", "verbs": ["get"]}
        ],
    },
}


@contextlib.contextmanager
def fake_cluster(replicas: Mapping[str, int]) -> Iterator[str]:
    """Gives the URL of a cluster.

    Args:
        replicas: Of its Deployments in the namespace `default`, by name.
    """

    def answer(path: str) -> dict[str, Any] | None:
        folder, _, name = path.rpartition("/")
        if folder == "/apis/apps/v1/namespaces/default/deployments" and name in replicas:
            metadata = {"name": name, "namespace": "default"}
            found = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": metadata}
            return {**found, "spec": {"replicas": replicas[name]}}
        return _DISCOVERY.get(path)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = answer(self.path.partition("?")[0])
            missing = {"kind": "Status", "apiVersion": "v1", "reason": "NotFound", "code": 404}
            body = json.dumps(missing if found is None else found).encode()
            self.send_response(404 if found is None else 200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
