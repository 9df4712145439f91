"""What the launcher asks the operating system."""

from __future__ import annotations

import socket

import pytest
from support.waiting import free_port

from tasuki.launch import machine
from tasuki.launch.machine import router_port

HOST = "127.0.0.1"


def test_two_launchers_do_not_choose_one_port(monkeypatch: pytest.MonkeyPatch) -> None:
    preferred = free_port()
    monkeypatch.setattr(machine, "PREFERRED_PORT", preferred)
    with router_port(HOST, None) as first, router_port(HOST, None) as second:
        assert (first, second) == (preferred, 0)
        with router_port(HOST, preferred) as wanted:
            assert wanted == preferred
        with socket.create_server((HOST, first)):
            pass
    with router_port(HOST, None) as again:
        assert again == preferred
    with socket.create_server((HOST, preferred)), router_port(HOST, None) as taken:
        assert taken == 0
