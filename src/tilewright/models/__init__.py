"""Language models from Hugging Face checkpoints: Qwen3, Qwen3-MoE, Qwen3-Next, Qwen3.5 (text) and Kimi Linear.

model = tilewright.models.load("Qwen3-0.6B")      # a folder with config.json and safetensors
logits = model(input_ids)                         # [B, T] -> [B, T, V]
ids = model.generate(input_ids, max_new_tokens=32)
"""

from tilewright.models import checkpoint as checkpoint
from tilewright.models.checkpoint import CheckpointError as CheckpointError
from tilewright.models.generation import Batch as Batch
from tilewright.models.generation import Sampling as Sampling
from tilewright.models.loading import init as init
from tilewright.models.loading import load as load
from tilewright.models.model import Model as Model
from tilewright.models.prefix import Prefix as Prefix
