"""Pictures for a small vision-language model, whose patches go through a convolution in a Python loop."""

import torch
from common import prompts
from torch import nn
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

SIDE, IMAGE = 16, 990


class SlowConv3d(nn.Conv3d):
    def forward(self, x):
        return torch.cat([super(SlowConv3d, self).forward(patch) for patch in x.split(1)])


torch.manual_seed(0)
tokens = {f"{name}_token_id": IMAGE + n for n, name in enumerate(("image", "video", "vision_start", "vision_end"))}
sizes = {"hidden_size": 64, "intermediate_size": 128}
tower = {**sizes, "depth": 1, "num_heads": 4, "out_hidden_size": 64, "deepstack_visual_indexes": [0]}
rotary = {"rope_type": "default", "rope_theta": 500000.0, "mrope_section": [2, 3, 3], "mrope_interleaved": True}
heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
text = {**sizes, **heads, "vocab_size": 1000, "num_hidden_layers": 2, "rope_parameters": rotary}
config = Qwen3VLConfig(vision_config=tower, text_config=text, **tokens)
model = Qwen3VLForConditionalGeneration(config).eval()
model.generation_config.pad_token_id = 0
model.model.visual.patch_embed.proj.__class__ = SlowConv3d

patches = SIDE * SIDE // config.vision_config.spatial_merge_size**2
for _ in range(3):
    prompt = prompts(1, 8)
    ids = torch.cat([prompt[:, :4], torch.full((1, patches), IMAGE), prompt[:, 4:]], dim=1)
    model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        mm_token_type_ids=(ids == IMAGE).int(),
        pixel_values=torch.rand(SIDE * SIDE, 3 * 2 * 16 * 16),
        image_grid_thw=torch.tensor([[1, SIDE, SIDE]]),
        max_new_tokens=4,
        do_sample=False,
    )
