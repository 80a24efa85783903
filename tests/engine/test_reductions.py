"""Reductions are sums, divided where a mean is wanted: some collectives have no average, or divide twice."""

from __future__ import annotations

import pytest

from exp.compat import supports_python_process_groups


@pytest.mark.skipif(not supports_python_process_groups(), reason="a process group in Python: torch >= 2.0")
@pytest.mark.slow
def test_gradients_and_buffers_are_summed(ranks):
    script = """
        import torch, torch.distributed as dist
        from exp.engine import staged
        seen = []
        class Watching(staged.StagedProcessGroup):
            def allreduce(self, tensors, opts=None):
                seen.append(opts is None or opts.reduceOp == dist.ReduceOp.SUM)
                return super().allreduce(tensors, opts)
        staged.StagedProcessGroup = Watching
        from datetime import timedelta
        store = dist.FileStore(folder + "/store", world_size)
        staged.init_staged_process_group("cpu", store, rank, world_size, timedelta(seconds=240))
        model = torch.nn.Linear(2, 2)
        wrapped = backend.ddp_class(model)
        wrapped(torch.ones(1, 2)).sum().backward()
        backend.all_reduce(torch.ones(1))
        del wrapped
        dist.destroy_process_group()
        print(json.dumps([len(seen) >= 2, all(seen)]))
    """
    assert ranks(script, world_size=2) == [[True, True]] * 2
