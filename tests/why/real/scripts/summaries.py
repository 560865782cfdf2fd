"""Summarise an article with BART, with the settings of its model card."""

import sys

from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

ARTICLE = (
    "The council voted on Tuesday to close the old bridge for two years. Engineers found cracks in three of its "
    "pillars last spring, and the cost of repairs has doubled since then. Shops on the east side fear for their "
    "customers. The mayor promised a ferry, which will run every quarter of an hour from seven in the morning. "
) * 5

tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
model = AutoModelForSeq2SeqLM.from_pretrained(sys.argv[1])

inputs = tokenizer(ARTICLE, max_length=512, truncation=True, return_tensors="pt")
output = model.generate(
    inputs["input_ids"],
    attention_mask=inputs["attention_mask"],
    num_beams=4,
    length_penalty=2.0,
    no_repeat_ngram_size=3,
    min_length=56,
    max_length=142,
    early_stopping=True,
)
print(len(ARTICLE.split()), "words ->", len(tokenizer.decode(output[0], skip_special_tokens=True).split()))
