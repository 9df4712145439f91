"""What NIXL is told when it starts, and how it is refused where something is missing."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tasuki.kv.net_devices import Network
from tasuki.kv.nixl_agent import environment_for
from tasuki.kv.transport import TransportError, UnknownTransportError, create_transport


def test_what_is_not_there_is_refused_with_what_is() -> None:
    with pytest.raises(UnknownTransportError, match="'teleport': there is host-staged, mooncake"):
        create_transport("teleport")
    with pytest.raises(TransportError, match=r"no network backend 'UCCL': there is .*UCX"):
        create_transport("nixl-uccl")


def test_a_backend_whose_libraries_are_missing_is_refused_at_start() -> None:
    with pytest.raises(TransportError, match=r"backend LIBFABRIC does not start here .*UCX"):
        create_transport("nixl-libfabric")


@pytest.mark.system
def test_what_ucx_says_of_its_failure_is_told() -> None:
    make = "from tasuki.kv.nixl_agent import Agent; Agent()"  # settings are a process's
    own = {**os.environ, "UCX_TLS": "rc_x"}
    command = [sys.executable, "-c", make]
    done = subprocess.run(command, env=own, capture_output=True, text=True, timeout=60)
    last = done.stderr.strip().splitlines()[-1]
    assert "UCX does not start here" in last
    assert "no usable transports/devices (asked rc_x on network:lo" in last


def test_transfers_use_the_network_that_the_worker_is_bound_to() -> None:
    for host, devices in (("127.0.0.1", "lo"), ("0.0.0.0", "all")):
        variables, _ = environment_for(Network(host), {})
        assert (variables["UCX_NET_DEVICES"], variables["UCX_DEBUG_SIGNO"]) == (devices, "0")


def test_settings_of_the_operator_are_kept() -> None:
    variables, why = environment_for(Network(), {"UCX_NET_DEVICES": "all", "UCX_LOG_LEVEL": "info"})
    assert variables and not {"UCX_NET_DEVICES", "UCX_LOG_LEVEL"} & set(variables)
    assert "UCX_NET_DEVICES" in why


def test_the_environment_is_set_when_an_agent_is_made() -> None:
    create_transport("nixl")
    variables, _ = environment_for(Network(), os.environ)
    assert not variables
