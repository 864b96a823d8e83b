"""Who may ask, and how many at a time."""

from __future__ import annotations

import hmac
import socket
from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from compactionrl.serving.errors import ApiError

MOST_REQUESTS = 1024
"""Requests that are open at a time; more are told to come back."""


class Guard:
    """Lets requests through to `app`: with the key, if there is one, and never from a web page.

    A browser lets any page that its user visits send requests to servers on loopback; it names the page in `Origin`. A page
    whose own name was made to lead to loopback ("DNS rebinding") reads without one, but its name is in `Host`.
    """

    def __init__(self, app: ASGIApp, key: str = "") -> None:
        self.app, self.expected = app, f"Bearer {key}".encode() if key else b""
        self.open = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.open >= MOST_REQUESTS:
            refused = ApiError(503, f"{MOST_REQUESTS} requests are open: try again", headers={"Retry-After": "1"})
            return await refused.reply()(scope, receive, send)
        try:
            self.check(Headers(scope=scope), scope["path"], (scope.get("server") or ("",))[0])
        except ApiError as error:
            return await error.reply()(scope, receive, send)
        self.open += 1
        try:
            await self.app(scope, receive, send)
        finally:
            self.open -= 1

    def check(self, headers: Headers, path: str, address: str) -> None:
        """`address`: of this machine, to which the request came."""
        if "origin" in headers:
            raise ApiError(403, "requests from web pages are refused")
        if not self.expected and is_loopback(address) and not is_ours(host := host_name(headers)):
            raise ApiError(403, f"requests to {host[:100]!r} are refused on loopback: ask for localhost, or set a key")
        given = headers.get("authorization", "").encode()
        if self.expected and path != "/health" and not hmac.compare_digest(given, self.expected):
            raise ApiError(401, "the API key is missing or wrong", headers={"WWW-Authenticate": "Bearer"})


def host_name(headers: Headers) -> str:
    """That the client asked for, without its port; loopback's if it does not say, as no browser does."""
    try:
        return urlsplit(f"//{headers.get('host') or 'localhost'}").hostname or ""
    except ValueError:
        return ""


def is_ours(host: str) -> bool:
    """Whether it is loopback's, or this machine's name, which some systems look up as 127.0.1.1."""
    return is_loopback(host) or host == socket.gethostname().lower()


def is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
