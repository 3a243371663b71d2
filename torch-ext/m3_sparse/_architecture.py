"""The architecture of a device, by the name that the capability table uses."""

import torch

# torch's own query costs microseconds a call.
_architectures: dict[torch.device, str] = {}


def architecture(device: torch.device) -> str:
    """ "sm_90" for such a CUDA device, else the name of the device type."""
    if device.type != "cuda" or torch.version.hip is not None:
        return device.type
    if torch.compiler.is_compiling():  # a dict that is filled while it is traced would be traced again
        return _query(device)
    if device not in _architectures:
        _architectures[device] = _query(device)
    return _architectures[device]


def _query(device: torch.device) -> str:
    if not torch.cuda.is_available():  # fake tensors of a machine without a GPU
        return device.type
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"
