"""What pyproject.toml cannot say: the kernels live in ``triton_kernels/`` and install as ``icl_patch.kernels``."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["icl_patch", "icl_patch.*"]), "icl_patch.kernels"],
    package_dir={"icl_patch.kernels": "triton_kernels"},
    package_data={"icl_patch": ["py.typed"], "icl_patch.embedded": ["model/*"]},
)
