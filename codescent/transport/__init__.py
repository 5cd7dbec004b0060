"""In: tensors in memory, and the run's key. Out: requests and answers between processes, over sockets of our own.
Does not decide what is applied (servers/ does), sends no pickle, and does not encrypt."""

from codescent.transport.client import Client, ServerLost
from codescent.transport.frames import Frame, FrameError, Kind
from codescent.transport.server import Answer, Refused, Server, Service
from codescent.transport.sockets import listen

__all__ = [
    "Answer",
    "Client",
    "Frame",
    "FrameError",
    "Kind",
    "Refused",
    "Server",
    "ServerLost",
    "Service",
    "listen",
]
