"""Batches of sends and receives of torch.distributed, for functions that do their own.

The steps of a schedule do not come here: their messages are the engine's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist


def _batch_p2p(p2p_ops: Sequence[dist.P2POp], desc: str | None = None) -> list[dist.Work]:
    """Start sends and receives; those of one direction are started one by one."""
    if not p2p_ops:
        return []
    directions = {op.op for op in p2p_ops}
    if len(directions) > 1:
        return dist.batch_isend_irecv(list(p2p_ops))
    peer = "group_dst" if directions == {dist.isend} else "group_src"
    return [op.op(op.tensor, group=op.group, tag=op.tag, **{peer: op.group_peer}) for op in p2p_ops]


def _sorted_batch_p2p(
    p2p_ops: Sequence[dist.P2POp], desc: str | None = None
) -> dict[int, list[dist.Work]]:
    """Start sends and receives, a batch a peer, in the order of the peers."""
    peers = sorted({op.peer for op in p2p_ops})
    return {peer: _batch_p2p([op for op in p2p_ops if op.peer == peer], desc) for peer in peers}


def _wait_batch_p2p(work: Sequence[dist.Work]) -> None:
    """Wait for what was started."""
    for one in work:
        one.wait()
