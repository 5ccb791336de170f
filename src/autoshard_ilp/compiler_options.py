"""What a planned step asks of the compiler that its program cannot say."""

from __future__ import annotations

from autoshard_ilp.costs.fusion import RANDOM
from autoshard_ilp.graph import Graph

ALONE = {"xla_tpu_enable_async_collective_fusion_fuse_all_gather": "false"}


def compiler_options(graph: Graph, platform: str) -> dict[str, str]:
    """Options for ``jax.jit``.

    XLA:TPU may compute an elementwise kernel and an all-gather in one. All operands of such a kernel are arrays: drawing
    random bits again for a dropout's mask makes the generator's thirty constants arrays as large as the mask. (Two
    GPT-2 layers recomputing on v5e 2x4: ``u32[2,12,1024,1024]`` 27 times over, 3.4 GB where 0.56 were predicted.) So
    steps that draw bits again gather beside their kernels.

    Args:
        graph: of the step.
        platform: of the devices, such as "tpu".
    """
    drawn_again = (op.primitive in RANDOM and op.params.get("recomputed") for op in graph.ops)
    return dict(ALONE) if platform == "tpu" and any(drawn_again) else {}
