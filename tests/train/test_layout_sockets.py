"""Who can reach the ranks of a trainer."""

import ipaddress
import os
import socket
from collections.abc import Callable
from typing import Any

import psutil
import pytest
from relax_train.settings import ParallelSettings


def _listening(master: str) -> tuple[list[str], int]:
    import torch
    import torch.distributed as dist
    from relax_train.backend.parallel import setup_parallel

    def listening() -> set[tuple[str, int]]:
        sockets = psutil.Process().net_connections("inet")
        return {tuple(s.laddr) for s in sockets if s.status == psutil.CONN_LISTEN}

    os.environ["MASTER_ADDR"] = master
    os.environ.pop("GLOO_SOCKET_IFNAME", None)
    inherited = listening()  # a rank is forked, and the tests' process may have sockets of its own
    parallel = setup_parallel(ParallelSettings())
    total = torch.ones(1)
    dist.all_reduce(total, group=parallel.gloo_group)
    addresses = sorted({ip for ip, _ in listening() - inherited})
    dist.barrier()
    return addresses, int(total)


@pytest.mark.parametrize("master", ["127.0.0.1", "localhost"])
def test_ranks_of_one_node_listen_on_the_loopback_only(master: str, run_ranks: Callable[..., Any]) -> None:
    with socket.create_server(("0.0.0.0", 0)):  # the rank's parent may listen where it likes
        results = run_ranks(_listening, 2, master)
    for addresses, total in results:
        assert total == 2
        assert addresses
        assert all(ipaddress.ip_address(a).is_loopback for a in addresses), addresses


def test_ranks_that_meet_at_another_address_can_be_on_other_nodes(run_ranks: Callable[..., Any]) -> None:
    mine = next(
        (
            a.address
            for addresses in psutil.net_if_addrs().values()
            for a in addresses
            if a.family.name == "AF_INET" and not ipaddress.ip_address(a.address).is_loopback
        ),
        None,
    )
    if mine is None:
        pytest.skip("this host has no address but the loopback")
    (first, total), _ = run_ranks(_listening, 2, mine)
    assert total == 2
    assert any(not ipaddress.ip_address(a).is_loopback for a in first)
