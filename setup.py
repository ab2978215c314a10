"""Which files go into a wheel; everything else stands in pyproject.toml.

The recipes live beside the package, where users look for them, and are installed inside it.
"""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["acm_compiler", "acm_compiler.*"]), "acm_compiler.recipes"],
    package_dir={"acm_compiler.recipes": "recipes"},
    package_data={
        "acm_compiler.recipes": ["*.yaml"],
        "acm_compiler": [
            "py.typed",
            "**/*.cpp",
            "**/*.h",
            "**/*.safetensors",
            "**/*.json",
            "**/*.j2",
            "**/*.css",
        ],
    },
)
