"""What DDP is given: gradients lie in the buckets that are exchanged, unless the user asks for copies."""

from __future__ import annotations

SCRIPT = """
    import torch
    from exp.engine.wrapper import wrap
    distributed = join()
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    found = []
    for options in ({}, {"gradient_as_bucket_view": None}, {"gradient_as_bucket_view": False}):
        wrapped = wrap(model, "ddp", options, backend, torch.device("cpu"))
        for _ in range(2):
            for parameter in model.parameters():
                parameter.grad = None
            wrapped(torch.ones(1, 4)).sum().backward()
        found.append(len({parameter.grad.storage().data_ptr() for parameter in model.parameters()}))
    del wrapped
    backend.destroy_process_group()
    print(json.dumps(found))
"""


def test_gradients_lie_in_their_bucket(ranks):
    assert ranks(SCRIPT, world_size=2) == [[1, 1, 4]] * 2
