"""Tables with their sources (datasheets, links, prices, published results), and how their rows are read."""

import csv
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter

Row = TypeVar("Row")
FOLDER = Path(__file__).parent


def rows_of(file_name: str, kind: type[Row]) -> tuple[Row, ...]:
    """Return the rows of a table as `kind`, whose fields are columns; an empty cell takes the field's default."""
    row_type: Any = kind
    optional = {field.name for field in fields(row_type) if field.default is not MISSING}
    with (FOLDER / file_name).open(encoding="utf-8", newline="") as file:
        cells = [
            {column: text for column, text in row.items() if text or column not in optional}
            for row in csv.DictReader(file)
        ]
    return tuple(TypeAdapter(list[row_type]).validate_python(cells))


def texts_of(file_name: str) -> dict[str, str]:
    """Return the second column of a table by the first."""
    with (FOLDER / file_name).open(encoding="utf-8", newline="") as file:
        return {row[0]: row[1] for row in list(csv.reader(file))[1:]}
