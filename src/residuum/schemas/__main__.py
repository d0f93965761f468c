"""``python -m residuum.schemas``: write the schema files from the records."""

from residuum.schemas import write_schemas

write_schemas()
