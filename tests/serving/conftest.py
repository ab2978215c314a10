"""Tests of the server need its packages, extra `serve`; those of the controller and the batcher need none."""

from importlib.util import find_spec

PACKAGES = ("fastapi", "prometheus_client", "python_multipart", "uvicorn", "httpx2", "tokenizers", "transformers")
WITHOUT = ("__init__.py", "conftest.py", "test_batcher.py", "test_controller.py")


def pytest_ignore_collect(collection_path, config):
    """Leave out files whose packages are missing."""
    needs = collection_path.suffix == ".py" and collection_path.name not in WITHOUT
    return True if needs and not all(map(find_spec, PACKAGES)) else None
