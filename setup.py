"""Which files go into a wheel; everything else stands in pyproject.toml.

The recipes live beside the package, where users look for them, and are installed inside it. Libraries of the CPU kernel
are there in wheels of scripts/build_wheel.py alone, which are for one platform and any Python.
"""

from pathlib import Path

from setuptools import Distribution, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel


class Package(Distribution):
    """The package, for one platform where libraries lie in it."""

    def has_ext_modules(self) -> bool:
        return any(Path("acm_compiler/codegen/cpu/prebuilt").glob("*.so"))


class Wheel(bdist_wheel):
    """A wheel whose libraries no Python loads by itself: for any of them."""

    def get_tag(self) -> tuple[str, str, str]:
        return ("py3", "none", super().get_tag()[2])


setup(
    distclass=Package,
    cmdclass={"bdist_wheel": Wheel},
    packages=[*find_packages(include=["acm_compiler", "acm_compiler.*"]), "acm_compiler.recipes"],
    package_dir={"acm_compiler.recipes": "recipes"},
    package_data={
        "acm_compiler.recipes": ["*.yaml"],
        "acm_compiler": [
            "py.typed",
            "**/*.cpp",
            "**/*.h",
            "**/*.so",
            "**/*.safetensors",
            "**/*.json",
            "**/*.j2",
            "**/*.css",
        ],
    },
)
