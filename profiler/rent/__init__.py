"""`rent`: which GPU to rent for a model, and what it costs."""

from __future__ import annotations

from profiler.rent.command import rent, rent_request
from profiler.rent.cost_lines import cost_over_load, cost_picture
from profiler.rent.sentences import rent_sentences
from profiler.rent.workload import workload_of

__all__ = ["cost_over_load", "cost_picture", "rent", "rent_request", "rent_sentences", "workload_of"]
