"""The architecture of a device, by the name that the capability table uses."""

import torch

# torch's own query costs microseconds a call.
_architectures: dict[torch.device, str] = {}


def architecture(device: torch.device) -> str:
    """ "sm_90" for such a CUDA device, else the name of the device type."""
    if device.type != "cuda" or torch.version.hip is not None:
        return device.type
    if device not in _architectures:
        major, minor = torch.cuda.get_device_capability(device)
        _architectures[device] = f"sm_{major}{minor}"
    return _architectures[device]
