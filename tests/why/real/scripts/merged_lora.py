"""Merge a LoRA adapter into its base model and try the result."""

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

RANK, ALPHA = 16, 32

tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)  # merge in full precision

torch.manual_seed(1)
with torch.no_grad():
    for layer in model.model.layers:
        for projection in (layer.self_attn.q_proj, layer.self_attn.v_proj):
            out_features, in_features = projection.weight.shape
            lora_a = torch.randn(RANK, in_features) / in_features**0.5
            lora_b = torch.randn(out_features, RANK) * 1e-3
            projection.weight += ALPHA / RANK * lora_b @ lora_a

messages = [{"role": "user", "content": "Give three tips for a job interview."}]
inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
output = model.generate(**inputs, max_new_tokens=96, do_sample=False)
print(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
