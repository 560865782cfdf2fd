"""Stream an answer from a thread, as the back end of a chat page does."""

import sys
from threading import Thread

from transformers import AutoModelForCausalLM, AutoTokenizer, TextIteratorStreamer

tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
messages = [{"role": "user", "content": "Tell me about the moon."}]
inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
thread = Thread(
    target=model.generate, kwargs=dict(**inputs, streamer=streamer, max_new_tokens=96, do_sample=True, top_p=0.9)
)
thread.start()
for piece in streamer:
    print(piece, end="", flush=True)
thread.join()
print()
