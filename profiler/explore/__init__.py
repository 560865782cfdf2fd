"""`roofscope explore`: one offline page that shows a model's theory at any batch, prompt and context."""
