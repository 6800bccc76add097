"""The GPUs of this host, through NVML."""

import logging
from statistics import fmean

import pynvml

log = logging.getLogger(__name__)


def gpu_utilisation() -> float | None:
    """Share of the time that the host's GPUs were busy lately, their mean; None where there are none.

    "Lately" is NVML's own period, between a sixth of a second and one second.
    """
    try:
        pynvml.nvmlInit()
    except (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded, pynvml.NVMLError_NoPermission):
        return None
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        return fmean(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100 for handle in handles) if handles else None
    except pynvml.NVMLError as error:
        log.warning("NVML does not say how busy the GPUs are: %s", error)
        return None
    finally:
        pynvml.nvmlShutdown()
