"""Cards of a node that no other job of ours there uses, where the scheduler counts cards but does not say which."""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
from typing import TYPE_CHECKING, Iterator

from exp.errors import UnavailableError
from exp.hardware.cards import only
from exp.launcher.rank import this_host

if TYPE_CHECKING:
    from exp.hardware.backend import Backend

__all__ = ["locked_cards"]


@contextlib.contextmanager
def locked_cards(backend: Backend, nproc: int) -> Iterator[None]:
    """Make only ``nproc`` cards visible to the processes that this one starts, for as long as the block lasts.

    A lock is a name in the kernel's own space of socket names: exclusive, the same for all users, and gone with the
    process that holds it. Nothing listens there. There is none where no more than ``nproc`` cards are visible, or
    none can be hidden.

    Args:
        backend: whose cards.
        nproc: how many.

    Raises:
        UnavailableError: too few are left.
    """
    count = backend.device_count() if backend.exclusive_devices else 0
    if count <= nproc or not backend.visible_variables:
        yield
        return
    with contextlib.ExitStack() as locks:
        mine: list[int] = []
        for card in range(count):
            # In place of host and card, whose names can be longer than a socket's may be, their digest.
            known_as = hashlib.sha256(f"{this_host()}/{only(backend, [card])}".encode()).hexdigest()
            lock = locks.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            with contextlib.suppress(OSError):  # somebody else's
                lock.bind(f"\0exp-card/{known_as}".encode())
                mine.append(card)
            if len(mine) == nproc:
                break
        if len(mine) < nproc:
            raise UnavailableError(
                f"{this_host()} has {len(mine)} of {count} {backend.name} cards to spare, but nproc={nproc}; have all "
                "jobs ask for their cards (launcher.gres), or for whole nodes (launcher.exclusive=true)"
            )
        os.environ.update(only(backend, mine))
        yield
