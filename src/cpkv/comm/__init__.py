"""How the ranks of a group exchange tensors: one interface, threads of one process or gloo processes behind it."""

from cpkv.comm.communicator import Collective, Communicator
from cpkv.comm.threads import ThreadGroup

__all__ = ["Collective", "Communicator", "ThreadGroup"]
