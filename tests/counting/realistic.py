"""Small configs with the proportions of published models, for types whose defaults hide what differs between layers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

PUBLISHED: dict[str, list[dict[str, Any]]] = json.loads(Path(__file__).with_name("realistic.json").read_text())
"""Keyword arguments of `AutoConfig.for_model`, by model type."""
