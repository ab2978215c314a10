"""Serving of a saved model over HTTP: requests in batches, budgets by load."""

from importlib.util import find_spec

from acm_compiler.errors import PackageMissing

_PACKAGES = ("fastapi", "prometheus_client", "python_multipart", "uvicorn")


def require_packages() -> None:
    """PackageMissing where a package of the server is not installed."""
    missing = [name for name in _PACKAGES if find_spec(name) is None]
    if missing:
        raise PackageMissing(f"serving needs {', '.join(missing)}", fix="pip install 'acm_compiler[serve]'")
