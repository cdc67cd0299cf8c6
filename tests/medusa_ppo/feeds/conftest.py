"""Heads to publish, and both kinds of feeds over one folder."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from heads.checkpoint import save_state
from heads.heads_config import HeadsConfig
from heads.modules import MedusaHeads
from medusa_ppo.feeds.actor_sketch import actor_sketch, sketch_rows
from medusa_ppo.feeds.feed import Feed
from medusa_ppo.feeds.feed_manifest import FeedActor, Judged, Release
from medusa_ppo.feeds.feed_server import FeedServer
from medusa_ppo.feeds.http_feed import FEED_TOKEN, open_feed

HIDDEN, VOCAB = 16, 40
CONFIG = HeadsConfig(HIDDEN, VOCAB, num_heads=2)


def lm_head(seed: int = 0) -> torch.Tensor:
    """Of an actor, `[V, D]`."""
    return torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(seed))


def actor(seed: int = 0) -> FeedActor:
    return FeedActor(heads=CONFIG.to_dict(), sketch=actor_sketch(lm_head(seed)[sketch_rows(VOCAB)]))


def heads_file(path: Path, seed: int) -> Path:
    """Tensors of heads that differ by seed."""
    torch.manual_seed(seed)
    heads = MedusaHeads(CONFIG).requires_grad_(False)
    for parameter in heads.parameters():
        parameter.copy_(torch.randn_like(parameter))
    save_state(path, heads.trainable_state())
    return path


def release(version: int, of: FeedActor | None = None) -> Release:
    judged = Judged(mean_acceptance_length=2.5, acceptance_per_position=[0.8, 0.7])
    return Release(
        actor=of or actor(), dtype="float32", version=version, policy_version=version, judged=judged
    )


def until(condition: Callable[[], bool]) -> None:
    """The test's own time limit ends it."""
    while not condition():
        time.sleep(0.005)


@dataclass(frozen=True)
class Place:
    """A feed, and the folder that it is in."""

    feed: Feed
    folder: Path


@pytest.fixture
def token(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv(FEED_TOKEN, "feed-test-secret")
    return "feed-test-secret"


@pytest.fixture
def served() -> Iterator[Callable[[Path], str]]:
    """served(folder) -> the address of a server of that feed, which ends with the test."""
    started: list[tuple[FeedServer, threading.Thread]] = []

    def serve(folder: Path) -> str:
        server = FeedServer(folder, "127.0.0.1", 0)
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        while not server.port:
            assert thread.is_alive(), "the server ended"
            time.sleep(0.01)
        started.append((server, thread))
        return f"http://127.0.0.1:{server.port}"

    yield serve
    for server, thread in started:
        server.stop()
        thread.join()


@pytest.fixture(params=["folder", "http"])
def place(
    request: pytest.FixtureRequest, tmp_path: Path, token: str, served: Callable[[Path], str]
) -> Iterator[Place]:
    folder = tmp_path / "feed"
    feed = open_feed(str(folder) if request.param == "folder" else served(folder))
    yield Place(feed, folder)
    feed.close()
