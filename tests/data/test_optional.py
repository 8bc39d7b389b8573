import builtins
import importlib

import pytest

from farspan.data.optional import require


def test_missing_package_is_named_with_the_extra_that_brings_it():
    with pytest.raises(ModuleNotFoundError) as error:
        require("no_such_package.part", "data: a.x")
    assert str(error.value) == (
        "data: a.x needs the package no_such_package, which is not installed; "
        'pip install "farspan[data]"'
    )


def test_installed_module_is_imported():
    assert require("json.decoder", "") is importlib.import_module("json.decoder")
    assert require("builtins", "") is builtins
