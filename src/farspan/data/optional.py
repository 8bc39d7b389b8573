"""Packages that only some kinds of data need."""

import importlib
from typing import Any


def require(module: str, what: str, extra: str = "data") -> Any:
    """Imports a module of a package that may not be installed.

    Args:
      module: Its full name: `pyarrow.parquet`.
      what: What needs it, to begin the message: `data: a .parquet file`.
      extra: The extra of farspan that brings the package.

    Returns:
      The module.

    Raises:
      ModuleNotFoundError: The package is not installed; the message says how to install it.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = module.split(".", maxsplit=1)[0]
        raise ModuleNotFoundError(
            f"{what} needs the package {package}, which is not installed; "
            f'pip install "farspan[{extra}]"'
        ) from error
