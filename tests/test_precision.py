"""The precision bench: what it calls divergence is the divergence."""
import math

import torch

from specviz.bench.precision import quality


def test_quality_of_known_distributions():
    """KL(fp32 || candidate) in nats, in this direction, averaged over all positions of all texts; equal logits give 0 and 100 %."""
    same = torch.randn(5, 7, generator=torch.Generator().manual_seed(0))
    assert quality([same], [same + 3]).mean_kl < 1e-12 and quality([same], [same + 3]).top_share == 1
    sure, fair = torch.tensor([[math.log(0.75), math.log(0.25)]]), torch.zeros(1, 2)
    got = quality([sure, same], [fair, same])
    expected = 0.75 * math.log(0.75 / 0.5) + 0.25 * math.log(0.25 / 0.5)
    assert abs(got.mean_kl - expected / 6) < 1e-6
    assert quality([torch.tensor([[0.0, 1.0]])], [torch.tensor([[1.0, 0.0]])]).top_share == 0
