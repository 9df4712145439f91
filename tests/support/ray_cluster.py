"""A Ray cluster of several nodes on this machine, as a process that tests command.

    RAY_TMPDIR=FOLDER python tests/support/ray_cluster.py ADDRESS CPUS...

Prints `cluster HOST:PORT` once it is up: a head without CPUs, and a node for each of CPUS, all
at ADDRESS.
Then it obeys lines on stdin, each answered by a line `looks JSON` about the cluster:
`look`, `kill ID`. It ends, with every node, at the end of stdin.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

os.environ |= {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_raylet_start_wait_time_s": "120",
    "RAY_worker_niceness": "0",
}
import ray
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group_table

_NODE = {
    "object_store_memory": 80 * 1024**2,
    "include_log_monitor": False,
}


def main(address: str, *cpus: str) -> None:
    """Keep a cluster until stdin ends."""
    there = {"node_ip_address": address, **_NODE}
    head = {"num_cpus": 0, "include_dashboard": False, "no_monitor": True}
    cluster = Cluster(initialize_head=True, head_node_args={**head, **there})
    nodes = {}
    for each in cpus:
        node = cluster.add_node(num_cpus=int(each), **there)
        nodes[node.node_id] = node
    ray.init(address=cluster.address, _node_ip_address=address, log_to_driver=False)
    print(f"cluster {cluster.address}", flush=True)
    for line in sys.stdin:
        word, *rest = line.split()
        if word == "kill":
            cluster.remove_node(nodes[rest[0]], allow_graceful=False)
        print(f"looks {json.dumps(_look())}", flush=True)
    ray.shutdown()
    cluster.shutdown()


def _look() -> dict[str, Any]:
    """Nodes that live with their addresses, free CPUs, and the nodes of each group with places."""
    groups = placement_group_table().values()
    return {
        "alive": {n["NodeID"]: n["NodeManagerAddress"] for n in ray.nodes() if n["Alive"]},
        "free_cpus": ray.available_resources().get("CPU", 0),
        "groups": [
            list(group["bundles_to_node_id"].values())
            for group in groups
            if group["state"] == "CREATED"
        ],
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
