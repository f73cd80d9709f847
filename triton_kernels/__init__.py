"""Triton kernels, installed as ``icl_patch.kernels``; this directory is never imported under its own name."""

if __name__ == "triton_kernels":
    raise ImportError("import icl_patch.kernels: the top-level name triton_kernels belongs to the Triton project's own package")
