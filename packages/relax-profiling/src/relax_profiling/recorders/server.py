"""The profiling calls of an SGLang server over HTTP. Standard library only."""

import dataclasses
import json
import urllib.error
import urllib.request
from typing import Any


class ServerRefused(RuntimeError):
    """The server answered with an error status; the message holds what it said."""


class ServerUnreachable(RuntimeError):
    """No answer within the deadline, or no connection."""


# An engine's address is meant literally: a proxy of the environment would send the call elsewhere.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclasses.dataclass(frozen=True)
class ProfileServer:
    """One SGLang server.

    Attributes:
        url: for instance ``http://127.0.0.1:30000``.
        api_key: sent as a bearer token when the server was started with ``--api-key``.
    """

    url: str
    api_key: str | None = None

    def start(self, body: dict[str, Any], timeout: float) -> None:
        """POST /start_profile. ``timeout`` in seconds."""
        self._call("POST", "/start_profile", body, timeout)

    def stop(self, timeout: float) -> None:
        """POST /stop_profile: returns when the traces are written. :class:`ServerRefused` when none is recorded."""
        self._call("POST", "/stop_profile", None, timeout)

    def expected_files(self, timeout: float) -> int:
        """Number of scheduler processes that write a trace each: tensor x pipeline (x data) parallel ranks."""
        try:
            answer = self._call("GET", "/server_info", None, timeout)
        except ServerRefused:
            answer = self._call("GET", "/get_server_info", None, timeout)
        try:
            info = json.loads(answer)
            dp = 1 if info.get("enable_dp_attention") else int(info.get("dp_size") or 1)
            return int(info.get("tp_size") or 1) * int(info.get("pp_size") or 1) * dp
        except (ValueError, TypeError, AttributeError) as e:
            raise ServerRefused(f"{self.url}/server_info is no description of a server: {answer[:200]!r}") from e

    def _call(self, method: str, path: str, body: dict[str, Any] | None, timeout: float) -> bytes:
        headers = {"Content-Type": "application/json"}
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url.rstrip("/") + path, data=data, headers=headers, method=method)
        try:
            with _OPENER.open(request, timeout=timeout) as answer:
                return bytes(answer.read())
        except urllib.error.HTTPError as e:
            said = e.read(300).decode(errors="replace").strip()
            raise ServerRefused(f"{self.url}{path} answered {e.code}: {said or e.reason}") from e
        except (OSError, ValueError) as e:  # URLError and timeouts are OSError, a malformed address is a ValueError
            reason = getattr(e, "reason", None) or e
            waited = f" within {timeout:.0f} s" if isinstance(reason, TimeoutError) else ""
            raise ServerUnreachable(f"no answer from {self.url}{path}{waited}: {reason}") from e
