import pytest


@pytest.fixture(autouse=True)
def _one_thread(one_thread):
    """In every test of this folder."""
