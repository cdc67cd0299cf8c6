"""Who may ask a server's control routes. The real server is in
tests/medusa_ppo/engines/test_http_server.py.
"""

from __future__ import annotations

import asyncio

import httpx
import pytest

from heads.errors import ConfigError
from medusa_ppo.runtime.control_guard import TOKEN, ControlGuard, secret_of, token_header


async def _answer(scope, receive, send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"done"})


def ask(path: str, headers: dict[str, str] | None = None) -> int:
    async def once() -> int:
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(ControlGuard(_answer)), base_url="http://here"
        ) as client:
            return (await client.post(path, headers=headers)).status_code

    return asyncio.run(once())


def test_control_routes_need_the_token_and_others_do_not(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(TOKEN, "secret")
    lora = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter/")
    for path in ("/collective_rpc", "/pause", "/v1x", "//v1/", "/healthy", "/metricsx", "/", *lora):
        assert ask(path) == 401, path
        assert ask(path, {"Authorization": "Bearer wrong"}) == 401, path
        assert ask(path, token_header()) == 200
    assert ask("/health") == ask("/v1/completions") == ask("/metrics") == 200


def test_without_a_token_nothing_is_guarded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(TOKEN, raising=False)
    assert ask("/collective_rpc") == 200 and token_header() == {}


def test_white_space_around_a_token_is_no_part_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of a Kubernetes secret often ends with a newline; an error of httpx quoted it, and the
    log had it.
    """
    monkeypatch.setenv(TOKEN, " secret\n")
    assert token_header() == {"Authorization": "Bearer secret"}
    assert ask("/pause", token_header()) == 200 and ask("/pause") == 401
    monkeypatch.setenv(TOKEN, "\n")
    assert token_header() == {}, "none, not an empty one"


@pytest.mark.parametrize("value", ["secret\nsecret", "se\u00e7ret", "secret\x7f"])
def test_a_token_that_cannot_be_sent_is_named_and_not_shown(
    value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TOKEN, value)
    for use in (token_header, lambda: secret_of(TOKEN), lambda: ControlGuard(_answer)):
        with pytest.raises(ConfigError, match=TOKEN) as caught:
            use()
        assert value not in str(caught.value)
