"""A chat of three turns that keeps its cache and prints tokens as they come."""

import sys

from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, TextStreamer

tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
cache = DynamicCache(config=model.config)
messages = []
for turn in ("Hello! Who are you?", "What can you cook with two eggs?", "And with a tomato?"):
    messages.append({"role": "user", "content": turn})
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**inputs, past_key_values=cache, streamer=streamer, max_new_tokens=40, do_sample=False)
    answer = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    messages.append({"role": "assistant", "content": answer})
