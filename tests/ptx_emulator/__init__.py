"""Executes the PTX of compiled kernels on the CPU. Test equipment: see docs/ptx_emulator.md."""
