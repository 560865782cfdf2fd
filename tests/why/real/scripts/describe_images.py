"""Describe images with a small vision-language model."""

import sys

import torch
from transformers import AutoConfig, AutoModelForImageTextToText

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

config = AutoConfig.from_pretrained(sys.argv[1])
model = AutoModelForImageTextToText.from_pretrained(
    sys.argv[1], dtype=torch.bfloat16, attn_implementation="flash_attention_2" if DEVICE == "cuda" else "eager"
).to(DEVICE)

size = config.vision_config.image_size
patches = (size // config.vision_config.patch_size) ** 2 // config.scale_factor**2
torch.manual_seed(2)
for picture in range(3):
    tiles = torch.rand(1, 4, 3, size, size, dtype=torch.bfloat16, device=DEVICE)
    text = torch.randint(10, 1000, (1, 24), device=DEVICE)
    image = torch.full((1, 4 * patches), config.image_token_id, device=DEVICE)
    ids = torch.cat([text[:, :4], image, text[:, 4:]], dim=1)
    output = model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), pixel_values=tiles, max_new_tokens=24, do_sample=False
    )
    print("picture", picture, output.shape[1] - ids.shape[1], "tokens")
