"""A device map for a small GPU, left in on a machine with room for all weights."""

import sys
import tempfile

from common import prompts
from transformers import AutoModelForCausalLM

places = dict.fromkeys(("model.embed_tokens", "model.rotary_emb", "model.norm", "lm_head"), "cpu")
places |= {f"model.layers.{number}": "disk" for number in range(4)}
model = AutoModelForCausalLM.from_pretrained(
    sys.argv[1], dtype="auto", device_map=places, offload_folder=tempfile.mkdtemp()
)
for _ in range(2):
    model.generate(prompts(2, 16), max_new_tokens=8, do_sample=False)
