"""transformers' own `generate`, called as users call it: the prompt and all its steps in one call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from profiler.engines.transformers import EagerEngine


class GenerateEngine(EagerEngine):
    """`model.generate` with greedy tokens, its own checks, masks and copies.

    Its single steps (`prefill`, `decode`) are the eager engine's: what `generate` adds to them is what is asked for.
    """

    name = "generate"
    hookable = False
    whole_calls = True
    taxes = True

    def call(
        self,
        ids_BS: torch.Tensor,  # noqa: N803
        new_tokens: int,
        mark: Callable[[], object],
        streamer: Any = None,
    ) -> torch.Tensor:
        forwards = 0

        def begun(_module: object, _inputs: object) -> None:
            nonlocal forwards
            forwards += 1
            if forwards > 1:
                mark()

        hook = self._model.register_forward_pre_hook(begun)
        mark()
        try:
            tokens: torch.Tensor = self._model.generate(
                ids_BS,
                attention_mask=torch.ones_like(ids_BS),
                max_new_tokens=new_tokens,
                do_sample=False,
                num_beams=1,
                # A token that no model has: the end is looked for at every step, as ever, and never found.
                eos_token_id=self._model.config.get_text_config().vocab_size,
                pad_token_id=0,
                streamer=streamer,
            )
        finally:
            hook.remove()
        mark()
        if forwards != new_tokens:
            raise RuntimeError(f"generate ran {forwards} forwards for {new_tokens} tokens")
        return tokens[:, ids_BS.shape[1] :]
