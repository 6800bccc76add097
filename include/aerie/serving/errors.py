"""What can go wrong with a server, named after what happened."""

from aerie.errors import BadInput, Busy, Failed, Retryable


class PlanRefused(BadInput):
    """The plan cannot work, by arithmetic or by a rule; a setting must change."""


class MachineNotReady(Retryable):
    """The disk, the port, the memory or processes on the GPUs stand in the server's way for now."""


class LaunchFailed(Failed):
    """The server ended, or said that it cannot go on, before it was ready."""


class OutOfMemory(LaunchFailed):
    """A GPU's memory did not suffice. The phase decides the remedy, so one of the three below is raised."""


class OutOfMemoryAtStart(OutOfMemory):
    """The KV pool or the CUDA graphs did not fit beside the weights."""


class OutOfMemoryInPrefill(OutOfMemory):
    """A prompt's activations did not fit, before the server was ready or later."""


class OutOfMemoryInDecode(OutOfMemory):
    """A decoding step of the running requests did not fit, before the server was ready or later."""


class NotReady(Retryable):
    """The server did not answer as a ready server does."""


class WrongServer(Failed):
    """A server answers, but not the one that was launched, or not as it was planned."""


class ServerDied(Retryable):
    """A server that was ready has ended."""


class KeeperUnreachable(Retryable):
    """No keeper answers where one is expected."""


class KeeperEnding(Retryable):
    """The keeper has ended its server and is ending itself; the next one can be started in a moment."""


class ServerBusy(Busy):
    """Others hold the server for another plan, or asked before; it must be waited for."""


class LeaseLost(Retryable):
    """The hold is over, or belongs to another launch."""


class LeaseElsewhere(Retryable):
    """The lease belongs to another host, whose processes cannot be seen from here."""


class ProcessesLeft(Failed):
    """Processes of a server are still there after they were killed."""
