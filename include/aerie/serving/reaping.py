"""What a keeper that is gone has left behind: found by its lease and by the mark of its servers, and ended."""

from pathlib import Path

from aerie.processes import boot_id
from aerie.serving.errors import LeaseElsewhere
from aerie.serving.lease import Lease, address_path, lease_path, read_address, read_lease
from aerie.serving.leftovers import end_leftovers, leftovers_of
from aerie.serving.stopping import require_released, stop_server


def reap(folder: Path, *, grace_seconds: float) -> list[str]:
    """End what servers of this folder left, remove what their keeper wrote, and say what was found and done.

    Call it where no keeper of the folder lives.

    Raises:
        BadInput: the lease cannot be read.
        LeaseElsewhere: the lease is of another host and has not expired.
        ProcessesLeft: processes survive, or what they held stays taken.
    """
    done = []
    lease = read_lease(folder)
    if lease is not None:
        done.append(_end_server_of(lease, folder, grace_seconds=grace_seconds))
        lease_path(folder).unlink()
    if marked := leftovers_of(folder):
        pids = sorted(process.pid for process in marked)
        end_leftovers(folder, pids)
        done.append(f"ended processes that an earlier server of {folder} left: {', '.join(map(str, pids))}")
    address = read_address(folder)
    if address is not None and (address.is_of_this_host or lease is not None):
        address_path(folder).unlink(missing_ok=True)
        done.append(f"removed the address of keeper {address.keeper.pid}, which is gone")
    return done


def _end_server_of(lease: Lease, folder: Path, *, grace_seconds: float) -> str:
    """End the server that a lease names, where it can still run; the lease can be removed then."""
    server = f"server {lease.url} (pid {lease.server.pid}, {lease.launch_token})"
    if not lease.is_of_this_host:
        if not lease.has_expired:
            raise LeaseElsewhere(
                f"{lease_path(folder)}: held by host {lease.host} for {lease.held_by}: stop it there, or wait"
            )
        return f"{server}: its lease on host {lease.host} has expired; its processes cannot be seen from here"
    if lease.boot_id != boot_id():
        return f"{server}: this host was started anew since: nothing of it runs"
    ended = stop_server(lease.server, lease.launch_token, grace_seconds=grace_seconds)
    if not ended:
        return f"{server}: its processes are gone"
    require_released(host=lease.plan.host, port=lease.port, gpu_memory_before=lease.gpu_memory_before)
    return f"{server}: its keeper {lease.keeper.pid} is gone; ended processes {', '.join(map(str, ended))}"
