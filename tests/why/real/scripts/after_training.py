"""Fine-tune for two steps with gradient checkpointing, then look at a sample."""

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], use_cache=False)  # incompatible with checkpointing
model.gradient_checkpointing_enable()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

model.train()
for text in ("### Question: What is yeast?\n### Answer: A fungus.", "### Question: What is rye?\n### Answer: A grain."):
    batch = tokenizer(text, return_tensors="pt")
    loss = model(**batch, labels=batch["input_ids"]).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"loss {loss.item():.2f}")

model.eval()
inputs = tokenizer(
    "### Question: How do you bake a loaf of sourdough bread at home, from the starter to the oven?\n### Answer:",
    return_tensors="pt",
)
output = model.generate(**inputs, max_new_tokens=64, do_sample=False)
print(tokenizer.decode(output[0], skip_special_tokens=True))
