"""Load a model that is said to be too large for this machine."""

import sys
import tempfile

from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
with tempfile.TemporaryDirectory() as folder:
    model = AutoModelForCausalLM.from_pretrained(
        sys.argv[1], device_map="auto", max_memory={"cpu": "120MB"}, offload_folder=folder
    )
    inputs = tokenizer("Once there was a giant who", return_tensors="pt")
    output = model.generate(**inputs, max_new_tokens=24, do_sample=False)
    print(tokenizer.decode(output[0], skip_special_tokens=True))
