"""In: a fixture that does several cases at once. Out: the parameters of the cases that this session has selected.
Does not select (pytest does): what is slow, or not asked for, is then not done in the batch either."""

from __future__ import annotations

from typing import Any

import pytest


def selected(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """The parameters of each selected test of the fixture's module; those without parameters are left out."""
    here = [item for item in request.session.items if isinstance(item, pytest.Function) and item.path == request.path]
    return [dict(item.callspec.params) for item in here if hasattr(item, "callspec")]
