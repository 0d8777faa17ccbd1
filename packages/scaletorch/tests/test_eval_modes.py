"""A model in eval mode for a while."""

import pytest
from torch import nn

from scaletorch.compose.evaluate import evaluating


def test_every_module_gets_its_own_mode_back():
    model = nn.Sequential(nn.Dropout(), nn.Dropout())
    model[0].eval()
    with pytest.raises(ZeroDivisionError), evaluating(model):
        _ = 1 / 0
    assert [module.training for module in model.modules()] == [True, False, True]
    with evaluating(model):
        assert not any(module.training for module in model.modules())
