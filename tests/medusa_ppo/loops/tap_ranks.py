"""One rank's part of test_tap.py: an actor that is cut over two gloo processes, each of which taps
its own rows.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from medusa_ppo.actors.hf import load_actor
from medusa_ppo.companion.companion_link import open_link
from medusa_ppo.loops.tap import CompanionTap


def main(
    rank: int, ranks: int, port: str, form: str, actor: str, address: str, out: Path, steps: int
) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = load_actor(actor)
    if form == "fsdp2":
        mesh = init_device_mesh("cpu", (ranks,))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    else:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    generator = torch.Generator().manual_seed(rank)
    # As many rows on each, or FSDP would wait; of other lengths.
    prompts = [[5 + rank, 6], [7 + rank]]
    responses = [
        torch.randint(0, 20, (3 + rank + n,), generator=generator).tolist() for n in (0, 2)
    ]
    with contextlib.closing(open_link(address)) as companion, CompanionTap(model, address) as tap:
        for step in range(steps):
            if rank and step == 1:
                # Another answer than the first one's: what that one was told holds for both.
                tap._sender.wish = tap.wish.model_copy(update={"rows": 0})
            with tap(prompts, responses):
                for prompt, response in zip(prompts, responses, strict=True):
                    logits = model(torch.tensor([[*prompt, *response]])).logits
                    (logits.square().mean()).backward()
            optimizer.step()
            optimizer.zero_grad()
            tap.updated()
            assert tap.drain(30), tap.problem
            # The companion joins what came before the next step's parts, and wants nothing while it
            # trains on them.
            dist.barrier()
            while rank == 0 and companion.ask().trained <= step:
                time.sleep(0.05)
            dist.barrier()
            with tap([], []):
                pass
            assert tap.drain(30), tap.problem
            dist.barrier()
        (out / f"rank{rank}.json").write_text(
            json.dumps({"responses": responses, "sent": tap.sent, "problem": tap.problem})
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    rank, ranks, port, form, actor, address, out, steps = sys.argv[1:]
    main(int(rank), int(ranks), port, form, actor, address, Path(out), int(steps))
