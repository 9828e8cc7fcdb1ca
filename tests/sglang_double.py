"""A server that speaks the part of SGLang's HTTP that a weight push uses, over real sockets, and holds no weights.

For what the real server cannot show: how much memory a push needs while it sends, and what happens when a call fails.
"""

import asyncio
import contextlib
import itertools
import json
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

PIECE = 64 << 10


class SGLangDouble:
    """Answers every call with 200.

    Args:
        on_update: called after a bucket has arrived whole, with its number from 0 and the body if it is small.
        refuses: number of the bucket that is answered with 400.
        hangs_up: number of the bucket that it takes the beginning of and then closes the connection.
        tp_size: what ``/server_info`` says.
        blocking: answers to paths that take their time, each called in a thread with the body's JSON.
    """

    def __init__(
        self,
        *,
        on_update: Callable[[int, bytes], None] = lambda number, body: None,
        refuses: int | None = None,
        hangs_up: int | None = None,
        tp_size: int = 1,
        blocking: Mapping[str, Callable[[Any], tuple[int, dict[str, Any]]]] | None = None,
    ) -> None:
        self.url = ""
        self.calls: list[str] = []
        self.weight_version = "0"
        self.startup_time = 0
        self._blocking = blocking or {}
        self._on_update, self._refuses, self._hangs_up, self._tp_size = on_update, refuses, hangs_up, tp_size
        self._numbers = itertools.count()
        self._connections: dict[asyncio.Task[None], asyncio.StreamWriter] = {}

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator["SGLangDouble"]:
        """Listens on a free port of this machine."""
        server = await asyncio.start_server(self._connection, "127.0.0.1", 0, limit=PIECE)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield self
        finally:
            server.close()
            open_now = dict(self._connections)
            for writer in open_now.values():
                writer.close()  # its task reads the end
            await asyncio.gather(*open_now)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections[task] = writer
        try:
            while line := await reader.readline():
                path = line.split()[1].decode()
                length = 0
                while (header := await reader.readline()) not in (b"\r\n", b""):
                    name, _, value = header.partition(b":")
                    if name.lower() == b"content-length":
                        length = int(value)
                number = next(self._numbers) if path == "/update_weights_from_tensor" else -1
                if number == self._hangs_up:
                    raise ConnectionError("as the test wants it")
                status, answer = await self._answered(path, await self._body(reader, length), number)
                content = json.dumps(answer).encode()
                writer.write(b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n" % (status, len(content)) + content)
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            del self._connections[task]
            writer.close()

    @staticmethod
    async def _body(reader: asyncio.StreamReader, length: int) -> bytes:
        """The body if it is small; a large one is read and forgotten piece by piece."""
        small = length <= PIECE
        kept = b""
        while length:
            piece = await reader.read(min(length, PIECE))
            if not piece:
                raise ConnectionError("the client is gone")
            length -= len(piece)
            kept = kept + piece if small else b""
        return kept

    async def _answered(self, path: str, body: bytes, number: int) -> tuple[int, dict[str, Any]]:
        if path not in self._blocking:
            return self._answer(path, body, number)
        self.calls.append(path)
        return await asyncio.to_thread(self._blocking[path], json.loads(body))

    def _answer(self, path: str, body: bytes, number: int) -> tuple[int, dict[str, Any]]:
        self.calls.append(path)
        if path == "/server_info":
            return 200, {"tp_size": self._tp_size, "startup_time": self.startup_time}
        if path == "/model_info":
            return 200, {"weight_version": self.weight_version}
        if path in ("/begin_weight_update", "/end_weight_update"):
            return 404, {}
        if path == "/update_weight_version":
            self.weight_version = json.loads(body)["new_version"]
        if path == "/update_weights_from_tensor":
            self._on_update(number, body)
            if number == self._refuses:
                return 400, {"success": False, "message": "no room for these weights"}
        return 200, {"success": True}
