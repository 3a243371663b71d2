"""Every call of the CUDA driver is checked: the error that comes up names the call, and the next launch works.

The checks run in a process of their own, where recording_driver.c is the driver and fails in one function after the other.
"""

import re

from launch_checks import ROOT, LaunchChecks, error_of, needs_variant, operators
from test_dense import problem

check = LaunchChecks(__file__)
# In the order of a first launch, so that what is done once a process has not been done when its turn comes.
IN_ORDER = (
    "cuInit",
    "cuDeviceGetAttribute",
    "cuCtxGetDevice",
    "cuDevicePrimaryCtxRetain",
    "cuCtxPushCurrent",
    "cuTensorMapEncodeTiled",
    "cuLibraryLoadData",
    "cuLibraryGetKernel",
    "cuKernelSetAttribute",
    "cuLaunchKernelEx",
    "cuCtxPopCurrent",
)


def declared():
    """The driver's functions that the launcher holds."""
    text = (ROOT / "torch-ext" / "launch" / "driver.h").read_text()
    return {f"cu{name}" for name in re.findall(r"decltype\(&cu\w+\) (\w+);", text)}


@check
def every_failure_names_the_call(driver):
    attend, arguments = operators().aot_dense_attention, problem()
    for name in IN_ORDER:
        driver.break_functions(name)
        launches = len(driver.launches)
        message = error_of(attend, *arguments)
        assert driver.failures == 1, (name, driver.failures)  # no second try, nothing ignored
        assert f"m3_sparse: {name} failed with error 999: recorded error" in message, message
        assert len(driver.launches) == launches, name  # the context is given back after a tensor map first
    driver.break_functions()
    launches = len(driver.launches)
    attend(*arguments)
    assert len(driver.launches) > launches


@check
def an_error_without_a_text_is_named_too(driver):
    attend, arguments = operators().aot_dense_attention, problem()
    driver.break_functions("cuLaunchKernelEx", "cuGetErrorString")
    assert "m3_sparse: cuLaunchKernelEx failed with error 999: unknown" in error_of(attend, *arguments)
    assert driver.failures == 2


@check
def a_function_that_is_missing_is_named(driver):
    attend, arguments = operators().aot_dense_attention, problem()
    for name in sorted(declared()):
        driver.hide_function(name)
        message = error_of(attend, *arguments)
        assert f"the NVIDIA driver lacks {name}: update it" in message, message
    driver.hide_function("")
    attend(*arguments)


def test_the_walk_is_complete():
    assert set(IN_ORDER) | {"cuGetErrorString"} == declared()
    calls = set()
    for path in (ROOT / "torch-ext" / "launch").glob("*.cpp"):
        calls |= {f"cu{name}" for name in re.findall(r"(?:driver\(\)|\bd|\bdriver)\.([A-Z]\w+)\(", path.read_text())}
    assert calls == declared()


@needs_variant
def test_every_failure_names_the_call():
    check.run("every_failure_names_the_call")


@needs_variant
def test_an_error_without_a_text_is_named():
    check.run("an_error_without_a_text_is_named_too")


@needs_variant
def test_a_missing_function_is_named():
    check.run("a_function_that_is_missing_is_named")


if __name__ == "__main__":
    check.main()
