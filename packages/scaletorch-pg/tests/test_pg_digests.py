"""Digests tell different bits apart, whatever the shape and dtype."""

import torch

from scaletorch.parallel.pg_manager.building import digest, digest_text


def test_digests_tell_bits_apart():
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.bool):
        for shape in ((), (0,), (3,), (5, 7), (1021, 17), (2049, 33)):
            tensor = (torch.randn(shape) * 50).to(dtype)
            known = int(digest(tensor))
            assert int(digest(tensor.clone())) == known
            if not tensor.numel():
                continue
            for at in torch.randint(tensor.numel(), (20,)).tolist():
                other = tensor.clone().view(-1)
                other[at] = ~other[at] if dtype is torch.bool else other[at] + 1
                if torch.equal(other, tensor.view(-1)):
                    continue
                assert int(digest(other)) != known
    assert int(digest(torch.zeros(8))) != int(digest(torch.zeros(16)))
    assert int(digest(torch.zeros(4))) != int(digest(-torch.zeros(4)))
    part = torch.arange(100.0)[3:50]
    assert int(digest(part)) == int(digest(part.clone()))


def test_what_has_no_values_or_is_sparse_has_a_text():
    assert digest_text(torch.zeros(2, device="meta")) == "none"
    dense = torch.diag(torch.arange(4.0))
    assert digest_text(dense.to_sparse()) == digest_text(dense) != digest_text(dense + 1)
    assert digest_text(dense.to(torch.complex64)) != digest_text(dense)
