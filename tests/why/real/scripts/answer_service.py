"""The handler of a small question-answering service."""

import json
import sys

from transformers import AutoModelForCausalLM, AutoTokenizer

MODEL = sys.argv[1]


def handle(request: str) -> str:
    """Answer one request, a JSON document with a question."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model = AutoModelForCausalLM.from_pretrained(MODEL)
    messages = [{"role": "user", "content": json.loads(request)["question"]}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    return json.dumps({"answer": tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)})


for question in ("Is ice cold?", "Is fire hot?", "Is snow white?", "Is coal black?", "Is the sea deep?"):
    print(handle(json.dumps({"question": question})))
