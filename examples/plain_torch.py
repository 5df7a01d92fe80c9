"""The demo's model in plain torch modules: python examples/plain_torch.py DIR, after
elasticps export --to DIR --rows features=N --rows genres=M, of as many as the data have."""

import sys
from pathlib import Path

from safetensors.torch import load_file
from torch import nn

from examples.demo.data import NO_GENRE
from examples.demo.model import DeepFM

state = {name: tensor for file in Path(sys.argv[1]).glob("*.safetensors") for name, tensor in load_file(file).items()}
features, genres = (state[f"embedding_bags.{table}.weight"] for table in ("features", "genres"))
bags = nn.EmbeddingBag.from_pretrained(genres, mode="mean", padding_idx=NO_GENRE)
model = DeepFM(nn.Embedding.from_pretrained(features), bags)
dense = {name.removeprefix("deepfm."): tensor for name, tensor in state.items() if name.startswith("deepfm.")}
missing = model.load_state_dict(dense, strict=False).missing_keys
print(f"{len(features):,} features, {len(genres)} genres, {len(dense)} dense tensors; loaded otherwise: {missing}")
