"""Assisted generation: a small draft model proposes, the large one checks."""

import sys

from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
draft = AutoModelForCausalLM.from_pretrained(sys.argv[2])

messages = [{"role": "user", "content": "Explain how a rainbow forms."}]
inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
output = model.generate(**inputs, assistant_model=draft, do_sample=False, max_new_tokens=40)
print(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
