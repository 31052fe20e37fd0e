"""Optional kernels for CPUs. The library works on torch without this folder."""
