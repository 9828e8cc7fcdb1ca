"""Measures the CPU time of many HTTP requests at once, with the connections of the engines' client and httpx's own.

    uv run python benchmarks/http_requests.py [--requests 64 256 512]

The server answers after 0.3 s, so that all requests are open at the same time, as those of a rollout are. Printed is
the CPU time of the client for each way, the better of two rounds after a first one, and their ratio.
"""

import argparse
import asyncio
import subprocess
import sys
import time

import httpx
from relax_rollout.connections import SingleConnections

BODY = b'{"input_ids": [' + b"1234, " * 255 + b"1]}"
ANSWER_AFTER_S = 0.3


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answers the requests of one connection."""
    try:
        while True:
            await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(len(BODY))
            await asyncio.sleep(ANSWER_AFTER_S)
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
            await writer.drain()
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()


async def serve() -> None:
    """Serves until it is ended; prints the port."""
    server = await asyncio.start_server(answer, "127.0.0.1", 0, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


async def cpu_s(url: str, requests: int, transport: httpx.AsyncBaseTransport) -> float:
    """CPU seconds of the better of two rounds, after one that finds no connections."""
    rounds = []
    async with httpx.AsyncClient(transport=transport, timeout=120) as client:
        for _ in range(3):
            began = time.process_time()
            await asyncio.gather(*(client.post(url, content=BODY) for _ in range(requests)))
            rounds.append(time.process_time() - began)
    return min(rounds[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, nargs="+", default=[64, 256, 512])
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        asyncio.run(serve())
        return
    server = subprocess.Popen([sys.executable, __file__, "--serve"], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None, "it was asked for"
        url = f"http://127.0.0.1:{int(server.stdout.readline())}/"
        print("requests   httpx, CPU s   ours, CPU s   ratio")
        for requests in arguments.requests:
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=3.0)
            theirs = asyncio.run(cpu_s(url, requests, httpx.AsyncHTTPTransport(limits=limits)))
            ours = asyncio.run(cpu_s(url, requests, SingleConnections(3.0)))
            print(f"{requests:8} {theirs:14.2f} {ours:13.2f} {theirs / ours:7.1f}")
    finally:
        server.terminate()
        server.wait(timeout=30)


if __name__ == "__main__":
    main()
