"""transformers, where it is installed."""

import pytest


@pytest.fixture(scope="module")
def transformers():
    pytest.importorskip("torch").set_num_threads(1)
    module = pytest.importorskip("transformers")
    module.logging.set_verbosity_error()
    module.logging.disable_progress_bar()
    return module
