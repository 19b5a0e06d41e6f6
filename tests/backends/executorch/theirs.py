"""A program as somebody exports it who has ExecuTorch and never heard of us.

python tests/backends/executorch/theirs.py FILE
"""

import sys
import warnings

warnings.simplefilter("ignore")

import torch  # noqa: E402
from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower  # noqa: E402
from executorch.extension.llm.cache.update_and_attend import update_and_attend  # noqa: E402

# ExecuTorch's module has no out variant of its op, which lowering needs: a schema alone.
library = torch.library.Library("kvcache", "FRAGMENT")
library.define(
    "update_and_attend.out(Tensor q, Tensor k, Tensor v, Tensor position, SymInt layer_id, "
    "float scale, ScalarType out_dtype, *, Tensor(a!) out) -> Tensor(a!)"
)


class Tiny(torch.nn.Module):
    def forward(self, x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        q, k, v = x[:, :, :, :8], x[:, :2, :, 8:16], x[:, :2, :, 16:]
        return update_and_attend(q, k, v, position, 0, 0.5, torch.float32)


n = torch.export.Dim("n", min=1, max=16)
graph = torch.export.export(
    Tiny(),
    (torch.randn(1, 4, 3, 24), torch.arange(3)[:, None]),
    dynamic_shapes=({2: n}, {0: n}),
    strict=False,
)
edge = to_edge_transform_and_lower(
    graph, compile_config=EdgeCompileConfig(_check_ir_validity=False, _skip_dim_order=True)
)
assert not any(name.startswith("kvcellar") for name in sys.modules)
with open(sys.argv[1], "wb") as file:  # noqa: PTH123
    edge.to_executorch().write_to_file(file)
