"""In: an error of torch's process groups or of the store. Out: whether it only says that another rank does not answer.
Does not say which rank (meeting/silent.py does)."""

from __future__ import annotations

from torch.distributed import DistBackendError, DistError

from codescent.meeting.store import StoreError

GLOO = "/gloo/"
"""In the words of each error of a gloo connection: the path of the source file, such as gloo/transport/tcp/pair.cc."""
ENFORCE = "[enforce fail"
OF_A_CONNECTION = ("connect", "closed", "timed out", "timeout", "reset by peer", "broken pipe")
"""gloo reports what is wrong on this rank, such as an unknown interface, and some lost connections, by one macro."""
OF_THIS_RANK = ("ncclUnhandledCudaError", "ncclInvalidArgument", "ncclInvalidUsage", "ncclInternalError")
"""Results of NCCL that speak of this rank. ncclRemoteError, ncclSystemError and its timeouts speak of another one."""


def is_lost_peer(error: BaseException | None) -> bool:
    """Whether an error, or one that caused it, only says that another rank does not answer: the cause is there."""
    if error is None:
        return False
    said = str(error)
    if isinstance(error, DistBackendError):
        return not any(own in said for own in OF_THIS_RANK)
    if isinstance(error, DistError | StoreError):
        return True
    if isinstance(error, RuntimeError) and GLOO in said:
        return ENFORCE not in said or any(word in said.lower() for word in OF_A_CONNECTION)
    return is_lost_peer(error.__cause__)
