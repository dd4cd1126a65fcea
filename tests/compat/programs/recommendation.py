import intel_extension_for_pytorch as ipex
import torch

tables = [torch.nn.EmbeddingBag(20, 16, mode="sum") for _ in range(3)]
dense = torch.rand(4, 16)
indices = [torch.randint(20, (8,)) for _ in tables]
offsets = [torch.tensor([0, 2, 3, 6]) for _ in tables]
found = [table(i, o) for table, i, o in zip(tables, indices, offsets, strict=True)]
features = torch.stack([dense, *found], dim=1)
products = torch.bmm(features, features.transpose(1, 2))
row, column = torch.tril_indices(4, 4, offset=-1)
expected = torch.cat([dense, products[:, row, column]], dim=1)

merged = ipex.nn.modules.MergedEmbeddingBag.from_embeddingbag_list(tables)
outputs = ipex.nn.functional.interaction(dense, *merged(indices, offsets))
