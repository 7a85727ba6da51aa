"""Fixtures that modules of this folder ask for."""

from tests.programs import own_programs  # noqa: F401
from tests.programs import shared_programs  # noqa: F401
