import pytest


@pytest.fixture(autouse=True)
def _one_thread(one_thread):
    """Applies to every test of this folder."""
